// The switch's side of lent memory without a switch: the remote store that ships over a packet socket, which
// writes packets, reads them back and compares, for a time or until it is told to end. Prints a line of JSON
// twice a second. Exit status 0: nothing came back wrong.
#include <poll.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <deque>
#include <nlohmann/json.hpp>
#include <random>

#include "buffering/remote_store.h"
#include "host/soft_socket.h"
#include "roce/error.h"

namespace {

using namespace millrace;
using buffering::RemoteStore;
using buffering::StoreEvent;

volatile sig_atomic_t ending = 0;

struct Options {
  std::vector<std::string> lenders;
  std::string device = "eth0";
  double seconds = 5;
  uint32_t held = 64, bytes = 1500, mtu = 4096, reads = 16, peer_dead_ms = 5000, instance = 0;
  uint16_t port = buffering::kLenderPort;
};

Time clock_now() { return std::chrono::steady_clock::now().time_since_epoch(); }

class Probe {
 public:
  explicit Probe(const Options& o) : options_(o), socket_(o.device, pool_) {
    std::string why;
    buffering::RemoteStoreConfig c;
    for (const std::string& text : o.lenders) {
      const auto address = IpAddress::parse(text);
      if (!address) throw Error(ErrorCode::kUsage, "\"" + text + "\" is no address");
      c.lenders.push_back({*address, o.port});
      for (int i = 0; i < 500 && !ways_.contains(*address); i++) {
        if (const auto path = socket_.resolver().resolve(*address, why)) ways_[*address] = *path;
        if (!ways_.contains(*address)) poll(nullptr, 0, 10);
      }
      if (!ways_.contains(*address)) throw Error(ErrorCode::kUnreachable, "no way to " + text + ": " + why);
      c.mac = ways_[*address].src_mac;
      c.addresses.push_back(ways_[*address].src_ip);
    }
    c.ids = o.held;
    c.mtu = o.mtu;
    c.reads_max = o.reads;
    c.instance = o.instance;
    c.peer_dead = std::chrono::milliseconds(o.peer_dead_ms);
    c.probe_after = std::chrono::milliseconds(500);
    c.retransmit_timeout = std::chrono::milliseconds(50);
    c.connect_timeout = std::chrono::seconds(10);
    std::random_device random;
    c.seed = static_cast<uint64_t>(random()) << 32 | random();
    c.ca_guid = c.seed;
    store_ = std::make_unique<RemoteStore>(c, pool_);
    kept_.resize(o.held);
    for (uint32_t id = 0; id < o.held; id++) free_.push_back(id);
  }

  int run() {
    const Time begin = clock_now();
    const Time end = begin + Time(static_cast<int64_t>(options_.seconds * 1e9));
    Time report = begin;
    while (ending == 0 && clock_now() < end) {
      turn(true);
      if (clock_now() < report) continue;
      print("status", begin);
      report = clock_now() + std::chrono::milliseconds(500);
    }
    // What is held is fetched, as far as its lender lives; then the leases end.
    const Time patience = clock_now() + std::chrono::seconds(20);
    for (uint32_t id : order_) store_->read(id, clock_now());
    order_.clear();
    while (free_.size() < options_.held && clock_now() < patience) turn(false);
    print("drained", begin);
    FrameList out;
    store_->shutdown(clock_now(), out);
    send(out);
    while (!store_->idle() && clock_now() < patience) turn(false);
    print("end", begin);
    return wrong_ == 0 && free_.size() == options_.held ? 0 : 1;
  }

 private:
  void send(FrameList& out) {
    // Whom the store does not know the way to, the switch's router would.
    out.for_each([&](FrameBuffer* b) {
      auto* eth = reinterpret_cast<roce::EthernetHeader*>(b->data());
      if (eth->dst != MacAddress{}) return;
      roce::Packet p;
      if (roce::parse({b->data(), b->length}, p) == roce::ParseVerdict::kOk)
        eth->dst = ways_[p.dst_ip].dst_mac;
    });
    socket_.send(out, clock_now());
  }

