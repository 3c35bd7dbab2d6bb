// The traffic manager's state as the control sockets tell it: copied out by the worker between two bursts,
// and made JSON of by the thread that serves the sockets. Knows no DPDK.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "buffering/remote_store.h"
#include "buffering/traffic_manager.h"

namespace millrace::switching {

struct QueueStatus {
  uint64_t bytes = 0;
  bool paused = false;  // by the neighbour
  bool storm = false;   // paused for so long that the watchdog drops
  buffering::QueueCounters counters;
};

struct GroupStatus {
  uint64_t bytes = 0, headroom_bytes = 0;
  bool lossless = false;
  bool pausing = false;  // the neighbour has been told to pause
};

struct PortQos {
  std::array<QueueStatus, buffering::kClasses> queues;
  std::array<GroupStatus, buffering::kClasses> groups;
  buffering::PfcCounters pfc;
  std::string pfc_mode = "off", pfc_why;  // hardware, software or off; as PfcOutcome has it
  buffering::SpillCounters spill;
};

struct QosStatus {
  uint64_t pool_size = 0, pool_used = 0, headroom_used = 0;
  uint32_t frames_queued = 0, frames_max = 0;
  std::vector<PortQos> ports;
  // Zeros without a spillway.
  bool spillway = false;
  buffering::SpillCounters spill;  // of all ports
  uint64_t store_size = 0, store_used = 0;
  uint32_t keys = 0, keys_max = 0;
  std::vector<buffering::SpillKeyStatus> key_list;  // some of them, if there are many
  std::vector<buffering::LenderStatus> lenders;
  bool fast_cnp = false;
  uint32_t cnp_connections = 0;  // whose queue pairs are known
};

// On the worker's thread. The list of keys is left out unless `with_keys`.
QosStatus qos_status(const buffering::TrafficManager& manager, bool with_keys, Time now,
                     const buffering::RemoteStore* remote = nullptr);

// `ports` are their names.
nlohmann::json buffers_json(const QosStatus& status, const std::vector<std::string>& ports);
nlohmann::json spillway_json(const QosStatus& status, const std::vector<std::string>& ports);
// One port's, for the counters of all rooms: what is not zero by its nature (states) is left out.
nlohmann::json port_qos_counters_json(const PortQos& port);
nlohmann::json spill_counters_json(const buffering::SpillCounters& counters);

}  // namespace millrace::switching
