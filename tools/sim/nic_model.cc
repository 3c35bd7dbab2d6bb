#include "tools/sim/nic_model.h"

#include <algorithm>
#include <map>
#include <utility>

#include "tools/sim/nic_cm.h"

namespace millrace::sim {

using host::Completion;
using host::ConnectRequest;
using host::LinkError;
using host::LinkId;
using host::LinkStats;
using host::MemoryRegion;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr Time kResolveAgain = milliseconds(5);
constexpr Time kProbeAfter = seconds(1), kPeerDead = seconds(5);
constexpr Time kGoodbyePatience = milliseconds(1500);
constexpr uint32_t kGsiQkey = 0x80010000;
constexpr uint64_t kTcpPortSpace = 0x0000000001060000;
constexpr uint8_t kAckTimeout = 14;

uint8_t mtu_code_of(uint32_t bytes) {
  uint8_t code = 1;
  while (code < 5 && (128u << code) < bytes) code++;
  return code;
}

void add(QueuePairCounts& to, const QueuePairCounts& c) {
  to.packets_sent += c.packets_sent;
  to.packets_received += c.packets_received;
  to.retransmitted += c.retransmitted;
  to.timeouts += c.timeouts;
  to.sequence_naks += c.sequence_naks;
  to.rnr_naks += c.rnr_naks;
  to.duplicates += c.duplicates;
  to.out_of_sequence += c.out_of_sequence;
  to.acks_sent += c.acks_sent;
  to.naks_sent += c.naks_sent;
  to.rnr_naks_sent += c.rnr_naks_sent;
  to.cnps_sent += c.cnps_sent;
  to.cnps_received += c.cnps_received;
  to.probes_sent += c.probes_sent;
  to.wrong_msn += c.wrong_msn;
}

std::string in_milliseconds(Time t) {
  return std::to_string(std::chrono::duration_cast<milliseconds>(t).count()) + " ms";
}

}  // namespace

struct NicModel::Impl final : host::Transport {
  enum class State : uint8_t {
    kResolving,
    kConnecting,
    kEstablishing,  // a REP has come, the application has not yet seen it
    kConnected,
    kDraining,  // the queue pair is in error, its flushes come
    kGoodbye,   // the caller has been told; DREQ sent
    kOver,
  };
  struct Link {
    LinkId id = 0;
    State state = State::kResolving;
    ConnectRequest request;
    bool begun = false, close_requested = false;
    Time started{}, resolve_at{}, due = kNever;  // `due`: of the state
    NicPacket path;
    uint32_t qpn = 0, psn_to_us = 0, cm_id = 0;
    std::unique_ptr<CmClient> cm;
    std::unique_ptr<NicQueuePair> qp;
    aggregation::JoinReply reply;
    Completion error{Completion::Kind::kError};
  };

  Impl(const NicConfig& config, const NicQuirks& q)
      : c(config), quirks(q), dice(config.seed), memory(dice.roll()) {
    next_qpn = dice.below(1 << 24);
    next_cm_id = static_cast<uint32_t>(dice.roll());
    transactions = dice.roll() << 32;
    cm_psn = dice.below(1 << 24);
    cm_port = static_cast<uint16_t>(0xC000 | dice.below(1 << 14));
  }

