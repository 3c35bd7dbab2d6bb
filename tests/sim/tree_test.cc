// Groups over trees of switches in virtual time: exact for every collective, one contribution per leaf, bits
// that no shape of the tree changes, and ends that reach everybody.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "tests/sim/job.h"

namespace millrace::sim {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce,     Collective::kReduce,    Collective::kBroadcast,
                               Collective::kReduceScatter, Collective::kAllGather, Collective::kBarrier};

struct Shape {
  uint16_t hosts = 8, leaves = 2, spines = 1;
  bool core = false, ipv6 = false;
};

FabricConfig fabric_of(const Shape& shape, uint64_t seed = 1) {
  FabricConfig f;
  f.seed = seed;
  f.hosts = shape.hosts, f.leaves = shape.leaves, f.spines = shape.spines;
  f.tree = true, f.core = shape.core, f.tree_ipv6 = shape.ipv6;
  f.host_link.delay = f.trunk.delay = std::chrono::microseconds(1);
  f.trunk.gbit = 100;
  f.engine.mtu = 256;
  f.engine.segment_bytes = 960;
  return f;
}

// A group of all hosts, rank r on host order[r].
class Tree {
 public:
  explicit Tree(const FabricConfig& config, std::vector<uint16_t> order = {}, uint8_t stripes = 1)
      : config_(config), fabric_(config), order_(std::move(order)), stripes_(stripes) {
    for (uint16_t h = 0; order_.size() < config.hosts && h == order_.size(); h++) order_.push_back(h);
    for (uint16_t r = 0; r < order_.size(); r++) comms.push_back(&join(r));
  }
  Communicator& join(uint16_t rank, uint8_t key = 1) {
    host::CommunicatorConfig c;
    c.key.fill(key);
    c.rank = rank, c.world = static_cast<uint16_t>(order_.size());
    c.switch_address = fabric_.address(order_[rank] % config_.leaves, false);
    c.mtu = config_.engine.mtu;
    c.stripes = stripes_;
    return host(rank).join(c);
  }
  Host& host(uint16_t rank) { return fabric_.host(order_[rank]); }
  Fabric& fabric() { return fabric_; }
  Time now() const { return fabric_.now(); }
  template <typename Done>
  bool run(Done done, Time limit = seconds(60)) {
    for (uint16_t h = 0; h < fabric_.hosts(); h++) fabric_.network().touch(fabric_.host(h));
    return fabric_.network().run(done, limit);
  }
  bool start() {
    return run([&] { return all_running(comms); });
  }
  void submit(Job& job, uint16_t rank) {
    comms[rank]->submit(job.operation[rank].get(), now());
    host(rank).pump(now());
  }
  void run_job(Job& job) {
    job.prepare(static_cast<uint16_t>(comms.size()));
    for (uint16_t r = 0; r < comms.size(); r++) submit(job, r);
    ASSERT_TRUE(run([&] { return job.done(); })) << "not over";
    job.check();
  }
  const aggregation::Engine& engine(uint16_t s) { return fabric_.at(s).pipeline().engine(); }
  void expect_nothing_left() {
    for (Communicator* c : comms) c->close(now());
    run([&] { return false; }, seconds(8));
    for (uint16_t s = 0; s < fabric_.switches(); s++) {
      EXPECT_EQ(engine(s).queue_pairs(), 0u) << s;
      EXPECT_EQ(engine(s).memory_reserved(), 0u) << s;
      EXPECT_EQ(fabric_.at(s).pool().in_use(), 0u) << s;
    }
  }

  std::vector<Communicator*> comms;

 private:
  FabricConfig config_;
  Fabric fabric_;
  std::vector<uint16_t> order_;
  uint8_t stripes_;
};

class Trees : public testing::TestWithParam<Collective> {};

TEST_P(Trees, AreExact) {
  const Shape shapes[] = {
      {8, 2, 1, false, false}, {5, 2, 1, false, true}, {3, 3, 1, false, false}, {9, 4, 2, true, false}};
  for (const Shape& shape : shapes) {
    // Ranks stand behind leaves as they come, so that a leaf's are scattered.
    Tree tree(fabric_of(shape));
    ASSERT_TRUE(tree.start()) << tree.comms[0]->text();
    for (const size_t count : {0, 1, 47, 48, 49, 239, 240, 241, 1200, 3000}) {
      for (const DataType type : {DataType::kF32, DataType::kBf16, DataType::kI8}) {
        for (const bool deterministic : {false, true}) {
          Job job;
          job.collective = GetParam();
          job.count = job.sharded() ? count * shape.hosts : count;
          job.type = type;
          job.in_place = count % 2;
          job.deterministic = deterministic;
          job.root = static_cast<uint16_t>(count % shape.hosts);
          job.seed = count + 1;
          if (deterministic && !job.reduces()) continue;
          SCOPED_TRACE(testing::Message() << shape.hosts << " hosts, " << shape.leaves << " leaves, " << count
                                          << " elements of " << aggregation::name(type) << ", root "
                                          << job.root << (deterministic ? ", deterministic" : ""));
          tree.run_job(job);
          if (HasFatalFailure()) return;
        }
      }
    }
    tree.expect_nothing_left();
  }
}

