#include "switch/router.h"

#include "switch/icmp_error.h"
#include "switch/ip_messages.h"

namespace millrace::switching {

using roce::EthernetHeader;
using roce::Ipv4Header;
using roce::Ipv6Header;

namespace {

constexpr uint8_t kIpProtoTcp = 6;
constexpr uint8_t kTimeExceeded4 = 11, kUnreachable4 = 3, kNet4 = 0, kHost4 = 1;
constexpr uint8_t kTimeExceeded6 = 3, kUnreachable6 = 1, kNoRoute6 = 0, kAddress6 = 3;

// Addresses that never cross a router, as source or as destination: "this network", loopback, link-local and
// class E with the limited broadcast (RFC 1812, 5.3.7; RFC 3927); unspecified, loopback, link-local (RFC
// 4291) and IPv4-mapped ones.
bool stays_on_link(const IpAddress& a, bool v4) {
  if (!v4) {
    static constexpr uint8_t kZeros[15] = {};
    if (a.is_v4()) return true;
    if (std::memcmp(a.bytes.data(), kZeros, 15) == 0 && a.bytes[15] <= 1) return true;
    return a.bytes[0] == 0xFE && (a.bytes[1] & 0xC0) == 0x80;
  }
  const uint8_t* b = a.v4();
  return b[0] == 0 || b[0] == 127 || b[0] >= 240 || (b[0] == 169 && b[1] == 254);
}

uint64_t mixed(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x9E3779B97F4A7C15ull;
  return h ^ h >> 32;
}

// Finalizer of MurmurHash3.
uint64_t finished(uint64_t h) {
  h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDull;
  h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53ull;
  return h ^ h >> 33;
}

uint64_t seed_of(const MacAddress& mac) {
  uint64_t v = 0;
  for (const uint8_t byte : mac.bytes) v = v << 8 | byte;
  return finished(v);
}

uint64_t word_of(const uint8_t* at) {
  uint64_t v;
  std::memcpy(&v, at, 8);
  return v;
}

uint32_t of(uint64_t hash32, uint32_t n) { return static_cast<uint32_t>((hash32 & 0xFFFFFFFF) * n >> 32); }

}  // namespace

struct Router::View {
  Network network;
  bool v4 = false;
  IpAddress src, dst;
  uint8_t protocol = 0, hops = 0;
  uint32_t ports_at = 0;  // of UDP or TCP; 0: this packet has none
};

Router::Router(const RoutingConfig& config, const LocalEndpoint& local, uint16_t ports, const MacAddress& mac,
               uint64_t seed, FramePool& pool)
    : interfaces_(config.interfaces),
      local_(local),
      routed_(ports),
      down_(ports),
      mac_(mac),
      ecmp_seed_(config.ecmp_seed ? finished(*config.ecmp_seed) : seed_of(mac)),
      pool_(pool),
      fib_(config.interfaces, config.routes),
      neighbours_(config.neighbours, fib_, ports, mac, seed, pool),
      sent_(fib_.next_hops().size()),
      icmp_bucket_(config.icmp_errors_pps) {
  for (const InterfaceAddress& i : interfaces_)
    if (i.interface != kBridge) routed_.at(i.interface) = 1;
}

bool Router::wants(const Frame& frame) const noexcept {
  const std::span<const uint8_t> bytes = frame.bytes();
  const Network network = network_of(bytes);
  if (network.vid != 0) return false;
  IpAddress dst;
  if (network.type == roce::kEtherTypeIpv4 && bytes.size() >= network.at + sizeof(Ipv4Header)) {
    dst = IpAddress::from_v4(reinterpret_cast<const Ipv4Header*>(bytes.data() + network.at)->dst);
  } else if (network.type == roce::kEtherTypeIpv6 && bytes.size() >= network.at + sizeof(Ipv6Header)) {
    dst = IpAddress::from_v6(reinterpret_cast<const Ipv6Header*>(bytes.data() + network.at)->dst);
  } else {
    return false;
  }
  return !dst.is_multicast() && !local_.owns(dst);
}

// What must hold before anybody is told anything about the packet; kRouted when it does.
Fate Router::check(std::span<const uint8_t> frame, View& view) const noexcept {
  view.network = network_of(frame);
  view.v4 = view.network.type == roce::kEtherTypeIpv4;
  const uint32_t at = view.network.at;
  const size_t room = frame.size() - at;
  uint32_t header = sizeof(Ipv6Header);
  bool whole = true;
  if (view.v4) {
    const auto* ip = reinterpret_cast<const Ipv4Header*>(frame.data() + at);
    header = (ip->version_ihl & 15u) * 4;
    const size_t total = ip->total_length.value();
    if (ip->version_ihl >> 4 != 4 || header < sizeof(Ipv4Header) || total < header || total > room)
      return Fate::kIpHeaderInvalid;
    if (roce::internet_checksum(frame.subspan(at, header)) != 0) return Fate::kIpChecksum;
    view.src = IpAddress::from_v4(ip->src), view.dst = IpAddress::from_v4(ip->dst);
    view.protocol = ip->protocol, view.hops = ip->ttl;
    whole = (ip->fragment.value() & 0x3FFF) == 0;
  } else {
    const auto* ip = reinterpret_cast<const Ipv6Header*>(frame.data() + at);
    if (ip->version_class_label.value() >> 28 != 6 || ip->payload_length.value() > room - header)
      return Fate::kIpHeaderInvalid;
    view.src = IpAddress::from_v6(ip->src), view.dst = IpAddress::from_v6(ip->dst);
    view.protocol = ip->next_header, view.hops = ip->hop_limit;
  }
  if (view.src.is_multicast() || stays_on_link(view.src, view.v4) || local_.owns(view.src))
    return Fate::kIpSourceInvalid;
  if (stays_on_link(view.dst, view.v4)) return Fate::kIpDestinationInvalid;
  const bool ports = view.protocol == roce::kIpProtoUdp || view.protocol == kIpProtoTcp;
  if (whole && ports && room >= header + 4) view.ports_at = at + header;
  return Fate::kRouted;
}

// Of addresses, protocol and ports; of addresses and protocol where a packet has no ports, as fragments,
// which so stay together.
uint64_t Router::flow_hash(std::span<const uint8_t> frame, const View& view) const noexcept {
  uint64_t h = ecmp_seed_;
  for (const IpAddress* a : {&view.src, &view.dst})
    h = mixed(mixed(h, word_of(a->bytes.data())), word_of(a->bytes.data() + 8));
  uint32_t ports = 0;
  if (view.ports_at != 0) std::memcpy(&ports, frame.data() + view.ports_at, 4);
  return finished(mixed(h, uint64_t{view.protocol} << 32 | ports));
}

// A flow keeps its next hop for as long as that one answers, whatever becomes of the others.
uint32_t Router::choose(const Fib::Entry& route, uint64_t hash) noexcept {
  const auto n = static_cast<uint32_t>(route.ways.size());
  const uint32_t first = route.ways[of(hash, n)];
  if (usable(first)) return first;
  uint32_t alive = 0;
  for (const uint32_t way : route.ways) alive += usable(way);
  if (alive == 0) return first;
  counters_.next_hops_avoided++;
  uint32_t left = of(hash >> 32, alive);
  for (const uint32_t way : route.ways)
    if (usable(way) && left-- == 0) return way;
  return first;
}

Fate Router::route(Frame& frame, bool may_hold, Time now, uint16_t& interface) noexcept {
  View view;
  if (const Fate fate = check(frame.bytes(), view); fate != Fate::kRouted) return fate;
  const Fib::Entry* entry = fib_.lookup(view.dst);
  if (entry == nullptr) {
    report(frame, view, kUnreachable4, kNet4, kUnreachable6, kNoRoute6, now);
    return Fate::kNoRoute;
  }
  if (entry->connected && entry->prefix.is_network_or_broadcast(view.dst)) return Fate::kIpDestinationInvalid;
  if (view.hops <= 1) {
    report(frame, view, kTimeExceeded4, 0, kTimeExceeded6, 0, now);
    return Fate::kTtlExpired;
  }
  uint32_t neighbour = 0;
  if (entry->connected) {
    neighbour = neighbours_.resolve(view.dst, entry->interface, entry->own, now);
    if (neighbour == NeighbourTable::kNone) return Fate::kNeighbourUnresolved;
  } else {
    neighbour = choose(*entry, flow_hash(frame.bytes(), view));
  }
  const Fate fate = send_to(neighbour, frame, view, may_hold, interface);
  if (fate == Fate::kRouted && !entry->connected) sent_[neighbour]++;
  return fate;
}

Fate Router::send_to(uint32_t neighbour, Frame& frame, const View& view, bool may_hold,
                     uint16_t& interface) noexcept {
  if (!neighbours_.known(neighbour))
    return may_hold && neighbours_.hold(neighbour, frame) ? Fate::kNeighbourHeld : Fate::kNeighbourUnresolved;
  interface = neighbours_.interface(neighbour);
  FrameBuffer* b = frame.buffer();
  // A tag for priority only does not cross a router.
  const auto tag = static_cast<uint32_t>(view.network.at - sizeof(EthernetHeader));
  b->offset += tag;
  b->length -= tag;
  auto* eth = reinterpret_cast<EthernetHeader*>(b->data());
  eth->dst = neighbours_.mac(neighbour);
  eth->src = mac_;
  eth->ether_type = view.network.type;
  if (view.v4) {
    decrement_ttl(*reinterpret_cast<Ipv4Header*>(eth + 1));
  } else {
    reinterpret_cast<Ipv6Header*>(eth + 1)->hop_limit--;
  }
  return Fate::kRouted;
}

void Router::decrement_ttl(Ipv4Header& ip) noexcept {
  const auto before = static_cast<uint16_t>(ip.ttl << 8 | ip.protocol);
  ip.ttl--;
  const auto after = static_cast<uint16_t>(ip.ttl << 8 | ip.protocol);
  ip.checksum = roce::updated_checksum(ip.checksum.value(), before, after);
}

Fate Router::route_own(Frame& frame, Time now, uint16_t& interface) noexcept {
  View view;
  const std::span<uint8_t> bytes = frame.bytes();
  view.network = network_of(bytes);
  const uint32_t at = view.network.at;
  if (view.network.type == roce::kEtherTypeIpv4) {
    const auto* ip = reinterpret_cast<const Ipv4Header*>(bytes.data() + at);
    view.src = IpAddress::from_v4(ip->src), view.dst = IpAddress::from_v4(ip->dst);
    view.protocol = ip->protocol;
    view.ports_at = at + static_cast<uint32_t>(sizeof(Ipv4Header));
  } else {
    const auto* ip = reinterpret_cast<const Ipv6Header*>(bytes.data() + at);
    view.src = IpAddress::from_v6(ip->src), view.dst = IpAddress::from_v6(ip->dst);
    view.protocol = ip->next_header;
    view.ports_at = at + static_cast<uint32_t>(sizeof(Ipv6Header));
  }
  const Fib::Entry* entry = fib_.lookup(view.dst);
  if (entry == nullptr) return Fate::kNoRoute;
  interface = entry->interface;
  MacAddress& to = reinterpret_cast<EthernetHeader*>(bytes.data())->dst;
  if (entry->connected && to != MacAddress{})
    return Fate::kRouted;  // the request came from there, so its MAC is the right one
  const uint32_t way = entry->connected ? neighbours_.resolve(view.dst, entry->interface, entry->own, now)
                                        : choose(*entry, flow_hash(bytes, view));
  // Nothing is held: who began to speak repeats it.
  if (way == NeighbourTable::kNone || !neighbours_.known(way)) return Fate::kNeighbourUnresolved;
  to = neighbours_.mac(way);
  interface = neighbours_.interface(way);
  if (!entry->connected) sent_[way]++;
  return Fate::kRouted;
}

bool Router::hear(const Frame& frame, uint16_t interface, Time now) noexcept {
  const std::span<uint8_t> bytes = frame.bytes();
  const Network network = network_of(bytes);
  if (network.vid != 0) return false;
  const MacAddress& to = reinterpret_cast<const EthernetHeader*>(bytes.data())->dst;
  if (network.type == roce::kEtherTypeArp) {
    if (bytes.size() < network.at + sizeof(ArpPacket)) return false;
    const auto* arp = reinterpret_cast<const ArpPacket*>(bytes.data() + network.at);
    if (!arp->is_ipv4_over_ethernet()) return false;
    hear_arp(bytes, network.at, interface, now);
    return to == mac_ && arp->operation.value() == kArpReply;
  }
  const std::span<const uint8_t> message = neighbour_message(bytes, network);
  if (message.empty()) return false;
  hear_neighbour(bytes.subspan(network.at), message, interface, now);
  return to == mac_ && message[0] == kAdvertisement;
}

void Router::hear_arp(std::span<const uint8_t> frame, uint32_t at, uint16_t interface, Time now) noexcept {
  const auto* arp = reinterpret_cast<const ArpPacket*>(frame.data() + at);
  const MacAddress& to = reinterpret_cast<const EthernetHeader*>(frame.data())->dst;
  const bool reply = arp->operation.value() == kArpReply;
  hear_address(IpAddress::from_v4(arp->sender_ip), arp->sender_mac, interface,
               local_.owns(IpAddress::from_v4(arp->target_ip)), reply && to == mac_, true, now);
}

// RFC 4861, 7.2.3 and 7.2.5. `packet` begins with its IPv6 header.
void Router::hear_neighbour(std::span<const uint8_t> packet, std::span<const uint8_t> message,
                            uint16_t interface, Time now) noexcept {
  const auto* ip = reinterpret_cast<const Ipv6Header*>(packet.data());
  const auto* nd = reinterpret_cast<const NeighbourMessage*>(message.data());
  const bool advertisement = nd->type == kAdvertisement;
  const uint8_t wanted = advertisement ? kTargetLinkLayer : kSourceLinkLayer;
  const MacAddress* mac = nullptr;
  for (size_t i = sizeof(NeighbourMessage); i + sizeof(LinkLayerOption) <= message.size();) {
    const auto* option = reinterpret_cast<const LinkLayerOption*>(message.data() + i);
    if (option->length_8 == 0) return;
    if (option->type == wanted && option->length_8 == 1) mac = &option->mac;
    i += size_t{option->length_8} * 8;
  }
  const IpAddress target = IpAddress::from_v6(nd->target);
  const IpAddress who = advertisement ? target : IpAddress::from_v6(ip->src);
  const uint32_t index = neighbours_.find(who);
  // An answer to a question to one host may leave the address out that was asked with.
  if (mac == nullptr && advertisement && index != NeighbourTable::kNone && neighbours_.known(index))
    mac = &neighbours_.mac(index);
  if (mac == nullptr) return;
  const uint32_t flags = advertisement ? nd->flags.value() : kOverride;
  hear_address(who, *mac, interface, advertisement ? false : local_.owns(target), flags & kSolicited,
               flags & kOverride, now);
}

// Those who speak to us are learned, of others only what is known already is changed (RFC 826).
void Router::hear_address(const IpAddress& address, const MacAddress& mac, uint16_t interface, bool to_us,
                          bool answer, bool override, Time now) noexcept {
  if (mac.is_multicast() || local_.owns(address)) return;
  const uint32_t index = neighbours_.find(address);
  if (index != NeighbourTable::kNone) {
    if (neighbours_.interface(index) == interface) neighbours_.hear(index, mac, answer, override, now);
    return;
  }
  if (!to_us) return;
  const Fib::Entry* entry = fib_.lookup(address);
  if (entry == nullptr || !entry->connected || entry->interface != interface ||
      entry->prefix.is_network_or_broadcast(address))
    return;
  neighbours_.learn(address, mac, interface, entry->own, now);
}

void Router::poll(Time now) noexcept { neighbours_.poll(now, made_); }

bool Router::next_released(Frame& frame, Fate& fate, Time now, uint16_t& interface) noexcept {
  frame = neighbours_.released().pop();
  if (frame) {
    fate = route(frame, false, now, interface);
    return true;
  }
  frame = neighbours_.given_up().pop();
  if (!frame) return false;
  View view;
  fate = check(frame.bytes(), view);
  if (fate != Fate::kRouted) return true;
  report(frame, view, kUnreachable4, kHost4, kUnreachable6, kAddress6, now);
  fate = Fate::kNeighbourUnresolved;
  return true;
}

// Our address on the interface that the error leaves by, in its reader's subnet if there is one.
const IpAddress* Router::source_for(const IpAddress& to, uint16_t interface) const noexcept {
  const IpAddress *there = nullptr, *anywhere = nullptr;
  for (const InterfaceAddress& i : interfaces_) {
    const IpAddress& own = i.prefix.address;
    if (own.is_v4() != to.is_v4()) continue;
    if (i.interface == interface && i.has_subnet && i.prefix.contains(to)) return &own;
    if (there == nullptr && i.interface == interface) there = &own;
    if (anywhere == nullptr) anywhere = &own;
  }
  return there != nullptr ? there : anywhere;
}

// Tells the sender, back along the way that its packet came.
void Router::report(const Frame& frame, const View& view, uint8_t type4, uint8_t code4, uint8_t type6,
                    uint8_t code6, Time now) noexcept {
  if (!may_be_reported(frame.bytes(), view.network.at)) return;
  const uint16_t interface = interface_of(frame.port());
  const IpAddress* from = source_for(view.src, interface);
  if (from == nullptr) return;
  IcmpError error{view.v4 ? type4 : type6, view.v4 ? code4 : code6,
                  reinterpret_cast<const EthernetHeader*>(frame.bytes().data())->src, mac_, *from};
  Frame answer;
  if (icmp_bucket_.take(now)) answer = build_icmp_error(pool_, error, frame.bytes(), view.network.at);
  if (!answer) {
    counters_.icmp_errors_limited++;
    return;
  }
  counters_.icmp_errors_sent++;
  answer.set_port(interface);
  made_.push(std::move(answer));
}

std::vector<Router::RouteInfo> Router::routes() const {
  std::vector<RouteInfo> all;
  for (const Fib::Entry& e : fib_.entries()) {
    RouteInfo info{e.prefix, e.connected, e.interface, {}};
    for (const uint32_t way : e.ways) {
      const Fib::NextHop& hop = fib_.next_hops()[way];
      info.ways.push_back({hop.address, hop.interface, neighbours_.state(way), sent_[way]});
    }
    all.push_back(std::move(info));
  }
  return all;
}

RouterCounters Router::counters() const {
  RouterCounters all = counters_;
#define X(n) all.n = neighbours_.counters().n;
  MILLRACE_NEIGHBOUR_COUNTERS(X)
#undef X
  return all;
}

}  // namespace millrace::switching
