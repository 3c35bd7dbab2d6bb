// millrace-memd: lends this server's memory to switches, whose spillways keep packets there
// (buffering/REMOTE.md).
#include <signal.h>
#include <sys/mman.h>
#include <sys/signalfd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>
#include <system_error>

#include "host/file_descriptor.h"
#include "host/memd_server.h"
#include "roce/error.h"

namespace millrace {
namespace {

using host::LeaseStatus;

constexpr Time kGoodbyePatience = std::chrono::seconds(3);

struct Options {
  std::string size = "256MiB", listen, device, transport = "auto";
  uint32_t leases = 1;
  double status = 10;
  bool json = false;
};

uint64_t parse_size(const std::string& text) {
  uint64_t n = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
  const std::string unit(end, text.data() + text.size());
  static const std::map<std::string, int> shifts = {{"", 0},   {"B", 0},    {"K", 10}, {"KiB", 10},
                                                    {"M", 20}, {"MiB", 20}, {"G", 30}, {"GiB", 30},
                                                    {"T", 40}, {"TiB", 40}};
  const auto shift = shifts.find(unit);
  if (error != std::errc{} || shift == shifts.end() || n == 0 || n > UINT64_MAX >> (shift->second + 8))
    throw Error(ErrorCode::kUsage,
                "--size: \"" + text + "\" is no size: bytes, or a number and K, M, G or T");
  return n << shift->second;
}

// ADDRESS, ADDRESS:PORT, [ADDRESS]:PORT.
void parse_listen(std::string text, host::MemdConfig& config) {
  const auto bad = [&] {
    throw Error(ErrorCode::kUsage, "--listen: \"" + text + "\" is no address: 10.0.0.1, 10.0.0.1:" +
                                       std::to_string(buffering::kLenderPort) +
                                       " or [fd00::1]:" + std::to_string(buffering::kLenderPort));
  };
  std::string address = text, port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string::npos) bad();
    address = text.substr(1, end - 1);
    port = text.substr(end + 1);
    if (!port.empty() && port[0] != ':') bad();
    if (!port.empty()) port = port.substr(1);
  } else if (std::count(text.begin(), text.end(), ':') == 1) {
    address = text.substr(0, text.find(':'));
    port = text.substr(text.find(':') + 1);
  }
  config.address = IpAddress::parse(address);
  if (!config.address) bad();
  if (port.empty()) return;
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), config.port);
  if (error != std::errc{} || end != port.data() + port.size() || config.port == 0) bad();
}

