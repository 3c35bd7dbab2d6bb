#include "switch/pipeline.h"

#include "buffering/local_store.h"
#include "buffering/tiered_store.h"
#include "roce/error.h"
#include "switch/copy.h"

namespace millrace::switching {

namespace {

constexpr size_t kChunk = 32;  // frames prefetched together

// 01-80-C2-00-00-00 … 0F: protocols between neighbours (pause, LLDP, spanning tree) that no bridge forwards.
bool is_reserved_multicast(const MacAddress& mac) {
  static constexpr uint8_t kPrefix[5] = {0x01, 0x80, 0xC2, 0x00, 0x00};
  return std::memcmp(mac.bytes.data(), kPrefix, 5) == 0 && mac.bytes[5] < 0x10;
}

uint16_t checked_ports(uint16_t ports) {
  // Each may be a routed port, whose domain of MAC addresses stands behind those of all VLANs.
  if (ports == 0 || ports > kBridge - kVlans)
    throw Error(ErrorCode::kConfig, "a pipeline needs 1 … 61438 ports");
  return ports;
}

// Without routing, every address is the bridge's.
std::vector<InterfaceAddress> interfaces(const PipelineConfig& config) {
  if (!config.routing.interfaces.empty()) return config.routing.interfaces;
  std::vector<InterfaceAddress> all;
  for (const IpAddress& a : config.engine.addresses) all.push_back({{a, 0}, kBridge, false});
  return all;
}

}  // namespace

Pipeline::Pipeline(const PipelineConfig& config, FramePool& pool)
    : mac_(config.engine.mac),
      ports_(checked_ports(config.ports)),
      pool_(pool),
      local_(config.engine.mac, interfaces(config)),
      l2_(config.l2, config.ports, config.engine.seed),
      flood_buckets_(config.ports + 1u, TokenBucket(config.l2.flood_pps)),
      engine_(config.engine, pool) {
  if (config.routing.enabled())
    router_.emplace(config.routing, local_, ports_, mac_, config.engine.seed, pool);
  for (uint16_t port = 0; port < ports_; port++)
    if (!router_ || !router_->is_routed_port(port)) bridged_.push_back(port);
  if (!config.buffers) return;
  buffers_.emplace(*config.buffers, pool, make_store(config));
}

// Where spilled packets go: local memory, lent memory, or the one before the other.
std::unique_ptr<buffering::Store> Pipeline::make_store(const PipelineConfig& config) {
  const buffering::SpillwayConfig& spillway = config.buffers->spillway;
  if (!spillway.enabled) return nullptr;
  const uint32_t ids = buffering::Spillway::ids_max(spillway);
  const uint64_t here = config.remote ? config.spill_local : spillway.pool_size;
  std::unique_ptr<buffering::Store> local;
  if (here != 0) local = std::make_unique<buffering::LocalStore>(here, spillway.frames_max, ids);
  if (!config.remote) return local;
  if (!router_)
    throw Error(ErrorCode::kConfig,
                "to reach lenders of memory, the switch needs an address with a prefix length");
  buffering::RemoteStoreConfig rc = *config.remote;
  rc.mac = config.engine.mac;
  rc.addresses = config.engine.addresses;
  rc.ca_guid = config.engine.seed;
  rc.seed = config.engine.seed;
  rc.ids = ids;
  auto lent = std::make_unique<buffering::RemoteStore>(rc, pool_);
  remote_ = lent.get();
  if (!local) return lent;
  return std::make_unique<buffering::TieredStore>(std::move(local), std::move(lent), ids);
}

void Pipeline::process(FrameList& received, Time now, FrameList& out) noexcept {
  Frame chunk[kChunk];
  const bool any = !received.empty();
  while (!received.empty()) {
    size_t n = 0;
    while (n < kChunk && !received.empty()) {
      chunk[n] = received.pop();
      __builtin_prefetch(chunk[n].buffer()->data());
      __builtin_prefetch(chunk[n].buffer()->data() + 64);
      n++;
    }
    for (size_t i = 0; i < n; i++) {
      counters_.received++;
      counters_.fates[static_cast<size_t>(receive(std::move(chunk[i]), now, out))]++;
    }
  }
  if (any) engine_.poll(now, engine_out_);
  finish(now, out);
}

void Pipeline::poll(Time now, FrameList& out) noexcept {
  engine_.poll(now, engine_out_);
  if (router_) router_->poll(now);
  finish(now, out);
}

void Pipeline::finish(Time now, FrameList& out) noexcept {
  route_engine_frames(now, out);
  if (router_) route_router_frames(now, out);
  if (buffers_) serve_buffers(now, out);
  check_books();
}

Fate Pipeline::receive(Frame frame, Time now, FrameList& out) noexcept {
  if (frame.bytes().size() < sizeof(roce::EthernetHeader)) return Fate::kL2Truncated;
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  const uint16_t ingress = frame.port();
  assert(ingress < ports_);
  if (eth.src.is_multicast() || eth.src == MacAddress{}) return Fate::kL2SourceInvalid;
  if (eth.src == mac_) return Fate::kL2SourceOurs;
  const Network network = network_of(frame.bytes());
  const bool routed = router_ && router_->is_routed_port(ingress);
  if (routed && network.vid != 0) return Fate::kTagOnRoutedPort;
  learn(eth, routed ? routed_domain(ingress) : network.vid, ingress, now);
  const uint16_t interface = routed ? ingress : kBridge;
  if (eth.dst == mac_) {
    const Fate fate = receive_ours(frame, network, interface, now, out);
    return reply(frame, fate, now, out);
  }
  if (eth.dst.is_multicast()) return receive_group(std::move(frame), network, interface, now, out);
  // RoCE that passes through is not looked at: a switch in the middle checks and changes nothing.
  return routed ? Fate::kNotBridged : forward(std::move(frame), ingress, now, out);
}

// A frame whose source is not learned goes on all the same: which of two ports forges an address nobody can
// tell from the frame, and to drop it would let a forger that was there first silence the owner.
void Pipeline::learn(const roce::EthernetHeader& eth, uint16_t domain, uint16_t ingress, Time now) noexcept {
  switch (l2_.learn(eth.src, domain, ingress, now)) {
    case L2Table::Learned::kKnown:
      break;
    case L2Table::Learned::kNew:
      counters_.l2_learned++;
      break;
    case L2Table::Learned::kMoved:
      counters_.l2_moved++;
      break;
    case L2Table::Learned::kFull:
      counters_.l2_full++;
      break;
    case L2Table::Learned::kMoveRefused:
      counters_.l2_move_refused++;
      break;
  }
}

// A frame to our MAC address: routed, to the engine, answered in place, or dropped by name.
Fate Pipeline::receive_ours(Frame& frame, const Network& network, uint16_t interface, Time now,
                            FrameList& out) noexcept {
  if (router_ && network.vid == 0) {
    if (router_->wants(frame)) {
      const uint16_t ingress = frame.port();
      uint16_t egress = kBridge;
      const Fate fate = router_->route(frame, now, egress);
      return fate == Fate::kRouted ? send_routed(std::move(frame), egress, ingress, now, out) : fate;
    }
    if (hear(frame, interface, now, out)) return Fate::kNeighbourHeard;
  }
  roce::Packet packet;
  roce::ParseVerdict verdict = roce::parse(frame.bytes(), packet);
  if (verdict == roce::ParseVerdict::kNotRoce) return local_.answer(frame, true, interface);
  if (verdict == roce::ParseVerdict::kOk) {
    if (!local_.owns(packet.dst_ip)) return Fate::kNotForUs;
    if (roce::icrc_ok(packet)) {
      if (remote_ != nullptr && remote_->receive(packet, now, engine_out_)) return Fate::kToStore;
      engine_.receive(std::move(frame), packet, now, engine_out_);
      return Fate::kToEngine;
    }
    verdict = roce::ParseVerdict::kBadIcrc;
  }
  counters_.roce_drops[static_cast<size_t>(verdict)]++;
  return Fate::kRoceInvalid;
}

Fate Pipeline::receive_group(Frame frame, const Network& network, uint16_t interface, Time now,
                             FrameList& out) noexcept {
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  if (is_reserved_multicast(eth.dst)) {
    const bool pause = buffers_ && buffers_->hear_pause(frame, frame.port(), now);
    return pause ? Fate::kPauseHeard : Fate::kReservedMulticast;
  }
  if (router_ && network.vid == 0) hear(frame, interface, now, out);
  const Fate fate = local_.answer(frame, false, interface);
  if (fate != Fate::kNotForUs) return reply(frame, fate, now, out);
  // A group's frame that is no question to us concerns the others.
  const uint16_t ingress = frame.port();
  return interface == kBridge ? flood(std::move(frame), ingress, ingress, now, out) : Fate::kNotBridged;
}

// What waited for the neighbour leaves before what comes behind it.
bool Pipeline::hear(const Frame& frame, uint16_t interface, Time now, FrameList& out) noexcept {
  const bool answer = router_->hear(frame, interface, now);
  route_router_frames(now, out);
  return answer;
}

// Answers leave by the port that the question came in on.
Fate Pipeline::reply(Frame& frame, Fate fate, Time now, FrameList& out) noexcept {
  if (fate == Fate::kArpReplied || fate == Fate::kNdReplied || fate == Fate::kEchoReplied) {
    const uint16_t ingress = frame.port();
    emit(std::move(frame), ingress, ports_, now, out);
  }
  return fate;
}

// On the bridge. `ingress` is ports_ for frames of our own.
Fate Pipeline::forward(Frame frame, uint16_t ingress, Time now, FrameList& out) noexcept {
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  const uint16_t egress = l2_.lookup(eth.dst, network_of(frame.bytes()).vid, now);
  if (egress == kNoPort) return flood(std::move(frame), ingress, ingress, now, out);
  if (egress == ingress) return Fate::kHairpin;
  emit(std::move(frame), egress, ingress, now, out);
  return Fate::kForwarded;
}

// To all ports of the bridge but `ingress`, at the expense of `payer`: a port, or ports_ for ourselves.
Fate Pipeline::flood(Frame frame, uint16_t ingress, uint16_t payer, Time now, FrameList& out) noexcept {
  // The original goes to the last port, copies to the ones before.
  size_t last = bridged_.size();
  while (last > 0 && bridged_[last - 1] == ingress) last--;
  if (last == 0) return Fate::kNoEgress;
  last--;
  if (!flood_buckets_[payer].take(now)) return Fate::kFloodLimited;
  for (size_t i = 0; i < last; i++) {
    if (bridged_[i] == ingress) continue;
    Frame copy = copy_flat(pool_, frame);
    if (!copy) {
      counters_.flood_copies_failed++;
      continue;
    }
    counters_.flood_copies++;
    emit(std::move(copy), bridged_[i], payer, now, out);
  }
  emit(std::move(frame), bridged_[last], payer, now, out);
  return Fate::kFlooded;
}

// A frame whose next hop's MAC it has. On the bridge it may leave by the port that it came in on: a host that
// uses us as the router towards its neighbour.
Fate Pipeline::send_routed(Frame frame, uint16_t interface, uint16_t payer, Time now,
                           FrameList& out) noexcept {
  uint16_t port = interface;
  if (interface == kBridge) {
    const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
    port = l2_.lookup(eth.dst, 0, now);
    if (port == kNoPort) return flood(std::move(frame), ports_, payer, now, out);
  }
  emit(std::move(frame), port, payer, now, out);
  return Fate::kRouted;
}

// A frame of the engine: by its route; if there is none, to where its MAC address was heard, which may be a
// routed port. A CNP that speaks for a bridged frame's destination has that one's MAC address, and is
// bridged.
Fate Pipeline::send_own(Frame frame, Time now, FrameList& out) noexcept {
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  if (!router_ || eth.src != mac_ || network_of(frame.bytes()).vid != 0)
    return forward(std::move(frame), ports_, now, out);
  uint16_t interface = kBridge;
  const Fate fate = router_->route_own(frame, now, interface);
  if (fate == Fate::kRouted && interface == kBridge) return forward(std::move(frame), ports_, now, out);
  if (fate == Fate::kRouted) {
    emit(std::move(frame), interface, ports_, now, out);
    return fate;
  }
  const MacAddress& to = reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data())->dst;
  uint16_t egress = kNoPort;
  for (uint16_t port = 0; port < ports_ && egress == kNoPort; port++)
    if (router_->is_routed_port(port)) egress = l2_.lookup(to, routed_domain(port), now);
  if (egress == kNoPort) egress = l2_.lookup(to, 0, now);
  if (egress == kNoPort) return fate;
  emit(std::move(frame), egress, ports_, now, out);
  return Fate::kForwarded;
}

