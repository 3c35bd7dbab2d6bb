#include "tools/sim/many.h"

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <map>

#include "roce/error.h"

namespace millrace::sim {

namespace {

// What a worker tells: that it begins a seed, and what came of it.
struct Message {
  uint64_t seed = 0;
  bool over = false;
  uint64_t trace = 0, frames = 0;
  uint32_t kinds = 0;
  uint32_t text_bytes = 0;  // behind the message, and before the counts
  bool failed = false;
};

void write_all(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const uint8_t*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd, at, bytes);
    if (n <= 0) ::_exit(3);
    at += n, bytes -= static_cast<size_t>(n);
  }
}

[[noreturn]] void work(const ManyOptions& o, unsigned worker, int fd) {
  Arena arena;
  for (uint64_t i = worker; i < o.seeds; i += o.jobs) {
    Message m;
    m.seed = o.from + i;
    write_all(fd, &m, sizeof(m));
    const RunResult r = run_seed(m.seed, arena, o.nic);
    std::string text;
    for (const std::string& t : r.texts) text += t + "\n";
    m.over = true;
    m.trace = r.trace;
    m.frames = r.stats.frames[0], m.kinds = r.stats.kinds[0];
    m.failed = r.violations != 0;
    m.text_bytes = static_cast<uint32_t>(text.size());
    write_all(fd, &m, sizeof(m));
    write_all(fd, text.data(), text.size());
    const SwarmCounts counts = r.stats;
    write_all(fd, &counts, sizeof(counts));
  }
  ::_exit(0);
}

struct Worker {
  pid_t pid = -1;
  int fd = -1;
  std::vector<uint8_t> buffer;
  std::optional<uint64_t> running;
};

class Collector {
 public:
  explicit Collector(const ManyOptions& options) : options_(options) {}

  ManyResult run() {
    std::fflush(nullptr);
    for (unsigned w = 0; w < options_.jobs; w++) start(w);
    while (std::any_of(workers_.begin(), workers_.end(), [](auto& w) { return w.fd >= 0; })) turn();
    std::sort(result_.failures.begin(), result_.failures.end(),
              [](auto& a, auto& b) { return a.seed < b.seed; });
    check::Hash hash;
    for (const auto& [seed, trace] : traces_) hash.number(trace);
    result_.trace = hash.value();
    return std::move(result_);
  }

 private:
  void start(unsigned number) {
    int fds[2];
    if (::pipe(fds) != 0) throw Error(ErrorCode::kSystem, "no pipe to a worker could be made");
    const pid_t pid = ::fork();
    if (pid < 0) throw Error(ErrorCode::kSystem, "no worker process could be started");
    if (pid == 0) {
      for (const Worker& w : workers_) ::close(w.fd);
      ::close(fds[0]);
      work(options_, number, fds[1]);
    }
    ::close(fds[1]);
    workers_.push_back({pid, fds[0], {}, {}});
  }

  void turn() {
    std::vector<pollfd> fds;
    for (const Worker& w : workers_) fds.push_back({w.fd, POLLIN, 0});
    ::poll(fds.data(), fds.size(), -1);
    for (size_t i = 0; i < workers_.size(); i++) {
      if (fds[i].revents == 0) continue;
      Worker& w = workers_[i];
      uint8_t bytes[65536];
      const ssize_t n = ::read(w.fd, bytes, sizeof(bytes));
      if (n > 0) {
        w.buffer.insert(w.buffer.end(), bytes, bytes + n);
        take(w);
      } else {
        gone(w);
      }
    }
    if (result_.failures.size() < options_.failures_max) return;
    for (Worker& w : workers_)
      if (w.fd >= 0) {
        ::kill(w.pid, SIGKILL);
        w.running.reset();
        gone(w);
      }
  }

