#include "switch/config_routing.h"

#include <algorithm>

namespace millrace::switching {

namespace {

constexpr size_t kAddressesMax = 64;  // of one interface
constexpr size_t kRoutesMax = 4096;

// The elements of a list of texts, or a list of one.
std::vector<std::string> texts_of(YamlMap& map, const std::string& key, size_t max, const char* what) {
  std::vector<std::string> all;
  map.texts(key, all);
  if (all.empty() || all.size() > max) map.fail(key, "must be 1 … " + std::to_string(max) + " " + what);
  return all;
}

[[noreturn]] void fail_element(YamlMap& map, const std::string& key, size_t i, const std::string& what) {
  map.fail_at(map.get(key)[i], map.path_of(key) + ": " + what);
}

// Whether an address can be one host's, as far as it tells by itself.
bool can_be_a_host(const IpAddress& ip) {
  static const Prefix kNoHosts[] = {*Prefix::parse("0.0.0.0/8"), *Prefix::parse("127.0.0.0/8"),
                                    *Prefix::parse("240.0.0.0/4"), *Prefix::parse("::/127")};
  return !ip.is_multicast() && std::none_of(std::begin(kNoHosts), std::end(kNoHosts),
                                            [&](const Prefix& p) { return p.contains(ip); });
}

std::string name_of(uint16_t interface, const Config& config) {
  if (interface == kBridge) return "the bridge";
  // The port that is being read is not in the list yet.
  return interface < config.ports.size() ? "port " + config.ports[interface].name : "this port";
}

InterfaceAddress parse_address(YamlMap& map, size_t i, const std::string& text, uint16_t interface) {
  const auto plain = IpAddress::parse(text);
  const auto prefix = Prefix::parse(text);
  const bool port = interface != kBridge;
  if ((!plain && !prefix) || (plain && port))
    fail_element(map, "addresses", i,
                 "'" + text + "' is not an IPv4 or IPv6 host address " +
                     (port ? "with its prefix length, as 10.255.0.0/31 or fd00::/127"
                           : "(as 10.77.0.100), with or without a prefix length (/1 … /32, /128 of IPv6)"));
  InterfaceAddress a{prefix ? *prefix : Prefix{*plain, 0}, interface, prefix.has_value()};
  const IpAddress& ip = a.prefix.address;
  const bool host = can_be_a_host(ip);
  if (!host || (prefix && (prefix->length == 0 || prefix->is_network_or_broadcast(ip))))
    fail_element(
        map, "addresses", i,
        "'" + text + "' is not an address that a host can have" +
            (prefix && host ? ": choose another in " + Prefix{prefix->network(), prefix->length}.to_string()
                            : ""));
  return a;
}

// Two interfaces may not claim the same addresses, nor one interface in two ways.
void check_overlap(YamlMap& map, size_t i, const InterfaceAddress& a, const Config& config) {
  for (const InterfaceAddress& other : config.routing.interfaces) {
    if (other.prefix.address == a.prefix.address)
      fail_element(map, "addresses", i, "'" + a.prefix.address.to_string() + "' is given twice");
    if (!other.has_subnet || !a.has_subnet || !other.prefix.overlaps(a.prefix)) continue;
    if (other.interface == a.interface && other.prefix.length == a.prefix.length) continue;
    fail_element(map, "addresses", i,
                 a.prefix.to_string() + " overlaps " + other.prefix.to_string() + " of " +
                     name_of(other.interface, config));
  }
}

std::string subnets(const Config& config, bool v4) {
  std::string all;
  for (const InterfaceAddress& i : config.routing.interfaces)
    if (i.has_subnet && i.prefix.address.is_v4() == v4)
      all += (all.empty() ? "" : ", ") + Prefix{i.prefix.network(), i.prefix.length}.to_string();
  return all.empty() ? "none" : all;
}

IpAddress parse_next_hop(YamlMap& map, size_t i, const std::string& text, const Prefix& prefix,
                         const Config& config) {
  const auto via = IpAddress::parse(text);
  const bool v4 = prefix.address.is_v4();
  if (!via || via->is_v4() != v4)
    fail_element(map, "via", i,
                 "'" + text + "' is not an " + (v4 ? "IPv4" : "IPv6") + " address, as the prefix " +
                     prefix.to_string() + " needs");
  bool connected = false, usable = true;
  for (const InterfaceAddress& a : config.routing.interfaces) {
    if (a.prefix.address == *via) fail_element(map, "via", i, "'" + text + "' is an address of this switch");
    if (!a.has_subnet || !a.prefix.contains(*via)) continue;
    connected = true;
    usable = !a.prefix.is_network_or_broadcast(*via);
  }
  if (!connected || !usable)
    fail_element(
        map, "via", i,
        "'" + text + "' is not a host in a connected subnet (connected: " + subnets(config, v4) + ")");
  return *via;
}

StaticRoute read_route(YamlMap& map, const Config& config) {
  map.require("prefix");
  map.require("via");
  std::string text;
  map.text("prefix", text);
  const auto prefix = Prefix::parse(text);
  if (!prefix)
    map.fail("prefix",
             "'" + text + "' is not a prefix, as 10.78.0.0/24 or fd78::/64 (/0 … /32, /128 of IPv6)");
  if (prefix->address != prefix->network())
    map.fail("prefix", "'" + text + "' has bits behind its length: did you mean " +
                           Prefix{prefix->network(), prefix->length}.to_string() + "?");
  if (prefix->address.is_multicast()) map.fail("prefix", "'" + text + "' is multicast, which is not routed");
  for (const InterfaceAddress& a : config.routing.interfaces)
    if (a.has_subnet && a.prefix.network() == prefix->address && a.prefix.length == prefix->length)
      map.fail("prefix", text + " is connected to " + name_of(a.interface, config));
  for (const StaticRoute& other : config.routing.routes)
    if (other.prefix.address == prefix->address && other.prefix.length == prefix->length)
      map.fail("prefix", text + " is given twice: write all its next hops in one list");
  StaticRoute route{*prefix, {}};
  const std::vector<std::string> hops = texts_of(map, "via", Fib::kWaysMax, "next hops");
  for (size_t i = 0; i < hops.size(); i++) {
    const IpAddress via = parse_next_hop(map, i, hops[i], *prefix, config);
    if (std::find(route.via.begin(), route.via.end(), via) != route.via.end())
      fail_element(map, "via", i, "'" + hops[i] + "' is given twice");
    route.via.push_back(via);
  }
  map.finish();
  return route;
}

}  // namespace

void read_interface(YamlMap& map, uint16_t interface, Config& config) {
  const std::vector<std::string> all = texts_of(map, "addresses", kAddressesMax, "addresses");
  for (size_t i = 0; i < all.size(); i++) {
    const InterfaceAddress a = parse_address(map, i, all[i], interface);
    check_overlap(map, i, a, config);
    config.engine.addresses.push_back(a.prefix.address);
    config.routing.interfaces.push_back(a);
  }
}

void read_routing(YamlMap& top, Config& config) {
  RoutingConfig& r = config.routing;
  if (r.interfaces.empty()) top.require("addresses");
  if (top.get("routes").IsDefined() && !r.enabled())
    top.fail("routes",
             "need a connected subnet: write a prefix length, as 10.77.0.100/24, to one of addresses");
  top.list("routes", [&](YamlMap map) {
    if (r.routes.size() == kRoutesMax) top.fail("routes", "must be at most " + std::to_string(kRoutesMax));
    r.routes.push_back(read_route(map, config));
  });
  YamlMap map = top.map("routing");
  map.number("ecmp_seed", 0, UINT64_MAX, [&](uint64_t v) { r.ecmp_seed = v; });
  map.number("icmp_errors_pps", 1, 1'000'000, r.icmp_errors_pps);
  map.number("neighbours_max", 1, 1 << 16, r.neighbours.entries_max);
  map.duration("reachable_ms", std::chrono::milliseconds(1), 1000, 86'400'000, r.neighbours.reachable);
  map.duration("next_hop_probe_ms", std::chrono::milliseconds(1), 10, 60'000, r.neighbours.next_hop_probe);
  map.finish();
  // On a spine, where nothing is bridged, an address without a subnet is what is meant.
  const bool bridges = std::any_of(config.ports.begin(), config.ports.end(), [&](const PortConfig& p) {
    const auto index = static_cast<uint16_t>(&p - config.ports.data());
    return std::none_of(r.interfaces.begin(), r.interfaces.end(),
                        [&](const InterfaceAddress& i) { return i.interface == index; });
  });
  for (const InterfaceAddress& i : r.interfaces)
    if (r.enabled() && bridges && !i.has_subnet)
      config.notes.push_back(
          "addresses: " + i.prefix.address.to_string() +
          " has no prefix length: as no subnet around it is connected, answers to those who "
          "use it follow the routes");
}

void read_parent(YamlMap& top, Config& config) {
  YamlMap map = top.map("aggregation");
  std::string text;
  map.text("parent", text);
  if (text.empty()) return;
  auto no = [&](const std::string& what) { map.fail("parent", "'" + text + "' " + what); };
  const auto parent = IpAddress::parse(text);
  if (!parent || !can_be_a_host(*parent))
    no("is not the IPv4 or IPv6 address of a switch, as 10.255.0.1 or fd00::1");
  const bool v4 = parent->is_v4();
  const std::vector<IpAddress>& own = config.engine.addresses;
  if (std::find(own.begin(), own.end(), *parent) != own.end())
    no("is an address of this switch: its parent is another one");
  if (std::none_of(own.begin(), own.end(), [&](const IpAddress& a) { return a.is_v4() == v4; }))
    no(std::string("is an ") + (v4 ? "IPv4" : "IPv6") + " address, and this switch has only " +
       (v4 ? "IPv6" : "IPv4") + " ones to join from");
  RoutingConfig& r = config.routing;
  const Fib fib(r.interfaces, r.routes);
  const Fib::Entry* way = fib.lookup(*parent);
  if (way == nullptr || (way->connected && way->prefix.is_network_or_broadcast(*parent)))
    no("is neither a host in a connected subnet nor behind a route (connected: " + subnets(config, v4) + ")");
  // The engine knows no MAC address of it, and the router finds one only for what is sent to a next hop.
  if (way->connected) r.routes.push_back({{*parent, static_cast<uint8_t>(v4 ? 32 : 128)}, {*parent}});
  config.engine.parent = parent;
}

}  // namespace millrace::switching
