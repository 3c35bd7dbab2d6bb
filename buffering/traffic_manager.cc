#include "buffering/traffic_manager.h"

#include <algorithm>
#include <bit>

namespace millrace::buffering {

namespace {

constexpr int64_t kQuantum = 512;  // bytes per round and weight
// How much time a busy port makes up for when it is polled late: some sleeps of the worker's idle mode, or
// one turn of a worker that hands a few hundred frames to the kernel.
constexpr Time kLagMax = std::chrono::milliseconds(1);
constexpr uint64_t kPicosecondsPerByte = 8'000'000'000'000ull;  // at 1 bit/s

constexpr uint8_t bit(uint8_t n) { return static_cast<uint8_t>(1u << n); }

QueueDrop drop_of(SharedBuffer::Verdict v) {
  switch (v) {
    case SharedBuffer::Verdict::kQueueFull:
      return QueueDrop::kQueueFull;
    case SharedBuffer::Verdict::kGroupFull:
      return QueueDrop::kGroupFull;
    case SharedBuffer::Verdict::kHeadroomFull:
      return QueueDrop::kHeadroomFull;
    default:
      return QueueDrop::kPoolFull;
  }
}

bool fits(SharedBuffer::Verdict v) {
  return v == SharedBuffer::Verdict::kFits || v == SharedBuffer::Verdict::kFitsHeadroom;
}

}  // namespace

TrafficManager::TrafficManager(const Config& config, FramePool& pool, std::unique_ptr<Store> store)
    : config_(config),
      pool_(pool),
      buffer_(config),
      store_(std::move(store)),
      classes_by_opcode_(config.ack_tc || config.cnp_tc),
      random_(config.seed | 1) {
  if (config.spillway.enabled && store_) spillway_.emplace(config, *store_, pool);
  hears_ = spillway_ && spillway_->hears();
  ports_.reserve(config.ports.size());
  active_.reserve(config.ports.size());
  for (const PortConfig& c : config.ports) {
    PortState& p = ports_.emplace_back(c);
    for (uint8_t q = 0; q < kClasses; q++)
      if (c.queues[q].scheduler.strict) p.strict |= bit(q);
    if (c.rate_bps != 0) p.ps_per_byte = kPicosecondsPerByte / c.rate_bps;
    const uint64_t drain = config.spillway.drain_rate_bps != 0 ? config.spillway.drain_rate_bps : c.rate_bps;
    if (drain != 0) p.drain_ps_per_byte = kPicosecondsPerByte / drain;
  }
}

TrafficManager::PortState::PortState(const PortConfig& c)
    : queue_of_tc(c.tc_to_queue), tc_of_dscp(c.dscp_to_tc), config(c) {}

QueueCounters TrafficManager::counters(uint16_t port, uint8_t queue) const {
  const PortState& p = ports_[port];
  QueueCounters c = p.queues[queue].counters;
  for (Amount* to : {&c.arrived, &c.sent})
    to->packets += p.passed[queue].packets, to->bytes += p.passed[queue].bytes;
  return c;
}

uint8_t TrafficManager::class_by_opcode(const Frame& frame, uint16_t map_of) const noexcept {
  const Look l = look(frame);
  if (l.kind == Look::Kind::kCnp && config_.cnp_tc) return *config_.cnp_tc;
  if (l.kind == Look::Kind::kAck && config_.ack_tc) return *config_.ack_tc;
  return ports_[map_of].tc_of_dscp[l.dscp()];
}

void TrafficManager::enqueue_slow(Frame frame, uint16_t port, uint8_t q, uint8_t tc, uint16_t source,
                                  Time now, FrameList& out) noexcept {
  PortState& p = ports_[port];
  Queue& queue = p.queues[q];
  const uint64_t bytes = frame.total_length();
  queue.counters.arrived.add(bytes);
  if (!p.up) return drop(p, q, std::move(frame), QueueDrop::kLinkDown);
  if (queue.storm) return drop(p, q, std::move(frame), QueueDrop::kWatchdog);
  const bool own = source == kNoSource;
  const uint8_t group = own ? uint8_t{0} : ports_[source].config.tc_to_pg[tc];
  Look l = own ? Look{} : look(frame);
  bool eligible = false;
  if (spillway_ && !own) {
    eligible = p.config.queues[q].profile.spill && ports_[source].config.groups[group].xoff == 0 &&
               spillway_->eligible(frame, l);
    if (spillway_->join(frame, l, eligible, port, q, now) != Spillway::Offer::kPass)
      return queue.counters.to_spillway.add(bytes);
  }
  const SharedBuffer::Place place{port, q, source, group};
  const SharedBuffer::Verdict verdict = buffer_.ask(place, bytes);
  if (fits(verdict) && frames_ < config_.frames_max) {
    if (!own) mark(p, port, q, frame, l);
    const bool headroom = verdict == SharedBuffer::Verdict::kFitsHeadroom;
    buffer_.charge(place, bytes, headroom);
    push(p, port, q, std::move(frame), place);
    if (headroom) begin_pausing(source, group, now, out);
    return;
  }
  if (!eligible) return drop(p, q, std::move(frame), fits(verdict) ? QueueDrop::kNoFrames : drop_of(verdict));
  queue.counters.to_spillway.add(bytes);
  spillway_->spill(frame, l, port, q, now);
  list(p, port);
  renew_slow(p, port);
}

// By the queue's length as it is, as DCQCN asks for (Zhu et al., SIGCOMM 2015, section 5).
void TrafficManager::mark(PortState& p, uint16_t port, uint8_t q, Frame& frame, Look& l) noexcept {
  const auto& wred = p.config.queues[q].wred;
  if (!wred || l.ecn() == kNotEct) return;
  const uint64_t length = buffer_.queue_bytes(port, q);
  if (length <= wred->min_threshold) return;
  if (length < wred->max_threshold) {
    const double part = static_cast<double>(length - wred->min_threshold) /
                        static_cast<double>(wred->max_threshold - wred->min_threshold);
    if (uniform() >= part * wred->probability) return;
  }
  p.queues[q].counters.ce_marked += mark_ce(frame, l);
}

// xorshift64* (Vigna, 2016).
double TrafficManager::uniform() noexcept {
  random_ ^= random_ >> 12;
  random_ ^= random_ << 25;
  random_ ^= random_ >> 27;
  return static_cast<double>((random_ * 0x2545F4914F6CDD1Dull) >> 11) * 0x1p-53;
}

void TrafficManager::push(PortState& p, uint16_t port, uint8_t q, Frame frame,
                          const SharedBuffer::Place& place) noexcept {
  FrameBuffer* b = frame.buffer();
  b->source = place.source;
  b->group = place.group;
  Queue& queue = p.queues[q];
  queue.frames.push(std::move(frame));
  queue.counters.bytes_max = std::max(queue.counters.bytes_max, buffer_.queue_bytes(port, q));
  p.backlog |= bit(q);
  frames_++;
  list(p, port);
}

void TrafficManager::drop(PortState& p, uint8_t q, Frame frame, QueueDrop why) noexcept {
  p.queues[q].counters.drops[static_cast<size_t>(why)].add(frame.total_length());
}

void TrafficManager::list(PortState& p, uint16_t port) noexcept {
  if (p.listed) return;
  p.listed = true;
  active_.push_back(port);
}

void TrafficManager::renew_slow(PortState& p, uint16_t port) noexcept {
  p.slow = p.paused;
  for (uint8_t q = 0; q < kClasses; q++)
    if (p.queues[q].storm) p.slow |= bit(q);
  // An acknowledgement may have to join a key of another queue.
  if (!p.up || (spillway_ && spillway_->holds(port))) p.slow = 0xFF;
}

void TrafficManager::poll(Time now, FrameList& out) noexcept {
  polled_ = now;
  if (now >= next_watch_) watch(now, out);
  if (spillway_) {
    if (spillway_->check_due(now)) check_spillway(now);
    if (now >= spillway_->next_deadline()) spillway_->poll(now, own_out_);
  }
  waits_for_room_ = false;
  for (size_t i = 0; i < active_.size();) {
    const uint16_t port = active_[i];
    PortState& p = ports_[port];
    run(p, port, now, out);
    waits_for_room_ |= p.backlog != 0 && p.room == 0;
    const bool idle =
        p.backlog == 0 && p.paused == 0 && p.pausing == 0 && !(spillway_ && spillway_->holds(port));
    if (!idle) {
      i++;
      continue;
    }
    p.listed = false;
    active_[i] = active_.back();
    active_.pop_back();
  }
}

Time TrafficManager::next_deadline() const noexcept {
  Time next = next_watch_;
  if (spillway_) next = std::min(next, spillway_->next_deadline());
  for (const uint16_t port : active_) {
    const PortState& p = ports_[port];
    if ((p.backlog & ~p.paused) != 0 && p.room > 0) next = std::min(next, p.free_at);
    if (spillway_ && spillway_->holds(port) && p.drain_at > polled_) next = std::min(next, p.drain_at);
    for (uint8_t q = 0; q < kClasses; q++)
      if (p.paused >> q & 1) next = std::min(next, p.queues[q].paused_until);
    next = std::min(next, p.pause_again);
  }
  return next;
}

void TrafficManager::run(PortState& p, uint16_t port, Time now, FrameList& out) noexcept {
  if (p.paused != 0) end_pauses(p, now);
  if (now >= p.pause_again) {
    send_pause(p, port, p.pausing, kQuantaMax, out);
    p.pause_again = now + quanta_time(kQuantaMax, speed(p)) / 2;
  }
  if (!p.up) {
    if (spillway_) reroute(port, now);
    return renew_slow(p, port);
  }
  for (;;) {
    if (spillway_ && spillway_->holds(port)) refill(p, port, now);
    if (p.room == 0 || p.free_at > now) break;
    const int q = choose(p);
    if (q < 0) break;
    Frame frame = pop(p, port, static_cast<uint8_t>(q), out);
    p.queues[q].counters.sent.add(frame.total_length());
    send(p, std::move(frame), port, now, kLagMax, out);
  }
  renew_slow(p, port);
}

// Strict queues first, then deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). −1: none may send.
int TrafficManager::choose(PortState& p) noexcept {
  const auto ready = static_cast<uint8_t>(p.backlog & ~p.paused);
  if (ready == 0) return -1;
  if (const auto strict = static_cast<uint8_t>(ready & p.strict)) return std::bit_width(strict) - 1;
  auto quantum = [&](uint8_t q) { return p.config.queues[q].scheduler.weight * kQuantum; };
  auto head = [&](uint8_t q) { return static_cast<int64_t>(p.queues[q].frames.front()->total_length()); };
  for (;;) {
    for (size_t step = 0; step < kClasses; step++) {
      const uint8_t q = p.turn;
      if (ready & bit(q)) {
        Queue& queue = p.queues[q];
        if (p.turn_new) queue.deficit += quantum(q);
        p.turn_new = false;
        if (head(q) <= queue.deficit) {
          queue.deficit -= head(q);
          return q;
        }
      }
      p.turn = (q + 1) % kClasses;
      p.turn_new = true;
    }
    // A whole round without a packet: as many at once as the nearest needs, less the one that follows.
    int64_t rounds = INT64_MAX;
    for (uint8_t q = 0; q < kClasses; q++)
      if (ready & bit(q))
        rounds = std::min(rounds, (head(q) - p.queues[q].deficit + quantum(q) - 1) / quantum(q) - 1);
    for (uint8_t q = 0; q < kClasses; q++)
      if (ready & bit(q)) p.queues[q].deficit += rounds * quantum(q);
  }
}

Frame TrafficManager::pop(PortState& p, uint16_t port, uint8_t q, FrameList& out) noexcept {
  Queue& queue = p.queues[q];
  Frame frame = queue.frames.pop();
  const FrameBuffer* b = frame.buffer();
  frames_--;
  if (queue.frames.empty()) {
    p.backlog &= static_cast<uint8_t>(~bit(q));
    queue.deficit = 0;
  }
  buffer_.release({port, q, b->source, b->group}, frame.total_length());
  if (b->source != kNoSource && (ports_[b->source].pausing & bit(b->group)) &&
      buffer_.may_resume(b->source, b->group))
    end_pausing(b->source, b->group, out);
  return frame;
}

void TrafficManager::empty_queue(PortState& p, uint16_t port, uint8_t q, QueueDrop why,
                                 FrameList& out) noexcept {
  while (p.backlog & bit(q)) drop(p, q, pop(p, port, q, out), why);
}

// Out of the spillway behind what waits, as long as the queue stays short.
void TrafficManager::refill(PortState& p, uint16_t port, Time now) noexcept {
  const SpillwayConfig& c = config_.spillway;
  const uint64_t burst = c.drain_burst != 0 ? c.drain_burst : 2 * uint64_t{config_.mtu};
  // Without a rate of its own, draining is held back by the port alone: it makes up for what the port does.
  const Time lag = std::max(Time(static_cast<int64_t>(burst * p.drain_ps_per_byte / 1000)),
                            c.drain_rate_bps == 0 && c.drain_burst == 0 ? kLagMax : Time{});
  for (uint8_t q = kClasses; q-- > 0;) {
    if (!spillway_->holds(port, q)) continue;
    spillway_->observe(port, q, buffer_.queue_bytes(port, q), p.paused >> q & 1, false);
    while (spillway_->drains(port, q) && (p.drain_ps_per_byte == 0 || p.drain_at <= now)) {
      const uint64_t bytes = spillway_->peek(port, q, now);
      const uint64_t queued = buffer_.queue_bytes(port, q);
      // One packet always may, whatever its length.
      if (bytes == 0 || (queued > 0 && queued + bytes > spillway_->drain_off(port, q))) break;
      const SharedBuffer::Place place{port, q, kNoSource, 0};
      if (frames_ >= config_.frames_max || !fits(buffer_.ask(place, bytes))) break;
      Frame frame = spillway_->next(port, q, now);
      p.queues[q].counters.drained.add(bytes);
      buffer_.charge(place, bytes, false);
      push(p, port, q, std::move(frame), place);
      if (p.drain_ps_per_byte != 0)
        occupy(p.drain_at, p.drain_ps, (bytes + kWireOverhead) * p.drain_ps_per_byte, now, lag);
    }
  }
}

void TrafficManager::check_spillway(Time now) noexcept {
  for (const uint32_t at : spillway_->active()) {
    const auto port = static_cast<uint16_t>(at / kClasses);
    const auto q = static_cast<uint8_t>(at % kClasses);
    PortState& p = ports_[port];
    if (p.paused != 0) end_pauses(p, now);
    spillway_->observe(port, q, buffer_.queue_bytes(port, q), p.paused >> q & 1, true);
  }
}

bool TrafficManager::hear_pause(const Frame& frame, uint16_t port, Time now) noexcept {
  const std::optional<Pause> pause = parse_pause(frame);
  if (!pause) return false;
  PortState& p = ports_[port];
  for (uint8_t q = 0; q < kClasses; q++) {
    if (!pause->priorities[q]) continue;
    (pause->quanta[q] != 0 ? p.pfc.pauses_received : p.pfc.resumes_received)++;
    if (!p.config.pfc[q]) continue;
    Queue& queue = p.queues[q];
    queue.paused_until = now + quanta_time(pause->quanta[q], speed(p));
    if (pause->quanta[q] != 0 && !(p.paused & bit(q)) && (p.backlog & bit(q))) {
      queue.stuck_since = now;
      queue.sent_seen = queue.counters.sent.packets;
    }
    if (pause->quanta[q] != 0)
      p.paused |= bit(q);
    else
      p.paused &= static_cast<uint8_t>(~bit(q));
    if (p.paused != 0 && p.config.watchdog && next_watch_ == kNever)
      next_watch_ = now + config_.watchdog.detection / 4;
  }
  list(p, port);
  renew_slow(p, port);
  return true;
}

void TrafficManager::end_pauses(PortState& p, Time now) noexcept {
  for (uint8_t q = 0; q < kClasses; q++)
    if ((p.paused & bit(q)) && p.queues[q].paused_until <= now) p.paused &= static_cast<uint8_t>(~bit(q));
}

void TrafficManager::begin_pausing(uint16_t port, uint8_t group, Time now, FrameList& out) noexcept {
  PortState& p = ports_[port];
  if (!p.config.pfc[group] || (p.pausing & bit(group))) return;
  p.pausing |= bit(group);
  send_pause(p, port, bit(group), kQuantaMax, out);
  p.pause_again = std::min(p.pause_again, now + quanta_time(kQuantaMax, speed(p)) / 2);
  list(p, port);
}

void TrafficManager::end_pausing(uint16_t port, uint8_t group, FrameList& out) noexcept {
  PortState& p = ports_[port];
  p.pausing &= static_cast<uint8_t>(~bit(group));
  if (p.pausing == 0) p.pause_again = kNever;
  send_pause(p, port, bit(group), 0, out);
}

// Beside all queues: a pause that waits in one is none.
void TrafficManager::send_pause(PortState& p, uint16_t port, uint8_t priorities, uint16_t quanta,
                                FrameList& out) noexcept {
  Pause pause;
  pause.priorities = priorities;
  for (uint8_t i = 0; i < kClasses; i++)
    if (priorities & bit(i)) pause.quanta[i] = quanta;
  Frame frame = build_pause(pool_, config_.mac, pause);
  if (!frame) {
    p.pfc.not_built++;
    return;
  }
  (quanta != 0 ? p.pfc.pauses_sent : p.pfc.resumes_sent) += static_cast<uint64_t>(std::popcount(priorities));
  frame.set_port(port);
  out.push(std::move(frame));
}

// SONiC's PFC watchdog, action "drop": a queue that had something to send and could not for the detection
// time is emptied, and closed until no pause has come for the restoration time.
void TrafficManager::watch(Time now, FrameList& out) noexcept {
  const Time interval = config_.watchdog.detection / 4;
  bool any = false;
  for (uint16_t port = 0; port < ports_.size(); port++) {
    PortState& p = ports_[port];
    if (!p.config.watchdog || p.config.pfc.none()) continue;
    end_pauses(p, now);
    for (uint8_t q = 0; q < kClasses; q++) {
      if (!p.config.pfc[q]) continue;
      Queue& queue = p.queues[q];
      const bool paused = p.paused & bit(q);
      const bool waiting = (p.backlog & bit(q)) || (spillway_ && spillway_->holds(port, q));
      const bool moved = queue.counters.sent.packets != queue.sent_seen;
      queue.sent_seen = queue.counters.sent.packets;
      if (!paused || !waiting || moved)
        queue.stuck_since = kNever;
      else if (queue.stuck_since == kNever)
        queue.stuck_since = now;
      if (paused)
        queue.calm_since = kNever;
      else if (queue.calm_since == kNever)
        queue.calm_since = now;
      if (!queue.storm && queue.stuck_since != kNever &&
          now - queue.stuck_since >= config_.watchdog.detection) {
        queue.storm = true;
        queue.counters.storms++;
        empty_queue(p, port, q, QueueDrop::kWatchdog, out);
        if (spillway_) spillway_->drop_all(port, q, SpillDrop::kWatchdog);
      } else if (queue.storm && queue.calm_since != kNever &&
                 now - queue.calm_since >= config_.watchdog.restoration) {
        queue.storm = false;
      }
      any |= paused || queue.storm;
    }
    renew_slow(p, port);
  }
  next_watch_ = any ? now + interval : kNever;
}

bool TrafficManager::set_link(uint16_t port, bool up, FrameList& out) noexcept {
  PortState& p = ports_[port];
  if (p.up == up) return false;
  p.up = up;
  if (!up)
    for (uint8_t q = 0; q < kClasses; q++) empty_queue(p, port, q, QueueDrop::kLinkDown, out);
  if (spillway_) up ? spillway_->unflush(port) : spillway_->flush(port);
  list(p, port);
  renew_slow(p, port);
  return true;
}

void TrafficManager::reroute(uint16_t port, Time now) noexcept {
  for (uint8_t q = 0; q < kClasses; q++)
    while (Frame frame = spillway_->holds(port, q) ? spillway_->next(port, q, now) : Frame()) {
      frame.set_port(port);
      rerouted_.push(std::move(frame));
    }
}

void TrafficManager::reenqueue(Frame frame, std::optional<uint16_t> port) noexcept {
  const uint16_t before = frame.port();
  const uint64_t bytes = frame.total_length();
  if (!port || *port == before || !ports_[*port].up)
    return spillway_->count_lost_again(before, bytes, SpillDrop::kUnrouted);
  PortState& p = ports_[*port];
  const uint8_t q = p.queue_of_tc[class_of(frame, *port)];
  const SharedBuffer::Place place{*port, q, kNoSource, 0};
  if (p.queues[q].storm || frames_ >= config_.frames_max || !fits(buffer_.ask(place, bytes)))
    return spillway_->count_lost_again(before, bytes, SpillDrop::kNotAgain);
  p.queues[q].counters.arrived.add(bytes);
  buffer_.charge(place, bytes, false);
  push(p, *port, q, std::move(frame), place);
}

}  // namespace millrace::buffering
