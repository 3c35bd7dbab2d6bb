#include <gtest/gtest.h>

#include <bit>

#include "switch/impair.h"

namespace millrace::switching {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

class ImpairmentTest : public ::testing::Test {
 protected:
  Frame numbered(uint32_t n, uint32_t bytes = 64) {
    Frame f = Frame::allocate(pool_);
    f.buffer()->length = bytes;
    std::memset(f.buffer()->data(), 0, bytes);
    std::memcpy(f.buffer()->data(), &n, sizeof(n));
    return f;
  }
  static uint32_t number(const Frame& f) {
    uint32_t n;
    std::memcpy(&n, f.bytes().data(), sizeof(n));
    return n;
  }
  // `frames` frames, one per microsecond, and then time enough for all; their numbers in order of departure.
  std::vector<uint32_t> run(const ImpairConfig& config, uint32_t frames, size_t queue_max = 4096) {
    Impairment impairment(pool_, config, queue_max);
    FrameList out;
    Time now = milliseconds(1);
    for (uint32_t i = 0; i < frames; i++, now += microseconds(1)) {
      impairment.poll(now, out);
      impairment.pass(numbered(i), now, out);
    }
    while (impairment.next_deadline() != kNever) impairment.poll(impairment.next_deadline(), out);
    counters_ = impairment.counters();
    std::vector<uint32_t> order;
    while (Frame f = out.pop()) order.push_back(number(f));
    return order;
  }
  ~ImpairmentTest() override { EXPECT_EQ(pool_.in_use(), 0u); }

  HeapFramePool pool_{2048, UINT32_MAX, true};
  ImpairCounters counters_;
};

std::vector<uint32_t> counting(uint32_t n) {
  std::vector<uint32_t> all(n);
  for (uint32_t i = 0; i < n; i++) all[i] = i;
  return all;
}

TEST_F(ImpairmentTest, NothingConfiguredChangesNothing) { EXPECT_EQ(run({}, 1000), counting(1000)); }

TEST_F(ImpairmentTest, LossIsAsOftenAsAsked) {
  const auto order = run({.loss = 0.1}, 20000);
  EXPECT_EQ(order.size() + counters_.lost, 20000u);
  EXPECT_NEAR(static_cast<double>(counters_.lost), 2000, 5 * 43);  // five standard deviations
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(ImpairmentTest, LossOfOneCutsTheLine) { EXPECT_TRUE(run({.loss = 1}, 100).empty()); }

TEST_F(ImpairmentTest, DuplicatesFollowTheirOriginal) {
  const auto order = run({.duplicate = 0.5}, 1000);
  EXPECT_EQ(order.size(), 1000 + counters_.duplicated);
  EXPECT_NEAR(static_cast<double>(counters_.duplicated), 500, 80);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST_F(ImpairmentTest, ReorderingLosesNothing) {
  auto order = run({.reorder = 0.1}, 5000);
  EXPECT_EQ(order.size(), 5000u);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  std::sort(order.begin(), order.end());
  EXPECT_EQ(order, counting(5000));
}

TEST_F(ImpairmentTest, DelayKeepsOrderAndTime) {
  Impairment impairment(pool_, {.delay = microseconds(300)});
  FrameList out;
  impairment.pass(numbered(0), milliseconds(1), out);
  impairment.pass(numbered(1), milliseconds(1), out);
  EXPECT_TRUE(out.empty());
  EXPECT_EQ(impairment.next_deadline(), microseconds(1300));
  impairment.poll(microseconds(1299), out);
  EXPECT_TRUE(out.empty());
  impairment.poll(microseconds(1300), out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(number(out.pop()), 0u);
  EXPECT_EQ(number(out.pop()), 1u);
  EXPECT_EQ(impairment.next_deadline(), kNever);
}

TEST_F(ImpairmentTest, CorruptionFlipsOneBitOfAPrivateCopy) {
  Impairment impairment(pool_, {.corrupt = 1});
  for (int i = 0; i < 100; i++) {
    // As a result leaves: a payload that other results share.
    Frame payload = Frame::allocate(pool_);
    payload.buffer()->length = 100;
    std::memset(payload.buffer()->data(), 0, 100);
    Frame f = numbered(0, 20);
    f.buffer()->shared = payload.buffer();
    payload.buffer()->owners++;
    f.buffer()->shared_data = payload.buffer()->data();
    f.buffer()->shared_length = 100;
    FrameList out;
    impairment.pass(std::move(f), milliseconds(1), out);
    Frame spoilt = out.pop();
    ASSERT_EQ(spoilt.bytes().size(), 120u);
    int bits = 0;
    for (const uint8_t byte : spoilt.bytes()) bits += std::popcount(byte);
    EXPECT_EQ(bits, 1);
    for (const uint8_t byte : payload.bytes()) EXPECT_EQ(byte, 0);
  }
  EXPECT_EQ(impairment.counters().corrupted, 100u);
}

TEST_F(ImpairmentTest, TheQueueIsBounded) {
  const auto order = run({.delay = milliseconds(100)}, 1000, 100);
  EXPECT_EQ(order, counting(100));
  EXPECT_EQ(counters_.queue_full, 900u);
}

TEST_F(ImpairmentTest, OneSeedIsOneFate) {
  ImpairConfig config{
      .loss = 0.1, .duplicate = 0.1, .reorder = 0.1, .corrupt = 0.0, .delay = microseconds(50), .seed = 5};
  const auto first = run(config, 2000);
  EXPECT_EQ(run(config, 2000), first);
  config.seed = 6;
  EXPECT_NE(run(config, 2000), first);
}

TEST_F(ImpairmentTest, AnEmptyPoolIsCountedAndTheFramePasses) {
  HeapFramePool small(2048, 1, true);
  Impairment impairment(small, {.duplicate = 1, .corrupt = 1});
  FrameList out;
  Frame f = Frame::allocate(small);
  f.buffer()->length = 10;
  impairment.pass(std::move(f), milliseconds(1), out);
  EXPECT_EQ(out.size(), 1u);
  EXPECT_EQ(impairment.counters().pool_empty, 2u);
}

TEST_F(ImpairmentTest, WhatIsHeldIsGivenBackAtTheEnd) {
  Impairment impairment(pool_, {.delay = milliseconds(5)});
  FrameList out;
  for (uint32_t i = 0; i < 10; i++) impairment.pass(numbered(i), milliseconds(1), out);
  EXPECT_EQ(impairment.held(), 10u);
  impairment.configure({});  // what is held keeps its time, what comes passes
  impairment.pass(numbered(10), milliseconds(2), out);
  EXPECT_EQ(out.size(), 1u);
}

}  // namespace
}  // namespace millrace::switching
