// What devices are asked for as ports start: PFC in hardware, and the speed of links.
#include <gtest/gtest.h>

#include <cerrno>

#include "roce/error.h"
#include "switch/port_setup.h"

namespace millrace::switching {
namespace {

using Kind = PfcRequest::Kind;
using Hardware = buffering::PortConfig::PfcHardware;

buffering::PortConfig lossless(std::initializer_list<int> priorities) {
  buffering::PortConfig p;
  for (const int n : priorities) {
    p.pfc.set(static_cast<size_t>(n));
    p.groups[static_cast<size_t>(n)].xoff = 96 << 10;
    p.groups[static_cast<size_t>(n)].xon = 32 << 10;
  }
  return p;
}

// A device that keeps what it was told, as a NIC's registers do.
struct Nic final : PfcDevice {
  int queue_abilities(PfcQueueAbilities& abilities) override {
    abilities = queues;
    return queue_rc;
  }
  int queue_configure(const PfcRequest& r) override { return set(r, queue_rc); }
  int priority_set(const PfcRequest& r) override { return set(r, priority_rc); }
  int pass_pauses_up() override {
    passes = pass_rc == 0;
    return pass_rc;
  }
  int set(const PfcRequest& r, int rc) {
    if (r.on && rc == 0 && r.priority == fails_at) rc = -EINVAL;
    if (!r.on) rc = undo_rc;
    if (rc != 0) return rc;
    asked.push_back(r);
    if (r.on)
      sends |= 1u << r.priority;
    else
      sends &= ~(1u << r.priority);
    return 0;
  }
  PfcQueueAbilities queues;
  int queue_rc = -ENOTSUP, priority_rc = 0, pass_rc = 0, undo_rc = 0, fails_at = -1;
  bool passes = false;
  unsigned sends = 0;
  std::vector<PfcRequest> asked;
};

TEST(PortSetup, EachLosslessPriorityIsAskedForWithItsWaterMarks) {
  auto port = lossless({3, 4});
  port.groups[4].xon = 0;
  port.pfc.set(6);  // obeyed, and nothing lossless: no pause is ever sent for it
  const auto plan = plan_pfc(port, Kind::kPriority, {});
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[0], (PfcRequest{Kind::kPriority, true, 3, 96, 32, 0xFFFF, 0}));
  EXPECT_EQ(plan[1], (PfcRequest{Kind::kPriority, true, 4, 96, 48, 0xFFFF, 0}));
  EXPECT_TRUE(plan_pfc(lossless({}), Kind::kPriority, {}).empty());
}

TEST(PortSetup, WaterMarksAreInOrderWhateverTheProfileSays) {
  for (const uint64_t xoff : {uint64_t{1}, uint64_t{1024}, uint64_t{5000}, uint64_t{1} << 40})
    for (const uint64_t xon : {uint64_t{0}, uint64_t{1}, uint64_t{4096}, uint64_t{1} << 40}) {
      auto port = lossless({0});
      port.groups[0].xoff = xoff, port.groups[0].xon = xon;
      const auto plan = plan_pfc(port, Kind::kPriority, {});
      ASSERT_EQ(plan.size(), 1u);
      EXPECT_GE(plan[0].low_water, 1u);
      EXPECT_LT(plan[0].low_water, plan[0].high_water);
    }
}

TEST(PortSetup, AReceiveQueueSpeaksForOnePriority) {
  const PfcQueueAbilities all{8, true};
  const auto plan = plan_pfc(lossless({3}), Kind::kQueue, all);
  ASSERT_EQ(plan.size(), 1u);
  EXPECT_EQ(plan[0], (PfcRequest{Kind::kQueue, true, 3, 0, 0, 0xFFFF, 0}));
  EXPECT_TRUE(plan_pfc(lossless({3, 4}), Kind::kQueue, all).empty());
  EXPECT_TRUE(plan_pfc(lossless({3}), Kind::kQueue, {3, true}).empty()) << "classes 0 … 2";
  EXPECT_TRUE(plan_pfc(lossless({3}), Kind::kQueue, {8, false}).empty());
}

TEST(PortSetup, ADeviceThatCanSendsAndPassesUp) {
  Nic nic;
  const PfcOutcome o = configure_pfc(nic, lossless({3, 4}));
  EXPECT_TRUE(o.wanted && o.hardware);
  EXPECT_EQ(o.why, "the device, too, sends pauses of priority 3,4");
  EXPECT_EQ(nic.sends, 0b11000u);
  EXPECT_TRUE(nic.passes);
}

TEST(PortSetup, ByReceiveQueueWhereTheDeviceHasThat) {
  Nic nic;
  nic.queue_rc = 0, nic.queues = {8, true};
  EXPECT_TRUE(configure_pfc(nic, lossless({3})).hardware);
  ASSERT_EQ(nic.asked.size(), 1u);
  EXPECT_EQ(nic.asked[0].kind, Kind::kQueue);
  // Two priorities it can only do by priority.
  Nic other;
  other.queue_rc = 0, other.queues = {8, true};
  EXPECT_TRUE(configure_pfc(other, lossless({3, 4})).hardware);
  ASSERT_EQ(other.asked.size(), 2u);
  EXPECT_EQ(other.asked[1].kind, Kind::kPriority);
}

TEST(PortSetup, ADeviceThatCannotLeavesItToTheTrafficManagerAndSaysWhy) {
  Nic nic;
  nic.priority_rc = nic.pass_rc = -ENOTSUP;
  const PfcOutcome o = configure_pfc(nic, lossless({3}));
  EXPECT_TRUE(o.wanted);
  EXPECT_FALSE(o.hardware);
  EXPECT_NE(o.why.find("the device does not send pauses of priority 3 (by priority: priority 3: "),
            std::string::npos)
      << o.why;
  EXPECT_EQ(o.why.find("passes"), std::string::npos) << "what has no flow control keeps nothing back";
  EXPECT_EQ(nic.sends, 0u);
}

TEST(PortSetup, WhatFailsHalfWayIsTakenBack) {
  Nic nic;
  nic.fails_at = 4;
  PfcOutcome o = configure_pfc(nic, lossless({2, 3, 4, 5}));
  EXPECT_FALSE(o.hardware);
  EXPECT_EQ(nic.sends, 0u);
  EXPECT_EQ(nic.asked.size(), 4u) << "2 and 3, and both again";
  EXPECT_NE(o.why.find("priority 4: Invalid argument"), std::string::npos) << o.why;
  // And if not even that is possible, it is told.
  Nic stubborn;
  stubborn.fails_at = 4, stubborn.undo_rc = -EIO;
  o = configure_pfc(stubborn, lossless({3, 4}));
  EXPECT_FALSE(o.hardware);
  EXPECT_NE(o.why.find("priority 3 could not be taken back"), std::string::npos) << o.why;
}

TEST(PortSetup, OnRefusesWhatTheDeviceCannot) {
  Nic nic;
  nic.priority_rc = -ENOTSUP;
  auto port = lossless({3});
  port.pfc_hardware = Hardware::kOn;
  try {
    configure_pfc(nic, port);
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kNoDevice);
    EXPECT_NE(std::string(e.what()).find("pfc_hardware is on, but the device does not send pauses"),
              std::string::npos)
        << e.what();
  }
  Nic half;
  half.fails_at = 4;
  port = lossless({3, 4});
  port.pfc_hardware = Hardware::kOn;
  EXPECT_THROW(configure_pfc(half, port), Error);
  EXPECT_EQ(half.sends, 0u);
  Nic able;
  EXPECT_TRUE(configure_pfc(able, port).hardware);
}

