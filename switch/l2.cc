#include "switch/l2.h"

#include <bit>

namespace millrace::switching {

namespace {

uint64_t key_of(const MacAddress& mac, uint16_t domain) {
  uint64_t v = 0;
  for (const uint8_t byte : mac.bytes) v = v << 8 | byte;
  return v << 16 | domain;
}

MacAddress mac_of(uint64_t v) {
  MacAddress mac;
  for (size_t i = 0; i < 6; i++) mac.bytes[i] = static_cast<uint8_t>(v >> (8 * (5 - i)));
  return mac;
}

}  // namespace

L2Table::L2Table(const L2Config& config, uint16_t ports, uint64_t seed)
    : config_(config),
      seed_(seed | 1),
      // Twice the slots that may be used: with two choices of four ways a bucket then hardly ever overflows.
      buckets_(std::bit_ceil(size_t{config.entries_max} * 2 / kWays + 1)),
      former_(buckets_.size() * kWays, kNobody),
      mask_(buckets_.size() - 1),
      reserve_(config.entries_max / (2u * ports)),
      reserved_left_(reserve_ * ports),
      per_port_(ports) {}

size_t L2Table::bucket_of(uint64_t key, int choice) const noexcept {
  // Finalizer of MurmurHash3 over the seeded key; its two halves are the two choices.
  uint64_t h = key ^ seed_;
  h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDull;
  h = (h ^ h >> 33) * (0xC4CEB9FE1A85EC53ull ^ (seed_ << 1));
  h ^= h >> 33;
  return (choice == 0 ? h : h >> 32) & mask_;
}

const L2Table::Slot* L2Table::find(uint64_t key) const noexcept {
  for (int choice = 0; choice < 2; choice++)
    for (const Slot& slot : buckets_[bucket_of(key, choice)].slots)
      if (slot.key == key) return &slot;
  return nullptr;
}

bool L2Table::may_add(uint16_t port) const noexcept {
  if (per_port_[port] < reserve_) return true;
  return size_ + reserved_left_ < config_.entries_max;
}

void L2Table::occupy(Slot& slot, uint64_t key, uint16_t port, Time now) noexcept {
  slot.key = key;
  slot.see(port, now);
  former(slot) = kNobody;
  size_++;
  if (++per_port_[port] <= reserve_) reserved_left_--;
}

void L2Table::release(Slot& slot) noexcept {
  const uint16_t port = slot.port();
  slot.key = 0;
  size_--;
  if (per_port_[port]-- <= reserve_) reserved_left_++;
}

// A few buckets at a time, whenever something new is learned: what has aged makes room before it is needed,
// and an idle switch is never woken for it.
void L2Table::sweep(Time now) noexcept {
  for (int i = 0; i < 2; i++) {
    for (Slot& slot : buckets_[hand_].slots)
      if (slot.key != 0 && aged(slot, now)) release(slot);
    hand_ = (hand_ + 1) & mask_;
  }
}

L2Table::Learned L2Table::learn(const MacAddress& mac, uint16_t domain, uint16_t port, Time now) noexcept {
  const uint64_t key = key_of(mac, domain);
  if (auto* slot = const_cast<Slot*>(find(key))) {
    if (slot->port() == port) {
      slot->see(port, now);
      return Learned::kKnown;
    }
    return move(*slot, port, now);
  }
  sweep(now);
  Slot* free = nullptr;
  for (int choice = 0; choice < 2 && free == nullptr; choice++)
    for (Slot& slot : buckets_[bucket_of(key, choice)].slots) {
      if (slot.key != 0 && aged(slot, now)) release(slot);
      if (slot.key == 0) free = &slot;
    }
  if (free == nullptr || !may_add(port)) return Learned::kFull;
  occupy(*free, key, port, now);
  return Learned::kNew;
}

uint64_t& L2Table::former(const Slot& slot) noexcept {
  const auto bytes = reinterpret_cast<const uint8_t*>(&slot) - reinterpret_cast<const uint8_t*>(&buckets_[0]);
  return former_[static_cast<size_t>(bytes) / sizeof(Slot)];
}

L2Table::Learned L2Table::move(Slot& slot, uint16_t port, Time now) noexcept {
  const Slot before{slot.key, former(slot)};
  const bool back = before.port() == port && !aged(before, now);
  if (!back && now - slot.seen() < config_.move_guard) return Learned::kMoveRefused;
  const Slot was = slot;
  release(slot);
  if (!may_add(port)) return Learned::kFull;
  occupy(slot, was.key, port, now);
  // Who had to give it back has no claim to it.
  if (!back) former(slot) = was.state;
  return Learned::kMoved;
}

uint16_t L2Table::lookup(const MacAddress& mac, uint16_t domain, Time now) const noexcept {
  const Slot* slot = find(key_of(mac, domain));
  return slot == nullptr || aged(*slot, now) ? kNoPort : slot->port();
}

std::vector<L2Table::Entry> L2Table::entries(Time now) const {
  std::vector<Entry> all;
  for (const Bucket& bucket : buckets_)
    for (const Slot& slot : bucket.slots)
      if (slot.key != 0 && !aged(slot, now))
        all.push_back({mac_of(slot.key >> 16), static_cast<uint16_t>(slot.key & 0xFFFF), slot.port(),
                       now - slot.seen()});
  return all;
}

}  // namespace millrace::switching
