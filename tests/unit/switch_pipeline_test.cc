// The pipeline with real neighbours (engine, table, local endpoint) on a heap pool. Wire bytes come from
// scapy, not from our own builder.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <set>

#include "switch/copy.h"
#include "switch/pipeline.h"
#include "tests/unit/allocation.h"

std::atomic<bool> millrace::allocation_forbidden{false};
using millrace::allocation_forbidden;

// NOLINTBEGIN: the replaced operators of the whole test program. Not inlined, or g++ 12 takes malloc and
// delete for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocation_forbidden.load()) std::abort();
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new[](size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (allocation_forbidden.load()) std::abort();
  return std::malloc(bytes);
}
[[gnu::noinline]] void* operator new[](size_t bytes, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, tag);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, size_t) noexcept { std::free(p); }
// NOLINTEND

namespace millrace::switching {
namespace {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;
using std::chrono::seconds;

Bytes from_hex(std::string_view hex) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16)));
  return bytes;
}

constexpr MacAddress kSwitch{{0x02, 0x4d, 0x52, 0, 0, 1}};
MacAddress host(uint8_t n) { return {{0x02, 0, 0, 0, 0, n}}; }

// An Ethernet frame of an experimental type.
Bytes plain(const MacAddress& dst, const MacAddress& src, size_t payload = 46) {
  Bytes b(dst.bytes.begin(), dst.bytes.end());
  b.insert(b.end(), src.bytes.begin(), src.bytes.end());
  b.push_back(0x88);
  b.push_back(0xB5);
  for (size_t i = 0; i < payload; i++) b.push_back(static_cast<uint8_t>(i));
  return b;
}

struct Sent {
  uint16_t port;
  Bytes bytes;
  bool operator==(const Sent&) const = default;
};

class PipelineTest : public ::testing::Test {
 protected:
  explicit PipelineTest(uint16_t ports = 4) { make(ports); }
  ~PipelineTest() override {
    pipeline_.reset();
    EXPECT_EQ(pool_.in_use(), 0u);
  }

  void make(uint16_t ports, L2Config l2 = {}) {
    PipelineConfig config;
    config.ports = ports;
    config.l2 = l2;
    config.engine.mac = kSwitch;
    config.engine.addresses = {*IpAddress::parse("10.77.0.100"), *IpAddress::parse("fd77::100")};
    pipeline_ = std::make_unique<Pipeline>(config, pool_);
  }
  Frame frame(uint16_t port, const Bytes& bytes) {
    Frame f = Frame::allocate(pool_);
    std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
    f.buffer()->length = static_cast<uint32_t>(bytes.size());
    f.set_port(port);
    return f;
  }
  std::vector<Sent> drain(FrameList& out) {
    std::vector<Sent> sent;
    while (Frame f = out.pop()) {
      Bytes bytes(f.total_length());
      f.copy_to(bytes.data());
      sent.push_back({f.port(), bytes});
    }
    return sent;
  }
  std::vector<Sent> receive(uint16_t port, const Bytes& bytes, Time now = seconds(1)) {
    FrameList in, out;
    in.push(frame(port, bytes));
    pipeline_->process(in, now, out);
    EXPECT_TRUE(in.empty());
    return drain(out);
  }
  uint64_t count(Fate f) const { return pipeline_->counters().fate(f); }

  HeapFramePool pool_{4608, UINT32_MAX, true};
  std::unique_ptr<Pipeline> pipeline_;
};

struct Answer {
  const char* description;
  const char* request;
  const char* reply;
  Fate fate;
};

const char* const kNa =
    "02000000000a024d5200000186dd6000000000203afffd770000000000000000000000000100fd77000000000000000000000000"
    "00018"
    "800c6ec60000000fd7700000000000000000000000001000201024d52000001";
