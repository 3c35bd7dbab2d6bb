// Frames with a VLAN tag: bridged in their VLAN, answered in it, reduced in it; never routed.
#include "roce/cm_message.h"
#include "switch/ip_messages.h"
#include "tests/unit/switch_fabric.h"

namespace millrace::switching {
namespace {

using namespace test;

Bytes tagged(Bytes b, uint16_t tci) {
  const uint8_t tag[4] = {0x81, 0x00, static_cast<uint8_t>(tci >> 8), static_cast<uint8_t>(tci)};
  b.insert(b.begin() + 12, tag, tag + 4);
  return b;
}
std::optional<uint16_t> tag_of(const Bytes& b) {
  return be16(b, 12) == 0x8100 ? std::optional(be16(b, 14)) : std::nullopt;
}
Bytes untagged(Bytes b) {
  b.erase(b.begin() + 12, b.begin() + 16);
  return b;
}

// A switch of three bridged ports, and of one that is routed when `routing`.
class VlanTest : public ::testing::TestWithParam<bool> {
 protected:
  VlanTest() {
    RoutingConfig r;
    r.interfaces = {on(kBridge, "10.77.1.1/24"), on(kBridge, "fd77:1::1/64")};
    if (GetParam()) {
      r.interfaces.push_back(on(3, "10.255.0.0/31"));
    } else {
      for (InterfaceAddress& i : r.interfaces) i.has_subnet = false;
    }
    sw = net.add_switch("leaf1", 4, r, 1);
    for (int h = 0; h < 4; h++)
      host[h] = net.add_host("10.77.1." + std::to_string(10 + h), "fd77:1::" + std::to_string(10 + h),
                             {sw, static_cast<uint16_t>(h)});
    net.settle();
    for (int h : host) net.host(h).inbox.clear();
    net.passed.clear();
  }
  const MacAddress& mac(int h) { return net.host(host[h]).mac; }
  std::deque<Bytes>& inbox(int h) { return net.host(host[h]).inbox; }
  std::vector<int> reached() {
    std::vector<int> ports;
    for (const Fabric::Passed& p : net.passed)
      if (p.from.node == sw) ports.push_back(p.from.port);
    net.passed.clear();
    return ports;
  }
  uint64_t fate(Fate f) { return net.sw(sw).pipeline->counters().fate(f); }

