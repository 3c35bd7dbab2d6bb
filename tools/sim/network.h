// Virtual time, nodes and the wires between them: the core of the simulator. A wire has two directions, each
// with a rate, a propagation delay, a finite queue with tail drop, and faults drawn from the network's seed.
// Everything happens in the order of (time, order of scheduling), so the same seed gives the same run.
// Single-threaded.
#pragma once

#include <functional>
#include <memory>
#include <queue>
#include <span>
#include <vector>

#include "roce/types.h"
#include "tools/sim/random.h"

namespace millrace::sim {

// What a frame costs on the wire beyond its bytes: preamble, FCS and the gap between frames.
inline constexpr uint32_t kEthernetOverhead = 24;
inline constexpr uint32_t kFrameBytesMax = 4480;

struct LinkConfig {
  double gbit = 100;
  Time delay = std::chrono::microseconds(1);
  uint64_t queue_bytes = UINT64_MAX;  // waiting to be sent; what exceeds it is dropped
};

// Per frame, in millionths.
struct LinkFaults {
  uint32_t loss = 0, duplicate = 0, reorder = 0, corrupt = 0, mark = 0;
  Time reorder_max = std::chrono::microseconds(200);
  Time jitter{};  // each frame is late by up to this, without overtaking
};

struct LinkStats {
  uint64_t frames = 0, bytes = 0;  // put on the wire; without kEthernetOverhead
  uint64_t lost = 0, duplicated = 0, reordered = 0, corrupted = 0, marked = 0, jittered = 0;
  uint64_t tail_drops = 0, down_drops = 0;
  uint64_t queue_peak = 0;  // bytes
  int64_t busy_ps = 0;      // time spent sending
};

// A frame between two nodes.
struct Packet {
  uint32_t size = 0;
  uint8_t bytes[kFrameBytesMax];
  std::span<uint8_t> span() { return {bytes, size}; }
  std::span<const uint8_t> span() const { return {bytes, size}; }
};

// What happens to a frame when it is put on a wire.
enum class Fate : uint8_t { kFlies, kLost, kTailDrop, kLinkDown };

// Sees all that happens on the wires.
class Observer {
 public:
  virtual ~Observer() = default;
  // `node` has put a frame on its wire `link` (a direction's number); `duplicate`: the network repeats it.
  virtual void sent(Time, uint32_t /*node*/, uint32_t /*link*/, std::span<const uint8_t>, Fate) {}
  // What arrives, corrupted or not. The node may yet drop it.
  virtual void arrived(Time, uint32_t /*node*/, uint32_t /*link*/, std::span<const uint8_t>) {}
};

class Network;

// Something with ports. Its clock runs with the network's but for the time that it has been paused.
class Node {
 public:
  virtual ~Node() = default;
  uint32_t id() const { return id_; }

 protected:
  struct Arrival {
    uint16_t port;
    Packet* packet;
  };
  // Takes the inbox, does what is due, sends. `now` is the node's own clock.
  virtual void run(Time now) = 0;
  virtual Time next_deadline() const = 0;  // by the node's own clock

  std::vector<Arrival> inbox_;
  Network* network_ = nullptr;

 private:
  friend class Network;
  uint32_t id_ = 0;
  std::vector<uint32_t> links_;  // outgoing, by port
  Time wake_ = kNever;           // when the network will look at it again
  Time offset_{};                // network time − own time
  Time stalled_until_{};
  bool stops_clock_ = false;
  Time stalled_at_{};
  bool dirty_ = false;
};

class Network {
 public:
  explicit Network(uint64_t seed);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // Nodes outlive nothing but their network's last run.
  void add(Node& node);
  // Joins two ports; the direction from a to b is the number returned, that from b to a the next one.
  uint32_t wire(Node& a, uint16_t port_a, Node& b, uint16_t port_b, const LinkConfig& config);
  void add_observer(Observer& observer) { observers_.push_back(&observer); }

  Time now() const { return now_; }
  Time clock_of(const Node& node) const { return now_ - node.offset_; }

  // Puts a frame, in up to three pieces, on the wire at a node's port.
  void send(const Node& from, uint16_t port, std::span<const uint8_t> bytes) {
    const std::span<const uint8_t> pieces[] = {bytes};
    send(from, port, pieces);
  }
  void send(const Node& from, uint16_t port, std::span<const std::span<const uint8_t>> pieces);
  void recycle(Packet* packet) { free_.push_back(packet); }

  // Calls back at a time, before the nodes that run then.
  void at(Time when, std::function<void()> what);
  // Lets a node run when the network next does; run_now() at once.
  void touch(Node& node);
  void run_now(Node& node);
  // The node does nothing until then; what arrives waits in a ring of kRing frames. With `stops_clock` its
  // clock stands still meanwhile, as a paused virtual machine's does; else it sees time jump.
  void stall(Node& node, Time until, bool stops_clock);
  bool stalled(const Node& node) const { return node.stalled_until_ > now_; }
  static constexpr size_t kRing = 2048;

  size_t links() const { return links_.size(); }
  LinkFaults& faults(uint32_t link) { return links_[link].faults; }
  const LinkConfig& config(uint32_t link) const { return links_[link].config; }
  const LinkStats& stats(uint32_t link) const { return links_[link].stats; }
  const Node& source(uint32_t link) const { return *links_[link].from; }
  const Node& destination(uint32_t link) const { return *links_[link].to; }
  uint32_t link_of(const Node& node, uint16_t port) const { return node.links_[port]; }
  void set_down(uint32_t link, bool down) { links_[link].down = down; }
  bool down(uint32_t link) const { return links_[link].down; }
  uint64_t frames() const { return frames_; }
  uint64_t ring_drops() const { return ring_drops_; }

  // Runs until done() or until `limit` more has passed; whether done() was reached.
  template <typename Done>
  bool run(Done done, Time limit) {
    const Time end = now_ + limit;
    while (!done())
      if (!step(end)) return done();
    return true;
  }
  void run_for(Time time) {
    run([] { return false; }, time);
  }

 private:
  struct Link {
    LinkConfig config;
    LinkFaults faults;
    LinkStats stats;
    Node* from;
    Node* to;
    uint16_t to_port;
    bool down = false;
    int64_t ps_per_byte;
    int64_t free_ps = 0;  // when all it was given is sent
    Time last_arrival{};  // of those that keep their order
  };
  struct Event {
    Time at;
    uint64_t order;
    Packet* packet;  // with a packet: `index` is the link it arrives by; else the node to wake, or a callback
    uint32_t index;
    bool callback;
    bool operator>(const Event& o) const { return at != o.at ? at > o.at : order > o.order; }
  };

  bool step(Time end);
  void handle(const Event& event);
  void deliver(uint32_t link, Packet* packet);
  void mark_dirty(Node& node);
  void run_node(Node& node);
  void run_dirty();
  void reschedule(Node& node);
  void launch(Link& link, uint32_t number, Packet* packet);
  Packet* take();
  void push(Time at, Packet* packet, uint32_t index, bool callback);
  Fate fate_of(Link& link, uint32_t size);

  Random random_;
  Time now_{};
  uint64_t order_ = 0, frames_ = 0, ring_drops_ = 0;
  std::vector<Node*> nodes_, dirty_, running_;
  std::vector<Link> links_;
  std::vector<Observer*> observers_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::function<void()>> callbacks_;  // by Event::index; empty once called
  std::vector<Packet*> free_;
  std::vector<std::unique_ptr<Packet>> packets_;
};

}  // namespace millrace::sim
