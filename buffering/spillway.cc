#include "buffering/spillway.h"

#include <algorithm>

#include "buffering/address_hash.h"
#include "roce/prefix.h"

namespace millrace::buffering {

namespace {

// A store is asked for packets of 256 bytes at the least, on average: where they are smaller, the number of
// packets is the limit.
constexpr uint64_t kBytesPerId = 256;
constexpr uint64_t kDefaultDrainOff = 64 << 10;
constexpr Time kExpiryInterval = std::chrono::milliseconds(1);
// Long enough for some packets of any port worth spilling for, short against the round trips of those who are
// told.
constexpr Time kWindow = std::chrono::microseconds(100);

}  // namespace

uint32_t Spillway::ids_max(const SpillwayConfig& config) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(config.pool_size / kBytesPerId, 64, 1u << 24));
}

Spillway::Spillway(const Config& config, Store& store, FramePool& pool)
    : config_(config.spillway),
      store_(store),
      seed_(config.seed),
      lines_(config.ports.size() * kClasses),
      ports_(config.ports.size()),
      keys_(config_.keys_max),
      key_index_(config_.keys_max),
      entries_(ids_max(config_)),
      flows_(ids_max(config_)),
      flow_index_(ids_max(config_)) {
  if (config_.fast_cnp) cnp_.emplace(config, pool);
  active_.reserve(lines_.size());
  for (size_t i = 0; i < lines_.size(); i++) {
    const auto& wred = config.ports[i / kClasses].queues[i % kClasses].wred;
    Line& l = lines_[i];
    l.drain_off = config_.drain_off != 0 ? config_.drain_off : wred ? wred->min_threshold : kDefaultDrainOff;
    l.drain_on = config_.drain_on != 0 ? std::min(config_.drain_on, l.drain_off) : l.drain_off / 2;
  }
  for (uint32_t k = config_.keys_max; k-- > 0;) {
    keys_[k].after = free_key_;
    free_key_ = k;
  }
}

Spillway::~Spillway() {
  for (uint32_t e = 0; e < fresh_entry_; e++)
    if (entries_[e].where == Where::kBack) Frame dropped(entries_[e].frame);
}

bool Spillway::eligible(const Frame& frame, const Look& l) const noexcept {
  if (l.kind != Look::Kind::kData || !config_.dscp[l.dscp()]) return false;
  if (config_.source_prefixes.empty()) return true;
  const IpAddress source = source_of(frame, l);
  return std::any_of(config_.source_prefixes.begin(), config_.source_prefixes.end(),
                     [&](const SpillwayConfig::Prefix& p) { return in_prefix(source, p.address, p.bits); });
}

uint64_t Spillway::key_hash(uint32_t line, const IpAddress& destination) const noexcept {
  return address_hash(destination, line + 1, seed_);
}

// What is one flow is told by 64 bits of hash alone: two that shared them would share their order, too. What
// is flooded waits at several ports, and is a flow at each.
uint64_t Spillway::flow_hash(uint16_t port, const Frame& frame, const Look& l) const noexcept {
  const uint64_t pair = uint64_t{l.qpn} << 32 | uint64_t{port} << 1 | 1;
  return address_hash(destination_of(frame, l), address_hash(source_of(frame, l), pair, seed_), seed_);
}

uint32_t Spillway::find_key(uint32_t line, const IpAddress& destination, uint64_t h) const noexcept {
  return key_index_.find(
      h, [&](uint32_t k) { return keys_[k].line == line && keys_[k].destination == destination; });
}

uint32_t Spillway::find_flow(uint64_t h) const noexcept {
  return flow_index_.find(h, [](uint32_t) { return true; });
}

Spillway::Offer Spillway::join(Frame& frame, Look& l, bool eligible, uint16_t port, uint8_t queue,
                               Time now) noexcept {
  if (ports_[port].keys == 0) return Offer::kPass;
  uint32_t key = kNone;
  if (eligible) {
    const uint32_t at = port * kClasses + queue;
    const IpAddress destination = destination_of(frame, l);
    if (lines_[at].keys > 0) key = find_key(at, destination, key_hash(at, destination));
  } else if (l.kind == Look::Kind::kAck) {
    const uint32_t flow = find_flow(flow_hash(port, frame, l));
    if (flow != kNone) key = flows_[flow].key;
    if (key != kNone) ports_[port].counters.acks_held++;
  }
  if (key == kNone) return Offer::kPass;
  return append(key, frame, l, now);
}

