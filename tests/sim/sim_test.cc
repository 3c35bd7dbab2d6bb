// All-reduce in virtual time under loss, duplication, reordering and corruption; and every way for a group to
// end. Expected sums come from a naive loop over the inputs, in double or 64-bit integers.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "tests/sim/cluster.h"

namespace {
bool allocation_forbidden = false;
}

// NOLINTBEGIN: the replaced operators of the whole test program. Not inlined, or g++ 12 takes malloc and
// delete for a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (allocation_forbidden) std::abort();
  if (void* p = std::malloc(bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (allocation_forbidden) std::abort();
  return std::malloc(bytes);
}
[[gnu::noinline]] void* operator new[](size_t bytes) { return operator new(bytes); }
[[gnu::noinline]] void* operator new[](size_t bytes, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, tag);
}
[[gnu::noinline]] void operator delete[](void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete[](void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
// NOLINTEND

namespace millrace::sim {
namespace {

using aggregation::Collective;
using aggregation::DataType;
using aggregation::ReduceOp;
using host::Communicator;
using host::Operation;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr DataType kTypes[] = {DataType::kF32,  DataType::kF64, DataType::kF16,
                               DataType::kBf16, DataType::kI32, DataType::kI64};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax};

// Small whole numbers: their sums over at most 16 ranks are exact in every type.
int value_of(uint64_t seed, uint16_t rank, size_t i) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + rank * 0xBF58476D1CE4E5B9ull + i * 0x94D049BB133111EBull;
  x ^= x >> 31;
  x *= 0xD6E8FEB86659FD93ull;
  return static_cast<int>((x >> 40) % 15) - 7;
}

void store(DataType type, uint8_t* at, double v) {
  auto put = [&](auto x) { std::memcpy(at, &x, sizeof(x)); };
  switch (type) {
    case DataType::kF32:
      put(static_cast<float>(v));
      break;
    case DataType::kF64:
      put(v);
      break;
    case DataType::kF16:
      put(static_cast<_Float16>(v));
      break;
    case DataType::kBf16: {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));  // exact: few significant bits
      put(static_cast<uint16_t>(bits >> 16));
      break;
    }
    case DataType::kI32:
      put(static_cast<int32_t>(v));
      break;
    case DataType::kI64:
      put(static_cast<int64_t>(v));
      break;
    default:
      std::abort();
  }
}

// One operation of one group, at all ranks.
struct Job {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  size_t count = 1;
  bool in_place = false;
  bool barrier = false;
  uint64_t seed = 1;
  std::vector<std::vector<uint8_t>> send, recv;
  std::vector<std::unique_ptr<Operation>> operation;

  void prepare(uint16_t world) {
    const size_t element = barrier ? 1 : aggregation::element_bytes(type),
                 bytes = barrier ? 0 : count * element;
    send.resize(world), recv.resize(world);
    for (uint16_t r = 0; r < world; r++) {
      send[r].resize(bytes + 1);  // never empty, and one byte of guard
      for (size_t i = 0; i < bytes / element; i++)
        store(type, send[r].data() + i * element, value_of(seed, r, i));
      recv[r].assign(bytes + 1, 0xA5);
      auto o = std::make_unique<Operation>();
      o->collective = barrier ? Collective::kBarrier : Collective::kAllReduce;
      o->type = barrier ? DataType::kU8 : type;
      o->op = barrier ? ReduceOp::kNone : op;
      o->send = send[r].data();
      o->recv = in_place ? send[r].data() : recv[r].data();
      o->bytes = bytes;
      operation.push_back(std::move(o));
    }
  }
  bool done() const {
    return std::all_of(operation.begin(), operation.end(), [](auto& o) { return o->done; });
  }
  void check() const {
    const size_t element = aggregation::element_bytes(type);
    for (size_t r = 0; r < operation.size(); r++) {
      ASSERT_EQ(operation[r]->status, MR_OK) << operation[r]->text;
      if (barrier) continue;
      for (size_t i = 0; i < count; i++) {
        double expected = value_of(seed, 0, i);
        for (uint16_t k = 1; k < operation.size(); k++) {
          const double v = value_of(seed, k, i);
          expected = op == ReduceOp::kSum   ? expected + v
                     : op == ReduceOp::kMin ? std::min(expected, v)
                                            : std::max(expected, v);
        }
        uint8_t bytes[8];
        store(type, bytes, expected);
        if (std::memcmp(bytes, operation[r]->recv + i * element, element) != 0) {
          // −0 from a sum of signed zeros is as right as 0.
          ASSERT_TRUE(expected == 0 && element <= 8) << "rank " << r << " element " << i;
        }
      }
      if (!in_place) {
        ASSERT_EQ(recv[r].back(), 0xA5) << "written past the end";
      }
    }
  }
};

