// Elements as millrace-perf's numbers need them: made from whole numbers, from accumulators and from random
// bits, and read back. Written from the formats' definitions, without the library's kernels, which they
// judge. Pure, any thread.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace millrace::perf {

inline uint64_t mix(uint64_t x) {  // SplitMix64's finalizer
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

template <typename T>
struct Integer {
  static constexpr bool kInteger = true, kSigned = std::is_signed_v<T>;
  static constexpr int kBits = 8 * sizeof(T);
  // Minima are shifted up by this: as much as eight bits leave, so that all of the type is compared.
  static constexpr int kScale = kBits - 8;
  using Storage = T;
  static T encode(int64_t v) { return static_cast<T>(v); }  // wraps, as the reduction does
  static T from_bits(uint64_t bits) { return static_cast<T>(bits); }
};

// f32 and f64. `spread` is how many bits of a sum differ from index to index, `scale` by how many bits minima
// are shifted up: as much as the type holds exactly together with what 64 ranks add to it. `rough` bounds the
// binary exponents of numbers whose sums depend on the order.
template <typename T, typename Word, int spread, int scale, int rough>
struct Ieee {
  static constexpr bool kInteger = false, kSigned = true, kFewBits = false;
  static constexpr int kMantissaBits = std::numeric_limits<T>::digits - 1;
  static constexpr int kBias = std::numeric_limits<T>::max_exponent - 1;
  static constexpr int kSignBit = 8 * sizeof(T) - 1;
  static constexpr int kSpread = spread, kScale = scale, kRoughLow = -rough, kRoughHigh = rough;
  using Storage = T;
  using Accumulator = T;
  static T encode(int64_t v) { return static_cast<T>(v); }
  static T from_bits(uint64_t bits) { return std::bit_cast<T>(static_cast<Word>(bits)); }
  static T round(Accumulator v) { return v; }
  static double decode(T v) { return static_cast<double>(v); }
};

// The types that are accumulated in f32. `infinite`: all ones in the exponent are infinity and NaN, as in
// IEEE 754; else (f8e4m3) only all ones in everything is special, a NaN.
template <typename Word, int exponent_bits, int mantissa_bits, bool infinite, int spread, int scale, int low,
          int high>
struct Narrow {
  static constexpr bool kInteger = false, kSigned = true;
  static constexpr bool kFewBits = mantissa_bits < 4;  // products of small numbers do not fit
  static constexpr int kMantissaBits = mantissa_bits, kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kSignBit = 8 * sizeof(Word) - 1;
  static constexpr int kSpread = spread, kScale = scale, kRoughLow = low, kRoughHigh = high;
  using Storage = Word;
  using Accumulator = float;

  // To nearest even.
  static Word round(float value) {
    constexpr uint64_t kTop = ((1ull << exponent_bits) - 1) << mantissa_bits;
    constexpr uint64_t kLargest = infinite ? kTop - 1 : (kTop | ((1ull << mantissa_bits) - 1)) - 1;
    const uint64_t sign = std::signbit(value) ? 1ull << kSignBit : 0;
    if (std::isnan(value))
      return static_cast<Word>(infinite ? kTop | 1ull << (mantissa_bits - 1) : kLargest + 1);
    // |value| = significand × 2^(exponent − 23)
    const uint32_t f = std::bit_cast<uint32_t>(value) & 0x7FFFFFFF;
    const bool subnormal = f >> 23 == 0;
    const uint32_t significand = subnormal ? f : (f & 0x7FFFFF) | 1u << 23;
    const int exponent = subnormal ? -126 : static_cast<int>(f >> 23) - 127;
    const int own = std::max(exponent, 1 - kBias);  // of the result, if it does not carry
    const int shift = std::min(23 - mantissa_bits + own - exponent, 31);
    const uint32_t rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    uint64_t units = significand >> shift;  // of the last place, the implicit bit included
    units += rest > half || (rest == half && units % 2 == 1);
    const uint64_t bits = (static_cast<uint64_t>(own + kBias - 1) << mantissa_bits) + units;
    if (bits <= kLargest) return static_cast<Word>(sign | bits);
    return static_cast<Word>(infinite ? sign | kTop : kLargest + 1);
  }

  static Word encode(int64_t v) {
    static const std::vector<Word> table = [] {
      std::vector<Word> all(2048);
      for (size_t i = 0; i < all.size(); i++) all[i] = round(static_cast<float>(i));
      return all;
    }();
    const auto magnitude = static_cast<uint64_t>(v < 0 ? -v : v);
    const Word bits = magnitude < table.size() ? table[magnitude] : round(static_cast<float>(magnitude));
    return static_cast<Word>(bits | (v < 0 ? 1ull << kSignBit : 0));
  }
  static Word from_bits(uint64_t bits) { return static_cast<Word>(bits); }

  static double decode(Word bits) {
    const uint64_t sign = bits >> kSignBit & 1;
    const uint64_t exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
    const uint64_t mantissa = bits & ((1u << mantissa_bits) - 1);
    constexpr uint64_t kOnes = (1u << exponent_bits) - 1, kAllOnes = (1u << mantissa_bits) - 1;
    double magnitude;
    if (exponent == kOnes && (infinite ? mantissa != 0 : mantissa == kAllOnes))
      magnitude = std::numeric_limits<double>::quiet_NaN();
    else if (exponent == kOnes && infinite)
      magnitude = std::numeric_limits<double>::infinity();
    else if (exponent == 0)
      magnitude = std::ldexp(static_cast<double>(mantissa), 1 - kBias - mantissa_bits);
    else
      magnitude = std::bit_cast<double>((exponent - kBias + 1023) << 52 | mantissa << (52 - mantissa_bits));
    return sign ? -magnitude : magnitude;
  }
};

using F64 = Ieee<double, uint64_t, 40, 40, 25>;
using F32 = Ieee<float, uint32_t, 20, 16, 12>;
using F16 = Narrow<uint16_t, 5, 10, true, 10, 3, -13, 8>;
using Bf16 = Narrow<uint16_t, 8, 7, true, 6, 0, -12, 12>;
using F8e4m3 = Narrow<uint8_t, 4, 3, false, 3, 0, -6, 2>;
using F8e5m2 = Narrow<uint8_t, 5, 2, true, 2, 0, -13, 8>;

}  // namespace millrace::perf
