#include "tools/sim/fabric.h"

namespace millrace::sim {

namespace {

IpAddress ip(const std::string& text) { return IpAddress::parse(text).value(); }
std::string hex(unsigned v) {
  char text[9];
  std::snprintf(text, sizeof(text), "%x", v);
  return text;
}
switching::InterfaceAddress on(uint16_t interface, const std::string& text, bool subnet = true) {
  return {switching::Prefix::parse(text).value(), interface, subnet};
}
switching::StaticRoute route(const std::string& prefix, const std::vector<std::string>& via) {
  switching::StaticRoute r{switching::Prefix::parse(prefix).value(), {}};
  for (const std::string& v : via) r.via.push_back(ip(v));
  return r;
}

// The wire between leaf l and spine s, of `spines`: IPv4 /31 and IPv6 /127.
std::string link4(unsigned l, unsigned s, unsigned spines, bool at_spine) {
  const unsigned n = 2 * (l * spines + s) + at_spine;
  return "10.255." + std::to_string(n >> 8) + "." + std::to_string(n & 255);
}
std::string link6(unsigned l, unsigned s, bool at_spine) {
  return "fd00:" + hex(l) + ":" + hex(s) + "::" + (at_spine ? "1" : "0");
}
// The wire between spine s and the core.
std::string core4(unsigned s, bool at_core) { return "10.254.0." + std::to_string(2 * s + at_core); }
std::string core6(unsigned s, bool at_core) { return "fd01:" + hex(s) + "::" + (at_core ? "1" : "0"); }
std::string leaf_net4(unsigned l) { return "10.77." + std::to_string(l + 1) + "."; }
std::string leaf_net6(unsigned l) { return "fd77:" + hex(l + 1) + "::"; }

// Spines' own addresses stand on no wire; others have routes to them.
std::string spine4(unsigned s) { return "10.88.0." + std::to_string(s + 1); }
std::string spine6(unsigned s) { return "fd88::" + hex(s + 1); }

}  // namespace

Fabric::Fabric(const FabricConfig& config) : config_(config), random_(config.seed), network_(random_.next()) {
  if (config_.leaves == 0)
    build_star();
  else
    build_leaves();
}

// Hosts and switches give their last frames back while the network is still there.
Fabric::~Fabric() {
  hosts_.clear();
  lenders_.clear();
  switches_.clear();
}

// `parent`: which spine, or the core behind them.
void Fabric::add_switch(uint16_t ports, switching::RoutingConfig routing, std::vector<IpAddress> addresses,
                        std::optional<unsigned> parent, bool borrows) {
  switching::PipelineConfig c;
  c.ports = ports;
  c.engine = config_.engine;
  c.engine.addresses = std::move(addresses);
  c.engine.mac = switch_mac(static_cast<uint16_t>(switches_.size()));
  c.engine.seed = random_.next();
  if (config_.tree && parent) c.engine.parent = ip(config_.tree_ipv6 ? spine6(*parent) : spine4(*parent));
  c.routing = std::move(routing);
  if (c.routing.enabled()) {
    c.engine.addresses.clear();
    for (const auto& i : c.routing.interfaces) c.engine.addresses.push_back(i.prefix.address);
  }
  if (config_.buffers) {
    c.buffers = config_.buffers;
    const buffering::PortConfig port = config_.buffers->ports.at(0);
    c.buffers->ports.assign(ports, port);
    c.buffers->mac = c.engine.mac;
    c.buffers->seed = c.engine.seed;
  }
  if (borrows && !config_.lenders.empty()) {
    c.remote = config_.remote;
    c.spill_local = config_.spill_local;
    for (uint16_t i = 0; i < config_.lenders.size(); i++) {
      const StackConfig stack = lender_stack(i);
      c.remote->lenders.push_back({config_.lenders[i].v6 ? stack.ip6 : stack.ip4});
    }
  }
  switches_.push_back(std::make_unique<SwitchNode>(c, config_.switch_frames));
  network_.add(*switches_.back());
}

void Fabric::add_host(uint16_t h, StackConfig stack, SwitchNode& to, uint16_t port) {
  HostConfig c;
  c.stack = std::move(stack);
  c.stack.mac = host_mac(h);
  if (config_.warm_neighbours) {
    const MacAddress& mac = to.config().engine.mac;
    for (const IpAddress& a : to.config().engine.addresses) c.stack.known[a] = mac;
  }
  c.seed = random_.next();
  c.first_psn = config_.engine.first_psn;
  LinkConfig link = config_.host_link;
  if (!config_.host_gbit.empty()) link.gbit = config_.host_gbit[h % config_.host_gbit.size()];
  c.gbit = link.gbit;
  if (config_.nic) c.nic = config_.nic(h);
  hosts_.push_back(std::make_unique<Host>(c));
  network_.add(*hosts_.back());
  uplinks_.push_back(network_.wire(*hosts_.back(), 0, to, port, link));
}

uint16_t Fabric::lenders_behind(unsigned leaf) const {
  uint16_t n = 0;
  for (size_t i = 0; i < config_.lenders.size(); i++) n += config_.leaves == 0 || i % config_.leaves == leaf;
  return n;
}

StackConfig Fabric::lender_stack(uint16_t i) const {
  StackConfig stack;
  stack.mac = lender_mac(i);
  if (config_.leaves == 0) {
    stack.ip4 = ip("10.77.0." + std::to_string(201 + i));
    stack.ip6 = ip("fd77::2:" + hex(i + 1));
    return stack;
  }
  const unsigned l = i % config_.leaves;
  stack.ip4 = ip(leaf_net4(l) + std::to_string(201 + i)), stack.prefix4 = 24;
  stack.ip6 = ip(leaf_net6(l) + hex(0x201 + i));
  stack.gateway4 = ip(leaf_net4(l) + "1"), stack.gateway6 = ip(leaf_net6(l) + "1");
  return stack;
}

// At the last ports of their switches. What they draw is apart from what the others do.
void Fabric::add_lenders() {
  Random random(config_.seed ^ 0x6c656e64);
  for (uint16_t i = 0; i < config_.lenders.size(); i++) {
    const FabricLender& of = config_.lenders[i];
    const unsigned l = config_.leaves == 0 ? 0 : i % config_.leaves;
    LenderConfig c;
    c.seed = random.next(), c.ca_guid = random.next();
    c.bytes = of.bytes, c.reads_max = of.reads_max, c.ack_every = of.ack_every;
    lenders_.push_back(std::make_unique<LenderNode>(lender_stack(i), c, of.v6));
    network_.add(*lenders_.back());
    const unsigned before = config_.leaves == 0 ? i : i / config_.leaves;
    const auto port = static_cast<uint16_t>(switches_[l]->config().ports - lenders_behind(l) + before);
    lender_links_.push_back(network_.wire(*lenders_.back(), 0, *switches_[l], port, of.link));
  }
}

void Fabric::build_star() {
  switching::RoutingConfig r;
  if (!config_.lenders.empty())
    r.interfaces = {on(switching::kBridge, "10.77.0.100/16"), on(switching::kBridge, "fd77::100/64")};
  add_switch(static_cast<uint16_t>(config_.hosts + lenders_behind(0)), r,
             {ip("10.77.0.100"), ip("fd77::100")});
  for (uint16_t h = 0; h < config_.hosts; h++) {
    StackConfig stack;
    // The switch has .100.
    const unsigned far = h < 90 ? 0 : h - 90u;
    stack.ip4 = h < 90 ? ip("10.77.0." + std::to_string(h + 1))
                       : ip("10.77." + std::to_string(1 + far / 200) + "." + std::to_string(far % 200 + 1));
    stack.ip6 = h < 90 ? ip("fd77::" + std::to_string(h + 1)) : ip("fd77::1:" + hex(far + 1));
    add_host(h, stack, *switches_[0], h);
  }
  add_lenders();
}

void Fabric::build_leaves() {
  const unsigned leaves = config_.leaves, spines = config_.spines;
  const auto down = static_cast<uint16_t>((config_.hosts + leaves - 1) / leaves);  // host ports of a leaf
  for (unsigned l = 0; l < leaves; l++) {
    switching::RoutingConfig r;
    r.interfaces = {on(switching::kBridge, leaf_net4(l) + "1/24"),
                    on(switching::kBridge, leaf_net6(l) + "1/64")};
    std::vector<std::string> via4, via6;
    for (unsigned s = 0; s < spines; s++) {
      const auto port = static_cast<uint16_t>(down + s);
      r.interfaces.push_back(on(port, link4(l, s, spines, false) + "/31"));
      r.interfaces.push_back(on(port, link6(l, s, false) + "/127"));
      via4.push_back(link4(l, s, spines, true)), via6.push_back(link6(l, s, true));
      r.routes.push_back(route(spine4(s) + "/32", {via4.back()}));
      r.routes.push_back(route(spine6(s) + "/128", {via6.back()}));
    }
    for (unsigned other = 0; other < leaves; other++) {
      if (other == l) continue;
      r.routes.push_back(route(leaf_net4(other) + "0/24", via4));
      r.routes.push_back(route(leaf_net6(other) + "/64", via6));
    }
    add_switch(static_cast<uint16_t>(down + spines + lenders_behind(l)), r, {},
               config_.core ? l % spines : 0);
  }
  for (unsigned s = 0; s < spines; s++) {
    switching::RoutingConfig r;
    r.interfaces = {on(switching::kBridge, spine4(s) + "/32", false),
                    on(switching::kBridge, spine6(s) + "/128", false)};
    for (unsigned l = 0; l < leaves; l++) {
      r.interfaces.push_back(on(static_cast<uint16_t>(l), link4(l, s, spines, true) + "/31"));
      r.interfaces.push_back(on(static_cast<uint16_t>(l), link6(l, s, true) + "/127"));
      r.routes.push_back(route(leaf_net4(l) + "0/24", {link4(l, s, spines, false)}));
      r.routes.push_back(route(leaf_net6(l) + "/64", {link6(l, s, false)}));
    }
    if (config_.core) {
      r.interfaces.push_back(on(static_cast<uint16_t>(leaves), core4(s, false) + "/31"));
      r.interfaces.push_back(on(static_cast<uint16_t>(leaves), core6(s, false) + "/127"));
      r.routes.push_back(route(spine4(spines) + "/32", {core4(s, true)}));
      r.routes.push_back(route(spine6(spines) + "/128", {core6(s, true)}));
    }
    const std::optional<unsigned> parent = config_.core ? std::optional(spines) : std::nullopt;
    add_switch(static_cast<uint16_t>(leaves + config_.core), r, {}, parent);
  }
  if (config_.core) {
    switching::RoutingConfig r;
    r.interfaces = {on(switching::kBridge, spine4(spines) + "/32", false),
                    on(switching::kBridge, spine6(spines) + "/128", false)};
    for (unsigned s = 0; s < spines; s++) {
      r.interfaces.push_back(on(static_cast<uint16_t>(s), core4(s, true) + "/31"));
      r.interfaces.push_back(on(static_cast<uint16_t>(s), core6(s, true) + "/127"));
      r.routes.push_back(route(spine4(s) + "/32", {core4(s, false)}));
      r.routes.push_back(route(spine6(s) + "/128", {core6(s, false)}));
    }
    add_switch(static_cast<uint16_t>(spines), r, {}, {}, false);
  }
  for (uint16_t h = 0; h < config_.hosts; h++) {
    const unsigned l = h % leaves, k = h / leaves;
    StackConfig stack;
    stack.ip4 = ip(leaf_net4(l) + std::to_string(10 + k)), stack.prefix4 = 24;
    stack.ip6 = ip(leaf_net6(l) + hex(10 + k));
    stack.gateway4 = ip(leaf_net4(l) + "1"), stack.gateway6 = ip(leaf_net6(l) + "1");
    add_host(h, stack, *switches_[l], static_cast<uint16_t>(k));
  }
  for (unsigned l = 0; l < leaves; l++)
    for (unsigned s = 0; s < spines; s++)
      network_.wire(*switches_[l], static_cast<uint16_t>(down + s), *switches_[leaves + s],
                    static_cast<uint16_t>(l), config_.trunk);
  for (unsigned s = 0; config_.core && s < spines; s++)
    network_.wire(*switches_[leaves + s], static_cast<uint16_t>(leaves), *switches_.back(),
                  static_cast<uint16_t>(s), config_.trunk);
  add_lenders();
  for (auto& s : switches_)
    s->act([](switching::Pipeline& p, Time now, FrameList& out) { p.announce(now, out); });
}

IpAddress Fabric::address(uint16_t s, bool v6) const {
  if (!routed()) return switches_[s]->config().engine.addresses[v6 ? 1 : 0];
  return switches_[s]->config().routing.interfaces[v6 ? 1 : 0].prefix.address;
}

std::string Fabric::link_name(uint32_t link) const {
  auto name = [&](const Node& n) {
    for (size_t i = 0; i < hosts_.size(); i++)
      if (hosts_[i].get() == &n) return "host" + std::to_string(i);
    for (size_t i = 0; i < lenders_.size(); i++)
      if (lenders_[i].get() == &n) return "lender" + std::to_string(i);
    for (size_t i = 0; i < switches_.size(); i++)
      if (switches_[i].get() == &n)
        return !routed()                             ? std::string("switch")
               : i < config_.leaves                  ? "leaf" + std::to_string(i)
               : i < config_.leaves + config_.spines ? "spine" + std::to_string(i - config_.leaves)
                                                     : std::string("core");
    return std::string("?");
  };
  return name(network_.source(link)) + ">" + name(network_.destination(link));
}

void Fabric::restart_switch(uint16_t s, bool new_mac) {
  SwitchNode& node = *switches_[s];
  node.restart(random_.next(), new_mac ? switch_mac(s, node.boots()) : node.config().engine.mac);
}

}  // namespace millrace::sim
