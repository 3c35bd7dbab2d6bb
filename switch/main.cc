// millrace-switch: reads the configuration, brings DPDK, ports and sockets up, and runs the worker on the
// main thread until a signal ends it.
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_log.h>
#include <sched.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "roce/error.h"
#include "switch/config.h"
#include "switch/control.h"
#include "switch/worker.h"

namespace millrace::switching {
namespace {

volatile std::sig_atomic_t signals = 0;

// Blocks the signals that end the switch for the threads that are started while it lives; afterwards they
// reach the main thread only, whose sleep they interrupt.
class SignalsToMain {
 public:
  SignalsToMain() {
    struct sigaction action {};
    action.sa_handler = [](int) { signals = signals + 1; };
    sigemptyset(&set_);
    for (const int s : {SIGTERM, SIGINT}) {
      sigaction(s, &action, nullptr);
      sigaddset(&set_, s);
    }
    std::signal(SIGPIPE, SIG_IGN);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  void unblock() { pthread_sigmask(SIG_UNBLOCK, &set_, nullptr); }

 private:
  sigset_t set_;
};

bool is_pci(const std::string& device) {
  unsigned domain, bus, slot, function;
  // Further devargs may follow the address.
  return std::sscanf(device.c_str(), "%4x:%2x:%2x.%1x", &domain, &bus, &slot, &function) == 4 ||
         std::sscanf(device.c_str(), "%2x:%2x.%1x", &bus, &slot, &function) == 3;
}

bool hugepages_free() {
  std::error_code error;
  for (const auto& size : std::filesystem::directory_iterator("/sys/kernel/mm/hugepages", error)) {
    unsigned long pages = 0;
    if (std::ifstream(size.path() / "free_hugepages") >> pages && pages > 0) return true;
  }
  return false;
}

// EAL pins its threads to one CPU each by default. Ours may use every CPU that the process may, unless the
// configuration names one.
std::string lcores(const Config& config) {
  if (config.lcore) return "0@" + std::to_string(*config.lcore);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  sched_getaffinity(0, sizeof(cpus), &cpus);
  std::string list;
  for (int i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &cpus)) list += (list.empty() ? "" : ",") + std::to_string(i);
  return "0@(" + list + ")";
}

std::vector<std::string> eal_arguments(const Config& config) {
  std::vector<std::string> args = {"millrace-switch", "--no-telemetry"};
  auto given = [&](std::initializer_list<std::string_view> names) {
    for (const std::string& arg : config.eal)
      for (const std::string_view name : names)
        if (arg == name || arg.starts_with(std::string(name) + "=")) return true;
    return false;
  };
  bool pci = false;
  for (const PortConfig& port : config.ports) {
    if (!is_pci(port.device)) continue;
    pci = true;
    args.insert(args.end(), {"-a", port.device});
  }
  if (!pci) args.insert(args.end(), {"--no-pci", "--iova-mode=va"});
  if (!given({"--lcores", "-l", "-c"})) args.push_back("--lcores=" + lcores(config));
  if (!given({"--log-level"}))
    args.push_back(config.log_level == "debug" || config.log_level == "trace" ? "--log-level=info"
                                                                              : "--log-level=warning");
  bool huge = !given({"--no-huge"});
  if (huge && !given({"-m", "--socket-mem"})) {
    // Frames, their bookkeeping, and room for what the devices and DPDK itself need.
    const uint64_t frames = (uint64_t{config.frame_count} + config.spill_frames) * (config.frame_room + 512u);
    const std::string megabytes = std::to_string((frames >> 20) + 128);
    huge = hugepages_free();
    if (!huge) {
      args.push_back("--no-huge");
      spdlog::info("no free hugepages: running on {} MiB of ordinary pages", megabytes);
    }
    args.insert(args.end(), {"-m", megabytes});
  }
  // Nothing is left on the disk either way; EAL refuses the former without hugepages.
  args.push_back(huge ? "--in-memory" : "--no-shconf");
  args.insert(args.end(), config.eal.begin(), config.eal.end());
  return args;
}

class Eal {
 public:
  explicit Eal(const Config& config) {
    rte_openlog_stream(stderr);
    std::vector<std::string> args = eal_arguments(config);
    std::vector<char*> raw;
    std::string line;
    for (std::string& arg : args) {
      raw.push_back(arg.data());
      line += " " + arg;
    }
    spdlog::debug("EAL:{}", line);
    if (rte_eal_init(static_cast<int>(raw.size()), raw.data()) < 0)
      throw Error(ErrorCode::kSystem,
                  std::string("DPDK's EAL does not start (") + rte_strerror(rte_errno) + ") with:" + line);
  }
  ~Eal() { rte_eal_cleanup(); }
  Eal(const Eal&) = delete;
  Eal& operator=(const Eal&) = delete;
};

void print_nonzero(const nlohmann::json& j, const std::string& path) {
  for (const auto& [key, value] : j.items()) {
    const std::string name = path.empty() ? key : path + "." + key;
    if (value.is_object()) {
      print_nonzero(value, name);
    } else if (value.is_number() && value != 0) {
      std::printf("  %-44s %s\n", name.c_str(), value.dump().c_str());
    }
  }
}

std::string ready_line(const Config& config) {
  std::string line =
      "millrace-switch: ready " + config.name + " mac " + config.engine.mac.to_string() + " addresses";
  for (const IpAddress& a : config.engine.addresses) line += " " + a.to_string();
  line += " ports";
  for (const PortConfig& p : config.ports) line += " " + p.name;
  return line;
}

void run(const Config& config) {
  for (const std::string& note : config.notes) spdlog::warn("{}", note);
  SignalsToMain to_main;
  cpu_set_t all_cpus;
  sched_getaffinity(0, sizeof(all_cpus), &all_cpus);
  Eal eal(config);
  MbufPool pool(config.frame_count + config.spill_frames, config.frame_room);

  // Threads inherit the affinity of the one that starts them; only the worker is to be pinned.
  cpu_set_t worker_cpus;
  sched_getaffinity(0, sizeof(worker_cpus), &worker_cpus);
  sched_setaffinity(0, sizeof(all_cpus), &all_cpus);
  Captures captures(config);
  CommandRing ring;
  Worker worker(config, pool, captures, ring);
  for (const std::string& note : worker.notes()) spdlog::info("{}", note);
  Control control(config, ring);
  sched_setaffinity(0, sizeof(worker_cpus), &worker_cpus);

  to_main.unblock();
  std::printf("%s\n", ready_line(config).c_str());
  std::fflush(stdout);
  worker.run(&signals);

  Snapshot last = worker.snapshot();
  worker.stop();
  captures.finish();
  for (size_t i = 0; i < last.ports.size(); i++) last.ports[i].capture = captures.port_counters(i);
  last.capture = captures.all_counters();
  std::printf("millrace-switch: %s ends after %.1f s; counters that are not zero:\n", config.name.c_str(),
              std::chrono::duration<double>(last.uptime).count());
  print_nonzero(counters_json(last), "");
  std::fflush(stdout);
}

int main(int argc, char** argv) {
  CLI::App app("The Millrace switch: forwards RoCEv2 and reduces in the network.", "millrace-switch");
  std::string file;
  bool check = false;
  app.set_version_flag("--version", "millrace-switch " MILLRACE_VERSION);
  app.add_option("--config", file, "configuration, a YAML file")->required();
  app.add_flag("--check", check, "only say whether the configuration is right");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  try {
    const Config config = load_config(file);
    if (check) {
      std::printf("%s: right\n", file.c_str());
      return 0;
    }
    spdlog::set_default_logger(spdlog::stderr_logger_mt("switch"));
    spdlog::set_pattern("millrace-switch: %l: %v");
    spdlog::set_level(spdlog::level::from_str(config.log_level));
    run(config);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "millrace-switch: %s\n", e.what());
    return 1;
  }
}

}  // namespace
}  // namespace millrace::switching

int main(int argc, char** argv) { return millrace::switching::main(argc, argv); }
