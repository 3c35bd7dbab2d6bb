// A reliable connection's queue pair: responder and requester behind one door, with what belongs to neither:
// who may speak to it (source address, P_Key), liveness, and the order in which it sends. Used alike by the
// switch and by hosts' soft transport. Pure; one thread.
#pragma once

#include "roce/rc_requester.h"
#include "roce/rc_responder.h"

namespace millrace::roce {

struct QueuePairConfig {
  Qpn local;
  Wire wire;
  Psn expected_psn;
  RequesterConfig requester;
  uint32_t reads_max = 0;                      // READs that the peer may have outstanding here
  Time probe_after = std::chrono::seconds(1);  // of silence, with nothing owed: a zero-length RDMA WRITE
  Time peer_dead = std::chrono::seconds(5);    // owed and no sign: the peer is dead
};

// The id that a probe completes with.
inline constexpr uint64_t kProbeId = UINT64_MAX;

// On a switch, QPNs from here on belong to the spillway's connections to lenders of memory.
inline constexpr uint32_t kStoreQpnFirst = 0xFF0000;

// What a packet turned out to be.
enum class Reception : uint8_t {
  kNewRequest,  // the caller answers through responder(): accept(), accept_read(), not_ready() or refuse()
  kReadAgain,   // a READ once more: responder().read_again(), or to be dropped
  kResponse,    // an ACK, a NAK or a READ's response, done
  kCongestion,  // a CNP, done
  kDuplicate,   // the rest: done, drop the packet
  kGap,
  kGapQuiet,
  kInvalid,  // refused, the queue pair is over
  kSourceMismatch,
  kPkeyMismatch,
  kBadOpcode,
};

class QueuePair {
 public:
  QueuePair(const QueuePairConfig& config, Time now);

  Reception receive(const Packet& packet, Time now);
  // Sends the acknowledgement owed and up to `budget` packets of READs' responses and of requests. True when
  // more could be sent at once (the budget or the pool ran out).
  bool emit(FramePool& pool, Crc32Combine& combine, uint32_t budget, Time now, FrameList& out);
  // Timers; call when next_deadline() has passed, then emit().
  void tick(Time now);
  Time next_deadline() const;
  // The same without the pace (requester().held_until()), which emit() alone serves.
  Time next_timer() const;

  // A CNP, for a packet that came marked "congestion experienced": at most one in 50 µs (DCQCN's notification
  // point; annex A17.9.3). False: none was due, or none could be built.
  bool send_cnp(FramePool& pool, Time now, FrameList& out);
  // Asks the peer for a sign of life, unless it owes one already: a zero-length RDMA WRITE, with rkey,
  // address and length 0, which any NIC acknowledges and which touches no memory.
  void probe();
  // No acknowledgement for peer_dead although one is owed.
  bool dead(Time now) const;
  // A NAK of either direction has ended it.
  bool over() const { return requester_.failed() || responder_.over(); }
  bool wants_to_emit() const {
    return wants_to_respond() || responder_.acknowledgement_owed() || requester_.wants_to_send();
  }

  RcResponder& responder() { return responder_; }
  RcRequester& requester() { return requester_; }
  const RcRequester& requester() const { return requester_; }
  const RcResponder& responder() const { return responder_; }
  Qpn local() const { return config_.local; }
  const Wire& wire() const { return config_.wire; }
  Time heard() const { return heard_; }  // when the last valid packet came
  uint64_t acks_sent() const { return acks_sent_; }
  uint64_t naks_sent() const { return naks_sent_; }
  uint64_t rnr_naks_sent() const { return rnr_naks_sent_; }
  uint64_t probes_sent() const { return probes_sent_; }

 private:
  bool wants_to_respond() const { return responder_.responding() && !requester_.pace().held(); }
  uint32_t emit_in_turns(FramePool& pool, Crc32Combine& combine, uint32_t budget, Time now, FrameList& out);
  void acknowledge(FramePool& pool, FrameList& out);

  QueuePairConfig config_;
  RcResponder responder_;
  RcRequester requester_;
  Time heard_;
  Time cnp_sent_{-1};
  bool request_next_ = false;  // of a queue pair that is held to a rate
  uint64_t acks_sent_ = 0, naks_sent_ = 0, rnr_naks_sent_ = 0, probes_sent_ = 0;
};

}  // namespace millrace::roce
