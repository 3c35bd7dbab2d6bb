#include "tools/sim/stack.h"

#include <algorithm>
#include <cstring>

namespace millrace::sim {

namespace {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr Time kAskEvery = milliseconds(200);  // an unanswered question
constexpr Time kFresh = seconds(5);  // after that, an answer is asked for again while it is still used

uint16_t be16(std::span<const uint8_t> b, size_t at) { return static_cast<uint16_t>(b[at] << 8 | b[at + 1]); }
void append(Bytes& b, std::span<const uint8_t> more) { b.insert(b.end(), more.begin(), more.end()); }
void append16(Bytes& b, unsigned v) {
  b.push_back(static_cast<uint8_t>(v >> 8));
  b.push_back(static_cast<uint8_t>(v));
}
MacAddress mac_at(std::span<const uint8_t> b, size_t at) {
  MacAddress m;
  std::copy_n(b.begin() + static_cast<ptrdiff_t>(at), 6, m.bytes.begin());
  return m;
}
bool same_subnet(const IpAddress& a, const IpAddress& b, unsigned bits) {
  for (unsigned i = 0; i < bits; i++)
    if ((a.bytes[i / 8] ^ b.bytes[i / 8]) >> (7 - i % 8) & 1) return false;
  return true;
}
uint16_t checksum(std::span<const uint8_t> b, uint64_t sum) {
  for (size_t i = 0; i < b.size(); i++) sum += i % 2 == 0 ? uint64_t{b[i]} << 8 : b[i];
  while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<uint16_t>(~sum);
}
// Of the pseudo header of RFC 8200, 8.1.
uint64_t pseudo_sum(const IpAddress& from, const IpAddress& to, size_t bytes) {
  uint64_t sum = bytes + 58;
  for (size_t i = 0; i < 16; i += 2) sum += be16(from.bytes, i) + uint64_t{be16(to.bytes, i)};
  return sum;
}

}  // namespace

Bytes Stack::arp(uint16_t operation, const MacAddress& to, const MacAddress& target_mac,
                 const IpAddress& target) const {
  Bytes b;
  append(b, to.bytes);
  append(b, config_.mac.bytes);
  append(b, std::array<uint8_t, 8>{0x08, 0x06, 0, 1, 0x08, 0, 6, 4});
  append16(b, operation);
  append(b, config_.mac.bytes);
  append(b, {config_.ip4.v4(), 4});
  append(b, target_mac.bytes);
  append(b, {target.v4(), 4});
  return b;
}

Bytes Stack::neighbour_message(uint8_t type, uint32_t flags, const IpAddress& target, uint8_t option,
                               const IpAddress& to, const MacAddress& to_mac) const {
  Bytes m = {type, 0, 0, 0, static_cast<uint8_t>(flags >> 24), 0, 0, 0};
  append(m, target.bytes);
  m.push_back(option), m.push_back(1);
  append(m, config_.mac.bytes);
  const uint16_t sum = checksum(m, pseudo_sum(config_.ip6, to, m.size()));
  m[2] = static_cast<uint8_t>(sum >> 8), m[3] = static_cast<uint8_t>(sum);
  Bytes b;
  append(b, to_mac.bytes);
  append(b, config_.mac.bytes);
  append(b, std::array<uint8_t, 6>{0x86, 0xDD, 0x60, 0, 0, 0});
  append16(b, static_cast<unsigned>(m.size()));
  append(b, std::array<uint8_t, 2>{58, 255});
  append(b, config_.ip6.bytes);
  append(b, to.bytes);
  append(b, m);
  return b;
}

void Stack::ask(const IpAddress& ip) {
  if (ip.is_v4()) {
    out_.push_back(arp(1, kBroadcastMac, {}, ip));
    return;
  }
  // To the solicited-node group of the address, RFC 4291, 2.7.1.
  IpAddress group = *IpAddress::parse("ff02::1:ff00:0");
  std::copy_n(ip.bytes.begin() + 13, 3, group.bytes.begin() + 13);
  const MacAddress mac{{0x33, 0x33, 0xff, ip.bytes[13], ip.bytes[14], ip.bytes[15]}};
  out_.push_back(neighbour_message(135, 0, ip, 1, group, mac));
}

std::optional<Resolved> Stack::resolve(const IpAddress& to, Time now) {
  const IpAddress& own = to.is_v4() ? config_.ip4 : config_.ip6;
  const bool near = same_subnet(own, to, to.is_v4() ? 96u + config_.prefix4 : config_.prefix6);
  const auto& gateway = to.is_v4() ? config_.gateway4 : config_.gateway6;
  if (!near && !gateway) return std::nullopt;
  const IpAddress& hop = near ? to : *gateway;
  Neighbour& n = neighbours_[hop];
  const bool stale = !n.mac || now - n.heard >= kFresh;
  if (stale && (n.asked == Time{} || now - n.asked >= kAskEvery)) {
    n.asked = std::max(now, Time(1));
    ask(hop);
  }
  if (!n.mac) return std::nullopt;
  return Resolved{*n.mac, own};
}

void Stack::hear(const IpAddress& ip, const MacAddress& mac, bool may_add, Time now) {
  const auto found = neighbours_.find(ip);
  if (found == neighbours_.end() && !may_add) return;
  neighbours_[ip].mac = mac;
  neighbours_[ip].heard = now;
}

bool Stack::receive_arp(std::span<const uint8_t> f, Time now) {
  if (f.size() < 42 || be16(f, 14) != 1 || be16(f, 16) != 0x0800) return true;
  const IpAddress sender = IpAddress::from_v4(f.data() + 28), target = IpAddress::from_v4(f.data() + 38);
  const bool ours = target == config_.ip4;
  if (sender != config_.ip4 && !sender.is_zero()) hear(sender, mac_at(f, 22), ours, now);
  if (ours && be16(f, 20) == 1) out_.push_back(arp(2, mac_at(f, 22), mac_at(f, 22), sender));
  return true;
}

bool Stack::receive_icmp6(std::span<const uint8_t> f, Time now) {
  if (f.size() < 78 || (f[54] != 135 && f[54] != 136)) return false;
  const IpAddress from = IpAddress::from_v6(f.data() + 22), to = IpAddress::from_v6(f.data() + 38),
                  target = IpAddress::from_v6(f.data() + 62);
  if (checksum(f.subspan(54), pseudo_sum(from, to, f.size() - 54)) != 0) return true;
  const bool option = f.size() >= 86 && f[79] == 1;
  if (f[54] == 136) {
    if (option && f[78] == 2) hear(target, mac_at(f, 80), false, now);
    return true;
  }
  if (target != config_.ip6) return true;
  if (option && f[78] == 1) hear(from, mac_at(f, 80), true, now);
  out_.push_back(neighbour_message(136, 0x60000000, target, 2, from, mac_at(f, 6)));
  return true;
}

bool Stack::receive(std::span<const uint8_t> f, Time now) {
  if (f.size() < 14) return true;
  const uint16_t type = be16(f, 12);
  if (type == 0x0806) return receive_arp(f, now);
  if (type == 0x86DD && f.size() >= 58 && f[20] == 58) return receive_icmp6(f, now);
  return false;
}

void Stack::poll(FrameSink& out) {
  for (const Bytes& b : out_) out.send(b);
  out_.clear();
}

}  // namespace millrace::sim
