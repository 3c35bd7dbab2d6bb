// The switch as a plain IP host: answers ARP, IPv6 neighbour solicitations and echo requests for its own
// addresses, by turning the request into the answer where it lies. Pure; called by the worker for frames to
// our MAC address or to a group; allocates nothing.
#pragma once

#include <vector>

#include "roce/frame.h"
#include "roce/headers.h"
#include "switch/counters.h"
#include "switch/fib.h"

namespace millrace::switching {

class LocalEndpoint {
 public:
  LocalEndpoint(const MacAddress& mac, std::vector<InterfaceAddress> addresses);

  // On any interface.
  bool owns(const IpAddress& address) const noexcept { return find(address) != nullptr; }

  // `interface` is where the frame came from: who has an address is answered where the address is, everything
  // else to each address on each interface.
  // kArpReplied, kNdReplied, kEchoReplied: the frame is now the answer, to leave by the port that it came in
  // on. kNotForUs: nothing of ours, the frame is unchanged. Anything else: why it is to be dropped. The frame
  // is whole from its Ethernet header on and has at most one VLAN tag, which the answer keeps. `unicast`: it
  // came to our MAC address; to a group only ARP requests and neighbour solicitations are answered.
  Fate answer(Frame& frame, bool unicast, uint16_t interface) const noexcept;

  // Tells everybody on its interface that an address of addresses() is ours now: a gratuitous ARP request (RFC
  // 5227, 3) or an unsolicited advertisement (RFC 4861, 7.2.6). Else hosts that knew a switch before us would go
  // on sending to its MAC address. None when the pool is empty.
  Frame announcement(const InterfaceAddress& address, FramePool& pool) const noexcept;
  const std::vector<InterfaceAddress>& addresses() const { return addresses_; }

 private:
  const InterfaceAddress* find(const IpAddress& address) const noexcept;
  bool has(const IpAddress& address, uint16_t interface) const noexcept {
    const InterfaceAddress* found = find(address);
    return found != nullptr && found->interface == interface;
  }
  Fate answer_arp(std::span<uint8_t> frame, uint32_t at, uint16_t interface) const noexcept;
  Fate answer_echo4(std::span<uint8_t> frame, uint32_t at) const noexcept;
  Fate answer_ipv6(Frame& frame, uint32_t at, bool unicast, uint16_t interface) const noexcept;
  Fate answer_solicitation(Frame& frame, uint32_t at, std::span<uint8_t> icmp,
                           uint16_t interface) const noexcept;
  bool bad_source(const IpAddress& source) const noexcept;

  MacAddress mac_;
  std::vector<InterfaceAddress> addresses_;  // sorted
};

}  // namespace millrace::switching
