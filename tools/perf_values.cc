#include "tools/perf_values.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "tools/perf_elements.h"

namespace millrace::perf {
namespace {

// Where a number is: its index in the vector, and what that hashes to.
struct Place {
  uint64_t hash;
  size_t index;
};

Place place_of(uint64_t seed, size_t index) { return {mix(seed + index * 0x9E3779B97F4A7C15ull), index}; }

template <typename E>
int64_t sign(uint64_t h) {
  return E::kSigned && (h >> 63) ? -1 : 1;
}
// One of the ranks, by 16 bits of a hash.
int chosen(uint64_t bits, int world) {
  return static_cast<int>((bits & 0xFFFF) % static_cast<unsigned>(world));
}

// --- Exact: what rank r contributes at a place, and what comes out. ---

// Four ranks in a row contribute 0, 1, 2 and 3, rotated by two bits of h that are their own: whole fours sum
// to 6, the ranks over are looked at one by one. A rank left out, taken twice or mistaken for another changes
// the sum at most indices. Rank 0 adds `spread` bits of h, so that results differ between indices and a
// result in the wrong place is seen. At 64 ranks at most 96 + 63 in bf16's 8 bits, 96 + 1023 in f16's 11;
// f8's few are rounded to, once, as the reduction does. Of integers, the first and the last rank add whole
// words of h, whose sum wraps at every second index.
struct Sum {
  static uint64_t rotated(uint64_t h, int r) {
    return ((h >> (2 * (r >> 2 & 15))) + static_cast<uint64_t>(r)) & 3;
  }
  template <typename E>
  static uint64_t extra(uint64_t h) {
    if constexpr (E::kInteger)
      return mix(h);
    else
      return mix(h) & ((1ull << E::kSpread) - 1);
  }
  template <typename E>
  static uint64_t extra_of_last(uint64_t h) {
    return E::kInteger ? mix(~h) : 0;
  }
  // Of whole numbers, which wrap.
  template <typename E>
  static int64_t total(uint64_t h, int world) {
    uint64_t sum = 6 * static_cast<uint64_t>(world / 4) + extra<E>(h) + extra_of_last<E>(h);
    for (int r = world & ~3; r < world; r++) sum += rotated(h, r);
    return E::kInteger ? static_cast<int64_t>(sum) : sign<E>(h) * static_cast<int64_t>(sum);
  }
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    const uint64_t h = at.hash;
    const uint64_t v =
        rotated(h, r) + (r == 0 ? extra<E>(h) : 0) + (r == world - 1 ? extra_of_last<E>(h) : 0);
    return E::encode(E::kInteger ? static_cast<int64_t>(v) : sign<E>(h) * static_cast<int64_t>(v));
  }
  template <typename E>
  static auto result(Place at, int world) {
    return E::encode(total<E>(at.hash, world));
  }
};

// The contributions of a sum. Integers: the wrapped sum, divided as C does. Floating point: one division in
// what the sum is accumulated in, then the type's rounding.
struct Average : Sum {
  template <typename E>
  static auto result(Place at, int world) {
    using T = typename E::Storage;
    const int64_t sum = total<E>(at.hash, world);
    if constexpr (E::kInteger) {
      return static_cast<T>(static_cast<T>(sum) / static_cast<T>(world));
    } else {
      using A = typename E::Accumulator;
      return E::round(static_cast<A>(sum) / static_cast<A>(world));
    }
  }
};

// One rank contributes a factor 2, one a factor 3, rank 0 a factor 1 … 8 and the sign, all others 1:
// |product| ≤ 48. Where few bits are held, rank 0's factor is 1, 2, 4 or 8. Of integers, the first and the
// last rank contribute odd words, whose product wraps.
struct Prod {
  template <typename E>
  static uint64_t extra(uint64_t h) {
    if constexpr (E::kInteger)
      return mix(h) | 1;
    else if constexpr (E::kFewBits)
      return 1ull << (h >> 40 & 3);
    else
      return 1 + (h >> 40 & 7);
  }
  template <typename E>
  static uint64_t extra_of_last(uint64_t h) {
    return E::kInteger ? mix(~h) | 1 : 1;
  }
  template <typename E>
  static auto signed_number(uint64_t h, uint64_t v) {
    return E::encode(E::kInteger ? static_cast<int64_t>(v) : sign<E>(h) * static_cast<int64_t>(v));
  }
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    const uint64_t h = at.hash;
    uint64_t v = (chosen(h, world) == r ? 2u : 1u) * (chosen(h >> 16, world) == r ? 3u : 1u);
    if (r == world - 1) v *= extra_of_last<E>(h);
    return r == 0 ? signed_number<E>(h, v * extra<E>(h)) : E::encode(static_cast<int64_t>(v));
  }
  template <typename E>
  static auto result(Place at, int) {
    return signed_number<E>(at.hash, 6 * extra<E>(at.hash) * extra_of_last<E>(at.hash));
  }
};

