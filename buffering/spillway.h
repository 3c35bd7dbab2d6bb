// The spillway: keeps eligible packets that a full queue would drop, and gives them back in order when the
// queue has calmed down (SPILLWAY-style; Millrace's own rules, buffering/BUFFERING.md). Packets of one key
// (egress port, queue, destination address) stand in one FIFO; while it is not empty, every later eligible
// packet of the key joins it, and so do the acknowledgements of a flow that has packets in it: order per
// flow, which go-back-N needs, follows. Driven by the traffic manager: pure, one worker, nothing is allocated
// after construction.
#pragma once

#include <optional>
#include <vector>

#include "buffering/config.h"
#include "buffering/fast_cnp.h"
#include "buffering/hash_index.h"
#include "buffering/look.h"
#include "buffering/spill_counters.h"
#include "buffering/store.h"

namespace millrace::buffering {

enum class SpillState : uint8_t { kPass, kSpill, kDrain, kFlush };

struct SpillKeyStatus {
  uint16_t port;
  uint8_t queue;
  IpAddress destination;
  SpillState state;
  Amount resident, spilled, drained, dropped;
  uint64_t resident_bytes_max;
  Time oldest;  // age of the packet in front
};

class Spillway {
 public:
  // `store` outlives the spillway and holds at least ids_max(config) packets; `pool` gives the CNPs.
  Spillway(const Config& config, Store& store, FramePool& pool);
  ~Spillway();
  static uint32_t ids_max(const SpillwayConfig& config);

  // Whether packets of this kind may be spilled at all; their queue and group are the traffic manager's
  // matter.
  bool eligible(const Frame& frame, const Look& l) const noexcept;

  enum class Offer : uint8_t {
    kPass,     // not ours: the frame is untouched
    kTaken,    // spilled
    kRefused,  // dropped and counted
  };
  // Before a frame is admitted to its queue: it joins its key if that is not empty.
  Offer join(Frame& frame, Look& l, bool eligible, uint16_t port, uint8_t queue, Time now) noexcept;
  // An eligible frame that was not admitted; kTaken or kRefused.
  Offer spill(Frame& frame, Look& l, uint16_t port, uint8_t queue, Time now) noexcept;

  // Whether the port has packets here.
  bool holds(uint16_t port) const { return ports_[port].keys > 0; }
  bool holds(uint16_t port, uint8_t queue) const { return line(port, queue).keys > 0; }
  uint64_t drain_off(uint16_t port, uint8_t queue) const { return line(port, queue).drain_off; }
  SpillState state(uint16_t port, uint8_t queue) const { return line(port, queue).state; }
  // What the queue behind the packets looks like now: begins to drain when it was calm for long enough, stops
  // when it is not. `tick`: this is one of the periodic checks.
  void observe(uint16_t port, uint8_t queue, uint64_t queue_bytes, bool paused, bool tick) noexcept;
  // While draining or flushing: the next packet that may leave, if one is back from its store.
  Frame next(uint16_t port, uint8_t queue, Time now) noexcept;
  // Its length, 0 if there is none. It stays the next one until next() is called.
  uint32_t peek(uint16_t port, uint8_t queue, Time now) noexcept;

  // The link is down: packets leave by next(), to be routed anew. Ended by unflush().
  void flush(uint16_t port) noexcept;
  void unflush(uint16_t port) noexcept;
  // Drops what the queue's keys hold.
  void drop_all(uint16_t port, uint8_t queue, SpillDrop why) noexcept;
  // Counts a packet that was rerouted and found no place.
  void count_lost_again(uint16_t port, uint64_t bytes, SpillDrop why) noexcept;

  // A frame that passes through, to learn queue pairs from; to be called for each where hears() is true.
  bool hears() const { return cnp_.has_value(); }
  void hear(const Frame& frame, Time now) noexcept { cnp_->hear(frame, now); }
  const FastCnp* fast_cnp() const { return cnp_ ? &*cnp_ : nullptr; }
  // CNPs to be sent; their port is not set.
  FrameList& cnps() { return cnps_; }

  // Drops what is too old, and serves the store; to be called when next_deadline() has passed.
  void poll(Time now, FrameList& out) noexcept;
  Time next_deadline() const noexcept;
  bool check_due(Time now) const { return now >= next_check_; }

