#include "switch/icmp_error.h"

#include <algorithm>

namespace millrace::switching {

namespace {

using roce::EthernetHeader;
using roce::Ipv4Header;
using roce::Ipv6Header;

constexpr size_t kError4Max = 576;              // RFC 1812, 4.3.2.3
constexpr size_t kError6Max = 1280;             // RFC 4443, 2.4 (c)
constexpr uint8_t kInternetworkControl = 0xC0;  // RFC 1812, 4.3.2.5

bool is_error4(uint8_t type) { return type == 3 || type == 4 || type == 5 || type == 11 || type == 12; }

bool is_v4(std::span<const uint8_t> frame, uint32_t at) { return frame[at] >> 4 == 4; }

}  // namespace

bool may_be_reported(std::span<const uint8_t> frame, uint32_t at) noexcept {
  if (reinterpret_cast<const EthernetHeader*>(frame.data())->dst.is_multicast()) return false;
  if (is_v4(frame, at)) {
    const auto* ip = reinterpret_cast<const Ipv4Header*>(frame.data() + at);
    if ((ip->fragment.value() & 0x1FFF) != 0) return false;  // not the first fragment
    if (ip->protocol != roce::kIpProtoIcmp) return true;
    const size_t type = at + (ip->version_ihl & 15u) * 4;
    return type < frame.size() && !is_error4(frame[type]);
  }
  const auto* ip = reinterpret_cast<const Ipv6Header*>(frame.data() + at);
  if (ip->next_header != roce::kIpProtoIcmp6) return true;
  const size_t type = at + sizeof(Ipv6Header);
  return type < frame.size() && frame[type] >= 128 && frame[type] != 137;  // errors, and redirects
}

Frame build_icmp_error(FramePool& pool, const IcmpError& error, std::span<const uint8_t> frame,
                       uint32_t at) noexcept {
  const bool v4 = is_v4(frame, at);
  const size_t ip_bytes = v4 ? sizeof(Ipv4Header) : sizeof(Ipv6Header);
  const size_t overhead = ip_bytes + sizeof(IcmpHeader);
  const size_t packet =
      v4 ? reinterpret_cast<const Ipv4Header*>(frame.data() + at)->total_length.value()
         : sizeof(Ipv6Header) +
               reinterpret_cast<const Ipv6Header*>(frame.data() + at)->payload_length.value();
  Frame answer = Frame::allocate(pool);
  if (!answer) return answer;
  FrameBuffer* b = answer.buffer();
  const size_t room = b->room_bytes - b->offset - sizeof(EthernetHeader) - overhead;
  const size_t quoted = std::min({packet, (v4 ? kError4Max : kError6Max) - overhead, room});
  b->length = static_cast<uint32_t>(sizeof(EthernetHeader) + overhead + quoted);

  auto* eth = reinterpret_cast<EthernetHeader*>(b->data());
  eth->dst = error.to_mac;
  eth->src = error.from_mac;
  eth->ether_type = v4 ? roce::kEtherTypeIpv4 : roce::kEtherTypeIpv6;
  uint8_t* ip_at = b->data() + sizeof(EthernetHeader);
  const std::span<uint8_t> message{ip_at + ip_bytes, sizeof(IcmpHeader) + quoted};
  auto* icmp = reinterpret_cast<IcmpHeader*>(message.data());
  *icmp = {error.type, error.code, uint16_t{0}, uint16_t{0}, uint16_t{0}};
  std::memcpy(icmp + 1, frame.data() + at, quoted);
  if (v4) {
    auto* ip = reinterpret_cast<Ipv4Header*>(ip_at);
    *ip = {
        0x45,      kInternetworkControl, static_cast<uint16_t>(overhead + quoted), uint16_t{0}, uint16_t{0},
        kHopLimit, roce::kIpProtoIcmp};
    std::memcpy(ip->src, error.from.v4(), 4);
    std::memcpy(ip->dst, reinterpret_cast<const Ipv4Header*>(frame.data() + at)->src, 4);
    ip->checksum = roce::internet_checksum({ip_at, sizeof(Ipv4Header)});
    icmp->checksum = roce::internet_checksum(message);
  } else {
    auto* ip = reinterpret_cast<Ipv6Header*>(ip_at);
    *ip = {uint32_t{6} << 28 | uint32_t{kInternetworkControl} << 20, static_cast<uint16_t>(message.size()),
           roce::kIpProtoIcmp6, kHopLimit};
    std::memcpy(ip->src, error.from.bytes.data(), 16);
    std::memcpy(ip->dst, reinterpret_cast<const Ipv6Header*>(frame.data() + at)->src, 16);
    icmp->checksum = icmp6_checksum(*ip, message);
  }
  return answer;
}

}  // namespace millrace::switching
