// The ranks of one simulated host that combine: the shipping hub and, for each rank, the shipping side of it,
// with messages passed by hand where they have sockets, and memory given where they map files. What was said
// is heard in the next turn.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "host/hub.h"
#include "host/local_rank.h"

namespace millrace::sim {

class HostHub;

class HubRank final : public host::LocalRank {
 public:
  HubRank(HostHub& hub, uint32_t seat, uint16_t leader, uint32_t process)
      : LocalRank(leader, process), hub_(&hub), seat_(seat) {}
  ~HubRank() override;

 private:
  friend class HostHub;
  void say(const host::LocalMessage& message) override;
  void hang_up() override {}

  HostHub* hub_;  // nullptr: it is gone
  uint32_t seat_;
};

class HostHub {
 public:
  // `memory`: zeroed, and good as long as the ranks are.
  using Memory = std::function<uint8_t*(size_t bytes)>;
  HostHub(const host::HubConfig& config, host::Transport& up, Memory memory, Time now);
  ~HostHub();

  // Whether a rank with this configuration belongs here and may still come.
  bool takes(const host::CommunicatorConfig& config) const;
  std::unique_ptr<HubRank> attach(const host::CommunicatorConfig& config);
  // Moves messages both ways and does what is due; whether there was anything.
  bool turn(Time now);
  host::Hub& hub() { return hub_; }
  const host::Hub& hub() const { return hub_; }
  uint16_t leader() const { return config_.join.rank; }
  bool has_mail() const { return !inbox_.empty() || !died_.empty(); }

 private:
  friend class HubRank;
  struct Mail {
    uint32_t seat;
    host::LocalMessage message;
  };
  void hear(const Mail& mail, Time now);
  void make_memory(Time now);

  host::HubConfig config_;
  Memory memory_;
  host::Hub hub_;
  host::LocalView view_;
  std::vector<HubRank*> ranks_;  // by seat; nullptr: its process is gone
  std::vector<bool> departed_;
  std::vector<uint32_t> died_;
  std::vector<Mail> inbox_;
};

}  // namespace millrace::sim
