// A user-space RoCEv2 endpoint as a pure state machine: connections (CM, active side), queue pairs,
// registered memory. It takes frames and a time and gives back frames; SoftSocket moves them over an
// AF_PACKET socket, the simulator over virtual links. One thread calls it.
#pragma once

#include <memory>

#include "host/transport.h"
#include "roce/cm.h"
#include "roce/frame.h"
#include "roce/packet.h"

namespace millrace::host {

struct SoftConfig {
  uint64_t ca_guid = 1;
  uint64_t seed = 1;  // of QPNs, PSNs, rkeys
  Time retransmit_timeout = std::chrono::milliseconds(67);
  uint64_t line_rate = 100'000'000'000;  // bit/s, where DCQCN's rate of a queue pair begins
  Time probe_after = std::chrono::seconds(1);
  Time peer_dead = std::chrono::seconds(5);
  std::optional<uint32_t> first_psn;
};

// What SoftEngine needs to know to reach an address: asked when a connect begins, and each second until the
// switch has answered.
class Resolver {
 public:
  virtual ~Resolver() = default;
  // Source address, and both MACs; nullopt while unknown (asked again every few milliseconds until the
  // connect times out). `error` (may be set with nullopt) is a sentence for the user.
  virtual std::optional<roce::Path> resolve(const IpAddress& to, std::string& error) = 0;
};

class SoftEngine final : public Transport {
 public:
  SoftEngine(const SoftConfig& config, FramePool& pool, Resolver& resolver);
  ~SoftEngine() override;

  // Any frame from the wire; not ours, not RoCE, malformed: counted and dropped.
  void receive(Frame frame, Time now, FrameList& out);
  // Everything due: requests, acknowledgements, timers. To be called after each burst of receive(), after
  // calls of the Transport interface, and when next_deadline() has passed. Frames in `out` may borrow their
  // payload from the memory of operations: whoever keeps them past the end of one calls own_payload() on them
  // first.
  void poll(Time now, FrameList& out);
  Time next_deadline() const;
  bool idle() const;  // no link left, goodbyes included

  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void* address, size_t bytes, Access access) override;
  void deregister_memory(const MemoryRegion& region) override;
  bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  bool post_message(LinkId link, std::span<const uint8_t> message) override;
  void close(LinkId link) override;
  using Transport::poll;
  void poll(std::vector<Completion>& completions) override;
  LinkStats stats(LinkId link) const override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::host
