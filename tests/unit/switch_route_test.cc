// Routing between pipelines: two leaves and two spines with hosts behind the leaves. What is expected comes
// from the RFCs' closed forms and from naive re-computation.
#include <set>

#include "tests/unit/allocation.h"
#include "tests/unit/switch_fabric.h"

namespace millrace::switching {
namespace {

using namespace test;

class RouteTest : public ::testing::TestWithParam<bool> {
 protected:
  bool v6() const { return GetParam(); }
  // Where the IP header's hop count stands in an untagged frame.
  size_t hops_at() const { return v6() ? 14 + 7 : 14 + 8; }
  LeafSpine lab;
  uint64_t fate(int sw, Fate f) { return lab.net.sw(sw).pipeline->counters().fate(f); }
};
INSTANTIATE_TEST_SUITE_P(Families, RouteTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "IPv6" : "IPv4"; });

TEST_P(RouteTest, RoceCrossesThreeRoutersUnchangedButForHopsAndMacs) {
  Bytes sent = lab.roce_packet(0, 2, v6(), 0xC123);
  lab.net.send(lab.host[0], sent);
  ASSERT_EQ(lab.h(2).inbox.size(), 1u);
  Bytes got = lab.h(2).inbox[0];
  EXPECT_EQ(mac_at(got, 0), lab.h(2).mac);
  EXPECT_EQ(mac_at(got, 6), lab.net.sw(lab.leaf[1]).mac);
  EXPECT_EQ(got[hops_at()], 64 - 3);
  roce::Packet packet;
  ASSERT_EQ(roce::parse(got, packet), roce::ParseVerdict::kOk);  // the IPv4 checksum among others
  EXPECT_TRUE(roce::icrc_ok(packet));
  // All the rest, byte for byte.
  std::copy_n(sent.begin(), 12, got.begin());
  got[hops_at()] = 64;
  if (!v6()) std::copy_n(sent.begin() + 24, 2, got.begin() + 24);
  EXPECT_EQ(got, sent);
  EXPECT_EQ(fate(lab.leaf[0], Fate::kRouted), 1u);
  EXPECT_EQ(fate(lab.spine[0], Fate::kRouted) + fate(lab.spine[1], Fate::kRouted), 1u);
  // The last one had to ask for the host first.
  EXPECT_EQ(fate(lab.leaf[1], Fate::kNeighbourHeld), 1u);
  EXPECT_EQ(lab.net.sw(lab.leaf[1]).pipeline->counters().router_fates[static_cast<size_t>(Fate::kRouted)],
            1u);
}

TEST_P(RouteTest, BothSpinesCarryFlowsAndAFlowKeepsItsSpine) {
  std::map<int, size_t> used;
  for (uint32_t flow = 0; flow < 200; flow++) {
    std::set<int> by;
    for (int repeat = 0; repeat < 2; repeat++) {
      lab.net.passed.clear();
      lab.net.send(lab.host[0], lab.roce_packet(0, 3, v6(), static_cast<uint16_t>(0xC000 + flow), 64));
      for (const Fabric::Passed& p : lab.net.passed)
        if (p.to.node == lab.spine[0] || p.to.node == lab.spine[1]) by.insert(p.to.node);
    }
    ASSERT_EQ(by.size(), 1u) << flow;
    used[*by.begin()]++;
  }
  EXPECT_EQ(lab.h(3).inbox.size(), 400u);
  EXPECT_GT(used[lab.spine[0]], 60u);  // 100 ± 40 is more than five standard deviations
  EXPECT_GT(used[lab.spine[1]], 60u);
}

TEST_P(RouteTest, NothingIsBridgedBetweenLeaves) {
  auto crossed = [&] {
    return lab.net.count([&](const Fabric::Passed& p) { return p.from.node >= 0 && p.to.node >= 0; });
  };
  const Bytes stray =
      ip_frame({{2, 9, 9, 9, 9, 9}}, lab.h(0).mac, lab.address(1, v6()), lab.address(0, v6()), 17, udp(1, 2));
  lab.net.send(lab.host[0], stray);  // an unknown address
  Bytes broadcast = stray;
  std::fill_n(broadcast.begin(), 6, uint8_t{0xFF});
  lab.net.send(lab.host[0], broadcast);
  EXPECT_EQ(crossed(), 0u);
  EXPECT_EQ(fate(lab.leaf[0], Fate::kFlooded), 2u);
  EXPECT_EQ(lab.h(1).inbox.size(), 1u);  // the broadcast; the other was not for it
  // The MAC address of a spine has been heard, but on no port of the bridge.
  Bytes to_spine = stray;
  std::copy_n(lab.net.sw(lab.spine[0]).mac.bytes.begin(), 6, to_spine.begin());
  lab.net.send(lab.host[0], to_spine);
  EXPECT_EQ(crossed(), 0u);
  // And what comes in on a routed port goes to no host.
  lab.net.passed.clear();
  for (const Bytes& b : {stray, broadcast}) lab.net.carry({lab.spine[0], 0}, b);
  lab.net.settle();
  EXPECT_EQ(fate(lab.leaf[0], Fate::kNotBridged), 2u);
  EXPECT_EQ(lab.net.passed.size(), 2u);
  // But a host and its neighbour on the same leaf are bridged, untouched.
  const Bytes direct =
      ip_frame(lab.h(0).mac, lab.h(1).mac, lab.address(0, v6()), lab.address(1, v6()), 17, udp(1, 2));
  lab.net.send(lab.host[1], direct);
  EXPECT_EQ(lab.h(0).inbox, std::deque<Bytes>{direct});
}

TEST_P(RouteTest, TracerouteSeesEachRouter) {
  const std::string via[2] = {LeafSpine::link4(1, 0, false), LeafSpine::link4(1, 1, false)};
  for (uint8_t hops = 1; hops <= 3; hops++) {
    lab.h(0).inbox.clear();
    const Bytes probe = lab.packet(0, lab.address(2, v6()), 17, udp(40000, 33434, 32), hops);
    lab.net.send(lab.host[0], probe);
    ASSERT_EQ(lab.h(0).inbox.size(), 1u) << int{hops};
    const Bytes& got = lab.h(0).inbox[0];
    ASSERT_EQ(be16(got, 12), v6() ? 0x86DD : 0x0800);
    const IpAddress from = v6() ? IpAddress::from_v6(&got[22]) : IpAddress::from_v4(&got[26]);
    const IpAddress to = v6() ? IpAddress::from_v6(&got[38]) : IpAddress::from_v4(&got[30]);
    EXPECT_EQ(to, lab.address(0, v6()));
    std::set<IpAddress> expected = {ip(v6() ? "fd77:1::1" : "10.77.1.1")};
    if (hops > 1) {
      // Of the spine, its address towards the first leaf; of the other leaf, its address towards the spine.
      expected.clear();
      for (int s = 0; s < 2; s++)
        expected.insert(
            ip(v6() ? LeafSpine::link6(hops - 2, s, hops == 2) : LeafSpine::link4(hops - 2, s, hops == 2)));
    }
    EXPECT_TRUE(expected.contains(from)) << from.to_string();
    const size_t icmp = v6() ? 54 : 34;
    EXPECT_EQ(got[icmp], v6() ? 3 : 11);  // time exceeded
    EXPECT_EQ(got[icmp + 1], 0);          // in transit
    const std::span<const uint8_t> message(got.data() + icmp, got.size() - icmp);
    EXPECT_EQ(v6() ? icmp6_sum(from, to, message) : ones_complement_sum(message), 0xFFFF);
    // The whole of this short packet, as it was when its last hop had been counted.
    Bytes quoted = Bytes(probe.begin() + 14, probe.end());
    Bytes was(message.begin() + 8, message.end());
    ASSERT_EQ(was.size(), quoted.size());
    EXPECT_EQ(was[hops_at() - 14], 1);
    if (!v6()) {
      EXPECT_EQ(ones_complement_sum({was.data(), 20}), 0xFFFF);
      was[10] = quoted[10], was[11] = quoted[11];
    }
    was[hops_at() - 14] = hops;
    EXPECT_EQ(was, quoted);
  }
  EXPECT_EQ(fate(lab.leaf[0], Fate::kTtlExpired), 1u);
  EXPECT_EQ(lab.net.sw(lab.leaf[0]).pipeline->router()->counters().icmp_errors_sent, 1u);
  EXPECT_TRUE(lab.h(2).inbox.empty());
}

TEST_P(RouteTest, NobodyIsToldOfErrorsAboutErrorsOrTooOften) {
  // An ICMP error itself: 11, or 3 of ICMPv6.
  const Bytes error = {static_cast<uint8_t>(v6() ? 3 : 11), 0, 0, 0, 0, 0, 0, 0};
  lab.net.send(lab.host[0], lab.packet(0, lab.address(2, v6()), v6() ? 58 : 1, error, 1));
  EXPECT_TRUE(lab.h(0).inbox.empty());
  EXPECT_EQ(fate(lab.leaf[0], Fate::kTtlExpired), 1u);
  // 100 a second allow a burst of a tenth of that.
  for (int i = 0; i < 50; i++)
    lab.net.send(lab.host[0], lab.packet(0, lab.address(2, v6()), 17, udp(1, 2), 1));
  EXPECT_EQ(lab.h(0).inbox.size(), 10u);
  EXPECT_EQ(lab.net.sw(lab.leaf[0]).pipeline->router()->counters().icmp_errors_limited, 40u);
}

TEST_P(RouteTest, WithoutARouteTheSenderIsTold) {
  lab.net.send(lab.host[0], lab.packet(0, ip(v6() ? "fd99::1" : "10.99.0.1"), 17, udp(1, 2)));
  ASSERT_EQ(lab.h(0).inbox.size(), 1u);
  const Bytes& got = lab.h(0).inbox[0];
  EXPECT_EQ(got[v6() ? 54 : 34], v6() ? 1 : 3);  // unreachable: no route, network
  EXPECT_EQ(got[v6() ? 55 : 35], 0);
  EXPECT_EQ(fate(lab.leaf[0], Fate::kNoRoute), 1u);
}

TEST_P(RouteTest, FramesWaitForAnUnresolvedNeighbour) {
  lab.h(2).answers = false;
  std::vector<Bytes> sent;
  for (uint16_t i = 0; i < 6; i++) {
    sent.push_back(lab.packet(3, lab.address(2, v6()), 17, udp(i, 9)));  // routed back into its own subnet
    lab.net.send(lab.host[3], sent.back());
  }
  EXPECT_TRUE(lab.h(2).answers == false && fate(lab.leaf[1], Fate::kNeighbourHeld) == 4);
  EXPECT_EQ(fate(lab.leaf[1], Fate::kNeighbourUnresolved), 2u);
  const auto& counters = [&] { return lab.net.sw(lab.leaf[1]).pipeline->router()->counters(); };
  const auto asked = [&] { return v6() ? counters().solicitations_sent : counters().arp_requests_sent; };
  const uint64_t before = asked();
  lab.h(2).inbox.clear();
  lab.net.run(milliseconds(500));
  EXPECT_EQ(lab.h(2).inbox.size(), 0u);  // one question a second
  lab.h(2).answers = true;
  lab.net.run(milliseconds(600));
  EXPECT_GT(asked(), before);
  ASSERT_EQ(lab.h(2).inbox.size(), 4u);
  for (uint16_t i = 0; i < 4; i++) EXPECT_EQ(be16(lab.h(2).inbox[i], v6() ? 54 : 34), i);  // in their order
  // From now on it is known.
  lab.net.send(lab.host[3], sent[0]);
  EXPECT_EQ(lab.h(2).inbox.size(), 5u);
}

// In one burst: the answer, and another packet of the flow. The one that waited is not overtaken.
TEST_P(RouteTest, WhatWaitedLeavesBeforeWhatComesBehind) {
  lab.h(1).answers = false;
  Fabric::Switch& leaf = lab.net.sw(lab.leaf[0]);
  const IpAddress own = lab.address(1, v6()), gateway = ip(v6() ? "fd77:1::1" : "10.77.1.1");
  auto numbered = [&](uint16_t i) { return lab.packet(0, own, 17, udp(i, 9)); };
  lab.net.send(lab.host[0], numbered(1));
  const Bytes answer =
      v6() ? ip_frame(leaf.mac, lab.h(1).mac, gateway, own, 58,
                      neighbour_message(136, 0x60000000, own, 2, lab.h(1).mac, own, gateway), 255)
           : arp(2, lab.h(1).mac, own, leaf.mac, gateway, leaf.mac);
  FrameList in, out;
  in.push(frame_of(leaf.pool, answer, 1));
  in.push(frame_of(leaf.pool, numbered(2), 0));
  leaf.pipeline->process(in, lab.net.now(), out);
  ASSERT_EQ(out.size(), 2u);
  for (uint16_t i = 1; i <= 2; i++) EXPECT_EQ(be16(bytes_of(out.pop()), v6() ? 54 : 34), i);
}

TEST_P(RouteTest, ANeighbourThatNeverAnswersIsGivenUpAndTheSenderIsTold) {
  lab.h(2).answers = false;
  lab.net.send(lab.host[0], lab.packet(0, lab.address(2, v6()), 17, udp(1, 2)));
  lab.net.run(milliseconds(2900));
  EXPECT_TRUE(lab.h(0).inbox.empty());
  EXPECT_EQ(lab.net.count([&](const Fabric::Passed& p) {
    return p.to.node == -1 - lab.host[2] && (v6() ? is_nd(p.bytes) : is_arp(p.bytes));
  }),
            3u);
  lab.net.run(milliseconds(200));
  ASSERT_EQ(lab.h(0).inbox.size(), 1u);
  EXPECT_EQ(lab.h(0).inbox[0][v6() ? 54 : 34], v6() ? 1 : 3);  // unreachable: the address, the host
  EXPECT_EQ(lab.h(0).inbox[0][v6() ? 55 : 35], v6() ? 3 : 1);
  EXPECT_EQ(lab.net.sw(lab.leaf[1]).pipeline->router()->counters().unanswered, 1u);
}

TEST_P(RouteTest, ADownSpineIsLeftOutAndTheOthersFlowsStay) {
  auto spine_of = [&](uint16_t port) {
    lab.net.passed.clear();
    lab.net.send(lab.host[0], lab.roce_packet(0, 2, v6(), port, 16));
    for (const Fabric::Passed& p : lab.net.passed)
      for (int s : lab.spine)
        if (p.to.node == s && p.bytes.size() > 64) return s;
    return -1;
  };
  std::map<uint16_t, int> before;
  for (uint16_t port = 0; port < 64; port++) before[port] = spine_of(port);
  for (uint16_t l = 0; l < 2; l++) lab.net.cut({lab.spine[0], l});
  lab.net.run(milliseconds(400));  // a question each 100 ms, three of them unanswered
  lab.h(2).inbox.clear();
  for (uint16_t port = 0; port < 64; port++) EXPECT_EQ(spine_of(port), lab.spine[1]);
  EXPECT_EQ(lab.h(2).inbox.size(), 64u);
  const auto* router = lab.net.sw(lab.leaf[0]).pipeline->router();
  EXPECT_EQ(router->counters().next_hops_avoided,
            static_cast<uint64_t>(std::count_if(before.begin(), before.end(),
                                                [&](auto& b) { return b.second == lab.spine[0]; })));
  std::set<IpAddress> failed;
  for (const Router::RouteInfo& r : router->routes())
    for (const auto& way : r.ways)
      if (way.state == "failed") failed.insert(way.address);
  EXPECT_EQ(failed,
            (std::set<IpAddress>{ip(LeafSpine::link4(0, 0, true)), ip(LeafSpine::link6(0, 0, true))}));
  lab.net.mend();
  lab.net.run(milliseconds(100));
  for (uint16_t port = 0; port < 64; port++) EXPECT_EQ(spine_of(port), before[port]);
}

// The leaf hears the spine's questions, but none of its own arrives there.
TEST_P(RouteTest, ASpineThatCanBeHeardButNotReachedIsLeftOut) {
  lab.net.cut_from({lab.leaf[0], 2});
  lab.net.run(milliseconds(400));
  lab.net.passed.clear();
  for (int ms = 0; ms < 1000; ms += 50) {
    for (uint16_t port = 0; port < 8; port++)
      lab.net.send(lab.host[0], lab.roce_packet(0, 2, v6(), port, 16));
    lab.net.run(milliseconds(50));
  }
  EXPECT_GT(lab.net.count([&](auto& p) {
    return p.from == Fabric::End{lab.spine[0], 0};
  }),
            0u);  // it does ask
  EXPECT_EQ(lab.h(2).inbox.size(), 160u);
}

TEST_P(RouteTest, NeighboursAreAskedAgainBeforeTheyExpireAndForgottenWhenGone) {
  lab.net.send(lab.host[0], lab.packet(0, lab.address(2, v6()), 17, udp(1, 2)));
  ASSERT_EQ(lab.h(2).inbox.size(), 1u);
  lab.net.passed.clear();
  auto questions = [&] {
    return lab.net.count([&](const Fabric::Passed& p) {
      return p.to.node == -1 - lab.host[2] && (v6() ? is_nd(p.bytes) : is_arp(p.bytes));
    });
  };
  lab.net.run(seconds(29));
  EXPECT_EQ(questions(), 0u);
  lab.net.run(seconds(2));
  EXPECT_EQ(questions(), 1u);
  for (const Fabric::Passed& p : lab.net.passed)
    if (p.to.node == -1 - lab.host[2]) {
      EXPECT_EQ(mac_at(p.bytes, 0), lab.h(2).mac);  // to it alone
    }
  lab.h(2).answers = false;
  lab.net.run(seconds(33));
  EXPECT_EQ(questions(), 4u);
  const NeighbourTable& table = lab.net.sw(lab.leaf[1]).pipeline->router()->neighbours();
  EXPECT_EQ(table.find(lab.address(2, v6())), NeighbourTable::kNone);
  EXPECT_EQ(table.counters().lost, 1u);
}

TEST_P(RouteTest, AHostWithANewMacIsFollowedButNotWithinASecond) {
  lab.net.send(lab.host[0], lab.packet(0, lab.address(2, v6()), 17, udp(1, 2)));
  ASSERT_EQ(lab.h(2).inbox.size(), 1u);
  const MacAddress fresh{{2, 0, 0, 0, 9, 9}};
  const IpAddress own = lab.address(2, v6());
  const MacAddress group = v6() ? MacAddress{{0x33, 0x33, 0, 0, 0, 1}} : kBroadcastMac;
  // Gratuitous: an ARP announcement (RFC 5227), an unsolicited overriding advertisement to all nodes.
  const Bytes announcement =
      v6() ? ip_frame(group, fresh, ip("ff02::1"), own, 58,
                      neighbour_message(136, 0x20000000, own, 2, fresh, own, ip("ff02::1")), 255)
           : arp(1, fresh, own, {}, own, group);
  const Router& router = *lab.net.sw(lab.leaf[1]).pipeline->router();
  auto known = [&] { return router.neighbours().mac(router.neighbours().find(own)); };
  lab.net.send(lab.host[2], announcement);
  EXPECT_EQ(known(), lab.h(2).mac);
  EXPECT_EQ(router.counters().change_refused, 1u);
  lab.net.run(milliseconds(1000));
  lab.h(2).mac = fresh;
  lab.net.send(lab.host[2], announcement);
  EXPECT_EQ(known(), fresh);
  EXPECT_EQ(router.neighbours().state(router.neighbours().find(own)), "reachable");  // it was asked at once
  lab.net.send(lab.host[0], lab.packet(0, own, 17, udp(3, 4)));
  EXPECT_EQ(mac_at(lab.h(2).inbox.back(), 0), fresh);
}

TEST_P(RouteTest, WhoAsksUsIsKnownWithoutAQuestion) {
  const IpAddress own = lab.address(2, v6()), gateway = ip(v6() ? "fd77:2::1" : "10.77.2.1");
  const MacAddress leaf = lab.net.sw(lab.leaf[1]).mac;
  lab.net.send(
      lab.host[2],
      v6() ? ip_frame({{0x33, 0x33, 0xFF, 0, 0, 1}}, lab.h(2).mac, ip("ff02::1:ff00:1"), own, 58,
                      neighbour_message(135, 0, gateway, 1, lab.h(2).mac, own, ip("ff02::1:ff00:1")), 255)
           : arp(1, lab.h(2).mac, own, {}, gateway, kBroadcastMac));
  const Router& router = *lab.net.sw(lab.leaf[1]).pipeline->router();
  ASSERT_NE(router.neighbours().find(own), NeighbourTable::kNone);
  EXPECT_EQ(router.neighbours().mac(router.neighbours().find(own)), lab.h(2).mac);
  ASSERT_FALSE(lab.h(2).inbox.empty());
  EXPECT_EQ(mac_at(lab.h(2).inbox[0], 6), leaf);
  lab.net.send(lab.host[0], lab.packet(0, own, 17, udp(1, 2)));
  EXPECT_EQ(fate(lab.leaf[1], Fate::kNeighbourHeld), 0u);
}

TEST_P(RouteTest, AnAddressIsAskedForOnItsInterfaceAndPingedOnAll) {
  const IpAddress uplink = ip(v6() ? LeafSpine::link6(0, 0, false) : LeafSpine::link4(0, 0, false));
  const IpAddress own = lab.address(0, v6());
  const Bytes question =
      v6() ? ip_frame({{0x33, 0x33, 0xFF, 0, 0, 0}}, lab.h(0).mac, ip("ff02::1:ff00:0"), own, 58,
                      neighbour_message(135, 0, uplink, 1, lab.h(0).mac, own, ip("ff02::1:ff00:0")), 255)
           : arp(1, lab.h(0).mac, own, {}, uplink, kBroadcastMac);
  lab.net.send(lab.host[0], question);
  EXPECT_TRUE(lab.h(0).inbox.empty());
  EXPECT_EQ(fate(lab.leaf[0], Fate::kFlooded), 1u);
  Bytes echo = {static_cast<uint8_t>(v6() ? 128 : 8), 0, 0, 0, 0, 1, 0, 1};
  for (const IpAddress& to :
       {uplink, ip(v6() ? "fd77:1::1" : "10.77.1.1"), ip(v6() ? "fd77:2::1" : "10.77.2.1"),
        ip(v6() ? LeafSpine::link6(1, 1, true) : LeafSpine::link4(1, 1, true))}) {
    echo[2] = echo[3] = 0;
    const auto sum = static_cast<uint16_t>(~(v6() ? icmp6_sum(own, to, echo) : ones_complement_sum(echo)));
    echo[2] = static_cast<uint8_t>(sum >> 8), echo[3] = static_cast<uint8_t>(sum);
    lab.h(0).inbox.clear();
    lab.net.send(lab.host[0], lab.packet(0, to, v6() ? 58 : 1, echo));
    if (to == ip(v6() ? LeafSpine::link6(1, 1, true) : LeafSpine::link4(1, 1, true))) {
      // The spine's wire to the other leaf is in no leaf's routes.
      EXPECT_EQ(fate(lab.leaf[0], Fate::kNoRoute), 1u);
      continue;
    }
    ASSERT_EQ(lab.h(0).inbox.size(), 1u) << to.to_string();
    EXPECT_EQ(lab.h(0).inbox[0][v6() ? 54 : 34], v6() ? 129 : 0);
  }
}

TEST_P(RouteTest, WhatMayNotCrossARouterIsDroppedByName) {
  const int leaf = lab.leaf[0];
  auto send = [&](std::string_view from, std::string_view to) {
    lab.net.send(lab.host[0], ip_frame(lab.net.sw(leaf).mac, lab.h(0).mac, ip(to), ip(from), 17, udp(1, 2)));
  };
  const std::vector<std::string_view> sources =
      v6() ? std::vector<std::string_view>{"::", "::1", "fe80::1", "ff02::1", "fd77:1::1"}
           : std::vector<std::string_view>{"0.0.0.0",         "127.0.0.1", "169.254.1.1", "224.0.0.1",
                                           "255.255.255.255", "240.0.0.1", "10.77.1.1"};
  const std::string_view good_source = v6() ? "fd77:1::10" : "10.77.1.10";
  const std::string_view good = v6() ? "fd77:2::10" : "10.77.2.10";
  for (const auto s : sources) send(s, good);
  EXPECT_EQ(fate(leaf, Fate::kIpSourceInvalid), sources.size());
  const std::vector<std::string_view> destinations =
      v6() ? std::vector<std::string_view>{"::", "::1", "fe80::1"}
           : std::vector<std::string_view>{"0.0.0.0",   "127.0.0.1",   "169.254.1.1", "255.255.255.255",
                                           "240.0.0.1", "10.77.1.255", "10.77.1.0"};
  for (const auto d : destinations) send(good_source, d);
  EXPECT_EQ(fate(leaf, Fate::kIpDestinationInvalid), destinations.size());
  send(good_source, v6() ? "ff0e::1" : "224.1.2.3");
  EXPECT_EQ(fate(leaf, Fate::kNotForUs), 1u);
  EXPECT_TRUE(lab.h(0).inbox.empty());  // and nobody is told
  EXPECT_EQ(fate(leaf, Fate::kRouted), 0u);

  Bytes damaged = lab.packet(0, ip(good), 17, udp(1, 2));
  damaged[14] = 0x55;
  lab.net.send(lab.host[0], damaged);
  Bytes cut = lab.packet(0, ip(good), 17, udp(1, 2));
  cut.pop_back();
  lab.net.send(lab.host[0], cut);
  EXPECT_EQ(fate(leaf, Fate::kIpHeaderInvalid), 2u);
  if (v6()) return;
  Bytes wrong = lab.packet(0, ip(good), 17, udp(1, 2));
  wrong[24] ^= 1;
  lab.net.send(lab.host[0], wrong);
  EXPECT_EQ(fate(leaf, Fate::kIpChecksum), 1u);
}

// IPv6's fragments have a header of their own in front of the ports, and so no ports.
TEST(Routing, FragmentsOfOneFlowStayTogether) {
  LeafSpine lab;
  std::set<int> by;
  for (uint16_t i = 0; i < 64; i++) {
    // A first fragment, whose ports are there, and later ones, in whose place anything may be.
    Bytes b = lab.packet(0, lab.address(2, false), 17, udp(i, i));
    b[20] = i % 2 ? 0x00 : 0x20, b[21] = static_cast<uint8_t>(i % 2 ? i : 0);
    b[24] = b[25] = 0;
    const auto sum = static_cast<uint16_t>(~ones_complement_sum({b.data() + 14, 20}));
    b[24] = static_cast<uint8_t>(sum >> 8), b[25] = static_cast<uint8_t>(sum);
    lab.net.passed.clear();
    lab.net.send(lab.host[0], b);
    for (const Fabric::Passed& p : lab.net.passed)
      if (p.to.node == lab.spine[0] || p.to.node == lab.spine[1]) by.insert(p.to.node);
  }
  EXPECT_EQ(by.size(), 1u);
  EXPECT_EQ(lab.h(2).inbox.size(), 64u);
}

TEST_P(RouteTest, TagsForPriorityAreTakenOffAndVlansDoNotReachTheRouter) {
  const Bytes plain = lab.packet(0, lab.address(2, v6()), 17, udp(1, 2));
  auto tagged = [&](uint16_t tci) {
    Bytes b = plain;
    const uint8_t tag[4] = {0x81, 0x00, static_cast<uint8_t>(tci >> 8), static_cast<uint8_t>(tci)};
    b.insert(b.begin() + 12, tag, tag + 4);
    return b;
  };
  lab.net.send(lab.host[0], tagged(0x6000));  // priority 3, no VLAN
  ASSERT_EQ(lab.h(2).inbox.size(), 1u);
  EXPECT_EQ(lab.h(2).inbox[0].size(), plain.size());
  lab.net.send(lab.host[0], tagged(0x6005));
  EXPECT_EQ(fate(lab.leaf[0], Fate::kNotForUs), 1u);
  lab.net.carry({lab.spine[0], 0}, tagged(5));
  lab.net.settle();
  EXPECT_EQ(fate(lab.leaf[0], Fate::kTagOnRoutedPort), 1u);
  EXPECT_EQ(lab.h(2).inbox.size(), 1u);
}

// A whole subnet is scanned: the table's bounds hold, and half of its places are left for those who speak.
TEST_P(RouteTest, AScanLeavesRoomForNeighboursThatSpeak) {
  for (int i = 0; i < 2000; i++) {
    const std::string to =
        v6() ? "fd77:1::1:" + std::to_string(i) : "10.77.1." + std::to_string(20 + i % 230);
    lab.net.carry({-1 - lab.host[0], 0}, lab.packet(0, ip(to), 17, udp(1, 2)));
  }
  lab.net.settle();
  const Router& router = *lab.net.sw(lab.leaf[0]).pipeline->router();
  const auto infos = router.neighbours().infos(lab.net.now());
  const auto held = [&] {
    uint32_t n = 0;
    for (const auto& i : infos) n += i.held;
    return n;
  };
  EXPECT_EQ(held(), 64u);  // half of what may wait, as all came in on one port
  EXPECT_LE(infos.size(), 512u + 4);
  lab.net.run(seconds(4));
  EXPECT_EQ(router.neighbours().infos(lab.net.now()).size(), 4u);  // the next hops
}

// A queue pair sends its last retry seven time-outs of 4.096 µs × 2^14 after the first packet (IBA vol. 1,
// 9.7.6.1.3). Whenever a spine dies, that one must find the other spine.
TEST(Routing, ADeadSpineIsLeftOutBeforeQueuePairsGiveUp) {
  constexpr auto kLastRetry = std::chrono::nanoseconds(7 * 4096ll << 14);
  for (int phase = 0; phase < 100; phase += 10) {
    LeafSpine lab;
    lab.net.run(seconds(1) + milliseconds(phase));
    for (uint16_t l = 0; l < 2; l++) lab.net.cut({lab.spine[0], l});
    lab.net.run(std::chrono::floor<milliseconds>(kLastRetry) / 10 * 10);
    for (uint16_t flow = 0; flow < 64; flow++)
      for (const bool v6 : {false, true})
        for (const auto& [from, to] : {std::pair{0, 2}, {2, 0}}) {
          lab.h(to).inbox.clear();
          lab.net.send(lab.host[from], lab.roce_packet(from, to, v6, flow, 16));
          ASSERT_EQ(lab.h(to).inbox.size(), 1u) << phase << " ms, flow " << flow << " from " << from;
        }
  }
}

// A host that asks us is known, however many others are waited for.
TEST_P(RouteTest, AScanKeepsNobodyFromBeingLearnedWhoSpeaks) {
  for (int i = 0; i < 2000; i++)
    lab.net.carry({-1 - lab.host[0], 0}, lab.packet(0, ip("fd77:1::1:" + std::to_string(i)), 17, udp(1, 2)));
  lab.net.settle();
  const Router& router = *lab.net.sw(lab.leaf[0]).pipeline->router();
  ASSERT_GT(router.counters().full, 0u);
  const IpAddress own = lab.address(1, v6()), gateway = ip(v6() ? "fd77:1::1" : "10.77.1.1");
  auto ask = [&](const MacAddress& mac) {
    lab.net.send(lab.host[1],
                 v6() ? ip_frame({{0x33, 0x33, 0xFF, 0, 0, 1}}, mac, ip("ff02::1:ff00:1"), own, 58,
                                 neighbour_message(135, 0, gateway, 1, mac, own, ip("ff02::1:ff00:1")), 255)
                      : arp(1, mac, own, {}, gateway, kBroadcastMac));
  };
  ask(lab.h(1).mac);
  const uint32_t index = router.neighbours().find(own);
  ASSERT_NE(index, NeighbourTable::kNone);
  EXPECT_EQ(router.neighbours().mac(index), lab.h(1).mac);
  EXPECT_EQ(router.neighbours().state(index), "reachable");  // it was asked at once
  lab.net.send(lab.host[2], lab.packet(2, own, 17, udp(1, 2)));
  EXPECT_EQ(mac_at(lab.h(1).inbox.back(), 0), lab.h(1).mac);
  // The books of those who wait are right: when all have been given up, as many may wait as before.
  lab.net.run(seconds(4));
  const auto count = [&] { return router.neighbours().infos(lab.net.now()).size(); };
  EXPECT_EQ(count(), 5u);  // next hops and this host
  for (int i = 0; i < 2000; i++)
    lab.net.carry({-1 - lab.host[0], 0}, lab.packet(0, ip("fd77:1::1:" + std::to_string(i)), 17, udp(1, 2)));
  lab.net.settle();
  EXPECT_EQ(count(), 5u + 512);
}

// What came in on one port and waits for hosts that are not there leaves room for what came in on another.
TEST_P(RouteTest, OnePortCannotHaveAllFramesThatWait) {
  for (int i = 20; i < 220; i++) {
    const std::string to = (v6() ? "fd77:1::" : "10.77.1.") + std::to_string(i);
    lab.net.carry({-1 - lab.host[0], 0}, lab.packet(0, ip(to), 17, udp(1, 2)));
  }
  lab.net.settle();
  const Router& router = *lab.net.sw(lab.leaf[0]).pipeline->router();
  ASSERT_GT(router.counters().hold_refused, 0u);
  lab.h(1).inbox.clear();  // the questions for all those hosts
  lab.net.send(lab.host[2], lab.packet(2, lab.address(1, v6()), 17, udp(1, 2)));
  EXPECT_EQ(lab.h(1).inbox.size(), 1u);
  // All is given back: as much can wait as before.
  lab.net.run(seconds(4));
  const uint64_t before = fate(lab.leaf[0], Fate::kNeighbourHeld);
  for (int i = 20; i < 220; i++) {
    const std::string to = (v6() ? "fd77:1::" : "10.77.1.") + std::to_string(i);
    lab.net.carry({-1 - lab.host[0], 0}, lab.packet(0, ip(to), 17, udp(1, 2)));
  }
  lab.net.settle();
  EXPECT_EQ(fate(lab.leaf[0], Fate::kNeighbourHeld) - before, 64u);
}

// Somebody says ten times in each 10 ms that a neighbour has another MAC address.
TEST_P(RouteTest, ANeighbourIsAskedOnceASecondHoweverOftenItChanges) {
  const IpAddress own = lab.address(2, v6());
  lab.net.send(lab.host[0], lab.packet(0, own, 17, udp(1, 2)));
  const Router& router = *lab.net.sw(lab.leaf[1]).pipeline->router();
  lab.h(2).answers = false;
  lab.net.run(seconds(1));
  lab.net.passed.clear();
  const MacAddress group = v6() ? MacAddress{{0x33, 0x33, 0, 0, 0, 1}} : kBroadcastMac;
  auto forge = [&](int i) {
    const MacAddress forged{{2, 0, 0, 9, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i)}};
    lab.net.send(lab.host[2],
                 v6() ? ip_frame(group, forged, ip("ff02::1"), own, 58,
                                 neighbour_message(136, 0x20000000, own, 2, forged, own, ip("ff02::1")), 255)
                      : arp(1, forged, own, {}, own, group));
  };
  for (int i = 0; i < 3000; i++) {
    forge(i);
    if (i % 10 == 9) lab.net.run(milliseconds(10));
  }
  EXPECT_EQ(router.counters().changed, 3000u);
  const size_t questions = lab.net.count([&](const Fabric::Passed& p) {
    return p.from.node == lab.leaf[1] && p.to.node == -1 - lab.host[2] &&
           (v6() ? is_nd(p.bytes) && p.bytes[54] == 135 : is_arp(p.bytes) && be16(p.bytes, 20) == 1);
  });
  EXPECT_GE(questions, 3u);
  EXPECT_LE(questions, 4u);
  // The host's answer counts, though its question was overtaken by another change.
  forge(3000);
  ASSERT_NE(router.neighbours().find(own), NeighbourTable::kNone);
  const MacAddress leaf = lab.net.sw(lab.leaf[1]).mac;
  const IpAddress gateway = ip(v6() ? "fd77:2::1" : "10.77.2.1");
  lab.net.send(lab.host[2],
               v6() ? ip_frame(leaf, lab.h(2).mac, gateway, own, 58,
                               neighbour_message(136, 0x60000000, own, 2, lab.h(2).mac, own, gateway), 255)
                    : arp(2, lab.h(2).mac, own, leaf, gateway, leaf));
  EXPECT_EQ(router.neighbours().state(router.neighbours().find(own)), "reachable");
}

