// A server that lends memory, on the simulated network: the model lender, and its operating system's address
// resolution. It dies without a word or ends as it should, and comes back with nothing remembered.
#pragma once

#include <functional>
#include <memory>

#include "tools/sim/network.h"
#include "tools/sim/nic_lender.h"
#include "tools/sim/stack.h"

namespace millrace::sim {

class LenderNode final : public Node, private FrameSink {
 public:
  // The model's MAC address and its own address are the stack's.
  LenderNode(const StackConfig& stack, const LenderConfig& config, bool v6);
  ~LenderNode() override;

  // Hears what is done with the memory; in the life of the node a lease's number is used once.
  std::function<void(const LeaseEvent&)> tell;
  void die();
  void end();
  void revoke();
  void restart(uint64_t seed);
  bool dead() const { return dead_; }
  bool gone() const { return gone_; }  // it lends nothing until restart()
  const IpAddress& address() const { return config_.address; }
  const LenderModel& model() const { return *model_; }

 private:
  void run(Time now) override;
  Time next_deadline() const override;
  void send(std::span<const uint8_t> frame) override { network_->send(*this, 0, frame); }

  StackConfig stack_config_;
  LenderConfig config_;
  Stack stack_;
  std::unique_ptr<LenderModel> model_;
  uint64_t lives_ = 0;
  bool dead_ = false, gone_ = false;
};

}  // namespace millrace::sim
