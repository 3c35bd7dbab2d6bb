#include "tools/perf_values.h"

#include <bit>
#include <cstring>
#include <type_traits>

namespace millrace::perf {
namespace {

// --- Elements. `spread` is how many bits of a result differ from index to index, and `scale` by how many
// bits minima are shifted up: as much as the type holds exactly together with what 64 ranks add to it (see
// the operators). ---

template <typename T, int spread, int scale>
struct Plain {
  static constexpr bool kSigned = std::is_signed_v<T>, kInteger = std::is_integral_v<T>;
  static constexpr int kSpread = spread, kScale = scale;
  using Storage = T;
  static T encode(int64_t v) { return static_cast<T>(v); }  // integers wrap, as they do in the reduction
};

// A whole number of up to 11 bits: f32 holds it exactly, and all bits that f16 has no room for are 0.
struct Half {
  static constexpr bool kSigned = true, kInteger = false;
  static constexpr int kSpread = 10, kScale = 3;
  using Storage = uint16_t;
  static uint16_t encode(int64_t v) {
    uint32_t f = std::bit_cast<uint32_t>(static_cast<float>(v));
    if (v == 0) return 0;
    uint32_t exponent = (f >> 23 & 0xFF) - 127 + 15;
    return static_cast<uint16_t>((f >> 16 & 0x8000) | exponent << 10 | (f >> 13 & 0x3FF));
  }
};

// A whole number of up to 8 bits.
struct Bfloat {
  static constexpr bool kSigned = true, kInteger = false;
  static constexpr int kSpread = 6, kScale = 0;
  using Storage = uint16_t;
  static uint16_t encode(int64_t v) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(v)) >> 16);
  }
};

uint64_t mix(uint64_t x) {  // SplitMix64's finalizer
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
uint64_t number_at(uint64_t seed, uint64_t index) { return mix(seed + index * 0x9E3779B97F4A7C15ull); }

template <typename E>
int64_t sign(uint64_t h) {
  return E::kSigned && (h >> 63) ? -1 : 1;
}

// --- Operators: what rank r contributes where the index hashes to h, and what comes out. ---

// Four ranks in a row contribute 0, 1, 2 and 3, rotated by two bits of h that are their own: whole fours sum
// to 6, the ranks over are looked at one by one. A rank left out, taken twice or mistaken for another changes
// the sum at most indices. Rank 0 adds `spread` bits of h, so that results differ between indices and a
// result in the wrong place is seen. At 64 ranks at most 96 + 63 in bf16's 8 bits, 96 + 1023 in f16's 11.
struct Sum {
  static int64_t rotated(uint64_t h, int r) {
    return static_cast<int64_t>(((h >> (2 * (r >> 2 & 15))) + static_cast<uint64_t>(r)) & 3);
  }
  template <typename E>
  static int64_t extra(uint64_t h) {
    return static_cast<int64_t>(mix(h) & ((1ull << E::kSpread) - 1));
  }
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int) {
    return sign<E>(h) * (rotated(h, r) + (r == 0 ? extra<E>(h) : 0));
  }
  template <typename E>
  static int64_t result(uint64_t h, int world) {
    int64_t sum = 6 * (world / 4) + extra<E>(h);
    for (int r = world & ~3; r < world; r++) sum += rotated(h, r);
    return sign<E>(h) * sum;
  }
};

// One rank contributes a factor 2, one a factor 3, rank 0 a factor 1 … 8 and the sign, all others 1:
// |product| ≤ 48.
struct Prod {
  static int chosen(uint64_t bits, int world) {
    return static_cast<int>((bits & 0xFFFF) % static_cast<unsigned>(world));
  }
  static int64_t extra(uint64_t h) { return 1 + static_cast<int64_t>(h >> 40 & 7); }
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int world) {
    return (chosen(h, world) == r ? 2 : 1) * (chosen(h >> 16, world) == r ? 3 : 1) *
           (r == 0 ? sign<E>(h) * extra(h) : 1);
  }
  template <typename E>
  static int64_t result(uint64_t h, int) {
    return 6 * sign<E>(h) * extra(h);
  }
};

