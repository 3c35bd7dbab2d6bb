// A model of an RDMA NIC with librdmacm and libibverbs on top: what host/verbs_link.cc is with real hardware,
// in simulated time. It shares no code with roce/ and has other habits, drawn from its seed, so that the
// switch meets more than the transport that was written beside it. Only what a Millrace host needs: RC, SEND
// and zero-length WRITE out, SEND and WRITE in, connections made by this side.
#pragma once

#include "tools/sim/nic.h"
#include "tools/sim/nic_queue_pair.h"
#include "tools/sim/nic_quirks.h"

namespace millrace::sim {

// Frames that came to nothing, of the whole NIC.
struct NicDrops {
  uint64_t foreign = 0, malformed = 0, corrupt = 0, unknown_qp = 0, bad_mad = 0, unknown_id = 0;
};

class NicModel final : public Nic {
 public:
  explicit NicModel(const NicConfig& config) : NicModel(config, draw_quirks(config.seed)) {}
  NicModel(const NicConfig& config, const NicQuirks& quirks);
  ~NicModel() override;
  static std::unique_ptr<Nic> make(const NicConfig& config) { return std::make_unique<NicModel>(config); }
  // One that does everything at once and asks for nothing twice, for figures.
  static std::unique_ptr<Nic> make_plain(const NicConfig& config) {
    return std::make_unique<NicModel>(config, NicQuirks{});
  }

  void receive(std::span<const uint8_t> frame, Time now) override;
  void poll(Time now, FrameSink& out) override;
  Time next_deadline() const override;
  host::Transport& transport() override;
  bool idle() const override;

  const NicQuirks& quirks() const;
  const NicDrops& drops() const;
  QueuePairCounts counts() const;                  // of all queue pairs, those that are gone included
  size_t regions() const;                          // registered and not deregistered
  double gbit(host::LinkId link, Time now) const;  // what DCQCN allows the link now; 0: no such link

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::sim
