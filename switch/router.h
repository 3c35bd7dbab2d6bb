// IP forwarding: a packet to our MAC address but to another's IP address is checked, loses a hop and leaves
// for its next hop, one of several by a hash of its flow. Pure; called by the worker; allocates nothing but
// frames of the pool. What it makes itself (questions to neighbours, ICMP errors) it gives back with the
// interface in Frame::port(), a port's number or kBridge.
#pragma once

#include "switch/counters.h"
#include "switch/l2.h"
#include "switch/local.h"
#include "switch/neighbours.h"

namespace millrace::switching {

struct RoutingConfig {
  std::vector<InterfaceAddress> interfaces;  // all addresses of the switch
  std::vector<StaticRoute> routes;
  NeighbourConfig neighbours;
  uint32_t icmp_errors_pps = 100;     // time exceeded and unreachable, in all
  std::optional<uint64_t> ecmp_seed;  // else of the MAC address: switches in a row must not choose alike

  bool enabled() const {
    return std::any_of(interfaces.begin(), interfaces.end(), [](auto& i) { return i.has_subnet; });
  }
};

class Router {
 public:
  Router(const RoutingConfig& config, const LocalEndpoint& local, uint16_t ports, const MacAddress& mac,
         uint64_t seed, FramePool& pool);

  bool is_routed_port(uint16_t port) const { return routed_[port]; }

  // Whether a frame to our MAC address is to be forwarded: an IP packet, without a VLAN, whose destination is
  // one host, and not us.
  bool wants(const Frame& frame) const noexcept;
  // kRouted: rewritten, to leave by `interface`. kNeighbourHeld: kept until released() has it. Anything else:
  // why it is to be dropped. Precondition: wants().
  Fate route(Frame& frame, Time now, uint16_t& interface) noexcept {
    return route(frame, true, now, interface);
  }

  // For a frame that was routed before and could not be sent: kRouted, or why not. Nothing is held.
  Fate route_again(Frame& frame, Time now, uint16_t& interface) noexcept {
    return route(frame, false, now, interface);
  }
  // A routed port whose link is down is no way for those that have another.
  void set_link(uint16_t port, bool up) noexcept { down_[port] = !up; }

  // For a frame of the engine, addressed to the MAC that the peer's request came from, or to none where we
  // are the one that asks. Where its destination lies behind a route, the route's next hop takes that one's
  // place: when a spine dies, results go by another. kRouted, or kNoRoute or kNeighbourUnresolved: the frame
  // is unchanged, the caller may know better.
  Fate route_own(Frame& frame, Time now, uint16_t& interface) noexcept;

  // Learns from ARP and neighbour discovery. true: an answer to us, with which nothing else is to be done.
  bool hear(const Frame& frame, uint16_t interface, Time now) noexcept;

  void poll(Time now) noexcept;
  Time next_deadline() const noexcept { return neighbours_.next_deadline(); }

  // The next frame that waited for a neighbour and what has become of it; false: none is left. It has its
  // ingress port, until it is kRouted.
  bool next_released(Frame& frame, Fate& fate, Time now, uint16_t& interface) noexcept;
  FrameList& made() { return made_; }

  struct RouteInfo {
    Prefix prefix;
    bool connected;
    uint16_t interface;  // of connected ones
    struct Way {
      IpAddress address;
      uint16_t interface;
      std::string_view state;  // of the neighbour
      uint64_t packets;        // sent to it by any route
    };
    std::vector<Way> ways;
  };
  std::vector<RouteInfo> routes() const;
  const NeighbourTable& neighbours() const { return neighbours_; }
  RouterCounters counters() const;

  // One hop less in an IPv4 header, its checksum by RFC 1624, equation 3.
  static void decrement_ttl(roce::Ipv4Header& ip) noexcept;

 private:
  struct View;  // of a packet's IP header
  Fate route(Frame& frame, bool may_hold, Time now, uint16_t& interface) noexcept;
  Fate check(std::span<const uint8_t> frame, View& view) const noexcept;
  Fate send_to(uint32_t neighbour, Frame& frame, const View& view, bool may_hold,
               uint16_t& interface) noexcept;
  uint64_t flow_hash(std::span<const uint8_t> frame, const View& view) const noexcept;
  uint32_t choose(const Fib::Entry& route, uint64_t hash) noexcept;
  bool usable(uint32_t way) const noexcept {
    const uint16_t interface = neighbours_.interface(way);
    return neighbours_.known(way) && (interface == kBridge || !down_[interface]);
  }
  void hear_arp(std::span<const uint8_t> frame, uint32_t at, uint16_t interface, Time now) noexcept;
  void hear_neighbour(std::span<const uint8_t> frame, std::span<const uint8_t> message, uint16_t interface,
                      Time now) noexcept;
  void hear_address(const IpAddress& address, const MacAddress& mac, uint16_t interface, bool to_us,
                    bool answer, bool override, Time now) noexcept;
  void report(const Frame& frame, const View& view, uint8_t type4, uint8_t code4, uint8_t type6,
              uint8_t code6, Time now) noexcept;
  uint16_t interface_of(uint16_t port) const { return routed_[port] ? port : kBridge; }
  const IpAddress* source_for(const IpAddress& to, uint16_t interface) const noexcept;

  std::vector<InterfaceAddress> interfaces_;
  const LocalEndpoint& local_;
  std::vector<uint8_t> routed_, down_;  // by port
  MacAddress mac_;
  uint64_t ecmp_seed_;
  FramePool& pool_;
  Fib fib_;
  NeighbourTable neighbours_;
  std::vector<uint64_t> sent_;  // by next hop
  TokenBucket icmp_bucket_;
  FrameList made_;
  RouterCounters counters_;
};

}  // namespace millrace::switching
