#include "tools/sim/check/memory_check.h"

#include <cstring>

#include "tools/sim/check/hash.h"

namespace millrace::sim::check {

namespace {
constexpr uint8_t kGuardByte = 0x5A, kPaint = 0xEB;

// The first byte that is not `value`, or `bytes`.
uint64_t first_other(const uint8_t* at, uint64_t bytes, uint8_t value) {
  if (bytes == 0 || (at[0] == value && std::memcmp(at, at + 1, bytes - 1) == 0)) return bytes;
  uint64_t i = 0;
  while (at[i] == value) i++;
  return i;
}
}  // namespace

size_t MemoryCheck::add(uint8_t* base, uint64_t bytes, std::string what) {
  std::memset(base - kGuard, kGuardByte, kGuard);
  std::memset(base + bytes, kGuardByte, kGuard);
  buffers_.push_back({base, bytes, std::move(what), {}});
  return buffers_.size() - 1;
}

uint64_t MemoryCheck::snapshot(const Buffer& b) {
  Hash h;
  for (const Range& r : b.constant) h.bytes({b.base + r.begin, r.end - r.begin});
  return h.value();
}

void MemoryCheck::offered(size_t buffer, std::vector<Range> constant) {
  Buffer& b = buffers_[buffer];
  b.constant = std::move(constant);
  b.painted = false;
  b.snapshot = snapshot(b);
}

void MemoryCheck::judge(Buffer& b, int64_t at_ns) {
  auto accuse = [&](const std::string& what) {
    if (!b.accused) violations_.add("memory", at_ns, b.what + ": " + what);
    b.accused = true;
  };
  if (first_other(b.base - kGuard, kGuard, kGuardByte) != kGuard) accuse("written in front of it");
  if (const uint64_t i = first_other(b.base + b.bytes, kGuard, kGuardByte); i != kGuard)
    accuse("written " + std::to_string(i) + " bytes behind its end");
  if (b.painted) {
    if (const uint64_t i = first_other(b.base, b.bytes, kPaint); i != b.bytes)
      accuse("written at byte " + std::to_string(i) + " after its operation was over");
  } else if (!b.constant.empty() && snapshot(b) != b.snapshot) {
    accuse("written, though it was given for reading");
  }
}

void MemoryCheck::returned(size_t buffer, int64_t at_ns) {
  Buffer& b = buffers_[buffer];
  judge(b, at_ns);
  std::memset(b.base, kPaint, b.bytes);
  b.constant.clear();
  b.painted = true;
}

void MemoryCheck::sweep(int64_t at_ns) {
  for (Buffer& b : buffers_) judge(b, at_ns);
}

}  // namespace millrace::sim::check
