// The responder half of a reliable connection: what an arriving request packet is (new, duplicate, gap), and
// what acknowledgement is owed (IBA vol. 1, 9.7.5). Pure; it places no data: its caller does, between
// arrive() and accept(). Reliable SENDs and RDMA WRITEs, both with and without immediate; READs and atomics
// are refused.
#pragma once

#include <optional>

#include "roce/packet.h"

namespace millrace::roce {

enum class Arrival : uint8_t {
  kNew,        // in order and well formed: the caller answers with accept(), not_ready() or refuse()
  kDuplicate,  // was accepted before; acknowledged again, to be dropped
  kGap,        // something before it is missing; NAKed once
  kGapQuiet,   // the same, already NAKed, or following an RNR NAK
  kInvalid,    // breaks the rules of opcode order or length; refused, the queue pair is over
};

struct Acknowledgement {
  uint8_t syndrome = kAckUnlimited;
  Psn psn;
  uint32_t msn = 0;  // messages completed, modulo 2^24
};

// Where a new RDMA WRITE packet's payload goes.
struct WritePlace {
  uint32_t rkey = 0;
  uint64_t address = 0;
};

class RcResponder {
 public:
  RcResponder(Psn expected, uint32_t mtu) : expected_(expected), mtu_(mtu) {}

  // Judges a request packet of this connection. For anything but kNew the acknowledgement owed, if any, is
  // noted.
  Arrival arrive(const Packet& packet);
  // After kNew: the packet has been taken.
  void accept(const Packet& packet);
  // After kNew: the packet cannot be taken now; the peer waits and repeats (RNR NAK). Later ones are dropped
  // in silence until it does.
  void not_ready(uint8_t timer_code);
  // After kNew: NAK with one of the kNak… syndromes; the queue pair is over.
  void refuse(uint8_t syndrome);

  // After kNew of a WRITE with payload: valid until accept().
  WritePlace place(const Packet& packet) const;

  // The acknowledgement owed, once.
  std::optional<Acknowledgement> take_acknowledgement();
  bool acknowledgement_owed() const { return owed_; }
  bool over() const { return over_; }
  Psn expected() const { return expected_; }
  uint32_t messages() const { return msn_; }

 private:
  enum class In : uint8_t { kNothing, kSend, kWrite };
  bool well_formed(const Packet& packet) const;
  void owe(uint8_t syndrome);

  Psn expected_;
  uint32_t mtu_;
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