// A poll is part of one turn of the worker, whatever is due.
TEST(NeighbourTable, APollAsksAFewAndTheNextOnesTheRest) {
  HeapFramePool pool;
  NeighbourConfig config;
  config.entries_max = 4000;
  NeighbourTable table(config, Fib({on(kBridge, "fd77::1/64")}, {}), 2, {{2, 0, 0, 0, 0, 1}}, 1, pool);
  const IpAddress own = ip("fd77::1");
  for (int i = 0; i < 2000; i++)
    ASSERT_NE(table.resolve(ip("fd77::1:" + std::to_string(i)), kBridge, own, seconds(1)),
              NeighbourTable::kNone);
  std::set<Bytes> asked;
  FrameList questions;
  for (int polls = 0; table.next_deadline() <= seconds(1); polls++) {
    ASSERT_LT(polls, 2000);
    table.poll(seconds(1), questions);
    ASSERT_LE(questions.size(), NeighbourTable::kActsMax);
    while (Frame f = questions.pop()) asked.insert(bytes_of(f));
  }
  EXPECT_EQ(asked.size(), 2000u);
  EXPECT_EQ(table.next_deadline(), seconds(2));
}

// Against a plain map, over random operations.
TEST(DueQueue, AgreesWithAMap) {
  constexpr uint32_t kEntries = 50;
  DueQueue queue(kEntries);
  std::map<uint32_t, Time> model;
  uint64_t state = 1;
  auto random = [&](uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((state >> 33) % n);
  };
  for (int i = 0; i < 100'000; i++) {
    const uint32_t entry = random(kEntries);
    if (random(3) == 0) {
      queue.remove(entry);
      model.erase(entry);
    } else {
      const Time due = milliseconds(random(1000));
      queue.set(entry, due);
      model[entry] = due;
    }
    Time next = kNever;
    for (const auto& [_, due] : model) next = std::min(next, due);
    ASSERT_EQ(queue.next(), next);
    if (next != kNever) {
      ASSERT_EQ(model.at(queue.first()), next);
    }
  }
}

