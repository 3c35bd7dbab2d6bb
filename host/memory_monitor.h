// Tells when the application gives registered memory back to the system (munmap, a shrinking heap, mremap,
// MADV_DONTNEED): a registration of it would go on pointing to pages that are no longer the application's. By
// userfaultfd(2), whose events hold the call up that gave the memory back until they have been read. Needs no
// privilege.
//
// That holds only that one call up: another thread may be given the same addresses before the event has been
// read. So whoever relies on a range calls settle() first, which reads what has happened so far.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "host/file_descriptor.h"

namespace millrace::host {

class MemoryMonitor {
 public:
  // `gone` is called with `mutex` held, on the monitor's own thread or within settle(), for each range of
  // addresses that has lost its pages. Whoever holds `mutex` must neither free nor unmap memory: that would
  // wait for this thread, and it for them.
  MemoryMonitor(std::mutex& mutex, std::function<void(uintptr_t begin, uintptr_t end)> gone);
  ~MemoryMonitor();
  MemoryMonitor(const MemoryMonitor&) = delete;
  MemoryMonitor& operator=(const MemoryMonitor&) = delete;

  // Why nothing can be watched here; empty where it can.
  const std::string& objection() const { return objection_; }
  // Watches the pages of [begin, end) until they are gone. false: they cannot be (a file's, another
  // monitor's).
  bool watch(uintptr_t begin, uintptr_t end);
  // Stops watching pages that are watched still.
  void unwatch(uintptr_t begin, uintptr_t end);
  // With `mutex` held: when it returns, `gone` has been called for all that was unmapped before.
  void settle();
  // Whether the pages of [begin, end), which are all present, are private to this process: those of files and
  // of shared memory can be taken away by others, without a word.
  static bool is_private(uintptr_t begin, uintptr_t end);

 private:
  void run();
  void take_events();
  bool ready();
  void disable(const char* what);

  std::mutex& mutex_;
  std::function<void(uintptr_t, uintptr_t)> gone_;
  std::string objection_;
  void* own_page_ = nullptr;  // watched, to ask questions by
  FileDescriptor events_, stop_;
  std::thread thread_;
};

}  // namespace millrace::host