bool all_running(const std::vector<Communicator*>& comms) {
  return std::all_of(comms.begin(), comms.end(),
                     [](Communicator* c) { return c->state() == Communicator::State::kRunning; });
}

std::vector<Communicator*> join_all(Cluster& c, uint16_t world, uint8_t key = 1, uint8_t stripes = 1) {
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < world; r++) {
    auto config = c.communicator(r, world, key);
    config.stripes = stripes;
    comms.push_back(&c.host(r).join(config));
  }
  return comms;
}

void run_job(Cluster& c, std::vector<Communicator*>& comms, Job& job, Time limit = seconds(60)) {
  job.prepare(static_cast<uint16_t>(comms.size()));
  for (size_t r = 0; r < comms.size(); r++)
    comms[r]->submit(job.operation[r].get(), c.now()), c.host(static_cast<uint16_t>(r)).pump(c.now());
  ASSERT_TRUE(c.run([&] { return job.done(); }, limit))
      << "operation not over at " << c.now().count() << " ns";
}

// A running group of the cluster's first `world` hosts, all of them unless said otherwise.
struct Group {
  Cluster cluster;
  std::vector<Communicator*> comms;
  explicit Group(const ClusterConfig& config, uint16_t world = 0)
      : cluster(config), comms(join_all(cluster, world ? world : config.hosts)) {
    EXPECT_TRUE(cluster.run([&] { return all_running(comms); })) << comms[0]->text();
  }
  // Submits the prepared job at `ranks`, at all of them when none are given.
  void submit(Job& job, std::vector<uint16_t> ranks = {}) {
    for (uint16_t r = 0; ranks.empty() || r < comms.size(); r++) {
      if (r == comms.size()) break;
      if (!ranks.empty() && std::find(ranks.begin(), ranks.end(), r) == ranks.end()) continue;
      comms[r]->submit(job.operation[r].get(), cluster.now());
      cluster.host(r).pump(cluster.now());
    }
  }
};

void expect_nothing_left(Cluster& c) {
  c.run([&] { return c.pipeline().engine().groups(c.now()).empty(); }, seconds(10));
  EXPECT_EQ(c.pipeline().engine().queue_pairs(), 0u);
  EXPECT_EQ(c.pipeline().engine().memory_reserved(), 0u);
  EXPECT_EQ(c.switch_pool().in_use(), 0u);
}

int seeds() {
  const char* s = std::getenv("MILLRACE_SIM_SEEDS");
  return s ? std::atoi(s) : 500;
}