// Zeroed pages that stay: they are touched now, so that a lease does not wait for them.
class Memory {
 public:
  explicit Memory(uint64_t bytes) : bytes_(bytes) {
    at_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at_ == MAP_FAILED)
      throw Error(ErrorCode::kSystem, "cannot take " + std::to_string(bytes) +
                                          " B of memory: " + std::system_category().message(errno));
    madvise(at_, bytes, MADV_HUGEPAGE);
    if (madvise(at_, bytes, MADV_POPULATE_WRITE) != 0 && errno == ENOMEM) {
      munmap(at_, bytes);
      throw Error(ErrorCode::kSystem, "this server has no " + std::to_string(bytes) + " B to lend");
    }
  }
  ~Memory() { munmap(at_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::span<uint8_t> span() const { return {static_cast<uint8_t*>(at_), bytes_}; }

 private:
  void* at_;
  uint64_t bytes_;
};

Time clock_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

void print_status(const host::MemdServer& server, const host::LeaseTable& table, bool json,
                  const char* event) {
  const host::MemdCounters c = server.counters();
  const auto leases = table.leases();
  if (json) {
    nlohmann::json j = {
        {"event", event},          {"leases_made", c.leases}, {"leases_refused", c.refused},
        {"leases_ended", c.ended}, {"leases_died", c.died},   {"leases_replaced", c.replaced}};
    j["leases"] = nlohmann::json::array();
    for (const LeaseStatus& l : leases) {
      nlohmann::json one = {{"switch", l.borrower.to_string()}, {"instance", l.instance}, {"bytes", l.bytes}};
      if (server.counts_bytes())
        one.update({{"bytes_written", l.bytes_written},
                    {"bytes_read", l.bytes_read},
                    {"writes", l.writes},
                    {"reads", l.reads}});
      j["leases"].push_back(one);
    }
    std::printf("%s\n", j.dump().c_str());
  } else {
    std::printf("%s: %zu leases; made %llu, refused %llu, ended %llu, died %llu, replaced %llu", event,
                leases.size(), static_cast<unsigned long long>(c.leases),
                static_cast<unsigned long long>(c.refused), static_cast<unsigned long long>(c.ended),
                static_cast<unsigned long long>(c.died), static_cast<unsigned long long>(c.replaced));
    for (const LeaseStatus& l : leases) {
      std::printf("; %s/%u has %llu B", l.borrower.to_string().c_str(), l.instance,
                  static_cast<unsigned long long>(l.bytes));
      if (server.counts_bytes())
        std::printf(", wrote %llu B, read %llu B", static_cast<unsigned long long>(l.bytes_written),
                    static_cast<unsigned long long>(l.bytes_read));
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

// Until SIGINT or SIGTERM, and then until the borrowers know.
void serve(host::MemdServer& server, const host::LeaseTable& table, const Options& o, int signals) {
  const Time every = o.status > 0 ? Time(static_cast<int64_t>(o.status * 1e9)) : kNever;
  Time report = every == kNever ? kNever : clock_now() + every;
  Time end = kNever;
  uint64_t seen = UINT64_MAX;
  for (;;) {
    Time now = clock_now();
    server.serve(now);
    const host::MemdCounters c = server.counters();
    const uint64_t events = c.leases + c.refused + c.ended + c.died;
    if (events != std::exchange(seen, events) || now >= report) {
      print_status(server, table, o.json, "status");
      if (every != kNever) report = now + every;
    }
    if (end != kNever && (server.idle() || now >= end)) return;
    std::vector<pollfd> wait{{signals, POLLIN, 0}};
    server.prepare_to_wait(wait);
    const Time until = std::min({server.next_deadline(), report, end});
    now = clock_now();
    timespec timeout{};
    if (until > now && until != kNever) {
      const Time left = until - now;
      timeout.tv_sec = left / std::chrono::seconds(1);
      timeout.tv_nsec = (left % std::chrono::seconds(1)).count();
    }
    if (ppoll(wait.data(), wait.size(), until == kNever ? nullptr : &timeout, nullptr) < 0 && errno != EINTR)
      throw Error(ErrorCode::kSystem, "cannot wait: " + std::system_category().message(errno));
    signalfd_siginfo info;
    if (wait[0].revents != 0 && read(signals, &info, sizeof info) == sizeof info && end == kNever) {
      server.shutdown(clock_now());
      end = clock_now() + kGoodbyePatience;
    }
  }
}

void run(const Options& o) {
  host::MemdConfig config;
  config.device = o.device;
  config.transport = o.transport;
  std::random_device random;
  config.seed = static_cast<uint64_t>(random()) << 32 | random();
  if (!o.listen.empty()) parse_listen(o.listen, config);
  const uint64_t bytes = parse_size(o.size);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  const host::FileDescriptor signal_fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  const Memory memory(bytes);
  host::LeaseTable table(memory.span(), o.leases);
  const auto server = make_memd_server(config, table);
  const std::string where = config.address ? config.address->to_string() : "every address of " + o.device;
  if (o.json)
    std::printf("%s\n", nlohmann::json{{"event", "ready"},
                                       {"version", MILLRACE_VERSION},
                                       {"bytes", bytes},
                                       {"parts", o.leases},
                                       {"port", config.port},
                                       {"transport", server->text()}}
                            .dump()
                            .c_str());
  else
    std::printf("millrace-memd %s lends %s in %u parts of %llu B at %s, port %u\ntransport %s\n",
                MILLRACE_VERSION, o.size.c_str(), o.leases,
                static_cast<unsigned long long>(table.part_bytes()), where.c_str(), config.port,
                server->text().c_str());
  std::fflush(stdout);
  serve(*server, table, o, signal_fd.get());
  print_status(*server, table, o.json, "end");
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  CLI::App app("Lends this server's memory to the spillways of Millrace switches over RDMA.");
  app.set_version_flag("--version", MILLRACE_VERSION);
  millrace::Options o;
  app.add_option("--size", o.size, "memory to lend, such as 256MiB or 64G")->capture_default_str();
  app.add_option("--leases", o.leases, "equal parts, one for each switch (and worker) that may borrow")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--listen", o.listen, "ADDRESS[:PORT] of this server");
  app.add_option("--device", o.device, "network interface or RDMA device; default: that of the address");
  app.add_option("--transport", o.transport, "verbs, soft, or auto: verbs where there is a usable device")
      ->check(CLI::IsMember({"auto", "verbs", "soft"}))
      ->capture_default_str();
  app.add_option("--status", o.status, "seconds between status lines; 0: only when something changes")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_flag("--json", o.json, "one JSON object a line instead of text");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    const int status = app.exit(e);
    return status == 0 ? 0 : 2;
  }
  try {
    millrace::run(o);
  } catch (const millrace::Error& e) {
    std::fprintf(stderr, "millrace-memd: %s\n", e.what());
    return e.code() == millrace::ErrorCode::kUsage ? 2 : 1;
  }
  return 0;
}
