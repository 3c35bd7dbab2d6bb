// What a switch in the middle reads of a frame that passes through: its DSCP and ECN, and for RoCEv2 its
// opcode and queue pair. Nothing is checked beyond what the reading needs: a frame that is no whole packet is
// some other traffic. Pure, hot; the frame's headers lie in its own bytes.
#pragma once

#include "roce/frame.h"
#include "roce/headers.h"

namespace millrace::buffering {

struct Look {
  enum class Kind : uint8_t {
    kOther,  // anything else
    kData,   // a request or RDMA READ response of a connected RoCEv2 transport
    kAck,    // an acknowledgement, NAK or atomic acknowledgement
    kCnp,
  };
  Kind kind = Kind::kOther;
  uint8_t tos = 0;    // DSCP and ECN; 0 of what is not IP
  uint8_t ip_at = 0;  // where the IP header begins; 0: there is none
  bool v6 = false;
  uint32_t qpn = 0;  // destination, of RoCEv2

  uint8_t dscp() const { return tos >> 2; }
  uint8_t ecn() const { return tos & 3; }
};

inline constexpr uint8_t kNotEct = 0, kCe = 3;

Look look(const Frame& frame) noexcept;

// The frame's DSCP; 0 when it is not IP.
inline uint8_t dscp_of(const Frame& frame) noexcept {
  const FrameBuffer* b = frame.buffer();
  if (b->length < 14 + 20) return 0;
  const uint8_t* type = b->data() + 12;
  if (type[0] == 0x08 && type[1] == 0x00) return type[3] >> 2;  // the byte behind version and length
  if (type[0] == 0x81 || type[0] == 0x86) return look(frame).dscp();
  return 0;
}

// The addresses of an IP frame.
IpAddress source_of(const Frame& frame, const Look& l) noexcept;
IpAddress destination_of(const Frame& frame, const Look& l) noexcept;

// Congestion Experienced, if the packet is ECN-capable and not marked yet; true if it did (RFC 3168). The
// IPv4 checksum follows (RFC 1624); neither is covered by the ICRC (IBA annex A17.3.3).
bool mark_ce(Frame& frame, Look& l) noexcept;

}  // namespace millrace::buffering
