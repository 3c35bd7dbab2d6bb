// The private side of reduce.h: the inner loops of one (type, operator), compiled once for each instruction
// set and picked at run time by Highway. Only reduce.h includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aggregation/datatype.h"

namespace millrace::aggregation {

// Types reduced in kind have only `accumulate`, wide ones only the other three; the rest is null. `bytes` is
// always that of the narrow elements.
struct Kernels {
  void (*accumulate)(uint8_t* acc, const uint8_t* in, size_t bytes);
  void (*widen)(float* wide, const uint8_t* in, size_t bytes);
  void (*accumulate_wide)(float* wide, const uint8_t* in, size_t bytes);
  void (*narrow)(uint8_t* out, const float* wide, size_t bytes);
  const char* target;  // Highway's name of the instruction set, "AVX2"
};

// Static storage, for the best instruction set of this machine; null where there is no kernel.
const Kernels* find_kernels(DataType type, ReduceOp op) noexcept;

}  // namespace millrace::aggregation
