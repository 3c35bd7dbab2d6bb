// millrace-perf's expected values against plain arithmetic over the contributions themselves, and that it can
// say no.
#include "tools/perf_values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tools/perf_elements.h"

namespace millrace::perf {
namespace {

constexpr size_t kCount = 300;

// --- Floating-point types by machine types, or by looking through all codes. ---

struct Brain {
  uint16_t bits;
  static double decode(Brain v) { return std::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }
  static Brain round(float v) {
    const auto f = std::bit_cast<uint32_t>(v);
    return {static_cast<uint16_t>((f + 0x7FFF + (f >> 16 & 1)) >> 16)};
  }
};

template <typename T>
struct Machine {
  T value;
  static double decode(Machine v) { return static_cast<double>(v.value); }
  template <typename A>
  static Machine round(A v) {
    return {static_cast<T>(v)};
  }
};

// OCP's definition of the 8-bit types, and rounding by search.
template <int mantissa_bits>
struct Eight {
  uint8_t bits;
  static double decode(Eight v) {
    constexpr int kBias = mantissa_bits == 3 ? 7 : 15;
    const int exponent = (v.bits & 0x7F) >> mantissa_bits, mantissa = v.bits & ((1 << mantissa_bits) - 1);
    const double part = static_cast<double>(mantissa) / (1 << mantissa_bits);
    const double magnitude =
        exponent == 0 ? part * std::pow(2, 1 - kBias) : (1 + part) * std::pow(2, exponent - kBias);
    return v.bits & 0x80 ? -magnitude : magnitude;
  }
  static Eight round(float v) {
    constexpr int kLargest = mantissa_bits == 3 ? 0x7E : 0x7B;
    int best = 0;
    for (int code = 1; code <= kLargest; code++) {
      const double was = std::fabs(decode({static_cast<uint8_t>(best)}) - std::fabs(v));
      const double is = std::fabs(decode({static_cast<uint8_t>(code)}) - std::fabs(v));
      if (is < was || (is == was && code % 2 == 0)) best = code;
    }
    return {static_cast<uint8_t>(best | (std::signbit(v) ? 0x80 : 0))};
  }
};

double apply(mr_op op, double a, double b) {
  switch (op) {
    case MR_PROD:
      return a * b;
    case MR_MIN:
      return std::min(a, b);
    case MR_MAX:
      return std::max(a, b);
    default:
      return a + b;
  }
}

template <typename T>
T apply_integer(mr_op op, T a, T b) {
  using U = uint64_t;  // wraps without being undefined
  switch (op) {
    case MR_PROD:
      return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    case MR_MIN:
      return std::min(a, b);
    case MR_MAX:
      return std::max(a, b);
    case MR_BAND:
      return static_cast<T>(a & b);
    case MR_BOR:
      return static_cast<T>(a | b);
    case MR_BXOR:
      return static_cast<T>(a ^ b);
    case MR_LAND:
      return static_cast<T>(a && b);
    case MR_LOR:
      return static_cast<T>(a || b);
    default:
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
}

// The right result passes, as a whole and in part; one with two elements changed has two wrong ones.
template <typename T>
void expect_right(const Values& v, std::vector<T> result) {
  ASSERT_EQ(count_wrong(v, 0, result.data(), kCount), 0u)
      << name(v.type) << " " << name(v.op) << " of " << v.world;
  ASSERT_EQ(count_wrong(v, 63, result.data() + 63, kCount - 63), 0u);
  auto* bytes = reinterpret_cast<uint8_t*>(result.data());
  bytes[0] ^= 1;
  bytes[(kCount - 1) * sizeof(T)] ^= 4;
  ASSERT_EQ(count_wrong(v, 0, result.data(), kCount), 2u);
}

template <typename T>
void check_integers(mr_type type) {
  for (int world = 1; world <= kExactWorldMax; world++)
    for (mr_op op : kOps) {
      const Values v{type, op, form_of(type, op, true, true), 7, world};
      std::vector<T> all(kCount), one(kCount);
      for (int rank = 0; rank < world; rank++) {
        fill(v, rank, 0, one.data(), kCount);
        ASSERT_EQ(count_changed(v, rank, 0, one.data(), kCount), 0u);
        for (size_t i = 0; i < kCount; i++) {
          if (op == MR_LAND || op == MR_LOR) one[i] = one[i] != 0;
          all[i] = rank == 0 ? one[i] : apply_integer(op, all[i], one[i]);
        }
      }
      if (op == MR_AVG)
        for (T& x : all) x = static_cast<T>(x / static_cast<T>(world));
      expect_right(v, all);
    }
}

TEST(PerfValues, IntegersMatchPlainArithmetic) {
  check_integers<uint8_t>(MR_U8);
  check_integers<int8_t>(MR_I8);
  check_integers<int32_t>(MR_I32);
  check_integers<uint32_t>(MR_U32);
  check_integers<int64_t>(MR_I64);
  check_integers<uint64_t>(MR_U64);
}

// Accumulated in f64, where every step is exact, and rounded once; averages are divided in A.
template <typename E, typename A>
void check_floats(mr_type type) {
  static_assert(sizeof(E) == 1 || sizeof(E) == 2 || sizeof(E) == sizeof(A));
  for (int world = 1; world <= kExactWorldMax; world++)
    for (mr_op op : {MR_SUM, MR_PROD, MR_MIN, MR_MAX, MR_AVG}) {
      const Values v{type, op, Form::kExact, 7, world};
      std::vector<double> all(kCount);
      std::vector<E> one(kCount);
      for (int rank = 0; rank < world; rank++) {
        fill(v, rank, 0, one.data(), kCount);
        for (size_t i = 0; i < kCount; i++)
          all[i] = rank == 0 ? E::decode(one[i]) : apply(op, all[i], E::decode(one[i]));
      }
      std::vector<E> result(kCount);
      for (size_t i = 0; i < kCount; i++) {
        const A sum = static_cast<A>(all[i]);
        ASSERT_EQ(static_cast<double>(sum), all[i]) << "not exact in the accumulator";
        result[i] = E::round(op == MR_AVG ? sum / static_cast<A>(world) : sum);
      }
      expect_right(v, result);
    }
}

TEST(PerfValues, FloatsMatchPlainArithmetic) {
  check_floats<Machine<float>, float>(MR_F32);
  check_floats<Machine<double>, double>(MR_F64);
  check_floats<Machine<_Float16>, float>(MR_F16);
  check_floats<Brain, float>(MR_BF16);
  check_floats<Eight<3>, float>(MR_F8E4M3);
  check_floats<Eight<2>, float>(MR_F8E5M2);
}

TEST(PerfElements, RoundingIsThatOfTheMachine) {
  for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 65521) {  // all exponents, many fractions
    const auto f = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(f)) continue;
    ASSERT_EQ(F16::round(f), std::bit_cast<uint16_t>(static_cast<_Float16>(f))) << f;
    ASSERT_EQ(Bf16::round(f), Brain::round(f).bits) << f;
  }
  // Halfway between neighbours, to the even one.
  EXPECT_EQ(F16::round(2049), F16::encode(2048));
  EXPECT_EQ(F16::round(2051), F16::encode(2052));
  EXPECT_EQ(F8e4m3::encode(17), 0x58);  // 16
  EXPECT_EQ(F8e4m3::encode(19), 0x5A);  // 20
  EXPECT_EQ(F8e5m2::encode(-9), 0xC8);  // −8
}

TEST(PerfElements, SpecialValuesOfEightBitTypes) {
  EXPECT_EQ(F8e4m3::decode(0x7E), 448);
  EXPECT_EQ(F8e4m3::round(464), 0x7E);
  EXPECT_EQ(F8e4m3::round(465), 0x7F);
  EXPECT_TRUE(std::isnan(F8e4m3::decode(0x7F)));
  EXPECT_EQ(F8e5m2::decode(0x7B), 57344);
  EXPECT_EQ(F8e5m2::round(61439), 0x7B);
  EXPECT_EQ(F8e5m2::round(-61440), 0xFC);
  EXPECT_EQ(F8e4m3::decode(0x01), 0x1p-9);
  EXPECT_EQ(F8e5m2::decode(0x81), -0x1p-16);
}

TEST(PerfElements, AllCodesComeBack) {
  for (uint32_t code = 0; code < 65536; code++) {
    const auto word = static_cast<uint16_t>(code);
    const auto machine = static_cast<double>(std::bit_cast<_Float16>(word));
    if (std::isnan(machine)) continue;
    ASSERT_EQ(F16::decode(word), machine);
    ASSERT_EQ(F16::round(static_cast<float>(machine)), word);
  }
  for (uint32_t code = 0; code < 256; code++) {
    const auto byte = static_cast<uint8_t>(code);
    const double e4m3 = F8e4m3::decode(byte), e5m2 = F8e5m2::decode(byte);
    ASSERT_TRUE(std::isnan(e4m3) || F8e4m3::round(static_cast<float>(e4m3)) == byte);
    ASSERT_TRUE(std::isnan(e5m2) || F8e5m2::round(static_cast<float>(e5m2)) == byte);
  }
}

TEST(PerfValues, ARankLeftOutTakenTwiceOrMistakenIsSeen) {
  for (int world : {2, 3, 4, 8}) {
    const Values v{MR_F32, MR_SUM, Form::kExact, 7, world};
    for (int rank = 0; rank < world; rank++) {
      std::vector<float> one(kCount), less(kCount), more(kCount);
      for (int r = 0; r < world; r++) {
        fill(v, r, 0, one.data(), kCount);
        for (size_t i = 0; i < kCount; i++) {
          less[i] += r != rank ? one[i] : 0;
          more[i] += r == rank ? 2 * one[i] : one[i];
        }
      }
      EXPECT_GT(count_wrong(v, 0, less.data(), kCount), kCount / 2);
      EXPECT_GT(count_wrong(v, 0, more.data(), kCount), kCount / 2);
    }
  }
}

TEST(PerfValues, PoisonAndOtherSeedsAreWrong) {
  for (mr_type type : kTypes)
    for (mr_op op : {MR_SUM, MR_MAX, MR_AVG, kNoOp}) {
      const Values v{type, op, Form::kExact, 7, 4}, other{type, op, Form::kExact, 8, 4};
      std::vector<uint8_t> data(kCount * element_bytes(type));
      poison(data.data(), data.size());
      EXPECT_EQ(count_not_poison(data.data(), data.size()), 0u);
      // In a byte it may happen to be right.
      EXPECT_GE(count_changed(v, 1, 0, data.data(), kCount), kCount - kCount / 16) << name(type);
      if (op != kNoOp) {
        EXPECT_GE(count_wrong(v, 0, data.data(), kCount), kCount - kCount / 16) << name(type);
      }
      fill(other, 1, 0, data.data(), kCount);
      EXPECT_GE(count_changed(v, 1, 0, data.data(), kCount), kCount / 2) << name(type);
      data[5] = 0xA4;
      data[7] = 0xA4;
      poison(data.data() + 8, 100);
      EXPECT_EQ(count_not_poison(data.data() + 7, 101), 1u);
    }
}

TEST(PerfValues, CopiesAreAnyBitsOfTheirRank) {
  const Values v{MR_F16, kNoOp, Form::kExact, 7, 4};
  std::vector<uint16_t> data(kCount), other(kCount);
  fill(v, 2, 0, data.data(), kCount);
  fill(v, 3, 0, other.data(), kCount);
  EXPECT_EQ(count_changed(v, 2, 0, data.data(), kCount), 0u);
  EXPECT_GT(count_changed(v, 3, 0, data.data(), kCount), kCount * 9 / 10);
  // An element's contribution depends on its place in the vector, not on where a call begins.
  fill(v, 2, 100, other.data(), 10);
  EXPECT_EQ(std::memcmp(other.data(), &data[100], 20), 0);
}

// --- Deterministic mode. ---

std::vector<std::vector<float>> bracketed(const Values& v) {
  std::vector<std::vector<float>> ranks(static_cast<size_t>(v.world), std::vector<float>(kCount));
  for (int r = 0; r < v.world; r++) fill(v, r, 0, ranks[static_cast<size_t>(r)].data(), kCount);
  return ranks;
}

TEST(PerfValues, DeterministicSumsAreBracketedAsNumericsSays) {
  std::vector<float> sum(kCount);
  Values v{MR_F32, MR_SUM, form_of(MR_F32, MR_SUM, true, false), 7, 3};
  EXPECT_EQ(v.form, Form::kBracketed);
  auto c = bracketed(v);
  for (size_t i = 0; i < kCount; i++) sum[i] = (c[0][i] + c[1][i]) + c[2][i];
  EXPECT_EQ(count_wrong(v, 0, sum.data(), kCount), 0u);

  v.world = 7;
  c = bracketed(v);
  for (size_t i = 0; i < kCount; i++)
    sum[i] = ((c[0][i] + c[1][i]) + (c[2][i] + c[3][i])) + ((c[4][i] + c[5][i]) + c[6][i]);
  EXPECT_EQ(count_wrong(v, 0, sum.data(), kCount), 0u);
  v.op = MR_AVG;
  for (float& x : sum) x /= 7;
  EXPECT_EQ(count_wrong(v, 0, sum.data(), kCount), 0u);

  // Another order shows.
  v = {MR_F32, MR_SUM, Form::kBracketed, 7, 4};
  c = bracketed(v);
  for (size_t i = 0; i < kCount; i++) sum[i] = ((c[0][i] + c[1][i]) + c[2][i]) + c[3][i];
  EXPECT_GT(count_wrong(v, 0, sum.data(), kCount), kCount / 10);
}

TEST(PerfValues, OnlyWhatDependsOnTheOrderIsBracketed) {
  EXPECT_EQ(form_of(MR_F32, MR_SUM, false, false), Form::kExact);
  EXPECT_EQ(form_of(MR_F32, MR_MAX, true, false), Form::kExact);
  EXPECT_EQ(form_of(MR_I32, MR_SUM, true, false), Form::kExact);
  EXPECT_EQ(form_of(MR_F8E5M2, MR_AVG, true, false), Form::kBracketed);
  EXPECT_EQ(form_of(MR_F16, MR_SUM, true, true), Form::kBfp8);
  EXPECT_EQ(form_of(MR_F16, kNoOp, true, true), Form::kExact);
}

// --- Block floating point. ---

// An element of a block with maximum `largest`, sent and received: whole units of 2^(e − 133), by definition.
float through_bfp8(double x, double largest) {
  int e = 8;
  while (e < 254 && largest >= 126.5 * std::ldexp(1, e - 133)) e++;
  return static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(x, 133 - e)), e - 133));
}

