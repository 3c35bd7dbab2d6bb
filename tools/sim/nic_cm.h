// The active side of the InfiniBand connection manager as a host has it: librdmacm over the kernel's ib_cm
// (IBA vol. 1, chapter 12; annex A11), written apart from roce/. One object per connection, a pure state
// machine: MADs and a time in, MADs and an outcome out.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "roce/types.h"
#include "tools/sim/nic_quirks.h"

namespace millrace::sim {

enum class CmKind : uint16_t {
  kReq = 0x10,
  kMra = 0x11,
  kRej = 0x12,
  kRep = 0x13,
  kRtu = 0x14,
  kDreq = 0x15,
  kDrep = 0x16
};

// Any of the messages; each has the fields that its table gives it (IBA tables 106 to 113).
struct CmMad {
  CmKind kind{};
  uint64_t transaction = 0;
  uint32_t local_id = 0, remote_id = 0;
  // REQ and REP.
  uint64_t ca_guid = 0;
  uint32_t qpn = 0;           // the sender's; in a DREQ the receiver's
  uint32_t starting_psn = 0;  // where the receiver of the message shall begin to send (12.6.5)
  uint8_t responder_resources = 0, initiator_depth = 0, rnr_retry = 0;
  bool flow_control = false;  // end to end, by credits
  // REQ.
  uint64_t service = 0;
  uint8_t remote_timeout = 0, local_timeout = 0, retry_count = 0, mtu = 0, max_cm_retries = 0;
  uint16_t pkey = 0xFFFF;
  IpAddress local_gid, remote_gid;
  uint32_t flow_label = 0;
  uint8_t traffic_class = 0, hop_limit = 0, ack_timeout = 0;
  // REP.
  uint8_t target_ack_delay = 0;
  // REJ and MRA.
  uint8_t answered = 0;  // 0 REQ, 1 REP, 2 other
  uint8_t service_timeout = 0;
  uint16_t reason = 0;
  std::vector<uint8_t> reject_info;
  std::vector<uint8_t> private_data;  // when read, all that the message has room for
};
std::array<uint8_t, 256> write_mad(const CmMad& mad);
bool read_mad(std::span<const uint8_t> bytes, CmMad& mad);

// rdma_cm's header and the consumer's bytes: a REQ's whole private data, 92 bytes.
std::vector<uint8_t> rdma_cm_data(const IpAddress& from, const IpAddress& to, uint16_t port,
                                  std::span<const uint8_t> consumer);

inline constexpr uint16_t kRejTimeout = 4, kRejConsumer = 28;

class CmClient {
 public:
  enum class Outcome : uint8_t { kNothing, kReply, kRejected, kUnreachable, kDisconnected };

  // `req` is complete; its IDs and transaction are the connection's.
  CmClient(CmMad req, const NicQuirks& quirks, Time now);

  // A message to our ID from the peer's address. With kReply and kRejected, `mad` is the answer.
  Outcome receive(const CmMad& mad, Time now);
  Outcome poll(Time now);  // kUnreachable, or nothing
  Time next_deadline() const { return state_ == State::kOver ? kNever : timer_; }
  // After kReply: the queue pair is up.
  void confirm();
  // Of whatever there is so far.
  void disconnect(Time now);
  bool over() const { return state_ == State::kOver; }
  // Nothing waits for a DREP any more.
  void forget() { state_ = State::kOver; }

  std::vector<CmMad> out;  // to be sent, by the caller

 private:
  enum class State : uint8_t { kReqSent, kRepReceived, kConnected, kDreqSent, kOver };
  CmMad answer(CmKind kind) const;
  Outcome on_rep(const CmMad& mad);
  Outcome on_dreq(const CmMad& mad);

  CmMad request_;  // REQ, later DREQ
  NicQuirks quirks_;
  State state_ = State::kReqSent;
  uint32_t own_id_, remote_id_ = 0, own_qpn_, remote_qpn_ = 0, tries_left_;
  uint64_t transaction_, ca_guid_;
  Time timer_;
};

// 4.096 µs × 2^code.
constexpr Time cm_timeout(uint8_t code) { return Time(int64_t{4096} << (code & 31)); }

}  // namespace millrace::sim
