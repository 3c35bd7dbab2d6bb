#include "roce/rc_requester.h"

#include <algorithm>
#include <bit>

namespace millrace::roce {

using std::chrono::milliseconds;

namespace {

Opcode opcode_for(WorkRequest::Kind kind, bool first, bool last) {
  switch (kind) {
    case WorkRequest::Kind::kSend:
      return first ? (last ? Opcode::kSendOnly : Opcode::kSendFirst)
                   : (last ? Opcode::kSendLast : Opcode::kSendMiddle);
    case WorkRequest::Kind::kWrite:
      return first ? (last ? Opcode::kWriteOnly : Opcode::kWriteFirst)
                   : (last ? Opcode::kWriteLast : Opcode::kWriteMiddle);
    case WorkRequest::Kind::kWriteImmediate:
      return first ? (last ? Opcode::kWriteOnlyImm : Opcode::kWriteFirst)
                   : (last ? Opcode::kWriteLastImm : Opcode::kWriteMiddle);
    case WorkRequest::Kind::kRead:
      return Opcode::kReadRequest;
  }
  return Opcode::kSendOnly;
}

// The bytes [from, to) of two parts laid end to end, as at most two pieces.
std::array<std::span<const uint8_t>, 2> slice(const std::array<std::span<const uint8_t>, 2>& parts,
                                              size_t from, size_t to) {
  const size_t n0 = parts[0].size();
  std::array<std::span<const uint8_t>, 2> out;
  if (from < n0) out[0] = parts[0].subspan(from, std::min(to, n0) - from);
  if (to > n0) {
    const size_t start = std::max(from, n0) - n0;
    out[1] = parts[1].subspan(start, to - n0 - start);
  }
  return out;
}

}  // namespace

RcRequester::RcRequester(const RequesterConfig& config)
    : config_(config),
      ring_(std::bit_ceil(static_cast<size_t>(config.requests_max))),
      mask_(ring_.size() - 1),
      una_(config.first_psn),
      highest_(config.first_psn),
      end_psn_(config.first_psn),
      pace_(config.dcqcn) {}

bool RcRequester::post(WorkRequest request) {
  if (room() == 0) return false;
  Posted& p = at(tail_++);
  p.request = std::move(request);
  p.first = end_psn_;
  p.packets =
      std::max<uint32_t>(1, (static_cast<uint32_t>(p.request.bytes()) + config_.mtu - 1) / config_.mtu);
  assert(!p.request.shared || p.packets == 1);
  assert(!p.read() || (config_.reads_max > 0 && p.packets + config_.packets_max < 1u << 23));
  if (p.read()) reads_posted_++;
  end_psn_ = end_psn_ + p.packets;
  return true;
}

uint32_t RcRequester::send_packet(const Posted& posted, uint32_t index, bool probe, const Wire& wire,
                                  FramePool& pool, Crc32Combine& combine, FrameList& out) {
  const WorkRequest& r = posted.request;
  const bool first = index == 0, last = index + 1 == posted.packets;
  TransportFields f;
  f.opcode = opcode_for(r.kind, first, last);
  f.dest_qp = wire.remote_qpn;
  f.psn = posted.first + index;
  f.ack_request = probe || (last && r.ack_request);
  f.pkey = wire.pkey;
  f.remote_address = r.remote_address;
  f.rkey = r.rkey;
  f.dma_length = static_cast<uint32_t>(r.bytes());
  f.immediate = r.immediate;
  Frame frame;
  if (posted.read()) {
    // All that is left of it from this packet on, in one request.
    f.ack_request = r.ack_request;
    f.remote_address += static_cast<uint64_t>(index) * config_.mtu;
    f.dma_length -= index * config_.mtu;
    frame = build(pool, wire.path, f, {});
  } else if (r.shared) {
    frame = build_shared(pool, wire.path, f, r.shared.buffer(), r.parts[0], r.payload_crc, combine);
  } else {
    const size_t from = static_cast<size_t>(index) * config_.mtu;
    const auto pieces = slice(r.parts, from, std::min(r.bytes(), from + config_.mtu));
    const bool fresh = f.psn.distance(highest_) >= 0;
    frame = r.borrow && fresh ? build_borrowed(pool, wire.path, f, pieces[0], pieces[1])
                              : build(pool, wire.path, f, pieces[0], pieces[1]);
  }
  if (!frame) return 0;
  const uint32_t bytes = frame.total_length();
  out.push(std::move(frame));
  return bytes;
}

Time RcRequester::tail_timeout() const {
  const Time estimate = rtt_smooth_ == Time{} ? config_.retransmit_timeout / 4
                                              : rtt_smooth_ + 4 * rtt_variance_ + milliseconds(1);
  return std::clamp<Time>(estimate, milliseconds(1), config_.retransmit_timeout / 2);
}

uint32_t RcRequester::transmit(const Wire& wire, FramePool& pool, Crc32Combine& combine, uint32_t budget,
                               Time now, FrameList& out) {
  uint32_t sent = 0;
  pace_.release(now);
  if (probe_due_ && budget > 0 && wants_to_send()) {
    // The newest packet again: its duplicate draws an ACK, a loss before it a NAK, either well before the
    // timer.
    const Posted& p = at(cursor_packet_ > 0 ? cursor_ : cursor_ - 1);
    probe_due_ = false;
    const auto index = static_cast<uint32_t>((highest_ - 1).distance(p.first));
    if (const uint32_t bytes = send_packet(p, index, true, wire, pool, combine, out)) {
      counters_.tail_probes++;
      counters_.packets_sent++;
      counters_.retransmitted++;
      sent++;
      if (pace_.limited()) pace_.sent(bytes, now);
    }
  }
  while (sent < budget && wants_to_send()) {
    Posted& p = at(cursor_);
    const uint32_t bytes = send_packet(p, cursor_packet_, false, wire, pool, combine, out);
    if (bytes == 0) {
      counters_.not_built++;
      break;
    }
    sent++;
    if (pace_.limited()) pace_.sent(bytes, now);
    note_sent(p, now);
  }
  return sent;
}

// The packet at the cursor has gone out.
void RcRequester::note_sent(Posted& p, Time now) {
  const Psn psn = p.first + cursor_packet_;
  const bool was_outstanding = outstanding();
  const bool asks = p.read() || (p.request.ack_request && cursor_packet_ + 1 == p.packets);
  counters_.packets_sent++;
  if (psn.distance(highest_) >= 0) {
    highest_ = p.read() ? p.first + p.packets : psn + 1;
    if (asks && sample_sent_ == kNever) {
      sample_psn_ = psn;
      sample_sent_ = now;
    }
  } else {
    counters_.retransmitted++;
    sample_sent_ = kNever;  // Karn: an answer to a repeated packet measures nothing
  }
  if (!was_outstanding) waiting_since_ = now;
  if (timer_ == kNever) timer_ = now + config_.retransmit_timeout * (1 << backoff_);
  tail_timer_ = now + tail_timeout();
  if (p.read()) {
    counters_.reads_sent++;
    reads_out_++;
  }
  if (p.read() || ++cursor_packet_ == p.packets) {
    cursor_++;
    cursor_packet_ = 0;
  }
}

void RcRequester::sample(Time rtt) {
  if (rtt_smooth_ == Time{}) {
    rtt_smooth_ = rtt;
    rtt_variance_ = rtt / 2;
    return;
  }
  const Time error = rtt > rtt_smooth_ ? rtt - rtt_smooth_ : rtt_smooth_ - rtt;
  rtt_variance_ = (3 * rtt_variance_ + error) / 4;  // RFC 6298, 2.3
  rtt_smooth_ = (7 * rtt_smooth_ + rtt) / 8;
}

void RcRequester::advance(Psn una, Time now) {
  if (una.distance(una_) <= 0) return;
  if (sample_sent_ != kNever && una.distance(sample_psn_) > 0) {
    sample(now - sample_sent_);
    sample_sent_ = kNever;
  }
  una_ = una;
  asked_again_ = false;
  // A go-back can leave the cursor behind what is now known to have arrived.
  while (head_ != tail_ && una_.distance(at(head_).first + at(head_).packets) >= 0) {
    const bool read = at(head_).read();
    if (read) reads_posted_--;
    if (cursor_ == head_) {
      cursor_++;
      cursor_packet_ = 0;
    } else if (read) {
      reads_out_--;
    }
    head_++;
  }
  if (cursor_ != tail_ && una_.distance(at(cursor_).first + cursor_packet_) > 0)
    cursor_packet_ = static_cast<uint32_t>(una_.distance(at(cursor_).first));
  backoff_ = 0;
  timer_ = outstanding() ? now + config_.retransmit_timeout : kNever;
  if (outstanding()) return;
  tail_timer_ = kNever;
  probe_due_ = false;  // what it would repeat is complete, and its place may be another's by now
}

void RcRequester::go_back(Psn psn) {
  uint64_t n = head_;
  while (n != tail_ && psn.distance(at(n).first + at(n).packets) >= 0) n++;
  if (reads_posted_ > 0)
    for (uint64_t k = n; k < cursor_; k++) reads_out_ -= at(k).read();
  cursor_ = n;
  cursor_packet_ = n == tail_ ? 0 : static_cast<uint32_t>(psn.distance(at(n).first));
  sample_sent_ = kNever;
  probe_due_ = false;
}

void RcRequester::congestion(Time now) {
  counters_.cnps++;
  pace_.notified(now);
}

void RcRequester::acknowledge(Psn psn, uint8_t syndrome, Time now) {
  const uint8_t kind = syndrome & 0xE0;
  const bool ack = kind == 0;
  // What it covers: an ACK everything up to psn, a NAK everything before it. Valid: una − 1 … highest − 1 for
  // an ACK (the lower end repeats an old one), una … highest − 1 for a NAK.
  const int32_t from_una = psn.distance(una_);
  const int32_t from_highest = psn.distance(highest_);
  if (failed_ || from_una < (ack ? -1 : 0) || from_highest >= 0) {
    counters_.stale_acks++;
    return;
  }
  const Psn covers = acknowledgeable(ack ? psn + 1 : psn);
  const bool short_of = covers != (ack ? psn + 1 : psn);
  // Whoever acknowledges for ever and never answers the READ before is as good as dead.
  if (!short_of || covers.distance(una_) > 0) waiting_since_ = now;
  if (ack) counters_.acks++;
  advance(covers, now);
  if (short_of && (ack || kind == kRnrNak || syndrome == kNakSequence)) return ask_again(covers);
  if (ack) return;
  if (kind == kRnrNak) {
    counters_.rnr_naks++;
    go_back(psn);
    rnr_until_ = now + rnr_wait(syndrome & 31);
    timer_ = tail_timer_ = kNever;
    return;
  }
  counters_.naks++;
  if (syndrome == kNakSequence) {
    go_back(psn);
    return;
  }
  failed_ = true;
  fail_syndrome_ = syndrome;
}

uint64_t RcRequester::first_read() {
  if (reads_posted_ == 0) return tail_;
  read_from_ = std::max(read_from_, head_);
  while (!at(read_from_).read()) read_from_++;  // each position is passed once
  return read_from_;
}

Psn RcRequester::acknowledgeable(Psn psn) {
  const uint64_t read = first_read();
  if (read == tail_) return psn;
  const Psn first = at(read).first;
  const Psn limit = first.distance(una_) > 0 ? first : una_;
  return psn.distance(limit) > 0 ? limit : psn;
}

// The response at `psn` is missing, as something behind it has shown: an implied NAK (IBA 9.7.5.1.9), and one
// only, for what was under way shows it over and over.
void RcRequester::ask_again(Psn psn) {
  if (asked_again_) return;
  asked_again_ = true;
  counters_.reads_again++;
  go_back(psn);
}

void RcRequester::read_response(const Packet& p, Time now) {
  const Psn psn = p.psn();
  if (failed_ || psn.distance(una_) < 0 || psn.distance(highest_) >= 0) {
    counters_.stale_acks++;
    return;
  }
  counters_.read_responses++;
  // It acknowledges what came before its READ, READs apart.
  const uint64_t read = first_read();
  const Psn covers = acknowledgeable(psn);
  if (covers.distance(una_) > 0) {
    waiting_since_ = now;
    advance(covers, now);
  }
  if (covers != psn) return ask_again(covers);
  const auto index = static_cast<uint64_t>(read == tail_ ? -1 : psn.distance(at(read).first));
  const bool in_read = read != tail_ && index < at(read).packets;
  const size_t from = index * config_.mtu;
  // How far the READ has been answered before says nothing about FIRST: it may have been asked for again.
  if (!in_read || p.op->ends() != (index + 1 == at(read).packets) ||
      p.payload.size() != std::min<size_t>(config_.mtu, at(read).request.bytes() - from)) {
    failed_ = true;
    fail_syndrome_ = kBadReadResponse;
    return;
  }
  if (!p.payload.empty())
    std::memcpy(at(read).request.into.data() + from, p.payload.data(), p.payload.size());
  waiting_since_ = now;
  advance(psn + 1, now);
  // The end of a long answer is not late as long as the rest is still coming.
  if (outstanding()) tail_timer_ = now + tail_timeout();
}

bool RcRequester::acknowledge_through(uint64_t id, Time now) {
  for (uint64_t n = head_; n != tail_; n++) {
    if (at(n).request.id != id) continue;
    const Psn end = at(n).first + at(n).packets;
    if (end.distance(highest_) > 0 || acknowledgeable(end) != end) return false;
    waiting_since_ = now;
    advance(end, now);
    return true;
  }
  return true;
}

void RcRequester::tick(Time now) {
  pace_.release(now);
  if (rnr_until_ != kNever && now >= rnr_until_) {
    rnr_until_ = kNever;
    timer_ = outstanding() ? now + config_.retransmit_timeout : kNever;
  }
  if (failed_ || !outstanding()) return;
  if (now >= timer_) {
    counters_.timeouts++;
    asked_again_ = false;
    go_back(una_);
    if (backoff_ < 3) backoff_++;
    timer_ = now + config_.retransmit_timeout * (1 << backoff_);
    tail_timer_ = kNever;
  } else if (now >= tail_timer_) {
    // Only with everything sent: otherwise packets on their way will tell.
    probe_due_ = cursor_ == tail_;
    tail_timer_ = kNever;
  }
}

Time RcRequester::next_timer() const {
  if (failed_) return kNever;
  return std::min({timer_, tail_timer_, rnr_until_});
}

bool RcRequester::next_completion(uint64_t& id) {
  if (completed_ == head_) return false;
  Posted& p = at(completed_++);
  id = p.request.id;
  p.request = WorkRequest{};
  return true;
}

}  // namespace millrace::roce