void run_seed(uint64_t seed) {
  std::mt19937_64 random(seed);
  auto draw = [&](uint64_t n) { return random() % n; };
  ClusterConfig cc;
  cc.seed = seed;
  cc.hosts = static_cast<uint16_t>(1 + draw(6));
  cc.ipv6 = draw(2);
  cc.wire.loss = 0.0001 * static_cast<double>(draw(400));
  cc.wire.duplicate = 0.0001 * static_cast<double>(draw(300));
  cc.wire.reorder = 0.0001 * static_cast<double>(draw(300));
  cc.wire.corrupt = 0.0001 * static_cast<double>(draw(50));
  cc.wire.gbit = draw(2) ? 10 : 100;
  static constexpr uint32_t mtus[] = {256, 512, 1024, 2048, 4096};
  cc.engine.mtu = mtus[draw(5)];
  cc.engine.segment_bytes = cc.engine.mtu - 64 + cc.engine.mtu * static_cast<uint32_t>(draw(8));
  cc.engine.window = static_cast<uint16_t>(1 + draw(8));
  if (draw(2)) cc.engine.first_psn = 0xFFFFFF - static_cast<uint32_t>(draw(40));
  Cluster c(cc);
  auto comms = join_all(c, cc.hosts, 1, static_cast<uint8_t>(1 + draw(3)));
  ASSERT_TRUE(c.run([&] { return all_running(comms); }, seconds(30)))
      << "the group did not start: " << comms[0]->text();

  std::vector<Job> jobs(1 + draw(4));
  for (Job& j : jobs) {
    j.type = kTypes[draw(6)];
    j.op = kOps[draw(3)];
    j.barrier = draw(6) == 0;
    j.count = 1 + draw(draw(2) ? 40 : 12000);
    j.in_place = draw(2);
    j.seed = random();
    j.prepare(cc.hosts);
  }
  // Ranks submit at different times, some of them everything at once.
  std::vector<size_t> next(cc.hosts, 0);
  auto over = [&] { return std::all_of(jobs.begin(), jobs.end(), [](Job& j) { return j.done(); }); };
  for (int rounds = 0; rounds < 1000 && !over(); rounds++) {
    for (uint16_t r = 0; r < cc.hosts; r++) {
      while (next[r] < jobs.size() && draw(3)) comms[r]->submit(jobs[next[r]++].operation[r].get(), c.now());
      c.host(r).pump(c.now());
    }
    c.run(over, milliseconds(1 + draw(300)));
  }
  ASSERT_TRUE(over()) << "not over after " << c.now().count() << " ns";
  for (const Job& j : jobs) j.check();
  for (auto* comm : comms) comm->close(c.now());
  for (uint16_t r = 0; r < cc.hosts; r++) c.host(r).pump(c.now());
  expect_nothing_left(c);
}

TEST(Seeds, LossDuplicationReorderingAndCorruptionNeverChangeASum) {
  const int n = seeds();
  for (int s = 1; s <= n; s++) {
    SCOPED_TRACE("seed " + std::to_string(s));
    run_seed(static_cast<uint64_t>(s));
    if (testing::Test::HasFatalFailure())
      FAIL() << "replay: MILLRACE_SIM_SEED=" << s << " sim_tests --gtest_filter=Seeds.One";
  }
}

TEST(Seeds, One) {
  const char* s = std::getenv("MILLRACE_SIM_SEED");
  run_seed(s ? std::strtoull(s, nullptr, 10) : 1);
}

TEST(AllReduce, TwoHostsSumFloats) {
  ClusterConfig cc;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  Job job;
  job.count = 100000;
  run_job(c, comms, job);
  job.check();
}

// The protocol's promise to the network: each link carries the buffer once in each direction and little more.
TEST(AllReduce, EachLinkCarriesTheBufferOnce) {
  ClusterConfig cc;
  cc.hosts = 4;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  Job job;
  job.count = 4 << 20;
  run_job(c, comms, job);
  job.check();
  for (uint16_t r = 0; r < 4; r++) {
    EXPECT_LT(static_cast<double>(c.wire().bytes_to_switch[r]), 1.04 * 4 * static_cast<double>(job.count));
    EXPECT_LT(static_cast<double>(c.wire().bytes_to_host[r]), 1.04 * 4 * static_cast<double>(job.count));
  }
}

