#include "buffering/local_store.h"

namespace millrace::buffering {

LocalStore::~LocalStore() {
  for (size_t id = 0; frames_ > 0; id++)
    if (packets_[id].frame != nullptr) discard(static_cast<uint32_t>(id));
}

bool LocalStore::write(uint32_t id, Frame& frame, Time) noexcept {
  const uint64_t bytes = frame.total_length();
  if (frames_ == frames_max_ || used_ + bytes > size_) return false;
  frames_++;
  used_ += bytes;
  packets_[id].frame = frame.release();
  return true;
}

Frame LocalStore::take(uint32_t id) noexcept {
  Frame frame(packets_[id].frame);
  packets_[id].frame = nullptr;
  frames_--;
  used_ -= frame.total_length();
  return frame;
}

void LocalStore::read(uint32_t id, Time) noexcept {
  // It has lain there for long, and will be needed soon.
  const auto* frame = reinterpret_cast<const char*>(packets_[id].frame);
  __builtin_prefetch(frame, 1);
  __builtin_prefetch(frame + 64, 1);
  packets_[id].next = kNone;
  (asked_last_ == kNone ? asked_first_ : packets_[asked_last_].next) = id;
  asked_last_ = id;
}

void LocalStore::discard(uint32_t id) noexcept { take(id); }

bool LocalStore::next_event(StoreEvent& event) noexcept {
  if (asked_first_ == kNone) return false;
  const uint32_t id = asked_first_;
  asked_first_ = packets_[id].next;
  if (asked_first_ == kNone) asked_last_ = kNone;
  event.kind = StoreEvent::Kind::kRead;
  event.id = id;
  event.frame = take(id);
  return true;
}

}  // namespace millrace::buffering
