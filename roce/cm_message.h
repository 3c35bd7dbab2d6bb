// The connection manager's messages (IBA vol. 1, 12.6) and rdma_cm's header inside a REQ (annex A11): plain
// structs of every field, and their 256 bytes on the wire. Pure functions, called from the agent and from
// tools that read captures; they never allocate, and no bytes make them throw.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <variant>

#include "roce/headers.h"

namespace millrace::roce {

inline constexpr size_t kMadBytes = 256;
using Mad = std::array<uint8_t, kMadBytes>;

// What the common MAD header says beyond class, version, method and attribute, which are fixed by the message
// (IBA 13.4.2). `attribute_modifier` carries vendors' enhanced connection establishment; we send 0.
struct MadHeader {
  uint16_t status = 0;
  uint16_t class_specific = 0;
  uint64_t transaction_id = 0;
  uint32_t attribute_modifier = 0;
  friend bool operator==(const MadHeader&, const MadHeader&) = default;
};

// One of a REQ's two paths; all zero when there is none.
struct CmPathRecord {
  uint16_t local_lid = 0, remote_lid = 0;  // 0xFFFF on routed paths and so on RoCE v2
  IpAddress local_gid, remote_gid;
  uint32_t flow_label = 0;  // 20 bits
  uint8_t packet_rate = 0;  // 0: the port's
  uint8_t traffic_class = 0, hop_limit = 0, sl = 0;
  bool subnet_local = false;
  uint8_t local_ack_timeout = 0;  // 4.096 µs × 2^n
  friend bool operator==(const CmPathRecord&, const CmPathRecord&) = default;
};

// Table 106. `vendor_id`, here and in the REP, belongs to the enhanced connection establishment and is 0 from
// us.
struct ReqMessage {
  static constexpr uint16_t kAttribute = 0x10;
  uint32_t local_comm_id = 0;
  uint32_t vendor_id = 0;
  uint64_t service_id = 0;
  uint64_t local_ca_guid = 0;
  uint32_t local_qkey = 0;
  Qpn local_qpn;
  uint8_t responder_resources = 0;
  uint32_t local_eecn = 0;
  uint8_t initiator_depth = 0;
  uint32_t remote_eecn = 0;
  uint8_t remote_cm_response_timeout = 0;  // 4.096 µs × 2^n, as is the local one
  uint8_t transport_service = 0;           // 0: RC
  bool end_to_end_flow_control = false;
  Psn starting_psn;
  uint8_t local_cm_response_timeout = 0;
  uint8_t retry_count = 0;
  uint16_t pkey = kDefaultPkey;
  uint8_t path_mtu = 0;
  bool rdc_exists = false;
  uint8_t rnr_retry_count = 0;
  uint8_t max_cm_retries = 0;
  bool srq = false;
  uint8_t extended_transport = 0;
  CmPathRecord primary, alternate;
  bool sap_supported = false;
  std::array<uint8_t, 92> private_data{};
  friend bool operator==(const ReqMessage&, const ReqMessage&) = default;
};

// What an MRA or REJ answers.
enum class CmAnswered : uint8_t { kReq = 0, kRep = 1, kOther = 2 };

// Table 107.
struct MraMessage {
  static constexpr uint16_t kAttribute = 0x11;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  CmAnswered answered = CmAnswered::kReq;
  uint8_t service_timeout = 0;  // 4.096 µs × 2^n
  std::array<uint8_t, 222> private_data{};
  friend bool operator==(const MraMessage&, const MraMessage&) = default;
};

// Table 108. `info` is the additional reject information, whose first `info_length` bytes count.
struct RejMessage {
  static constexpr uint16_t kAttribute = 0x12;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  CmAnswered answered = CmAnswered::kReq;
  uint8_t info_length = 0;
  uint16_t reason = 0;
  std::array<uint8_t, 72> info{};
  std::array<uint8_t, 148> private_data{};
  friend bool operator==(const RejMessage&, const RejMessage&) = default;
};

// Table 110.
struct RepMessage {
  static constexpr uint16_t kAttribute = 0x13;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  uint32_t local_qkey = 0;
  Qpn local_qpn;
  uint32_t vendor_id = 0;
  uint32_t local_eecn = 0;
  Psn starting_psn;
  uint8_t responder_resources = 0, initiator_depth = 0;
  uint8_t target_ack_delay = 0;
  uint8_t failover_accepted = 0;
  bool end_to_end_flow_control = false;
  uint8_t rnr_retry_count = 0;
  bool srq = false;
  uint64_t local_ca_guid = 0;
  std::array<uint8_t, 196> private_data{};
  friend bool operator==(const RepMessage&, const RepMessage&) = default;
};

// Table 111.
struct RtuMessage {
  static constexpr uint16_t kAttribute = 0x14;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  std::array<uint8_t, 224> private_data{};
  friend bool operator==(const RtuMessage&, const RtuMessage&) = default;
};

// Table 112.
struct DreqMessage {
  static constexpr uint16_t kAttribute = 0x15;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  Qpn remote_qpn;
  std::array<uint8_t, 220> private_data{};
  friend bool operator==(const DreqMessage&, const DreqMessage&) = default;
};

// Table 113.
struct DrepMessage {
  static constexpr uint16_t kAttribute = 0x16;
  uint32_t local_comm_id = 0, remote_comm_id = 0;
  std::array<uint8_t, 224> private_data{};
  friend bool operator==(const DrepMessage&, const DrepMessage&) = default;
};

using CmBody =
    std::variant<ReqMessage, MraMessage, RejMessage, RepMessage, RtuMessage, DreqMessage, DrepMessage>;

struct CmMessage {
  MadHeader header;
  CmBody body;
};

// A MAD of class 7 (communication management), version 2, method Send and one of the attributes above;
// std::nullopt for anything else. Every bit pattern of the fields is accepted; reserved bits are dropped.
std::optional<CmMessage> decode_cm(std::span<const uint8_t> mad) noexcept;

// Precondition (asserted): each value fits its field. Reserved bits are 0.
Mad encode_cm(const CmMessage& message) noexcept;

// rdma_cm's header, the first 36 bytes of a REQ's private data (annex A11; Linux' struct cma_hdr).
struct RdmaCmHeader {
  static constexpr size_t kBytes = 36;
  uint8_t version = 0;  // major 7:4, minor 3:0
  uint8_t ip_version = 4;
  uint16_t src_port = 0;
  // IPv4 stands in the last four bytes behind zeros, unlike a GID; kept here as an IpAddress all the same.
  IpAddress src_ip, dst_ip;
  friend bool operator==(const RdmaCmHeader&, const RdmaCmHeader&) = default;
};
// std::nullopt when the IP version is neither 4 nor 6. The version is the caller's to judge.
std::optional<RdmaCmHeader> decode_rdma_cm(std::span<const uint8_t, RdmaCmHeader::kBytes> bytes) noexcept;
void encode_rdma_cm(const RdmaCmHeader& header, std::span<uint8_t, RdmaCmHeader::kBytes> bytes) noexcept;

// The CM's time codes: 4.096 µs × 2^code, code 0 … 31. Rounded up, so that a peer is never told too little.
Time cm_time(uint8_t code) noexcept;
uint8_t cm_time_code(Time time) noexcept;

// The UDP source port of a flow label, 0xC000 | (fl[13:0] ^ fl[19:14]) (annex A17), and a label that gives
// the port back.
constexpr uint16_t flow_label_port(uint32_t label) {
  return static_cast<uint16_t>(0xC000 | ((label & 0x3FFF) ^ (label >> 14 & 0x3F)));
}
constexpr uint32_t port_flow_label(uint16_t port) { return port & 0x3FFFu; }

}  // namespace millrace::roce
