// Which port a MAC address was last seen on: a bounded table with ageing, learned from source addresses.
// Owned and called by one worker; memory is taken once, at construction. Time comes from the caller.
//
// Addresses are learned per domain: the VLAN of the frame on bridged ports (802.1Q's independent learning; 0
// is untagged and priority-tagged), a routed port's own otherwise. A router or a virtual machine host has one
// MAC address in several VLANs, behind different ports; in one table for all it would seem to move with each
// frame. And what was heard on a routed port can never be found for a bridged frame.
#pragma once

#include <algorithm>
#include <vector>

#include "roce/types.h"

namespace millrace::switching {

struct L2Config {
  Time ageing = std::chrono::seconds(300);
  uint32_t entries_max = 16384;
  uint32_t flood_pps = 10000;  // frames flooded per ingress port and second (the pipeline's bound)
  // An address that spoke on its port within this time does not move to another one: a forged source cannot
  // take a live host's traffic away, a host that really moves is believed after a moment of silence. The port
  // that it moved from takes it back at once: who forged it while its owner was silent has it until the owner
  // speaks, and no longer.
  Time move_guard = std::chrono::seconds(1);
};

inline constexpr uint16_t kNoPort = UINT16_MAX;
inline constexpr uint16_t kVlans = 4096;
// The domain of a routed port, apart from those of all VLANs.
constexpr uint16_t routed_domain(uint16_t port) { return static_cast<uint16_t>(kVlans + port); }

class L2Table {
 public:
  // `seed` makes the hash unpredictable, so that nobody can aim sources at one bucket.
  L2Table(const L2Config& config, uint16_t ports, uint64_t seed);

  // kMoveRefused: the address is alive on another port and stays there.
  enum class Learned { kKnown, kNew, kMoved, kMoveRefused, kFull };
  Learned learn(const MacAddress& mac, uint16_t domain, uint16_t port, Time now) noexcept;
  // kNoPort: unknown, or not seen for `ageing`.
  uint16_t lookup(const MacAddress& mac, uint16_t domain, Time now) const noexcept;

  struct Entry {
    MacAddress mac;
    uint16_t domain;
    uint16_t port;
    Time age;
  };
  std::vector<Entry> entries(Time now) const;  // those not aged
  uint32_t size() const { return size_; }      // aged ones that nobody has cleared yet included

 private:
  // Packed, so that four make a cache line. Times are kept in units of 2^16 ns, a 15th of a millisecond.
  struct Slot {
    uint64_t key = 0;    // MAC << 16 | domain; 0: free (the zero MAC is never a source)
    uint64_t state = 0;  // when it was seen, its low 16 bits replaced by the port
    uint16_t port() const { return static_cast<uint16_t>(state & 0xFFFF); }
    Time seen() const { return Time(static_cast<int64_t>(state & ~uint64_t{0xFFFF})); }
    void see(uint16_t port, Time now) {
      state = (static_cast<uint64_t>(now.count()) & ~uint64_t{0xFFFF}) | port;
    }
  };
  static constexpr uint64_t kNobody = UINT64_MAX;  // a state whose port is kNoPort
  static constexpr size_t kWays = 4;
  struct alignas(64) Bucket {
    Slot slots[kWays];
  };

  bool aged(const Slot& slot, Time now) const { return now - slot.seen() >= config_.ageing; }
  const Slot* find(uint64_t key) const noexcept;
  bool may_add(uint16_t port) const noexcept;
  void occupy(Slot& slot, uint64_t key, uint16_t port, Time now) noexcept;
  void release(Slot& slot) noexcept;
  Learned move(Slot& slot, uint16_t port, Time now) noexcept;
  uint64_t& former(const Slot& slot) noexcept;
  void sweep(Time now) noexcept;
  size_t bucket_of(uint64_t key, int choice) const noexcept;

  L2Config config_;
  uint64_t seed_;
  std::vector<Bucket> buckets_;
  // By slot: its state when it left the port that it was on before, or kNobody. Apart, as only moves look.
  std::vector<uint64_t> former_;
  size_t mask_;
  size_t hand_ = 0;
  uint32_t size_ = 0;
  // Each port keeps a share of the table that no other port can use, so that a flood of sources on one port
  // cannot keep the hosts of another from being learned.
  uint32_t reserve_;
  uint32_t reserved_left_;
  std::vector<uint32_t> per_port_;
};

// A rate in frames per second with a tenth of a second of burst; kept as time, so that it needs no rounding.
class TokenBucket {
 public:
  explicit TokenBucket(uint32_t per_second)
      : cost_(std::chrono::nanoseconds(std::chrono::seconds(1)) / per_second),
        burst_(std::max(cost_, Time(std::chrono::milliseconds(100)))),
        credit_(burst_) {}
  bool take(Time now) noexcept {
    credit_ = std::min(burst_, credit_ + (now - last_));
    last_ = now;
    if (credit_ < cost_) return false;
    credit_ -= cost_;
    return true;
  }

 private:
  Time cost_, burst_, credit_;
  Time last_{};
};

}  // namespace millrace::switching