  // The transport.
  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void* address, size_t bytes, host::Access access) override {
    return memory.add(address, bytes, access);
  }
  void deregister_memory(const MemoryRegion& region) override { memory.remove(region.id); }
  bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  bool post_message(LinkId link, std::span<const uint8_t> message) override;
  void close(LinkId link) override;
  void poll(std::vector<Completion>& to) override;
  LinkStats stats(LinkId link) const override;

  // The wire.
  void receive(std::span<const uint8_t> frame, Time t);
  void receive_mad(const NicPacket& packet);
  void send_mad(const NicPacket& path, const CmMad& mad);
  void turn(Time t, FrameSink& out);
  void send_data(FrameSink& out);
  Time next_deadline() const;

  // A link's life.
  void tick(Link& link);
  void try_resolve(Link& link);
  void send_request(Link& link);
  void on_reply(Link& link, const CmMad& rep);
  void on_reject(Link& link, const CmMad& rej);
  void establish(Link& link);
  void check_peer(Link& link);
  void take_events(Link& link);
  void fail(Link& link, LinkError error, const std::string& text);
  void fail_by(Link& link, QueuePairFault fault);
  void start_draining(Link& link);
  void drained(Link& link);
  Time due(const Link& link) const;

  Link* find(LinkId id) {
    const auto found = links.find(id);
    return found == links.end() ? nullptr : &found->second;
  }
  static std::string switch_name(const Link& l) {
    return l.request.switch_address.to_string() + " port " + std::to_string(l.request.port);
  }
  Completion completion(const Link& l, Completion::Kind kind) const {
    Completion done{kind};
    done.link = l.id;
    return done;
  }

  NicConfig c;
  NicQuirks quirks;
  Dice dice;
  NicMemory memory;
  std::map<LinkId, Link> links;
  std::map<uint32_t, LinkId> by_qpn, by_cm_id;
  std::vector<Completion> completions;
  std::deque<std::vector<uint8_t>> control;  // of the connection manager
  NicDrops drops;
  QueuePairCounts gone;  // of queue pairs that are no more
  LinkId next_link = 1, turn_of = 0;
  uint32_t next_qpn, next_cm_id, cm_psn;
  uint64_t transactions;
  uint16_t cm_port;
  Time now{}, port_free{};
  bool touched = false;  // by the transport, since the last turn
};

// --- the transport ---

LinkId NicModel::Impl::connect(const ConnectRequest& request) {
  Link& l = links[next_link];
  l.id = next_link++;
  l.request = request;
  touched = true;
  return l.id;
}

bool NicModel::Impl::post_segment(LinkId id, uint64_t segment, const aggregation::SegmentHeader& header,
                                  std::span<const uint8_t> payload, const MemoryRegion& source) {
  Link* l = find(id);
  if (l == nullptr || l->state != State::kConnected) return false;
  touched = true;
  return l->qp->post_segment(segment, header, payload, source.lkey);
}

bool NicModel::Impl::post_message(LinkId id, std::span<const uint8_t> message) {
  Link* l = find(id);
  if (l == nullptr || l->state != State::kConnected) return false;
  touched = true;
  return l->qp->post_message(message);
}

void NicModel::Impl::close(LinkId id) {
  Link* l = find(id);
  if (l == nullptr || l->state > State::kDraining) return;
  touched = true;
  l->close_requested = true;
  if (l->state < State::kDraining) start_draining(*l);
}

void NicModel::Impl::poll(std::vector<Completion>& to) {
  for (Completion& done : completions) {
    // A receive is posted again as its completion is taken, before the caller can post what it answers to.
    if (done.kind == Completion::Kind::kMessage || done.kind == Completion::Kind::kResult)
      if (Link* l = find(done.link); l != nullptr && l->qp) l->qp->post_receive();
    to.push_back(std::move(done));
  }
  completions.clear();
}

LinkStats NicModel::Impl::stats(LinkId id) const {
  LinkStats s;
  const auto found = links.find(id);
  if (found == links.end() || !found->second.qp) return s;
  const QueuePairCounts& n = found->second.qp->counts();
  s.packets_sent = n.packets_sent + n.acks_sent;
  s.packets_received = n.packets_received;
  s.retransmitted = n.retransmitted;
  s.timeouts = n.timeouts;
  s.naks_received = n.sequence_naks;
  s.rnr_naks_received = n.rnr_naks;
  s.duplicates_received = n.duplicates;
  s.out_of_sequence = n.out_of_sequence;
  return s;
}

// --- connecting ---

void NicModel::Impl::try_resolve(Link& l) {
  const std::optional<Resolved> way = c.resolve(l.request.switch_address);
  if (!way) {
    l.resolve_at = now + kResolveAgain;
    return;
  }
  l.path.to_mac = way->mac;
  l.path.from_mac = c.mac;
  l.path.from = way->source;
  l.path.to = l.request.switch_address;
  send_request(l);
}