TEST(Ends, AHostThatDiesIsNamedWithinEightSecondsAndLeavesNothing) {
  ClusterConfig cc;
  cc.hosts = 4;
  Group g(cc);
  Cluster& c = g.cluster;
  Job job;
  job.count = 1 << 20;
  job.prepare(4);
  g.submit(job);
  c.run_for(std::chrono::microseconds(300));
  ASSERT_FALSE(job.done());
  c.host(2).crash();
  const Time killed = c.now();
  ASSERT_TRUE(
      c.run([&] { return job.operation[0]->done && job.operation[1]->done && job.operation[3]->done; },
            seconds(20)));
  EXPECT_LT(c.now() - killed, seconds(8));
  for (int r : {0, 1, 3}) {
    EXPECT_EQ(job.operation[r]->status, MR_ERR_MEMBER_LOST);
    EXPECT_NE(job.operation[r]->text.find("rank 2 (10.77.0.3)"), std::string::npos) << job.operation[r]->text;
  }
  // The same hosts, the same key, at once.
  c.restart_host(2);
  auto again = join_all(c, 4);
  ASSERT_TRUE(c.run([&] { return all_running(again); })) << again[0]->text();
  Job second;
  second.count = 1000;
  run_job(c, again, second);
  second.check();
  for (auto* comm : again) comm->close(c.now());
  for (uint16_t r = 0; r < 4; r++) c.host(r).pump(c.now());
  expect_nothing_left(c);
}

TEST(Ends, ARestartedRankReplacesItsDeadSelf) {
  ClusterConfig cc;
  cc.hosts = 2;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  c.host(1).crash();
  c.run_for(milliseconds(10));
  Communicator& reborn = c.restart_host(1).join(c.communicator(1, 2));
  ASSERT_TRUE(c.run([&] { return comms[0]->state() == Communicator::State::kFailed; }, seconds(8)));
  EXPECT_NE(comms[0]->text().find("rank 1"), std::string::npos) << comms[0]->text();
  Communicator& other = c.host(0).join(c.communicator(0, 2));
  ASSERT_TRUE(c.run([&] {
    return reborn.state() == Communicator::State::kRunning && other.state() == Communicator::State::kRunning;
  })) << reborn.text();
}

TEST(Ends, ARankThatIsTakenIsRefused) {
  ClusterConfig cc;
  cc.hosts = 3;
  Group g(cc, 2);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  Communicator& thief = c.host(2).join(c.communicator(1, 2));
  ASSERT_TRUE(c.run([&] { return thief.state() == Communicator::State::kFailed; }));
  EXPECT_EQ(thief.status(), MR_ERR_REFUSED);
  EXPECT_NE(thief.text().find("rank 1 is taken by 10.77.0.2"), std::string::npos) << thief.text();
  Job job;
  job.count = 5000;
  run_job(c, comms, job);
  job.check();
}

struct Disagreement {
  const char* field;
  void (*change)(Operation&);
};
class Disagree : public testing::TestWithParam<Disagreement> {};
TEST_P(Disagree, EveryRankLearnsWhoAndWhat) {
  ClusterConfig cc;
  cc.hosts = 4;
  Group g(cc);
  Cluster& c = g.cluster;
  Job job;
  job.count = 100000;
  job.prepare(4);
  GetParam().change(*job.operation[1]);
  const Time start = c.now();
  g.submit(job);
  ASSERT_TRUE(c.run([&] { return job.done(); }));
  EXPECT_LT(c.now() - start, seconds(2));
  for (auto& o : job.operation) {
    EXPECT_EQ(o->status, MR_ERR_MISMATCH);
    EXPECT_NE(o->text.find("rank 1 " + std::string(GetParam().field)), std::string::npos) << o->text;
  }
  expect_nothing_left(c);
}
INSTANTIATE_TEST_SUITE_P(
    Fields, Disagree,
    testing::Values(Disagreement{"datatype", [](Operation& o) { o.type = DataType::kI32; }},
                    Disagreement{"operator", [](Operation& o) { o.op = ReduceOp::kMax; }},
                    Disagreement{"total", [](Operation& o) { o.bytes = 1000; }},
                    Disagreement{"total", [](Operation& o) { o.bytes -= 8; }},
                    Disagreement{"collective",
                                 [](Operation& o) {
                                   o.collective = Collective::kBarrier, o.type = DataType::kU8,
                                   o.op = ReduceOp::kNone, o.bytes = 0;
                                 }}),
    [](const auto& i) { return std::string(i.param.field) + std::to_string(i.index); });