const Answer kAnswers[] = {
    {"ARP", "ffffffffffff02000000000a0806000108000604000102000000000a0a4d00010000000000000a4d0064",
     "02000000000a024d5200000108060001080006040002024d520000010a4d006402000000000a0a4d0001",
     Fate::kArpReplied},
    {"ARP with a VLAN tag",
     "ffffffffffff02000000000a810000050806000108000604000102000000000a0a4d00010000000000000a4d0064",
     "02000000000a024d520000018100000508060001080006040002024d520000010a4d006402000000000a0a4d0001",
     Fate::kArpReplied},
    {"neighbour solicitation to the solicited-node group",
     "3333ff00010002000000000a86dd6000000000203afffd770000000000000000000000000001ff0200000000000000000001ff0"
     "00100"
     "87007aa400000000fd770000000000000000000000000100010102000000000a",
     kNa, Fate::kNdReplied},
    {"neighbour solicitation to our address, without an option",
     "024d5200000102000000000a86dd6000000000183afffd770000000000000000000000000001fd7700000000000000000000000"
     "00100"
     "87007e4400000000fd770000000000000000000000000100",
     kNa, Fate::kNdReplied},
    {"duplicate address detection of our address: all nodes hear that it is taken",
     "3333ff00010002000000000a86dd6000000000183aff00000000000000000000000000000000ff0200000000000000000001ff0"
     "00100"
     "87007b3000000000fd770000000000000000000000000100",
     "333300000001024d5200000186dd6000000000203afffd770000000000000000000000000100ff0200000000000000000000000"
     "000018"
     "800056220000000fd7700000000000000000000000001000201024d52000001",
     Fate::kNdReplied},
    {"ICMP echo",
     "024d5200000102000000000a080045000021000700000301a2d70a4d00010a4d00640800a1f01234000968656c6c6f",
     "02000000000a024d5200000108004500002100070000400165d70a4d00640a4d00010000a9f01234000968656c6c6f",
     Fate::kEchoReplied},
    {"ICMPv6 echo",
     "024d5200000102000000000a86dd60000000000d3a03fd770000000000000000000000000001fd7700000000000000000000000"
     "00100"
     "80002db81234000968656c6c6f",
     "02000000000a024d5200000186dd60000000000d3a40fd770000000000000000000000000100fd7700000000000000000000000"
     "00001"
     "81002cb81234000968656c6c6f",
     Fate::kEchoReplied},
};

// Hosts that knew a switch before this one at its addresses must learn its MAC. Bytes by scapy.
TEST_F(PipelineTest, AnnouncesItsAddressesOnEveryPort) {
  FrameList out;
  pipeline_->announce(seconds(1), out);
  const Bytes arp =
      from_hex("ffffffffffff024d5200000108060001080006040001024d520000010a4d00640000000000000a4d0064");
  const Bytes advertisement = from_hex(
      "333300000001024d5200000186dd6000000000203afffd770000000000000000000000000100ff0200000000"
      "000000000000000000018800056220000000fd7700000000000000000000000001000201024d52000001");
  std::vector<Sent> expected;
  for (const Bytes& bytes : {arp, advertisement})
    for (uint16_t port = 0; port < 4; port++) expected.push_back({port, bytes});
  std::vector<Sent> sent = drain(out);
  auto order = [](const Sent& a, const Sent& b) {
    return std::pair(a.bytes.size(), a.port) < std::pair(b.bytes.size(), b.port);
  };
  std::sort(sent.begin(), sent.end(), order);
  EXPECT_EQ(sent, expected);
}

TEST_F(PipelineTest, AnswersForItsAddressesByteForByte) {
  for (const Answer& a : kAnswers) {
    SCOPED_TRACE(a.description);
    const uint64_t before = count(a.fate);
    EXPECT_EQ(receive(2, from_hex(a.request)), (std::vector<Sent>{{2, from_hex(a.reply)}}));
    EXPECT_EQ(count(a.fate), before + 1);
  }
}

