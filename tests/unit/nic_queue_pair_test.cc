// The model NIC's queue pair on its own, its peer being packets that the test makes; and DCQCN's rate against
// the paper's formulas.
#include "tools/sim/nic_queue_pair.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace millrace::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;

constexpr uint32_t kOurs = 0x100, kTheirs = 0x200;
constexpr uint32_t kFirst = 0xFFFFFE, kExpected = 0xFFFFFD;

struct Bench {
  explicit Bench(const NicQuirks& quirks = {}, uint32_t mtu = 1024)
      : memory(7), qp(config(quirks, mtu), memory, now) {
    target.resize(8192, 0xEE);
    region = memory.add(target.data(), target.size(), host::Access::kResult);
  }
  static NicQueuePair::Config config(const NicQuirks& quirks, uint32_t mtu) {
    NicQueuePair::Config c;
    c.path.to = *IpAddress::parse("10.0.0.2");
    c.path.from = *IpAddress::parse("10.0.0.1");
    c.path.udp_port = 0xC123;
    c.path.qpn = kTheirs;
    c.qpn = kOurs;
    c.first_psn = kFirst;
    c.expected_psn = kExpected;
    c.mtu = mtu;
    c.receives = 3;
    c.quirks = quirks;
    return c;
  }
  // From the peer, `number` packets behind the first that it sends.
  NicPacket packet(uint8_t opcode, uint32_t number, std::span<const uint8_t> payload = {}) const {
    NicPacket p;
    p.to = *IpAddress::parse("10.0.0.1");
    p.from = *IpAddress::parse("10.0.0.2");
    p.qpn = kOurs;
    p.opcode = opcode;
    p.psn = (kExpected + number) & 0xFFFFFF;
    p.payload = payload;
    return p;
  }
  NicPacket write(uint8_t opcode, uint32_t number, uint64_t offset, std::span<const uint8_t> payload,
                  uint32_t length) const {
    NicPacket p = packet(opcode, number, payload);
    p.address = reinterpret_cast<uintptr_t>(target.data()) + offset;
    p.rkey = region.rkey;
    p.length = length;
    return p;
  }
  void acknowledge(uint8_t syndrome, uint32_t number, uint32_t msn) {
    NicPacket p = packet(kOpAck, 0);
    p.psn = (kFirst + number) & 0xFFFFFF;
    p.syndrome = syndrome;
    p.msn = msn;
    qp.receive(p, now);
  }
  // What has been said since the last call, as (syndrome, psn relative to the first expected, msn).
  struct Said {
    uint8_t opcode;
    uint8_t syndrome;
    uint32_t number, msn;
    friend bool operator==(const Said&, const Said&) = default;
  };
  std::vector<Said> said() {
    std::vector<Said> all;
    for (; !qp.control.empty(); qp.control.pop_front()) {
      NicPacket p;
      EXPECT_EQ(read_frame(qp.control.front(), p), Reading::kGood);
      EXPECT_EQ(p.qpn, kTheirs);
      EXPECT_EQ(p.udp_port, 0xC123);
      all.push_back({p.opcode, p.syndrome, (p.psn - kExpected) & 0xFFFFFF, p.msn});
    }
    return all;
  }
  // All request packets that may leave now, by number.
  std::vector<uint32_t> sent() {
    std::vector<uint32_t> all;
    while (qp.ready_at() != kNever) {
      now = std::max(now, qp.ready_at());
      const Bytes frame = qp.next_packet(now);
      if (frame.empty()) break;
      NicPacket p;
      EXPECT_EQ(read_frame(frame, p), Reading::kGood);
      all.push_back((p.psn - kFirst) & 0xFFFFFF);
      last = p;
      asked.push_back(p.ack_request);
    }
    return all;
  }
  void post(uint64_t segment, size_t bytes) {
    source.resize(65536, 0x5A);
    if (send_key == 0) send_key = memory.add(source.data(), source.size(), host::Access::kSend).lkey;
    ASSERT_TRUE(qp.post_segment(segment, {}, std::span(source).first(bytes), send_key));
  }
  std::vector<uint64_t> completed() {
    std::vector<uint64_t> all;
    for (const QueuePairEvent& e : qp.events)
      if (e.kind == QueuePairEvent::Kind::kSent) all.push_back(e.segment);
    qp.events.clear();
    return all;
  }

  Time now{1000};
  NicMemory memory;
  NicQueuePair qp;
  Bytes target, source;
  host::MemoryRegion region;
  uint32_t send_key = 0;
  NicPacket last;
  std::vector<bool> asked;
};

