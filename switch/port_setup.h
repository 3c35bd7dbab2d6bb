// What a port's device is asked for once it runs, and what it tells: priority flow control in hardware, and
// the speed of its link. Pure, so that a test can play a device that can, cannot, or fails half-way;
// switch/port.cc speaks to DPDK. Called at start-up only.
//
// Who does what with PFC in hardware. The device sends pauses by itself when its receive buffer fills, which
// it does when the worker is late: software has not even seen these packets. Pauses for a priority group that
// is over its threshold stay the traffic manager's to send, and received pauses its to obey: a port has one
// transmit queue, so that a device that obeyed would stop all classes for one, and the watchdog, the spillway
// and the counters would know nothing of it. So the device is told to pass pauses up and not to obey. Both
// may speak for one priority, and a pause replaces the one before it: the device's is as long as the traffic
// manager's (the longest there is), and it never says "go on", or it would end what the other began.
#pragma once

#include <string>
#include <vector>

#include "buffering/config.h"

namespace millrace::switching {

struct PfcRequest {
  enum class Kind : uint8_t {
    kPriority,  // rte_eth_dev_priority_flow_ctrl_set
    kQueue,     // rte_eth_dev_priority_flow_ctrl_queue_configure
  };
  Kind kind = Kind::kPriority;
  bool on = true;  // false: as it was
  uint8_t priority = 0;
  // Of kPriority, in KiB as drivers have it: how full the receive buffer is when a pause is sent, and when no
  // more are.
  uint32_t high_water = 0, low_water = 0;
  uint16_t pause_time = 0;  // quanta
  uint16_t rx_queue = 0;    // of kQueue
  friend bool operator==(const PfcRequest&, const PfcRequest&) = default;
};

// Of pauses by receive queue.
struct PfcQueueAbilities {
  uint8_t classes = 0;
  bool sends = false;
};

// Each answers as DPDK does: 0, or a negative errno.
class PfcDevice {
 public:
  virtual ~PfcDevice() = default;
  virtual int queue_abilities(PfcQueueAbilities& abilities) = 0;
  virtual int queue_configure(const PfcRequest& request) = 0;
  virtual int priority_set(const PfcRequest& request) = 0;
  // No pauses for the whole link, and those that come are passed up.
  virtual int pass_pauses_up() = 0;
};

// Empty where nothing is lossless, or where this kind cannot say it: a queue speaks for one priority, and a
// port has one receive queue.
std::vector<PfcRequest> plan_pfc(const buffering::PortConfig& port, PfcRequest::Kind kind,
                                 const PfcQueueAbilities& abilities);

struct PfcOutcome {
  bool wanted = false;    // the port has PFC
  bool hardware = false;  // the device sends pauses, too; false: the traffic manager alone
  std::string why;        // a sentence without its end
};

// Throws Error (kNoDevice) where pfc_hardware is on and the device cannot; then, as wherever it is not done
// whole, what had been done is taken back.
PfcOutcome configure_pfc(PfcDevice& device, const buffering::PortConfig& port);

// What links run at, bit/s by port, 0 where nobody knows, becomes the speed of ports that were told none. The
// return value is where the rate of the switch's own queue pairs begins: the fastest port's; 0: not known.
uint64_t adopt_speeds(std::vector<buffering::PortConfig>& ports, const std::vector<uint64_t>& links);

}  // namespace millrace::switching