TEST_F(PipelineTest, QuestionsForOthersAreFlooded) {
  for (const Answer& a : kAnswers) {
    Bytes request = from_hex(a.request);
    if (!(request[0] & 1)) continue;
    SCOPED_TRACE(a.description);
    // Another target: the last byte of the ARP target, the last one of the ND target.
    const bool arp = a.fate == Fate::kArpReplied;
    const size_t at = arp ? request.size() - 1 : 14 + 40 + 8 + 15;
    request[at] ^= 0x40;
    const std::vector<Sent> sent = receive(2, request);
    EXPECT_EQ(sent, (std::vector<Sent>{{0, request}, {1, request}, {3, request}}));
  }
}

TEST_F(PipelineTest, DamagedRequestsAreDroppedByName) {
  Bytes echo = from_hex(kAnswers[5].request);
  echo.back() ^= 1;
  EXPECT_TRUE(receive(0, echo).empty());
  EXPECT_EQ(count(Fate::kIcmpChecksum), 1u);
  Bytes echo6 = from_hex(kAnswers[6].request);
  echo6.back() ^= 1;
  EXPECT_TRUE(receive(0, echo6).empty());
  EXPECT_EQ(count(Fate::kIcmpChecksum), 2u);
  Bytes solicitation = from_hex(kAnswers[3].request);
  solicitation[14 + 7] = 254;  // the hop limit must prove that the sender is on the link
  EXPECT_TRUE(receive(0, solicitation).empty());
  EXPECT_EQ(count(Fate::kNotForUs), 1u);
  Bytes fragment = from_hex(kAnswers[5].request);
  fragment[14 + 6] = 0x20;
  EXPECT_TRUE(receive(0, fragment).empty());
  EXPECT_EQ(count(Fate::kUnsupported), 1u);
  Bytes from_us = from_hex(kAnswers[5].request);
  std::copy_n(from_us.begin() + 14 + 16, 4, from_us.begin() + 14 + 12);
  EXPECT_TRUE(receive(0, from_us).empty());
  EXPECT_EQ(count(Fate::kIpSourceInvalid), 1u);
  EXPECT_TRUE(receive(0, {1, 2, 3}).empty());
  EXPECT_EQ(count(Fate::kL2Truncated), 1u);
}

// Every prefix and every single-byte change of every request: no crash, books balanced (process asserts
// them).
TEST_F(PipelineTest, MangledRequestsLeaveTheBooksBalanced) {
  for (const Answer& a : kAnswers) {
    const Bytes whole = from_hex(a.request);
    for (size_t n = 0; n < whole.size(); n++)
      receive(1, Bytes(whole.begin(), whole.begin() + static_cast<long>(n)));
    for (size_t i = 0; i < whole.size(); i++)
      for (const uint8_t change : {0x01, 0x80, 0xFF}) {
        Bytes b = whole;
        b[i] = static_cast<uint8_t>(b[i] ^ change);
        receive(1, b);
      }
  }
}

// SEND ONLY with 8 bytes of payload, its ICRC by scapy.contrib.roce.
const char* const kRoce =
    "024d5200000102000000000a08004500003400070000401165b40a4d00010a4d0064c12312b7002000000400ffff000000558000"
    "0003"
    "7061796c6f6164211b9d2352";

TEST_F(PipelineTest, RoceForUsGoesToTheEngineAndBadOnesAreDroppedByName) {
  const Bytes good = from_hex(kRoce);
  receive(0, good);
  EXPECT_EQ(count(Fate::kToEngine), 1u);
  Bytes bad = good;
  bad[60] ^= 1;
  EXPECT_TRUE(receive(0, bad).empty());
  EXPECT_EQ(pipeline_->counters().roce_drop(roce::ParseVerdict::kBadIcrc), 1u);
  EXPECT_TRUE(receive(0, Bytes(good.begin(), good.end() - 1)).empty());
  EXPECT_EQ(pipeline_->counters().roce_drop(roce::ParseVerdict::kIpLength), 1u);
  EXPECT_EQ(count(Fate::kRoceInvalid), 2u);
  EXPECT_EQ(count(Fate::kToEngine), 1u);
}

