// The traffic manager: what stands between the pipeline's decision where a frame goes and the port that sends
// it. It admits frames to eight queues per port out of one shared buffer, marks ECN, schedules and shapes,
// hears and sends PFC pauses, and hands what does not fit to the spillway. Pure; one worker; nothing is
// allocated per frame.
//
// A frame that meets an idle port passes straight through: it would have been admitted, unmarked, and sent at
// once.
#pragma once

#include <memory>
#include <optional>

#include "buffering/pfc.h"
#include "buffering/shared_buffer.h"
#include "buffering/spillway.h"

namespace millrace::buffering {

// Why a frame was not sent. Spilled frames have reasons of their own (SpillDrop).
#define MILLRACE_QUEUE_DROPS(X)                                                            \
  X(kQueueFull, "queue_full")       /* over its threshold */                               \
  X(kGroupFull, "group_full")       /* its ingress priority group is over its threshold */ \
  X(kHeadroomFull, "headroom_full") /* of a lossless group: the sender did not pause */    \
  X(kPoolFull, "pool_full")         /* the shared buffer */                                \
  X(kNoFrames, "no_frames")         /* frames_max */                                       \
  X(kWatchdog, "pfc_watchdog")      /* the queue was paused for too long */                \
  X(kLinkDown, "link_down")

enum class QueueDrop : uint8_t {
#define X(id, text) id,
  MILLRACE_QUEUE_DROPS(X)
#undef X
      kCount
};
inline constexpr size_t kQueueDrops = static_cast<size_t>(QueueDrop::kCount);
inline constexpr std::array<std::string_view, kQueueDrops> kQueueDropNames = {
#define X(id, text) text,
    MILLRACE_QUEUE_DROPS(X)
#undef X
};

// arrived + drained = sent + queued + handed to the spillway + dropped, in packets and bytes.
struct QueueCounters {
  Amount arrived;  // for this queue, before admission
  Amount drained;  // came back out of the spillway
  Amount sent;
  Amount to_spillway;  // taken or refused there
  std::array<Amount, kQueueDrops> drops{};
  uint64_t ce_marked = 0;
  uint64_t bytes_max = 0;  // high watermark
  uint64_t storms = 0;     // times that the watchdog has fired
};

struct PfcCounters {
  uint64_t pauses_received = 0, resumes_received = 0;  // by priority and frame
  uint64_t pauses_sent = 0, resumes_sent = 0, not_built = 0;
};

class TrafficManager {
 public:
  // Bytes that each frame takes on the wire beyond its own: FCS, preamble and gap (IEEE 802.3).
  static constexpr uint64_t kWireOverhead = 24;

  // `store` may be empty when the spillway is off; `pool` outlives the traffic manager.
  TrafficManager(const Config& config, FramePool& pool, std::unique_ptr<Store> store);

  // Takes a frame that is to leave by `port`. `source` is its ingress port, or kNoSource for our own: these
  // are never marked and never spilled. What may leave at once is appended to `out`, its port set.
  void enqueue(Frame frame, uint16_t port, uint16_t source, Time now, FrameList& out) noexcept {
    if (hears_ && source != kNoSource) [[unlikely]]
      spillway_->hear(frame, now);
    PortState& p = ports_[port];
    const uint8_t tc = class_of(frame, source == kNoSource ? port : source);
    const uint8_t q = p.queue_of_tc[tc];
    if (p.backlog == 0 && (p.slow >> q & 1) == 0 && p.room > 0 && p.free_at <= now) [[likely]] {
      p.passed[q].add(frame.total_length());
      send(p, std::move(frame), port, now, Time{}, out);
      return;
    }
    enqueue_slow(std::move(frame), port, q, tc, source, now, out);
  }
  // Everything that may leave by now, timers included.
  void poll(Time now, FrameList& out) noexcept;
  // When poll() is next of use; frames that wait for room in a device are not in it.
  Time next_deadline() const noexcept;

  // A frame that came in on `port`: true if it is a PFC frame, which is obeyed.
  bool hear_pause(const Frame& frame, uint16_t port, Time now) noexcept;
  // How many frames the device behind the port takes before the next call.
  void set_room(uint16_t port, uint32_t frames) noexcept { ports_[port].room = frames; }
  bool waits_for_room() const noexcept { return waits_for_room_; }
  // Whether that is news.
  bool set_link(uint16_t port, bool up, FrameList& out) noexcept;
  // Packets of a port whose link is down, to be routed anew with reenqueue().
  Frame next_rerouted() noexcept { return rerouted_.pop(); }
  // Drops and counts what finds no other port (nullopt), or no room there.
  void reenqueue(Frame frame, std::optional<uint16_t> port) noexcept;
  // What the store has to say to those who lend it memory, and the spillway's CNPs; their way is the
  // pipeline's matter.
  FrameList& own_frames() noexcept {
    if (spillway_) own_out_.splice(spillway_->cnps());
    return own_out_;
  }

  bool empty() const { return frames_ == 0 && (!spillway_ || spillway_->keys_count() == 0); }
  uint32_t frames_queued() const { return frames_; }
  const SharedBuffer& buffer() const { return buffer_; }
  const Spillway* spillway() const { return spillway_ ? &*spillway_ : nullptr; }
  QueueCounters counters(uint16_t port, uint8_t queue) const;
  const PfcCounters& pfc_counters(uint16_t port) const { return ports_[port].pfc; }
  uint64_t queue_bytes(uint16_t port, uint8_t queue) const { return buffer_.queue_bytes(port, queue); }
  bool paused(uint16_t port, uint8_t queue) const { return ports_[port].paused >> queue & 1; }
  bool storm(uint16_t port, uint8_t queue) const { return ports_[port].queues[queue].storm; }
  // Whether the ingress side of a lossless group is told to pause.
  bool pausing(uint16_t port, uint8_t group) const { return ports_[port].pausing >> group & 1; }
  const Config& config() const { return config_; }

