// What the traffic manager and the spillway are told, in SONiC's terms (its CONFIG_DB tables; names of fields
// follow them). Plain data, checked by whoever reads it; bytes are those of Ethernet frames without FCS.
#pragma once

#include <array>
#include <bitset>
#include <optional>
#include <vector>

#include "roce/types.h"

namespace millrace::buffering {

inline constexpr size_t kClasses = 8;  // traffic classes, queues and priority groups of a port
inline constexpr uint64_t kNoLimit = UINT64_MAX;

// BUFFER_PROFILE. A queue or priority group may use `size` bytes that nobody else gets, and beyond these of
// the shared buffer what its threshold allows.
struct BufferProfile {
  uint64_t size = 0;              // reserved
  std::optional<int> dynamic_th;  // −8 … 7: 2^dynamic_th times what is free of the shared buffer
  uint64_t static_th = kNoLimit;  // without dynamic_th: bytes
  // Of lossless priority groups (xoff > 0 makes one): what may still arrive once the sender was told to
  // pause, and when it may go on: at `xon` bytes, or `xon_offset` bytes below the threshold, whichever is
  // higher.
  uint64_t xoff = 0, xon = 0, xon_offset = 0;
  // Of queues, packet_discard_action: what does not fit is spilled if it is eligible, else dropped.
  bool spill = false;
};

// WRED_PROFILE with ecn_all: marks, and never drops.
struct WredProfile {
  uint64_t min_threshold = 0, max_threshold = 0;  // Kmin, Kmax: bytes in the queue
  double probability = 1;                         // Pmax at Kmax; beyond it every packet is marked
};

// SCHEDULER, of a queue.
struct Scheduler {
  bool strict = false;  // before all others, the highest queue first
  uint8_t weight = 1;   // DWRR's, 1 … 100
};

struct QueueConfig {
  BufferProfile profile;
  Scheduler scheduler;
  std::optional<WredProfile> wred;
};

struct PortConfig {
  uint64_t rate_bps = 0;       // emulated line rate; 0: the device's
  uint64_t speed_bps = 100e9;  // the link's, in whose bit times pauses are counted where rate_bps is 0
  bool speed_given = false;    // else whoever knows the device may tell better
  std::array<uint8_t, 64> dscp_to_tc{};
  std::array<uint8_t, kClasses> tc_to_queue{0, 1, 2, 3, 4, 5, 6, 7};
  std::array<uint8_t, kClasses> tc_to_pg{0, 1, 2, 3, 4, 5, 6, 7};
  std::array<QueueConfig, kClasses> queues;
  std::array<BufferProfile, kClasses> groups;
  // pfc_enable: the priorities whose pauses are obeyed and, for lossless groups, sent. Priority n is queue
  // and priority group n.
  std::bitset<kClasses> pfc;
  bool watchdog = true;  // PFC_WD on those priorities
  // Whether the device is to send pauses of lossless groups from its receive buffer, too.
  enum class PfcHardware : uint8_t { kAuto, kOn, kOff } pfc_hardware = PfcHardware::kAuto;
};

struct SpillwayConfig {
  bool enabled = false;
  std::bitset<64> dscp;  // spill_dscp; none: nothing is spilled
  struct Prefix {
    IpAddress address;
    uint8_t bits = 128;  // of the 128, so 96 + those of an IPv4 prefix
  };
  std::vector<Prefix> source_prefixes;  // spill_src_prefix; empty: any
  uint64_t pool_size = 256u << 20;      // spill_pool_size, bytes of packets
  uint32_t frames_max = UINT32_MAX;     // of the frame pool's buffers, for the local store
  uint64_t key_limit = kNoLimit;        // spill_key_limit, bytes
  uint32_t keys_max = 1024;             // spill_max_keys
  // Bytes in the queue; 0: half of ECN min and ECN min (64 KiB where the queue has no WRED profile).
  uint64_t drain_on = 0, drain_off = 0;
  Time drain_check_interval = std::chrono::microseconds(10);
  uint32_t drain_hold_checks = 2;
  uint64_t drain_rate_bps = 0;  // 0: the port's
  uint64_t drain_burst = 0;     // bytes; 0: 2 MTU
  bool mark_ce = true;          // spill_mark_ce
  bool fast_cnp = false;
  Time fast_cnp_interval = std::chrono::microseconds(50);  // per flow
  uint8_t fast_cnp_dscp = 48;                              // adapters' default
  Time max_residence = std::chrono::milliseconds(100);
};

struct WatchdogConfig {
  Time detection = std::chrono::milliseconds(200), restoration = std::chrono::milliseconds(200);
};

struct Config {
  uint64_t pool_size = 12u << 20;    // BUFFER_POOL size: the shared buffer
  uint64_t pool_xoff = 0;            // headroom that lossless groups share; 0: each has its own
  uint32_t frames_max = UINT32_MAX;  // that may wait in queues, as each takes a whole buffer of the pool
  uint32_t mtu = 4200;               // bytes of the longest frame that is worth planning for
  std::optional<uint8_t> ack_tc;     // class of RoCE acknowledgements and CNPs, whatever their DSCP
  std::optional<uint8_t> cnp_tc;
  std::vector<PortConfig> ports;  // by the pipeline's number
  WatchdogConfig watchdog;
  SpillwayConfig spillway;
  MacAddress mac;  // source of pause frames
  uint64_t seed = 1;
};

}  // namespace millrace::buffering
