// What the tests of the reduction kernels share: running on every instruction set, memory that notices when a
// loop leaves its range, scalar references written from the formats' definitions, and values to try.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "aggregation/reduce.h"
#include "hwy/highway.h"

namespace millrace::aggregation {

// ---- Every test runs once for each instruction set this machine has.

class OnEachTarget : public ::testing::TestWithParam<int64_t> {
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

inline auto each_target() { return ::testing::ValuesIn(hwy::SupportedAndGeneratedTargets()); }
inline std::string target_name(const ::testing::TestParamInfo<int64_t>& target) {
  return hwy::TargetName(target.param);
}

inline constexpr DataType kAllTypes[] = {DataType::kU8,  DataType::kI8,  DataType::kI32,    DataType::kU32,
                                         DataType::kI64, DataType::kU64, DataType::kF16,    DataType::kBf16,
                                         DataType::kF32, DataType::kF64, DataType::kF8E4M3, DataType::kF8E5M2,
                                         DataType::kBfp8};
inline constexpr ReduceOp kAllOps[] = {ReduceOp::kNone, ReduceOp::kSum,  ReduceOp::kProd,
                                       ReduceOp::kMin,  ReduceOp::kMax,  ReduceOp::kBand,
                                       ReduceOp::kBor,  ReduceOp::kBxor, ReduceOp::kAvg};

// Below and above every vector length there is, and a whole chunk.
inline constexpr size_t kCounts[] = {0,  1,  2,  3,  4,  5,  7,  8,  9,  15,  16,  17,  19,  31,
                                     32, 33, 47, 63, 64, 65, 95, 96, 97, 127, 129, 255, 257, 1021};
inline constexpr size_t kOffsets[] = {0, 1, 3, 7, 42};

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

// What accumulating does; avg adds, and divides at the end.
template <class T>
T reference(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kAvg) op = ReduceOp::kSum;
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

inline constexpr Format kF16 = {DataType::kF16, 10, 5};
inline constexpr Format kBf16 = {DataType::kBf16, 7, 8};
inline constexpr Format kFormats[] = {kF16, kBf16};

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

}  // namespace millrace::aggregation