INSTANTIATE_TEST_SUITE_P(All, Trees, testing::ValuesIn(kAll), [](const auto& instance) {
  std::string name(aggregation::name(instance.param));
  std::erase(name, '-');
  return name;
});

TEST(Tree, TheRootIsTheLowestSwitchWhereAllRanksAre) {
  FabricConfig f = fabric_of({4, 2, 1, false, false});
  Tree tree(f, {0, 2});  // hosts 0 and 2 stand behind leaf 0
  ASSERT_TRUE(tree.start());
  Job job;
  job.count = 1000;
  tree.run_job(job);
  EXPECT_EQ(tree.engine(0).groups(tree.now()).at(0).parent, "");
  tree.run([] { return false; }, seconds(3));
  EXPECT_TRUE(tree.engine(2).groups(tree.now()).empty())
      << "the spine keeps a group that it is not needed for";
  EXPECT_EQ(tree.engine(2).counters().segments, 0u);
  tree.expect_nothing_left();
}

// A leaf's uplink carries what one host's link does, whatever the number of its hosts; accumulators of sums
// are twice as wide as bf16, those of maxima are not.
TEST(Tree, AnUplinkCarriesOneContribution) {
  FabricConfig f = fabric_of({16, 2, 1, false, false});
  f.engine.mtu = 4096;
  f.engine.segment_bytes = 16320;
  Tree tree(f);
  ASSERT_TRUE(tree.start());
  const uint32_t trunk_up = 2 * f.hosts,
                 trunk_down = trunk_up + 1;  // of leaf 0: wires are made in this order
  for (const auto& [type, op, wide] : {std::tuple{DataType::kF32, ReduceOp::kSum, 1.0},
                                       {DataType::kBf16, ReduceOp::kSum, 2.0},
                                       {DataType::kBf16, ReduceOp::kMax, 1.0}}) {
    auto bytes = [&](uint32_t link) {
      return static_cast<double>(tree.fabric().network().stats(link).bytes);
    };
    const double before[] = {bytes(tree.fabric().uplink(0)), bytes(trunk_up), bytes(trunk_down)};
    Job job;
    job.count = (4 << 20) / aggregation::element_bytes(type);
    job.type = type;
    job.op = op;
    tree.run_job(job);
    if (HasFatalFailure()) return;
    const double host = bytes(tree.fabric().uplink(0)) - before[0];
    EXPECT_NEAR((bytes(trunk_up) - before[1]) / host, wide, 0.03);
    EXPECT_NEAR((bytes(trunk_down) - before[2]) / host, 1, 0.03);
  }
}

// f32 sums whose last bits depend on the order: whatever comes when and wherever ranks stand, the bits are
// those of the bracketing that NUMERICS.md documents.
TEST(Tree, DeterministicSumsHaveTheBitsOfTheBracketing) {
  constexpr uint16_t kWorld = 7;
  constexpr size_t kCount = 300;
  auto value = [](uint16_t rank, size_t i) {
    return static_cast<float>(value_of(3, rank, i)) *
               std::ldexp(1.0F, static_cast<int>((rank * 7 + i) % 23)) +
           0.1F;
  };
  std::vector<float> right(kCount), in_turn(kCount);
  for (size_t i = 0; i < kCount; i++) {
    float v[kWorld];
    for (uint16_t r = 0; r < kWorld; r++) v[r] = value(r, i);
    right[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6]);
    for (uint16_t r = 0; r < kWorld; r++) in_turn[i] += v[r];
  }
  ASSERT_NE(std::memcmp(right.data(), in_turn.data(), kCount * sizeof(float)), 0);
  const Shape shapes[] = {{7, 1, 1, false, false}, {7, 2, 1, false, false}, {7, 3, 1, false, true},
                          {7, 7, 1, false, false}, {7, 4, 2, true, false},  {7, 3, 3, true, false}};
  const char* asked = std::getenv("MILLRACE_ORDERS");
  const int orders = asked ? std::atoi(asked) : 60;
  Random random(77);
  std::set<std::vector<float>> others;
  for (int n = 0; n < orders; n++) {
    const Shape& shape = shapes[static_cast<size_t>(n) % std::size(shapes)];
    std::vector<uint16_t> order;
    for (uint16_t h = 0; h < kWorld; h++) order.push_back(h);
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
    Tree tree(fabric_of(shape, random.next()), order, static_cast<uint8_t>(1 + n % 3));
    ASSERT_TRUE(tree.start()) << tree.comms[0]->text();
    for (const bool deterministic : {true, false}) {
      Job job;
      job.count = kCount;
      job.deterministic = deterministic;
      job.prepare(kWorld);
      for (uint16_t r = 0; r < kWorld; r++)
        for (size_t i = 0; i < kCount; i++) store(DataType::kF32, job.send[r].data() + i * 4, value(r, i));
      std::vector<std::pair<uint64_t, uint16_t>> when;
      for (uint16_t r = 0; r < kWorld; r++) when.push_back({random.below(50), r});
      std::sort(when.begin(), when.end());
      for (const auto& [at, r] : when) {
        tree.run([] { return false; }, std::chrono::microseconds(at));
        tree.submit(job, r);
      }
      ASSERT_TRUE(tree.run([&] { return job.done(); }));
      for (uint16_t r = 0; r < kWorld; r++) {
        ASSERT_EQ(job.operation[r]->status, MR_OK) << job.operation[r]->text;
        if (deterministic) {
          ASSERT_EQ(std::memcmp(job.recv[r].data(), right.data(), kCount * 4), 0)
              << "rank " << r << ", " << shape.leaves << " leaves, order " << n;
        } else if (r == 0) {
          std::vector<float> got(kCount);
          std::memcpy(got.data(), job.recv[r].data(), kCount * 4);
          others.insert(got);
        }
      }
    }
  }
  EXPECT_GT(others.size(), 5u) << "the order did not matter, so this has shown nothing";
}

