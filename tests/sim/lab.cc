#include "tests/sim/lab.h"

#include <algorithm>

namespace millrace::sim {

namespace {

constexpr Time kHello = std::chrono::microseconds(1);
constexpr uint8_t kAckSyndrome = 0x1F, kNakSyndrome = 0x60;

}  // namespace

buffering::PortConfig lab_port(double rate_gbit, uint64_t queue_limit, bool spill) {
  buffering::PortConfig port;
  port.rate_bps = static_cast<uint64_t>(rate_gbit * 1e9);
  port.dscp_to_tc.fill(0);
  port.dscp_to_tc[26] = 3;
  port.dscp_to_tc[48] = 6;
  for (auto& q : port.queues) q.profile.static_th = queue_limit;
  port.queues[3].profile.spill = spill;
  return port;
}

std::vector<uint8_t> LabHost::pause_frame(uint8_t priority, uint16_t quanta) const {
  std::vector<uint8_t> f(60, 0);
  const uint8_t to[6] = {0x01, 0x80, 0xC2, 0x00, 0x00, 0x01};
  std::copy_n(to, 6, f.begin());
  std::copy_n(mac().bytes.begin(), 6, f.begin() + 6);
  set_be(f.data() + 12, 2, 0x8808);
  set_be(f.data() + 14, 2, 0x0101);
  set_be(f.data() + 16, 2, 1u << priority);
  set_be(f.data() + 18 + 2 * priority, 2, quanta);
  return f;
}

void LabHost::put(std::span<const uint8_t> frame, Time now) {
  const auto busy =
      Time(static_cast<int64_t>(static_cast<double>(frame.size() + kEthernetOverhead) * ns_per_byte_));
  free_at_ = std::max(free_at_, now) + busy;
  network_->send(*this, 0, frame);
}

NicPacket LabHost::packet(const Stream& s) const {
  NicPacket p;
  const bool sender = s.config.from == index_;
  const LabHost& peer = *peers_[sender ? s.config.to : s.config.from];
  p.to_mac = peer.mac(), p.from_mac = mac();
  p.to = peer.address(), p.from = address();
  p.udp_port = static_cast<uint16_t>(0xC000 + s.qpn);
  p.qpn = sender ? s.qpn : s.sender_qpn;
  return p;
}

bool LabHost::may_send(const Stream& s, Time now) const {
  if (s.next >= s.packets() || s.next_at > now) return false;
  return !s.config.closed || s.next - s.una < s.config.window;
}

void LabHost::send_one(Stream& s, Time now) {
  NicPacket p = packet(s);
  p.opcode = s.config.opcode;
  const uint8_t dscp = s.next % 2 ? s.config.odd_dscp : s.config.dscp;
  p.traffic_class = static_cast<uint8_t>(dscp << 2 | s.config.ecn);
  p.psn = static_cast<uint32_t>(s.next) & 0xFFFFFF;
  p.ack_request = s.config.closed && (s.next % 8 == 7 || s.next + 1 == s.packets());
  std::vector<uint8_t> payload(s.config.payload, static_cast<uint8_t>(s.next));
  if (payload.size() >= 8) set_be(payload.data(), 8, s.next);
  p.payload = payload;
  if (s.next < s.sent_at.size()) {
    s.retransmitted++;
  } else {
    s.sent_at.push_back(now);
  }
  s.sent++;
  s.next++;
  const double gbit = s.rate ? s.rate->gbit(now) : s.config.gbit;
  const auto gap = Time(static_cast<int64_t>(static_cast<double>(s.wire_bytes() * 8) / gbit));
  // An open loop keeps its schedule, a closed one its distance, but for what it waited for the wire.
  s.next_at = (s.config.closed ? std::max(s.next_at, now - 2 * gap) : s.next_at) + gap;
  if (s.rate) s.rate->sent(s.frame_bytes(), now);
  if (s.config.closed && s.timer == kNever) s.timer = now + s.config.timeout;
  put(make_frame(p), now);
}

void LabHost::run(Time now) {
  for (const Arrival& a : inbox_) {
    receive(a.packet->span(), now);
    network_->recycle(a.packet);
  }
  inbox_.clear();
  for (Timed& t : frames_)
    if (t.at <= now && !t.frame.empty()) {
      put(t.frame, now);
      t.frame.clear();
    }
  std::erase_if(frames_, [](const Timed& t) { return t.frame.empty(); });
  for (Stream* s : out)
    if (s->timer <= now) {
      s->timeouts++;
      s->next = s->una;
      s->timer = now + s->config.timeout;
    }
  if (obeys_pause && paused_until > now) return;
  // One packet at a time, the streams in turn.
  for (size_t n = 0; n < out.size() && free_at_ <= now; n++) {
    Stream& s = *out[turn_++ % out.size()];
    if (may_send(s, now)) send_one(s, now);
  }
}

Time LabHost::next_deadline() const {
  Time t = kNever;
  for (const Timed& f : frames_) t = std::min(t, f.at);
  for (const Stream* s : out) {
    t = std::min(t, s->timer);
    if (s->next >= s->packets() || (s->config.closed && s->next - s->una >= s->config.window)) continue;
    const Time ready = std::max(s->next_at, free_at_);
    t = std::min(t, obeys_pause ? std::max(ready, paused_until) : ready);
  }
  return t;
}

void LabHost::receive(std::span<const uint8_t> bytes, Time now) {
  if (keep) seen.emplace_back(bytes.begin(), bytes.end());
  if (bytes.size() >= 34 && get_be(bytes.data() + 12, 2) == 0x8808) {
    const uint64_t enable = get_be(bytes.data() + 16, 2);
    for (int i = 0; i < 8; i++) {
      if ((enable >> i & 1) == 0) continue;
      const uint64_t quanta = get_be(bytes.data() + 18 + 2 * i, 2);
      (quanta != 0 ? pauses : resumes)++;
      paused_until = now + Time(static_cast<int64_t>(static_cast<double>(quanta * 64) * ns_per_byte_));
    }
    return;
  }
  NicPacket p;
  if (read_frame(bytes, p) != Reading::kGood || p.to != address()) return;
  for (Stream* s : in)
    if (s->qpn == p.qpn && p.opcode == s->config.opcode) return take_data(*s, p, now);
  // As an adapter, from the queue pair's peer only.
  for (Stream* s : out)
    if (s->sender_qpn == p.qpn && p.from == peers_[s->config.to]->address()) return take_ack(*s, p, now);
}

void LabHost::take_data(Stream& s, const NicPacket& p, Time now) {
  const uint64_t number = p.payload.size() >= 8 ? get_be(p.payload.data(), 8) : p.psn;
  s.received++;
  s.last_at = now;
  s.marked += p.congestion_experienced();
  if (static_cast<int64_t>(number) > s.last) {
    s.in_order++;
    s.gaps += number - static_cast<uint64_t>(s.last + 1);
    s.last = static_cast<int64_t>(number);
    s.latency_max = std::max(s.latency_max, now - s.sent_at[number]);
  } else if (!s.config.closed) {
    s.overtaken++;
  }
  if (!s.config.closed) return;
  if (s.config.dcqcn && p.congestion_experienced() && now - s.cnp_at >= std::chrono::microseconds(50)) {
    s.cnp_at = now;
    answer(s, kOpCnp, 0, 0);
  }
  if (number == s.expected) {
    s.expected++;
    s.nak_out = false;
    if (p.ack_request) answer(s, kOpAck, kAckSyndrome, number);
  } else if (number < s.expected) {
    s.duplicates++;
    answer(s, kOpAck, kAckSyndrome, s.expected - 1);
  } else if (!s.nak_out) {
    s.nak_out = true;
    s.naks++;
    answer(s, kOpAck, kNakSyndrome, s.expected);
  }
}

void LabHost::answer(const Stream& s, uint8_t opcode, uint8_t syndrome, uint64_t number) {
  NicPacket p = packet(s);
  p.opcode = opcode;
  p.psn = static_cast<uint32_t>(number) & 0xFFFFFF;
  p.syndrome = syndrome;
  p.becn = opcode == kOpCnp;
  p.traffic_class = opcode == kOpCnp ? 48 << 2 : static_cast<uint8_t>(s.config.dscp << 2 | 2);
  const uint8_t nothing[16] = {};
  if (opcode == kOpCnp) p.payload = nothing;
  put(make_frame(p), network_->now());
}

void LabHost::take_ack(Stream& s, const NicPacket& p, Time now) {
  if (p.opcode == kOpCnp) {
    s.cnps++;
    if (s.rate) s.rate->on_cnp(now);
    return;
  }
  // The number behind 24 bits, nearest to what is outstanding.
  const auto number = s.una + ((p.psn - s.una) & 0xFFFFFF);
  const uint64_t through = p.syndrome == kNakSyndrome ? number : number + 1;
  if (through > s.sent_at.size()) return;  // far behind
  if (through > s.una) {
    s.una = through;
    s.timer = s.una < s.next ? now + s.config.timeout : kNever;
  }
  if (p.syndrome == kNakSyndrome) s.next = s.una;
  if (s.una > s.next) s.next = s.una;
  if (s.una >= s.packets()) {
    s.timer = kNever;
    if (s.done_at == kNever) s.done_at = now;
  }
}

Lab::Lab(const LabConfig& config) : config_(config), network_(config.seed) {
  switching::PipelineConfig pc;
  pc.ports = config.hosts;
  pc.engine.mac = {{2, 0x53, 0, 0, 0, 1}};
  pc.engine.addresses = {*IpAddress::parse("10.77.0.1")};
  if (config.buffered) {
    pc.buffers = config.buffers;
    pc.buffers->ports.resize(config.hosts, lab_port(0, buffering::kNoLimit, false));
    pc.buffers->mac = pc.engine.mac;
  }
  switch_ = std::make_unique<SwitchNode>(pc, UINT32_MAX);
  network_.add(*switch_);
  for (uint16_t h = 0; h < config.hosts; h++) {
    hosts_.push_back(std::make_unique<LabHost>(h, config.host_gbit));
    network_.add(*hosts_.back());
    LinkConfig link;
    link.gbit = config.host_gbit;
    link.delay = h < config.delay.size() ? config.delay[h] : std::chrono::microseconds(1);
    network_.wire(*hosts_[h], 0, *switch_, h, link);
  }
  for (auto& host : hosts_) {
    for (auto& peer : hosts_) host->peers_.push_back(peer.get());
    // The switch learns where everybody is.
    std::vector<uint8_t> hello(60, 0);
    std::fill_n(hello.begin(), 6, 0xFF);
    std::copy_n(host->mac().bytes.begin(), 6, hello.begin() + 6);
    set_be(hello.data() + 12, 2, 0x88B5);  // for local experiments
    host->send_at(kHello, hello);
    network_.touch(*host);
  }
}

Lab::~Lab() = default;

Stream& Lab::add(const StreamConfig& config) {
  Stream& s = *streams_.emplace_back(std::make_unique<Stream>());
  s.config = config;
  s.qpn = static_cast<uint32_t>(100 + streams_.size());
  s.sender_qpn = s.qpn + 0x8000;
  s.next_at = config.start;
  if (config.dcqcn) {
    DcqcnParameters p = config.reaction;
    p.line_gbit = config.gbit;
    s.rate.emplace(p);
  }
  hosts_[config.from]->out.push_back(&s);
  hosts_[config.to]->in.push_back(&s);
  network_.touch(*hosts_[config.from]);
  return s;
}

std::vector<uint8_t> Lab::cm_frame(const LabHost& from, const LabHost& to, const CmMad& mad) const {
  const auto bytes = write_mad(mad);
  NicPacket p;
  p.to_mac = to.mac(), p.from_mac = from.mac();
  p.to = to.address(), p.from = from.address();
  p.udp_port = 0xC001;
  p.opcode = kOpUdSend, p.qpn = 1, p.qkey = 0x80010000, p.source_qp = 1;
  p.payload = bytes;
  return make_frame(p);
}

void Lab::connect(const Stream& s, Time when) {
  LabHost &active = *hosts_[s.config.from], &passive = *hosts_[s.config.to];
  auto delay = [&](uint16_t h) {
    return h < config_.delay.size() ? config_.delay[h] : Time(std::chrono::microseconds(1));
  };
  const Time way = delay(s.config.from) + delay(s.config.to) + std::chrono::microseconds(10);
  CmMad req, rep;
  req.kind = CmKind::kReq, req.local_id = s.sender_qpn, req.qpn = s.sender_qpn;
  rep.kind = CmKind::kRep, rep.local_id = s.qpn, rep.remote_id = s.sender_qpn, rep.qpn = s.qpn;
  active.send_at(when, cm_frame(active, passive, req));
  passive.send_at(when + way, cm_frame(passive, active, rep));
  network_.touch(active), network_.touch(passive);
}

bool Lab::run(Time limit) {
  const bool sent = network_.run(
      [&] { return std::all_of(streams_.begin(), streams_.end(), [](auto& s) { return s->finished(); }); },
      limit);
  // What is still on wires and in queues.
  network_.run([&] { return switch_->pipeline().drained(); }, limit);
  network_.run_for(std::chrono::milliseconds(1));
  return sent;
}

}  // namespace millrace::sim
