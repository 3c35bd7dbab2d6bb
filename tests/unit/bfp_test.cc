// Block floating point, against a reference in double arithmetic written from NUMERICS.md.
#include "aggregation/bfp.h"

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

class Bfp8 : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, Bfp8, each_target(), target_name);

using Block = std::array<uint8_t, 64>;
using Elements = std::array<float, 63>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double greatest_finite(const Elements& values) {
  double greatest = 0;
  for (const float v : values) {
    if (std::isfinite(v)) greatest = std::max(greatest, std::abs(static_cast<double>(v)));
  }
  return greatest;
}

// The smallest exponent that holds the block's greatest number in mantissas up to 126.
Block encoded_by_definition(const Elements& values) {
  const double greatest = greatest_finite(values);
  int exponent = 8;
  while (exponent < 254 && greatest >= std::ldexp(126.5, exponent - 133)) ++exponent;
  Block block = {static_cast<uint8_t>(exponent)};
  for (size_t i = 0; i < values.size(); ++i) {
    double mantissa = -128;
    if (!std::isnan(values[i])) {
      mantissa = std::clamp(std::nearbyint(std::ldexp(static_cast<double>(values[i]), 133 - exponent)),
                            -127.0, 127.0);
    }
    block[i + 1] = static_cast<uint8_t>(static_cast<int8_t>(mantissa));
  }
  return block;
}

float decoded_by_definition(int exponent, int mantissa) {
  if (exponent == 255 || mantissa == -128) return kNan;
  if (std::abs(mantissa) == 127) return mantissa < 0 ? -kInf : kInf;
  return static_cast<float>(std::ldexp(mantissa, std::max(exponent, 8) - 133));
}

Elements decoded_by_definition(const Block& block) {
  Elements out;
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = decoded_by_definition(block[0], static_cast<int8_t>(block[i + 1]));
  }
  return out;
}

Block encoded(const Elements& values) {
  Block block;
  bfp8_encode(DataType::kF32, reinterpret_cast<const uint8_t*>(values.data()), values.size(), block.data());
  return block;
}

Elements decoded(const Block& block) {
  Elements out;
  bfp8_decode(DataType::kF32, block.data(), out.size(), reinterpret_cast<uint8_t*>(out.data()));
  return out;
}

void expect_same(const Elements& got, const Elements& expected) {
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(bits_to<uint32_t>(got[i]), expected_bits(expected[i])) << "element " << i;
  }
}