Spillway::Offer Spillway::spill(Frame& frame, Look& l, uint16_t port, uint8_t queue, Time now) noexcept {
  const uint32_t at = port * kClasses + queue;
  const IpAddress destination = destination_of(frame, l);
  const uint64_t h = key_hash(at, destination);
  uint32_t key = find_key(at, destination, h);
  if (key == kNone) {
    if (free_key_ == kNone) return refuse(port, frame, SpillDrop::kKeys);
    key = open(at, destination, h);
    const Offer offer = append(key, frame, l, now);
    if (offer == Offer::kRefused) close(key);  // an empty key never stays
    if (next_check_ == kNever) next_check_ = now + config_.drain_check_interval;
    if (next_expiry_ == kNever) next_expiry_ = now + kExpiryInterval;
    return offer;
  }
  return append(key, frame, l, now);
}

Spillway::Offer Spillway::refuse(uint16_t port, Frame& frame, SpillDrop why) noexcept {
  SpillCounters& c = ports_[port].counters;
  const uint64_t bytes = frame.total_length();
  c.offered.add(bytes);
  c.refused[static_cast<size_t>(why)].add(bytes);
  frame = Frame();
  return Offer::kRefused;
}

Spillway::Offer Spillway::append(uint32_t key, Frame& frame, Look& l, Time now) noexcept {
  Key& k = keys_[key];
  const auto port = static_cast<uint16_t>(k.line / kClasses);
  const uint64_t bytes = frame.total_length();
  if (k.resident.bytes + bytes > config_.key_limit) return refuse(port, frame, SpillDrop::kKeyFull);
  const bool entries_left = free_entry_ != kNone || fresh_entry_ < entries_.size();
  if (!entries_left || resident_bytes_ + bytes > config_.pool_size)
    return refuse(port, frame, SpillDrop::kFull);
  const uint64_t fh = flow_hash(port, frame, l);
  SpillCounters& c = ports_[port].counters;
  const bool ect = l.kind == Look::Kind::kData && l.ecn() != kNotEct;
  const FastCnp::Notice notice = cnp_ && ect ? FastCnp::notice(frame, l) : FastCnp::Notice{};

  const uint32_t id = free_entry_ != kNone ? free_entry_ : fresh_entry_;
  if (!store_.write(id, frame, now)) return refuse(port, frame, SpillDrop::kFull);
  if (id == fresh_entry_)
    fresh_entry_++;
  else
    free_entry_ = entries_[id].next;

  uint32_t flow = find_flow(fh);
  if (flow == kNone) {
    flow = free_flow_ != kNone ? free_flow_ : fresh_flow_++;
    if (flow == free_flow_) free_flow_ = flows_[flow].next;
    flows_[flow] = {fh, key, 0, kNone};
    flow_index_.insert(fh, flow);
  }
  flows_[flow].packets++;
  entries_[id] = {kNone,
                  key,
                  flow,
                  static_cast<uint32_t>(bytes),
                  nullptr,
                  now,
                  Where::kStored,
                  {},
                  config_.mark_ce && ect && l.ecn() != kCe};
  (k.last == kNone ? k.first : entries_[k.last].next) = id;
  k.last = id;
  if (k.ask == kNone) k.ask = id;
  lines_[k.line].unasked++;

  k.resident.add(bytes), k.spilled.add(bytes);
  k.resident_bytes_max = std::max(k.resident_bytes_max, k.resident.bytes);
  c.offered.add(bytes), c.spilled.add(bytes), c.resident.add(bytes);
  c.resident_bytes_max = std::max(c.resident_bytes_max, c.resident.bytes);
  resident_bytes_ += bytes;
  resident_bytes_max_ = std::max(resident_bytes_max_, resident_bytes_);
  follow(k, now);
  if (cnp_ && ect) k.grows ? cnp_->tell(notice, now, c, cnps_) : c.suppressed(CnpSuppressed::kShrinking);
  return Offer::kTaken;
}