TEST_F(PipelineTest, RoceForOthersPassesUncheckedAndUnchanged) {
  receive(3, plain(kBroadcastMac, host(7)));
  Bytes b = from_hex(kRoce);
  std::copy_n(host(7).bytes.begin(), 6, b.begin());
  b[60] ^= 1;  // its ICRC is wrong, which is the receiver's business
  EXPECT_EQ(receive(0, b), (std::vector<Sent>{{3, b}}));
}

TEST_F(PipelineTest, UnknownIsFloodedAndLearnedIsForwarded) {
  const Bytes question = plain(host(2), host(1));
  EXPECT_EQ(receive(0, question), (std::vector<Sent>{{1, question}, {2, question}, {3, question}}));
  const Bytes answer = plain(host(1), host(2));
  EXPECT_EQ(receive(3, answer), (std::vector<Sent>{{0, answer}}));
  EXPECT_EQ(receive(0, question), (std::vector<Sent>{{3, question}}));
  EXPECT_EQ(count(Fate::kForwarded), 2u);
  EXPECT_EQ(count(Fate::kFlooded), 1u);
  EXPECT_EQ(pipeline_->counters().flood_copies, 2u);
}

TEST_F(PipelineTest, NothingLeavesByThePortThatItCameInOn) {
  receive(1, plain(kBroadcastMac, host(1)));
  EXPECT_TRUE(receive(1, plain(host(1), host(2))).empty());
  EXPECT_EQ(count(Fate::kHairpin), 1u);
  for (uint16_t port = 0; port < 4; port++)
    for (const Sent& s : receive(port, plain(host(99), host(static_cast<uint8_t>(10 + port)))))
      EXPECT_NE(s.port, port);
}

TEST_F(PipelineTest, ASwitchOfOnePortFloodsNowhere) {
  make(1);
  EXPECT_TRUE(receive(0, plain(kBroadcastMac, host(1))).empty());
  EXPECT_EQ(count(Fate::kNoEgress), 1u);
  EXPECT_EQ(receive(0, from_hex(kAnswers[0].request)).size(), 1u);
}

TEST_F(PipelineTest, LearnedAddressesAge) {
  L2Config l2;
  l2.ageing = seconds(10);
  make(4, l2);
  receive(0, plain(kBroadcastMac, host(1)), seconds(1));
  EXPECT_EQ(receive(1, plain(host(1), host(2)), seconds(10)).size(), 1u);
  EXPECT_EQ(receive(1, plain(host(1), host(2)), seconds(11)).size(), 3u);
  receive(0, plain(kBroadcastMac, host(1)), seconds(12));  // speaking again renews it
  EXPECT_EQ(receive(1, plain(host(1), host(2)), seconds(21)).size(), 1u);
}

TEST_F(PipelineTest, AHostMovesOnlyWhenItHasBeenSilentOnItsOldPort) {
  receive(0, plain(kBroadcastMac, host(1)), milliseconds(1000));
  receive(1, plain(kBroadcastMac, host(1)), milliseconds(1999));
  EXPECT_EQ(pipeline_->counters().l2_move_refused, 1u);
  EXPECT_EQ(receive(2, plain(host(1), host(2)), milliseconds(1999)).at(0).port, 0);
  EXPECT_EQ(receive(1, plain(kBroadcastMac, host(1)), milliseconds(2000)).size(), 3u);
  EXPECT_EQ(pipeline_->counters().l2_moved, 1u);
  EXPECT_EQ(receive(2, plain(host(1), host(2)), milliseconds(2001)).at(0).port, 1);
}

