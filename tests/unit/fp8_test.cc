// The two 8-bit floats, against a reference written from the OCP 8-bit Floating Point Specification 1.0.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "aggregation/reduce.h"
#include "tests/unit/reduce_rig.h"

namespace millrace::aggregation {
namespace {

class Fp8 : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, Fp8, each_target(), target_name);

// Table 1 of the specification, and what this code base makes of overflow (NUMERICS.md).
struct Spec {
  DataType type;
  int mantissa_bits;
  int bias;
  uint8_t greatest;       // code of the greatest number
  uint8_t canonical_nan;  // positive
  uint8_t overflow;       // of a positive number
  uint8_t negative_overflow;

  // The number of a code's magnitude, also of the code after the greatest as if it were a number: that is
  // where rounding turns to overflow.
  double magnitude(int code) const {
    const int exponent = code >> mantissa_bits;
    const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }
  float value(uint8_t code) const {
    const int bits = code & 0x7f;
    double m = std::numeric_limits<double>::quiet_NaN();
    if (bits <= greatest) m = magnitude(bits);
    if (type == DataType::kF8E5M2 && bits == 0x7c) m = std::numeric_limits<double>::infinity();
    return static_cast<float>((code & 0x80) != 0 ? -m : m);
  }
  // The nearer of the two codes around the number; of two as near, the even one.
  uint8_t rounded(float v) const {
    if (std::isnan(v)) return canonical_nan;
    const double m = std::abs(static_cast<double>(v));
    int below = 0;
    int above = greatest + 1;
    if (m >= magnitude(above)) return std::signbit(v) ? negative_overflow : overflow;
    while (above - below > 1) {
      const int middle = (below + above) / 2;
      (magnitude(middle) <= m ? below : above) = middle;
    }
    const double down = m - magnitude(below);
    const double up = magnitude(above) - m;
    const int nearest = down < up || (down == up && below % 2 == 0) ? below : above;
    if (nearest > greatest) return std::signbit(v) ? negative_overflow : overflow;
    return static_cast<uint8_t>(nearest | (std::signbit(v) ? 0x80 : 0));
  }
};

constexpr Spec kE4M3 = {DataType::kF8E4M3, 3, 7, 0x7e, 0x7f, 0x7f, 0x7f};
constexpr Spec kE5M2 = {DataType::kF8E5M2, 2, 15, 0x7b, 0x7e, 0x7c, 0xfc};
constexpr Spec kSpecs[] = {kE4M3, kE5M2};

// What is known of the two without any formula.
TEST(Fp8Spec, TheReferenceKnowsTheSpecificationsExamples) {
  EXPECT_EQ(kE4M3.value(0x7e), 448.0F);
  EXPECT_EQ(kE4M3.value(0x08), 0x1p-6F);
  EXPECT_EQ(kE4M3.value(0x07), 0.875F * 0x1p-6F);
  EXPECT_EQ(kE4M3.value(0x01), 0x1p-9F);
  EXPECT_TRUE(std::isnan(kE4M3.value(0x7f)) && std::isnan(kE4M3.value(0xff)));
  EXPECT_EQ(kE5M2.value(0x7b), 57344.0F);
  EXPECT_EQ(kE5M2.value(0x04), 0x1p-14F);
  EXPECT_EQ(kE5M2.value(0x03), 0.75F * 0x1p-14F);
  EXPECT_EQ(kE5M2.value(0x01), 0x1p-16F);
  EXPECT_EQ(kE5M2.value(0xfc), -std::numeric_limits<float>::infinity());
  for (const int nan : {0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff}) {
    EXPECT_TRUE(std::isnan(kE5M2.value(static_cast<uint8_t>(nan))));
  }
}

std::vector<uint8_t> narrowed(DataType type, const std::vector<float>& values) {
  std::vector<uint8_t> out(values.size());
  Reducer::get(type, ReduceOp::kSum).narrow(out.data(), values.data(), out.size());
  return out;
}

TEST_P(Fp8, WideningIsExactForEveryCode) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (const Spec& spec : kSpecs) {
    std::vector<float> wide(256);
    Reducer::get(spec.type, ReduceOp::kSum).widen(wide.data(), codes.data(), codes.size());
    const auto back = narrowed(spec.type, wide);
    for (const uint8_t code : codes) {
      const float expected = spec.value(code);
      ASSERT_EQ(std::isnan(wide[code]), std::isnan(expected)) << name(spec.type) << ' ' << +code;
      if (std::isnan(expected)) {
        ASSERT_EQ(back[code], spec.canonical_nan);
      } else {
        ASSERT_EQ(bits_to<uint32_t>(wide[code]), bits_to<uint32_t>(expected))
            << name(spec.type) << ' ' << +code;
        ASSERT_EQ(back[code], code) << name(spec.type);
      }
    }
  }
}

// All upper halves of an f32, each with the lower halves that decide a rounding.
const std::vector<float>& upper_patterns() {
  static const std::vector<float> kValues = [] {
    std::vector<float> out;
    for (uint32_t upper = 0; upper < 65536; ++upper) {
      for (const uint32_t lower : {0U, 1U, 0x8000U, 0xffffU})
        out.push_back(bits_to<float>(upper << 16 | lower));
    }
    return out;
  }();
  return kValues;
}