// `source` is the frame's ingress port, or ports_ for frames of our own.
void Pipeline::emit(Frame frame, uint16_t port, uint16_t source, Time now, FrameList& out) noexcept {
  counters_.emitted++;
  if (buffers_) {
    buffers_->enqueue(std::move(frame), port, source == ports_ ? buffering::kNoSource : source, now, out);
    return;
  }
  frame.set_port(port);
  out.push(std::move(frame));
}

void Pipeline::serve_buffers(Time now, FrameList& out) noexcept {
  buffers_->poll(now, out);
  if (remote_ != nullptr) {
    // Leases end once everything is back.
    if (ending_ && !remote_->closing() && buffers_->empty()) remote_->shutdown(now, engine_out_);
  }
  engine_out_.splice(buffers_->own_frames());
  route_engine_frames(now, out);
  while (Frame frame = buffers_->next_rerouted()) {
    const std::optional<uint16_t> port = another_way(frame, now);
    buffers_->reenqueue(std::move(frame), port);
  }
}

// Of a frame that was spilled for a port whose link is down. What was bridged has no other.
std::optional<uint16_t> Pipeline::another_way(Frame& frame, Time now) noexcept {
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  if (!router_ || eth.src != mac_) return std::nullopt;
  uint16_t interface = kBridge;
  if (router_->route_again(frame, now, interface) != Fate::kRouted) return std::nullopt;
  if (interface != kBridge) return interface;
  const auto& rewritten = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  const uint16_t port = l2_.lookup(rewritten.dst, 0, now);
  if (port == kNoPort) return std::nullopt;
  return port;
}

