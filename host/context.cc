#include "host/context.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>

#include <algorithm>
#include <cassert>
#include <csignal>
#include <cstdlib>
#include <system_error>

#include "host/socket_address.h"
#include "host/soft_endpoint.h"
#include "host/verbs_endpoint.h"
#include "roce/error.h"

namespace millrace::host {
namespace {

// Submissions taken in one turn, so that a flood of them does not starve acknowledgements.
constexpr int kSubmissionsPerTurn = 64;
// Rounds of completions in one turn: each may let a communicator post more, which may complete at once.
constexpr int kRoundsPerTurn = 8;
// Requests looked at per turn and communicator: operations are over nearly in the order of their issue.
constexpr size_t kRequestsPerTurn = 64;
// How long a goodbye may take before the link is let go; the switch then finds out by its own timers.
constexpr Time kLeavePatience = std::chrono::seconds(3);
constexpr Time kStopPatience = std::chrono::milliseconds(500);
// Of these, so long may ranks of this host, whom we lead, take to leave too.
constexpr Time kHubPatience = std::chrono::milliseconds(250);

Time clock_now() {
  return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
}

uint64_t random_number() {
  uint64_t n;
  if (getrandom(&n, sizeof n, 0) != sizeof n)
    throw Error(ErrorCode::kSystem, "the system gives no random numbers");
  return n;
}

std::string host_name() {
  std::array<char, 65> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "this host";
}

Time spin_from_environment() {
  const char* text = std::getenv("MILLRACE_SPIN_US");
  if (text == nullptr || *text == '\0') return Time{};
  char* end;
  unsigned long us = std::strtoul(text, &end, 10);
  if (*end != '\0' || us > 1'000'000)
    throw Error(ErrorCode::kUsage, std::string("MILLRACE_SPIN_US=") + text + ": microseconds, 0 to 1000000");
  return std::chrono::microseconds(us);
}

}  // namespace

Context::Context(TransportChoice choice, const std::string& device)
    : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      spin_(spin_from_environment()),
      process_(getpid()),
      choice_(choice),
      device_(device) {
  if (!wake_)
    throw Error(ErrorCode::kSystem, "cannot make an eventfd: " + std::system_category().message(errno));
  // A device that cannot be used shows now; which one verbs uses depends on the switch. It is not kept open: a
  // rank that combines with others of its host may never need it, and would be woken by all their packets.
  if (!device.empty() && choice == TransportChoice::kSoft) text_ = open_soft(device)->text() + ": asked for";
  if (!device.empty() && choice != TransportChoice::kSoft) VerbsDevice::check_name(device);
  if (text_.empty())
    text_ = choice == TransportChoice::kSoft    ? "soft: asked for"
            : choice == TransportChoice::kVerbs ? "verbs: asked for"
                                                : "auto: chosen when the first communicator joins";
  // The application's signals are for its own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& e) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(ErrorCode::kSystem, std::string("cannot start the progress thread: ") + e.what());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread_.native_handle(), "millrace");
}

Context::~Context() {
  run_on_thread([this] {
    stop_ = true;
    stop_deadline_ = clock_now() + kStopPatience;
  });
  thread_.join();
  assert(memberships_.empty() && "a communicator outlives its context");
}

// --- application threads ---

void Context::push(const Submission& submission) {
  while (!queue_.push(submission)) std::this_thread::sleep_for(std::chrono::microseconds(20));
  // Both sides exchange: either this comes second and sees that the thread sleeps, or sleep() does and then
  // sees the submission.
  if (sleeping_.exchange(false, std::memory_order_acq_rel)) {
    uint64_t one = 1;
    (void)!write(wake_.get(), &one, sizeof one);  // fails only when it is set already
  }
}

void Context::run_on_thread(std::function<void()> what) {
  check_process();
  Call call{std::move(what), nullptr};
  push({nullptr, &call});
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return call.done; });
  if (call.error) std::rethrow_exception(call.error);
}

std::unique_ptr<Endpoint> Context::open_soft(const std::string& device) const {
  return std::make_unique<SoftEndpoint>(device, random_number(), random_number());
}

