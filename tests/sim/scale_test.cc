// A star of many fast hosts against the closed form. Everything is in virtual time, so the figures are the
// same on any machine; only the wall time is the machine's.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "tests/sim/job.h"

namespace millrace::sim {
namespace {

// What one all-reduce of `bytes` must take when the window never closes: the busier direction of a host's
// link, that of the results, carries all of the buffer in frames of `mtu` payload bytes, each with Ethernet
// (14 bytes), IPv4, UDP, BTH, RETH and ICRC (20 + 8 + 12 + 16 + 4) and 24 bytes of FCS, preamble and gap;
// before it, the first chunk crosses the other direction; and both wires delay what crosses them.
double closed_form_us(double bytes, double mtu, double gbit, double delay_us) {
  const double header = 14 + 20 + 8 + 12 + 16 + 4 + 24;
  const double per_byte_us = 8e-3 / gbit;
  const double results = bytes / mtu * (mtu + header) * per_byte_us;
  return results + (mtu + header) * per_byte_us + 2 * delay_us;
}

// Every so many ranks, every so many elements.
void check_some(const Job& job, size_t ranks, size_t elements) {
  for (size_t r = 0; r < job.operation.size(); r += ranks)
    for (size_t i = 0; i < job.count; i += elements) {
      int sum = 0;
      for (uint16_t k = 0; k < job.operation.size(); k++) sum += value_of(job.seed, k, i);
      float got;
      std::memcpy(&got, job.operation[r]->recv + i * 4, 4);
      ASSERT_EQ(got, static_cast<float>(sum)) << r << " " << i;
    }
}

void run_star(uint64_t bytes) {
  const auto wall = std::chrono::steady_clock::now();
  ClusterConfig cc;
  cc.hosts = 256;
  cc.wire.gbit = 400;
  cc.wire.delay = std::chrono::microseconds(1);
  cc.engine.memory_limit = 1u << 30;
  Group g(cc);
  Job job;
  job.count = bytes / 4;
  job.prepare(cc.hosts);
  const Time start = g.cluster.now();
  g.submit(job);
  ASSERT_TRUE(g.cluster.run([&] { return job.done(); }));
  const double us = static_cast<double>((g.cluster.now() - start).count()) / 1e3;
  const double ideal = closed_form_us(static_cast<double>(bytes), cc.engine.mtu, cc.wire.gbit, 1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - wall;
  std::printf(
      "256 hosts at 400 Gb/s, %llu B: %.1f us, closed form %.1f us, ratio %.3f; %llu frames, %.1f s of "
      "wall\n",
      static_cast<unsigned long long>(bytes), us, ideal, us / ideal,
      static_cast<unsigned long long>(g.cluster.wire().frames), took.count());
  EXPECT_LT(us, 1.10 * ideal);
  EXPECT_GE(us, ideal);
  check_some(job, 85, 997);
}

TEST(Scale, AStarOf256HostsComesWithinATenthOfTheClosedFormAtOneMiB) { run_star(1u << 20); }
TEST(Scale, AStarOf256HostsComesWithinATenthOfTheClosedFormAtFourMiB) { run_star(4u << 20); }

// 1,024 hosts behind 32 leaves, 4 spines and a core. On top of the star's: each level above the leaf's is one
// more frame's time and one more wire each way, and a child sends a segment up once it has all of it.
void run_tree(uint64_t bytes) {
  const auto wall = std::chrono::steady_clock::now();
  FabricConfig f;
  f.hosts = 1024, f.leaves = 32, f.spines = 4;
  f.tree = f.core = true;
  f.host_link.gbit = f.trunk.gbit = 400;
  f.host_link.delay = f.trunk.delay = std::chrono::nanoseconds(500);
  f.engine.memory_limit = 4ull << 30;
  f.engine.segment_bytes = 16320;
  f.engine.window = 32;
  Fabric fabric(f);
  Job job;
  job.count = bytes / 4;
  job.prepare(f.hosts);
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < f.hosts; r++) {
    host::CommunicatorConfig c;
    c.rank = r, c.world = f.hosts;
    c.switch_address = fabric.address(r % f.leaves, false);
    comms.push_back(&fabric.host(r).join(c));
  }
  ASSERT_TRUE(fabric.network().run([&] { return all_running(comms); }, seconds(60))) << comms[0]->text();
  const Time start = fabric.now();
  for (uint16_t r = 0; r < f.hosts; r++) {
    comms[r]->submit(job.operation[r].get(), start);
    fabric.host(r).pump(start);
  }
  ASSERT_TRUE(fabric.network().run([&] { return job.done(); }, seconds(60)));
  const double us = static_cast<double>((fabric.now() - start).count()) / 1e3;
  const double frame = 4096 + 14 + 20 + 8 + 12 + 16 + 4 + 24, per_byte_us = 8e-3 / 400;
  const double segment = f.engine.segment_bytes + 64 + 4 * (14 + 20 + 8 + 12 + 4 + 24);
  const double levels = 2 * (segment * per_byte_us + frame * per_byte_us + 2 * 0.5);
  const double ideal = closed_form_us(static_cast<double>(bytes), 4096, 400, 0.5) + levels;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - wall;
  std::printf(
      "1,024 hosts at 400 Gb/s, three levels, %llu B: %.1f us, closed form %.1f us, ratio %.3f; %llu frames, "
      "%.1f s of wall\n",
      static_cast<unsigned long long>(bytes), us, ideal, us / ideal,
      static_cast<unsigned long long>(fabric.network().frames()), took.count());
  EXPECT_LT(us, 1.10 * ideal);
  EXPECT_GE(us, ideal);
  check_some(job, 341, 4999);
}

// With MILLRACE_FULL also 4 MiB, for which 10 GiB of memory are needed.
TEST(Scale, ATreeOf1024HostsComesWithinATenthOfTheClosedForm) {
  run_tree(1u << 20);
  if (std::getenv("MILLRACE_FULL")) run_tree(4u << 20);
}

}  // namespace
}  // namespace millrace::sim
