// CNPs that the switch sends for what it spills. The connection manager's messages, the data and the reading
// of the CNPs are the simulator's, written apart from roce/.
#include "buffering/fast_cnp.h"

#include <gtest/gtest.h>

#include "buffering/local_store.h"
#include "buffering/traffic_manager.h"
#include "tests/unit/switch_fabric.h"
#include "tools/sim/nic_cm.h"
#include "tools/sim/nic_wire.h"

namespace millrace::buffering {
namespace {

using sim::CmKind;
using sim::CmMad;
using sim::NicPacket;
using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr uint8_t kReadMiddle = 0x0E;  // RDMA READ response middle, IBA table 38
constexpr MacAddress kMac{{2, 0x53, 0, 0, 0, 1}};

struct Side {
  MacAddress mac;
  IpAddress address;
  uint32_t qpn, id;
};

class FastCnpTest : public testing::Test {
 protected:
  FastCnpTest() { config.spillway.fast_cnp = true, config.mac = kMac; }

  Frame frame_of(const std::vector<uint8_t>& bytes) {
    Frame f = Frame::allocate(pool);
    std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
    f.buffer()->length = static_cast<uint32_t>(bytes.size());
    return f;
  }
  static NicPacket between(const Side& from, const Side& to) {
    NicPacket packet;
    packet.to_mac = to.mac, packet.from_mac = from.mac;
    packet.to = to.address, packet.from = from.address;
    packet.udp_port = 0xC123;
    return packet;
  }
  std::vector<uint8_t> mad(const Side& from, const Side& to, CmKind kind, uint32_t local, uint32_t remote,
                           uint32_t qpn = 0, uint32_t qkey = 0x80010000) {
    CmMad m;
    m.kind = kind, m.local_id = local, m.remote_id = remote, m.qpn = qpn;
    m.local_gid = from.address, m.remote_gid = to.address;
    const auto bytes = sim::write_mad(m);
    NicPacket packet = between(from, to);
    packet.opcode = sim::kOpUdSend, packet.qpn = 1, packet.qkey = qkey, packet.source_qp = 1;
    packet.payload = bytes;
    return sim::make_frame(packet);
  }
  void hear(FastCnp& cnp, const std::vector<uint8_t>& bytes) {
    const Frame f = frame_of(bytes);
    cnp.hear(f, now);
  }
  void connect(FastCnp& cnp, const Side& from, const Side& to) {
    hear(cnp, mad(from, to, CmKind::kReq, from.id, 0, from.qpn));
    hear(cnp, mad(to, from, CmKind::kRep, to.id, from.id, to.qpn));
    hear(cnp, mad(from, to, CmKind::kRtu, from.id, to.id));
  }
  static NicPacket data(const Side& from, const Side& to, uint8_t opcode = sim::kOpSendMiddle) {
    NicPacket packet = between(from, to);
    packet.opcode = opcode, packet.qpn = to.qpn, packet.traffic_class = 26 << 2 | 2;
    static const uint8_t payload[256] = {};
    packet.payload = payload;
    return packet;
  }
  // Whom a CNP for such a packet goes to: 0 if none is sent.
  uint32_t told(FastCnp& cnp, const NicPacket& packet) {
    const Frame f = frame_of(sim::make_frame(packet));
    FrameList out;
    cnp.tell(FastCnp::notice(f, look(f)), now, counters, out);
    EXPECT_LE(out.size(), 1u);
    if (out.empty()) return 0;
    const Frame sent = out.pop();
    last.assign(sent.bytes().begin(), sent.bytes().end());
    EXPECT_EQ(sent.total_length(), last.size());
    EXPECT_EQ(sim::read_frame(last, cnp_read), sim::Reading::kGood);
    EXPECT_EQ(cnp_read.opcode, sim::kOpCnp);
    return cnp_read.qpn;
  }
  uint64_t suppressed(CnpSuppressed why) const { return counters.cnps_suppressed[static_cast<size_t>(why)]; }

