// A host: one machine with one NIC, its operating system's address resolution, and processes' communicators.
// It can crash, come back as a new process with nothing remembered, and stall.
#pragma once

#include "host/communicator.h"
#include "tools/sim/network.h"
#include "tools/sim/nic.h"
#include "tools/sim/stack.h"

namespace millrace::host {
class SoftEngine;
}

namespace millrace::sim {

struct HostConfig {
  StackConfig stack;
  uint64_t seed = 1;
  uint64_t guid = 0;  // of the NIC, the same in all processes; 0: made from the first one's seed
  std::optional<uint32_t> first_psn;
  double gbit = 100;
  NicFactory nic;  // empty: SoftNic
};

class Host final : public Node, private FrameSink {
 public:
  explicit Host(const HostConfig& config);
  ~Host() override;

  // Starts to join; run the network until state() says what came of it. The reference is good until
  // restart().
  host::Communicator& join(const host::CommunicatorConfig& config);
  // Forgets a communicator that is over: closed, or failed.
  void forget(const host::Communicator& communicator);
  // Lets the host act on what has just been submitted.
  void pump(Time now);
  // The process is gone without a word: it neither receives nor sends any more.
  void crash();
  // A new process on the same machine, with nothing remembered.
  void restart(uint64_t seed);
  bool crashed() const { return crashed_; }

  Nic& nic() { return *nic_; }
  // Of a SoftNic; the NIC is none else.
  host::SoftEngine& endpoint();
  const HostConfig& config() const { return config_; }
  const IpAddress& address(bool v6) const { return v6 ? config_.stack.ip6 : config_.stack.ip4; }
  Stack& stack() { return stack_; }
  // Called after each turn of a host that has not crashed.
  std::function<void(Time now)> after_turn;
  // From now on its communicators believe in twice the window that START tells them.
  void set_eager(bool eager) { eager_ = eager; }
  uint64_t foreign_frames() const { return foreign_; }  // flooded to it, not addressed to it

 private:
  void run(Time now) override;
  Time next_deadline() const override;
  void send(std::span<const uint8_t> frame) override;

  HostConfig config_;
  Stack stack_;
  std::unique_ptr<Nic> nic_;
  std::vector<std::unique_ptr<host::Communicator>> communicators_;
  std::vector<host::Completion> completions_;
  uint64_t joins_ = 0, foreign_ = 0;
  bool crashed_ = false, eager_ = false;
  Time now_{};
};

}  // namespace millrace::sim