void Spillway::follow(Key& k, Time now) noexcept {
  if (now < k.window_ends) return;
  k.grows = k.resident.bytes > k.bytes_before;
  k.bytes_before = k.resident.bytes;
  k.window_ends = now + kWindow;
}

uint32_t Spillway::open(uint32_t at, const IpAddress& destination, uint64_t h) noexcept {
  const uint32_t key = free_key_;
  free_key_ = keys_[key].after;
  keys_[key] = Key{};
  Key& k = keys_[key];
  k.destination = destination, k.hash = h, k.line = at;
  key_index_.insert(h, key);
  keys_count_++;
  Port& p = port_of(k);
  p.keys++;
  Line& l = lines_[at];
  if (l.keys++ == 0) {
    l.place = static_cast<uint32_t>(active_.size());
    active_.push_back(at);
    l.cursor = l.ask_cursor = key;
    l.calm = 0;
    k.before = k.after = key;
    set_state(l, SpillState::kSpill, p.counters);
  } else {
    // At the end of the round that is under way.
    k.after = l.cursor, k.before = keys_[l.cursor].before;
    keys_[k.before].after = key, keys_[k.after].before = key;
  }
  return key;
}

void Spillway::close(uint32_t key) noexcept {
  Key& k = keys_[key];
  assert(k.first == kNone && k.resident == Amount{});
  Line& l = lines_[k.line];
  Port& p = port_of(k);
  key_index_.erase(k.hash, key);
  if (l.cursor == key) l.cursor = k.after;
  if (l.ask_cursor == key) l.ask_cursor = k.after;
  keys_[k.before].after = k.after, keys_[k.after].before = k.before;
  keys_count_--;
  p.keys--;
  if (--l.keys == 0) {
    l.cursor = l.ask_cursor = kNone;
    lines_[active_.back()].place = l.place;
    active_[l.place] = active_.back();
    active_.pop_back();
    set_state(l, SpillState::kPass, p.counters);
  }
  if (keys_count_ == 0) next_check_ = next_expiry_ = kNever;
  k.after = free_key_;
  free_key_ = key;
}

void Spillway::set_state(Line& l, SpillState to, SpillCounters& c) noexcept {
  if (l.state == to) return;
  l.state = to;
  c.transitions++;
}

void Spillway::observe(uint16_t port, uint8_t queue, uint64_t queue_bytes, bool paused, bool tick) noexcept {
  Line& l = line(port, queue);
  SpillCounters& c = ports_[port].counters;
  if (tick && paused && l.keys > 0) c.held_by_pfc += config_.drain_check_interval;
  if (l.state == SpillState::kDrain && (paused || queue_bytes > l.drain_off)) {
    l.calm = 0;
    set_state(l, SpillState::kSpill, c);
  } else if (l.state == SpillState::kSpill && tick) {
    l.calm = !paused && queue_bytes <= l.drain_on ? l.calm + 1 : 0;
    if (l.calm >= config_.drain_hold_checks) set_state(l, SpillState::kDrain, c);
  }
}

// Keys take turns in what is asked for, as they do in what leaves.
void Spillway::ask_ahead(Line& l, Time now) noexcept {
  while (l.unasked > 0 && l.ahead < store_.reads_max()) {
    Key& k = keys_[l.ask_cursor];
    l.ask_cursor = k.after;
    if (k.ask == kNone) continue;
    const uint32_t id = k.ask;
    k.ask = entries_[id].next;
    l.unasked--;
    if (entries_[id].where != Where::kStored) continue;  // lost meanwhile
    entries_[id].where = Where::kAsked;
    l.ahead++;
    store_.read(id, now);
  }
}

void Spillway::collect() noexcept {
  StoreEvent event;
  while (store_.next_event(event)) {
    Entry& e = entries_[event.id];
    assert(e.where == Where::kAsked || e.where == Where::kDoomed || e.where == Where::kStored);
    Line& l = lines_[keys_[e.key].line];
    if (event.kind == StoreEvent::Kind::kLost) {
      if (e.where != Where::kStored) l.ahead--;
      if (e.where != Where::kDoomed) e.why = SpillDrop::kStoreLost;
      e.where = Where::kGone;
    } else if (e.where == Where::kDoomed) {
      l.ahead--;
      e.where = Where::kGone;
      event.frame = Frame();
    } else {
      e.where = Where::kBack;
      e.frame = event.frame.release();
    }
    if (e.where == Where::kGone && keys_[e.key].first == event.id) clear_head(e.key);
  }
}

