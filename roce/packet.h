// A parsed view of one RoCEv2 packet. Owns nothing: it points into the frame that was parsed and dies with
// it. Pure; called on the hot path of the switch and from a host's transport thread; never allocates.
#pragma once

#include <span>
#include <string_view>

#include "roce/frame.h"
#include "roce/headers.h"

namespace millrace::roce {

// Why a packet is no valid RoCEv2 packet for us. The drop's name is the counter's name.
#define MILLRACE_PARSE_VERDICTS(X)                                                         \
  X(kOk, "ok")                                                                             \
  X(kNotRoce, "not_roce") /* another protocol, whole and well */                           \
  X(kTruncatedEthernet, "truncated_ethernet")                                              \
  X(kTruncatedIp, "truncated_ip")                                                          \
  X(kBadIpVersion, "bad_ip_version")                                                       \
  X(kIpOptions, "ip_options") /* annex A17 allows none */                                  \
  X(kIpFragment, "ip_fragment")                                                            \
  X(kIpLength, "ip_length") /* longer than the frame, or too short for UDP */              \
  X(kIpChecksum, "ip_checksum")                                                            \
  X(kIpMapped, "ip_mapped") /* an IPv4-mapped address in an IPv6 header (RFC 4291) */      \
  X(kUdpLength, "udp_length")                                                              \
  X(kTruncatedBth, "truncated_bth")                                                        \
  X(kBthVersion, "bth_version")                                                            \
  X(kUnknownOpcode, "unknown_opcode")                                                      \
  X(kTruncatedHeaders, "truncated_headers") /* extended headers, pad or ICRC do not fit */ \
  X(kBadIcrc, "bad_icrc")

enum class ParseVerdict : uint8_t {
#define X(id, text) id,
  MILLRACE_PARSE_VERDICTS(X)
#undef X
      kCount
};
std::string_view name(ParseVerdict) noexcept;

struct Packet {
  std::span<uint8_t> ip;  // from the IP header to the end of the ICRC; link padding is cut off
  MacAddress src_mac, dst_mac;
  IpAddress src_ip, dst_ip;
  uint16_t vlan_tci = 0;
  bool has_vlan = false;
  uint8_t tos = 0;  // DSCP and ECN
  uint16_t src_port = 0;
  const OpcodeTraits* op = nullptr;
  const Bth* bth = nullptr;
  const Reth* reth = nullptr;
  const Aeth* aeth = nullptr;
  const Deth* deth = nullptr;
  const AtomicEth* atomic = nullptr;
  const AtomicAckEth* atomic_ack = nullptr;
  const Be32* immediate = nullptr;
  uint32_t header_bytes = 0;   // IP, UDP, BTH and extended headers
  std::span<uint8_t> payload;  // without pad

  Psn psn() const { return Psn(bth->psn.value()); }
  Qpn dest_qp() const { return Qpn{bth->dest_qp.value()}; }
  Opcode opcode() const { return static_cast<Opcode>(bth->opcode); }
  bool ack_request() const { return bth->ack_request & 0x80; }
  bool ecn_ce() const { return (tos & 3) == 3; }
};

// Parses `frame` from its Ethernet header (at most one VLAN tag). kOk fills `out` completely, the ICRC is not
// yet checked. kNotRoce: the frame is not UDP port 4791. Anything else: malformed.
ParseVerdict parse(std::span<uint8_t> frame, Packet& out) noexcept;

// Whether the stored ICRC is the computed one.
bool icrc_ok(const Packet&) noexcept;

// The Internet checksum (RFC 1071) over `bytes`, continuing from the partial sum `sum`; as stored, big-endian
// value.
uint16_t internet_checksum(std::span<const uint8_t> bytes, uint32_t sum = 0) noexcept;

// The checksum of a header in which one 16-bit word changed from `before` to `after` (RFC 1624, equation 3).
uint16_t updated_checksum(uint16_t checksum, uint16_t before, uint16_t after) noexcept;

}  // namespace millrace::roce
