// Groups over trees of switches in virtual time: exact for every collective, one contribution per leaf, bits that
// no shape of the tree changes, and ends that reach everybody.
#include <gtest/gtest.h>

#include <map>
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
  const Shape shapes[] = {{8, 2, 1, false, false}, {5, 2, 1, false, true}, {3, 3, 1, false, false}, {9, 4, 2, true, false}};
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
                                          << " elements of " << aggregation::name(type) << ", root " << job.root
                                          << (deterministic ? ", deterministic" : ""));
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
  EXPECT_TRUE(tree.engine(2).groups(tree.now()).empty()) << "the spine keeps a group that it is not needed for";
  EXPECT_EQ(tree.engine(2).counters().segments, 0u);
  tree.expect_nothing_left();
}

}  // namespace
}  // namespace millrace::sim
