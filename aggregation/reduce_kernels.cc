#include "aggregation/reduce_kernels.h"

#include <cstdint>
#include <cstring>

// Highway compiles this file once per instruction set, each time in a namespace of its own.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "aggregation/reduce_kernels.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "aggregation/reduce_ops-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace millrace::aggregation::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Payloads start anywhere, so elements are loaded as bytes: a misaligned float* would be undefined behaviour
// even unread. Tails go through a vector on the stack, because Highway's masked loads read the whole vector
// on most targets and the byte after a payload may be another packet's, or nobody's.

#if HWY_TARGET == HWY_SCALAR  // a vector is one element and does not come apart into bytes

template <class D>
HWY_INLINE hn::Vec<D> load_bytes(D d, const uint8_t* from) {
  hn::TFromD<D> element;
  std::memcpy(&element, from, sizeof(element));
  return hn::Set(d, element);
}

template <class D>
HWY_INLINE void store_bytes(D /*d*/, hn::Vec<D> v, uint8_t* to) {
  const hn::TFromD<D> element = hn::GetLane(v);
  std::memcpy(to, &element, sizeof(element));
}

#else

template <class D>
HWY_INLINE hn::Vec<D> load_bytes(D d, const uint8_t* from) {
  return hn::BitCast(d, hn::LoadU(hn::Repartition<uint8_t, D>(), from));
}

template <class D>
HWY_INLINE void store_bytes(D /*d*/, hn::Vec<D> v, uint8_t* to) {
  const hn::Repartition<uint8_t, D> d8;
  hn::StoreU(hn::BitCast(d8, v), d8, to);
}

#endif

// T: the lanes; for the operators that do not care about sign, or about lanes at all, not the element's own.
template <class T, class Op>
void accumulate(uint8_t* HWY_RESTRICT acc, const uint8_t* HWY_RESTRICT in, size_t bytes) {
  const hn::ScalableTag<T> d;
  const size_t step = hn::Lanes(d) * sizeof(T);
  size_t at = 0;
  for (; at + step <= bytes; at += step) {
    store_bytes(d, Op::apply(d, load_bytes(d, acc + at), load_bytes(d, in + at)), acc + at);
  }
  const size_t tail = bytes - at;
  if (tail == 0) return;
  HWY_ALIGN uint8_t acc_tail[HWY_MAX_BYTES] = {};
  HWY_ALIGN uint8_t in_tail[HWY_MAX_BYTES] = {};
  std::memcpy(acc_tail, acc + at, tail);
  std::memcpy(in_tail, in + at, tail);
  store_bytes(d, Op::apply(d, load_bytes(d, acc_tail), load_bytes(d, in_tail)), acc_tail);
  std::memcpy(acc + at, acc_tail, tail);
}

// The wide loops work on one vector of f32 and the half vector of 16-bit elements that belongs to it.

struct First {  // the operator of a first contribution: nothing is there yet
  template <class DF>
  static HWY_INLINE hn::Vec<DF> combine(DF /*df*/, const float* /*wide*/, hn::Vec<DF> v) {
    return v;
  }
};

template <class Op>
struct Further {
  template <class DF>
  static HWY_INLINE hn::Vec<DF> combine(DF df, const float* wide, hn::Vec<DF> v) {
    return Op::apply(df, hn::LoadU(df, wide), v);
  }
};

template <class Format, class Step>
void widen_into(float* HWY_RESTRICT wide, const uint8_t* HWY_RESTRICT in, size_t bytes) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const size_t step = hn::Lanes(df);
  const size_t n = bytes / 2;
  size_t i = 0;
  for (; i + step <= n; i += step) {
    const auto v = Format::widen(df, load_bytes(d16, in + 2 * i));
    hn::StoreU(Step::combine(df, wide + i, v), df, wide + i);
  }
  const size_t tail = n - i;
  if (tail == 0) return;
  HWY_ALIGN uint8_t in_tail[HWY_MAX_BYTES] = {};
  HWY_ALIGN float wide_tail[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(in_tail, in + 2 * i, 2 * tail);
  std::memcpy(wide_tail, wide + i, sizeof(float) * tail);
  const auto v = Format::widen(df, load_bytes(d16, in_tail));
  hn::StoreU(Step::combine(df, wide_tail, v), df, wide_tail);
  std::memcpy(wide + i, wide_tail, sizeof(float) * tail);
}

