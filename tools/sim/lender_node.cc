#include "tools/sim/lender_node.h"

namespace millrace::sim {

LenderNode::LenderNode(const StackConfig& stack, const LenderConfig& config, bool v6)
    : stack_config_(stack), config_(config), stack_(stack) {
  config_.mac = stack.mac;
  config_.address = v6 ? stack.ip6 : stack.ip4;
  restart(config.seed);
}

LenderNode::~LenderNode() {
  for (const Arrival& a : inbox_) network_->recycle(a.packet);
}

void LenderNode::restart(uint64_t seed) {
  config_.seed = seed;
  const uint64_t life = ++lives_ << 32;
  if (model_) network_->touch(*this);
  model_ = std::make_unique<LenderModel>(config_, [this, life](const LeaseEvent& e) {
    LeaseEvent numbered = e;
    numbered.lease += life;
    if (tell) tell(numbered);
  });
  dead_ = gone_ = false;
}

void LenderNode::die() { dead_ = gone_ = true; }

void LenderNode::end() {
  gone_ = true;
  model_->end(network_->clock_of(*this));
  network_->touch(*this);
}

void LenderNode::revoke() {
  gone_ = true;
  model_->revoke();
}

void LenderNode::run(Time now) {
  for (const Arrival& a : inbox_) {
    const std::span<const uint8_t> frame = a.packet->span();
    const bool group = !frame.empty() && (frame[0] & 1);
    const bool ours = frame.size() >= 14 && std::equal(stack_config_.mac.bytes.begin(),
                                                       stack_config_.mac.bytes.end(), frame.begin());
    // A process that has died leaves a host behind, which answers ARP.
    if ((group || ours) && !stack_.receive(frame, now) && !group && !dead_) model_->receive(frame, now);
    network_->recycle(a.packet);
  }
  inbox_.clear();
  stack_.poll(*this);
  if (!dead_) model_->poll(now, *this);
}

Time LenderNode::next_deadline() const {
  if (stack_.wants_to_send()) return Time{};
  return dead_ ? kNever : model_->next_deadline();
}

}  // namespace millrace::sim
