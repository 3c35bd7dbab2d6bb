// What the spillway counts; single writer, the worker.
#pragma once

#include <array>
#include <string_view>

#include "buffering/amount.h"
#include "roce/types.h"

namespace millrace::buffering {

// Why a packet that was spilled, or should have been, is dropped.
#define MILLRACE_SPILL_DROPS(X)                                                    \
  X(kFull, "full")             /* the pool, or its store, has no room */           \
  X(kKeyFull, "key_full")      /* spill_key_limit */                               \
  X(kKeys, "keys")             /* spill_max_keys */                                \
  X(kResidence, "residence")   /* held for longer than max_residence */            \
  X(kStoreLost, "store_lost")  /* its lender is gone */                            \
  X(kWatchdog, "pfc_watchdog") /* of a queue that the PFC watchdog has emptied */  \
  X(kUnrouted, "unrouted")     /* its port went down, and there is no other way */ \
  X(kNotAgain, "not_again")    /* re-routed, and the other port has no room */

enum class SpillDrop : uint8_t {
#define X(id, text) id,
  MILLRACE_SPILL_DROPS(X)
#undef X
      kCount
};
inline constexpr size_t kSpillDrops = static_cast<size_t>(SpillDrop::kCount);
inline constexpr std::array<std::string_view, kSpillDrops> kSpillDropNames = {
#define X(id, text) text,
    MILLRACE_SPILL_DROPS(X)
#undef X
};

// Why no CNP is sent for a packet that is spilled and ECN-capable (fast_cnp).
#define MILLRACE_CNP_SUPPRESSIONS(X)                                                  \
  X(kUnknownQp, "unknown_qp") /* the CM's exchange did not come by here */            \
  X(kInterval, "interval")    /* fast_cnp_interval: its sender was told just now */   \
  X(kShrinking, "shrinking")  /* its key shrinks: enough have slowed down, for now */ \
  X(kNoFrames, "no_frames")

enum class CnpSuppressed : uint8_t {
#define X(id, text) id,
  MILLRACE_CNP_SUPPRESSIONS(X)
#undef X
      kCount
};
inline constexpr size_t kCnpSuppressions = static_cast<size_t>(CnpSuppressed::kCount);
inline constexpr std::array<std::string_view, kCnpSuppressions> kCnpSuppressionNames = {
#define X(id, text) text,
    MILLRACE_CNP_SUPPRESSIONS(X)
#undef X
};

// Of one key, one port or all together. spilled = drained + rerouted + resident + dropped after having been
// spilled (`lost`), in packets and in bytes, at every moment.
struct SpillCounters {
  Amount offered;  // eligible packets that met a full queue or a key that is not empty
  Amount spilled;  // of these, taken in
  Amount drained, rerouted, resident;
  std::array<Amount, kSpillDrops> refused{};  // not taken in
  std::array<Amount, kSpillDrops> lost{};     // taken in, and dropped later
  uint64_t resident_bytes_max = 0;            // high watermark
  uint64_t transitions = 0;                   // between pass, spill and drain
  uint64_t ce_marked = 0;
  uint64_t cnps_sent = 0;  // by the switch itself
  std::array<uint64_t, kCnpSuppressions> cnps_suppressed{};
  uint64_t acks_held = 0;  // acknowledgements that joined a key, to stay in order; part of spilled
  std::array<uint64_t, 24> residence{};  // drained packets by time held: below 2^n µs, n = 0 …
  Time held_by_pfc{};                    // time in which pauses kept packets in

  void suppressed(CnpSuppressed why) { cnps_suppressed[static_cast<size_t>(why)]++; }
  Amount refused_in_all() const { return sum(refused); }
  Amount lost_in_all() const { return sum(lost); }

 private:
  static Amount sum(const std::array<Amount, kSpillDrops>& all) {
    Amount a;
    for (const Amount& one : all) a.packets += one.packets, a.bytes += one.bytes;
    return a;
  }
};

}  // namespace millrace::buffering