// Found by review: an empty first header leaves no reducer behind, and the last member's packet, which
// settles the disagreement, must not be summed.
TEST(Ends, NothingAgainstSomethingIsADisagreementInEitherOrder) {
  for (DataType type : {DataType::kBf16, DataType::kF32}) {
    for (uint16_t empty : {0, 1}) {
      Group g(ClusterConfig{});
      Cluster& c = g.cluster;
      for (int round = 0; round < 2; round++) {  // once with a fresh slot, once after a sum
        Job job;
        job.type = type;
        job.count = 500;
        if (round == 0) {
          run_job(c, g.comms, job);
          job.check();
          continue;
        }
        job.prepare(2);
        job.operation[empty]->bytes = 0;
        g.submit(job, {empty});
        c.run_for(milliseconds(1));
        g.submit(job, {static_cast<uint16_t>(1 - empty)});
        ASSERT_TRUE(c.run([&] { return job.done(); }));
        for (auto& o : job.operation) EXPECT_EQ(o->status, MR_ERR_MISMATCH) << o->text;
      }
      expect_nothing_left(c);
    }
  }
}

// Found by review: a rank that has said goodbye is not probed to death, and the others learn of it when it
// matters.
TEST(Ends, ADepartureBetweenOperationsIsNoErrorUntilTheNextOne) {
  ClusterConfig cc;
  cc.hosts = 3;
  Group g(cc);
  Cluster& c = g.cluster;
  Job job;
  run_job(c, g.comms, job);
  g.comms[2]->close(c.now());
  c.host(2).pump(c.now());
  c.run_for(seconds(20));
  EXPECT_EQ(g.comms[0]->status(), MR_OK) << g.comms[0]->text();
  EXPECT_EQ(c.pipeline().engine().counters().groups_failed, 0u);
  Job next;
  next.prepare(3);
  g.submit(next, {0});
  ASSERT_TRUE(c.run([&] { return next.operation[0]->done; }, seconds(2)));
  EXPECT_EQ(next.operation[0]->status, MR_ERR_MEMBER_LOST);
  EXPECT_NE(next.operation[0]->text.find("rank 2"), std::string::npos) << next.operation[0]->text;
}

// Found by review: joins of a taken rank, repeated fast, must not fill the send queue of the one that holds
// it.
TEST(Ends, AFloodOfJoinsForATakenRankHarmsNobody) {
  ClusterConfig cc;
  cc.hosts = 3;
  cc.engine.window = 1;
  cc.engine.segment_bytes = 4096 - 64;
  Group g(cc, 2);
  Cluster& c = g.cluster;
  c.hosts_are_deaf = true;  // nobody acknowledges a probe
  for (int i = 0; i < 60; i++) c.host(2).join(c.communicator(1, 2));
  c.run_for(milliseconds(100));
  c.hosts_are_deaf = false;
  Job job;
  job.count = 20000;
  run_job(c, g.comms, job);
  job.check();
}

TEST(Ends, TwoEqualCampsAreBothNamed) {
  ClusterConfig cc;
  Group g(cc);
  Cluster& c = g.cluster;
  Job job;
  job.count = 10;
  job.prepare(2);
  job.operation[1]->op = ReduceOp::kMin;
  g.submit(job);
  ASSERT_TRUE(c.run([&] { return job.done(); }));
  EXPECT_NE(job.operation[0]->text.find("rank 1 operator min, rank 0 sum"), std::string::npos)
      << job.operation[0]->text;
}

TEST(Ends, ALateMemberIsNamed) {
  ClusterConfig cc;
  cc.hosts = 3;
  cc.engine.operation_timeout = seconds(3);
  Group g(cc);
  Cluster& c = g.cluster;
  Job job;
  job.count = 10;
  job.prepare(3);
  g.submit(job, {0, 2});
  ASSERT_TRUE(c.run([&] { return job.operation[0]->done && job.operation[2]->done; }));
  EXPECT_EQ(job.operation[0]->status, MR_ERR_LATE);
  EXPECT_NE(job.operation[0]->text.find("rank 1 (10.77.0.2)"), std::string::npos) << job.operation[0]->text;
  EXPECT_EQ(c.pipeline().engine().counters().stragglers, 1u);
}

