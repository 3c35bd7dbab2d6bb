// What the simulator's tests share: jobs whose results a naive loop knows, and groups that run them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <memory>

#include "tools/sim/cluster.h"

namespace millrace::sim {

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
inline int value_of(uint64_t seed, uint16_t rank, size_t i) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + rank * 0xBF58476D1CE4E5B9ull + i * 0x94D049BB133111EBull;
  x ^= x >> 31;
  x *= 0xD6E8FEB86659FD93ull;
  return static_cast<int>((x >> 40) % 15) - 7;
}

inline void store(DataType type, uint8_t* at, double v) {
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
        uint8_t right[8], other_zero[8];
        store(type, right, expected);
        // Of two zeros, either sign is right: the order of arrival decides which comes of a sum.
        store(type, other_zero, -0.0);
        const uint8_t* got = operation[r]->recv + i * element;
        ASSERT_TRUE(std::memcmp(right, got, element) == 0 ||
                    (expected == 0 && std::memcmp(other_zero, got, element) == 0))
            << "rank " << r << " element " << i;
      }
      if (!in_place) {
        ASSERT_EQ(recv[r].back(), 0xA5) << "written past the end";
      }
    }
  }
};

inline bool all_running(const std::vector<Communicator*>& comms) {
  return std::all_of(comms.begin(), comms.end(),
                     [](Communicator* c) { return c->state() == Communicator::State::kRunning; });
}

inline std::vector<Communicator*> join_all(Cluster& c, uint16_t world, uint8_t key = 1, uint8_t stripes = 1) {
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < world; r++) {
    auto config = c.communicator(r, world, key);
    config.stripes = stripes;
    comms.push_back(&c.host(r).join(config));
  }
  return comms;
}

inline void run_job(Cluster& c, std::vector<Communicator*>& comms, Job& job, Time limit = seconds(60)) {
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

inline void expect_nothing_left(Cluster& c) {
  c.run([&] { return c.pipeline().engine().groups(c.now()).empty(); }, seconds(10));
  EXPECT_EQ(c.pipeline().engine().queue_pairs(), 0u);
  EXPECT_EQ(c.pipeline().engine().memory_reserved(), 0u);
  EXPECT_EQ(c.switch_pool().in_use(), 0u);
}

}  // namespace millrace::sim
