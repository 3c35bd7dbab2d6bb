#include "roce/rc_responder.h"

#include <algorithm>
#include <cassert>

namespace millrace::roce {

namespace {

constexpr uint32_t kMessageBytesMax = 1u << 31;  // IBA 9.7.4.1.6

Opcode response_opcode(bool first, bool last) {
  if (first) return last ? Opcode::kReadResponseOnly : Opcode::kReadResponseFirst;
  return last ? Opcode::kReadResponseLast : Opcode::kReadResponseMiddle;
}

}  // namespace

RcResponder::RcResponder(Psn expected, uint32_t mtu, uint32_t reads_max)
    : expected_(expected), mtu_(mtu), reads_max_(reads_max) {
  reading_.reserve(reads_max);
}

uint32_t RcResponder::read_packets(const Packet& p) const {
  const uint32_t n = p.reth->length.value();
  return std::max<uint32_t>(1, n / mtu_ + (n % mtu_ != 0));
}

uint32_t RcResponder::reads_fresh() const {
  return static_cast<uint32_t>(
      std::count_if(reading_.begin(), reading_.end(), [](const Reading& r) { return r.fresh; }));
}

bool RcResponder::well_formed_read(const Packet& p) const {
  if (in_ != In::kNothing || !p.payload.empty() || (p.bth->flags & 0x30)) return false;
  const uint32_t n = p.reth->length.value();
  return n <= kMessageBytesMax && p.reth->address.value() + n >= p.reth->address.value() &&
         read_packets(p) < 1u << 23 && reads_fresh() < reads_max_;
}

bool RcResponder::well_formed(const Packet& p) const {
  const OpcodeTraits& op = *p.op;
  if (p.opcode() == Opcode::kReadRequest) return well_formed_read(p);
  if (!op.rc || !op.request || op.ieth || (!op.send && !op.write)) return false;
  // Order within a message, IBA 9.7.4.1.2.
  if (op.starts() ? in_ != In::kNothing : in_ != (op.send ? In::kSend : In::kWrite)) return false;
  // Lengths, IBA 9.7.4.1.6: FIRST and MIDDLE carry the path MTU exactly and no pad.
  const size_t n = p.payload.size();
  const bool padded = p.bth->flags & 0x30;
  if (!op.ends() && (n != mtu_ || padded)) return false;
  if (n > mtu_ || (op.last && n == 0)) return false;
  if (op.write) {
    if (op.only && p.reth->length.value() != n) return false;
    if (op.first && p.reth->length.value() <= n) return false;
    if (op.reth && p.reth->address.value() + p.reth->length.value() < p.reth->address.value()) return false;
    if (op.middle && write_remaining_ <= n) return false;
    if (op.last && write_remaining_ != n) return false;
  }
  return true;
}

void RcResponder::owe(uint8_t syndrome) {
  owed_ = true;
  syndrome_ = syndrome;
}

Arrival RcResponder::arrive(const Packet& p) {
  const int32_t distance = p.psn().distance(expected_);
  if (over_) return Arrival::kGapQuiet;
  if (distance < 0 && p.opcode() == Opcode::kReadRequest && reads_max_ > 0) {
    // More than was accepted cannot be had again; what asks for that is no repeat of anything.
    const bool within = static_cast<int32_t>(read_packets(p)) <= -distance && p.payload.empty();
    return within ? Arrival::kReadAgain : Arrival::kGapQuiet;
  }
  if (distance < 0) {
    // Acknowledged again with the newest PSN, unless a NAK is already waiting to go, which says as much.
    if (!owed_) owe(kAckUnlimited);
    return Arrival::kDuplicate;
  }
  if (distance > 0) {
    if (nak_sent_) return Arrival::kGapQuiet;
    nak_sent_ = true;
    owe(kNakSequence);
    return Arrival::kGap;
  }
  if (!well_formed(p)) {
    refuse(kNakInvalidRequest);
    return Arrival::kInvalid;
  }
  return Arrival::kNew;
}

WritePlace RcResponder::place(const Packet& p) const {
  return p.reth ? WritePlace{p.reth->rkey.value(), p.reth->address.value()} : write_;
}

void RcResponder::accept(const Packet& p) {
  const OpcodeTraits& op = *p.op;
  assert(p.opcode() != Opcode::kReadRequest);
  const auto n = static_cast<uint32_t>(p.payload.size());
  if (op.write && !op.ends()) {
    write_ = place(p);
    write_.address += n;
    write_remaining_ = (p.reth ? p.reth->length.value() : write_remaining_) - n;
  }
  in_ = op.ends() ? In::kNothing : op.send ? In::kSend : In::kWrite;
  ++expected_;
  if (op.ends()) msn_ = (msn_ + 1) & 0xFFFFFF;
  nak_sent_ = false;
  // A sequence NAK that has not gone out is void now: what it asked for has come.
  if (owed_ && syndrome_ != kAckUnlimited) owe(kAckUnlimited);
  if (p.ack_request()) owe(kAckUnlimited);
}

void RcResponder::accept_read(const Packet& p, std::span<const uint8_t> memory) {
  assert(memory.size() == p.reth->length.value() && reads_fresh() < reads_max_);
  // Its message number is its own from now on, not from its last response (IBA C9-148).
  msn_ = (msn_ + 1) & 0xFFFFFF;
  // A repeat may have been for nothing, its first answer having come late; then the peer has the oldest by
  // now.
  if (reading_.size() == reads_max_)
    reading_.erase(std::find_if(reading_.begin(), reading_.end(), [](const Reading& r) { return !r.fresh; }));
  reading_.push_back({memory, expected_, read_packets(p), 0, msn_});
  expected_ = expected_ + read_packets(p);
  nak_sent_ = false;
  // The responses acknowledge what came before them; nothing has come behind them yet.
  owed_ = false;
}

// Each PSN is in reading_ once at most, and in order: what the peer has asked for again is sent before what
// is still due behind it.
void RcResponder::read_again(const Packet& p, std::span<const uint8_t> memory) {
  assert(memory.size() == p.reth->length.value());
  Reading again{memory, p.psn(), read_packets(p), 0, msn_, false};
  const auto ends_behind = [&](const Reading& r) { return (r.first + r.packets).distance(again.first) > 0; };
  const auto at = std::find_if(reading_.begin(), reading_.end(), ends_behind);
  if (at != reading_.end() && (again.first + again.packets).distance(at->first) > 0) {
    // Part of what is under way: only what has been sent needs to be sent again. One that ends elsewhere is
    // no repeat.
    if (again.first.distance(at->first + at->sent) < 0 &&
        again.first + again.packets == at->first + at->packets) {
      again.fresh = at->fresh;
      *at = again;
    }
    return;
  }
  if (reading_.size() < reads_max_) reading_.insert(at, again);
}

uint32_t RcResponder::respond(const Wire& wire, FramePool& pool, uint32_t budget, Pace& pace, Time now,
                              FrameList& out) {
  uint32_t sent = 0, done = 0;
  while (sent < budget && done < reading_.size() && !pace.held()) {
    Reading& r = reading_[done];
    const size_t from = static_cast<size_t>(r.sent) * mtu_;
    const bool last = r.sent + 1 == r.packets;
    TransportFields f;
    f.opcode = response_opcode(r.sent == 0, last);
    f.dest_qp = wire.remote_qpn;
    f.pkey = wire.pkey;
    f.psn = r.first + r.sent;
    f.syndrome = kAckUnlimited;
    f.msn = r.msn;
    const auto payload = r.memory.subspan(from, std::min<size_t>(mtu_, r.memory.size() - from));
    Frame frame = build(pool, wire.path, f, payload);
    if (!frame) break;
    if (pace.limited()) pace.sent(frame.total_length(), now);
    out.push(std::move(frame));
    sent++;
    r.sent++;
    if (last) done++;
  }
  responses_sent_ += sent;
  reading_.erase(reading_.begin(), reading_.begin() + done);
  return sent;
}

void RcResponder::not_ready(uint8_t timer_code) {
  nak_sent_ = true;
  owe(static_cast<uint8_t>(kRnrNak | (timer_code & 31)));
}

void RcResponder::refuse(uint8_t syndrome) {
  owe(syndrome);
  over_ = true;
}

std::optional<Acknowledgement> RcResponder::take_acknowledgement() {
  if (!acknowledgement_owed()) return std::nullopt;
  owed_ = false;
  // An ACK names the last packet taken, a NAK the one expected (IBA 9.7.5.1.1).
  const Psn psn = syndrome_ == kAckUnlimited ? expected_ - 1 : expected_;
  return Acknowledgement{syndrome_, psn, msn_};
}

}  // namespace millrace::roce
