// Which MAC address an IP neighbour has: asked for by ARP and neighbour solicitation, believed for a while,
// asked again before that is over. Next hops of routes are known from the start and asked all the time, so
// that a dead one is left out before queue pairs give up. Pure; called by the worker; memory is taken once,
// at construction.
//
// What neighbours say unasked (their own requests, gratuitous ARP, unsolicited advertisements) may bring an
// address and change it, but confirms nothing: that our frames arrive is shown by an answer alone. However
// often they say it, a neighbour is asked no more than once in an interval.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "roce/frame.h"
#include "switch/counters.h"
#include "switch/due_queue.h"
#include "switch/fib.h"

namespace millrace::switching {

struct NeighbourConfig {
  uint32_t entries_max = 1024;                // of one interface, next hops aside
  Time reachable = std::chrono::seconds(30);  // after an answer, before it is asked again
  // The same, of next hops, answered or not. One that dies is left out after (kAsksMax + 1) of these at most,
  // which must be over before a queue pair sends the last of its retries, or groups die with a spine:
  //   (kAsksMax + 1) × next_hop_probe < retry_count × ACK time-out, here 4 × 100 ms < 7 × 67 ms = 469 ms.
  Time next_hop_probe = std::chrono::milliseconds(100);
  Time ask_interval = std::chrono::milliseconds(1000);            // of unanswered questions to others
  static constexpr uint32_t kAsksMax = 3;                         // unanswered, then it is given up
  static constexpr uint32_t kHeldMax = 4;                         // frames that wait for one neighbour
  static constexpr uint32_t kHeldTotalMax = 128;                  // frames that wait, in all
  static constexpr Time kLock = std::chrono::milliseconds(1000);  // after an answer, nobody else may answer
};

struct NeighbourCounters {
#define X(n) uint64_t n = 0;
  MILLRACE_NEIGHBOUR_COUNTERS(X)
#undef X
};

class NeighbourTable {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  static constexpr uint32_t kActsMax = 16;  // neighbours that one poll() asks or gives up

  // `ports`: how many. The next hops of `fib` get the first indices, in its order.
  NeighbourTable(const NeighbourConfig& config, const Fib& fib, uint16_t ports, const MacAddress& mac,
                 uint64_t seed, FramePool& pool);

  uint32_t find(const IpAddress& address) const noexcept;
  // Finds or adds; kNone when there is no room. `own` is our address in its subnet. A new one is asked for by
  // the next poll().
  uint32_t resolve(const IpAddress& address, uint16_t interface, const IpAddress& own, Time now) noexcept;
  // Adds one that has spoken to us. It waits for nothing, so that those who do wait cannot keep it out.
  // Precondition: find() does not know it.
  void learn(const IpAddress& address, const MacAddress& mac, uint16_t interface, const IpAddress& own,
             Time now) noexcept;
  bool known(uint32_t index) const noexcept { return entries_[index].has_mac; }
  const MacAddress& mac(uint32_t index) const noexcept { return entries_[index].mac; }
  uint16_t interface(uint32_t index) const noexcept { return entries_[index].interface; }

  // Keeps `frame` until the neighbour is known; false, and the frame stays the caller's, when too many wait.
  // Frame::port() is where it came in.
  bool hold(uint32_t index, Frame& frame) noexcept;

  // A neighbour has said what its address is. `answer`: in answer to a question of ours, as it looks.
  // `override`: an advertisement that may not replace an address that is known has it false.
  void hear(uint32_t index, const MacAddress& mac, bool answer, bool override, Time now) noexcept;

  // Asks who is due, each question with Frame::port() its interface, and gives neighbours up; kActsMax of
  // them at a time, the longest due first: next_deadline() stays in the past while some are left.
  void poll(Time now, FrameList& questions) noexcept;
  Time next_deadline() const noexcept { return due_.next(); }

  // Frames that waited: their neighbour has become known, or has been given up. To be taken after each call.
  FrameList& released() { return released_; }
  FrameList& given_up() { return given_up_; }

  struct Info {
    IpAddress address;
    uint16_t interface;
    MacAddress mac;          // zeros: not known
    std::string_view state;  // "reachable", "stale", "probing", "incomplete", "failed"
    bool next_hop;
    Time age;  // since its last answer; kNever: it has given none
    uint32_t held;
  };
  std::vector<Info> infos(Time now) const;
  std::string_view state(uint32_t index) const;
  const NeighbourCounters& counters() const { return counters_; }

 private:
  struct Entry {
    IpAddress address, own;
    MacAddress mac;
    uint16_t interface = kBridge;
    bool used = false, next_hop = false, has_mac = false;
    bool confirmed = false;  // the MAC address is from an answer
    bool failed = false;     // a next hop that has been given up
    uint32_t asks = 0;       // unanswered ones
    Time answered{};         // the last answer; zero: none
    Time asked{};            // the last question; zero: none
    uint32_t next = kNone;
    FrameList held;
  };
  size_t bucket_of(const IpAddress& address) const noexcept;
  bool usable(const MacAddress& mac) const noexcept;
  uint32_t occupy(const IpAddress& address, uint16_t interface, const IpAddress& own, Time now) noexcept;
  void release(uint32_t index) noexcept;
  void let_go(Entry& entry, FrameList& to) noexcept;
  void become(uint32_t index, const MacAddress& mac, bool confirmed, Time now) noexcept;
  void act(uint32_t index, Time now, FrameList& questions) noexcept;
  void ask(uint32_t index, Time now, FrameList& questions) noexcept;
  Frame question4(const Entry& entry) noexcept;
  Frame question6(const Entry& entry) noexcept;
  Time interval(const Entry& entry) const {
    return entry.next_hop ? config_.next_hop_probe : config_.ask_interval;
  }
  size_t slot_of(uint16_t interface) const { return interface == kBridge ? quota_.size() - 1 : interface; }

  NeighbourConfig config_;
  MacAddress mac_;
  uint64_t seed_;
  FramePool& pool_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> buckets_;
  uint32_t free_ = kNone;
  // By port, the bridge last: one interface's neighbours cannot fill the others' places, and of an
  // interface's own places at most half wait for answers, so that somebody who scans a subnet does not use
  // them up.
  struct Quota {
    uint32_t left = 0, incomplete = 0, incomplete_max = 0;
  };
  std::vector<Quota> quota_;
  // By port that they came in on. A port may hold as many frames as there are places left (dynamic
  // thresholds; Choudhury and Hahne, 1998): one port alone half of them all, and each that fills its share
  // still leaves as much for others.
  std::vector<uint32_t> held_by_port_;
  uint32_t held_ = 0;
  DueQueue due_;  // when something is to be done about an entry
  FrameList released_, given_up_;
  NeighbourCounters counters_;
};

}  // namespace millrace::switching
