#include "aggregation/bfp.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>
#include <limits>

#include "aggregation/reduce_kernels.h"

// Highway compiles this file once per instruction set, each time in a namespace of its own.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "aggregation/bfp.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "aggregation/reduce_ops-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace millrace::aggregation::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A block is byte 0, the exponent e, and 63 mantissas m of one byte: m x 2^(e - 133). -126 to 126 are
// numbers.
constexpr int kExponentMin = 8;        // from here on no f32 subnormal shows up on either way
constexpr int kExponentMax = 254;      // 255 makes a block of NaNs
constexpr int kScaleBias = 133 - 127;  // from e to the exponent field of an f32 that is 2^(e - 133)

// 63 is no multiple of a vector, so the last vector of a block overlaps the one before it. That reads and
// writes nothing outside the block, and is right as long as the last one is computed before the others are
// stored. No vector may be longer than a block.
using F32 = hn::CappedTag<float, 16>;

// ---- Elements: how a vector of f32 is loaded from and stored to memory of some type.

struct FloatElements {
  static constexpr size_t kSize = sizeof(float);
  static HWY_INLINE hn::Vec<F32> load(F32 df, const uint8_t* from) { return load_bytes(df, from); }
  static HWY_INLINE void store(F32 df, hn::Vec<F32> v, uint8_t* to) { store_bytes(df, v, to); }
};

template <class Format>
struct NarrowElements {
  using Narrow = hn::Rebind<typename Format::Bits, F32>;
  static constexpr size_t kSize = sizeof(typename Format::Bits);
  static HWY_INLINE hn::Vec<F32> load(F32 df, const uint8_t* from) {
    return Format::widen(df, load_bytes(Narrow(), from));
  }
  static HWY_INLINE void store(F32 df, hn::Vec<F32> v, uint8_t* to) {
    store_bytes(Narrow(), hn::TruncateTo(Narrow(), Format::narrow(df, v)), to);
  }
};

HWY_INLINE float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Calls body(i) for the first element of each vector of a block, the overlapping last one included.
template <class Body>
HWY_INLINE void for_each_vector(size_t lanes, Body body) {
  for (size_t i = 0; i + lanes <= kBfp8BlockElements; i += lanes) body(i);
  body(kBfp8BlockElements - lanes);
}

// ---- Encoding.

// The exponent of the block's greatest finite magnitude, one more where that would round to a mantissa past
// 126, that is from 126.5 / 64 = 0x1.fap0 on: the addition carries there.
template <class Elements>
HWY_INLINE uint32_t block_exponent(const uint8_t* in) {
  const F32 df;
  const hn::RebindToSigned<F32> di;
  const auto infinity = hn::Set(di, 0x7f800000);
  auto greatest = hn::Zero(di);
  for_each_vector(hn::Lanes(df), [&](size_t i) {
    const auto bits = hn::BitCast(di, Elements::load(df, in + i * Elements::kSize));
    const auto magnitude = hn::And(bits, hn::Set(di, 0x7fffffff));
    greatest = hn::Max(greatest, hn::IfThenElseZero(hn::Lt(magnitude, infinity), magnitude));
  });
  const auto bits = static_cast<uint32_t>(hn::GetLane(hn::MaxOfLanes(di, greatest)));
  return std::clamp<uint32_t>((bits + 0x30000) >> 23, kExponentMin, kExponentMax);
}

template <class Elements>
HWY_INLINE void encode_block(uint8_t* HWY_RESTRICT out, const uint8_t* HWY_RESTRICT in) {
  const F32 df;
  const U32<F32> du;
  const hn::Rebind<uint8_t, F32> d8;
  const uint32_t exponent = block_exponent<Elements>(in);
  out[0] = static_cast<uint8_t>(exponent);
  const auto inverse = hn::Set(df, float_of_bits((2 * 127 + kScaleBias - exponent) << 23));
  // Adding 1.5 x 2^23 leaves an integer in the last bits, rounded to nearest even, two's complement.
  const auto rounder = hn::Set(df, 0x1.8p23F);
  for_each_vector(hn::Lanes(df), [&](size_t i) {
    const auto v = Elements::load(df, in + i * Elements::kSize);
    // Infinities end at 127 of their sign, and so does what the greatest exponent cannot hold.
    const auto clamped = hn::Min(hn::Max(hn::Mul(v, inverse), hn::Set(df, -127.0F)), hn::Set(df, 127.0F));
    const auto scaled = hn::IfThenElse(hn::IsNaN(v), hn::Set(df, -128.0F), clamped);
    const auto low_byte = hn::And(hn::BitCast(du, hn::Add(scaled, rounder)), hn::Set(du, 0xff));
    store_bytes(d8, hn::TruncateTo(d8, low_byte), out + 1 + i);
  });
}