// The ranks contribute `world` numbers in a row, rotated, from a base that differs between indices and is
// negative at most of them where the type has negatives; shifted up by `scale` bits, and with those bits
// filled, so that wide types are compared in full. Before the shift −96 … 94, or 0 … 190: 8 bits. (f8 rounds
// them, which keeps their order.)
template <bool max>
struct Extreme {
  template <typename E>
  static auto value(uint64_t h, int64_t place) {
    const int64_t base = static_cast<int64_t>(h >> 40 & 127) - (E::kSigned ? 96 : 0);
    const uint64_t low = mix(h) & ((1ull << E::kScale) - 1);
    return E::encode(static_cast<int64_t>((static_cast<uint64_t>(base + place) << E::kScale) + low));
  }
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    return value<E>(at.hash, chosen((at.hash & 0x3FFF) + static_cast<unsigned>(r), world));
  }
  template <typename E>
  static auto result(Place at, int world) {
    return value<E>(at.hash, max ? world - 1 : 0);
  }
};

// Of every four bits, one is the same at all ranks, one is one rank's alone (the others have the operator's
// neutral element there), and two are each rank's own noise.
template <mr_op op>
struct Bitwise {
  static uint64_t combine(uint64_t a, uint64_t b) {
    return op == MR_BAND ? a & b : op == MR_BOR ? a | b : a ^ b;
  }
  static uint64_t bits(uint64_t h, int r, int world) {
    constexpr uint64_t kCommon = 0x1111111111111111ull, kNoise = 0x6666666666666666ull,
                       kOne = 0x8888888888888888ull;
    const uint64_t common = mix(h ^ 0x5555), noise = mix(h ^ mix(static_cast<uint64_t>(r) + 1));
    const uint64_t neutral = op == MR_BAND ? ~0ull : 0;
    return (common & kCommon) | (noise & kNoise) | ((chosen(h, world) == r ? common : neutral) & kOne);
  }
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    return E::from_bits(bits(at.hash, r, world));
  }
  template <typename E>
  static auto result(Place at, int world) {
    uint64_t all = bits(at.hash, 0, world);
    for (int r = 1; r < world; r++) all = combine(all, bits(at.hash, r, world));
    return E::from_bits(all);
  }
};

// At one index in four each, all ranks have something, none has, one alone has, and one alone has not. What
// they have is one bit, of any place value.
template <bool all_of>
struct Logical {
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    const uint64_t h = at.hash, kind = h >> 60 & 3;
    const bool mine = chosen(h, world) == r;
    const bool set = kind == 0 || (kind == 2 && mine) || (kind == 3 && !mine);
    return E::from_bits(set ? 1ull << mix(h + static_cast<uint64_t>(r)) % E::kBits : 0);
  }
  template <typename E>
  static auto result(Place at, int world) {
    const uint64_t kind = at.hash >> 60 & 3;
    const bool alone = world == 1;
    if (all_of) return E::encode(kind == 0 || (kind == 2 && alone));
    return E::encode(kind == 0 || kind == 2 || (kind == 3 && !alone));
  }
};