TEST(PortSetup, OffAndLossyOnlyHavePausesPassedUp) {
  Nic nic;
  auto port = lossless({3});
  port.pfc_hardware = Hardware::kOff;
  PfcOutcome o = configure_pfc(nic, port);
  EXPECT_TRUE(o.wanted && !o.hardware && nic.passes && nic.asked.empty());
  EXPECT_EQ(o.why, "pfc_hardware is off");
  Nic other;
  other.pass_rc = -EIO;
  port = {};
  port.pfc.set(3);
  o = configure_pfc(other, port);
  EXPECT_TRUE(o.wanted && !o.hardware && other.asked.empty());
  EXPECT_NE(o.why.find("whether it passes pauses up is not known"), std::string::npos) << o.why;
  Nic untouched;
  EXPECT_FALSE(configure_pfc(untouched, {}).wanted);
  EXPECT_FALSE(untouched.passes);
}

TEST(PortSetup, LinksTellTheSpeedThatNobodyGave) {
  std::vector<buffering::PortConfig> ports(4);
  ports[1].speed_bps = 50'000'000'000, ports[1].speed_given = true;
  ports[2].rate_bps = 1'000'000'000;
  EXPECT_EQ(adopt_speeds(ports, {25'000'000'000, 400'000'000'000, 400'000'000'000, 0}), 50'000'000'000u);
  EXPECT_EQ(ports[0].speed_bps, 25'000'000'000u);
  EXPECT_EQ(ports[1].speed_bps, 50'000'000'000u) << "what was given stands";
  EXPECT_EQ(ports[2].speed_bps, 400'000'000'000u) << "shaped, yet pauses count in its bit times only without";
  EXPECT_EQ(ports[3].speed_bps, 100'000'000'000u) << "not known";
  std::vector<buffering::PortConfig> none;
  EXPECT_EQ(adopt_speeds(none, {10'000'000'000, 40'000'000'000}), 40'000'000'000u) << "without qos";
  EXPECT_EQ(adopt_speeds(none, {0, 0}), 0u);
}

}  // namespace
}  // namespace millrace::switching