TEST(Ends, AMissingRankIsNamedAfterTheJoinTimeout) {
  ClusterConfig cc;
  cc.hosts = 3;
  cc.engine.join_timeout = seconds(4);
  Cluster c(cc);
  Communicator& a = c.host(0).join(c.communicator(0, 3));
  Communicator& b = c.host(2).join(c.communicator(2, 3));
  ASSERT_TRUE(c.run([&] {
    return a.state() == Communicator::State::kFailed && b.state() == Communicator::State::kFailed;
  }));
  EXPECT_EQ(a.status(), MR_ERR_LATE);
  EXPECT_NE(a.text().find(": 1"), std::string::npos) << a.text();
  expect_nothing_left(c);
}

TEST(Ends, AMemberThatLeavesMidOperationIsNamed) {
  ClusterConfig cc;
  cc.hosts = 3;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  Job job;
  job.count = 10;
  job.prepare(3);
  g.submit(job, {0, 1});
  c.run_for(milliseconds(5));
  comms[2]->close(c.now());
  c.host(2).pump(c.now());
  ASSERT_TRUE(c.run([&] { return job.operation[0]->done && job.operation[1]->done; }, seconds(2)));
  EXPECT_EQ(job.operation[0]->status, MR_ERR_MEMBER_LOST);
  EXPECT_NE(job.operation[0]->text.find("rank 2"), std::string::npos) << job.operation[0]->text;
  expect_nothing_left(c);
}

TEST(Ends, AnAdministratorsAbortReachesAll) {
  ClusterConfig cc;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  FrameList out;
  const uint32_t id = c.pipeline().engine().groups(c.now())[0].id;
  ASSERT_TRUE(c.pipeline().abort_group(id, "maintenance", c.now(), out));
  // What was sent at once is lost here; the retransmission carries it.
  out.clear();
  ASSERT_TRUE(c.run(
      [&] {
        return comms[0]->state() == Communicator::State::kFailed &&
               comms[1]->state() == Communicator::State::kFailed;
      },
      seconds(2)));
  EXPECT_EQ(comms[1]->status(), MR_ERR_ABORTED);
  EXPECT_NE(comms[1]->text().find("maintenance"), std::string::npos);
}

TEST(Join, AWrongMtuIsCorrectedByTheRefusal) {
  ClusterConfig cc;
  cc.engine.mtu = 1024;
  cc.engine.segment_bytes = 1024 * 8 - 64;
  Cluster c(cc);
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < 2; r++) {
    auto config = c.communicator(r, 2);
    config.mtu = 4096;
    comms.push_back(&c.host(r).join(config));
  }
  ASSERT_TRUE(c.run([&] { return all_running(comms); })) << comms[0]->text();
  Job job;
  job.count = 10000;
  run_job(c, comms, job);
  job.check();
}

TEST(Join, AGroupOverTheQuotaIsRefusedWithTheFigures) {
  ClusterConfig cc;
  cc.engine.memory_limit = 1 << 20;
  Cluster c(cc);
  Communicator& a = c.host(0).join(c.communicator(0, 2));
  ASSERT_TRUE(c.run([&] { return a.state() == Communicator::State::kFailed; }));
  EXPECT_EQ(a.status(), MR_ERR_REFUSED);
  EXPECT_NE(a.text().find("0 KiB of 1 MiB used, this group needs"), std::string::npos) << a.text();
}

TEST(Join, ATenantsSecretIsAskedFor) {
  ClusterConfig cc;
  cc.engine.tenants[7] = {"blue", "wood", 0};
  Cluster c(cc);
  auto config = c.communicator(0, 1);
  config.tenant = 7;
  config.secret = "stone";
  Communicator& wrong = c.host(0).join(config);
  ASSERT_TRUE(c.run([&] { return wrong.state() == Communicator::State::kFailed; }));
  EXPECT_NE(wrong.text().find("tenant 7"), std::string::npos) << wrong.text();
  config.secret = "wood";
  Communicator& right = c.host(0).join(config);
  ASSERT_TRUE(c.run([&] { return right.state() == Communicator::State::kRunning; })) << right.text();
}

