// The cache of registrations against memory that really comes and goes: what the kernel tells about munmap
// and its like, a fake device that remembers what is registered.
#include "host/registration_cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <thread>

#include "roce/error.h"

namespace millrace::host {
namespace {

class FakeRegistrar : public Registrar {
 public:
  MemoryRegion enroll(const void* address, size_t bytes, Access access, void*& handle) override {
    size_t pinned = bytes;
    for (const auto& [key, memory] : live) pinned += memory.second;
    if (refuse || pinned > limit) throw Error(ErrorCode::kSystem, "no");
    const uint32_t key = ++last_key;
    live[key] = {address, bytes};
    handle = reinterpret_cast<void*>(uintptr_t{key});
    return {.id = 0, .lkey = key, .rkey = access == Access::kResult ? key : 0};
  }
  void dismiss(void* handle) override {
    ASSERT_EQ(live.erase(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(handle))), 1u);
  }
  std::map<uint32_t, std::pair<const void*, size_t>> live;
  uint32_t last_key = 0;
  bool refuse = false;
  size_t limit = SIZE_MAX;  // of bytes registered at once
};

constexpr size_t kBytes = 1 << 20;

void* map(void* at = nullptr, int flags = MAP_PRIVATE | MAP_ANONYMOUS, int fd = -1, size_t bytes = kBytes) {
  void* p = mmap(at, bytes, PROT_READ | PROT_WRITE, flags | (at ? MAP_FIXED : 0), fd, 0);
  EXPECT_NE(p, MAP_FAILED);
  return p;
}

class Cache : public testing::Test {
 protected:
  void SetUp() override {
    cache_ = std::make_unique<RegistrationCache>(registrar_);
    if (!cache_->objection().empty()) GTEST_SKIP() << "nothing can be watched here: " << cache_->objection();
    memory_ = map();
  }
  void TearDown() override {
    if (memory_) munmap(memory_, kBytes);
    cache_.reset();
    EXPECT_TRUE(registrar_.live.empty());
  }
  // Uses memory for one call, as an operation does; the key that it had.
  uint32_t use(const void* address, size_t bytes = kBytes, Access access = Access::kResult) {
    const MemoryRegion region = cache_->acquire(address, bytes, access);
    cache_->release(region);
    return region.lkey;
  }
  uint8_t* at(size_t offset) { return static_cast<uint8_t*>(memory_) + offset; }

