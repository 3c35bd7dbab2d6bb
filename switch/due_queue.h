// Which entry of a table is due next: a binary heap of times that knows where each entry stands in it, so
// that setting a time anew costs the logarithm of the entries and never a look at all of them. Pure; owned
// and called by one worker; memory is taken once, at construction.
#pragma once

#include <cassert>
#include <vector>

#include "roce/types.h"

namespace millrace::switching {

class DueQueue {
 public:
  explicit DueQueue(size_t entries) : places_(entries, kNowhere) { heap_.reserve(entries); }

  // Adds an entry, or moves it. Precondition: entry < entries.
  void set(uint32_t entry, Time due) noexcept {
    if (places_[entry] == kNowhere) {
      places_[entry] = static_cast<uint32_t>(heap_.size());
      heap_.push_back({due, entry});
      rise(heap_.size() - 1);
      return;
    }
    const size_t at = places_[entry];
    const bool earlier = due < heap_[at].due;
    heap_[at].due = due;
    earlier ? rise(at) : sink(at);
  }
  void remove(uint32_t entry) noexcept {
    const size_t at = places_[entry];
    if (at == kNowhere) return;
    places_[entry] = kNowhere;
    const Item last = heap_.back();
    heap_.pop_back();
    if (at == heap_.size()) return;
    put(at, last);
    rise(at);
    sink(places_[last.entry]);
  }
  Time next() const noexcept { return heap_.empty() ? kNever : heap_.front().due; }
  // Whose time is next(). Precondition: next() is not kNever.
  uint32_t first() const noexcept {
    assert(!heap_.empty());
    return heap_.front().entry;
  }

 private:
  struct Item {
    Time due;
    uint32_t entry;
  };
  static constexpr uint32_t kNowhere = UINT32_MAX;

  void put(size_t at, const Item& item) noexcept {
    heap_[at] = item;
    places_[item.entry] = static_cast<uint32_t>(at);
  }
  void rise(size_t at) noexcept {
    const Item item = heap_[at];
    for (; at > 0 && item.due < heap_[(at - 1) / 2].due; at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
    put(at, item);
  }
  void sink(size_t at) noexcept {
    const Item item = heap_[at];
    for (size_t below; (below = 2 * at + 1) < heap_.size(); at = below) {
      if (below + 1 < heap_.size() && heap_[below + 1].due < heap_[below].due) below++;
      if (item.due <= heap_[below].due) break;
      put(at, heap_[below]);
    }
    put(at, item);
  }

  std::vector<Item> heap_;
  std::vector<uint32_t> places_;  // by entry
};

}  // namespace millrace::switching
