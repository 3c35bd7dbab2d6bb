#include "host/memory_monitor.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <set>
#include <system_error>

namespace millrace::host {

namespace {

uintptr_t page_bytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}
uintptr_t page_down(uintptr_t at) { return at / page_bytes() * page_bytes(); }
uintptr_t page_up(uintptr_t at) { return page_down(at + page_bytes() - 1); }

// A forked child that never executes anything would keep the userfaultfd, and with it the watches, alive when
// the parent has closed it, and nobody would read the events: so it closes its copies.
struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};
Registry& registry() {
  static Registry* r = [] {
    auto* made = new Registry;  // never destroyed: exit handlers may fork
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     for (const int fd : registry().descriptors) close(fd);
                     registry().mutex.unlock();
                   });
    return made;
  }();
  return *r;
}

}  // namespace

MemoryMonitor::MemoryMonitor(std::mutex& mutex, std::function<void(uintptr_t, uintptr_t)> gone)
    : mutex_(mutex), gone_(std::move(gone)) {
  if (!ready()) return;
  {
    std::lock_guard lock(registry().mutex);
    registry().descriptors.insert(events_.get());
  }
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), "millrace-memory");
  } catch (const std::system_error& e) {
    errno = e.code().value();
    disable("cannot start a thread");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void MemoryMonitor::disable(const char* what) {
  objection_ = std::string(what) + ": " + std::system_category().message(errno);
  if (events_) {
    std::lock_guard lock(registry().mutex);
    registry().descriptors.erase(events_.get());
    events_ = FileDescriptor();
  }
}

// Opens what is needed; the objection says why not.
bool MemoryMonitor::ready() {
  // Faults are none of our business, so the restricted kind that every user may have will do.
  events_ = FileDescriptor(
      static_cast<int>(syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY)));
  if (!events_) {
    disable("this system gives no userfaultfd");
    return false;
  }
  uffdio_api api{};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE;
  if (ioctl(events_.get(), UFFDIO_API, &api) != 0) {
    disable("userfaultfd reports no unmapped memory");
    return false;
  }
  own_page_ = mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (own_page_ == MAP_FAILED) own_page_ = nullptr;
  if (own_page_ != nullptr) *static_cast<volatile char*>(own_page_) = 0;
  const auto own = reinterpret_cast<uintptr_t>(own_page_);
  stop_ = FileDescriptor(eventfd(0, EFD_CLOEXEC));
  if (own_page_ == nullptr || !stop_ || !watch(own, own + 1)) {
    disable("userfaultfd watches no memory here");
    return false;
  }
  return true;
}

MemoryMonitor::~MemoryMonitor() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    (void)!write(stop_.get(), &one, sizeof one);
    thread_.join();
  }
  if (own_page_ != nullptr) munmap(own_page_, page_bytes());  // watched by nobody any more
}

bool MemoryMonitor::watch(uintptr_t begin, uintptr_t end) {
  if (!events_) return false;
  uffdio_register request{};
  request.range.start = page_down(begin);
  request.range.len = page_up(end) - request.range.start;
  // Nothing is ever write-protected: the mode that makes no fault, and so costs the application nothing.
  request.mode = UFFDIO_REGISTER_MODE_WP;
  return ioctl(events_.get(), UFFDIO_REGISTER, &request) == 0;
}

void MemoryMonitor::unwatch(uintptr_t begin, uintptr_t end) {
  if (!events_) return;
  uffdio_range range{page_down(begin), page_up(end) - page_down(begin)};
  ioctl(events_.get(), UFFDIO_UNREGISTER, &range);
}

// The kernel refuses to write-protect anything while an unmapping is under way whose event has not been read;
// one that has nothing to do on our own page asks for that and no more.
void MemoryMonitor::settle() {
  if (!events_) return;
  while (true) {
    take_events();
    uffdio_writeprotect request{};
    request.range.start = reinterpret_cast<uintptr_t>(own_page_);
    request.range.len = page_bytes();
    if (ioctl(events_.get(), UFFDIO_WRITEPROTECT, &request) == 0 || errno != EAGAIN) return;
    sched_yield();
  }
}

bool MemoryMonitor::is_private(uintptr_t begin, uintptr_t end) {
  static constexpr uint64_t kFileOrShared = uint64_t{1} << 61;
  const FileDescriptor pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap) return false;
  std::array<uint64_t, 1024> pages;
  for (uintptr_t at = page_down(begin); at < end;) {
    const size_t wanted = std::min<size_t>(pages.size(), (page_up(end) - at) / page_bytes());
    const ssize_t got = pread(pagemap.get(), pages.data(), wanted * sizeof(uint64_t),
                              static_cast<off_t>(at / page_bytes() * sizeof(uint64_t)));
    if (got <= 0) return false;
    const size_t n = static_cast<size_t>(got) / sizeof(uint64_t);
    for (size_t i = 0; i < n; i++)
      if (pages[i] & kFileOrShared) return false;
    at += n * page_bytes();
  }
  return true;
}

void MemoryMonitor::run() {
  std::array<pollfd, 2> descriptors{{{events_.get(), POLLIN, 0}, {stop_.get(), POLLIN, 0}}};
  while (true) {
    if (poll(descriptors.data(), descriptors.size(), -1) <= 0) continue;
    if (descriptors[1].revents) break;
    if (descriptors[0].revents) {
      std::lock_guard lock(mutex_);
      take_events();
    }
  }
  // Before this thread's own end gives memory back, which nobody would hear of.
  std::lock_guard lock(registry().mutex);
  registry().descriptors.erase(events_.get());
  events_ = FileDescriptor();
}

// With the mutex held, which keeps others from looking anything up between an event and the call of gone_().
void MemoryMonitor::take_events() {
  uffd_msg message;
  while (read(events_.get(), &message, sizeof message) == sizeof message) {
    if (message.event == UFFD_EVENT_UNMAP || message.event == UFFD_EVENT_REMOVE)
      gone_(message.arg.remove.start, message.arg.remove.end);
    if (message.event == UFFD_EVENT_REMAP)
      gone_(message.arg.remap.from, message.arg.remap.from + message.arg.remap.len);
  }
}

}  // namespace millrace::host
