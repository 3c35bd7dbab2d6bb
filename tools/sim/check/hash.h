// A fast 64-bit hash of bytes and numbers in order, the same on every little-endian machine and compiler. For
// traces and snapshots; not secret.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>

namespace millrace::sim::check {

class Hash {
 public:
  void number(uint64_t v) {
    state_ = (state_ ^ v) * 0x9E3779B97F4A7C15ull;
    state_ ^= state_ >> 32;
  }
  void bytes(std::span<const uint8_t> b) {
    number(b.size());
    const uint8_t* p = b.data();
    size_t n = b.size();
    // Two lanes, so that the multiplications overlap.
    uint64_t a = state_, c = ~state_;
    for (; n >= 16; n -= 16, p += 16) {
      uint64_t x, y;
      std::memcpy(&x, p, 8);
      std::memcpy(&y, p + 8, 8);
      a = (a ^ x) * 0x9E3779B97F4A7C15ull;
      c = (c ^ y) * 0xC2B2AE3D27D4EB4Full;
      a ^= a >> 29, c ^= c >> 31;
    }
    state_ = a ^ c << 1;
    for (; n > 0; n--, p++) state_ = (state_ ^ *p) * 0x100000001B3ull;
    state_ ^= state_ >> 32;
  }
  uint64_t value() const { return state_; }

 private:
  uint64_t state_ = 0x243F6A8885A308D3ull;
};

inline uint64_t hash_of(std::span<const uint8_t> b) {
  Hash h;
  h.bytes(b);
  return h.value();
}

}  // namespace millrace::sim::check