TEST_P(Bfp8, EveryExponentAndMantissaDecodesAsDefined) {
  const Reducer reducer = Reducer::get(DataType::kF32, ReduceOp::kSum, DataType::kBfp8);
  for (int exponent = 0; exponent < 256; ++exponent) {
    for (const bool specials : {false, true}) {
      int mantissa = specials ? -128 : -126;
      while (mantissa <= (specials ? 127 : 126)) {
        Block block = {static_cast<uint8_t>(exponent)};
        for (size_t i = 1; i < 64; ++i) block[i] = static_cast<uint8_t>(mantissa <= 127 ? mantissa++ : 0);
        const Elements expected = decoded_by_definition(block);
        expect_same(decoded(block), expected);
        Elements widened;
        reducer.widen(widened.data(), block.data(), block.size());
        expect_same(widened, expected);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A special value is an affair of its own element, wherever it stands: the others keep their exact values.
TEST_P(Bfp8, SpecialValuesStayWhereTheyAre) {
  const Reducer reducer = Reducer::get(DataType::kF32, ReduceOp::kSum, DataType::kBfp8);
  for (size_t at = 0; at < 63; ++at) {
    for (const float special :
         {kNan, bits_to<float>(0xffc01234U), bits_to<float>(0x7f800001U), kInf, -kInf}) {
      Elements values;
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 31;
      values[at] = special;
      const Block block = encoded(values);
      ASSERT_EQ(block, encoded_by_definition(values));
      expect_same(decoded(block), values);
      Elements sum = {};
      reducer.accumulate_wide(sum.data(), block.data(), block.size());
      expect_same(sum, values);
      Block narrowed;
      reducer.narrow(narrowed.data(), sum.data(), narrowed.size());
      ASSERT_EQ(narrowed, block);
      if (HasFatalFailure()) return;
    }
  }
}

// All magnitudes, spreads, corners and ties that a block can have.
Elements some_block(std::mt19937_64& random) {
  Elements values;
  const int top = static_cast<int>(random() % 278) - 149;
  const int spread = 1 + static_cast<int>(random() % 12);
  const auto kind = random() % 4;
  for (float& v : values) {
    const auto mantissa = static_cast<double>(random() % 512) / 2 - 128;  // halves: ties at some scale
    const double fraction = static_cast<double>(random()) * 0x1p-63 - 1;
    const double scale = std::ldexp(1.0, top - static_cast<int>(random() % static_cast<uint64_t>(spread)));
    v = static_cast<float>(kind == 0 ? std::ldexp(mantissa, top - 7) : fraction * scale);
  }
  if (kind == 1) {  // around the magnitude from which the exponent is one more
    const auto field = static_cast<uint32_t>((top + 149) % 255) << 23;
    values[random() % 63] = bits_to<float>(field | static_cast<uint32_t>(0x7cfffe + random() % 5));
  }
  if (kind == 2) {
    const auto special = corners<float>();
    for (int i = 0; i < 3; ++i) values[random() % 63] = special[random() % special.size()];
  }
  return values;
}

TEST_P(Bfp8, EncodingIsTheReferences) {
  std::mt19937_64 random(63);
  for (int i = 0; i < 20000; ++i) {
    const Elements values = some_block(random);
    ASSERT_EQ(encoded(values), encoded_by_definition(values)) << i;
  }
}

TEST_P(Bfp8, TheExponentIsTheSmallestThatHolds) {
  for (int exponent = 1; exponent < 255; ++exponent) {
    const auto field = static_cast<uint32_t>(exponent) << 23;
    for (const uint32_t mantissa : {0U, 1U, 0x400000U, 0x7cffffU, 0x7d0000U, 0x7d0001U, 0x7fffffU}) {
      Elements values = {};
      values[62] = bits_to<float>(field | mantissa);
      values[0] = -values[62] / 126;
      ASSERT_EQ(encoded(values), encoded_by_definition(values)) << exponent << ' ' << mantissa;
    }
  }
  Elements values = {};
  EXPECT_EQ(encoded(values), (Block{8}));
  values[3] = -0.0F;
  values[4] = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(encoded(values), (Block{8}));
  values[5] = 126;
  EXPECT_EQ(encoded(values)[0], 133);
  EXPECT_EQ(encoded(values)[6], 126);
  values[5] = 126.5F;
  EXPECT_EQ(encoded(values)[0], 134);
  EXPECT_EQ(encoded(values)[6], 63);
  values[5] = std::numeric_limits<float>::max();
  EXPECT_EQ(decoded(encoded(values))[5], kInf);
}

TEST_P(Bfp8, DecodedBlocksEncodeToTheSameValues) {
  std::mt19937_64 random(64);
  for (int i = 0; i < 2000; ++i) {
    const Elements once = decoded(encoded(some_block(random)));
    expect_same(decoded(encoded(once)), once);
    if (HasFatalFailure()) return;
  }
}

// ---- The codec for each type, at any length and alignment.

template <class T>
std::vector<T> narrow_all(const Format* format, const std::vector<float>& values) {
  std::vector<T> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if constexpr (sizeof(T) == 2) {
      out[i] = format->rounded(values[i]);
    } else {
      out[i] = expected_bits(values[i]);
    }
  }
  return out;
}

// T: the bits of an element; `format` is that of the 16-bit types.
template <class T>
void check_codec(DataType type, const Format* format, size_t count, size_t offset, size_t fence,
                 std::mt19937_64& random) {
  SCOPED_TRACE(std::string(name(type)) + " n=" + std::to_string(count) + " +" + std::to_string(offset));
  std::vector<float> wide;
  while (wide.size() < count) {
    const Elements block = some_block(random);
    wide.insert(wide.end(), block.begin(), block.end());
  }
  wide.resize(count);
  const auto elements = narrow_all<T>(format, wide);
  Range in(offset, count * sizeof(T), fence);
  in.fill(elements);
  Range blocks(offset + 1, wire_bytes(type, DataType::kBfp8, count * sizeof(T)), fence);
  bfp8_encode(type, in.data(), count, blocks.data());
  in.check();
  blocks.check();
  std::vector<uint8_t> expected;
  std::vector<float> back;
  for (size_t at = 0; at < count; at += 63) {
    Elements values = {};
    for (size_t i = at; i < std::min(at + 63, count); ++i) {
      if constexpr (sizeof(T) == 2) {
        values[i - at] = format->value(elements[i]);
      } else {
        values[i - at] = bits_to<float>(elements[i]);
      }
    }
    const Block block = encoded_by_definition(values);
    expected.insert(expected.end(), block.begin(), block.end());
    const Elements decoded = decoded_by_definition(block);
    back.insert(back.end(), decoded.begin(), decoded.end());
  }
  back.resize(count);
  ASSERT_EQ(blocks.values<uint8_t>(), expected);
  Range out(offset, count * sizeof(T), fence);
  bfp8_decode(type, blocks.data(), count, out.data());
  blocks.check();
  out.check();
  ASSERT_EQ(out.values<T>(), narrow_all<T>(format, back));
}

TEST_P(Bfp8, TheCodecIsTheReferenceAtAnyLengthAndAlignment) {
  std::mt19937_64 random(65);
  std::vector<size_t> counts = {126, 127, 189, 1000};
  for (size_t count = 0; count <= 66; ++count) counts.push_back(count);
  for (const size_t count : counts) {
    for (const size_t offset : kOffsets) {
      check_codec<uint16_t>(DataType::kF16, &kF16, count, offset, offset % 2 * 64, random);
      check_codec<uint16_t>(DataType::kBf16, &kBf16, count, offset, offset % 2 * 64, random);
      check_codec<uint32_t>(DataType::kF32, nullptr, count, offset, offset % 2 * 64, random);
      if (HasFatalFailure()) return;
    }
  }
}

// ---- The switch's side.

void check_operation(ReduceOp op, size_t blocks, size_t offset, size_t fence, std::mt19937_64& random) {
  SCOPED_TRACE(std::string(name(op)) + " blocks=" + std::to_string(blocks) + " +" + std::to_string(offset));
  const Reducer reducer = Reducer::get(DataType::kBf16, op, DataType::kBfp8);
  const size_t bytes = blocks * 64;
  const size_t n = blocks * 63;
  Range memory(offset % 2 * sizeof(float), n * sizeof(float), fence);
  auto* wide = reinterpret_cast<float*>(memory.data());
  std::vector<float> expected(n);
  for (int contribution = 0; contribution < 3; ++contribution) {
    Range in(offset, bytes, fence);
    std::vector<uint8_t> payload;
    for (size_t b = 0; b < blocks; ++b) {
      Block block = encoded_by_definition(some_block(random));
      // Some blocks are what no encoder makes.
      for (int i = 0; random() % 4 == 0 && i < 8; ++i) block[random() % 64] = static_cast<uint8_t>(random());
      payload.insert(payload.end(), block.begin(), block.end());
      const Elements values = decoded_by_definition(block);
      for (size_t i = 0; i < 63; ++i) {
        float& sum = expected[b * 63 + i];
        sum = contribution == 0 ? values[i] : reference(op, sum, values[i]);
      }
    }
    in.fill(payload);
    if (contribution == 0) {
      reducer.widen(wide, in.data(), bytes);
    } else {
      reducer.accumulate_wide(wide, in.data(), bytes);
    }
    in.check();
    memory.check();
  }
  reducer.finish_wide(wide, bytes, 3);
  Range out(offset, bytes, fence);
  reducer.narrow(out.data(), wide, bytes);
  out.check();
  memory.check();
  const auto sums = memory.values<uint32_t>();
  const auto result = out.values<uint8_t>();
  for (size_t b = 0; b < blocks; ++b) {
    Elements values;
    for (size_t i = 0; i < 63; ++i) {
      const float sum = expected[b * 63 + i];
      values[i] = op == ReduceOp::kAvg ? static_cast<float>(static_cast<double>(sum) / 3) : sum;
      ASSERT_EQ(sums[b * 63 + i], expected_bits(values[i])) << b << ' ' << i;
    }
    const Block block = encoded_by_definition(values);
    ASSERT_TRUE(std::equal(block.begin(), block.end(), result.begin() + static_cast<ptrdiff_t>(b * 64))) << b;
  }
}

TEST_P(Bfp8, OperationsAreTheReferenceAtAnyAlignment) {
  std::mt19937_64 random(66);
  for (const ReduceOp op : kAllOps) {
    if (!wire_supported(DataType::kBf16, op, DataType::kBfp8)) continue;
    for (const size_t blocks : {0, 1, 2, 3, 16, 64}) {
      for (const size_t offset : kOffsets) {
        check_operation(op, blocks, offset, offset % 2 * 64, random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// ---- The error bound of NUMERICS.md.

// Sums the contributions through the code under test. Returns how much of the bound the worst element uses:
// above 1 is a breach.
double worst_error(const std::vector<Elements>& contributions) {
  const Reducer reducer = Reducer::get(DataType::kF32, ReduceOp::kSum, DataType::kBfp8);
  Elements wide = {};
  std::array<double, 63> exact = {};
  std::array<double, 63> magnitudes = {};
  double maxima = 0;
  for (size_t c = 0; c < contributions.size(); ++c) {
    const Block block = encoded(contributions[c]);
    if (c == 0) {
      reducer.widen(wide.data(), block.data(), block.size());
    } else {
      reducer.accumulate_wide(wide.data(), block.data(), block.size());
    }
    maxima += greatest_finite(contributions[c]);
    for (size_t i = 0; i < 63; ++i) {
      exact[i] += contributions[c][i];
      magnitudes[i] += std::abs(static_cast<double>(decoded_by_definition(block)[i]));
    }
  }
  Block result;
  reducer.narrow(result.data(), wide.data(), result.size());
  const Elements got = decoded(result);
  double worst = 0;
  for (size_t i = 0; i < 63; ++i) {
    const double summing = static_cast<double>(contributions.size() - 1) * 0x1p-24 * magnitudes[i];
    const double bound = (maxima + greatest_finite(wide)) / 126.5 + summing;
    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - exact[i]) / bound);
  }
  return worst;
}

TEST_P(Bfp8, TheErrorBoundHoldsForRandomContributions) {
  std::mt19937_64 random(67);
  std::normal_distribution<float> normal;
  double worst = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<Elements> contributions(1 + random() % 16);
    for (Elements& values : contributions) {
      const float scale = std::ldexp(1.0F, static_cast<int>(random() % 21) - 10);
      for (float& v : values) v = normal(random) * scale;
    }
    worst = std::max(worst, worst_error(contributions));
  }
  EXPECT_LE(worst, 1.0);
  EXPECT_GE(worst, 0.4);
}

// Each contribution's maximum just makes its scale the coarser one, each element is half a step off in the
// same direction, and so is the sum.
TEST_P(Bfp8, TheErrorBoundIsNearlyReached) {
  EXPECT_EQ(worst_error({Elements{126.5F, 1.0F}}), 0.5 * 126.5 * 2 / (126.5 + 126));
  const double worst = worst_error({Elements{126.5F, 1.001F}, Elements{127.0F, 3.0F}});
  EXPECT_LE(worst, 1.0);
  EXPECT_GE(worst, 0.99);
}

TEST_P(Bfp8, SmallIntegersSumExactly) {
  std::vector<Elements> contributions(8);
  std::mt19937_64 random(68);
  for (Elements& values : contributions) {
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 31) - 15);
  }
  EXPECT_EQ(worst_error(contributions), 0.0);
}

TEST(Bfp8DeathTest, OtherTypesAssert) {
  uint8_t bytes[64] = {};
  EXPECT_DEATH(bfp8_encode(DataType::kF64, bytes, 1, bytes + 8), "loops");
  EXPECT_DEATH(bfp8_decode(DataType::kU8, bytes, 1, bytes + 8), "loops");
}

}  // namespace
}  // namespace millrace::aggregation
