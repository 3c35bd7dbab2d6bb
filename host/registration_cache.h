// Registrations of application memory that outlive the call they were made for, since to pin pages costs more
// than to send them. Bounded; a registration whose memory the application gives back is never used again
// (MemoryMonitor), and where that cannot be known, nothing is kept. The progress thread calls it.
#pragma once

#include <array>
#include <memory>
#include <mutex>

#include "host/memory_monitor.h"
#include "host/transport.h"

namespace millrace::host {

// Who really registers: a protection domain; a fake in tests.
class Registrar {
 public:
  virtual ~Registrar() = default;
  // Fills in lkey and rkey (0 for kSend). `handle` is given back to deregister(). Throws millrace::Error.
  virtual MemoryRegion enroll(const void* address, size_t bytes, Access access, void*& handle) = 0;
  virtual void dismiss(void* handle) = 0;
};

class RegistrationCache {
 public:
  static constexpr size_t kEntriesMax = 512;  // in use and idle together
  static constexpr size_t kIdleBytesMax = size_t{4} << 30;

  struct Counters {
    uint64_t hits = 0, misses = 0, invalidated = 0, evicted = 0;
  };

  // `registrar` outlives the cache. idle_bytes_max: what may stay registered with nobody using it.
  explicit RegistrationCache(Registrar& registrar, size_t idle_bytes_max = kIdleBytesMax);
  ~RegistrationCache();
  RegistrationCache(const RegistrationCache&) = delete;
  RegistrationCache& operator=(const RegistrationCache&) = delete;

  // A registration that covers [address, address + bytes), until release(). Throws millrace::Error.
  MemoryRegion acquire(const void* address, size_t bytes, Access access);
  void release(const MemoryRegion& region);
  // Ends those registrations that nobody uses and that must or can not be kept.
  void sweep();

  size_t registrations() const;
  Counters counters() const;
  // Why nothing is kept; empty where it is.
  const std::string& objection() const { return monitor_->objection(); }

 private:
  enum class State : uint8_t { kFree, kValid, kStale };
  struct Entry {
    State state = State::kFree;
    Access access = Access::kSend;
    bool watched = false;
    uint32_t users = 0;
    uintptr_t begin = 0, end = 0;
    uint64_t used_at = 0;
    MemoryRegion region;
    void* handle = nullptr;
  };

  Entry* find(uintptr_t begin, uintptr_t end, Access access);
  Entry* claim();
  void take(Entry& e);
  void clear(Entry& e);
  bool overlaps_any(const Entry& gone) const;
  size_t drop_idle(size_t bytes_wanted);
  template <typename Which>
  size_t dismiss_if(Which which);

  Registrar& registrar_;
  const size_t idle_bytes_max_;
  // Held by the monitor too: nothing under it may free memory, so entries have their places from the start.
  mutable std::mutex mutex_;
  std::array<Entry, kEntriesMax> entries_;
  size_t places_ = 0;      // of entries_ that have ever been used: what is to be searched
  size_t idle_bytes_ = 0;  // of valid entries without users
  Counters counters_;
  uint64_t clock_ = 0;
  bool stale_ = false;
  std::unique_ptr<MemoryMonitor> monitor_;
};

}  // namespace millrace::host