void Context::choose_endpoint(const IpAddress& switch_address) {
  if (is_link_local(switch_address) && device_.empty())
    throw Error(ErrorCode::kUsage,
                switch_address.to_string() +
                    " is a link-local address, which every interface may lead to: name the "
                    "device");
  std::lock_guard lock(choosing_);
  bool chosen = false;
  run_on_thread([&] { chosen = endpoint_ != nullptr; });
  if (chosen) return;
  std::unique_ptr<Endpoint> endpoint;
  std::string why = "asked for";
  if (choice_ != TransportChoice::kSoft) {
    try {
      endpoint = std::make_unique<VerbsEndpoint>(VerbsDevice::open(device_, switch_address));
      if (choice_ == TransportChoice::kAuto) why = "there is a usable device (asked for auto)";
    } catch (const Error& e) {
      if (choice_ == TransportChoice::kVerbs) throw;
      why = std::string(e.what()) + " (asked for auto)";
    }
  }
  if (!endpoint)
    endpoint = open_soft(device_.empty() ? KernelResolver::device_towards(switch_address) : device_);
  run_on_thread([&] { adopt(std::move(endpoint), why); });
}

// One try to reach the hub of this host's ranks, with a hello; where nobody leads, this process does.
// Nothing: it has to be tried again.
std::optional<LocalSocket> Context::approach(const std::string& name, const CommunicatorConfig& config,
                                             LocalHub*& hub) {
  LocalMessage hello;
  hello.kind = LocalMessage::Kind::kHello;
  hello.hello.rank = config.rank;
  hello.hello.world = config.world;
  hello.hello.stripes = config.stripes;
  hello.hello.tenant = config.tenant;
  hello.hello.key = config.key;
  std::optional<LocalSocket> socket;
  if (std::optional<LocalSocket> listener = LocalSocket::listen(name)) {
    choose_endpoint(config.switch_address);
    run_on_thread([&] {
      check_usable();
      endpoint_->send(clock_now());
      HubConfig of_hub;
      of_hub.join = config;
      of_hub.join.mtu = endpoint_->path_mtu_max();
      of_hub.host_name = host_name();
      hubs_.push_back(
          std::make_unique<LocalHub>(std::move(*listener), of_hub, endpoint_->transport(), clock_now()));
      hub = hubs_.back().get();
      // Before anything can end it: its own rank shall hear of it.
      socket = LocalSocket::connect(name);
      if (socket) socket->send(hello);
      hub->receive(clock_now());
    });
    return socket;
  }
  socket = LocalSocket::connect(name);
  if (socket && !socket->send(hello)) socket.reset();
  return socket;
}

// The rank's place among those of this host.
std::unique_ptr<LocalTransport> Context::meet(const CommunicatorConfig& config, LocalHub*& hub) {
  check_process();
  const std::string name = LocalSocket::name_of(config);
  const Time until = clock_now() + config.connect_timeout;
  while (true) {
    const Time left = until - clock_now();
    if (std::optional<LocalSocket> socket = approach(name, config, hub)) {
      LocalMessage answer;
      const auto patience = std::chrono::duration_cast<std::chrono::milliseconds>(left).count();
      if (socket->wait(answer, static_cast<int>(patience)) == LocalSocket::Received::kMessage) {
        if (answer.kind == LocalMessage::Kind::kRefused) throw Error(ErrorCode::kRefused, answer.text);
        return std::make_unique<LocalTransport>(std::move(*socket), answer.rank);
      }
    }
    if (hub != nullptr || clock_now() >= until)
      throw Error(ErrorCode::kUnreachable,
                  "the rank that leads on this host does not answer: is its process stopped?");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Context::check_usable() const {
  if (!failed_.empty())
    throw Error(ErrorCode::kState, failed_ + "; this context is of no use any more (mr_finalize it)");
}

Membership* Context::join(CommunicatorConfig config) {
  config.nonce_seed = random_number();
  std::unique_ptr<LocalTransport> local;
  LocalHub* hub = nullptr;
  if (config.combine)
    local = meet(config, hub);
  else
    choose_endpoint(config.switch_address);
  Membership* membership = nullptr;
  run_on_thread([&] {
    check_usable();
    auto made = std::make_unique<Membership>();
    if (local) {
      made->local_ = std::move(local);
      made->hub_ = hub;
    } else {
      config.mtu = endpoint_->path_mtu_max();
      // It may have slept: the connect's time-out counts from its last look at the clock.
      endpoint_->send(clock_now());
    }
    Transport& transport = made->local_ ? *made->local_ : endpoint_->transport();
    made->communicator_ = std::make_unique<Communicator>(config, transport, clock_now());
    made->rank_ = config.rank, made->world_ = config.world;
    membership = made.get();
    memberships_.push_back(std::move(made));
  });
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return membership->status() != MR_IN_PROGRESS; });
  return membership;
}

