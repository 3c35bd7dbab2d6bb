#include "switch/neighbours.h"

#include <algorithm>
#include <bit>

#include "switch/ip_messages.h"

namespace millrace::switching {

namespace {

using roce::EthernetHeader;
using roce::Ipv6Header;

// How many neighbours a subnet can have, at most `limit`.
uint32_t hosts_of(const Prefix& subnet, uint32_t limit) {
  const unsigned bits = (subnet.address.is_v4() ? 32u : 128u) - subnet.length;
  return bits >= 32 ? limit : static_cast<uint32_t>(std::min<uint64_t>(limit, uint64_t{1} << bits));
}

}  // namespace

NeighbourTable::NeighbourTable(const NeighbourConfig& config, const Fib& fib, uint16_t ports,
                               const MacAddress& mac, uint64_t seed, FramePool& pool)
    : config_(config),
      mac_(mac),
      seed_(seed),
      pool_(pool),
      quota_(ports + 1u),
      held_by_port_(ports),
      due_(0) {
  for (const Fib::Entry& e : fib.entries()) {
    if (!e.connected) continue;
    Quota& quota = quota_[slot_of(e.interface)];
    quota.left = std::min(config.entries_max, quota.left + hosts_of(e.prefix, config.entries_max));
  }
  size_t places = fib.next_hops().size();
  for (Quota& quota : quota_) {
    places += quota.left;
    quota.incomplete_max = (quota.left + 1) / 2;
  }
  entries_.resize(places);
  due_ = DueQueue(places);
  buckets_.resize(std::bit_ceil(places + 1), kNone);
  for (size_t i = places; i-- > 0;) {
    entries_[i].next = free_;
    free_ = static_cast<uint32_t>(i);
  }
  for (const Fib::NextHop& hop : fib.next_hops())
    entries_[occupy(hop.address, hop.interface, hop.own, Time{})].next_hop = true;
}

size_t NeighbourTable::bucket_of(const IpAddress& address) const noexcept {
  uint64_t high, low;
  std::memcpy(&high, address.bytes.data(), 8);
  std::memcpy(&low, address.bytes.data() + 8, 8);
  uint64_t h = (high ^ seed_) * 0x9E3779B97F4A7C15ull;
  h = (h ^ h >> 32 ^ low) * 0xC4CEB9FE1A85EC53ull;
  return (h ^ h >> 32) & (buckets_.size() - 1);
}

uint32_t NeighbourTable::find(const IpAddress& address) const noexcept {
  if (buckets_.empty()) return kNone;
  uint32_t i = buckets_[bucket_of(address)];
  while (i != kNone && entries_[i].address != address) i = entries_[i].next;
  return i;
}

uint32_t NeighbourTable::occupy(const IpAddress& address, uint16_t interface, const IpAddress& own,
                                Time now) noexcept {
  const uint32_t index = free_;
  Entry& e = entries_[index];
  free_ = e.next;
  e.address = address, e.own = own, e.interface = interface;
  e.used = true;
  e.next_hop = e.has_mac = e.confirmed = e.failed = false;
  e.asks = 0;
  e.answered = e.asked = Time{};
  uint32_t& bucket = buckets_[bucket_of(address)];
  e.next = bucket;
  bucket = index;
  due_.set(index, now);
  return index;
}

void NeighbourTable::release(uint32_t index) noexcept {
  Entry& e = entries_[index];
  uint32_t* link = &buckets_[bucket_of(e.address)];
  while (*link != index) link = &entries_[*link].next;
  *link = e.next;
  Quota& quota = quota_[slot_of(e.interface)];
  quota.left++;
  if (!e.has_mac) quota.incomplete--;
  due_.remove(index);
  e.used = false;
  e.next = free_;
  free_ = index;
}

uint32_t NeighbourTable::resolve(const IpAddress& address, uint16_t interface, const IpAddress& own,
                                 Time now) noexcept {
  if (const uint32_t index = find(address); index != kNone) return index;
  Quota& quota = quota_[slot_of(interface)];
  if (quota.left == 0 || quota.incomplete >= quota.incomplete_max) {
    counters_.full++;
    return kNone;
  }
  quota.left--;
  quota.incomplete++;
  return occupy(address, interface, own, now);
}

void NeighbourTable::learn(const IpAddress& address, const MacAddress& mac, uint16_t interface,
                           const IpAddress& own, Time now) noexcept {
  if (!usable(mac)) return;
  Quota& quota = quota_[slot_of(interface)];
  if (quota.left == 0) {
    counters_.full++;
    return;
  }
  quota.left--;
  quota.incomplete++;  // until become(), in the next line
  become(occupy(address, interface, own, now), mac, false, now);
}

bool NeighbourTable::hold(uint32_t index, Frame& frame) noexcept {
  Entry& e = entries_[index];
  uint32_t& of_port = held_by_port_[frame.port()];
  if (e.held.size() >= NeighbourConfig::kHeldMax || of_port >= NeighbourConfig::kHeldTotalMax - held_) {
    counters_.hold_refused++;
    return false;
  }
  held_++;
  of_port++;
  e.held.push(std::move(frame));
  return true;
}

void NeighbourTable::let_go(Entry& e, FrameList& to) noexcept {
  held_ -= static_cast<uint32_t>(e.held.size());
  e.held.for_each([this](const FrameBuffer* b) { held_by_port_[b->port]--; });
  to.splice(e.held);
}

void NeighbourTable::become(uint32_t index, const MacAddress& mac, bool confirmed, Time now) noexcept {
  Entry& e = entries_[index];
  if (!e.has_mac) {
    counters_.learned++;
    if (!e.next_hop) quota_[slot_of(e.interface)].incomplete--;
  }
  e.mac = mac;
  e.has_mac = true;
  e.failed = false;
  e.confirmed = confirmed;
  if (confirmed) {
    e.asks = 0;
    e.answered = now;
    due_.set(index, now + (e.next_hop ? config_.next_hop_probe : config_.reachable));
  } else {
    // What nobody has confirmed is asked about at once, but not again within the interval: somebody who
    // changes it all the time would have us ask all the time. An answer on its way still counts, and the new
    // address is asked at least once before it is given up.
    e.asks = std::min(e.asks, NeighbourConfig::kAsksMax - 1);
    due_.set(index, e.asked > Time{} ? std::max(now, e.asked + interval(e)) : now);
  }
  let_go(e, released_);
}

// Whether it can be a neighbour's.
bool NeighbourTable::usable(const MacAddress& mac) const noexcept {
  return !mac.is_multicast() && mac != MacAddress{} && mac != mac_;
}

void NeighbourTable::hear(uint32_t index, const MacAddress& mac, bool answer, bool override,
                          Time now) noexcept {
  Entry& e = entries_[index];
  if (!usable(mac)) return;
  const bool confirms = answer && e.asks > 0;
  if (e.has_mac && e.mac != mac) {
    if (!override) return;
    if (e.confirmed && now - e.answered < NeighbourConfig::kLock) {
      counters_.change_refused++;
      return;
    }
    counters_.changed++;
    become(index, mac, confirms, now);
  } else if (confirms) {
    become(index, mac, true, now);
  } else if (!e.has_mac && !e.next_hop) {
    become(index, mac, false, now);
  }
  // A next hop that does not answer is asked all the time anyway. That it can be heard is no reason to send
  // it anything: a link that works in one direction only would come back with each of its requests.
}

void NeighbourTable::poll(Time now, FrameList& questions) noexcept {
  for (uint32_t i = 0; i < kActsMax && now >= due_.next(); i++) act(due_.first(), now, questions);
}

void NeighbourTable::act(uint32_t index, Time now, FrameList& questions) noexcept {
  Entry& e = entries_[index];
  if (e.asks >= NeighbourConfig::kAsksMax) {
    (e.has_mac ? counters_.lost : counters_.unanswered)++;
    let_go(e, given_up_);
    if (!e.next_hop) {
      release(index);
      return;
    }
    e.has_mac = e.confirmed = false;
    e.failed = true;
    e.asks = 0;
  }
  ask(index, now, questions);
}

void NeighbourTable::ask(uint32_t index, Time now, FrameList& questions) noexcept {
  Entry& e = entries_[index];
  e.asked = now;
  due_.set(index, now + interval(e));
  e.asks++;
  Frame question = e.address.is_v4() ? question4(e) : question6(e);
  if (!question) {
    counters_.asks_not_built++;
    return;
  }
  (e.address.is_v4() ? counters_.arp_requests_sent : counters_.solicitations_sent)++;
  question.set_port(e.interface);
  questions.push(std::move(question));
}

// RFC 826; to the neighbour alone while its address is known (RFC 1122, 2.3.2.1).
Frame NeighbourTable::question4(const Entry& e) noexcept {
  constexpr uint32_t kBytes = sizeof(EthernetHeader) + sizeof(ArpPacket);
  Frame frame = Frame::allocate(pool_);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  assert(b->offset + kBytes <= b->room_bytes);
  b->length = kBytes;
  auto* eth = reinterpret_cast<EthernetHeader*>(b->data());
  eth->dst = e.has_mac ? e.mac : kBroadcastMac;
  eth->src = mac_;
  eth->ether_type = roce::kEtherTypeArp;
  auto* arp = reinterpret_cast<ArpPacket*>(eth + 1);
  *arp = {uint16_t{1}, roce::kEtherTypeIpv4, 6, 4, kArpRequest, mac_, {}, {}, {}};
  std::memcpy(arp->sender_ip, e.own.v4(), 4);
  std::memcpy(arp->target_ip, e.address.v4(), 4);
  return frame;
}

// RFC 4861, 4.3 and 7.2.2: to the solicited-node group (RFC 4291, 2.7.1; RFC 2464, 7), or to the neighbour
// alone while its address is known.
Frame NeighbourTable::question6(const Entry& e) noexcept {
  constexpr uint32_t kMessage = sizeof(NeighbourMessage) + sizeof(LinkLayerOption);
  constexpr uint32_t kBytes = sizeof(EthernetHeader) + sizeof(Ipv6Header) + kMessage;
  Frame frame = Frame::allocate(pool_);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  assert(b->offset + kBytes <= b->room_bytes);
  b->length = kBytes;
  const auto& a = e.address.bytes;
  auto* eth = reinterpret_cast<EthernetHeader*>(b->data());
  eth->dst = e.has_mac ? e.mac : MacAddress{{0x33, 0x33, 0xFF, a[13], a[14], a[15]}};
  eth->src = mac_;
  eth->ether_type = roce::kEtherTypeIpv6;
  auto* ip = reinterpret_cast<Ipv6Header*>(eth + 1);
  ip->version_class_label = uint32_t{6} << 28;
  ip->payload_length = uint16_t{kMessage};
  ip->next_header = roce::kIpProtoIcmp6;
  ip->hop_limit = 255;
  std::memcpy(ip->src, e.own.bytes.data(), 16);
  const uint8_t group[16] = {0xFF, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xFF, a[13], a[14], a[15]};
  std::memcpy(ip->dst, e.has_mac ? a.data() : group, 16);
  auto* nd = reinterpret_cast<NeighbourMessage*>(ip + 1);
  *nd = {kSolicitation, 0, uint16_t{0}, uint32_t{0}, {}};
  std::memcpy(nd->target, a.data(), 16);
  *reinterpret_cast<LinkLayerOption*>(nd + 1) = {kSourceLinkLayer, 1, mac_};
  nd->checksum = icmp6_checksum(*ip, {reinterpret_cast<const uint8_t*>(nd), kMessage});
  return frame;
}

std::string_view NeighbourTable::state(uint32_t index) const {
  const Entry& e = entries_[index];
  if (!e.has_mac) return e.failed ? "failed" : "incomplete";
  if (e.asks > 0) return "probing";
  return e.confirmed ? "reachable" : "stale";
}

std::vector<NeighbourTable::Info> NeighbourTable::infos(Time now) const {
  std::vector<Info> all;
  for (uint32_t i = 0; i < entries_.size(); i++) {
    const Entry& e = entries_[i];
    if (!e.used) continue;
    all.push_back({e.address, e.interface, e.has_mac ? e.mac : MacAddress{}, state(i), e.next_hop,
                   e.answered > Time{} ? now - e.answered : kNever, static_cast<uint32_t>(e.held.size())});
  }
  return all;
}

}  // namespace millrace::switching
