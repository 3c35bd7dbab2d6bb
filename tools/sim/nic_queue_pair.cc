#include "tools/sim/nic_queue_pair.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace millrace::sim {

using std::chrono::microseconds;

namespace {

constexpr uint8_t kCredits = 0x1F, kRnr = 0x20, kSequence = 0x60, kInvalidRequest = 0x61,
                  kRemoteAccessError = 0x62;
constexpr uint32_t kRetryCount = 7;
constexpr Time kTimeoutMax{67'108'864};  // 4.096 µs × 2^14
constexpr Time kCnpGap = microseconds(50);
constexpr uint64_t kOnTheWire = 24;  // preamble, FCS and gap

// Tables 45 and 46 count alike: 1, then two codes for each power of two (2, 3, 4, 6, 8, 12 …).
uint32_t coded_count(uint8_t code) {
  if (code < 2) return code;
  return code % 2 == 0 ? 1u << code / 2 : 3u << (code - 3) / 2;
}

DcqcnParameters line_rate(double gbit) {
  DcqcnParameters p;
  p.line_gbit = gbit;
  return p;
}

}  // namespace

Time rnr_wait_time(uint8_t code) {
  return code == 0 ? microseconds(655'360) : microseconds(10 * coded_count(code));
}

NicQueuePair::NicQueuePair(const Config& config, const NicMemory& memory, Time now)
    : c_(config),
      memory_(memory),
      dice_(config.seed),
      heard_(now),
      dcqcn_(line_rate(config.gbit)),
      receives_(config.receives) {
  // One lap up, so that what lies just before the first number is no underflow.
  una_ = next_ = top_ = end_ = (uint64_t{1} << 24) + (c_.first_psn & 0xFFFFFF);
  expected_ = (uint64_t{1} << 24) + (c_.expected_psn & 0xFFFFFF);
}

// The number nearest to `near` that ends in these 24 bits (9.7.2: comparisons are modulo 2^24).
uint64_t NicQueuePair::unwrap(uint32_t psn, uint64_t near) const {
  constexpr uint64_t kLap = 1 << 24;
  const uint64_t base = near - near % kLap + psn % kLap;
  if (base > near + kLap / 2) return base - kLap;
  if (base + kLap / 2 <= near) return base + kLap;
  return base;
}

void NicQueuePair::stop(QueuePairFault fault) {
  if (fault_ == QueuePairFault::kNone) fault_ = fault;
  works_.clear();
  retransmit_at_ = rnr_until_ = ack_at_ = kNever;
  ack_due_ = false;
  una_ = next_ = top_ = end_;
}

// --- requester ---

bool NicQueuePair::post_segment(uint64_t segment, const aggregation::SegmentHeader& header,
                                std::span<const uint8_t> payload, uint32_t lkey) {
  if (fault_ != QueuePairFault::kNone || works_.size() + 1 >= c_.sends_max) return false;
  Work w;
  w.segment = segment;
  w.first = end_;
  std::memcpy(w.header.data(), &header, sizeof header);
  w.payload = payload;
  w.lkey = lkey;
  w.packets = (w.header.size() + payload.size() + c_.mtu - 1) / c_.mtu;
  end_ += w.packets;
  works_.push_back(std::move(w));
  return true;
}

bool NicQueuePair::post_message(std::span<const uint8_t> message) {
  if (fault_ != QueuePairFault::kNone || works_.size() + 1 >= c_.sends_max) return false;
  Work w;
  w.first = end_;
  w.message.assign(message.begin(), message.end());
  w.packets = (message.size() + c_.mtu - 1) / c_.mtu;
  end_ += w.packets;
  works_.push_back(std::move(w));
  return true;
}

void NicQueuePair::probe() {
  if (fault_ != QueuePairFault::kNone || !works_.empty()) return;
  Work w;
  w.probe = true;
  w.first = end_++;
  works_.push_back(std::move(w));
  counts_.probes_sent++;
}

const NicQueuePair::Work& NicQueuePair::work_of(uint64_t sequence) const {
  const auto behind = std::upper_bound(works_.begin(), works_.end(), sequence,
                                       [](uint64_t s, const Work& w) { return s < w.first; });
  assert(behind != works_.begin());
  return *std::prev(behind);
}

Time NicQueuePair::ready_at() const {
  const bool may = fault_ == QueuePairFault::kNone && next_ < end_ &&
                   next_ - una_ < c_.quirks.in_flight_max && rnr_until_ == kNever;
  return may ? pace_at_ : kNever;
}

std::vector<uint8_t> NicQueuePair::next_packet(Time now) {
  const Work& w = work_of(next_);
  const uint64_t index = next_ - w.first;
  const bool first = index == 0, last = index + 1 == w.packets;
  NicPacket p = c_.path;
  p.psn = static_cast<uint32_t>(next_ & 0xFFFFFF);
  p.traffic_class = c_.quirks.traffic_class;
  p.migrated = c_.quirks.migrated;
  std::span<const uint8_t> tail;
  if (w.probe) {
    p.opcode = kOpWriteOnly;
  } else {
    p.opcode = first ? last ? kOpSendOnly : kOpSendFirst : last ? kOpSendLast : kOpSendMiddle;
    p.solicited = last && c_.quirks.solicited;
  }
  if (!w.message.empty()) {
    p.payload = std::span(w.message).subspan(index * c_.mtu);
    p.payload = p.payload.first(std::min<size_t>(c_.mtu, p.payload.size()));
  } else if (!w.probe) {
    const size_t from = index * c_.mtu, to = std::min(from + c_.mtu, w.header.size() + w.payload.size());
    if (from < w.header.size()) p.payload = w.header;
    const size_t start = from < w.header.size() ? 0 : from - w.header.size();
    tail = w.payload.subspan(start, to - w.header.size() - start);
    if (!tail.empty() && !memory_.readable(w.lkey, tail)) {
      stop(QueuePairFault::kLocalProtection);
      return {};
    }
  }
  const uint32_t every = c_.quirks.ack_request_every;
  p.ack_request = last || (every != 0 && ++since_ack_request_ >= every);
  if (p.ack_request) since_ack_request_ = 0;
  std::vector<uint8_t> frame = make_frame(p, tail);

  counts_.packets_sent++;
  if (una_ == top_) owed_since_ = now;
  if (next_ < top_) counts_.retransmitted++;
  top_ = std::max(top_, ++next_);
  if (retransmit_at_ == kNever) retransmit_at_ = now + timeout();
  const uint64_t bytes = frame.size() + kOnTheWire;
  dcqcn_.sent(bytes, now);
  pace_at_ =
      std::max(pace_at_, now) + Time(static_cast<int64_t>(static_cast<double>(bytes) * 8 / dcqcn_.gbit(now)));
  return frame;
}

Time NicQueuePair::timeout() const {
  return std::min(c_.quirks.first_timeout * (1 << std::min(timeouts_in_row_, 6u)), kTimeoutMax);
}

// The retry counter of 9.9.2.1.1: time-outs and sequence NAKs without progress in between.
bool NicQueuePair::spend_retry() {
  if (c_.quirks.retry_for_ever) return true;
  if (retries_left_-- > 0) return true;
  stop(QueuePairFault::kRetryExceeded);
  return false;
}

void NicQueuePair::on_timeout(Time now) {
  counts_.timeouts++;
  if (!spend_retry()) return;
  timeouts_in_row_++;
  next_ = una_;
  retransmit_at_ = now + timeout();
}

void NicQueuePair::advance(uint64_t to, Time now) {
  if (to <= una_) return;
  una_ = to;
  next_ = std::max(next_, una_);
  while (!works_.empty() && works_.front().first + works_.front().packets <= una_) {
    messages_done_++;
    if (!works_.front().probe) {
      QueuePairEvent e{works_.front().message.empty() ? QueuePairEvent::Kind::kSent
                                                      : QueuePairEvent::Kind::kMessageSent};
      e.segment = works_.front().segment;
      events.push_back(std::move(e));
    }
    works_.pop_front();
  }
  retries_left_ = kRetryCount;
  timeouts_in_row_ = 0;
  retransmit_at_ = una_ < top_ ? now + timeout() : kNever;
}

// An acknowledgement that says how far packets have come says with its MSN how many messages that makes.
void NicQueuePair::check_msn(const NicPacket& p, uint64_t covered) {
  if (covered == una_ && p.msn != (messages_done_ & 0xFFFFFF)) counts_.wrong_msn++;
}

void NicQueuePair::on_acknowledgement(const NicPacket& p, Time now) {
  const uint64_t s = unwrap(p.psn, una_);
  const uint8_t kind = p.syndrome >> 5;
  if (s >= top_) return;  // of something never sent: a ghost
  heard_ = now;
  if (una_ < top_) owed_since_ = now;
  if (kind == 0) {
    advance(s + 1, now);
    return check_msn(p, s + 1);
  }
  if (s < una_) return;  // an old one
  const bool progress = s > una_;
  advance(s, now);
  check_msn(p, s);
  if (kind == 1) {
    counts_.rnr_naks++;
    retries_left_ = kRetryCount;
    next_ = s;
    rnr_until_ = now + rnr_wait_time(p.syndrome & 31);
    retransmit_at_ = kNever;
    return;
  }
  if (kind != 3) return;
  if (p.syndrome == kSequence) {
    counts_.sequence_naks++;
    if (!progress && !spend_retry()) return;
    next_ = s;
    return;
  }
  stop(p.syndrome == kInvalidRequest      ? QueuePairFault::kRemoteInvalidRequest
       : p.syndrome == kRemoteAccessError ? QueuePairFault::kRemoteAccess
                                          : QueuePairFault::kRemoteOperation);
}

// --- both ---

void NicQueuePair::receive(const NicPacket& p, Time now) {
  if (fault_ != QueuePairFault::kNone || p.from != c_.path.to || ((p.pkey ^ c_.path.pkey) & 0x7FFF) != 0)
    return;
  counts_.packets_received++;
  if (p.opcode == kOpCnp) {
    counts_.cnps_received++;
    if (c_.quirks.dcqcn) dcqcn_.on_cnp(now);
    return;
  }
  notice_congestion(p, now);
  if (p.opcode == kOpAck) return on_acknowledgement(p, now);
  if (p.opcode > kOpAck || (p.opcode >= 0x0D && p.opcode <= 0x10)) return;  // UD, READ responses
  heard_ = now;
  on_request(p, now);
}

// The notification point: one CNP per 50 µs.
void NicQueuePair::notice_congestion(const NicPacket& p, Time now) {
  if (!p.congestion_experienced() || !c_.quirks.dcqcn || now < cnp_after_) return;
  cnp_after_ = now + kCnpGap;
  NicPacket cnp = c_.path;
  cnp.opcode = kOpCnp;
  cnp.becn = true;
  cnp.traffic_class = 48 << 2;
  control.push_back(make_frame(cnp));
  counts_.cnps_sent++;
}

void NicQueuePair::poll(Time now) {
  if (fault_ != QueuePairFault::kNone) return;
  if (now >= rnr_until_) rnr_until_ = kNever;
  if (ack_due_ || now >= ack_at_) acknowledge(credits(), expected_ - 1);
  if (now >= retransmit_at_) on_timeout(now);
}

Time NicQueuePair::next_deadline() const {
  if (fault_ != QueuePairFault::kNone) return kNever;
  return std::min({ack_at_, retransmit_at_, rnr_until_});
}

// --- responder ---

NicQueuePair::Kind NicQueuePair::kind_of(uint8_t opcode) {
  Kind k;
  k.known = opcode <= 0x0B;
  k.send = opcode <= 0x05;
  const int place = opcode % 6;  // first, middle, last, last with immediate, only, only with immediate
  k.starts = place == 0 || place >= 4;
  k.ends = place >= 2;
  k.immediate = place == 3 || place == 5;
  return k;
}

// Order (9.7.4.1.2) and lengths (9.7.4.1.6) of the packet expected now.
bool NicQueuePair::well_formed(const NicPacket& p, const Kind& k) const {
  const size_t n = p.payload.size();
  if (!k.known) return false;  // READs and atomics: no responder resources
  if (k.starts ? in_message_ : !in_message_ || in_send_ != k.send) return false;
  if (!k.ends && n != c_.mtu) return false;
  if (k.ends && !k.starts && n == 0) return false;
  if (n > c_.mtu) return false;
  if (k.send) return true;
  const uint64_t left = k.starts ? p.length : write_left_;
  return k.ends ? left == n : left > n;
}

void NicQueuePair::on_request(const NicPacket& p, Time now) {
  const uint64_t s = unwrap(p.psn, expected_);
  if (s < expected_) {
    counts_.duplicates++;
    return owe(p.ack_request || !c_.quirks.lazy_duplicates, now);
  }
  if (s > expected_) {
    counts_.out_of_sequence++;
    if (!nak_out_) acknowledge(kSequence, expected_);
    nak_out_ = true;
    return;
  }
  const Kind k = kind_of(p.opcode);
  if (!well_formed(p, k)) return refuse(kInvalidRequest, QueuePairFault::kBadPacket);
  if (k.send ? k.starts : k.immediate) {
    if (receives_ == 0 || dice_.one_in(c_.quirks.rnr_one_in)) {
      acknowledge(static_cast<uint8_t>(kRnr | (c_.quirks.rnr_timer & 31)), expected_);
      nak_out_ = true;
      return;
    }
  }
  if (!(k.send ? take_send(p, k) : take_write(p, k))) return;
  expected_++;
  nak_out_ = false;
  in_message_ = !k.ends;
  in_send_ = k.send;
  if (k.ends) finish_message(p, k);
  if (c_.quirks.only_when_asked && !p.ack_request) return;
  owe(p.ack_request || (c_.quirks.ack_every != 0 && ++unacknowledged_ >= c_.quirks.ack_every), now);
}

bool NicQueuePair::take_write(const NicPacket& p, const Kind& k) {
  if (k.starts) {
    write_key_ = p.rkey;
    write_at_ = p.address;
    write_left_ = p.length;
    // The key of an empty one is not looked at (9.7.4.1.5), else the whole message must be allowed at once.
    if (p.length != 0 && memory_.target(p.rkey, p.address, p.length) == nullptr) {
      refuse(kRemoteAccessError, QueuePairFault::kLocalAccess);
      return false;
    }
  }
  if (p.payload.empty()) return true;
  uint8_t* at = memory_.target(write_key_, write_at_, p.payload.size());
  if (at == nullptr) {
    refuse(kRemoteAccessError, QueuePairFault::kLocalAccess);
    return false;
  }
  std::copy(p.payload.begin(), p.payload.end(), at);
  write_at_ += p.payload.size();
  write_left_ -= p.payload.size();
  return true;
}

bool NicQueuePair::take_send(const NicPacket& p, const Kind& k) {
  if (k.starts) {
    receives_--;
    message_.clear();
  }
  if (message_.size() + p.payload.size() > aggregation::kMessageBytesMax) {
    refuse(kInvalidRequest, QueuePairFault::kLocalLength);
    return false;
  }
  message_.insert(message_.end(), p.payload.begin(), p.payload.end());
  return true;
}

void NicQueuePair::finish_message(const NicPacket& p, const Kind& k) {
  msn_ = (msn_ + 1) & 0xFFFFFF;
  if (k.send) {
    QueuePairEvent e{QueuePairEvent::Kind::kMessage};
    e.message = std::move(message_);
    events.push_back(std::move(e));
  } else if (k.immediate) {
    receives_--;
    QueuePairEvent e{QueuePairEvent::Kind::kResult};
    e.immediate = p.immediate;
    events.push_back(std::move(e));
  }
}

void NicQueuePair::owe(bool asked, Time now) {
  if (!asked) {
    ack_at_ = std::min(ack_at_, now + c_.quirks.ack_delay);
  } else if (c_.quirks.one_ack_per_turn) {
    ack_due_ = true;
  } else {
    acknowledge(credits(), expected_ - 1);
  }
}

void NicQueuePair::acknowledge(uint8_t syndrome, uint64_t sequence) {
  NicPacket p = c_.path;
  p.opcode = kOpAck;
  p.migrated = c_.quirks.migrated;
  p.traffic_class = c_.quirks.traffic_class;
  p.psn = static_cast<uint32_t>(sequence & 0xFFFFFF);
  p.syndrome = syndrome;
  p.msn = msn_;
  control.push_back(make_frame(p));
  (syndrome < kRnr ? counts_.acks_sent : syndrome < kSequence ? counts_.rnr_naks_sent : counts_.naks_sent)++;
  // Whatever it is, it acknowledges all that came before.
  ack_due_ = false;
  ack_at_ = kNever;
  unacknowledged_ = 0;
}

void NicQueuePair::refuse(uint8_t syndrome, QueuePairFault fault) {
  acknowledge(syndrome, expected_);
  stop(fault);
}

// The largest count that table 46 has and that is true.
uint8_t NicQueuePair::credits() const {
  if (!c_.quirks.real_credits) return kCredits;
  uint8_t code = 0;
  while (code < 30 && coded_count(static_cast<uint8_t>(code + 1)) <= receives_) code++;
  return code;
}

}  // namespace millrace::sim