  Config config;
  HeapFramePool pool{4608, UINT32_MAX, true};
  SpillCounters counters;
  Time now = seconds(1);
  std::vector<uint8_t> last;
  NicPacket cnp_read;
  Side a{{{2, 0, 0, 0, 0, 1}}, *IpAddress::parse("10.78.0.1"), 0x1111, 71};
  Side p{{{2, 0, 0, 0, 0, 2}}, *IpAddress::parse("10.77.0.2"), 0x2222, 72};
};

// As the receiver's own: from its address, with its P_Key, to the sender's queue pair (annex A17.9.3); the
// ICRC is right, or read_frame() would say so.
TEST_F(FastCnpTest, ACnpIsWhatTheReceiverWouldSend) {
  FastCnp cnp(config, pool);
  connect(cnp, a, p);
  NicPacket d = data(a, p);
  d.pkey = 0x8123;
  EXPECT_EQ(told(cnp, d), a.qpn);
  EXPECT_EQ(cnp_read.from, p.address);
  EXPECT_EQ(cnp_read.to, a.address);
  EXPECT_EQ(cnp_read.from_mac, p.mac);
  EXPECT_EQ(cnp_read.to_mac, a.mac);
  EXPECT_EQ(cnp_read.pkey, 0x8123);
  EXPECT_TRUE(cnp_read.becn);
  EXPECT_EQ(cnp_read.psn, 0u);
  EXPECT_EQ(cnp_read.traffic_class, 48 << 2) << "DSCP 48, not ECN-capable";
  // Sixteen reserved bytes, which the reader leaves out, between the BTH and the ICRC.
  ASSERT_EQ(last.size(), 14u + 20 + 8 + 12 + 16 + 4);
  EXPECT_TRUE(std::all_of(last.begin() + 54, last.begin() + 70, [](uint8_t b) { return b == 0; }));
  EXPECT_GE(cnp_read.udp_port, 0xC000);
  EXPECT_EQ(counters.cnps_sent, 1u);
  // The other way, where it is READ responses that congest.
  EXPECT_EQ(told(cnp, data(p, a, kReadMiddle)), p.qpn);
  EXPECT_EQ(cnp_read.from, a.address);
  EXPECT_EQ(cnp_read.to, p.address);
}

TEST_F(FastCnpTest, OverIpv6InAVlanAndWithAnotherDscp) {
  config.spillway.fast_cnp_dscp = 46;
  a.address = *IpAddress::parse("fd78::1"), p.address = *IpAddress::parse("fd77::2");
  FastCnp cnp(config, pool);
  connect(cnp, a, p);
  std::vector<uint8_t> bytes = sim::make_frame(data(a, p));
  const uint8_t tag[] = {0x81, 0x00, 0x30, 0x07};  // priority 1, VLAN 7
  bytes.insert(bytes.begin() + 12, tag, tag + 4);
  const Frame f = frame_of(bytes);
  FrameList out;
  cnp.tell(FastCnp::notice(f, look(f)), now, counters, out);
  ASSERT_EQ(out.size(), 1u);
  const Frame sent = out.pop();
  last.assign(sent.bytes().begin(), sent.bytes().end());
  EXPECT_EQ(sim::get_be(last.data() + 12, 4), 0x8100C007u) << "priority 6, the same VLAN";
  last.erase(last.begin() + 12, last.begin() + 16);
  ASSERT_EQ(sim::read_frame(last, cnp_read), sim::Reading::kGood);
  EXPECT_EQ(cnp_read.traffic_class, 46 << 2);
  EXPECT_EQ(cnp_read.from, p.address);
  EXPECT_EQ(cnp_read.qpn, a.qpn);
}

// What was routed has the switch's own MAC address as its source: whereto, the router knows.
TEST_F(FastCnpTest, OfWhatWasRoutedItComesFromTheSwitchsMac) {
  FastCnp cnp(config, pool);
  connect(cnp, a, p);
  NicPacket d = data(a, p);
  d.from_mac = kMac;
  EXPECT_EQ(told(cnp, d), a.qpn);
  EXPECT_EQ(cnp_read.from_mac, kMac);
  EXPECT_EQ(cnp_read.to_mac, MacAddress{});
}

TEST_F(FastCnpTest, OnceInItsIntervalForEachFlow) {
  FastCnp cnp(config, pool);
  Side other = a;
  other.qpn = 0x3333, other.id = 73;
  connect(cnp, a, p);
  Side q = p;
  q.qpn = 0x4444, q.id = 74;
  connect(cnp, other, q);
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn);
  EXPECT_EQ(told(cnp, data(other, q)), other.qpn) << "another flow";
  EXPECT_EQ(told(cnp, data(p, a)), p.qpn) << "another direction";
  now += microseconds(50) - nanoseconds(1);
  EXPECT_EQ(told(cnp, data(a, p)), 0u);
  EXPECT_EQ(suppressed(CnpSuppressed::kInterval), 1u);
  now += nanoseconds(1);
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn);
  EXPECT_EQ(counters.cnps_sent, 4u);
}

