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

// The wide loops work on one vector of f32 and the part of a vector of narrow elements that belongs to it.

template <class Format, class Step>
void widen_into(float* HWY_RESTRICT wide, const uint8_t* HWY_RESTRICT in, size_t bytes) {
  constexpr size_t kSize = sizeof(typename Format::Bits);
  const hn::ScalableTag<float> df;
  const hn::Rebind<typename Format::Bits, decltype(df)> dn;
  const size_t step = hn::Lanes(df);
  const size_t n = bytes / kSize;
  size_t i = 0;
  for (; i + step <= n; i += step) {
    const auto v = Format::widen(df, load_bytes(dn, in + kSize * i));
    hn::StoreU(Step::combine(df, wide + i, v), df, wide + i);
  }
  const size_t tail = n - i;
  if (tail == 0) return;
  HWY_ALIGN uint8_t in_tail[HWY_MAX_BYTES] = {};
  HWY_ALIGN float wide_tail[HWY_MAX_BYTES / sizeof(float)] = {};
  std::memcpy(in_tail, in + kSize * i, kSize * tail);
  std::memcpy(wide_tail, wide + i, sizeof(float) * tail);
  const auto v = Format::widen(df, load_bytes(dn, in_tail));
  hn::StoreU(Step::combine(df, wide_tail, v), df, wide_tail);
  std::memcpy(wide + i, wide_tail, sizeof(float) * tail);
}

template <class Format>
void narrow(uint8_t* HWY_RESTRICT out, const float* HWY_RESTRICT wide, size_t bytes) {
  constexpr size_t kSize = sizeof(typename Format::Bits);
  const hn::ScalableTag<float> df;
  const hn::Rebind<typename Format::Bits, decltype(df)> dn;
  const size_t step = hn::Lanes(df);
  const size_t n = bytes / kSize;
  size_t i = 0;
  for (; i + step <= n; i += step) {
    store_bytes(dn, hn::TruncateTo(dn, Format::narrow(df, hn::LoadU(df, wide + i))), out + kSize * i);
  }
  const size_t tail = n - i;
  if (tail == 0) return;
  HWY_ALIGN float wide_tail[HWY_MAX_BYTES / sizeof(float)] = {};
  HWY_ALIGN uint8_t out_tail[HWY_MAX_BYTES];
  std::memcpy(wide_tail, wide + i, sizeof(float) * tail);
  store_bytes(dn, hn::TruncateTo(dn, Format::narrow(df, hn::LoadU(df, wide_tail))), out_tail);
  std::memcpy(out + kSize * i, out_tail, kSize * tail);
}

// ---- The division of integer averages, towards zero as in C. There is no vector instruction for it.

// Bytes go through f32: a quotient that is no integer is at least 1/255 away from one (or below 255/256),
// much more than the rounding of a division, so truncation finds the right integer.
template <class T>
void divide_bytes(uint8_t* acc, size_t bytes, uint32_t contributions) {
  const hn::ScalableTag<float> df;
  const hn::RebindToSigned<decltype(df)> di;
  const hn::Rebind<T, decltype(df)> d8;
  const hn::Rebind<uint8_t, decltype(df)> du8;
  const auto divisor = hn::Set(df, static_cast<float>(contributions));
  const auto quotients = [&](const uint8_t* from, uint8_t* to) {
    const auto dividends = hn::ConvertTo(df, hn::PromoteTo(di, load_bytes(d8, from)));
    const auto integers = hn::ConvertTo(di, hn::Div(dividends, divisor));
    store_bytes(du8, hn::TruncateTo(du8, hn::BitCast(U32<decltype(df)>(), integers)), to);
  };
  const size_t step = hn::Lanes(df);
  size_t at = 0;
  for (; at + step <= bytes; at += step) quotients(acc + at, acc + at);
  const size_t tail = bytes - at;
  if (tail == 0) return;
  HWY_ALIGN uint8_t acc_tail[HWY_MAX_BYTES] = {};
  std::memcpy(acc_tail, acc + at, tail);
  quotients(acc_tail, acc_tail);
  std::memcpy(acc + at, acc_tail, tail);
}

// The others are multiplied by the reciprocal, floor((2^64 - 1) / contributions). It is at most 1 short of
// 2^64 / contributions, so the upper half of the product is the quotient or one less, and the remainder tells
// which.
template <class T>
void divide_integers(uint8_t* acc, size_t bytes, uint32_t contributions) {
  __extension__ using Product = unsigned __int128;
  const uint64_t reciprocal = UINT64_MAX / contributions;
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T value;
    std::memcpy(&value, acc + at, sizeof(T));
    const bool negative = value < 0;
    const uint64_t extended = static_cast<uint64_t>(value);
    const uint64_t magnitude = negative ? 0 - extended : extended;
    auto quotient = static_cast<uint64_t>(static_cast<Product>(magnitude) * reciprocal >> 64);
    quotient += magnitude - quotient * contributions >= contributions ? 1 : 0;
    value = static_cast<T>(negative ? 0 - quotient : quotient);
    std::memcpy(acc + at, &value, sizeof(T));
  }
}