TEST(Join, AnAbsentSwitchIsReportedWithinTheTimeout) {
  ClusterConfig cc;
  Cluster c(cc);
  c.wire_config().loss = 1;
  auto config = c.communicator(0, 2);
  config.connect_timeout = seconds(3);
  Communicator& a = c.host(0).join(config);
  ASSERT_TRUE(c.run([&] { return a.state() == Communicator::State::kFailed; }, seconds(4)));
  EXPECT_EQ(a.status(), MR_ERR_UNREACHABLE);
  EXPECT_NE(a.text().find("10.77.0.100"), std::string::npos);
}

TEST(Shutdown, TellsEveryMemberAndDrains) {
  ClusterConfig cc;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  FrameList out;
  c.pipeline().shutdown(c.now(), out);
  ASSERT_TRUE(c.run(
      [&] {
        return comms[0]->state() == Communicator::State::kFailed &&
               comms[1]->state() == Communicator::State::kFailed;
      },
      seconds(3)));
  EXPECT_NE(comms[0]->text().find("shutting down"), std::string::npos) << comms[0]->text();
  EXPECT_TRUE(c.run([&] { return c.pipeline().drained(); }, seconds(60)));
}

// Segment s + window before result s: RNR NAKs, until the others have caught up, and nothing worse.
TEST(Window, ABreachDrawsRnrNaksAndNothingWorse) {
  ClusterConfig cc;
  cc.engine.window = 2;
  Cluster c(cc);
  Communicator& honest = c.host(0).join(c.communicator(0, 2));
  // Rank 1 by hand, on the transport itself, with no window of its own.
  host::SoftEngine& endpoint = c.host(1).endpoint();
  host::ConnectRequest request;
  request.switch_address = c.switch_address();
  request.join.key.fill(1);
  request.join.rank = 1;
  request.join.world = 2;
  request.window = 64;
  const host::LinkId link = endpoint.connect(request);
  ASSERT_TRUE(c.run([&] { return honest.state() == Communicator::State::kRunning; }));
  const uint32_t group = c.pipeline().engine().groups(c.now())[0].id;

  constexpr uint32_t kSegments = 7, kBytes = 65472;
  std::vector<int32_t> mine(kSegments * kBytes / 4, 5), sum(mine.size(), -1), theirs(mine.size(), 37),
      other(mine.size(), -1);
  const uint32_t rkey = endpoint.register_memory(sum.data(), sum.size() * 4);
  for (uint32_t s = 0; s < kSegments; s++) {
    aggregation::SegmentHeader h;
    h.magic = aggregation::kMagic;
    h.version = 1, h.collective = 1, h.op = 1, h.type = h.wire_type = 3;
    h.flags = s + 1 == kSegments ? aggregation::kFlagLast : 0;
    h.group = group, h.rank = uint16_t{1};
    h.total = uint64_t{kSegments * kBytes}, h.offset = uint64_t{s * kBytes};
    h.length = h.payload_bytes = kBytes;
    h.result_address = reinterpret_cast<uintptr_t>(sum.data()) + s * kBytes;
    h.result_rkey = rkey;
    ASSERT_TRUE(
        endpoint.post_segment(link, s, h, {reinterpret_cast<uint8_t*>(mine.data()) + s * kBytes, kBytes}));
  }
  c.run_for(milliseconds(50));
  const auto counters = c.pipeline().engine().counters();
  EXPECT_GT(counters.window_breaches, 0u);
  EXPECT_GT(counters.rnr_naks_sent, 0u);
  EXPECT_EQ(counters.segments, 2u);
  EXPECT_EQ(counters.groups_failed, 0u);

  Operation op;
  op.op = ReduceOp::kSum;
  op.type = DataType::kI32;
  op.send = reinterpret_cast<uint8_t*>(theirs.data());
  op.recv = reinterpret_cast<uint8_t*>(other.data());
  op.bytes = theirs.size() * 4;
  honest.submit(&op, c.now());
  c.host(0).pump(c.now());
  ASSERT_TRUE(c.run([&] { return op.done; }));
  c.run_for(milliseconds(100));
  EXPECT_EQ(op.status, MR_OK) << op.text;
  EXPECT_EQ(std::count(sum.begin(), sum.end(), 42), static_cast<long>(sum.size()));
  EXPECT_EQ(std::count(other.begin(), other.end(), 42), static_cast<long>(other.size()));
}

