#include "switch/local.h"

#include <algorithm>
#include <cassert>

#include "switch/ip_messages.h"

namespace millrace::switching {

namespace {

using roce::EthernetHeader;
using roce::Ipv4Header;
using roce::Ipv6Header;

constexpr uint8_t kEcho4Request = 8, kEcho4Reply = 0;
constexpr uint8_t kEcho6Request = 128, kEcho6Reply = 129;
constexpr MacAddress kAllNodesMac{{0x33, 0x33, 0, 0, 0, 1}};
constexpr IpAddress kAllNodes{{0xFF, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}};

void turn_around(uint8_t* frame, const MacAddress& to, const MacAddress& from) noexcept {
  auto* eth = reinterpret_cast<EthernetHeader*>(frame);
  eth->dst = to;
  eth->src = from;
}

}  // namespace

LocalEndpoint::LocalEndpoint(const MacAddress& mac, std::vector<InterfaceAddress> addresses)
    : mac_(mac), addresses_(std::move(addresses)) {
  std::sort(addresses_.begin(), addresses_.end(), [](const InterfaceAddress& a, const InterfaceAddress& b) {
    return a.prefix.address < b.prefix.address;
  });
}

const InterfaceAddress* LocalEndpoint::find(const IpAddress& address) const noexcept {
  const auto at =
      std::lower_bound(addresses_.begin(), addresses_.end(), address,
                       [](const InterfaceAddress& a, const IpAddress& b) { return a.prefix.address < b; });
  return at != addresses_.end() && at->prefix.address == address ? &*at : nullptr;
}

bool LocalEndpoint::bad_source(const IpAddress& source) const noexcept {
  static constexpr uint8_t kLimitedBroadcast[4] = {255, 255, 255, 255};
  const bool zero = source.is_zero() || (source.is_v4() && std::memcmp(source.v4(), "\0\0\0\0", 4) == 0);
  const bool broadcast = source.is_v4() && std::memcmp(source.v4(), kLimitedBroadcast, 4) == 0;
  return zero || broadcast || source.is_multicast() || owns(source);
}

Fate LocalEndpoint::answer(Frame& frame, bool unicast, uint16_t interface) const noexcept {
  const std::span<uint8_t> bytes = frame.bytes();
  const Network network = network_of(bytes);
  if (network.type == roce::kEtherTypeArp) return answer_arp(bytes, network.at, interface);
  if (network.type == roce::kEtherTypeIpv4 && unicast) return answer_echo4(bytes, network.at);
  if (network.type == roce::kEtherTypeIpv6) return answer_ipv6(frame, network.at, unicast, interface);
  return Fate::kNotForUs;
}

Fate LocalEndpoint::answer_arp(std::span<uint8_t> frame, uint32_t at, uint16_t interface) const noexcept {
  if (frame.size() < at + sizeof(ArpPacket)) return Fate::kNotForUs;
  auto* arp = reinterpret_cast<ArpPacket*>(frame.data() + at);
  if (!arp->is_ipv4_over_ethernet() || arp->operation.value() != kArpRequest) return Fate::kNotForUs;
  if (!has(IpAddress::from_v4(arp->target_ip), interface)) return Fate::kNotForUs;
  // A sender address of zero is a probe for duplicates (RFC 5227, 2.1.1): it is answered as any other
  // request, which defends the address.
  if (arp->sender_mac.is_multicast() || owns(IpAddress::from_v4(arp->sender_ip)))
    return Fate::kIpSourceInvalid;
  turn_around(frame.data(), arp->sender_mac, mac_);
  arp->operation = kArpReply;
  arp->target_mac = arp->sender_mac;
  arp->sender_mac = mac_;
  std::swap(arp->target_ip, arp->sender_ip);
  return Fate::kArpReplied;
}

// Precondition: the IPv4 header and its length have been looked at by roce::parse (which said that this is no
// RoCE); options and fragments have not.
Fate LocalEndpoint::answer_echo4(std::span<uint8_t> frame, uint32_t at) const noexcept {
  if (frame.size() < at + sizeof(Ipv4Header)) return Fate::kNotForUs;
  auto* ip = reinterpret_cast<Ipv4Header*>(frame.data() + at);
  const size_t header = (ip->version_ihl & 15u) * 4, total = ip->total_length.value();
  if (header < sizeof(Ipv4Header) || total < header || total > frame.size() - at) return Fate::kNotForUs;
  if (!owns(IpAddress::from_v4(ip->dst))) return Fate::kNotForUs;
  if (header != sizeof(Ipv4Header) || (ip->fragment.value() & 0x3FFF) != 0) return Fate::kUnsupported;
  if (ip->protocol != roce::kIpProtoIcmp || total < header + sizeof(IcmpHeader)) return Fate::kUnsupported;
  if (bad_source(IpAddress::from_v4(ip->src))) return Fate::kIpSourceInvalid;
  const std::span<uint8_t> message = frame.subspan(at + header, total - header);
  auto* icmp = reinterpret_cast<IcmpHeader*>(message.data());
  if (icmp->type != kEcho4Request || icmp->code != 0) return Fate::kUnsupported;
  if (roce::internet_checksum(message) != 0) return Fate::kIcmpChecksum;
  turn_around(frame.data(), reinterpret_cast<EthernetHeader*>(frame.data())->src, mac_);
  icmp->type = kEcho4Reply;
  icmp->checksum = uint16_t{0};
  icmp->checksum = roce::internet_checksum(message);
  std::swap(ip->src, ip->dst);
  ip->ttl = kHopLimit;
  ip->checksum = uint16_t{0};
  ip->checksum = roce::internet_checksum({frame.data() + at, sizeof(Ipv4Header)});
  return Fate::kEchoReplied;
}

Fate LocalEndpoint::answer_ipv6(Frame& frame, uint32_t at, bool unicast, uint16_t interface) const noexcept {
  const std::span<uint8_t> bytes = frame.bytes();
  if (bytes.size() < at + sizeof(Ipv6Header)) return Fate::kNotForUs;
  auto* ip = reinterpret_cast<Ipv6Header*>(bytes.data() + at);
  const size_t length = ip->payload_length.value();
  if (length > bytes.size() - at - sizeof(Ipv6Header)) return Fate::kNotForUs;
  const bool ours = owns(IpAddress::from_v6(ip->dst));
  const Fate otherwise = ours ? Fate::kUnsupported : Fate::kNotForUs;
  if (ip->next_header != roce::kIpProtoIcmp6 || length < sizeof(IcmpHeader)) return otherwise;
  const std::span<uint8_t> message = bytes.subspan(at + sizeof(Ipv6Header), length);
  auto* icmp = reinterpret_cast<IcmpHeader*>(message.data());
  if (icmp->type == kSolicitation) return answer_solicitation(frame, at, message, interface);
  if (!ours || !unicast || icmp->type != kEcho6Request || icmp->code != 0) return otherwise;
  if (bad_source(IpAddress::from_v6(ip->src))) return Fate::kIpSourceInvalid;
  if (icmp6_checksum(*ip, message) != 0) return Fate::kIcmpChecksum;
  turn_around(bytes.data(), reinterpret_cast<EthernetHeader*>(bytes.data())->src, mac_);
  std::swap(ip->src, ip->dst);
  ip->hop_limit = kHopLimit;
  icmp->type = kEcho6Reply;
  icmp->checksum = uint16_t{0};
  icmp->checksum = icmp6_checksum(*ip, message);
  return Fate::kEchoReplied;
}

// RFC 4861, 7.1.1 (what is valid) and 7.2.4 (the answer). An unspecified source is a host that tests whether
// the address is free (RFC 4862, 5.4): all nodes are told that it is not.
Fate LocalEndpoint::answer_solicitation(Frame& frame, uint32_t at, std::span<uint8_t> message,
                                        uint16_t interface) const noexcept {
  const std::span<uint8_t> bytes = frame.bytes();
  auto* ip = reinterpret_cast<Ipv6Header*>(bytes.data() + at);
  if (message.size() < sizeof(NeighbourMessage) || ip->hop_limit != 255) return Fate::kNotForUs;
  auto* nd = reinterpret_cast<NeighbourMessage*>(message.data());
  if (nd->code != 0 || !has(IpAddress::from_v6(nd->target), interface)) return Fate::kNotForUs;
  if (icmp6_checksum(*ip, message) != 0) return Fate::kIcmpChecksum;
  const IpAddress source = IpAddress::from_v6(ip->src);
  const bool probe = source.is_zero();
  if (!probe && bad_source(source)) return Fate::kIpSourceInvalid;

  // The answer may be longer than the question: a probe, for one, carries no option.
  constexpr uint32_t kAnswer = sizeof(NeighbourMessage) + sizeof(LinkLayerOption);
  FrameBuffer* b = frame.buffer();
  const uint32_t total = at + static_cast<uint32_t>(sizeof(Ipv6Header)) + kAnswer;
  if (b->offset + total > b->room_bytes) return Fate::kPoolEmpty;
  b->length = total;
  turn_around(bytes.data(), probe ? kAllNodesMac : reinterpret_cast<EthernetHeader*>(bytes.data())->src,
              mac_);
  ip->version_class_label = uint32_t{6} << 28;
  ip->payload_length = uint16_t{kAnswer};
  if (probe) {
    std::memcpy(ip->dst, kAllNodes.bytes.data(), 16);
  } else {
    std::memcpy(ip->dst, ip->src, 16);
  }
  std::memcpy(ip->src, nd->target, 16);
  nd->type = kAdvertisement;
  nd->flags = kOverride | (probe ? 0 : kSolicited);
  *reinterpret_cast<LinkLayerOption*>(nd + 1) = {kTargetLinkLayer, 1, mac_};
  nd->checksum = uint16_t{0};
  nd->checksum = icmp6_checksum(*ip, {message.data(), kAnswer});
  return Fate::kNdReplied;
}

Frame LocalEndpoint::announcement(const InterfaceAddress& address, FramePool& pool) const noexcept {
  Frame frame = Frame::allocate(pool);
  if (!frame) return frame;
  const IpAddress& ip = address.prefix.address;
  FrameBuffer* b = frame.buffer();
  b->length = static_cast<uint32_t>(sizeof(EthernetHeader)) +
              static_cast<uint32_t>(ip.is_v4() ? sizeof(ArpPacket)
                                               : sizeof(Ipv6Header) + sizeof(NeighbourMessage) +
                                                     sizeof(LinkLayerOption));
  assert(b->offset + b->length <= b->room_bytes);
  std::memset(b->data(), 0, b->length);
  auto* eth = reinterpret_cast<EthernetHeader*>(b->data());
  eth->dst = ip.is_v4() ? kBroadcastMac : kAllNodesMac;
  eth->src = mac_;
  eth->ether_type = ip.is_v4() ? roce::kEtherTypeArp : roce::kEtherTypeIpv6;
  if (ip.is_v4()) {
    auto* arp = reinterpret_cast<ArpPacket*>(eth + 1);
    *arp = {uint16_t{1}, roce::kEtherTypeIpv4, 6, 4, kArpRequest, mac_, {}, {}, {}};
    std::memcpy(arp->sender_ip, ip.v4(), 4);
    std::memcpy(arp->target_ip, ip.v4(), 4);
    return frame;
  }
  auto* header = reinterpret_cast<Ipv6Header*>(eth + 1);
  auto* message = reinterpret_cast<NeighbourMessage*>(header + 1);
  constexpr uint16_t kMessageBytes = sizeof(NeighbourMessage) + sizeof(LinkLayerOption);
  header->version_class_label = uint32_t{6} << 28;
  header->payload_length = kMessageBytes;
  header->next_header = roce::kIpProtoIcmp6;
  header->hop_limit = 255;
  std::memcpy(header->src, ip.bytes.data(), 16);
  std::memcpy(header->dst, kAllNodes.bytes.data(), 16);
  message->type = kAdvertisement;
  message->flags = kOverride;
  std::memcpy(message->target, ip.bytes.data(), 16);
  *reinterpret_cast<LinkLayerOption*>(message + 1) = {kTargetLinkLayer, 1, mac_};
  message->checksum = icmp6_checksum(*header, {reinterpret_cast<uint8_t*>(message), kMessageBytes});
  return frame;
}

}  // namespace millrace::switching
