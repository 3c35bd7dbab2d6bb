// One packet's journey through the switch: learn, ours or not, parse, check, reduce, route or forward. Pure:
// it knows no port but by number, no clock and no socket. One pipeline per worker, called by that worker
// only; process() and poll() allocate nothing but frames of the pool (joining and leaving members aside, see
// the engine).
#pragma once

#include <vector>

#include "aggregation/engine.h"
#include "buffering/remote_store.h"
#include "buffering/traffic_manager.h"
#include "switch/counters.h"
#include "switch/ip_messages.h"
#include "switch/l2.h"
#include "switch/local.h"
#include "switch/router.h"

namespace millrace::switching {

struct PipelineConfig {
  uint16_t ports = 0;
  L2Config l2;
  aggregation::EngineConfig engine;  // its MAC and addresses are the switch's own
  RoutingConfig routing;             // its interfaces, if any, have all of those addresses
  // Without it frames leave for their ports at once, and whoever drives the pipeline queues and drops.
  std::optional<buffering::Config> buffers = std::nullopt;
  // Servers that lend memory to the spillway. Who we are (MAC, addresses, seed) is taken from the engine's
  // configuration, `ids` from the spillway's. Of pool_size, `spill_local` bytes stay here, and are used
  // first.
  std::optional<buffering::RemoteStoreConfig> remote = std::nullopt;
  uint64_t spill_local = 0;
};

class Pipeline {
 public:
  // `pool` gives every frame that is made here and outlives the pipeline. Throws millrace::Error.
  Pipeline(const PipelineConfig& config, FramePool& pool);
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Takes one burst. Each frame carries its ingress port in Frame::port(), those appended to `out` their
  // egress port. Leaves `received` empty.
  void process(FrameList& received, Time now, FrameList& out) noexcept;
  // What is due by time; to be called when next_deadline() has passed.
  void poll(Time now, FrameList& out) noexcept;
  Time next_deadline() const {
    Time next = engine_.next_deadline();
    if (router_) next = std::min(next, router_->next_deadline());
    if (buffers_) next = std::min(next, buffers_->next_deadline());
    return next;
  }

  // How many frames the device behind a port takes now, for the traffic manager; and whether frames wait for
  // such room, so that poll() is of use as soon as there is some.
  void set_room(uint16_t port, uint32_t frames) noexcept {
    if (buffers_) buffers_->set_room(port, frames);
  }
  bool waits_for_room() const noexcept { return buffers_ && buffers_->waits_for_room(); }
  // The state of a port's link; all are up at first.
  void set_link(uint16_t port, bool up, Time now, FrameList& out) noexcept;

  // Tells the neighbours whose addresses ours are; to be called when ports have come up.
  void announce(Time now, FrameList& out);

  // Ends the groups and connections; drained() once nothing is left of them.
  void shutdown(Time now, FrameList& out);
  bool drained() const {
    return engine_.drained() && (!buffers_ || buffers_->empty()) && (remote_ == nullptr || remote_->idle());
  }
  bool abort_group(uint32_t id, const std::string& why, Time now, FrameList& out);

  const aggregation::Engine& engine() const { return engine_; }
  const L2Table& l2() const { return l2_; }
  const Router* router() const { return router_ ? &*router_ : nullptr; }  // nullptr: nothing is routed
  const buffering::TrafficManager* buffers() const { return buffers_ ? &*buffers_ : nullptr; }
  const buffering::RemoteStore* remote() const { return remote_; }  // nullptr: nobody lends memory
  const PipelineCounters& counters() const { return counters_; }

 private:
  std::unique_ptr<buffering::Store> make_store(const PipelineConfig& config);
  Fate receive(Frame frame, Time now, FrameList& out) noexcept;
  void learn(const roce::EthernetHeader& eth, uint16_t domain, uint16_t ingress, Time now) noexcept;
  Fate receive_ours(Frame& frame, const Network& network, uint16_t interface, Time now,
                    FrameList& out) noexcept;
  Fate receive_group(Frame frame, const Network& network, uint16_t interface, Time now,
                     FrameList& out) noexcept;
  bool hear(const Frame& frame, uint16_t interface, Time now, FrameList& out) noexcept;
  Fate reply(Frame& frame, Fate fate, Time now, FrameList& out) noexcept;
  Fate forward(Frame frame, uint16_t ingress, Time now, FrameList& out) noexcept;
  Fate flood(Frame frame, uint16_t ingress, uint16_t payer, Time now, FrameList& out) noexcept;
  Fate send_routed(Frame frame, uint16_t interface, uint16_t payer, Time now, FrameList& out) noexcept;
  Fate send_own(Frame frame, Time now, FrameList& out) noexcept;
  void emit(Frame frame, uint16_t port, uint16_t source, Time now, FrameList& out) noexcept;
  void serve_buffers(Time now, FrameList& out) noexcept;
  std::optional<uint16_t> another_way(Frame& frame, Time now) noexcept;
  void route_engine_frames(Time now, FrameList& out) noexcept;
  void route_router_frames(Time now, FrameList& out) noexcept;
  void finish(Time now, FrameList& out) noexcept;
  void check_books() const noexcept;

  MacAddress mac_;
  uint16_t ports_;
  FramePool& pool_;
  LocalEndpoint local_;
  std::optional<Router> router_;
  std::vector<uint16_t> bridged_;  // the ports of the bridge; the others are routed
  L2Table l2_;
  std::vector<TokenBucket> flood_buckets_;  // by ingress port; the last is the engine's and the router's
  aggregation::Engine engine_;
  FrameList engine_out_;                      // of the remote store too; empty between calls
  buffering::RemoteStore* remote_ = nullptr;  // the traffic manager's, if any
  bool ending_ = false;
  std::optional<buffering::TrafficManager> buffers_;
  PipelineCounters counters_;
};

}  // namespace millrace::switching
