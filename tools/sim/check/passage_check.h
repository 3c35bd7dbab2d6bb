// That a switch passes the packets of each (source, destination, queue pair) on in the order in which they
// came to it, and none that did not come: by what the ICRC covers, which is all that may not change on the
// way but the mark of congestion, which an ECN-capable packet may get and none may lose. A packet may be
// missing; a copy may leave as often as it came.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "tools/sim/check/violations.h"
#include "tools/sim/check/wire_packet.h"

namespace millrace::sim::check {

class PassageCheck {
 public:
  explicit PassageCheck(Violations& violations) : violations_(violations) {}

  void came(uint32_t node, std::span<const uint8_t> frame) {
    WirePacket p;
    const char* why;
    if (read_packet(frame, false, p, why) != WireKind::kRoce || p.cnp() || p.dest_qp <= 1) return;
    flow(node, p).waiting.emplace(identity(frame, p), Came{++arrivals_, p.ecn});
  }
  // One of the switch's links went down just now. What it holds for that link in others' memory comes back
  // when newer packets go another way already: whatever has come so far may leave late.
  void detour(uint32_t node) { detours_[node] = arrivals_; }
  // By one of its links: what is flooded leaves by several.
  void left(int64_t at_ns, uint32_t node, uint32_t link, std::span<const uint8_t> frame) {
    WirePacket p;
    const char* why;
    if (read_packet(frame, false, p, why) != WireKind::kRoce || p.cnp() || p.dest_qp <= 1) return;
    Flow& f = flow(node, p);
    uint64_t& last = f.last[link];
    // The first of its like that came behind all that have left.
    uint64_t best = 0;
    bool late = false;
    const auto detour = detours_.find(node);
    const auto [begin, end] = f.waiting.equal_range(identity(frame, p));
    for (auto i = begin; i != end; ++i) {
      if (p.ecn != i->second.ecn && (p.ecn != 3 || i->second.ecn == 0)) continue;
      if (i->second.number > last && (best == 0 || i->second.number < best)) best = i->second.number;
      late |= detour != detours_.end() && i->second.number <= detour->second;
    }
    passed_++;
    if (best == 0 && late) return;
    if (best == 0)
      return violations_.add(
          "passage", at_ns,
          "switch node " + std::to_string(node) +
              " passes on out of order, twice, or with another mark: " + describe_packet(frame));
    last = best;
    if (f.waiting.size() <= f.sweep_at) return;
    std::erase_if(f.waiting, [&](const auto& entry) { return entry.second.number + 200000 < arrivals_; });
    f.sweep_at = std::max(kSweepAt, 2 * f.waiting.size());
  }
  uint64_t passed() const { return passed_; }

 private:
  static constexpr size_t kSweepAt = 20000;
  struct Came {
    uint64_t number;
    uint8_t ecn;
  };
  struct Flow {
    std::multimap<uint64_t, Came> waiting;  // by identity
    std::map<uint32_t, uint64_t> last;      // number of what has left, by link
    size_t sweep_at = kSweepAt;
  };
  using Key = std::tuple<uint32_t, Address, Address, uint32_t>;
  Flow& flow(uint32_t node, const WirePacket& p) { return flows_[{node, p.src, p.dst, p.dest_qp}]; }
  static uint64_t identity(std::span<const uint8_t> frame, const WirePacket& p) {
    const uint32_t icrc = be32(frame.data() + frame.size() - 4);
    return uint64_t{icrc} << 32 | uint64_t{p.opcode} << 24 | p.psn;
  }

  Violations& violations_;
  std::map<Key, Flow> flows_;
  std::map<uint32_t, uint64_t> detours_;  // by node: the last that came before
  uint64_t arrivals_ = 0, passed_ = 0;
};

}  // namespace millrace::sim::check
