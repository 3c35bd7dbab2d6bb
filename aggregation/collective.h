// What distinguishes the collectives: who contributes to a segment, and who receives how much of its result.
// Shared by switch and host, so that both cut and count alike. Pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aggregation/datatype.h"
#include "aggregation/ranks.h"

namespace millrace::aggregation {

// Everybody contributes, and an operator makes one value of all.
constexpr bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}

constexpr bool has_root(Collective c) { return c == Collective::kReduce || c == Collective::kBroadcast; }

// The vector falls into one shard per rank: each receives its own (reduce-scatter) or gives it (all-gather).
constexpr bool has_shards(Collective c) {
  return c == Collective::kReduceScatter || c == Collective::kAllGather;
}

// A segment of an operation, as all members agree on it. Bytes are of the result, but for `payload`.
struct SegmentShape {
  Collective collective = Collective::kAllReduce;
  ReduceOp op = ReduceOp::kNone;
  DataType type = DataType::kU8, wire = DataType::kU8;
  uint16_t world = 1, root = 0;
  uint64_t total = 0, offset = 0;
  uint32_t length = 0;
  uint32_t payload = 0;  // bytes that a contributor sends

  uint64_t shard() const { return total / world; }

  // Whose data a segment carries that is not reduced.
  uint16_t source() const {
    return collective == Collective::kAllGather && total != 0 ? static_cast<uint16_t>(offset / shard())
                                                              : root;
  }
  bool contributes(uint16_t rank) const { return length != 0 && (reduces(collective) || rank == source()); }
  uint16_t contributors() const { return length == 0 ? 0 : reduces(collective) ? world : 1; }

  bool contributes(const RankSet& ranks) const {
    return length != 0 && (reduces(collective) || ranks.contains(source()));
  }
  // What members that stand for several ranks send of them: accumulators, where those are wide.
  bool partial_is_wide() const {
    return reduces(collective) && length != 0 && accumulates_wide(type, op, wire);
  }
  uint32_t partial_bytes() const {
    return partial_is_wide() ? static_cast<uint32_t>(wide_elements(wire, payload) * sizeof(float)) : payload;
  }

  struct Range {
    uint32_t begin = 0, end = 0;
    uint32_t bytes() const { return end - begin; }
  };
  // Which of the payload's bytes a rank receives.
  Range receives(uint16_t rank) const {
    return collective == Collective::kReduceScatter ? shards(rank, rank) : whole(receives_all(rank));
  }
  // What of them ranks receive together: the range from the first's to the last's.
  Range receives(const RankSet& ranks) const {
    if (ranks.size() == 1) return receives(ranks.first());
    if (collective == Collective::kReduceScatter) return shards(ranks.first(), ranks.last());
    return whole(collective == Collective::kReduce ? ranks.contains(root)
                                                   : collective != Collective::kBarrier);
  }

 private:
  Range whole(bool received) const { return received ? Range{0, payload} : Range{}; }
  bool receives_all(uint16_t rank) const {
    return collective == Collective::kAllReduce || (collective == Collective::kReduce && rank == root) ||
           ((collective == Collective::kBroadcast || collective == Collective::kAllGather) &&
            rank != source());
  }
  Range shards(uint16_t first, uint16_t last) const {
    const uint64_t begin = std::max(offset, first * shard());
    const uint64_t end = std::min(offset + length, (last + uint64_t{1}) * shard());
    if (begin >= end) return {};
    // In another wire form a segment lies within one shard.
    if (wire != type) return {0, payload};
    return {static_cast<uint32_t>(begin - offset), static_cast<uint32_t>(end - offset)};
  }
};

}  // namespace millrace::aggregation
