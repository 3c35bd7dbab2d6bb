// The connection manager (IBA vol. 1, chapter 12) as a pure state machine, both sides: it takes the UD
// packets that arrive at QP1 and a time, and gives back MADs to send and events. One agent per address owner
// (a switch, a host's soft transport); one thread calls it. Losses, repeats and stale requests are its
// business; what a connection is for is its caller's. It allocates per connection, never per data packet.
#pragma once

#include <deque>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "roce/build.h"
#include "roce/packet.h"

namespace millrace::roce {

// The local communication ID of a connection.
struct CmId {
  uint32_t value = 0;
  friend constexpr auto operator<=>(CmId, CmId) = default;
};

// RDMA port space TCP: service id 0x0000000001060000 | port (annex A11).
constexpr uint64_t tcp_service_id(uint16_t port) { return 0x0000000001060000ull | port; }

// REJ reasons used here (IBA 12.6.7.2).
enum class RejectReason : uint16_t {
  kNoQp = 1,
  kNoResources = 3,
  kTimeout = 4,
  kUnsupportedRequest = 5,
  kInvalidCommId = 6,
  kInvalidCommInstance = 7,
  kInvalidServiceId = 8,
  kInvalidTransport = 9,
  kStaleConnection = 10,
  kPrimaryRemoteGid = 12,
  kInvalidMtu = 26,
  kConsumer = 28,
};

struct CmConfig {
  uint64_t ca_guid = 0;  // unique per owner and boot
  uint64_t seed = 1;     // of the communication and transaction IDs, which start at random
  Time response_timeout = std::chrono::milliseconds(400);  // between repeats of REQ, REP and DREQ
  uint32_t retries = 15;                                   // repeats of REQ and REP before giving up
  uint32_t disconnect_retries = 5;
  Time mra_timeout_max = std::chrono::seconds(10);  // an MRA is honoured up to this
  Time id_reuse =
      std::chrono::seconds(30);  // a finished connection answers strays, and its ID rests, so long
  uint32_t connections_max = 65536;
  uint32_t half_open_max = 1024;  // requests neither accepted nor refused by the caller, and unconfirmed ones
  uint32_t half_open_per_source = 256;  // of these, so that one address cannot keep all others out
};

// One side's parameters of the queue pair (what a REQ or REP says).
struct CmQueuePair {
  Qpn qpn;
  Psn first_psn;            // "starting PSN": where the *other* side shall begin to send (IBA 12.6.5)
  uint8_t mtu_code = 5;     // REQ only
  uint8_t retry_count = 7;  // REQ only
  uint8_t rnr_retry = 7;
  uint8_t ack_timeout = 14;  // REQ: 4.096 µs × 2^n, what the requester uses
  uint8_t responder_resources = 0;
  uint8_t initiator_depth = 0;
};

struct CmEvent {
  enum class Kind {
    kRequest,       // passive: a REQ; answer with accept(), reject() or mra() followed by one of these
    kReply,         // active: a REP; bring the queue pair up, then confirm()
    kEstablished,   // passive: an RTU came (or established() was called)
    kRejected,      // the peer refused: reason and private data
    kUnreachable,   // retries used up without an answer
    kDisconnected,  // the peer sent DREQ (already answered) or replaced the connection by a new REQ from its
                    // QP
    kClosed,        // our disconnect() is over: DREP, or its retries used up
  };
  Kind kind;
  CmId id;
  Path path;                // back to the peer: MACs, addresses, VLAN as received (src_port is the flow's)
  CmQueuePair remote;       // kRequest, kReply
  uint64_t service_id = 0;  // kRequest
  RejectReason reason = RejectReason::kTimeout;  // kRejected
  std::vector<uint8_t> private_data;  // kRequest: without rdma_cm's 36 bytes; kReply, kRejected: whole
};

// Names of the agent's counters; the name is also the drop's.
#define MILLRACE_CM_COUNTERS(X)                                                                  \
  X(mads_received)                                                                               \
  X(mads_sent)                                                                                   \
  X(req_received)                                                                                \
  X(req_repeated)                                                                                \
  X(rep_repeated)                                                                                \
  X(rej_sent)                                                                                    \
  X(rej_repeated)                                                                                \
  X(mra_received) X(mra_sent) X(dreq_received) X(dreq_unknown) X(retries) X(bad_qkey) X(bad_mad) \
      X(unknown_id) X(stale_replaced) X(half_open_refused) X(send_failed)
struct CmCounters {
#define X(n) uint64_t n = 0;
  MILLRACE_CM_COUNTERS(X)
#undef X
};

// A call that names a connection which has ended, or is not in the state that the call is for, does nothing:
// the peer may have ended it while the event was on its way. A connection ends with exactly one of kRejected,
// kUnreachable, kDisconnected and kClosed, or with the caller's reject().
class CmAgent {
 public:
  // Throws Error (kConfig) for time-outs or limits that are not positive.
  // `pool` gives the MADs' buffers and outlives the agent.
  CmAgent(const CmConfig& config, FramePool& pool);
  ~CmAgent();

  // A packet that parsed, whose ICRC is right and whose destination is our address and QP1. Anything but a
  // well-formed CM MAD with the GSI's Q_Key is counted and dropped.
  void receive(const Packet& packet, Time now, FrameList& out);
  // Whether such a packet answers or ends a connection of this agent, where several share an address.
  bool owns(const Packet& packet) const;
  // Sends what is due; call when next_deadline() has passed.
  void poll(Time now, FrameList& out);
  Time next_deadline() const;
  bool next_event(CmEvent& event);

  // Passive side: REQs for other services are rejected with kInvalidServiceId.
  void listen(uint64_t service_id);
  // Accepts a request with our queue pair; the REP (its private data at most 196 bytes) is repeated until
  // RTU.
  void accept(CmId id, const CmQueuePair& local, std::span<const uint8_t> private_data, Time now,
              FrameList& out);
  // Refuses (private data at most 148 bytes); a repeated REQ of the same connection draws the same REJ again.
  void reject(CmId id, RejectReason reason, std::span<const uint8_t> private_data, Time now, FrameList& out);
  // Asks the peer to wait `service_time` more.
  void mra(CmId id, Time service_time, Time now, FrameList& out);
  // The first valid packet on the queue pair counts as RTU.
  void established(CmId id);

  // Active side: `path` has every field filled; private data at most 56 bytes (behind rdma_cm's IP header,
  // which connect() writes from the path's addresses, `local_port` being its source port). The REQ's flow
  // label stands for the path's src_port. CmId{0}, which is no connection's, when connections_max are live
  // already or as many events wait to be taken.
  CmId connect(const Path& path, uint64_t service_id, const CmQueuePair& local, uint16_t local_port,
               std::span<const uint8_t> private_data, Time now, FrameList& out);
  // After kReply: sends RTU, and again whenever the REP is repeated.
  void confirm(CmId id, Time now, FrameList& out);

  // Active side, before the REP: what is repeated from now on goes by another neighbour.
  void redirect(CmId id, const MacAddress& next_hop);

  // Either side: DREQ until DREP, then kClosed. Of a connection not yet established: REJ, with `why` as its
  // private data, or silence, then kClosed.
  void disconnect(CmId id, Time now, FrameList& out, std::span<const uint8_t> why = {});

  size_t connections() const;  // those not finished
  size_t records() const;      // entries of every table, resting connections included; 0 when nothing is left
  const CmCounters& counters() const { return counters_; }

 private:
  struct Connection;
  struct Impl;
  std::unique_ptr<Impl> impl_;
  CmCounters counters_;
};

}  // namespace millrace::roce
