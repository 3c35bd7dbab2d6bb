// Frames for the switch's fuzz target: the small protocols around IP, and the repair of whatever was mutated,
// so that it gets past lengths and checksums.
#pragma once

#include "roce/icrc.h"
#include "roce/packet.h"
#include "switch/ip_messages.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {

inline void put16(std::span<uint8_t> b, size_t at, size_t v) {
  b[at] = static_cast<uint8_t>(v >> 8), b[at + 1] = static_cast<uint8_t>(v);
}

// Makes lengths, checksums and ICRC right, as far as the frame has them.
inline void repair(std::span<uint8_t> b) {
  if (b.size() < 14 + 20 + 8) return;
  const auto network = switching::network_of(b);
  const size_t at = network.at;
  const bool v4 = network.type == roce::kEtherTypeIpv4;
  const size_t header = v4 ? 20 : 40;
  if ((!v4 && network.type != roce::kEtherTypeIpv6) || b.size() < at + header + 8) return;
  const size_t up = at + header, length = b.size() - up;
  const uint8_t protocol = b[at + (v4 ? 9 : 6)];
  if (v4) {
    b[at] = 0x45;
    put16(b, at + 2, b.size() - at);
    put16(b, at + 10, 0);
    put16(b, at + 10, roce::internet_checksum(b.subspan(at, 20)));
  } else {
    put16(b, at + 4, length);
  }
  if (protocol == roce::kIpProtoUdp) put16(b, up + 4, length);
  if (protocol == roce::kIpProtoIcmp || protocol == roce::kIpProtoIcmp6) {
    put16(b, up + 2, 0);
    const auto message = b.subspan(up);
    put16(b, up + 2,
          v4 ? roce::internet_checksum(message)
             : switching::icmp6_checksum(*reinterpret_cast<const roce::Ipv6Header*>(b.data() + at), message));
  }
  roce::Packet p;
  if (roce::parse(b, p) != roce::ParseVerdict::kOk) return;
  const size_t covered = p.ip.size() - roce::kIcrcBytes;
  roce::store_icrc(p.ip.data() + covered, roce::icrc(p.ip.first(covered), p.header_bytes));
}

inline void append(Bytes& b, std::span<const uint8_t> more) { b.insert(b.end(), more.begin(), more.end()); }

inline Bytes ethernet(const MacAddress& to, const MacAddress& from, uint16_t type) {
  Bytes b;
  append(b, to.bytes);
  append(b, from.bytes);
  b.push_back(static_cast<uint8_t>(type >> 8)), b.push_back(static_cast<uint8_t>(type));
  return b;
}

// An IP packet of any protocol, its lengths and checksums right.
inline Bytes ip_frame(const MacAddress& to_mac, const MacAddress& from_mac, const IpAddress& to,
                      const IpAddress& from, uint8_t protocol, uint8_t hops,
                      std::span<const uint8_t> payload) {
  Bytes b;
  if (to.is_v4()) {
    b = ethernet(to_mac, from_mac, roce::kEtherTypeIpv4);
    append(b, Bytes{0x45, 0, 0, 0, 0, 0, 0x40, 0, hops, protocol, 0, 0});
    append(b, {from.v4(), 4});
    append(b, {to.v4(), 4});
  } else {
    b = ethernet(to_mac, from_mac, roce::kEtherTypeIpv6);
    append(b, Bytes{0x60, 0, 0, 0, 0, 0, protocol, hops});
    append(b, from.bytes);
    append(b, to.bytes);
  }
  append(b, payload);
  repair(b);
  return b;
}

inline Bytes arp(uint16_t operation, const MacAddress& sender_mac, const IpAddress& sender,
                 const IpAddress& target, const MacAddress& to) {
  Bytes b = ethernet(to, sender_mac, roce::kEtherTypeArp);
  append(b, Bytes{0, 1, 8, 0, 6, 4, 0, static_cast<uint8_t>(operation)});
  append(b, sender_mac.bytes);
  append(b, {sender.v4(), 4});
  append(b, to.bytes);
  append(b, {target.v4(), 4});
  return b;
}

inline Bytes neighbour(uint8_t type, const MacAddress& mac, const IpAddress& from, const IpAddress& to,
                       const IpAddress& target, const MacAddress& to_mac) {
  Bytes m = {type, 0, 0, 0, 0x60, 0, 0, 0};
  append(m, target.bytes);
  m.push_back(type == switching::kSolicitation ? 1 : 2), m.push_back(1);
  append(m, mac.bytes);
  return ip_frame(to_mac, mac, to, from, roce::kIpProtoIcmp6, 255, m);
}

inline Bytes echo(const MacAddress& to_mac, const MacAddress& mac, const IpAddress& to, const IpAddress& from,
                  uint8_t hops) {
  const Bytes m = {static_cast<uint8_t>(to.is_v4() ? 8 : 128), 0, 0, 0, 0, 1, 0, 2, 'p', 'i', 'n', 'g'};
  return ip_frame(to_mac, mac, to, from, to.is_v4() ? roce::kIpProtoIcmp : roce::kIpProtoIcmp6, hops, m);
}

}  // namespace millrace::fuzz
