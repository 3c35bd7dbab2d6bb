// Where chunks meet: one stripe's ring of segment slots. A slot gathers one segment from all members, chunk
// by chunk; the first contribution's frame is the accumulator. Used by the engine on the hot path; everything
// is reserved when the group is admitted.
#pragma once

#include <memory>
#include <vector>

#include "aggregation/protocol.h"
#include "aggregation/reduce.h"
#include "roce/frame.h"

namespace millrace::aggregation {

// A payload in the frame that brought it.
struct Held {
  FrameRef frame;
  std::span<uint8_t> data;
};

// The byte range of one packet of a segment. Chunk 0 shares its packet with the segment header.
struct Chunk {
  Held sum;  // the first contribution; its payload becomes the result
  uint32_t contributions = 0;
};

struct SegmentSlot {
  uint64_t counter = 0;  // which segment of the stripe
  uint32_t headers = 0;  // members whose first packet has come; 0: the slot is free
  uint32_t chunks_released = 0;
  Time since{};                       // when the first header came
  bool straggling = false;            // counted as such
  std::vector<SegmentHeader> header;  // by seat
  std::vector<bool> present;          // by seat
  uint32_t first_seat = 0;            // whose header is the reference
  // Of the reference, which all members agree with:
  SegmentShape shape;
  Reducer reducer;    // none where nothing is reduced
  bool wide = false;  // summed in a wider type than it has on the wire
  bool hold = false;  // contributions are kept until all are there, and reduced in the order of ranks
  std::vector<Chunk> chunks;
  // In trees: how many members contribute, how many have done so, and whether the partial has gone up.
  uint32_t contributors = 0, contributed = 0;
  bool sent_up = false;

  const SegmentHeader& reference() const { return header[first_seat]; }
};

// How a segment of `payload` bytes is cut by the path MTU: chunk 0 is MTU − 64 bytes, later ones the MTU.
struct ChunkMap {
  uint32_t mtu;
  uint32_t count(uint32_t payload) const {
    return payload <= mtu - kSegmentHeaderBytes ? 1 : 2 + (payload - (mtu - kSegmentHeaderBytes) - 1) / mtu;
  }
  uint32_t offset(uint32_t chunk) const { return chunk == 0 ? 0 : chunk * mtu - kSegmentHeaderBytes; }
  uint32_t bytes(uint32_t chunk, uint32_t payload) const {
    const uint32_t end = (chunk + 1) * mtu - kSegmentHeaderBytes;
    return (end < payload ? end : payload) - offset(chunk);
  }
};

// The ring. Since members' packets come in order and a chunk is complete only with all of them, chunks
// complete in order: segment `released` is always the oldest one incomplete.
class SlotRing {
 public:
  // `window` slots of `chunks` chunks each for members with `seats` seats.
  SlotRing(uint16_t window, uint32_t chunks, uint32_t seats, uint32_t mtu)
      : slots_(window), wide_(static_cast<size_t>(window) * chunks * mtu), chunks_(chunks), mtu_(mtu) {
    for (SegmentSlot& s : slots_) {
      s.header.resize(seats);
      s.present.resize(seats);
      s.chunks.resize(chunks);
    }
  }
  static uint64_t bytes(uint16_t window, uint32_t chunks, uint32_t seats, uint32_t mtu) {
    return static_cast<uint64_t>(window) *
           (seats * (kSegmentHeaderBytes + 1) + chunks * (sizeof(Chunk) + sizeof(float) * mtu));
  }

  // A member may send segment s once s − window has been released.
  bool admits(uint64_t segment) const { return segment < released_ + slots_.size(); }
  SegmentSlot& slot(uint64_t segment) { return slots_[segment % slots_.size()]; }
  const SegmentSlot& slot(uint64_t segment) const { return slots_[segment % slots_.size()]; }
  // The wide accumulator (f32, one for each byte at most) of a chunk, for types that are summed in a wider
  // one.
  float* wide(uint64_t segment, uint32_t chunk) {
    return wide_.data() + ((segment % slots_.size()) * chunks_ + chunk) * mtu_;
  }
  // What a rank has contributed to a chunk, where contributions are held. Room for that is made by hold().
  Held& held(uint64_t segment, uint32_t chunk, uint16_t rank) {
    return held_[((segment % slots_.size()) * chunks_ + chunk) * slots_[0].header.size() + rank];
  }
  bool holds() const { return !held_.empty(); }
  void hold() { held_.resize(slots_.size() * chunks_ * slots_[0].header.size()); }
  uint64_t released() const { return released_; }
  void release(SegmentSlot& slot) {
    slot.headers = 0;
    slot.chunks_released = 0;
    slot.straggling = false;
    slot.contributed = 0;
    slot.sent_up = false;
    slot.present.assign(slot.present.size(), false);
    released_++;
  }
  // Drops everything that is gathered; the frames go back to their pools.
  void clear() {
    for (SegmentSlot& s : slots_) {
      for (Chunk& c : s.chunks) c = Chunk{};
      s.headers = 0;
    }
    for (Held& h : held_) h = Held{};
  }
  size_t window() const { return slots_.size(); }

 private:
  std::vector<SegmentSlot> slots_;
  std::vector<float> wide_;
  std::vector<Held> held_;  // by slot, chunk and rank; empty until a deterministic operation comes
  uint32_t chunks_, mtu_;
  uint64_t released_ = 0;
};

}  // namespace millrace::aggregation