// Found by review: a member that keeps its results from being sent (RNR NAKs, no ACKs) and sends on and on is
// held at its window; posted and unsent results are no licence.
TEST(Window, WithholdingResultsDoesNotOpenIt) {
  ClusterConfig cc;
  cc.hosts = 1;
  cc.engine.window = 1;
  cc.engine.segment_bytes = 4096 - 64;
  cc.engine.first_psn = 100;
  Cluster c(cc);
  host::SoftEngine& endpoint = c.host(0).endpoint();
  host::ConnectRequest request;
  request.switch_address = c.switch_address();
  request.join.key.fill(1);
  request.window = 64;
  const host::LinkId link = endpoint.connect(request);
  ASSERT_TRUE(c.run([&] {
    const auto groups = c.pipeline().engine().groups(c.now());
    return !groups.empty() && groups[0].members[0].remote_qpn != 0;
  }));
  c.hosts_are_deaf = true;
  const auto member = c.pipeline().engine().groups(c.now())[0];
  HeapFramePool pool;
  roce::TransportFields nak;
  nak.opcode = roce::Opcode::kAcknowledge;
  nak.dest_qp = Qpn{member.members[0].qpn};
  nak.psn = Psn(100);            // START
  nak.syndrome = roce::kRnrNak;  // timer code 0: 655 ms
  std::string error;
  const Frame frame = roce::build(pool, *c.host(0).resolve(c.switch_address(), error), nak, {});
  c.inject(0, frame.bytes());
  c.run_for(milliseconds(1));
  c.hosts_are_deaf = false;
  uint64_t posted = 0;
  for (uint32_t s = 0; s < 120; s++) {
    aggregation::SegmentHeader h;
    h.magic = aggregation::kMagic;
    h.version = 1, h.collective = 6, h.type = h.wire_type = 1;
    h.flags = aggregation::kFlagLast | aggregation::kFlagHeaderOnly;
    h.group = member.id;
    h.operation = uint64_t{s};
    posted += endpoint.post_segment(link, s, h, {});
  }
  ASSERT_GT(posted, 20u);
  c.run_for(milliseconds(400));
  EXPECT_GT(c.pipeline().engine().counters().window_breaches, 0u);
  EXPECT_LE(c.pipeline().engine().counters().segments, 1u);
}

// Style's promise: between a burst in and a burst out, nothing is allocated.
TEST(HotPath, ReducingAllocatesNothing) {
  ClusterConfig cc;
  cc.hosts = 3;
  cc.switch_frames = 4000;
  cc.wire.loss = 0.01;
  Group g(cc);
  {
    FrameList all;
    for (uint32_t i = 0; i < cc.switch_frames / 2; i++) all.push(Frame::allocate(g.cluster.switch_pool()));
  }
  // Connections may still be completing (a lost RTU): that is joining, which may allocate.
  Job first;
  run_job(g.cluster, g.comms, first);
  for (DataType type : {DataType::kF32, DataType::kBf16}) {
    Job job;
    job.type = type;
    job.count = 200000;
    g.cluster.around_pipeline = [](bool inside) { allocation_forbidden = inside; };
    run_job(g.cluster, g.comms, job);
    g.cluster.around_pipeline = nullptr;
    job.check();
  }
  EXPECT_GT(g.cluster.pipeline().engine().counters().retransmitted_packets, 0u);
}

TEST(Pools, ATinyFramePoolSlowsAndNeverCorrupts) {
  ClusterConfig cc;
  cc.hosts = 3;
  cc.switch_frames = 420;
  cc.wire.gbit = 100;
  Group g(cc);
  Cluster& c = g.cluster;
  auto& comms = g.comms;
  Job job;
  job.count = 500000;
  run_job(c, comms, job);
  job.check();
}

}  // namespace
}  // namespace millrace::sim
