// The traffic manager by itself: admission, scheduling, shaping, marking and pauses against closed forms.
#include "buffering/traffic_manager.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>

#include "buffering/local_store.h"
#include "roce/packet.h"
#include "tools/sim/nic_wire.h"

namespace millrace::buffering {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr uint32_t kPayload = 940, kFrame = 14 + 20 + 8 + 12 + kPayload + 4;

struct Rig {
  explicit Rig(Config c = {}, uint16_t ports = 3) : config(std::move(c)) {
    PortConfig port;
    for (uint8_t d = 0; d < 64; d++) port.dscp_to_tc[d] = d / 8;  // class selectors
    config.ports.resize(ports, port);
  }
  TrafficManager& make() { return tm.emplace(config, pool, std::unique_ptr<Store>()); }
  PortConfig& port(uint16_t p) { return config.ports[p]; }

  Frame frame(uint8_t tc, uint8_t ecn = 2, uint32_t payload = kPayload, bool v6 = false) {
    sim::NicPacket p;
    p.to_mac = {{2, 0, 0, 0, 0, 2}}, p.from_mac = {{2, 0, 0, 0, 0, 1}};
    p.to = *IpAddress::parse(v6 ? "fd00::2" : "10.0.0.2"),
    p.from = *IpAddress::parse(v6 ? "fd00::1" : "10.0.0.1");
    p.traffic_class = static_cast<uint8_t>(tc << 5 | ecn);
    p.opcode = sim::kOpSendMiddle;
    p.udp_port = 0xC000;
    p.psn = number++;
    const std::vector<uint8_t> zeros(payload);
    p.payload = zeros;
    const std::vector<uint8_t> bytes = sim::make_frame(p);
    Frame f = Frame::allocate(pool);
    std::memcpy(f.buffer()->data(), bytes.data(), bytes.size());
    f.buffer()->length = static_cast<uint32_t>(bytes.size());
    return f;
  }
  void send(uint8_t tc, uint16_t to, uint16_t from, Time now, uint8_t ecn = 2) {
    tm->enqueue(frame(tc, ecn), to, from, now, out);
  }
  // Frames that left, by traffic class; they are gone then.
  std::map<int, int> take() {
    std::map<int, int> classes;
    while (Frame f = out.pop()) classes[f.bytes()[15] >> 5]++;
    return classes;
  }
  uint64_t dropped(uint16_t port, uint8_t q, QueueDrop why) {
    return tm->counters(port, q).drops[static_cast<size_t>(why)].packets;
  }
  Frame pause(uint8_t priority, uint16_t quanta) {
    Pause p;
    p.priorities[priority] = true;
    p.quanta[priority] = quanta;
    return build_pause(pool, {{2, 0, 0, 0, 0, 9}}, p);
  }

