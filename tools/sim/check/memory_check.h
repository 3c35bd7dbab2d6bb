// No write outside what a member offered, and none after the operation was given back: guard bytes around
// every buffer, a snapshot of what may not change, and a pattern over what has been given back, looked at
// until the end.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/sim/check/violations.h"

namespace millrace::sim::check {

class MemoryCheck {
 public:
  static constexpr uint64_t kGuard = 64;  // bytes before and behind each buffer

  explicit MemoryCheck(Violations& violations) : violations_(violations) {}

  // `base` … `base + bytes` is a buffer with kGuard bytes of room on either side, which are painted. `what`
  // names it. Returns its number.
  size_t add(uint8_t* base, uint64_t bytes, std::string what);
  uint8_t* base(size_t buffer) const { return buffers_[buffer].base; }
  struct Range {
    uint64_t begin, end;
  };
  // The buffer is offered to an operation. `constant`: what of it may be read only.
  void offered(size_t buffer, std::vector<Range> constant);
  // The operation is over: guards and constants are judged, then the buffer is painted and must stay so.
  void returned(size_t buffer, int64_t at_ns);
  // Judges all guards and all that was given back.
  void sweep(int64_t at_ns);

 private:
  struct Buffer {
    uint8_t* base;
    uint64_t bytes;
    std::string what;
    std::vector<Range> constant;
    uint64_t snapshot = 0;  // of what is constant
    bool painted = false, accused = false;
  };
  static uint64_t snapshot(const Buffer& b);
  void judge(Buffer& b, int64_t at_ns);

  Violations& violations_;
  std::vector<Buffer> buffers_;
};

}  // namespace millrace::sim::check
