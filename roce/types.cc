#include "roce/types.h"

#include <arpa/inet.h>

#include <cstdio>

namespace millrace {

std::string MacAddress::to_string() const {
  char s[18];
  std::snprintf(s, sizeof(s), "%02x:%02x:%02x:%02x:%02x:%02x", bytes[0], bytes[1], bytes[2], bytes[3],
                bytes[4], bytes[5]);
  return s;
}

std::optional<MacAddress> MacAddress::parse(std::string_view text) {
  if (text.size() != 17) return std::nullopt;
  MacAddress mac;
  for (size_t i = 0; i < 6; i++) {
    auto digit = [&](size_t at) -> int {
      const char c = text[at];
      if (c >= '0' && c <= '9') return c - '0';
      if (c >= 'a' && c <= 'f') return c - 'a' + 10;
      if (c >= 'A' && c <= 'F') return c - 'A' + 10;
      return -1;
    };
    const int hi = digit(3 * i), lo = digit(3 * i + 1);
    if (hi < 0 || lo < 0 || (i < 5 && text[3 * i + 2] != ':')) return std::nullopt;
    mac.bytes[i] = static_cast<uint8_t>(hi << 4 | lo);
  }
  return mac;
}

std::optional<IpAddress> IpAddress::parse(std::string_view text) {
  const std::string s(text);
  uint8_t b[16];
  if (inet_pton(AF_INET, s.c_str(), b) == 1) return from_v4(b);
  if (inet_pton(AF_INET6, s.c_str(), b) == 1) return from_v6(b);
  return std::nullopt;
}

std::string IpAddress::to_string() const {
  char s[INET6_ADDRSTRLEN];
  if (is_v4()) return inet_ntop(AF_INET, v4(), s, sizeof(s));
  return inet_ntop(AF_INET6, bytes.data(), s, sizeof(s));
}

}  // namespace millrace
