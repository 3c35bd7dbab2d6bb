// The simulator's own random numbers: the same sequence of draws with every compiler and library. Small and
// fast; nothing secret comes of it.
#pragma once

#include <cstdint>

namespace millrace::sim {

// splitmix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  // Seeds that differ a little give sequences that differ wholly.
  explicit Random(uint64_t seed) : state_(seed) { state_ = next() ^ seed << 32; }
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  // 0 … n − 1; n > 0.
  uint64_t below(uint64_t n) { return next() % n; }
  // Both ends included.
  uint64_t between(uint64_t from, uint64_t to) { return from + below(to - from + 1); }
  bool one_in(uint64_t n) { return below(n) == 0; }
  // With a probability in millionths. Draws nothing for 0, so that a fault that is off changes no other's
  // fate.
  bool ppm(uint32_t p) { return p != 0 && below(1000000) < p; }
  // A generator of its own, so that what one part draws does not move what another gets.
  Random fork() { return Random(next()); }

 private:
  uint64_t state_;
};

}  // namespace millrace::sim
