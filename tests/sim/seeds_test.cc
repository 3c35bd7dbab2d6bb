// All-reduce in virtual time under loss, duplication, reordering and corruption, by seeds; what the links
// carry; the window; and a hot path that allocates nothing. Expected sums come from a naive loop over the
// inputs.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>

#include "tests/sim/job.h"

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
    j.collective = static_cast<Collective>(1 + draw(6));
    j.root = static_cast<uint16_t>(draw(cc.hosts));
    j.deterministic = draw(2);
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
  const uint32_t rkey = endpoint.register_memory(sum.data(), sum.size() * 4, host::Access::kResult).rkey;
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
    ASSERT_TRUE(endpoint.post_segment(link, s, h,
                                      {reinterpret_cast<uint8_t*>(mine.data()) + s * kBytes, kBytes}, {}));
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
    return !groups.empty() && groups[0].state == "running";
  }));
  c.set_hosts_deaf(true);
  const auto member = c.pipeline().engine().groups(c.now())[0];
  HeapFramePool pool;
  roce::TransportFields nak;
  nak.opcode = roce::Opcode::kAcknowledge;
  nak.dest_qp = Qpn{member.members[0].qpn};
  nak.psn = Psn(100);            // START
  nak.syndrome = roce::kRnrNak;  // timer code 0: 655 ms
  const Frame frame = roce::build(pool, c.path(0), nak, {});
  c.inject(0, frame.bytes());
  c.run_for(milliseconds(1));
  c.set_hosts_deaf(false);
  uint64_t posted = 0;
  for (uint32_t s = 0; s < 120; s++) {
    aggregation::SegmentHeader h;
    h.magic = aggregation::kMagic;
    h.version = 1, h.collective = 6, h.type = h.wire_type = 1;
    h.flags = aggregation::kFlagLast | aggregation::kFlagHeaderOnly;
    h.group = member.id;
    h.operation = uint64_t{s};
    posted += endpoint.post_segment(link, s, h, {}, {});
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