TEST_F(FastCnpTest, WithoutAConnectionManagersExchangeTheSenderIsUnknown) {
  FastCnp cnp(config, pool);
  EXPECT_EQ(told(cnp, data(a, p)), 0u);
  hear(cnp, mad(a, p, CmKind::kReq, a.id, 0, a.qpn));
  EXPECT_EQ(told(cnp, data(a, p)), 0u) << "a request alone";
  hear(cnp, mad(p, a, CmKind::kRep, p.id, a.id + 1, p.qpn));
  EXPECT_EQ(told(cnp, data(a, p)), 0u) << "the reply to another";
  Side elsewhere = p;
  elsewhere.address = *IpAddress::parse("10.77.0.9");
  hear(cnp, mad(elsewhere, a, CmKind::kRep, p.id, a.id, p.qpn));
  EXPECT_EQ(told(cnp, data(a, p)), 0u) << "a reply of another";
  EXPECT_EQ(suppressed(CnpSuppressed::kUnknownQp), 4u);
  hear(cnp, mad(p, a, CmKind::kRep, p.id, a.id, p.qpn));
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn);
  NicPacket stranger = data(a, p);
  stranger.qpn++;
  EXPECT_EQ(told(cnp, stranger), 0u);
}

TEST_F(FastCnpTest, WhatIsNoCmMessageTeachesNothing) {
  FastCnp cnp(config, pool);
  hear(cnp, mad(a, p, CmKind::kReq, a.id, 0, a.qpn, 0x80010001));
  std::vector<uint8_t> broken = mad(a, p, CmKind::kReq, a.id, 0, a.qpn);
  broken[80] ^= 1;
  hear(cnp, broken);
  std::vector<uint8_t> shorter = mad(a, p, CmKind::kReq, a.id, 0, a.qpn);
  for (size_t n = 0; n < shorter.size(); n++)
    hear(cnp, std::vector<uint8_t>(shorter.begin(), shorter.begin() + static_cast<ptrdiff_t>(n)));
  hear(cnp, mad(a, p, CmKind::kReq, a.id, 0, 1));
  EXPECT_EQ(cnp.requests() + cnp.connections(), 0u);
}

TEST_F(FastCnpTest, RepeatsChangeNothingAndANewConnectionReplacesAnOldOne) {
  FastCnp cnp(config, pool);
  connect(cnp, a, p), connect(cnp, a, p);
  EXPECT_EQ(cnp.connections(), 1u);
  EXPECT_EQ(cnp.requests(), 0u);
  // The same queue pair at p, which has lost its peer and found another.
  Side later = a;
  later.qpn = 0x5555, later.id = 75;
  connect(cnp, later, p);
  EXPECT_EQ(cnp.connections(), 1u);
  EXPECT_EQ(told(cnp, data(a, p)), later.qpn);
  // The same ID with another queue pair is another request.
  Side again = later;
  again.qpn = 0x6666;
  Side q = p;
  q.qpn = 0x7777;
  connect(cnp, again, q);
  EXPECT_EQ(told(cnp, data(a, q)), again.qpn);
  EXPECT_EQ(told(cnp, data(a, p)), 0u);
}