template <class Format>
void narrow(uint8_t* HWY_RESTRICT out, const float* HWY_RESTRICT wide, size_t bytes) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint16_t, decltype(df)> d16;
  const size_t step = hn::Lanes(df);
  const size_t n = bytes / 2;
  size_t i = 0;
  for (; i + step <= n; i += step) {
    store_bytes(d16, hn::TruncateTo(d16, Format::narrow(df, hn::LoadU(df, wide + i))), out + 2 * i);
  }
  const size_t tail = n - i;
  if (tail == 0) return;
  HWY_ALIGN float wide_tail[HWY_MAX_BYTES / sizeof(float)] = {};
  HWY_ALIGN uint8_t out_tail[HWY_MAX_BYTES];
  std::memcpy(wide_tail, wide + i, sizeof(float) * tail);
  store_bytes(d16, hn::TruncateTo(d16, Format::narrow(df, hn::LoadU(df, wide_tail))), out_tail);
  std::memcpy(out + 2 * i, out_tail, 2 * tail);
}

// ---- Which loops belong to a type and an operator.

constexpr const char* kTarget = HWY_STR(HWY_NAMESPACE) + 2;  // without Highway's "N_"

template <class T, class Op>
const Kernels* in_kind() {
  static constexpr Kernels kKernels = {&accumulate<T, Op>, nullptr, nullptr, nullptr, kTarget};
  return &kKernels;
}

template <class Format, class Op>
const Kernels* wide() {
  static constexpr Kernels kKernels = {nullptr, &widen_into<Format, First>, &widen_into<Format, Further<Op>>,
                                       &narrow<Format>, kTarget};
  return &kKernels;
}

template <class T>
const Kernels* integer(ReduceOp op) {
  using Unsigned = hwy::MakeUnsigned<T>;
  switch (op) {
    case ReduceOp::kSum:
      return in_kind<Unsigned, Sum>();
    case ReduceOp::kProd:
      return in_kind<Unsigned, Prod>();
    case ReduceOp::kMin:
      return in_kind<T, Min>();
    case ReduceOp::kMax:
      return in_kind<T, Max>();
    case ReduceOp::kBand:
      return in_kind<uint8_t, Band>();
    case ReduceOp::kBor:
      return in_kind<uint8_t, Bor>();
    case ReduceOp::kBxor:
      return in_kind<uint8_t, Bxor>();
    default:
      return nullptr;
  }
}

template <class T>
const Kernels* floating(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return in_kind<T, Sum>();
    case ReduceOp::kProd:
      return in_kind<T, Prod>();
    case ReduceOp::kMin:
      return in_kind<T, Min>();
    case ReduceOp::kMax:
      return in_kind<T, Max>();
    default:
      return nullptr;
  }
}

template <class Format>
const Kernels* widened(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return wide<Format, Sum>();
    case ReduceOp::kProd:
      return wide<Format, Prod>();
    case ReduceOp::kMin:
      return wide<Format, Min>();
    case ReduceOp::kMax:
      return wide<Format, Max>();
    default:
      return nullptr;
  }
}

const Kernels* kernels(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::kU8:
      return integer<uint8_t>(op);
    case DataType::kI8:
      return integer<int8_t>(op);
    case DataType::kI32:
      return integer<int32_t>(op);
    case DataType::kU32:
      return integer<uint32_t>(op);
    case DataType::kI64:
      return integer<int64_t>(op);
    case DataType::kU64:
      return integer<uint64_t>(op);
    case DataType::kF16:
      return widened<F16>(op);
    case DataType::kBf16:
      return widened<Bf16>(op);
    case DataType::kF32:
      return floating<float>(op);
    case DataType::kF64:
      return floating<double>(op);
    default:
      return nullptr;
  }
}

}  // namespace millrace::aggregation::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace millrace::aggregation {

HWY_EXPORT(kernels);

const Kernels* find_kernels(DataType type, ReduceOp op) noexcept {
  return HWY_DYNAMIC_DISPATCH(kernels)(type, op);
}

}  // namespace millrace::aggregation

#endif  // HWY_ONCE
