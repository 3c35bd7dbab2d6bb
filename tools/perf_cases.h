// What millrace-perf can be asked to measure: collectives, which type and operator go with which, what a size
// means, and nccl-tests' factors. Pure, any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "host/millrace.h"

namespace millrace::perf {

enum class Collective : uint8_t { kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather, kBarrier };

inline constexpr std::array kCollectives = {Collective::kAllReduce, Collective::kReduce,
                                            Collective::kBroadcast, Collective::kReduceScatter,
                                            Collective::kAllGather, Collective::kBarrier};
inline constexpr std::array kTypes = {MR_U8,  MR_I8,   MR_I32, MR_U32, MR_I64,    MR_U64,
                                      MR_F16, MR_BF16, MR_F32, MR_F64, MR_F8E4M3, MR_F8E5M2};
inline constexpr std::array kOps = {MR_SUM,  MR_PROD, MR_MIN,  MR_MAX,  MR_AVG,
                                    MR_BAND, MR_BOR,  MR_BXOR, MR_LAND, MR_LOR};
inline constexpr mr_op kNoOp{};  // of collectives that reduce nothing

const char* name(Collective collective);  // "all-reduce"
const char* name(mr_type type);
const char* name(mr_op op);  // "none" for kNoOp

bool reduces(Collective collective);
bool has_root(Collective collective);
bool has_shards(Collective collective);  // a rank gives or gets its part of the vector only
bool is_floating(mr_type type);
bool goes_with(mr_type type, mr_op op);
bool goes_as_bfp8(mr_type type);

// One line of the table, but for its size.
struct Kind {
  Collective collective;
  mr_type type;
  mr_op op;
  int root;  // -1: there is none
  bool operator==(const Kind&) const = default;
};

// What a size in bytes comes to. As in nccl-tests it is the whole vector's (the larger of what a rank sends
// and receives), and `count` what the call is given: where each rank has its part, the elements of a part.
// Sizes are rounded down, to whole elements and, where there are parts, to as many in each.
struct Extent {
  size_t bytes, count;
  bool operator==(const Extent&) const = default;
};
Extent extent_of(uint64_t bytes, Collective collective, mr_type type, int ranks);

// busbw / algbw, as in nccl-tests' PERFORMANCE.md: what crosses a rank's link by the best algorithm among
// the ranks themselves, so that numbers of different collectives can be held against the link's speed.
double bus_factor(Collective collective, int ranks);

}  // namespace millrace::perf