TEST(Tree, IsExactOnABadNetwork) {
  for (const bool core : {false, true}) {
    Tree tree(fabric_of({9, 4, core ? uint16_t{2} : uint16_t{1}, core, false}, 5), {}, 2);
    ASSERT_TRUE(tree.start());
    LinkFaults bad;
    bad.loss = bad.duplicate = bad.reorder = 5000;  // ppm
    bad.reorder_max = std::chrono::microseconds(50);
    Network& net = tree.fabric().network();
    for (uint32_t link = 0; link < net.links(); link++) net.faults(link) = bad;
    for (const bool deterministic : {false, true}) {
      for (const DataType type : {DataType::kF32, DataType::kF16}) {
        Job job;
        job.count = 20000;
        job.type = type;
        job.deterministic = deterministic;
        tree.run_job(job);
        if (HasFatalFailure()) return;
      }
    }
    uint64_t again = 0;
    for (uint16_t s = 0; s < tree.fabric().switches(); s++)
      again += tree.engine(s).counters().retransmitted_packets;
    EXPECT_GT(again, 0u);
    for (uint32_t link = 0; link < net.links(); link++) net.faults(link) = {};
    tree.expect_nothing_left();
  }
}

// Everybody hears of it, in its words.
TEST(Tree, AnyEndReachesAllNamingRanks) {
  struct Case {
    const char* what;
    std::function<void(Tree&)> strike;
    std::function<std::string(uint16_t rank)> text;  // what each rank's error has in it; empty: it is gone
  };
  // Ranks 0, 2, 4, 6 stand behind leaf 0.
  const Case cases[] = {
      {"host", [](Tree& t) { t.fabric().host(3).crash(); },
       [](uint16_t rank) { return rank == 3 ? "" : "rank 3 (10.77.2.11)"; }},
      {"leaf", [](Tree& t) { t.fabric().restart_switch(1, false); },
       [](uint16_t rank) { return rank % 2 ? "10.77.2.1" : "the switch 10.77.2.1 (ranks 1, 3, 5, 7)"; }},
      {"spine", [](Tree& t) { t.fabric().restart_switch(2, false); },
       [](uint16_t rank) {
         return std::string(
                    "the parent switch 10.88.0.1 has not acknowledged anything for 5 s; behind it: ranks ") +
                (rank % 2 ? "0, 2, 4, 6" : "1, 3, 5, 7");
       }},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    Tree tree(fabric_of({8, 2, 1, false, false}));
    ASSERT_TRUE(tree.start());
    Job job;
    job.count = 200000;
    job.prepare(8);
    for (uint16_t r = 0; r < 8; r++) tree.submit(job, r);
    tree.run([] { return false; }, std::chrono::microseconds(300));
    ASSERT_FALSE(job.done());
    const Time struck = tree.now();
    c.strike(tree);
    auto told = [&](uint16_t r) { return c.text(r).empty() || job.operation[r]->done; };
    ASSERT_TRUE(tree.run([&] {
      for (uint16_t r = 0; r < 8; r++)
        if (!told(r)) return false;
      return true;
    }));
    EXPECT_LT(tree.now() - struck, seconds(8));
    for (uint16_t r = 0; r < 8; r++) {
      if (c.text(r).empty()) continue;
      EXPECT_NE(job.operation[r]->status, MR_OK);
      EXPECT_NE(job.operation[r]->text.find(c.text(r)), std::string::npos)
          << "rank " << r << ": " << job.operation[r]->text;
    }
    tree.run([] { return false; }, seconds(10));
    for (uint16_t s = 0; s < 3; s++) {
      EXPECT_TRUE(tree.engine(s).groups(tree.now()).empty()) << s;
      EXPECT_EQ(tree.engine(s).memory_reserved(), 0u) << s;
      EXPECT_EQ(tree.fabric().at(s).pool().in_use(), 0u) << s;
    }
  }
}

