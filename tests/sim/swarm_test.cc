// The swarm in the ordinary run: many seeds, each with its own network, groups and faults, under checkers
// that share no code with what they judge; and that a seed is a whole run.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tools/sim/many.h"
#include "tools/sim/nic_model.h"
#include "tools/sim/strict_pools.h"

namespace millrace::sim {
namespace {

// Under a sanitizer a run costs some ten times as much.
uint64_t seeds() {
  if (const char* s = std::getenv("MILLRACE_SIM_SEEDS")) return std::strtoull(s, nullptr, 10);
  return kStrictPools ? 200 : 2000;
}

double run(const ManyOptions& o, ManyResult& result) {
  const auto start = std::chrono::steady_clock::now();
  result = run_many(o);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void expect_none(const ManyResult& result) {
  for (const Failure& f : result.failures) {
    std::string all;
    for (const std::string& t : f.texts) all += t;
    ADD_FAILURE() << "seed " << f.seed << ", replay: " << replay_command(f.seed) << "\n"
                  << describe(draw_plan(f.seed)) << "\n"
                  << all;
  }
}

TEST(Swarm, SeedsEndWithoutAViolation) {
  ManyOptions o;
  o.seeds = seeds();
  o.jobs = default_jobs();
  ManyResult result;
  const double wall = run(o, result);
  expect_none(result);
  std::printf("%s", report(result, wall).c_str());
  if (o.seeds < 200) return;
  auto& s = result.stats;
  auto median = [](auto v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
  };
  EXPECT_GE(median(s.frames), 10000u);
  EXPECT_GE(median(s.kinds), 3u);
  // A few hundred seeds need not draw them all.
  for (size_t k = 0; k < kFaultKinds && o.seeds >= 1000; k++) EXPECT_GT(s.injected[k], 0u) << kFaultNames[k];
  const ExactCounts& x = s.exact;
  for (size_t c = 1; c < x.collective.size(); c++)
    EXPECT_GT(x.collective[c], 0u) << check::collective_name(static_cast<int>(c));
  for (size_t t = 1; t < x.type.size(); t++) EXPECT_GT(x.type[t], 0u) << "type " << t;
  for (size_t k = 1; k < x.op.size(); k++) EXPECT_GT(x.op[k], 0u) << "operator " << k;
  for (const uint64_t n : {x.bfp, x.deterministic, x.combined, x.alone, x.modelled}) EXPECT_GT(n, 0u);
  // Every path that is there for a fault has been taken.
  EXPECT_GT(s.engine.naks_sent, 0u);
  EXPECT_GT(s.engine.naks_received, 0u);
  EXPECT_GT(s.engine.rnr_naks_sent, 0u);
  EXPECT_GT(s.engine.timeouts, 0u);
  EXPECT_GT(s.engine.tail_probes, 0u);
  EXPECT_GT(s.engine.groups_failed, 0u);
  EXPECT_EQ(s.engine.groups_formed >= s.engine.groups_ended, true);
  EXPECT_GT(s.engine.cnps_sent, 0u);
  EXPECT_GT(s.cm.rej_repeated, 0u);
}

TEST(Swarm, TheSameSeedIsTheSameRun) {
  Arena arena;
  for (const uint64_t seed : {3, 16, 25, 87}) {
    const RunResult a = run_seed(seed, arena), b = run_seed(seed, arena);
    EXPECT_EQ(a.trace, b.trace) << seed;
    EXPECT_EQ(a.stats.frames, b.stats.frames) << seed;
  }
}

TEST(Swarm, AnotherSeedIsAnotherRun) {
  Arena arena;
  EXPECT_NE(run_seed(1, arena).trace, run_seed(2, arena).trace);
}

// A plan by hand, for what a seed has shown once; plans drawn from seeds change as the drawing does.
class Regression : public testing::Test {
 protected:
  Regression() {
    plan.seed = 1;
    plan.fabric.seed = 1;
    plan.fabric.hosts = 4;
    plan.fabric.engine.mtu = 1024;
    plan.fabric.engine.segment_bytes = 4032;
    plan.fabric.engine.join_timeout = std::chrono::seconds(6);
    GroupPlan g;
    g.hosts = {0, 1, 2, 3};
    g.world = 4;
    for (uint64_t i = 0; i < 6; i++) {
      OperationPlan o;
      o.reduction = {9, 1, 5000 + i, 4, i};
      g.operations.push_back(o);
    }
    g.gap_max = std::chrono::milliseconds(2);
    g.join_at.assign(4, Time{});
    plan.groups.push_back(g);
    plan.heal_at = std::chrono::milliseconds(20);
  }
  SwarmCounts expect_clean() {
    Arena arena;
    const RunResult r = run_plan(plan, arena);
    for (const std::string& t : r.texts) ADD_FAILURE() << t;
    return r.stats;
  }
  void add(FaultKind kind, Time at, Time duration, uint32_t target, uint32_t rank = 0) {
    plan.faults.push_back({kind, at, duration, target, rank});
    plan.has[static_cast<size_t>(kind)] = true;
    plan.heal_at = std::max(plan.heal_at, at + duration);
  }
  Plan plan;
};

TEST_F(Regression, NothingWrongEndsWell) { expect_clean(); }

// Two ranks on each of two hosts, one of which has a NIC of the model; then one of them dies alone.
TEST_F(Regression, RanksOfAHostCombineAndAreMissedAlone) {
  plan.groups[0].hosts = {0, 1, 1, 0};
  plan.groups[0].combine = true;
  plan.fabric.nic = [](uint16_t h) { return h == 0 ? NicFactory() : NicFactory(NicModel::make); };
  plan.modelled = {1};
  EXPECT_EQ(expect_clean().exact.combined, 2 * 4 * 6u);  // and once more, in the last round
  plan.groups[0].generations = 2;
  for (const uint32_t rank : {2, 3})  // one on either host, of which one leads there; it lives on
    add(FaultKind::kRankCrash, std::chrono::milliseconds(5), Time{}, 0, rank);
  const SwarmCounts counts = expect_clean();
  EXPECT_GT(counts.injected[static_cast<size_t>(FaultKind::kRankCrash)], 0u);
  EXPECT_GT(counts.formed_again, 0u);
}

// Found by the swarm: an endpoint that had been idle for longer than the connect time-out gave a new connect
// up at once, since it counted from its last turn.
TEST_F(Regression, AnIdleEndpointConnectsAgainAfterLonger) {
  plan.groups[0].join_at.assign(4, Time{});
  plan.rest_before_final = std::chrono::seconds(40);
  expect_clean();
}

// Found by the swarm: a host that missed the announcement of a restarted switch's new MAC address asked the
// old one for all of its connect time-out.
TEST_F(Regression, ASwitchWithAnotherMacIsFoundThoughItsAnnouncementWasLost) {
  for (uint32_t h = 0; h < 4; h++)
    add(FaultKind::kFlap, std::chrono::microseconds(4990), std::chrono::milliseconds(3), h);
  add(FaultKind::kSwitchNewMac, std::chrono::milliseconds(5), Time{}, 0);
  expect_clean();
}

}  // namespace
}  // namespace millrace::sim