TEST_F(FastCnpTest, EndsAreHeard) {
  struct {
    const char* what;
    bool by_active;
    CmKind kind;
    bool known_after;
    uint32_t off;  // of the other's ID
  } const ends[] = {
      {"DREQ", true, CmKind::kDreq, false, 0},     {"DREQ", false, CmKind::kDreq, false, 0},
      {"DREP", true, CmKind::kDrep, false, 0},     {"DREP", false, CmKind::kDrep, false, 0},
      {"REJ", true, CmKind::kRej, false, 0},       {"REJ", false, CmKind::kRej, false, 0},
      {"RTU", true, CmKind::kRtu, true, 0},        {"MRA", false, CmKind::kMra, true, 0},
      {"another's", true, CmKind::kDreq, true, 1}, {"another's", false, CmKind::kDreq, true, 1}};
  for (const auto& e : ends) {
    FastCnp cnp(config, pool);
    connect(cnp, a, p);
    const Side &from = e.by_active ? a : p, &to = e.by_active ? p : a;
    hear(cnp, mad(from, to, e.kind, from.id, to.id + e.off, to.qpn));
    EXPECT_EQ(cnp.connections(), e.known_after) << e.what << e.by_active;
    EXPECT_EQ(told(cnp, data(a, p)) != 0, e.known_after) << e.what << e.by_active;
  }
  FastCnp cnp(config, pool);
  hear(cnp, mad(a, p, CmKind::kReq, a.id, 0, a.qpn));
  EXPECT_EQ(cnp.requests(), 1u);
  hear(cnp, mad(p, a, CmKind::kRej, 0, a.id));  // refused at once: it has no ID
  EXPECT_EQ(cnp.requests(), 0u);
}

// What was heard of longest ago gives way; a flood of requests leaves the connections alone.
TEST_F(FastCnpTest, TablesAreBounded) {
  FastCnp cnp(config, pool);
  connect(cnp, a, p);
  Side flood = a;
  for (uint32_t i = 0; i < 2 * FastCnp::kRequestsMax; i++)
    hear(cnp, mad(flood, p, CmKind::kReq, 1000 + i, 0, 0x8000 + i));
  EXPECT_EQ(cnp.requests(), FastCnp::kRequestsMax);
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn);
  auto numbered = [](Side s, uint32_t i) {
    s.qpn = 0x10000 + i, s.id = 10000 + i;
    return s;
  };
  for (uint32_t i = 0; i < FastCnp::kConnectionsMax; i++) {
    connect(cnp, numbered(a, i), numbered(p, i));
    if (i % 1000 != 0) continue;
    now += microseconds(50);
    ASSERT_EQ(told(cnp, data(a, p)), a.qpn) << "used, so that it is not the oldest";
  }
  EXPECT_EQ(cnp.connections(), FastCnp::kConnectionsMax);
  EXPECT_EQ(told(cnp, data(numbered(a, 0), numbered(p, 0))), 0u);
  EXPECT_EQ(told(cnp, data(numbered(a, 7), numbered(p, 7))), numbered(a, 7).qpn);
}

TEST_F(FastCnpTest, WhatIsOldIsForgotten) {
  FastCnp cnp(config, pool);
  connect(cnp, a, p);
  hear(cnp, mad(a, p, CmKind::kReq, 99, 0, 0x9999));
  now += minutes(2) - nanoseconds(1);
  hear(cnp, mad(a, p, CmKind::kRtu, 1, 2));
  EXPECT_EQ(cnp.requests(), 1u);
  now += nanoseconds(1);
  hear(cnp, mad(a, p, CmKind::kRtu, 1, 2));
  EXPECT_EQ(cnp.requests(), 0u);
  now = seconds(1) + hours(24) - nanoseconds(1);
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn);
  now += hours(24) - nanoseconds(1);
  EXPECT_EQ(told(cnp, data(a, p)), a.qpn) << "it was used meanwhile";
  now += hours(24);
  EXPECT_EQ(told(cnp, data(a, p)), 0u);
  hear(cnp, mad(a, p, CmKind::kRtu, 1, 2));
  EXPECT_EQ(cnp.connections(), 0u);
}

TEST_F(FastCnpTest, WithoutAFrameItIsCounted) {
  HeapFramePool empty(4608, 0);
  FastCnp cnp(config, empty);
  connect(cnp, a, p);
  EXPECT_EQ(told(cnp, data(a, p)), 0u);
  EXPECT_EQ(suppressed(CnpSuppressed::kNoFrames), 1u);
}

