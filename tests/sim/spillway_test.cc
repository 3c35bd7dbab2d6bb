// The seventeen scenarios of traffic manager and spillway (buffering/BUFFERING.md) in virtual time, on the
// shipping pipeline. Expected values are closed forms of rates, durations and limits.
#include <gtest/gtest.h>

#include "tests/sim/two_dc.h"

namespace millrace::sim {
namespace {

using buffering::QueueDrop;
using buffering::SpillCounters;
using buffering::SpillDrop;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr uint64_t kLimit = 100'000;  // bytes, of the queue
constexpr double kRate = 1;           // Gb/s, of the congested port
constexpr uint64_t kFrame = 14 + 20 + 8 + 12 + 1024 + 4, kWire = kFrame + kEthernetOverhead;
constexpr Time kBurst = milliseconds(10), kBegin = milliseconds(1);
constexpr uint64_t kExcess = 1'250'000;  // wire bytes: (1 + 1 − 1) Gb/s for 10 ms

LabConfig two_to_one(bool spill, uint16_t hosts = 3) {
  LabConfig c;
  c.hosts = hosts;
  for (uint16_t h = 0; h < hosts; h++)
    c.buffers.ports.push_back(lab_port(h == 2 ? kRate : 10, h == 2 ? kLimit : buffering::kNoLimit, true));
  c.buffers.spillway.enabled = spill;
  c.buffers.spillway.dscp[26] = true;
  c.buffers.spillway.drain_on = 32 << 10;
  c.buffers.spillway.drain_off = 64 << 10;
  return c;
}

StreamConfig burst(uint16_t from, uint16_t to = 2) {
  StreamConfig s;
  s.from = from, s.to = to, s.gbit = kRate;
  s.start = kBegin, s.length = kBurst;
  return s;
}

uint64_t drops(const buffering::TrafficManager& tm, QueueDrop why) {
  uint64_t n = 0;
  for (uint16_t p = 0; p < tm.config().ports.size(); p++)
    for (uint8_t q = 0; q < buffering::kClasses; q++)
      n += tm.counters(p, q).drops[static_cast<size_t>(why)].packets;
  return n;
}

uint64_t all_drops(const buffering::TrafficManager& tm) {
  uint64_t n = 0;
  for (size_t d = 0; d < buffering::kQueueDrops; d++) n += drops(tm, static_cast<QueueDrop>(d));
  return n;
}

// Invariants 3 and 4 and the queues' books; whenever it is called.
void check_books(Lab& lab) {
  const buffering::TrafficManager& tm = lab.buffers();
  for (uint16_t p = 0; p < tm.config().ports.size(); p++)
    for (uint8_t q = 0; q < buffering::kClasses; q++) {
      const buffering::QueueCounters c = tm.counters(p, q);
      uint64_t gone = c.sent.bytes + c.to_spillway.bytes + tm.queue_bytes(p, q);
      for (const buffering::Amount& d : c.drops) gone += d.bytes;
      EXPECT_EQ(c.arrived.bytes + c.drained.bytes, gone) << p << " " << int(q);
    }
  EXPECT_LE(tm.buffer().used(), tm.buffer().size() + tm.buffer().headroom_used());
  if (tm.spillway() == nullptr) return;
  const SpillCounters c = tm.spillway()->counters();
  const buffering::Amount lost = c.lost_in_all(), refused = c.refused_in_all();
  EXPECT_EQ(c.spilled.packets, c.drained.packets + c.rerouted.packets + c.resident.packets + lost.packets);
  EXPECT_EQ(c.spilled.bytes, c.drained.bytes + c.rerouted.bytes + c.resident.bytes + lost.bytes);
  EXPECT_EQ(c.offered.packets, c.spilled.packets + refused.packets);
  EXPECT_LE(tm.spillway()->store().used(), tm.spillway()->store().size());
  EXPECT_LE(c.resident.bytes, tm.config().spillway.pool_size);
}

void check_empty(Lab& lab) {
  check_books(lab);
  const buffering::TrafficManager& tm = lab.buffers();
  EXPECT_TRUE(tm.empty());
  EXPECT_EQ(tm.buffer().used(), 0u);
  EXPECT_EQ(tm.frames_queued(), 0u);
  EXPECT_EQ(lab.at().pool().in_use(), 0u);
  if (tm.spillway() != nullptr) {
    EXPECT_EQ(tm.spillway()->store().used(), 0u);
    EXPECT_EQ(tm.spillway()->counters().resident, buffering::Amount{});
  }
}

void expect_whole(const Stream& s) {
  EXPECT_EQ(s.received, s.packets());
  EXPECT_EQ(s.gaps, 0u);
  EXPECT_EQ(s.overtaken, 0u);
}

TEST(Spillway, S1WithoutCongestionNothingIsSpilledAndTheOutputIsTheSame) {
  std::vector<std::vector<uint8_t>> seen[2];
  for (const bool spill : {true, false}) {
    LabConfig c = two_to_one(spill);
    Lab lab(c);
    lab.host(2).keep = true;
    StreamConfig a = burst(0), b = burst(1);
    a.gbit = b.gbit = 0.45;
    a.ecn = 0;
    lab.add(a), lab.add(b);
    ASSERT_TRUE(lab.run(milliseconds(100)));
    for (auto& s : lab.streams()) expect_whole(*s);
    if (spill) {
      EXPECT_EQ(lab.spillway().counters().offered.packets, 0u);
    }
    check_empty(lab);
    seen[spill] = lab.host(2).seen;
  }
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_GT(seen[0].size(), 1000u);
}

TEST(Spillway, S2TwoToOneIsKeptWholeAndDrainedInOrder) {
  Lab lab(two_to_one(true));
  Stream &a = lab.add(burst(0)), &b = lab.add(burst(1));
  lab.run_until(kBegin + kBurst);
  check_books(lab);
  const uint64_t q = lab.buffers().queue_bytes(2, 3) / kFrame * kWire;
  EXPECT_GE(q, (32u << 10) - 2 * kWire);
  EXPECT_LE(q, (64u << 10) + 2 * kWire);
  const uint64_t peak = lab.spillway().counters().resident_bytes_max / kFrame * kWire;
  EXPECT_NEAR(static_cast<double>(peak), static_cast<double>(kExcess - q), 2.0 * 4200);

  ASSERT_TRUE(lab.network().run([&] { return lab.spillway().keys_count() == 0; }, milliseconds(50)));
  const double empty_us = static_cast<double>((lab.network().now() - kBegin - kBurst).count()) / 1e3;
  // P / C, give or take what the queue may hold more or less than at the end of the burst.
  EXPECT_NEAR(empty_us, static_cast<double>(peak) * 8 / kRate / 1e3, (32 << 10) * 8 / kRate / 1e3);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  expect_whole(a), expect_whole(b);
  EXPECT_EQ(all_drops(lab.buffers()), 0u);
  // The port never rested: all of it left at its rate.
  const double last_us = static_cast<double>((std::max(a.last_at, b.last_at) - kBegin).count()) / 1e3;
  EXPECT_NEAR(last_us, 2 * 1.25e6 * 8 / 1e3, 60);
  const SpillCounters c = lab.spillway().counters();
  EXPECT_EQ(c.spilled, c.drained);
  EXPECT_EQ(c.refused_in_all().packets + c.lost_in_all().packets, 0u);
  check_empty(lab);
}

TEST(Spillway, S3WithoutSpillingTheExcessIsDropped) {
  Lab lab(two_to_one(false));
  Stream &a = lab.add(burst(0)), &b = lab.add(burst(1));
  ASSERT_TRUE(lab.run(milliseconds(50)));
  const uint64_t lost = a.packets() + b.packets() - a.received - b.received;
  EXPECT_EQ(lost, drops(lab.buffers(), QueueDrop::kQueueFull));
  EXPECT_EQ(lost, all_drops(lab.buffers()));
  // The excess, less what the queue holds.
  EXPECT_NEAR(static_cast<double>(lost * kWire), static_cast<double>(kExcess - kLimit), 8400);
  check_empty(lab);
}

TEST(Spillway, S4OnlyTheEligibleSourceIsKept) {
  LabConfig c = two_to_one(true);
  // 10.77.0.10 alone is the remote datacenter.
  c.buffers.spillway.source_prefixes = {{*IpAddress::parse("10.77.0.10"), 128}};
  Lab lab(c);
  Stream &cross = lab.add(burst(0)), &intra = lab.add(burst(1));
  ASSERT_TRUE(lab.run(milliseconds(50)));
  expect_whole(cross);
  EXPECT_EQ(intra.received + drops(lab.buffers(), QueueDrop::kQueueFull), intra.packets());
  EXPECT_GT(drops(lab.buffers(), QueueDrop::kQueueFull), 0u);
  EXPECT_EQ(intra.overtaken, 0u);
  EXPECT_EQ(lab.spillway().counters().refused_in_all().packets, 0u);
  check_empty(lab);
}

TEST(Spillway, S5AFullPoolDropsTheRestAndKeepsTheOrder) {
  LabConfig c = two_to_one(true);
  c.buffers.spillway.pool_size = 600'000;  // about half of what it would take
  Lab lab(c);
  Stream &a = lab.add(burst(0)), &b = lab.add(burst(1));
  lab.run_until(kBegin + kBurst);
  const uint64_t q = lab.buffers().queue_bytes(2, 3);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  const SpillCounters s = lab.spillway().counters();
  const uint64_t lost = a.packets() + b.packets() - a.received - b.received;
  EXPECT_EQ(lost, s.refused[static_cast<size_t>(SpillDrop::kFull)].packets);
  EXPECT_EQ(lost, s.refused_in_all().packets);
  const double kept = 600'000.0 / kFrame;
  EXPECT_NEAR(static_cast<double>(lost),
              (static_cast<double>(kExcess) / kWire) - static_cast<double>(q) / kFrame - kept, 8);
  EXPECT_EQ(a.overtaken + b.overtaken, 0u);
  check_empty(lab);
}

TEST(Spillway, S6AnotherDestinationSeesNothingOfIt) {
  auto latency = [](bool congested) {
    LabConfig c = two_to_one(true, 4);
    Lab lab(c);
    StreamConfig other = burst(0, 3);
    other.gbit = 0.4;
    Stream& quiet = lab.add(other);
    if (congested) lab.add(burst(0)), lab.add(burst(1));
    EXPECT_TRUE(lab.run(milliseconds(50)));
    expect_whole(quiet);
    EXPECT_EQ(lab.spillway().counters(3).offered.packets, 0u);
    EXPECT_EQ(lab.spillway().counters(2).offered.packets > 0, congested);
    check_empty(lab);
    return quiet.latency_max;
  };
  // The sender's own wire, which both streams share, may hold one packet of the other stream.
  EXPECT_LE(latency(true) - latency(false), Time(static_cast<int64_t>(kWire * 8 / 10)));
}

// Unequal rates: else one sender would find room every time, the other never.
StreamConfig go_back_n(uint16_t from, uint64_t packets) {
  StreamConfig s = burst(from);
  s.gbit = from == 0 ? 1.07 : 0.93;
  s.closed = true;
  s.packets = packets;
  return s;
}

struct Outcome {
  uint64_t naks = 0, retransmitted = 0, marked = 0, spilled_bytes = 0, timeouts = 0, duplicates = 0;
  Time done{};
};

Outcome go_back_n_run(const LabConfig& c, const std::vector<StreamConfig>& streams, Time pause_at = kNever) {
  Lab lab(c);
  if (pause_at != kNever) {
    lab.host(2).pause_us(3, pause_at, 0xFFFF);
    lab.host(2).pause_us(3, pause_at + milliseconds(6), 0);
  }
  for (const StreamConfig& s : streams) lab.add(s);
  EXPECT_TRUE(lab.run(std::chrono::seconds(5)));
  Outcome o;
  for (auto& s : lab.streams()) {
    if (s->config.closed) {
      EXPECT_EQ(s->expected, s->packets());
    }
    o.naks += s->naks, o.retransmitted += s->retransmitted, o.marked += s->marked;
    o.timeouts += s->timeouts, o.duplicates += s->duplicates;
    if (s->done_at != kNever) o.done = std::max(o.done, s->done_at);
  }
  if (lab.buffers().spillway() != nullptr) o.spilled_bytes = lab.spillway().counters().spilled.bytes;
  check_empty(lab);
  return o;
}

TEST(Spillway, S7GoBackNSeesNoGapWithSpillingAndSomeWithout) {
  const std::vector<StreamConfig> streams = {go_back_n(0, 1130), go_back_n(1, 1130)};
  const Outcome on = go_back_n_run(two_to_one(true), streams),
                off = go_back_n_run(two_to_one(false), streams);
  EXPECT_EQ(on.naks, 0u);
  EXPECT_EQ(on.retransmitted, 0u);
  EXPECT_GT(off.naks, 0u);
  EXPECT_GT(off.retransmitted, 0u);
}

// What it is like if later packets of a flow pass by those that are spilled: here because every second one is
// not eligible. S7 would see it, and so would everything that counts who was overtaken.
TEST(Spillway, S8WhatDoesNotStandBehindItsFlowIsSeenToOvertake) {
  LabConfig c = two_to_one(true);
  for (auto& port : c.buffers.ports) port.dscp_to_tc[27] = 3;
  std::vector<StreamConfig> streams = {go_back_n(0, 1130), go_back_n(1, 1130)};
  for (StreamConfig& s : streams) s.odd_dscp = 27;
  EXPECT_GT(go_back_n_run(c, streams).naks, 0u);
  Lab lab(c);
  StreamConfig fast = burst(0), slow = burst(1);
  fast.gbit = 1.07, slow.gbit = 0.93;
  fast.odd_dscp = slow.odd_dscp = 27;
  Stream &a = lab.add(fast), &b = lab.add(slow);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  EXPECT_GT(a.overtaken + b.overtaken, 0u);
}

TEST(Spillway, S9APausedPortReleasesNothingUntilItMayGoOn) {
  LabConfig c = two_to_one(true);
  c.buffers.ports[2].pfc[3] = true;
  Lab lab(c);
  Stream &a = lab.add(burst(0)), &b = lab.add(burst(1));
  // 5 ms of 512 bit times at 1 Gb/s, then XON.
  const Time from = kBegin + milliseconds(3);
  lab.host(2).pause_us(3, from, 0xFFFF);
  lab.host(2).pause_us(3, from + milliseconds(5), 0);
  lab.run_until(from + microseconds(50));
  EXPECT_TRUE(lab.buffers().paused(2, 3));
  const uint64_t sent = lab.buffers().counters(2, 3).sent.packets;
  const SpillCounters before = lab.spillway().counters();
  lab.run_until(from + milliseconds(5) - microseconds(50));
  EXPECT_EQ(lab.buffers().counters(2, 3).sent.packets, sent);
  EXPECT_EQ(lab.spillway().counters().drained, before.drained);
  // Everything that came meanwhile is in it: 2 Gb/s for 4.9 ms, but for what the queue still took.
  EXPECT_NEAR(static_cast<double>((lab.spillway().counters().resident.bytes - before.resident.bytes) /
                                  kFrame * kWire),
              2e9 / 8 * 4.9e-3, static_cast<double>(kLimit));
  EXPECT_GT(lab.spillway().counters().held_by_pfc, milliseconds(4));
  ASSERT_TRUE(lab.run(milliseconds(100)));
  expect_whole(a), expect_whole(b);
  EXPECT_EQ(all_drops(lab.buffers()), 0u);
  check_empty(lab);
}

TEST(Spillway, S10TheWatchdogEndsAPauseThatLastsTooLong) {
  LabConfig c = two_to_one(true);
  c.buffers.ports[2].pfc[3] = true;
  c.buffers.spillway.max_residence = std::chrono::seconds(1);
  Lab lab(c);
  lab.add(burst(0)), lab.add(burst(1));
  // Refreshed every 20 ms, for 300 ms in all.
  const Time from = kBegin + milliseconds(3);
  for (int i = 0; i < 15; i++) lab.host(2).pause_us(3, from + milliseconds(20 * i), 0xFFFF);
  lab.run_until(from + milliseconds(199));
  EXPECT_FALSE(lab.buffers().storm(2, 3));
  EXPECT_EQ(all_drops(lab.buffers()), 0u);
  lab.run_until(from + milliseconds(260));
  EXPECT_TRUE(lab.buffers().storm(2, 3));
  const auto queue = lab.buffers().counters(2, 3);
  EXPECT_EQ(queue.storms, 1u);
  const uint64_t dropped = queue.drops[static_cast<size_t>(QueueDrop::kWatchdog)].packets;
  const uint64_t lost = lab.spillway().counters().lost[static_cast<size_t>(SpillDrop::kWatchdog)].packets;
  EXPECT_GT(dropped, 0u);
  EXPECT_GT(lost, 0u);
  EXPECT_EQ(all_drops(lab.buffers()), dropped);
  EXPECT_EQ(lab.spillway().counters().lost_in_all().packets, lost);
  EXPECT_TRUE(lab.buffers().empty());
  // Restored 200 ms after the last pause has run out, 33.6 ms after it came.
  lab.run_until(from + milliseconds(280 + 34 + 190));
  EXPECT_TRUE(lab.buffers().storm(2, 3));
  lab.run_until(from + milliseconds(280 + 34 + 310));
  EXPECT_FALSE(lab.buffers().storm(2, 3));
  StreamConfig again = burst(0);
  again.start = lab.network().now() + milliseconds(1);
  Stream& s = lab.add(again);
  ASSERT_TRUE(lab.run(milliseconds(100)));
  expect_whole(s);
  check_empty(lab);
}

TEST(Spillway, S11OnlyEctPacketsAreMarked) {
  LabConfig c = two_to_one(true);
  Lab lab(c);
  StreamConfig ect = burst(0), not_ect = burst(1);
  not_ect.ecn = 0;
  Stream &a = lab.add(ect), &b = lab.add(not_ect);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  expect_whole(a), expect_whole(b);
  EXPECT_GT(a.marked, 0u);
  EXPECT_EQ(a.marked, lab.spillway().counters().ce_marked);
  EXPECT_EQ(b.marked, 0u);
}

TEST(Spillway, S12MarkingMakesDcqcnSendersSpillLess) {
  auto run = [](bool mark) {
    LabConfig c = two_to_one(true);
    c.delay = {milliseconds(5), milliseconds(5), microseconds(1)};
    c.buffers.spillway.mark_ce = mark;
    std::vector<StreamConfig> streams = {go_back_n(0, 20'000), go_back_n(1, 20'000)};
    for (StreamConfig& s : streams) s.dcqcn = true, s.timeout = std::chrono::seconds(1);
    c.buffers.spillway.max_residence = std::chrono::seconds(1);
    return go_back_n_run(c, streams);
  };
  const Outcome with = run(true), without = run(false);
  EXPECT_GT(with.marked, 0u);
  EXPECT_EQ(without.marked, 0u);
  EXPECT_LT(with.spilled_bytes, without.spilled_bytes);
  EXPECT_EQ(with.retransmitted + without.retransmitted, 0u);
}

// The switch tells the senders itself, half a round trip before the marks of what it spills could.
TEST(Spillway, AFastCnpMakesFarSendersSpillLess) {
  struct Run {
    uint64_t spilled, peak, sent, unknown, retransmitted = 0, cnps = 0;
  };
  auto run = [](bool fast, bool connect) {
    LabConfig c = two_to_one(true);
    c.delay = {milliseconds(5), milliseconds(5), microseconds(1)};
    c.buffers.spillway.fast_cnp = fast;
    c.buffers.spillway.max_residence = std::chrono::seconds(1);
    Lab lab(c);
    for (uint16_t h = 0; h < 2; h++) {
      StreamConfig s = go_back_n(h, 20'000);
      s.dcqcn = true, s.timeout = std::chrono::seconds(1);
      s.start = milliseconds(30);
      Stream& stream = lab.add(s);
      if (connect) lab.connect(stream, milliseconds(1));
    }
    EXPECT_TRUE(lab.run(std::chrono::seconds(5)));
    const SpillCounters s = lab.spillway().counters();
    Run r{s.spilled.bytes, s.resident_bytes_max, s.cnps_sent,
          s.cnps_suppressed[static_cast<size_t>(buffering::CnpSuppressed::kUnknownQp)]};
    for (auto& stream : lab.streams()) {
      r.retransmitted += stream->retransmitted + stream->timeouts, r.cnps += stream->cnps;
      EXPECT_EQ(stream->expected, stream->packets());
    }
    check_empty(lab);
    return r;
  };
  const Run with = run(true, true), without = run(false, true), unknown = run(true, false);
  EXPECT_GT(with.sent, 0u);
  EXPECT_EQ(with.unknown, 0u);
  EXPECT_GT(with.cnps, with.sent) << "those of the receivers come, too";
  EXPECT_LT(with.spilled, without.spilled);
  EXPECT_LT(with.peak, without.peak);
  EXPECT_EQ(with.retransmitted + without.retransmitted, 0u);
  // Without the connection manager nobody is known, and nothing changes.
  EXPECT_EQ(unknown.sent, 0u);
  EXPECT_GT(unknown.unknown, 0u);
  EXPECT_EQ(unknown.spilled, without.spilled);
}

TEST(Spillway, S13ASenderThatRepeatsTooEarlyBreaksNothing) {
  std::vector<StreamConfig> streams = {go_back_n(0, 1130), go_back_n(1, 1130)};
  for (StreamConfig& s : streams) s.timeout = milliseconds(4);
  LabConfig c = two_to_one(true);
  c.buffers.ports[2].pfc[3] = true;
  const Outcome o = go_back_n_run(c, streams, kBegin + milliseconds(5));  // nothing leaves for 6 ms
  EXPECT_GT(o.timeouts, 0u);
  EXPECT_GT(o.duplicates, 0u);
  EXPECT_EQ(o.naks, 0u);
}

TEST(Spillway, S14ALinkThatGoesDownMidDrainLosesWhatIsCounted) {
  Lab lab(two_to_one(true));
  Stream &a = lab.add(burst(0)), &b = lab.add(burst(1));
  lab.run_until(kBegin + kBurst + milliseconds(2));
  const uint64_t resident = lab.spillway().counters().resident.packets;
  ASSERT_GT(resident, 0u);
  const uint64_t queued = lab.buffers().frames_queued();
  lab.at().act([](switching::Pipeline& p, Time now, FrameList& out) { p.set_link(2, false, now, out); });
  check_books(lab);
  // Bridged: there is no other way.
  const SpillCounters c = lab.spillway().counters();
  EXPECT_EQ(c.lost[static_cast<size_t>(SpillDrop::kUnrouted)].packets, resident);
  EXPECT_EQ(drops(lab.buffers(), QueueDrop::kLinkDown), queued);
  EXPECT_TRUE(lab.buffers().empty());
  StreamConfig late = burst(0);
  late.start = lab.network().now() + microseconds(10), late.length = milliseconds(1);
  Stream& into_the_void = lab.add(late);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  EXPECT_EQ(into_the_void.received, 0u);
  EXPECT_EQ(drops(lab.buffers(), QueueDrop::kLinkDown), queued + into_the_void.packets());
  lab.at().act([](switching::Pipeline& p, Time now, FrameList& out) { p.set_link(2, true, now, out); });
  late.start = lab.network().now() + microseconds(10);
  Stream& again = lab.add(late);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  expect_whole(again);
  EXPECT_EQ(a.overtaken + b.overtaken, 0u);
  check_empty(lab);
}

TEST(Spillway, S15ALoadThatSwingsAboutTheThresholdsKeepsTheOrder) {
  Lab lab(two_to_one(true));
  std::vector<Stream*> all;
  // 0.2 ms at 2 Gb/s, 0.2 ms at rest: fifty times.
  for (int i = 0; i < 50; i++)
    for (uint16_t h = 0; h < 2; h++) {
      StreamConfig s = burst(h);
      s.start = kBegin + microseconds(400) * i, s.length = microseconds(200);
      if (i > 0) s.gbit = 1;
      all.push_back(&lab.add(s));
    }
  StreamConfig steady = burst(0);
  steady.gbit = 0.3, steady.length = milliseconds(20);
  all.push_back(&lab.add(steady));
  ASSERT_TRUE(lab.run(milliseconds(100)));
  for (Stream* s : all) expect_whole(*s);
  const SpillCounters c = lab.spillway().counters();
  EXPECT_GT(c.spilled.packets, 0u);
  // Once into and once out of each state per swing at most.
  EXPECT_LE(c.transitions, 50u * 4);
  EXPECT_EQ(all_drops(lab.buffers()), 0u);
  check_empty(lab);
}

TEST(Spillway, S16AcknowledgementsAndCnpsAreNeverSpilled) {
  Lab lab(two_to_one(true));
  StreamConfig acks = burst(0), cnps = burst(1);
  acks.opcode = kOpAck, acks.payload = 0;
  acks.gbit = cnps.gbit = 1;
  cnps.opcode = kOpCnp, cnps.payload = 16;
  acks.packets = cnps.packets = 20'000;
  lab.add(acks), lab.add(cnps);
  lab.run_until(milliseconds(30));
  EXPECT_GT(all_drops(lab.buffers()), 0u);
  EXPECT_EQ(lab.spillway().counters().offered.packets, 0u);
}

// Invariant 6: within interval × hold checks and one tick of the queue's being calm.
TEST(Spillway, AKeyWithAnIdleQueueDrainsAtOnce) {
  LabConfig c = two_to_one(true);
  c.buffers.ports[2].pfc[3] = true;
  c.buffers.ports[2].queues[3].profile.static_th = 4 * kFrame;
  Lab lab(c);
  const Time from = kBegin + microseconds(500), resumed = from + milliseconds(1);
  lab.host(2).pause_us(3, from, 0xFFFF);
  lab.host(2).pause_us(3, resumed, 0);
  StreamConfig s = burst(0);
  s.length = milliseconds(1);
  Stream& a = lab.add(s);
  // The pause's own way: 60 bytes and 24 more at 10 Gb/s, and 1 µs.
  const Time heard = resumed + nanoseconds(1068);
  lab.run_until(heard - nanoseconds(100));
  const auto before = lab.spillway().counters();
  EXPECT_GT(before.resident.packets, 40u);
  EXPECT_EQ(lab.buffers().queue_bytes(2, 3), 4 * kFrame);
  // The queue's four packets are below drain_on; then it is calm.
  const auto& w = c.buffers.spillway;
  lab.run_until(heard + w.drain_check_interval * (w.drain_hold_checks + 1));
  EXPECT_GT(lab.spillway().counters().drained.packets, before.drained.packets);
  ASSERT_TRUE(lab.run(milliseconds(50)));
  expect_whole(a);
  check_empty(lab);
}

// Two datacenters; tests/sim/two_dc_table prints all cases.
TEST(TwoDc, ATransferThatMeetsABurstIsOnlyDelayed) {
  for (const int round_trip : {1, 20})
    for (const bool short_flows : {false, true})
      for (const Control control : {Control::kOff, Control::kUnmarked}) {
        TwoDcCase c;
        c.round_trip = milliseconds(round_trip);
        c.short_flows = short_flows, c.dcqcn = control;
        const TwoDcResult r = run_two_dc(c);
        SCOPED_TRACE(testing::Message() << round_trip << " ms, " << (short_flows ? "short" : "long"));
        ASSERT_TRUE(r.finished);
        EXPECT_EQ(r.drops, 0u);
        EXPECT_EQ(r.cross_retransmitted + r.burst_retransmitted + r.timeouts, 0u);
        EXPECT_LE(static_cast<double>(r.cross.count()), 1.05 * static_cast<double>(r.ideal.count()));
        EXPECT_NEAR(static_cast<double>(r.peak_bytes), static_cast<double>(r.peak_expected),
                    0.05 * static_cast<double>(r.peak_expected));
        // Neither does the flow beside it notice.
        EXPECT_GT(r.unrelated_gbit, 0.39);
      }
}

// Marked, too: a burst of flows so short that they are over before a CNP comes leaves the transfer at its
// rate with the parameters of the paper, any burst with a timer that is shorter than the CNPs' interval.
TEST(TwoDc, MarkingDelaysATransferByNoMoreThanItsSendersParametersDo) {
  for (const int round_trip : {1, 20})
    for (const bool short_flows : {false, true})
      for (const int timer_us : {55, 10}) {
        TwoDcCase c;
        c.round_trip = milliseconds(round_trip);
        c.short_flows = short_flows, c.dcqcn = Control::kOn;
        c.reaction.increase_period = microseconds(timer_us);
        const TwoDcResult r = run_two_dc(c);
        SCOPED_TRACE(testing::Message() << round_trip << " ms, " << short_flows << " T " << timer_us);
        ASSERT_TRUE(r.finished);
        EXPECT_EQ(r.drops, 0u);
        EXPECT_EQ(r.cross_retransmitted + r.burst_retransmitted + r.timeouts, 0u);
        EXPECT_GT(r.marked, 0u);
        if (!short_flows && timer_us == 55) continue;
        EXPECT_LE(static_cast<double>(r.cross.count()), 1.05 * static_cast<double>(r.ideal.count()));
      }
}

TEST(TwoDc, WithoutSpillingItLosesPacketsAndWithPfcItsNeighboursTime) {
  TwoDcCase c;
  c.relief = Relief::kDrop;
  const TwoDcResult dropped = run_two_dc(c);
  EXPECT_GT(dropped.drops, 0u);
  EXPECT_GT(dropped.cross_retransmitted, 0u);
  c.relief = Relief::kPfc;
  c.buffer_bytes = 12'000'000;
  const TwoDcResult paused = run_two_dc(c);
  EXPECT_EQ(paused.drops, 0u);
  EXPECT_LT(paused.unrelated_gbit, 0.39);
}

}  // namespace
}  // namespace millrace::sim
