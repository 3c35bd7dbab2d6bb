// A set of ranks: what a member stands for. A host has one rank, a child switch those that have come to it.
// Shared by switch and host. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace millrace::aggregation {

// Ranks [first, first + count).
struct RankRange {
  uint16_t first = 0;
  uint32_t count = 0;
  friend bool operator==(const RankRange&, const RankRange&) = default;
};

class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(uint16_t rank) { insert(rank); }

  void insert(uint16_t rank);
  void erase(uint16_t rank);
  bool contains(uint16_t rank) const noexcept;
  bool empty() const noexcept { return ranges_.empty(); }
  uint32_t size() const noexcept { return size_; }
  uint16_t first() const noexcept { return ranges_.front().first; }  // of a set that is not empty
  uint16_t last() const noexcept {
    return static_cast<uint16_t>(ranges_.back().first + ranges_.back().count - 1);
  }
  // Disjoint, in order, as few as there can be.
  const std::vector<RankRange>& ranges() const noexcept { return ranges_; }
  std::vector<uint16_t> ranks() const;
  // "rank 3", "ranks 0-3, 7", at most 16 ranges.
  std::string to_string() const;

  // The maximal complete subtrees of the canonical bracketing over [0, world) within the set, in order: what
  // a child sends of a deterministic operation (PROTOCOL.md, Trees).
  std::vector<RankRange> subtrees(uint32_t world) const;

  friend bool operator==(const RankSet&, const RankSet&) = default;

 private:
  std::vector<RankRange> ranges_;
  uint32_t size_ = 0;
};

// Where the canonical bracketing divides `count` ranks: so many are on the left, the largest power of two
// below `count`.
uint32_t left_of(uint32_t count) noexcept;

}  // namespace millrace::aggregation
