// Fast CNPs: when an ECN-capable packet is spilled, the switch itself tells its sender so, half a long round
// trip before the receiver could. A CNP names the sender's queue pair, which no data packet does: it is
// learned from the connection manager's exchange that passes through (IBA vol. 1, 12.6). Flows whose numbers
// were exchanged by other means stay unknown, and are counted. Pure, one worker; memory is taken at
// construction, and what is kept is bounded in number and in age.
#pragma once

#include <array>
#include <vector>

#include "buffering/config.h"
#include "buffering/hash_index.h"
#include "buffering/look.h"
#include "buffering/spill_counters.h"
#include "roce/cm_message.h"
#include "roce/packet.h"

namespace millrace::buffering {

class FastCnp {
 public:
  // What was heard longest ago gives way. Requests that nobody has answered yet have a limit of their own, so
  // that a flood of them leaves the connections alone.
  static constexpr uint32_t kConnectionsMax = 16384, kRequestsMax = 1024;
  // A request is repeated for about a minute; a connection may rest for long, and then its numbers may be
  // another's.
  static constexpr Time kRequestAge = std::chrono::minutes(2), kConnectionAge = std::chrono::hours(24);

  FastCnp(const Config& config, FramePool& pool);

  // A frame that passes through; heeded if it is a CM message.
  void hear(const Frame& frame, Time now) noexcept {
    const Look l = look(frame);
    if (l.qpn == kGsiQpn.value && l.kind == Look::Kind::kOther) hear_cm(frame, now);
  }

  // What is to be known of a packet that is spilled, before it is.
  struct Notice {
    MacAddress src_mac, dst_mac;
    IpAddress source, destination;
    Qpn destination_qpn;
    uint16_t pkey = 0, vlan_tci = 0;
    bool has_vlan = false;
  };
  static Notice notice(const Frame& frame, const Look& l) noexcept;
  // Sends a CNP to its source, or counts why not. Of a packet whose source MAC address is the switch's own,
  // it is to be routed, and addressed to no MAC; of any other, to be bridged.
  void tell(const Notice& n, Time now, SpillCounters& counters, FrameList& out) noexcept;

  uint32_t connections() const { return lists_[1].size; }
  uint32_t requests() const { return lists_[0].size; }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Record {
    IpAddress active, passive;
    uint32_t active_id, passive_id;  // communication IDs
    Qpn active_qpn, passive_qpn;
    Time heard;
    std::array<Time, 2> told;  // the last CNP to the active and the passive side
    uint32_t before, after;    // in its list, or of the free ones
    bool connected;
  };
  struct List {
    uint32_t oldest = kNone, newest = kNone, size = 0;
  };

  void hear_cm(const Frame& frame, Time now) noexcept;
  void request(const IpAddress& active, const IpAddress& passive, const roce::ReqMessage& m,
               Time now) noexcept;
  void reply(const IpAddress& active, const IpAddress& passive, const roce::RepMessage& m, Time now) noexcept;
  void end(const IpAddress& from, const IpAddress& to, uint32_t from_id, uint32_t to_id) noexcept;
  void forget_old(Time now) noexcept;

  uint64_t id_hash(const IpAddress& active, const IpAddress& passive, uint32_t active_id) const noexcept;
  uint64_t flow_hash(const IpAddress& from, const IpAddress& to, Qpn to_qpn) const noexcept;
  uint32_t find(const IpAddress& active, const IpAddress& passive, uint32_t active_id) const noexcept;
  // Of flows: twice the record's number, and 1 if they go from the passive side to the active one.
  uint32_t find_flow(const IpAddress& from, const IpAddress& to, Qpn to_qpn) const noexcept;
  uint64_t hash_of(const Record& r) const noexcept;
  uint64_t flow_hash_of(const Record& r, bool to_active) const noexcept;
  uint32_t take_record() noexcept;
  void remove(uint32_t record) noexcept;
  void link(uint32_t record) noexcept;
  void unlink(uint32_t record) noexcept;

  FramePool& pool_;
  uint64_t seed_;
  MacAddress mac_;
  Time interval_;
  uint8_t tos_;
  LazyArray<Record> records_;
  HashIndex by_id_, by_flow_;
  std::array<List, 2> lists_;  // requests, connections
  uint32_t fresh_ = 0, free_ = kNone;
};

}  // namespace millrace::buffering
