// Spilled packets in memory of the switch itself: in the very buffers that they were received into, so that
// neither spilling nor draining copies anything. What a packet takes is a whole buffer of the frame pool; the
// pool is made that much larger (`frames_max`). Pure; one worker; after construction nothing is allocated.
#pragma once

#include "buffering/lazy_array.h"
#include "buffering/store.h"

namespace millrace::buffering {

class LocalStore final : public Store {
 public:
  // `size`: bytes of packets; ids are below `ids`.
  LocalStore(uint64_t size, uint32_t frames_max, uint32_t ids)
      : size_(size), frames_max_(frames_max), packets_(ids) {}
  ~LocalStore() override;

  bool write(uint32_t id, Frame& frame, Time now) noexcept override;
  void read(uint32_t id, Time now) noexcept override;
  void discard(uint32_t id) noexcept override;
  bool next_event(StoreEvent& event) noexcept override;
  void poll(Time, FrameList&) noexcept override {}
  Time next_deadline() const override { return kNever; }
  uint64_t size() const override { return size_; }
  uint64_t used() const override { return used_; }
  uint32_t reads_max() const override { return 32; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Packet {
    FrameBuffer* frame;
    uint32_t next;  // asked for after this one
  };
  Frame take(uint32_t id) noexcept;

  uint64_t size_, used_ = 0;
  uint32_t frames_max_, frames_ = 0;
  LazyArray<Packet> packets_;  // by id
  uint32_t asked_first_ = kNone, asked_last_ = kNone;
};

}  // namespace millrace::buffering