template <typename T>
void block_through_bfp8(T* block, size_t count) {
  double largest = 0;
  for (size_t i = 0; i < count; i++) largest = std::max(largest, std::fabs(static_cast<double>(block[i])));
  for (size_t i = 0; i < count; i++)
    block[i] = static_cast<T>(through_bfp8(static_cast<double>(block[i]), largest));
}

// What a correct switch would give for ranks [0, last).
std::vector<float> reduced_as_bfp8(const Values& v, int last) {
  std::vector<float> all(kCount), one(kCount);
  std::vector<_Float16> half(kCount);
  std::vector<uint16_t> brain(kCount);
  for (int r = 0; r < last; r++) {
    if (v.type == MR_F32) fill(v, r, 0, one.data(), kCount);
    if (v.type == MR_F16)
      fill(v, r, 0, half.data(), kCount), std::copy(half.begin(), half.end(), one.begin());
    if (v.type == MR_BF16) {
      fill(v, r, 0, brain.data(), kCount);
      for (size_t i = 0; i < kCount; i++) one[i] = static_cast<float>(Brain::decode({brain[i]}));
    }
    for (size_t at = 0; at < kCount; at += 63)
      block_through_bfp8(&one[at], std::min<size_t>(63, kCount - at));
    for (size_t i = 0; i < kCount; i++)
      all[i] = r == 0 ? one[i] : static_cast<float>(apply(v.op, all[i], one[i]));
  }
  if (v.op == MR_AVG)
    for (float& x : all) x /= static_cast<float>(v.world);
  for (size_t at = 0; at < kCount; at += 63) block_through_bfp8(&all[at], std::min<size_t>(63, kCount - at));
  return all;
}