void NicModel::Impl::send_request(Link& l) {
  do next_qpn = (next_qpn + 1) & 0xFFFFFF;
  while (next_qpn < 16 || by_qpn.contains(next_qpn));
  l.qpn = next_qpn;
  by_qpn[l.qpn] = l.id;
  l.cm_id = next_cm_id++;
  if (l.cm_id == 0) l.cm_id = next_cm_id++;
  by_cm_id[l.cm_id] = l.id;
  l.psn_to_us = c.first_psn ? *c.first_psn & 0xFFFFFF : dice.below(1 << 24);
  const uint32_t label = quirks.flow_label ? 1 + dice.below((1 << 20) - 1) : 0;
  // A17's port of a flow label; without one, any port, as long as it stays.
  l.path.udp_port =
      static_cast<uint16_t>(0xC000 | (label != 0 ? (label & 0x3FFF) ^ (label >> 14) : dice.below(1 << 14)));

  aggregation::JoinRequest& join = l.request.join;
  join.mtu_code = mtu_code_of(l.request.mtu);
  if (!l.request.secret.empty())
    join.tag = aggregation::join_tag(join, l.request.secret, l.path.from, l.path.to, l.qpn);
  CmMad req;
  req.kind = CmKind::kReq;
  req.transaction = transactions | l.cm_id;
  req.local_id = l.cm_id;
  req.ca_guid = c.ca_guid;
  req.qpn = l.qpn;
  req.starting_psn = l.psn_to_us;
  req.rnr_retry = 7;
  req.flow_control = quirks.real_credits;
  req.service = kTcpPortSpace | l.request.port;
  req.remote_timeout = req.local_timeout = quirks.cm_timeout;
  req.retry_count = 7;
  req.mtu = join.mtu_code;
  req.max_cm_retries = quirks.cm_retries;
  req.local_gid = l.path.from;
  req.remote_gid = l.path.to;
  req.flow_label = label;
  req.traffic_class = quirks.traffic_class;
  req.hop_limit = 64;
  req.ack_timeout = kAckTimeout;
  req.private_data = rdma_cm_data(l.path.from, l.path.to, static_cast<uint16_t>(32768 + dice.below(28232)),
                                  aggregation::encode(join));
  l.cm = std::make_unique<CmClient>(std::move(req), quirks, now);
  l.state = State::kConnecting;
}

void NicModel::Impl::on_reply(Link& l, const CmMad& rep) {
  if (l.state != State::kConnecting) return;
  const auto reply = aggregation::decode_join_reply(rep.private_data);
  if (!reply || reply->version != aggregation::kProtocolVersion)
    return fail(l, LinkError::kBroken, switch_name(l) + " accepted, but does not speak this protocol");
  l.reply = *reply;
  NicQueuePair::Config q;
  q.path = l.path;
  q.path.qpn = rep.qpn;
  q.qpn = l.qpn;
  q.first_psn = rep.starting_psn;  // the sender of a message says where its receiver begins
  q.expected_psn = l.psn_to_us;
  q.mtu = l.request.mtu;
  q.sends_max = 2u * l.request.window + 2;
  q.receives = l.request.window + 3u;
  q.gbit = c.gbit;
  q.quirks = quirks;
  q.seed = dice.roll();
  l.qp = std::make_unique<NicQueuePair>(q, memory, now);
  l.state = State::kEstablishing;
  l.due = now + quirks.establish_delay;
}

void NicModel::Impl::establish(Link& l) {
  l.state = State::kConnected;
  l.cm->confirm();
  Completion done = completion(l, Completion::Kind::kConnected);
  done.join_reply = l.reply;
  completions.push_back(std::move(done));
}

void NicModel::Impl::on_reject(Link& l, const CmMad& rej) {
  if (l.state != State::kConnecting) return;
  const auto refusal = aggregation::decode_join_reject(rej.private_data);
  if (refusal && rej.reason == kRejConsumer) {
    l.error.code = refusal->code;
    l.error.mtu_wanted = refusal->mtu_code;
    return fail(l, LinkError::kRefused, refusal->text);
  }
  fail(l, LinkError::kRefused,
       switch_name(l) + " rejected the connection (CM reason " + std::to_string(rej.reason) +
           "): is a Millrace switch listening there?");
}

// --- the wire ---