// May close the key.
void Spillway::clear_head(uint32_t key) noexcept {
  Key& k = keys_[key];
  while (k.first != kNone && entries_[k.first].where == Where::kGone) {
    const Entry& e = entries_[k.first];
    port_of(k).counters.lost[static_cast<size_t>(e.why)].add(e.bytes);
    k.dropped.add(e.bytes);
    remove_head(key);
  }
  if (k.first == kNone) close(key);
}

// Out of the FIFO and the books; what it counts as is the caller's.
void Spillway::remove_head(uint32_t key) noexcept {
  Key& k = keys_[key];
  const uint32_t id = k.first;
  Entry& e = entries_[id];
  if (k.ask == id) {  // lost before it was asked for
    k.ask = e.next;
    lines_[k.line].unasked--;
  }
  k.first = e.next;
  if (k.first == kNone) k.last = kNone;
  k.resident.remove(e.bytes);
  port_of(k).counters.resident.remove(e.bytes);
  resident_bytes_ -= e.bytes;
  Flow& f = flows_[e.flow];
  if (--f.packets == 0) {
    flow_index_.erase(f.hash, e.flow);
    f.next = free_flow_;
    free_flow_ = e.flow;
  }
  e.where = Where::kFree;
  e.frame = nullptr;
  e.next = free_entry_;
  free_entry_ = id;
}

bool Spillway::ready(Line& l, Time now) noexcept {
  if (2 * l.ahead <= store_.reads_max()) {
    ask_ahead(l, now);
    collect();
  }
  if (head_is_back(l)) return true;
  collect();
  // collect() may have closed keys, down to the last one.
  for (uint32_t n = l.keys; n > 0; n--) {
    if (head_is_back(l)) return true;
    l.cursor = keys_[l.cursor].after;
  }
  return false;
}

uint32_t Spillway::peek(uint16_t port, uint8_t queue, Time now) noexcept {
  Line& l = line(port, queue);
  return ready(l, now) ? entries_[keys_[l.cursor].first].bytes : 0;
}

Frame Spillway::next(uint16_t port, uint8_t queue, Time now) noexcept {
  Line& l = line(port, queue);
  if (!ready(l, now)) return {};
  const uint32_t key = l.cursor;
  Key& k = keys_[key];
  Entry& e = entries_[k.first];
  Frame frame(e.frame);
  SpillCounters& c = ports_[port].counters;
  follow(k, now);
  // On leaving, not on coming: so that the mark tells of now, not of when the packet came. And only while the
  // key grows: when it shrinks, its senders are slower than the port, which would idle if they slowed down
  // more.
  if (e.markable && k.grows && l.state != SpillState::kFlush) {
    Look look_now = look(frame);
    c.ce_marked += mark_ce(frame, look_now);
  }
  (l.state == SpillState::kFlush ? c.rerouted : c.drained).add(e.bytes);
  k.drained.add(e.bytes);
  const auto held_us = static_cast<uint64_t>((now - e.arrived).count() / 1000);
  c.residence[std::min<size_t>(static_cast<size_t>(std::bit_width(held_us)), c.residence.size() - 1)]++;
  l.ahead--;
  l.cursor = k.after;
  remove_head(key);
  clear_head(key);
  return frame;
}

void Spillway::flush(uint16_t port) noexcept {
  for (uint8_t q = 0; q < kClasses; q++)
    if (Line& l = line(port, q); l.keys > 0) set_state(l, SpillState::kFlush, ports_[port].counters);
}

void Spillway::unflush(uint16_t port) noexcept {
  for (uint8_t q = 0; q < kClasses; q++)
    if (Line& l = line(port, q); l.state == SpillState::kFlush)
      set_state(l, SpillState::kSpill, ports_[port].counters);
}

