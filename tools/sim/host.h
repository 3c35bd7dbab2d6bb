// A host: one machine with one NIC, its operating system's address resolution, and processes' communicators.
// It can crash, come back as a new process with nothing remembered, and stall.
#pragma once

#include <list>

#include "host/communicator.h"
#include "tools/sim/host_hub.h"
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

  // Starts to join, where the configuration says so together with this host's other ranks; run the network
  // until state() says what came of it. The reference is good until restart().
  host::Communicator& join(const host::CommunicatorConfig& config);
  // Forgets a communicator that is over: closed, or failed. Before that it dies, as its process would.
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
  // Where ranks that combine get the memory that they share, and how long their hub waits for one of them.
  // (Without it they cannot.)
  void set_shared_memory(HostHub::Memory memory, Time operation_timeout) {
    shared_memory_ = std::move(memory), hub_patience_ = operation_timeout;
  }
  // Whether the rank leads others, which lose it with the NIC.
  bool leads(const host::Communicator& communicator) const;
  bool combines() const { return !hubs_.empty(); }
  // From now on its communicators believe in twice the window that START tells them.
  void set_eager(bool eager) { eager_ = eager; }
  uint64_t foreign_frames() const { return foreign_; }  // flooded to it, not addressed to it

 private:
  struct Process {
    std::unique_ptr<HubRank> local;  // where it combines with others
    std::unique_ptr<host::Communicator> communicator;
    uint16_t rank = 0;
  };
  void run(Time now) override;
  bool pump_round(Time now);
  bool pump_local(Time now);
  std::unique_ptr<HubRank> meet(const host::CommunicatorConfig& config);
  Time next_deadline() const override;
  void send(std::span<const uint8_t> frame) override;

  HostConfig config_;
  Stack stack_;
  std::unique_ptr<Nic> nic_;
  std::list<HostHub> hubs_;  // outlive the processes, and use the NIC
  std::vector<Process> processes_;
  HostHub::Memory shared_memory_;
  Time hub_patience_ = std::chrono::seconds(600);
  std::vector<host::Completion> completions_;
  uint64_t joins_ = 0, foreign_ = 0;
  bool crashed_ = false, eager_ = false, more_ = false;
  Time now_{};
};

}  // namespace millrace::sim
