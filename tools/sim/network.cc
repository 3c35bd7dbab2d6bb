#include "tools/sim/network.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "tools/sim/wire_marks.h"

namespace millrace::sim {

using std::chrono::nanoseconds;

namespace {

// Time never stands still, or a state machine that asks for "now" for ever would hang the run.
constexpr Time kTurn = nanoseconds(100);

// The first nanosecond at which something that ends at `ps` has ended.
Time ceil_ns(int64_t ps) { return nanoseconds((ps + 999) / 1000); }

}  // namespace

Network::Network(uint64_t seed) : random_(seed) {}
Network::~Network() = default;

void Network::add(Node& node) {
  node.id_ = static_cast<uint32_t>(nodes_.size());
  node.network_ = this;
  nodes_.push_back(&node);
}

uint32_t Network::wire(Node& a, uint16_t port_a, Node& b, uint16_t port_b, const LinkConfig& config) {
  const auto number = static_cast<uint32_t>(links_.size());
  auto one = [&](Node& from, uint16_t port, Node& to, uint16_t to_port) {
    if (from.links_.size() <= port) from.links_.resize(port + 1u, UINT32_MAX);
    from.links_[port] = static_cast<uint32_t>(links_.size());
    Link l{};
    l.config = config;
    l.from = &from, l.to = &to, l.to_port = to_port;
    l.ps_per_byte = std::llround(8000 / config.gbit);
    links_.push_back(l);
  };
  one(a, port_a, b, port_b);
  one(b, port_b, a, port_a);
  return number;
}

Packet* Network::take() {
  if (free_.empty()) {
    packets_.push_back(std::make_unique<Packet>());
    return packets_.back().get();
  }
  Packet* p = free_.back();
  free_.pop_back();
  return p;
}

void Network::push(Time at, Packet* packet, uint32_t index, bool callback) {
  events_.push({at, order_++, packet, index, callback});
}

void Network::at(Time when, std::function<void()> what) {
  callbacks_.push_back(std::move(what));
  push(std::max(when, now_), nullptr, static_cast<uint32_t>(callbacks_.size() - 1), true);
}

Fate Network::fate_of(Link& link, uint32_t size) {
  if (link.down) {
    link.stats.down_drops++;
    return Fate::kLinkDown;
  }
  const int64_t now_ps = now_.count() * 1000;
  const int64_t backlog_ps = std::max<int64_t>(0, link.free_ps - now_ps);
  const auto backlog = static_cast<uint64_t>(backlog_ps / link.ps_per_byte);
  if (backlog > 0 && backlog + size > link.config.queue_bytes) {
    link.stats.tail_drops++;
    return Fate::kTailDrop;
  }
  link.stats.queue_peak = std::max(link.stats.queue_peak, backlog + size);
  const int64_t takes = (size + kEthernetOverhead) * link.ps_per_byte;
  link.free_ps = std::max(link.free_ps, now_ps) + takes;
  link.stats.busy_ps += takes;
  if (random_.ppm(link.faults.loss)) {
    link.stats.lost++;
    return Fate::kLost;
  }
  return Fate::kFlies;
}

void Network::send(const Node& from, uint16_t port, std::span<const std::span<const uint8_t>> pieces) {
  if (port >= from.links_.size() || from.links_[port] == UINT32_MAX) return;
  const uint32_t number = from.links_[port];
  Link& link = links_[number];
  Packet* packet = take();
  packet->size = 0;
  for (const auto& piece : pieces) {
    assert(packet->size + piece.size() <= kFrameBytesMax);
    if (!piece.empty()) std::memcpy(packet->bytes + packet->size, piece.data(), piece.size());
    packet->size += static_cast<uint32_t>(piece.size());
  }
  frames_++;
  link.stats.frames++;
  link.stats.bytes += packet->size;
  const Fate fate = fate_of(link, packet->size);
  for (Observer* o : observers_) o->sent(now_, from.id_, number, packet->span(), fate);
  if (fate != Fate::kFlies) return recycle(packet);
  launch(link, number, packet);
}

void Network::launch(Link& link, uint32_t number, Packet* packet) {
  const LinkFaults& f = link.faults;
  const Time sent = ceil_ns(link.free_ps);
  Time at = sent + link.config.delay;
  if (f.jitter > Time{}) {
    at += Time(static_cast<int64_t>(random_.below(static_cast<uint64_t>(f.jitter.count()) + 1)));
    link.stats.jittered++;
  }
  at = std::max(at, link.last_arrival);
  if (random_.ppm(f.mark) && mark_congestion(packet->span())) link.stats.marked++;
  // What an FCS does not see has happened inside of a device. Then an ICRC or a checksum tells; ARP has none.
  const bool arp = packet->size >= 14 && packet->bytes[12] == 0x08 && packet->bytes[13] == 0x06;
  if (!arp && random_.ppm(f.corrupt)) {
    link.stats.corrupted++;
    // Behind the Ethernet header, which is each hop's own.
    const uint64_t bit = 14 * 8 + random_.below((uint64_t{packet->size} - 14) * 8);
    packet->bytes[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
  }
  auto late = [&] {
    return Time(static_cast<int64_t>(1 + random_.below(static_cast<uint64_t>(f.reorder_max.count()))));
  };
  if (random_.ppm(f.duplicate)) {
    link.stats.duplicated++;
    Packet* copy = take();
    copy->size = packet->size;
    std::memcpy(copy->bytes, packet->bytes, packet->size);
    push(at + late(), copy, number, false);
  }
  if (random_.ppm(f.reorder)) {
    link.stats.reordered++;
    at += late();
  } else {
    link.last_arrival = at;
  }
  push(at, packet, number, false);
}

void Network::mark_dirty(Node& node) {
  if (node.dirty_) return;
  node.dirty_ = true;
  dirty_.push_back(&node);
}

void Network::deliver(uint32_t number, Packet* packet) {
  Link& link = links_[number];
  Node& to = *link.to;
  for (Observer* o : observers_) o->arrived(now_, to.id_, number, packet->span());
  if (to.stalled_until_ > now_ && to.inbox_.size() >= kRing) {
    ring_drops_++;
    return recycle(packet);
  }
  to.inbox_.push_back({link.to_port, packet});
  mark_dirty(to);
}

void Network::handle(const Event& event) {
  if (event.callback) {
    const auto what = std::move(callbacks_[event.index]);
    callbacks_[event.index] = nullptr;
    what();
  } else if (event.packet != nullptr) {
    deliver(event.index, event.packet);
  } else {
    Node& node = *nodes_[event.index];
    if (node.wake_ != event.at) return;  // another wake has come before it
    node.wake_ = kNever;
    if (clock_of(node) >= node.next_deadline() || node.stalled_until_ != Time{})
      mark_dirty(node);
    else
      reschedule(node);
  }
}

void Network::reschedule(Node& node) {
  const Time own = node.next_deadline();
  if (own == kNever) return;
  const Time when = std::max(own + node.offset_, now_ + kTurn);
  if (when >= node.wake_ && node.wake_ > now_) return;
  node.wake_ = when;
  push(when, nullptr, node.id_, false);
}

void Network::run_node(Node& node) {
  node.dirty_ = false;
  if (node.stalled_until_ > now_) return;
  if (node.stalled_until_ != Time{}) {
    if (node.stops_clock_) node.offset_ += node.stalled_until_ - node.stalled_at_;
    node.stalled_until_ = Time{};
  }
  node.run(clock_of(node));
  reschedule(node);
}

void Network::touch(Node& node) { mark_dirty(node); }

void Network::run_now(Node& node) { run_node(node); }

void Network::stall(Node& node, Time until, bool stops_clock) {
  if (node.stalled_until_ > now_) return;  // one at a time
  node.stalled_until_ = until;
  node.stalled_at_ = now_;
  node.stops_clock_ = stops_clock;
  at(until, [this, &node] { mark_dirty(node); });
}

bool Network::step(Time end) {
  if (!dirty_.empty()) {  // touched from outside
    run_dirty();
    return true;
  }
  if (events_.empty() || events_.top().at > end) {
    now_ = std::max(now_, end);
    return false;
  }
  now_ = std::max(now_, events_.top().at);
  while (!events_.empty() && events_.top().at <= now_) {
    const Event event = events_.top();
    events_.pop();
    handle(event);
  }
  run_dirty();
  return true;
}

void Network::run_dirty() {
  running_.swap(dirty_);
  for (Node* node : running_) run_node(*node);
  running_.clear();
}

}  // namespace millrace::sim
