#include "aggregation/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "hwy/highway.h"
#include "tests/unit/reduce_rig.h"

namespace millrace::aggregation {
namespace {

class Reduce : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, Reduce, each_target(), target_name);

// ---- Types reduced in kind.

template <class T>
void check_accumulate(DataType type, ReduceOp op, size_t n, size_t acc_offset, size_t in_offset, size_t fence,
                      std::mt19937_64& random) {
  SCOPED_TRACE(std::string(name(type)) + ' ' + std::string(name(op)) + " n=" + std::to_string(n) + " acc+" +
               std::to_string(acc_offset) + " in+" + std::to_string(in_offset));
  const auto a = some_values<T>(n, random);
  const auto b = some_values<T>(n, random);
  Range acc(acc_offset, n * sizeof(T), fence);
  Range in(in_offset, n * sizeof(T), fence);
  acc.fill(a);
  in.fill(b);
  Reducer::get(type, op).accumulate(acc.data(), in.data(), n * sizeof(T));
  acc.check();
  in.check();
  const auto got = acc.values<Bits<T>>();
  const auto in_after = in.values<Bits<T>>();
  for (size_t i = 0; i < n; ++i) {
    ASSERT_EQ(got[i], expected_bits(reference(op, a[i], b[i])))
        << "element " << i << " of " << +a[i] << ", " << +b[i] << std::hex << " bits "
        << +bits_to<Bits<T>>(a[i]) << ", " << +bits_to<Bits<T>>(b[i]);
    ASSERT_EQ(in_after[i], bits_to<Bits<T>>(b[i])) << "the input was written";
  }
}

template <class T>
void check_in_kind(DataType type) {
  ASSERT_EQ(element_bytes(type), sizeof(T));
  std::mt19937_64 random(static_cast<unsigned>(type));
  for (const ReduceOp op : kAllOps) {
    if (!supported(type, op)) continue;
    for (const size_t n : kCounts) {
      for (const size_t acc_offset : kOffsets) {
        for (const size_t in_offset : kOffsets) {
          check_accumulate<T>(type, op, n, acc_offset, in_offset, (acc_offset + in_offset) % 2 * 64, random);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(Reduce, TheTargetAskedForIsTheOneThatRuns) {
  EXPECT_STREQ(Reducer::get(DataType::kF32, ReduceOp::kSum).target(), hwy::TargetName(GetParam()));
}

TEST_P(Reduce, EverySupportedPairHasKernels) {
  for (const DataType type : kAllTypes) {
    for (const ReduceOp op : kAllOps) {
      for (const DataType wire : kAllTypes) {
        const Kernels* kernels = find_kernels(type, op, wire);
        ASSERT_EQ(kernels != nullptr, wire_supported(type, op, wire)) << name(type) << ' ' << name(op);
        if (kernels == nullptr) continue;
        EXPECT_EQ(kernels->accumulate != nullptr, !accumulates_wide(type, op, wire));
        EXPECT_EQ(kernels->widen != nullptr, is_wide(wire));
        EXPECT_EQ(kernels->accumulate_wide != nullptr, is_wide(wire));
        EXPECT_EQ(kernels->narrow != nullptr, is_wide(wire));
        EXPECT_EQ(kernels->combine != nullptr, is_wide(wire));
        EXPECT_EQ(kernels->finish != nullptr, op == ReduceOp::kAvg);
        EXPECT_EQ(kernels->wire, wire);
        EXPECT_STREQ(kernels->target, hwy::TargetName(GetParam()));
      }
    }
  }
}

TEST_P(Reduce, U8IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<uint8_t>(DataType::kU8); }
TEST_P(Reduce, I8IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<int8_t>(DataType::kI8); }
TEST_P(Reduce, I32IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<int32_t>(DataType::kI32); }
TEST_P(Reduce, U32IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<uint32_t>(DataType::kU32); }
TEST_P(Reduce, I64IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<int64_t>(DataType::kI64); }
TEST_P(Reduce, U64IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<uint64_t>(DataType::kU64); }
TEST_P(Reduce, F32IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<float>(DataType::kF32); }
TEST_P(Reduce, F64IsTheReferenceAtAnyLengthAndAlignment) { check_in_kind<double>(DataType::kF64); }

template <class T>
T reduce_one(DataType type, ReduceOp op, std::vector<T> values) {
  T acc = values.front();
  for (size_t i = 1; i < values.size(); ++i) {
    Reducer::get(type, op).accumulate(reinterpret_cast<uint8_t*>(&acc),
                                      reinterpret_cast<const uint8_t*>(&values[i]), sizeof(T));
  }
  return acc;
}

TEST_P(Reduce, IntegersWrap) {
  const auto sum = ReduceOp::kSum;
  EXPECT_EQ(reduce_one<int32_t>(DataType::kI32, sum, {INT32_MAX, 1}), INT32_MIN);
  EXPECT_EQ(reduce_one<int32_t>(DataType::kI32, sum, {INT32_MIN, -1}), INT32_MAX);
  EXPECT_EQ(reduce_one<int64_t>(DataType::kI64, sum, {INT64_MAX, 1}), INT64_MIN);
  EXPECT_EQ(reduce_one<uint8_t>(DataType::kU8, sum, {255, 1}), 0);
  EXPECT_EQ(reduce_one<int8_t>(DataType::kI8, sum, {127, 1}), -128);
  EXPECT_EQ(reduce_one<uint64_t>(DataType::kU64, sum, {UINT64_MAX, 2}), 1U);
  EXPECT_EQ(reduce_one<int32_t>(DataType::kI32, ReduceOp::kProd, {0x10001, 0x10001}), 0x20001);
  EXPECT_EQ(reduce_one<int64_t>(DataType::kI64, ReduceOp::kProd, {INT64_MIN, -1}), INT64_MIN);
}

TEST_P(Reduce, F32SumsFollowTheOrderGiven) {
  const auto sum = [](std::vector<float> v) {
    return reduce_one(DataType::kF32, ReduceOp::kSum, std::move(v));
  };
  // 2^24 + 1 is a tie that goes down to even, so the order decides.
  EXPECT_EQ(sum({0x1p24F, 1, -0x1p24F}), 0.0F);
  EXPECT_EQ(sum({0x1p24F, -0x1p24F, 1}), 1.0F);
  EXPECT_EQ(sum({1, 1, 0x1p24F}), 16777218.0F);
  EXPECT_EQ(sum({0x1p24F, 1, 1}), 16777216.0F);
}

TEST_P(Reduce, ZerosAndInfinitiesAreIeee) {
  const float inf = std::numeric_limits<float>::infinity();
  const auto f32 = [](ReduceOp op, float a, float b) {
    return bits_to<uint32_t>(reduce_one<float>(DataType::kF32, op, {a, b}));
  };
  EXPECT_EQ(f32(ReduceOp::kSum, -0.0F, -0.0F), 0x80000000U);
  EXPECT_EQ(f32(ReduceOp::kSum, -0.0F, 0.0F), 0U);
  EXPECT_EQ(f32(ReduceOp::kSum, inf, -inf), 0x7fc00000U);
  EXPECT_EQ(f32(ReduceOp::kSum, 3e38F, 3e38F), 0x7f800000U);
  EXPECT_EQ(f32(ReduceOp::kMin, -0.0F, 0.0F), 0x80000000U);
  EXPECT_EQ(f32(ReduceOp::kMin, 0.0F, -0.0F), 0x80000000U);
  EXPECT_EQ(f32(ReduceOp::kMax, -0.0F, 0.0F), 0U);
  EXPECT_EQ(f32(ReduceOp::kMax, 0.0F, -0.0F), 0U);
  EXPECT_EQ(f32(ReduceOp::kMin, -inf, bits_to<float>(0xffc12345U)), 0x7fc00000U);
  EXPECT_EQ(f32(ReduceOp::kMax, bits_to<float>(0x7f800001U), inf), 0x7fc00000U);
}

// All orders of a set of contributions give the same bits.
template <class T>
void check_order_independent(DataType type, ReduceOp op, std::vector<T> values) {
  std::vector<size_t> order(values.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto first = bits_to<Bits<T>>(reduce_one<T>(type, op, values));
  do {
    std::vector<T> permuted(values.size());
    for (size_t i = 0; i < order.size(); ++i) permuted[i] = values[order[i]];
    ASSERT_EQ(bits_to<Bits<T>>(reduce_one<T>(type, op, permuted)), first) << name(type) << ' ' << name(op);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_P(Reduce, ArrivalOrderDoesNotShowInMinMaxOrNan) {
  const auto nan_a = bits_to<float>(0x7fc00001U);
  const auto nan_b = bits_to<float>(0xff812345U);
  const auto wide_nan_a = bits_to<double>(uint64_t{0x7ff8000000000001});
  const auto wide_nan_b = bits_to<double>(uint64_t{0xfff0123456789abc});
  const double inf = std::numeric_limits<double>::infinity();
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
    check_order_independent<float>(DataType::kF32, op, {nan_a, 1, nan_b, -0.0F, 0.0F});
    check_order_independent<double>(DataType::kF64, op, {wide_nan_a, 1, wide_nan_b, -0.0, 0.0});
    check_order_independent<double>(DataType::kF64, op, {inf, wide_nan_a, -inf, 2});
  }
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    check_order_independent<float>(DataType::kF32, op, {0.0F, -0.0F, 1e-45F, -1e-45F, 7});
    check_order_independent<double>(DataType::kF64, op, {0.0, -0.0, 5e-324, -5e-324, inf, -inf});
  }
}

// ---- Types reduced in f32.

std::vector<uint16_t> all_codes() {
  std::vector<uint16_t> codes(65536);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint16_t>(i);
  return codes;
}

const uint8_t* bytes_of(const std::vector<uint16_t>& v) { return reinterpret_cast<const uint8_t*>(v.data()); }

std::vector<uint16_t> narrowed(DataType type, const std::vector<float>& values) {
  std::vector<uint16_t> out(values.size());
  Reducer::get(type, ReduceOp::kSum)
      .narrow(reinterpret_cast<uint8_t*>(out.data()), values.data(), 2 * values.size());
  return out;
}

TEST_P(Reduce, WideningIsExactForEveryCode) {
  const auto codes = all_codes();
  for (const Format& format : kFormats) {
    std::vector<float> wide(codes.size());
    Reducer::get(format.type, ReduceOp::kSum).widen(wide.data(), bytes_of(codes), 2 * codes.size());
    for (const uint16_t code : codes) {
      if (format.is_nan(code)) {
        ASSERT_TRUE(std::isnan(wide[code])) << name(format.type) << ' ' << code;
      } else {
        ASSERT_EQ(bits_to<uint32_t>(wide[code]), bits_to<uint32_t>(format.value(code)))
            << name(format.type) << ' ' << code;
      }
    }
  }
}

TEST_P(Reduce, EveryCodeComesBackAndNanIsCanonical) {
  const auto codes = all_codes();
  for (const Format& format : kFormats) {
    std::vector<float> wide(codes.size());
    Reducer::get(format.type, ReduceOp::kSum).widen(wide.data(), bytes_of(codes), 2 * codes.size());
    const auto back = narrowed(format.type, wide);
    for (const uint16_t code : codes) {
      ASSERT_EQ(back[code], format.is_nan(code) ? format.canonical_nan() : code) << name(format.type);
    }
  }
}

// Rounding is monotonic, so it is right everywhere if it is right around every boundary: at each number of
// the narrow type, at each midpoint between two neighbours, and at the f32 values next to both.
TEST_P(Reduce, RoundingIsToNearestEvenAroundEveryTie) {
  for (const Format& format : kFormats) {
    std::vector<float> inputs;
    std::vector<uint16_t> expected;
    const auto add = [&](float v, uint16_t code) {
      inputs.insert(inputs.end(), {v, -v});
      expected.insert(expected.end(), {code, static_cast<uint16_t>(code | 0x8000)});
    };
    const float inf = std::numeric_limits<float>::infinity();
    for (uint16_t low = 0; low < format.infinity(); ++low) {
      const auto high = static_cast<uint16_t>(low + 1);
      const auto tie = static_cast<float>((format.magnitude(low) + format.magnitude(high)) / 2);
      ASSERT_EQ(tie, (format.magnitude(low) + format.magnitude(high)) / 2) << "a tie must be an f32";
      const auto exact = static_cast<float>(format.magnitude(low));
      add(exact, low);
      add(std::nextafter(exact, inf), low);
      add(std::nextafter(tie, 0.0F), low);
      add(tie, low % 2 == 0 ? low : high);
      add(std::nextafter(tie, inf), high);
      if (high != format.infinity())
        add(std::nextafter(static_cast<float>(format.magnitude(high)), 0.0F), high);
    }
    add(std::numeric_limits<float>::max(), format.infinity());
    add(inf, format.infinity());
    const auto got = narrowed(format.type, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(got[i], expected[i]) << name(format.type) << ' ' << std::hexfloat << inputs[i];
    }
  }
}

TEST_P(Reduce, RoundingIsTheReferencesForArbitraryFloats) {
  std::mt19937_64 random(16);
  std::vector<float> inputs(1 << 18);
  for (float& v : inputs) v = bits_to<float>(static_cast<uint32_t>(random()));
  for (size_t i = 0; i < inputs.size();
       i += 2) {  // half of them in f16's range, which arbitrary bits seldom hit
    const auto exponent = static_cast<uint32_t>(127 - 27 + random() % 45);
    inputs[i] = bits_to<float>((bits_to<uint32_t>(inputs[i]) & 0x807fffffU) | exponent << 23);
  }
  for (const Format& format : kFormats) {
    const auto got = narrowed(format.type, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(got[i], format.rounded(inputs[i])) << name(format.type) << ' ' << std::hexfloat << inputs[i];
    }
  }
}

#ifdef __FLT16_MAX__
TEST_P(Reduce, F16IsTheCompilers) {
  const auto codes = all_codes();
  std::vector<float> wide(codes.size());
  Reducer::get(DataType::kF16, ReduceOp::kSum).widen(wide.data(), bytes_of(codes), 2 * codes.size());
  for (const uint16_t code : codes) {
    const auto theirs = static_cast<float>(bits_to<_Float16>(code));
    if (std::isnan(theirs)) {
      ASSERT_TRUE(std::isnan(wide[code]));
    } else {
      ASSERT_EQ(bits_to<uint32_t>(wide[code]), bits_to<uint32_t>(theirs)) << code;
    }
  }
  std::mt19937_64 random(17);
  std::vector<float> inputs(1 << 18);
  for (float& v : inputs) {
    const auto exponent = static_cast<uint32_t>(127 - 27 + random() % 45);
    v = bits_to<float>((static_cast<uint32_t>(random()) & 0x807fffffU) | exponent << 23);
  }
  const auto got = narrowed(DataType::kF16, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(got[i], bits_to<uint16_t>(static_cast<_Float16>(inputs[i]))) << std::hexfloat << inputs[i];
  }
}
#endif

TEST_P(Reduce, EveryNanNarrowsToTheCanonicalOne) {
  const std::vector<float> nans = {bits_to<float>(0x7f800001U), bits_to<float>(0x7f807fffU),
                                   bits_to<float>(0x7fffffffU), bits_to<float>(0xffffffffU),
                                   bits_to<float>(0xff800001U), bits_to<float>(0xffc00000U)};
  for (const Format& format : kFormats) {
    for (const uint16_t code : narrowed(format.type, nans)) EXPECT_EQ(code, format.canonical_nan());
  }
}

// One pass of widen, two of accumulate_wide and one of narrow, each step against the scalar reference.
void check_wide(const Format& format, ReduceOp op, size_t n, size_t in_offset, size_t wide_offset,
                size_t fence, std::mt19937_64& random) {
  SCOPED_TRACE(std::string(name(format.type)) + ' ' + std::string(name(op)) + " n=" + std::to_string(n) +
               " in+" + std::to_string(in_offset));
  const Reducer reducer = Reducer::get(format.type, op);
  Range wide(wide_offset * sizeof(float), n * sizeof(float), fence);
  std::vector<float> expected(n);
  for (int contribution = 0; contribution < 3; ++contribution) {
    std::vector<uint16_t> values(n);
    for (uint16_t& v : values) v = static_cast<uint16_t>(random());
    Range in(in_offset, 2 * n, fence);
    in.fill(values);
    auto* acc = reinterpret_cast<float*>(wide.data());
    if (contribution == 0) {
      reducer.widen(acc, in.data(), 2 * n);
    } else {
      reducer.accumulate_wide(acc, in.data(), 2 * n);
    }
    in.check();
    wide.check();
    const auto got = wide.values<float>();
    for (size_t i = 0; i < n; ++i) {
      const float v = format.value(values[i]);
      expected[i] = contribution == 0 ? v : reference(op, expected[i], v);
      if (std::isnan(expected[i]) && contribution == 0) {
        ASSERT_TRUE(std::isnan(got[i])) << i;  // an exact copy, payload and all
      } else {
        ASSERT_EQ(bits_to<uint32_t>(got[i]), expected_bits(expected[i])) << i;
      }
    }
  }
  Range out(in_offset, 2 * n, fence);
  reducer.narrow(out.data(), reinterpret_cast<const float*>(wide.data()), 2 * n);
  out.check();
  wide.check();
  const auto got = out.values<uint16_t>();
  for (size_t i = 0; i < n; ++i) ASSERT_EQ(got[i], format.rounded(expected[i])) << i;
}

TEST_P(Reduce, WideTypesAreTheReferenceAtAnyLengthAndAlignment) {
  for (const Format& format : kFormats) {
    std::mt19937_64 random(static_cast<unsigned>(format.type));
    for (const ReduceOp op : kAllOps) {
      if (!supported(format.type, op)) continue;
      for (const size_t n : kCounts) {
        for (const size_t in_offset : kOffsets) {
          for (const size_t wide_offset : {size_t{0}, size_t{1}}) {
            check_wide(format, op, n, in_offset, wide_offset, (in_offset + wide_offset) % 2 * 64, random);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// All pairs of 8-bit codes, and each 16-bit code with others of any kind: in kind they come to what they do
// in f32, NaNs and zeros included, at any length.
TEST_P(Reduce, MinimaAndMaximaInKindAreThoseInF32) {
  std::mt19937_64 random(7);
  for (const DataType type : {DataType::kF16, DataType::kBf16, DataType::kF8E4M3, DataType::kF8E5M2})
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax})
      for (const size_t less : {0, 1, 7, 30}) {
        const size_t size = element_bytes(type), n = 65536 - less;
        const Reducer reducer = Reducer::get(type, op);
        std::vector<uint8_t> a(n * size), b(n * size), expected(n * size);
        for (size_t i = 0; i < n; i++) {
          const uint64_t one = size == 1 ? i >> 8 : i, other = size == 1      ? i
                                                               : random() % 4 ? random()
                                                                              : i ^ 0x8000;
          std::memcpy(a.data() + i * size, &one, size);
          std::memcpy(b.data() + i * size, &other, size);
        }
        std::vector<float> wide(n);
        reducer.widen(wide.data(), a.data(), a.size());
        reducer.accumulate_wide(wide.data(), b.data(), b.size());
        reducer.narrow(expected.data(), wide.data(), expected.size());
        reducer.accumulate(a.data(), b.data(), a.size());
        ASSERT_EQ(a, expected) << name(type) << ' ' << name(op);
      }
}

// The reason for the wide types: 2048 ones and more do not fit f16's mantissa, but they fit f32's.
TEST_P(Reduce, WideSumsAreRoundedOnce) {
  const uint16_t one = kF16.rounded(1.0F);
  const uint16_t big = kF16.rounded(2048.0F);
  const Reducer reducer = Reducer::get(DataType::kF16, ReduceOp::kSum);
  float wide = 0;
  uint16_t out = 0;
  reducer.widen(&wide, reinterpret_cast<const uint8_t*>(&big), 2);
  for (int i = 0; i < 3; ++i) reducer.accumulate_wide(&wide, reinterpret_cast<const uint8_t*>(&one), 2);
  reducer.narrow(reinterpret_cast<uint8_t*>(&out), &wide, 2);
  EXPECT_EQ(wide, 2051.0F);
  EXPECT_EQ(kF16.value(out), 2052.0F);  // a tie to even; rounding at each step would have given 2048
}

// ---- Breaches.

TEST(ReduceDeathTest, MisuseAsserts) {
  uint8_t bytes[16] = {};
  float wide[8] = {};
  const Reducer sum = Reducer::get(DataType::kF32, ReduceOp::kSum);
  EXPECT_DEATH(sum.accumulate(bytes, bytes + 4, 8), "disjoint");
  EXPECT_DEATH(sum.widen(wide, bytes, 16), "widen");
  EXPECT_DEATH(Reducer::get(DataType::kF16, ReduceOp::kSum).accumulate(bytes, bytes + 8, 8), "accumulate");
  EXPECT_DEATH(Reducer::get(DataType::kF32, ReduceOp::kBxor), "supported");
  EXPECT_DEATH(Reducer::get(DataType::kF64, ReduceOp::kSum, DataType::kBfp8), "supported");
  EXPECT_DEATH(Reducer::get(DataType::kF16, ReduceOp::kAvg).finish(bytes, 8, 2), "accumulate");
  EXPECT_DEATH(Reducer::get(DataType::kF32, ReduceOp::kAvg).finish_wide(wide, 8, 2), "widen");
  EXPECT_DEATH(Reducer::get(DataType::kF32, ReduceOp::kAvg).finish(bytes, 8, 0), "contributions");
  EXPECT_DEATH(sum.combine_wide(wide, wide + 4, 4), "combine");
  EXPECT_DEATH(Reducer::get(DataType::kBf16, ReduceOp::kSum).combine_wide(wide, wide + 1, 4), "disjoint");
  EXPECT_DEATH(Reducer().accumulate(bytes, bytes + 8, 8), "kernels_");
}

}  // namespace
}  // namespace millrace::aggregation
