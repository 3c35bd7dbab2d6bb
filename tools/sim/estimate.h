// The planner's question: how long must a collective take at best, by a ring of the hosts and by the network?
#pragma once

#include <cstdint>
#include <string>

#include "tools/sim/check/sum_check.h"

namespace millrace::sim {

struct EstimateInput {
  int collective = check::kAllReduce;
  uint64_t bytes = 64 << 20;  // of the whole vector
  unsigned hosts = 8;
  double gbit = 100;      // of each host's link
  double latency_us = 2;  // one way, host to switch and on to a host: propagation and what switches add
  unsigned mtu = 4096;    // RoCE path MTU
  uint64_t window_bytes = 4 * 65472;  // outstanding, of all stripes
};

struct Estimate {
  // nccl-tests' factors: 2(n−1)/n·S/B of an all-reduce, half of that where there are shards, S/B to or from a
  // root; and a latency for each of its steps, 2(n−1) or half of that.
  double ring_us = 0;
  double network_us = 0;  // S/B, of an all-gather (n−1)/n·S/B, and twice half of the latency; with headers,
                          // and held by the window if it is small
  double header_share = 0;  // of what crosses the wire
  bool window_bound = false;
};

Estimate estimate(const EstimateInput& in);
std::string describe(const EstimateInput& in, const Estimate& e);

}  // namespace millrace::sim