void NicModel::Impl::receive(std::span<const uint8_t> frame, Time t) {
  now = t;
  NicPacket p;
  switch (read_frame(frame, p)) {
    case Reading::kGood:
      break;
    case Reading::kForeign:
      drops.foreign++;
      return;
    case Reading::kMalformed:
      drops.malformed++;
      return;
    case Reading::kCorrupt:
      drops.corrupt++;
      return;
  }
  if (p.to_mac != c.mac || std::find(c.addresses.begin(), c.addresses.end(), p.to) == c.addresses.end()) {
    drops.foreign++;
    return;
  }
  if (p.qpn == 1) return receive_mad(p);
  const auto found = by_qpn.find(p.qpn);
  Link* l = found == by_qpn.end() ? nullptr : find(found->second);
  // Before its time a queue pair is not ready to receive, after it is not there: both are silent.
  if (l == nullptr || l->state != State::kConnected) {
    drops.unknown_qp++;
    return;
  }
  l->qp->receive(p, now);
  take_events(*l);
}

void NicModel::Impl::take_events(Link& l) {
  for (QueuePairEvent& e : l.qp->events) {
    using Kind = QueuePairEvent::Kind;
    Completion done = completion(l, e.kind == Kind::kSent          ? Completion::Kind::kSent
                                    : e.kind == Kind::kMessageSent ? Completion::Kind::kMessageSent
                                    : e.kind == Kind::kResult      ? Completion::Kind::kResult
                                                                   : Completion::Kind::kMessage);
    done.segment = e.segment;
    done.immediate = e.immediate;
    done.message = std::move(e.message);
    completions.push_back(std::move(done));
  }
  l.qp->events.clear();
  if (l.qp->fault() != QueuePairFault::kNone && l.state == State::kConnected) fail_by(l, l.qp->fault());
}

void NicModel::Impl::receive_mad(const NicPacket& p) {
  CmMad mad;
  if (p.opcode != kOpUdSend || p.qkey != kGsiQkey || (p.pkey & 0x7FFF) != 0x7FFF ||
      !read_mad(p.payload, mad) || mad.kind == CmKind::kReq) {
    drops.bad_mad++;
    return;
  }
  const auto found = by_cm_id.find(mad.remote_id);
  Link* l = found == by_cm_id.end() ? nullptr : find(found->second);
  if (l == nullptr || l->path.to != p.from) {
    drops.unknown_id++;
    if (mad.kind != CmKind::kDreq) return;
    // Of a connection that is gone here; it can go there, too.
    NicPacket back;
    back.to_mac = p.from_mac, back.from_mac = p.to_mac;
    back.to = p.from, back.from = p.to;
    CmMad drep;
    drep.kind = CmKind::kDrep;
    drep.transaction = mad.transaction;
    drep.local_id = mad.remote_id, drep.remote_id = mad.local_id;
    return send_mad(back, drep);
  }
  switch (l->cm->receive(mad, now)) {
    case CmClient::Outcome::kReply:
      return on_reply(*l, mad);
    case CmClient::Outcome::kRejected:
      return on_reject(*l, mad);
    case CmClient::Outcome::kDisconnected:
      return fail(*l, LinkError::kDisconnected,
                  "the switch at " + switch_name(*l) + " closed the connection");
    default:
      return;
  }
}

void NicModel::Impl::send_mad(const NicPacket& path, const CmMad& mad) {
  NicPacket p = path;
  p.udp_port = cm_port;  // all of QP1 is one flow
  p.traffic_class = 0;
  p.opcode = kOpUdSend;
  p.migrated = quirks.migrated;
  p.qpn = 1;
  p.psn = cm_psn = (cm_psn + 1) & 0xFFFFFF;
  p.qkey = kGsiQkey;
  p.source_qp = 1;
  const auto bytes = write_mad(mad);
  control.push_back(make_frame(p, bytes));
}

void NicModel::Impl::turn(Time t, FrameSink& out) {
  now = t;
  touched = false;
  for (auto l = links.begin(); l != links.end();) {
    Link& link = l->second;
    tick(link);
    if (link.cm) {
      for (const CmMad& mad : link.cm->out) send_mad(link.path, mad);
      link.cm->out.clear();
    }
    if (link.qp) {
      for (; !link.qp->control.empty(); link.qp->control.pop_front()) out.send(link.qp->control.front());
      // Its last word, if it has failed, has been said.
      if (link.state >= State::kGoodbye) {
        add(gone, link.qp->counts());
        link.qp.reset();
      }
    }
    if (link.state != State::kOver) {
      ++l;
      continue;
    }
    by_qpn.erase(link.qpn);
    by_cm_id.erase(link.cm_id);
    l = links.erase(l);
  }
  for (; !control.empty(); control.pop_front()) out.send(control.front());
  send_data(out);
}

