// An index of table entries by hash: open addressing with linear probing and backward shift, so that nothing
// is left of what was removed. It knows entries by number and hash only; the caller says which of those with
// equal hash is meant. Pure; memory is taken once and touched as it fills.
#pragma once

#include <bit>

#include "buffering/lazy_array.h"

namespace millrace::buffering {

class HashIndex {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit HashIndex(uint32_t entries_max)
      : mask_(std::bit_ceil(2 * static_cast<size_t>(entries_max) + 2) - 1), slots_(mask_ + 1) {}

  // The entry of this hash for which `is` is true, or kNone.
  template <typename Is>
  uint32_t find(uint64_t hash, Is is) const noexcept {
    for (size_t at = hash & mask_; slots_[at].entry != 0; at = (at + 1) & mask_)
      if (slots_[at].hash == hash && is(slots_[at].entry - 1)) return slots_[at].entry - 1;
    return kNone;
  }
  // Precondition: not in it, and fewer than entries_max are.
  void insert(uint64_t hash, uint32_t entry) noexcept {
    size_t at = hash & mask_;
    while (slots_[at].entry != 0) at = (at + 1) & mask_;
    slots_[at] = {hash, entry + 1};
  }
  // Precondition: it is in it.
  void erase(uint64_t hash, uint32_t entry) noexcept {
    size_t hole = hash & mask_;
    while (slots_[hole].entry != entry + 1) {
      assert(slots_[hole].entry != 0);
      hole = (hole + 1) & mask_;
    }
    for (size_t at = (hole + 1) & mask_; slots_[at].entry != 0; at = (at + 1) & mask_) {
      // It may move into the hole if that is not before its home.
      const size_t home = slots_[at].hash & mask_;
      if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
      slots_[hole] = slots_[at];
      hole = at;
    }
    slots_[hole] = {};
  }

 private:
  struct Slot {
    uint64_t hash;
    uint32_t entry;  // its number + 1; 0: free
  };

  size_t mask_;
  LazyArray<Slot> slots_;
};

}  // namespace millrace::buffering
