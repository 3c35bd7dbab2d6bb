#include "tools/sim/nic_lender.h"

#include <algorithm>

namespace millrace::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr uint32_t kMagic = 0x4D524C53;
constexpr uint64_t kService = 0x01060000 | 18616;  // rdma_cm's TCP port space
constexpr uint32_t kGsiQkey = 0x80010000;
constexpr uint8_t kCredits = 0x1F, kSequence = 0x60, kInvalidRequest = 0x61, kRemoteAccess = 0x62;
constexpr uint8_t kReadRequest = 0x0C, kReadFirst = 0x0D, kReadMiddle = 0x0E, kReadLast = 0x0F,
                  kReadOnly = 0x10;
constexpr Time kAnswerWithin = milliseconds(500);  // to a REP or a DREQ, before it is sent again
constexpr uint32_t kTries = 8;
constexpr Time kSilence = seconds(5);  // of the borrower, who is then gone
constexpr Time kRest = seconds(2);     // for which a goodbye is answered again

uint32_t mtu_bytes(uint8_t code) { return code >= 1 && code <= 5 ? 128u << code : 0; }

}  // namespace

LenderModel::LenderModel(const LenderConfig& config, std::function<void(const LeaseEvent&)> tell)
    : config_(config), tell_(std::move(tell)), dice_(config.seed) {}

size_t LenderModel::leases() const {
  return static_cast<size_t>(std::count_if(leases_.begin(), leases_.end(), [](const auto& l) {
    return l.second.state == State::kReplied || l.second.state == State::kUp;
  }));
}

void LenderModel::receive(std::span<const uint8_t> frame, Time now) {
  NicPacket p;
  if (read_frame(frame, p) != Reading::kGood || p.to != config_.address) return;
  if (p.qpn == 1) return on_mad(p, now);
  const auto found = leases_.find(p.qpn);
  if (found == leases_.end()) return;
  Lease& l = found->second;
  if (l.state > State::kUp || p.from != l.path.to) return;
  // The RTU may have been lost; the borrower knows that it has the lease.
  if (l.state == State::kReplied) l.state = State::kUp, l.timer = kNever;
  l.heard = now;
  on_packet(l, p, now);
}

// --- the connection manager's passive side (IBA vol. 1, chapter 12) ---

void LenderModel::send_mad(const NicPacket& path, const CmMad& mad) {
  NicPacket p = path;
  p.opcode = kOpUdSend;
  p.qpn = 1, p.source_qp = 1;
  p.psn = cm_psn_ = (cm_psn_ + 1) & 0xFFFFFF;
  p.qkey = kGsiQkey;
  p.traffic_class = 0;
  const auto bytes = write_mad(mad);
  out_.push_back(make_frame(p, bytes));
}

LenderModel::Lease* LenderModel::find(const IpAddress& borrower, uint32_t peer_id) {
  for (auto& [qpn, l] : leases_)
    if (l.path.to == borrower && l.peer_id == peer_id) return &l;
  return nullptr;
}

void LenderModel::on_mad(const NicPacket& p, Time now) {
  CmMad mad;
  if (p.opcode != kOpUdSend || p.qkey != kGsiQkey || !read_mad(p.payload, mad)) return;
  if (mad.kind == CmKind::kReq) return on_request_for_lease(p, mad, now);
  Lease* l = find(p.from, mad.local_id);
  if (mad.kind == CmKind::kDreq) {
    // Answered even when nothing is known of it any more: the answer may have been lost.
    NicPacket back;
    back.to_mac = p.from_mac, back.from_mac = config_.mac;
    back.to = p.from, back.from = config_.address;
    CmMad drep;
    drep.kind = CmKind::kDrep;
    drep.transaction = mad.transaction;
    drep.local_id = mad.remote_id, drep.remote_id = mad.local_id;
    send_mad(back, drep);
    if (l != nullptr) over(*l, now);
    return;
  }
  if (l == nullptr) return;
  if (mad.kind == CmKind::kRtu && l->state == State::kReplied) {
    l->state = State::kUp;
    l->timer = kNever;
    l->heard = now;
  } else if (mad.kind == CmKind::kRej || (mad.kind == CmKind::kDrep && l->state == State::kEnding)) {
    over(*l, now);
  }
}

