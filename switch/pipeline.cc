#include "switch/pipeline.h"

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
  if (ports == 0 || ports >= kNoPort) throw Error(ErrorCode::kConfig, "a pipeline needs 1 … 65534 ports");
  return ports;
}

}  // namespace

Pipeline::Pipeline(const PipelineConfig& config, FramePool& pool)
    : mac_(config.engine.mac),
      ports_(checked_ports(config.ports)),
      pool_(pool),
      local_(config.engine.mac, config.engine.addresses),
      l2_(config.l2, config.ports, config.engine.seed),
      flood_buckets_(config.ports + 1u, TokenBucket(config.l2.flood_pps)),
      engine_(config.engine, pool) {}

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
  route_engine_frames(now, out);
  check_books();
}

void Pipeline::poll(Time now, FrameList& out) noexcept {
  engine_.poll(now, engine_out_);
  route_engine_frames(now, out);
  check_books();
}

Fate Pipeline::receive(Frame frame, Time now, FrameList& out) noexcept {
  if (frame.bytes().size() < sizeof(roce::EthernetHeader)) return Fate::kL2Truncated;
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  const uint16_t ingress = frame.port();
  assert(ingress < ports_);
  if (eth.src.is_multicast() || eth.src == MacAddress{}) return Fate::kL2SourceInvalid;
  if (eth.src == mac_) return Fate::kL2SourceOurs;
  switch (l2_.learn(eth.src, ingress, now)) {
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
      return Fate::kL2MoveRefused;
  }

  Fate fate = Fate::kNotForUs;
  if (eth.dst == mac_) {
    fate = receive_ours(frame, now);
  } else if (eth.dst.is_multicast()) {
    if (is_reserved_multicast(eth.dst)) return Fate::kReservedMulticast;
    fate = local_.answer(frame, false);
    // A group's frame that is no question to us concerns the others.
    if (fate == Fate::kNotForUs) return flood(std::move(frame), ingress, now, out);
  } else {
    // RoCE that passes through is not looked at: a switch in the middle checks and changes nothing.
    return forward(std::move(frame), ingress, now, out);
  }
  if (fate == Fate::kArpReplied || fate == Fate::kNdReplied || fate == Fate::kEchoReplied)
    emit(std::move(frame), ingress, out);
  return fate;
}

// A frame to our MAC address: to the engine, answered in place, or dropped by name.
Fate Pipeline::receive_ours(Frame& frame, Time now) noexcept {
  roce::Packet packet;
  roce::ParseVerdict verdict = roce::parse(frame.bytes(), packet);
  if (verdict == roce::ParseVerdict::kNotRoce) return local_.answer(frame, true);
  if (verdict == roce::ParseVerdict::kOk) {
    if (!local_.owns(packet.dst_ip)) return Fate::kNotForUs;
    if (roce::icrc_ok(packet)) {
      engine_.receive(std::move(frame), packet, now, engine_out_);
      return Fate::kToEngine;
    }
    verdict = roce::ParseVerdict::kBadIcrc;
  }
  counters_.roce_drops[static_cast<size_t>(verdict)]++;
  return Fate::kRoceInvalid;
}

// `ingress` is ports_ for the engine's frames.
Fate Pipeline::forward(Frame frame, uint16_t ingress, Time now, FrameList& out) noexcept {
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
  const uint16_t egress = l2_.lookup(eth.dst, now);
  if (egress == kNoPort) return flood(std::move(frame), ingress, now, out);
  if (egress == ingress) return Fate::kHairpin;
  emit(std::move(frame), egress, out);
  return Fate::kForwarded;
}

Fate Pipeline::flood(Frame frame, uint16_t ingress, Time now, FrameList& out) noexcept {
  const uint16_t others = static_cast<uint16_t>(ingress < ports_ ? ports_ - 1 : ports_);
  if (others == 0) return Fate::kNoEgress;
  if (!flood_buckets_[ingress].take(now)) return Fate::kFloodLimited;
  // The original goes to the last port, copies to the ones before.
  const uint16_t last = static_cast<uint16_t>(ingress == ports_ - 1 ? ports_ - 2 : ports_ - 1);
  for (uint16_t port = 0; port < last; port++) {
    if (port == ingress) continue;
    Frame copy = copy_flat(pool_, frame);
    if (!copy) {
      counters_.flood_copies_failed++;
      continue;
    }
    counters_.flood_copies++;
    emit(std::move(copy), port, out);
  }
  emit(std::move(frame), last, out);
  return Fate::kFlooded;
}

void Pipeline::emit(Frame frame, uint16_t port, FrameList& out) noexcept {
  frame.set_port(port);
  counters_.emitted++;
  out.push(std::move(frame));
}

void Pipeline::route_engine_frames(Time now, FrameList& out) noexcept {
  while (Frame frame = engine_out_.pop()) {
    counters_.from_engine++;
    counters_.engine_fates[static_cast<size_t>(forward(std::move(frame), ports_, now, out))]++;
  }
}

// Each frame left exactly once: in = out, for both origins and for what was emitted.
void Pipeline::check_books() const noexcept {
  auto sum = [](const auto& fates) {
    uint64_t n = 0;
    for (const uint64_t v : fates) n += v;
    return n;
  };
  auto sent = [](const auto& fates) {
    uint64_t n = 0;
    for (const Fate f :
         {Fate::kForwarded, Fate::kFlooded, Fate::kArpReplied, Fate::kNdReplied, Fate::kEchoReplied})
      n += fates[static_cast<size_t>(f)];
    return n;
  };
  assert(counters_.received == sum(counters_.fates));
  assert(counters_.from_engine == sum(counters_.engine_fates));
  assert(counters_.fate(Fate::kRoceInvalid) == sum(counters_.roce_drops));
  assert(counters_.emitted == sent(counters_.fates) + sent(counters_.engine_fates) + counters_.flood_copies);
  (void)sum, (void)sent;
}

void Pipeline::shutdown(Time now, FrameList& out) {
  engine_.shutdown(now, engine_out_);
  route_engine_frames(now, out);
}

bool Pipeline::abort_group(uint32_t id, const std::string& why, Time now, FrameList& out) {
  const bool found = engine_.abort_group(id, why, now, engine_out_);
  route_engine_frames(now, out);
  return found;
}

}  // namespace millrace::switching
