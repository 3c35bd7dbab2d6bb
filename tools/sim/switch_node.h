// A switch: the shipping pipeline with its frame pool, on the simulated network. It can be restarted (a new
// boot: another GUID, other numbers, perhaps another MAC address) and stall.
#pragma once

#include <functional>

#include "switch/pipeline.h"
#include "tools/sim/network.h"

namespace millrace::sim {

// What spillways and stores have done, in packets, in all boots.
struct SpillStats {
  uint64_t spilled = 0, drained = 0, rerouted = 0, refused = 0, lost = 0, unrouted = 0, store_lost = 0;
  uint64_t written = 0, read = 0, lender_lost = 0, deaths = 0, connects = 0;
  void add(const SpillStats& more);
};

class SwitchNode final : public Node {
 public:
  // `frames` bounds the pool; UINT32_MAX: unlimited.
  SwitchNode(const switching::PipelineConfig& config, uint32_t frames);
  ~SwitchNode() override;

  switching::Pipeline& pipeline() { return *pipeline_; }
  const switching::Pipeline& pipeline() const { return *pipeline_; }
  HeapFramePool& pool() { return pool_; }
  const switching::PipelineConfig& config() const { return config_; }
  uint64_t boots() const { return boots_; }
  uint64_t rx_drops() const { return rx_drops_; }  // no frame was free

  // What frames do when the pipeline is asked to act outside of its turn.
  void act(const std::function<void(switching::Pipeline&, Time, FrameList&)>& what);
  // The process ends without a word and a new one starts, which announces its addresses.
  void restart(uint64_t seed, const MacAddress& mac);
  // Counts of the boots before this one.
  const aggregation::Counters& past() const { return past_; }
  const roce::CmCounters& past_cm() const { return past_cm_; }
  SpillStats spill_stats() const;  // all boots

  // Called with true before the pipeline runs and with false after it.
  std::function<void(bool inside)> around_pipeline;
  // Called after each turn, with the frames that the pipeline still holds.
  std::function<void(uint32_t frames_held)> after_turn;

 private:
  void run(Time now) override;
  Time next_deadline() const override { return pipeline_->next_deadline(); }
  void emit(FrameList& out);

  switching::PipelineConfig config_;
  HeapFramePool pool_;
  std::unique_ptr<switching::Pipeline> pipeline_;
  FrameList in_;
  uint64_t boots_ = 1, rx_drops_ = 0;
  aggregation::Counters past_;
  roce::CmCounters past_cm_;
  SpillStats past_spill_;
};

// Adds up what engines count.
void add(aggregation::Counters& to, const aggregation::Counters& more);
void add(roce::CmCounters& to, const roce::CmCounters& more);

}  // namespace millrace::sim
