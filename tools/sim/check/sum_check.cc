#include "tools/sim/check/sum_check.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstring>

namespace millrace::sim::check {

namespace {

enum { kU8 = 1, kI8, kI32, kU32, kI64, kU64, kF16, kBf16, kF32, kF64, kF8E4M3, kF8E5M2 };
enum { kSum = 1, kProd, kMin, kMax, kBand, kBor, kBxor, kAvg };

// Whole numbers up to 2^bits are exact in the type.
unsigned exact_bits(int type) {
  static constexpr unsigned bits[] = {0, 8, 7, 31, 32, 63, 64, 11, 8, 24, 53, 4, 3};
  return bits[type];
}
// In a block of block floating point whole numbers up to 126 are exact, whatever else is in it.
unsigned exact_bits(const Reduction& r) { return r.bfp ? 6 : exact_bits(r.type); }
bool is_float(int type) { return type >= kF16; }
bool is_f8(int type) { return type == kF8E4M3 || type == kF8E5M2; }
bool adds_up(const Reduction& r) { return r.op == kSum || r.op == kAvg; }

uint64_t mix(uint64_t x) {
  x = (x ^ x >> 32) * 0xD6E8FEB86659FD93ull;
  x = (x ^ x >> 29) * 0xD6E8FEB86659FD93ull;
  return x ^ x >> 32;
}
uint64_t word_of(const Reduction& r, uint32_t rank, uint64_t block) {
  return mix(r.seed + (rank + 1) * 0x9E3779B97F4A7C15ull + block * 0xC2B2AE3D27D4EB4Full);
}

// What a rank contributes: one value where an element is its own to show, else one of 256 by a byte of
// chance.
struct Values {
  std::array<int64_t, 256> own, other;  // by the byte
  bool census =
      false;  // a sum's or an average's: own in every second element; else where i % world is the rank

  Values(const Reduction& r, uint32_t rank) {
    census = r.world <= exact_bits(r) || !is_float(r.type);
    for (int64_t byte = 0; byte < 256; byte++) {
      own[static_cast<size_t>(byte)] = own_value(r, rank, byte);
      other[static_cast<size_t>(byte)] = random_value(r, rank, byte);
    }
  }
  int64_t at(const Reduction& r, uint32_t rank, uint64_t i, uint64_t word) const {
    return (is_own(r, rank, i) ? own : other)[word >> 8 * (i % 8) & 0xFF];
  }
  bool is_own(const Reduction& r, uint32_t rank, uint64_t i) const {
    return adds_up(r) ? census && i % 2 == 0 : i % r.world == rank;
  }

