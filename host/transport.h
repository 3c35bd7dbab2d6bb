// The seam between a communicator and what carries it: libibverbs, or the soft endpoint. Verbs-shaped: queue
// pairs, posted sends, completions. A transport is pumped by one thread, the context's progress thread, which
// is also the one that calls every function here.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "aggregation/protocol.h"
#include "roce/types.h"

namespace millrace::host {

// Why a queue pair ended.
enum class LinkError : uint8_t {
  kNone,
  kUnreachable,   // no answer to the connect, or none from a live connection for peer_dead
  kRefused,       // rejected: the text is the switch's
  kDisconnected,  // the switch hung up
  kBroken,        // a NAK that ends a queue pair, or anything that the protocol does not allow
};

using LinkId = uint32_t;  // one stripe's connection

struct ConnectRequest {
  IpAddress switch_address;
  uint16_t port = 18600;
  aggregation::JoinRequest join;  // the tag is filled in by the transport, which knows the QPN and GIDs
  std::string secret;             // empty: no tag
  uint32_t mtu = 4096;
  uint16_t window = 8;  // sizes queues: send 2 × window + 2, receives window + 3
  Time connect_timeout = std::chrono::seconds(10);
};

struct Completion {
  enum class Kind : uint8_t {
    kConnected,    // the REP's parameters are in `join_reply`; START comes later as kMessage
    kSent,         // the SEND of `segment` has been acknowledged
    kResult,       // WRITE with immediate: `immediate`
    kMessage,      // a SEND arrived: `message` (START, terminal)
    kMessageSent,  // the oldest message of post_message() has been acknowledged
    kClosed,       // close() is over: no memory of the link's operations will be written any more
    kError,        // the link is gone: `error`, `text`; kClosed does not follow
  };
  Kind kind;
  LinkId link = 0;
  uint64_t segment = 0;
  uint32_t immediate = 0;
  aggregation::JoinReply join_reply;
  std::vector<uint8_t> message;
  LinkError error = LinkError::kNone;
  aggregation::Code code{};  // of a refusal
  uint8_t mtu_wanted = 0;    // IB code, with Code::kMtu
  std::string text;
};

struct LinkStats {
  uint64_t packets_sent = 0, packets_received = 0, retransmitted = 0, timeouts = 0, naks_received = 0,
           rnr_naks_received = 0, duplicates_received = 0, out_of_sequence = 0, cnps_received = 0,
           cnps_sent = 0;

  LinkStats& operator+=(const LinkStats& o) {
    packets_sent += o.packets_sent;
    packets_received += o.packets_received;
    retransmitted += o.retransmitted;
    timeouts += o.timeouts;
    naks_received += o.naks_received;
    rnr_naks_received += o.rnr_naks_received;
    duplicates_received += o.duplicates_received;
    out_of_sequence += o.out_of_sequence;
    cnps_received += o.cnps_received;
    cnps_sent += o.cnps_sent;
    return *this;
  }
};

// Registered memory as its transport names it.
struct MemoryRegion {
  uint32_t id = 0;    // the transport's own; 0: nothing to deregister
  uint32_t lkey = 0;  // of sends from it
  uint32_t rkey = 0;  // of results into it; 0: none may be written there
};
enum class Access : uint8_t { kSend, kResult };

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts to connect; kConnected or kError follows.
  virtual LinkId connect(const ConnectRequest& request) = 0;
  // Makes [address, address + bytes) a source of sends, with kResult also a target of results. Throws
  // millrace::Error, whose sentence names the memory, where the system does not allow it.
  virtual MemoryRegion register_memory(const void* address, size_t bytes, Access access) = 0;
  // The caller has no operation in it any more.
  virtual void deregister_memory(const MemoryRegion& region) = 0;
  // One SEND of the header and `payload`, gathered from the caller's memory, which is `source` or within it
  // and stays untouched until kSent or the link's end. false: the send queue is full.
  virtual bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                            std::span<const uint8_t> payload, const MemoryRegion& source) = 0;
  // One SEND of a control message, at most aggregation::kMessageBytesMax bytes, which are copied. false:
  // there is no room now; or never, with a transport that has no use for it.
  virtual bool post_message(LinkId, std::span<const uint8_t>) { return false; }
  // Moves the queue pair to the error state at once; kClosed follows once nothing is sent from or written to
  // memory any more. Says goodbye (DREQ) in the background.
  virtual void close(LinkId link) = 0;
  // Appends the completions that have arrived, in order per link.
  virtual void poll(std::vector<Completion>& completions) = 0;
  virtual LinkStats stats(LinkId link) const = 0;
};

}  // namespace millrace::host
