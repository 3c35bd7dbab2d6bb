// What the checkers read of a RoCEv2 frame, by their own offsets (IBA vol. 1, annex A17), and the ICRC by
// zlib.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace millrace::sim::check {

using Address = std::array<uint8_t, 16>;  // IPv4 as ::ffff:a.b.c.d

struct WirePacket {
  Address src, dst;
  uint8_t opcode = 0;
  bool ack_request = false;
  uint8_t ecn = 0;
  bool marked = false;  // ECN: congestion experienced
  uint32_t dest_qp = 0, psn = 0;
  uint8_t syndrome = 0;  // of an ACK
  uint32_t msn = 0;      // of an ACK
  uint32_t immediate = 0;
  std::span<const uint8_t> payload;    // without pad
  std::span<const uint8_t> above_psn;  // everything behind the BTH, to the ICRC
  size_t ip_at = 14;

  bool first() const { return opcode == 0x00 || opcode == 0x06; }
  bool middle() const { return opcode == 0x01 || opcode == 0x07; }
  bool last() const { return opcode == 0x02 || opcode == 0x03 || opcode == 0x08 || opcode == 0x09; }
  bool only() const { return opcode == 0x04 || opcode == 0x05 || opcode == 0x0A || opcode == 0x0B; }
  bool starts() const { return first() || only(); }
  bool ends() const { return last() || only(); }
  bool send() const { return opcode <= 0x05; }
  bool with_immediate() const { return opcode == 0x05 || opcode == 0x09 || opcode == 0x0B || opcode == 0x03; }
  bool request() const { return opcode <= 0x0B; }
  bool acknowledge() const { return opcode == 0x11; }
  bool cnp() const { return opcode == 0x81; }
  bool mad() const { return opcode == 0x64 && dest_qp == 1; }
};

enum class WireKind : uint8_t { kOther, kRoce, kMalformed };
// kOther: no UDP to port 4791. kMalformed: `why` names what is wrong, the ICRC included unless `check_icrc`
// is false.
WireKind read_packet(std::span<const uint8_t> frame, bool check_icrc, WirePacket& out, const char*& why);
// One line: opcode, queue pair, PSN and what else it carries.
std::string describe_packet(std::span<const uint8_t> frame);
uint32_t compute_icrc(std::span<const uint8_t> frame, size_t ip_at, size_t end);

inline uint32_t be16(const uint8_t* p) { return static_cast<uint32_t>(p[0] << 8 | p[1]); }
inline uint32_t be24(const uint8_t* p) { return static_cast<uint32_t>(p[0] << 16 | p[1] << 8 | p[2]); }
inline uint32_t be32(const uint8_t* p) { return static_cast<uint32_t>(p[0]) << 24 | be24(p + 1); }

}  // namespace millrace::sim::check
