// What the RDMA tests need of a rank that millrace-perf is not: buffers that nobody may touch while an
// operation runs, memberships by the thousand, a member that ignores its window. Exit status 0: all went as
// it should.
#include <sys/mman.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "host/millrace.h"
#include "host/verbs_endpoint.h"

namespace {

using namespace std::chrono_literals;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(mr_status status, const char* text = nullptr) {
  if (status != MR_OK) throw Failure(text ? text : mr_last_error());
}

struct Options {
  int rank = 0, size = 2, cycles = 10, cut_every = 0;
  std::string group, address, transport = "verbs", device, directory = ".";
  bool registered = true;

  mr_comm_config comm(int which_rank, uint64_t salt) const {
    mr_comm_config c{};
    for (size_t i = 0; i < sizeof c.key && 2 * i + 1 < group.size(); i++)
      c.key[i] = static_cast<uint8_t>(std::stoul(group.substr(2 * i, 2), nullptr, 16));
    for (size_t i = 0; i < 8; i++) c.key[i] ^= static_cast<uint8_t>(salt >> (8 * i));
    c.rank = which_rank;
    c.size = size;
    c.switch_address = address.c_str();
    return c;
  }
  mr_context* context() const {
    mr_context_config c{transport.c_str(), device.empty() ? nullptr : device.c_str()};
    mr_context* made;
    require(mr_init(&c, &made));
    return made;
  }
};

// Whole pages, which can be made untouchable.
struct Pages {
  explicit Pages(size_t bytes) : bytes_(bytes) {
    data = static_cast<int32_t*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (data == MAP_FAILED) throw Failure("mmap failed");
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { munmap(data, bytes_); }
  void forbid() { must(mprotect(data, bytes_, PROT_NONE)); }
  void allow() { must(mprotect(data, bytes_, PROT_READ | PROT_WRITE)); }
  int32_t* data;

 private:
  static void must(int result) {
    if (result != 0) throw Failure("mprotect failed");
  }
  size_t bytes_;
};

// Between post and completion the buffers are PROT_NONE for the process: whatever reads or writes them with
// its own instructions dies by SIGSEGV. Without mr_register the first round lets the library register, and
// the following ones meet its cache.
int zero_copy(const Options& o) {
  constexpr size_t kBytes = 1 << 20;
  mr_context* context = o.context();
  mr_comm_config config = o.comm(o.rank, 0);
  mr_comm* comm;
  require(mr_comm_create(context, &config, &comm));
  Pages send(kBytes), recv(kBytes);
  mr_memory *send_memory = nullptr, *recv_memory = nullptr;
  if (o.registered) {
    require(mr_register(context, send.data, kBytes, &send_memory));
    require(mr_register(context, recv.data, kBytes, &recv_memory));
  }
  int wrong = 0;
  for (int round = 0; round < 3; round++) {
    for (size_t bytes : {kBytes, size_t{8}, size_t{4032}, size_t{4036}, size_t{65472}, size_t{300000}}) {
      const bool in_place = round == 2;
      const size_t count = bytes / sizeof(int32_t);
      for (size_t i = 0; i < count; i++) {
        send.data[i] = static_cast<int32_t>(i) * (o.rank + 1) + round;
        recv.data[i] = in_place ? send.data[i] : -1;
      }
      const bool forbidden = o.registered || round > 0;
      mr_request* request;
      require(
          mr_all_reduce(comm, in_place ? recv.data : send.data, recv.data, count, MR_I32, MR_SUM, &request));
      if (forbidden) send.forbid(), recv.forbid();
      const char* text;
      const mr_status status = mr_wait(request, &text);
      if (forbidden) send.allow(), recv.allow();
      require(status, text);
      const int32_t ranks = o.size * (o.size + 1) / 2;
      for (size_t i = 0; i < count; i++)
        wrong += recv.data[i] != static_cast<int32_t>(i) * ranks + round * o.size;
    }
  }
  std::printf("transport %s\n%d wrong\n", mr_transport_name(context), wrong);
  if (send_memory) require(mr_deregister(send_memory));
  if (recv_memory) require(mr_deregister(recv_memory));
  require(mr_comm_destroy(comm));
  require(mr_finalize(context));
  return wrong == 0 ? 0 : 1;
}

// Tells the lab by a file, and waits until it has taken that away.
void ask_lab(const Options& o, const std::string& what) {
  const std::string path = o.directory + "/" + what;
  std::ofstream(path).put('\n');
  for (int i = 0; i < 3000 && access(path.c_str(), F_OK) == 0; i++) std::this_thread::sleep_for(10ms);
  if (access(path.c_str(), F_OK) == 0) throw Failure("the lab does not answer to " + what);
}

// Groups of two ranks, both here, formed, used and left; before every cut_every-th is left, the lab cuts the
// wire.
int cycles(const Options& o) {
  mr_context* context = o.context();
  for (int cycle = 1; cycle <= o.cycles; cycle++) {
    mr_comm* comms[2] = {};
    std::string errors[2];
    auto on_both = [&](const std::function<void(int)>& what) {
      auto guarded = [&](int rank) {
        try {
          what(rank);
        } catch (const std::exception& e) {
          errors[rank] = e.what();
        }
      };
      std::thread other(guarded, 1);
      guarded(0);
      other.join();
      for (const std::string& error : errors)
        if (!error.empty()) throw Failure("cycle " + std::to_string(cycle) + ": " + error);
    };
    on_both([&](int rank) {
      const mr_comm_config config = o.comm(rank, static_cast<uint64_t>(cycle));
      require(mr_comm_create(context, &config, &comms[rank]));
      int32_t value = cycle + rank, sum = -1;
      require(mr_all_reduce_wait(comms[rank], &value, &sum, 1, MR_I32, MR_SUM));
      if (sum != 2 * cycle + 1) throw Failure("wrong sum " + std::to_string(sum));
    });
    const bool cut = o.cut_every != 0 && cycle % o.cut_every == 0;
    if (cut) ask_lab(o, "cut");
    on_both([&](int rank) { require(mr_comm_destroy(comms[rank])); });
    if (cut) ask_lab(o, "mend");
    if (cycle % 100 == 0) std::printf("%d cycles\n", cycle), std::fflush(stdout);
  }
  std::printf("%d cycles done\n", o.cycles);
  require(mr_finalize(context));
  return 0;
}

// Rank 1 of two, by hand on the transport itself: twice the window's segments posted at once. The switch must
// answer with RNR NAKs, which the kernel must obey, and in the end every sum must be right.
int breach(const Options& o) {
  using namespace millrace;
  using namespace millrace::host;
  VerbsEndpoint endpoint(VerbsDevice::open(o.device, *IpAddress::parse(o.address)));
  Transport& transport = endpoint.transport();
  auto now = [] {
    return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
  };
  ConnectRequest request;
  request.switch_address = *IpAddress::parse(o.address);
  std::copy_n(o.comm(1, 0).key, request.join.key.size(), request.join.key.begin());
  request.join.rank = static_cast<uint16_t>(o.rank);
  request.join.world = static_cast<uint16_t>(o.size);
  request.window = 64;
  request.mtu = endpoint.path_mtu_max();
  LinkId link = 0;
  std::optional<aggregation::Start> start;
  uint32_t results = 0, sent = 0;
  bool closed = false;
  const auto deadline = now() + 60s;
  auto pump = [&](const std::function<bool()>& until) {
    std::vector<Completion> completions;
    while (!until()) {
      if (now() > deadline) throw Failure("not over after 60 s");
      endpoint.receive(now());
      endpoint.send(now());
      completions.clear();
      transport.poll(completions);
      for (const Completion& c : completions) {
        if (c.kind == Completion::Kind::kError) throw Failure(c.text);
        if (c.kind == Completion::Kind::kMessage) start = aggregation::decode_control_message(c.message).start;
        if (c.kind == Completion::Kind::kMessage && !start) throw Failure("a message that is no START");
        results += c.kind == Completion::Kind::kResult;
        sent += c.kind == Completion::Kind::kSent;
        closed |= c.kind == Completion::Kind::kClosed;
      }
      std::this_thread::sleep_for(200us);
    }
  };
  endpoint.send(now());
  link = transport.connect(request);
  pump([&] { return start.has_value(); });
  const uint32_t segments = 2u * start->window, bytes = start->segment_bytes;
  std::vector<int32_t> mine(segments * bytes / 4, 5), sum(mine.size(), -1);
  const MemoryRegion source = transport.register_memory(mine.data(), mine.size() * 4, Access::kSend),
                     target = transport.register_memory(sum.data(), sum.size() * 4, Access::kResult);
  for (uint32_t s = 0; s < segments; s++) {
    aggregation::SegmentHeader h;
    h.magic = aggregation::kMagic;
    h.version = 1, h.collective = 1, h.op = 1, h.type = h.wire_type = 3;
    h.flags = s + 1 == segments ? aggregation::kFlagLast : 0;
    h.group = start->group, h.rank = static_cast<uint16_t>(o.rank);
    h.total = uint64_t{segments} * bytes, h.offset = uint64_t{s} * bytes;
    h.length = h.payload_bytes = bytes;
    h.result_address = reinterpret_cast<uintptr_t>(sum.data()) + uint64_t{s} * bytes;
    h.result_rkey = target.rkey;
    if (!transport.post_segment(
            link, s, h, {reinterpret_cast<const uint8_t*>(mine.data()) + uint64_t{s} * bytes, bytes}, source))
      throw Failure("the send queue is full");
  }
  std::printf("posted %u segments of %u bytes\n", segments, bytes), std::fflush(stdout);
  pump([&] { return results == segments && sent == segments; });
  const auto right = std::count(sum.begin(), sum.end(), 5 + 37);
  transport.close(link);
  pump([&] { return closed; });
  transport.deregister_memory(source);
  transport.deregister_memory(target);
  pump([&] { return endpoint.idle(); });
  std::printf("%ld of %zu right\n", right, sum.size());
  return right == static_cast<long>(sum.size()) ? 0 : 1;
}

// The other rank of breach(): an all-reduce of the same size, begun later.
int late(const Options& o) {
  mr_context* context = o.context();
  mr_comm_config config = o.comm(o.rank, 0);
  mr_comm* comm;
  require(mr_comm_create(context, &config, &comm));
  mr_comm_info info;
  require(mr_comm_get_info(comm, &info));
  std::this_thread::sleep_for(1s);
  std::vector<int32_t> theirs(2u * info.window * info.segment_bytes / 4, 37), sum(theirs.size(), -1);
  require(mr_all_reduce_wait(comm, theirs.data(), sum.data(), sum.size(), MR_I32, MR_SUM));
  const auto right = std::count(sum.begin(), sum.end(), 5 + 37);
  require(mr_comm_destroy(comm));
  require(mr_finalize(context));
  std::printf("%ld of %zu right\n", right, sum.size());
  return right == static_cast<long>(sum.size()) ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"A rank for tests of the RDMA path."};
  app.require_subcommand(1);
  app.add_option("--rank", o.rank);
  app.add_option("--size", o.size);
  app.add_option("--group", o.group)->required();
  app.add_option("--switch", o.address)->required();
  app.add_option("--transport", o.transport);
  app.add_option("--device", o.device);
  app.add_option("--register", o.registered);
  app.add_option("--cycles", o.cycles);
  app.add_option("--cut-every", o.cut_every);
  app.add_option("--directory", o.directory, "where it and the lab tell each other things");
  int (*chosen)(const Options&) = nullptr;
  const std::pair<const char*, int (*)(const Options&)> commands[] = {
      {"zero-copy", zero_copy}, {"cycles", cycles}, {"breach", breach}, {"late", late}};
  for (const auto& [name, run] : commands)
    app.add_subcommand(name)->fallthrough()->callback([&chosen, run = run] { chosen = run; });
  CLI11_PARSE(app, argc, argv);
  try {
    return chosen(o);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "probe: rank %d: %s\n", o.rank, e.what());
    return 1;
  }
}