// Through the traffic manager: who is told, and when no more.
class FastCnpAtAPort : public FastCnpTest {
 protected:
  FastCnpAtAPort() {
    PortConfig port;
    port.rate_bps = 1'000'000'000;
    port.dscp_to_tc[26] = 3;
    port.queues[3].profile.static_th = 1000;
    port.queues[3].profile.spill = true;
    config.ports.resize(2, port);
    config.ports[0].rate_bps = 0;
    config.spillway.enabled = true;
    config.spillway.dscp.set(26);
    config.spillway.pool_size = 1 << 20;
  }
  TrafficManager& make() {
    return tm.emplace(config, pool,
                      std::make_unique<LocalStore>(1 << 20, UINT32_MAX, Spillway::ids_max(config.spillway)));
  }
  void pass(const std::vector<uint8_t>& bytes, uint16_t to) {
    tm->enqueue(frame_of(bytes), to, 1 - to, now, out);
  }
  size_t cnps() {
    size_t n = 0;
    for (FrameList& own = tm->own_frames(); Frame f = own.pop(); n++)
      EXPECT_EQ(sim::read_frame(f.bytes(), cnp_read), sim::Reading::kGood);
    return n;
  }
  std::optional<TrafficManager> tm;
  FrameList out;
};

TEST_F(FastCnpAtAPort, SpilledPacketsThatAreEctTellTheirSender) {
  make();
  pass(mad(a, p, CmKind::kReq, a.id, 0, a.qpn), 1);
  pass(mad(p, a, CmKind::kRep, p.id, a.id, p.qpn), 0);
  ASSERT_EQ(tm->spillway()->fast_cnp()->connections(), 1u);
  now += milliseconds(1);
  NicPacket d = data(a, p);
  d.traffic_class = 26 << 2;
  for (int i = 0; i < 6; i++) pass(sim::make_frame(d), 1);
  EXPECT_EQ(tm->spillway()->counters().spilled.packets, 2u);
  EXPECT_EQ(cnps(), 0u) << "not ECN-capable: nobody asked for it";
  pass(sim::make_frame(data(a, p)), 1);
  EXPECT_EQ(tm->spillway()->counters().spilled.packets, 3u);
  EXPECT_EQ(cnps(), 1u);
  EXPECT_EQ(cnp_read.qpn, a.qpn);
  pass(sim::make_frame(data(a, p)), 1);
  EXPECT_EQ(cnps(), 0u);
  const SpillCounters c = tm->spillway()->counters();
  EXPECT_EQ(c.cnps_sent, 1u);
  EXPECT_EQ(c.cnps_suppressed[static_cast<size_t>(CnpSuppressed::kInterval)], 1u);
  EXPECT_EQ(c.cnps_suppressed[static_cast<size_t>(CnpSuppressed::kUnknownQp)], 0u);
}