  void take(Worker& w) {
    for (;;) {
      Message m;
      if (w.buffer.size() < sizeof(m)) return;
      std::memcpy(&m, w.buffer.data(), sizeof(m));
      SwarmCounts counts;
      const size_t whole = sizeof(m) + (m.over ? m.text_bytes + sizeof(counts) : 0);
      if (w.buffer.size() < whole) return;
      w.running = m.seed;
      if (m.over) {
        const auto* text = reinterpret_cast<const char*>(w.buffer.data() + sizeof(m));
        if (m.failed) result_.failures.push_back({m.seed, {std::string(text, m.text_bytes)}});
        std::memcpy(&counts, text + m.text_bytes, sizeof(counts));
        SwarmStats stats;
        static_cast<SwarmCounts&>(stats) = counts;
        stats.frames = {m.frames}, stats.kinds = {m.kinds};
        result_.stats.add(stats);
        traces_[m.seed] = m.trace;
        w.running.reset();
        if (options_.progress) options_.progress(result_.stats.runs);
      }
      w.buffer.erase(w.buffer.begin(), w.buffer.begin() + static_cast<ptrdiff_t>(whole));
    }
  }

  void gone(Worker& w) {
    ::close(w.fd);
    w.fd = -1;
    int status = 0;
    ::waitpid(w.pid, &status, 0);
    if (!w.running) return;
    result_.failures.push_back(
        {*w.running,
         {WIFSIGNALED(status) ? "the run died by signal " + std::to_string(WTERMSIG(status)) + " (" +
                                    ::strsignal(WTERMSIG(status)) + ")\n"
                              : "the run ended with status " + std::to_string(WEXITSTATUS(status)) + "\n"}});
  }

  const ManyOptions& options_;
  std::vector<Worker> workers_;
  ManyResult result_;
  std::map<uint64_t, uint64_t> traces_;
};

// printf, so that the compiler sees what does not match.
[[gnu::format(printf, 2, 3)]] void add_line(std::string& out, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof(text), format, values);
  va_end(values);
  out += text;
  out += '\n';
}