// One packet of each queue pair in turn, each at its own rate, all of them at the line's.
void NicModel::Impl::send_data(FrameSink& out) {
  const Time until = now + quirks.pace_ahead;
  bool sent = true;
  while (sent && port_free <= until) {
    sent = false;
    auto l = links.upper_bound(turn_of);
    for (size_t n = links.size(); n > 0; n--, ++l) {
      if (l == links.end()) l = links.begin();
      Link& link = l->second;
      if (link.state != State::kConnected || link.qp->ready_at() > until) continue;
      const std::vector<uint8_t> frame = link.qp->next_packet(now);
      take_events(link);
      turn_of = link.id;
      sent = true;
      if (frame.empty()) break;
      out.send(frame);
      const auto bits = static_cast<double>(frame.size() + 24) * 8;
      port_free = std::max(port_free, now) + Time(static_cast<int64_t>(bits / c.gbit));
      break;
    }
  }
}

// --- a link's life ---

void NicModel::Impl::tick(Link& l) {
  if (!std::exchange(l.begun, true)) l.started = l.resolve_at = now;
  if (l.state == State::kResolving && now >= l.resolve_at) try_resolve(l);
  if (l.state <= State::kEstablishing && now >= l.started + l.request.connect_timeout)
    fail(l, LinkError::kUnreachable,
         l.state == State::kResolving
             ? "no answer to " +
                   std::string(l.request.switch_address.is_v4() ? "ARP" : "neighbour discovery") + " for " +
                   l.request.switch_address.to_string() + " within " +
                   in_milliseconds(l.request.connect_timeout) + ": is the switch up and on this network?"
             : "no answer from the switch at " + switch_name(l) + " within " +
                   in_milliseconds(l.request.connect_timeout) +
                   ": is millrace-switch running there, and does its port match?");
  if (l.cm && l.cm->poll(now) == CmClient::Outcome::kUnreachable)
    fail(l, LinkError::kUnreachable,
         "no answer from the switch at " + switch_name(l) +
             ": is millrace-switch running there, and does its port match?");
  if (l.state == State::kEstablishing && now >= l.due) establish(l);
  if (l.state == State::kConnected) {
    l.qp->poll(now);
    take_events(l);
  }
  if (l.state == State::kConnected) check_peer(l);
  if (l.state == State::kDraining && l.due == kNever) l.due = now + (l.qp ? quirks.drain_delay : Time{});
  if (l.state == State::kDraining && now >= l.due) drained(l);
  if (l.state == State::kGoodbye && (!l.cm || l.cm->over() || now >= l.due)) l.state = State::kOver;
}

void NicModel::Impl::check_peer(Link& l) {
  const Time owed = l.qp->owed_since();
  if (owed == kNever) {
    if (now - l.qp->heard() >= kProbeAfter) l.qp->probe();
    return;
  }
  if (now - std::max(owed, l.qp->heard()) < kPeerDead) return;
  l.qp->stop(QueuePairFault::kRetryExceeded);
  fail(l, LinkError::kUnreachable,
       "the switch at " + switch_name(l) + " has not acknowledged anything for " +
           std::to_string(std::chrono::duration_cast<seconds>(kPeerDead).count()) +
           " s: it is down, or the network to it is");
}

void NicModel::Impl::fail_by(Link& l, QueuePairFault fault) {
  const std::string who = "the switch at " + switch_name(l),
                    where = " (queue pair " + std::to_string(l.qpn) + " of a model NIC)";
  switch (fault) {
    case QueuePairFault::kRetryExceeded:
      return fail(
          l, LinkError::kUnreachable,
          who + " has not acknowledged anything through 7 retries: it is down, or the network to it is" +
              where);
    case QueuePairFault::kRemoteInvalidRequest:
    case QueuePairFault::kRemoteAccess:
    case QueuePairFault::kRemoteOperation:
      return fail(
          l, LinkError::kBroken,
          who + " refused a segment as invalid: a bug here or there, or two of different versions" + where);
    case QueuePairFault::kLocalProtection:
      return fail(l, LinkError::kBroken,
                  "a buffer of an operation is no longer what was registered: it must stay mapped until the "
                  "operation is over" +
                      where);
    case QueuePairFault::kLocalAccess:
      return fail(l, LinkError::kBroken, who + " wrote a result outside the memory it was offered" + where);
    case QueuePairFault::kLocalLength:
      return fail(l, LinkError::kBroken, who + " sent a message longer than a receive buffer" + where);
    default:
      return fail(l, LinkError::kBroken, who + " sent a packet that breaks the transport's rules" + where);
  }
}

