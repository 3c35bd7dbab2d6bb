#include "buffering/look.h"

#include "roce/packet.h"

namespace millrace::buffering {

namespace {

// Opcodes of connected transports (RC, UC, XRC) that carry requests or responses with data; IBA table 38.
Look::Kind kind_of(uint8_t opcode) {
  if (opcode == static_cast<uint8_t>(roce::Opcode::kCnp)) return Look::Kind::kCnp;
  const uint8_t transport = opcode >> 5, operation = opcode & 0x1F;
  if (transport != 0 && transport != 1 && transport != 5) return Look::Kind::kOther;
  const bool acknowledgement = operation == static_cast<uint8_t>(roce::Opcode::kAcknowledge) ||
                               operation == static_cast<uint8_t>(roce::Opcode::kAtomicAcknowledge);
  return acknowledgement ? Look::Kind::kAck : Look::Kind::kData;
}

}  // namespace

Look look(const Frame& frame) noexcept {
  using namespace roce;
  Look l;
  const uint8_t* bytes = frame.buffer()->data();
  const size_t length = frame.buffer()->length;
  size_t at = sizeof(EthernetHeader);
  if (length < at + sizeof(Ipv4Header)) return l;
  uint16_t type = reinterpret_cast<const EthernetHeader*>(bytes)->ether_type.value();
  if (type == kEtherTypeVlan) {
    type = reinterpret_cast<const VlanTag*>(bytes + at)->ether_type.value();
    at += sizeof(VlanTag);
  }
  size_t udp_at = 0;
  if (type == kEtherTypeIpv4 && length >= at + sizeof(Ipv4Header)) {
    const auto& ip = *reinterpret_cast<const Ipv4Header*>(bytes + at);
    l.tos = ip.tos;
    l.ip_at = static_cast<uint8_t>(at);
    // Options and fragments are no RoCEv2 (annex A17).
    if (ip.version_ihl == 0x45 && ip.protocol == kIpProtoUdp && (ip.fragment.value() & 0x3FFF) == 0)
      udp_at = at + sizeof(Ipv4Header);
  } else if (type == kEtherTypeIpv6 && length >= at + sizeof(Ipv6Header)) {
    const auto& ip = *reinterpret_cast<const Ipv6Header*>(bytes + at);
    l.tos = static_cast<uint8_t>(ip.version_class_label.value() >> 20);
    l.ip_at = static_cast<uint8_t>(at);
    l.v6 = true;
    if (ip.next_header == kIpProtoUdp) udp_at = at + sizeof(Ipv6Header);
  }
  if (udp_at == 0 || length < udp_at + sizeof(UdpHeader) + sizeof(Bth)) return l;
  if (reinterpret_cast<const UdpHeader*>(bytes + udp_at)->dst_port.value() != kRoceUdpPort) return l;
  const auto& bth = *reinterpret_cast<const Bth*>(bytes + udp_at + sizeof(UdpHeader));
  l.kind = kind_of(bth.opcode);
  l.qpn = bth.dest_qp.value();
  return l;
}

IpAddress source_of(const Frame& frame, const Look& l) noexcept {
  const uint8_t* ip = frame.buffer()->data() + l.ip_at;
  return l.v6 ? IpAddress::from_v6(reinterpret_cast<const roce::Ipv6Header*>(ip)->src)
              : IpAddress::from_v4(reinterpret_cast<const roce::Ipv4Header*>(ip)->src);
}

IpAddress destination_of(const Frame& frame, const Look& l) noexcept {
  const uint8_t* ip = frame.buffer()->data() + l.ip_at;
  return l.v6 ? IpAddress::from_v6(reinterpret_cast<const roce::Ipv6Header*>(ip)->dst)
              : IpAddress::from_v4(reinterpret_cast<const roce::Ipv4Header*>(ip)->dst);
}

bool mark_ce(Frame& frame, Look& l) noexcept {
  if (l.ip_at == 0 || l.ecn() == kNotEct || l.ecn() == kCe) return false;
  assert(frame.buffer()->owners == 1);
  uint8_t* bytes = frame.buffer()->data() + l.ip_at;
  if (l.v6) {
    auto& ip = *reinterpret_cast<roce::Ipv6Header*>(bytes);
    ip.version_class_label = ip.version_class_label.value() | uint32_t{kCe} << 20;
  } else {
    auto& ip = *reinterpret_cast<roce::Ipv4Header*>(bytes);
    const uint16_t before = static_cast<uint16_t>(ip.version_ihl << 8 | ip.tos);
    ip.tos |= kCe;
    const uint16_t after = static_cast<uint16_t>(ip.version_ihl << 8 | ip.tos);
    ip.checksum = roce::updated_checksum(ip.checksum.value(), before, after);
  }
  l.tos |= kCe;
  return true;
}

}  // namespace millrace::buffering
