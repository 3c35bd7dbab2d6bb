// The slots of a lender's memory: which are free, and which packets each has. Pure; nothing is allocated
// after construction.
#pragma once

#include <algorithm>

#include "buffering/lazy_array.h"

namespace millrace::buffering {

class Slots {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Slot {
    uint32_t first;  // packet, in the order of their bytes; kNone of a slot that is free
    uint32_t next;   // free slot
    uint32_t packets;
    uint32_t head;  // of its first bytes, that are not in it
  };

  explicit Slots(uint32_t count) : slots_(count) {}
  Slot& operator[](uint32_t slot) { return slots_[slot]; }
  uint32_t count() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t used() const { return used_; }
  uint32_t free() const { return count() - used_; }

  // While some are free.
  uint32_t take() {
    uint32_t slot = free_;
    if (slot == kNone)
      slot = fresh_++;
    else
      free_ = slots_[slot].next;
    used_++;
    slots_[slot] = {kNone, kNone, 0, 0};
    return slot;
  }
  void give(uint32_t slot) {
    assert(slots_[slot].packets == 0 && slots_[slot].first == kNone);
    slots_[slot].next = free_;
    free_ = slot;
    used_--;
  }

 private:
  LazyArray<Slot> slots_;
  uint32_t used_ = 0, fresh_ = 0, free_ = kNone;
};

}  // namespace millrace::buffering