// Any bits: nothing is reduced, and no byte may be touched.
struct Copy {
  template <typename E>
  static auto contribution(Place at, int r, int) {
    return E::from_bits(mix(at.hash ^ mix(static_cast<uint64_t>(r) + 1)));
  }
  template <typename E>
  static auto result(Place at, int) {
    return contribution<E>(at, 0, 1);
  }
};

// --- Bracketed: numbers with all bits of the mantissa and many exponents. ---

template <mr_op op>
struct Bracketed {
  template <typename E>
  static auto contribution(Place at, int r, int) {
    const uint64_t h = mix(at.hash ^ mix(static_cast<uint64_t>(r) + 1));
    constexpr bool product = op == MR_PROD;  // of numbers in ½ … 2
    constexpr int low = product ? -1 : E::kRoughLow, high = product ? 0 : E::kRoughHigh;
    const auto exponent =
        static_cast<uint64_t>(E::kBias + low + static_cast<int>((h >> 52 & 0x7FF) % (high - low + 1)));
    return E::from_bits((h >> 63) << E::kSignBit | exponent << E::kMantissaBits |
                        (h & ((1ull << E::kMantissaBits) - 1)));
  }
  // Ranks [begin, end): the largest power of two below their number, then the rest.
  template <typename E>
  static typename E::Accumulator over(Place at, int begin, int end, int world) {
    using A = typename E::Accumulator;
    if (end - begin == 1) return static_cast<A>(E::decode(contribution<E>(at, begin, world)));
    const int half = static_cast<int>(std::bit_ceil(static_cast<unsigned>(end - begin))) / 2;
    const A left = over<E>(at, begin, begin + half, world), right = over<E>(at, begin + half, end, world);
    return op == MR_PROD ? left * right : left + right;
  }
  template <typename E>
  static auto result(Place at, int world) {
    using A = typename E::Accumulator;
    const A all = over<E>(at, 0, world, world);
    return E::round(op == MR_AVG ? all / static_cast<A>(world) : all);
  }
};

// --- Block floating point: all ranks have numbers of one magnitude, so that one left out is seen in spite of
// the error admitted; the magnitude differs between blocks where the type has the room. ---

template <mr_op op>
struct Blocked {
  template <typename E>
  static auto contribution(Place at, int r, int world) {
    const uint64_t h = mix(at.hash ^ mix(static_cast<uint64_t>(r) + 1));
    using A = typename E::Accumulator;
    const A positive = h >> 63 ? -1 : 1;
    if (op == MR_PROD) {  // all but three ranks have 1
      const bool mine = r == 0 || r == world - 1 || r == chosen(at.hash, world);
      return E::round(mine ? positive * static_cast<A>(64 + (h & 63)) / 64 : 1);
    }
    // As many bits as the type holds, 20 at most.
    const bool f16 = std::is_same_v<E, F16>;
    const int bits = f16 ? 10 : std::min(E::kMantissaBits + 1, 20);
    const auto v = static_cast<A>(h & ((1u << bits) - 1));
    return E::round(positive * v * static_cast<A>(f16 ? 1u : 1u << (at.index >> 7 & 7)));
  }
};

double reduce(mr_op op, double a, double b) {
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

// One block: `in` are its results. All sums and products here are exact in f64.
template <typename E, mr_op op>
uint64_t count_wrong_in_block(const Values& v, uint64_t seed, size_t first, const typename E::Storage* in,
                              size_t count) {
  const auto ranks = static_cast<size_t>(v.world);
  std::vector<double> magnitudes(ranks * count), block_max(ranks);
  std::array<double, kBfp8Block> exact{}, error{};
  for (size_t r = 0; r < ranks; r++)
    for (size_t i = 0; i < count; i++) {
      const double x = E::decode(
          Blocked<op>::template contribution<E>(place_of(seed, first + i), static_cast<int>(r), v.world));
      exact[i] = r == 0 ? x : reduce(op, exact[i], x);
      magnitudes[i * ranks + r] = std::fabs(x);
      block_max[r] = std::max(block_max[r], std::fabs(x));
    }
  double accumulated_max = 0;
  for (size_t i = 0; i < count; i++) {
    if (op == MR_AVG) exact[i] /= v.world;
    error[i] = bfp8_accumulated_error(op, &magnitudes[i * ranks], block_max.data(), v.world);
    accumulated_max = std::max(accumulated_max, std::fabs(exact[i]) + error[i]);
  }
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; i++)  // a NaN is wrong
    wrong += !(std::fabs(E::decode(in[i]) - exact[i]) <= bfp8_error_max(error[i], accumulated_max));
  return wrong;
}

