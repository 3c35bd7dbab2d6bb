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
    case DataType::kI8:
      put(static_cast<int8_t>(v));
      break;
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

// One operation of one group, at all ranks. `count` is of elements of the whole vector, rounded down to a
// multiple of the ranks where that is cut into shards.
struct Job {
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  size_t count = 1;
  bool in_place = false;
  Collective collective = Collective::kAllReduce;
  uint16_t root = 0;
  bool deterministic = false;
  uint64_t seed = 1;
  std::vector<std::vector<uint8_t>> send, recv;  // of the whole vector's size at every rank, and guarded
  std::vector<std::unique_ptr<Operation>> operation;

  bool reduces() const {
    return collective == Collective::kAllReduce || collective == Collective::kReduce ||
           collective == Collective::kReduceScatter;
  }
  bool sharded() const {
    return collective == Collective::kReduceScatter || collective == Collective::kAllGather;
  }

  void prepare(uint16_t world) {
    const bool barrier = collective == Collective::kBarrier;
    const size_t element = barrier ? 1 : aggregation::element_bytes(type);
    if (barrier) count = 0;
    if (sharded()) count -= count % world;
    const size_t bytes = count * element, shard = bytes / world;
    send.resize(world), recv.resize(world);
    for (uint16_t r = 0; r < world; r++) {
      send[r].resize(bytes + 1);  // never empty, and one byte of guard
      recv[r].assign(bytes + 1, 0xA5);
      auto o = std::make_unique<Operation>();
      o->collective = collective;
      o->type = barrier ? DataType::kU8 : type;
      o->op = reduces() ? op : ReduceOp::kNone;
      const bool rooted = collective == Collective::kReduce || collective == Collective::kBroadcast;
      o->root = rooted ? root : uint16_t{0};
      o->deterministic = reduces() && deterministic;
      o->bytes = bytes;
      uint8_t* from = send[r].data();
      uint8_t* to = recv[r].data();
      if (in_place) {
        if (collective == Collective::kAllGather)
          from = to + r * shard;
        else
          to = from + (collective == Collective::kReduceScatter ? r * shard : 0);
      }
      const size_t mine = collective == Collective::kAllGather ? count / world : count;
      for (size_t i = 0; i < mine; i++) store(type, from + i * element, value_of(seed, r, i));
      o->send = from;
      o->recv = to;
      operation.push_back(std::move(o));
    }
  }
  bool done() const {
    return std::all_of(operation.begin(), operation.end(), [](auto& o) { return o->done; });
  }
  // What a rank finds as the i-th element of its result.
  double expected(size_t i, uint16_t rank) const {
    const auto world = static_cast<uint16_t>(operation.size());
    if (collective == Collective::kBroadcast) return value_of(seed, root, i);
    if (collective == Collective::kAllGather)
      return value_of(seed, static_cast<uint16_t>(i / (count / world)), i % (count / world));
    if (collective == Collective::kReduceScatter) i += rank * (count / world);
    double all = value_of(seed, 0, i);
    for (uint16_t k = 1; k < world; k++) {
      const double v = value_of(seed, k, i);
      all = op == ReduceOp::kSum ? all + v : op == ReduceOp::kMin ? std::min(all, v) : std::max(all, v);
    }
    return all;
  }
  void check() const {
    const size_t element = aggregation::element_bytes(type);
    for (uint16_t r = 0; r < operation.size(); r++) {
      ASSERT_EQ(operation[r]->status, MR_OK) << operation[r]->text;
      const bool has_result = collective != Collective::kReduce || r == root;
      const size_t n = !has_result                                ? 0
                       : collective == Collective::kReduceScatter ? count / operation.size()
                                                                  : count;
      for (size_t i = 0; i < n; i++) {
        const double value = expected(i, r);
        uint8_t right[8], other_zero[8];
        store(type, right, value);
        // Of two zeros, either sign is right: the order of arrival decides which comes of a sum.
        store(type, other_zero, -0.0);
        const uint8_t* got = operation[r]->recv + i * element;
        ASSERT_TRUE(std::memcmp(right, got, element) == 0 ||
                    (value == 0 && std::memcmp(other_zero, got, element) == 0))
            << aggregation::name(collective) << " of " << count << " " << aggregation::name(type)
            << (in_place ? " in place" : "") << (deterministic ? ", deterministic" : "") << ": rank " << r
            << " element " << i << " is not " << value;
      }
      // Nothing else has been written.
      if (in_place) continue;
      for (size_t i = n * element; i < recv[r].size(); i++)
        ASSERT_EQ(recv[r][i], 0xA5) << "rank " << r << ": written at " << i;
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
