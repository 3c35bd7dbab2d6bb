#include "buffering/local_store.h"

#include <algorithm>

namespace millrace::buffering {

LocalStore::LocalStore(std::span<uint8_t> memory, uint32_t ids, FramePool& pool)
    : memory_(memory),
      pool_(pool),
      blocks_(static_cast<uint32_t>(std::min<size_t>(memory.size() / kBlock, kNone))),
      next_(blocks_),
      packets_(ids) {}

uint32_t LocalStore::take_block() noexcept {
  if (free_ == kNone) return fresh_++;
  const uint32_t block = free_;
  free_ = next_[block];
  return block;
}

void LocalStore::give_blocks(uint32_t first) noexcept {
  while (first != kNone) {
    const uint32_t after = next_[first];
    next_[first] = free_;
    free_ = first;
    used_--;
    first = after;
  }
}

bool LocalStore::write(uint32_t id, Frame& frame, Time) noexcept {
  FrameBuffer* b = frame.buffer();
  own_payload(b);
  assert(b->shared == nullptr && b->length > 0);
  const uint32_t needed = (b->length + kBlock - 1) / kBlock;
  if (needed > blocks_ - used_) return false;
  used_ += needed;
  uint32_t* link = &packets_[id].first;
  for (uint32_t at = 0; at < b->length; at += kBlock) {
    const uint32_t block = take_block();
    std::memcpy(memory_.data() + size_t{block} * kBlock, b->data() + at, std::min(kBlock, b->length - at));
    *link = block;
    link = &next_[block];
  }
  *link = kNone;
  packets_[id].length = b->length;
  frame = Frame();
  return true;
}

void LocalStore::read(uint32_t id, Time) noexcept {
  packets_[id].next = kNone;
  (asked_last_ == kNone ? asked_first_ : packets_[asked_last_].next) = id;
  asked_last_ = id;
}

void LocalStore::discard(uint32_t id) noexcept { give_blocks(packets_[id].first); }

bool LocalStore::next_event(StoreEvent& event) noexcept {
  if (asked_first_ == kNone) return false;
  Frame frame = Frame::allocate(pool_);
  if (!frame) return false;  // again when there is one
  const uint32_t id = asked_first_;
  const Packet& packet = packets_[id];
  FrameBuffer* b = frame.buffer();
  assert(b->offset + packet.length <= b->room_bytes);
  b->length = packet.length;
  uint8_t* to = b->data();
  uint32_t left = packet.length;
  for (uint32_t block = packet.first; block != kNone; block = next_[block]) {
    const uint32_t n = std::min(kBlock, left);
    std::memcpy(to, memory_.data() + size_t{block} * kBlock, n);
    to += n, left -= n;
  }
  give_blocks(packet.first);
  asked_first_ = packet.next;
  if (asked_first_ == kNone) asked_last_ = kNone;
  event.kind = StoreEvent::Kind::kRead;
  event.id = id;
  event.frame = std::move(frame);
  return true;
}

}  // namespace millrace::buffering
