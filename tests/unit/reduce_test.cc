#include "aggregation/reduce.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hwy/highway.h"

namespace millrace::aggregation {
namespace {

// ---- Every test runs once for each instruction set this machine has.

class Reduce : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    hwy::SetSupportedTargetsForTest(GetParam());
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }
};

INSTANTIATE_TEST_SUITE_P(Targets, Reduce, ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()),
                         [](const auto& target) { return std::string(hwy::TargetName(target.param)); });

constexpr DataType kAllTypes[] = {DataType::kU8,  DataType::kI8,  DataType::kI32,    DataType::kU32,
                                  DataType::kI64, DataType::kU64, DataType::kF16,    DataType::kBf16,
                                  DataType::kF32, DataType::kF64, DataType::kF8E4M3, DataType::kF8E5M2,
                                  DataType::kBfp8};
constexpr ReduceOp kAllOps[] = {ReduceOp::kNone, ReduceOp::kSum,  ReduceOp::kProd,
                                ReduceOp::kMin,  ReduceOp::kMax,  ReduceOp::kBand,
                                ReduceOp::kBor,  ReduceOp::kBxor, ReduceOp::kAvg};

// Below and above every vector length there is, and a whole chunk.
constexpr size_t kCounts[] = {0,  1,  2,  3,  4,  5,  7,  8,  9,  15,  16,  17,  19,  31,
                              32, 33, 47, 63, 64, 65, 95, 96, 97, 127, 129, 255, 257, 1021};
constexpr size_t kOffsets[] = {0, 1, 3, 7, 42};

// ---- Memory that notices. Without a fence the range ends where the heap block does, for AddressSanitizer;
// with one, the bytes around the range are checked by check(), for builds without it.
class Range {
 public:
  Range(size_t offset, size_t bytes, size_t fence)
      : offset_(offset), bytes_(bytes), size_(offset + bytes + fence), block_(new uint8_t[size_]) {
    std::memset(block_.get(), kFence, size_);
  }
  uint8_t* data() { return block_.get() + offset_; }
  template <class T>
  void fill(const std::vector<T>& values) {
    if (!values.empty()) std::memcpy(data(), values.data(), bytes_);
  }
  template <class T>
  std::vector<T> values() {
    std::vector<T> out(bytes_ / sizeof(T));
    if (!out.empty()) std::memcpy(out.data(), data(), bytes_);
    return out;
  }
  void check() const {
    for (size_t i = 0; i < size_; ++i) {
      const bool inside = i >= offset_ && i < offset_ + bytes_;
      ASSERT_TRUE(inside || block_[i] == kFence) << "byte " << i << " is outside the range";
    }
  }

 private:
  static constexpr uint8_t kFence = 0xa5;
  size_t offset_;
  size_t bytes_;
  size_t size_;
  std::unique_ptr<uint8_t[]> block_;
};

// ---- References.

template <class T>
using Bits = std::conditional_t<
    sizeof(T) == 1, uint8_t,
    std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class To, class From>
To bits_to(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The bits of a value, where any NaN has to be the canonical one.
template <class T>
Bits<T> expected_bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    if (std::isnan(value)) return 0x7fc00000U;
  } else if constexpr (std::is_same_v<T, double>) {
    if (std::isnan(value)) return 0x7ff8000000000000U;
  }
  return bits_to<Bits<T>>(value);
}

// A type so much wider that rounding to it first and to T afterwards is rounding once: more than 2p + 1 bits.
#ifdef __SIZEOF_FLOAT128__
__extension__ using Quad = __float128;
#else
using Quad = long double;
#endif
template <class T>
using Wider = std::conditional_t<std::is_same_v<T, float>, double, Quad>;

template <class T>
T float_reference(ReduceOp op, T a, T b) {
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<T>(static_cast<Wider<T>>(a) + static_cast<Wider<T>>(b));
    case ReduceOp::kProd:
      return static_cast<T>(static_cast<Wider<T>>(a) * static_cast<Wider<T>>(b));
    default:
      break;
  }
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  const bool a_is_less = a < b || (a == b && std::signbit(a) && !std::signbit(b));
  return a_is_less == (op == ReduceOp::kMin) ? a : b;
}

// Two's complement by way of 128 bits: nothing overflows, the cast at the end keeps the low bits.
template <class T>
T integer_reference(ReduceOp op, T a, T b) {
  __extension__ using Wide = __int128;
  __extension__ using WideBits = unsigned __int128;
  switch (op) {
    case ReduceOp::kSum:
      return static_cast<T>(static_cast<Wide>(a) + b);
    case ReduceOp::kProd:
      return static_cast<T>(static_cast<WideBits>(a) * static_cast<WideBits>(b));
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kBand:
      return static_cast<T>(a & b);
    case ReduceOp::kBor:
      return static_cast<T>(a | b);
    default:
      return static_cast<T>(a ^ b);
  }
}

