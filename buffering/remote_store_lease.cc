#include <bit>

#include "buffering/remote_store_impl.h"

namespace millrace::buffering {

using namespace lent;

void RemoteStore::Impl::connect(Lender& l, Time t, FrameList& out) {
  l.qpn = Qpn{kFirstQpn + (++next_qpn & 0xFFFF)};
  l.first_psn = Psn(config.first_psn ? *config.first_psn : static_cast<uint32_t>(random()));
  roce::Path path;
  path.src_mac = config.mac;
  path.dst_ip = l.config.address;
  path.src_ip = *std::find_if(config.addresses.begin(), config.addresses.end(),
                              [&](const IpAddress& a) { return a.is_v4() == path.dst_ip.is_v4(); });
  path.src_port = roce::flow_source_port(kGsiQpn, kGsiQpn);
  path.tos = config.tos;
  roce::CmQueuePair local;
  local.qpn = l.qpn;
  local.first_psn = l.first_psn;
  local.mtu_code = roce::mtu_code(config.mtu);
  local.initiator_depth = static_cast<uint8_t>(config.reads_max);
  const auto port = static_cast<uint16_t>(0xC000 | (random() & 0x3FFF));
  const auto request = encode(LeaseRequest{.instance = config.instance, .bytes = config.bytes_wanted});
  l.cm = cm.connect(path, roce::tcp_service_id(l.config.port), local, port, request, t, out);
  l.since = t;
  if (l.cm.value != 0) l.state = State::kConnecting;
}

std::string RemoteStore::Impl::refused(const Lender& l, const roce::CmEvent& e) const {
  const std::string who = l.who();
  const auto refusal = decode_lease_refusal(e.private_data);
  if (refusal && refusal->version != kLeaseVersion)
    return who + " speaks version " + std::to_string(refusal->version) +
           " of the lease, this switch version " + std::to_string(kLeaseVersion);
  if (refusal && e.reason == roce::RejectReason::kConsumer) return who + " refused: " + refusal->text;
  return who + " rejected the connection (CM reason " + std::to_string(static_cast<int>(e.reason)) +
         "): is millrace-memd listening on port " + std::to_string(l.config.port) + "?";
}

void RemoteStore::Impl::handle_reply(Lender& l, const roce::CmEvent& e, Time t, FrameList& out) {
  const auto reply = decode_lease_reply(e.private_data);
  const std::string who = l.who();
  if (!reply || reply->version != kLeaseVersion)
    return part(l, who + " accepted, but lends nothing by this version of the lease", t, out);
  const uint64_t slots = std::min<uint64_t>(reply->bytes / config.slot_bytes, kSlotsMax);
  l.depth = std::min<uint32_t>(config.reads_max, e.remote.responder_resources);
  if (slots == 0 || l.depth == 0)
    return part(l, who + " lends less than one packet takes, or grants no RDMA READ", t, out);
  l.rkey = reply->rkey;
  l.address = reply->address;
  l.slots = std::make_unique<Slots>(static_cast<uint32_t>(slots));
  roce::QueuePairConfig qc;
  qc.local = l.qpn;
  qc.wire.path = e.path;
  qc.wire.path.src_port = roce::flow_source_port(l.qpn, e.remote.qpn);
  qc.wire.remote_qpn = e.remote.qpn;
  qc.expected_psn = l.first_psn;
  qc.requester.first_psn = e.remote.first_psn;
  qc.requester.mtu = config.mtu;
  qc.requester.requests_max = config.writes_max + config.reads_max + 2;
  qc.requester.reads_max = l.depth;
  qc.requester.retransmit_timeout = config.retransmit_timeout;
  qc.probe_after = config.probe_after;
  qc.peer_dead = config.peer_dead;
  l.qp = std::make_unique<roce::QueuePair>(qc, t);
  l.requests.resize(std::bit_ceil(qc.requester.requests_max));
  l.state = State::kConnected;
  l.since = t;
  l.counts.connects++;
  l.counts.why.clear();
  cm.confirm(l.cm, t, out);
  work = true;
}

void RemoteStore::Impl::handle_events(Time t, FrameList& out) {
  roce::CmEvent e;
  while (cm.next_event(e)) {
    using Kind = roce::CmEvent::Kind;
    const auto found = std::find_if(lenders.begin(), lenders.end(),
                                    [&](auto& l) { return l->cm == e.id && e.id.value != 0; });
    if (found == lenders.end()) continue;  // of one that was given up
    Lender& l = **found;
    if (e.kind == Kind::kReply) {
      if (l.state == State::kConnecting) handle_reply(l, e, t, out);
      continue;
    }
    l.cm = {};
    if (e.kind == Kind::kRejected) l.counts.refusals++;
    const std::string who = l.who();
    if (e.kind == Kind::kRejected)
      part(l, refused(l, e), t, out);
    else if (e.kind == Kind::kUnreachable)
      part(l, who + " did not answer", t, out);
    else if (e.kind == Kind::kDisconnected)
      part(l, who + " ended the lease", t, out);
  }
}

// Forgets what the lender held, which is lost, and tries again after a while.
void RemoteStore::Impl::part(Lender& l, const std::string& why, Time t, FrameList& out) {
  if (l.state == State::kConnected && !closing) l.counts.deaths++;
  if (l.state == State::kConnected && t - l.since >= config.again_max) l.backoff = config.again_min;
  if (l.cm.value != 0) cm.disconnect(l.cm, t, out);
  l.cm = {};
  clear(l);
  l.state = State::kWaiting;
  l.counts.why = why;
  l.again = t + l.backoff;
  l.backoff = std::min(2 * l.backoff, config.again_max);
}

void RemoteStore::Impl::clear(Lender& l) {
  if (l.qp) {
    const auto& c = l.qp->requester().counters();
    l.counts.packets_sent += c.packets_sent;
    l.counts.retransmitted += c.retransmitted;
    l.counts.reads_again += c.reads_again;
  }
  l.qp.reset();  // before the frames that it points into
  for (; l.head != l.tail; l.head++) l.at(l.head).frame = Frame();
  l.head = l.tail = 0;
  l.reads = 0;
  for (List* list : {&l.held, &l.asked, &l.reading})
    while (list->first != kNone) {
      Entry& e = entries[list->first];
      if (e.frame != nullptr) Frame dropped(std::exchange(e.frame, nullptr));
      l.counts.lost++;
      move(list->first, Where::kEvent);
    }
  l.gathered = Frame();
  l.open = l.open_last = kNone;
  l.slots.reset();
  l.packets = 0;
}

// A lender has nothing to say but that it is alive.
void RemoteStore::Impl::handle_request(Lender& l, const roce::Packet& p, Time t, FrameList& out) {
  if (p.op->write && p.op->only && !p.op->imm && p.payload.empty()) return l.qp->responder().accept(p);
  l.qp->responder().refuse(roce::kNakRemoteAccess);
  l.qp->emit(pool, combine, 0, t, out);
  part(l, l.who() + " asked for what is not its to ask", t, out);
}

}  // namespace millrace::buffering
