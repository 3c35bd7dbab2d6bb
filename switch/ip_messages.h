// The small protocols around IP as structs of big-endian bytes: ARP, ICMP, neighbour discovery, and how a
// frame is looked at on the way to them. Header-only, pure; shared by what answers, what routes and what
// resolves.
#pragma once

#include <span>

#include "roce/headers.h"
#include "roce/packet.h"

namespace millrace::switching {

// RFC 826 for Ethernet and IPv4.
struct ArpPacket {
  Be16 hardware, protocol;
  uint8_t hardware_bytes, protocol_bytes;
  Be16 operation;
  MacAddress sender_mac;
  uint8_t sender_ip[4];
  MacAddress target_mac;
  uint8_t target_ip[4];

  bool is_ipv4_over_ethernet() const {
    return hardware.value() == 1 && protocol.value() == roce::kEtherTypeIpv4 && hardware_bytes == 6 &&
           protocol_bytes == 4;
  }
};
static_assert(sizeof(ArpPacket) == 28);
inline constexpr uint16_t kArpRequest = 1, kArpReply = 2;

// RFC 792 and RFC 4443: of echo; errors have zeros in place of identifier and sequence.
struct IcmpHeader {
  uint8_t type, code;
  Be16 checksum, identifier, sequence;
};
static_assert(sizeof(IcmpHeader) == 8);

// RFC 4861, 4.3 and 4.4.
struct NeighbourMessage {
  uint8_t type, code;
  Be16 checksum;
  Be32 flags;
  uint8_t target[16];
};
static_assert(sizeof(NeighbourMessage) == 24);
struct LinkLayerOption {
  uint8_t type, length_8;
  MacAddress mac;
};
static_assert(sizeof(LinkLayerOption) == 8);

inline constexpr uint8_t kSolicitation = 135, kAdvertisement = 136;
inline constexpr uint8_t kSourceLinkLayer = 1, kTargetLinkLayer = 2;
inline constexpr uint32_t kSolicited = 1u << 30, kOverride = 1u << 29;
inline constexpr uint8_t kHopLimit = 64;

// What stands behind a frame's Ethernet header and its tag, if it has one.
struct Network {
  uint16_t type = 0;  // 0: too short to have one
  uint16_t vid = 0;   // VLAN identifier; 0: untagged, or tagged for its priority only
  uint32_t at = 0;    // where the network layer begins
};

// Precondition: `frame` holds an Ethernet header.
inline Network network_of(std::span<const uint8_t> frame) noexcept {
  Network n;
  n.at = sizeof(roce::EthernetHeader);
  n.type = reinterpret_cast<const roce::EthernetHeader*>(frame.data())->ether_type.value();
  if (n.type != roce::kEtherTypeVlan) return n;
  if (frame.size() < n.at + sizeof(roce::VlanTag)) return {0, 0, n.at};
  const auto* tag = reinterpret_cast<const roce::VlanTag*>(frame.data() + n.at);
  n.type = tag->ether_type.value();
  n.vid = tag->tci.value() & 0x0FFF;
  n.at += static_cast<uint32_t>(sizeof(roce::VlanTag));
  return n;
}

// The checksum of `message` under IPv6's pseudo header (RFC 8200, 8.1); 0 when the stored one is right.
inline uint16_t icmp6_checksum(const roce::Ipv6Header& ip, std::span<const uint8_t> message) noexcept {
  const uint32_t pseudo = static_cast<uint32_t>(message.size()) + roce::kIpProtoIcmp6;
  const uint32_t addresses = static_cast<uint16_t>(~roce::internet_checksum({ip.src, 32}));
  return roce::internet_checksum(message, pseudo + addresses);
}

// The message of a neighbour solicitation or advertisement that is valid by RFC 4861, 7.1.1 and 7.1.2, but
// for its options; empty when it is none.
inline std::span<uint8_t> neighbour_message(std::span<uint8_t> frame, const Network& network) noexcept {
  if (network.type != roce::kEtherTypeIpv6 || frame.size() < network.at + sizeof(roce::Ipv6Header)) return {};
  const auto* ip = reinterpret_cast<const roce::Ipv6Header*>(frame.data() + network.at);
  const size_t length = ip->payload_length.value();
  if (ip->next_header != roce::kIpProtoIcmp6 || ip->hop_limit != 255 || length < sizeof(NeighbourMessage) ||
      length > frame.size() - network.at - sizeof(roce::Ipv6Header))
    return {};
  const std::span<uint8_t> message = frame.subspan(network.at + sizeof(roce::Ipv6Header), length);
  const auto* nd = reinterpret_cast<const NeighbourMessage*>(message.data());
  if ((nd->type != kSolicitation && nd->type != kAdvertisement) || nd->code != 0) return {};
  if (icmp6_checksum(*ip, message) != 0) return {};
  return message;
}

}  // namespace millrace::switching