template <class T>
T reference(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return float_reference(op, a, b);
  } else {
    return integer_reference(op, a, b);
  }
}

// A 16-bit float by the definition of the format: sign, biased exponent, mantissa.
struct Format {
  DataType type;
  int mantissa_bits;
  int exponent_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }
  uint16_t canonical_nan() const { return static_cast<uint16_t>(infinity() | 1 << (mantissa_bits - 1)); }
  bool is_nan(uint16_t bits) const { return (bits & 0x7fff) > infinity(); }

  // The number that the magnitude's bits would mean if the exponent had no reserved value, so that "infinity"
  // is the number after the greatest, which is where rounding turns to infinity.
  double magnitude(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int unit = 1 - bias() - mantissa_bits;
    if (exponent == 0) return std::ldexp(mantissa, unit);
    return std::ldexp((1 << mantissa_bits) + mantissa, unit + exponent - 1);
  }
  float value(uint16_t bits) const {
    if (is_nan(bits)) return std::numeric_limits<float>::quiet_NaN();
    const bool infinite = (bits & 0x7fff) == infinity();
    const double m = infinite ? std::numeric_limits<double>::infinity() : magnitude(bits);
    return static_cast<float>((bits & 0x8000) != 0 ? -m : m);
  }

  // Rounding by scaling to an integer, which std::nearbyint rounds to even in the default environment.
  uint16_t rounded(float v) const {
    if (std::isnan(v)) return canonical_nan();
    const auto sign = static_cast<uint16_t>(std::signbit(v) ? 0x8000 : 0);
    if (std::isinf(v)) return static_cast<uint16_t>(sign | infinity());
    if (v == 0) return sign;
    const double m = std::abs(static_cast<double>(v));
    const int exponent = std::max(std::ilogb(m), 1 - bias());
    const double units = std::nearbyint(std::ldexp(m, mantissa_bits - exponent));
    // Counting units from the subnormals up: each binade adds 2^mantissa_bits codes.
    const double code = units + std::ldexp(exponent + bias() - 1, mantissa_bits);
    const double clamped = std::min(code, static_cast<double>(infinity()));
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(clamped));
  }
};

constexpr Format kF16 = {DataType::kF16, 10, 5};
constexpr Format kBf16 = {DataType::kBf16, 7, 8};
constexpr Format kFormats[] = {kF16, kBf16};

// ---- Values: half of them arbitrary bits, half from the corners of the type.

template <class T>
std::vector<T> corners() {
  using L = std::numeric_limits<T>;
  if constexpr (std::is_floating_point_v<T>) {
    using B = Bits<T>;
    const B infinity = bits_to<B>(L::infinity());
    const B sign = static_cast<B>(B{1} << (sizeof(T) * 8 - 1));
    std::vector<T> out = {0,
                          1,
                          static_cast<T>(1.5),
                          3,
                          L::min(),
                          L::denorm_min(),
                          L::max(),
                          L::epsilon(),
                          L::infinity(),
                          L::quiet_NaN(),
                          bits_to<T>(static_cast<B>(infinity + 1)),
                          bits_to<T>(static_cast<B>(bits_to<B>(L::quiet_NaN()) + 12345))};
    const size_t positive = out.size();
    for (size_t i = 0; i < positive; ++i)
      out.push_back(bits_to<T>(static_cast<B>(bits_to<B>(out[i]) | sign)));
    return out;
  } else {
    return {0,
            1,
            2,
            static_cast<T>(-1),
            static_cast<T>(-2),
            L::min(),
            L::max(),
            static_cast<T>(L::min() + 1),
            static_cast<T>(L::max() - 1),
            static_cast<T>(L::max() / 2 + 1)};
  }
}

template <class T>
std::vector<T> some_values(size_t n, std::mt19937_64& random) {
  const std::vector<T> special = corners<T>();
  std::vector<T> out(n);
  for (T& v : out) {
    v = (random() & 1) != 0 ? special[random() % special.size()] : bits_to<T>(static_cast<Bits<T>>(random()));
  }
  return out;
}

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
      const Kernels* kernels = find_kernels(type, op);
      ASSERT_EQ(kernels != nullptr, supported(type, op)) << name(type) << ' ' << name(op);
      if (kernels == nullptr) continue;
      EXPECT_EQ(kernels->accumulate != nullptr, !is_wide(type));
      EXPECT_EQ(kernels->widen != nullptr, is_wide(type));
      EXPECT_EQ(kernels->accumulate_wide != nullptr, is_wide(type));
      EXPECT_EQ(kernels->narrow != nullptr, is_wide(type));
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
  EXPECT_DEATH(Reducer().accumulate(bytes, bytes + 8, 8), "kernels_");
}

}  // namespace
}  // namespace millrace::aggregation
