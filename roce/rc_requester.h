// The requester half of a reliable connection: work requests in order, packets out, acknowledgements in,
// go-back-N, RNR waits, timers (IBA vol. 1, 9.7.2 to 9.7.8) and DCQCN's pace. Pure. Everything is reserved at
// construction; nothing is allocated per request or packet.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "roce/build.h"
#include "roce/dcqcn.h"
#include "roce/packet.h"

namespace millrace::roce {

struct WorkRequest {
  enum class Kind : uint8_t { kSend, kWrite, kWriteImmediate, kRead };
  Kind kind = Kind::kSend;
  bool ack_request = true;  // on its last packet
  // parts[1] is sent from where it lies when it goes out for the first time (own_payload() is the caller's
  // business); repeats are copied, since by then the peer may have it and the memory may be changing.
  bool borrow = false;
  uint64_t id = 0;  // the caller's, given back on completion
  // The message, gathered from two places that stay untouched until completion. With `shared`, it is one
  // packet whose payload is parts[0], inside that buffer, sent without a copy; `payload_crc` is crc32(0,
  // parts[0]).
  std::array<std::span<const uint8_t>, 2> parts;
  // Where what an RDMA READ brings goes, in place of parts; the caller's, untouched by it until completion.
  std::span<uint8_t> into;
  FrameRef shared;
  uint32_t payload_crc = 0;
  uint64_t remote_address = 0;
  uint32_t rkey = 0;
  uint32_t immediate = 0;

  size_t bytes() const { return kind == Kind::kRead ? into.size() : parts[0].size() + parts[1].size(); }
};

// In place of a NAK's syndrome, which none of the wire's has all bits set: a READ was answered by packets
// whose opcodes or lengths are not those of what was asked for.
inline constexpr uint8_t kBadReadResponse = 0xFF;

struct RequesterConfig {
  Psn first_psn;
  uint32_t mtu = 4096;          // path MTU, bytes
  uint32_t requests_max = 64;   // work requests outstanding
  uint32_t packets_max = 4096;  // packets sent and not acknowledged, < 2^23
  uint32_t reads_max = 0;  // READs outstanding, by what the peer's REP or REQ grants; 0: none may be posted
  Time retransmit_timeout = std::chrono::milliseconds(67);  // doubled per repeat, up to eight times
  DcqcnConfig dcqcn;
};

struct RequesterCounters {
  uint64_t packets_sent = 0, retransmitted = 0, timeouts = 0, tail_probes = 0, acks = 0, naks = 0,
           rnr_naks = 0, stale_acks = 0, not_built = 0, reads_sent = 0, read_responses = 0, reads_again = 0,
           cnps = 0;
};

class RcRequester {
 public:
  explicit RcRequester(const RequesterConfig& config);
  // What a queue of `requests_max` requests takes, for those who account for it.
  static uint64_t bytes(uint32_t requests_max) { return std::bit_ceil(requests_max) * sizeof(Posted); }

  // false: the queue is full. A READ takes as many PSNs as its response has packets, which with packets_max
  // stay below 2^23.
  bool post(WorkRequest request);
  // Sends what may be sent, up to `budget` packets; returns how many were.
  uint32_t transmit(const Wire& wire, FramePool& pool, Crc32Combine& combine, uint32_t budget, Time now,
                    FrameList& out);
  // An ACK or NAK of this connection (also AETHs of unknown kind).
  void acknowledge(Psn psn, uint8_t syndrome, Time now);
  // A packet of a READ's response: placed, if it is the one due. One that is missing makes its READ asked for
  // again, from the first byte not there (IBA 9.7.5.1.9), and everything behind it.
  void read_response(const Packet& packet, Time now);
  // Takes all packets of requests up to and including `id` as acknowledged: the peer has shown by other means
  // that it has them. Nothing happens when no such request is outstanding. False when it has not been sent
  // yet, so that the peer cannot have it.
  bool acknowledge_through(uint64_t id, Time now);
  // A CNP arrived: from now on packets are paced, until DCQCN has found back to the line's rate.
  void congestion(Time now);
  // Runs the timers; call when next_deadline() has passed.
  void tick(Time now);
  Time next_deadline() const { return failed_ ? kNever : std::min(next_timer(), held_until()); }
  Time next_timer() const;  // the same without the pace