  Config config;
  HeapFramePool pool{4608, UINT32_MAX, true};
  FrameList out;
  std::optional<TrafficManager> tm;
  uint32_t number = 0;
};

TEST(TrafficManager, AFrameThatMeetsAnIdlePortPassesUntouched) {
  Rig rig;
  rig.port(1).queues[3].wred = WredProfile{0, 1, 1};
  rig.make();
  Frame f = rig.frame(3);
  const std::vector<uint8_t> before(f.bytes().begin(), f.bytes().end());
  rig.tm->enqueue(std::move(f), 1, 0, Time{}, rig.out);
  ASSERT_EQ(rig.out.size(), 1u);
  const Frame left = rig.out.pop();
  EXPECT_EQ(left.port(), 1);
  EXPECT_TRUE(std::equal(before.begin(), before.end(), left.bytes().begin(), left.bytes().end()));
  EXPECT_EQ(rig.tm->counters(1, 3).arrived, (Amount{1, kFrame}));
  EXPECT_EQ(rig.tm->counters(1, 3).sent, (Amount{1, kFrame}));
  EXPECT_EQ(rig.tm->next_deadline(), kNever);
}

// (998 + 24) bytes at 3 Gb/s last 2725.3 ns: the remainders add up, none is lost.
TEST(TrafficManager, TheShaperSpacesFramesByTheirTimeOnTheWire) {
  Rig rig;
  rig.port(1).rate_bps = 3'000'000'000;
  rig.make();
  Time now = milliseconds(1);
  for (int i = 0; i < 301; i++) rig.send(0, 1, 0, now);
  EXPECT_EQ(rig.out.size(), 1u);
  const Time begin = now;
  int sent = 1;
  while (sent < 301) {
    now = rig.tm->next_deadline();
    ASSERT_NE(now, kNever);
    rig.out.clear();
    rig.tm->poll(now, rig.out);
    ASSERT_LE(rig.out.size(), 1u);
    sent += static_cast<int>(rig.out.size());
  }
  // 300 frames; the rate in whole picoseconds per byte is 2666 instead of 2666.67.
  EXPECT_NEAR(static_cast<double>((now - begin).count()), 300 * (kFrame + 24) * 2.666, 2);
  // At rest it saves nothing up.
  now += milliseconds(5);
  rig.out.clear();
  rig.send(0, 1, 0, now), rig.send(0, 1, 0, now);
  EXPECT_EQ(rig.out.size(), 1u);
}

TEST(TrafficManager, APollThatIsLateCostsABusyPortNoTime) {
  Rig rig;
  rig.port(1).rate_bps = 1'000'000'000;
  rig.make();
  for (int i = 0; i < 300; i++) rig.send(0, 1, 0, Time{});
  rig.tm->poll(microseconds(100), rig.out);
  // 8.176 µs each: the 13th begins at 98.1 µs.
  EXPECT_EQ(rig.out.size(), 13u);
  rig.tm->poll(microseconds(100) + milliseconds(10), rig.out);
  EXPECT_LE(rig.out.size(), 13u + 124u) << "a long absence is not made up for";
}

// Nor where what the port sends comes out of the spillway.
TEST(TrafficManager, APollThatIsLateCostsADrainingPortNoTime) {
  Rig rig;
  rig.port(1).rate_bps = 1'000'000'000;
  rig.port(1).queues[0].profile.static_th = 20'000;
  rig.port(1).queues[0].profile.spill = true;
  rig.config.spillway.enabled = true;
  rig.config.spillway.dscp.set();
  const uint32_t ids = Spillway::ids_max(rig.config.spillway);
  rig.tm.emplace(rig.config, rig.pool, std::make_unique<LocalStore>(64u << 20, ids, ids));
  for (int i = 0; i < 4000; i++) rig.send(0, 1, 0, Time{});
  const uint64_t spilled = rig.tm->spillway()->counters().spilled.packets;
  EXPECT_GT(spilled, 3900u);
  // Every 400 µs instead of when it was asked to: 49 frames each time, of which the queue holds 32 at once.
  Time now{};
  for (int i = 0; i < 50; i++) rig.tm->poll(now += microseconds(400), rig.out);
  EXPECT_EQ(rig.dropped(1, 0, QueueDrop::kQueueFull), 0u);
  EXPECT_NEAR(static_cast<double>(rig.out.size()), 20'000 / 8.176, 60);
}

TEST(TrafficManager, TheDeviceBehindAPortSaysHowMuchItTakes) {
  Rig rig;
  rig.make();
  rig.tm->set_room(1, 2);
  for (int i = 0; i < 5; i++) rig.send(0, 1, 0, Time{});
  EXPECT_EQ(rig.out.size(), 2u);
  rig.tm->poll(Time{}, rig.out);
  EXPECT_TRUE(rig.tm->waits_for_room());
  EXPECT_EQ(rig.out.size(), 2u);
  rig.tm->set_room(1, 100);
  rig.tm->poll(Time{}, rig.out);
  EXPECT_FALSE(rig.tm->waits_for_room());
  EXPECT_EQ(rig.out.size(), 5u);
}

TEST(TrafficManager, DwrrSharesByWeightAndStrictGoesFirst) {
  Rig rig;
  const int weights[3] = {1, 2, 5};
  for (uint8_t q = 0; q < 3; q++) rig.port(1).queues[q].scheduler.weight = static_cast<uint8_t>(weights[q]);
  rig.port(1).queues[5].scheduler.strict = rig.port(1).queues[7].scheduler.strict = true;
  rig.make();
  rig.tm->set_room(1, 0);
  for (int i = 0; i < 1000; i++)
    for (const uint8_t tc : {0, 1, 2}) rig.send(tc, 1, 0, Time{});
  for (int i = 0; i < 10; i++) rig.send(5, 1, 0, Time{}), rig.send(7, 1, 0, Time{});
  auto next = [&](uint32_t n) {
    rig.tm->set_room(1, n);
    rig.tm->poll(Time{}, rig.out);
    return rig.take();
  };
  EXPECT_EQ(next(10), (std::map<int, int>{{7, 10}}));
  EXPECT_EQ(next(10), (std::map<int, int>{{5, 10}}));
  const auto shares = next(1600);
  for (int q = 0; q < 3; q++) EXPECT_NEAR(shares.at(q), 1600 * weights[q] / 8, 4) << q;
  // Whoever is left has it all, and a queue that was empty has saved nothing up.
  auto rest = next(1400);
  EXPECT_EQ(rest[0] + shares.at(0), 1000);
  EXPECT_EQ(rest[1] + shares.at(1), 1000);
  EXPECT_EQ(rest[2] + shares.at(2), 1000);
  rig.tm->set_room(1, 0);
  for (int i = 0; i < 200; i++) rig.send(0, 1, 0, Time{}), rig.send(1, 1, 0, Time{});
  const auto again = next(300);
  EXPECT_NEAR(again.at(0), 100, 3);
}

// A queue that runs empty in its turn does not keep what is left of it: 100 × 512 bytes are 50 frames, for
// one frame's turn before as for none.
TEST(TrafficManager, WhatATurnOfDwrrLeavesOverIsNotKept) {
  Rig rig;
  rig.port(1).queues[1].scheduler.weight = 100;
  rig.make();
  rig.tm->set_room(1, 0);
  rig.send(1, 1, 0, Time{});
  for (int i = 0; i < 500; i++) rig.send(0, 1, 0, Time{});
  std::string left;
  const auto next = [&](uint32_t n) {
    for (; n > 0; n--) {
      rig.tm->set_room(1, 1);
      rig.tm->poll(Time{}, rig.out);
      left += static_cast<char>('0' + rig.take().begin()->first);
    }
  };
  next(20);
  ASSERT_NE(left.find('1'), std::string::npos);
  rig.tm->set_room(1, 0);
  for (int i = 0; i < 200; i++) rig.send(1, 1, 0, Time{});
  left.clear();
  next(120);
  const size_t first = left.find('1');
  ASSERT_LT(first, 5u);
  EXPECT_NEAR(static_cast<double>(left.find('0', first) - first), 100 * 512.0 / kFrame, 1) << left;
}

TEST(TrafficManager, DwrrSharesBytesNotFrames) {
  Rig rig;
  rig.make();
  rig.tm->set_room(1, 0);
  for (int i = 0; i < 4000; i++) rig.tm->enqueue(rig.frame(0, 2, 42), 1, 0, Time{}, rig.out);  // 102 bytes
  for (int i = 0; i < 1000; i++) rig.send(1, 1, 0, Time{});
  rig.tm->set_room(1, 2200);
  rig.tm->poll(Time{}, rig.out);
  const auto shares = rig.take();
  EXPECT_NEAR(shares.at(0) * 102.0, shares.at(1) * 1.0 * kFrame, 2048);
}

// One queue alone with α = 2^n gets S·α / (1 + α) of the buffer (Choudhury and Hahne, 1998, equation 3).
TEST(TrafficManager, ADynamicThresholdLeavesTheOthersTheirShare) {
  for (const int n : {-3, 0, 1, 3}) {
    Config c;
    c.pool_size = 1000 * kFrame;
    Rig rig(c);
    for (auto& q : rig.port(1).queues) q.profile.dynamic_th = n;
    for (auto& q : rig.port(2).queues) q.profile.dynamic_th = n;
    rig.make();
    rig.tm->set_room(1, 0), rig.tm->set_room(2, 0);
    const double alpha = std::exp2(n);
    for (int i = 0; i < 1100; i++) rig.send(0, 1, 0, Time{});
    EXPECT_NEAR(static_cast<double>(rig.tm->queue_bytes(1, 0)), 1000.0 * kFrame * alpha / (1 + alpha),
                2 * kFrame)
        << n;
    EXPECT_EQ(rig.dropped(1, 0, QueueDrop::kQueueFull), 1100 - rig.tm->queue_bytes(1, 0) / kFrame);
    // A second queue finds what is left over and gets α times what then is free: its equal share at last.
    const double left = 1000.0 * kFrame - static_cast<double>(rig.tm->queue_bytes(1, 0));
    for (int i = 0; i < 1100; i++) rig.send(0, 2, 0, Time{});
    EXPECT_NEAR(static_cast<double>(rig.tm->queue_bytes(2, 0)), left * alpha / (1 + alpha), 2 * kFrame) << n;
  }
}

TEST(TrafficManager, AReserveIsThereWhateverOthersUse) {
  Config c;
  c.pool_size = 100 * kFrame;
  Rig rig(c);
  rig.port(2).queues[0].profile.size = 10 * kFrame;
  rig.make();
  rig.tm->set_room(1, 0), rig.tm->set_room(2, 0);
  for (int i = 0; i < 200; i++) rig.send(0, 1, 0, Time{});
  EXPECT_EQ(rig.tm->queue_bytes(1, 0), 90 * kFrame);
  EXPECT_EQ(rig.dropped(1, 0, QueueDrop::kPoolFull), 110u);
  for (int i = 0; i < 20; i++) rig.send(0, 2, 0, Time{});
  EXPECT_EQ(rig.tm->queue_bytes(2, 0), 10 * kFrame);
  EXPECT_EQ(rig.tm->buffer().used(), 100 * kFrame);
}

TEST(TrafficManager, AnIngressGroupIsBoundedAcrossAllPortsThatItsFramesLeaveBy) {
  Rig rig;
  rig.port(0).groups[0].static_th = 5 * kFrame;
  rig.make();
  rig.tm->set_room(1, 0), rig.tm->set_room(2, 0);
  for (int i = 0; i < 4; i++) rig.send(0, 1, 0, Time{}), rig.send(0, 2, 0, Time{});
  EXPECT_EQ(rig.tm->buffer().group_bytes(0, 0), 5 * kFrame);
  EXPECT_EQ(rig.dropped(1, 0, QueueDrop::kGroupFull) + rig.dropped(2, 0, QueueDrop::kGroupFull), 3u);
  rig.tm->set_room(1, 100), rig.tm->set_room(2, 100);
  rig.tm->poll(Time{}, rig.out);
  EXPECT_EQ(rig.tm->buffer().group_bytes(0, 0), 0u);
}

TEST(TrafficManager, FramesThatWaitAreBoundedInNumberToo) {
  Config c;
  c.frames_max = 10;
  Rig rig(c);
  rig.make();
  rig.tm->set_room(1, 0);
  for (int i = 0; i < 12; i++) rig.send(0, 1, 0, Time{});
  EXPECT_EQ(rig.tm->frames_queued(), 10u);
  EXPECT_EQ(rig.dropped(1, 0, QueueDrop::kNoFrames), 2u);
}

// RFC 3168 and WRED with ecn_all: nothing up to Kmin, Pmax at the middle's double, everything from Kmax on;
// only what is capable; ours never. The IPv4 checksum stays right (the parser's own is asked).
TEST(TrafficManager, MarksByTheLengthOfTheQueue) {
  for (const bool v6 : {false, true}) {
    Rig rig;
    rig.port(1).queues[3].wred = WredProfile{100 * kFrame, 300 * kFrame, 0.5};
    rig.make();
    rig.tm->set_room(1, 0);
    for (int i = 0; i < 400; i++) rig.tm->enqueue(rig.frame(3, 1, kPayload, v6), 1, 0, Time{}, rig.out);
    for (int i = 0; i < 20; i++) rig.tm->enqueue(rig.frame(3, 0, kPayload, v6), 1, 0, Time{}, rig.out);
    for (int i = 0; i < 20; i++)
      rig.tm->enqueue(rig.frame(3, 2, kPayload, v6), 1, kNoSource, Time{}, rig.out);
    rig.tm->set_room(1, 10'000);
    rig.tm->poll(Time{}, rig.out);
    int marked[2] = {}, capable_unmarked = 0, n = 0;
    while (Frame f = rig.out.pop()) {
      roce::Packet p;
      ASSERT_EQ(roce::parse(f.bytes(), p), roce::ParseVerdict::kOk);
      ASSERT_TRUE(roce::icrc_ok(p));
      const bool ce = (p.tos & 3) == 3;
      if (n < 101) {
        EXPECT_FALSE(ce) << n;
      } else if (n < 301) {
        marked[0] += ce;
      } else if (n < 400) {
        marked[1] += ce;
      } else if (n < 420) {
        EXPECT_EQ(p.tos & 3, 0);
      } else {
        capable_unmarked += (p.tos & 3) == 2;
      }
      n++;
    }
    EXPECT_EQ(n, 440);
    // Probabilities from 0 to 0.5: a quarter of 200, six standard deviations.
    EXPECT_NEAR(marked[0], 50, 6 * std::sqrt(200 * 0.25 * 0.75));
    EXPECT_EQ(marked[1], 99);
    EXPECT_EQ(capable_unmarked, 20);
    EXPECT_EQ(rig.tm->counters(1, 3).ce_marked, static_cast<uint64_t>(marked[0] + marked[1]));
  }
}

struct Heard {
  uint16_t port;
  uint16_t quanta;
};

std::vector<Heard> pauses(FrameList& out, uint8_t priority) {
  std::vector<Heard> all;
  while (Frame f = out.pop())
    if (const auto p = parse_pause(f); p && p->priorities[priority])
      all.push_back({f.port(), p->quanta[priority]});
  return all;
}

TEST(TrafficManager, ALosslessGroupPausesItsSenderBeforeItLosesAnything) {
  Config c;
  c.mac = {{2, 0, 0, 0, 0, 7}};
  Rig rig(c);
  PortConfig& in = rig.port(0);
  in.pfc[3] = true;
  in.speed_bps = 10'000'000'000;
  in.groups[3].static_th = 10 * kFrame, in.groups[3].xoff = 5 * kFrame, in.groups[3].xon = 4 * kFrame;
  rig.make();
  rig.tm->set_room(1, 0);
  Time now = milliseconds(1);
  for (int i = 0; i < 10; i++) rig.send(3, 1, 0, now);
  EXPECT_TRUE(rig.out.empty());
  rig.send(3, 1, 0, now);  // into the headroom
  ASSERT_EQ(rig.out.size(), 1u);
  const FrameBuffer* b = rig.out.front();
  // IEEE 802.1Qbb: destination, source, type, opcode, class-enable vector, eight times, padding.
  const uint8_t want[] = {0x01, 0x80, 0xC2, 0x00, 0x00, 0x01, 2, 0, 0, 0, 0,    7,    0x88, 0x08,
                          0x01, 0x01, 0x00, 0x08, 0,    0,    0, 0, 0, 0, 0xFF, 0xFF, 0,    0};
  EXPECT_EQ(b->length, 60u);
  EXPECT_EQ(std::memcmp(b->data(), want, sizeof(want)), 0);
  EXPECT_EQ(rig.out.front()->port, 0);
  rig.out.clear();
  for (int i = 0; i < 4; i++) rig.send(3, 1, 0, now);
  EXPECT_EQ(rig.tm->buffer().headroom_bytes(0, 3), 5 * kFrame);
  rig.send(3, 1, 0, now);
  EXPECT_EQ(rig.dropped(1, 3, QueueDrop::kHeadroomFull), 1u);
  EXPECT_TRUE(rig.out.empty()) << "one pause is enough";
  // Told again before it runs out: 65535 × 512 bits at 10 Gb/s are 3.36 ms.
  EXPECT_EQ(rig.tm->next_deadline(), now + nanoseconds(65535ll * 512 / 10 / 2));
  now = rig.tm->next_deadline();
  rig.tm->poll(now, rig.out);
  const auto again = pauses(rig.out, 3);
  ASSERT_EQ(again.size(), 1u);
  EXPECT_EQ(again[0].quanta, 0xFFFF);
  // 15 frames wait: at four it may go on.
  rig.tm->set_room(1, 10);
  rig.tm->poll(now, rig.out);
  EXPECT_TRUE(pauses(rig.out, 3).empty());
  rig.tm->set_room(1, 1);
  rig.tm->poll(now, rig.out);
  const auto resume = pauses(rig.out, 3);
  ASSERT_EQ(resume.size(), 1u);
  EXPECT_EQ(resume[0].quanta, 0);
  EXPECT_EQ(resume[0].port, 0);
  EXPECT_FALSE(rig.tm->pausing(0, 3));
}

TEST(TrafficManager, APauseStopsItsPriorityOnlyAndRunsOut) {
  Rig rig;
  rig.port(1).pfc[3] = true;
  rig.port(1).speed_bps = 1'000'000'000;
  rig.make();
  // 100 quanta of 512 bits at 1 Gb/s: 51.2 µs.
  EXPECT_TRUE(rig.tm->hear_pause(rig.pause(3, 100), 1, Time{}));
  EXPECT_TRUE(rig.tm->hear_pause(rig.pause(4, 100), 1, Time{}));  // not enabled: heard, not obeyed
  rig.send(3, 1, 0, Time{}), rig.send(4, 1, 0, Time{});
  rig.tm->poll(Time{}, rig.out);
  EXPECT_EQ(rig.take(), (std::map<int, int>{{4, 1}}));
  EXPECT_EQ(rig.tm->next_deadline(), nanoseconds(51'200));
  rig.tm->poll(nanoseconds(51'199), rig.out);
  EXPECT_TRUE(rig.out.empty());
  rig.tm->poll(nanoseconds(51'200), rig.out);
  EXPECT_EQ(rig.take(), (std::map<int, int>{{3, 1}}));
  EXPECT_EQ(rig.tm->pfc_counters(1).pauses_received, 2u);
  // XON ends one early.
  rig.tm->hear_pause(rig.pause(3, 0xFFFF), 1, milliseconds(1));
  rig.send(3, 1, 0, milliseconds(1));
  rig.tm->hear_pause(rig.pause(3, 0), 1, milliseconds(1) + nanoseconds(10));
  rig.tm->poll(milliseconds(1) + nanoseconds(10), rig.out);
  EXPECT_EQ(rig.take(), (std::map<int, int>{{3, 1}}));
}

// The watchdog looks four times in its detection time, no more often; what is stuck for that time is dropped,
// and the queue is open again after as long a calm as its restoration time.
TEST(TrafficManager, TheWatchdogLooksAtItsTimesAndNotAllTheTime) {
  Rig rig;
  rig.config.watchdog.detection = milliseconds(200), rig.config.watchdog.restoration = milliseconds(100);
  rig.port(1).pfc[3] = true, rig.port(1).watchdog = true;
  rig.port(1).speed_bps = 1'000'000'000;
  rig.make();
  rig.tm->hear_pause(rig.pause(3, 0xFFFF), 1, Time{});
  rig.send(3, 1, 0, Time{});
  Time now{}, dropped = kNever;
  int polls = 0;
  for (int i = 1; i <= 30; i++) {  // a pause of 33.6 ms every 20 ms, for 600 ms
    for (; rig.tm->next_deadline() < milliseconds(20 * i) && polls < 1000; polls++) {
      now = std::max(now, rig.tm->next_deadline());
      rig.tm->poll(now, rig.out);
      if (dropped == kNever && rig.dropped(1, 3, QueueDrop::kWatchdog) > 0) dropped = now;
    }
    now = milliseconds(20 * i);
    rig.tm->hear_pause(rig.pause(3, 0xFFFF), 1, now);
  }
  EXPECT_TRUE(rig.out.empty());
  EXPECT_GE(dropped, milliseconds(200));
  EXPECT_LE(dropped, milliseconds(300));
  EXPECT_EQ(rig.dropped(1, 3, QueueDrop::kWatchdog), 1u);
  EXPECT_GE(polls, 11);  // 600 ms / 50 ms
  EXPECT_LE(polls, 60);
  // Closed as long as pauses come and 100 ms more.
  rig.send(3, 1, 0, now);
  EXPECT_EQ(rig.dropped(1, 3, QueueDrop::kWatchdog), 2u);
  for (polls = 0; rig.tm->next_deadline() < milliseconds(850) && polls < 1000; polls++)
    rig.tm->poll(now = std::max(now, rig.tm->next_deadline()), rig.out);
  EXPECT_LE(polls, 20);
  EXPECT_EQ(rig.tm->next_deadline(), kNever) << "nothing is left to watch";
  rig.send(3, 1, 0, milliseconds(850));
  EXPECT_EQ(rig.take(), (std::map<int, int>{{3, 1}}));
}

// What is spilled comes back once the queue has shrunk to `drain_on`: half of `drain_off` where only that is
// given, half of ECN's Kmin where neither is, 32 KiB where there is no ECN either (BUFFERING.md).
TEST(TrafficManager, SpilledFramesComeBackAtTheThresholdThatIsConfigured) {
  const struct {
    uint64_t on, off, ecn_min, expected;
  } cases[] = {{0, 0, 0, 32768},
               {0, 0, 40'000, 20'000},
               {0, 50'000, 40'000, 25'000},
               {10'000, 50'000, 0, 10'000},
               {70'000, 30'000, 0, 30'000}};
  for (const auto& each : cases) {
    Rig rig;
    PortConfig& port = rig.port(1);
    port.rate_bps = 1'000'000'000;
    port.queues[0].profile.static_th = 100'000, port.queues[0].profile.spill = true;
    if (each.ecn_min != 0) port.queues[0].wred = WredProfile{each.ecn_min, 90'000, 0};
    rig.config.spillway.enabled = true;
    rig.config.spillway.dscp.set(0);
    rig.config.spillway.drain_on = each.on, rig.config.spillway.drain_off = each.off;
    rig.tm.emplace(rig.config, rig.pool, std::make_unique<LocalStore>(1 << 20, 1000, 1000));
    for (int i = 0; i < 300; i++) rig.send(0, 1, 0, Time{});
    EXPECT_GT(rig.tm->spillway()->counters().spilled.packets, 150u);
    uint64_t bytes = 0;
    Time now{};
    for (int polls = 0; rig.tm->spillway()->counters().drained.packets == 0 && polls < 10'000; polls++) {
      bytes = rig.tm->queue_bytes(1, 0);
      now = std::max(now + nanoseconds(1), rig.tm->next_deadline());
      rig.tm->poll(now, rig.out);
    }
    // Two checks of 10 µs each, in which 2,500 B leave, and a frame.
    EXPECT_LE(bytes, each.expected + kFrame);
    EXPECT_GE(bytes, each.expected - 2500 - 2 * kFrame) << each.on << " " << each.off << " " << each.ecn_min;
  }
}

TEST(TrafficManager, OtherFramesAreNoPauses) {
  Rig rig;
  rig.port(1).pfc.set();
  rig.make();
  Frame truncated = rig.pause(3, 100);
  truncated.buffer()->length = 33;
  EXPECT_FALSE(rig.tm->hear_pause(truncated, 1, Time{}));
  Frame global = rig.pause(3, 100);
  global.buffer()->data()[15] = 0x01, global.buffer()->data()[14] = 0x00;  // 802.3x's pause of everything
  EXPECT_FALSE(rig.tm->hear_pause(global, 1, Time{}));
  EXPECT_FALSE(rig.tm->hear_pause(rig.frame(3), 1, Time{}));
  rig.send(3, 1, 0, Time{});
  EXPECT_EQ(rig.out.size(), 1u);
}

TEST(TrafficManager, AcknowledgementsAndCnpsMayHaveClassesOfTheirOwn) {
  Config c;
  c.ack_tc = 5, c.cnp_tc = 6;
  Rig rig(c);
  rig.make();
  auto send = [&](uint8_t opcode) {
    Frame f = rig.frame(1);
    f.buffer()->data()[14 + 20 + 8] = opcode;
    rig.tm->enqueue(std::move(f), 1, 0, Time{}, rig.out);
  };
  send(0x11), send(0x81), send(0x0A), send(0x10);
  EXPECT_EQ(rig.tm->counters(1, 5).sent.packets, 1u);
  EXPECT_EQ(rig.tm->counters(1, 6).sent.packets, 1u);
  EXPECT_EQ(rig.tm->counters(1, 1).sent.packets, 2u);
}

// Found by the swarm: packets of one flow that were spilled at several ports, as flooded ones are, and the
// flow's acknowledgement, which overtook them at all of these but the first.
TEST(TrafficManager, AnAcknowledgementStaysBehindItsFlowAtEveryPort) {
  Rig rig;
  rig.config.spillway.enabled = true;
  rig.config.spillway.dscp.set();
  for (const uint16_t p : {1, 2}) {
    rig.port(p).rate_bps = 1'000'000'000;
    for (auto& q : rig.port(p).queues) q.profile.static_th = 2 * kFrame, q.profile.spill = true;
  }
  rig.tm.emplace(rig.config, rig.pool,
                 std::make_unique<LocalStore>(1 << 20, 1000, Spillway::ids_max(rig.config.spillway)));
  for (int i = 0; i < 10; i++)
    for (const uint16_t p : {1, 2}) rig.send(1, p, 0, Time{});
  for (const uint16_t p : {1, 2}) {
    Frame ack = rig.frame(1, 2, 0);
    ack.buffer()->data()[14 + 20 + 8] = 0x11;
    rig.tm->enqueue(std::move(ack), p, 0, Time{}, rig.out);
    EXPECT_EQ(rig.tm->spillway()->counters(p).acks_held, 1u) << p;
  }
  for (int turns = 0; turns < 10000 && !rig.tm->empty(); turns++)
    rig.tm->poll(std::max(rig.tm->next_deadline(), nanoseconds(turns)), rig.out);
  int left[3] = {}, last[3] = {};
  while (Frame f = rig.out.pop()) {
    left[f.port()]++;
    last[f.port()] = f.bytes()[14 + 20 + 8];
  }
  for (const uint16_t p : {1, 2}) {
    EXPECT_EQ(left[p], 11) << p;
    EXPECT_EQ(last[p], 0x11) << p;
  }
}

TEST(TrafficManager, ALinkThatIsDownTakesNothingAndKeepsNothing) {
  Rig rig;
  rig.make();
  rig.tm->set_room(1, 0);
  rig.send(2, 1, 0, Time{});
  EXPECT_TRUE(rig.tm->set_link(1, false, rig.out));
  EXPECT_FALSE(rig.tm->set_link(1, false, rig.out));
  rig.send(2, 1, 0, Time{});
  EXPECT_EQ(rig.dropped(1, 2, QueueDrop::kLinkDown), 2u);
  EXPECT_TRUE(rig.tm->empty());
  EXPECT_EQ(rig.pool.in_use(), 0u);
  rig.tm->set_room(1, 9);
  EXPECT_TRUE(rig.tm->set_link(1, true, rig.out));
  rig.send(2, 1, 0, Time{});
  EXPECT_EQ(rig.out.size(), 1u);
}

}  // namespace
}  // namespace millrace::buffering
