// The responder half of a reliable connection: what an arriving request packet is (new, duplicate, gap), and
// what acknowledgement is owed (IBA vol. 1, 9.7.5). Pure; it places no data: its caller does, between
// arrive() and accept(). Reliable SENDs and RDMA WRITEs, both with and without immediate, and RDMA READs, of
// which it keeps what is still to be sent; atomics are refused.
#pragma once

#include <optional>
#include <vector>

#include "roce/build.h"
#include "roce/dcqcn.h"
#include "roce/packet.h"

namespace millrace::roce {

enum class Arrival : uint8_t {
  kNew,  // in order and well formed: the caller answers with accept(), accept_read(), not_ready() or refuse()
  kDuplicate,  // was accepted before; acknowledged again, to be dropped
  kReadAgain,  // a READ that was accepted before, or the rest of one: read_again(), or to be dropped
  kGap,        // something before it is missing; NAKed once
  kGapQuiet,   // the same, already NAKed, or following an RNR NAK
  kInvalid,    // breaks the rules of opcode order or length; refused, the queue pair is over
};

struct Acknowledgement {
  uint8_t syndrome = kAckUnlimited;
  Psn psn;
  uint32_t msn = 0;  // messages completed, modulo 2^24
};

// Where a new RDMA WRITE packet's payload goes, or what a READ asks for comes from.
struct WritePlace {
  uint32_t rkey = 0;
  uint64_t address = 0;
};

class RcResponder {
 public:
  // `reads_max`: READs that the peer may have outstanding, as agreed in the connection's REQ or REP; one more
  // is an invalid request (IBA 9.7.4.1.7).
  RcResponder(Psn expected, uint32_t mtu, uint32_t reads_max = 0);

  // Judges a request packet of this connection. For anything but kNew the acknowledgement owed, if any, is
  // noted.
  Arrival arrive(const Packet& packet);
  // After kNew: the packet has been taken.
  void accept(const Packet& packet);
  // After kNew or kReadAgain of a READ: what it asks for, which place() and its RETH's length name, lies in
  // `memory`, untouched by the caller until it has been sent. What was sent before is read again: it may have
  // changed.
  void accept_read(const Packet& packet, std::span<const uint8_t> memory);
  void read_again(const Packet& packet, std::span<const uint8_t> memory);
  // Sends up to `budget` packets of what READs have asked for, in the order of the requests and as its
  // queue pair's pace allows; returns how many.
  uint32_t respond(const Wire& wire, FramePool& pool, uint32_t budget, Pace& pace, Time now, FrameList& out);
  bool responding() const { return !reading_.empty(); }
  uint64_t responses_sent() const { return responses_sent_; }
  // After kNew: the packet cannot be taken now; the peer waits and repeats (RNR NAK). Later ones are dropped
  // in silence until it does.
  void not_ready(uint8_t timer_code);
  // After kNew: NAK with one of the kNak… syndromes; the queue pair is over.
  void refuse(uint8_t syndrome);

  // After kNew of a WRITE with payload, or of a READ: valid until accept().
  WritePlace place(const Packet& packet) const;

  // The acknowledgement owed, once. It waits for READs' responses, since it would acknowledge them too.
  std::optional<Acknowledgement> take_acknowledgement();
  bool acknowledgement_owed() const { return owed_ && !responding(); }
  bool over() const { return over_; }
  Psn expected() const { return expected_; }
  uint32_t messages() const { return msn_; }

 private:
  enum class In : uint8_t { kNothing, kSend, kWrite };
  // A READ's responses that are still to be sent.
  struct Reading {
    std::span<const uint8_t> memory;
    Psn first;
    uint32_t packets = 0, sent = 0;
    uint32_t msn = 0;
    bool fresh = true;  // its last packet has never been sent, so that the peer counts it as outstanding
  };
  bool well_formed(const Packet& packet) const;
  bool well_formed_read(const Packet& packet) const;
  void owe(uint8_t syndrome);
  uint32_t read_packets(const Packet& packet) const;
  uint32_t reads_fresh() const;

  Psn expected_;
  uint32_t mtu_;
  uint32_t reads_max_;
  std::vector<Reading> reading_;  // in the order of PSNs, reserved at construction
  uint64_t responses_sent_ = 0;
  uint32_t msn_ = 0;
  In in_ = In::kNothing;
  WritePlace write_;              // of the message being received
  uint32_t write_remaining_ = 0;  // bytes
  uint8_t syndrome_ = kAckUnlimited;
  bool owed_ = false;
  bool nak_sent_ = false;  // for the packet expected now, sequence or RNR
  bool over_ = false;
};

}  // namespace millrace::roce
