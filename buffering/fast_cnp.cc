#include "buffering/fast_cnp.h"

#include "buffering/address_hash.h"
#include "roce/build.h"

namespace millrace::buffering {

namespace {

constexpr uint32_t kRecordsMax = FastCnp::kConnectionsMax + FastCnp::kRequestsMax;
constexpr uint16_t kCnpPriority = 6;  // of the VLAN tag, as adapters' own
constexpr int kForgottenAtOnce = 8;
constexpr Time kNeverTold{-1};

}  // namespace

FastCnp::FastCnp(const Config& config, FramePool& pool)
    : pool_(pool),
      seed_(config.seed),
      mac_(config.mac),
      interval_(config.spillway.fast_cnp_interval),
      tos_(static_cast<uint8_t>(config.spillway.fast_cnp_dscp << 2)),
      records_(kRecordsMax),
      by_id_(kRecordsMax),
      by_flow_(2 * kRecordsMax) {}

uint64_t FastCnp::id_hash(const IpAddress& active, const IpAddress& passive,
                          uint32_t active_id) const noexcept {
  return address_hash(passive, address_hash(active, active_id, seed_), seed_);
}

uint64_t FastCnp::flow_hash(const IpAddress& from, const IpAddress& to, Qpn to_qpn) const noexcept {
  return address_hash(to, address_hash(from, to_qpn.value, seed_), seed_);
}

uint64_t FastCnp::hash_of(const Record& r) const noexcept {
  return id_hash(r.active, r.passive, r.active_id);
}

uint64_t FastCnp::flow_hash_of(const Record& r, bool to_active) const noexcept {
  return to_active ? flow_hash(r.passive, r.active, r.active_qpn)
                   : flow_hash(r.active, r.passive, r.passive_qpn);
}

uint32_t FastCnp::find(const IpAddress& active, const IpAddress& passive, uint32_t active_id) const noexcept {
  return by_id_.find(id_hash(active, passive, active_id), [&](uint32_t i) {
    const Record& r = records_[i];
    return r.active_id == active_id && r.active == active && r.passive == passive;
  });
}

uint32_t FastCnp::find_flow(const IpAddress& from, const IpAddress& to, Qpn to_qpn) const noexcept {
  return by_flow_.find(flow_hash(from, to, to_qpn), [&](uint32_t i) {
    const Record& r = records_[i / 2];
    return i % 2 ? r.active_qpn == to_qpn && r.passive == from && r.active == to
                 : r.passive_qpn == to_qpn && r.active == from && r.passive == to;
  });
}

void FastCnp::link(uint32_t record) noexcept {
  Record& r = records_[record];
  List& list = lists_[r.connected];
  r.before = list.newest, r.after = kNone;
  (list.newest == kNone ? list.oldest : records_[list.newest].after) = record;
  list.newest = record;
  list.size++;
}

void FastCnp::unlink(uint32_t record) noexcept {
  const Record& r = records_[record];
  List& list = lists_[r.connected];
  (r.before == kNone ? list.oldest : records_[r.before].after) = r.after;
  (r.after == kNone ? list.newest : records_[r.after].before) = r.before;
  list.size--;
}

uint32_t FastCnp::take_record() noexcept {
  if (free_ == kNone) return fresh_++;
  const uint32_t record = free_;
  free_ = records_[record].after;
  return record;
}

void FastCnp::remove(uint32_t record) noexcept {
  Record& r = records_[record];
  unlink(record);
  by_id_.erase(hash_of(r), record);
  if (r.connected)
    for (const bool to_active : {false, true})
      by_flow_.erase(flow_hash_of(r, to_active), 2 * record + to_active);
  r.after = free_;
  free_ = record;
}

void FastCnp::forget_old(Time now) noexcept {
  const Time age[] = {kRequestAge, kConnectionAge};
  for (size_t i = 0; i < lists_.size(); i++)
    for (int n = 0; n < kForgottenAtOnce && lists_[i].oldest != kNone; n++) {
      if (now - records_[lists_[i].oldest].heard < age[i]) break;
      remove(lists_[i].oldest);
    }
}

// By the addresses of the packet, as the data will be; whoever can forge them can forge a CNP as well.
void FastCnp::hear_cm(const Frame& frame, Time now) noexcept {
  roce::Packet p;
  if (roce::parse(frame.bytes(), p) != roce::ParseVerdict::kOk || p.opcode() != roce::Opcode::kUdSendOnly ||
      p.deth->qkey.value() != roce::kGsiQkey || p.payload.size() < roce::kMadBytes || !roce::icrc_ok(p))
    return;
  const auto message = roce::decode_cm(p.payload.first(roce::kMadBytes));
  if (!message) return;
  forget_old(now);
  if (const auto* req = std::get_if<roce::ReqMessage>(&message->body))
    request(p.src_ip, p.dst_ip, *req, now);
  else if (const auto* rep = std::get_if<roce::RepMessage>(&message->body))
    reply(p.dst_ip, p.src_ip, *rep, now);
  else if (const auto* rej = std::get_if<roce::RejMessage>(&message->body))
    end(p.src_ip, p.dst_ip, rej->local_comm_id, rej->remote_comm_id);
  else if (const auto* dreq = std::get_if<roce::DreqMessage>(&message->body))
    end(p.src_ip, p.dst_ip, dreq->local_comm_id, dreq->remote_comm_id);
  else if (const auto* drep = std::get_if<roce::DrepMessage>(&message->body))
    end(p.src_ip, p.dst_ip, drep->local_comm_id, drep->remote_comm_id);
}

void FastCnp::request(const IpAddress& active, const IpAddress& passive, const roce::ReqMessage& m,
                      Time now) noexcept {
  if (m.local_qpn.value <= kGsiQpn.value) return;
  if (const uint32_t known = find(active, passive, m.local_comm_id); known != kNone) {
    // A late repeat of the request changes nothing.
    if (records_[known].active_qpn == m.local_qpn) return;
    remove(known);
  }
  if (lists_[0].size == kRequestsMax) remove(lists_[0].oldest);
  const uint32_t record = take_record();
  records_[record] = {active, passive, m.local_comm_id,          0,     m.local_qpn,
                      {},     now,     {kNeverTold, kNeverTold}, kNone, kNone,
                      false};
  by_id_.insert(hash_of(records_[record]), record);
  link(record);
}

void FastCnp::reply(const IpAddress& active, const IpAddress& passive, const roce::RepMessage& m,
                    Time now) noexcept {
  if (m.local_qpn.value <= kGsiQpn.value) return;
  const uint32_t record = find(active, passive, m.remote_comm_id);
  if (record == kNone || records_[record].connected) return;
  // Whoever had these queue pairs before is gone.
  if (const uint32_t flow = find_flow(active, passive, m.local_qpn); flow != kNone) remove(flow / 2);
  const uint32_t back = find_flow(passive, active, records_[record].active_qpn);
  if (back != kNone) remove(back / 2);
  if (lists_[1].size == kConnectionsMax) remove(lists_[1].oldest);
  unlink(record);
  Record& r = records_[record];
  r.passive_id = m.local_comm_id, r.passive_qpn = m.local_qpn;
  r.heard = now;
  r.connected = true;
  link(record);
  for (const bool to_active : {false, true})
    by_flow_.insert(flow_hash_of(r, to_active), 2 * record + to_active);
}

// A REJ need not know both IDs, and one that a request draws does not.
void FastCnp::end(const IpAddress& from, const IpAddress& to, uint32_t from_id, uint32_t to_id) noexcept {
  uint32_t record = find(from, to, from_id);
  if (record != kNone && (!records_[record].connected || records_[record].passive_id == to_id))
    return remove(record);
  record = find(to, from, to_id);
  if (record != kNone && (!records_[record].connected || records_[record].passive_id == from_id))
    remove(record);
}

FastCnp::Notice FastCnp::notice(const Frame& frame, const Look& l) noexcept {
  const uint8_t* bytes = frame.buffer()->data();
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(bytes);
  Notice n;
  n.src_mac = eth.src, n.dst_mac = eth.dst;
  n.source = source_of(frame, l), n.destination = destination_of(frame, l);
  n.destination_qpn = Qpn{l.qpn};
  const size_t bth_at =
      l.ip_at + (l.v6 ? sizeof(roce::Ipv6Header) : sizeof(roce::Ipv4Header)) + sizeof(roce::UdpHeader);
  n.pkey = reinterpret_cast<const roce::Bth*>(bytes + bth_at)->pkey.value();
  n.has_vlan = eth.ether_type.value() == roce::kEtherTypeVlan;
  if (n.has_vlan)
    n.vlan_tci = reinterpret_cast<const roce::VlanTag*>(bytes + sizeof(roce::EthernetHeader))->tci.value();
  return n;
}

// From the destination's address, as its own CNP would come: adapters look for the queue pair's peer there.
void FastCnp::tell(const Notice& n, Time now, SpillCounters& counters, FrameList& out) noexcept {
  const uint32_t flow = find_flow(n.source, n.destination, n.destination_qpn);
  if (flow == kNone || now - records_[flow / 2].heard >= kConnectionAge)
    return counters.suppressed(CnpSuppressed::kUnknownQp);
  Record& r = records_[flow / 2];
  const bool to_active = flow % 2;  // the data; the CNP goes the other way
  Time& told = r.told[to_active ? 1 : 0];
  if (told != kNeverTold && now - told < interval_) return counters.suppressed(CnpSuppressed::kInterval);
  roce::Path path;
  const bool routed = n.src_mac == mac_;
  path.src_mac = routed ? mac_ : n.dst_mac;
  path.dst_mac = routed ? MacAddress{} : n.src_mac;
  path.src_ip = n.destination, path.dst_ip = n.source;
  path.tos = tos_;
  path.has_vlan = n.has_vlan;
  path.vlan_tci = static_cast<uint16_t>((n.vlan_tci & 0x0FFF) | kCnpPriority << 13);
  roce::TransportFields f;
  f.opcode = roce::Opcode::kCnp;
  f.dest_qp = to_active ? r.passive_qpn : r.active_qpn;
  f.pkey = n.pkey;
  path.src_port = roce::flow_source_port(n.destination_qpn, f.dest_qp);
  Frame cnp = roce::build(pool_, path, f, {});
  if (!cnp) return counters.suppressed(CnpSuppressed::kNoFrames);
  told = now;
  unlink(flow / 2);
  r.heard = now;
  link(flow / 2);
  counters.cnps_sent++;
  out.push(std::move(cnp));
}

}  // namespace millrace::buffering