// Nobody can tell the owner of an address from who forges it: frames of both go on, what differs is where the
// answers go.
TEST_F(PipelineTest, WhoseMoveIsRefusedIsServedAllTheSame) {
  receive(0, plain(kBroadcastMac, host(1)), milliseconds(1000));
  receive(2, plain(kBroadcastMac, host(2)), milliseconds(1000));
  const Bytes question = plain(host(2), host(1));
  EXPECT_EQ(receive(1, question, milliseconds(1100)), (std::vector<Sent>{{2, question}}));
  const Bytes group = plain(kBroadcastMac, host(1));
  EXPECT_EQ(receive(1, group, milliseconds(1100)), (std::vector<Sent>{{0, group}, {2, group}, {3, group}}));
  // To the switch itself: host 0x0a, whose requests these are, has spoken on port 3.
  receive(3, plain(kBroadcastMac, host(0x0a)), milliseconds(1100));
  EXPECT_EQ(receive(1, from_hex(kAnswers[0].request), milliseconds(1100)),
            (std::vector<Sent>{{1, from_hex(kAnswers[0].reply)}}));
  receive(1, from_hex(kRoce), milliseconds(1100));
  EXPECT_EQ(count(Fate::kToEngine), 1u);
  EXPECT_EQ(pipeline_->counters().l2_move_refused, 4u);
  EXPECT_EQ(receive(2, plain(host(1), host(2)), milliseconds(1100)).at(0).port, 0);
  EXPECT_EQ(receive(2, plain(host(0x0a), host(2)), milliseconds(1100)).at(0).port, 3);
}

// A forger waits for a second of silence, takes the address and goes on speaking.
TEST_F(PipelineTest, ItsOwnerTakesAnAddressBackWithItsFirstFrame) {
  const Bytes owned = plain(kBroadcastMac, host(1)), towards = plain(host(1), host(2));
  auto port_of_host1 = [&](Time now) { return receive(2, towards, now).at(0).port; };
  receive(0, owned, milliseconds(1000));
  for (int ms = 2000; ms < 5000; ms += 100) receive(1, owned, milliseconds(ms));
  EXPECT_EQ(port_of_host1(milliseconds(5000)), 1);
  receive(0, owned, milliseconds(5000));
  EXPECT_EQ(port_of_host1(milliseconds(5000)), 0);
  // The forger has no claim to it, however long it had it and however much it says.
  for (int ms = 5000; ms < 9000; ms += 10) {
    if (ms % 500 == 0) receive(0, owned, milliseconds(ms));
    receive(1, owned, milliseconds(ms));
    ASSERT_EQ(port_of_host1(milliseconds(ms)), 0) << ms;
  }
  EXPECT_EQ(pipeline_->counters().l2_moved, 2u);
}

TEST_F(PipelineTest, AClaimToAnAddressAgesAsTheAddressDoes) {
  L2Config l2;
  l2.ageing = seconds(10);
  make(4, l2);
  const Bytes owned = plain(kBroadcastMac, host(1));
  receive(0, owned, seconds(1));
  for (int s = 2; s <= 11; s++) receive(1, owned, seconds(s));
  receive(0, owned, seconds(11));  // it has been away for ten seconds
  EXPECT_EQ(receive(2, plain(host(1), host(2)), seconds(11)).at(0).port, 1);
  EXPECT_EQ(pipeline_->counters().l2_move_refused, 1u);
}

TEST_F(PipelineTest, ForgedAndReservedAddressesAreDropped) {
  EXPECT_TRUE(receive(0, plain(host(2), kBroadcastMac)).empty());
  EXPECT_TRUE(receive(0, plain(host(2), MacAddress{})).empty());
  EXPECT_EQ(count(Fate::kL2SourceInvalid), 2u);
  EXPECT_TRUE(receive(0, plain(host(2), kSwitch)).empty());
  EXPECT_EQ(count(Fate::kL2SourceOurs), 1u);
  EXPECT_TRUE(receive(0, plain({{0x01, 0x80, 0xC2, 0, 0, 0x0E}}, host(1))).empty());
  EXPECT_EQ(count(Fate::kReservedMulticast), 1u);
  EXPECT_TRUE(receive(0, plain(kSwitch, host(1))).empty());
  EXPECT_EQ(count(Fate::kNotForUs), 1u);
}

