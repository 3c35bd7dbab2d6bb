// A hash of an address and a number, seeded, so that nobody can choose addresses that collide: halves of
// 128-bit products, folded. Header-only, hot.
#pragma once

#include "roce/types.h"

namespace millrace::buffering {

__extension__ using Product = unsigned __int128;

inline uint64_t address_hash(const IpAddress& a, uint64_t with, uint64_t seed) noexcept {
  uint64_t high, low;
  std::memcpy(&high, a.bytes.data(), 8);
  std::memcpy(&low, a.bytes.data() + 8, 8);
  const auto product =
      static_cast<Product>(low ^ seed) * ((high + with) * 0x9E3779B97F4A7C15ull ^ 0xBF58476D1CE4E5B9ull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace millrace::buffering