// The reference is slow and the same for every instruction set.
const std::vector<uint8_t>& expected_of_patterns(const Spec& spec) {
  static const auto rounded = [](const Spec& of) {
    std::vector<uint8_t> out;
    for (const float v : upper_patterns()) out.push_back(of.rounded(v));
    return out;
  };
  static const std::array<std::vector<uint8_t>, 2> kExpected = {rounded(kE4M3), rounded(kE5M2)};
  return kExpected[spec.type == DataType::kF8E4M3 ? 0 : 1];
}

TEST_P(Fp8, RoundingIsTheReferencesForAllUpperPatterns) {
  for (const Spec& spec : kSpecs) {
    const auto& expected = expected_of_patterns(spec);
    const auto got = narrowed(spec.type, upper_patterns());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(+got[i], +expected[i]) << name(spec.type) << ' ' << std::hexfloat << upper_patterns()[i];
    }
  }
}

TEST_P(Fp8, RoundingIsToNearestEvenAroundEveryTie) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Spec& spec : kSpecs) {
    std::vector<float> inputs;
    std::vector<uint8_t> expected;
    const auto add = [&](float v, int code) {
      const bool over = code > spec.greatest;
      inputs.insert(inputs.end(), {v, -v});
      expected.push_back(over ? spec.overflow : static_cast<uint8_t>(code));
      expected.push_back(over ? spec.negative_overflow : static_cast<uint8_t>(code | 0x80));
    };
    for (int low = 0; low <= spec.greatest; ++low) {
      const auto exact = static_cast<float>(spec.magnitude(low));
      const auto next = static_cast<float>(spec.magnitude(low + 1));
      const float tie = (exact + next) / 2;
      add(exact, low);
      add(std::nextafter(exact, inf), low);
      add(std::nextafter(tie, 0.0F), low);
      add(tie, low % 2 == 0 ? low : low + 1);
      add(std::nextafter(tie, inf), low + 1);
      add(std::nextafter(next, 0.0F), low + 1);
    }
    add(std::numeric_limits<float>::max(), 0x80);
    add(inf, 0x80);
    const auto got = narrowed(spec.type, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(+got[i], +expected[i]) << name(spec.type) << ' ' << std::hexfloat << inputs[i];
      ASSERT_EQ(+spec.rounded(inputs[i]), +expected[i]) << "the two references differ";
    }
  }
}

// Overflow is told, never clipped: to infinity where there is one, else to NaN.
TEST_P(Fp8, OverflowIsNotSaturated) {
  const std::vector<float> values = {448, 464, std::nextafter(464.0F, 500.0F), -1000, 1e30F};
  EXPECT_EQ(narrowed(DataType::kF8E4M3, values), (std::vector<uint8_t>{0x7e, 0x7e, 0x7f, 0x7f, 0x7f}));
  const std::vector<float> e5m2 = {57344, std::nextafter(61440.0F, 0.0F), 61440, -61440, -1e30F};
  EXPECT_EQ(narrowed(DataType::kF8E5M2, e5m2), (std::vector<uint8_t>{0x7b, 0x7b, 0x7c, 0xfc, 0xfc}));
}

float divided(float sum, uint32_t contributions) {
  return static_cast<float>(static_cast<double>(sum) / contributions);
}

// Widen, accumulate twice, finish, narrow.
void check_operation(const Spec& spec, ReduceOp op, size_t n, size_t in_offset, size_t wide_offset,
                     size_t fence, std::mt19937_64& random) {
  SCOPED_TRACE(std::string(name(spec.type)) + ' ' + std::string(name(op)) + " n=" + std::to_string(n) +
               " in+" + std::to_string(in_offset));
  const Reducer reducer = Reducer::get(spec.type, op);
  Range memory(wide_offset * sizeof(float), n * sizeof(float), fence);
  auto* wide = reinterpret_cast<float*>(memory.data());
  std::vector<float> expected(n);
  for (int contribution = 0; contribution < 3; ++contribution) {
    std::vector<uint8_t> codes(n);
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
    Range in(in_offset, n, fence);
    in.fill(codes);
    if (contribution == 0) {
      reducer.widen(wide, in.data(), n);
    } else {
      reducer.accumulate_wide(wide, in.data(), n);
    }
    in.check();
    memory.check();
    for (size_t i = 0; i < n; ++i) {
      const float v = spec.value(codes[i]);
      expected[i] = contribution == 0 ? v : reference(op, expected[i], v);
    }
  }
  reducer.finish_wide(wide, n, 3);
  memory.check();
  Range out(in_offset, n, fence);
  reducer.narrow(out.data(), wide, n);
  out.check();
  const auto got = out.values<uint8_t>();
  for (size_t i = 0; i < n; ++i) {
    const float result = op == ReduceOp::kAvg ? divided(expected[i], 3) : expected[i];
    ASSERT_EQ(bits_to<uint32_t>(memory.values<float>()[i]), expected_bits(result)) << i;
    ASSERT_EQ(+got[i], +spec.rounded(result)) << i;
  }
}

TEST_P(Fp8, OperationsAreTheReferenceAtAnyLengthAndAlignment) {
  for (const Spec& spec : kSpecs) {
    std::mt19937_64 random(static_cast<unsigned>(spec.type));
    for (const ReduceOp op : kAllOps) {
      if (!supported(spec.type, op)) continue;
      for (const size_t n :
           {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 31, 33, 63, 65, 255}) {
        for (const size_t in_offset : kOffsets) {
          const size_t wide_offset = in_offset % 2;
          check_operation(spec, op, n, in_offset, wide_offset, in_offset % 3 * 64, random);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace millrace::aggregation
