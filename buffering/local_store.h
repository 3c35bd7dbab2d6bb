// Spilled packets in memory of the switch itself: copied into chains of small blocks, so that packets of any
// length share the memory without waste, and out again into fresh frames. Pure; one worker; after
// construction nothing is allocated.
#pragma once

#include <span>

#include "buffering/lazy_array.h"
#include "buffering/store.h"

namespace millrace::buffering {

class LocalStore final : public Store {
 public:
  static constexpr uint32_t kBlock = 128;

  // `memory` (hugepages in the switch) outlives the store; ids are below `ids`. Frames come from `pool`.
  LocalStore(std::span<uint8_t> memory, uint32_t ids, FramePool& pool);

  bool write(uint32_t id, Frame& frame, Time now) noexcept override;
  void read(uint32_t id, Time now) noexcept override;
  void discard(uint32_t id) noexcept override;
  bool next_event(StoreEvent& event) noexcept override;
  void poll(Time, FrameList&) noexcept override {}
  Time next_deadline() const override { return kNever; }
  uint64_t size() const override { return uint64_t{blocks_} * kBlock; }
  uint64_t used() const override { return uint64_t{used_} * kBlock; }
  uint32_t reads_max() const override { return kReadsMax; }

 private:
  static constexpr uint32_t kReadsMax = 8, kNone = UINT32_MAX;
  struct Packet {
    uint32_t first;   // block
    uint32_t length;  // bytes
    uint32_t next;    // asked for after this one
  };
  uint32_t take_block() noexcept;
  void give_blocks(uint32_t first) noexcept;

  std::span<uint8_t> memory_;
  FramePool& pool_;
  uint32_t blocks_;
  uint32_t used_ = 0;
  uint32_t fresh_ = 0;         // blocks from here on were never used
  uint32_t free_ = kNone;      // the others, linked through next_
  LazyArray<uint32_t> next_;   // by block
  LazyArray<Packet> packets_;  // by id
  uint32_t asked_first_ = kNone, asked_last_ = kNone;
};

}  // namespace millrace::buffering
