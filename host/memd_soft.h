// A lender of memory over the soft transport, as a pure state machine: frames and a time in, frames out. It
// is the responder of each lease's queue pair and moves the bytes itself. One thread.
#pragma once

#include <map>
#include <memory>
#include <random>

#include "host/memd.h"
#include "roce/cm.h"
#include "roce/queue_pair.h"

namespace millrace::host {

struct SoftLenderConfig {
  std::optional<IpAddress> address;  // where it listens; else any of the interface's
  uint16_t port = buffering::kLenderPort;
  uint32_t mtu_max = 4096;  // that the interface carries
  uint8_t reads_max = 16;   // of one lease in flight
  uint64_t ca_guid = 1;
  uint64_t seed = 1;
  Time probe_after = std::chrono::seconds(1);
  Time peer_dead = std::chrono::seconds(5);  // then the lease ends
};

class SoftLender {
 public:
  // `table` and `pool` outlive it.
  SoftLender(const SoftLenderConfig& config, LeaseTable& table, FramePool& pool);
  ~SoftLender();

  // Any frame from the wire; not ours, not RoCE, malformed: counted and dropped.
  void receive(Frame frame, Time now, FrameList& out);
  // Acknowledgements, READs' responses, timers: after each burst of receive() and at next_deadline().
  void poll(Time now, FrameList& out);
  Time next_deadline() const;
  // Ends all leases (DREQ) and takes no new ones; go on until idle().
  void shutdown(Time now, FrameList& out);
  bool idle() const;

  struct Counters {
    uint64_t leases = 0, replaced = 0, refused = 0, ended = 0, died = 0, broken = 0;
    uint64_t packets = 0, dropped = 0, duplicates = 0, gaps = 0, naks = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Lease;
  void handle_events(Time now, FrameList& out);
  void handle_request(const roce::CmEvent& event, Time now, FrameList& out);
  void refuse(const roce::CmEvent& event, const buffering::LeaseRefusal& why, Time now, FrameList& out);
  void serve(Lease& lease, const roce::Packet& packet, bool again, Time now, FrameList& out);
  void end(uint32_t qpn, Time now, FrameList& out);
  std::optional<std::span<uint8_t>> lent(const Lease& lease, uint32_t rkey, uint64_t address,
                                         uint64_t bytes) const;

  SoftLenderConfig config_;
  LeaseTable& table_;
  FramePool& pool_;
  roce::CmAgent cm_;
  roce::Crc32Combine combine_;
  std::mt19937_64 random_;
  std::map<uint32_t, std::unique_ptr<Lease>> leases_;  // by our QPN
  uint32_t next_qpn_;
  bool closing_ = false;
  bool work_ = false;  // something may be ready to send
  Time now_{};
  Counters counters_;
};

}  // namespace millrace::host
