// What a host's operating system does beside its RDMA NIC: answers ARP and neighbour solicitations for its
// addresses, and asks for others'. Written from RFC 826, 4861 and 5227, not from switch/'s code.
#pragma once

#include <map>
#include <optional>

#include "tools/sim/nic.h"

namespace millrace::sim {

struct StackConfig {
  MacAddress mac;
  IpAddress ip4, ip6;
  uint8_t prefix4 = 16, prefix6 = 64;           // of the subnet that needs no gateway
  std::optional<IpAddress> gateway4, gateway6;  // to everything else
  // Addresses known from the start, as from an earlier conversation. A gratuitous announcement changes them.
  std::map<IpAddress, MacAddress> known;
};

class Stack {
 public:
  explicit Stack(const StackConfig& config) : config_(config) {
    for (const auto& [ip, mac] : config_.known) neighbours_[ip] = {mac, Time{}, Time{}};
  }

  // True: the frame was the stack's. Answers leave at the next poll().
  bool receive(std::span<const uint8_t> frame, Time now);
  // nullopt: asked for; try again later.
  std::optional<Resolved> resolve(const IpAddress& to, Time now);
  // All that it has learned: it asks again.
  void forget() { neighbours_.clear(); }
  void poll(FrameSink& out);
  bool wants_to_send() const { return !out_.empty(); }

 private:
  using Bytes = std::vector<uint8_t>;
  struct Neighbour {
    std::optional<MacAddress> mac;
    Time asked{};
    Time heard{};
  };
  void hear(const IpAddress& ip, const MacAddress& mac, bool may_add, Time now);
  bool receive_arp(std::span<const uint8_t> f, Time now);
  bool receive_icmp6(std::span<const uint8_t> f, Time now);
  void ask(const IpAddress& ip);
  Bytes arp(uint16_t operation, const MacAddress& to, const MacAddress& target_mac,
            const IpAddress& target) const;
  Bytes neighbour_message(uint8_t type, uint32_t flags, const IpAddress& target, uint8_t option,
                          const IpAddress& to, const MacAddress& to_mac) const;

  StackConfig config_;
  std::map<IpAddress, Neighbour> neighbours_;
  std::vector<Bytes> out_;
};

}  // namespace millrace::sim
