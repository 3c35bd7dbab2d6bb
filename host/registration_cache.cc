#include "host/registration_cache.h"

#include <algorithm>
#include <cassert>
#include <span>
#include <utility>

#include "roce/error.h"

namespace millrace::host {

RegistrationCache::RegistrationCache(Registrar& registrar, size_t idle_bytes_max)
    : registrar_(registrar), idle_bytes_max_(idle_bytes_max) {
  monitor_ = std::make_unique<MemoryMonitor>(mutex_, [this](uintptr_t begin, uintptr_t end) {
    for (Entry& e : std::span(entries_).first(places_)) {
      if (e.state != State::kValid || e.begin >= end || begin >= e.end) continue;
      if (e.users == 0) idle_bytes_ -= e.end - e.begin;
      e.state = State::kStale;
      stale_ = true;
      counters_.invalidated++;
    }
  });
}

RegistrationCache::~RegistrationCache() {
  dismiss_if([](const Entry&) { return true; });
}

RegistrationCache::Entry* RegistrationCache::find(uintptr_t begin, uintptr_t end, Access access) {
  for (Entry& e : std::span(entries_).first(places_))
    if (e.state == State::kValid && e.begin <= begin && end <= e.end &&
        (access == Access::kSend || e.access == Access::kResult))
      return &e;
  return nullptr;
}

RegistrationCache::Entry* RegistrationCache::claim() {
  std::lock_guard lock(mutex_);
  for (Entry& e : entries_) {
    if (e.state != State::kFree) continue;
    places_ = std::max(places_, static_cast<size_t>(&e - entries_.data()) + 1);
    return &e;
  }
  return nullptr;
}

// One user more.
void RegistrationCache::take(Entry& e) {
  if (e.users++ == 0) idle_bytes_ -= e.end - e.begin;
  e.used_at = ++clock_;
}

void RegistrationCache::clear(Entry& e) {
  if (e.state == State::kValid && e.users == 0) idle_bytes_ -= e.end - e.begin;
  e = Entry{};
}

// Whether another entry is on one of its pages, or next to it: a page is watched for all of them.
bool RegistrationCache::overlaps_any(const Entry& gone) const {
  constexpr uintptr_t kNear = 1 << 21;  // of any page size
  return std::any_of(
      entries_.begin(), entries_.begin() + static_cast<ptrdiff_t>(places_), [&](const Entry& e) {
        return e.state != State::kFree && e.begin < gone.end + kNear && gone.begin < e.end + kNear;
      });
}

// Deregisters what `which` names, one at a time, since the lock must not be held meanwhile; the number of
// bytes. Only this thread makes entries or ends them, the monitor only marks them.
template <typename Which>
size_t RegistrationCache::dismiss_if(Which which) {
  size_t bytes = 0;
  for (Entry& e : std::span(entries_).first(places_)) {
    Entry gone;
    bool unwatch;
    {
      std::lock_guard lock(mutex_);
      if (e.state == State::kFree || !which(e)) continue;
      gone = e;
      clear(e);
      unwatch = gone.state == State::kValid && gone.watched && !overlaps_any(gone);
    }
    bytes += gone.end - gone.begin;
    registrar_.dismiss(gone.handle);
    if (unwatch) monitor_->unwatch(gone.begin, gone.end);
  }
  return bytes;
}

// The least recently used go first, until as many bytes are free, or nobody is idle any more.
size_t RegistrationCache::drop_idle(size_t bytes_wanted) {
  size_t dropped = 0;
  while (dropped < bytes_wanted) {
    uint64_t oldest = UINT64_MAX;
    {
      std::lock_guard lock(mutex_);
      for (const Entry& e : entries_)
        if (e.state != State::kFree && e.users == 0) oldest = std::min(oldest, e.used_at);
      if (oldest == UINT64_MAX) break;
      counters_.evicted++;
    }
    dropped += dismiss_if([&](const Entry& e) { return e.users == 0 && e.used_at == oldest; });
  }
  return dropped;
}

MemoryRegion RegistrationCache::acquire(const void* address, size_t bytes, Access access) {
  const auto begin = reinterpret_cast<uintptr_t>(address), end = begin + bytes;
  assert(bytes > 0 && end > begin);
  sweep();
  {
    std::lock_guard lock(mutex_);
    monitor_->settle();
    if (Entry* e = find(begin, end, access)) {
      counters_.hits++;
      take(*e);
      return e->region;
    }
    counters_.misses++;
  }
  // Smaller ones within this one would only be in the way.
  dismiss_if([&](const Entry& e) {
    return e.users == 0 && begin <= e.begin && e.end <= end &&
           (access == Access::kResult || e.access == Access::kSend);
  });
  Entry* place = claim();
  if (place == nullptr && drop_idle(1) > 0) place = claim();
  if (place == nullptr)
    throw Error(ErrorCode::kSystem,
                "more than " + std::to_string(kEntriesMax) +
                    " buffers are registered at once: mr_register one large piece instead");
  // In the table before it is watched, watched before it is pinned: what is unmapped from here on is noticed.
  {
    std::lock_guard lock(mutex_);
    *place = {.state = State::kValid,
              .access = access,
              .users = 1,
              .begin = begin,
              .end = end,
              .used_at = ++clock_};
  }
  bool watched = monitor_->watch(begin, end);
  void* handle = nullptr;
  MemoryRegion region;
  while (true) {
    try {
      region = registrar_.enroll(address, bytes, access, handle);
      break;
    } catch (const Error&) {
      // What we keep for later may be what fills the limit of locked memory.
      if (drop_idle(bytes) > 0) continue;
      std::lock_guard lock(mutex_);
      *place = Entry{};
      throw;
    }
  }
  if (watched && !MemoryMonitor::is_private(begin, end)) watched = false;  // now that its pages are there
  region.id = static_cast<uint32_t>(place - entries_.data()) + 1;
  std::lock_guard lock(mutex_);
  place->watched = watched;
  place->region = region;
  place->handle = handle;
  return region;
}

void RegistrationCache::release(const MemoryRegion& region) {
  {
    std::lock_guard lock(mutex_);
    Entry& e = entries_[region.id - 1];
    assert(e.state != State::kFree && e.users > 0);
    if (--e.users > 0) return;
    if (!e.watched) e.state = State::kStale;
    if (e.state == State::kStale)
      stale_ = true;
    else
      idle_bytes_ += e.end - e.begin;
  }
  sweep();
}

void RegistrationCache::sweep() {
  size_t idle;
  bool stale;
  {
    std::lock_guard lock(mutex_);
    stale = std::exchange(stale_, false);
    idle = idle_bytes_;
  }
  if (stale) dismiss_if([](const Entry& e) { return e.state == State::kStale && e.users == 0; });
  if (idle > idle_bytes_max_) drop_idle(idle - idle_bytes_max_);
}

size_t RegistrationCache::registrations() const {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(entries_.begin(), entries_.end(),
                                           [](const Entry& e) { return e.state != State::kFree; }));
}

RegistrationCache::Counters RegistrationCache::counters() const {
  std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace millrace::host
