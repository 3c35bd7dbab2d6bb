#include "tools/sim/nic_wire.h"

#include <zlib.h>

#include <algorithm>
#include <array>

namespace millrace::sim {

namespace {

constexpr uint16_t kUdpPort = 4791;
constexpr size_t kEthernet = 14, kUdp = 8, kBth = 12, kIcrc = 4, kCnpReserved = 16;
constexpr size_t kIpv4 = 20, kIpv6 = 40;

// Which headers stand behind the BTH, in this order (IBA table 38). Atomics and invalidates are not modelled.
struct Extensions {
  bool known = false, deth = false, reth = false, aeth = false, immediate = false, reserved16 = false;
  size_t bytes() const {
    return (deth ? 8u : 0u) + (reth ? 16u : 0u) + (aeth ? 4u : 0u) + (immediate ? 4u : 0u) +
           (reserved16 ? kCnpReserved : 0u);
  }
};

Extensions extensions(uint8_t opcode) {
  Extensions e;
  switch (opcode) {
    case 0x00:  // SEND first, middle, last, only
    case 0x01:
    case 0x02:
    case 0x04:
    case 0x07:  // WRITE middle, last
    case 0x08:
    case 0x0E:  // READ response middle
      e.known = true;
      break;
    case 0x03:  // SEND last and only, WRITE last, with immediate
    case 0x05:
    case 0x09:
      e.known = e.immediate = true;
      break;
    case 0x06:  // WRITE first, only; READ request
    case 0x0A:
    case 0x0C:
      e.known = e.reth = true;
      break;
    case 0x0B:  // WRITE only with immediate
      e.known = e.reth = e.immediate = true;
      break;
    case 0x0D:  // READ response first, last, only; acknowledgement
    case 0x0F:
    case 0x10:
    case 0x11:
      e.known = e.aeth = true;
      break;
    case 0x64:  // UD SEND only, with and without immediate
      e.known = e.deth = true;
      break;
    case 0x65:
      e.known = e.deth = e.immediate = true;
      break;
    case kOpCnp:
      e.known = e.reserved16 = true;
      break;
    default:
      break;
  }
  return e;
}

uint16_t internet_checksum(const uint8_t* header, size_t bytes) {
  uint32_t sum = 0;
  for (size_t i = 0; i < bytes; i += 2) sum += static_cast<uint32_t>(get_be(header + i, 2));
  sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<uint16_t>(~(sum + (sum >> 16)));
}

void write_ip(uint8_t* at, const NicPacket& p, size_t behind) {
  if (p.to.is_v4()) {
    at[0] = 0x45;
    at[1] = p.traffic_class;
    set_be(at + 2, 2, kIpv4 + behind);
    set_be(at + 4, 2, p.identification);
    at[6] = 0x40;  // do not fragment
    at[8] = p.hops;
    at[9] = 17;
    std::copy_n(p.from.v4(), 4, at + 12);
    std::copy_n(p.to.v4(), 4, at + 16);
    set_be(at + 10, 2, internet_checksum(at, kIpv4));
    return;
  }
  set_be(at, 4, 6u << 28 | uint32_t{p.traffic_class} << 20 | p.flow_label);
  set_be(at + 4, 2, behind);
  at[6] = 17;
  at[7] = p.hops;
  std::copy_n(p.from.bytes.data(), 16, at + 8);
  std::copy_n(p.to.bytes.data(), 16, at + 24);
}

void write_bth(uint8_t* at, const NicPacket& p, size_t pad) {
  at[0] = p.opcode;
  at[1] = static_cast<uint8_t>(p.solicited << 7 | p.migrated << 6 | pad << 4);
  set_be(at + 2, 2, p.pkey);
  at[4] = static_cast<uint8_t>(p.fecn << 7 | p.becn << 6);
  set_be(at + 5, 3, p.qpn);
  at[8] = p.ack_request ? 0x80 : 0;
  set_be(at + 9, 3, p.psn);
}

uint8_t* write_extensions(uint8_t* at, const NicPacket& p, const Extensions& e) {
  if (e.deth) {
    set_be(at, 4, p.qkey);
    set_be(at + 5, 3, p.source_qp);
    at += 8;
  }
  if (e.reth) {
    set_be(at, 8, p.address);
    set_be(at + 8, 4, p.rkey);
    set_be(at + 12, 4, p.length);
    at += 16;
  }
  if (e.aeth) {
    at[0] = p.syndrome;
    set_be(at + 1, 3, p.msn);
    at += 4;
  }
  if (e.immediate) {
    set_be(at, 4, p.immediate);
    at += 4;
  }
  return at + (e.reserved16 ? kCnpReserved : 0);
}

void read_extensions(const uint8_t* at, NicPacket& p, const Extensions& e) {
  if (e.deth) {
    p.qkey = static_cast<uint32_t>(get_be(at, 4));
    p.source_qp = static_cast<uint32_t>(get_be(at + 5, 3));
    at += 8;
  }
  if (e.reth) {
    p.address = get_be(at, 8);
    p.rkey = static_cast<uint32_t>(get_be(at + 8, 4));
    p.length = static_cast<uint32_t>(get_be(at + 12, 4));
    at += 16;
  }
  if (e.aeth) {
    p.syndrome = at[0];
    p.msn = static_cast<uint32_t>(get_be(at + 1, 3));
    at += 4;
  }
  if (e.immediate) p.immediate = static_cast<uint32_t>(get_be(at, 4));
}

// The IP header; `rest` becomes what it says lies behind it.
Reading read_ip(std::span<const uint8_t> ip, bool v4, NicPacket& p, std::span<const uint8_t>& rest) {
  const uint8_t* h = ip.data();
  if (v4) {
    if (ip.size() < kIpv4 || h[9] != 17) return Reading::kForeign;
    if (h[0] != 0x45 || internet_checksum(h, kIpv4) != 0) return Reading::kMalformed;
    const size_t total = get_be(h + 2, 2);
    if (total < kIpv4 || total > ip.size() || (get_be(h + 6, 2) & 0x3FFF) != 0) return Reading::kMalformed;
    p.traffic_class = h[1];
    p.identification = static_cast<uint16_t>(get_be(h + 4, 2));
    p.hops = h[8];
    p.from = IpAddress::from_v4(h + 12);
    p.to = IpAddress::from_v4(h + 16);
    rest = ip.subspan(kIpv4, total - kIpv4);
    return Reading::kGood;
  }
  if (ip.size() < kIpv6 || h[6] != 17) return Reading::kForeign;
  const auto word = static_cast<uint32_t>(get_be(h, 4));
  const size_t behind = get_be(h + 4, 2);
  if (word >> 28 != 6 || behind > ip.size() - kIpv6) return Reading::kMalformed;
  p.traffic_class = static_cast<uint8_t>(word >> 20);
  p.flow_label = word & 0xFFFFF;
  p.hops = h[7];
  p.from = IpAddress::from_v6(h + 8);
  p.to = IpAddress::from_v6(h + 24);
  rest = ip.subspan(kIpv6, behind);
  return Reading::kGood;
}

}  // namespace

uint32_t invariant_crc(std::span<const uint8_t> ip) {
  std::array<uint8_t, 8 + kIpv6 + kUdp + kBth> head;
  const bool v4 = ip[0] >> 4 == 4;
  const size_t headers = (v4 ? kIpv4 : kIpv6) + kUdp + kBth;
  std::fill_n(head.begin(), 8, uint8_t{0xFF});  // the local route header that RoCE has not
  uint8_t* h = head.data() + 8;
  std::copy_n(ip.begin(), headers, h);
  if (v4) {
    h[1] = h[8] = h[10] = h[11] = 0xFF;  // TOS, TTL, checksum
  } else {
    h[0] |= 0x0F;  // traffic class and flow label
    h[1] = h[2] = h[3] = h[7] = 0xFF;
  }
  uint8_t* udp = h + (v4 ? kIpv4 : kIpv6);
  udp[6] = udp[7] = 0xFF;
  udp[kUdp + 4] = 0xFF;  // FECN, BECN, reserved
  uLong crc = crc32(0, head.data(), static_cast<uInt>(8 + headers));
  crc = crc32(crc, ip.data() + headers, static_cast<uInt>(ip.size() - headers));
  return static_cast<uint32_t>(crc);
}

std::vector<uint8_t> make_frame(const NicPacket& p, std::span<const uint8_t> tail) {
  const Extensions e = extensions(p.opcode);
  const size_t data = p.payload.size() + tail.size(), pad = (4 - data % 4) % 4;
  const size_t ip_bytes = p.to.is_v4() ? kIpv4 : kIpv6;
  const size_t behind_ip = kUdp + kBth + e.bytes() + data + pad + kIcrc;
  std::vector<uint8_t> frame(kEthernet + ip_bytes + behind_ip);
  uint8_t* at = frame.data();
  std::copy_n(p.to_mac.bytes.data(), 6, at);
  std::copy_n(p.from_mac.bytes.data(), 6, at + 6);
  set_be(at + 12, 2, p.to.is_v4() ? 0x0800 : 0x86DD);
  write_ip(at += kEthernet, p, behind_ip);
  at += ip_bytes;
  set_be(at, 2, p.udp_port);
  set_be(at + 2, 2, kUdpPort);
  set_be(at + 4, 2, behind_ip);  // and no checksum
  write_bth(at += kUdp, p, pad);
  at = write_extensions(at + kBth, p, e);
  at = std::copy(p.payload.begin(), p.payload.end(), at);
  at = std::copy(tail.begin(), tail.end(), at) + pad;
  const uint32_t crc = invariant_crc({frame.data() + kEthernet, at});
  for (int i = 0; i < 4; i++) at[i] = static_cast<uint8_t>(crc >> 8 * i);  // its low byte first
  return frame;
}

Reading read_frame(std::span<const uint8_t> frame, NicPacket& p) {
  p = {};
  if (frame.size() < kEthernet) return Reading::kForeign;
  const uint64_t type = get_be(frame.data() + 12, 2);
  if (type != 0x0800 && type != 0x86DD) return Reading::kForeign;
  std::copy_n(frame.begin(), 6, p.to_mac.bytes.begin());
  std::copy_n(frame.begin() + 6, 6, p.from_mac.bytes.begin());
  std::span<const uint8_t> udp;
  const std::span<const uint8_t> ip = frame.subspan(kEthernet);
  if (const Reading r = read_ip(ip, type == 0x0800, p, udp); r != Reading::kGood) return r;
  if (udp.size() < kUdp || get_be(udp.data() + 2, 2) != kUdpPort) return Reading::kForeign;
  if (get_be(udp.data() + 4, 2) != udp.size() || udp.size() < kUdp + kBth + kIcrc) return Reading::kMalformed;
  p.udp_port = static_cast<uint16_t>(get_be(udp.data(), 2));
  const uint8_t* crc = &udp[udp.size() - kIcrc];
  const uint32_t stored = crc[0] | crc[1] << 8 | crc[2] << 16 | uint32_t{crc[3]} << 24;
  if (invariant_crc({ip.data(), crc}) != stored) return Reading::kCorrupt;

  const uint8_t* bth = udp.data() + kUdp;
  const Extensions e = extensions(bth[0]);
  const size_t pad = bth[1] >> 4 & 3, headers = kUdp + kBth + e.bytes();
  if (!e.known || (bth[1] & 0x0F) != 0 || udp.size() < headers + pad + kIcrc) return Reading::kMalformed;
  p.opcode = bth[0];
  p.solicited = bth[1] & 0x80;
  p.migrated = bth[1] & 0x40;
  p.pkey = static_cast<uint16_t>(get_be(bth + 2, 2));
  p.fecn = bth[4] & 0x80;
  p.becn = bth[4] & 0x40;
  p.qpn = static_cast<uint32_t>(get_be(bth + 5, 3));
  p.ack_request = bth[8] & 0x80;
  p.psn = static_cast<uint32_t>(get_be(bth + 9, 3));
  read_extensions(bth + kBth, p, e);
  p.payload = udp.subspan(headers, udp.size() - headers - pad - kIcrc);
  return Reading::kGood;
}

}  // namespace millrace::sim