// ---- Which loops belong to a type and an operator.

using Finish = void (*)(uint8_t* acc, size_t bytes, uint32_t contributions);

template <DataType kType, class T, class Op, Finish kFinish = nullptr>
const Kernels* in_kind() {
  static constexpr Kernels kKernels = {
      .accumulate = &accumulate<T, Op>, .finish = kFinish, .wire = kType, .target = kTarget};
  return &kKernels;
}

using Accumulate = void (*)(uint8_t* acc, const uint8_t* in, size_t bytes);

template <DataType kType, class Format, class Op, Finish kFinish = nullptr, Accumulate kInKind = nullptr>
const Kernels* wide() {
  static constexpr Kernels kKernels = {.accumulate = kInKind,
                                       .widen = &widen_into<Format, First>,
                                       .accumulate_wide = &widen_into<Format, Further<Op>>,
                                       .narrow = &narrow<Format>,
                                       .combine = &accumulate<float, Op>,
                                       .finish = kFinish,
                                       .wire = kType,
                                       .target = kTarget};
  return &kKernels;
}

template <class T>
constexpr Finish integer_division() {
  if constexpr (sizeof(T) == 1) {
    return &divide_bytes<T>;
  } else {
    return &divide_integers<T>;
  }
}

template <DataType kType, class T>
const Kernels* integer(ReduceOp op) {
  using Unsigned = hwy::MakeUnsigned<T>;
  switch (op) {
    case ReduceOp::kSum:
      return in_kind<kType, Unsigned, Sum>();
    case ReduceOp::kProd:
      return in_kind<kType, Unsigned, Prod>();
    case ReduceOp::kMin:
      return in_kind<kType, T, Min>();
    case ReduceOp::kMax:
      return in_kind<kType, T, Max>();
    case ReduceOp::kBand:
      return in_kind<kType, uint8_t, Band>();
    case ReduceOp::kBor:
      return in_kind<kType, uint8_t, Bor>();
    case ReduceOp::kBxor:
      return in_kind<kType, uint8_t, Bxor>();
    case ReduceOp::kAvg:
      return in_kind<kType, Unsigned, Sum, integer_division<T>()>();
    default:
      return nullptr;
  }
}

template <DataType kType, class T>
const Kernels* floating(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return in_kind<kType, T, Sum>();
    case ReduceOp::kProd:
      return in_kind<kType, T, Prod>();
    case ReduceOp::kMin:
      return in_kind<kType, T, Min>();
    case ReduceOp::kMax:
      return in_kind<kType, T, Max>();
    case ReduceOp::kAvg:
      return in_kind<kType, T, Sum, &divide<T>>();
    default:
      return nullptr;
  }
}

template <DataType kType, class Format>
const Kernels* widened(ReduceOp op) {
  using Lane = hwy::MakeSigned<typename Format::Bits>;
  switch (op) {
    case ReduceOp::kSum:
      return wide<kType, Format, Sum>();
    case ReduceOp::kProd:
      return wide<kType, Format, Prod>();
    case ReduceOp::kMin:
      return wide<kType, Format, Min, nullptr, &accumulate<Lane, Extreme<Format, false>>>();
    case ReduceOp::kMax:
      return wide<kType, Format, Max, nullptr, &accumulate<Lane, Extreme<Format, true>>>();
    case ReduceOp::kAvg:
      return wide<kType, Format, Sum, &divide<float>>();
    default:
      return nullptr;
  }
}

const Kernels* kernels(DataType type, ReduceOp op) {
  switch (type) {
    case DataType::kU8:
      return integer<DataType::kU8, uint8_t>(op);
    case DataType::kI8:
      return integer<DataType::kI8, int8_t>(op);
    case DataType::kI32:
      return integer<DataType::kI32, int32_t>(op);
    case DataType::kU32:
      return integer<DataType::kU32, uint32_t>(op);
    case DataType::kI64:
      return integer<DataType::kI64, int64_t>(op);
    case DataType::kU64:
      return integer<DataType::kU64, uint64_t>(op);
    case DataType::kF16:
      return widened<DataType::kF16, F16>(op);
    case DataType::kBf16:
      return widened<DataType::kBf16, Bf16>(op);
    case DataType::kF32:
      return floating<DataType::kF32, float>(op);
    case DataType::kF64:
      return floating<DataType::kF64, double>(op);
    case DataType::kF8E4M3:
      return widened<DataType::kF8E4M3, F8E4M3>(op);
    case DataType::kF8E5M2:
      return widened<DataType::kF8E5M2, F8E5M2>(op);
    default:
      return nullptr;
  }
}

}  // namespace millrace::aggregation::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace millrace::aggregation {

HWY_EXPORT(kernels);

const Kernels* find_kernels(DataType type, ReduceOp op, DataType wire) noexcept {
  if (!wire_supported(type, op, wire)) return nullptr;
  if (wire == DataType::kBfp8) return find_bfp8_kernels(op);
  return HWY_DYNAMIC_DISPATCH(kernels)(type, op);
}

}  // namespace millrace::aggregation

#endif  // HWY_ONCE
