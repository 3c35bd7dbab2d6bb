// One context: the progress thread and all that it owns (the endpoint, communicators, registrations).
// Application threads hand it work through a bounded lock-free queue and an eventfd; it needs no further
// calls from them to make progress, to acknowledge, or to notice that a peer is gone. Errors of the network
// or of this host end the communicators concerned with a sentence; they never end the thread.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <boost/lockfree/queue.hpp>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "host/communicator.h"
#include "host/endpoint.h"
#include "host/file_descriptor.h"
#include "host/local_hub.h"
#include "host/local_transport.h"
#include "host/millrace.h"

namespace millrace::host {
class Context;
class Membership;
struct Registration;
}  // namespace millrace::host

// One operation as the application sees it. Owned by the application until freed and by the progress thread
// until it is over, whichever is later, so that neither can pull it from under the other.
struct mr_request {
  millrace::host::Operation operation;
  const char* path = "network";
  millrace::host::Membership* membership = nullptr;  // progress thread
  // Progress thread; those that cover send and recv.
  std::array<millrace::host::Registration*, 2> registrations{};
  std::atomic<int> state{MR_IN_PROGRESS};  // an mr_status; everything else is set before it
  std::atomic<int> owners{1};

  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

namespace millrace::host {

// Memory that the application registered. Progress thread.
struct Registration {
  uint8_t* address = nullptr;
  size_t bytes = 0;
  MemoryRegion region;    // once there is an endpoint
  uint32_t requests = 0;  // in flight in this memory
};

// One rank's membership in a group: a communicator and its requests. The communicator belongs to the progress
// thread; what the application reads is published.
class Membership {
 public:
  // MR_IN_PROGRESS while joining, MR_OK, then what ended it, for good.
  mr_status status() const { return static_cast<mr_status>(status_.load(std::memory_order_acquire)); }
  // The sentence; to be read once status() is an error.
  const std::string& text() const { return text_; }

 private:
  friend class Context;
  std::unique_ptr<LocalTransport> local_;  // where it combines with other ranks of this host
  LocalHub* hub_ = nullptr;                // where it leads them
  std::unique_ptr<Communicator> communicator_;
  uint16_t rank_ = 0, world_ = 1;
  std::deque<mr_request*> requests_;
  Time leave_deadline_ = kNever;
  std::atomic<int> status_{MR_IN_PROGRESS};
  std::string text_;   // written once, before the status that needs it
  bool left_ = false;  // under the context's mutex
};

// Which transport a context was asked for; kAuto is verbs where there is a usable device, else soft.
enum class TransportChoice : uint8_t { kAuto, kSoft, kVerbs };

class Context {
 public:
  // An empty device: the one that routes to the first switch joined. Throws millrace::Error.
  Context(TransportChoice choice, const std::string& device);
  // Throws millrace::Error in a forked child, where there is no progress thread.
  void check_process() const;
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Application threads. Those that throw, throw millrace::Error.

  // Blocks until all ranks are there or the join has failed, which the membership says. mtu, nonce_seed of
  // the configuration are filled in here.
  Membership* join(CommunicatorConfig config);
  // Blocks until the group is left and every request is over; `membership` is gone afterwards.
  void leave(Membership* membership);
  void abort(Membership* membership, const std::string& why);
  LinkStats stats(Membership* membership);
  std::optional<aggregation::Start> start(Membership* membership);
  // Of this host, which combine; 0: the rank has joined the switch itself.
  struct Combining {
    uint32_t ranks = 0;
    uint16_t leader = 0;
  };
  Combining combining(Membership* membership);
  // Hands over a request, which the caller shares from now on. Blocks only while the queue is full.
  void submit(Membership* membership, mr_request* request);
  Registration* register_memory(void* address, size_t bytes);
  // false: operations are in flight in it, and nothing was done.
  bool deregister_memory(Registration* registration);
  // "soft on eth0 (RoCE path MTU up to 4096): no RDMA device (asked for auto)"; before the first join, which
  // chooses, what it was asked for.
  std::string transport_text();

 private:
  // A function for the progress thread that its caller waits for.
  struct Call {
    std::function<void()> what;
    std::exception_ptr error;
    bool done = false;  // under the mutex
  };
  // What travels through the queue: one or the other.
  struct Submission {
    mr_request* request;
    Call* call;
  };
  static constexpr size_t kQueueLength = 1024;

  void push(const Submission& submission);
  void check_usable() const;
  void run_on_thread(std::function<void()> what);
  void choose_endpoint(const IpAddress& switch_address);
  std::unique_ptr<LocalTransport> meet(const CommunicatorConfig& config, LocalHub*& hub);
  std::optional<LocalSocket> approach(const std::string& name, const CommunicatorConfig& config,
                                      LocalHub*& hub);
  std::unique_ptr<Endpoint> open_soft(const std::string& device) const;

  // Progress thread from here on.
  void run();
  bool progress(Time now);
  bool take_submissions(Time now);
  void accept(mr_request* request, Time now);
  bool handle_completions(Time now);
  bool finish_requests(Membership& membership);
  void finish(mr_request* request);
  void publish(Membership& membership, mr_status status, const std::string& text);
  bool may_reap(const Membership& membership, Time now) const;
  void reap_left(Time now);
  bool pump_local(Time now);
  void drop_hubs();
  bool goodbyes_over(Time now);
  void sleep(Time now);
  Time next_deadline() const;
  void adopt(std::unique_ptr<Endpoint> endpoint, const std::string& why);
  MemoryRegion register_region(void* address, size_t bytes);
  void fail(const std::string& why, Time now);
  Registration* find_registration(const uint8_t* address, uint64_t bytes, Access access);

  boost::lockfree::queue<Submission, boost::lockfree::capacity<kQueueLength>> queue_;
  FileDescriptor wake_;
  std::atomic<bool> sleeping_{false};
  Time spin_;
  std::mutex mutex_;
  std::condition_variable changed_;  // a call is over, a membership's status or left_ has changed

  const pid_t process_;
  const TransportChoice choice_;
  const std::string device_;  // as asked for
  std::mutex choosing_;       // one thread opens the device, others that join wait

  // Progress thread, and those that construct and destroy.
  std::unique_ptr<Endpoint> endpoint_;
  std::string text_;                           // of the transport
  std::list<std::unique_ptr<LocalHub>> hubs_;  // of groups whose ranks on this host we lead
  std::list<std::unique_ptr<Membership>> memberships_;
  std::list<std::unique_ptr<Registration>> registrations_;
  std::string failed_;  // why the device cannot be used any more
  std::vector<Completion> completions_;
  std::vector<pollfd> descriptors_;
  Time spin_until_{}, stop_deadline_ = kNever;
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace millrace::host
