// The plainest fabric, for tests: one switch and some hosts around it, all wires alike. The same seed gives
// the same run.
#pragma once

#include "host/soft_engine.h"
#include "tools/sim/fabric.h"

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

class Cluster : private Observer {
 public:
  explicit Cluster(const ClusterConfig& config);
  ~Cluster() override;

  Time now() const { return fabric_.now(); }
  Host& host(uint16_t i) { return fabric_.host(i); }
  // A new process on the host's machine, with nothing remembered; the old one is gone without a word.
  Host& restart_host(uint16_t i);
  Fabric& fabric() { return fabric_; }
  switching::Pipeline& pipeline() { return fabric_.at(0).pipeline(); }
  HeapFramePool& switch_pool() { return fabric_.at(0).pool(); }
  WireCounts wire();
  // The faults of all wires from now on.
  void set_wire(const WireConfig& config);
  IpAddress switch_address() const { return fabric_.address(0, config_.ipv6); }
  IpAddress host_address(uint16_t i) { return fabric_.host(i).address(config_.ipv6); }
  static MacAddress host_mac(uint16_t i) { return Fabric::host_mac(i); }
  // What leads from a host to the switch.
  roce::Path path(uint16_t host);
  // The parameters of a plain join of `rank` of `world`.
  host::CommunicatorConfig communicator(uint16_t rank, uint16_t world, uint8_t key = 1) const;

  // Runs until done() or until `limit` more has passed; whether done() was reached.
  template <typename Done>
  bool run(Done done, Time limit = std::chrono::seconds(60)) {
    // Hosts may have been given something to do.
    for (uint16_t h = 0; h < fabric_.hosts(); h++) fabric_.network().touch(fabric_.host(h));
    return fabric_.network().run(done, limit);
  }
  void run_for(Time time) {
    run([] { return false; }, time);
  }
  // Sees every frame put on a wire.
  std::function<void(uint16_t host, bool to_switch, std::span<const uint8_t> frame)> tap;
  // Called with true before the pipeline runs and with false after it.
  std::function<void(bool inside)> around_pipeline;
  // Nothing that the switch sends arrives.
  void set_hosts_deaf(bool deaf);
  // Puts raw bytes on a host's wire to the switch, as anybody could.
  void inject(uint16_t from_host, std::span<const uint8_t> frame);

 private:
  void sent(Time, uint32_t node, uint32_t link, std::span<const uint8_t> frame, Fate fate) override;

  ClusterConfig config_;
  Fabric fabric_;
};

}  // namespace millrace::sim
