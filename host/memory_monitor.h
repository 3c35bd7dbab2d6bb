// Tells when the application gives registered memory back to the system (munmap, a shrinking heap, mremap,
// MADV_DONTNEED): a registration of it would go on pointing to pages that are no longer the application's. By
// userfaultfd(2), whose events hold the application's call up until they have been read, so that nobody can
// use the same addresses again before the owner of the monitor knows. Needs no privilege.
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
  // `gone` is called on the monitor's own thread, with `mutex` held, for each range of addresses that has
  // lost its pages. Whoever holds `mutex` must neither free nor unmap memory: that would wait for this
  // thread, and it for them.
  MemoryMonitor(std::mutex& mutex, std::function<void(uintptr_t begin, uintptr_t end)> gone);
  ~MemoryMonitor();
  MemoryMonitor(const MemoryMonitor&) = delete;
  MemoryMonitor& operator=(const MemoryMonitor&) = delete;

  // Why nothing can be watched here; empty where it can.
  const std::string& objection() const { return objection_; }
  // Watches the pages of [begin, end) until they are gone. false: they cannot be (a file's, another
  // monitor's).
  bool watch(uintptr_t begin, uintptr_t end);

 private:
  void run();
  void take_events();

  std::mutex& mutex_;
  std::function<void(uintptr_t, uintptr_t)> gone_;
  std::string objection_;
  uintptr_t page_bytes_;
  FileDescriptor events_, stop_;
  std::thread thread_;
};

}  // namespace millrace::host