// A packet that is under way from its store is dropped when it comes.
void Spillway::doom(uint32_t id, SpillDrop why) noexcept {
  Entry& e = entries_[id];
  Line& l = lines_[keys_[e.key].line];
  e.why = why;
  if (e.where == Where::kStored) {
    store_.discard(id);
    e.where = Where::kGone;
  } else if (e.where == Where::kAsked) {
    e.where = Where::kDoomed;
  } else if (e.where == Where::kBack) {
    l.ahead--;
    Frame dropped(e.frame);
    e.frame = nullptr;
    e.where = Where::kGone;
  }
}

void Spillway::drop_all(uint16_t port, uint8_t queue, SpillDrop why) noexcept {
  Line& l = line(port, queue);
  uint32_t key = l.cursor;
  for (uint32_t n = l.keys; n > 0; n--) {
    const uint32_t after = keys_[key].after;
    for (uint32_t id = keys_[key].first; id != kNone; id = entries_[id].next) doom(id, why);
    clear_head(key);
    key = after;
  }
}

void Spillway::count_lost_again(uint16_t port, uint64_t bytes, SpillDrop why) noexcept {
  SpillCounters& c = ports_[port].counters;
  c.rerouted.remove(bytes);
  c.lost[static_cast<size_t>(why)].add(bytes);
}

// Packets stand in the order of their arrival: the first that is young enough ends the search.
void Spillway::expire(Time now) noexcept {
  for (size_t i = active_.size(); i-- > 0;) {
    const uint32_t at = active_[i];
    uint32_t key = lines_[at].cursor;
    for (uint32_t n = lines_[at].keys; n > 0; n--) {
      const uint32_t after = keys_[key].after;
      for (uint32_t id = keys_[key].first; id != kNone; id = entries_[id].next) {
        if (now - entries_[id].arrived <= config_.max_residence) break;
        if (entries_[id].where != Where::kGone) doom(id, SpillDrop::kResidence);
      }
      clear_head(key);
      key = after;
    }
  }
}

void Spillway::poll(Time now, FrameList& out) noexcept {
  store_.poll(now, out);
  collect();
  if (now >= next_check_) next_check_ = keys_count_ > 0 ? now + config_.drain_check_interval : kNever;
  if (now >= next_expiry_) {
    next_expiry_ = now + kExpiryInterval;
    expire(now);
  }
}

Time Spillway::next_deadline() const noexcept {
  return std::min({next_check_, next_expiry_, store_.next_deadline()});
}

SpillCounters Spillway::counters() const {
  SpillCounters all;
  auto add = [](Amount& to, const Amount& more) { to.packets += more.packets, to.bytes += more.bytes; };
  for (const Port& p : ports_) {
    const SpillCounters& c = p.counters;
    add(all.offered, c.offered), add(all.spilled, c.spilled), add(all.drained, c.drained);
    add(all.rerouted, c.rerouted), add(all.resident, c.resident);
    for (size_t i = 0; i < kSpillDrops; i++) add(all.refused[i], c.refused[i]), add(all.lost[i], c.lost[i]);
    for (size_t i = 0; i < c.residence.size(); i++) all.residence[i] += c.residence[i];
    all.transitions += c.transitions, all.ce_marked += c.ce_marked, all.acks_held += c.acks_held;
    all.held_by_pfc += c.held_by_pfc;
    all.cnps_sent += c.cnps_sent;
    for (size_t i = 0; i < kCnpSuppressions; i++) all.cnps_suppressed[i] += c.cnps_suppressed[i];
  }
  all.resident_bytes_max = resident_bytes_max_;
  return all;
}

std::vector<SpillKeyStatus> Spillway::keys(Time now) const {
  std::vector<SpillKeyStatus> all;
  for (const uint32_t at : active_) {
    uint32_t key = lines_[at].cursor;
    for (uint32_t n = lines_[at].keys; n > 0; n--, key = keys_[key].after) {
      const Key& k = keys_[key];
      all.push_back({static_cast<uint16_t>(at / kClasses), static_cast<uint8_t>(at % kClasses), k.destination,
                     lines_[at].state, k.resident, k.spilled, k.drained, k.dropped, k.resident_bytes_max,
                     now - entries_[k.first].arrived});
    }
  }
  return all;
}

}  // namespace millrace::buffering