template <typename T>
T median(std::vector<T> v) {
  if (v.empty()) return {};
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

unsigned default_jobs() {
  const long n = ::sysconf(_SC_NPROCESSORS_ONLN);
  return n < 1 ? 1 : static_cast<unsigned>(std::min(n, 64l));
}

ManyResult run_many(const ManyOptions& options) { return Collector(options).run(); }

std::string replay_command(uint64_t seed) { return "millrace-sim --seed " + std::to_string(seed); }

std::string report(const ManyResult& result, double wall) {
  const SwarmStats& s = result.stats;
  std::string out;
  auto n = [](uint64_t v) { return static_cast<unsigned long long>(v); };
  uint64_t frames = 0;
  for (const uint64_t f : s.frames) frames += f;
  add_line(
      out,
      "%llu seeds in %.1f s of wall time, %.0f s of virtual time, %llu with violations; trace of all %016llx",
      n(s.runs), wall, std::chrono::duration<double>(s.virtual_time).count(), n(result.failures.size()),
      n(result.trace));
  add_line(out, "frames: %llu, median %llu a seed; kinds of fault: median %u a seed", n(frames),
           n(median(s.frames)), median(s.kinds));
  add_line(out, "operations: %llu exact, %llu ended in an error; groups that formed again: %llu",
           n(s.operations_ok), n(s.operations_failed), n(s.formed_again));
  const ExactCounts& x = s.exact;
  for (size_t c = 1; c < x.collective.size(); c++)
    add_line(out, "  %-22s %10llu", check::collective_name(static_cast<int>(c)).data(), n(x.collective[c]));
  const std::pair<const char*, uint64_t> kinds[] = {{"bfp8", x.bfp},
                                                    {"deterministic", x.deterministic},
                                                    {"of ranks that combine", x.combined},
                                                    {"on one host alone", x.alone},
                                                    {"over a model NIC", x.modelled}};
  for (const auto& [name, v] : kinds) add_line(out, "  %-22s %10llu", name, n(v));
  add_line(out, "faults (injected, in seeds):");
  for (size_t k = 0; k < kFaultKinds; k++)
    add_line(out, "  %-22s %10llu %7llu", kFaultNames[k].data(), n(s.injected[k]), n(s.seeds_with[k]));
  const auto& w = s.wire;
  add_line(out, "on the wire (hosts, switches):");
  const std::pair<const char*, const uint64_t*> both[] = {
      {"packets", w.packets},       {"acks", w.acks},       {"naks", w.naks},     {"rnr_naks", w.rnr_naks},
      {"fatal_naks", w.fatal_naks}, {"repeats", w.repeats}, {"probes", w.probes}, {"cnps", w.cnps}};
  for (const auto& [name, v] : both) add_line(out, "  %-22s %10llu %10llu", name, n(v[0]), n(v[1]));
  const SpillStats& p = s.spill;
  const std::pair<const char*, uint64_t> spill[] = {{"spilled", p.spilled},
                                                    {"drained", p.drained},
                                                    {"rerouted", p.rerouted},
                                                    {"refused", p.refused},
                                                    {"lost", p.lost},
                                                    {"  without another way", p.unrouted},
                                                    {"  with their lender", p.store_lost},
                                                    {"written to lenders", p.written},
                                                    {"read from lenders", p.read},
                                                    {"lost with lenders", p.lender_lost},
                                                    {"leases", p.connects},
                                                    {"leases that died", p.deaths}};
  add_line(out, "spillways (packets, from counters):");
  for (const auto& [name, v] : spill) add_line(out, "  %-22s %10llu", name, n(v));
  add_line(out, "paths (from counters):");
  const auto& e = s.engine;
  const std::pair<const char*, uint64_t> paths[] = {{"req", w.req},
                                                    {"rep", w.rep},
                                                    {"rtu", w.rtu},
                                                    {"rej", w.rej},
                                                    {"mra", w.mra},
                                                    {"dreq", w.dreq},
                                                    {"drep", w.drep},
                                                    {"mad_repeats", w.mad_repeats},
                                                    {"rej_issued_again", s.cm.rej_repeated},
                                                    {"req_repeated", s.cm.req_repeated},
                                                    {"stale_replaced", s.cm.stale_replaced},
                                                    {"starts", w.starts},
                                                    {"segments", w.segments},
                                                    {"results", w.results},
                                                    {"terminals", w.terminals},
                                                    {"groups_formed", e.groups_formed},
                                                    {"groups_failed", e.groups_failed},
                                                    {"groups_reclaimed", e.groups_ended},
                                                    {"joins_refused", e.joins_refused},
                                                    {"naks_sent", e.naks_sent},
                                                    {"naks_received", e.naks_received},
                                                    {"rnr_naks_sent", e.rnr_naks_sent},
                                                    {"rnr_naks_received", e.rnr_naks_received},
                                                    {"timeouts", e.timeouts},
                                                    {"tail_probes", e.tail_probes},
                                                    {"retransmitted", e.retransmitted_packets},
                                                    {"duplicates_absorbed", e.duplicate_request},
                                                    {"out_of_sequence", e.out_of_sequence},
                                                    {"stale_acks", e.stale_ack},
                                                    {"liveness_probes", e.probes_sent},
                                                    {"cnps_sent", e.cnps_sent},
                                                    {"cnps_received", e.cnps_received},
                                                    {"window_breaches", e.window_breaches},
                                                    {"members_evicted", e.members_evicted},
                                                    {"stragglers", e.stragglers},
                                                    {"results_not_built", e.results_not_built},
                                                    {"unknown_qp", e.unknown_qp},
                                                    {"rx_drops_no_frame", s.rx_drops},
                                                    {"ring_drops_stalled", s.ring_drops},
                                                    {"frames_held_peak", s.frames_peak}};
  for (const auto& [name, v] : paths) add_line(out, "  %-22s %10llu", name, n(v));
  return out;
}

}  // namespace millrace::sim
