// One packet's journey through the switch: learn, ours or not, parse, check, reduce, route or forward. Pure:
// it knows no port but by number, no clock and no socket. One pipeline per worker, called by that worker
// only; process() and poll() allocate nothing but frames of the pool (joining and leaving members aside, see
// the engine).
#pragma once

#include <vector>

#include "aggregation/engine.h"
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
    const Time engine = engine_.next_deadline();
    return router_ ? std::min(engine, router_->next_deadline()) : engine;
  }

  // Tells the neighbours whose addresses ours are; to be called when ports have come up.
  void announce(Time now, FrameList& out);

  // Ends the groups and connections; drained() once nothing is left of them.
  void shutdown(Time now, FrameList& out);
  bool drained() const { return engine_.drained(); }
  bool abort_group(uint32_t id, const std::string& why, Time now, FrameList& out);

  const aggregation::Engine& engine() const { return engine_; }
  const L2Table& l2() const { return l2_; }
  const Router* router() const { return router_ ? &*router_ : nullptr; }  // nullptr: nothing is routed
  const PipelineCounters& counters() const { return counters_; }

 private:
  Fate receive(Frame frame, Time now, FrameList& out) noexcept;
  void learn(const roce::EthernetHeader& eth, uint16_t domain, uint16_t ingress, Time now) noexcept;
  Fate receive_ours(Frame& frame, const Network& network, uint16_t interface, Time now,
                    FrameList& out) noexcept;
  Fate receive_group(Frame frame, const Network& network, uint16_t interface, Time now,
                     FrameList& out) noexcept;
  bool hear(const Frame& frame, uint16_t interface, Time now, FrameList& out) noexcept;
  Fate reply(Frame& frame, Fate fate, FrameList& out) noexcept;
  Fate forward(Frame frame, uint16_t ingress, Time now, FrameList& out) noexcept;
  Fate flood(Frame frame, uint16_t ingress, uint16_t payer, Time now, FrameList& out) noexcept;
  Fate send_routed(Frame frame, uint16_t interface, uint16_t payer, Time now, FrameList& out) noexcept;
  Fate send_own(Frame frame, Time now, FrameList& out) noexcept;
  void emit(Frame frame, uint16_t port, FrameList& out) noexcept;
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
  FrameList engine_out_;  // empty between calls
  PipelineCounters counters_;
};

}  // namespace millrace::switching