 private:
  // The byte in each of eight.
  static int64_t bits(int64_t byte) {
    return static_cast<int64_t>(static_cast<uint64_t>(byte) * 0x0101010101010101ull);
  }
  static int64_t shift(const Reduction& r) { return is_float(r.type) ? 7 : 0; }
  static int64_t own_value(const Reduction& r, uint32_t rank, int64_t byte) {
    if (adds_up(r)) {
      const unsigned bits = exact_bits(r);
      return int64_t{1} << rank % (bits < 62 ? bits : 62);
    }
    // A factor above 1 and the extreme are one rank's alone: that it is missing shows.
    if (r.op == kProd) return is_float(r.type) ? int64_t{3} : int64_t{3} + 2 * (rank % 8);
    // Bits that only this rank clears, or sets; others' bits in between.
    if (r.op == kBand) return bits(byte & 0x7E);
    if (r.op == kBor) return bits(byte | 0x81);
    if (r.op == kBxor) return bits(byte | 1);
    if (is_f8(r.type)) return r.op == kMin ? -1 - byte % 8 : 16 * (1 + byte % 4);
    return (r.op == kMin ? 1 + byte % 16 : 100 + byte % 16) - shift(r);
  }
  static int64_t random_value(const Reduction& r, uint32_t rank, int64_t byte) {
    if (adds_up(r)) {
      // The block of a result may not have more than 126 in it.
      if (r.bfp) return (byte & 1 ? -1 : 1) * (1 + byte % std::max<int64_t>(1, 126 / r.world));
      if (is_f8(r.type)) return (byte & 1 ? -1 : 1) * (1 + byte % (r.world > 48 ? 2 : 8));
      if (r.world > 16 && (r.type == kF16 || r.type == kBf16)) return 1 + byte % 2;
      // Never 0, exact in the type, and for 16-bit floats with sums that need rounding.
      const int64_t magnitude = 1 + byte * (r.type == kF16 ? 8 : element_bytes(r.type) <= 2 ? 1 : 37);
      return byte & 1 && r.type != kU8 ? -magnitude : magnitude;
    }
    // Odd factors above 1 show that one is missing even where the product wraps.
    if (r.op == kProd)
      return !is_float(r.type) ? int64_t{3} + 2 * (rank % 8) : byte & 1 ? int64_t{-1} : int64_t{1};
    if (r.op == kBand) return bits(byte | 0x81);
    if (r.op == kBor) return bits(byte & 0x7E);
    if (r.op == kBxor) return bits(byte | 1);  // never 0
    return is_f8(r.type) ? 1 + byte % 8 : 20 + byte % 64 - shift(r);
  }
};

// v × 2^scale as a float of `significand` bits (the hidden one included) and `exponent` bits, rounded to
// nearest, ties to even. `finite`: without infinities, whose codes but for the last are numbers.
uint64_t encode_float(int64_t v, int scale, unsigned significand, unsigned exponent, bool finite = false) {
  if (v == 0) return 0;
  const uint64_t sign = v < 0;
  uint64_t m = sign ? ~static_cast<uint64_t>(v) + 1 : static_cast<uint64_t>(v);
  const auto top = static_cast<unsigned>(63 - std::countl_zero(m));
  int64_t e = static_cast<int64_t>(top) + scale;
  if (top >= significand) {
    const unsigned drop = top + 1 - significand;
    const uint64_t rest = m & ((uint64_t{1} << drop) - 1), half = uint64_t{1} << (drop - 1);
    m >>= drop;
    if (rest > half || (rest == half && (m & 1))) m++;
    if (m >> significand) m >>= 1, e++;
  } else {
    m <<= significand - 1 - top;
  }
  const int64_t bias = (int64_t{1} << (exponent - 1)) - 1, most = (int64_t{1} << exponent) - 1;
  const uint64_t fraction = m & ((uint64_t{1} << (significand - 1)) - 1);
  assert(e + bias > 0);  // no sum, divided by a number of ranks that there can be, is subnormal
  if (finite && (e + bias > most || (e + bias == most && fraction == (1u << (significand - 1)) - 1)))
    return (uint64_t{1} << (exponent + significand - 1)) - 1;  // its only NaN
  if (!finite && e + bias >= most)
    return (sign << exponent | static_cast<uint64_t>(most)) << (significand - 1);
  return (sign << exponent | static_cast<uint64_t>(e + bias)) << (significand - 1) | fraction;
}

uint64_t encode_float(int type, int64_t v, int scale) {
  switch (type) {
    case kF16:
      return encode_float(v, scale, 11, 5);
    case kBf16:
      return encode_float(v, scale, 8, 8);
    case kF8E4M3:
      return encode_float(v, scale, 4, 4, true);
    default:
      return encode_float(v, scale, 3, 5);
  }
}

uint64_t encode(int type, int64_t v) {
  switch (type) {
    case kF16:
    case kBf16:
    case kF8E4M3:
    case kF8E5M2:
      return encode_float(type, v, 0);
    case kF32:
      return std::bit_cast<uint32_t>(static_cast<float>(v));
    case kF64:
      return std::bit_cast<uint64_t>(static_cast<double>(v));
    default:
      return static_cast<uint64_t>(v);
  }
}

void put(int type, uint8_t* at, int64_t v) {
  const uint64_t bits = encode(type, v);
  std::memcpy(at, &bits, element_bytes(type));  // little-endian, as on the wire
}

// Integers narrower than 64 bits wrap; what is compared is what is left.
int64_t wrapped(int type, int64_t v) {
  switch (type) {
    case kU8:
      return static_cast<uint8_t>(v);
    case kI8:
      return static_cast<int8_t>(v);
    case kI32:
      return static_cast<int32_t>(v);
    case kU32:
      return static_cast<uint32_t>(v);
    default:
      return v;
  }
}

// Bits of what a sum comes to once it is divided by the number of ranks.
uint64_t average(const Reduction& r, int64_t sum) {
  const int64_t whole = wrapped(r.type, sum), n = r.world;
  switch (r.type) {
    case kU64:
      return static_cast<uint64_t>(sum) / r.world;
    case kF64:
      return std::bit_cast<uint64_t>(static_cast<double>(sum) / r.world);
    case kF32:
      return std::bit_cast<uint32_t>(static_cast<float>(sum) / static_cast<float>(n));
    case kF16:
    case kBf16:
    case kF8E4M3:
    case kF8E5M2: {
      // Divided in f32, then rounded to the type.
      int exponent;
      const float f = std::frexp(static_cast<float>(sum) / static_cast<float>(n), &exponent);
      return encode_float(r.type, static_cast<int64_t>(std::ldexp(f, 24)), exponent - 24);
    }
    default:
      return static_cast<uint64_t>(whole / n);
  }
}

// Writes what `all` ranks' contributions to an element, combined, come to.
void put_result(const Reduction& r, uint8_t* at, int64_t all) {
  if (r.op != kAvg) return put(r.type, at, all);
  const uint64_t bits = average(r, all);
  std::memcpy(at, &bits, element_bytes(r.type));
}

// A block of a result in block floating point: it has one exponent for all of its elements, the least with
// which the greatest of them rounds to less than 127 units (aggregation/NUMERICS.md).
constexpr uint64_t kBlock = 63;
void put_block(const Reduction& r, uint8_t* at, std::span<const int64_t> all) {
  std::array<float, kBlock> f;
  float most = 0;
  for (size_t i = 0; i < all.size(); i++) {
    f[i] = static_cast<float>(all[i]) / (r.op == kAvg ? static_cast<float>(r.world) : 1.0f);
    most = std::max(most, std::abs(f[i]));
  }
  int scale = -125;
  while (static_cast<double>(most) >= std::ldexp(126.5, scale)) scale++;
  for (size_t i = 0; i < all.size(); i++) {
    const auto units = static_cast<int64_t>(std::nearbyint(std::ldexp(static_cast<double>(f[i]), -scale)));
    const uint64_t bits = r.type == kF32
                              ? std::bit_cast<uint32_t>(std::ldexp(static_cast<float>(units), scale))
                              : encode_float(r.type, units, scale);
    std::memcpy(at + i * element_bytes(r.type), &bits, element_bytes(r.type));
  }
}

int64_t combine(const Reduction& r, int64_t a, int64_t b) {
  switch (r.op) {
    case kSum:
    case kAvg:
      return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    case kProd:
      return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    case kBand:
      return a & b;
    case kBor:
      return a | b;
    case kBxor:
      return a ^ b;
    case kMin:
      return wrapped(r.type, a) < wrapped(r.type, b) ? a : b;
    default:
      return wrapped(r.type, a) > wrapped(r.type, b) ? a : b;
  }
}

}  // namespace

uint32_t element_bytes(int type) {
  static constexpr uint32_t bytes[] = {0, 1, 1, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};
  return bytes[type];
}

std::string_view collective_name(int collective) {
  static constexpr std::string_view names[] = {"nothing",        "all-reduce", "reduce", "broadcast",
                                               "reduce-scatter", "all-gather", "barrier"};
  return names[collective];
}

uint64_t vector_bytes(const Reduction& r) {
  return r.collective == kBarrier ? 0 : r.count * element_bytes(r.type);
}
uint64_t contribution_bytes(const Reduction& r, uint32_t rank) {
  if (r.collective == kBroadcast && rank != r.root) return 0;
  return r.collective == kAllGather ? vector_bytes(r) / r.world : vector_bytes(r);
}
uint64_t result_bytes(const Reduction& r, uint32_t rank) {
  if (r.collective == kReduce && rank != r.root) return 0;
  return r.collective == kReduceScatter ? vector_bytes(r) / r.world : vector_bytes(r);
}

namespace {

template <uint32_t kSize>
void fill(const Reduction& r, uint32_t rank, uint8_t* out) {
  const Values values(r, rank);
  std::array<uint64_t, 256> own, other;
  for (size_t i = 0; i < 256; i++) {
    own[i] = encode(r.type, values.own[i]);
    other[i] = encode(r.type, values.other[i]);
  }
  for (uint64_t i = 0; i < r.count;) {
    uint64_t word = word_of(r, rank, i / 8);
    for (const uint64_t end = i + 8; i < end && i < r.count; i++, word >>= 8) {
      const uint64_t bits = (values.is_own(r, rank, i) ? own : other)[word & 0xFF];
      std::memcpy(out + i * kSize, &bits, kSize);  // little-endian, as on the wire
    }
  }
}

}  // namespace

void fill_contribution(const Reduction& r, uint32_t rank, uint8_t* out) {
  if (!r.reduces()) {
    const uint64_t bytes = contribution_bytes(r, rank);
    for (uint64_t i = 0; i < bytes; i += 8) {
      const uint64_t word = word_of(r, rank, i / 8);
      std::memcpy(out + i, &word, bytes - i < 8 ? bytes - i : 8);
    }
    return;
  }
  switch (element_bytes(r.type)) {
    case 1:
      return fill<1>(r, rank, out);
    case 2:
      return fill<2>(r, rank, out);
    case 4:
      return fill<4>(r, rank, out);
    default:
      return fill<8>(r, rank, out);
  }
}

std::vector<uint8_t> expected_result(const Reduction& r) {
  const uint32_t size = element_bytes(r.type);
  if (!r.reduces()) {
    std::vector<uint8_t> out(vector_bytes(r));
    for (uint32_t rank = 0; rank < r.world; rank++)
      if (const uint64_t part = contribution_bytes(r, rank))
        fill_contribution(r, rank, out.data() + (r.collective == kAllGather ? rank * part : 0));
    return out;
  }
  std::vector<int64_t> all(r.count);
  for (uint32_t rank = 0; rank < r.world; rank++) {
    const Values values(r, rank);
    for (uint64_t i = 0; i < r.count;) {
      const uint64_t word = word_of(r, rank, i / 8);
      for (const uint64_t end = i + 8; i < end && i < r.count; i++) {
        const int64_t v = values.at(r, rank, i, word);
        all[i] = rank == 0 ? v : combine(r, all[i], v);
      }
    }
  }
  std::vector<uint8_t> out(r.count * size);
  if (r.bfp) {
    // Blocks begin with the vector, or with each shard.
    const uint64_t unit = r.has_shards() ? r.count / r.world : r.count;
    for (uint64_t i = 0; i < r.count;) {
      const uint64_t n = std::min(kBlock, unit - i % unit);
      put_block(r, out.data() + i * size, {all.data() + i, n});
      i += n;
    }
    return out;
  }
  for (uint64_t i = 0; i < r.count; i++) put_result(r, out.data() + i * size, all[i]);
  return out;
}

namespace {

// Whose part, were it left out or counted twice, would explain element `i` of a sum?
std::string explain_sum(const Reduction& r, uint64_t i, const uint8_t* got) {
  std::string text;
  auto part = [&](uint32_t k) { return Values(r, k).at(r, k, i, word_of(r, k, i / 8)); };
  int64_t sum = 0;
  for (uint32_t k = 0; k < r.world; k++) sum = combine(r, sum, part(k));
  for (uint32_t k = 0; k < r.world; k++) {
    const int64_t v = part(k);
    for (const int times : {0, 2}) {
      uint8_t guess[8];
      put_result(r, guess, sum + (times - 1) * v);
      if (std::memcmp(guess, got, element_bytes(r.type)) == 0)
        text += times == 0 ? "; rank " + std::to_string(k) + " is missing in it"
                           : "; rank " + std::to_string(k) + " is counted twice in it";
    }
  }
  return text;
}

// From which place of the vector `got` is, if so much of it is that chance has no part in it.
std::string explain_place(std::span<const uint8_t> whole, std::span<const uint8_t> got, uint32_t size) {
  const uint64_t bytes = std::min<uint64_t>(got.size(), 16);
  if (bytes < 8) return {};
  for (uint64_t i = 0; i + bytes <= whole.size(); i += size)
    if (std::memcmp(whole.data() + i, got.data(), bytes) == 0)
      return "; it is what belongs at " + std::to_string(i / size) + " of the vector";
  return {};
}

}  // namespace

std::string explain_difference(const Reduction& r, uint32_t rank, std::span<const uint8_t> whole,
                               std::span<const uint8_t> got) {
  if (got.size() != result_bytes(r, rank) || whole.size() != vector_bytes(r))
    return "the result has another size";
  const uint64_t begin = r.collective == kReduceScatter ? rank * got.size() : 0;
  const std::span<const uint8_t> expected = whole.subspan(begin, got.size());
  if (got.empty() || std::memcmp(expected.data(), got.data(), got.size()) == 0) return {};
  const uint32_t size = element_bytes(r.type);
  const uint64_t count = got.size() / size;
  uint64_t wrong = 0, first = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (std::memcmp(expected.data() + i * size, got.data() + i * size, size) == 0) continue;
    if (wrong++ == 0) first = i;
  }
  auto shown = [&](std::span<const uint8_t> bytes) {
    uint64_t v = 0;
    std::memcpy(&v, bytes.data() + first * size, size);
    return std::to_string(v);
  };
  std::string text = std::string(collective_name(r.collective)) + ", type " + std::to_string(r.type) +
                     ", operator " + std::to_string(r.op) +
                     (r.has_root() ? ", root " + std::to_string(r.root) : "") + ": " + std::to_string(wrong) +
                     " of " + std::to_string(count) + " elements are wrong, the first is number " +
                     std::to_string(first) + " (bits " + shown(got) + " for " + shown(expected) + ")";
  if (r.reduces() && adds_up(r)) text += explain_sum(r, begin / size + first, got.data() + first * size);
  return text + explain_place(whole, got.subspan(first * size), size);
}

}  // namespace millrace::sim::check
