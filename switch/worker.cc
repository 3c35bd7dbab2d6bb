#include "switch/worker.h"

#include <sys/prctl.h>

#include <array>
#include <ctime>

namespace millrace::switching {

using namespace std::chrono_literals;

namespace {

Time read_clock(clockid_t id) {
  timespec t;
  clock_gettime(id, &t);
  return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
}

constexpr Time kLinkInterval = 100ms;

// A link may take a moment to come up; whoever has none is not waited for any longer.
constexpr Time kLinkPatience = 3s;

}  // namespace

Time clock_now() { return read_clock(CLOCK_MONOTONIC); }

Captures::Captures(const Config& config) : by_port_(config.ports.size()) {
  const Time wall_offset = read_clock(CLOCK_REALTIME) - clock_now();
  std::vector<std::string> names;
  std::vector<Capture*> existing;
  for (size_t i = 0; i < config.ports.size(); i++) {
    const PortConfig& port = config.ports[i];
    names.push_back(port.name);
    if (!port.capture) continue;
    by_port_[i] = std::make_unique<Capture>(*port.capture, std::vector{port.name}, wall_offset);
    existing.push_back(by_port_[i].get());
  }
  if (config.capture) {
    all_ = std::make_unique<Capture>(*config.capture, names, wall_offset);
    existing.push_back(all_.get());
  }
  if (!existing.empty()) writer_ = std::make_unique<CaptureWriter>(existing);
}

std::optional<CaptureCounters> Captures::port_counters(size_t port) const {
  if (by_port_[port] == nullptr) return std::nullopt;
  return by_port_[port]->counters();
}

std::optional<CaptureCounters> Captures::all_counters() const {
  if (all_ == nullptr) return std::nullopt;
  return all_->counters();
}

Worker::Lane::Lane(const PortConfig& config, uint16_t index, MbufPool& pool, const Captures& captures)
    : port(config, index, pool),
      rx(pool, config.rx),
      tx(pool, config.tx),
      own(captures.of_port(index)),
      all(captures.of_all(index)) {}

Worker::Worker(const Config& config, MbufPool& pool, Captures& captures, CommandRing& ring)
    : config_(config),
      pool_(pool),
      captures_(captures),
      ring_(ring),
      lanes_(make_lanes(config, pool, captures)),
      pipeline_(pipeline_config(), pool),
      started_(clock_now()) {}

std::vector<std::unique_ptr<Worker::Lane>> Worker::make_lanes(const Config& config, MbufPool& pool,
                                                              const Captures& captures) {
  std::vector<std::unique_ptr<Lane>> lanes;
  for (size_t i = 0; i < config.ports.size(); i++) {
    lanes.push_back(std::make_unique<Lane>(config.ports[i], static_cast<uint16_t>(i), pool, captures));
    if (config.buffers) lanes.back()->port.set_up_pfc(config.buffers->ports[i]);
  }
  return lanes;
}

PipelineConfig Worker::pipeline_config() {
  PipelineConfig c{static_cast<uint16_t>(config_.ports.size()),
                   config_.l2,
                   config_.engine,
                   config_.routing,
                   config_.buffers,
                   config_.lenders,
                   config_.spill_local};
  const std::vector<uint64_t> links = link_speeds();
  std::vector<buffering::PortConfig> none;
  const uint64_t fastest = adopt_speeds(c.buffers ? c.buffers->ports : none, links);
  if (fastest != 0) c.engine.line_rate = fastest;
  for (size_t i = 0; i < lanes_.size(); i++) {
    const Port& port = lanes_[i]->port;
    const bool told = c.buffers && (c.buffers->ports[i].speed_given || c.buffers->ports[i].rate_bps != 0);
    if (links[i] == 0 && !told)
      notes_.push_back("port " + port.name() +
                       ": the speed of its link is not known: PORT's speed in qos can tell it");
    if (port.pfc().wanted)
      notes_.push_back("port " + port.name() + ": PFC in " + (port.pfc().hardware ? "hardware" : "software") +
                       ": " + port.pfc().why);
  }
  return c;
}

// By port; 0: not known.
std::vector<uint64_t> Worker::link_speeds() const {
  std::vector<uint64_t> links(lanes_.size());
  const Time end = clock_now() + kLinkPatience;
  for (;;) {
    bool all_known = true;
    for (size_t i = 0; i < lanes_.size(); i++) {
      const bool told = config_.buffers && config_.buffers->ports[i].speed_given;
      links[i] = lanes_[i]->port.link_bps();
      all_known &= links[i] != 0 || told || lanes_[i]->port.link_up();
    }
    if (all_known || clock_now() >= end) return links;
    const timespec pause{0, 10'000'000};
    nanosleep(&pause, nullptr);
  }
}

Worker::~Worker() { stop(); }

void Worker::stop() {
  for (const auto& lane : lanes_) {
    lane->rx.clear();
    lane->tx.clear();
    lane->port.stop();
  }
}

void Worker::run(const volatile std::sig_atomic_t* signals) {
  // Sleeps of some microseconds are meant: the default slack of 50 µs would more than double them.
  prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);
  Time deadline = kNever;
  // Again, since a link may take a moment to come up and a host may not believe a second change so soon.
  std::array announcements = {Time{}, Time(1s), Time(3s), Time(10s)};
  auto next_announcement = announcements.begin();
  for (;;) {
    const Time now = clock_now();
    bool worked = turn(now);
    if (next_announcement != announcements.end() && now - started_ >= *next_announcement) {
      next_announcement++;
      pipeline_.announce(now, out_);
      transmit(now);
    }
    worked |= execute_commands(now);
    if (*signals > 0 && deadline == kNever) {
      deadline = now + kDrain;
      pipeline_.shutdown(now, out_);
      transmit(now);
    }
    if (deadline != kNever && (drained() || now >= deadline || *signals > 1)) return;
    rest(worked, now);
  }
}

