// Who of a group's members disagrees about a segment, and about what. Shared by whoever gathers segments: the
// switch, and a host for its own ranks. Not on the hot path.
#pragma once

#include <string>
#include <vector>

#include "aggregation/protocol.h"

namespace millrace::aggregation {

// Whether two members mean the same segment; what is each member's own is left out.
bool agree(const SegmentHeader& a, const SegmentHeader& b) noexcept;

struct Disagreement {
  std::vector<uint16_t> ranks;  // that differ from the majority; of two equal camps both
  std::string text;             // names the fields and the values
};
// Of headers that do not all agree, each with its member's rank, in the order of ranks.
Disagreement judge(const std::vector<std::pair<uint16_t, SegmentHeader>>& headers);

}  // namespace millrace::aggregation
