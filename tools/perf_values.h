// The numbers that millrace-perf moves: what each rank contributes at each index, and what must come out, in
// closed form or by plain arithmetic over the contributions, without the code under test. Pure, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/millrace.h"
#include "tools/perf_cases.h"

namespace millrace::perf {

inline constexpr int kExactWorldMax = 64;

enum class Form : uint8_t {
  // Sums and products are exact in what they are accumulated in, for up to kExactWorldMax ranks, so the order
  // does not matter and results are compared bit for bit. Integers wrap.
  kExact,
  // Floating-point sums, products and averages whose last bits depend on the order: compared, bit for bit,
  // with the one order of deterministic mode (aggregation/NUMERICS.md).
  kBracketed,
  // For block floating point: all ranks' numbers of one magnitude, results within bfp8_error_max().
  kBfp8
};

// The form to verify a reduction with.
Form form_of(mr_type type, mr_op op, bool deterministic, bool bfp8);

// Different seeds give different contributions and results. With kNoOp, contributions are any bits, and there
// is no result but they.
struct Values {
  mr_type type;
  mr_op op;
  Form form;
  uint64_t seed;
  int world;
};

// Fills `count` elements, of which the first is element `first` of the vector, with the contribution of
// `rank`.
void fill(const Values& v, int rank, size_t first, void* data, size_t count);
// How many of the elements are not the contribution of `rank`.
uint64_t count_changed(const Values& v, int rank, size_t first, const void* data, size_t count);
// How many of the elements are not the result over all ranks. Where there are blocks, they begin at `first`.
uint64_t count_wrong(const Values& v, size_t first, const void* data, size_t count);

// Bytes that are no result, so that what is not written is seen, and what is written beside it, too.
void poison(void* data, size_t bytes);
uint64_t count_not_poison(const void* data, size_t bytes);

size_t element_bytes(mr_type type);

// Block floating point: 63 elements share an exponent, 8-bit mantissas. Encoding an element moves it by at
// most M / 126.5, M being the greatest magnitude in its block (aggregation/NUMERICS.md, "Error bound"); it
// happens to each contribution and to the accumulated result.
inline constexpr size_t kBfp8Block = 63;
// The bound of an accumulated element, before its own encoding: `magnitudes` are the ranks' |x| at the index,
// `block_max` the ranks' M of its block, e = M / 126.5.
//   sum   Σ e + (n − 1) 2⁻²⁴ Σ (|x| + e), the last term being f32's roundings
//   avg   that of the sum / n + 2⁻²⁴ Σ (|x| + e) / n
//   prod  (1 + (n − 1) 2⁻²⁴) Π (|x| + e) − Π |x|
//   min, max  max e
double bfp8_accumulated_error(mr_op op, const double* magnitudes, const double* block_max, int ranks);
// And after it: + R / 126.5, R being the greatest magnitude in the accumulated block.
double bfp8_error_max(double accumulated_error, double accumulated_block_max);

}  // namespace millrace::perf
