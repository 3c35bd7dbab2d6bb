#include "aggregation/ranks.h"

#include <algorithm>
#include <bit>

namespace millrace::aggregation {

namespace {

// The first range that ends behind a rank.
template <typename Ranges>
auto at(Ranges& ranges, uint16_t rank) {
  return std::partition_point(ranges.begin(), ranges.end(),
                              [&](const RankRange& r) { return r.first + r.count <= rank; });
}

void collect(const RankSet& set, RankRange node, std::vector<RankRange>& out) {
  const auto& ranges = set.ranges();
  const auto r = at(ranges, node.first);
  if (r == ranges.end() || r->first >= node.first + node.count) return;  // none of it
  if (r->first <= node.first && r->first + r->count >= node.first + node.count) return out.push_back(node);
  const uint32_t left = left_of(node.count);
  collect(set, {node.first, left}, out);
  collect(set, {static_cast<uint16_t>(node.first + left), node.count - left}, out);
}

}  // namespace

uint32_t left_of(uint32_t count) noexcept { return std::bit_ceil(count) / 2; }

void RankSet::insert(uint16_t rank) {
  const auto next = at(ranges_, rank);
  if (next != ranges_.end() && next->first <= rank) return;
  size_++;
  const bool joins_next = next != ranges_.end() && next->first == rank + 1;
  const bool joins_previous = next != ranges_.begin() && (next - 1)->first + (next - 1)->count == rank;
  if (joins_previous) {
    (next - 1)->count += 1 + (joins_next ? next->count : 0);
    if (joins_next) ranges_.erase(next);
  } else if (joins_next) {
    next->first = rank;
    next->count++;
  } else {
    ranges_.insert(next, {rank, 1});
  }
}

void RankSet::erase(uint16_t rank) {
  const auto r = at(ranges_, rank);
  if (r == ranges_.end() || r->first > rank) return;
  size_--;
  const RankRange before{r->first, static_cast<uint32_t>(rank - r->first)};
  const RankRange behind{static_cast<uint16_t>(rank + 1), r->count - before.count - 1};
  auto next = ranges_.erase(r);
  if (behind.count != 0) next = ranges_.insert(next, behind);
  if (before.count != 0) ranges_.insert(next, before);
}

bool RankSet::contains(uint16_t rank) const noexcept {
  const auto r = at(ranges_, rank);
  return r != ranges_.end() && r->first <= rank;
}

std::vector<uint16_t> RankSet::ranks() const {
  std::vector<uint16_t> all;
  for (const RankRange& r : ranges_)
    for (uint32_t i = 0; i < r.count; i++) all.push_back(static_cast<uint16_t>(r.first + i));
  return all;
}

std::string RankSet::to_string() const {
  std::string s = size_ == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min<size_t>(16, ranges_.size()); i++) {
    const RankRange& r = ranges_[i];
    s += (i ? ", " : "") + std::to_string(r.first);
    if (r.count > 1) s += "-" + std::to_string(r.first + r.count - 1);
  }
  return ranges_.size() > 16 ? s + ", …" : s;
}

std::vector<RankRange> RankSet::subtrees(uint32_t world) const {
  std::vector<RankRange> out;
  if (world != 0) collect(*this, {0, world}, out);
  return out;
}

}  // namespace millrace::aggregation