void Context::leave(Membership* membership) {
  run_on_thread([&] {
    Time now = clock_now();
    membership->leave_deadline_ = now + kLeavePatience;
    if (membership->requests_.empty())
      membership->communicator_->close(now);
    else
      membership->communicator_->abort("the communicator was destroyed", now);
  });
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return membership->left_; });
  }
  run_on_thread([&] { std::erase_if(memberships_, [&](const auto& m) { return m.get() == membership; }); });
}

void Context::abort(Membership* membership, const std::string& why) {
  run_on_thread([&] { membership->communicator_->abort(why, clock_now()); });
}

std::optional<aggregation::Start> Context::start(Membership* membership) {
  std::optional<aggregation::Start> start;
  run_on_thread([&] { start = membership->communicator_->start(); });
  return start;
}

LinkStats Context::stats(Membership* membership) {
  LinkStats stats;
  run_on_thread([&] {
    // Of ranks that combine, the leader's are those that the network has seen.
    stats = membership->hub_ ? membership->hub_->hub().stats() : membership->communicator_->stats();
  });
  return stats;
}

Context::Combining Context::combining(Membership* membership) {
  Combining combining;
  run_on_thread([&] {
    if (const auto& local = membership->local_) combining = {local->ranks(), local->leader()};
  });
  return combining;
}

void Context::check_process() const {
  if (getpid() != process_)
    throw Error(ErrorCode::kUsage,
                "this context belongs to the process that made it: a forked child makes one of its own");
}

void Context::submit(Membership* membership, mr_request* request) {
  check_process();
  request->membership = membership;
  if (membership->local_)
    request->path = membership->local_->ranks() == membership->world_ ? "shared memory"
                                                                      : "shared memory, then network";
  request->owners.fetch_add(1, std::memory_order_relaxed);
  push({request, nullptr});
}

Registration* Context::register_memory(void* address, size_t bytes) {
  Registration* registration = nullptr;
  run_on_thread([&] {
    auto made = std::make_unique<Registration>();
    made->address = static_cast<uint8_t*>(address);
    made->bytes = bytes;
    if (endpoint_) made->region = register_region(made->address, bytes);
    registration = made.get();
    registrations_.push_back(std::move(made));
  });
  return registration;
}

bool Context::deregister_memory(Registration* registration) {
  bool idle = false;
  run_on_thread([&] {
    idle = registration->requests == 0;
    if (!idle) return;
    if (registration->region.id) endpoint_->transport().deregister_memory(registration->region);
    std::erase_if(registrations_, [&](const auto& r) { return r.get() == registration; });
  });
  return idle;
}

std::string Context::transport_text() {
  std::string text;
  run_on_thread([&] { text = text_; });
  return text;
}

// --- progress thread ---

// Memory that was registered before there was a device is registered now.
void Context::adopt(std::unique_ptr<Endpoint> endpoint, const std::string& why) {
  endpoint_ = std::move(endpoint);
  text_ = endpoint_->text() + ": " + why;
  try {
    for (auto& r : registrations_) r->region = register_region(r->address, r->bytes);
  } catch (...) {
    for (auto& r : registrations_) r->region = {};
    endpoint_.reset();
    throw;
  }
}

// For both ways; memory that may only be read, as a send buffer may, for that way.
MemoryRegion Context::register_region(void* address, size_t bytes) {
  try {
    return endpoint_->transport().register_memory(address, bytes, Access::kResult);
  } catch (const Error&) {
    return endpoint_->transport().register_memory(address, bytes, Access::kSend);
  }
}

void Context::run() {
  while (true) {
    Time now = clock_now();
    try {
      const bool more = progress(now);
      if (stop_ && goodbyes_over(now)) return;
      if (!more) sleep(now);
    } catch (const std::exception& e) {
      fail(e.what(), now);
    }
  }
}

