// A described network and what a job does on it, from a YAML file: see SIM.md.
#pragma once

#include <string>
#include <vector>

#include "tools/sim/check/sum_check.h"
#include "tools/sim/fabric.h"

namespace millrace::sim {

struct ScenarioStep {
  int collective = check::kAllReduce;
  bool deterministic = false, in_place = false;
  int type = 9, op = 1;
  uint16_t root = 0;
  uint64_t bytes = 0;  // of the whole vector: what a reduce-scatter gives, what an all-gather gets
  uint32_t repeat = 1;
  Time gap{};  // computing before each
};

struct ScenarioGroup {
  std::string name;
  std::vector<uint16_t> hosts;  // by rank
  uint16_t where = 0;
  bool v6 = false;
  uint8_t stripes = 1;
  uint32_t in_flight = 1;
  std::vector<ScenarioStep> steps;
};

struct Scenario {
  std::string name;
  FabricConfig fabric;
  LinkFaults wire;
  std::vector<ScenarioGroup> groups;
};

// Every mistake is a millrace::Error that names the file, the line and the key.
Scenario load_scenario(const std::string& file);
Scenario parse_scenario(const std::string& text, const std::string& name);

struct StepReport {
  std::string group, what;
  uint64_t bytes = 0;
  std::vector<double> us;  // each rank's, from its call to its completion
};
struct LinkReport {
  std::string name;
  double gbit = 0, utilisation = 0;
  uint64_t frames = 0, bytes = 0, queue_peak = 0, tail_drops = 0, lost = 0;
};
struct ScenarioReport {
  std::string name, trouble;  // trouble: what went wrong, if anything
  double duration_us = 0;     // from the last member's START to the last completion
  uint64_t frames = 0, retransmitted = 0, naks = 0, rnr_naks = 0, timeouts = 0, wrong = 0;
  std::vector<StepReport> steps;
  std::vector<LinkReport> links;
};

ScenarioReport run_scenario(const Scenario& scenario);
std::string to_text(const ScenarioReport& report);
std::string to_json(const ScenarioReport& report);

}  // namespace millrace::sim
