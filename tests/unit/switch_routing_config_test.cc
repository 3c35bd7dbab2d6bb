// What the configuration file says about addresses, routes and neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "roce/error.h"
#include "switch/config.h"

namespace millrace::switching {
namespace {

const std::string kPorts = R"(ports:
  - {name: p1, device: d1}
  - {name: up1, device: d2, addresses: [10.255.0.0/31, "fd00::/127"]}
  - {name: up2, device: d3, addresses: ["10.255.0.2/31"]}
)";
const std::string kTop = "name: leaf1\naddresses: [10.77.0.100/24, \"fd77::100/64\", 192.0.2.1]\n" + kPorts;

std::string refusal(const std::string& text) {
  try {
    parse_config(text, "f.yaml");
  } catch (const Error& e) {
    return e.what();
  }
  return "accepted";
}

TEST(RoutingConfigTest, InterfacesAndRoutesAreRead) {
  const Config c = parse_config(kTop + R"(
routes:
  - {prefix: 10.78.0.0/24, via: [10.255.0.1, 10.255.0.3]}
  - {prefix: "fd78::/64", via: ["fd00::1"]}
  - {prefix: 0.0.0.0/0, via: [10.77.0.1]}
routing: {ecmp_seed: 7, icmp_errors_pps: 5, neighbours_max: 9, reachable_ms: 2000, next_hop_probe_ms: 250}
)",
                                "f.yaml");
  EXPECT_TRUE(c.routing.enabled());
  // The engine answers on every one of them.
  ASSERT_EQ(c.engine.addresses.size(), 6u);
  ASSERT_EQ(c.routing.interfaces.size(), 6u);
  EXPECT_EQ(c.engine.addresses[3].to_string(), "10.255.0.0");
  EXPECT_EQ(c.routing.interfaces[0].prefix.to_string(), "10.77.0.100/24");
  EXPECT_EQ(c.routing.interfaces[0].interface, kBridge);
  EXPECT_FALSE(c.routing.interfaces[2].has_subnet);
  EXPECT_EQ(c.routing.interfaces[4].interface, 1);
  EXPECT_EQ(c.routing.interfaces[4].prefix.to_string(), "fd00::/127");
  EXPECT_EQ(c.routing.interfaces[5].interface, 2);
  ASSERT_EQ(c.routing.routes.size(), 3u);
  EXPECT_EQ(c.routing.routes[0].prefix.to_string(), "10.78.0.0/24");
  EXPECT_EQ(c.routing.routes[0].via.at(1).to_string(), "10.255.0.3");
  EXPECT_EQ(c.routing.ecmp_seed, 7u);
  EXPECT_EQ(c.routing.icmp_errors_pps, 5u);
  EXPECT_EQ(c.routing.neighbours.entries_max, 9u);
  EXPECT_EQ(c.routing.neighbours.reachable, std::chrono::seconds(2));
  EXPECT_EQ(c.routing.neighbours.next_hop_probe, std::chrono::milliseconds(250));
  // The one address that has no subnet is pointed out.
  EXPECT_EQ(std::count_if(c.notes.begin(), c.notes.end(),
                          [](const std::string& n) { return n.starts_with("addresses: 192.0.2.1 "); }),
            1);
}

TEST(RoutingConfigTest, WithoutAPrefixLengthNothingIsRouted) {
  const Config c =
      parse_config("name: a\naddresses: [10.77.0.100]\nports: [{name: p, device: d}]\n", "f.yaml");
  EXPECT_FALSE(c.routing.enabled());
  for (const std::string& note : c.notes) EXPECT_FALSE(note.starts_with("addresses")) << note;
}

TEST(RoutingConfigTest, ASpineNeedsNoAddressButThoseOfItsPorts) {
  const Config c = parse_config(
      "name: spine1\nports:\n  - {name: p1, device: d1, addresses: [10.255.0.1/31]}\n", "f.yaml");
  EXPECT_TRUE(c.routing.enabled());
  EXPECT_EQ(c.engine.addresses.at(0).to_string(), "10.255.0.1");
  EXPECT_NE(refusal("name: a\nports: [{name: p, device: d}]\n").find("addresses: missing"),
            std::string::npos);
}

