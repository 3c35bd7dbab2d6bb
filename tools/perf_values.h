// The numbers that millrace-perf reduces: what each rank contributes at each index, and what must come out,
// in closed form, without the code under test. Every result is an exact number in its type for up to
// kExactWorldMax ranks, so results are compared bit for bit. Pure, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/millrace.h"

namespace millrace::perf {

inline constexpr int kExactWorldMax = 64;

// Fills `count` elements with the contribution of `rank`. Different seeds give different contributions and
// results.
void fill(mr_type type, mr_op op, uint64_t seed, int rank, int world, void* data, size_t count);
// How many of `count` elements are not the result over all ranks; data[0] is element `first` of the vector.
uint64_t count_wrong(mr_type type, mr_op op, uint64_t seed, int world, const void* data, size_t count,
                     size_t first = 0);
// How many of `count` elements are not what `rank` contributes.
uint64_t count_not_of(mr_type type, mr_op op, uint64_t seed, int rank, int world, const void* data,
                      size_t count);
// Fills a buffer with bytes that are no result, so that what is not written is seen.
void poison(void* data, size_t bytes);
uint64_t count_not_poison(const void* data, size_t bytes);
// Whether there are numbers for this type and operator.
bool has_values(mr_type type, mr_op op);

size_t element_bytes(mr_type type);

}  // namespace millrace::perf
