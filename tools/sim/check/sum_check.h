// The exact result: what each rank contributes, and what must come of it by a naive loop. Contributions are
// chosen so that a sum shows whose part is missing or counted twice: in every second element of a sum rank r
// gives 2^r, as far as the type holds that exactly.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace millrace::sim::check {

// The numbers are the protocol's: types u8 … f64 are 1 … 10, operators sum, prod, min, max 1 … 4.
struct Reduction {
  int type = 9, op = 1;
  uint64_t count = 0;
  uint32_t world = 1;
  uint64_t seed = 1;
};

uint32_t element_bytes(int type);
// `out` has count × element_bytes(type) bytes; its address is that of an element.
void fill_contribution(const Reduction& r, uint32_t rank, uint8_t* out);
// The reduction of all ranks' contributions.
std::vector<uint8_t> expected_result(const Reduction& r);
// An empty string: they are equal. Else a sentence about the first element that differs, which for a sum
// names the ranks that are missing or counted twice.
std::string explain_difference(const Reduction& r, std::span<const uint8_t> expected,
                               std::span<const uint8_t> got);

}  // namespace millrace::sim::check
