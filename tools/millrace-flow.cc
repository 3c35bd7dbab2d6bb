// Transfers between two hosts' reliable connections, as a NIC's go-back-N makes them, and what became of
// every packet: for labs of congestion, where it matters which flow lost or overtook what. Both ends are told
// the queue pair numbers, so nothing is negotiated. One thread; it ends by itself or by SIGTERM, in bounded
// time.
#include <poll.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <thread>

#include "host/millrace.h"
#include "host/soft_socket.h"
#include "roce/error.h"
#include "roce/queue_pair.h"

namespace {

using namespace millrace;
using namespace std::chrono_literals;
using nlohmann::json;

volatile std::sig_atomic_t told_to_end = 0;

Time clock_now() {
  return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
}

struct Options {
  std::string device = "eth0", begin;
  uint32_t mtu = 4096, window = 64, message = 32768, timeout_ms = 500, dscp = 26, line_mbps = 100;
  uint32_t seconds_max = 120;
  std::vector<std::string> connections;
};

// LOCAL,PEER,REMOTE,SEND,RECEIVE
struct Connection {
  Qpn local, remote;
  IpAddress peer;
  uint64_t send = 0, receive = 0;
};

// Byte sizes and queue pair numbers.
uint64_t number(const std::string& text, uint64_t max, const std::string& whole) {
  uint64_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size() || v > max)
    throw Error(ErrorCode::kUsage,
                "--connect " + whole + ": '" + text + "' is no number in 0 … " + std::to_string(max));
  return v;
}

Connection connection_of(const std::string& text) {
  constexpr uint64_t kQpnMax = 0xFFFFFF, kBytesMax = 1u << 30;
  std::vector<std::string> fields(1);
  for (const char c : text) {
    if (c == ',')
      fields.emplace_back();
    else
      fields.back() += c;
  }
  if (fields.size() != 5)
    throw Error(ErrorCode::kUsage, "--connect " + text + ": write LOCAL-QPN,PEER,REMOTE-QPN,SEND,RECEIVE");
  const auto peer = IpAddress::parse(fields[1]);
  if (!peer)
    throw Error(ErrorCode::kUsage, "--connect " + text + ": '" + fields[1] + "' is no IPv4 or IPv6 address");
  Connection c;
  c.local = Qpn{static_cast<uint32_t>(number(fields[0], kQpnMax, text))};
  c.peer = *peer;
  c.remote = Qpn{static_cast<uint32_t>(number(fields[2], kQpnMax, text))};
  c.send = number(fields[3], kBytesMax, text);
  c.receive = number(fields[4], kBytesMax, text);
  if (c.send % 8 != 0 || c.receive % 8 != 0)
    throw Error(ErrorCode::kUsage, "--connect " + text + ": bytes must be a multiple of 8");
  if (c.local.value < 2 || c.remote.value < 2)
    throw Error(ErrorCode::kUsage,
                "--connect " + text + ": queue pair numbers 0 and 1 have uses of their own");
  return c;
}

// Both ends can say what PSN a queue pair begins with; not the same for all, and far into the number space.
Psn first_psn(Qpn q) { return Psn(q.value * 2654435761u >> 7); }

