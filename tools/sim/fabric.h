// A described network, built: switches with the shipping pipeline, hosts and their wires; a star, or leaves
// and spines with static routes. Everything random in it comes of one seed.
#pragma once

#include <memory>
#include <vector>

#include "tools/sim/host.h"
#include "tools/sim/lender_node.h"
#include "tools/sim/switch_node.h"

namespace millrace::sim {

// A server that lends memory to the switches' spillways.
struct FabricLender {
  uint64_t bytes = 1 << 20;  // to each of them
  uint8_t reads_max = 16;
  uint32_t ack_every = 1;
  bool v6 = false;  // the family that they speak to it
  LinkConfig link;
};

struct FabricConfig {
  uint64_t seed = 1;
  uint16_t hosts = 2;
  // 0 leaves: a star around one switch. Else host h stands behind leaf h % leaves.
  uint16_t leaves = 0, spines = 0;
  // A tree of aggregation: leaf l's parent is spine l % spines, where there is a core switch, whose children
  // the spines are, else the first spine.
  bool tree = false, core = false, tree_ipv6 = false;
  LinkConfig host_link;
  std::vector<double> host_gbit;     // by host, repeated; empty: host_link's
  LinkConfig trunk;                  // between leaves and spines
  aggregation::EngineConfig engine;  // addresses, MAC and seed are filled in
  uint32_t switch_frames = UINT32_MAX;
  // Every switch's traffic manager and spillway; all ports are as its first.
  std::optional<buffering::Config> buffers;
  // Behind the star's switch, or behind leaf l % leaves. Every switch but the core, to which there is no
  // route from a leaf, borrows of all of them; `remote` lacks their names.
  std::vector<FabricLender> lenders;
  buffering::RemoteStoreConfig remote;
  uint64_t spill_local = 0;
  // Hosts know the addresses they need from the start; else they ask.
  bool warm_neighbours = true;
  std::function<NicFactory(uint16_t host)> nic;  // empty: SoftNic everywhere
};

class Fabric {
 public:
  explicit Fabric(const FabricConfig& config);
  ~Fabric();

  Network& network() { return network_; }
  Time now() const { return network_.now(); }
  uint16_t hosts() const { return static_cast<uint16_t>(hosts_.size()); }
  Host& host(uint16_t i) { return *hosts_[i]; }
  const Host& host(uint16_t i) const { return *hosts_[i]; }
  uint16_t switches() const { return static_cast<uint16_t>(switches_.size()); }  // leaves, spines, core
  SwitchNode& at(uint16_t i) { return *switches_[i]; }
  const SwitchNode& at(uint16_t i) const { return *switches_[i]; }
  uint16_t lenders() const { return static_cast<uint16_t>(lenders_.size()); }
  LenderNode& lender(uint16_t i) { return *lenders_[i]; }
  bool routed() const { return config_.leaves > 0; }
  uint16_t leaf_of(uint16_t host) const { return static_cast<uint16_t>(host % config_.leaves); }
  // Where a group whose switch is `s` joins.
  IpAddress address(uint16_t s, bool v6) const;
  // The wire of a host: from the host, and to it.
  uint32_t uplink(uint16_t h) const { return uplinks_[h]; }
  uint32_t downlink(uint16_t h) const { return uplinks_[h] + 1; }
  uint32_t lender_link(uint16_t i) const { return lender_links_[i]; }  // from the lender; then to it
  bool is_host_link(uint32_t link) const { return link / 2 < hosts_.size(); }
  std::string link_name(uint32_t link) const;

  uint64_t draw() { return random_.next(); }
  Random& random() { return random_; }
  // Another boot: everything of it is new but its addresses; `new_mac` too.
  void restart_switch(uint16_t s, bool new_mac);
  static MacAddress switch_mac(uint16_t s, uint64_t boot = 0) {
    return {{2, 0x53, 0, static_cast<uint8_t>(boot), static_cast<uint8_t>(s), 1}};
  }
  static MacAddress lender_mac(uint16_t i) { return {{2, 0, 0, 2, 0, static_cast<uint8_t>(i)}}; }
  static MacAddress host_mac(uint16_t i) {
    return {{2, 0, 0, 1, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i)}};
  }

 private:
  void add_switch(uint16_t ports, switching::RoutingConfig routing, std::vector<IpAddress> addresses,
                  std::optional<unsigned> parent = {}, bool borrows = true);
  void build_star();
  void build_leaves();
  void add_host(uint16_t h, StackConfig stack, SwitchNode& to, uint16_t port);
  uint16_t lenders_behind(unsigned leaf) const;
  StackConfig lender_stack(uint16_t i) const;
  void add_lenders();

  FabricConfig config_;
  Random random_;
  Network network_;
  std::vector<std::unique_ptr<SwitchNode>> switches_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<LenderNode>> lenders_;
  std::vector<uint32_t> uplinks_, lender_links_;
};

}  // namespace millrace::sim
