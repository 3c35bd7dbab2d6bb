// Builds RoCEv2 packets: headers in front of a payload, pad and ICRC behind it. Pure, no allocation beyond
// the one buffer taken from the pool; called on the switch's hot path and from a host's transport thread.
#pragma once

#include "roce/frame.h"
#include "roce/headers.h"
#include "roce/icrc.h"

namespace millrace::roce {

// In Path::tos: ECN-capable, so that a congested switch marks instead of dropping (RFC 3168's ECT(0)).
inline constexpr uint8_t kEct0 = 2;

// Where packets of one connection go: everything below the BTH.
struct Path {
  MacAddress src_mac, dst_mac;
  IpAddress src_ip, dst_ip;
  uint16_t src_port = 0xC000;  // UDP; see flow_source_port()
  uint8_t tos = 0;
  uint8_t hop_limit = 64;
  uint16_t identification = 0;  // IPv4; with "do not fragment" any value serves
  bool has_vlan = false;
  uint16_t vlan_tci = 0;
};

// Everything that one connection's packets have in common.
struct Wire {
  Path path;
  Qpn remote_qpn;
  uint16_t pkey = kDefaultPkey;
};

// UDP source port of a flow without a flow label: the label is derived from the two QPNs, then folded into
// 0xC000 | 14 bits (annex A17.3.1's entropy, as librdmacm's rdma_flow_label_to_udp_sport does it).
uint16_t flow_source_port(Qpn local, Qpn remote) noexcept;

// What stands in the BTH and extended headers. Only the fields that the opcode carries are used.
struct TransportFields {
  Opcode opcode = Opcode::kSendOnly;
  Qpn dest_qp;
  Psn psn;
  bool ack_request = false;
  bool solicited = false;
  bool migrated = true;  // MigReq: receivers want 1, Linux's rxe sends 0
  uint16_t pkey = kDefaultPkey;
  uint64_t remote_address = 0;  // RETH, AtomicETH
  uint32_t rkey = 0;            // RETH, AtomicETH, IETH
  uint32_t dma_length = 0;
  uint32_t immediate = 0;
  uint8_t syndrome = 0;  // AETH
  uint32_t msn = 0;
  uint32_t qkey = 0;  // DETH
  Qpn src_qp;
  uint64_t swap_or_add = 0, compare = 0;  // AtomicETH
  uint64_t original = 0;                  // AtomicAckETH
};

// One packet with its payload copied behind the headers from up to two pieces. nullptr Frame when the pool is
// empty or the buffers are too small for the packet.
Frame build(FramePool& pool, const Path& path, const TransportFields& fields,
            std::span<const uint8_t> payload, std::span<const uint8_t> more = {}) noexcept;

// One packet whose payload stays where it is, in `owner`'s buffer: fresh headers, the shared payload, and the
// pad and ICRC as tail. `payload_crc` is crc32(0, payload), computed once for all sharers.
Frame build_shared(FramePool& pool, const Path& path, const TransportFields& fields, FrameBuffer* owner,
                   std::span<const uint8_t> payload, uint32_t payload_crc, Crc32Combine& combine) noexcept;

// One packet whose payload is `copied`, then `borrowed`, which stays where it is in the caller's memory: see
// own_payload(). The buffer has room to take it later.
Frame build_borrowed(FramePool& pool, const Path& path, const TransportFields& fields,
                     std::span<const uint8_t> copied, std::span<const uint8_t> borrowed) noexcept;

}  // namespace millrace::roce