TEST(RoutingConfigTest, AParentInAConnectedSubnetIsANextHop) {
  for (const char* parent : {"10.255.0.1", "fd00::1", "10.77.0.9"}) {
    const Config c =
        parse_config(kTop + "aggregation: {parent: \"" + parent + "\", parent_port: 18602}\n", "f.yaml");
    ASSERT_TRUE(c.engine.parent.has_value());
    EXPECT_EQ(c.engine.parent->to_string(), parent);
    EXPECT_EQ(c.engine.parent_port, 18602);
    // As routes of the file would be: the router resolves the next hops of routes by itself.
    ASSERT_EQ(c.routing.routes.size(), 1u) << parent;
    EXPECT_EQ(c.routing.routes[0].prefix.to_string(),
              std::string(parent) + (c.engine.parent->is_v4() ? "/32" : "/128"));
    EXPECT_EQ(c.routing.routes[0].via, std::vector<IpAddress>{*c.engine.parent});
  }
}

TEST(RoutingConfigTest, AParentBehindARouteIsReachedByIt) {
  for (const char* prefix : {"10.99.0.0/24", "0.0.0.0/0", "10.99.0.1/32"}) {
    const Config c = parse_config(kTop + "aggregation: {parent: 10.99.0.1}\nroutes:\n  - {prefix: " + prefix +
                                      ", via: [10.255.0.1, 10.255.0.3]}\n",
                                  "f.yaml");
    EXPECT_EQ(c.engine.parent->to_string(), "10.99.0.1");
    EXPECT_EQ(c.engine.parent_port, 18600);
    EXPECT_EQ(c.routing.routes.size(), 1u) << prefix;
  }
  EXPECT_FALSE(parse_config(kTop + "aggregation: {window: 4}\n", "f.yaml").engine.parent.has_value());
}

TEST(RoutingConfigTest, TheExamplesForOperatorsAreRight) {
  std::ifstream in(std::string(MILLRACE_SOURCE_ROOT) + "/switch/OPERATIONS.md");
  std::ostringstream text;
  text << in.rdbuf();
  const std::string page = text.str();
  size_t examples = 0;
  const std::string fence = "```yaml\n";
  for (size_t at = page.find(fence, page.find("### Two leaves")); at < page.find("\n## Trees");
       at = page.find(fence, at)) {
    at += fence.size();
    EXPECT_TRUE(parse_config(page.substr(at, page.find("```", at) - at), "example").routing.enabled());
    examples++;
  }
  EXPECT_EQ(examples, 2u);
}