template <typename E, mr_op op>
uint64_t count_wrong_as(Blocked<op>, const Values& v, size_t first, const void* data, size_t count) {
  const auto* in = static_cast<const typename E::Storage*>(data);
  uint64_t wrong = 0;
  for (size_t at = 0; at < count; at += kBfp8Block)
    wrong +=
        count_wrong_in_block<E, op>(v, mix(v.seed), first + at, in + at, std::min(kBfp8Block, count - at));
  return wrong;
}

// --- All of them. ---

template <typename E, typename O>
uint64_t count_wrong_as(O, const Values& v, size_t first, const void* data, size_t count) {
  const auto* in = static_cast<const typename E::Storage*>(data);
  const uint64_t seed = mix(v.seed);
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    const typename E::Storage expected = O::template result<E>(place_of(seed, first + i), v.world);
    wrong += std::memcmp(&in[i], &expected, sizeof expected) != 0;
  }
  return wrong;
}

template <template <mr_op> typename O, typename E, typename F>
auto with_rounded_operator(mr_op op, F f) {
  switch (op) {
    case MR_PROD:
      return f.template operator()<E, O<MR_PROD>>();
    case MR_AVG:
      return f.template operator()<E, O<MR_AVG>>();
    case MR_MIN:
      return f.template operator()<E, O<MR_MIN>>();
    case MR_MAX:
      return f.template operator()<E, O<MR_MAX>>();
    default:
      return f.template operator()<E, O<MR_SUM>>();
  }
}

template <typename E, typename F>
auto with_operator(const Values& v, F f) {
  if (v.op == kNoOp) return f.template operator()<E, Copy>();
  if constexpr (!E::kInteger) {
    if (v.form == Form::kBracketed) return with_rounded_operator<Bracketed, E>(v.op, f);
    if constexpr (sizeof(typename E::Storage) == 2 || std::is_same_v<E, F32>)
      if (v.form == Form::kBfp8) return with_rounded_operator<Blocked, E>(v.op, f);
  }
  if constexpr (E::kInteger) {
    switch (v.op) {
      case MR_BAND:
        return f.template operator()<E, Bitwise<MR_BAND>>();
      case MR_BOR:
        return f.template operator()<E, Bitwise<MR_BOR>>();
      case MR_BXOR:
        return f.template operator()<E, Bitwise<MR_BXOR>>();
      case MR_LAND:
        return f.template operator()<E, Logical<true>>();
      case MR_LOR:
        return f.template operator()<E, Logical<false>>();
      default:
        break;
    }
  }
  switch (v.op) {
    case MR_PROD:
      return f.template operator()<E, Prod>();
    case MR_MIN:
      return f.template operator()<E, Extreme<false>>();
    case MR_MAX:
      return f.template operator()<E, Extreme<true>>();
    case MR_AVG:
      return f.template operator()<E, Average>();
    default:
      return f.template operator()<E, Sum>();
  }
}