void LenderModel::refuse(const NicPacket& p, const CmMad& mad, uint8_t code, const std::string& text) {
  NicPacket back;
  back.to_mac = p.from_mac, back.from_mac = config_.mac;
  back.to = p.from, back.from = config_.address;
  CmMad rej;
  rej.kind = CmKind::kRej;
  rej.transaction = mad.transaction;
  rej.remote_id = mad.local_id;
  rej.reason = kRejConsumer;
  rej.private_data.resize(8 + text.size());
  set_be(rej.private_data.data(), 4, kMagic);
  rej.private_data[4] = 1;
  rej.private_data[5] = code;
  rej.private_data[6] = static_cast<uint8_t>(text.size());
  std::copy(text.begin(), text.end(), rej.private_data.begin() + 8);
  send_mad(back, rej);
}

void LenderModel::on_request_for_lease(const NicPacket& p, const CmMad& mad, Time now) {
  if (Lease* known = find(p.from, mad.local_id); known != nullptr && known->peer_qpn == mad.qpn) {
    if (known->state == State::kReplied) send_mad(known->path, known->reply);
    return;
  }
  const uint8_t* data = mad.private_data.data() + 36;  // behind rdma_cm's addresses
  if (mad.service != kService || get_be(data, 4) != kMagic || data[4] != 1)
    return tell_({LeaseEvent::Kind::kWrong, 0, 0, 0, "a REQ that asks for no lease"});
  if (mad.initiator_depth == 0 || mtu_bytes(mad.mtu) == 0)
    return tell_({LeaseEvent::Kind::kWrong, 0, 0, 0, "a REQ without READs or a path MTU"});
  if (closing_) return refuse(p, mad, 2, "the lender ends");
  const auto instance = static_cast<uint32_t>(get_be(data + 8, 4));
  // A borrower that comes again has forgotten what it had.
  for (auto& [qpn, l] : leases_)
    if (l.path.to == p.from && l.instance == instance && l.state <= State::kUp) end(l, now);
  if (leases() >= config_.leases_max) return refuse(p, mad, 2, "everything is lent");
  lend(p, mad, instance, get_be(data + 16, 8), now);
}

void LenderModel::lend(const NicPacket& p, const CmMad& mad, uint32_t instance, uint64_t wanted, Time now) {
  uint32_t qpn;
  do qpn = dice_.below(0xFFFFF0) + 16;
  while (leases_.contains(qpn));
  Lease& l = leases_[qpn];
  l.number = ++lent_;
  l.path.to_mac = p.from_mac, l.path.from_mac = config_.mac;
  l.path.to = p.from, l.path.from = config_.address;
  l.path.udp_port = static_cast<uint16_t>(0xC000 | dice_.below(0x4000));
  l.path.qpn = mad.qpn;
  l.path.pkey = mad.pkey;
  l.peer_id = mad.local_id, l.peer_qpn = mad.qpn, l.instance = instance;
  l.mtu = mtu_bytes(mad.mtu);
  l.rkey = static_cast<uint32_t>(dice_.roll()) | 1;
  l.address = (dice_.roll() & 0xFFFFFFFFF) << 12;
  l.memory.resize(wanted == 0 ? config_.bytes : std::min(config_.bytes, wanted));
  l.expected = uint64_t{1} << 32 | dice_.below(1 << 24);
  l.heard = now;
  CmMad& rep = l.reply;
  rep.kind = CmKind::kRep;
  rep.transaction = mad.transaction;
  rep.local_id = static_cast<uint32_t>(dice_.roll()) | 1, rep.remote_id = mad.local_id;
  rep.qpn = qpn;
  rep.ca_guid = config_.ca_guid;
  rep.starting_psn = static_cast<uint32_t>(l.expected & 0xFFFFFF);
  rep.responder_resources = std::min(config_.reads_max, mad.initiator_depth);
  rep.rnr_retry = 7;
  rep.private_data.resize(32);
  set_be(rep.private_data.data(), 4, kMagic);
  rep.private_data[4] = 1;
  set_be(rep.private_data.data() + 8, 4, l.rkey);
  set_be(rep.private_data.data() + 16, 8, l.address);
  set_be(rep.private_data.data() + 24, 8, l.memory.size());
  send_mad(l.path, rep);
  l.timer = now + kAnswerWithin;
  tell_({LeaseEvent::Kind::kBegun, l.number, l.address, l.memory.size(), {}});
}