TEST(RoutingConfigTest, MistakesNameFileLineKeyAndWhatIsAllowed) {
  struct Case {
    std::string text;
    std::vector<std::string> expected;
  };
  auto routes = [](const std::string& r) { return kTop + "routes:\n  - " + r + "\n"; };
  const Case cases[] = {
      {routes("{prefix: 10.78.0.0/24, via: [10.9.0.1]}"),
       {"f.yaml:8: routes[0].via: '10.9.0.1'", "connected: 10.77.0.0/24, 10.255.0.0/31, 10.255.0.2/31"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.255.0.1,\n     10.9.0.1]}"),
       {"f.yaml:9: routes[0].via: '10.9.0.1'"}},
      {routes("{prefix: \"fd78::/64\", via: [10.255.0.1]}"),
       {"f.yaml:8: routes[0].via: '10.255.0.1'", "IPv6"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.255.0.0]}"), {"f.yaml:8: routes[0].via", "of this switch"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.77.0.255]}"), {"f.yaml:8: routes[0].via: '10.77.0.255'"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.255.0.1, 10.255.0.1]}"), {"f.yaml:8: routes[0].via", "twice"}},
      {routes("{prefix: 10.78.0.0/24, via: []}"), {"f.yaml:8: routes[0].via: must be 1 … 64 next hops"}},
      {routes("{prefix: 10.78.0.0/24}"), {"f.yaml:8: routes[0].via: missing"}},
      {routes("{prefix: 10.78.0.0, via: [10.255.0.1]}"),
       {"f.yaml:8: routes[0].prefix: '10.78.0.0'", "/0 … /32"}},
      {routes("{prefix: 10.78.0.0/33, via: [10.255.0.1]}"), {"f.yaml:8: routes[0].prefix: '10.78.0.0/33'"}},
      {routes("{prefix: 10.78.0.1/24, via: [10.255.0.1]}"), {"f.yaml:8: routes[0].prefix", "10.78.0.0/24?"}},
      {routes("{prefix: 10.77.0.0/24, via: [10.255.0.1]}"),
       {"f.yaml:8: routes[0].prefix", "connected to the bridge"}},
      {routes("{prefix: 10.255.0.2/31, via: [10.255.0.1]}"),
       {"f.yaml:8: routes[0].prefix", "connected to port up2"}},
      {routes("{prefix: 224.0.0.0/4, via: [10.255.0.1]}"), {"f.yaml:8: routes[0].prefix", "multicast"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.255.0.1]}\n  - {prefix: 10.78.0.0/24, via: [10.255.0.3]}"),
       {"f.yaml:9: routes[1].prefix", "given twice"}},
      {routes("{prefix: 10.78.0.0/24, via: [10.255.0.1], metric: 1}"),
       {"f.yaml:8: routes[0].metric: unknown key"}},
      {kTop + "routing: {reachable_ms: 5}\n", {"f.yaml:7: routing.reachable_ms: '5'", "1000 … 86400000"}},
      {kTop + "routing: {neighbours_max: 0}\n", {"f.yaml:7: routing.neighbours_max", "1 … 65536"}},
      {"name: a\naddresses: [10.0.0.1]\nports: [{name: p, device: d}]\nroutes: [{prefix: 10.1.0.0/24, via: "
       "[10.0.0.2]}]\n",
       {"f.yaml:4: routes: need a connected subnet"}},
      {"name: a\naddresses: [10.77.0.0/24]\n" + kPorts,
       {"f.yaml:2: addresses: '10.77.0.0/24'", "a host can have"}},
      {"name: a\naddresses: [10.77.0.255/24]\n" + kPorts, {"f.yaml:2: addresses: '10.77.0.255/24'"}},
      {"name: a\naddresses: [127.0.0.1]\n" + kPorts, {"f.yaml:2: addresses: '127.0.0.1'"}},
      {"name: a\naddresses: [10.255.0.1]\nports:\n  - {name: p, device: d, addresses: [10.255.0.0]}\n",
       {"f.yaml:4: ports[0].addresses: '10.255.0.0'", "with its prefix length"}},
      {"name: a\naddresses: [10.255.0.9/24]\n" + kPorts,
       {"f.yaml:5: ports[1].addresses: 10.255.0.0/31 overlaps 10.255.0.9/24 of the bridge"}},
      {"name: a\naddresses: [10.255.0.0]\n" + kPorts,
       {"f.yaml:5: ports[1].addresses: '10.255.0.0' is given twice"}},
      {kTop + "aggregation:\n  parent: spine1\n",
       {"f.yaml:8: aggregation.parent: 'spine1'", "as 10.255.0.1"}},
      {kTop + "aggregation:\n  parent: 224.0.0.1\n", {"f.yaml:8: aggregation.parent: '224.0.0.1'"}},
      {kTop + "aggregation:\n  parent: [10.255.0.1]\n", {"f.yaml:8: aggregation.parent: must be a text"}},
      {kTop + "aggregation:\n  parent: 10.255.0.2\n",
       {"f.yaml:8: aggregation.parent: '10.255.0.2'", "of this switch"}},
      {kTop + "aggregation:\n  parent: 192.0.2.1\n", {"f.yaml:8: aggregation.parent", "of this switch"}},
      {kTop + "aggregation:\n  parent: 10.99.0.1\n",
       {"f.yaml:8: aggregation.parent: '10.99.0.1'",
        "behind a route (connected: 10.77.0.0/24, 10.255.0.0/31, 10.255.0.2/31)"}},
      {kTop + "aggregation:\n  parent: 10.77.0.255\n", {"f.yaml:8: aggregation.parent: '10.77.0.255'"}},
      {kTop + "aggregation:\n  parent_port: 18600\n", {"f.yaml:8: aggregation.parent_port", "parent, too"}},
      {kTop + "aggregation:\n  parent: 10.255.0.1\n  parent_port: 0\n",
       {"f.yaml:9: aggregation.parent_port: '0'", "1 … 65535"}},
      {"name: a\naddresses: [10.0.0.1/24]\nports: [{name: p, device: d}]\naggregation:\n  parent: "
       "\"fd00::1\"\n",
       {"f.yaml:5: aggregation.parent: 'fd00::1' is an IPv6 address", "only IPv4"}},
      {"name: a\naddresses: [10.0.0.1]\nports: [{name: p, device: d}]\naggregation:\n  parent: 10.0.0.2\n",
       {"f.yaml:5: aggregation.parent: '10.0.0.2' is neither", "connected: none"}},
      {"name: a\naddresses: [10.0.0.1]\nports:\n  - {name: p, device: d, addresses: []}\n",
       {"f.yaml:4: ports[0].addresses: must be 1 … 64"}},
  };
  for (const Case& c : cases) {
    const std::string said = refusal(c.text);
    for (const std::string& part : c.expected)
      EXPECT_NE(said.find(part), std::string::npos) << "expected: " << part << "\nsaid:     " << said;
  }
}

}  // namespace
}  // namespace millrace::switching
