// The invariant CRC of RoCEv2 (IBA annex A17.3.3): CRC-32 over eight bytes of ones, then the packet from its
// IP header to the end of the pad, with the fields that routers may change read as ones. Pure functions.
#pragma once

#include <cstdint>
#include <span>

namespace millrace::roce {

// CRC-32 (Ethernet polynomial, reflected), continuing from `crc`; zlib's crc32 convention, start with 0.
uint32_t crc32(uint32_t crc, std::span<const uint8_t> bytes) noexcept;

// CRC of the concatenation of A (crc_a) and B (crc_b, length_b bytes).
class Crc32Combine {
 public:
  // Combines for a B of exactly `length_b` bytes; the operator is kept for the last lengths used, so a stream
  // of equal payloads costs one multiplication each (zlib's crc32_combine_op).
  uint32_t operator()(uint32_t crc_a, uint32_t crc_b, uint32_t length_b) noexcept;

 private:
  struct Entry {
    uint32_t length = UINT32_MAX;
    uint32_t op = 0;
  };
  Entry entries_[64];
};

// CRC of the masked headers: `ip` runs from the first byte of the IP header to the end of the extended
// transport headers. Precondition: ip holds a whole IPv4 (20 bytes) or IPv6 header, UDP and BTH.
uint32_t icrc_headers(std::span<const uint8_t> ip) noexcept;

// The ICRC of a packet that lies in one piece: `ip` from the IP header to the end of the pad bytes.
inline uint32_t icrc(std::span<const uint8_t> ip, uint32_t header_bytes) noexcept {
  return crc32(icrc_headers(ip.first(header_bytes)), ip.subspan(header_bytes));
}

// On the wire the ICRC is little-endian (the bit-reflected register, least significant byte first).
inline void store_icrc(uint8_t* at, uint32_t v) noexcept {
  for (int i = 0; i < 4; i++) at[i] = static_cast<uint8_t>(v >> (8 * i));
}
inline uint32_t load_icrc(const uint8_t* at) noexcept {
  return at[0] | at[1] << 8 | at[2] << 16 | static_cast<uint32_t>(at[3]) << 24;
}

}  // namespace millrace::roce