// Says goodbye; nothing touches the memory from here on.
void LenderModel::end(Lease& l, Time now) {
  over(l, now);
  l.state = State::kEnding;
  l.tries = 0;
  l.timer = now;  // poll() says it
}

void LenderModel::over(Lease& l, Time now) {
  if (l.state <= State::kUp) tell_({LeaseEvent::Kind::kEnded, l.number, 0, 0, {}});
  l.state = State::kOver;
  l.timer = now + kRest;
  l.memory = {};
}

void LenderModel::end(Time now) {
  closing_ = true;
  for (auto& [qpn, l] : leases_)
    if (l.state <= State::kUp) end(l, now);
}

void LenderModel::revoke() {
  closing_ = true;
  for (auto& [qpn, l] : leases_) l.revoked = true;
}

void LenderModel::poll(Time now, FrameSink& out) {
  for (auto it = leases_.begin(); it != leases_.end();) {
    Lease& l = it->second;
    if (l.state == State::kUp && now - l.heard >= kSilence) end(l, now);
    if (now >= l.timer && l.state == State::kOver) {
      it = leases_.erase(it);
      continue;
    }
    if (now >= l.timer) {
      l.timer = now + kAnswerWithin;
      if (++l.tries > kTries) {
        over(l, now);
      } else if (l.state == State::kReplied) {
        send_mad(l.path, l.reply);
      } else if (l.state == State::kEnding) {
        CmMad dreq;
        dreq.kind = CmKind::kDreq;
        dreq.transaction = l.number;
        dreq.local_id = l.reply.local_id, dreq.remote_id = l.peer_id;
        dreq.qpn = l.peer_qpn;
        send_mad(l.path, dreq);
      }
    }
    ++it;
  }
  for (const auto& frame : out_) out.send(frame);
  out_.clear();
}

Time LenderModel::next_deadline() const {
  Time t = out_.empty() ? kNever : Time{};
  for (const auto& [qpn, l] : leases_) {
    t = std::min(t, l.timer);
    if (l.state == State::kUp) t = std::min(t, l.heard + kSilence);
  }
  return t;
}

// --- the responder (chapter 9) ---

bool LenderModel::holds(const Lease& l, uint64_t address, uint64_t bytes) const {
  return address >= l.address && bytes <= l.memory.size() && address - l.address <= l.memory.size() - bytes;
}

void LenderModel::acknowledge(Lease& l, uint8_t syndrome, uint64_t psn) {
  NicPacket p = l.path;
  p.opcode = kOpAck;
  p.psn = static_cast<uint32_t>(psn & 0xFFFFFF);
  p.syndrome = syndrome;
  p.msn = l.msn;
  out_.push_back(make_frame(p));
  l.unacknowledged = 0;
}

// A NAK that ends the connection. `why`, if it is the borrower's fault.
void LenderModel::break_off(Lease& l, uint8_t syndrome, const std::string& why) {
  acknowledge(l, syndrome, l.expected);
  if (!why.empty()) tell_({LeaseEvent::Kind::kWrong, l.number, 0, 0, why});
  end(l, l.heard);
}