 private:
  struct Queue {
    FrameList frames;
    int64_t deficit = 0;
    Time paused_until{};
    Time stuck_since = kNever, calm_since = kNever;  // as the watchdog has seen it
    uint64_t sent_seen = 0;
    bool storm = false;
    QueueCounters counters;
  };
  // What every frame touches stands first.
  struct alignas(64) PortState {
    explicit PortState(const PortConfig& c);
    uint8_t backlog = 0;  // bit per queue that has frames
    uint8_t slow = 0;     // bit per queue that no frame may pass straight through
    std::array<uint8_t, kClasses> queue_of_tc;
    uint64_t room = UINT64_MAX;  // no limit that anybody will reach
    uint64_t ps_per_byte = 0;    // 0: no shaping
    // Until when the port is busy with what was sent; `…_ps` is the part below a nanosecond.
    Time free_at{};
    uint64_t free_ps = 0;
    std::array<uint8_t, 64> tc_of_dscp;
    std::array<Amount, kClasses> passed{};  // straight through, by queue: arrived and sent

    uint8_t strict = 0;  // bit per queue
    uint8_t paused = 0, pausing = 0;
    uint8_t turn = 0;      // DWRR: whose it is
    bool turn_new = true;  // it has not had its quantum yet
    bool up = true, listed = false;
    Time drain_at{};
    uint64_t drain_ps = 0, drain_ps_per_byte = 0;
    PortConfig config;
    Time pause_again = kNever;  // pauses are refreshed
    std::array<Queue, kClasses> queues;
    PfcCounters pfc;
  };

  uint8_t class_of(const Frame& frame, uint16_t map_of) const noexcept {
    if (classes_by_opcode_) return class_by_opcode(frame, map_of);
    return ports_[map_of].tc_of_dscp[dscp_of(frame)];
  }
  // Hands the frame over to the port, which is busy with it from then on. `lag`: how late a poll may be
  // without the port losing time.
  static void send(PortState& p, Frame frame, uint16_t port, Time now, Time lag, FrameList& out) noexcept {
    p.room--;
    if (p.ps_per_byte != 0)
      occupy(p.free_at, p.free_ps, (frame.total_length() + kWireOverhead) * p.ps_per_byte, now, lag);
    frame.set_port(port);
    out.push(std::move(frame));
  }
  // A server that was free since `at` (but at most since `lag` ago) is busy for `ps` more.
  static void occupy(Time& at, uint64_t& at_ps, uint64_t ps, Time now, Time lag) noexcept {
    if (at < now - lag) at = now - lag, at_ps = 0;
    ps += at_ps;
    at += Time(static_cast<int64_t>(ps / 1000));
    at_ps = ps % 1000;
  }

  uint8_t class_by_opcode(const Frame& frame, uint16_t map_of) const noexcept;
  void enqueue_slow(Frame frame, uint16_t port, uint8_t q, uint8_t tc, uint16_t source, Time now,
                    FrameList& out) noexcept;
  void push(PortState& p, uint16_t port, uint8_t q, Frame frame, const SharedBuffer::Place& place) noexcept;
  void drop(PortState& p, uint8_t q, Frame frame, QueueDrop why) noexcept;
  void mark(PortState& p, uint16_t port, uint8_t q, Frame& frame, Look& l) noexcept;
  void run(PortState& p, uint16_t port, Time now, FrameList& out) noexcept;
  void refill(PortState& p, uint16_t port, Time now) noexcept;
  void reroute(uint16_t port, Time now) noexcept;
  int choose(PortState& p) noexcept;
  Frame pop(PortState& p, uint16_t port, uint8_t q, FrameList& out) noexcept;
  void empty_queue(PortState& p, uint16_t port, uint8_t q, QueueDrop why, FrameList& out) noexcept;
  void begin_pausing(uint16_t port, uint8_t group, Time now, FrameList& out) noexcept;
  void end_pausing(uint16_t port, uint8_t group, FrameList& out) noexcept;
  void send_pause(PortState& p, uint16_t port, uint8_t priorities, uint16_t quanta, FrameList& out) noexcept;
  void end_pauses(PortState& p, Time now) noexcept;
  void watch(Time now, FrameList& out) noexcept;
  void check_spillway(Time now) noexcept;
  void list(PortState& p, uint16_t port) noexcept;
  void renew_slow(PortState& p, uint16_t port) noexcept;
  uint64_t speed(const PortState& p) const {
    return p.config.rate_bps != 0 ? p.config.rate_bps : p.config.speed_bps;
  }
  double uniform() noexcept;

  Config config_;
  FramePool& pool_;
  SharedBuffer buffer_;
  std::unique_ptr<Store> store_;
  std::optional<Spillway> spillway_;
  std::vector<PortState> ports_;
  std::vector<uint16_t> active_;  // ports with something to do
  FrameList rerouted_, own_out_;
  bool classes_by_opcode_, hears_ = false, waits_for_room_ = false;
  Time polled_{};
  uint32_t frames_ = 0;  // in queues
  uint64_t random_;
  Time next_watch_ = kNever;
};

}  // namespace millrace::buffering
