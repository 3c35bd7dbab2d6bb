#include "tools/sim/nic_cm.h"

#include <algorithm>
#include <utility>

#include "tools/sim/nic_wire.h"

namespace millrace::sim {

namespace {

constexpr size_t kHeader = 24, kMad = 256;

// Where a message's private data lies behind the MAD header, and how much there is of it.
struct Private {
  size_t at = 0, bytes = 0;
};
Private private_of(CmKind kind) {
  switch (kind) {
    case CmKind::kReq:
      return {140, 92};
    case CmKind::kMra:
      return {10, 222};
    case CmKind::kRej:
      return {84, 148};
    case CmKind::kRep:
      return {36, 196};
    case CmKind::kRtu:
    case CmKind::kDrep:
      return {8, 224};
    case CmKind::kDreq:
      return {12, 220};
  }
  return {};
}

uint8_t byte(unsigned v) { return static_cast<uint8_t>(v); }

// A GID of RoCE v2: IPv4 is mapped (A17.4.1), which is how IpAddress keeps it.
void put_gid(uint8_t* at, const IpAddress& a) { std::copy_n(a.bytes.data(), 16, at); }

void write_req(uint8_t* b, const CmMad& m) {
  set_be(b + 8, 8, m.service);
  set_be(b + 16, 8, m.ca_guid);
  set_be(b + 32, 3, m.qpn);
  b[35] = m.responder_resources;
  b[39] = m.initiator_depth;
  b[43] = byte(m.remote_timeout << 3 | (m.flow_control ? 1 : 0));  // transport service RC: 0
  set_be(b + 44, 3, m.starting_psn);
  b[47] = byte(m.local_timeout << 3 | (m.retry_count & 7));
  set_be(b + 48, 2, m.pkey);
  b[50] = byte(m.mtu << 4 | (m.rnr_retry & 7));
  b[51] = byte(m.max_cm_retries << 4);
  set_be(b + 52, 4, 0xFFFFFFFF);  // both LIDs: routed
  put_gid(b + 56, m.local_gid);
  put_gid(b + 72, m.remote_gid);
  set_be(b + 88, 4, uint64_t{m.flow_label} << 12);
  b[92] = m.traffic_class;
  b[93] = m.hop_limit;
  b[95] = byte(m.ack_timeout << 3);
}

void read_req(const uint8_t* b, CmMad& m) {
  m.service = get_be(b + 8, 8);
  m.ca_guid = get_be(b + 16, 8);
  m.qpn = static_cast<uint32_t>(get_be(b + 32, 3));
  m.responder_resources = b[35];
  m.initiator_depth = b[39];
  m.remote_timeout = b[43] >> 3;
  m.flow_control = b[43] & 1;
  m.starting_psn = static_cast<uint32_t>(get_be(b + 44, 3));
  m.local_timeout = b[47] >> 3;
  m.retry_count = b[47] & 7;
  m.pkey = static_cast<uint16_t>(get_be(b + 48, 2));
  m.mtu = b[50] >> 4;
  m.rnr_retry = b[50] & 7;
  m.max_cm_retries = b[51] >> 4;
  m.local_gid = IpAddress::from_v6(b + 56);
  m.remote_gid = IpAddress::from_v6(b + 72);
  m.flow_label = static_cast<uint32_t>(get_be(b + 88, 4) >> 12);
  m.traffic_class = b[92];
  m.hop_limit = b[93];
  m.ack_timeout = b[95] >> 3;
}

void write_rep(uint8_t* b, const CmMad& m) {
  set_be(b + 12, 3, m.qpn);
  set_be(b + 20, 3, m.starting_psn);
  b[24] = m.responder_resources;
  b[25] = m.initiator_depth;
  b[26] = byte(m.target_ack_delay << 3 | (m.flow_control ? 1 : 0));
  b[27] = byte(m.rnr_retry << 5);
  set_be(b + 28, 8, m.ca_guid);
}

void read_rep(const uint8_t* b, CmMad& m) {
  m.qpn = static_cast<uint32_t>(get_be(b + 12, 3));
  m.starting_psn = static_cast<uint32_t>(get_be(b + 20, 3));
  m.responder_resources = b[24];
  m.initiator_depth = b[25];
  m.target_ack_delay = b[26] >> 3;
  m.flow_control = b[26] & 1;
  m.rnr_retry = b[27] >> 5;
  m.ca_guid = get_be(b + 28, 8);
}

}  // namespace

std::array<uint8_t, 256> write_mad(const CmMad& m) {
  std::array<uint8_t, 256> mad{};
  mad[0] = 1;     // base version
  mad[1] = 0x07;  // communication management
  mad[2] = 2;     // its version
  mad[3] = 0x03;  // Send
  set_be(&mad[8], 8, m.transaction);
  set_be(&mad[16], 2, static_cast<uint16_t>(m.kind));
  uint8_t* b = &mad[kHeader];
  set_be(b, 4, m.local_id);
  if (m.kind != CmKind::kReq) set_be(b + 4, 4, m.remote_id);
  if (m.kind == CmKind::kReq) write_req(b, m);
  if (m.kind == CmKind::kRep) write_rep(b, m);
  if (m.kind == CmKind::kDreq) set_be(b + 8, 3, m.qpn);
  if (m.kind == CmKind::kMra) {
    b[8] = byte(m.answered << 6);
    b[9] = byte(m.service_timeout << 3);
  }
  if (m.kind == CmKind::kRej) {
    b[8] = byte(m.answered << 6);
    b[9] = byte(static_cast<unsigned>(m.reject_info.size()) << 1);
    set_be(b + 10, 2, m.reason);
    std::copy(m.reject_info.begin(), m.reject_info.end(), b + 12);
  }
  const Private where = private_of(m.kind);
  std::copy_n(m.private_data.begin(), std::min(m.private_data.size(), where.bytes), b + where.at);
  return mad;
}

bool read_mad(std::span<const uint8_t> mad, CmMad& m) {
  m = {};
  if (mad.size() != kMad || mad[0] != 1 || mad[1] != 0x07 || mad[2] != 2 || mad[3] != 0x03) return false;
  const auto attribute = static_cast<uint16_t>(get_be(&mad[16], 2));
  if (attribute < 0x10 || attribute > 0x16) return false;
  m.kind = static_cast<CmKind>(attribute);
  m.transaction = get_be(&mad[8], 8);
  const uint8_t* b = &mad[kHeader];
  m.local_id = static_cast<uint32_t>(get_be(b, 4));
  if (m.kind != CmKind::kReq) m.remote_id = static_cast<uint32_t>(get_be(b + 4, 4));
  if (m.kind == CmKind::kReq) read_req(b, m);
  if (m.kind == CmKind::kRep) read_rep(b, m);
  if (m.kind == CmKind::kDreq) m.qpn = static_cast<uint32_t>(get_be(b + 8, 3));
  if (m.kind == CmKind::kMra || m.kind == CmKind::kRej) m.answered = b[8] >> 6;
  if (m.kind == CmKind::kMra) m.service_timeout = b[9] >> 3;
  if (m.kind == CmKind::kRej) {
    m.reason = static_cast<uint16_t>(get_be(b + 10, 2));
    m.reject_info.assign(b + 12, b + 12 + std::min(72, b[9] >> 1));
  }
  const Private where = private_of(m.kind);
  m.private_data.assign(b + where.at, b + where.at + where.bytes);
  return true;
}

std::vector<uint8_t> rdma_cm_data(const IpAddress& from, const IpAddress& to, uint16_t port,
                                  std::span<const uint8_t> consumer) {
  std::vector<uint8_t> data(92);
  data[1] = from.is_v4() ? 0x40 : 0x60;
  set_be(&data[2], 2, port);
  // struct cma_hdr: an IPv4 address stands in the last word, behind zeros.
  if (from.is_v4()) {
    std::copy_n(from.v4(), 4, &data[16]);
    std::copy_n(to.v4(), 4, &data[32]);
  } else {
    put_gid(&data[4], from);
    put_gid(&data[20], to);
  }
  std::copy_n(consumer.begin(), std::min<size_t>(consumer.size(), 56), data.begin() + 36);
  return data;
}

CmClient::CmClient(CmMad req, const NicQuirks& quirks, Time now)
    : request_(std::move(req)),
      quirks_(quirks),
      own_id_(request_.local_id),
      own_qpn_(request_.qpn),
      tries_left_(quirks.cm_retries),
      transaction_(request_.transaction),
      ca_guid_(request_.ca_guid),
      timer_(now + cm_timeout(quirks.cm_timeout)) {
  out.push_back(request_);
}

CmMad CmClient::answer(CmKind kind) const {
  CmMad m;
  m.kind = kind;
  m.transaction = transaction_;
  m.local_id = own_id_;
  m.remote_id = remote_id_;
  return m;
}

CmClient::Outcome CmClient::receive(const CmMad& m, Time now) {
  if (state_ == State::kOver) return Outcome::kNothing;
  if (state_ != State::kReqSent && m.local_id != remote_id_) return Outcome::kNothing;
  switch (m.kind) {
    case CmKind::kRep:
      return on_rep(m);
    case CmKind::kMra:
      // As long as the peer asks for, and its message's own way on top.
      if (state_ == State::kReqSent && m.answered == 0)
        timer_ = now + cm_timeout(m.service_timeout) + cm_timeout(quirks_.cm_timeout);
      return Outcome::kNothing;
    case CmKind::kRej: {
      const State before = std::exchange(state_, State::kOver);
      if (before == State::kDreqSent) return Outcome::kNothing;
      return before == State::kReqSent ? Outcome::kRejected : Outcome::kDisconnected;
    }
    case CmKind::kDreq:
      return on_dreq(m);
    case CmKind::kDrep:
      if (state_ == State::kDreqSent) state_ = State::kOver;
      return Outcome::kNothing;
    default:
      return Outcome::kNothing;
  }
}

CmClient::Outcome CmClient::on_rep(const CmMad& m) {
  if (state_ == State::kReqSent) {
    remote_id_ = m.local_id;
    remote_qpn_ = m.qpn;
    state_ = State::kRepReceived;
    timer_ = kNever;
    return Outcome::kReply;
  }
  if (state_ == State::kRepReceived) {
    CmMad mra = answer(CmKind::kMra);
    mra.answered = 1;
    mra.service_timeout = quirks_.mra_timeout;
    out.push_back(std::move(mra));
  } else if (state_ == State::kConnected) {
    out.push_back(answer(CmKind::kRtu));
  }
  return Outcome::kNothing;
}

CmClient::Outcome CmClient::on_dreq(const CmMad& m) {
  // Linux leaves a DREQ unanswered whose queue pair is another, or that comes before our RTU has gone.
  if (m.qpn != own_qpn_ || (state_ != State::kConnected && state_ != State::kDreqSent))
    return Outcome::kNothing;
  CmMad drep = answer(CmKind::kDrep);
  drep.transaction = m.transaction;
  out.push_back(std::move(drep));
  return std::exchange(state_, State::kOver) == State::kConnected ? Outcome::kDisconnected
                                                                  : Outcome::kNothing;
}

CmClient::Outcome CmClient::poll(Time now) {
  if (state_ == State::kOver || now < timer_) return Outcome::kNothing;
  if (tries_left_ > 0) {
    tries_left_--;
    timer_ = now + cm_timeout(quirks_.cm_timeout);
    out.push_back(request_);
    return Outcome::kNothing;
  }
  if (state_ == State::kDreqSent) {
    state_ = State::kOver;
    return Outcome::kNothing;
  }
  disconnect(now);
  return Outcome::kUnreachable;
}

void CmClient::confirm() {
  state_ = State::kConnected;
  out.push_back(answer(CmKind::kRtu));
}

void CmClient::disconnect(Time now) {
  switch (state_) {
    case State::kReqSent: {  // the peer, should it know us, does so by the GUID (12.6.7.2, code 4)
      CmMad rej = answer(CmKind::kRej);
      rej.answered = 2;
      rej.reason = kRejTimeout;
      rej.reject_info.resize(8);
      set_be(rej.reject_info.data(), 8, ca_guid_);
      out.push_back(std::move(rej));
      state_ = State::kOver;
      return;
    }
    case State::kRepReceived: {
      CmMad rej = answer(CmKind::kRej);
      rej.answered = 1;
      rej.reason = kRejConsumer;
      out.push_back(std::move(rej));
      state_ = State::kOver;
      return;
    }
    case State::kConnected:
      request_ = answer(CmKind::kDreq);
      request_.qpn = remote_qpn_;
      out.push_back(request_);
      state_ = State::kDreqSent;
      tries_left_ = quirks_.cm_retries;
      timer_ = now + cm_timeout(quirks_.cm_timeout);
      return;
    default:
      return;
  }
}

}  // namespace millrace::sim
