#include "host/memory_monitor.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>

namespace millrace::host {

MemoryMonitor::MemoryMonitor(std::mutex& mutex, std::function<void(uintptr_t, uintptr_t)> gone)
    : mutex_(mutex), gone_(std::move(gone)), page_bytes_(static_cast<uintptr_t>(sysconf(_SC_PAGESIZE))) {
  auto object = [&](const char* what) {
    objection_ = std::string(what) + ": " + std::system_category().message(errno);
    events_ = FileDescriptor();
  };
  // Faults are none of our business, so the restricted kind that every user may have will do.
  events_ = FileDescriptor(
      static_cast<int>(syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY)));
  if (!events_) {
    object("this system gives no userfaultfd");
    return;
  }
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE;
  if (ioctl(events_.get(), UFFDIO_API, &api) != 0) {
    object("userfaultfd reports no unmapped memory");
    return;
  }
  stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  if (!stop_) {
    object("cannot make an eventfd");
    return;
  }
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "millrace-memory");
  } catch (const std::system_error& e) {
    errno = e.code().value();
    object("cannot start a thread");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

MemoryMonitor::~MemoryMonitor() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_.get(), &one, sizeof one);
  thread_.join();
}

bool MemoryMonitor::watch(uintptr_t begin, uintptr_t end) {
  if (!events_) return false;
  uffdio_register request{};
  request.range.start = begin / page_bytes_ * page_bytes_;
  request.range.len = (end + page_bytes_ - 1) / page_bytes_ * page_bytes_ - request.range.start;
  // Nothing is ever write-protected: the mode that makes no fault, and so costs the application nothing.
  request.mode = UFFDIO_REGISTER_MODE_WP;
  return ioctl(events_.get(), UFFDIO_REGISTER, &request) == 0;
}

void MemoryMonitor::run() {
  std::array<pollfd, 2> descriptors{{{events_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
  while (true) {
    if (poll(descriptors.data(), descriptors.size(), -1) < 0 && errno != EINTR) return;
    if (descriptors[1].revents) return;
    if (descriptors[0].revents) take_events();
  }
}

// Reading an event lets the application's call return; the mutex keeps others from looking anything up
// between that and the call of gone_().
void MemoryMonitor::take_events() {
  std::lock_guard lock(mutex_);
  uffd_msg message;
  while (read(events_.get(), &message, sizeof message) == sizeof message) {
    if (message.event == UFFD_EVENT_UNMAP || message.event == UFFD_EVENT_REMOVE)
      gone_(message.arg.remove.start, message.arg.remove.end);
    if (message.event == UFFD_EVENT_REMAP)
      gone_(message.arg.remap.from, message.arg.remap.from + message.arg.remap.len);
  }
}

}  // namespace millrace::host
