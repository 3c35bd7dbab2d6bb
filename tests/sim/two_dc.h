// Two datacenters in virtual time: a transfer over a long link meets a local burst of twice the rate of the
// port that both go to, beside an unrelated flow that shares the long link.
#pragma once

#include "tests/sim/lab.h"

namespace millrace::sim {

enum class Relief : uint8_t { kDrop, kSpill, kPfc };
// DCQCN at the senders. kUnmarked: it is on, but the spillway takes what would be marked, and does not mark
// it (spill_mark_ce: false, the queue's limit at Kmin).
enum class Control : uint8_t { kOff, kOn, kUnmarked };

struct TwoDcCase {
  Relief relief = Relief::kSpill;
  Time round_trip = std::chrono::milliseconds(1);
  uint64_t cross_bytes = 32 << 20;  // of payload
  uint64_t buffer_bytes = 1'000'000;
  bool short_flows = false;  // the burst: as flows of 125 KB, else as four
  Control dcqcn = Control::kOff;
  bool fast_cnp = false;
  DcqcnParameters reaction = StreamConfig{}.reaction;
};

struct TwoDcResult {
  bool finished = false;
  Time cross{}, burst{}, ideal{};  // from the first packet to the last acknowledgement
  uint64_t drops = 0;              // of any kind, in the switch
  uint64_t cross_retransmitted = 0, cross_naks = 0, burst_retransmitted = 0, timeouts = 0, marked = 0;
  uint64_t peak_bytes = 0, peak_expected = 0;  // wire bytes in the spillway
  double unrelated_gbit = 0;                   // what was left of its 0.4 Gb/s while the burst lasted
};

// Rates in Gb/s: port 10, cross 9.5, burst 2 × 10 for 10 ms, unrelated 0.4.
TwoDcResult run_two_dc(const TwoDcCase& c);

}  // namespace millrace::sim