  // Completed requests, oldest first.
  bool next_completion(uint64_t& id);

  bool failed() const { return failed_; }  // a NAK that ends the queue pair
  uint8_t fail_syndrome() const { return fail_syndrome_; }
  bool outstanding() const { return una_ != highest_; }  // something was sent and is not acknowledged
  bool idle() const { return head_ == tail_; }           // no request is left
  // Since when the peer owes an acknowledgement without having given any sign; kNever when nothing is owed.
  Time waiting_since() const { return outstanding() ? waiting_since_ : kNever; }
  // When the pace lets the next packet go; kNever when it holds none back. Part of next_deadline();
  // transmit() at that time is enough, tick() need not come first.
  Time held_until() const { return pace_.held_until(); }
  const Dcqcn& dcqcn() const { return pace_.dcqcn(); }
  // Shared with the responder half, whose READ responses keep to it.
  Pace& pace() { return pace_; }
  const Pace& pace() const { return pace_; }
  // A packet could leave now, were there frames for it.
  bool wants_to_send() const {
    if (failed_ || rnr_until_ != kNever || pace_.held()) return false;
    if (probe_due_ && outstanding()) return true;
    if (cursor_ == tail_) return false;
    const Posted& next = at(cursor_);
    if (next.read() && reads_out_ >= config_.reads_max) return false;
    return (next.first + cursor_packet_).distance(una_) < static_cast<int32_t>(config_.packets_max);
  }
  Psn next_psn() const { return end_psn_; }
  const RequesterCounters& counters() const { return counters_; }
  uint32_t room() const { return config_.requests_max - static_cast<uint32_t>(tail_ - completed_); }

 private:
  struct Posted {
    WorkRequest request;
    Psn first;
    uint32_t packets = 0;

    bool read() const { return request.kind == WorkRequest::Kind::kRead; }
  };
  Posted& at(uint64_t n) { return ring_[n & mask_]; }
  const Posted& at(uint64_t n) const { return ring_[n & mask_]; }
  // Returns the packet's length; 0: it could not be built.
  uint32_t send_packet(const Posted& posted, uint32_t index, bool probe, const Wire& wire, FramePool& pool,
                       Crc32Combine& combine, FrameList& out);
  void advance(Psn una, Time now);  // everything before `una` is acknowledged
  void go_back(Psn psn);
  void note_sent(Posted& posted, Time now);
  // The oldest READ that is not complete; tail_ when there is none. And the furthest that an acknowledgement
  // can reach, since only its responses complete it.
  uint64_t first_read();
  Psn acknowledgeable(Psn psn);
  void ask_again(Psn psn);
  void sample(Time rtt);
  Time tail_timeout() const;

  RequesterConfig config_;
  std::vector<Posted> ring_;
  uint64_t mask_;
  // Counting positions in the ring: completed_ ≤ head_ ≤ cursor_ ≤ tail_.
  uint64_t completed_ = 0;  // reported by next_completion()
  uint64_t head_ = 0;       // oldest not wholly acknowledged
  uint64_t cursor_ = 0;     // next to send, from packet cursor_packet_
  uint64_t tail_ = 0;
  uint32_t cursor_packet_ = 0;
  uint64_t reads_posted_ = 0;  // not complete
  uint32_t reads_out_ = 0;     // of these between head_ and cursor_
  uint64_t read_from_ = 0;     // no READ that is not complete is before it
  bool asked_again_ = false;   // for the response at una_; not for each sign that it is missing
  Psn una_;                    // oldest unacknowledged
  Psn highest_;                // one past the newest ever sent
  Psn end_psn_;                // one past the newest posted

  Time waiting_since_{};
  Time timer_ = kNever;       // retransmission
  Time tail_timer_ = kNever;  // one probe of the newest packet, before the retransmission timer
  Time rnr_until_ = kNever;
  Pace pace_;
  uint32_t backoff_ = 0;
  bool probe_due_ = false;
  Time rtt_smooth_{}, rtt_variance_{};
  Psn sample_psn_;
  Time sample_sent_ = kNever;
  bool failed_ = false;
  uint8_t fail_syndrome_ = 0;
  RequesterCounters counters_;
};

}  // namespace millrace::roce