// Everything that routing can make of a frame, with its ingress port on the first leaf.
std::vector<std::pair<Bytes, uint16_t>> all_kinds(LeafSpine& lab) {
  Fabric::Switch& leaf = lab.net.sw(lab.leaf[0]);
  std::vector<std::pair<Bytes, uint16_t>> kinds;
  for (const bool v6 : {false, true}) {
    const IpAddress far = lab.address(2, v6), near = lab.address(1, v6), own = lab.address(0, v6);
    kinds.push_back({lab.roce_packet(0, 2, v6, 0xC000), 0});                               // by a route
    kinds.push_back({lab.packet(0, near, 17, udp(1, 2)), 0});                              // held
    kinds.push_back({lab.packet(0, far, 17, udp(1, 2), 1), 0});                            // time exceeded
    kinds.push_back({lab.packet(0, ip(v6 ? "fd99::1" : "10.99.0.1"), 17, udp(1, 2)), 0});  // no route
    const IpAddress gateway = ip(v6 ? "fd77:1::1" : "10.77.1.1");
    // The neighbour's answer to the question that the one held raises: what is held is released.
    kinds.push_back(
        {v6 ? ip_frame(leaf.mac, lab.h(1).mac, gateway, near, 58,
                       neighbour_message(136, 0x60000000, near, 2, lab.h(1).mac, near, gateway), 255)
            : arp(2, lab.h(1).mac, near, leaf.mac, gateway, leaf.mac),
         1});
    kinds.push_back(
        {v6 ? ip_frame({{0x33, 0x33, 0xFF, 0, 0, 1}}, lab.h(0).mac, ip("ff02::1:ff00:1"), own, 58,
                       neighbour_message(135, 0, gateway, 1, lab.h(0).mac, own, ip("ff02::1:ff00:1")), 255)
            : arp(1, lab.h(0).mac, own, {}, gateway, kBroadcastMac),
         0});
  }
  return kinds;
}