// ---- Decoding.

// Whether any mantissa is -128, -127 or 127; one more wraps 127 round to the other two.
HWY_INLINE bool has_specials(const uint8_t* block) {
  const hn::CappedTag<int8_t, 32> d8;
  auto any = hn::Zero(d8);
  for (size_t i = 1;; i += hn::Lanes(d8)) {
    const bool last = i + hn::Lanes(d8) >= kBfp8BlockBytes;
    const auto m = load_bytes(d8, block + (last ? kBfp8BlockBytes - hn::Lanes(d8) : i));
    const auto special = hn::Lt(hn::Add(m, hn::Set(d8, 1)), hn::Set(d8, -125));
    any = hn::Or(any, hn::VecFromMask(d8, special));
    if (last) return !hn::AllFalse(d8, hn::MaskFromVec(any));
  }
}

// The f32 of the mantissas from element i on. Blocks without special values, which are most, save the tests.
template <bool kSpecials>
struct Decoder {
  explicit HWY_INLINE Decoder(const uint8_t* in)
      : block(in),
        exponent(in[0]),
        scale(float_of_bits((std::max<uint32_t>(in[0], kExponentMin) - kScaleBias) << 23)) {}

  HWY_INLINE hn::Vec<F32> operator()(size_t i) const {
    const F32 df;
    const hn::RebindToSigned<F32> di;
    const auto m = hn::PromoteTo(di, load_bytes(hn::Rebind<int8_t, F32>(), block + 1 + i));
    const auto number = hn::Mul(hn::ConvertTo(df, m), hn::Set(df, scale));
    if constexpr (!kSpecials) return number;
    if (exponent > kExponentMax) return canonical_nan(df);
    const auto infinity = hn::Mul(hn::ConvertTo(df, m), hn::Set(df, std::numeric_limits<float>::infinity()));
    const auto is_nan = hn::RebindMask(df, hn::Eq(m, hn::Set(di, -128)));
    const auto special = hn::IfThenElse(is_nan, canonical_nan(df), infinity);
    return hn::IfThenElse(hn::RebindMask(df, hn::Gt(hn::Abs(m), hn::Set(di, 126))), special, number);
  }

  const uint8_t* block;
  uint32_t exponent;
  float scale;
};

// One block. The last vector comes first, so that what it reads of an accumulator is as yet unchanged.
template <class Step, class Decode>
HWY_INLINE void accumulate_decoded(float* HWY_RESTRICT wide, const Decode& decode) {
  const F32 df;
  const size_t step = hn::Lanes(df);
  const size_t last = kBfp8BlockElements - step;
  const auto at_last = Step::combine(df, wide + last, decode(last));
  for (size_t i = 0; i + step <= kBfp8BlockElements; i += step) {
    hn::StoreU(Step::combine(df, wide + i, decode(i)), df, wide + i);
  }
  hn::StoreU(at_last, df, wide + last);
}

HWY_INLINE bool is_plain(const uint8_t* block) { return block[0] <= kExponentMax && !has_specials(block); }

template <class Step>
void decode_into(float* HWY_RESTRICT wide, const uint8_t* HWY_RESTRICT in, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kBfp8BlockBytes, wide += kBfp8BlockElements) {
    if (HWY_LIKELY(is_plain(in + at))) {
      accumulate_decoded<Step>(wide, Decoder<false>(in + at));
    } else {
      accumulate_decoded<Step>(wide, Decoder<true>(in + at));
    }
  }
}

void narrow_blocks(uint8_t* HWY_RESTRICT out, const float* HWY_RESTRICT wide, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kBfp8BlockBytes, wide += kBfp8BlockElements) {
    encode_block<FloatElements>(out + at, reinterpret_cast<const uint8_t*>(wide));
  }
}

// ---- The hosts' codec.

template <class Elements>
void encode(const uint8_t* HWY_RESTRICT in, size_t count, uint8_t* HWY_RESTRICT out) {
  constexpr size_t kBlockSize = kBfp8BlockElements * Elements::kSize;
  for (; count >= kBfp8BlockElements; count -= kBfp8BlockElements) {
    encode_block<Elements>(out, in);
    in += kBlockSize;
    out += kBfp8BlockBytes;
  }
  if (count == 0) return;
  uint8_t padded[kBlockSize] = {};
  std::memcpy(padded, in, count * Elements::kSize);
  encode_block<Elements>(out, padded);
}