// While the key shrinks its senders are slower than the port.
TEST_F(FastCnpAtAPort, NobodyIsToldWhileTheKeyShrinks) {
  make();
  pass(mad(a, p, CmKind::kReq, a.id, 0, a.qpn), 1);
  pass(mad(p, a, CmKind::kRep, p.id, a.id, p.qpn), 0);
  now += microseconds(500);
  for (int i = 0; i < 200; i++) pass(sim::make_frame(data(a, p)), 1);
  EXPECT_EQ(cnps(), 1u);
  // A packet takes 2.7 µs on the wire; one comes in 25 µs.
  const Time until = now + microseconds(400);
  for (; now < until; now += microseconds(1)) {
    if (now.count() % 25'000 == 0) pass(sim::make_frame(data(a, p)), 1);
    tm->poll(now, out);
  }
  EXPECT_GT(tm->spillway()->keys_count(), 0u);
  const SpillCounters c = tm->spillway()->counters();
  EXPECT_LE(c.cnps_sent, 1u + 4u) << "not yet seen to shrink, for two windows";
  EXPECT_GE(c.cnps_suppressed[static_cast<size_t>(CnpSuppressed::kShrinking)], 4u);
  // It is full again: growing, and told so.
  const uint64_t before = c.cnps_sent;
  for (int i = 0; i < 8; i++, now += microseconds(50)) {
    for (int k = 0; k < 40; k++) pass(sim::make_frame(data(a, p)), 1);
    tm->poll(now, out);
  }
  EXPECT_GT(tm->spillway()->counters().cnps_sent, before);
}

TEST_F(FastCnpAtAPort, OffItLearnsAndSendsNothing) {
  config.spillway.fast_cnp = false;
  make();
  pass(mad(a, p, CmKind::kReq, a.id, 0, a.qpn), 1);
  pass(mad(p, a, CmKind::kRep, p.id, a.id, p.qpn), 0);
  for (int i = 0; i < 9; i++) pass(sim::make_frame(data(a, p)), 1);
  EXPECT_GT(tm->spillway()->counters().spilled.packets, 0u);
  EXPECT_EQ(cnps(), 0u);
  EXPECT_EQ(tm->spillway()->fast_cnp(), nullptr);
}

// What was routed: the CNP goes by the route to its source, with the MAC addresses of that way; what was
// bridged beside it keeps those of the two hosts.
class FastCnpOfASwitch : public FastCnpAtAPort {
 protected:
  void start(bool routed) {
    using switching::test::on;
    switching::PipelineConfig c;
    c.ports = 2;
    c.engine.mac = kMac;
    c.engine.addresses = {*IpAddress::parse("10.78.0.100"), *IpAddress::parse("10.77.0.100")};
    if (routed) c.routing.interfaces = {on(0, "10.78.0.100/24"), on(1, "10.77.0.100/24")};
    // A route to 10.78.0.1 that would lead astray what is bridged.
    if (!routed) c.routing.interfaces = {on(switching::kBridge, "10.77.0.100/24")};
    if (!routed) c.routing.routes = {switching::test::route("10.78.0.0/24", {"10.77.0.9"})};
    c.buffers = config;
    pipeline = std::make_unique<switching::Pipeline>(c, pool);
    for (const auto& [side, port] : {std::pair{&a, 0}, {&p, 1}})
      feed(switching::test::arp(1, side->mac, side->address, {},
                                c.engine.addresses[static_cast<size_t>(port)], kBroadcastMac),
           static_cast<uint16_t>(port));
  }
  void feed(const std::vector<uint8_t>& bytes, uint16_t port) {
    FrameList in;
    Frame f = frame_of(bytes);
    f.set_port(port);
    in.push(std::move(f));
    pipeline->process(in, now, out);
  }
  void congest(MacAddress to_a, MacAddress to_p) {
    Side far = a, near = p;
    far.mac = to_a, near.mac = to_p;
    feed(mad(a, near, CmKind::kReq, a.id, 0, a.qpn), 0);
    feed(mad(p, far, CmKind::kRep, p.id, a.id, p.qpn), 1);
    out.clear();
    for (int i = 0; i < 9; i++) feed(sim::make_frame(data(a, near)), 0);
    int cnps = 0;
    while (Frame f = out.pop()) {
      last.assign(f.bytes().begin(), f.bytes().end());
      if (sim::read_frame(last, cnp_read) != sim::Reading::kGood || cnp_read.opcode != sim::kOpCnp) continue;
      cnps++;
      EXPECT_EQ(f.port(), 0);
      EXPECT_EQ(cnp_read.qpn, a.qpn);
      EXPECT_EQ(cnp_read.from, p.address);
      EXPECT_EQ(cnp_read.to, a.address);
      EXPECT_EQ(cnp_read.to_mac, a.mac);
      EXPECT_EQ(cnp_read.from_mac, to_p);
    }
    EXPECT_EQ(cnps, 1);
  }
  std::unique_ptr<switching::Pipeline> pipeline;
};

TEST_F(FastCnpOfASwitch, ThatRoutesTheCnpIsRouted) {
  start(true);
  congest(kMac, kMac);
}

TEST_F(FastCnpOfASwitch, ThatBridgesTheCnpIsBridgedWhateverItsRoutes) {
  start(false);
  congest(a.mac, p.mac);
}

}  // namespace
}  // namespace millrace::buffering
