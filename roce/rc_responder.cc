#include "roce/rc_responder.h"

namespace millrace::roce {

bool RcResponder::well_formed(const Packet& p) const {
  const OpcodeTraits& op = *p.op;
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

void RcResponder::not_ready(uint8_t timer_code) {
  nak_sent_ = true;
  owe(static_cast<uint8_t>(kRnrNak | (timer_code & 31)));
}

void RcResponder::refuse(uint8_t syndrome) {
  owe(syndrome);
  over_ = true;
}

std::optional<Acknowledgement> RcResponder::take_acknowledgement() {
  if (!owed_) return std::nullopt;
  owed_ = false;
  // An ACK names the last packet taken, a NAK the one expected (IBA 9.7.5.1.1).
  const Psn psn = syndrome_ == kAckUnlimited ? expected_ - 1 : expected_;
  return Acknowledgement{syndrome_, psn, msn_};
}

}  // namespace millrace::roce