template <typename F>
auto with_element(mr_type type, F f) {
  switch (type) {
    case MR_U8:
      return f.template operator()<Integer<uint8_t>>();
    case MR_I8:
      return f.template operator()<Integer<int8_t>>();
    case MR_I32:
      return f.template operator()<Integer<int32_t>>();
    case MR_U32:
      return f.template operator()<Integer<uint32_t>>();
    case MR_I64:
      return f.template operator()<Integer<int64_t>>();
    case MR_U64:
      return f.template operator()<Integer<uint64_t>>();
    case MR_F16:
      return f.template operator()<F16>();
    case MR_BF16:
      return f.template operator()<Bf16>();
    case MR_F64:
      return f.template operator()<F64>();
    case MR_F8E4M3:
      return f.template operator()<F8e4m3>();
    case MR_F8E5M2:
      return f.template operator()<F8e5m2>();
    default:
      return f.template operator()<F32>();
  }
}

template <typename F>
auto dispatch(const Values& v, F f) {
  return with_element(v.type, [&]<typename E>() { return with_operator<E>(v, f); });
}

}  // namespace

Form form_of(mr_type type, mr_op op, bool deterministic, bool bfp8) {
  if (op == kNoOp || !is_floating(type)) return Form::kExact;
  if (bfp8) return Form::kBfp8;
  const bool order_matters = op == MR_SUM || op == MR_PROD || op == MR_AVG;
  return deterministic && order_matters ? Form::kBracketed : Form::kExact;
}

void fill(const Values& v, int rank, size_t first, void* data, size_t count) {
  dispatch(v, [&]<typename E, typename O>() {
    auto* out = static_cast<typename E::Storage*>(data);
    const uint64_t seed = mix(v.seed);
    for (size_t i = 0; i < count; i++)
      out[i] = O::template contribution<E>(place_of(seed, first + i), rank, v.world);
  });
}

uint64_t count_changed(const Values& v, int rank, size_t first, const void* data, size_t count) {
  return dispatch(v, [&]<typename E, typename O>() {
    const auto* in = static_cast<const typename E::Storage*>(data);
    const uint64_t seed = mix(v.seed);
    uint64_t changed = 0;
    for (size_t i = 0; i < count; i++) {
      const typename E::Storage expected =
          O::template contribution<E>(place_of(seed, first + i), rank, v.world);
      changed += std::memcmp(&in[i], &expected, sizeof expected) != 0;
    }
    return changed;
  });
}

uint64_t count_wrong(const Values& v, size_t first, const void* data, size_t count) {
  return dispatch(v, [&]<typename E, typename O>() { return count_wrong_as<E>(O{}, v, first, data, count); });
}

namespace {
// In every byte: no whole number as a float, and as an integer rarely right.
constexpr uint8_t kPoison = 0xA5;
}  // namespace

void poison(void* data, size_t bytes) { std::memset(data, kPoison, bytes); }

uint64_t count_not_poison(const void* data, size_t bytes) {
  const auto* in = static_cast<const uint8_t*>(data);
  return static_cast<uint64_t>(std::count_if(in, in + bytes, [](uint8_t b) { return b != kPoison; }));
}

size_t element_bytes(mr_type type) {
  return with_element(type, []<typename E>() { return sizeof(typename E::Storage); });
}

double bfp8_accumulated_error(mr_op op, const double* magnitudes, const double* block_max, int ranks) {
  constexpr double kEncoding = 1 / 126.5, kRounding = 0x1p-24;
  double error_sum = 0, error_max = 0, sum = 0, product = 1, product_with_errors = 1;
  for (int r = 0; r < ranks; r++) {
    const double error = block_max[r] * kEncoding;
    error_sum += error;
    error_max = std::max(error_max, error);
    sum += magnitudes[r] + error;
    product *= magnitudes[r];
    product_with_errors *= magnitudes[r] + error;
  }
  switch (op) {
    case MR_PROD:
      return (1 + (ranks - 1) * kRounding) * product_with_errors - product;
    case MR_MIN:
    case MR_MAX:
      return error_max;
    case MR_AVG:
      return (error_sum + ranks * kRounding * sum) / ranks;
    default:
      return error_sum + (ranks - 1) * kRounding * sum;
  }
}

double bfp8_error_max(double accumulated_error, double accumulated_block_max) {
  return accumulated_error + accumulated_block_max / 126.5;
}

}  // namespace millrace::perf