TEST(Routing, ProcessAllocatesNothing) {
  LeafSpine lab;
  const Fabric::Switch& leaf = lab.net.sw(lab.leaf[0]);
  const auto kinds = all_kinds(lab);
  std::vector<Frame> spare;  // so that the pool needs no new slab
  HeapFramePool pool;
  PipelineConfig config;
  config.ports = 4;
  config.engine.mac = leaf.mac;
  config.routing.interfaces = {on(kBridge, "10.77.1.1/24"), on(kBridge, "fd77:1::1/64"),
                               on(2, "10.255.0.0/31"),      on(3, "10.255.0.2/31"),
                               on(2, "fd00::/127"),         on(3, "fd01::/127")};
  config.routing.routes = {route("10.77.2.0/24", {"10.255.0.1", "10.255.0.3"}),
                           route("fd77:2::/64", {"fd00::1", "fd01::1"})};
  config.routing.neighbours.next_hop_probe = seconds(1);  // two rounds, so that too many frames wait
  for (const InterfaceAddress& i : config.routing.interfaces)
    config.engine.addresses.push_back(i.prefix.address);
  Pipeline pipeline(config, pool);
  for (int i = 0; i < 2000; i++) spare.push_back(Frame::allocate(pool));
  spare.clear();
  FrameList in, out;
  for (int round = 0; round < 40; round++) {
    const Time now = seconds(1) + milliseconds(500) * round;
    for (const auto& [bytes, port] : kinds) in.push(frame_of(pool, bytes, port));
    // The spines answer from the tenth round on, and again no more.
    for (uint8_t s = 0; s < 2 && round >= 10 && round < 20; s++)
      in.push(frame_of(pool,
                       arp(2, {{2, 0, 0, 0, 8, s}}, ip(s == 0 ? "10.255.0.1" : "10.255.0.3"), leaf.mac,
                           ip(s == 0 ? "10.255.0.0" : "10.255.0.2"), leaf.mac),
                       static_cast<uint16_t>(2 + s)));
    allocation_forbidden = true;
    pipeline.process(in, now, out);
    if (now >= pipeline.next_deadline()) pipeline.poll(now, out);
    allocation_forbidden = false;
    out.clear();
  }
  const PipelineCounters& c = pipeline.counters();
  for (const Fate f : {Fate::kRouted, Fate::kNeighbourHeld, Fate::kNeighbourHeard, Fate::kNeighbourUnresolved,
                       Fate::kTtlExpired, Fate::kNoRoute, Fate::kArpReplied, Fate::kNdReplied})
    EXPECT_GT(c.fate(f), 0u) << kFateNames[static_cast<size_t>(f)];
  EXPECT_GT(c.router_fates[static_cast<size_t>(Fate::kRouted)], 0u);
  EXPECT_GT(c.router_fates[static_cast<size_t>(Fate::kNeighbourUnresolved)], 0u);
  const RouterCounters r = pipeline.router()->counters();
  EXPECT_GT(r.icmp_errors_sent, 0u);
  EXPECT_GT(r.lost, 0u);
}

