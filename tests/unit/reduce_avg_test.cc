// What happens to accumulators after the contributions: the division of averages, and the combination of
// partial results.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "aggregation/reduce.h"
#include "tests/unit/reduce_rig.h"

namespace millrace::aggregation {
namespace {

class Average : public OnEachTarget {};
INSTANTIATE_TEST_SUITE_P(Targets, Average, each_target(), target_name);

constexpr uint32_t kDivisors[] = {1, 2, 3, 5, 7, 8, 127, 128, 129, 255, 256, 257, 1000, 4099, 65535, 65536};

// 128-bit integers divide as C's do, and neither overflow nor round; floats divide in a type so wide that the
// second rounding changes nothing.
template <class T>
T quotient(T sum, uint32_t contributions) {
  if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(static_cast<Wider<T>>(sum) / static_cast<Wider<T>>(contributions));
  } else {
    __extension__ using Wide = __int128;
    return static_cast<T>(static_cast<Wide>(sum) / static_cast<Wide>(contributions));
  }
}

template <class T>
void check_finish(DataType type, const std::vector<T>& sums, uint32_t contributions, size_t offset,
                  size_t fence) {
  SCOPED_TRACE(std::string(name(type)) + " / " + std::to_string(contributions) +
               " n=" + std::to_string(sums.size()));
  const size_t bytes = sums.size() * sizeof(T);
  Range acc(offset, bytes, fence);
  acc.fill(sums);
  Reducer::get(type, ReduceOp::kAvg).finish(acc.data(), bytes, contributions);
  acc.check();
  const auto got = acc.values<Bits<T>>();
  for (size_t i = 0; i < sums.size(); ++i) {
    ASSERT_EQ(got[i], expected_bits(quotient(sums[i], contributions))) << i << ": " << +sums[i];
  }
}

template <class T>
void check_type(DataType type) {
  std::mt19937_64 random(static_cast<unsigned>(type));
  for (const uint32_t contributions : kDivisors) {
    for (const size_t n : kCounts) {
      const size_t offset = kOffsets[(n + contributions) % std::size(kOffsets)];
      check_finish(type, some_values<T>(n, random), contributions, offset, n % 2 * 64);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  // Around multiples of the divisor, where a quotient steps.
  for (const uint32_t contributions : kDivisors) {
    std::vector<T> steps;
    for (int i = 0; i < 300; ++i) {
      const uint64_t multiple = random() % 1000000 * contributions;
      for (const uint64_t near : {multiple - 1, multiple, multiple + 1}) {
        steps.push_back(static_cast<T>(near));
        steps.push_back(static_cast<T>(0 - near));
      }
    }
    check_finish(type, steps, contributions, 1, 0);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(Average, EveryTypeDividesAsTheReference) {
  check_type<uint8_t>(DataType::kU8);
  check_type<int8_t>(DataType::kI8);
  check_type<int32_t>(DataType::kI32);
  check_type<uint32_t>(DataType::kU32);
  check_type<int64_t>(DataType::kI64);
  check_type<uint64_t>(DataType::kU64);
  check_type<float>(DataType::kF32);
  check_type<double>(DataType::kF64);
}

TEST_P(Average, BytesAreRightForAllValuesAndManyDivisors) {
  std::vector<uint8_t> bytes;
  std::vector<int8_t> signed_bytes;
  for (int i = 0; i < 256; ++i) {
    bytes.push_back(static_cast<uint8_t>(i));
    signed_bytes.push_back(static_cast<int8_t>(i));
  }
  for (uint32_t contributions = 1; contributions <= 600; ++contributions) {
    check_finish(DataType::kU8, bytes, contributions, 0, 0);
    check_finish(DataType::kI8, signed_bytes, contributions, 0, 0);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Average, IsTheWrappedSumTowardsZero) {
  const auto average = [](DataType type, auto a, auto b, uint32_t contributions) {
    const Reducer reducer = Reducer::get(type, ReduceOp::kAvg);
    auto* acc = reinterpret_cast<uint8_t*>(&a);
    reducer.accumulate(acc, reinterpret_cast<const uint8_t*>(&b), sizeof(a));
    reducer.finish(acc, sizeof(a), contributions);
    return a;
  };
  EXPECT_EQ(average(DataType::kI32, int32_t{-3}, int32_t{-4}, 2), -3);
  EXPECT_EQ(average(DataType::kI32, int32_t{3}, int32_t{4}, 2), 3);
  EXPECT_EQ(average(DataType::kI32, INT32_MAX, int32_t{1}, 2), INT32_MIN / 2);
  EXPECT_EQ(average(DataType::kU8, uint8_t{200}, uint8_t{100}, 2), 22);
  EXPECT_EQ(average(DataType::kI64, INT64_MIN, int64_t{0}, 1), INT64_MIN);
  EXPECT_EQ(average(DataType::kU64, UINT64_MAX, uint64_t{0}, 1), UINT64_MAX);
  EXPECT_EQ(average(DataType::kF32, 1.0F, 1.0F, 3), 2.0F / 3.0F);
  EXPECT_EQ(average(DataType::kF64, 1.0, 0.0, 3), 1.0 / 3.0);
}

// 1 and 2^-11 x 3: the sum is not an f16, and its half is rounded once.
TEST_P(Average, WideTypesAreDividedBeforeTheOneRounding) {
  const Reducer reducer = Reducer::get(DataType::kF16, ReduceOp::kAvg);
  for (const auto& [values, contributions] : {std::pair{std::vector<float>{1, 0x3p-11F}, 2U},
                                              {std::vector<float>{2048, 1, 1, 1}, 4U},
                                              {std::vector<float>{65504, 65504, 65504}, 3U},
                                              {std::vector<float>{0x1p-24F, 0x1p-24F, 0}, 3U}}) {
    std::vector<float> wide(1);
    float sum = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const uint16_t bits = kF16.rounded(values[i]);
      const auto* in = reinterpret_cast<const uint8_t*>(&bits);
      i == 0 ? reducer.widen(wide.data(), in, 2) : reducer.accumulate_wide(wide.data(), in, 2);
      sum += values[i];
    }
    reducer.finish_wide(wide.data(), 2, contributions);
    uint16_t out = 0;
    reducer.narrow(reinterpret_cast<uint8_t*>(&out), wide.data(), 2);
    EXPECT_EQ(wide[0], quotient(sum, contributions));
    EXPECT_EQ(out, kF16.rounded(quotient(sum, contributions)));
  }
}

TEST_P(Average, OtherOperatorsAreFinishedAlready) {
  std::vector<uint8_t> bytes(64, 77);
  std::vector<float> wide(63, 77.0F);
  for (const DataType type : kAllTypes) {
    for (const ReduceOp op : kAllOps) {
      if (op == ReduceOp::kAvg) continue;
      if (supported(type, op) && !is_wide(type)) Reducer::get(type, op).finish(bytes.data(), 64, 3);
      if (supported(type, op) && is_wide(type)) Reducer::get(type, op).finish_wide(wide.data(), 32, 3);
      if (!wire_supported(type, op, DataType::kBfp8)) continue;
      Reducer::get(type, op, DataType::kBfp8).finish_wide(wide.data(), 64, 3);
    }
  }
  EXPECT_EQ(bytes, std::vector<uint8_t>(64, 77));
  EXPECT_EQ(wide, std::vector<float>(63, 77.0F));
}

TEST_P(Average, PartialResultsCombineAsTheReference) {
  std::mt19937_64 random(7);
  const auto check = [&](DataType type, DataType wire, ReduceOp op) {
    for (const size_t n : kCounts) {
      const auto a = some_values<float>(n, random);
      const auto b = some_values<float>(n, random);
      Range acc(n % 2 * sizeof(float), n * sizeof(float), n % 3 * 64);
      Range in(0, n * sizeof(float), 0);
      acc.fill(a);
      in.fill(b);
      Reducer::get(type, op, wire)
          .combine_wide(reinterpret_cast<float*>(acc.data()), reinterpret_cast<const float*>(in.data()), n);
      acc.check();
      const auto got = acc.values<uint32_t>();
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(got[i], expected_bits(reference(op, a[i], b[i])))
            << name(wire) << ' ' << name(op) << ' ' << i;
      }
    }
  };
  for (const DataType type : kAllTypes) {
    for (const DataType wire : {type, DataType::kBfp8}) {
      for (const ReduceOp op : kAllOps) {
        if (is_wide(wire) && wire_supported(type, op, wire)) check(type, wire, op);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace millrace::aggregation
