// Collectives benchmark with nccl-tests' habits and columns, one process per rank, over libmillrace's public
// API. It has no way to talk to other ranks but the switch: times and verdicts are gathered by all-reduces of
// their own.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "tools/perf_cases.h"
#include "tools/perf_options.h"
#include "tools/perf_values.h"

namespace millrace::perf {
namespace {

using Clock = std::chrono::steady_clock;

// A failed call: the library's sentence, which is all that is to be said.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(mr_status status, const char* text) {
  if (status == MR_OK) return;
  throw Failure(text != nullptr && *text ? text : mr_status_text(status));
}
void require(mr_status status) { require(status, mr_last_error()); }

struct ContextCloser {
  void operator()(mr_context* c) const { mr_finalize(c); }
};
struct CommCloser {
  void operator()(mr_comm* c) const { mr_comm_destroy(c); }
};
struct MemoryCloser {
  void operator()(mr_memory* m) const { mr_deregister(m); }
};

// Page-aligned memory between two guards, registered, guards and all, unless that is left to the library.
class Buffer {
 public:
  static constexpr size_t kGuard = 4096;

  Buffer(mr_context* context, size_t bytes, bool registered)
      : bytes_(kGuard + (bytes + 4095) / 4096 * 4096 + kGuard) {
    memory_.reset(std::aligned_alloc(4096, bytes_));
    if (!memory_) throw std::bad_alloc();
    poison(memory_.get(), bytes_);
    if (!registered) return;
    mr_memory* registration;
    require(mr_register(context, memory_.get(), bytes_, &registration));
    registration_.reset(registration);
  }
  uint8_t* data() { return static_cast<uint8_t*>(memory_.get()) + kGuard; }

  // Poisons the guards right before and right after the first `bytes`.
  void set_guards(size_t bytes) {
    poison(data() - kGuard, kGuard);
    poison(data() + bytes, kGuard);
  }
  // How many of their bytes have been written to.
  uint64_t guards_hurt(size_t bytes) {
    return count_not_poison(data() - kGuard, kGuard) + count_not_poison(data() + bytes, kGuard);
  }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  size_t bytes_;
  std::unique_ptr<void, Free> memory_;
  std::unique_ptr<mr_memory, MemoryCloser> registration_;
};

struct Measurement {
  double time_us = 0, algbw = 0, busbw = 0;  // per operation, the slowest rank's; GB/s
  uint64_t wrong = 0;                        // elements, and bytes beside the results, all ranks
};

// A line of the table.
struct Case {
  Kind kind;
  Extent extent;
  uint64_t seed;           // each case has numbers of its own, so that stale results do not pass
  size_t part_bytes, own;  // of one rank, where each has its part; offset of this rank's, else 0
};

class Benchmark {
 public:
  explicit Benchmark(const Options& options) : o_(options) {
    for (const Kind& kind : o_.kinds) checks_data_ |= o_.check && kind.collective != Collective::kBarrier;
    mr_context_config context_config{};
    context_config.transport = o_.transport.c_str();
    context_config.device = o_.device.empty() ? nullptr : o_.device.c_str();
    mr_context* context;
    require(mr_init(&context_config, &context));
    context_.reset(context);

    mr_comm_config config{};
    std::copy(o_.key.begin(), o_.key.end(), config.key);
    config.rank = o_.rank;
    config.size = o_.size;
    config.switch_address = o_.switch_address.empty() ? nullptr : o_.switch_address.c_str();
    config.stripes = o_.stripes;
    config.tenant = o_.tenant;
    config.secret = o_.secret.empty() ? nullptr : o_.secret.c_str();
    config.combine = o_.combine.c_str();
    config.wait = o_.wait;
    mr_comm* comm;
    require(mr_comm_create(context, &config, &comm));
    comm_.reset(comm);
  }

  // Whether every result was right.
  bool run();