// The ranks contribute `world` numbers in a row, rotated, from a base that differs between indices and is
// negative at most of them where the type has negatives; shifted up by `scale` bits, and with those bits
// filled, so that wide types are compared in full. Before the shift −96 … 94, or 0 … 190: 8 bits.
template <bool max>
struct Extreme {
  template <typename E>
  static int64_t value(uint64_t h, int64_t place) {
    int64_t base = static_cast<int64_t>(h >> 40 & 127) - (E::kSigned ? 96 : 0);
    int64_t low = static_cast<int64_t>(mix(h) & ((1ull << E::kScale) - 1));
    return (base + place) * (1ll << E::kScale) + low;
  }
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int world) {
    return value<E>(
        h, static_cast<int64_t>(((h & 0xFFFF) + static_cast<unsigned>(r)) % static_cast<unsigned>(world)));
  }
  template <typename E>
  static int64_t result(uint64_t h, int world) {
    return value<E>(h, max ? world - 1 : 0);
  }
};

// Noise in every bit. The result of these is a loop over the ranks.
template <typename F>
struct Bitwise {
  static uint64_t bits(uint64_t h, int r) { return mix(h ^ mix(static_cast<uint64_t>(r))); }
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int) {
    // Every second bit is the same at all ranks, so that what all have and what none has is seen.
    const uint64_t common = mix(h ^ 0x5555), own = bits(h, r);
    return static_cast<int64_t>((common & 0x5555555555555555ull) | (own & 0xAAAAAAAAAAAAAAAAull));
  }
  template <typename E>
  static int64_t result(uint64_t h, int world) {
    int64_t all = contribution<E>(h, 0, world);
    for (int r = 1; r < world; r++) all = F::of(all, contribution<E>(h, r, world));
    return all;
  }
};
struct And {
  static int64_t of(int64_t a, int64_t b) { return a & b; }
};
struct Or {
  static int64_t of(int64_t a, int64_t b) { return a | b; }
};
struct Xor {
  static int64_t of(int64_t a, int64_t b) { return a ^ b; }
};

// At one index in four all ranks have a value, at one in four none, at the others some.
template <bool all_of>
struct Logical {
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int) {
    const uint64_t own = mix(h ^ mix(static_cast<uint64_t>(r)));
    const bool set = (h & 3) == 0 || ((h & 3) != 1 && (own & 1));
    return set ? 1 + static_cast<int64_t>(own >> 60 & 7) : 0;
  }
  template <typename E>
  static int64_t result(uint64_t h, int world) {
    bool all = true, any = false;
    for (int r = 0; r < world; r++) {
      const bool set = contribution<E>(h, r, world) != 0;
      all = all && set, any = any || set;
    }
    return all_of ? all : any;
  }
};

// The average is a number of h's; the ranks are spread evenly about it. Integers' sums wrap before the
// division.
struct Average {
  template <typename E>
  static int64_t middle(uint64_t h) {
    return sign<E>(h) * static_cast<int64_t>(mix(h) & 15);
  }
  template <typename E>
  static int64_t contribution(uint64_t h, int r, int world) {
    const auto place =
        static_cast<int64_t>(((h & 0xFFFF) + static_cast<unsigned>(r)) % static_cast<unsigned>(world));
    return middle<E>(h) + 2 * place - (world - 1);
  }
  template <typename E>
  static int64_t result(uint64_t h, int world) {
    if constexpr (std::is_integral_v<typename E::Storage> && E::kInteger) {
      using T = typename E::Storage;
      const auto sum = static_cast<T>(static_cast<uint64_t>(middle<E>(h)) * static_cast<uint64_t>(world));
      return static_cast<int64_t>(sum / static_cast<T>(world));
    }
    return middle<E>(h);
  }
};

template <typename E, typename O>
void fill_as(uint64_t seed, int rank, int world, void* data, size_t count) {
  auto* out = static_cast<typename E::Storage*>(data);
  for (size_t i = 0; i < count; i++)
    out[i] = E::encode(O::template contribution<E>(number_at(seed, i), rank, world));
}

template <typename E, typename O>
uint64_t count_wrong_as(uint64_t seed, int world, const void* data, size_t count, size_t first) {
  auto* in = static_cast<const typename E::Storage*>(data);
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    auto expected = E::encode(O::template result<E>(number_at(seed, first + i), world));
    wrong += std::memcmp(&in[i], &expected, sizeof expected) != 0;
  }
  return wrong;
}

