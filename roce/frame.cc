#include "roce/frame.h"

#include <new>

namespace millrace {

HeapFramePool::HeapFramePool(uint32_t room_bytes, uint32_t limit, bool strict)
    : room_bytes_(room_bytes), limit_(limit), strict_(strict) {
  // A bounded pool keeps what it has once made, so that a warm one allocates nothing.
  if (limit_ != UINT32_MAX) cache_max_ = limit_;
  if (strict_) cache_max_ = 0;
}

HeapFramePool::~HeapFramePool() {
  spill(0);
  assert(existing_ == 0 && "a frame outlives its pool");
}

void HeapFramePool::refill() noexcept {
  for (uint32_t i = 0, n = strict_ ? 1 : 64; i < n && existing_ < limit_; i++) {
    auto* b = new (std::nothrow) FrameBuffer;
    if (b == nullptr) return;
    b->room = new (std::nothrow) uint8_t[room_bytes_];
    if (b->room == nullptr) {
      delete b;
      return;
    }
    b->room_bytes = room_bytes_;
    b->pool = this;
    existing_++;
    push(b);
  }
}

void HeapFramePool::spill(uint32_t keep) noexcept {
  while (cached() > keep) {
    FrameBuffer* b = pop();
    delete[] b->room;
    delete b;
    existing_--;
  }
}

}  // namespace millrace
