#include "tools/sim/switch_node.h"

#include <algorithm>

#include "tools/sim/strict_pools.h"

namespace millrace::sim {

void add(aggregation::Counters& to, const aggregation::Counters& more) {
#define X(n) to.n += more.n;
  MILLRACE_AGGREGATION_COUNTERS(X)
#undef X
}

void add(roce::CmCounters& to, const roce::CmCounters& more) {
#define X(n) to.n += more.n;
  MILLRACE_CM_COUNTERS(X)
#undef X
}

void SpillStats::add(const SpillStats& o) {
  spilled += o.spilled, drained += o.drained, rerouted += o.rerouted, refused += o.refused, lost += o.lost;
  unrouted += o.unrouted, store_lost += o.store_lost, written += o.written, read += o.read;
  lender_lost += o.lender_lost, deaths += o.deaths, connects += o.connects;
}

SpillStats SwitchNode::spill_stats() const {
  SpillStats s = past_spill_;
  const buffering::TrafficManager* buffers = pipeline_->buffers();
  if (buffers == nullptr || buffers->spillway() == nullptr) return s;
  const buffering::SpillCounters c = buffers->spillway()->counters();
  auto lost = [&](buffering::SpillDrop why) { return c.lost[static_cast<size_t>(why)].packets; };
  s.add({.spilled = c.spilled.packets,
         .drained = c.drained.packets,
         .rerouted = c.rerouted.packets,
         .refused = c.refused_in_all().packets,
         .lost = c.lost_in_all().packets,
         .unrouted = lost(buffering::SpillDrop::kUnrouted),
         .store_lost = lost(buffering::SpillDrop::kStoreLost)});
  const buffering::RemoteStore* remote = pipeline_->remote();
  for (size_t i = 0; remote != nullptr && i < remote->lenders(); i++) {
    const buffering::LenderStatus l = remote->status(i);
    s.add({.written = l.written,
           .read = l.read,
           .lender_lost = l.lost,
           .deaths = l.deaths,
           .connects = l.connects});
  }
  return s;
}

SwitchNode::SwitchNode(const switching::PipelineConfig& config, uint32_t frames)
    : config_(config),
      pool_(4608, frames, kStrictPools && frames == UINT32_MAX),
      pipeline_(std::make_unique<switching::Pipeline>(config_, pool_)) {}

SwitchNode::~SwitchNode() {
  for (const Arrival& a : inbox_) network_->recycle(a.packet);
}

void SwitchNode::emit(FrameList& out) {
  while (const Frame f = out.pop()) {
    const FrameBuffer* b = f.buffer();
    const std::span<const uint8_t> pieces[] = {
        {b->data(), b->length}, {b->shared_data, b->shared_length}, {b->tail, b->tail_length}};
    network_->send(*this, f.port(), pieces);
  }
}

void SwitchNode::run(Time now) {
  for (const Arrival& a : inbox_) {
    if (Frame f = Frame::allocate(pool_)) {
      std::copy_n(a.packet->bytes, a.packet->size, f.buffer()->data());
      f.buffer()->length = a.packet->size;
      f.set_port(a.port);
      in_.push(std::move(f));
    } else {
      rx_drops_++;
    }
    network_->recycle(a.packet);
  }
  inbox_.clear();
  FrameList out;
  if (around_pipeline) around_pipeline(true);
  pipeline_->process(in_, now, out);
  if (now >= pipeline_->next_deadline()) pipeline_->poll(now, out);
  if (around_pipeline) around_pipeline(false);
  emit(out);
  if (after_turn) after_turn(pool_.in_use());
}

void SwitchNode::act(const std::function<void(switching::Pipeline&, Time, FrameList&)>& what) {
  FrameList out;
  what(*pipeline_, network_->clock_of(*this), out);
  emit(out);
  network_->touch(*this);
}

void SwitchNode::restart(uint64_t seed, const MacAddress& mac) {
  add(past_, pipeline_->engine().counters());
  add(past_cm_, pipeline_->engine().cm_counters());
  past_spill_ = spill_stats();
  for (const Arrival& a : inbox_) network_->recycle(a.packet);
  inbox_.clear();
  config_.engine.seed = seed;
  config_.engine.mac = mac;
  pipeline_.reset();
  pipeline_ = std::make_unique<switching::Pipeline>(config_, pool_);
  boots_++;
  act([](switching::Pipeline& p, Time now, FrameList& out) { p.announce(now, out); });
}

}  // namespace millrace::sim
