// Vector arithmetic for reduce_kernels.cc, compiled once per Highway target: the operators, and the
// conversions between f32 and the 16-bit types. Values only; no memory is touched here.

// Highway's per-target include guard: the file is included again for each target.
#if defined(MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#undef MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#else
#define MILLRACE_AGGREGATION_REDUCE_OPS_INL_H_
#endif

#include <cstdint>
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

// ---- The 16-bit types. `DF` is a tag of f32 lanes; the narrow bits come and go zero-extended in u32 lanes.

template <class DF>
using U32 = hn::RebindToUnsigned<DF>;

struct Bf16 {
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
    const hn::RebindToSigned<DF> di;
    const auto bits = hn::BitCast(du, v);
    const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
    const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 0x8000));
    // Numbers from 2^-14 on: rounded as in bf16 with 13 bits to drop. From 65520 on, the carry (or the mere
    // size of the exponent, infinity's too) leaves more than f16's infinity, so the minimum settles overflow.
    const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
    const auto rebiased = hn::Sub(magnitude, hn::Set(du, uint32_t{127 - 15} << 23));
    const auto carried = hn::ShiftRight<13>(hn::Add(hn::Add(rebiased, hn::Set(du, 0xfff)), odd));
    const auto normal = hn::Min(carried, hn::Set(du, 0x7c00));
    // Below 2^-14, f16 is fixed-point in units of 2^-24, which is the last place of f32 numbers in [0.5, 1):
    // the addition rounds to it, and the sum's last bits are the result, 2^-14 itself included.
    const auto half = hn::Set(df, 0.5F);
    const auto sum = hn::Add(hn::BitCast(df, magnitude), half);
    const auto subnormal = hn::Sub(hn::BitCast(du, sum), hn::BitCast(du, half));
    const auto is_normal = hn::RebindMask(du, hn::Gt(hn::BitCast(di, magnitude), hn::Set(di, 0x387fffff)));
    const auto rounded = hn::Or(sign, hn::IfThenElse(is_normal, normal, subnormal));
    return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), hn::Set(du, 0x7e00), rounded);
  }
};

}  // namespace millrace::aggregation::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
