#include "host/memd_soft.h"

#include <algorithm>

namespace millrace::host {

using buffering::LeaseCode;
using buffering::LeaseRefusal;

namespace {

constexpr uint32_t kPacketsPerTurn = 64;

roce::CmConfig cm_config(const SoftLenderConfig& c) {
  roce::CmConfig cm;
  cm.ca_guid = c.ca_guid;
  cm.seed = c.seed;
  return cm;
}

}  // namespace

struct SoftLender::Lease {
  Lease(const roce::QueuePairConfig& config, Time now) : qp(config, now) {}
  roce::QueuePair qp;
  roce::CmId cm{};
  uint32_t part = 0;
  uint32_t rkey = 0;
  uint64_t address = 0;
  bool established = false;
};

SoftLender::SoftLender(const SoftLenderConfig& config, LeaseTable& table, FramePool& pool)
    : config_(config), table_(table), pool_(pool), cm_(cm_config(config), pool), random_(config.seed) {
  cm_.listen(roce::tcp_service_id(config.port));
  next_qpn_ = static_cast<uint32_t>(random_()) & 0xFFFFFF;
}
SoftLender::~SoftLender() = default;

void SoftLender::refuse(const roce::CmEvent& e, const LeaseRefusal& why, Time now, FrameList& out) {
  counters_.refused++;
  cm_.reject(e.id, roce::RejectReason::kConsumer, encode(why), now, out);
}

void SoftLender::handle_request(const roce::CmEvent& e, Time now, FrameList& out) {
  const auto request = buffering::decode_lease_request(e.private_data);
  if (const auto no = lease_objection(request, e.remote.initiator_depth)) return refuse(e, *no, now, out);
  const uint32_t mtu = roce::mtu_bytes(e.remote.mtu_code);
  if (mtu > config_.mtu_max)
    return refuse(e,
                  {.code = LeaseCode::kMtu,
                   .text = "the path MTU is at most " + std::to_string(config_.mtu_max) +
                           " here, the switch asks for " + std::to_string(mtu)},
                  now, out);
  if (closing_) return refuse(e, {.code = LeaseCode::kFull, .text = "the lender is ending"}, now, out);
  // A borrower that comes again has forgotten what it had.
  if (const auto old = table_.find(e.path.dst_ip, request->instance)) {
    const auto lease =
        std::find_if(leases_.begin(), leases_.end(), [&](const auto& l) { return l.second->part == *old; });
    counters_.replaced++;
    end(lease->first, now, out);
  }
  std::string why;
  const auto part = table_.take(e.path.dst_ip, request->instance, request->bytes, why);
  if (!part) return refuse(e, {.code = LeaseCode::kFull, .text = why}, now, out);

  do next_qpn_ = (next_qpn_ + 1) & 0xFFFFFF;
  while (next_qpn_ < 16 || leases_.contains(next_qpn_));
  roce::CmQueuePair local;
  local.qpn = Qpn{next_qpn_};
  local.first_psn = Psn(static_cast<uint32_t>(random_()));
  local.responder_resources = std::min(config_.reads_max, e.remote.initiator_depth);
  roce::QueuePairConfig qc;
  qc.local = local.qpn;
  qc.wire.path = e.path;
  qc.wire.path.src_port = roce::flow_source_port(local.qpn, e.remote.qpn);
  qc.wire.remote_qpn = e.remote.qpn;
  qc.expected_psn = local.first_psn;
  qc.requester.first_psn = e.remote.first_psn;
  qc.requester.mtu = mtu;
  qc.requester.requests_max = 1;  // probes
  qc.reads_max = local.responder_resources;
  qc.probe_after = config_.probe_after;
  qc.peer_dead = config_.peer_dead;
  auto lease = std::make_unique<Lease>(qc, now);
  lease->cm = e.id;
  lease->part = *part;
  do lease->rkey = static_cast<uint32_t>(random_());
  while (lease->rkey == 0);
  // Any address does, so none that says where this process has its memory.
  lease->address = uint64_t{*part} * table_.part_bytes();
  const auto reply = encode(buffering::LeaseReply{
      .rkey = lease->rkey, .address = lease->address, .bytes = table_.status(*part).bytes});
  leases_[next_qpn_] = std::move(lease);
  counters_.leases++;
  cm_.accept(e.id, local, reply, now, out);
}

void SoftLender::handle_events(Time now, FrameList& out) {
  roce::CmEvent e;
  while (cm_.next_event(e)) {
    using Kind = roce::CmEvent::Kind;
    if (e.kind == Kind::kRequest) {
      handle_request(e, now, out);
      continue;
    }
    const auto lease =
        std::find_if(leases_.begin(), leases_.end(), [&](const auto& l) { return l.second->cm == e.id; });
    if (lease == leases_.end()) continue;
    if (e.kind == Kind::kEstablished) {
      lease->second->established = true;
      continue;
    }
    counters_.ended++;
    lease->second->cm = {};
    end(lease->first, now, out);
  }
}

// From here on nothing touches the part, so that it can be lent again.
void SoftLender::end(uint32_t qpn, Time now, FrameList& out) {
  const auto found = leases_.find(qpn);
  if (found->second->cm.value != 0) cm_.disconnect(found->second->cm, now, out);
  table_.release(found->second->part);
  leases_.erase(found);
}

std::optional<std::span<uint8_t>> SoftLender::lent(const Lease& l, uint32_t rkey, uint64_t address,
                                                   uint64_t bytes) const {
  const std::span<uint8_t> memory = table_.memory(l.part);
  if (bytes == 0) return memory.first(0);
  if (rkey != l.rkey || address < l.address || address - l.address > memory.size() ||
      bytes > memory.size() - (address - l.address))
    return std::nullopt;
  return memory.subspan(address - l.address, bytes);
}

// A request that is in order, or a READ once more.
void SoftLender::serve(Lease& l, const roce::Packet& p, bool again, Time now, FrameList& out) {
  roce::RcResponder& responder = l.qp.responder();
  LeaseStatus& status = table_.status(l.part);
  const bool read = p.opcode() == roce::Opcode::kReadRequest;
  const roce::WritePlace place = responder.place(p);
  const uint64_t bytes = read ? p.reth->length.value() : p.payload.size();
  // A WRITE's whole extent is checked with its first packet already: none of it is written in vain.
  const uint64_t extent = !read && p.reth ? p.reth->length.value() : bytes;
  const auto memory = read || p.op->write ? lent(l, place.rkey, place.address, extent) : std::nullopt;
  if (!memory) {
    if (again) return;
    counters_.naks++;
    counters_.broken++;
    responder.refuse(p.op->send ? roce::kNakInvalidRequest : roce::kNakRemoteAccess);
    l.qp.emit(pool_, combine_, kPacketsPerTurn, now, out);
    return;
  }
  if (read) {
    again ? responder.read_again(p, *memory) : responder.accept_read(p, *memory);
    status.reads++;
    status.bytes_read += bytes;
    return;
  }
  if (bytes != 0) std::memcpy(memory->data(), p.payload.data(), bytes);
  responder.accept(p);
  status.writes += p.op->ends() && bytes != 0;
  status.bytes_written += bytes;
}

void SoftLender::receive(Frame frame, Time now, FrameList& out) {
  now_ = now;
  roce::Packet p;
  counters_.packets++;
  if (roce::parse(frame.bytes(), p) != roce::ParseVerdict::kOk || !roce::icrc_ok(p) ||
      (config_.address && p.dst_ip != *config_.address)) {
    counters_.dropped++;
    return;
  }
  if (p.dest_qp() == kGsiQpn) {
    cm_.receive(p, now, out);
    handle_events(now, out);
    return;
  }
  const auto found = leases_.find(p.dest_qp().value);
  if (found == leases_.end()) {
    counters_.dropped++;
    return;
  }
  Lease& l = *found->second;
  work_ = true;
  const roce::Reception r = l.qp.receive(p, now);
  switch (r) {
    case roce::Reception::kNewRequest:
    case roce::Reception::kReadAgain:
      if (p.ecn_ce()) l.qp.send_cnp(pool_, now, out);
      serve(l, p, r == roce::Reception::kReadAgain, now, out);
      break;
    case roce::Reception::kDuplicate:
      counters_.duplicates++;
      break;
    case roce::Reception::kGap:
    case roce::Reception::kGapQuiet:
      counters_.gaps++;
      break;
    case roce::Reception::kResponse:
      for (uint64_t id; l.qp.requester().next_completion(id);) continue;
      break;
    case roce::Reception::kCongestion:
      break;
    case roce::Reception::kInvalid:
      counters_.broken++;
      counters_.naks++;
      l.qp.emit(pool_, combine_, kPacketsPerTurn, now, out);
      break;
    default:
      counters_.dropped++;
      return;
  }
  if (l.qp.over()) return end(found->first, now, out);
  if (!l.established) cm_.established(l.cm);  // the RTU may have been lost
  handle_events(now, out);
}

void SoftLender::poll(Time now, FrameList& out) {
  now_ = now;
  if (now >= cm_.next_deadline()) cm_.poll(now, out);
  handle_events(now, out);
  work_ = false;
  for (auto l = leases_.begin(); l != leases_.end();) {
    const uint32_t qpn = l->first;
    roce::QueuePair& qp = (l++)->second->qp;
    if (now >= qp.next_deadline()) {
      qp.tick(now);
      if (qp.dead(now)) {
        counters_.died++;
        end(qpn, now, out);
        continue;
      }
    }
    work_ |= qp.emit(pool_, combine_, kPacketsPerTurn, now, out);
  }
}

Time SoftLender::next_deadline() const {
  if (work_) return now_;
  Time t = cm_.next_deadline();
  for (const auto& [qpn, l] : leases_) t = std::min(t, l->qp.next_deadline());
  return t;
}

void SoftLender::shutdown(Time now, FrameList& out) {
  closing_ = true;
  while (!leases_.empty()) end(leases_.begin()->first, now, out);
}

bool SoftLender::idle() const { return leases_.empty() && cm_.connections() == 0; }

}  // namespace millrace::host
