#include "tools/sim/arena.h"

#include <sys/mman.h>

#include <cstring>

#include "roce/error.h"

namespace millrace::sim {

namespace {
// Far from where programs, heaps, stacks and the sanitizers' shadows lie on 64-bit Linux.
constexpr uintptr_t kBase = 0x3000'0000'0000;
constexpr size_t kKept = size_t{32} << 20;  // pages worth keeping between runs
}  // namespace

Arena::Arena(size_t bytes_max) : size_(bytes_max) {
  void* at = ::mmap(reinterpret_cast<void*>(kBase), size_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  if (at != reinterpret_cast<void*>(kBase))
    throw Error(ErrorCode::kSystem,
                "the simulator's memory at 0x300000000000 could not be had: is another in this process?");
  base_ = static_cast<uint8_t*>(at);
}

Arena::~Arena() { ::munmap(base_, size_); }

uint8_t* Arena::take(size_t bytes, size_t skew) {
  uint8_t* at = base_ + used_ + skew;
  used_ += (bytes + skew + 63) / 64 * 64;
  if (used_ > size_)
    throw Error(ErrorCode::kSystem, "the simulated processes need more than the simulator's 16 GiB");
  return at;
}

void Arena::reset() {
  if (used_ > kKept) ::madvise(base_ + kKept, used_ - kKept, MADV_DONTNEED);
  std::memset(base_, 0, used_ < kKept ? used_ : kKept);
  used_ = 0;
}

}  // namespace millrace::sim
