#include "tools/sim/check/wire_packet.h"

#include <zlib.h>

#include <cstdio>
#include <cstring>

namespace millrace::sim::check {

uint32_t compute_icrc(std::span<const uint8_t> frame, size_t ip_at, size_t end) {
  // The headers up to the BTH, masked, behind eight bytes of ones.
  uint8_t head[8 + 40 + 8 + 12];
  const bool v4 = frame[ip_at] >> 4 == 4;
  const size_t ip = v4 ? 20 : 40, bytes = ip + 8 + 12;
  std::memset(head, 0xFF, 8);
  std::memcpy(head + 8, frame.data() + ip_at, bytes);
  uint8_t* h = head + 8;
  if (v4) {
    h[1] = h[8] = h[10] = h[11] = 0xFF;
  } else {
    h[0] |= 0x0F;
    h[1] = h[2] = h[3] = h[7] = 0xFF;
  }
  h[ip + 6] = h[ip + 7] = 0xFF;
  h[ip + 8 + 4] = 0xFF;
  uLong crc = ::crc32(0, head, static_cast<uInt>(8 + bytes));
  const size_t rest = ip_at + bytes;
  if (end > rest) crc = ::crc32(crc, frame.data() + rest, static_cast<uInt>(end - rest));
  return static_cast<uint32_t>(crc);
}

namespace {

// Bytes of extended headers, or −1 for an opcode that we do not know.
int extended(uint8_t opcode) {
  switch (opcode) {
    case 0x00:
    case 0x01:
    case 0x02:
    case 0x04:
    case 0x07:
    case 0x08:
    case 0x0E:  // READ response middle
      return 0;
    case 0x03:
    case 0x05:
    case 0x09:
    case 0x0D:  // READ response first, last, only
    case 0x0F:
    case 0x10:
    case 0x11:
      return 4;
    case 0x06:
    case 0x0A:
    case 0x0C:  // READ request
    case 0x81:
      return 16;
    case 0x0B:
      return 20;
    case 0x64:
      return 8;
    default:
      return -1;
  }
}

bool ip_checksum_ok(const uint8_t* p) {
  uint32_t sum = 0;
  for (int i = 0; i < 20; i += 2) sum += be16(p + i);
  while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
  return sum == 0xFFFF;
}

}  // namespace

WireKind read_packet(std::span<const uint8_t> f, bool check_icrc, WirePacket& out, const char*& why) {
  why = nullptr;
  auto bad = [&](const char* what) {
    why = what;
    return WireKind::kMalformed;
  };
  if (f.size() < 14) return bad("shorter than an Ethernet header");
  const uint32_t type = be16(f.data() + 12);
  const size_t ip = 14;
  size_t udp, length;
  if (type == 0x0800) {
    if (f.size() < ip + 20) return bad("shorter than an IPv4 header");
    if (f[ip + 9] != 17) return WireKind::kOther;
    if (f[ip] != 0x45) return bad("IPv4 options, or another version");
    if (!ip_checksum_ok(f.data() + ip)) return bad("a wrong IPv4 checksum");
    if (be16(f.data() + ip + 6) & 0x3FFF) return bad("a fragment");
    length = be16(f.data() + ip + 2);
    out.ecn = f[ip + 1] & 3;
    udp = ip + 20;
    out.src = out.dst = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF};
    std::memcpy(out.src.data() + 12, f.data() + ip + 12, 4);
    std::memcpy(out.dst.data() + 12, f.data() + ip + 16, 4);
  } else if (type == 0x86DD) {
    if (f.size() < ip + 40) return bad("shorter than an IPv6 header");
    if (f[ip + 6] != 17) return WireKind::kOther;
    length = 40 + be16(f.data() + ip + 4);
    out.ecn = f[ip + 1] >> 4 & 3;
    udp = ip + 40;
    std::memcpy(out.src.data(), f.data() + ip + 8, 16);
    std::memcpy(out.dst.data(), f.data() + ip + 24, 16);
  } else {
    return WireKind::kOther;
  }
  if (ip + length > f.size() || udp + 8 > ip + length) return bad("an IP length that does not fit");
  if (be16(f.data() + udp + 2) != 4791) return WireKind::kOther;
  if (be16(f.data() + udp + 4) != ip + length - udp) return bad("a UDP length that is not IP's");
  const size_t bth = udp + 8, end = ip + length;
  if (bth + 16 > end) return bad("no room for a BTH");
  const uint8_t* b = f.data() + bth;
  out.opcode = b[0];
  const int more = extended(out.opcode);
  if (more < 0) return bad("an unknown opcode");
  const size_t pad = b[1] >> 4 & 3, at = bth + 12 + static_cast<size_t>(more);
  if (b[1] & 0x0F) return bad("another transport version");
  if (at + pad + 4 > end) return bad("no room for its headers");
  out.dest_qp = be24(b + 5);
  out.ack_request = b[8] & 0x80;
  out.psn = be24(b + 9);
  if (out.opcode == 0x11) out.syndrome = b[12], out.msn = be24(b + 13);
  if (out.with_immediate()) out.immediate = be32(f.data() + at - 4);
  out.marked = out.ecn == 3;
  out.payload = f.subspan(at, end - 4 - pad - at);
  out.above_psn = f.subspan(bth + 12, end - 4 - bth - 12);
  out.ip_at = ip;
  if (check_icrc) {
    const uint32_t crc = compute_icrc(f, ip, end - 4);
    const uint8_t* stored = f.data() + end - 4;
    const uint32_t found = stored[0] | static_cast<uint32_t>(stored[1]) << 8 |
                           static_cast<uint32_t>(stored[2]) << 16 | static_cast<uint32_t>(stored[3]) << 24;
    if (crc != found) return bad("a wrong ICRC");
  }
  return WireKind::kRoce;
}