  // Queues with packets here, as port × 8 + queue; changes as keys open and close.
  const std::vector<uint32_t>& active() const { return active_; }
  const SpillCounters& counters(uint16_t port) const { return ports_[port].counters; }
  SpillCounters counters() const;  // of all ports
  std::vector<SpillKeyStatus> keys(Time now) const;
  uint32_t keys_count() const { return keys_count_; }
  const Store& store() const { return store_; }
  bool drains(uint16_t port, uint8_t queue) const {
    const SpillState s = line(port, queue).state;
    return s == SpillState::kDrain || s == SpillState::kFlush;
  }

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  enum class Where : uint8_t {
    kFree,
    kStored,
    kAsked,   // a read is under way
    kDoomed,  // the same, but it will be dropped
    kBack,
    kGone,  // lost
  };
  struct Entry {
    uint32_t next;  // in the key's FIFO, or of the free list
    uint32_t key;
    uint32_t flow;
    uint32_t bytes;
    FrameBuffer* frame;  // when it is back
    Time arrived;
    Where where;
    SpillDrop why;  // of kDoomed and kGone
    bool markable;  // data, ECN-capable and not marked
  };
  struct Flow {
    uint64_t hash;
    uint32_t key;
    uint32_t packets;
    uint32_t next;  // of the free list
  };
  struct Key {
    IpAddress destination;
    uint64_t hash = 0;
    uint32_t line = 0;
    uint32_t first = kNone, last = kNone;    // FIFO
    uint32_t ask = kNone;                    // first that was not asked for
    uint32_t before = kNone, after = kNone;  // in the line's ring; `after` also links free keys
    Amount resident, spilled, drained, dropped;
    uint64_t resident_bytes_max = 0;
    // Whether it has grown in the last window; what it held when that began.
    bool grows = true;
    uint64_t bytes_before = 0;
    Time window_ends{};
  };
  struct Line {
    SpillState state = SpillState::kPass;
    uint32_t keys = 0, calm = 0;
    uint32_t cursor = kNone, ask_cursor = kNone;  // in the ring of keys
    uint32_t ahead = 0;                           // entries asked for or back
    uint32_t unasked = 0;
    uint32_t place = 0;  // in active_
    uint64_t drain_on = 0, drain_off = 0;
  };
  struct Port {
    uint32_t keys = 0;
    SpillCounters counters;
  };

  Line& line(uint16_t port, uint8_t queue) { return lines_[port * kClasses + queue]; }
  const Line& line(uint16_t port, uint8_t queue) const { return lines_[port * kClasses + queue]; }
  Port& port_of(const Key& k) { return ports_[k.line / kClasses]; }
  uint64_t key_hash(uint32_t line, const IpAddress& destination) const noexcept;
  uint64_t flow_hash(uint16_t port, const Frame& frame, const Look& l) const noexcept;
  uint32_t find_key(uint32_t line, const IpAddress& destination, uint64_t h) const noexcept;
  uint32_t find_flow(uint64_t h) const noexcept;
  uint32_t open(uint32_t line, const IpAddress& destination, uint64_t h) noexcept;
  void close(uint32_t key) noexcept;
  Offer append(uint32_t key, Frame& frame, Look& l, Time now) noexcept;
  Offer refuse(uint16_t port, Frame& frame, SpillDrop why) noexcept;
  bool head_is_back(const Line& l) const noexcept {
    return l.keys > 0 && entries_[keys_[l.cursor].first].where == Where::kBack;
  }
  void ask_ahead(Line& l, Time now) noexcept;
  void collect() noexcept;
  bool ready(Line& l, Time now) noexcept;  // moves the cursor to a key whose head is back
  void doom(uint32_t entry, SpillDrop why) noexcept;
  static void follow(Key& k, Time now) noexcept;
  void clear_head(uint32_t key) noexcept;  // of what is gone; may close the key
  void remove_head(uint32_t key) noexcept;
  void expire(Time now) noexcept;
  void set_state(Line& l, SpillState to, SpillCounters& c) noexcept;

  SpillwayConfig config_;
  Store& store_;
  uint64_t seed_;
  std::vector<Line> lines_;
  std::vector<Port> ports_;
  std::vector<Key> keys_;
  HashIndex key_index_;
  LazyArray<Entry> entries_;
  LazyArray<Flow> flows_;
  HashIndex flow_index_;
  std::vector<uint32_t> active_;
  std::optional<FastCnp> cnp_;
  FrameList cnps_;
  uint32_t keys_count_ = 0, free_key_ = kNone;
  uint32_t fresh_entry_ = 0, free_entry_ = kNone, fresh_flow_ = 0, free_flow_ = kNone;
  uint64_t resident_bytes_ = 0, resident_bytes_max_ = 0;
  Time next_check_ = kNever;  // of queues, while anything is held
  Time next_expiry_ = kNever;
};

}  // namespace millrace::buffering
