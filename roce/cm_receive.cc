// What the agent does with a message, one function for each kind.
#include <algorithm>

#include "roce/cm_impl.h"

namespace millrace::roce {

namespace {

// An address that one host has, so that an answer goes to one host and comes from one.
bool unicast(const IpAddress& a) {
  if (a.is_multicast() || a.is_zero()) return false;
  static constexpr uint8_t none[4] = {0, 0, 0, 0}, all[4] = {255, 255, 255, 255};
  return !a.is_v4() || (std::memcmp(a.v4(), none, 4) != 0 && std::memcmp(a.v4(), all, 4) != 0);
}

// Back along the way that the packet came.
Path reply_path(const Packet& p) {
  Path path;
  path.src_mac = p.dst_mac;
  path.dst_mac = p.src_mac;
  path.src_ip = p.dst_ip;
  path.dst_ip = p.src_ip;
  path.tos = p.tos & 0xFC;  // the ECN bits are the network's word about the packet, not part of the path
  path.has_vlan = p.has_vlan;
  path.vlan_tci = p.vlan_tci;
  return path;
}

// The connection's path: its traffic class and flow are what the REQ says, not what the REQ itself had.
Path connection_path(const Packet& p, const ReqMessage& m) {
  Path path = reply_path(p);
  path.tos = m.primary.traffic_class;
  if ((path.tos & 3) == 3) path.tos &= 0xFC;  // nobody may ask for packets that are marked from the start
  path.src_port = m.primary.flow_label != 0 ? flow_label_port(m.primary.flow_label)
                                            : flow_source_port(kGsiQpn, m.local_qpn);
  return path;
}

// Why a REQ can come to nothing here, if so.
std::optional<RejectReason> objection(const Packet& p, const ReqMessage& m) {
  if (m.transport_service != kServiceTypeRc) return RejectReason::kInvalidTransport;
  if (m.primary.local_gid != p.src_ip || m.primary.remote_gid != p.dst_ip)
    return RejectReason::kPrimaryRemoteGid;
  if (mtu_bytes(m.path_mtu) == 0) return RejectReason::kInvalidMtu;
  // QP 0 and 1 are management's own; communication ID 0 stands for none in a REJ.
  if (m.local_qpn.value <= kGsiQpn.value || m.local_comm_id == 0) return RejectReason::kUnsupportedRequest;
  const auto cma = decode_rdma_cm(std::span(m.private_data).first<kRdmaCmBytes>());
  if (!cma || cma->version != 0) return RejectReason::kUnsupportedRequest;
  return std::nullopt;
}

CmQueuePair remote_of(const ReqMessage& m) {
  return {.qpn = m.local_qpn,
          .first_psn = m.starting_psn,
          .mtu_code = m.path_mtu,
          .retry_count = m.retry_count,
          .rnr_retry = m.rnr_retry_count,
          .ack_timeout = m.primary.local_ack_timeout,
          .responder_resources = m.responder_resources,
          .initiator_depth = m.initiator_depth};
}

}  // namespace

void CmAgent::receive(const Packet& packet, Time now, FrameList& out) {
  if (const auto message = impl_->admit(packet))
    std::visit([&](const auto& body) { impl_->on_message(packet, message->header, body, now, out); },
               message->body);
}

bool CmAgent::owns(const Packet& packet) const {
  if (packet.bth == nullptr || packet.deth == nullptr) return false;
  const auto message = decode_cm(packet.payload);
  if (!message) return false;
  const uint32_t id = std::visit(
      [](const auto& body) -> uint32_t {
        if constexpr (requires { body.remote_comm_id; })
          return body.remote_comm_id;
        else
          return 0;  // a REQ is nobody's yet
      },
      message->body);
  const Connection* c = impl_->find(id);
  return c != nullptr && c->path.dst_ip == packet.src_ip;
}

std::optional<CmMessage> CmAgent::Impl::admit(const Packet& p) {
  counters.mads_received++;
  if (p.bth == nullptr || p.deth == nullptr || p.opcode() != Opcode::kUdSendOnly ||
      p.deth->src_qp.value() != kGsiQpn.value || !unicast(p.src_ip) || !unicast(p.dst_ip)) {
    counters.bad_mad++;
    return std::nullopt;
  }
  // The default partition, full or limited member (IBA 10.9.3).
  if ((p.bth->pkey.value() & 0x7FFF) != (kDefaultPkey & 0x7FFF)) {
    counters.bad_mad++;
    return std::nullopt;
  }
  if (p.deth->qkey.value() != kGsiQkey) {
    counters.bad_qkey++;
    return std::nullopt;
  }
  auto message = decode_cm(p.payload);
  if (!message) counters.bad_mad++;
  return message;
}

void CmAgent::Impl::send_rej(const Packet& packet, const MadHeader& header, uint32_t local_id,
                             uint32_t remote_id, CmAnswered answered, RejectReason reason, FrameList& out) {
  const RejMessage m{.local_comm_id = local_id,
                     .remote_comm_id = remote_id,
                     .answered = answered,
                     .reason = static_cast<uint16_t>(reason)};
  counters.rej_sent++;
  send(reply_path(packet), encode_cm({{.transaction_id = header.transaction_id}, m}), out);
}

void CmAgent::Impl::send_drep(const Packet& packet, const MadHeader& header, const DreqMessage& dreq,
                              FrameList& out) {
  const DrepMessage m{.local_comm_id = dreq.remote_comm_id, .remote_comm_id = dreq.local_comm_id};
  send(reply_path(packet), encode_cm({{.transaction_id = header.transaction_id}, m}), out);
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader& h, const ReqMessage& m, Time now,
                               FrameList& out) {
  if (!listening()) {
    counters.unknown_id++;
    return;
  }
  counters.req_received++;
  Connection* known = find(by_remote_id, {p.src_ip, m.local_ca_guid, m.local_comm_id});
  // An ID alone is no identity: a peer that was restarted may count its IDs from the same start.
  if (known && known->remote_qpn == m.local_qpn && known->remote_psn == m.starting_psn &&
      known->service_id == m.service_id)
    return on_repeated_req(*known, p, h, out);

  std::optional<RejectReason> reason = objection(p, m);
  if (!services.contains(m.service_id)) reason = RejectReason::kInvalidServiceId;
  if (reason) return send_rej(p, h, 0, m.local_comm_id, CmAnswered::kReq, *reason, out);

  if (known && known->state != CmState::kResting) replace(*known, now);
  if (Connection* stale = find(by_remote_qp, {p.src_ip, m.local_ca_guid, m.local_qpn.value}))
    replace(*stale, now);
  const auto from = half_open_from.find(p.src_ip);
  const bool source_full = from != half_open_from.end() && from->second >= config.half_open_per_source;
  if (full() || source_full || half_open >= config.half_open_max) {
    // In silence: the peer repeats its REQ, and a place may be free by then. A REJ would be final.
    counters.half_open_refused++;
    return;
  }
  Connection& c = create(connection_path(p, m), CmState::kReqReceived);
  c.remote_id = m.local_comm_id;
  c.remote_guid = m.local_ca_guid;
  c.remote_qpn = m.local_qpn;
  c.remote_psn = m.starting_psn;
  c.service_id = m.service_id;
  c.transaction_id = h.transaction_id;
  index_remote(c);
  event(c, CmEvent::Kind::kRequest);
  CmEvent& e = events.back();
  e.remote = remote_of(m);
  e.service_id = m.service_id;
  e.private_data.assign(m.private_data.begin() + kRdmaCmBytes, m.private_data.end());
}

void CmAgent::Impl::on_repeated_req(Connection& c, const Packet& p, const MadHeader& h, FrameList& out) {
  counters.req_repeated++;
  // Where the peer is now: the first REQ's Ethernet header, which no CRC covers end to end, may have been
  // wrong.
  c.path.src_mac = p.dst_mac;
  c.path.dst_mac = p.src_mac;
  switch (c.state) {
    case CmState::kReqReceived:
      if (!c.answer) return;  // the caller has not spoken yet
      counters.mra_sent++;
      return send(c.path, *c.answer, out);
    case CmState::kRepSent:
      return send(c.path, *c.answer, out);
    case CmState::kResting:
      if (!c.answer)
        return send_rej(p, h, 0, c.remote_id, CmAnswered::kReq, RejectReason::kStaleConnection, out);
      counters.rej_sent++;
      counters.rej_repeated++;
      return send(c.path, *c.answer, out);
    default:
      return;  // a late copy
  }
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader&, const MraMessage& m, Time now, FrameList&) {
  counters.mra_received++;
  Connection* c = find(m.remote_comm_id);
  if (c == nullptr || c->path.dst_ip != p.src_ip) {
    counters.unknown_id++;
    return;
  }
  const bool for_req = c->state == CmState::kReqSent && m.answered == CmAnswered::kReq;
  const bool for_rep =
      c->state == CmState::kRepSent && m.answered == CmAnswered::kRep && c->remote_id == m.local_comm_id;
  if (for_req || for_rep) take_mra(*c, m.service_timeout, now);
}

// A REJ names our ID, except one for a time-out, whose sender may never have heard it.
CmAgent::Connection* CmAgent::Impl::find_rejected(const Packet& p, const RejMessage& m) const {
  Connection* c = find(m.remote_comm_id);
  if (c && c->path.dst_ip == p.src_ip) {
    // Before the REP the peer's ID is not known, whatever this REJ calls itself.
    if (c->state == CmState::kReqSent || c->remote_id == m.local_comm_id) return c;
    return nullptr;
  }
  if (static_cast<RejectReason>(m.reason) != RejectReason::kTimeout || m.info_length < sizeof(Be64))
    return nullptr;
  Be64 guid;
  std::memcpy(&guid, m.info.data(), sizeof(guid));
  return find(by_remote_id, {p.src_ip, guid.value(), m.local_comm_id});
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader&, const RejMessage& m, Time now, FrameList&) {
  Connection* c = find_rejected(p, m);
  if (c == nullptr) {
    counters.unknown_id++;
    return;
  }
  switch (c->state) {
    case CmState::kResting:
      return;
    case CmState::kDreqSent:
      event(*c, CmEvent::Kind::kClosed);
      break;
    case CmState::kEstablished:
      event(*c, CmEvent::Kind::kDisconnected);
      break;
    default:
      event(*c, CmEvent::Kind::kRejected);
      events.back().reason = static_cast<RejectReason>(m.reason);
      events.back().private_data.assign(m.private_data.begin(), m.private_data.end());
  }
  rest(*c, now);
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader& h, const RepMessage& m, Time now,
                               FrameList& out) {
  Connection* c = find(m.remote_comm_id);
  if (c == nullptr || c->path.dst_ip != p.src_ip || !c->active) {
    counters.unknown_id++;
    if (listening()) on_stray_rep(p, h, m, RejectReason::kInvalidCommId, out);
    return;
  }
  if (c->state == CmState::kReqSent) {
    if (m.local_comm_id == 0 || m.local_qpn.value <= kGsiQpn.value) {
      counters.bad_mad++;
      return;
    }
    return on_first_rep(*c, m, now);
  }
  counters.rep_repeated++;
  // Given up before this REP came, or the peer has answered twice, as two: it must not wait for an RTU.
  if (c->remote_id != m.local_comm_id || (c->state == CmState::kResting && !c->answer))
    return on_stray_rep(p, h, m, RejectReason::kStaleConnection, out);
  if (c->state == CmState::kDreqSent || !c->answer) return;
  if (c->state == CmState::kResting) {
    counters.rej_sent++;
    counters.rej_repeated++;
  }
  if (c->state == CmState::kRepReceived) counters.mra_sent++;
  send(c->path, *c->answer, out);
}

void CmAgent::Impl::on_first_rep(Connection& c, const RepMessage& m, Time now) {
  if (Connection* stale = find(by_remote_qp, {c.path.dst_ip, m.local_ca_guid, m.local_qpn.value}))
    replace(*stale, now);
  set_timer(c, kNever);
  c.answer.reset();
  c.remote_id = m.local_comm_id;
  c.remote_guid = m.local_ca_guid;
  c.remote_qpn = m.local_qpn;
  c.remote_psn = m.starting_psn;
  index_remote(c);
  set_state(c, CmState::kRepReceived);
  event(c, CmEvent::Kind::kReply);
  CmEvent& e = events.back();
  // What a REP does not carry is as our REQ set it for both.
  e.remote = c.local;
  e.remote.qpn = m.local_qpn;
  e.remote.first_psn = m.starting_psn;
  e.remote.rnr_retry = m.rnr_retry_count;
  e.remote.responder_resources = m.responder_resources;
  e.remote.initiator_depth = m.initiator_depth;
  e.private_data.assign(m.private_data.begin(), m.private_data.end());
}

void CmAgent::Impl::on_stray_rep(const Packet& p, const MadHeader& h, const RepMessage& m,
                                 RejectReason reason, FrameList& out) {
  send_rej(p, h, m.remote_comm_id, m.local_comm_id, CmAnswered::kRep, reason, out);
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader&, const RtuMessage& m, Time, FrameList& out) {
  Connection* c = find(m.remote_comm_id, m.local_comm_id, p.src_ip);
  if (c == nullptr) {
    counters.unknown_id++;
    return;
  }
  if (c->state == CmState::kRepSent) return establish(*c);
  if (c->state == CmState::kResting && c->answer) {
    // Our REJ got lost and the peer believes that it is connected.
    counters.rej_sent++;
    counters.rej_repeated++;
    send(c->path, *c->answer, out);
  }
}

void CmAgent::Impl::establish(Connection& c) {
  set_timer(c, kNever);
  c.answer.reset();
  set_state(c, CmState::kEstablished);
  event(c, CmEvent::Kind::kEstablished);
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader& h, const DreqMessage& m, Time now,
                               FrameList& out) {
  counters.dreq_received++;
  Connection* c = find(m.remote_comm_id, m.local_comm_id, p.src_ip);
  if (c == nullptr) {
    counters.dreq_unknown++;
    if (!listening()) {
      counters.unknown_id++;
      return;
    }
    return send_drep(p, h, m, out);
  }
  // Before accept() there is no queue pair that the peer could name.
  if (c->local.qpn.value != 0 && c->local.qpn != m.remote_qpn) {
    counters.unknown_id++;
    return;
  }
  send_drep(p, h, m, out);
  if (c->state == CmState::kResting) return;
  event(*c, c->state == CmState::kDreqSent ? CmEvent::Kind::kClosed : CmEvent::Kind::kDisconnected);
  rest(*c, now);
}

void CmAgent::Impl::on_message(const Packet& p, const MadHeader&, const DrepMessage& m, Time now,
                               FrameList&) {
  Connection* c = find(m.remote_comm_id, m.local_comm_id, p.src_ip);
  if (c == nullptr) {
    counters.unknown_id++;
    return;
  }
  if (c->state != CmState::kDreqSent) return;
  event(*c, CmEvent::Kind::kClosed);
  rest(*c, now);
}

}  // namespace millrace::roce
