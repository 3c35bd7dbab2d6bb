#include "buffering/shared_buffer.h"

#include <algorithm>
#include <cassert>

namespace millrace::buffering {

SharedBuffer::SharedBuffer(const Config& config)
    : queues_(config.ports.size() * kClasses), groups_(queues_.size()), size_(config.pool_size) {
  profiles_.reserve(2 * queues_.size());
  uint64_t headroom = 0, queue_reserves = 0, group_reserves = 0;
  for (const PortConfig& port : config.ports)
    for (const QueueConfig& q : port.queues) {
      profiles_.push_back(q.profile);
      queue_reserves += q.profile.size;
    }
  for (const PortConfig& port : config.ports)
    for (const BufferProfile& g : port.groups) {
      profiles_.push_back(g);
      group_reserves += g.size;
      headroom += g.xoff;
    }
  for (size_t i = 0; i < queues_.size(); i++) {
    queues_[i].profile = &profiles_[i];
    groups_[i].profile = &profiles_[queues_.size() + i];
  }
  headroom_size_ = config.pool_xoff != 0 ? std::min(config.pool_xoff, headroom) : headroom;
  // What lies in the headroom also lies in a queue.
  egress_.size = size_ + headroom_size_ - std::min(queue_reserves, size_);
  ingress_.size = size_ - std::min(group_reserves, size_);
}

uint64_t SharedBuffer::threshold(const BufferProfile& profile, uint64_t free) noexcept {
  if (!profile.dynamic_th) return profile.static_th;
  const int n = *profile.dynamic_th;
  return n >= 0 ? free << n : free >> -n;
}

SharedBuffer::Fit SharedBuffer::fit(const Account& a, const View& view, uint64_t bytes) noexcept {
  const uint64_t after = a.bytes + bytes;
  if (after <= a.profile->size) return Fit::kFits;
  const uint64_t shared = after - a.profile->size;
  if (shared > threshold(*a.profile, view.free())) return Fit::kOverThreshold;
  return shared - shared_of(a) <= view.free() ? Fit::kFits : Fit::kPoolFull;
}

void SharedBuffer::add(Account& a, View& view, uint64_t bytes) noexcept {
  const uint64_t before = shared_of(a);
  a.bytes += bytes;
  view.used += shared_of(a) - before;
}

void SharedBuffer::take(Account& a, View& view, uint64_t bytes) noexcept {
  assert(a.bytes >= bytes);
  const uint64_t before = shared_of(a);
  a.bytes -= bytes;
  view.used -= before - shared_of(a);
}

SharedBuffer::Verdict SharedBuffer::ask(const Place& p, uint64_t bytes) const noexcept {
  const Fit out = fit(queues_[p.port * kClasses + p.queue], egress_, bytes);
  if (out == Fit::kOverThreshold) return Verdict::kQueueFull;
  if (out == Fit::kPoolFull) return Verdict::kPoolFull;
  if (p.source == kNoSource) return Verdict::kFits;
  const Account& group = groups_[p.source * kClasses + p.group];
  // Behind what lies in the headroom already, nothing passes.
  const Fit in = group.headroom > 0 ? Fit::kOverThreshold : fit(group, ingress_, bytes);
  if (in == Fit::kFits) return Verdict::kFits;
  if (group.profile->xoff == 0) return in == Fit::kPoolFull ? Verdict::kPoolFull : Verdict::kGroupFull;
  const bool room = group.headroom + bytes <= group.profile->xoff && headroom_ + bytes <= headroom_size_;
  return room ? Verdict::kFitsHeadroom : Verdict::kHeadroomFull;
}

void SharedBuffer::charge(const Place& p, uint64_t bytes, bool headroom) noexcept {
  add(queues_[p.port * kClasses + p.queue], egress_, bytes);
  used_ += bytes;
  if (p.source == kNoSource) return;
  Account& group = groups_[p.source * kClasses + p.group];
  if (headroom) {
    group.headroom += bytes;
    headroom_ += bytes;
  } else {
    add(group, ingress_, bytes);
  }
}

void SharedBuffer::release(const Place& p, uint64_t bytes) noexcept {
  take(queues_[p.port * kClasses + p.queue], egress_, bytes);
  used_ -= bytes;
  if (p.source == kNoSource) return;
  Account& group = groups_[p.source * kClasses + p.group];
  // The headroom empties first, whichever packet leaves.
  const uint64_t from_headroom = std::min(bytes, group.headroom);
  group.headroom -= from_headroom;
  headroom_ -= from_headroom;
  take(group, ingress_, bytes - from_headroom);
}

bool SharedBuffer::may_resume(uint16_t port, uint8_t group) const noexcept {
  const Account& a = groups_[port * kClasses + group];
  if (a.headroom > 0) return false;
  uint64_t level = a.profile->size + a.profile->xon;
  if (a.profile->xon_offset > 0) {
    const uint64_t limit = threshold(*a.profile, ingress_.free());
    const uint64_t below = limit - std::min(limit, a.profile->xon_offset);
    level = std::max(level, below > kNoLimit - a.profile->size ? kNoLimit : a.profile->size + below);
  }
  return a.bytes <= level;
}

}  // namespace millrace::buffering
