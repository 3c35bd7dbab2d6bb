#include "roce/icrc.h"

#include <isa-l/crc.h>
#include <zlib.h>

#include <cassert>
#include <cstring>

#include "roce/headers.h"

namespace millrace::roce {

uint32_t crc32(uint32_t crc, std::span<const uint8_t> bytes) noexcept {
  return crc32_gzip_refl(crc, bytes.data(), bytes.size());
}

uint32_t Crc32Combine::operator()(uint32_t crc_a, uint32_t crc_b, uint32_t length_b) noexcept {
  Entry& e = entries_[(length_b ^ length_b >> 6) % 64];
  if (e.length != length_b) {
    e.length = length_b;
    e.op = static_cast<uint32_t>(crc32_combine_gen(static_cast<z_off_t>(length_b)));
  }
  return static_cast<uint32_t>(crc32_combine_op(crc_a, crc_b, e.op));
}

uint32_t icrc_headers(std::span<const uint8_t> ip) noexcept {
  // The longest case: 8 of ones, IPv6, UDP, BTH, DETH or RETH, and immediate.
  uint8_t copy[8 + sizeof(Ipv6Header) + sizeof(UdpHeader) + sizeof(Bth) + 32];
  assert(ip.size() >= sizeof(Ipv4Header) + sizeof(UdpHeader) + sizeof(Bth) && ip.size() + 8 <= sizeof(copy));
  std::memset(copy, 0xFF, 8);
  std::memcpy(copy + 8, ip.data(), ip.size());
  uint8_t* p = copy + 8;
  if (p[0] >> 4 == 4) {
    p[1] = 0xFF;           // TOS
    p[8] = 0xFF;           // TTL
    p[10] = p[11] = 0xFF;  // header checksum
    p += sizeof(Ipv4Header);
  } else {
    p[0] |= 0x0F;  // traffic class and flow label
    p[1] = p[2] = p[3] = 0xFF;
    p[7] = 0xFF;  // hop limit
    p += sizeof(Ipv6Header);
  }
  p[6] = p[7] = 0xFF;               // UDP checksum
  p[sizeof(UdpHeader) + 4] = 0xFF;  // FECN, BECN, reserved
  return crc32(0, {copy, ip.size() + 8});
}

}  // namespace millrace::roce