  FakeRegistrar registrar_;
  std::unique_ptr<RegistrationCache> cache_;
  void* memory_ = nullptr;
};

TEST_F(Cache, TheSameBufferAndPartsOfItAreRegisteredOnce) {
  const uint32_t key = use(memory_);
  EXPECT_EQ(use(memory_), key);
  EXPECT_EQ(use(at(1000), 5000), key);
  EXPECT_EQ(use(at(1000), 5000, Access::kSend), key);
  EXPECT_EQ(registrar_.last_key, 1u);
  EXPECT_EQ(cache_->counters().hits, 3u);
}

TEST_F(Cache, ALargerPieceReplacesThoseWithinIt) {
  use(at(0), 4096), use(at(8192), 4096);
  EXPECT_EQ(registrar_.live.size(), 2u);
  use(memory_);
  EXPECT_EQ(registrar_.live.size(), 1u);
}

TEST_F(Cache, MemoryThatMayOnlyBeSentFromIsNoTargetOfResults) {
  const uint32_t key = use(memory_, kBytes, Access::kSend);
  const MemoryRegion region = cache_->acquire(memory_, kBytes, Access::kResult);
  EXPECT_NE(region.lkey, key);
  EXPECT_NE(region.rkey, 0u);
  cache_->release(region);
}

TEST_F(Cache, UnmappedMemoryIsNeverUsedAgain) {
  const uint32_t key = use(memory_);
  munmap(memory_, kBytes);
  ASSERT_EQ(map(memory_), memory_);  // other pages at the same place
  EXPECT_NE(use(memory_), key);
  EXPECT_EQ(registrar_.live.size(), 1u);
  EXPECT_EQ(cache_->counters().invalidated, 1u);
}

TEST_F(Cache, OnePageOfItIsEnough) {
  const uint32_t key = use(memory_);
  munmap(at(kBytes / 2), 4096);
  ASSERT_EQ(map(at(kBytes / 2), MAP_PRIVATE | MAP_ANONYMOUS, -1, 4096), at(kBytes / 2));
  EXPECT_NE(use(memory_), key);
}

TEST_F(Cache, MappedOverIsGone) {
  const uint32_t key = use(memory_);
  map(memory_);  // MAP_FIXED takes the old mapping away
  EXPECT_NE(use(memory_), key);
}

TEST_F(Cache, GivenBackByMadviseIsGone) {
  const uint32_t key = use(memory_);
  ASSERT_EQ(madvise(memory_, kBytes, MADV_DONTNEED), 0);
  EXPECT_NE(use(memory_), key);
}

TEST_F(Cache, MovedByMremapIsGone) {
  const uint32_t key = use(memory_);
  void* elsewhere = mremap(memory_, kBytes, 2 * kBytes, MREMAP_MAYMOVE);
  ASSERT_NE(elsewhere, MAP_FAILED);
  if (elsewhere != memory_) {
    ASSERT_EQ(map(memory_), memory_);
    EXPECT_NE(use(memory_), key);
  }
  EXPECT_NE(use(elsewhere, 2 * kBytes), key);
  munmap(elsewhere, 2 * kBytes);
  if (elsewhere == memory_) memory_ = nullptr;
}

#ifndef __SANITIZE_ADDRESS__  // whose free() keeps the memory
TEST_F(Cache, FreedHeapMemoryIsGone) {
  // Large enough for a mapping of its own, which free() unmaps.
  void* p = std::malloc(64 << 20);
  std::memset(p, 1, 64 << 20);
  const uint32_t key = use(p, 64 << 20);
  std::free(p);
  EXPECT_EQ(cache_->counters().invalidated, 1u);
  void* q = std::malloc(64 << 20);
  EXPECT_NE(use(q, 64 << 20), key);
  std::free(q);
}
#endif

TEST_F(Cache, MemoryInUseOutlivesItsUnmapping) {
  // A mistake of the application's: the device keeps its pages until the operation is over.
  const MemoryRegion region = cache_->acquire(memory_, kBytes, Access::kResult);
  munmap(std::exchange(memory_, nullptr), kBytes);
  cache_->sweep();
  EXPECT_EQ(registrar_.live.size(), 1u);
  cache_->release(region);
  EXPECT_TRUE(registrar_.live.empty());
}

TEST_F(Cache, MemoryThatCannotBeWatchedIsRegisteredForTheCall) {
  std::FILE* file = std::tmpfile();
  ASSERT_EQ(ftruncate(fileno(file), kBytes), 0);
  void* p = map(nullptr, MAP_PRIVATE, fileno(file));
  const MemoryRegion region = cache_->acquire(p, kBytes, Access::kSend);
  const size_t during = registrar_.live.size();
  cache_->release(region);
  EXPECT_EQ(during, 1u);
  EXPECT_TRUE(registrar_.live.empty());
  munmap(p, kBytes);
  std::fclose(file);
}

TEST_F(Cache, SharedMemoryWhichOthersMayTruncateIsRegisteredForTheCall) {
  const int fd = memfd_create("shared", 0);
  ASSERT_EQ(ftruncate(fd, kBytes), 0);
  void* p = map(nullptr, MAP_SHARED, fd);
  std::memset(p, 1, kBytes);
  const MemoryRegion region = cache_->acquire(p, kBytes, Access::kResult);
  EXPECT_EQ(registrar_.live.size(), 1u);
  cache_->release(region);
  EXPECT_TRUE(registrar_.live.empty());
  munmap(p, kBytes);
  close(fd);
}

TEST_F(Cache, WhatIsKeptMakesRoomUnderTheLimitOfLockedMemory) {
  registrar_.limit = kBytes / 2;
  const uint32_t first = use(at(0), kBytes / 2);
  EXPECT_NE(use(at(kBytes / 2), kBytes / 2), first);
  const MemoryRegion held = cache_->acquire(at(0), kBytes / 2, Access::kSend);
  EXPECT_THROW(cache_->acquire(at(kBytes / 2), 4096, Access::kSend), Error);
  cache_->release(held);
}

// A child that never executes anything must not keep the parent's watches alive: nobody would read what they
// say, and unmapping would wait for ever.
TEST_F(Cache, AForkedChildDoesNotHoldTheParentsMemory) {
  use(memory_);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char byte;
    close(gate[1]);
    (void)!read(gate[0], &byte, 1);
    _exit(0);
  }
  close(gate[0]);
  cache_.reset();
  munmap(std::exchange(memory_, nullptr), kBytes);  // hangs where the child holds the watch
  close(gate[1]);
  int status;
  ASSERT_EQ(waitpid(child, &status, 0), child);
}