void LenderModel::on_packet(Lease& l, const NicPacket& p, Time) {
  if (p.opcode == kOpCnp || p.opcode == kOpAck) return;
  const auto ahead = static_cast<int64_t>(((p.psn - l.expected) & 0xFFFFFF) ^ 0x800000) - 0x800000;
  const uint64_t psn = l.expected + static_cast<uint64_t>(ahead);
  if (ahead > 0) {
    if (!l.nak_out) acknowledge(l, kSequence, l.expected);
    l.nak_out = true;
    return;
  }
  if (l.revoked && (p.opcode != kOpWriteOnly || p.length != 0)) return break_off(l, kRemoteAccess, {});
  if (ahead < 0) {
    // What was answered is answered again; of a READ that may begin in the middle.
    if (p.opcode == kReadRequest && holds(l, p.address, p.length))
      read(l, p, psn, true);
    else
      acknowledge(l, kCredits, l.expected - 1);
    return;
  }
  l.nak_out = false;
  if (!execute(l, p)) return;
  if (p.opcode != kReadRequest && (p.ack_request || ++l.unacknowledged >= config_.ack_every))
    acknowledge(l, kCredits, l.expected - 1);
}

bool LenderModel::execute(Lease& l, const NicPacket& p) {
  if (p.opcode == kReadRequest) {
    if (l.in_write) return break_off(l, kInvalidRequest, "a READ within a WRITE"), false;
    if (p.rkey != l.rkey || p.length == 0 || !holds(l, p.address, p.length))
      return break_off(l, kRemoteAccess, "a READ of what is not lent"), false;
    return read(l, p, l.expected, false);
  }
  if (p.opcode < kOpWriteFirst || p.opcode > kOpWriteOnly || p.opcode == 0x09)
    return break_off(l, kInvalidRequest, "neither a WRITE nor a READ"), false;
  return write(l, p);
}

bool LenderModel::write(Lease& l, const NicPacket& p) {
  const bool starts = p.opcode == kOpWriteFirst || p.opcode == kOpWriteOnly;
  const bool ends = p.opcode == 0x08 || p.opcode == kOpWriteOnly;
  if (starts == l.in_write) return break_off(l, kInvalidRequest, "a WRITE's packets out of order"), false;
  if (starts) {
    // The key of an empty one, a sign of life, is not looked at (9.7.4.1.5).
    if (p.length != 0 && (p.rkey != l.rkey || !holds(l, p.address, p.length)))
      return break_off(l, kRemoteAccess, "a WRITE to what is not lent"), false;
    l.write_begin = l.write_at = p.address, l.write_left = l.write_bytes = p.length;
  }
  const size_t n = p.payload.size();
  if (ends ? n != l.write_left : n != l.mtu || n >= l.write_left)
    return break_off(l, kInvalidRequest, "a WRITE's packet of a wrong length"), false;
  std::copy(p.payload.begin(), p.payload.end(),
            l.memory.begin() + static_cast<ptrdiff_t>(n == 0 ? 0 : l.write_at - l.address));
  l.write_at += n, l.write_left -= n;
  l.in_write = !ends;
  l.expected++;
  written_ += n;
  if (!ends) return true;
  l.msn = (l.msn + 1) & 0xFFFFFF;
  if (l.write_bytes != 0) tell_({LeaseEvent::Kind::kWritten, l.number, l.write_begin, l.write_bytes, {}});
  return true;
}

bool LenderModel::read(Lease& l, const NicPacket& p, uint64_t first, bool again) {
  const uint64_t packets = (p.length + l.mtu - 1) / l.mtu;
  if (!again) {
    l.expected += packets;
    l.msn = (l.msn + 1) & 0xFFFFFF;
    read_ += p.length;
    tell_({LeaseEvent::Kind::kRead, l.number, p.address, p.length, {}});
  }
  for (uint64_t i = 0; i < packets; i++) {
    NicPacket r = l.path;
    const bool begins = i == 0, ends = i + 1 == packets;
    r.opcode = begins ? ends ? kReadOnly : kReadFirst : ends ? kReadLast : kReadMiddle;
    r.psn = static_cast<uint32_t>((first + i) & 0xFFFFFF);
    r.syndrome = kCredits;
    r.msn = l.msn;
    const uint64_t at = p.address - l.address + i * l.mtu;
    r.payload = std::span(l.memory).subspan(at, std::min<uint64_t>(l.mtu, p.length - i * l.mtu));
    out_.push_back(make_frame(r));
  }
  return true;
}

}  // namespace millrace::sim
