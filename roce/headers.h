// The wire's headers, as structs of big-endian bytes. Sources: IEEE 802.3/802.1Q, RFC 791, RFC 8200, RFC 768;
// InfiniBand Architecture Specification vol. 1 (IBA) chapter 9 and annex A17 (RoCEv2).
#pragma once

#include "roce/types.h"

namespace millrace::roce {

inline constexpr uint16_t kRoceUdpPort = 4791;
inline constexpr uint16_t kEtherTypeIpv4 = 0x0800;
inline constexpr uint16_t kEtherTypeArp = 0x0806;
inline constexpr uint16_t kEtherTypeVlan = 0x8100;
inline constexpr uint16_t kEtherTypeIpv6 = 0x86DD;
inline constexpr uint8_t kIpProtoIcmp = 1;
inline constexpr uint8_t kIpProtoUdp = 17;
inline constexpr uint8_t kIpProtoIcmp6 = 58;
inline constexpr uint32_t kIcrcBytes = 4;

struct EthernetHeader {
  MacAddress dst, src;
  Be16 ether_type;
};
static_assert(sizeof(EthernetHeader) == 14);

struct VlanTag {
  Be16 tci, ether_type;
};
static_assert(sizeof(VlanTag) == 4);

struct Ipv4Header {
  uint8_t version_ihl, tos;
  Be16 total_length, identification, fragment;
  uint8_t ttl, protocol;
  Be16 checksum;
  uint8_t src[4], dst[4];
};
static_assert(sizeof(Ipv4Header) == 20);

struct Ipv6Header {
  Be32 version_class_label;
  Be16 payload_length;
  uint8_t next_header, hop_limit;
  uint8_t src[16], dst[16];
};
static_assert(sizeof(Ipv6Header) == 40);

struct UdpHeader {
  Be16 src_port, dst_port, length, checksum;
};
static_assert(sizeof(UdpHeader) == 8);

// Base transport header, IBA 9.2.
struct Bth {
  uint8_t opcode;
  uint8_t flags;  // solicited event 7, MigReq 6, pad count 5:4, header version 3:0
  Be16 pkey;
  uint8_t fecn_becn;  // FECN 7, BECN 6 (annex A17.9.1); masked by the ICRC
  Be24 dest_qp;
  uint8_t ack_request;  // AckReq 7
  Be24 psn;
};
static_assert(sizeof(Bth) == 12);

// RDMA extended transport header, IBA 9.3.3.
struct Reth {
  Be64 address;
  Be32 rkey, length;
};
static_assert(sizeof(Reth) == 16);

// ACK extended transport header, IBA 9.3.5.
struct Aeth {
  uint8_t syndrome;
  Be24 msn;
};
static_assert(sizeof(Aeth) == 4);

// Datagram extended transport header, IBA 9.3.1.
struct Deth {
  Be32 qkey;
  uint8_t reserved = 0;
  Be24 src_qp;
};
static_assert(sizeof(Deth) == 8);

// Atomic extended transport header and the one of its acknowledgement, IBA 9.3.4.
struct AtomicEth {
  Be64 address;
  Be32 rkey;
  Be64 swap_or_add, compare;
};
static_assert(sizeof(AtomicEth) == 28);
struct AtomicAckEth {
  Be64 original;
};
static_assert(sizeof(AtomicAckEth) == 8);

// Opcodes, IBA table 38. RC has the high bits 000, UD 011; CNP is annex A17.9.3's.
enum class Opcode : uint8_t {
  kSendFirst = 0x00,
  kSendMiddle = 0x01,
  kSendLast = 0x02,
  kSendLastImm = 0x03,
  kSendOnly = 0x04,
  kSendOnlyImm = 0x05,
  kWriteFirst = 0x06,
  kWriteMiddle = 0x07,
  kWriteLast = 0x08,
  kWriteLastImm = 0x09,
  kWriteOnly = 0x0A,
  kWriteOnlyImm = 0x0B,
  kReadRequest = 0x0C,
  kReadResponseFirst = 0x0D,
  kReadResponseMiddle = 0x0E,
  kReadResponseLast = 0x0F,
  kReadResponseOnly = 0x10,
  kAcknowledge = 0x11,
  kAtomicAcknowledge = 0x12,
  kCompareSwap = 0x13,
  kFetchAdd = 0x14,
  kSendLastInvalidate = 0x16,
  kSendOnlyInvalidate = 0x17,
  kUdSendOnly = 0x64,
  kUdSendOnlyImm = 0x65,
  kCnp = 0x81,
};

// What an opcode carries and where it stands in its message.
struct OpcodeTraits {
  bool known = false, rc = false, request = false, response = false;
  bool first = false, middle = false, last = false, only = false;
  bool send = false, write = false;
  bool reth = false, aeth = false, imm = false, deth = false, ieth = false, atomic = false,
       atomic_ack = false;
  uint8_t header_bytes = 0;  // extended headers, without the BTH

  bool starts() const { return first || only; }
  bool ends() const { return last || only; }
};
const OpcodeTraits& traits(uint8_t opcode) noexcept;
inline const OpcodeTraits& traits(Opcode opcode) noexcept { return traits(static_cast<uint8_t>(opcode)); }
std::string_view opcode_name(uint8_t opcode) noexcept;

// AETH syndromes, IBA 9.7.5.2.
inline constexpr uint8_t kAckUnlimited = 0x1F;  // ACK, credits not advertised
inline constexpr uint8_t kRnrNak = 0x20;        // | timer code
inline constexpr uint8_t kNakSequence = 0x60;
inline constexpr uint8_t kNakInvalidRequest = 0x61;
inline constexpr uint8_t kNakRemoteAccess = 0x62;
inline constexpr uint8_t kNakRemoteOperational = 0x63;

// The wait that an RNR NAK's timer code asks for, IBA table 45 (code 0 is 655.36 ms, 1 is 0.01 ms, 12 is 0.64
// ms).
Time rnr_wait(uint8_t timer_code) noexcept;

// Path MTU codes, IBA table 44's convention: 1 = 256 … 5 = 4096. 0 for an unknown size or code.
uint32_t mtu_bytes(uint8_t code) noexcept;
uint8_t mtu_code(uint32_t bytes) noexcept;

inline constexpr uint16_t kDefaultPkey = 0xFFFF;
inline constexpr uint32_t kGsiQkey = 0x80010000;

}  // namespace millrace::roce