// One turn; whether there is more to do at once.
bool Context::progress(Time now) {
  bool submitted = take_submissions(now);
  bool more = endpoint_ && endpoint_->receive(now);
  more |= pump_local(now);
  int rounds = 0;
  while (handle_completions(now) && ++rounds < kRoundsPerTurn) {
  }
  if (endpoint_) endpoint_->send(now);
  more |= handle_completions(now);  // its timers end links
  for (auto& m : memberships_) {
    // While it fails or leaves it is in progress again: the end is told once nothing can be written any more.
    // And before its requests are, so that whoever waits for one finds the communicator's error too.
    mr_status status = m->communicator_ ? m->communicator_->status() : MR_IN_PROGRESS;
    if (status != MR_IN_PROGRESS && status != m->status()) publish(*m, status, m->communicator_->text());
    more |= finish_requests(*m);
  }
  reap_left(now);
  drop_hubs();
  if (submitted || more || rounds) spin_until_ = now + spin_;
  return more || submitted;
}

bool Context::take_submissions(Time now) {
  int n = 0;
  Submission submission{};
  while (n < kSubmissionsPerTurn && queue_.pop(submission)) {
    n++;
    if (submission.request) {
      accept(submission.request, now);
      continue;
    }
    Call* call = submission.call;
    try {
      call->what();
    } catch (...) {
      call->error = std::current_exception();
    }
    std::lock_guard lock(mutex_);
    call->done = true;
    changed_.notify_all();
  }
  return n != 0;
}

void Context::accept(mr_request* request, Time now) {
  Operation& operation = request->operation;
  Membership& membership = *request->membership;
  auto use = [&](const uint8_t* address, uint64_t bytes, Access access, Registration*& registration) {
    registration = bytes != 0 ? find_registration(address, bytes, access) : nullptr;
    if (registration) registration->requests++;
    return registration ? std::optional(registration->region) : std::nullopt;
  };
  operation.send_region = use(operation.send, operation.send_bytes(membership.rank_, membership.world_),
                              Access::kSend, request->registrations[0]);
  operation.recv_region = use(operation.recv, operation.recv_bytes(membership.rank_, membership.world_),
                              Access::kResult, request->registrations[1]);
  membership.requests_.push_back(request);
  membership.communicator_->submit(&operation, now);
}

Registration* Context::find_registration(const uint8_t* address, uint64_t bytes, Access access) {
  for (auto& r : registrations_)
    if (address >= r->address && bytes <= r->bytes &&
        static_cast<size_t>(address - r->address) <= r->bytes - bytes &&
        (access == Access::kSend || r->region.rkey != 0))
      return r.get();
  return nullptr;
}

// Gives each completion to its communicator and lets communicators post; whether there were any.
bool Context::handle_completions(Time now) {
  completions_.clear();
  if (endpoint_) endpoint_->transport().poll(completions_);
  bool any = !completions_.empty();
  for (const Completion& completion : completions_) {
    for (auto& h : hubs_)
      if (h->hub().owns(completion.link)) h->hub().handle(completion, now);
    for (auto& m : memberships_)
      if (m->communicator_ && !m->local_ && m->communicator_->owns(completion.link))
        m->communicator_->handle(completion, now);
  }
  for (auto& h : hubs_) h->poll(now);
  for (auto& m : memberships_) {
    if (!m->local_ || !m->communicator_) continue;
    completions_.clear();
    m->local_->poll(completions_);
    any |= !completions_.empty();
    for (const Completion& completion : completions_)
      if (m->communicator_->owns(completion.link)) m->communicator_->handle(completion, now);
  }
  for (auto& m : memberships_)
    if (m->communicator_) m->communicator_->poll(now);
  return any;
}

// What ranks of this host have to say to each other; whether there was anything.
bool Context::pump_local(Time now) {
  bool any = false;
  for (auto& h : hubs_) {
    any |= h->receive(now);
    if (stop_ && now >= stop_deadline_ - kHubPatience) h->hub().leave(now);
  }
  for (auto& m : memberships_)
    if (m->local_) any |= m->local_->receive(now);
  return any;
}

void Context::drop_hubs() {
  for (auto h = hubs_.begin(); h != hubs_.end();) {
    if (!(*h)->hub().over()) {
      ++h;
      continue;
    }
    for (auto& m : memberships_)
      if (m->hub_ == h->get()) m->hub_ = nullptr;
    endpoint_->release_memory();
    h = hubs_.erase(h);
  }
}

// Whether there may be more to finish.
bool Context::finish_requests(Membership& membership) {
  auto& requests = membership.requests_;
  size_t n = std::min(requests.size(), kRequestsPerTurn);
  for (size_t i = 0; i < n; i++)
    if (requests[i]->operation.done) finish(std::exchange(requests[i], nullptr));
  return std::erase(requests, nullptr) != 0 && !requests.empty();
}

