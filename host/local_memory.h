// The memory that a hub shares with its ranks once their group has started: for each rank, stripe and place
// in the window one segment (header and payload), for each stripe and place one result, and the counters that
// say how far each side is. Plain addresses; who maps it is local_socket.h's affair.
//
// A place needs no flag of its own: a rank posts segment s + window only once it has taken result s, so the
// window that the protocol has anyway tells both sides what they may overwrite.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "aggregation/protocol.h"

namespace millrace::host {

// A counter with one writer, alone in its cache line, in memory that two processes see.
struct alignas(64) SharedCounter {
  uint64_t value = 0;

  uint64_t read() const {
    return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(value)).load(std::memory_order_seq_cst);
  }
  void publish(uint64_t n) { std::atomic_ref<uint64_t>(value).store(n, std::memory_order_seq_cst); }
  uint64_t exchange(uint64_t n) {
    return std::atomic_ref<uint64_t>(value).exchange(n, std::memory_order_seq_cst);
  }
};
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

struct LocalLayout {
  uint32_t ranks = 0;
  uint32_t stripes = 0, window = 0;
  uint32_t segment_bytes = 0;

  static constexpr size_t kPage = 4096;
  static size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
  size_t slot_bytes() const {
    return (aggregation::kSegmentHeaderBytes + size_t{segment_bytes} + 63) / 64 * 64;
  }
  size_t places() const { return size_t{stripes} * window; }
  size_t results_bytes() const { return pages(places() * segment_bytes); }
  size_t rank_bytes() const { return kPage + pages(places() * slot_bytes()); }
  size_t bytes() const { return kPage + results_bytes() + ranks * rank_bytes(); }
};

// Whoever waits in poll(2) says so, looks at the other side's counters once more, and is then told by a
// message; both orders are sequentially consistent, so one of the two sees the other.
struct LocalControl {
  SharedCounter sleeping;
  SharedCounter counts[aggregation::kStripesMax];  // segments: results of the hub, posts of a rank
};
static_assert(sizeof(LocalControl) <= LocalLayout::kPage);

class LocalView {
 public:
  LocalView() = default;
  LocalView(const LocalLayout& layout, uint8_t* base) : layout_(layout), base_(base) {}
  explicit operator bool() const { return base_ != nullptr; }

  const LocalLayout& layout() const { return layout_; }
  uint8_t* base() const { return base_; }
  LocalControl& hub() const { return *reinterpret_cast<LocalControl*>(base_); }
  LocalControl& rank(uint32_t seat) const { return *reinterpret_cast<LocalControl*>(rank_base(seat)); }
  aggregation::SegmentHeader& header(uint32_t seat, uint32_t stripe, uint64_t segment) const {
    return *reinterpret_cast<aggregation::SegmentHeader*>(slot(seat, stripe, segment));
  }
  uint8_t* payload(uint32_t seat, uint32_t stripe, uint64_t segment) const {
    return slot(seat, stripe, segment) + aggregation::kSegmentHeaderBytes;
  }
  uint8_t* result(uint32_t stripe, uint64_t segment) const {
    return results() + place(stripe, segment) * layout_.segment_bytes;
  }
  uint8_t* results() const { return base_ + LocalLayout::kPage; }

 private:
  size_t place(uint32_t stripe, uint64_t segment) const {
    return size_t{stripe} * layout_.window + segment % layout_.window;
  }
  uint8_t* rank_base(uint32_t seat) const {
    return results() + layout_.results_bytes() + seat * layout_.rank_bytes();
  }
  uint8_t* slot(uint32_t seat, uint32_t stripe, uint64_t segment) const {
    return rank_base(seat) + LocalLayout::kPage + place(stripe, segment) * layout_.slot_bytes();
  }

  LocalLayout layout_;
  uint8_t* base_ = nullptr;
};

}  // namespace millrace::host
