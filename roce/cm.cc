#include "roce/cm.h"

#include <algorithm>
#include <cassert>

#include "roce/cm_impl.h"
#include "roce/error.h"

namespace millrace::roce {

namespace {

template <size_t N>
void fill(std::array<uint8_t, N>& to, std::span<const uint8_t> from, size_t at = 0) {
  assert(at + from.size() <= N && "private data too long for its message");
  std::copy(from.begin(), from.end(), to.begin() + static_cast<ptrdiff_t>(at));
}

void validate(const CmConfig& c) {
  if (c.response_timeout <= Time::zero() || c.id_reuse <= Time::zero() || c.mra_timeout_max < Time::zero())
    throw Error(ErrorCode::kConfig,
                "the connection manager's time-outs must be positive; set response_timeout "
                "and id_reuse above 0");
  if (c.connections_max == 0 || c.half_open_max == 0 || c.half_open_per_source == 0)
    throw Error(ErrorCode::kConfig,
                "the connection manager needs room for a connection; set connections_max and "
                "half_open_max to 1 or more");
}

ReqMessage make_req(const CmConfig& config, const Path& path, uint64_t service_id, const CmQueuePair& local) {
  ReqMessage m;
  m.service_id = service_id;
  m.local_ca_guid = config.ca_guid;
  m.local_qpn = local.qpn;
  m.responder_resources = local.responder_resources;
  m.initiator_depth = local.initiator_depth;
  m.transport_service = kServiceTypeRc;
  m.starting_psn = local.first_psn;
  // What we grant the peer to answer, and what it may expect of us: its REP's repeats are timed by the
  // latter.
  m.remote_cm_response_timeout = m.local_cm_response_timeout = cm_time_code(config.response_timeout);
  m.retry_count = local.retry_count;
  m.path_mtu = local.mtu_code;
  m.rnr_retry_count = local.rnr_retry;
  m.max_cm_retries = static_cast<uint8_t>(std::min(config.retries, 15u));
  // Routed, so the LIDs are permissive, as Linux has them: RoCE has none.
  m.primary.local_lid = m.primary.remote_lid = 0xFFFF;
  m.primary.local_gid = path.src_ip;
  m.primary.remote_gid = path.dst_ip;
  m.primary.flow_label = port_flow_label(path.src_port);
  m.primary.traffic_class = path.tos;
  m.primary.hop_limit = path.hop_limit;
  m.primary.local_ack_timeout = local.ack_timeout;
  return m;
}

}  // namespace

size_t CmRemoteKeyHash::operator()(const CmRemoteKey& key) const {
  uint64_t h = salt;
  const auto mix = [&h](uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 29;
  };
  uint64_t hi, lo;
  std::memcpy(&hi, key.ip.bytes.data(), 8);
  std::memcpy(&lo, key.ip.bytes.data() + 8, 8);
  mix(hi);
  mix(lo);
  mix(key.guid);
  mix(key.number);
  return h;
}

CmAgent::Impl::Impl(const CmConfig& agent_config, FramePool& frames, CmCounters& counts)
    : config(agent_config), pool(frames), counters(counts) {
  validate(config);
  // Mixed so that no relation between the two cancels out: IDs must differ from boot to boot.
  std::mt19937_64 random(config.seed * 0x9E3779B97F4A7C15ull + config.ca_guid);
  transaction_high = random() << 32;
  id_mask = static_cast<uint32_t>(random());
  next_id = static_cast<uint32_t>(random());
  psn = Psn(static_cast<uint32_t>(random()));
  by_remote_id = RemoteIndex(0, CmRemoteKeyHash{random()});
  by_remote_qp = RemoteIndex(0, CmRemoteKeyHash{random()});
}

CmAgent::Connection* CmAgent::Impl::find(uint32_t id) const {
  const auto it = connections.find(id);
  return it == connections.end() ? nullptr : it->second.get();
}

CmAgent::Connection* CmAgent::Impl::find(uint32_t id, uint32_t remote_id, const IpAddress& ip) const {
  if (remote_id == 0) return nullptr;  // no ID; a connection that awaits its REP has none to compare with
  Connection* c = find(id);
  return c && c->remote_id == remote_id && c->path.dst_ip == ip ? c : nullptr;
}

CmAgent::Connection* CmAgent::Impl::find(const RemoteIndex& index, const CmRemoteKey& key) const {
  const auto it = index.find(key);
  return it == index.end() ? nullptr : find(it->second.value);
}

CmAgent::Connection& CmAgent::Impl::create(const Path& path, CmState state) {
  // IDs count up behind a mask, so that one does not come again before 2^32 others, whatever rests.
  uint32_t id = 0;
  do id = next_id++ ^ id_mask;
  while (id == 0 || connections.contains(id));
  auto& c = *(connections[id] = std::make_unique<Connection>());
  c.id = CmId{id};
  c.path = path;
  c.active = state == CmState::kReqSent;
  c.state = CmState::kReqSent;
  set_state(c, state);
  return c;
}

void CmAgent::Impl::index_remote(Connection& c) {
  by_remote_id[id_key(c)] = c.id;
  by_remote_qp[qp_key(c)] = c.id;
}

bool CmAgent::Impl::full() const {
  return connections.size() - resting.size() >= config.connections_max ||
         events.size() >= config.connections_max;
}

void CmAgent::Impl::set_state(Connection& c, CmState state) {
  const auto half = [](CmState s) { return s == CmState::kReqReceived || s == CmState::kRepSent; };
  if (half(state) && !half(c.state)) {
    half_open++;
    half_open_from[c.path.dst_ip]++;
  } else if (!half(state) && half(c.state)) {
    half_open--;
    const auto from = half_open_from.find(c.path.dst_ip);
    if (--from->second == 0) half_open_from.erase(from);
  }
  c.state = state;
}

void CmAgent::Impl::rest(Connection& c, Time now, bool keep_answer) {
  assert(c.state != CmState::kResting);
  set_timer(c, kNever);
  set_state(c, CmState::kResting);
  if (!keep_answer) c.answer.reset();
  const auto qp = by_remote_qp.find(qp_key(c));
  if (qp != by_remote_qp.end() && qp->second == c.id) by_remote_qp.erase(qp);
  resting.emplace_back(now + config.id_reuse, c.id);
  if (resting.size() > config.connections_max) {
    forget(resting.front().second);
    resting.pop_front();
  }
}

void CmAgent::Impl::forget(CmId id) {
  const auto it = connections.find(id.value);
  const auto remote = by_remote_id.find(id_key(*it->second));
  if (remote != by_remote_id.end() && remote->second == id) by_remote_id.erase(remote);
  connections.erase(it);
}

void CmAgent::Impl::replace(Connection& c, Time now) {
  counters.stale_replaced++;
  event(c, c.state == CmState::kDreqSent ? CmEvent::Kind::kClosed : CmEvent::Kind::kDisconnected);
  rest(c, now);
}

void CmAgent::Impl::event(const Connection& c, CmEvent::Kind kind) {
  events.push_back({.kind = kind, .id = c.id, .path = c.path});
}

void CmAgent::Impl::set_timer(Connection& c, Time when) {
  if (c.deadline != kNever) timers.erase({c.deadline, c.id.value});
  c.deadline = when;
  if (when != kNever) timers.insert({when, c.id.value});
}

void CmAgent::Impl::start_repeats(Connection& c, uint32_t repeats, Time now) {
  c.repeats_left = repeats;
  c.mra_taken = false;
  set_timer(c, now + config.response_timeout);
}

void CmAgent::Impl::on_timer(Connection& c, Time now, FrameList& out) {
  if (c.repeats_left > 0) {
    c.repeats_left--;
    c.mra_taken = false;
    counters.retries++;
    send(c.path, *c.answer, out);
    set_timer(c, now + config.response_timeout);
    return;
  }
  if (c.state == CmState::kDreqSent) {
    event(c, CmEvent::Kind::kClosed);
    rest(c, now);
    return;
  }
  event(c, CmEvent::Kind::kUnreachable);
  refuse(c, CmAnswered::kOther, RejectReason::kTimeout, {}, now, out);
}

void CmAgent::Impl::take_mra(Connection& c, uint8_t service_timeout, Time now) {
  if (c.mra_taken) return;
  c.mra_taken = true;
  const Time wait = std::min(cm_time(service_timeout), config.mra_timeout_max);
  set_timer(c, std::max(c.deadline, now + wait));
}

void CmAgent::Impl::send(const Path& path, const Mad& mad, FrameList& out) {
  Path to = path;
  // All messages of QP1 are one flow, whatever the connection's own is.
  to.src_port = flow_source_port(kGsiQpn, kGsiQpn);
  const TransportFields fields{
      .opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .psn = psn, .qkey = kGsiQkey, .src_qp = kGsiQpn};
  Frame frame = build(pool, to, fields, mad);
  if (!frame) {
    // As good as lost on the wire: the timers, ours or the peer's, repeat it.
    counters.send_failed++;
    return;
  }
  ++psn;
  counters.mads_sent++;
  out.push(std::move(frame));
}

void CmAgent::Impl::send_answer(Connection& c, const CmMessage& message, FrameList& out) {
  c.answer = std::make_unique<Mad>(encode_cm(message));
  send(c.path, *c.answer, out);
}

void CmAgent::Impl::refuse(Connection& c, CmAnswered answered, RejectReason reason,
                           std::span<const uint8_t> private_data, Time now, FrameList& out) {
  RejMessage m{.local_comm_id = c.id.value,
               .remote_comm_id = c.remote_id,
               .answered = answered,
               .reason = static_cast<uint16_t>(reason)};
  // No connection of ours comes of a refused REQ, so no ID is shown (as Linux does it).
  if (answered == CmAnswered::kReq) m.local_comm_id = 0;
  if (reason == RejectReason::kTimeout) {
    // The peer may know us by our CA GUID and our ID only (IBA 12.6.7.2, code 4).
    const Be64 guid = config.ca_guid;
    m.info_length = sizeof(guid);
    std::memcpy(m.info.data(), &guid, sizeof(guid));
  }
  fill(m.private_data, private_data);
  counters.rej_sent++;
  send_answer(c, {{.transaction_id = c.transaction_id}, m}, out);
  rest(c, now, true);
}

CmAgent::CmAgent(const CmConfig& config, FramePool& pool)
    : impl_(std::make_unique<Impl>(config, pool, counters_)) {}

CmAgent::~CmAgent() = default;

void CmAgent::poll(Time now, FrameList& out) {
  Impl& a = *impl_;
  while (!a.timers.empty() && a.timers.begin()->first <= now)
    a.on_timer(*a.find(a.timers.begin()->second), now, out);
  while (!a.resting.empty() && a.resting.front().first <= now) {
    a.forget(a.resting.front().second);
    a.resting.pop_front();
  }
}

Time CmAgent::next_deadline() const {
  const Time timer = impl_->timers.empty() ? kNever : impl_->timers.begin()->first;
  const Time rested = impl_->resting.empty() ? kNever : impl_->resting.front().first;
  return std::min(timer, rested);
}

bool CmAgent::next_event(CmEvent& event) {
  if (impl_->events.empty()) return false;
  event = std::move(impl_->events.front());
  impl_->events.pop_front();
  return true;
}

void CmAgent::listen(uint64_t service_id) { impl_->services.insert(service_id); }

void CmAgent::accept(CmId id, const CmQueuePair& local, std::span<const uint8_t> private_data, Time now,
                     FrameList& out) {
  Connection* c = impl_->find(id.value);
  if (c == nullptr || c->state != CmState::kReqReceived) return;
  c->local = local;
  RepMessage m{.local_comm_id = c->id.value,
               .remote_comm_id = c->remote_id,
               .local_qpn = local.qpn,
               .starting_psn = local.first_psn,
               .responder_resources = local.responder_resources,
               .initiator_depth = local.initiator_depth,
               .rnr_retry_count = local.rnr_retry,
               .local_ca_guid = impl_->config.ca_guid};
  fill(m.private_data, private_data);
  impl_->set_state(*c, CmState::kRepSent);
  impl_->send_answer(*c, {{.transaction_id = c->transaction_id}, m}, out);
  impl_->start_repeats(*c, impl_->config.retries, now);
}

void CmAgent::reject(CmId id, RejectReason reason, std::span<const uint8_t> private_data, Time now,
                     FrameList& out) {
  Connection* c = impl_->find(id.value);
  if (c == nullptr || c->state != CmState::kReqReceived) return;
  impl_->refuse(*c, CmAnswered::kReq, reason, private_data, now, out);
}

void CmAgent::mra(CmId id, Time service_time, Time, FrameList& out) {
  Connection* c = impl_->find(id.value);
  if (c == nullptr || (c->state != CmState::kReqReceived && c->state != CmState::kRepReceived)) return;
  const MraMessage m{.local_comm_id = c->id.value,
                     .remote_comm_id = c->remote_id,
                     .answered = c->state == CmState::kReqReceived ? CmAnswered::kReq : CmAnswered::kRep,
                     .service_timeout = cm_time_code(service_time)};
  counters_.mra_sent++;
  impl_->send_answer(*c, {{.transaction_id = c->transaction_id}, m}, out);
}

void CmAgent::established(CmId id) {
  Connection* c = impl_->find(id.value);
  if (c != nullptr && c->state == CmState::kRepSent) impl_->establish(*c);
}

CmId CmAgent::connect(const Path& path, uint64_t service_id, const CmQueuePair& local, uint16_t local_port,
                      std::span<const uint8_t> private_data, Time now, FrameList& out) {
  if (impl_->full()) return {};
  Connection& c = impl_->create(path, CmState::kReqSent);
  c.service_id = service_id;
  c.local = local;
  c.transaction_id = impl_->own_transaction(c.id);
  ReqMessage m = make_req(impl_->config, path, service_id, local);
  m.local_comm_id = c.id.value;
  encode_rdma_cm({.ip_version = static_cast<uint8_t>(path.dst_ip.is_v4() ? 4 : 6),
                  .src_port = local_port,
                  .src_ip = path.src_ip,
                  .dst_ip = path.dst_ip},
                 std::span(m.private_data).first<kRdmaCmBytes>());
  fill(m.private_data, private_data, kRdmaCmBytes);
  impl_->send_answer(c, {{.transaction_id = c.transaction_id}, m}, out);
  impl_->start_repeats(c, impl_->config.retries, now);
  return c.id;
}

void CmAgent::confirm(CmId id, Time, FrameList& out) {
  Connection* c = impl_->find(id.value);
  if (c == nullptr || c->state != CmState::kRepReceived) return;
  impl_->set_state(*c, CmState::kEstablished);
  const RtuMessage m{.local_comm_id = c->id.value, .remote_comm_id = c->remote_id};
  impl_->send_answer(*c, {{.transaction_id = c->transaction_id}, m}, out);
}

void CmAgent::redirect(CmId id, const MacAddress& next_hop) {
  Connection* c = impl_->find(id.value);
  if (c != nullptr && c->state == CmState::kReqSent) c->path.dst_mac = next_hop;
}

void CmAgent::disconnect(CmId id, Time now, FrameList& out, std::span<const uint8_t> why) {
  Connection* c = impl_->find(id.value);
  if (c == nullptr || c->state == CmState::kResting || c->state == CmState::kDreqSent) return;
  if (c->state == CmState::kEstablished) {
    const DreqMessage m{
        .local_comm_id = c->id.value, .remote_comm_id = c->remote_id, .remote_qpn = c->remote_qpn};
    impl_->set_state(*c, CmState::kDreqSent);
    impl_->send_answer(*c, {{.transaction_id = impl_->own_transaction(c->id)}, m}, out);
    impl_->start_repeats(*c, impl_->config.disconnect_retries, now);
    return;
  }
  impl_->event(*c, CmEvent::Kind::kClosed);
  CmAnswered answered = CmAnswered::kOther;
  RejectReason reason = RejectReason::kConsumer;
  if (c->state == CmState::kReqReceived) answered = CmAnswered::kReq;
  if (c->state == CmState::kRepReceived) answered = CmAnswered::kRep;
  if (c->state == CmState::kReqSent) reason = RejectReason::kTimeout;  // the peer's ID is not known yet
  impl_->refuse(*c, answered, reason, why, now, out);
}

size_t CmAgent::connections() const { return impl_->connections.size() - impl_->resting.size(); }

size_t CmAgent::records() const {
  const Impl& a = *impl_;
  return a.connections.size() + a.by_remote_id.size() + a.by_remote_qp.size() + a.timers.size() +
         a.resting.size() + a.events.size() + a.half_open;
}

}  // namespace millrace::roce
