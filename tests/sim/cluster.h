// A cluster in virtual time: the shipping pipeline as the switch, the shipping soft endpoint and communicator
// as hosts, and wires between them that lose, repeat, reorder and corrupt by a seed. The seed of
// millrace-sim. Single-threaded; the same seed gives the same run.
#pragma once

#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <vector>

#include "host/communicator.h"
#include "host/soft_engine.h"
#include "switch/pipeline.h"

namespace millrace::sim {

struct WireConfig {
  double loss = 0, duplicate = 0, reorder = 0, corrupt = 0;  // probabilities per frame
  double gbit = 10;                                          // serialisation
  Time delay = std::chrono::microseconds(2);
};

struct ClusterConfig {
  uint64_t seed = 1;
  uint16_t hosts = 2;
  WireConfig wire;
  aggregation::EngineConfig engine;  // addresses and MAC are filled in
  uint32_t switch_frames = UINT32_MAX;
  bool ipv6 = false;
};

// What crossed the wires, in all.
struct WireCounts {
  uint64_t frames = 0, lost = 0, duplicated = 0, reordered = 0, corrupted = 0;
  std::vector<uint64_t> bytes_to_switch, bytes_to_host;  // by host, Ethernet frames without FCS
};

class Host final : public host::Resolver {
 public:
  Host(class Cluster& cluster, uint16_t index, uint64_t seed);
  std::optional<roce::Path> resolve(const IpAddress& to, std::string& error) override;
  // Starts to join; run the cluster until state() says what came of it.
  host::Communicator& join(const host::CommunicatorConfig& config);
  void pump(Time now);
  Time next_deadline() const;
  // The process is gone: it neither receives nor sends any more.
  void crash() { crashed_ = true; }
  bool crashed() const { return crashed_; }
  host::SoftEngine& endpoint() { return *endpoint_; }

 private:
  friend class Cluster;
  Cluster& cluster_;
  uint16_t index_;
  uint64_t seed_;
  HeapFramePool pool_;
  FrameList inbox_;
  std::unique_ptr<host::SoftEngine> endpoint_;
  std::vector<std::unique_ptr<host::Communicator>> communicators_;
  bool crashed_ = false;
};

class Cluster {
 public:
  explicit Cluster(const ClusterConfig& config);
  ~Cluster();

  Time now() const { return now_; }
  Host& host(uint16_t i) { return *hosts_[i]; }
  // A new process on the host's machine, with nothing remembered; the old one is gone without a word.
  Host& restart_host(uint16_t i);
  switching::Pipeline& pipeline() { return *pipeline_; }
  HeapFramePool& switch_pool() { return switch_pool_; }
  const WireCounts& wire() const { return counts_; }
  WireConfig& wire_config() { return config_.wire; }
  IpAddress switch_address() const;
  IpAddress host_address(uint16_t i) const;
  static MacAddress host_mac(uint16_t i) {
    return {{2, 0, 0, 1, static_cast<uint8_t>(i >> 8), static_cast<uint8_t>(i)}};
  }
  // The parameters of a plain join of `rank` of `world`.
  host::CommunicatorConfig communicator(uint16_t rank, uint16_t world, uint8_t key = 1) const;

  // Runs until done() or until `limit` more has passed; whether done() was reached.
  template <typename Done>
  bool run(Done done, Time limit = std::chrono::seconds(60)) {
    const Time end = now_ + limit;
    while (!done())
      if (!step(end)) return done();
    return true;
  }
  void run_for(Time time) {
    run([] { return false; }, time);
  }
  // Sees every frame put on a wire, before its fate is drawn.
  std::function<void(uint16_t host, bool to_switch, std::span<const uint8_t> frame)> tap;
  // Called with true before the pipeline runs and with false after it.
  std::function<void(bool inside)> around_pipeline;
  bool hosts_are_deaf = false;  // nothing that the switch sends arrives
  // Puts raw bytes on a host's wire to the switch, as anybody could.
  void inject(uint16_t from_host, std::span<const uint8_t> frame);

 private:
  friend class Host;
  struct Flight {
    Time at;
    uint64_t order;
    uint16_t host;
    bool to_switch;
    std::vector<uint8_t> bytes;
    bool operator>(const Flight& o) const { return at != o.at ? at > o.at : order > o.order; }
  };
  bool step(Time end);
  void carry(FrameList& frames, uint16_t host, bool to_switch);
  void launch(std::vector<uint8_t> bytes, uint16_t host, bool to_switch);
  void run_switch();

  ClusterConfig config_;
  std::mt19937_64 random_;
  HeapFramePool switch_pool_;
  std::unique_ptr<switching::Pipeline> pipeline_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::priority_queue<Flight, std::vector<Flight>, std::greater<>> flights_;
  std::vector<Time> wire_free_[2];  // when each wire has sent what it was given, by direction and host
  FrameList switch_inbox_;
  Time now_{};
  uint64_t order_ = 0, restarts_ = 0;
  WireCounts counts_;
};

}  // namespace millrace::sim