template <typename E, typename O>
uint64_t count_not_of_as(uint64_t seed, int rank, int world, const void* data, size_t count) {
  auto* in = static_cast<const typename E::Storage*>(data);
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    auto expected = E::encode(O::template contribution<E>(number_at(seed, i), rank, world));
    wrong += std::memcmp(&in[i], &expected, sizeof expected) != 0;
  }
  return wrong;
}

template <typename E, typename F>
auto with_operator(mr_op op, F f) {
  switch (op) {
    case MR_PROD:
      return f.template operator()<E, Prod>();
    case MR_MIN:
      return f.template operator()<E, Extreme<false>>();
    case MR_MAX:
      return f.template operator()<E, Extreme<true>>();
    case MR_AVG:
      return f.template operator()<E, Average>();
    case MR_BAND:
      return f.template operator()<E, Bitwise<And>>();
    case MR_BOR:
      return f.template operator()<E, Bitwise<Or>>();
    case MR_BXOR:
      return f.template operator()<E, Bitwise<Xor>>();
    case MR_LAND:
      return f.template operator()<E, Logical<true>>();
    case MR_LOR:
      return f.template operator()<E, Logical<false>>();
    default:
      return f.template operator()<E, Sum>();
  }
}

template <typename F>
auto dispatch(mr_type type, mr_op op, F f) {
  switch (type) {
    case MR_U8:
      return with_operator<Plain<uint8_t, 6, 0>>(op, f);
    case MR_I8:
      return with_operator<Plain<int8_t, 6, 0>>(op, f);
    case MR_I32:
      return with_operator<Plain<int32_t, 20, 16>>(op, f);
    case MR_U32:
      return with_operator<Plain<uint32_t, 20, 16>>(op, f);
    case MR_I64:
      return with_operator<Plain<int64_t, 40, 40>>(op, f);
    case MR_U64:
      return with_operator<Plain<uint64_t, 40, 40>>(op, f);
    case MR_F16:
      return with_operator<Half>(op, f);
    case MR_BF16:
      return with_operator<Bfloat>(op, f);
    case MR_F64:
      return with_operator<Plain<double, 40, 40>>(op, f);
    default:
      return with_operator<Plain<float, 20, 16>>(op, f);
  }
}

}  // namespace

void fill(mr_type type, mr_op op, uint64_t seed, int rank, int world, void* data, size_t count) {
  dispatch(type, op, [&]<typename E, typename O>() { fill_as<E, O>(mix(seed), rank, world, data, count); });
}

uint64_t count_wrong(mr_type type, mr_op op, uint64_t seed, int world, const void* data, size_t count,
                     size_t first) {
  return dispatch(type, op, [&]<typename E, typename O>() {
    return count_wrong_as<E, O>(mix(seed), world, data, count, first);
  });
}

uint64_t count_not_of(mr_type type, mr_op op, uint64_t seed, int rank, int world, const void* data,
                      size_t count) {
  return dispatch(type, op, [&]<typename E, typename O>() {
    return count_not_of_as<E, O>(mix(seed), rank, world, data, count);
  });
}

bool has_values(mr_type type, mr_op op) {
  const bool floating = type == MR_F16 || type == MR_BF16 || type == MR_F32 || type == MR_F64;
  const bool of_bits = op == MR_BAND || op == MR_BOR || op == MR_BXOR || op == MR_LAND || op == MR_LOR;
  return type >= MR_U8 && type <= MR_F64 && !(floating && of_bits);
}

void poison(void* data, size_t bytes) {
  // 0xA5 in every byte is no whole number as a float, and as an integer it is outside of what comes out, but
  // for the types of one byte.
  std::memset(data, 0xA5, bytes);
}

uint64_t count_not_poison(const void* data, size_t bytes) {
  auto* in = static_cast<const uint8_t*>(data);
  uint64_t other = 0;
  for (size_t i = 0; i < bytes; i++) other += in[i] != 0xA5;
  return other;
}

size_t element_bytes(mr_type type) {
  return dispatch(type, MR_SUM, []<typename E, typename O>() { return sizeof(typename E::Storage); });
}

}  // namespace millrace::perf
