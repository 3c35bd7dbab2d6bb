// Of targets in which several speak to each other: who is where, what is on its way, and what the input does
// to it.
#pragma once

#include "roce/types.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {

inline IpAddress address_of(size_t who, bool v6) {
  const uint8_t four[4] = {10, 0, 0, static_cast<uint8_t>(who + 1)};
  uint8_t sixteen[16] = {0xFD};
  sixteen[15] = static_cast<uint8_t>(who + 1);
  return v6 ? IpAddress::from_v6(sixteen) : IpAddress::from_v4(four);
}

struct Flight {
  size_t to;
  Bytes bytes;
};

// The n-th comes off the wire.
inline Flight take(std::vector<Flight>& wire, size_t n) {
  Flight f = std::move(wire[n]);
  wire.erase(wire.begin() + static_cast<ptrdiff_t>(n));
  return f;
}

// Some bytes behind the UDP header are others, perhaps the end is missing; lengths and checksums are right.
inline void mutate(Bytes& bytes, bool v6, Input& in) {
  const size_t transport = v6 ? 14 + 40 + 8 : 14 + 20 + 8;
  for (size_t n = 1 + in.below(4); n > 0; n--)
    bytes[transport + in.u16() % (bytes.size() - transport)] ^= in.byte();
  if (in.byte() & 1) {
    const size_t cut = in.byte() % (bytes.size() - transport);
    bytes.erase(bytes.end() - static_cast<ptrdiff_t>(cut), bytes.end());
  }
  repair(bytes);
}

}  // namespace millrace::fuzz
