// Vector arithmetic for reduce_kernels.cc and bfp.cc, compiled once per Highway target: the operators, the
// conversions between f32 and the narrower types, and the loops that both files need.

// Highway's per-target include guard: the file is included again for each target.
#if defined(MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#undef MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#else
#define MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace millrace::aggregation::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// ---- Operators. `D` is the tag of the lanes, integers unsigned where the sign makes no difference.

template <class D>
HWY_INLINE hn::Vec<D> canonical_nan(D d) {
  return hn::Set(d, std::numeric_limits<hn::TFromD<D>>::quiet_NaN());
}

// Replaces any NaN by the canonical one.
template <class D, class V>
HWY_INLINE V canonical(D d, V v) {
  if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
    return hn::IfThenElse(hn::IsNaN(v), canonical_nan(d), v);
  } else {
    return v;
  }
}

struct Sum {
  template <class D, class V>
  static HWY_INLINE V apply(D d, V a, V b) {
    return canonical(d, hn::Add(a, b));
  }
};

struct Prod {
  template <class D, class V>
  static HWY_INLINE V apply(D d, V a, V b) {
    if constexpr (sizeof(hn::TFromD<D>) == 1 && HWY_TARGET != HWY_SCALAR) {
      // No vector unit multiplies bytes: even and odd bytes go through 16-bit lanes. Only the low byte of a
      // product counts, so what stands above an even byte does no harm.
      const hn::Repartition<uint16_t, D> d16;
      const auto a16 = hn::BitCast(d16, a);
      const auto b16 = hn::BitCast(d16, b);
      const auto even = hn::And(hn::Mul(a16, b16), hn::Set(d16, 0xff));
      const auto odd = hn::ShiftLeft<8>(hn::Mul(hn::ShiftRight<8>(a16), hn::ShiftRight<8>(b16)));
      return hn::BitCast(d, hn::Or(even, odd));
    } else {
      return canonical(d, hn::Mul(a, b));
    }
  }
};

// Machines differ in what Min and Max give for NaN and for zeros of unequal sign, so both are settled here.
// Equal operands have equal bits but for the zeros, where `Or` yields -0 and `And` yields +0.
struct Min {
  template <class D, class V>
  static HWY_INLINE V apply(D d, V a, V b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      const V least = hn::IfThenElse(hn::Eq(a, b), hn::Or(a, b), hn::Min(a, b));
      return hn::IfThenElse(hn::Or(hn::IsNaN(a), hn::IsNaN(b)), canonical_nan(d), least);
    } else {
      return hn::Min(a, b);
    }
  }
};

struct Max {
  template <class D, class V>
  static HWY_INLINE V apply(D d, V a, V b) {
    if constexpr (hwy::IsFloat<hn::TFromD<D>>()) {
      const V greatest = hn::IfThenElse(hn::Eq(a, b), hn::And(a, b), hn::Max(a, b));
      return hn::IfThenElse(hn::Or(hn::IsNaN(a), hn::IsNaN(b)), canonical_nan(d), greatest);
    } else {
      return hn::Max(a, b);
    }
  }
};

struct Band {
  template <class D, class V>
  static HWY_INLINE V apply(D /*d*/, V a, V b) {
    return hn::And(a, b);
  }
};

struct Bor {
  template <class D, class V>
  static HWY_INLINE V apply(D /*d*/, V a, V b) {
    return hn::Or(a, b);
  }
};

struct Bxor {
  template <class D, class V>
  static HWY_INLINE V apply(D /*d*/, V a, V b) {
    return hn::Xor(a, b);
  }
};

// ---- The narrow types. `DF` is a tag of f32 lanes; rounded bits come zero-extended in u32 lanes. `Bits` is
// what an element is in memory.

template <class DF>
using U32 = hn::RebindToUnsigned<DF>;

