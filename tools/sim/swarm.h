// One run of the swarm: a plan carried out under the checkers. First a safety phase with faults; then
// everything is healed and whatever still runs must end within a bounded time; then all groups form once
// more, which must succeed; at last nothing may be left anywhere.
#pragma once

#include "tools/sim/check/books_check.h"
#include "tools/sim/check/lender_check.h"
#include "tools/sim/check/passage_check.h"
#include "tools/sim/check/wire_check.h"
#include "tools/sim/member.h"

namespace millrace::sim {

// What one or many runs did: plain numbers.
struct SwarmCounts {
  uint64_t runs = 0, operations_ok = 0, operations_failed = 0, formed_again = 0;
  std::array<uint64_t, kFaultKinds> seeds_with{};  // runs that had this kind
  std::array<uint64_t, kFaultKinds> injected{};    // frames, or events
  aggregation::Counters engine;
  roce::CmCounters cm;  // of switches
  ExactCounts exact;
  check::WireCounts wire;
  SpillStats spill;
  uint64_t rx_drops = 0, ring_drops = 0, frames_peak = 0;
  Time virtual_time{};
};
struct SwarmStats : SwarmCounts {
  std::vector<uint64_t> frames;  // by run
  std::vector<uint32_t> kinds;   // of faults, by run
  void add(const SwarmStats& other);
};

struct RunResult {
  uint64_t seed = 0, trace = 0, violations = 0;
  std::vector<std::string> texts;  // the first violations
  SwarmStats stats;
};

// A host's NIC in the swarm, by its number; empty: what the seed draws.
using NicChooser = std::function<NicFactory(uint16_t host)>;

// `dump`: is told every frame, as a line.
using Dump = std::function<void(const std::string& line)>;
RunResult run_seed(uint64_t seed, Arena& arena, const NicChooser& nic = {}, const Dump& dump = {});
RunResult run_plan(const Plan& plan, Arena& arena, const Dump& dump = {});

}  // namespace millrace::sim
