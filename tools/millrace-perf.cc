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

// Page-aligned memory, registered unless that is left to the library.
class Buffer {
 public:
  Buffer(mr_context* context, size_t bytes, bool registered)
      : bytes_(std::max<size_t>((bytes + 4095) / 4096 * 4096, 4096)) {
    memory_.reset(std::aligned_alloc(4096, bytes_));
    if (!memory_) throw std::bad_alloc();
    std::memset(memory_.get(), 0, bytes_);
    if (!registered) return;
    mr_memory* registration;
    require(mr_register(context, memory_.get(), bytes_, &registration));
    registration_.reset(registration);
  }
  uint8_t* data() { return static_cast<uint8_t*>(memory_.get()); }

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
  uint64_t wrong = 0;                        // elements, all ranks
};

struct Case {
  Collective collective;
  int root;  // -1: there is none
  mr_type type;
  mr_op op;             // of contributions, too, where nothing is reduced
  size_t count, bytes;  // of the whole vector
  size_t part;          // elements of a call: the vector's, or a rank's shard's
  uint64_t seed;  // each size, type and operator has numbers of its own, so that stale results do not pass
};

class Benchmark {
 public:
  explicit Benchmark(const Options& options) : o_(options) {
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
    mr_comm* comm;
    require(mr_comm_create(context, &config, &comm));
    comm_.reset(comm);
  }

  // Whether every result was right.
  bool run();

 private:
  void print_start();
  void print_header();
  void measure_collective(Collective collective);
  void measure_case(const Case& c);
  mr_status call(const Case& c, uint8_t* send, uint8_t* recv, bool in_place, mr_request** request);
  void fill_contribution(const Case& c, uint64_t seed, uint8_t* at) const;
  uint64_t wrong_result(const Case& c, uint64_t seed, const uint8_t* buffer, bool in_place) const;
  void measure_barriers();
  void operate(const Case& c, bool in_place, int n);
  void prepare(const Case& c, bool in_place, int n);
  uint64_t wrong(const Case& c, bool in_place, int n);
  Measurement measure(const Case& c, bool in_place);
  void gather(Measurement* m, int n);
  void print_row(const Case* c, const Measurement* m, int n);
  void record(const Case* c, const Measurement* m, int n);
  void gather_stats();
  void print_end();
  bool prints() const { return o_.rank == 0; }
  bool prints_table() const { return prints() && o_.json != "-"; }

