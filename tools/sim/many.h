// Many seeds, in processes of their own: a run that dies by an assertion or a signal is a failed seed like
// any other, and several processors are used.
#pragma once

#include "tools/sim/swarm.h"

namespace millrace::sim {

struct Failure {
  uint64_t seed = 0;
  std::vector<std::string> texts;
};

struct ManyOptions {
  uint64_t from = 1, seeds = 1;
  unsigned jobs = 1;
  uint64_t failures_max = 10;  // then it stops
  NicChooser nic;
  std::function<void(uint64_t done)> progress;  // empty: none
};

struct ManyResult {
  SwarmStats stats;
  std::vector<Failure> failures;  // by seed
  uint64_t trace = 0;             // of all traces, in the order of seeds
};

ManyResult run_many(const ManyOptions& options);
// As many as there are processors.
unsigned default_jobs();

// Figures of a run, for people.
std::string report(const ManyResult& result, double wall_seconds);
// "millrace-sim --seed 7", and what it is about.
std::string replay_command(uint64_t seed);

}  // namespace millrace::sim
