// What is counted in packets and bytes.
#pragma once

#include <cstdint>

namespace millrace::buffering {

struct Amount {
  uint64_t packets = 0, bytes = 0;
  void add(uint64_t n) {
    packets++;
    bytes += n;
  }
  void remove(uint64_t n) {
    packets--;
    bytes -= n;
  }
  friend bool operator==(const Amount&, const Amount&) = default;
};

}  // namespace millrace::buffering
