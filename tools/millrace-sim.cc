// The shipping code in virtual time: seeds with faults under checkers, described networks, and estimates. See
// tools/sim/SIM.md.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "aggregation/datatype.h"
#include "roce/error.h"
#include "switch/config.h"
#include "tools/sim/estimate.h"
#include "tools/sim/many.h"
#include "tools/sim/scenario.h"

namespace millrace::sim {
namespace {

struct Options {
  std::optional<uint64_t> seed;
  uint64_t seeds = 0, from = 1;
  unsigned jobs = default_jobs();
  std::string scenario;
  bool estimate = false, json = false, frames = false;
  std::string collective = "all-reduce", type = "f32", size = "64MiB";
  EstimateInput plan;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int run_seeds(const Options& o) {
  const bool one = o.seed.has_value();
  ManyOptions m;
  m.from = one ? *o.seed : o.from;
  m.seeds = one ? 1 : o.seeds;
  m.jobs = static_cast<unsigned>(std::min<uint64_t>(o.jobs, m.seeds));
  if (one)
    std::printf("seed %llu: %s\n", static_cast<unsigned long long>(m.from),
                describe(draw_plan(m.from)).c_str());
  if (one && o.frames) {
    Arena arena;
    run_seed(m.from, arena, {}, [](const std::string& line) { std::puts(line.c_str()); });
  }
  const auto start = std::chrono::steady_clock::now();
  if (::isatty(STDERR_FILENO) && !one)
    m.progress = [&](uint64_t done) {
      if (done % 20 == 0)
        std::fprintf(stderr, "\r%llu of %llu seeds, %.0f s ", static_cast<unsigned long long>(done),
                     static_cast<unsigned long long>(m.seeds), seconds_since(start));
    };
  const ManyResult r = run_many(m);
  if (m.progress) std::fprintf(stderr, "\r%40s\r", "");
  for (const Failure& f : r.failures) {
    std::printf("FAILED seed %llu, replay: %s\n%s\n", static_cast<unsigned long long>(f.seed),
                replay_command(f.seed).c_str(), describe(draw_plan(f.seed)).c_str());
    for (const std::string& t : f.texts) std::printf("%s", t.c_str());
  }
  std::printf("%s", report(r, seconds_since(start)).c_str());
  return r.failures.empty() ? 0 : 1;
}

int run_described(const Options& o) {
  const ScenarioReport r = run_scenario(load_scenario(o.scenario));
  std::printf("%s", (o.json ? to_json(r) : to_text(r)).c_str());
  if (!r.trouble.empty()) std::fprintf(stderr, "millrace-sim: %s\n", r.trouble.c_str());
  return r.trouble.empty() ? 0 : 1;
}

int run_estimate(Options o) {
  auto bytes = switching::parse_size(o.size);
  if (!bytes)
    throw Error(ErrorCode::kUsage, "--size: '" + o.size + "' is no size (write bytes, KiB, MiB or GiB)");
  const auto type = aggregation::parse_data_type(o.type);
  if (!type) throw Error(ErrorCode::kUsage, "--type: '" + o.type + "' is none of u8 … f64");
  while (check::collective_name(o.plan.collective) != o.collective)
    if (++o.plan.collective > check::kBarrier)
      throw Error(ErrorCode::kUsage, "--collective: '" + o.collective + "' is none of all-reduce … barrier");
  if (o.plan.collective == check::kBarrier) *bytes = 0;
  const uint64_t element = aggregation::element_bytes(*type);
  o.plan.bytes = *bytes / element * element;
  const Estimate e = estimate(o.plan);
  if (o.json)
    std::printf("%s\n", nlohmann::json{{"collective", o.collective},
                                       {"bytes", o.plan.bytes},
                                       {"elements", o.plan.bytes / element},
                                       {"hosts", o.plan.hosts},
                                       {"gbit", o.plan.gbit},
                                       {"ring_us", e.ring_us},
                                       {"network_us", e.network_us},
                                       {"window_bound", e.window_bound}}
                            .dump(2)
                            .c_str());
  else
    std::printf("%llu elements of %s; %s", static_cast<unsigned long long>(o.plan.bytes / element),
                o.type.c_str(), describe(o.plan, e).c_str());
  return 0;
}

int run(int argc, char** argv) {
  Options o;
  CLI::App app("The shipping code in virtual time: seeds with faults, described networks, estimates.",
               "millrace-sim");
  app.set_version_flag("--version", "millrace-sim " MILLRACE_VERSION);
  auto* mode = app.add_option_group("mode");
  mode->add_option("--seed", o.seed, "one run, with everything drawn from this seed");
  mode->add_option("--seeds", o.seeds, "so many runs")->check(CLI::PositiveNumber);
  mode->add_option("--scenario", o.scenario, "runs the network and the traces that this YAML file describes");
  mode->add_flag("--estimate", o.estimate,
                 "what a collective must take at best, by a ring and in the network");
  mode->require_option(1);
  app.add_option("--from", o.from, "the first seed of --seeds")->capture_default_str();
  app.add_option("--jobs", o.jobs, "processes for --seeds")
      ->check(CLI::Range(1u, 256u))
      ->capture_default_str();
  app.add_flag("--frames", o.frames, "of --seed: every frame, as a line");
  app.add_flag("--json", o.json, "the report of --scenario or --estimate as JSON");
  app.add_option("--collective", o.collective, "--estimate: all-reduce … barrier")->capture_default_str();
  app.add_option("--type", o.type, "--estimate: datatype")->capture_default_str();
  app.add_option("--size", o.size, "--estimate: bytes of the whole vector")->capture_default_str();
  app.add_option("--hosts", o.plan.hosts, "--estimate")->check(CLI::Range(1u, 65535u))->capture_default_str();
  app.add_option("--gbit", o.plan.gbit, "--estimate: rate of a host's link")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--latency-us", o.plan.latency_us, "--estimate: one way, from host to host")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--mtu", o.plan.mtu, "--estimate: RoCE path MTU")
      ->check(CLI::Range(256u, 4096u))
      ->capture_default_str();
  app.add_option("--window-bytes", o.plan.window_bytes, "--estimate: outstanding, of all stripes")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    if (o.estimate) return run_estimate(o);
    if (!o.scenario.empty()) return run_described(o);
    return run_seeds(o);
  } catch (const Error& e) {
    std::fprintf(stderr, "millrace-sim: %s\n", e.what());
    return e.code() == ErrorCode::kUsage || e.code() == ErrorCode::kConfig ? 2 : 1;
  }
}

}  // namespace
}  // namespace millrace::sim

int main(int argc, char** argv) { return millrace::sim::run(argc, argv); }
