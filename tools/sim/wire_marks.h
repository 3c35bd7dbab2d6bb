// Marks a frame "congestion experienced", as a congested switch does.
#pragma once

#include <cstdint>
#include <span>

namespace millrace::sim {

// Sets both ECN bits of an IPv4 or IPv6 frame without a VLAN tag, and mends IPv4's checksum; neither field is
// under the ICRC. False: not IP.
inline bool mark_congestion(std::span<uint8_t> f) {
  if (f.size() < 34) return false;
  if (f[12] == 0x08 && f[13] == 0x00) {
    const auto word = static_cast<uint16_t>(f[14] << 8 | f[15]);
    f[15] |= 3;
    const auto now = static_cast<uint16_t>(f[14] << 8 | f[15]);
    // RFC 1624, equation 3.
    uint32_t sum = static_cast<uint16_t>(~static_cast<uint16_t>(f[24] << 8 | f[25]));
    sum += static_cast<uint16_t>(~word);
    sum += now;
    while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
    sum = ~sum & 0xFFFF;
    f[24] = static_cast<uint8_t>(sum >> 8), f[25] = static_cast<uint8_t>(sum);
    return true;
  }
  if (f[12] == 0x86 && f[13] == 0xDD) {
    f[15] |= 0x30;
    return true;
  }
  return false;
}

}  // namespace millrace::sim