bool Worker::drained() const {
  if (!pipeline_.drained()) return false;
  for (const auto& lane : lanes_)
    if (lane->tx.held() > 0 || lane->port.has_queued()) return false;
  return true;
}

bool Worker::turn(Time now) noexcept {
  bool worked = false;
  for (const auto& lane : lanes_) {
    worked |= lane->port.receive(arrived_) > 0;
    while (Frame frame = arrived_.pop()) {
      lane->record(frame, Direction::kIn, now);
      lane->rx.pass(std::move(frame), now, received_);
    }
    lane->rx.poll(now, received_);
  }
  if (now >= next_link_check_) watch_links(now);
  for (size_t i = 0; i < lanes_.size(); i++)
    pipeline_.set_room(static_cast<uint16_t>(i), lanes_[i]->port.room());
  if (!received_.empty()) pipeline_.process(received_, now, out_);
  if (now >= pipeline_.next_deadline() || pipeline_.waits_for_room()) pipeline_.poll(now, out_);
  worked |= !out_.empty();
  transmit(now);
  return worked;
}

void Worker::watch_links(Time now) noexcept {
  next_link_check_ = now + kLinkInterval;
  for (size_t i = 0; i < lanes_.size(); i++)
    pipeline_.set_link(static_cast<uint16_t>(i), lanes_[i]->port.link_up(), now, out_);
}

void Worker::transmit(Time now) noexcept {
  while (Frame frame = out_.pop()) {
    Lane& lane = *lanes_[frame.port()];
    lane.tx.pass(std::move(frame), now, leaving_);
  }
  for (const auto& lane : lanes_) lane->tx.poll(now, leaving_);
  while (Frame frame = leaving_.pop()) {
    Lane& lane = *lanes_[frame.port()];
    if (!lane.port.admits(frame)) continue;
    lane.record(frame, Direction::kOut, now);
    lane.port.send(std::move(frame));
  }
  for (const auto& lane : lanes_) lane->port.flush();
}

Time Worker::next_deadline() const {
  Time next = pipeline_.next_deadline();
  for (const auto& lane : lanes_) next = std::min({next, lane->rx.next_deadline(), lane->tx.next_deadline()});
  return next;
}

