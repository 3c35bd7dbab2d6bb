// The plain values of the RoCEv2 wire: big-endian integers, addresses, queue pair numbers, sequence numbers.
// Header-only, no state, called from any thread; never allocates.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <compare>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace millrace {

// Points in time and durations alike: nanoseconds since an arbitrary start of the caller's choosing. The pure
// rooms never read a clock; time is always handed to them.
using Time = std::chrono::nanoseconds;
inline constexpr Time kNever = Time::max();

// An unsigned integer of N bytes as it stands on the wire. Byte storage, so structs of these have alignment 1
// and no padding.
template <typename T, size_t N = sizeof(T)>
class BigEndian {
 public:
  constexpr BigEndian() = default;
  constexpr BigEndian(T value) {
    set(value);
  }  // NOLINT: implicit on purpose, a header reads like an assignment
  constexpr T value() const {
    T v = 0;
    for (size_t i = 0; i < N; i++) v = static_cast<T>((static_cast<uint64_t>(v) << 8) | bytes_[i]);
    return v;
  }
  constexpr void set(T value) {
    for (size_t i = 0; i < N; i++)
      bytes_[i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * (N - 1 - i)));
  }
  friend constexpr bool operator==(const BigEndian&, const BigEndian&) = default;

 private:
  uint8_t bytes_[N] = {};
};
using Be16 = BigEndian<uint16_t>;
using Be24 = BigEndian<uint32_t, 3>;
using Be32 = BigEndian<uint32_t>;
using Be64 = BigEndian<uint64_t>;

// A packet sequence number: 24 bits, compared signed modulo 2^24 (IBA vol. 1, 9.7.2).
class Psn {
 public:
  constexpr Psn() = default;
  constexpr explicit Psn(uint32_t v) : v_(v & 0xFFFFFF) {}
  constexpr uint32_t value() const { return v_; }
  constexpr Psn operator+(uint32_t n) const { return Psn(v_ + n); }
  constexpr Psn operator-(uint32_t n) const { return Psn(v_ - n); }
  constexpr Psn& operator++() { return *this = *this + 1; }
  // Signed distance this − other, in −2^23 … 2^23 − 1.
  constexpr int32_t distance(Psn other) const { return static_cast<int32_t>((v_ - other.v_) << 8) >> 8; }
  friend constexpr bool operator==(Psn, Psn) = default;

 private:
  uint32_t v_ = 0;
};

// A queue pair number, 24 bits.
struct Qpn {
  uint32_t value = 0;
  friend constexpr auto operator<=>(Qpn, Qpn) = default;
};
inline constexpr Qpn kGsiQpn{1};

struct MacAddress {
  std::array<uint8_t, 6> bytes{};
  bool is_multicast() const { return bytes[0] & 1; }
  std::string to_string() const;
  static std::optional<MacAddress> parse(std::string_view text);
  friend auto operator<=>(const MacAddress&, const MacAddress&) = default;
};
inline constexpr MacAddress kBroadcastMac{{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}};

// An IPv4 or IPv6 address; IPv4 is kept as ::ffff:a.b.c.d, which is also its RoCE v2 GID (IBA annex A17.4.1).
struct IpAddress {
  std::array<uint8_t, 16> bytes{};
  bool is_v4() const {
    static constexpr uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    return std::memcmp(bytes.data(), prefix, 12) == 0;
  }
  bool is_multicast() const { return is_v4() ? (bytes[12] & 0xf0) == 0xe0 : bytes[0] == 0xff; }
  bool is_zero() const { return *this == IpAddress{}; }
  const uint8_t* v4() const { return bytes.data() + 12; }
  static IpAddress from_v4(const uint8_t* four) {
    IpAddress a;
    a.bytes[10] = a.bytes[11] = 0xff;
    std::memcpy(a.bytes.data() + 12, four, 4);
    return a;
  }
  static IpAddress from_v6(const uint8_t* sixteen) {
    IpAddress a;
    std::memcpy(a.bytes.data(), sixteen, 16);
    return a;
  }
  // "10.0.0.1" or "fd00::1"; std::nullopt for anything else.
  static std::optional<IpAddress> parse(std::string_view text);
  std::string to_string() const;
  friend auto operator<=>(const IpAddress&, const IpAddress&) = default;
};
struct IpAddressHash {
  size_t operator()(const IpAddress& a) const {
    uint64_t hi, lo;
    std::memcpy(&hi, a.bytes.data(), 8);
    std::memcpy(&lo, a.bytes.data() + 8, 8);
    return std::hash<uint64_t>{}(hi * 0x9E3779B97F4A7C15ull ^ lo);
  }
};

}  // namespace millrace