const Bytes kData(1024, 0x11);
using Numbers = std::vector<uint32_t>;

TEST(NicRequester, CutsAMessageAndWrapsItsNumbers) {
  Bench b;
  b.post(5, 3000 - 64);
  EXPECT_EQ(b.sent(), (Numbers{0, 1, 2}));
  EXPECT_EQ(b.asked, (std::vector<bool>{false, false, true}));
  EXPECT_EQ(b.last.opcode, kOpSendLast);
  EXPECT_EQ(b.last.payload.size(), 3000u - 2048);
  b.acknowledge(0x1F, 1, 0);
  EXPECT_TRUE(b.completed().empty());
  b.acknowledge(0x1F, 2, 1);
  EXPECT_EQ(b.completed(), std::vector<uint64_t>{5});
  EXPECT_EQ(b.qp.counts().wrong_msn, 0u);
}

TEST(NicRequester, CountsAWrongMsn) {
  Bench b;
  b.post(5, 100);
  b.sent();
  b.acknowledge(0x1F, 0, 2);
  EXPECT_EQ(b.qp.counts().wrong_msn, 1u);
}

TEST(NicRequester, GoesBackToWhatASequenceNakNames) {
  Bench b;
  b.post(0, 100), b.post(1, 2000), b.post(2, 100);
  EXPECT_EQ(b.sent(), (Numbers{0, 1, 2, 3, 4}));
  b.acknowledge(0x60, 2, 1);  // 0 and 1 have come
  EXPECT_EQ(b.completed(), std::vector<uint64_t>{0});
  EXPECT_EQ(b.sent(), (Numbers{2, 3, 4}));
  b.acknowledge(0x60, 1, 1);  // an old one
  EXPECT_TRUE(b.sent().empty());
  b.acknowledge(0x1F, 17, 9);  // of what was never sent
  EXPECT_TRUE(b.completed().empty());
  EXPECT_EQ(b.qp.counts().retransmitted, 3u);
}

TEST(NicRequester, WaitsOutAnRnrNak) {
  Bench b;
  b.post(0, 100);
  b.sent();
  b.acknowledge(0x20 | 12, 0, 0);
  EXPECT_EQ(b.qp.ready_at(), kNever);
  const Time told = b.now;
  EXPECT_EQ(b.qp.next_deadline(), told + microseconds(640));
  b.qp.poll(b.now = told + microseconds(639));
  EXPECT_TRUE(b.sent().empty());
  b.qp.poll(b.now = told + microseconds(640));
  EXPECT_EQ(b.sent(), Numbers{0});
  for (int i = 0; i < 100; i++) {  // for ever, if need be
    b.acknowledge(0x20 | 1, 0, 0);
    b.qp.poll(b.now += microseconds(10));
    EXPECT_EQ(b.sent(), Numbers{0});
  }
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kNone);
}

// IBA vol. 1, table 45, all of it in units of 0.01 ms.
TEST(NicRequester, KnowsTheRnrTimers) {
  const int table[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                         48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                         2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  for (uint8_t code = 0; code < 32; code++) EXPECT_EQ(rnr_wait_time(code), microseconds(10 * table[code]));
}

TEST(NicRequester, GivesUpAfterSevenRetries) {
  NicQuirks quirks;
  quirks.first_timeout = milliseconds(2);
  Bench b(quirks);
  b.post(0, 3000);
  const Time begun = b.now;
  b.sent();
  std::vector<int64_t> waits;
  int rounds = 0;
  for (Time before = begun; b.qp.fault() == QueuePairFault::kNone; rounds++) {
    b.now = b.qp.next_deadline();
    waits.push_back(std::chrono::duration_cast<milliseconds>(b.now - before).count());
    before = b.now;
    b.qp.poll(b.now);
    b.sent();
  }
  EXPECT_EQ(rounds, 8);  // once, and seven times again
  EXPECT_EQ(waits, (std::vector<int64_t>{2, 4, 8, 16, 32, 64, 67, 67}));
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kRetryExceeded);
  EXPECT_LT(b.now - begun, milliseconds(270));
}

TEST(NicRequester, ProgressGivesRetriesBack) {
  Bench b;
  b.post(0, 60000);
  b.sent();
  for (uint32_t i = 0; i < 30; i++) {
    b.qp.poll(b.now = b.qp.next_deadline());
    b.sent();
    b.acknowledge(0x1F, i, 0);
  }
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kNone);
  for (int i = 0; i < 7; i++) b.acknowledge(0x60, 30, 0);
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kNone);
  b.acknowledge(0x60, 30, 0);
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kRetryExceeded);
}