// The bytes that a queue pair sends are words of this sequence: neither an omission nor an exchange of
// packets goes unnoticed.
uint64_t word(Qpn sender, uint64_t index) {
  uint64_t z = (uint64_t{sender.value} << 40) + index * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

roce::QueuePairConfig configure(const Options& o, const Connection& c, const roce::Path& path) {
  roce::QueuePairConfig q;
  q.local = c.local;
  q.wire = {path, c.remote};
  q.wire.path.src_port = roce::flow_source_port(c.local, c.remote);
  q.wire.path.tos = static_cast<uint8_t>(o.dscp << 2 | roce::kEct0);
  q.expected_psn = first_psn(c.remote);
  q.requester.first_psn = first_psn(c.local);
  q.requester.mtu = o.mtu;
  q.requester.packets_max = o.window;
  // As many messages as the window holds, or the window would never be full.
  q.requester.requests_max = std::max(64u, static_cast<uint32_t>(uint64_t{o.window} * o.mtu / o.message) + 1);
  q.requester.retransmit_timeout = std::chrono::milliseconds(o.timeout_ms);
  q.requester.dcqcn.line_rate = uint64_t{o.line_mbps} * 1'000'000;
  q.peer_dead = 60s;
  q.probe_after = 60s;
  return q;
}

class Flow {
 public:
  Flow(const Options& options, const Connection& c, const roce::Path& path, FramePool& pool, Time now)
      : options_(options), c_(c), pool_(pool), qp_(configure(options, c, path), now) {
    data_.resize(c.send / 8);
    for (uint64_t i = 0; i < data_.size(); i++) data_[i] = word(c.local, i);
  }

  Qpn local() const { return c_.local; }

  void receive(const roce::Packet& p, Time now, FrameList& out) {
    if (p.op->rc && !p.op->response) {
      arrived_++;
      marked_ += p.ecn_ce();
    }
    switch (qp_.receive(p, now)) {
      case roce::Reception::kNewRequest:
        if (p.ecn_ce()) qp_.send_cnp(pool_, now, out);
        take(p);
        break;
      case roce::Reception::kDuplicate:
        duplicates_++;
        break;
      case roce::Reception::kGap:
      case roce::Reception::kGapQuiet:
        gaps_++;
        break;
      case roce::Reception::kResponse:
        complete(now);
        break;
      default:
        break;
    }
  }

  void begin(Time now) {
    if (begun_ == kNever) begun_ = now;
  }

  void send(Time now, FrameList& out) {
    if (now >= qp_.next_deadline()) qp_.tick(now);
    post();
    more_ = qp_.emit(pool_, combine_, 64, now, out);
  }

  bool done() const { return acknowledged_ == c_.send && received_ == c_.receive; }
  // What ends it for good before it is done.
  const char* failure(Time now) const {
    if (wrong_ > 0) return "bytes are not those that were sent, or out of order";
    if (qp_.over()) return "a NAK has ended the connection";
    return qp_.dead(now) ? "the peer acknowledges nothing" : nullptr;
  }
  Time next_deadline(Time now) const { return more_ ? now : qp_.next_deadline(); }

  json report() const {
    const roce::RequesterCounters& r = qp_.requester().counters();
    auto seconds = [](Time from, Time to) -> json {
      if (from == kNever || to == kNever) return nullptr;
      return std::chrono::duration<double>(to - from).count();
    };
    return {{"qpn", c_.local.value},
            {"peer", c_.peer.to_string()},
            {"peer_qpn", c_.remote.value},
            {"sent",
             {{"bytes", acknowledged_},
              {"seconds", seconds(begun_, c_.send > 0 ? acknowledged_at_ : kNever)},
              {"packets", r.packets_sent},
              {"retransmitted", r.retransmitted},
              {"timeouts", r.timeouts},
              {"tail_probes", r.tail_probes},
              {"naks_received", r.naks},
              {"cnps_received", r.cnps}}},
            {"received",
             {{"bytes", received_},
              {"wrong_packets", wrong_},
              {"packets", arrived_},
              {"duplicates", duplicates_},
              {"out_of_sequence", gaps_},
              {"naks_sent", qp_.naks_sent()},
              {"ce_marked", marked_}}},
            {"done", done()}};
  }

 private:
  void take(const roce::Packet& p) {
    bool good = p.payload.size() % 8 == 0 && received_ + p.payload.size() <= c_.receive;
    for (size_t at = 0; good && at < p.payload.size(); at += 8) {
      uint64_t v;
      std::memcpy(&v, p.payload.data() + at, 8);
      good = v == word(c_.remote, (received_ + at) / 8);
    }
    wrong_ += !good;
    received_ += p.payload.size();
    qp_.responder().accept(p);
  }

  void post() {
    if (begun_ == kNever) return;
    while (posted_ < c_.send && qp_.requester().room() > 0) {
      const uint64_t n = std::min<uint64_t>(options_.message, c_.send - posted_);
      roce::WorkRequest request;
      request.id = n;
      request.parts[0] = {reinterpret_cast<const uint8_t*>(data_.data()) + posted_, n};
      if (!qp_.requester().post(std::move(request))) return;
      posted_ += n;
    }
  }

  void complete(Time now) {
    uint64_t bytes;
    while (qp_.requester().next_completion(bytes))
      if (bytes != roce::kProbeId) acknowledged_ += bytes;
    if (acknowledged_ == c_.send && acknowledged_at_ == kNever) acknowledged_at_ = now;
  }

  const Options& options_;
  const Connection c_;
  FramePool& pool_;
  roce::QueuePair qp_;
  roce::Crc32Combine combine_;
  std::vector<uint64_t> data_;
  uint64_t posted_ = 0, acknowledged_ = 0, received_ = 0;
  uint64_t arrived_ = 0, duplicates_ = 0, gaps_ = 0, marked_ = 0, wrong_ = 0;
  Time begun_ = kNever, acknowledged_at_ = kNever;
  bool more_ = false;
};

roce::Path path_to(host::Resolver& resolver, const IpAddress& peer) {
  std::string why;
  for (const Time until = clock_now() + 15s; clock_now() < until && !told_to_end;) {
    if (const auto path = resolver.resolve(peer, why)) return *path;
    std::this_thread::sleep_for(5ms);
  }
  throw Error(ErrorCode::kUnreachable, "no way to " + peer.to_string() + (why.empty() ? "" : ": " + why));
}

class Transfers {
 public:
  Transfers(const Options& options, const std::vector<Connection>& connections)
      : options_(options), socket_(options.device, pool_) {
    if (options.mtu > socket_.path_mtu_max())
      throw Error(ErrorCode::kUsage, "--mtu " + std::to_string(options.mtu) + ": " + options.device +
                                         " carries at most " + std::to_string(socket_.path_mtu_max()));
    for (const Connection& c : connections) {
      flows_.push_back(
          std::make_unique<Flow>(options, c, path_to(socket_.resolver(), c.peer), pool_, clock_now()));
    }
  }

  // 0: all is sent, acknowledged and received, and who told us to end knows it.
  int run() {
    say({{"event", "ready"}});
    const Time end = clock_now() + std::chrono::seconds(options_.seconds_max);
    const char* failure = nullptr;
    while (!told_to_end && failure == nullptr) {
      const Time now = clock_now();
      if (now >= end) break;
      turn(now);
      for (const auto& flow : flows_)
        if (const char* text = flow->failure(now)) failure = text;
      if (!told_done_ && std::all_of(flows_.begin(), flows_.end(), [](auto& f) { return f->done(); })) {
        say({{"event", "done"}});
        told_done_ = true;
      }
      wait(clock_now());
    }
    // What has come until now is counted, too.
    for (int turns = 0; failure == nullptr && turns < 1000 && turn(clock_now());) turns++;
    json all = json::array();
    for (const auto& flow : flows_) all.push_back(flow->report());
    say({{"event", "end"},
         {"kernel_drops", kernel_drops_ + socket_.take_kernel_drops()},
         {"connections", all}});
    if (failure != nullptr) std::fprintf(stderr, "millrace-flow: %s\n", failure);
    if (failure == nullptr && !told_done_)
      std::fprintf(stderr, "millrace-flow: ended before everything was sent and received\n");
    return told_done_ && failure == nullptr ? 0 : 1;
  }

 private:
  // Whether something has come.
  bool turn(Time now) {
    const bool came = socket_.receive(received_) > 0;
    while (Frame frame = received_.pop()) {
      roce::Packet p;
      if (roce::parse(frame.bytes(), p) != roce::ParseVerdict::kOk || !roce::icrc_ok(p)) continue;
      for (const auto& flow : flows_)
        if (flow->local() == p.dest_qp()) flow->receive(p, now, out_);
    }
    if (!begun_ && (options_.begin.empty() || std::ifstream(options_.begin).good())) begun_ = true;
    for (const auto& flow : flows_) {
      if (begun_) flow->begin(now);
      flow->send(now, out_);
    }
    socket_.send(out_, now);
    return came;
  }

  void wait(Time now) {
    Time until = now + (begun_ ? 100ms : 2ms);
    until = std::min(until, socket_.retry_at());
    for (const auto& flow : flows_) until = std::min(until, flow->next_deadline(now));
    if (until <= now) return;
    pollfd p{socket_.fd(), static_cast<short>(POLLIN | (socket_.waits_for_room() ? POLLOUT : 0)), 0};
    const auto nanoseconds = (until - now).count();
    const timespec timeout{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    ppoll(&p, 1, &timeout, nullptr);  // interrupted: told_to_end says it
  }

  static void say(const json& line) { std::cout << line.dump() << std::endl; }

  const Options& options_;
  HeapFramePool pool_;
  host::SoftSocket socket_;
  std::vector<std::unique_ptr<Flow>> flows_;
  FrameList received_, out_;
  uint64_t kernel_drops_ = 0;
  bool begun_ = false, told_done_ = false;
};

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{
      "Sends bytes over reliable connections in user space (RoCEv2 SENDs, go-back-N, DCQCN) and counts what "
      "becomes of "
      "each packet. One JSON object per line: ready, done, and, when SIGTERM ends it, the counters."};
  app.set_version_flag("--version", std::string("millrace-flow ") + mr_version());
  app.add_option(
         "--connect", o.connections,
         "LOCAL-QPN,PEER,REMOTE-QPN,SEND,RECEIVE: bytes; the peer is told the same the other way round")
      ->required();
  app.add_option("--device", o.device, "network interface")->capture_default_str();
  app.add_option("--begin", o.begin, "file at whose appearance sending begins (default: at once)");
  app.add_option("--mtu", o.mtu, "RoCE path MTU")
      ->check(CLI::IsMember({256, 512, 1024, 2048, 4096}))
      ->capture_default_str();
  app.add_option("--window", o.window, "packets in flight")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  app.add_option("--message", o.message, "bytes of one SEND; at most the window's")
      ->check(CLI::Range(8, 1 << 24))
      ->capture_default_str();
  app.add_option("--timeout-ms", o.timeout_ms, "until go-back-N repeats unasked")
      ->check(CLI::Range(1, 60000))
      ->capture_default_str();
  app.add_option("--dscp", o.dscp, "of data and acknowledgements")
      ->check(CLI::Range(0, 63))
      ->capture_default_str();
  app.add_option("--line-rate-mbps", o.line_mbps, "where DCQCN begins")
      ->check(CLI::Range(1, 1'600'000))
      ->capture_default_str();
  app.add_option("--seconds", o.seconds_max, "the end, whatever has happened")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  std::signal(SIGTERM, [](int) { told_to_end = 1; });
  std::signal(SIGINT, [](int) { told_to_end = 1; });
  try {
    o.message = o.message / 8 * 8;
    if (uint64_t{o.message} > uint64_t{o.window} * o.mtu)
      throw Error(ErrorCode::kUsage,
                  "--message: a message must fit the window, as only its end asks to be acknowledged");
    std::vector<Connection> connections;
    for (const std::string& text : o.connections) connections.push_back(connection_of(text));
    return Transfers(o, connections).run();
  } catch (const Error& e) {
    std::fprintf(stderr, "millrace-flow: %s\n", e.what());
    return e.code() == ErrorCode::kUsage ? 2 : 1;
  }
}
