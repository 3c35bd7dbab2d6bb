#include "roce/queue_pair.h"

#include <algorithm>

namespace millrace::roce {

namespace {

constexpr Time kCnpInterval = std::chrono::microseconds(50);
// CNPs have a class of their own, and are not to be marked: DSCP 48, priority 6, which is what adapters use.
constexpr uint8_t kCnpTos = 48 << 2;
constexpr uint16_t kCnpPriority = 6;

}  // namespace

QueuePair::QueuePair(const QueuePairConfig& config, Time now)
    : config_(config),
      responder_(config.expected_psn, config.requester.mtu, config.reads_max),
      requester_(config.requester),
      heard_(now) {}

Reception QueuePair::receive(const Packet& p, Time now) {
  if (p.src_ip != config_.wire.path.dst_ip) return Reception::kSourceMismatch;
  if (((p.bth->pkey.value() ^ config_.wire.pkey) & 0x7FFF) != 0) return Reception::kPkeyMismatch;
  if (p.opcode() == Opcode::kCnp) {
    requester_.congestion(now);
    return Reception::kCongestion;
  }
  if (!p.op->rc) return Reception::kBadOpcode;
  if (p.op->response) {
    const bool read = p.opcode() != Opcode::kAcknowledge && p.opcode() != Opcode::kAtomicAcknowledge;
    if (p.opcode() != Opcode::kAcknowledge && !(read && config_.requester.reads_max > 0))
      return Reception::kBadOpcode;
    heard_ = now;
    if (read)
      requester_.read_response(p, now);
    else
      requester_.acknowledge(p.psn(), p.aeth->syndrome, now);
    return Reception::kResponse;
  }
  heard_ = now;
  switch (responder_.arrive(p)) {
    case Arrival::kNew:
      return Reception::kNewRequest;
    case Arrival::kDuplicate:
      return Reception::kDuplicate;
    case Arrival::kReadAgain:
      return Reception::kReadAgain;
    case Arrival::kGap:
      return Reception::kGap;
    case Arrival::kGapQuiet:
      return Reception::kGapQuiet;
    case Arrival::kInvalid:
      return Reception::kInvalid;
  }
  return Reception::kInvalid;
}

bool QueuePair::emit(FramePool& pool, Crc32Combine& combine, uint32_t budget, Time now, FrameList& out) {
  Pace& pace = requester_.pace();
  pace.release(now);
  const bool turns = pace.limited() && responder_.responding();
  if (turns)
    budget -= emit_in_turns(pool, combine, budget, now, out);
  else if (responder_.responding())
    budget -= responder_.respond(config_.wire, pool, budget, pace, now, out);
  if (responder_.acknowledgement_owed()) acknowledge(pool, out);
  if (!turns) requester_.transmit(config_.wire, pool, combine, budget, now, out);
  return wants_to_respond() || requester_.wants_to_send();
}

// READ responses go first where nothing limits them but the budget. At a rate, they would leave nothing to
// the requests for as long as the peer asks for more.
uint32_t QueuePair::emit_in_turns(FramePool& pool, Crc32Combine& combine, uint32_t budget, Time now,
                                  FrameList& out) {
  Pace& pace = requester_.pace();
  uint32_t sent = 0;
  while (sent < budget && !pace.held()) {
    const bool responds = responder_.responding() && !(request_next_ && requester_.wants_to_send());
    const uint32_t n = responds ? responder_.respond(config_.wire, pool, 1, pace, now, out)
                                : requester_.transmit(config_.wire, pool, combine, 1, now, out);
    if (n == 0) break;
    sent += n;
    request_next_ = responds;
  }
  return sent;
}

void QueuePair::acknowledge(FramePool& pool, FrameList& out) {
  const Acknowledgement ack = *responder_.take_acknowledgement();
  TransportFields f;
  f.opcode = Opcode::kAcknowledge;
  f.dest_qp = config_.wire.remote_qpn;
  f.pkey = config_.wire.pkey;
  f.psn = ack.psn;
  f.syndrome = ack.syndrome;
  f.msn = ack.msn;
  // A lost acknowledgement is no more than that: the peer repeats and is acknowledged again.
  Frame frame = build(pool, config_.wire.path, f, {});
  if (!frame) return;
  out.push(std::move(frame));
  const uint8_t kind = ack.syndrome & 0xE0;
  (kind == 0 ? acks_sent_ : kind == kRnrNak ? rnr_naks_sent_ : naks_sent_)++;
}

void QueuePair::tick(Time now) {
  requester_.tick(now);
  if (now - heard_ >= config_.probe_after) probe();
}

void QueuePair::probe() {
  if (over() || !requester_.idle()) return;
  WorkRequest request;
  request.kind = WorkRequest::Kind::kWrite;
  request.id = kProbeId;
  if (requester_.post(std::move(request))) probes_sent_++;
}

bool QueuePair::send_cnp(FramePool& pool, Time now, FrameList& out) {
  if (cnp_sent_ >= Time{} && now - cnp_sent_ < kCnpInterval) return false;
  TransportFields f;
  f.opcode = Opcode::kCnp;
  f.dest_qp = config_.wire.remote_qpn;
  f.pkey = config_.wire.pkey;
  Path path = config_.wire.path;
  path.tos = kCnpTos;
  path.vlan_tci = static_cast<uint16_t>((path.vlan_tci & 0x0FFF) | kCnpPriority << 13);
  Frame cnp = build(pool, path, f, {});
  if (!cnp) return false;
  cnp_sent_ = now;
  out.push(std::move(cnp));
  return true;
}

Time QueuePair::next_deadline() const {
  if (over()) return kNever;
  return std::min(next_timer(), requester_.held_until());
}

Time QueuePair::next_timer() const {
  if (over()) return kNever;
  const Time probe = requester_.idle() ? heard_ + config_.probe_after : kNever;
  const Time since = requester_.waiting_since();
  const Time dead = since == kNever ? kNever : since + config_.peer_dead;
  return std::min({requester_.next_timer(), probe, dead});
}

bool QueuePair::dead(Time now) const {
  const Time since = requester_.waiting_since();
  return since != kNever && now - since >= config_.peer_dead;
}

}  // namespace millrace::roce
