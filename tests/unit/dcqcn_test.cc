#include "roce/dcqcn.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/unit/rc_rig.h"
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

// --- what a queue pair makes of it -------------------------------------------------------------------

class PacedRequester : public Requester {};
class PacedPair : public Pair {
 protected:
  PacedPair() { config.requester.dcqcn.line_rate = 2'000'000'000; }
  // What leaves now, as letters: R a READ's response, S a request, A an acknowledgement.
  std::string emit(QueuePair& qp, uint32_t budget = 8) {
    FrameList out;
    more = qp.emit(pool, combine, budget, now, out);
    std::string s;
    while (Frame f = out.pop()) {
      bytes = f.total_length();
      const Sent sent = wrap(std::move(f));
      const bool ack = sent.packet.opcode() == Opcode::kAcknowledge;
      if (!ack && sent.packet.op->response) psns.push_back(sent.packet.psn().value());
      s += ack ? 'A' : sent.packet.op->response ? 'R' : 'S';
    }
    return s;
  }
  void read(QueuePair& qp, uint32_t psn, uint32_t length) {
    const Sent request = packet(Opcode::kReadRequest, psn, 0, false, 0, length);
    ASSERT_EQ(qp.receive(request.packet, now), Reception::kNewRequest);
    qp.responder().accept_read(request.packet, std::span(memory).first(length));
  }
  void post(QueuePair& qp) {
    WorkRequest r;
    r.parts[0] = std::span(memory).first(8);
    ASSERT_TRUE(qp.requester().post(std::move(r)));
  }
  void congest(QueuePair& qp) {
    ASSERT_EQ(qp.receive(packet(Opcode::kCnp, 0, 0).packet, now), Reception::kCongestion);
  }

  std::vector<uint8_t> memory = std::vector<uint8_t>(8192, 3);
  std::vector<uint32_t> psns;
  uint32_t bytes = 0;  // of the last packet
  bool more = false;
};

// 1 bit each ns from the first CNP on; no timer changes that here.
TEST_F(PacedRequester, ACnpPacesWhatIsSentBehindIt) {
  config.requests_max = 64;
  config.dcqcn.line_rate = 2'000'000'000;
  config.dcqcn.increase_timer = seconds(1);
  requester = std::make_unique<RcRequester>(config);
  for (uint64_t i = 0; i < 40; i++) post(8, i);
  EXPECT_EQ(std::ranges::count(send(4), '!'), 4);
  requester->congestion(now);
  EXPECT_EQ(requester->counters().cnps, 1u);
  EXPECT_TRUE(requester->wants_to_send()) << "the first behind it is not held back";
  Time gap{};
  for (int i = 0; i < 10; i++) {
    FrameList out;
    EXPECT_EQ(requester->transmit(wire, pool, combine, 100, now, out), 1u);
    gap = nanoseconds(8 * out.pop().total_length());
    const Time next = now + gap;
    EXPECT_EQ(requester->held_until(), next);
    EXPECT_EQ(requester->next_deadline(), next);
    EXPECT_FALSE(requester->wants_to_send());
    now = next - nanoseconds(1);
    EXPECT_EQ(send(), "");
    now = next;
    if (i % 2) requester->tick(now);  // as well as without
    EXPECT_EQ(requester->wants_to_send(), i % 2 == 1);
  }
  // Repeats are paced as well; what a late caller has missed is made up for, up to 20 µs.
  now = milliseconds(60);
  requester->tick(now);
  EXPECT_EQ(requester->counters().timeouts, 1u);
  EXPECT_EQ(std::ranges::count(send(), '!'), microseconds(20) / gap + 1);
  EXPECT_NE(requester->held_until(), kNever);
}

TEST_F(PacedRequester, ThePaceEndsWhenTheLinesRateIsReached) {
  config.requests_max = 64;
  requester = std::make_unique<RcRequester>(config);
  for (uint64_t i = 0; i < 40; i++) post(8, i);
  requester->congestion(now);
  EXPECT_EQ(std::ranges::count(send(), '!'), 1);
  now = milliseconds(1);  // nine periods of 55 µs and more
  EXPECT_EQ(std::ranges::count(send(), '!'), 39);
  EXPECT_EQ(requester->held_until(), kNever);
}

// DSCP 48, not ECN-capable, in priority 6 where there is a tag; whatever the class of the data.
TEST_F(PacedPair, CnpsHaveAClassOfTheirOwnAndComeOnceIn50Microseconds) {
  config.wire.path.tos = 0x6A;
  config.wire.path.has_vlan = true;
  config.wire.path.vlan_tci = 0x3123;
  QueuePair qp(config, Time{});
  FrameList out;
  EXPECT_TRUE(qp.send_cnp(pool, Time{}, out));
  EXPECT_FALSE(qp.send_cnp(pool, nanoseconds(49'999), out));
  EXPECT_TRUE(qp.send_cnp(pool, microseconds(50), out));
  ASSERT_EQ(out.size(), 2u);
  const Frame frame = out.pop();
  EXPECT_EQ(frame.bytes()[14], 0xC1);
  EXPECT_EQ(frame.bytes()[15], 0x23);
  Packet cnp;
  ASSERT_EQ(parse(frame.bytes(), cnp), ParseVerdict::kOk);
  EXPECT_TRUE(icrc_ok(cnp));
  EXPECT_EQ(cnp.tos, 0xC0);
  EXPECT_EQ(cnp.opcode(), Opcode::kCnp);
  EXPECT_EQ(cnp.dest_qp(), Qpn{5});
}

TEST_F(PacedPair, ACnpThatItHearsHoldsItsRequestsBackAndNoAcknowledgement) {
  config.requester.dcqcn.line_rate = 2'000'000'000;
  QueuePair qp(config, Time{});
  path.src_ip = *IpAddress::parse("10.0.0.2");
  EXPECT_EQ(qp.receive(packet(Opcode::kCnp, 0, 0).packet, Time{}), Reception::kCongestion);
  std::vector<uint8_t> data(8);
  for (int i = 0; i < 2; i++) {
    WorkRequest r;
    r.parts[0] = data;
    ASSERT_TRUE(qp.requester().post(std::move(r)));
  }
  FrameList out;
  EXPECT_FALSE(qp.emit(pool, combine, 8, Time{}, out)) << "held back, so there is no point in trying at once";
  ASSERT_EQ(out.size(), 1u);
  const Time next = nanoseconds(8 * out.pop().total_length());
  EXPECT_EQ(qp.next_deadline(), next);
  EXPECT_GT(qp.next_timer(), next);
  const Sent request = packet(Opcode::kSendOnly, 100, 8, true);
  ASSERT_EQ(qp.receive(request.packet, Time{}), Reception::kNewRequest);
  qp.responder().accept(request.packet);
  qp.emit(pool, combine, 8, Time{}, out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(wrap(out.pop()).packet.opcode(), Opcode::kAcknowledge);
  qp.emit(pool, combine, 8, next, out);
  EXPECT_EQ(out.size(), 1u);
}

// 1 bit each ns behind the first CNP.
TEST_F(PacedPair, ReadResponsesKeepToThePace) {
  config.reads_max = 4;
  config.requester.dcqcn.increase_timer = seconds(1);
  QueuePair qp(config, now);
  read(qp, 100, 8 * kMtu);
  EXPECT_EQ(emit(qp, 3), "RRR") << "nothing limits them yet";
  EXPECT_TRUE(more);
  congest(qp);
  Time next = now;
  for (int i = 0; i < 4; i++) {
    now = next;
    EXPECT_EQ(emit(qp), "R") << i;
    EXPECT_FALSE(more) << "held back, so there is no point in trying at once";
    EXPECT_FALSE(qp.wants_to_emit());
    next = now + nanoseconds(8 * bytes);
    EXPECT_EQ(qp.next_deadline(), next);
    now = next - nanoseconds(1);
    EXPECT_EQ(emit(qp), "");
  }
  now = next;
  EXPECT_EQ(emit(qp), "R");
  EXPECT_EQ(psns, (std::vector<uint32_t>{100, 101, 102, 103, 104, 105, 106, 107}));
  EXPECT_FALSE(qp.responder().responding());
}

TEST_F(PacedPair, AtARateResponsesAndRequestsTakeTurns) {
  config.reads_max = 4;
  config.requester.dcqcn.increase_timer = seconds(1);
  QueuePair qp(config, now);
  read(qp, 100, 4 * kMtu);
  for (int i = 0; i < 3; i++) post(qp);
  congest(qp);
  std::string order;
  for (int i = 0; i < 20; i++) {
    const std::string s = emit(qp);
    EXPECT_LE(s.size(), 1u);
    order += s;
    now = std::min(qp.requester().held_until(), now + microseconds(5));
  }
  EXPECT_EQ(order, "RSRSRSR");
}

// An acknowledgement of what came behind a READ waits for its responses, however long the pace makes that.
TEST_F(PacedPair, AnAcknowledgementStillWaitsForTheResponsesBeforeIt) {
  config.reads_max = 4;
  config.requester.dcqcn.increase_timer = seconds(1);
  QueuePair qp(config, now);
  read(qp, 100, 3 * kMtu);
  const Sent behind = packet(Opcode::kSendOnly, 103, 8, true);
  ASSERT_EQ(qp.receive(behind.packet, now), Reception::kNewRequest);
  qp.responder().accept(behind.packet);
  congest(qp);
  std::string order;
  for (int i = 0; i < 12; i++, now += microseconds(1)) order += emit(qp);
  EXPECT_EQ(order, "RRRA");
}

// A READ that is asked for again in part is answered from there, at the pace too, and what follows in order.
TEST_F(PacedPair, GoingBackKeepsTheOrderAtAPace) {
  config.reads_max = 4;
  config.requester.dcqcn.increase_timer = seconds(1);
  QueuePair qp(config, now);
  read(qp, 100, 4 * kMtu), read(qp, 104, 2 * kMtu);
  congest(qp);
  for (int i = 0; i < 10 && psns.size() < 3; i++, now += microseconds(1)) emit(qp);
  ASSERT_EQ(psns, (std::vector<uint32_t>{100, 101, 102}));
  const Sent again = packet(Opcode::kReadRequest, 101, 0, false, kMtu, 3 * kMtu);
  ASSERT_EQ(qp.receive(again.packet, now), Reception::kReadAgain);
  qp.responder().read_again(again.packet, std::span(memory).subspan(kMtu, 3 * kMtu));
  psns.clear();
  for (int i = 0; i < 40; i++, now += microseconds(1)) EXPECT_LE(emit(qp).size(), 1u);
  EXPECT_EQ(psns, (std::vector<uint32_t>{101, 102, 103, 104, 105}));
}

TEST_F(PacedPair, OfManyResponsesThePaceIsTheRate) {
  config.reads_max = 4;
  config.requester.dcqcn.increase_timer = seconds(1);
  QueuePair qp(config, now);
  congest(qp);
  uint64_t sent = 0;
  uint32_t psn = 100;
  for (; now < milliseconds(1); now += nanoseconds(500)) {
    if (!qp.responder().responding()) read(qp, psn, 8 * kMtu), psn += 8;
    const size_t n = emit(qp).size();
    sent += n * bytes;
  }
  EXPECT_NEAR(static_cast<double>(sent), 1e6 / 8, 2 * 300);
}

}  // namespace
}  // namespace millrace::roce
