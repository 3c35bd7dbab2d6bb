// Lent memory and links that go down, in the swarm: the checkers that judge them notice, and plans by hand
// that have a name.
#include <gtest/gtest.h>

#include "tools/sim/check/books_check.h"
#include "tools/sim/check/lender_check.h"
#include "tools/sim/check/passage_check.h"
#include "tools/sim/nic_wire.h"
#include "tools/sim/swarm.h"

namespace millrace::sim {
namespace {

using check::BooksCheck;
using check::LenderCheck;
using check::PassageCheck;
using check::Violations;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// What is said of doings in a lease of 40,000 bytes at 1,000,000.
std::string judge(const std::function<void(LenderCheck&)>& doings) {
  Violations v;
  LenderCheck check(v, 4224);
  check.begun(2, 7, 1'000'000, 40'000);
  doings(check);
  return v.count() == 0 ? "" : v.texts().front();
}

TEST(LenderCheck, SlotsWrittenReadAndUsedAgainAreFine) {
  EXPECT_EQ(judge([](LenderCheck& c) {
              c.written(0, 2, 7, 1'000'000, 1098);
              c.written(0, 2, 7, 1'004'224, 4200);
              c.read(0, 2, 7, 1'000'000, 1098);
              c.written(0, 2, 7, 1'000'000, 60);
              c.read(0, 2, 7, 1'000'000, 60);
              c.written(0, 2, 7, 1'004'224, 64);  // of a packet that was given up
              c.read(0, 2, 7, 1'004'224, 64);
              // Three packets of 500 bytes in one slot, of which 100 of the first stay: the outer two are
              // wanted, then the one between, which came with them.
              c.written(0, 2, 7, 1'008'548, 1400);
              c.read(0, 2, 7, 1'008'548, 1400);
              c.read(0, 2, 7, 1'008'948, 500);
              c.ended(2, 7);
              c.begun(2, 8, 1'000'000, 40'000);
              EXPECT_EQ(c.writes(), 5u);
              EXPECT_EQ(c.reads(), 5u);
            }),
            "");
}

TEST(LenderCheck, WhatAHonestBorrowerDoesNotDoIsSeen) {
  const auto written = [](LenderCheck& c) { c.written(0, 2, 7, 1'004'224, 1098); };
  const std::pair<const char*, std::function<void(LenderCheck&)>> wrongs[] = {
      {"outside of the lease", [](LenderCheck& c) { c.written(0, 2, 7, 999'999, 10); }},
      {"outside of the lease", [](LenderCheck& c) { c.written(0, 2, 7, 1'039'000, 1001); }},
      {"into the next slot", [](LenderCheck& c) { c.written(0, 2, 7, 1'004'224, 4225); }},
      {"within a slot", [](LenderCheck& c) { c.written(0, 2, 7, 1'004'353, 300); }},
      {"never written", [](LenderCheck& c) { c.read(0, 2, 7, 1'000'000, 1098); }},
      {"than was written", [](LenderCheck& c) { c.read(0, 2, 7, 1'004'224, 1099); }},
      {"than was written", [](LenderCheck& c) { c.read(0, 2, 7, 1'004'224, 0); }},
      {"read twice",
       [](LenderCheck& c) {
         c.read(0, 2, 7, 1'004'224, 1098);
         c.read(0, 2, 7, 1'004'224, 1098);
       }},
      {"read twice",
       [](LenderCheck& c) {
         c.read(0, 2, 7, 1'004'224, 1098);
         c.read(0, 2, 7, 1'004'224, 500);
       }},
      {"read twice",
       [](LenderCheck& c) {
         c.read(0, 2, 7, 1'004'224, 1098);
         c.read(0, 2, 7, 1'004'500, 822);
       }},
      {"a lease that is over",
       [](LenderCheck& c) {
         c.ended(2, 7);
         c.read(0, 2, 7, 1'004'224, 1098);
       }},
      {"a lease that is over", [](LenderCheck& c) { c.written(0, 1, 7, 1'000'000, 10); }},
      {"a READ of what is not lent", [](LenderCheck& c) { c.wrong(0, 2, "a READ of what is not lent"); }},
  };
  for (const auto& [text, wrong] : wrongs) {
    const std::string said = judge([&](LenderCheck& c) {
      written(c);
      wrong(c);
    });
    EXPECT_NE(said.find(text), std::string::npos) << text << ": " << said;
  }
}

TEST(Books, APortThatIsDownAndDrainsIsSeen) {
  Violations v;
  BooksCheck(v).sent_down(0, "switch 0", 5, 5);
  EXPECT_EQ(v.count(), 0u);
  BooksCheck(v).sent_down(0, "switch 0", 5, 6);
  EXPECT_EQ(v.count(), 1u);
  BooksCheck(v).kept_down(0, "switch 0", 3, 1000, 1000);
  BooksCheck(v).kept_down(0, "switch 0", 0, 1001, 1000);
  EXPECT_EQ(v.count(), 1u);
  BooksCheck(v).kept_down(0, "switch 0", 3, 1001, 1000);
  EXPECT_EQ(v.count(), 2u);
}

// Packets of one queue pair on their way through a switch, with their marks.
std::vector<uint8_t> packet(uint32_t psn, uint8_t ecn) {
  NicPacket p;
  p.to = *IpAddress::parse("10.0.0.2"), p.from = *IpAddress::parse("10.0.0.1");
  p.opcode = kOpSendMiddle, p.qpn = 9, p.psn = psn, p.traffic_class = ecn;
  return make_frame(p);
}

TEST(PassageOfMarks, AMarkMayComeToWhoCanTakeOneAndNeverGo) {
  for (const uint8_t came : {0, 1, 2, 3})
    for (const uint8_t left : {0, 1, 2, 3}) {
      Violations v;
      PassageCheck check(v);
      check.came(5, packet(1, came));
      check.left(0, 5, 1, packet(1, left));
      EXPECT_EQ(v.count() == 0, came == left || (left == 3 && came != 0)) << int(came) << " " << int(left);
    }
}

TEST(PassageOfDetours, OnlyWhatCameBeforeALinkWentDownMayLeaveLate) {
  for (const bool detour : {false, true}) {
    Violations v;
    PassageCheck check(v);
    check.came(5, packet(1, 0));
    if (detour) check.detour(5);
    check.came(5, packet(2, 0));
    check.came(5, packet(3, 0));
    check.left(0, 5, 1, packet(2, 0));
    check.left(0, 5, 1, packet(1, 0));
    EXPECT_EQ(v.count() == 0, detour);
    check.left(0, 5, 1, packet(3, 0));
    EXPECT_EQ(v.count() == 0, detour);
    check.left(0, 5, 1, packet(2, 0));
    EXPECT_EQ(v.count(), detour ? 1u : 2u);
  }
}

// A group of four hosts, of which two send to a third what a port of 2 Gb/s cannot take: 1,000 packets of
// 1,098 bytes each at 1.5 Gb/s.
class Lent : public testing::Test {
 protected:
  Lent() {
    plan.seed = plan.fabric.seed = 3;
    plan.fabric.hosts = 4;
    plan.fabric.engine.mtu = 1024;
    plan.fabric.engine.segment_bytes = 4032;
    plan.fabric.engine.join_timeout = seconds(6);
    GroupPlan g;
    g.hosts = {0, 1, 2, 3};
    g.world = 4;
    for (uint64_t i = 0; i < 6; i++) {
      OperationPlan o;
      o.reduction = {9, 1, 5000 + i, 4, i};
      g.operations.push_back(o);
    }
    g.join_at.assign(4, Time{});
    plan.groups.push_back(g);
    buffering::Config& b = plan.fabric.buffers.emplace();
    buffering::PortConfig& port = b.ports.emplace_back();
    port.rate_bps = 2'000'000'000;
    b.pool_size = 1 << 30;
    for (auto& q : port.queues) q.profile.spill = true;
    for (auto& p : port.groups) p.static_th = 16 << 10;
    b.spillway.enabled = true;
    b.spillway.dscp.set();
    b.spillway.pool_size = 4 << 20;
    b.spillway.drain_off = 16 << 10;
    plan.fabric.lenders.resize(2);
    for (FabricLender& l : plan.fabric.lenders) l.bytes = 4 << 20;
    plan.fabric.remote.mtu = 1024;
    for (const uint16_t from : {1, 3})
      plan.streams.push_back({.from = from,
                              .to = 2,
                              .traffic_class = 2,
                              .payload = 1024,
                              .gbit = 1.5,
                              .at = milliseconds(2),
                              .length = microseconds(6000)});
    plan.heal_at = milliseconds(60);
  }
  void add(FaultKind kind, Time at, Time duration, uint32_t target, uint32_t rank = 0) {
    plan.faults.push_back({kind, at, duration, target, rank});
    plan.has[static_cast<size_t>(kind)] = true;
    plan.heal_at = std::max(plan.heal_at, at + duration);
  }
  SpillStats expect_clean() {
    Arena arena;
    const RunResult r = run_plan(plan, arena);
    for (const std::string& t : r.texts) ADD_FAILURE() << t;
    EXPECT_EQ(r.stats.operations_failed, 0u);
    return r.stats.spill;
  }
  Plan plan;
};

// The excess is 3 − 2 Gb/s for 6 ms: 750,000 bytes, less 16 KiB in the queue of each sender.
TEST_F(Lent, WhatAPortCannotTakeGoesToTheLendersAndComesBack) {
  const SpillStats s = expect_clean();
  EXPECT_GT(s.written, (750'000u - 3 * (16u << 10)) / 1122);
  EXPECT_EQ(s.written, s.read);
  EXPECT_EQ(s.written, s.drained);
  EXPECT_EQ(s.lost + s.refused + s.deaths, 0u);
  EXPECT_EQ(s.connects, 2u);
}

TEST_F(Lent, LocalMemoryIsFilledFirst) {
  plan.fabric.spill_local = 300'000;
  const SpillStats s = expect_clean();
  EXPECT_GT(s.written, 0u);
  EXPECT_GE(s.spilled - s.written, 300'000u / 1098);
  EXPECT_EQ(s.spilled, s.drained);
}

TEST_F(Lent, ALenderThatDiesLosesWhatItHeldAndComesBackWithAnotherLease) {
  add(FaultKind::kLenderDeath, milliseconds(7), milliseconds(400), 0);
  const SpillStats s = expect_clean();
  EXPECT_GT(s.store_lost, 100u);
  EXPECT_EQ(s.store_lost, s.lender_lost);
  EXPECT_EQ(s.store_lost, s.lost);
  EXPECT_EQ(s.deaths, 1u);
  EXPECT_EQ(s.connects, 3u);
  EXPECT_EQ(s.spilled, s.drained + s.lost);
}

TEST_F(Lent, ALenderThatEndsOrRefusesIsNoticedAtOnce) {
  for (const uint32_t how : {0, 1}) {
    plan.faults.clear();
    add(FaultKind::kLenderEnd, milliseconds(7), milliseconds(400), 0, how);
    const SpillStats s = expect_clean();
    EXPECT_GT(s.store_lost, 100u);
    EXPECT_EQ(s.deaths, 1u);
    EXPECT_EQ(s.connects, 3u);
  }
}

// Bridged packets have no other way than a port that is down: all that was kept for it is lost and counted.
TEST_F(Lent, ALinkThatGoesDownEmptiesWhatIsKeptForIt) {
  add(FaultKind::kLinkDown, milliseconds(7), milliseconds(5), 2, kLinkOfHost);
  const SpillStats s = expect_clean();
  EXPECT_GT(s.unrouted, 100u);
  EXPECT_EQ(s.spilled, s.drained + s.unrouted);
  EXPECT_EQ(s.rerouted, 0u);
}

// Routed ones go by the other spine: hosts 1 and 3 are behind leaf 1, host 2 is behind leaf 0. Which spine a
// stream takes is a matter of its hash; each of leaf 1's trunks goes down once.
TEST_F(Lent, WhatIsKeptForATrunkThatGoesDownIsReroutedInOrder) {
  plan.fabric.leaves = plan.fabric.spines = 2;
  plan.fabric.trunk.gbit = 100;
  for (StreamPlan& s : plan.streams) s.gbit = 3;
  for (const bool lent : {true, false}) {
    if (!lent) plan.fabric.lenders.clear();
    SpillStats all;
    for (const uint32_t trunk : {2, 3}) {
      plan.faults.clear();
      add(FaultKind::kLinkDown, milliseconds(6), milliseconds(5), trunk, kLinkOfTrunk);
      all.add(expect_clean());
    }
    // Where lenders are behind the trunk, too, what is written to them has it first, and little is kept.
    EXPECT_GT(all.rerouted, lent ? 0u : 100u);
    EXPECT_EQ(all.written > 0, lent);
    EXPECT_EQ(all.spilled, all.drained + all.rerouted + all.lost);
  }
}

// The switch's own frames for a member are dropped before they get onto a wire, and repeated.
TEST_F(Lent, AMembersLinkThatGoesDownIsOnlyADelay) {
  for (const int64_t at_us : {150, 400, 900, 1500, 2500}) {
    plan.faults.clear();
    add(FaultKind::kLinkDown, microseconds(at_us), milliseconds(2), 1, kLinkOfHost);
    expect_clean();
  }
}

}  // namespace
}  // namespace millrace::sim
