// A model of a server that lends memory (buffering/REMOTE.md), as a NIC and librdmacm make it of a process
// that sleeps: the passive side of the connection manager, RDMA WRITEs and READs served in order, and nothing
// else. Written from REMOTE.md and the specification, apart from buffering/, roce/ and host/. It tells what
// it serves to whoever judges the borrower. A pure state machine: frames and a time in, frames out.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tools/sim/nic.h"
#include "tools/sim/nic_cm.h"
#include "tools/sim/nic_wire.h"

namespace millrace::sim {

struct LenderConfig {
  MacAddress mac;
  IpAddress address;
  uint64_t seed = 1;
  uint64_t ca_guid = 1;
  uint64_t bytes = 1 << 20;  // of each lease
  uint8_t reads_max = 16;    // that one lease may have in flight
  uint32_t leases_max = 64;
  uint32_t ack_every = 1;  // WRITEs, whose acknowledgement nobody asked for
};

// What has happened to a lease, in the order in which it took effect.
struct LeaseEvent {
  enum class Kind : uint8_t {
    kBegun,
    kWritten,
    kRead,   // the first time
    kWrong,  // the borrower has broken a rule: `text`
    kEnded,
  };
  Kind kind;
  uint64_t lease;  // unique in the life of the model
  uint64_t address = 0, bytes = 0;
  std::string text;
};

class LenderModel {
 public:
  LenderModel(const LenderConfig& config, std::function<void(const LeaseEvent&)> tell);

  void receive(std::span<const uint8_t> frame, Time now);
  void poll(Time now, FrameSink& out);
  Time next_deadline() const;
  // The process ends as it should: its leases do, and it takes no others.
  void end(Time now);
  // The same, but that the memory is taken back in silence: whoever comes for it is refused access.
  void revoke();

  size_t leases() const;
  uint64_t bytes_written() const { return written_; }
  uint64_t bytes_read() const { return read_; }

 private:
  enum class State : uint8_t { kReplied, kUp, kEnding, kOver };
  struct Lease {
    uint64_t number = 0;
    State state = State::kReplied;
    NicPacket path;  // to the borrower
    CmMad reply;
    uint32_t peer_id = 0, peer_qpn = 0, instance = 0, mtu = 0, rkey = 0;
    uint64_t address = 0;
    std::vector<uint8_t> memory;
    // PSNs are kept unwrapped.
    uint64_t expected = 0;
    uint32_t msn = 0, unacknowledged = 0;
    bool nak_out = false, revoked = false;
    bool in_write = false;
    uint64_t write_begin = 0, write_at = 0, write_left = 0, write_bytes = 0;
    Time heard{}, timer = kNever;
    uint32_t tries = 0;
  };

  void on_mad(const NicPacket& p, Time now);
  void on_request_for_lease(const NicPacket& p, const CmMad& mad, Time now);
  void refuse(const NicPacket& p, const CmMad& mad, uint8_t code, const std::string& text);
  void lend(const NicPacket& p, const CmMad& mad, uint32_t instance, uint64_t wanted, Time now);
  void on_packet(Lease& l, const NicPacket& p, Time now);
  bool execute(Lease& l, const NicPacket& p);
  bool write(Lease& l, const NicPacket& p);
  bool read(Lease& l, const NicPacket& p, uint64_t first, bool again);
  bool holds(const Lease& l, uint64_t address, uint64_t bytes) const;
  void acknowledge(Lease& l, uint8_t syndrome, uint64_t psn);
  void break_off(Lease& l, uint8_t syndrome, const std::string& why);
  void end(Lease& l, Time now);
  void over(Lease& l, Time now);
  void send_mad(const NicPacket& path, const CmMad& mad);
  Lease* find(const IpAddress& borrower, uint32_t peer_id);

  LenderConfig config_;
  std::function<void(const LeaseEvent&)> tell_;
  Dice dice_;
  std::map<uint32_t, Lease> leases_;  // by queue pair number
  std::vector<std::vector<uint8_t>> out_;
  uint64_t lent_ = 0, written_ = 0, read_ = 0;
  uint32_t cm_psn_ = 0;
  bool closing_ = false;
};

}  // namespace millrace::sim
