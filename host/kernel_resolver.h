// What the kernel knows about reaching a switch: the interface, its addresses and MTU, the route, the
// neighbour's MAC. Asks by rtnetlink, never waits for the network: an unknown neighbour is provoked by a
// datagram and asked for again by the caller. Used by the thread that owns it.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "host/soft_engine.h"

struct mnl_socket;

namespace millrace::host {

struct Interface {
  int index = 0;
  uint32_t mtu = 0;
  MacAddress mac;
  uint64_t speed = 0;  // bit/s; 0: it does not say
};
// Throws millrace::Error when there is no such interface, it is no Ethernet interface, or it is down.
Interface query_interface(const std::string& device);

// Bytes of the largest RoCE packet over its payload: IPv6, UDP, BTH, RETH, immediate, ICRC. The same for
// IPv4, so that one interface has one answer.
inline constexpr uint32_t kRoceOverheadBytes = 40 + 8 + 12 + 16 + 4 + 4;
// The largest RoCE path MTU whose packets fit an interface; throws millrace::Error where not even 256 does.
uint32_t path_mtu_max(const std::string& device, uint32_t interface_mtu);
// "eth0 has an MTU of 1500, but a RoCE path MTU of 4096 needs 4180: ip link set eth0 mtu 4200".
std::string mtu_too_small(const std::string& device, uint32_t interface_mtu, uint32_t path_mtu);

class KernelResolver final : public Resolver {
 public:
  // For one interface; throws millrace::Error.
  explicit KernelResolver(const std::string& device);
  ~KernelResolver() override;

  std::optional<roce::Path> resolve(const IpAddress& to, std::string& error) override;

  // The interface that the route to `to` leaves by; throws millrace::Error where there is none.
  static std::string device_towards(const IpAddress& to);

 private:
  struct Route {
    int interface_index = 0;
    uint8_t type = 0;
    std::optional<IpAddress> source, gateway;
  };
  struct Neighbour {
    uint16_t state = 0;  // 0: the kernel has no entry
    std::optional<MacAddress> mac;
  };
  struct SocketCloser {
    void operator()(mnl_socket* socket) const;
  };

  KernelResolver();
  // 0, or the kernel's errno.
  int ask_route(const IpAddress& to, int interface_index, bool only_if_in_table, Route& route);
  int ask_neighbour(const IpAddress& next_hop, Neighbour& neighbour);
  // Makes the kernel verify an entry that it has not heard of lately; false where it does not let us.
  bool verify_neighbour(const IpAddress& next_hop);
  // Has the kernel send ARP or a neighbour solicitation, by a datagram to the discard port.
  void provoke(const IpAddress& next_hop);
  std::optional<MacAddress> next_hop_mac(const IpAddress& next_hop, std::string& error);

  std::string device_;
  Interface interface_;
  std::unique_ptr<mnl_socket, SocketCloser> socket_;
  uint32_t sequence_ = 0;
  std::map<IpAddress, Time> provoked_;  // when last, by next hop
  std::set<IpAddress> silent_;          // next hops that have not answered at least once
};

}  // namespace millrace::host
