// The switch as an RDMA endpoint that reduces: it owns the connections that members make to the switch, the
// groups that they form, and the slots in which their chunks meet. One engine per worker, called by that
// worker only. It takes parsed packets and a time and gives back frames; it knows no port, no socket and no
// clock. receive() allocates nothing for data packets; joining, failing and leaving may.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aggregation/counters.h"
#include "roce/cm.h"
#include "roce/frame.h"
#include "roce/packet.h"

namespace millrace::aggregation {

struct Tenant {
  std::string name;
  std::string secret;         // HMAC-SHA256 key; empty: joins carry no tag
  uint64_t memory_limit = 0;  // bytes; 0: only the switch's own limit
};

struct EngineConfig {
  std::vector<IpAddress> addresses;  // the switch's own
  MacAddress mac;
  uint16_t cm_port = 18600;         // RDMA port space TCP
  std::optional<IpAddress> parent;  // the switch above in a tree; of a family that `addresses` has
  uint16_t parent_port = 18600;
  uint32_t mtu = 4096;                 // path MTU of members, bytes: 256 … 4096
  uint32_t segment_bytes = 65472;      // payload of one segment; MTU − 64 plus a multiple of the MTU
  uint16_t window = 4;                 // segments outstanding per stripe; few, so that slots stay in cache
  uint64_t memory_limit = 256u << 20;  // bytes of frames and accumulators that groups may reserve together
  uint32_t groups_max = 1024;
  uint32_t world_max = 1024;  // members of one group
  Time join_timeout = std::chrono::seconds(60);
  Time operation_timeout = std::chrono::seconds(600);
  Time straggler_after = std::chrono::seconds(1);
  Time probe_after = std::chrono::seconds(1);
  Time peer_dead = std::chrono::seconds(5);
  Time retransmit_timeout = std::chrono::milliseconds(67);  // 4.096 µs × 2^14, as hosts are told to use
  uint64_t line_rate = 100'000'000'000;  // bit/s, where DCQCN's rate of a queue pair begins
  std::map<uint32_t, Tenant> tenants;    // by id; empty: the switch runs open
  std::optional<uint32_t> first_psn;     // fixes every first PSN, for tests of the wrap
  uint64_t seed = 1;  // of queue pair numbers, PSNs and IDs; from the system's entropy in production
};

struct MemberInfo {
  uint16_t rank = 0;  // of a child switch the lowest
  std::string ranks;  // "ranks 4-7" of a child switch; empty of a host
  IpAddress address;
  uint32_t qpn = 0;  // of the switch's queue pair (first stripe)
  uint32_t remote_qpn = 0;
  bool connected = false;
  Time silent_for{};        // since anything valid came from it
  uint64_t rate = 0;        // bit/s that CNPs hold its slowest queue pair to; 0: none does
  uint64_t segments = 0;    // contributed, all stripes
  uint64_t results = 0;     // segments whose result has been sent to it
  bool waited_for = false;  // others have contributed to a segment that this member has not
};

struct GroupInfo {
  uint32_t id = 0;
  std::string key;     // 32 hex digits
  std::string state;   // "joining", "running", "failed"
  std::string reason;  // of a failure: the terminal's sentence
  uint32_t tenant = 0;
  uint16_t world = 0;
  uint8_t stripes = 0;
  uint64_t memory = 0;              // bytes reserved
  uint64_t operation = 0;           // newest operation seen
  std::string parent;               // address of the switch above, where the group is not rooted here
  std::string what;                 // "all-reduce sum f32 1048576 B", empty when idle
  Time waiting_for{};               // how long the oldest incomplete segment has been waiting
  std::vector<MemberInfo> members;  // those that joined, by rank; then child switches
};

class Engine {
 public:
  // `pool` gives every frame that the engine sends and outlives it. Throws millrace::Error for impossible
  // values.
  Engine(const EngineConfig& config, FramePool& pool);
  ~Engine();

  // Takes a RoCE packet that is addressed to one of our addresses and whose ICRC is right. `packet` points
  // into `frame`. Frames to send are appended to `out`: complete from the Ethernet header (to the member's
  // MAC) to the ICRC, their egress port not yet chosen.
  void receive(Frame frame, const roce::Packet& packet, Time now, FrameList& out);
  // Acknowledgements, results and timers that are due. To be called after each burst of receive() and when
  // next_deadline() has passed.
  void poll(Time now, FrameList& out);
  Time next_deadline() const;

  // Tells every member (terminal code 12), then disconnects; drained() once nothing is left. Joins are
  // refused.
  void shutdown(Time now, FrameList& out);
  bool drained() const;
  // An administrator's abort (terminal code 4). false: no such group.
  bool abort_group(uint32_t id, const std::string& why, Time now, FrameList& out);

  std::vector<GroupInfo> groups(Time now) const;
  Counters counters() const;
  const roce::CmCounters& cm_counters() const;
  uint64_t memory_reserved() const;  // bytes, ≤ memory_limit; 0 without groups
  size_t queue_pairs() const;
  size_t cm_records() const;  // resting ones included; 0 when nothing is left

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::aggregation