template <class Elements, class Decode>
HWY_INLINE void store_decoded(uint8_t* HWY_RESTRICT out, const Decode& decode) {
  const F32 df;
  for_each_vector(hn::Lanes(df),
                  [&](size_t i) { Elements::store(df, decode(i), out + i * Elements::kSize); });
}

template <class Elements>
HWY_INLINE void decode_block(uint8_t* HWY_RESTRICT out, const uint8_t* HWY_RESTRICT in) {
  if (HWY_LIKELY(is_plain(in))) {
    store_decoded<Elements>(out, Decoder<false>(in));
  } else {
    store_decoded<Elements>(out, Decoder<true>(in));
  }
}

template <class Elements>
void decode(const uint8_t* HWY_RESTRICT in, size_t count, uint8_t* HWY_RESTRICT out) {
  constexpr size_t kBlockSize = kBfp8BlockElements * Elements::kSize;
  for (; count >= kBfp8BlockElements; count -= kBfp8BlockElements) {
    decode_block<Elements>(out, in);
    in += kBfp8BlockBytes;
    out += kBlockSize;
  }
  if (count == 0) return;
  uint8_t padded[kBlockSize];
  decode_block<Elements>(padded, in);
  std::memcpy(out, padded, count * Elements::kSize);
}

struct Codec {
  void (*encode)(const uint8_t* in, size_t count, uint8_t* out);
  void (*decode)(const uint8_t* in, size_t count, uint8_t* out);
};

template <class Elements>
const Codec* codec_of() {
  static constexpr Codec kCodec = {&encode<Elements>, &decode<Elements>};
  return &kCodec;
}

const Codec* codec(DataType type) {
  switch (type) {
    case DataType::kF16:
      return codec_of<NarrowElements<F16>>();
    case DataType::kBf16:
      return codec_of<NarrowElements<Bf16>>();
    case DataType::kF32:
      return codec_of<FloatElements>();
    default:
      return nullptr;
  }
}

void bfp8_encode(DataType type, const uint8_t* in, size_t count, uint8_t* out) {
  const Codec* loops = codec(type);
  assert(loops != nullptr);
  loops->encode(in, count, out);
}

void bfp8_decode(DataType type, const uint8_t* in, size_t count, uint8_t* out) {
  const Codec* loops = codec(type);
  assert(loops != nullptr);
  loops->decode(in, count, out);
}

// ---- The switch's loops.

template <class Op, void (*kFinish)(uint8_t*, size_t, uint32_t) = nullptr>
const Kernels* blocks() {
  static constexpr Kernels kKernels = {.widen = &decode_into<First>,
                                       .accumulate_wide = &decode_into<Further<Op>>,
                                       .narrow = &narrow_blocks,
                                       .combine = &accumulate<float, Op>,
                                       .finish = kFinish,
                                       .wire = DataType::kBfp8,
                                       .target = kTarget};
  return &kKernels;
}

const Kernels* bfp8_kernels(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return blocks<Sum>();
    case ReduceOp::kProd:
      return blocks<Prod>();
    case ReduceOp::kMin:
      return blocks<Min>();
    case ReduceOp::kMax:
      return blocks<Max>();
    case ReduceOp::kAvg:
      return blocks<Sum, &divide<float>>();
    default:
      return nullptr;
  }
}

}  // namespace millrace::aggregation::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE

namespace millrace::aggregation {

HWY_EXPORT(bfp8_kernels);
HWY_EXPORT(bfp8_encode);
HWY_EXPORT(bfp8_decode);

const Kernels* find_bfp8_kernels(ReduceOp op) noexcept { return HWY_DYNAMIC_DISPATCH(bfp8_kernels)(op); }

void bfp8_encode(DataType type, const uint8_t* in, size_t count, uint8_t* out) noexcept {
  HWY_DYNAMIC_DISPATCH(bfp8_encode)(type, in, count, out);
}

void bfp8_decode(DataType type, const uint8_t* in, size_t count, uint8_t* out) noexcept {
  HWY_DYNAMIC_DISPATCH(bfp8_decode)(type, in, count, out);
}

}  // namespace millrace::aggregation

#endif  // HWY_ONCE