// Every prefix and many single-byte changes of every kind: no crash, books balanced (process asserts them).
TEST(Routing, MangledFramesLeaveTheBooksBalanced) {
  LeafSpine lab;
  auto send = [&](const Bytes& b, uint16_t port) {
    lab.net.carry(port < 2 ? Fabric::End{-1 - lab.host[port], 0} : Fabric::End{lab.spine[port - 2], 0}, b);
    lab.net.run(milliseconds(1));
  };
  for (auto& [whole, port] : all_kinds(lab)) {
    const size_t headers = std::min<size_t>(whole.size(), 100);
    for (size_t n = 0; n < headers; n++)
      send(Bytes(whole.begin(), whole.begin() + static_cast<long>(n)), port);
    for (size_t i = 0; i < headers; i++)
      for (const uint8_t change : {0x01, 0x80, 0xFF}) {
        Bytes b = whole;
        b[i] = static_cast<uint8_t>(b[i] ^ change);
        // With a right checksum, what it protects is reached.
        if (be16(b, 12) == 0x0800 && i >= 14 && i < 34) {
          b[24] = b[25] = 0;
          const auto sum = static_cast<uint16_t>(~ones_complement_sum({b.data() + 14, 20}));
          b[24] = static_cast<uint8_t>(sum >> 8), b[25] = static_cast<uint8_t>(sum);
        }
        send(b, static_cast<uint16_t>(i % 2 ? port : 2));
      }
  }
  lab.net.passed.clear();
}

}  // namespace
}  // namespace millrace::switching
