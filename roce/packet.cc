#include "roce/packet.h"

#include "roce/icrc.h"

namespace millrace::roce {

std::string_view name(ParseVerdict v) noexcept {
  static constexpr std::string_view names[] = {
#define X(id, text) text,
      MILLRACE_PARSE_VERDICTS(X)
#undef X
  };
  return names[static_cast<size_t>(v)];
}

uint16_t internet_checksum(std::span<const uint8_t> bytes, uint32_t sum) noexcept {
  size_t i = 0;
  for (; i + 1 < bytes.size(); i += 2) sum += static_cast<uint32_t>(bytes[i] << 8 | bytes[i + 1]);
  if (i < bytes.size()) sum += static_cast<uint32_t>(bytes[i] << 8);
  while (sum >> 16) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}

uint16_t updated_checksum(uint16_t checksum, uint16_t before, uint16_t after) noexcept {
  uint32_t sum = static_cast<uint16_t>(~checksum);
  sum += static_cast<uint16_t>(~before) + uint32_t{after};
  sum = (sum & 0xFFFF) + (sum >> 16);
  sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}

namespace {

// The IP header: addresses, the extent of `ip` cut to the header's length, and where UDP starts.
ParseVerdict parse_ipv4(std::span<uint8_t> ip, Packet& out, uint32_t& udp_at) noexcept {
  if (ip.size() < sizeof(Ipv4Header)) return ParseVerdict::kTruncatedIp;
  const auto* h = reinterpret_cast<const Ipv4Header*>(ip.data());
  if (h->version_ihl >> 4 != 4) return ParseVerdict::kBadIpVersion;
  const uint32_t header = (h->version_ihl & 15u) * 4;
  const uint32_t total = h->total_length.value();
  if (header < sizeof(Ipv4Header) || total < header || total > ip.size()) return ParseVerdict::kIpLength;
  if (h->protocol != kIpProtoUdp) return ParseVerdict::kNotRoce;
  if (h->fragment.value() & 0x3FFF) return ParseVerdict::kIpFragment;
  if (total < header + sizeof(UdpHeader)) return ParseVerdict::kIpLength;
  const auto* udp = reinterpret_cast<const UdpHeader*>(ip.data() + header);
  if (udp->dst_port.value() != kRoceUdpPort) return ParseVerdict::kNotRoce;
  if (header != sizeof(Ipv4Header)) return ParseVerdict::kIpOptions;
  if (internet_checksum(ip.first(header)) != 0) return ParseVerdict::kIpChecksum;
  out.src_ip = IpAddress::from_v4(h->src);
  out.dst_ip = IpAddress::from_v4(h->dst);
  out.tos = h->tos;
  out.ip = ip.first(total);
  udp_at = header;
  return ParseVerdict::kOk;
}

ParseVerdict parse_ipv6(std::span<uint8_t> ip, Packet& out, uint32_t& udp_at) noexcept {
  if (ip.size() < sizeof(Ipv6Header)) return ParseVerdict::kTruncatedIp;
  const auto* h = reinterpret_cast<const Ipv6Header*>(ip.data());
  const uint32_t word = h->version_class_label.value();
  if (word >> 28 != 6) return ParseVerdict::kBadIpVersion;
  const uint32_t total = static_cast<uint32_t>(sizeof(Ipv6Header)) + h->payload_length.value();
  if (total > ip.size()) return ParseVerdict::kIpLength;
  if (h->next_header != kIpProtoUdp) return ParseVerdict::kNotRoce;
  if (total < sizeof(Ipv6Header) + sizeof(UdpHeader)) return ParseVerdict::kIpLength;
  const auto* udp = reinterpret_cast<const UdpHeader*>(ip.data() + sizeof(Ipv6Header));
  if (udp->dst_port.value() != kRoceUdpPort) return ParseVerdict::kNotRoce;
  out.src_ip = IpAddress::from_v6(h->src);
  out.dst_ip = IpAddress::from_v6(h->dst);
  // Elsewhere these stand for IPv4 addresses: such a packet would pass for one of another host's, and what
  // answers it would be IPv4.
  if (out.src_ip.is_v4() || out.dst_ip.is_v4()) return ParseVerdict::kIpMapped;
  out.tos = static_cast<uint8_t>(word >> 20);
  out.ip = ip.first(total);
  udp_at = sizeof(Ipv6Header);
  return ParseVerdict::kOk;
}

ParseVerdict parse_transport(Packet& out, uint32_t udp_at) noexcept {
  const std::span<uint8_t> ip = out.ip;
  const auto* udp = reinterpret_cast<const UdpHeader*>(ip.data() + udp_at);
  if (udp->length.value() != ip.size() - udp_at) return ParseVerdict::kUdpLength;
  out.src_port = udp->src_port.value();
  const uint32_t bth_at = udp_at + static_cast<uint32_t>(sizeof(UdpHeader));
  if (ip.size() < bth_at + sizeof(Bth) + kIcrcBytes) return ParseVerdict::kTruncatedBth;
  out.bth = reinterpret_cast<const Bth*>(ip.data() + bth_at);
  if ((out.bth->flags & 0x0F) != 0) return ParseVerdict::kBthVersion;
  out.op = &traits(out.bth->opcode);
  if (!out.op->known) return ParseVerdict::kUnknownOpcode;
  uint8_t* at = ip.data() + bth_at + sizeof(Bth);
  out.header_bytes = bth_at + static_cast<uint32_t>(sizeof(Bth)) + out.op->header_bytes;
  const uint32_t pad = out.bth->flags >> 4 & 3;
  if (ip.size() < out.header_bytes + pad + kIcrcBytes) return ParseVerdict::kTruncatedHeaders;
  if (out.op->deth) out.deth = reinterpret_cast<const Deth*>(std::exchange(at, at + sizeof(Deth)));
  if (out.op->reth) out.reth = reinterpret_cast<const Reth*>(std::exchange(at, at + sizeof(Reth)));
  if (out.op->aeth) out.aeth = reinterpret_cast<const Aeth*>(std::exchange(at, at + sizeof(Aeth)));
  if (out.op->atomic) out.atomic = reinterpret_cast<const AtomicEth*>(at);
  if (out.op->atomic_ack) out.atomic_ack = reinterpret_cast<const AtomicAckEth*>(at);
  if (out.op->imm) out.immediate = reinterpret_cast<const Be32*>(at);
  out.payload = ip.subspan(out.header_bytes, ip.size() - out.header_bytes - pad - kIcrcBytes);
  return ParseVerdict::kOk;
}

}  // namespace

ParseVerdict parse(std::span<uint8_t> frame, Packet& out) noexcept {
  out = Packet{};
  if (frame.size() < sizeof(EthernetHeader)) return ParseVerdict::kTruncatedEthernet;
  const auto* eth = reinterpret_cast<const EthernetHeader*>(frame.data());
  out.src_mac = eth->src;
  out.dst_mac = eth->dst;
  uint16_t type = eth->ether_type.value();
  std::span<uint8_t> ip = frame.subspan(sizeof(EthernetHeader));
  if (type == kEtherTypeVlan) {
    if (ip.size() < sizeof(VlanTag)) return ParseVerdict::kTruncatedEthernet;
    const auto* tag = reinterpret_cast<const VlanTag*>(ip.data());
    out.has_vlan = true;
    out.vlan_tci = tag->tci.value();
    type = tag->ether_type.value();
    ip = ip.subspan(sizeof(VlanTag));
  }
  uint32_t udp_at = 0;
  ParseVerdict v = ParseVerdict::kNotRoce;
  if (type == kEtherTypeIpv4) v = parse_ipv4(ip, out, udp_at);
  if (type == kEtherTypeIpv6) v = parse_ipv6(ip, out, udp_at);
  return v == ParseVerdict::kOk ? parse_transport(out, udp_at) : v;
}

bool icrc_ok(const Packet& p) noexcept {
  const std::span<const uint8_t> covered = p.ip.first(p.ip.size() - kIcrcBytes);
  return icrc(covered, p.header_bytes) == load_icrc(p.ip.data() + covered.size());
}

}  // namespace millrace::roce