// The magnitude's bits of a float with `kMantissa` bits of mantissa and exponent bias `kBias`, rounded to
// nearest even from `magnitude`, an f32 without its sign; at most kTop, which the codes past the greatest
// number stand for, and NaNs too.
template <int kMantissa, int kBias, uint32_t kTop, class DF>
HWY_INLINE hn::Vec<U32<DF>> rounded_magnitude(DF df, hn::Vec<U32<DF>> magnitude) {
  const U32<DF> du;
  const hn::RebindToSigned<DF> di;
  // Normal numbers: adding one less than half of the last kept place, and one more if the kept part is odd,
  // carries exactly when the value is to go up. A carry out of the mantissa steps the exponent. Where the
  // carry, or the mere size of the exponent (infinity's too), leads past kTop, the minimum settles overflow.
  constexpr int kDropped = 23 - kMantissa;
  const auto odd = hn::And(hn::ShiftRight<kDropped>(magnitude), hn::Set(du, 1));
  const auto rebiased = hn::Sub(magnitude, hn::Set(du, uint32_t{127 - kBias} << 23));
  const auto half = hn::Set(du, (uint32_t{1} << (kDropped - 1)) - 1);
  const auto carried = hn::ShiftRight<kDropped>(hn::Add(hn::Add(rebiased, half), odd));
  const auto normal = hn::Min(carried, hn::Set(du, kTop));
  // Below them the type is fixed-point, in units that are the last place of f32 numbers at this `base`: the
  // addition rounds to it, and the sum's last bits are the result, the smallest normal number included.
  const auto base = hn::Set(du, uint32_t{127 + 24 - kBias - kMantissa} << 23);
  const auto sum = hn::Add(hn::BitCast(df, magnitude), hn::BitCast(df, base));
  const auto subnormal = hn::Sub(hn::BitCast(du, sum), base);
  const auto greatest_subnormal = hn::Set(di, static_cast<int32_t>((uint32_t{128 - kBias} << 23) - 1));
  const auto is_normal = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), greatest_subnormal));
  return hn::IfThenElse(is_normal, normal, subnormal);
}

// The least or the greatest in kind, by codes as signed integers: magnitudes are in order, and with those of
// negative numbers turned round all are, −0 below +0.
template <class Format, bool kMax>
struct Extreme {
  template <class D, class V>
  static HWY_INLINE V apply(D d, V a, V b) {
    using T = hn::TFromD<D>;
    const V magnitude = hn::Set(d, hwy::LimitsMax<T>()), last = hn::Set(d, T{Format::kGreatest});
    const auto is_nan = hn::Or(hn::Gt(hn::And(a, magnitude), last), hn::Gt(hn::And(b, magnitude), last));
    const V a_place = hn::Xor(a, hn::And(hn::BroadcastSignBit(a), magnitude));
    const V b_place = hn::Xor(b, hn::And(hn::BroadcastSignBit(b), magnitude));
    const auto takes_a = kMax ? hn::Gt(a_place, b_place) : hn::Gt(b_place, a_place);
    return hn::IfThenElse(is_nan, hn::Set(d, T{Format::kNan}), hn::IfThenElse(takes_a, a, b));
  }
};

// kGreatest: the code behind which there are only NaNs.
struct Bf16 {
  using Bits = uint16_t;
  static constexpr int16_t kGreatest = 0x7f80, kNan = 0x7fc0;

  template <class DF>
  static HWY_INLINE hn::Vec<DF> widen(DF df, hn::Vec<hn::Rebind<uint16_t, DF>> bits16) {
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(U32<DF>(), bits16)));
  }

  // bf16 is the upper half of an f32, so half of the last kept place is 0x8000. Adding one less than that,
  // and one more if the kept part is odd, carries exactly when the value is to go up. A carry out of the
  // mantissa steps the exponent, at the top to infinity, which is what IEEE asks for.
  template <class DF>
  static HWY_INLINE hn::Vec<U32<DF>> narrow(DF /*df*/, hn::Vec<DF> v) {
    const U32<DF> du;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fff)), odd));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7fc0), rounded);
  }
};

struct F16 {
  using Bits = uint16_t;
  static constexpr int16_t kGreatest = 0x7c00, kNan = 0x7e00;

  template <class DF>
  static HWY_INLINE hn::Vec<DF> widen(DF df, hn::Vec<hn::Rebind<uint16_t, DF>> bits16) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX2 && !defined(HWY_DISABLE_F16C)
    // F16C widens exactly whatever MXCSR says. Highway's own fallback would not: it takes infinities for
    // numbers.
    return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits16));
#else
    const U32<DF> du;
    const hn::RebindToSigned<DF> di;
    const auto bits = hn::PromoteTo(du, bits16);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fff));
    const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du, 0x8000)));
    // The exponent moves from bias 15 to bias 127, and for infinity and NaN from 31 to 255: twice as far.
    const auto bias = hn::Set(du, uint32_t{127 - 15} << 23);
    const auto special = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x7bff)));
    const auto moved = hn::Add(hn::ShiftLeft<13>(magnitude), bias);
    const auto normal = hn::Add(moved, hn::IfThenElseZero(special, bias));
    // Subnormals count units of 2^-24; both steps are exact and no f32 subnormal occurs.
    const auto counted = hn::Mul(hn::ConvertTo(df, hn::BitCast(di, magnitude)), hn::Set(df, 0x1p-24F));
    const auto is_normal = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x3ff)));
    return hn::BitCast(df, hn::Or(sign, hn::IfThenElse(is_normal, normal, hn::BitCast(du, counted))));
