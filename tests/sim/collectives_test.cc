// Every collective in virtual time: sizes about a segment, in place and not, any number of ranks; and sums
// that are the same bits in whatever order contributions come.
#include <gtest/gtest.h>

#include <set>

#include "tests/sim/job.h"

namespace millrace::sim {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce,     Collective::kReduce,    Collective::kBroadcast,
                               Collective::kReduceScatter, Collective::kAllGather, Collective::kBarrier};

// Segments of 960 bytes at an MTU of 256: 240 elements of four bytes.
ClusterConfig small_segments(uint16_t hosts) {
  ClusterConfig cc;
  cc.hosts = hosts;
  cc.engine.mtu = 256;
  cc.engine.segment_bytes = 960;
  return cc;
}

class Collectives : public testing::TestWithParam<Collective> {};

TEST_P(Collectives, AreExactAtEverySize) {
  for (const uint16_t world : {1, 2, 3, 5}) {
    Group g(small_segments(world));
    for (const size_t count : {0, 1, 7, 47, 48, 49, 239, 240, 241, 1200, 3000}) {
      for (const bool in_place : {false, true}) {
        for (uint16_t root = 0; root < world; root++) {
          Job job;
          job.collective = GetParam();
          // Shards of `count` about a segment's size as well.
          job.count = job.sharded() ? count * world : count;
          job.type = count % 2 ? DataType::kI32 : DataType::kF32;
          job.in_place = in_place;
          const bool rooted =
              job.collective == Collective::kReduce || job.collective == Collective::kBroadcast;
          if (!rooted && root != 0) continue;
          job.root = root;
          job.seed = count + 1;
          SCOPED_TRACE(testing::Message() << world << " ranks, " << count << " elements, root " << root
                                          << (in_place ? ", in place" : ""));
          run_job(g.cluster, g.comms, job);
          job.check();
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Bytes, whose shards begin and end anywhere in a packet.
TEST_P(Collectives, AreExactWithShardsThatBeginAnywhere) {
  Group g(small_segments(3));
  for (const size_t shard : {1, 2, 3, 191, 193, 255, 1001, 2003}) {
    Job job;
    job.collective = GetParam();
    job.count = 3 * shard;
    job.type = DataType::kI8;
    run_job(g.cluster, g.comms, job);
    job.check();
    if (HasFatalFailure()) FAIL() << "shards of " << shard;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Collectives, testing::ValuesIn(kAll), [](const auto& instance) {
  std::string name(aggregation::name(instance.param));
  std::erase(name, '-');
  return name;
});

// A rank's link carries its contribution and its result, not what others send or receive.
TEST(Collectives, NobodyReceivesWhatIsNotForIt) {
  ClusterConfig cc;
  cc.hosts = 4;
  Group g(cc);
  constexpr size_t kBytes = 1 << 20;
  for (const Collective c : kAll) {
    if (c == Collective::kBarrier) continue;
    std::vector<uint64_t> up(4), down(4);
    g.cluster.tap = [&](uint16_t host, bool to_switch, std::span<const uint8_t> f) {
      (to_switch ? up : down)[host] += f.size();
    };
    Job job;
    job.collective = c;
    job.root = 1;
    job.count = kBytes / 4;
    run_job(g.cluster, g.comms, job);
    job.check();
    g.cluster.tap = nullptr;
    for (uint16_t r = 0; r < 4; r++) {
      const double sends = c == Collective::kBroadcast ? r == 1 : c == Collective::kAllGather ? 0.25 : 1;
      const double receives = c == Collective::kReduce          ? r == 1
                              : c == Collective::kBroadcast     ? r != 1
                              : c == Collective::kReduceScatter ? 0.25
                              : c == Collective::kAllGather     ? 0.75
                                                                : 1;
      // Headers, acknowledgements and retransmissions at the tail: 5 %, and as much where no data is.
      EXPECT_NEAR(static_cast<double>(up[r]) / kBytes, sends, 0.05) << aggregation::name(c) << " rank " << r;
      EXPECT_NEAR(static_cast<double>(down[r]) / kBytes, receives, 0.05)
          << aggregation::name(c) << " rank " << r;
    }
  }
}

// What a person is shown of an operation that waits for others.
TEST(Collectives, AreNamedWhileTheyWait) {
  ClusterConfig cc;
  cc.hosts = 2;
  for (const auto& [collective, what] : std::initializer_list<std::pair<Collective, const char*>>{
           {Collective::kAllReduce, "all-reduce sum f32 4000 B"},
           {Collective::kBroadcast, "broadcast f32 4000 B"},
           {Collective::kReduceScatter, "reduce-scatter sum f32 4000 B"},
           {Collective::kBarrier, "barrier"}}) {
    Group g(cc);
    Job job;
    job.collective = collective;
    job.count = 1000;
    job.prepare(2);
    g.submit(job, {1});
    g.cluster.run_for(milliseconds(1));
    const auto info = g.cluster.pipeline().engine().groups(g.cluster.now());
    ASSERT_EQ(info.size(), 1u);
    EXPECT_EQ(info[0].what, what);
    EXPECT_TRUE(info[0].members[0].waited_for);
    EXPECT_FALSE(info[0].members[1].waited_for);
    g.submit(job, {0});
    ASSERT_TRUE(g.cluster.run([&] { return job.done(); }, seconds(10)));
  }
}

// The sum of random numbers of very different sizes over seven ranks, submitted in a random order: its bits.
template <typename T>
std::vector<T> sum_in_some_order(uint64_t seed, bool deterministic, uint8_t stripes, DataType type) {
  constexpr uint16_t kWorld = 7;
  constexpr size_t kCount = 300;
  Cluster c(small_segments(kWorld));
  auto comms = join_all(c, kWorld, 1, stripes);
  EXPECT_TRUE(c.run([&] { return all_running(comms); }, seconds(30)));
  std::mt19937_64 values(42), order(seed);
  std::vector<std::vector<T>> send(kWorld, std::vector<T>(kCount)), recv = send;
  std::vector<Operation> operations(kWorld);
  for (uint16_t r = 0; r < kWorld; r++) {
    for (T& v : send[r]) {
      const double x =
          std::ldexp(static_cast<double>(values() % 2000) - 1000, static_cast<int>(values() % 12));
      store(type, reinterpret_cast<uint8_t*>(&v), x * 1.37);
    }
    Operation& o = operations[r];
    o.type = type;
    o.op = ReduceOp::kSum;
    o.deterministic = deterministic;
    o.send = reinterpret_cast<const uint8_t*>(send[r].data());
    o.recv = reinterpret_cast<uint8_t*>(recv[r].data());
    o.bytes = kCount * sizeof(T);
  }
  std::vector<uint16_t> ranks = {0, 1, 2, 3, 4, 5, 6};
  std::shuffle(ranks.begin(), ranks.end(), order);
  for (const uint16_t r : ranks) {
    comms[r]->submit(&operations[r], c.now());
    c.host(r).pump(c.now());
    c.run_for(milliseconds(1));
  }
  EXPECT_TRUE(
      c.run([&] { return std::all_of(operations.begin(), operations.end(), [](auto& o) { return o.done; }); },
            seconds(10)));
  for (uint16_t r = 0; r < kWorld; r++) EXPECT_EQ(recv[r], recv[0]) << operations[r].text;
  return recv[0];
}

// ((0+1)+(2+3)) + ((4+5)+6), which are the largest powers of two smaller than what is to be split.
TEST(Deterministic, SumsInTheCanonicalBracketing) {
  const std::vector<uint32_t> got = sum_in_some_order<uint32_t>(5, true, 1, DataType::kF32);
  std::mt19937_64 values(42);
  std::vector<std::vector<float>> x(7, std::vector<float>(got.size()));
  for (auto& rank : x)
    for (float& v : rank) {
      const double y =
          std::ldexp(static_cast<double>(values() % 2000) - 1000, static_cast<int>(values() % 12));
      v = static_cast<float>(y * 1.37);
    }
  for (size_t i = 0; i < got.size(); i++) {
    const float expected = ((x[0][i] + x[1][i]) + (x[2][i] + x[3][i])) + ((x[4][i] + x[5][i]) + x[6][i]);
    ASSERT_EQ(got[i], std::bit_cast<uint32_t>(expected)) << i;
  }
}

TEST(Deterministic, OneBitPatternInWhateverOrderContributionsCome) {
  std::set<std::vector<uint32_t>> f32, f32_as_they_come;
  std::set<std::vector<uint16_t>> f16;
  for (uint64_t seed = 1; seed <= 30; seed++) {
    const auto stripes = static_cast<uint8_t>(1 + seed % 3);
    f32.insert(sum_in_some_order<uint32_t>(seed, true, stripes, DataType::kF32));
    f16.insert(sum_in_some_order<uint16_t>(seed, true, stripes, DataType::kF16));
    f32_as_they_come.insert(sum_in_some_order<uint32_t>(seed, false, stripes, DataType::kF32));
  }
  EXPECT_EQ(f32.size(), 1u);
  EXPECT_EQ(f16.size(), 1u);
  // Otherwise this test could not fail.
  EXPECT_GT(f32_as_they_come.size(), 10u);
}

// What the first deterministic operation needs more is refused by name where there is no room for it.
TEST(Deterministic, SaysWhatMemoryItNeeds) {
  ClusterConfig cc = small_segments(16);
  cc.engine.memory_limit = 300'000;
  Group g(cc);
  const uint64_t before = g.cluster.pipeline().engine().memory_reserved();
  Job job;
  job.deterministic = true;
  job.count = 500;
  job.prepare(16);
  g.submit(job);
  ASSERT_TRUE(g.cluster.run([&] { return job.done(); }, seconds(10)));
  EXPECT_EQ(job.operation[0]->status, MR_ERR_REFUSED) << before;
  EXPECT_NE(job.operation[0]->text.find("deterministic operation needs"), std::string::npos)
      << job.operation[0]->text << " " << before;
}

}  // namespace
}  // namespace millrace::sim