TEST_F(PipelineTest, FloodingIsBoundedPerIngressPort) {
  L2Config l2;
  l2.flood_pps = 100;  // a burst of a tenth of a second: 10 frames
  make(2, l2);
  auto burst = [&](uint16_t port, Time now) {
    size_t sent = 0;
    for (int i = 0; i < 50; i++)
      sent += receive(port, plain(host(99), host(static_cast<uint8_t>(port + 1))), now).size();
    return sent;
  };
  EXPECT_EQ(burst(0, seconds(5)), 10u);
  EXPECT_EQ(burst(1, seconds(5)), 10u);  // another port's flood costs this one nothing
  EXPECT_EQ(burst(0, seconds(5) + milliseconds(50)), 5u);
  EXPECT_EQ(burst(0, seconds(7)), 10u);
  EXPECT_EQ(count(Fate::kFloodLimited), 40u + 40u + 45u + 40u);
  // Known destinations are not flooded, so not bounded.
  receive(1, plain(host(1), host(50)), seconds(8));
  size_t sent = 0;
  for (int i = 0; i < 50; i++) sent += receive(0, plain(host(50), host(1)), seconds(8)).size();
  EXPECT_EQ(sent, 50u);
}

TEST(Pipeline, AnEmptyPoolCostsCopiesButNotTheOriginal) {
  HeapFramePool pool(4608, 1, true);
  PipelineConfig config;
  config.ports = 3;
  config.engine.mac = kSwitch;
  config.engine.addresses = {*IpAddress::parse("10.77.0.100")};
  Pipeline pipeline(config, pool);
  const Bytes bytes = plain(kBroadcastMac, host(1));
  FrameList in, out;
  Frame f = Frame::allocate(pool);
  std::memcpy(f.buffer()->data(), bytes.data(), bytes.size());
  f.buffer()->length = static_cast<uint32_t>(bytes.size());
  f.set_port(0);
  in.push(std::move(f));
  pipeline.process(in, seconds(1), out);
  EXPECT_EQ(out.size(), 1u);
  EXPECT_EQ(pipeline.counters().flood_copies_failed, 1u);
  EXPECT_EQ(pipeline.counters().fate(Fate::kFlooded), 1u);
}

TEST(Pipeline, ProcessAllocatesNothing) {
  HeapFramePool pool;
  PipelineConfig config;
  config.ports = 4;
  config.engine.mac = kSwitch;
  config.engine.addresses = {*IpAddress::parse("10.77.0.100"), *IpAddress::parse("fd77::100")};
  Pipeline pipeline(config, pool);
  std::vector<Bytes> kinds = {from_hex(kRoce), plain(host(2), host(1)), plain(kBroadcastMac, host(3)),
                              plain(kSwitch, host(4))};
  for (const Answer& a : kAnswers) kinds.push_back(from_hex(a.request));
  FrameList in, out;
  for (int i = 0; i < 400; i++) {
    Frame f = Frame::allocate(pool);
    Bytes bytes = kinds[static_cast<size_t>(i) % kinds.size()];
    bytes[11] = static_cast<uint8_t>(bytes[11] + i);  // many sources: learning is covered, too
    std::memcpy(f.buffer()->data(), bytes.data(), bytes.size());
    f.buffer()->length = static_cast<uint32_t>(bytes.size());
    f.set_port(static_cast<uint16_t>(i % 4));
    in.push(std::move(f));
  }
  // So that the pool itself needs no new slab for the flood's copies.
  std::vector<Frame> spare;
  for (int i = 0; i < 480; i++) spare.push_back(Frame::allocate(pool));
  spare.clear();
  allocation_forbidden = true;
  pipeline.process(in, seconds(1), out);
  pipeline.poll(seconds(1), out);
  allocation_forbidden = false;
  EXPECT_GT(pipeline.counters().fate(Fate::kToEngine), 0u);
  EXPECT_GT(pipeline.counters().fate(Fate::kEchoReplied), 0u);
  EXPECT_GT(pipeline.counters().fate(Fate::kFlooded), 0u);
  EXPECT_EQ(out.size(), pipeline.counters().emitted);
  out.clear();
}

