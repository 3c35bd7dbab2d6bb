// Which way a packet goes: prefixes against a naive search, the spread over next hops, and the hop that it
// loses.
#include <cmath>
#include <random>
#include <set>

#include "roce/prefix.h"
#include "tests/unit/switch_fabric.h"

namespace millrace::switching {
namespace {

using namespace test;

// One router with `ways` next hops on a bridge of one port; how often each is chosen.
std::vector<size_t> spread(size_t ways, uint64_t seed, const std::function<bool(uint16_t)>& which, bool v6,
                           std::vector<size_t>* chosen = nullptr) {
  Fabric net;
  RoutingConfig r;
  r.ecmp_seed = seed;
  r.interfaces = {on(kBridge, "10.1.0.100/24"), on(kBridge, "fd01::100/64")};
  std::vector<std::string> via;
  for (size_t i = 0; i < ways; i++) via.push_back((v6 ? "fd01::" : "10.1.0.") + std::to_string(i + 1));
  r.routes = {route(v6 ? "::/0" : "0.0.0.0/0", {via.begin(), via.end()})};
  const int sw = net.add_switch("sw", 8, r, 1);
  std::vector<int> hops;
  for (size_t i = 0; i < ways; i++)
    hops.push_back(net.add_host("10.1.0." + std::to_string(i + 1), "fd01::" + std::to_string(i + 1),
                                {sw, static_cast<uint16_t>(i)}));
  net.settle();
  std::vector<size_t> counts(ways);
  for (uint16_t port = 0; port < 4096; port++) {
    if (!which(port)) continue;
    net.passed.clear();
    net.send(hops[0],
             ip_frame(net.sw(sw).mac, net.host(hops[0]).mac, ip(v6 ? "fd09::9" : "10.9.9.9"),
                      ip(v6 ? "fd08::8" : "10.8.8.8"), 17, udp(static_cast<uint16_t>(0xC000 + port), 4791)));
    for (size_t i = 0; i < ways; i++)
      if (net.passed.back().to.node == -1 - hops[i]) {
        counts[i]++;
        if (chosen) chosen->push_back(i);
      }
  }
  return counts;
}

TEST(Ecmp, FourThousandSourcePortsSpreadEvenly) {
  for (const bool v6 : {false, true})
    for (size_t ways = 2; ways <= 4; ways++) {
      const auto counts = spread(
          ways, 42, [](uint16_t) { return true; }, v6);
      // Five standard deviations of a fair choice.
      const double mean = 4096.0 / static_cast<double>(ways);
      const double bound = 5 * std::sqrt(mean * (1 - 1 / static_cast<double>(ways)));
      for (const size_t n : counts) EXPECT_NEAR(static_cast<double>(n), mean, bound) << ways;
    }
}

TEST(Ecmp, SwitchesInARowDoNotChooseAlike) {
  std::vector<size_t> first;
  spread(
      2, 1, [](uint16_t) { return true; }, false, &first);
  ASSERT_EQ(first.size(), 4096u);
  // Of the flows that the first switch sends one way, the second one shares evenly, unless it has the same
  // seed.
  const auto second = spread(
      2, 2, [&](uint16_t port) { return first[port] == 0; }, false);
  EXPECT_NEAR(static_cast<double>(second[0]), static_cast<double>(second[1]), 5 * std::sqrt(2048.0));
  const auto same = spread(
      2, 1, [&](uint16_t port) { return first[port] == 0; }, false);
  EXPECT_EQ(same[1], 0u);
}

// RFC 1624: whatever the rest of the header sums to, the incremental update is what computing afresh gives.
TEST(Ttl, TheChecksumIsUpdatedAsIfComputedAfresh) {
  for (uint32_t identification = 0; identification < 0x10000; identification += 7)
    for (const uint8_t ttl : {2, 64, 128, 255}) {
      Bytes b = ip_frame({}, {}, ip("10.0.0.1"), ip("10.0.0.2"), 17, udp(1, 2), ttl);
      b[18] = static_cast<uint8_t>(identification >> 8), b[19] = static_cast<uint8_t>(identification);
      auto fresh = [](Bytes h) {
        h[24] = h[25] = 0;
        return static_cast<uint16_t>(~ones_complement_sum({h.data() + 14, 20}));
      };
      const uint16_t sum = fresh(b);
      b[24] = static_cast<uint8_t>(sum >> 8), b[25] = static_cast<uint8_t>(sum);
      Router::decrement_ttl(*reinterpret_cast<roce::Ipv4Header*>(b.data() + 14));
      ASSERT_EQ(b[22], ttl - 1);
      ASSERT_EQ(be16(b, 24), fresh(b)) << identification;
    }
}

// Against a search of all prefixes, bit by bit.
TEST(FibTest, TheLongestPrefixWinsAsInANaiveSearch) {
  std::mt19937 random(7);
  for (const bool v6 : {false, true}) {
    std::vector<StaticRoute> routes;
    auto address = [&] {
      // Few distinct bits, so that prefixes nest and addresses hit.
      IpAddress a;
      if (!v6) a.bytes[10] = a.bytes[11] = 0xFF;
      for (size_t i = v6 ? 0 : 12; i < 16; i++)
        a.bytes[i] = static_cast<uint8_t>(random() % 3 << random() % 7);
      if (v6) a.bytes[0] = 0xFD;
      return a;
    };
    auto bit = [&](const IpAddress& a, unsigned i) {
      return a.bytes[(v6 ? 0 : 12) + i / 8] >> (7 - i % 8) & 1;
    };
    std::set<std::pair<IpAddress, unsigned>> seen;
    for (int i = 0; i < 400; i++) {
      const auto length = static_cast<uint8_t>(random() % (v6 ? 129 : 33));
      IpAddress a = address();
      for (unsigned n = length; n < (v6 ? 128u : 32u); n++)
        a.bytes[(v6 ? 0 : 12) + n / 8] &= static_cast<uint8_t>(~(0x80 >> n % 8));
      if (seen.insert({a, length}).second) routes.push_back({{a, length}, {}});
    }
    const Fib fib({}, routes);
    int found = 0;
    for (int i = 0; i < 20000; i++) {
      const IpAddress a = address();
      const StaticRoute* best = nullptr;
      for (const StaticRoute& r : routes) {
        bool match = true;
        for (unsigned n = 0; n < r.prefix.length; n++) match &= bit(a, n) == bit(r.prefix.address, n);
        if (match && (best == nullptr || r.prefix.length > best->prefix.length)) best = &r;
      }
      const Fib::Entry* entry = fib.lookup(a);
      ASSERT_EQ(entry == nullptr, best == nullptr) << a.to_string();
      if (best == nullptr) continue;
      found++;
      ASSERT_EQ(entry->prefix.to_string(), best->prefix.to_string()) << a.to_string();
    }
    EXPECT_GT(found, 1000);
  }
}

TEST(PrefixTest, ReadsAndKnowsItsSpecialAddresses) {
  EXPECT_EQ(Prefix::parse("10.77.0.100/24")->network(), ip("10.77.0.0"));
  EXPECT_EQ(Prefix::parse("fd77::1234/64")->network(), ip("fd77::"));
  for (const char* bad : {"10.0.0.0", "10.0.0.0/33", "10.0.0.0/", "10.0.0.0/ 8", "10.0.0.0/-1", "fd00::/129",
                          "/24", "10.0.0.0/8/8", "10.0.0/8"})
    EXPECT_FALSE(Prefix::parse(bad)) << bad;
  const Prefix p = *Prefix::parse("10.77.0.64/26");
  EXPECT_TRUE(p.is_network_or_broadcast(ip("10.77.0.64")));
  EXPECT_TRUE(p.is_network_or_broadcast(ip("10.77.0.127")));
  EXPECT_FALSE(p.is_network_or_broadcast(ip("10.77.0.65")));
  EXPECT_FALSE(Prefix::parse("10.255.0.0/31")->is_network_or_broadcast(ip("10.255.0.0")));
}

// Bit by bit; and no IPv6 prefix takes IPv4 addresses, though these are kept as ::ffff:0:0/96.
TEST(PrefixTest, ComparesTheBitsItHasAndNoOtherFamily) {
  for (const char* text : {"fd77:1234:5678:9abc:def0:1357:9bdf:2468", "10.77.3.200"}) {
    const IpAddress a = ip(text);
    for (unsigned bits = a.is_v4() ? 96 : 0; bits <= 128; bits++)
      for (unsigned flipped = a.is_v4() ? 96 : 0; flipped < 128; flipped++) {
        IpAddress b = a;
        b.bytes[flipped / 8] ^= static_cast<uint8_t>(0x80 >> flipped % 8);
        EXPECT_EQ(in_prefix(b, a, bits), flipped >= bits) << text << "/" << bits << " " << flipped;
      }
  }
  EXPECT_FALSE(in_prefix(ip("10.0.0.1"), ip("::"), 0));
  EXPECT_TRUE(in_prefix(ip("fd00::1"), ip("::"), 0));
  EXPECT_FALSE(in_prefix(ip("fd00::1"), ip("0.0.0.0"), 96));
  EXPECT_TRUE(in_prefix(ip("10.0.0.1"), ip("0.0.0.0"), 96));
}

}  // namespace
}  // namespace millrace::switching