  void turn(bool writing) {
    FrameList in, out;
    const uint32_t n = socket_.receive(in);
    const Time now = clock_now();
    while (Frame f = in.pop()) {
      roce::Packet p;
      if (roce::parse(f.bytes(), p) == roce::ParseVerdict::kOk && roce::icrc_ok(p))
        store_->receive(p, now, out);
    }
    StoreEvent e;
    while (store_->next_event(e)) take(e);
    while (writing && !free_.empty() && write()) continue;
    // The oldest half is on its way back, so that both directions are busy.
    while (order_.size() > options_.held / 2) {
      store_->read(order_.front(), now);
      order_.pop_front();
    }
    store_->poll(now, out);
    send(out);
    if (n == 0) {
      pollfd d{socket_.fd(), POLLIN, 0};
      poll(&d, 1, 1);
    }
  }

  bool write() {
    const uint32_t id = free_.front();
    Frame f = Frame::allocate(pool_);
    f.buffer()->length = 64 + static_cast<uint32_t>(random_() % (options_.bytes - 63));
    for (uint8_t& b : f.bytes()) b = static_cast<uint8_t>(random_());
    std::vector<uint8_t> copy(f.bytes().begin(), f.bytes().end());
    if (!store_->write(id, f, clock_now())) return false;
    free_.pop_front();
    kept_[id] = std::move(copy);
    order_.push_back(id);
    return true;
  }

  void take(StoreEvent& e) {
    if (e.kind == StoreEvent::Kind::kLost) {
      lost_++;
      std::erase(order_, e.id);
    } else {
      read_++;
      wrong_ +=
          !std::equal(e.frame.bytes().begin(), e.frame.bytes().end(), kept_[e.id].begin(), kept_[e.id].end());
    }
    free_.push_back(e.id);
  }

  void print(const char* event, Time begin) const {
    nlohmann::json j = {{"event", event},
                        {"seconds", std::chrono::duration<double>(clock_now() - begin).count()},
                        {"read", read_},
                        {"wrong", wrong_},
                        {"lost", lost_}};
    for (size_t i = 0; i < store_->lenders(); i++) {
      const buffering::LenderStatus s = store_->status(i);
      j["lenders"].push_back({{"address", s.lender.address.to_string()},
                              {"connected", s.state == buffering::LenderStatus::State::kConnected},
                              {"bytes", s.bytes},
                              {"written", s.written},
                              {"read", s.read},
                              {"lost", s.lost},
                              {"deaths", s.deaths},
                              {"connects", s.connects},
                              {"retransmitted", s.retransmitted},
                              {"reads_again", s.reads_again},
                              {"why", s.why}});
    }
    std::printf("%s\n", j.dump().c_str());
    std::fflush(stdout);
  }

  Options options_;
  HeapFramePool pool_{8192};
  host::SoftSocket socket_;
  std::map<IpAddress, roce::Path> ways_;
  std::unique_ptr<RemoteStore> store_;
  std::mt19937 random_{1};
  std::vector<std::vector<uint8_t>> kept_;
  std::deque<uint32_t> free_, order_;
  uint64_t read_ = 0, wrong_ = 0, lost_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Writes packets into lent memory and reads them back.");
  Options o;
  app.add_option("lenders", o.lenders)->required();
  app.add_option("--device", o.device);
  app.add_option("--seconds", o.seconds);
  app.add_option("--held", o.held)->check(CLI::Range(2, 1 << 20));
  app.add_option("--bytes", o.bytes)->check(CLI::Range(64, 4200));
  app.add_option("--mtu", o.mtu);
  app.add_option("--reads", o.reads);
  app.add_option("--port", o.port);
  app.add_option("--instance", o.instance);
  app.add_option("--peer-dead-ms", o.peer_dead_ms);
  CLI11_PARSE(app, argc, argv);
  for (const int s : {SIGINT, SIGTERM}) signal(s, [](int) { ending = 1; });
  try {
    return Probe(o).run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "store_probe: %s\n", e.what());
    return 1;
  }
}
