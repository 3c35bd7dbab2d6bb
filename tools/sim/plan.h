// Everything that one seed decides about a run of the swarm: the fabric, the groups with their operations,
// and what goes wrong when.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "tools/sim/check/sum_check.h"
#include "tools/sim/fabric.h"

namespace millrace::sim {

// Kinds of faults, by the names in the statistics.
#define MILLRACE_SIM_FAULTS(X)                                                                   \
  X(kLoss, "loss") /* of frames: these seven on all wires, all the time */                       \
  X(kDuplication, "duplication")                                                                 \
  X(kReordering, "reordering")                                                                   \
  X(kCorruption, "corruption")                                                                   \
  X(kJitter, "jitter")                                                                           \
  X(kMarking, "congestion_marks")                                                                \
  X(kTailDrop, "tail_drop")                                                                      \
  X(kBuffers, "buffer_drops")            /* by the switches' traffic managers and spillways */   \
  X(kSpilled, "spilled")                 /* packets kept and given back */                       \
  X(kPause, "pfc_pause")                 /* a host pauses what its switch sends it */            \
  X(kFewFrames, "frames_exhausted")      /* the switch's pool is all but empty */                \
  X(kCrash, "host_crash")                /* and back with the same key, soon or after healing */ \
  X(kRankCrash, "rank_crash")            /* of one process, whose host's others combine */       \
  X(kSwitchRestart, "switch_restart")    /* with a new GUID */                                   \
  X(kSwitchNewMac, "switch_restart_mac") /* and a new MAC address */                             \
  X(kFlap, "link_flap")                  /* too short to be noticed as a death */                \
  X(kOutage, "link_outage")              /* longer than peer_dead */                             \
  X(kTrunkFlap, "trunk_flap")                                                                    \
  X(kStall, "host_stall") /* the clock goes on */                                                \
  X(kLongStall, "host_stall_long")                                                               \
  X(kClockStop, "host_clock_stop") /* as a paused virtual machine's */                           \
  X(kLongClockStop, "host_clock_stop_long")                                                      \
  X(kSwitchStall, "switch_stall")                                                                \
  X(kSwitchClockStop, "switch_clock_stop")                                                       \
  X(kLongSwitchStall, "switch_stall_long") /* either kind */                                     \
  X(kStraggler, "straggler")               /* a rank that is slow to call */                     \
  X(kLate, "late_member")                  /* slower than the operation's time-out */            \
  X(kAbort, "administrator_abort")                                                               \
  X(kLocalAbort, "member_abort")                                                                 \
  X(kLeave, "member_leaves")                                                                     \
  X(kMismatch, "disagreement")                                                                   \
  X(kQuota, "quota_refusal")                                                                     \
  X(kSecret, "wrong_secret")                                                                     \
  X(kLateCopy, "late_req_copies") /* of REQs, up to seconds after their connection is over */    \
  X(kEager, "window_breach")      /* a host that believes in twice the window */                 \
  X(kLateJoiner, "late_joiner")   /* a rank that joins seconds after the others */               \
  X(kLinkDown, "link_down")       /* which its switches are told of */                           \
  X(kRerouted, "rerouted")        /* packets that a spillway held for such a link */             \
  X(kLenderDeath, "lender_death") /* of a server that lends memory, without a word */            \
  X(kLenderEnd, "lender_end")     /* with a word, or it refuses access from now on */            \
  X(kStoreLost, "store_lost")     /* packets that were lost with their lender */                 \
  X(kPassersBy, "passers_by")     /* packets of hosts among themselves */

enum class FaultKind : uint8_t {
#define X(id, text) id,
  MILLRACE_SIM_FAULTS(X)
#undef X
      kCount
};
inline constexpr size_t kFaultKinds = static_cast<size_t>(FaultKind::kCount);
inline constexpr std::array<std::string_view, kFaultKinds> kFaultNames = {
#define X(id, text) text,
    MILLRACE_SIM_FAULTS(X)
#undef X
};

// Something that happens at a time.
struct Fault {
  FaultKind kind;
  Time at{}, duration{};
  uint32_t target = 0;  // host, switch, link or group
  uint32_t rank = 0;    // of a group's member
};

struct OperationPlan {
  check::Reduction reduction;
  bool deterministic = false, in_place = false;
};

struct GroupPlan {
  uint32_t number = 0;
  uint16_t where = 0;  // the switch that reduces, or
  bool tree = false;   // each rank joins at its own leaf
  bool v6 = false;
  std::vector<uint16_t> hosts;  // by rank; several may be on one
  bool combine = false;         // those of one host before the network
  uint8_t stripes = 1;
  uint32_t tenant = 0;
  std::string secret;
  bool refused = false;  // its join must be refused; it has one rank that joins, of `world`
  uint16_t world = 1;
  std::vector<OperationPlan> operations;
  // The switch then keeps all ranks' contributions.
  bool deterministic() const {
    return std::any_of(operations.begin(), operations.end(),
                       [](const OperationPlan& o) { return o.deterministic; });
  }
  uint32_t in_flight = 1;
  Time gap_max{};            // of a rank between two operations
  uint32_t generations = 1;  // how often it forms again in the safety phase
  Time rejoin_after_max{};
  std::vector<Time> join_at;  // by rank
};

// What goes from host to host, and is nothing to the switches but something to pass on: packets at a rate.
struct StreamPlan {
  uint16_t from = 0, to = 0;
  bool v6 = false;
  uint8_t traffic_class = 0;
  uint32_t payload = 0;
  double gbit = 1;
  Time at{}, length{};
};

// Which link a fault is about (Fault::rank); its target is the host, trunk or lender.
enum LinkOf : uint32_t { kLinkOfHost, kLinkOfTrunk, kLinkOfLender };

struct Plan {
  uint64_t seed = 0;
  FabricConfig fabric;
  LinkFaults wire;
  std::vector<GroupPlan> groups;
  std::vector<Fault> faults;  // by time
  std::vector<StreamPlan> streams;
  std::array<bool, kFaultKinds> has{};
  std::vector<uint16_t> eager;     // hosts
  std::vector<uint16_t> modelled;  // hosts whose NIC is the model, not the soft transport
  Time heal_at{};
  bool final_round = true;  // all groups form once more when all is healed
  Time rest_before_final{};
  unsigned kinds() const {
    unsigned n = 0;
    for (const bool b : has) n += b;
    return n;
  }
};

Plan draw_plan(uint64_t seed);
// One line about it.
std::string describe(const Plan& plan);

}  // namespace millrace::sim