void Context::finish(mr_request* request) {
  mr_status status = request->operation.status;
  if (endpoint_) endpoint_->release_memory();
  // Aborted because this host's device failed: that is what the application should hear.
  if (!failed_.empty() && status == MR_ERR_ABORTED) {
    status = MR_ERR_SYSTEM;
    request->operation.text = failed_;
  }
  for (Registration* r : request->registrations)
    if (r) r->requests--;
  request->state.store(status, std::memory_order_release);
  request->state.notify_all();
  request->release();
}

void Context::publish(Membership& membership, mr_status status, const std::string& text) {
  mr_status known = membership.status();
  if (known != MR_IN_PROGRESS && known != MR_OK) return;  // the first error is the one that counts
  std::lock_guard lock(mutex_);
  membership.text_ = text;
  membership.status_.store(status, std::memory_order_release);
  changed_.notify_all();
}

bool Context::may_reap(const Membership& m, Time now) const {
  if (!m.communicator_ || m.leave_deadline_ == kNever) return false;
  if (now >= m.leave_deadline_) return true;
  using State = Communicator::State;
  State state = m.communicator_->state();
  return (state == State::kClosed || state == State::kFailed) && m.requests_.empty();
}

void Context::reap_left(Time now) {
  for (auto& m : memberships_) {
    if (!may_reap(*m, now)) continue;
    m->communicator_.reset();  // first: it is what could still write to a request's memory
    m->local_.reset();
    for (mr_request* request : m->requests_) {
      request->operation.status = MR_ERR_ABORTED;
      request->operation.text = "the communicator was destroyed";
      finish(request);
    }
    m->requests_.clear();
    m->leave_deadline_ = kNever;
    std::lock_guard lock(mutex_);
    m->left_ = true;
    changed_.notify_all();
  }
}

bool Context::goodbyes_over(Time now) {
  return !endpoint_ || !failed_.empty() || now >= stop_deadline_ || (hubs_.empty() && endpoint_->idle());
}

void Context::fail(const std::string& why, Time now) {
  if (failed_.empty()) failed_ = why;
  if (endpoint_) endpoint_->detach();
  for (auto& h : hubs_)
    h->hub().fail(aggregation::Code::kMemberLost, {h->leader()},
                  "rank " + std::to_string(h->leader()) + ", which combines for the ranks of " + host_name() +
                      ": " + why,
                  now);
  for (auto& m : memberships_) {
    publish(*m, MR_ERR_SYSTEM, failed_);
    if (m->communicator_) m->communicator_->abort(failed_, now);
  }
}

Time Context::next_deadline() const {
  Time next = stop_deadline_;
  if (endpoint_) next = std::min(next, endpoint_->next_deadline());
  for (auto& h : hubs_) {
    next = std::min(next, h->next_deadline());
    if (stop_) next = std::min(next, stop_deadline_ - kHubPatience);
  }
  for (auto& m : memberships_) {
    next = std::min(next, m->leave_deadline_);
    if (m->communicator_) next = std::min(next, m->communicator_->next_deadline());
    if (m->local_) next = std::min(next, m->local_->next_deadline());
  }
  return next;
}

void Context::sleep(Time now) {
  if (now < spin_until_) return;
  sleeping_.exchange(true, std::memory_order_acq_rel);
  descriptors_.assign(1, {wake_.get(), POLLIN, 0});
  bool wait_for_it = !endpoint_ || endpoint_->prepare_to_wait(descriptors_);
  for (auto& h : hubs_) wait_for_it = h->prepare_to_wait(descriptors_) && wait_for_it;
  for (auto& m : memberships_)
    if (m->local_) wait_for_it = m->local_->prepare_to_wait(descriptors_) && wait_for_it;
  if (wait_for_it && queue_.empty()) {
    Time wait = std::clamp(next_deadline() - now, Time{}, Time(std::chrono::seconds(10)));
    timespec timeout{wait.count() / 1'000'000'000, wait.count() % 1'000'000'000};
    if (ppoll(descriptors_.data(), descriptors_.size(), &timeout, nullptr) > 0 && descriptors_[0].revents) {
      uint64_t count;
      (void)!read(wake_.get(), &count, sizeof count);
    }
  }
  sleeping_.store(false, std::memory_order_relaxed);
}

}  // namespace millrace::host