TEST(Tree, DisagreementIsJudgedAcrossLeaves) {
  Tree tree(fabric_of({8, 2, 1, false, false}));
  ASSERT_TRUE(tree.start());
  Job job;
  job.count = 1000;
  job.prepare(8);
  for (uint16_t r = 1; r < 8; r += 2) job.operation[r]->op = ReduceOp::kMax;
  job.operation[5]->op = ReduceOp::kMax;
  for (uint16_t r = 0; r < 8; r++) tree.submit(job, r);
  ASSERT_TRUE(tree.run([&] { return job.done(); }));
  for (uint16_t r = 0; r < 8; r++) {
    EXPECT_EQ(job.operation[r]->status, MR_ERR_MISMATCH) << job.operation[r]->text;
    EXPECT_NE(job.operation[r]->text.find("ranks 1, 3, 5, 7 operator max, ranks 0, 2, 4, 6 sum"),
              std::string::npos)
        << job.operation[r]->text;
  }
}

// The first `ranks` of `world` join behind two leaves in turn, and all of them fail with these words.
void expect_refused(Fabric& fabric, uint16_t ranks, uint16_t world, const std::string& words) {
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < ranks; r++) {
    host::CommunicatorConfig c;
    c.rank = r, c.world = world;
    c.switch_address = fabric.address(r % 2, false);
    c.mtu = 256;
    comms.push_back(&fabric.host(r).join(c));
  }
  auto failed = [](Communicator* c) { return c->state() == Communicator::State::kFailed; };
  ASSERT_TRUE(
      fabric.network().run([&] { return std::all_of(comms.begin(), comms.end(), failed); }, seconds(20)));
  for (Communicator* c : comms) EXPECT_NE(c->text().find(words), std::string::npos) << c->text();
}

TEST(Tree, WhoIsMissingIsSaidByTheRoot) {
  FabricConfig f = fabric_of({8, 2, 1, false, false});
  f.engine.join_timeout = seconds(3);
  Fabric fabric(f);
  expect_refused(fabric, 6, 8, "ranks missing after the join time-out of 3 s: 6, 7");
}

TEST(Tree, TheParentsRefusalIsPassedOn) {
  Fabric fabric(fabric_of({4, 2, 1, false, false}));
  fabric.at(2).act([](switching::Pipeline& p, Time now, FrameList& out) { p.shutdown(now, out); });
  expect_refused(fabric, 4, 4, "the parent switch 10.88.0.1: the switch is shutting down");
}

// A child that begins anew takes the place of what it was; its connections are accounted for once.
TEST(Tree, ALeafThatIsRestartedWhileAGroupFormsTakesItsPlace) {
  FabricConfig f = fabric_of({4, 2, 1, false, false});
  Fabric fabric(f);
  auto join = [&](uint16_t r) {
    host::CommunicatorConfig c;
    c.rank = r, c.world = 4;
    c.switch_address = fabric.address(r % 2, false);
    c.mtu = 256;
    return &fabric.host(r).join(c);
  };
  join(0);
  join(1);  // behind the leaf that is restarted
  auto& spine = fabric.at(2).pipeline().engine();
  auto ranks_at_spine = [&] {
    std::set<std::string> all;
    for (const auto& g : spine.groups(fabric.now()))
      for (const auto& m : g.members) all.insert(m.ranks);
    return all;
  };
  ASSERT_TRUE(fabric.network().run(
      [&] {
        return ranks_at_spine() == std::set<std::string>{"rank 0", "rank 1"};
      },
      seconds(5)));
  const uint64_t memory = spine.memory_reserved();
  fabric.restart_switch(1, false);
  fabric.host(1).restart(7);
  join(3);
  ASSERT_TRUE(fabric.network().run(
      [&] {
        return ranks_at_spine() == std::set<std::string>{"rank 0", "rank 3"};
      },
      seconds(20)));
  EXPECT_EQ(spine.memory_reserved(), memory);
}

}  // namespace
}  // namespace millrace::sim