  Fabric net;
  int sw, host[4];
};
INSTANTIATE_TEST_SUITE_P(Kinds, VlanTest, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Routing" : "Bridging"; });

TEST_P(VlanTest, QuestionsInATagAreAnsweredInTheSameTag) {
  const IpAddress gateway4 = ip("10.77.1.1"), gateway6 = ip("fd77:1::1");
  const MacAddress ours = net.sw(sw).mac;
  const IpAddress own4 = net.host(host[0]).ip4, own6 = net.host(host[0]).ip6, group = ip("ff02::1:ff00:1");
  Bytes echo = {8, 0, 0, 0, 0, 1, 0, 1}, echo6 = {128, 0, 0, 0, 0, 1, 0, 1};
  const auto sum = static_cast<uint16_t>(~ones_complement_sum(echo));
  echo[2] = static_cast<uint8_t>(sum >> 8), echo[3] = static_cast<uint8_t>(sum);
  const auto sum6 = static_cast<uint16_t>(~icmp6_sum(own6, gateway6, echo6));
  echo6[2] = static_cast<uint8_t>(sum6 >> 8), echo6[3] = static_cast<uint8_t>(sum6);
  const Bytes questions[] = {arp(1, mac(0), own4, {}, gateway4, kBroadcastMac),
                             ip_frame({{0x33, 0x33, 0xFF, 0, 0, 1}}, mac(0), group, own6, 58,
                                      neighbour_message(135, 0, gateway6, 1, mac(0), own6, group), 255),
                             ip_frame(ours, mac(0), gateway4, own4, 1, echo),
                             ip_frame(ours, mac(0), gateway6, own6, 58, echo6)};
  for (const Bytes& q : questions) {
    inbox(0).clear();
    net.send(host[0], q);
    ASSERT_EQ(inbox(0).size(), 1u);
    const Bytes plain = inbox(0)[0];
    for (const uint16_t tci : {0x0000, 0x0005, 0x7005, 0x0FFE}) {
      inbox(0).clear();
      net.send(host[0], tagged(q, tci));
      ASSERT_EQ(inbox(0).size(), 1u) << tci;
      EXPECT_EQ(tag_of(inbox(0)[0]), tci);
      EXPECT_EQ(untagged(inbox(0)[0]), plain);
    }
  }
}

TEST_P(VlanTest, TagsPassUnchangedAndAddressesAreLearnedPerVlan) {
  const Bytes towards = ip_frame(mac(2), mac(0), net.host(host[2]).ip4, net.host(host[0]).ip4, 17, udp(1, 2));
  net.send(host[2], tagged(ip_frame(kBroadcastMac, mac(2), net.host(host[0]).ip4, net.host(host[2]).ip4, 17,
                                    udp(1, 2)),
                           5));
  reached();
  net.send(host[0], tagged(towards, 0x6005));
  EXPECT_EQ(reached(), std::vector<int>{2});
  EXPECT_EQ(inbox(2).back(), tagged(towards, 0x6005));
  // In another VLAN, and in none, nobody has heard of it.
  const std::vector<int> others = GetParam() ? std::vector<int>{1, 2} : std::vector<int>{1, 2, 3};
  net.send(host[0], tagged(towards, 6));
  EXPECT_EQ(reached(), others);
  net.send(host[0], towards);
  EXPECT_EQ(reached(), others);
  // A tag for priority alone is no VLAN.
  net.send(host[2], tagged(ip_frame(kBroadcastMac, mac(2), net.host(host[0]).ip4, net.host(host[2]).ip4, 17,
                                    udp(1, 2)),
                           0x8000));
  reached();
  net.send(host[0], towards);
  EXPECT_EQ(reached(), std::vector<int>{2});
}

// A router with an arm in each VLAN, behind two ports: with one table for all, its address would be refused
// as a forged one.
TEST_P(VlanTest, OneMacInTwoVlansBehindTwoPortsIsNoMove) {
  const MacAddress router{{2, 0, 0, 0, 5, 5}};
  for (int i = 0; i < 3; i++) {
    net.send(host[0],
             tagged(ip_frame(kBroadcastMac, router, ip("10.0.0.1"), ip("10.0.0.2"), 17, udp(1, 2)), 5));
    net.send(host[1],
             tagged(ip_frame(kBroadcastMac, router, ip("10.0.0.1"), ip("10.0.0.2"), 17, udp(1, 2)), 6));
  }
  EXPECT_EQ(net.sw(sw).pipeline->counters().l2_move_refused, 0u);
  reached();
  for (const auto& [vlan, port] : {std::pair<uint16_t, int>{5, 0}, {6, 1}}) {
    net.send(host[2], tagged(ip_frame(router, mac(2), ip("10.0.0.2"), ip("10.0.0.1"), 17, udp(1, 2)), vlan));
    EXPECT_EQ(reached(), std::vector<int>{port});
  }
}

// A REQ that the engine refuses (its private data is no join) is enough to see which way its answers go.
TEST_P(VlanTest, TheEngineAnswersInTheTagOfTheRequest) {
  HeapFramePool pool;
  for (const std::optional<uint16_t> tci : {std::optional<uint16_t>(), std::optional<uint16_t>(0x6000),
                                            std::optional<uint16_t>(0x6007), std::optional<uint16_t>(9)}) {
    roce::Path path;
    path.src_mac = mac(1), path.dst_mac = net.sw(sw).mac;
    path.src_ip = net.host(host[1]).ip4, path.dst_ip = ip("10.77.1.1");
    path.has_vlan = tci.has_value();
    path.vlan_tci = tci.value_or(0);
    roce::TransportFields fields;
    fields.opcode = static_cast<roce::Opcode>(0x64);  // UD SEND ONLY
    fields.dest_qp = Qpn{1};
    fields.src_qp = Qpn{1};
    fields.qkey = 0x80010000;
    roce::ReqMessage req;
    req.local_comm_id = 77u + tci.value_or(1);
    req.service_id = 0x0000000001060000ull | 18600;
    req.local_qpn = Qpn{0x1234};
    req.primary.local_gid = path.src_ip, req.primary.remote_gid = path.dst_ip;
    req.path_mtu = 5;
    const roce::Mad mad = roce::encode_cm({{}, req});
    inbox(1).clear(), net.passed.clear();
    net.send(host[1], bytes_of(roce::build(pool, path, fields, mad)));
    ASSERT_EQ(inbox(1).size(), 1u) << tci.value_or(0xFFFF);
    EXPECT_EQ(reached(), std::vector<int>{1});
    EXPECT_EQ(tag_of(inbox(1)[0]), tci);
    roce::Packet answer;
    ASSERT_EQ(roce::parse(inbox(1)[0], answer), roce::ParseVerdict::kOk);
    EXPECT_EQ(answer.dst_ip, path.src_ip);
    EXPECT_TRUE(roce::icrc_ok(answer));
  }
  EXPECT_EQ(fate(Fate::kToEngine), 4u);
}

}  // namespace
}  // namespace millrace::switching
