#include "roce/dcqcn.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tools/sim/nic_dcqcn.h"

namespace millrace::roce {
namespace {

using std::chrono::hours;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

constexpr uint64_t kGbit = 1'000'000'000;
constexpr double kG = 1.0 / 256;
constexpr Time kPeriod = microseconds(55);

DcqcnConfig line(uint64_t rate) {
  DcqcnConfig c;
  c.line_rate = rate;
  return c;
}

// No timer within a test's time.
DcqcnConfig steady(uint64_t rate) {
  DcqcnConfig c = line(rate);
  c.alpha_timer = c.increase_timer = hours(1);
  return c;
}

TEST(Dcqcn, BeginsAtLineRateAndTheFirstCnpHalvesIt) {
  Dcqcn d(line(100 * kGbit));
  EXPECT_FALSE(d.limited());
  EXPECT_EQ(d.rate(seconds(1)), 100 * kGbit);
  d.notified(seconds(1));
  EXPECT_TRUE(d.limited());
  EXPECT_EQ(d.rate(seconds(1)), 50 * kGbit);
  EXPECT_EQ(d.target_rate(seconds(1)), 100 * kGbit);
  d.notified(seconds(1));
  EXPECT_EQ(d.rate(seconds(1)), 25 * kGbit);
  EXPECT_EQ(d.target_rate(seconds(1)), 50 * kGbit);
}

// After m periods without a CNP α is (1 − g)^m; each of n CNPs then takes 1 − α down by 1 − g.
TEST(Dcqcn, AlphaFallsPerPeriodAndRisesPerCnp) {
  for (const int m : {0, 1, 2, 17, 400}) {
    Dcqcn d(line(100 * kGbit));
    d.notified(Time{});
    const Time later = m * kPeriod;
    if (m > 0) {
      EXPECT_NEAR(d.alpha(later - nanoseconds(1)), std::pow(1 - kG, m - 1), 1e-12);
    }
    EXPECT_NEAR(d.alpha(later), std::pow(1 - kG, m), 1e-12);
    for (int n = 1; n <= 5; n++) {
      d.notified(later);
      EXPECT_NEAR(d.alpha(later), 1 - (1 - std::pow(1 - kG, m)) * std::pow(1 - kG, n), 1e-12) << m;
    }
  }
}

// A cut takes off α/2.
TEST(Dcqcn, ALaterCnpCutsByWhatIsLeftOfAlpha) {
  Dcqcn d(line(100 * kGbit));
  d.notified(Time{});
  const Time later = 1000 * kPeriod;  // long at line rate again
  ASSERT_EQ(d.rate(later), 100 * kGbit);
  d.notified(later);
  EXPECT_NEAR(static_cast<double>(d.rate(later)), 1e11 * (1 - std::pow(1 - kG, 1000) / 2), 1);
}

// Each period the distance to the target is halved; the last thousandth is the line's.
TEST(Dcqcn, FastRecoveryHalvesTheDistanceToTheTarget) {
  Dcqcn d(line(100 * kGbit));
  d.notified(Time{});
  for (int k = 1; k <= 8; k++) {
    EXPECT_NEAR(static_cast<double>(d.rate(k * kPeriod)), 1e11 * (1 - std::ldexp(0.5, -k)), 1) << k;
    EXPECT_NEAR(static_cast<double>(d.rate(k * kPeriod - nanoseconds(1))),
                1e11 * (1 - std::ldexp(0.5, 1 - k)), 1);
  }
  EXPECT_EQ(d.rate(9 * kPeriod), 100 * kGbit);
  d.sent(100, 9 * kPeriod);
  EXPECT_FALSE(d.limited());
}

// From step 6 on the target rises by R_AI. With e = target − rate after five steps, the sum of halvings gives
// target − rate = R_AI + (e − R_AI) / 2^k after k more.
TEST(Dcqcn, AdditiveIncreaseFollowsAfterFiveSteps) {
  Dcqcn d(line(10 * kGbit));
  d.notified(Time{});
  d.notified(Time{});  // rate 2.5, target 5
  const double e = 2.5e9 / 32;
  EXPECT_NEAR(static_cast<double>(d.rate(5 * kPeriod)), 5e9 - e, 1);
  EXPECT_EQ(d.target_rate(5 * kPeriod), 5 * kGbit);
  for (int k = 1; k <= 20; k++) {
    const Time t = (5 + k) * kPeriod;
    EXPECT_NEAR(static_cast<double>(d.target_rate(t)), 5e9 + k * 4e7, 1);
    EXPECT_NEAR(static_cast<double>(d.rate(t)), 5e9 + k * 4e7 - 4e7 - std::ldexp(e - 4e7, -k), 2);
  }
}

TEST(Dcqcn, BytesRaiseTheRateAsTheTimerDoesAndBothTogetherFaster) {
  DcqcnConfig c = line(10 * kGbit);
  c.byte_counter = 1000;
  Dcqcn d(c);
  d.notified(Time{});
  d.notified(Time{});
  d.sent(999, Time{});
  EXPECT_EQ(d.rate(Time{}), 2'500'000'000u);
  d.sent(1, Time{});
  EXPECT_EQ(d.rate(Time{}), 3'750'000'000u);
  d.sent(4000, Time{});
  EXPECT_EQ(d.target_rate(Time{}), 5 * kGbit) << "five steps";
  d.sent(1000, Time{});
  EXPECT_EQ(d.target_rate(Time{}), 5'040'000'000u) << "the sixth";
  // With more than five of each, R_HAI times the steps beyond: the timer's second to fifth add R_AI, since
  // one of the two is beyond five; its sixth 1 × R_HAI; then the bytes' seventh, the timer's seventh 2 ×.
  EXPECT_EQ(d.target_rate(5 * kPeriod), 5'240'000'000u);
  EXPECT_EQ(d.target_rate(6 * kPeriod), 5'440'000'000u);
  d.sent(1000, 6 * kPeriod);
  EXPECT_EQ(d.target_rate(6 * kPeriod), 5'640'000'000u);
  EXPECT_EQ(d.target_rate(7 * kPeriod), 6'040'000'000u);
}

TEST(Dcqcn, ACnpBeginsTheStepsAnew) {
  Dcqcn d(line(10 * kGbit));
  d.notified(Time{});
  d.notified(Time{});
  const Time later = 30 * kPeriod + microseconds(20);
  d.notified(later);
  const uint64_t rate = d.rate(later), target = d.target_rate(later);
  EXPECT_EQ(d.rate(later + kPeriod - nanoseconds(1)), rate);
  EXPECT_NEAR(static_cast<double>(d.rate(later + kPeriod)), static_cast<double>(rate + target) / 2, 1);
  EXPECT_EQ(d.target_rate(later + 5 * kPeriod), target);
  EXPECT_EQ(d.target_rate(later + 6 * kPeriod), target + 40'000'000);
}

TEST(Dcqcn, TheRateStaysBetweenTheMinimumAndTheLine) {
  for (const uint64_t rate : {kGbit, 10 * kGbit, 400 * kGbit}) {
    const uint64_t least = std::min<uint64_t>(100'000'000, rate / 100);
    std::mt19937_64 random(rate);
    Dcqcn d(line(rate));
    Time now{};
    uint64_t lowest = rate;
    for (int i = 0; i < 20000; i++) {
      now += nanoseconds(random() % (random() % 8 ? 20'000 : 20'000'000));
      if (random() % 16 == 0)
        for (auto n = random() % 20; n > 0; n--) d.notified(now);
      if (d.limited()) d.sent(static_cast<uint32_t>(random() % 5000), now);
      ASSERT_LE(d.rate(now), rate);
      ASSERT_GE(d.rate(now), least);
      ASSERT_LE(d.target_rate(now), rate);
      lowest = std::min(lowest, d.rate(now));
    }
    EXPECT_EQ(lowest, least);
  }
}

TEST(Dcqcn, APacketsLengthIsThePauseBehindIt) {
  Dcqcn d(steady(2 * kGbit));
  d.notified(seconds(3));  // 1 Gb/s: 8 ns a byte
  Time now = seconds(3);
  EXPECT_EQ(d.sent(1000, now), now + nanoseconds(8000));
  now += nanoseconds(8000);
  EXPECT_EQ(d.sent(4200, now), now + nanoseconds(8000 + 4200 * 8 - 8000));
}

// 1023 B at 3.5 Gb/s are 2338.28… ns: fractions are not lost.
TEST(Dcqcn, PausesAddUpToTheRate) {
  Dcqcn d(steady(7 * kGbit));
  d.notified(Time{});
  Time now{};
  for (int i = 1; i <= 9000; i++) {
    now = d.sent(1023, now);
    ASSERT_NEAR(static_cast<double>(now.count()), i * 1023 * 8 / 3.5, 1) << i;
  }
}

// Who comes late by less than 20 µs loses nothing; who was idle has not saved up.
TEST(Dcqcn, LateIsMadeUpForButNotIdleTime) {
  Dcqcn d(steady(2 * kGbit));
  d.notified(Time{});
  EXPECT_EQ(d.sent(1000, Time{}), microseconds(8));
  EXPECT_EQ(d.sent(1000, microseconds(15)), microseconds(16));
  EXPECT_EQ(d.sent(1000, microseconds(16)), microseconds(24));
  EXPECT_EQ(d.sent(1000, seconds(5)), seconds(5) - microseconds(20 - 8));
  EXPECT_EQ(d.sent(1000, seconds(5)), seconds(5) - microseconds(20 - 16));
  EXPECT_EQ(d.sent(1000, seconds(5)), seconds(5) + microseconds(4));
}

// What is made up for in one go is what step by step would have come to.
TEST(Dcqcn, ALongPauseIsMadeUpForAsItsStepsWould) {
  for (const uint64_t rate : {kGbit, 25 * kGbit, 100 * kGbit}) {
    Dcqcn stepped(line(rate)), d(line(rate));
    for (int i = 0; i < 9; i++) stepped.notified(Time{}), d.notified(Time{});
    for (int k = 1; k < 6000; k++) {
      if (stepped.limited()) stepped.sent(0, k * kPeriod);
      ASSERT_EQ(d.rate(k * kPeriod), stepped.rate(k * kPeriod)) << k;
      ASSERT_NEAR(d.alpha(k * kPeriod), stepped.alpha(k * kPeriod), 1e-9);
    }
    EXPECT_FALSE(stepped.limited());
    EXPECT_EQ(d.rate(hours(24 * 365)), rate);
  }
}

// The simulator's NICs have a reaction point that somebody else wrote.
TEST(Dcqcn, AgreesWithTheSimulatorsOwn) {
  for (uint64_t seed = 1; seed <= 50; seed++) {
    std::mt19937_64 random(seed);
    Dcqcn ours(line(100 * kGbit));
    sim::Dcqcn theirs{sim::DcqcnParameters{}};
    Time now{};
    const uint64_t cnp_one_in = 20 + random() % 2000;
    for (int i = 0; i < 20000; i++) {
      now += microseconds(2);
      if (random() % cnp_one_in == 0) ours.notified(now), theirs.on_cnp(now);
      const auto bytes = static_cast<uint32_t>(static_cast<double>(ours.rate(now)) * 2e-6 / 8);
      if (ours.limited()) ours.sent(bytes, now);
      theirs.sent(bytes, now);
      const double gbit = static_cast<double>(ours.rate(now)) / 1e9;
      // They count a step before or after they use it, which is one increase more or less.
      ASSERT_NEAR(gbit, theirs.gbit(now), 0.02 * theirs.gbit(now) + 0.3) << seed << " at " << now.count();
      ASSERT_NEAR(ours.alpha(now), theirs.alpha(), 1e-5);
    }
  }
}

}  // namespace
}  // namespace millrace::roce
