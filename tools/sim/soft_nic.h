// The shipping soft transport as a host's NIC: frames are copied in and out of SoftEngine, nothing else.
#pragma once

#include "host/soft_engine.h"
#include "tools/sim/nic.h"

namespace millrace::sim {

class SoftNic final : public Nic, private host::Resolver {
 public:
  explicit SoftNic(const NicConfig& config);
  static std::unique_ptr<Nic> make(const NicConfig& config) { return std::make_unique<SoftNic>(config); }

  void receive(std::span<const uint8_t> frame, Time now) override;
  void poll(Time now, FrameSink& out) override;
  Time next_deadline() const override;
  host::Transport& transport() override { return engine_; }
  bool idle() const override { return engine_.idle(); }

  host::SoftEngine& engine() { return engine_; }
  HeapFramePool& pool() { return pool_; }

 private:
  std::optional<roce::Path> resolve(const IpAddress& to, std::string& error) override;

  NicConfig config_;
  HeapFramePool pool_;
  host::SoftEngine engine_;
  FrameList out_;
  std::vector<uint8_t> bytes_;  // of the frame being sent
};

}  // namespace millrace::sim
