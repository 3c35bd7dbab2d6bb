// The arithmetic of aggregation: adding one contribution's payload into an accumulator. Called by workers
// inside Pipeline::process and by the host's ring; it keeps no state, allocates nothing and touches no byte
// outside the ranges it is given, whatever their length and alignment.
//
// Semantics, equal on every instruction set bit for bit:
//  - Integers wrap (two's complement), so their results are exact and independent of order.
//  - f32 and f64 accumulate in kind, one IEEE rounding per step and no multiply-add contraction.
//  - f16 and bf16 are widened exactly to f32, accumulated there and rounded once, to nearest even, in
//  narrow():
//    ties, subnormals and overflow to infinity included. The rounding is ours, not the machine's.
//  - Whatever NaN goes in, the NaN that comes out of a reduction is the canonical one (positive, quiet, no
//    payload): hardware keeps the first operand's payload, which would let arrival order show in the result.
//  - min and max are minimum and maximum of IEEE 754-2019: NaN wins, and -0 < +0. Their results are
//  independent
//    of order.
// Elements are little-endian, as in the hosts' memory. The floating-point environment is the default one: a
// host process that flushes subnormals to zero loses them in sums, products, minima and maxima, not in
// conversions, and no other rounding mode than to nearest is supported.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "aggregation/datatype.h"
#include "aggregation/reduce_kernels.h"

namespace millrace::aggregation {

// The loops for one (type, operator), looked up once per operation; a call is then one indirect call. One
// pointer wide, so it may be kept in a slot.
//
// `acc`, `in` and `out` may start at any address; ranges must be disjoint (asserted), and `bytes` a multiple
// of the element's size (the protocol has checked it); 0 is allowed.
class Reducer {
 public:
  // Without loops: any use asserts. It exists so that an operation can hold a Reducer before it knows its
  // type.
  Reducer() = default;

  // Precondition: supported(type, op).
  static Reducer get(DataType type, ReduceOp op) noexcept;

  // acc = acc (op) in, element by element. Only types that are not wide.
  void accumulate(uint8_t* acc, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->accumulate != nullptr);
    assert(disjoint(acc, bytes, in, bytes));
    kernels_->accumulate(acc, in, bytes);
  }

  // wide = in, exactly, for the first contribution. `wide` is f32[bytes / 2]. Only wide types.
  void widen(float* wide, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->widen != nullptr);
    assert(disjoint(wide, bytes * 2, in, bytes));
    kernels_->widen(wide, in, bytes);
  }

  // wide = wide (op) in, for the other contributions.
  void accumulate_wide(float* wide, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->accumulate_wide != nullptr);
    assert(disjoint(wide, bytes * 2, in, bytes));
    kernels_->accumulate_wide(wide, in, bytes);
  }

  // out = wide, rounded once to nearest even. `bytes` are those of `out`.
  void narrow(uint8_t* out, const float* wide, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->narrow != nullptr);
    assert(disjoint(wide, bytes * 2, out, bytes));
    kernels_->narrow(out, wide, bytes);
  }

  // The instruction set in use, by Highway's name ("AVX2"), for start-up logs and millrace-doctor.
  const char* target() const {
    assert(kernels_ != nullptr);
    return kernels_->target;
  }

 private:
  explicit Reducer(const Kernels* kernels) : kernels_(kernels) {}

  static bool disjoint(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    const auto a_begin = reinterpret_cast<uintptr_t>(a);
    const auto b_begin = reinterpret_cast<uintptr_t>(b);
    return a_begin + a_bytes <= b_begin || b_begin + b_bytes <= a_begin;
  }

  const Kernels* kernels_ = nullptr;
};

static_assert(std::is_trivially_copyable_v<Reducer>);

}  // namespace millrace::aggregation