uint64_t wrong_of(const Values& v, const std::vector<float>& result) {
  if (v.type == MR_F32) return count_wrong(v, 0, result.data(), kCount);
  std::vector<_Float16> half(kCount);
  std::vector<Brain> brain(kCount);
  std::copy(result.begin(), result.end(), half.begin());
  std::transform(result.begin(), result.end(), brain.begin(), Brain::round);
  return v.type == MR_F16 ? count_wrong(v, 0, half.data(), kCount) : count_wrong(v, 0, brain.data(), kCount);
}

TEST(PerfValues, CorrectBlockFloatingPointIsWithinTheBound) {
  for (mr_type type : {MR_F32, MR_F16, MR_BF16})
    for (mr_op op : {MR_SUM, MR_PROD, MR_MIN, MR_MAX, MR_AVG})
      for (int world : {1, 2, 3, 4, 7, 16}) {
        const Values v{type, op, form_of(type, op, false, true), 7, world};
        EXPECT_EQ(wrong_of(v, reduced_as_bfp8(v, world)), 0u)
            << name(type) << " " << name(op) << " of " << world;
      }
}

TEST(PerfValues, ARankLeftOutIsBeyondBlockFloatingPointsBound) {
  for (mr_type type : {MR_F32, MR_F16, MR_BF16})
    for (int world : {2, 4, 8}) {
      const Values v{type, MR_SUM, Form::kBfp8, 7, world};
      EXPECT_GT(wrong_of(v, reduced_as_bfp8(v, world - 1)), kCount / 2) << name(type) << " of " << world;
      std::vector<float> nan(kCount, std::numeric_limits<float>::quiet_NaN());
      EXPECT_EQ(wrong_of(v, nan), kCount);
    }
}

TEST(PerfValues, TheBoundOfBlockFloatingPointByHand) {
  // Two ranks, maxima 126.5 and 253: errors 1 and 2.
  const double x[] = {10, 20}, m[] = {126.5, 253};
  const double tiny = 33 * 0x1p-24;  // of f32's one addition: 11 + 22
  EXPECT_DOUBLE_EQ(bfp8_accumulated_error(MR_SUM, x, m, 2), 3 + tiny);
  EXPECT_DOUBLE_EQ(bfp8_accumulated_error(MR_AVG, x, m, 2), 1.5 + tiny);
  EXPECT_DOUBLE_EQ(bfp8_accumulated_error(MR_MIN, x, m, 2), 2);
  EXPECT_DOUBLE_EQ(bfp8_accumulated_error(MR_MAX, x, m, 2), 2);
  EXPECT_NEAR(bfp8_accumulated_error(MR_PROD, x, m, 2), 11 * 22 - 10 * 20, 1e-4);
  EXPECT_DOUBLE_EQ(bfp8_error_max(3, 379.5), 6);
}

}  // namespace
}  // namespace millrace::perf