TEST(NicRequester, FatalNaksEndIt) {
  for (const auto& [syndrome, fault] :
       {std::pair{0x61, QueuePairFault::kRemoteInvalidRequest},
        std::pair{0x62, QueuePairFault::kRemoteAccess}, std::pair{0x63, QueuePairFault::kRemoteOperation}}) {
    Bench b;
    b.post(0, 100);
    b.sent();
    b.acknowledge(static_cast<uint8_t>(syndrome), 0, 0);
    EXPECT_EQ(b.qp.fault(), fault);
  }
}

TEST(NicRequester, AsksForAcknowledgementsAsOftenAsItIsTold) {
  NicQuirks quirks;
  quirks.ack_request_every = 2;
  Bench b(quirks);
  b.post(0, 5000);
  b.sent();
  EXPECT_EQ(b.asked, (std::vector<bool>{false, true, false, true, true}));
}

TEST(NicRequester, ReadsRegisteredMemoryOnly) {
  Bench b;
  b.post(0, 2000);
  b.memory.remove(b.send_key);
  b.sent();
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kLocalProtection);
}

TEST(NicRequester, KeepsTheRoomOfAProbe) {
  Bench b;
  for (uint64_t i = 0; i < 17; i++) b.post(i, 100);
  EXPECT_FALSE(b.qp.post_segment(17, {}, {}, 0));
}

TEST(NicResponder, AcknowledgesAsItsHabitIs) {
  NicQuirks quirks;
  quirks.ack_every = 4;
  quirks.ack_delay = microseconds(20);
  Bench b(quirks);
  for (uint32_t i = 0; i < 3; i++) b.qp.receive(b.write(kOpWriteOnly, i, 0, kData, 1024), b.now);
  b.qp.poll(b.now);
  EXPECT_TRUE(b.said().empty());
  b.qp.receive(b.write(kOpWriteOnly, 3, 0, kData, 1024), b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x1F, 3, 4}}));
  b.qp.receive(b.write(kOpWriteOnly, 4, 0, kData, 1024), b.now);
  EXPECT_EQ(b.qp.next_deadline(), b.now + microseconds(20));
  b.qp.poll(b.now + microseconds(20));
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x1F, 4, 5}}));
  NicPacket asks = b.write(kOpWriteOnly, 5, 0, kData, 1024);
  asks.ack_request = true;
  b.qp.receive(asks, b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x1F, 5, 6}}));
}

TEST(NicResponder, MaySayNothingUnasked) {
  NicQuirks quirks;
  quirks.only_when_asked = true;
  Bench b(quirks);
  b.qp.receive(b.write(kOpWriteOnly, 0, 0, kData, 1024), b.now);
  b.qp.poll(b.now + std::chrono::seconds(1));
  EXPECT_TRUE(b.said().empty());
  b.qp.receive(b.write(kOpWriteOnly, 0, 0, kData, 1024), b.now);
  EXPECT_EQ(b.said().size(), 1u) << "but a duplicate is acknowledged";
}

TEST(NicResponder, NaksAGapOnce) {
  Bench b;
  b.qp.receive(b.write(kOpWriteOnly, 0, 0, kData, 1024), b.now);
  for (const uint32_t n : {2, 3, 4}) b.qp.receive(b.write(kOpWriteOnly, n, 0, kData, 1024), b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x60, 1, 1}}));
  b.qp.receive(b.write(kOpWriteOnly, 1, 0, kData, 1024), b.now);
  b.qp.receive(b.write(kOpWriteOnly, 5, 0, kData, 1024), b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x60, 2, 2}}));
}

TEST(NicResponder, AcknowledgesDuplicatesWithTheNewest) {
  Bench b;
  for (uint32_t i = 0; i < 3; i++) b.qp.receive(b.write(kOpWriteOnly, i, 0, kData, 1024), b.now);
  b.said();
  const Bytes other(1024, 0x22);
  b.qp.receive(b.write(kOpWriteOnly, 1, 0, other, 1024), b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x1F, 2, 3}}));
  EXPECT_EQ(b.target[0], 0x11) << "a duplicate was executed";
}

