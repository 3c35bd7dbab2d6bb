// A reliable connection of the model NIC: go-back-N requester, responder, DCQCN at both ends (IBA vol. 1,
// chapter 9; annex A17). Written from the specification, apart from roce/. Sequence numbers are kept
// unwrapped in 64 bits, and a retransmission reads the message's memory again, as hardware does.
#pragma once

#include <array>
#include <deque>
#include <span>
#include <vector>

#include "aggregation/protocol.h"
#include "tools/sim/nic_dcqcn.h"
#include "tools/sim/nic_memory.h"
#include "tools/sim/nic_quirks.h"
#include "tools/sim/nic_wire.h"

namespace millrace::sim {

// Why a queue pair is in the error state, as a completion's status would say.
enum class QueuePairFault : uint8_t {
  kNone,
  kRetryExceeded,
  kRemoteInvalidRequest,
  kRemoteAccess,
  kRemoteOperation,
  kLocalProtection,  // a send's memory is no longer registered
  kLocalAccess,      // the peer wrote where it may not
  kLocalLength,      // a message longer than its receive
  kBadPacket,        // the peer broke the transport's rules
};

struct QueuePairEvent {
  enum class Kind : uint8_t { kSent, kMessageSent, kResult, kMessage } kind;
  uint64_t segment = 0;
  uint32_t immediate = 0;
  std::vector<uint8_t> message;
};

struct QueuePairCounts {
  uint64_t packets_sent = 0, packets_received = 0, retransmitted = 0, timeouts = 0, sequence_naks = 0,
           rnr_naks = 0, duplicates = 0, out_of_sequence = 0, acks_sent = 0, naks_sent = 0, rnr_naks_sent = 0,
           cnps_sent = 0, cnps_received = 0, probes_sent = 0;
  uint64_t wrong_msn = 0;  // acknowledgements whose MSN is not what their PSN says
};

class NicQueuePair {
 public:
  struct Config {
    NicPacket path;  // with the peer's queue pair number
    uint32_t qpn = 0;
    uint32_t first_psn = 0, expected_psn = 0;
    uint32_t mtu = 4096;
    uint32_t sends_max = 18, receives = 11;
    double gbit = 100;
    NicQuirks quirks;
    uint64_t seed = 1;
  };
  NicQueuePair(const Config& config, const NicMemory& memory, Time now);

  // false: no room, of which one place is a probe's.
  bool post_segment(uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, uint32_t lkey);
  // Of bytes that are copied.
  bool post_message(std::span<const uint8_t> message);
  void post_receive() { receives_++; }
  // A zero-length RDMA WRITE, unless something is outstanding anyway.
  void probe();
  // A packet for our number.
  void receive(const NicPacket& packet, Time now);
  // Timers, and what waits for the end of the turn.
  void poll(Time now);
  // When a request packet may leave; kNever: none is waiting for its time.
  Time ready_at() const;
  std::vector<uint8_t> next_packet(Time now);
  Time next_deadline() const;  // of poll()
  // The error state, at once and in silence.
  void stop(QueuePairFault fault);

  QueuePairFault fault() const { return fault_; }
  bool idle() const { return works_.empty(); }
  Time heard() const { return heard_; }  // an acknowledgement, or a request
  Time owed_since() const { return una_ == top_ ? kNever : owed_since_; }
  double gbit(Time now) { return dcqcn_.gbit(now); }
  const QueuePairCounts& counts() const { return counts_; }
  uint32_t qpn() const { return c_.qpn; }

  std::vector<QueuePairEvent> events;        // for the caller to take
  std::deque<std::vector<uint8_t>> control;  // ACKs, NAKs and CNPs, to be sent at once

 private:
  struct Work {
    bool probe = false;
    std::vector<uint8_t> message;  // instead of header and payload
    uint64_t segment = 0, first = 0, packets = 1;
    uint32_t lkey = 0;
    std::array<uint8_t, aggregation::kSegmentHeaderBytes> header{};
    std::span<const uint8_t> payload;
  };
  struct Kind {  // of a request's opcode
    bool known = false, send = false, starts = false, ends = false, immediate = false;
  };
  static Kind kind_of(uint8_t opcode);
  uint64_t unwrap(uint32_t psn, uint64_t near) const;

  // Requester.
  void on_acknowledgement(const NicPacket& p, Time now);
  void advance(uint64_t to, Time now);
  void check_msn(const NicPacket& p, uint64_t covered);
  bool spend_retry();
  void on_timeout(Time now);
  Time timeout() const;
  const Work& work_of(uint64_t sequence) const;

  // Responder.
  void on_request(const NicPacket& p, Time now);
  bool well_formed(const NicPacket& p, const Kind& k) const;
  bool take_write(const NicPacket& p, const Kind& k);
  bool take_send(const NicPacket& p, const Kind& k);
  void finish_message(const NicPacket& p, const Kind& k);
  void owe(bool asked, Time now);
  void acknowledge(uint8_t syndrome, uint64_t sequence);
  void refuse(uint8_t syndrome, QueuePairFault fault);
  uint8_t credits() const;
  void notice_congestion(const NicPacket& p, Time now);

  Config c_;
  const NicMemory& memory_;
  Dice dice_;
  QueuePairFault fault_ = QueuePairFault::kNone;
  Time heard_;
  QueuePairCounts counts_;

  // una_ ≤ next_ ≤ top_ ≤ end_: oldest unacknowledged, next to send, one past the newest ever sent, one past
  // the newest posted.
  uint64_t una_, next_, top_, end_;
  std::deque<Work> works_;
  uint64_t messages_done_ = 0;
  uint32_t since_ack_request_ = 0, retries_left_ = 7, timeouts_in_row_ = 0;
  Time retransmit_at_ = kNever, rnr_until_ = kNever, owed_since_{}, pace_at_{};
  Dcqcn dcqcn_;

  uint64_t expected_;
  uint32_t msn_ = 0, receives_, unacknowledged_ = 0;
  bool nak_out_ = false, ack_due_ = false, in_message_ = false, in_send_ = false;
  Time ack_at_ = kNever, cnp_after_{};
  uint32_t write_key_ = 0;
  uint64_t write_at_ = 0, write_left_ = 0;
  std::vector<uint8_t> message_;
};

// The wait of an RNR NAK's timer code (IBA table 45).
Time rnr_wait_time(uint8_t code);

}  // namespace millrace::sim