// Of two threads that give memory back and are given the same addresses, only the first is held up until its
// event has been read.
TEST_F(Cache, MemoryThatAnotherThreadWasGivenIsNotTakenForTheOld) {
  for (int round = 0; round < 300; round++) {
    const uint32_t key = use(memory_);
    std::atomic<bool> unmapped{false};
    std::thread application([&] {
      unmapped = true;
      munmap(memory_, kBytes);
    });
    while (!unmapped) {
    }
    // As soon as the addresses are free, whatever the monitor's thread has heard.
    void* again;
    while ((again = mmap(memory_, kBytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0)) == MAP_FAILED) {
    }
    ASSERT_EQ(again, memory_);
    EXPECT_NE(use(memory_), key) << "round " << round;
    application.join();
  }
}

TEST_F(Cache, IdleRegistrationsAreBoundedTheOldestGoFirst) {
  RegistrationCache small(registrar_, 3 * 4096);
  auto use_small = [&](size_t page) {
    const MemoryRegion region = small.acquire(at(page * 4096), 4096, Access::kSend);
    small.release(region);
    return region.lkey;
  };
  const uint32_t first = use_small(0), second = use_small(2);
  use_small(4);
  EXPECT_EQ(use_small(0), first);  // now the second is the oldest
  use_small(6);
  EXPECT_LE(registrar_.live.size(), 3u);
  EXPECT_EQ(use_small(0), first);
  EXPECT_NE(use_small(2), second);
}

TEST_F(Cache, TooManyInUseAreRefusedAndIdleOnesMakeRoom) {
  std::vector<MemoryRegion> held;
  for (size_t i = 0; i < RegistrationCache::kEntriesMax; i++)
    held.push_back(cache_->acquire(at(i * 128), 64, Access::kSend));
  EXPECT_THROW(cache_->acquire(at(kBytes - 64), 64, Access::kSend), Error);
  cache_->release(held.back());
  held.pop_back();
  held.push_back(cache_->acquire(at(kBytes - 64), 64, Access::kSend));
  for (const MemoryRegion& region : held) cache_->release(region);
}

TEST_F(Cache, ARefusalLeavesNothing) {
  registrar_.refuse = true;
  EXPECT_THROW(use(memory_), Error);
  registrar_.refuse = false;
  EXPECT_EQ(cache_->registrations(), 0u);
  use(memory_);
}

// The race that matters: another thread unmaps and maps again and again while this one registers. A key must
// never be handed out for pages that were unmapped before acquire() was called.
TEST_F(Cache, ConcurrentUnmappingIsNeverMissed) {
  std::atomic<uint32_t> generation{0}, asked{0};
  std::atomic<bool> stop{false};
  std::thread application([&] {
    while (!stop) {
      munmap(memory_, kBytes);
      map(memory_);
      generation++;
      while (asked != generation && !stop) std::this_thread::yield();
    }
  });
  uint32_t last = 0;
  for (int rounds = 0; rounds < 200;) {
    const uint32_t now = generation;
    if (now == asked) {
      std::this_thread::yield();
      continue;
    }
    const uint32_t key = use(memory_);
    EXPECT_NE(key, last);
    last = key;
    EXPECT_EQ(use(memory_), key);
    asked = now;
    rounds++;
  }
  stop = true;
  application.join();
  EXPECT_EQ(registrar_.last_key, 200u);
}

}  // namespace
}  // namespace millrace::host