std::string describe_packet(std::span<const uint8_t> frame) {
  static constexpr const char* names[] = {
      "SEND first",         "SEND middle",       "SEND last",    "SEND last imm",       "SEND only",
      "SEND only imm",      "WRITE first",       "WRITE middle", "WRITE last",          "WRITE last imm",
      "WRITE only",         "WRITE only imm",    "READ",         "READ response first", "READ response mid",
      "READ response last", "READ response only"};
  static constexpr const char* mads[] = {"REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP"};
  WirePacket p;
  const char* why;
  char text[160];
  const WireKind kind = read_packet(frame, true, p, why);
  if (kind == WireKind::kMalformed) return std::string("malformed: ") + why;
  if (kind == WireKind::kOther) return "no RoCE, " + std::to_string(frame.size()) + " bytes";
  if (p.mad()) {
    const uint32_t a = be16(p.payload.data() + 16) - 0x10;
    std::snprintf(text, sizeof(text), "%s %08x %08x", a < 7 ? mads[a] : "MAD", be32(p.payload.data() + 24),
                  be32(p.payload.data() + 28));
  } else if (p.cnp()) {
    std::snprintf(text, sizeof(text), "CNP to %06x", p.dest_qp);
  } else if (p.acknowledge()) {
    const char* what = p.syndrome < 0x20    ? "ACK"
                       : p.syndrome < 0x40  ? "RNR NAK"
                       : p.syndrome == 0x60 ? "NAK"
                                            : "NAK, fatal";
    std::snprintf(text, sizeof(text), "%s to %06x PSN %06x MSN %u", what, p.dest_qp, p.psn, p.msn);
  } else {
    std::snprintf(text, sizeof(text), "%s to %06x PSN %06x%s, %zu bytes", names[p.opcode], p.dest_qp, p.psn,
                  p.ack_request ? " AckReq" : "", p.payload.size());
    if (p.with_immediate()) return std::string(text) + ", immediate " + std::to_string(p.immediate);
  }
  return text;
}

}  // namespace millrace::sim::check