#endif
  }

  template <class DF>
  static HWY_INLINE hn::Vec<U32<DF>> narrow(DF df, hn::Vec<DF> v) {
    const U32<DF> du;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    const auto magnitude = rounded_magnitude<10, 15, 0x7c00>(df, hn::And(bits, hn::Set(du, 0x7fffffff)));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7e00), hn::Or(sign, magnitude));
  }
};

// The two FP8 types of the OCP 8-bit Floating Point Specification 1.0.

// IEEE-like, and the upper half of an f16, which is the way up; down it must not round twice.
struct F8E5M2 {
  using Bits = uint8_t;
  static constexpr int8_t kGreatest = 0x7c, kNan = 0x7e;

  template <class DF>
  static HWY_INLINE hn::Vec<DF> widen(DF df, hn::Vec<hn::Rebind<uint8_t, DF>> bits8) {
    return F16::widen(df, hn::ShiftLeft<8>(hn::PromoteTo(hn::Rebind<uint16_t, DF>(), bits8)));
  }

  template <class DF>
  static HWY_INLINE hn::Vec<U32<DF>> narrow(DF df, hn::Vec<DF> v) {
    const U32<DF> du;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80));
    const auto magnitude = rounded_magnitude<2, 15, 0x7c>(df, hn::And(bits, hn::Set(du, 0x7fffffff)));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7e), hn::Or(sign, magnitude));
  }
};

// No infinities: the one code past 448 is NaN, so whatever is rounded beyond 448 is NaN.
struct F8E4M3 {
  using Bits = uint8_t;
  static constexpr int8_t kGreatest = 0x7e, kNan = 0x7f;

  // With its mantissa where f16 has its own, an element is an f16 of exponent bias 15 instead of 7: 2^-8 of
  // itself, subnormals included.
  template <class DF>
  static HWY_INLINE hn::Vec<DF> widen(DF df, hn::Vec<hn::Rebind<uint8_t, DF>> bits8) {
    const hn::Rebind<uint16_t, DF> d16;
    const auto bits = hn::PromoteTo(d16, bits8);
    const auto magnitude = hn::And(bits, hn::Set(d16, 0x7f));
    const auto sign = hn::ShiftLeft<8>(hn::And(bits, hn::Set(d16, 0x80)));
    const auto number = hn::Or(sign, hn::ShiftLeft<7>(magnitude));
    const auto is_nan = hn::Eq(magnitude, hn::Set(d16, 0x7f));
    const auto f16 = hn::IfThenElse(is_nan, hn::Set(d16, 0x7e00), number);
    return hn::Mul(F16::widen(df, f16), hn::Set(df, 256.0F));
  }

  template <class DF>
  static HWY_INLINE hn::Vec<U32<DF>> narrow(DF df, hn::Vec<DF> v) {
    const U32<DF> du;
    const auto bits = hn::BitCast(du, v);
    const auto sign = hn::And(hn::ShiftRight<24>(bits), hn::Set(du, 0x80));
    const auto nan = hn::Set(du, 0x7f);
    const auto magnitude = rounded_magnitude<3, 7, 0x7f>(df, hn::And(bits, hn::Set(du, 0x7fffffff)));
    return hn::IfThenElse(hn::Eq(magnitude, nan), nan, hn::Or(sign, magnitude));
  }
};

// ---- Memory.

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

// acc = acc / contributions, for the floating-point types.
template <class T>
void divide(uint8_t* acc, size_t bytes, uint32_t contributions) {
  const hn::ScalableTag<T> d;
  const size_t step = hn::Lanes(d) * sizeof(T);
  const auto divisor = hn::Set(d, static_cast<T>(contributions));
  size_t at = 0;
  for (; at + step <= bytes; at += step) {
    store_bytes(d, canonical(d, hn::Div(load_bytes(d, acc + at), divisor)), acc + at);
  }
  const size_t tail = bytes - at;
  if (tail == 0) return;
  HWY_ALIGN uint8_t acc_tail[HWY_MAX_BYTES] = {};
  std::memcpy(acc_tail, acc + at, tail);
  store_bytes(d, canonical(d, hn::Div(load_bytes(d, acc_tail), divisor)), acc_tail);
  std::memcpy(acc + at, acc_tail, tail);
}

// How a contribution meets an accumulator of f32: the first one is copied, since nothing is there yet.
struct First {
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

inline constexpr const char* kTarget = &HWY_STR(HWY_NAMESPACE)[2];  // without Highway's "N_"

}  // namespace millrace::aggregation::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
