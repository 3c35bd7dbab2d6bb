// The exact result: what each rank contributes, and what each must receive by a naive loop. Contributions are
// chosen so that a sum shows whose part is missing or counted twice: in every second element of a sum rank r
// gives 2^r, as far as the type holds that exactly. All contributions and sums are exact in every type and
// wire form; only averages are rounded, as aggregation/NUMERICS.md has it. What is only moved (broadcast,
// all-gather) is random bits, so that whatever comes from another place is recognised.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::sim::check {

// The protocol's numbers.
enum Collective : int { kAllReduce = 1, kReduce, kBroadcast, kReduceScatter, kAllGather, kBarrier };

// An operation of a group. The numbers are the protocol's: types u8 … f8e5m2 are 1 … 12, operators sum,
// prod, min, max, band, bor, bxor, avg 1 … 8; the operator is of no account where nothing is reduced.
struct Reduction {
  int type = 9, op = 1;
  uint64_t count = 0;  // elements of the whole vector; a multiple of the world where that falls into shards
  uint32_t world = 1;
  uint64_t seed = 1;
  int collective = kAllReduce;
  uint32_t root = 0;
  bool bfp = false;  // types f16, bf16 and f32 cross the network in block floating point

  bool reduces() const {
    return collective == kAllReduce || collective == kReduce || collective == kReduceScatter;
  }
  bool has_root() const { return collective == kReduce || collective == kBroadcast; }
  bool has_shards() const { return collective == kReduceScatter || collective == kAllGather; }
  friend bool operator==(const Reduction&, const Reduction&) = default;
};
std::string_view collective_name(int collective);

uint32_t element_bytes(int type);
// Bytes of the whole vector, of what a rank gives, and of what it must hold in the end; nothing where it
// takes no part.
uint64_t vector_bytes(const Reduction& r);
uint64_t contribution_bytes(const Reduction& r, uint32_t rank);
uint64_t result_bytes(const Reduction& r, uint32_t rank);
// `out` has contribution_bytes(); its address is that of an element.
void fill_contribution(const Reduction& r, uint32_t rank, uint8_t* out);
// The whole vector that comes of all ranks' contributions; each rank receives all of it, its shard or
// nothing.
std::vector<uint8_t> expected_result(const Reduction& r);
// `got` is a rank's. An empty string: it is what `expected`, the whole vector, says. Else a sentence about
// the first element that differs: of a sum it names the ranks that are missing or counted twice, and of
// others from where in the vector it is, if from anywhere.
std::string explain_difference(const Reduction& r, uint32_t rank, std::span<const uint8_t> expected,
                               std::span<const uint8_t> got);

}  // namespace millrace::sim::check
