// The books of the shared buffer: who may use how many bytes of it. There are two views of the same packets,
// as in switch chips: by egress queue, and by ingress port and priority group. A packet is admitted when both
// have room: a reserve of their own first, then the shared part, of which a dynamic threshold gives each
// 2^n times what is still free (Choudhury and Hahne, "Dynamic Queue Length Thresholds", 1998). What a
// lossless group gets beyond its threshold goes to its headroom. Pure; one worker; nothing is allocated.
#pragma once

#include <vector>

#include "buffering/config.h"

namespace millrace::buffering {

inline constexpr uint16_t kNoSource = UINT16_MAX;  // charged to no ingress port: our own, or drained

class SharedBuffer {
 public:
  explicit SharedBuffer(const Config& config);

  enum class Verdict : uint8_t {
    kFits,
    kFitsHeadroom,  // the sender is to be paused
    kQueueFull,
    kGroupFull,
    kHeadroomFull,
    kPoolFull,
  };
  struct Place {
    uint16_t port;
    uint8_t queue;
    uint16_t source;  // ingress port, or kNoSource
    uint8_t group;
  };
  Verdict ask(const Place& p, uint64_t bytes) const noexcept;
  // After kFits… only.
  void charge(const Place& p, uint64_t bytes, bool headroom) noexcept;
  void release(const Place& p, uint64_t bytes) noexcept;

  uint64_t queue_bytes(uint16_t port, uint8_t queue) const { return queues_[port * kClasses + queue].bytes; }
  uint64_t group_bytes(uint16_t port, uint8_t group) const {
    const Account& a = groups_[port * kClasses + group];
    return a.bytes + a.headroom;
  }
  uint64_t headroom_bytes(uint16_t port, uint8_t group) const {
    return groups_[port * kClasses + group].headroom;
  }
  // Whether a paused group has room enough again for its sender to go on.
  bool may_resume(uint16_t port, uint8_t group) const noexcept;
  uint64_t used() const { return used_; }  // all packets in all queues
  uint64_t headroom_used() const { return headroom_; }
  uint64_t size() const { return size_; }

 private:
  struct Account {
    uint64_t bytes = 0;     // without those in the headroom
    uint64_t headroom = 0;  // groups only
    const BufferProfile* profile = nullptr;
  };
  // The part of either view that is not reserved.
  struct View {
    uint64_t size = 0, used = 0;
    uint64_t free() const { return size - std::min(used, size); }
  };
  static uint64_t threshold(const BufferProfile& profile, uint64_t free) noexcept;
  static uint64_t shared_of(const Account& a) { return a.bytes - std::min(a.bytes, a.profile->size); }
  enum class Fit : uint8_t { kFits, kOverThreshold, kPoolFull };
  static Fit fit(const Account& a, const View& view, uint64_t bytes) noexcept;
  static void add(Account& a, View& view, uint64_t bytes) noexcept;
  static void take(Account& a, View& view, uint64_t bytes) noexcept;

  std::vector<BufferProfile> profiles_;  // queues', then groups'
  std::vector<Account> queues_, groups_;
  View egress_, ingress_;
  uint64_t size_, headroom_size_, headroom_ = 0, used_ = 0;
};

}  // namespace millrace::buffering
