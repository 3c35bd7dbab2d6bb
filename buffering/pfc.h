// Priority-based flow control's frames (IEEE 802.1Qbb, 802.3 annex 31D): which priorities are to pause, and
// for how long.
#pragma once

#include <array>
#include <optional>

#include "buffering/config.h"
#include "roce/frame.h"

namespace millrace::buffering {

inline constexpr uint16_t kEtherTypeMacControl = 0x8808;
inline constexpr uint16_t kPfcOpcode = 0x0101;
inline constexpr uint16_t kQuantaMax = 0xFFFF;

// 01-80-C2-00-00-01, which no bridge forwards.
inline constexpr MacAddress kPauseMac{{0x01, 0x80, 0xC2, 0x00, 0x00, 0x01}};

struct Pause {
  std::bitset<kClasses> priorities;         // that the frame speaks of
  std::array<uint16_t, kClasses> quanta{};  // of 512 bit times; 0: go on
};

// nullopt: no PFC frame, or not a whole one.
std::optional<Pause> parse_pause(const Frame& frame) noexcept;
// An empty frame when the pool is.
Frame build_pause(FramePool& pool, const MacAddress& source, const Pause& pause) noexcept;

// How long that many quanta last on a link of `bps`, 1 … 10^12.
inline Time quanta_time(uint16_t quanta, uint64_t bps) noexcept {
  return Time(static_cast<int64_t>(uint64_t{quanta} * 512 * 1'000'000'000ull / bps));
}

}  // namespace millrace::buffering
