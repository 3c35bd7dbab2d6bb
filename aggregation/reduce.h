// The arithmetic of aggregation: adding one contribution's payload into an accumulator. Called by workers
// inside Pipeline::process and by the host's ring; it keeps no state, allocates nothing and touches no byte
// outside the ranges it is given, whatever their length and alignment.
//
// What comes out, for each type and operator, is in NUMERICS.md; it is equal on every instruction set bit for
// bit. Elements are little-endian, as in the hosts' memory. The floating-point environment is the default
// one: a host process that flushes subnormals to zero loses them in sums, products, minima and maxima, not in
// conversions, and no other rounding mode than to nearest is supported.
#pragma once

#include <cassert>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "aggregation/datatype.h"
#include "aggregation/reduce_kernels.h"

namespace millrace::aggregation {

// The loops for one (type, operator, wire type), looked up once per operation; a call is then one indirect
// call. One pointer wide, so it may be kept in a slot.
//
// `acc`, `in` and `out` may start at any address; ranges must be disjoint (asserted). `bytes` are those of
// the elements as they are on the wire, a multiple of an element's or a block's size (the protocol has
// checked it); 0 is allowed. A `wide` range holds wide_elements(wire, bytes) floats, for bfp8 the padding of
// the last block included.
//
// An operation is: the first contribution copied (or widened), the others accumulated, finish or finish_wide
// once, then (wide types) narrow.
class Reducer {
 public:
  // Without loops: any use asserts. It exists so that an operation can hold a Reducer before it knows its
  // type.
  Reducer() = default;
  explicit operator bool() const { return kernels_ != nullptr; }

  // For elements that travel as themselves. Precondition: supported(type, op).
  static Reducer get(DataType type, ReduceOp op) noexcept;

  // For elements that travel as `wire`. Precondition: wire_supported(type, op, wire).
  static Reducer get(DataType type, ReduceOp op, DataType wire) noexcept;

  // acc = acc (op) in, element by element. Only where accumulates_wide() is false.
  void accumulate(uint8_t* acc, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->accumulate != nullptr);
    assert(disjoint(acc, bytes, in, bytes));
    kernels_->accumulate(acc, in, bytes);
  }

  // wide = in, exactly, for the first contribution. Only wide types.
  void widen(float* wide, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->widen != nullptr);
    assert(disjoint(wide, wide_size(bytes), in, bytes));
    kernels_->widen(wide, in, bytes);
  }

  // wide = wide (op) in, for the other contributions.
  void accumulate_wide(float* wide, const uint8_t* in, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->accumulate_wide != nullptr);
    assert(disjoint(wide, wide_size(bytes), in, bytes));
    kernels_->accumulate_wide(wide, in, bytes);
  }

  // acc = acc (op) in, both accumulators of `elements` floats: partial results, bracketed as the
  // deterministic mode asks. Only wide types; types in kind have accumulate() for it.
  void combine_wide(float* acc, const float* in, size_t elements) const {
    assert(kernels_ != nullptr && kernels_->combine != nullptr);
    assert(disjoint(acc, elements * sizeof(float), in, elements * sizeof(float)));
    kernels_->combine(reinterpret_cast<uint8_t*>(acc), reinterpret_cast<const uint8_t*>(in),
                      elements * sizeof(float));
  }

  // What is left to do after the last contribution, once: for avg the division by their number, which is that
  // of the ranks (1 to 2^16); for other operators nothing. Only types that are not wide.
  void finish(uint8_t* acc, size_t bytes, uint32_t contributions) const {
    assert(kernels_ != nullptr && kernels_->accumulate != nullptr);
    assert(contributions >= 1 && contributions <= kContributionsMax);
    if (kernels_->finish != nullptr) kernels_->finish(acc, bytes, contributions);
  }

  // The same for accumulators, before narrow().
  void finish_wide(float* wide, size_t bytes, uint32_t contributions) const {
    assert(kernels_ != nullptr && kernels_->widen != nullptr);
    assert(contributions >= 1 && contributions <= kContributionsMax);
    if (kernels_->finish == nullptr) return;
    kernels_->finish(reinterpret_cast<uint8_t*>(wide), wide_size(bytes), contributions);
  }

  // out = wide, rounded once to nearest even. `bytes` are those of `out`.
  void narrow(uint8_t* out, const float* wide, size_t bytes) const {
    assert(kernels_ != nullptr && kernels_->narrow != nullptr);
    assert(disjoint(wide, wide_size(bytes), out, bytes));
    kernels_->narrow(out, wide, bytes);
  }

  // The instruction set in use, by Highway's name ("AVX2"), for start-up logs and millrace-doctor.
  const char* target() const {
    assert(kernels_ != nullptr);
    return kernels_->target;
  }

 private:
  static constexpr uint32_t kContributionsMax = 1U << 16;  // ranks have 16 bits

  explicit Reducer(const Kernels* kernels) : kernels_(kernels) {}

  size_t wide_size(size_t bytes) const { return wide_elements(kernels_->wire, bytes) * sizeof(float); }

  static bool disjoint(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    const auto a_begin = reinterpret_cast<uintptr_t>(a);
    const auto b_begin = reinterpret_cast<uintptr_t>(b);
    return a_begin + a_bytes <= b_begin || b_begin + b_bytes <= a_begin;
  }

  const Kernels* kernels_ = nullptr;
};

static_assert(std::is_trivially_copyable_v<Reducer>);

}  // namespace millrace::aggregation