// Without work: spins for a while, then sleeps, longer each time, never past a deadline.
void Worker::rest(bool worked, Time now) {
  constexpr Time kFirstSleep = std::chrono::microseconds(10);
  if (worked) {
    last_work_ = now;
    sleep_ = Time{};
  }
  if (config_.idle.sleep_max == Time{} || now - last_work_ < config_.idle.spin) return;
  sleep_ = std::min(sleep_ == Time{} ? kFirstSleep : sleep_ * 2, config_.idle.sleep_max);
  const Time bounded = std::min(sleep_, next_deadline() - now);
  if (bounded <= Time{}) return;
  const timespec t{0, static_cast<long>(bounded.count())};
  nanosleep(&t, nullptr);  // a signal ends it early, as it should
}

bool Worker::execute_commands(Time now) {
  bool any = false;
  for (Command* command = nullptr; ring_.pop(command); any = true) {
    execute(*command, now);
    command->done.release();  // from here on it is its owner's again
  }
  return any;
}

void Worker::execute(Command& command, Time now) {
  command.ok = true;
  switch (command.kind) {
    case Command::Kind::kSnapshot:
      command.snapshot = snapshot();
      break;
    case Command::Kind::kGroups:
      command.groups = pipeline_.engine().groups(now);
      break;
    case Command::Kind::kL2:
      command.l2 = pipeline_.l2().entries(now);
      break;
    case Command::Kind::kRoutes:
      if (const Router* router = pipeline_.router()) command.routes = router->routes();
      break;
    case Command::Kind::kNeighbours:
      if (const Router* router = pipeline_.router()) command.neighbours = router->neighbours().infos(now);
      break;
    case Command::Kind::kQos:
      if (const auto* buffers = pipeline_.buffers())
        command.qos = with_pfc(qos_status(*buffers, true, now, pipeline_.remote()));
      break;
    case Command::Kind::kAbort:
      command.ok = pipeline_.abort_group(command.group, command.why, now, out_);
      transmit(now);
      break;
    case Command::Kind::kImpair:
      if (command.rx) lanes_[command.port]->rx.configure(*command.rx);
      if (command.tx) lanes_[command.port]->tx.configure(*command.tx);
      break;
  }
}

QosStatus Worker::with_pfc(QosStatus status) const {
  for (size_t i = 0; i < lanes_.size(); i++) {
    const PfcOutcome& pfc = lanes_[i]->port.pfc();
    status.ports[i].pfc_mode = !pfc.wanted ? "off" : pfc.hardware ? "hardware" : "software";
    status.ports[i].pfc_why = pfc.why;
  }
  return status;
}

Snapshot Worker::snapshot() const {
  Snapshot s;
  s.uptime = clock_now() - started_;
  for (size_t i = 0; i < lanes_.size(); i++) {
    PortStatus port = lanes_[i]->port.status();
    port.rx_config = lanes_[i]->rx.config();
    port.tx_config = lanes_[i]->tx.config();
    port.rx_impair = lanes_[i]->rx.counters();
    port.tx_impair = lanes_[i]->tx.counters();
    port.capture = captures_.port_counters(i);
    s.ports.push_back(std::move(port));
  }
  s.capture = captures_.all_counters();
  s.frames = pool_.count();
  s.frames_cached = pool_.cached();
  s.frames_available = pool_.available();
  s.memory_reserved = pipeline_.engine().memory_reserved();
  s.queue_pairs = pipeline_.engine().queue_pairs();
  s.pipeline = pipeline_.counters();
  s.aggregation = pipeline_.engine().counters();
  s.cm = pipeline_.engine().cm_counters();
  if (const Router* router = pipeline_.router()) s.router = router->counters();
  s.l2_entries = pipeline_.l2().size();
  if (const auto* buffers = pipeline_.buffers())
    s.qos = with_pfc(qos_status(*buffers, false, clock_now(), pipeline_.remote()));
  return s;
}

}  // namespace millrace::switching