TEST(NicResponder, WritesInSeveralPacketsAndChecksTheirRoom) {
  Bench b;
  b.qp.receive(b.write(kOpWriteFirst, 0, 8192 - 2048, kData, 2048), b.now);
  b.qp.receive(b.packet(0x08, 1, kData), b.now);
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kNone);
  EXPECT_EQ(b.target[8191], 0x11);
  EXPECT_EQ(b.target[8191 - 2048], 0xEE);
  b.qp.receive(b.write(kOpWriteOnly, 2, 8192 - 1023, kData, 1024), b.now);
  EXPECT_EQ(b.said().back(), (Bench::Said{kOpAck, 0x62, 2, 1}));
  EXPECT_EQ(b.qp.fault(), QueuePairFault::kLocalAccess);
}

TEST(NicResponder, WritesNothingOfWhatDoesNotWhollyFit) {
  Bench b;
  b.qp.receive(b.write(kOpWriteFirst, 0, 8192 - 2048, kData, 2049), b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x62, 0, 0}}));
  EXPECT_EQ(b.target, Bytes(8192, 0xEE));
}

TEST(NicResponder, LooksAtNoKeyOfAnEmptyWrite) {
  Bench b;
  NicPacket probe = b.packet(kOpWriteOnly, 0);
  probe.ack_request = true;
  b.qp.receive(probe, b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x1F, 0, 1}}));
}

TEST(NicResponder, IsNotReadyWithoutAReceive) {
  Bench b;
  NicPacket immediate = b.packet(0x0B, 0);
  for (uint32_t i = 0; i < 3; i++) {
    immediate.psn = (kExpected + i) & 0xFFFFFF;
    b.qp.receive(immediate, b.now);
  }
  b.said();
  immediate.psn = kExpected + 3 - 0x1000000;
  b.qp.receive(immediate, b.now);
  EXPECT_EQ(b.said(), (std::vector<Bench::Said>{{kOpAck, 0x20 | 12, 3, 3}}));
  b.qp.receive(b.write(kOpWriteOnly, 4, 0, kData, 1024), b.now);
  EXPECT_TRUE(b.said().empty()) << "what follows an RNR NAK is dropped in silence";
  b.qp.post_receive();
  b.qp.receive(immediate, b.now);
  EXPECT_EQ(b.qp.events.size(), 4u);
}

TEST(NicResponder, AdvertisesItsReceivesWhereThatIsItsHabit) {
  NicQuirks quirks;
  quirks.real_credits = true;
  Bench b(quirks);
  for (int i = 0; i < 30; i++) b.qp.post_receive();  // 33: code 10 is 32
  NicPacket probe = b.packet(kOpWriteOnly, 0);
  probe.ack_request = true;
  b.qp.receive(probe, b.now);
  EXPECT_EQ(b.said().at(0).syndrome, 10);
}

TEST(NicResponder, RefusesWhatBreaksTheRules) {
  const Bytes half(512, 1), big(1025, 1);
  const auto refused = [](const std::function<NicPacket(const Bench&)>& make) {
    Bench b;
    b.qp.receive(make(b), b.now);
    const auto said = b.said();
    return b.qp.fault() == QueuePairFault::kBadPacket && said.size() == 1 && said[0].syndrome == 0x61;
  };
  EXPECT_TRUE(refused([&](const Bench& b) { return b.packet(kOpSendFirst, 0, half); })) << "short FIRST";
  EXPECT_TRUE(refused([&](const Bench& b) { return b.packet(kOpSendMiddle, 0, kData); })) << "no FIRST";
  EXPECT_TRUE(refused([&](const Bench& b) { return b.packet(kOpSendOnly, 0, big); })) << "beyond the MTU";
  EXPECT_TRUE(refused([&](const Bench& b) { return b.write(kOpWriteOnly, 0, 0, half, 513); })) << "length";
  EXPECT_TRUE(refused([&](const Bench& b) { return b.write(0x0C, 0, 0, {}, 8); })) << "READ";
}

// --- DCQCN ---

DcqcnParameters paper() {
  DcqcnParameters p;
  p.line_gbit = 40;
  return p;
}

// Equation 1: R_T = R_C, R_C = R_C (1 − α/2), α = (1 − g) α + g.
TEST(Dcqcn, CutsByHalfOfAlpha) {
  Dcqcn d(paper());
  Time now{};
  EXPECT_EQ(d.gbit(now), 40);
  d.on_cnp(now);
  EXPECT_DOUBLE_EQ(d.gbit(now), 20);  // α begins at 1
  EXPECT_DOUBLE_EQ(d.target_gbit(), 40);
  d.on_cnp(now += microseconds(50));
  EXPECT_DOUBLE_EQ(d.gbit(now), 10);
  EXPECT_DOUBLE_EQ(d.target_gbit(), 20);
}