 private:
  void print_start();
  void print_header();
  void make_buffers();
  Case case_of(const Kind& kind, uint64_t bytes) const;
  Values values_of(const Case& c, size_t k) const;
  void measure_data(const Kind& kind);
  void measure_barriers();
  mr_status issue(const Case& c, size_t k, bool in_place, mr_request** request);
  void set_modes(bool on);
  void operate(const Case& c, bool in_place, int n);
  void prepare(const Case& c, bool in_place, int n);
  void fill_contribution(const Case& c, size_t k, uint8_t* at);
  uint64_t wrong(const Case& c, bool in_place, int n);
  uint64_t wrong_elements(const Case& c, const Values& v, const uint8_t* at, bool in_place) const;
  Measurement measure(const Case& c, bool in_place);
  void gather(Measurement* m, int n);
  void print_row(const Case& c, const Measurement* m, int n);
  void record(const Case& c, const Measurement* m, int n);
  void gather_stats();
  void print_end();
  bool prints() const { return o_.rank == 0; }
  bool prints_table() const { return prints() && o_.json != "-"; }

  const Options& o_;
  bool checks_data_ = false;
  std::unique_ptr<mr_context, ContextCloser> context_;
  std::unique_ptr<mr_comm, CommCloser> comm_;
  std::deque<Buffer> send_, recv_;  // one of each per operation in flight
  uint64_t wrong_total_ = 0;
  double busbw_total_ = 0;
  int busbw_count_ = 0;
  nlohmann::ordered_json json_;
};

void Benchmark::print_start() {
  // The first operation says by which path all will go.
  mr_request* request;
  require(mr_barrier(comm_.get(), &request));
  while (mr_test(request) == MR_IN_PROGRESS) {
    timespec pause{0, 100'000};
    nanosleep(&pause, nullptr);
  }
  mr_request_info info{};
  require(mr_request_get_info(request, &info));
  const char* text;
  require(mr_wait(request, &text), text);

  const char* transport = mr_transport_name(context_.get());
  mr_comm_info group{};
  require(mr_comm_get_info(comm_.get(), &group));
  std::string what;
  for (const Kind& kind : o_.kinds)
    if (const std::string one = name(kind.collective);
        (", " + what + ",").find(", " + one + ",") == what.npos)
      what += (what.empty() ? "" : ", ") + one;
  json_ = {{"version", mr_version()},
           {"collective", what},
           {"deterministic", o_.deterministic},
           {"wire", o_.bfp8 ? "bfp8" : "exact"},
           {"ranks", o_.size},
           {"switch", o_.switch_address},
           {"transport", transport},
           {"path", info.path},
           {"memory", info.memory},
           {"combining", group.combining},
           {"combined_ranks", group.combined_ranks},
           {"stripes", std::max(1, o_.stripes)},
           {"path_mtu", group.path_mtu},
           {"segment_bytes", group.segment_bytes},
           {"window", group.window},
           {"inflight", o_.inflight},
           {"iterations", o_.iterations},
           {"warmups", o_.warmups},
           {"check", o_.check},
           {"results", nlohmann::ordered_json::array()}};
  if (!prints_table()) return;
  std::printf("# millrace-perf %s: %s, %d rank%s, switch %s, %d stripe%s%s%s\n", mr_version(), what.c_str(),
              o_.size, o_.size == 1 ? "" : "s",
              o_.switch_address.empty() ? "none" : o_.switch_address.c_str(), std::max(1, o_.stripes),
              o_.stripes > 1 ? "s" : "", o_.deterministic ? ", deterministic" : "",
              o_.bfp8 ? ", bfp8 on the wire" : "");
  std::printf("# transport %s\n# path %s, memory %s", transport, info.path, info.memory);
  if (group.path_mtu != 0)
    std::printf(", path MTU %u, %u segments of %u B outstanding per stripe", group.path_mtu, group.window,
                group.segment_bytes);
  std::printf("\n# ranks of one host combine before the network: %s", group.combining);
  if (group.combined_ranks != 0)
    std::printf("; here %u, through rank %d", group.combined_ranks, group.combining_rank);
  std::printf("\n");
  std::printf("# %d warm-up and %d timed iterations, %d in flight, %s\n#\n", o_.warmups, o_.iterations,
              o_.inflight,
              checks_data_ ? o_.bfp8 ? "every element checked within bfp8's bound" : "every element checked"
              : o_.check   ? "nothing to check"
                           : "not checked");
}

void Benchmark::print_header() {
  if (!prints_table()) return;
  std::printf("# %57s %22s %33s\n", "", "out-of-place", "in-place");
  std::printf("# %10s  %12s  %8s  %6s  %6s  %8s  %6s  %6s  %6s   %8s  %6s  %6s  %6s\n", "size", "count",
              "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw", "busbw",
              "#wrong");
  std::printf("# %10s  %12s  %8s  %6s  %6s  %8s  %6s  %6s  %6s   %8s  %6s  %6s  %6s\n", "(B)", "(elements)",
              "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "(us)", "(GB/s)", "(GB/s)", "");
}

bool Benchmark::run() {
  print_start();
  make_buffers();
  const Kind* before = nullptr;
  for (const Kind& kind : o_.kinds) {
    if (!before || before->collective != kind.collective) {
      if (prints_table() && kind.collective != o_.kinds.front().collective) std::printf("#\n");
      if (prints_table() && o_.kinds.front().collective != o_.kinds.back().collective)
        std::printf("# %s\n", name(kind.collective));
      print_header();
    }
    before = &kind;
    if (kind.collective == Collective::kBarrier)
      measure_barriers();
    else
      measure_data(kind);
  }
  if (o_.stats) gather_stats();
  if (prints()) print_end();
  return wrong_total_ == 0;
}

// Buffers for the largest case.
void Benchmark::make_buffers() {
  size_t bytes = 0;
  for (const Kind& kind : o_.kinds) {
    if (kind.collective == Collective::kBarrier) continue;
    for (uint64_t size : o_.sizes(kind.type))
      bytes = std::max<size_t>(bytes, case_of(kind, size).extent.bytes);
  }
  for (int i = 0; i < o_.inflight; i++) {
    send_.emplace_back(context_.get(), bytes, o_.registered);
    recv_.emplace_back(context_.get(), bytes, o_.registered);
  }
}

Case Benchmark::case_of(const Kind& kind, uint64_t bytes) const {
  Case c{kind, extent_of(bytes, kind.collective, kind.type, o_.size), 0, 0, 0};
  c.seed = bytes << 24 | static_cast<uint64_t>(kind.type) << 20 | static_cast<uint64_t>(kind.op) << 16;
  c.seed ^= static_cast<uint64_t>(kind.collective) << 60 ^ static_cast<uint64_t>(kind.root + 1) << 44;
  if (has_shards(kind.collective)) {
    c.part_bytes = c.extent.count * element_bytes(kind.type);
    c.own = static_cast<size_t>(o_.rank) * c.part_bytes;
  }
  return c;
}

Values Benchmark::values_of(const Case& c, size_t k) const {
  return {c.kind.type, c.kind.op, form_of(c.kind.type, c.kind.op, o_.deterministic, o_.bfp8), c.seed + k,
          o_.size};
}

// Only for what is measured: times and verdicts are gathered in the ordinary way.
void Benchmark::set_modes(bool on) {
  require(mr_comm_set_deterministic(comm_.get(), on && o_.deterministic));
  require(mr_comm_set_wire(comm_.get(), on && o_.bfp8 ? MR_WIRE_BFP8 : MR_WIRE_EXACT));
}

// In place all of it is in recv_: a rank's own part is where it is in the whole. Ranks that send nothing have
// nothing to send from.
mr_status Benchmark::issue(const Case& c, size_t k, bool in_place, mr_request** request) {
  uint8_t* recv = recv_[k].data();
  uint8_t* send = in_place ? recv : send_[k].data();
  const auto& [collective, type, op, root] = c.kind;
  const size_t count = c.extent.count;
  switch (collective) {
    case Collective::kReduce:
      return mr_reduce(comm_.get(), send, recv, count, type, op, root, request);
    case Collective::kBroadcast:
      if (!in_place && o_.rank != root) send = nullptr;
      return mr_broadcast(comm_.get(), send, recv, count, type, root, request);
    case Collective::kReduceScatter:
      return mr_reduce_scatter(comm_.get(), send, in_place ? recv + c.own : recv, count, type, op, request);
    case Collective::kAllGather:
      return mr_all_gather(comm_.get(), in_place ? recv + c.own : send, recv, count, type, request);
    default:
      return mr_all_reduce(comm_.get(), send, recv, count, type, op, request);
  }
}

// Issues n operations, at most `inflight` of them outstanding, and waits for all.
void Benchmark::operate(const Case& c, bool in_place, int n) {
  std::deque<mr_request*> outstanding;
  auto finish_oldest = [&] {
    mr_request* oldest = outstanding.front();
    outstanding.pop_front();
    const char* text;
    mr_status status = mr_wait(oldest, &text);
    if (status == MR_OK) return;
    std::string sentence = *text ? text : mr_status_text(status);
    // The group is over, so these end too, and do not hold memory that is about to be freed.
    for (mr_request* r : outstanding) mr_wait(r, nullptr);
    throw Failure(sentence);
  };
  for (int i = 0; i < n; i++) {
    if (outstanding.size() == static_cast<size_t>(o_.inflight)) finish_oldest();
    auto k = static_cast<size_t>(i % o_.inflight);
    mr_request* request;
    mr_status status = issue(c, k, in_place, &request);
    if (status != MR_OK) {
      std::string sentence = mr_last_error();
      for (mr_request* r : outstanding) mr_wait(r, nullptr);
      throw Failure(sentence);
    }
    outstanding.push_back(request);
  }
  while (!outstanding.empty()) finish_oldest();
}

// For n operations: poison where results come, and in place, fresh numbers where they come from.
void Benchmark::prepare(const Case& c, bool in_place, int n) {
  const bool gathers = c.kind.collective == Collective::kAllGather;
  for (size_t k = 0; k < static_cast<size_t>(std::min(n, o_.inflight)); k++) {
    uint8_t* at = recv_[k].data();
    recv_[k].set_guards(c.extent.bytes);
    poison(at, c.extent.bytes);
    if (in_place) fill_contribution(c, k, gathers ? at + c.own : at);
  }
}

void Benchmark::fill_contribution(const Case& c, size_t k, uint8_t* at) {
  const bool part = c.kind.collective == Collective::kAllGather;
  fill(values_of(c, k), o_.rank, 0, at, part ? c.extent.count : c.extent.bytes / element_bytes(c.kind.type));
}

// Elements of this rank's buffer that are not what they should be, those included that were to stay as they
// were: poison, or in place its own contribution.
uint64_t Benchmark::wrong_elements(const Case& c, const Values& v, const uint8_t* at, bool in_place) const {
  const size_t count = c.extent.count, bytes = c.extent.bytes;
  auto untouched = [&](size_t begin, size_t end) {
    const size_t element = element_bytes(v.type);
    return in_place ? count_changed(v, o_.rank, begin / element, at + begin, (end - begin) / element)
                    : count_not_poison(at + begin, end - begin);
  };
  switch (c.kind.collective) {
    case Collective::kReduce:
      return o_.rank == c.kind.root ? count_wrong(v, 0, at, count) : untouched(0, bytes);
    case Collective::kBroadcast:
      return count_changed(v, c.kind.root, 0, at, count);
    case Collective::kReduceScatter: {
      const size_t first = static_cast<size_t>(o_.rank) * count, begin = in_place ? c.own : 0;
      return untouched(0, begin) + count_wrong(v, first, at + begin, count) +
             untouched(begin + c.part_bytes, bytes);
    }
    case Collective::kAllGather: {
      uint64_t sum = 0;
      for (int r = 0; r < o_.size; r++)
        sum += count_changed(v, r, 0, at + static_cast<size_t>(r) * c.part_bytes, count);
      return sum;
    }
    default:
      return count_wrong(v, 0, at, count);
  }
}

// And bytes that were written right before or after the buffer.
uint64_t Benchmark::wrong(const Case& c, bool in_place, int n) {
  uint64_t sum = 0;
  for (size_t k = 0; k < static_cast<size_t>(std::min(n, o_.inflight)); k++)
    sum +=
        wrong_elements(c, values_of(c, k), recv_[k].data(), in_place) + recv_[k].guards_hurt(c.extent.bytes);
  return sum;
}

// Out of place, the warm-ups' and the timed iterations' last results are checked. In place, iterations work
// on each other's results, so, as in nccl-tests, a round on fresh numbers before and after the timed ones is
// checked.
Measurement Benchmark::measure(const Case& c, bool in_place) {
  Measurement m;
  if (!in_place)
    for (size_t k = 0; k < send_.size(); k++) fill_contribution(c, k, send_[k].data());
  if (o_.warmups > 0) {
    int round = std::min(o_.warmups, o_.inflight);
    if (in_place) {
      prepare(c, in_place, o_.inflight);
      operate(c, in_place, o_.warmups - round);
      prepare(c, in_place, round);
      operate(c, in_place, round);
    } else {
      prepare(c, in_place, o_.warmups);
      operate(c, in_place, o_.warmups);
    }
    if (o_.check) m.wrong += wrong(c, in_place, o_.warmups);
  }
  prepare(c, in_place, o_.iterations);
  require(mr_barrier_wait(comm_.get()));
  auto start = Clock::now();
  operate(c, in_place, o_.iterations);
  m.time_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / o_.iterations;
  if (!o_.check) return m;
  if (in_place) {
    int round = std::min(o_.iterations, o_.inflight);
    prepare(c, in_place, round);
    operate(c, in_place, round);
  }
  m.wrong += wrong(c, in_place, o_.iterations);
  return m;
}

// The slowest rank's times and the sum of all wrong elements, at every rank.
void Benchmark::gather(Measurement* m, int n) {
  double times[2];
  uint64_t wrongs[2];
  for (int i = 0; i < n; i++) {
    times[i] = m[i].time_us;
    wrongs[i] = m[i].wrong;
  }
  auto count = static_cast<size_t>(n);
  require(mr_all_reduce_wait(comm_.get(), times, times, count, MR_F64, MR_MAX));
  require(mr_all_reduce_wait(comm_.get(), wrongs, wrongs, count, MR_U64, MR_SUM));
  for (int i = 0; i < n; i++) {
    m[i].time_us = times[i];
    m[i].wrong = wrongs[i];
    wrong_total_ += wrongs[i];
  }
}

void Benchmark::measure_data(const Kind& kind) {
  for (uint64_t bytes : o_.sizes(kind.type)) {
    const Case c = case_of(kind, bytes);
    Measurement m[2];
    set_modes(true);
    for (int in_place = 0; in_place < 2; in_place++) m[in_place] = measure(c, in_place);
    set_modes(false);
    gather(m, 2);
    for (Measurement& one : m) {
      one.algbw = static_cast<double>(c.extent.bytes) / one.time_us / 1e3;
      one.busbw = one.algbw * bus_factor(kind.collective, o_.size);
      busbw_total_ += one.busbw;
      busbw_count_++;
    }
    print_row(c, m, 2);
    record(c, m, 2);
  }
}

void Benchmark::measure_barriers() {
  for (int i = 0; i < o_.warmups; i++) require(mr_barrier_wait(comm_.get()));
  Measurement m;
  require(mr_barrier_wait(comm_.get()));
  auto start = Clock::now();
  for (int i = 0; i < o_.iterations; i++) require(mr_barrier_wait(comm_.get()));
  m.time_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / o_.iterations;
  gather(&m, 1);
  const Case c{{Collective::kBarrier, MR_U8, kNoOp, -1}, {0, 0}, 0, 0, 0};
  print_row(c, &m, 1);
  record(c, &m, 1);
}

void Benchmark::print_row(const Case& c, const Measurement* m, int n) {
  if (!prints_table()) return;
  const bool data = c.kind.collective != Collective::kBarrier;
  std::printf("  %10zu  %12zu  %8s  %6s  %6d", c.extent.bytes, c.extent.count, data ? name(c.kind.type) : "-",
              data ? name(c.kind.op) : "-", c.kind.root);
  for (int i = 0; i < n; i++) {
    int digits = m[i].time_us < 100 ? 2 : m[i].time_us < 10000 ? 1 : 0;
    std::printf("%s  %8.*f  %6.2f  %6.2f", i ? " " : "", digits, m[i].time_us, m[i].algbw, m[i].busbw);
    if (o_.check && data)
      std::printf("  %6llu", static_cast<unsigned long long>(m[i].wrong));
    else
      std::printf("  %6s", "N/A");
  }
  std::printf("\n");
  std::fflush(stdout);
}

void Benchmark::record(const Case& c, const Measurement* m, int n) {
  const bool data = c.kind.collective != Collective::kBarrier;
  nlohmann::ordered_json row = {{"collective", name(c.kind.collective)},
                                {"size", c.extent.bytes},
                                {"count", c.extent.count},
                                {"type", data ? name(c.kind.type) : "-"},
                                {"op", data ? name(c.kind.op) : "-"},
                                {"root", c.kind.root}};
  for (int i = 0; i < n; i++) {
    nlohmann::ordered_json one = {{"time_us", m[i].time_us}, {"algbw", m[i].algbw}, {"busbw", m[i].busbw}};
    one["wrong"] = o_.check && data ? nlohmann::ordered_json(m[i].wrong) : nlohmann::ordered_json(nullptr);
    row[i ? "in_place" : "out_of_place"] = std::move(one);
  }
  json_["results"].push_back(std::move(row));
}

void Benchmark::gather_stats() {
  mr_comm_stats stats;
  require(mr_comm_get_stats(comm_.get(), &stats));
  static_assert(sizeof stats == 10 * sizeof(uint64_t));
  uint64_t sums[10];
  std::memcpy(sums, &stats, sizeof sums);
  require(mr_all_reduce_wait(comm_.get(), sums, sums, 10, MR_U64, MR_SUM));
  std::memcpy(&stats, sums, sizeof sums);
  json_["stats"] = {{"packets_sent", stats.packets_sent},
                    {"packets_received", stats.packets_received},
                    {"retransmitted", stats.retransmitted},
                    {"timeouts", stats.timeouts},
                    {"naks_received", stats.naks_received},
                    {"rnr_naks_received", stats.rnr_naks_received},
                    {"duplicates_received", stats.duplicates_received},
                    {"out_of_sequence", stats.out_of_sequence},
                    {"cnps_received", stats.cnps_received},
                    {"cnps_sent", stats.cnps_sent}};
}

void Benchmark::print_end() {
  double average = busbw_count_ ? busbw_total_ / busbw_count_ : 0;
  json_["average_busbw"] = average;
  json_["wrong"] = checks_data_ ? nlohmann::ordered_json(wrong_total_) : nlohmann::ordered_json(nullptr);
  if (prints_table()) {
    if (checks_data_)
      std::printf("# Out of bounds values : %llu %s\n", static_cast<unsigned long long>(wrong_total_),
                  wrong_total_ ? "FAILED" : "OK");
    if (busbw_count_) std::printf("# Avg bus bandwidth    : %g\n", average);
    if (o_.stats) {
      std::printf("# Transport, all ranks :");
      for (auto& [key, value] : json_["stats"].items())
        std::printf(" %s %llu", key.c_str(), value.get<unsigned long long>());
      std::printf("\n");
    }
  }
  std::string text = json_.dump(2) + "\n";
  if (o_.json == "-") {
    std::fputs(text.c_str(), stdout);
  } else if (!o_.json.empty()) {
    std::ofstream file(o_.json);
    file << text;
    file.close();
    if (!file) throw Failure("cannot write " + o_.json);
  }
  if (std::fflush(stdout) != 0) throw Failure("cannot write to standard output");
}

int run(int argc, char** argv) {
  Options options;
  try {
    options = parse_options(argc, argv);
  } catch (const Exit& e) {
    return e.status;
  }
  try {
    return Benchmark(options).run() ? 0 : 1;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "millrace-perf: rank %d: not enough memory for the buffers: lower -e or --inflight\n",
                 options.rank);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "millrace-perf: rank %d: %s\n", options.rank, e.what());
  }
  return 1;
}

}  // namespace
}  // namespace millrace::perf

int main(int argc, char** argv) { return millrace::perf::run(argc, argv); }
