// The RoCEv2 packets of the simulator's model NIC, written from IEEE 802.3, RFC 791, 768 and 8200 and the
// InfiniBand Architecture Specification (IBA vol. 1, chapter 9 and annex A17), apart from roce/ on purpose:
// the one is tested against the other. Pure functions.
#pragma once

#include <span>
#include <vector>

#include "roce/types.h"

namespace millrace::sim {

// Everything that a packet says. What its opcode does not carry is neither written nor read.
struct NicPacket {
  MacAddress to_mac, from_mac;
  IpAddress to, from;
  uint8_t traffic_class = 0, hops = 64;
  uint16_t identification = 0;  // IPv4
  uint32_t flow_label = 0;      // IPv6
  uint16_t udp_port = 0;        // source

  uint8_t opcode = 0;
  bool solicited = false, migrated = false, fecn = false, becn = false, ack_request = false;
  uint16_t pkey = 0xFFFF;
  uint32_t qpn = 0, psn = 0;

  uint64_t address = 0;              // RETH
  uint32_t rkey = 0, length = 0;     // RETH
  uint8_t syndrome = 0;              // AETH
  uint32_t msn = 0;                  // AETH
  uint32_t qkey = 0, source_qp = 0;  // DETH
  uint32_t immediate = 0;
  std::span<const uint8_t> payload;

  bool congestion_experienced() const { return (traffic_class & 3) == 3; }
};

// Table 38's numbers, those that are used by name.
inline constexpr uint8_t kOpSendFirst = 0x00, kOpSendMiddle = 0x01, kOpSendLast = 0x02, kOpSendOnly = 0x04,
                         kOpWriteFirst = 0x06, kOpWriteMiddle = 0x07, kOpWriteOnly = 0x0A, kOpAck = 0x11,
                         kOpUdSend = 0x64, kOpCnp = 0x81;

// A whole Ethernet frame without FCS; its payload is the packet's and `tail` behind it.
std::vector<uint8_t> make_frame(const NicPacket& packet, std::span<const uint8_t> tail = {});

enum class Reading : uint8_t {
  kGood,
  kForeign,    // no RoCEv2
  kMalformed,  // lengths, versions, opcodes, IPv4's checksum
  kCorrupt,    // the ICRC
};
// `packet`'s payload lies within the frame.
Reading read_frame(std::span<const uint8_t> frame, NicPacket& packet);

// The ICRC of an IP packet up to and without its own four bytes (IBA 7.8.1 and A17.3.3).
uint32_t invariant_crc(std::span<const uint8_t> ip_packet);

// Big-endian integers in raw bytes.
inline uint64_t get_be(const uint8_t* at, int bytes) {
  uint64_t v = 0;
  for (int i = 0; i < bytes; i++) v = v * 256 + at[i];
  return v;
}
inline void set_be(uint8_t* at, int bytes, uint64_t v) {
  for (int i = bytes - 1; i >= 0; i--, v /= 256) at[i] = static_cast<uint8_t>(v);
}

}  // namespace millrace::sim