// Equation 2, and what the next cut is then.
TEST(Dcqcn, AlphaFallsWhileNoCnpComes) {
  Dcqcn d(paper());
  d.on_cnp(Time{});
  d.gbit(microseconds(55 * 10));
  const double alpha = std::pow(255.0 / 256, 10);
  EXPECT_NEAR(d.alpha(), alpha, 1e-12);
  const double before = d.gbit(microseconds(55 * 10));
  d.on_cnp(microseconds(55 * 10));
  EXPECT_NEAR(d.gbit(microseconds(55 * 10)), before * (1 - alpha / 2), 1e-9);
  EXPECT_NEAR(d.alpha(), alpha * 255 / 256 + 1.0 / 256, 1e-12);
}

// Equations 3 and 4: five halvings of the distance to the old rate, then R_AI a step.
TEST(Dcqcn, RecoversFastThenAdditively) {
  Dcqcn d(paper());
  d.on_cnp(Time{});
  d.on_cnp(Time{});  // to 10, target 20
  double expected = 10;
  for (int step = 1; step <= 5; step++) {
    expected = 20 - 10 / std::pow(2, step);
    EXPECT_DOUBLE_EQ(d.gbit(microseconds(55 * step)), expected) << step;
  }
  double target = 20;
  for (int step = 6; step <= 20; step++) {
    target += 0.04;
    expected = (expected + target) / 2;
    EXPECT_NEAR(d.gbit(microseconds(55 * step)), expected, 1e-9) << step;
  }
}

// Beyond F steps of both timer and bytes, R_HAI times the steps.
TEST(Dcqcn, IncreasesHyperOnceBothHaveGoneFar) {
  Dcqcn d(paper());
  d.on_cnp(Time{});
  d.on_cnp(Time{});
  for (int i = 0; i < 7; i++) d.sent(10'000'000, microseconds(1));  // five fast, two additive
  EXPECT_NEAR(d.target_gbit(), 20.08, 1e-9);
  d.gbit(microseconds(55 * 6));  // timer steps 0 to 5: additive, since one of both has reached F
  EXPECT_NEAR(d.target_gbit(), 20.08 + 6 * 0.04, 1e-9);
  d.gbit(microseconds(55 * 7));  // both beyond F, by one
  EXPECT_NEAR(d.target_gbit(), 20.32 + 0.2, 1e-9);
}

TEST(Dcqcn, ComesBackToLineRateAndRests) {
  Dcqcn d(paper());
  d.on_cnp(Time{});
  EXPECT_TRUE(d.limited());
  EXPECT_EQ(d.gbit(milliseconds(100)), 40);
  EXPECT_FALSE(d.limited());
  EXPECT_EQ(d.gbit(std::chrono::hours(1000)), 40) << "and costs nothing afterwards";
}

TEST(NicQueuePair, PacesAtItsRate) {
  Bench b;
  b.post(0, 65536 - 64);
  b.qp.next_packet(b.now);
  const auto gap = [&] {
    const Time before = b.qp.ready_at();
    b.qp.next_packet(before);
    return b.qp.ready_at() - before;
  };
  const double bits = (1024 + 58 + 24) * 8;  // 14 + 20 + 8 + 12 + 4 around the payload, 24 on the wire
  EXPECT_EQ(gap(), Time(static_cast<int64_t>(bits / 100)));
  NicPacket cnp = b.packet(kOpCnp, 0);
  b.qp.receive(cnp, b.now);
  EXPECT_EQ(gap(), Time(static_cast<int64_t>(bits / 50)));
  b.qp.receive(cnp, b.now + microseconds(50));
  EXPECT_EQ(gap(), Time(static_cast<int64_t>(bits / 25)));
}

TEST(NicQueuePair, SaysOnceIn50MicrosecondsThatItSawCongestion) {
  Bench b;
  uint32_t n = 0;
  for (const int at : {1, 2, 49, 50, 51, 99, 101}) {
    NicPacket p = b.write(kOpWriteOnly, n++, 0, kData, 1024);
    p.traffic_class = 0x6B;
    b.qp.receive(p, microseconds(at));
  }
  std::vector<Bench::Said> said = b.said();
  EXPECT_EQ(std::count_if(said.begin(), said.end(), [](auto& s) { return s.opcode == kOpCnp; }), 3);
}

}  // namespace
}  // namespace millrace::sim
