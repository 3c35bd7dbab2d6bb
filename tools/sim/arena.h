// The memory of all simulated processes, at the same address in every run: the addresses of buffers stand in
// segment headers and result packets, and so in the trace. One exists at a time in a process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace millrace::sim {

class Arena {
 public:
  // Throws millrace::Error when the address range is taken.
  explicit Arena(size_t bytes_max = size_t{16} << 30);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Never given back before reset(). Aligned to 64 bytes, then moved on by `skew`. Throws millrace::Error
  // when full.
  uint8_t* take(size_t bytes, size_t skew = 0);
  // Everything is free again and, so that runs do not see each other's bytes, zero.
  void reset();

 private:
  uint8_t* base_;
  size_t size_, used_ = 0;
};

}  // namespace millrace::sim