  const Options& o_;
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
  for (const Collective c : o_.collectives) what += (what.empty() ? "" : ",") + std::string(name(c));
  const bool only_barriers = what == "barrier";
  json_ = {{"version", mr_version()},
           {"collective", what},
           {"deterministic", o_.deterministic},
           {"ranks", o_.size},
           {"switch", o_.switch_address},
           {"transport", transport},
           {"path", info.path},
           {"memory", info.memory},
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
  std::printf("# millrace-perf %s: %s, %d rank%s, switch %s, %d stripe%s\n", mr_version(), what.c_str(),
              o_.size, o_.size == 1 ? "" : "s",
              o_.switch_address.empty() ? "none" : o_.switch_address.c_str(), std::max(1, o_.stripes),
              o_.stripes > 1 ? "s" : "");
  std::printf("# transport %s\n# path %s, memory %s", transport, info.path, info.memory);
  if (group.path_mtu != 0)
    std::printf(", path MTU %u, %u segments of %u B outstanding per stripe", group.path_mtu, group.window,
                group.segment_bytes);
  std::printf("\n");
  std::printf("# %d warm-up and %d timed iterations, %d in flight, %s\n#\n", o_.warmups, o_.iterations,
              o_.inflight,
              only_barriers ? "nothing to check"
              : o_.check    ? "every element checked"
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
  require(mr_comm_set_deterministic(comm_.get(), o_.deterministic));
  for (const Collective c : o_.collectives) {
    if (prints_table() && o_.collectives.size() > 1) std::printf("# %s\n", name(c));
    print_header();
    if (c == Collective::kBarrier)
      measure_barriers();
    else
      measure_collective(c);
  }
  if (o_.stats) gather_stats();
  if (prints()) print_end();
  return wrong_total_ == 0;
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
    mr_status status = call(c, send_[k].data(), recv_[k].data(), in_place, &request);
    if (status != MR_OK) {
      std::string sentence = mr_last_error();
      for (mr_request* r : outstanding) mr_wait(r, nullptr);
      throw Failure(sentence);
    }
    outstanding.push_back(request);
  }
  while (!outstanding.empty()) finish_oldest();
}

// In place everything happens in `recv`: a rank's own part is where it is in the whole.
mr_status Benchmark::call(const Case& c, uint8_t* send, uint8_t* recv, bool in_place, mr_request** request) {
  const size_t own = static_cast<size_t>(o_.rank) * c.part * element_bytes(c.type);
  if (in_place) send = recv;
  switch (c.collective) {
    case Collective::kReduce:
      return mr_reduce(comm_.get(), send, recv, c.part, c.type, c.op, c.root, request);
    case Collective::kBroadcast:
      return mr_broadcast(comm_.get(), send, recv, c.part, c.type, c.root, request);
    case Collective::kReduceScatter:
      return mr_reduce_scatter(comm_.get(), send, in_place ? recv + own : recv, c.part, c.type, c.op,
                               request);
    case Collective::kAllGather:
      return mr_all_gather(comm_.get(), in_place ? recv + own : send, recv, c.part, c.type, request);
    default:
      return mr_all_reduce(comm_.get(), send, recv, c.part, c.type, c.op, request);
  }
}

// A rank's contribution, `at` where its call sends from.
void Benchmark::fill_contribution(const Case& c, uint64_t seed, uint8_t* at) const {
  fill(c.type, c.op, seed, o_.rank, o_.size, at, c.collective == Collective::kAllGather ? c.part : c.count);
}

// Fresh numbers for n operations in place, fresh poison out of place.
void Benchmark::prepare(const Case& c, bool in_place, int n) {
  const size_t own = static_cast<size_t>(o_.rank) * c.part * element_bytes(c.type);
  for (size_t k = 0; k < static_cast<size_t>(std::min(n, o_.inflight)); k++) {
    if (!in_place || c.collective == Collective::kAllGather) poison(recv_[k].data(), c.bytes);
    if (in_place)
      fill_contribution(c, c.seed + k, recv_[k].data() + (c.collective == Collective::kAllGather ? own : 0));
  }
}

// Elements that are not the result, and bytes written beside it.
uint64_t Benchmark::wrong_result(const Case& c, uint64_t seed, const uint8_t* buffer, bool in_place) const {
  const size_t element = element_bytes(c.type);
  const auto rank = static_cast<size_t>(o_.rank);
  uint64_t sum = 0;
  size_t bytes = c.bytes;
  switch (c.collective) {
    case Collective::kReduce:
      if (o_.rank == c.root)
        sum = count_wrong(c.type, c.op, seed, o_.size, buffer, c.count);
      else
        bytes = 0;
      break;
    case Collective::kBroadcast:
      sum = count_not_of(c.type, c.op, seed, c.root, o_.size, buffer, c.count);
      break;
    case Collective::kReduceScatter:
      sum = count_wrong(c.type, c.op, seed, o_.size, buffer + (in_place ? rank * c.part * element : 0),
                        c.part, rank * c.part);
      bytes = c.part * element;
      break;
    case Collective::kAllGather:
      for (int r = 0; r < o_.size; r++)
        sum += count_not_of(c.type, c.op, seed, r, o_.size,
                            buffer + static_cast<size_t>(r) * c.part * element, c.part);
      break;
    default:
      sum = count_wrong(c.type, c.op, seed, o_.size, buffer, c.count);
  }
  return in_place ? sum : sum + count_not_poison(buffer + bytes, c.bytes - bytes);
}

uint64_t Benchmark::wrong(const Case& c, bool in_place, int n) {
  uint64_t sum = 0;
  for (size_t k = 0; k < static_cast<size_t>(std::min(n, o_.inflight)); k++)
    sum += wrong_result(c, c.seed + k, recv_[k].data(), in_place);
  return sum;
}

// Out of place, the warm-ups' and the timed iterations' last results are checked. In place, iterations work
// on each other's results, so, as in nccl-tests, a round on fresh numbers before and after the timed ones is
// checked.
Measurement Benchmark::measure(const Case& c, bool in_place) {
  Measurement m;
  if (!in_place)
    for (size_t k = 0; k < send_.size(); k++) fill_contribution(c, c.seed + k, send_[k].data());
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

void Benchmark::measure_collective(Collective collective) {
  while (send_.size() < static_cast<size_t>(o_.inflight)) {
    send_.emplace_back(context_.get(), o_.bytes_max, o_.registered);
    recv_.emplace_back(context_.get(), o_.bytes_max, o_.registered);
  }
  const auto ranks = static_cast<size_t>(o_.size);
  const bool rooted = has_root(collective);
  for (mr_type type : o_.types)
    for (mr_op op : o_.ops) {
      // Of several, those that make no sense are left out; where nothing is reduced, all but the first.
      if (!has_values(type, op) || (!reduces(collective) && op != o_.ops.front())) continue;
      for (uint64_t bytes : o_.sizes())
        for (int root = rooted && o_.root >= 0 ? o_.root : 0; root < (rooted ? o_.size : 1); root++) {
          Case c{collective, rooted ? root : -1, type, op, bytes / element_bytes(type), 0, 0, 0};
          if (has_shards(collective)) c.count -= c.count % ranks;
          c.bytes = c.count * element_bytes(type);
          c.part = has_shards(collective) ? c.count / ranks : c.count;
          c.seed = (bytes << 20 | static_cast<uint64_t>(type) << 16 | static_cast<uint64_t>(op) << 12) ^
                   (static_cast<uint64_t>(collective) << 60) ^ (static_cast<uint64_t>(root) << 44);
          measure_case(c);
          if (o_.root >= 0) break;
        }
    }
}

// As nccl-tests' PERFORMANCE.md counts: what each rank's link would carry at least with a ring, for a busbw
// that does not depend on the number of ranks.
void Benchmark::measure_case(const Case& c) {
  Measurement m[2];
  for (int in_place = 0; in_place < 2; in_place++) m[in_place] = measure(c, in_place);
  gather(m, 2);
  const double others = static_cast<double>(o_.size - 1) / o_.size;
  const double factor = c.collective == Collective::kAllReduce ? 2 * others
                        : has_shards(c.collective)             ? others
                                                               : 1;
  for (Measurement& one : m) {
    one.algbw = static_cast<double>(c.bytes) / one.time_us / 1e3;
    one.busbw = one.algbw * factor;
    busbw_total_ += one.busbw;
    busbw_count_++;
  }
  print_row(&c, m, 2);
  record(&c, m, 2);
}

void Benchmark::measure_barriers() {
  for (int i = 0; i < o_.warmups; i++) require(mr_barrier_wait(comm_.get()));
  Measurement m;
  require(mr_barrier_wait(comm_.get()));
  auto start = Clock::now();
  for (int i = 0; i < o_.iterations; i++) require(mr_barrier_wait(comm_.get()));
  m.time_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count() / o_.iterations;
  gather(&m, 1);
  print_row(nullptr, &m, 1);
  record(nullptr, &m, 1);
}

void Benchmark::print_row(const Case* c, const Measurement* m, int n) {
  if (!prints_table()) return;
  if (c)
    std::printf("  %10zu  %12zu  %8s  %6s  %6d", c->bytes, c->part, name(c->type),
                reduces(c->collective) ? name(c->op) : "none", c->root);
  else
    std::printf("  %10d  %12d  %8s  %6s  %6d", 0, 0, "-", "-", -1);
  for (int i = 0; i < n; i++) {
    int digits = m[i].time_us < 100 ? 2 : m[i].time_us < 10000 ? 1 : 0;
    std::printf("%s  %8.*f  %6.2f  %6.2f", i ? " " : "", digits, m[i].time_us, m[i].algbw, m[i].busbw);
    if (o_.check && c)
      std::printf("  %6llu", static_cast<unsigned long long>(m[i].wrong));
    else
      std::printf("  %6s", "N/A");
  }
  std::printf("\n");
  std::fflush(stdout);
}

void Benchmark::record(const Case* c, const Measurement* m, int n) {
  nlohmann::ordered_json row = {{"collective", name(c ? c->collective : Collective::kBarrier)},
                                {"size", c ? c->bytes : 0},
                                {"count", c ? c->part : 0},
                                {"type", c ? name(c->type) : "-"},
                                {"op", !c                       ? "-"
                                       : reduces(c->collective) ? name(c->op)
                                                                : "none"},
                                {"root", c ? c->root : -1}};
  for (int i = 0; i < n; i++) {
    nlohmann::ordered_json one = {{"time_us", m[i].time_us}, {"algbw", m[i].algbw}, {"busbw", m[i].busbw}};
    one["wrong"] = o_.check && c ? nlohmann::ordered_json(m[i].wrong) : nlohmann::ordered_json(nullptr);
    row[i ? "in_place" : "out_of_place"] = std::move(one);
  }
  json_["results"].push_back(std::move(row));
}

void Benchmark::gather_stats() {
  mr_comm_stats stats;
  require(mr_comm_get_stats(comm_.get(), &stats));
  static_assert(sizeof stats == 8 * sizeof(uint64_t));
  uint64_t sums[8];
  std::memcpy(sums, &stats, sizeof sums);
  require(mr_all_reduce_wait(comm_.get(), sums, sums, 8, MR_U64, MR_SUM));
  std::memcpy(&stats, sums, sizeof sums);
  json_["stats"] = {{"packets_sent", stats.packets_sent},
                    {"packets_received", stats.packets_received},
                    {"retransmitted", stats.retransmitted},
                    {"timeouts", stats.timeouts},
                    {"naks_received", stats.naks_received},
                    {"rnr_naks_received", stats.rnr_naks_received},
                    {"duplicates_received", stats.duplicates_received},
                    {"out_of_sequence", stats.out_of_sequence}};
}

void Benchmark::print_end() {
  double average = busbw_count_ ? busbw_total_ / busbw_count_ : 0;
  json_["average_busbw"] = average;
  const bool checked = o_.check && busbw_count_ != 0;
  json_["wrong"] = checked ? nlohmann::ordered_json(wrong_total_) : nlohmann::ordered_json(nullptr);
  if (prints_table()) {
    if (checked)
      std::printf("# Out of bounds values : %llu %s\n", static_cast<unsigned long long>(wrong_total_),
                  wrong_total_ ? "FAILED" : "OK");
    if (busbw_count_ != 0) std::printf("# Avg bus bandwidth    : %g\n", average);
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