void Pipeline::set_link(uint16_t port, bool up, Time now, FrameList& out) noexcept {
  if (router_) router_->set_link(port, up);
  if (!buffers_ || !buffers_->set_link(port, up, out)) return;
  finish(now, out);
}

void Pipeline::route_engine_frames(Time now, FrameList& out) noexcept {
  while (Frame frame = engine_out_.pop()) {
    counters_.from_engine++;
    counters_.engine_fates[static_cast<size_t>(send_own(std::move(frame), now, out))]++;
  }
}

// What waited for a neighbour, and what the router made itself.
void Pipeline::route_router_frames(Time now, FrameList& out) noexcept {
  Frame frame;
  Fate fate;
  uint16_t interface = kBridge;
  while (router_->next_released(frame, fate, now, interface)) {
    counters_.from_router++;
    const uint16_t ingress = frame.port();
    if (fate == Fate::kRouted) fate = send_routed(std::move(frame), interface, ingress, now, out);
    counters_.router_fates[static_cast<size_t>(fate)]++;
  }
  while ((frame = router_->made().pop())) {
    counters_.from_router++;
    interface = frame.port();
    if (interface == kBridge) {
      fate = forward(std::move(frame), ports_, now, out);
    } else {
      emit(std::move(frame), interface, ports_, now, out);
      fate = Fate::kForwarded;
    }
    counters_.router_fates[static_cast<size_t>(fate)]++;
  }
}