MacAddress numbered(uint32_t n) {
  return {{0x02, 0x11, static_cast<uint8_t>(n >> 24), static_cast<uint8_t>(n >> 16),
           static_cast<uint8_t>(n >> 8), static_cast<uint8_t>(n)}};
}

TEST(L2Table, HoldsWhatItIsConfiguredFor) {
  L2Config config;
  config.entries_max = 1024;
  L2Table table(config, 1, 42);
  for (uint32_t i = 0; i < 1024; i++)
    ASSERT_EQ(table.learn(numbered(i), 0, 0, seconds(1)), L2Table::Learned::kNew) << i;
  EXPECT_EQ(table.learn(numbered(5000), 0, 0, seconds(1)), L2Table::Learned::kFull);
  for (uint32_t i = 0; i < 1024; i++) EXPECT_EQ(table.lookup(numbered(i), 0, seconds(2)), 0);
  EXPECT_EQ(table.entries(seconds(2)).size(), 1024u);
  // All of them aged: room again.
  EXPECT_EQ(table.entries(seconds(301)).size(), 0u);
  uint32_t learned = 0;
  for (uint32_t i = 0; i < 4096; i++)
    learned += table.learn(numbered(10000 + i), 0, 0, seconds(302)) == L2Table::Learned::kNew;
  EXPECT_EQ(learned, 1024u);
}

TEST(L2Table, AFloodOfSourcesOnOnePortLeavesRoomForTheOthers) {
  L2Config config;
  config.entries_max = 1024;
  L2Table table(config, 4, 42);
  for (uint32_t i = 0; i < 100000; i++) table.learn(numbered(i), 0, 0, seconds(1));
  EXPECT_EQ(table.size(), 1024u - 3 * 128);  // half of the table is reserved in equal shares
  for (uint16_t port = 1; port < 4; port++)
    for (uint32_t i = 0; i < 128; i++)
      EXPECT_EQ(table.learn(numbered(1'000'000u * port + i), 0, port, seconds(1)), L2Table::Learned::kNew);
}

// Against a plain map, over random operations.
TEST(L2Table, AgreesWithAMap) {
  L2Config config;
  config.entries_max = 64;
  config.ageing = seconds(5);
  config.move_guard = Time{};
  L2Table table(config, 3, 7);
  std::map<MacAddress, std::pair<uint16_t, Time>> model;
  uint64_t state = 1;
  auto random = [&](uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>((state >> 33) % n);
  };
  Time now = seconds(1);
  for (int i = 0; i < 200000; i++) {
    now += milliseconds(random(50));
    const MacAddress mac = numbered(random(60));
    if (random(2) == 0) {
      const auto port = static_cast<uint16_t>(random(3));
      if (table.learn(mac, 0, port, now) != L2Table::Learned::kFull) {
        model[mac] = {port, now};
      } else {
        model.erase(mac);
      }
    } else {
      const auto it = model.find(mac);
      const bool there = it != model.end() && now - it->second.second < config.ageing;
      ASSERT_EQ(table.lookup(mac, 0, now), there ? it->second.first : kNoPort);
    }
  }
}

TEST(CopyFlat, JoinsAllPieces) {
  HeapFramePool pool(4608, UINT32_MAX, true);
  Frame payload = Frame::allocate(pool);
  std::memcpy(payload.buffer()->data(), "payload", 7);
  payload.buffer()->length = 7;
  Frame f = Frame::allocate(pool);
  std::memcpy(f.buffer()->data(), "head", 4);
  FrameBuffer* b = f.buffer();
  b->length = 4;
  b->shared = payload.buffer();
  payload.buffer()->owners++;
  b->shared_data = payload.buffer()->data() + 3;
  b->shared_length = 4;
  std::memcpy(b->tail, "crc", 3);
  b->tail_length = 3;
  f.set_port(3);
  Frame copy = copy_flat(pool, f);
  EXPECT_EQ(std::string(copy.bytes().begin(), copy.bytes().end()), "headloadcrc");
  EXPECT_EQ(copy.port(), 3);
}

}  // namespace
}  // namespace millrace::switching