void NicModel::Impl::fail(Link& l, LinkError error, const std::string& text) {
  if (l.state >= State::kDraining) return;
  l.error.link = l.id;
  l.error.error = error;
  l.error.text = text;
  start_draining(l);
}

void NicModel::Impl::start_draining(Link& l) {
  l.state = State::kDraining;
  l.due = kNever;  // begins with the next turn: the caller's clock may be ahead of ours
  if (l.qp) l.qp->stop(QueuePairFault::kNone);
}

// Nothing is read from the caller's memory or written to it any more.
void NicModel::Impl::drained(Link& l) {
  completions.push_back(l.error.error == LinkError::kNone || l.close_requested
                            ? completion(l, Completion::Kind::kClosed)
                            : std::move(l.error));
  l.state = State::kGoodbye;
  l.due = now + kGoodbyePatience;
  if (l.cm) l.cm->disconnect(now);
}

Time NicModel::Impl::due(const Link& l) const {
  switch (l.state) {
    case State::kResolving:
      return std::min(l.resolve_at, l.started + l.request.connect_timeout);
    case State::kConnecting:
      return std::min(l.cm->next_deadline(), l.started + l.request.connect_timeout);
    case State::kEstablishing:
      return std::min(l.due, l.started + l.request.connect_timeout);
    case State::kConnected: {
      Time t = std::min(l.qp->next_deadline(), l.cm->next_deadline());
      // What has its time may still wait for the line, which must not run dry until we are called again.
      if (l.qp->ready_at() != kNever)
        t = std::min(t, std::max(l.qp->ready_at(), port_free) - quirks.pace_ahead / 2);
      const Time owed = l.qp->owed_since();
      return std::min(
          t, owed == kNever ? l.qp->heard() + kProbeAfter : std::max(owed, l.qp->heard()) + kPeerDead);
    }
    case State::kDraining:
      return l.due == kNever ? now : l.due;
    case State::kGoodbye:
      return l.cm && !l.cm->over() ? std::min(l.due, l.cm->next_deadline()) : now;
    case State::kOver:
      return now;
  }
  return kNever;
}

Time NicModel::Impl::next_deadline() const {
  if (touched || !completions.empty() || !control.empty()) return now;
  Time t = kNever;
  for (const auto& [id, l] : links) {
    if (!l.begun || (l.cm && !l.cm->out.empty()) || (l.qp && !l.qp->control.empty())) return now;
    t = std::min(t, due(l));
  }
  return t;
}

// --- the NIC ---

NicModel::NicModel(const NicConfig& config, const NicQuirks& quirks)
    : impl_(std::make_unique<Impl>(config, quirks)) {}
NicModel::~NicModel() = default;

void NicModel::receive(std::span<const uint8_t> frame, Time now) { impl_->receive(frame, now); }
void NicModel::poll(Time now, FrameSink& out) { impl_->turn(now, out); }
Time NicModel::next_deadline() const { return impl_->next_deadline(); }
host::Transport& NicModel::transport() { return *impl_; }
bool NicModel::idle() const { return impl_->links.empty(); }

const NicQuirks& NicModel::quirks() const { return impl_->quirks; }
const NicDrops& NicModel::drops() const { return impl_->drops; }
size_t NicModel::regions() const { return impl_->memory.size(); }

QueuePairCounts NicModel::counts() const {
  QueuePairCounts all = impl_->gone;
  for (const auto& [id, l] : impl_->links)
    if (l.qp) add(all, l.qp->counts());
  return all;
}

double NicModel::gbit(host::LinkId id, Time now) const {
  Impl::Link* l = impl_->find(id);
  return l != nullptr && l->qp ? l->qp->gbit(now) : 0;
}

}  // namespace millrace::sim
