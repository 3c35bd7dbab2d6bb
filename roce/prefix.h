// Whether an address lies in a prefix: one comparison for the routes and for whoever selects traffic by its
// source. Header-only, no state, hot.
#pragma once

#include "roce/types.h"

namespace millrace {

// `bits` are of the 128: 96 and those of an IPv4 prefix. No IPv6 prefix has IPv4 addresses in it, though they
// are kept as ::ffff:0:0/96: ::/0 is all of IPv6 and nothing else.
inline bool in_prefix(const IpAddress& address, const IpAddress& prefix, unsigned bits) {
  if (address.is_v4() != prefix.is_v4()) return false;
  const unsigned whole = bits / 8, rest = bits % 8;
  if (std::memcmp(address.bytes.data(), prefix.bytes.data(), whole) != 0) return false;
  return rest == 0 || ((address.bytes[whole] ^ prefix.bytes[whole]) & (0xFF00u >> rest) & 0xFF) == 0;
}

}  // namespace millrace