// Each frame left exactly once: in = out, for each origin and for what was emitted.
void Pipeline::check_books() const noexcept {
  auto sum = [](const auto& fates) {
    uint64_t n = 0;
    for (const uint64_t v : fates) n += v;
    return n;
  };
  auto sent = [](const auto& fates) {
    uint64_t n = 0;
    for (const Fate f : {Fate::kForwarded, Fate::kFlooded, Fate::kRouted, Fate::kArpReplied, Fate::kNdReplied,
                         Fate::kEchoReplied})
      n += fates[static_cast<size_t>(f)];
    return n;
  };
  assert(counters_.received == sum(counters_.fates));
  assert(counters_.from_engine == sum(counters_.engine_fates));
  assert(counters_.from_router == sum(counters_.router_fates));
  assert(counters_.fate(Fate::kRoceInvalid) == sum(counters_.roce_drops));
  assert(counters_.emitted == sent(counters_.fates) + sent(counters_.engine_fates) +
                                  sent(counters_.router_fates) + counters_.flood_copies);
  (void)sum, (void)sent;
}

void Pipeline::announce(Time now, FrameList& out) {
  for (const InterfaceAddress& address : local_.addresses()) {
    Frame frame = local_.announcement(address, pool_);
    if (!frame) continue;
    counters_.from_router++;
    Fate fate = Fate::kForwarded;
    if (address.interface == kBridge)
      fate = flood(std::move(frame), ports_, ports_, now, out);
    else
      emit(std::move(frame), address.interface, ports_, now, out);
    counters_.router_fates[static_cast<size_t>(fate)]++;
  }
  check_books();
}

void Pipeline::shutdown(Time now, FrameList& out) {
  engine_.shutdown(now, engine_out_);
  ending_ = true;
  finish(now, out);
}

bool Pipeline::abort_group(uint32_t id, const std::string& why, Time now, FrameList& out) {
  const bool found = engine_.abort_group(id, why, now, engine_out_);
  finish(now, out);
  return found;
}

}  // namespace millrace::switching
