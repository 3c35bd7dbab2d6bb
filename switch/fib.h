// Which way an address lies: the longest matching prefix of the connected subnets and static routes.
// Immutable once built, so any thread may look up; lookup() allocates nothing and costs at most one probe
// sequence for each prefix length that is in use.
//
// Not rte_fib or rte_lpm: the pipeline runs without DPDK in the simulator, the fuzzers and the sanitizers,
// and they must run the very table that ships. Both are also made for a million prefixes that come and go:
// rte_lpm's first level alone takes 64 MiB of hugepages, and each lookup misses the cache. A leaf has some
// dozens of prefixes of four or five lengths, which stay in the first-level cache here.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "roce/types.h"

namespace millrace::switching {

// The bridge of all ports without addresses of their own, where an interface is called by its port.
inline constexpr uint16_t kBridge = UINT16_MAX - 1;

struct Prefix {
  IpAddress address;   // may have bits behind the prefix: an interface's address with its subnet
  uint8_t length = 0;  // as written: of 32 bits for IPv4, of 128 for IPv6

  // "10.77.0.0/24"; std::nullopt for anything else.
  static std::optional<Prefix> parse(std::string_view text);
  std::string to_string() const;
  IpAddress network() const;  // the address without the bits behind the prefix
  bool contains(const IpAddress& other) const;
  bool overlaps(const Prefix& other) const { return contains(other.address) || other.contains(address); }
  // Of IPv4 subnets that have these (not /31, RFC 3021, and /32): the network's own and the broadcast
  // address.
  bool is_network_or_broadcast(const IpAddress& other) const;
};

// An address of the switch's own with the subnet around it, or (no subnet) reached by other ways only.
struct InterfaceAddress {
  Prefix prefix;
  uint16_t interface = kBridge;  // or a routed port's number
  bool has_subnet = true;
};

struct StaticRoute {
  Prefix prefix;
  std::vector<IpAddress> via;  // each in a connected subnet
};

class Fib {
 public:
  static constexpr size_t kWaysMax = 64;  // next hops of one route

  struct Entry {
    Prefix prefix;
    bool connected = false;
    // Connected: where, and our first address there.
    uint16_t interface = kBridge;
    IpAddress own;
    // Otherwise: which of next_hops() to share the flows among.
    std::vector<uint32_t> ways;
  };
  struct NextHop {
    IpAddress address;
    uint16_t interface;
    IpAddress own;  // our address in its subnet
  };

  Fib() : Fib({}, {}) {}
  // Precondition: what check_routing() says.
  Fib(const std::vector<InterfaceAddress>& interfaces, const std::vector<StaticRoute>& routes);

  // nullptr: no route.
  const Entry* lookup(const IpAddress& address) const noexcept;
  const std::vector<Entry>& entries() const { return entries_; }  // connected ones first
  const std::vector<NextHop>& next_hops() const { return next_hops_; }

 private:
  struct Bits {
    uint64_t high = 0, low = 0;  // in memory order
    friend bool operator==(const Bits&, const Bits&) = default;
  };
  struct Level {
    Bits mask;
    uint8_t length;  // of 128 bits
  };
  struct Slot {
    Bits network;
    uint32_t entry = 0;
    uint8_t length = 0;
    bool used = false;
  };
  static Bits bits_of(const IpAddress& address);
  static Level level_of(const Prefix& prefix);
  static size_t hash(const Bits& network, uint8_t length);
  void insert(uint32_t entry);

  std::vector<Entry> entries_;
  std::vector<NextHop> next_hops_;
  std::vector<Level> levels_[2];  // IPv4's and IPv6's, longest first
  std::vector<Slot> slots_;       // open addressing, at most half full
  size_t mask_ = 0;
};

}  // namespace millrace::switching
