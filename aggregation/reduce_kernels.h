// The private side of reduce.h: the inner loops of one operator on one wire type, compiled once for each
// instruction set and picked at run time by Highway. Only reduce.h includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aggregation/datatype.h"

namespace millrace::aggregation {

// `bytes` is always that of the elements as they are on the wire, but for `combine` and for the `finish` of
// wide types, where it is that of the f32 accumulators.
struct Kernels {
  // Types reduced in kind have only this, wide ones the next four; of these, minima and maxima have both.
  void (*accumulate)(uint8_t* acc, const uint8_t* in, size_t bytes);
  void (*widen)(float* wide, const uint8_t* in, size_t bytes);
  void (*accumulate_wide)(float* wide, const uint8_t* in, size_t bytes);
  void (*narrow)(uint8_t* out, const float* wide, size_t bytes);
  void (*combine)(uint8_t* acc, const uint8_t* in, size_t bytes);
  void (*finish)(uint8_t* acc, size_t bytes, uint32_t contributions);  // null where there is nothing to do
  DataType wire;
  const char* target;  // Highway's name of the instruction set, "AVX2"
};

// Static storage, for the best instruction set of this machine; null where there is no kernel, that is where
// wire_supported() is false.
const Kernels* find_kernels(DataType type, ReduceOp op, DataType wire) noexcept;

// The same for bfp8 blocks, whatever the type of the elements in them (bfp.cc); null for other operators than
// the arithmetic ones.
const Kernels* find_bfp8_kernels(ReduceOp op) noexcept;

}  // namespace millrace::aggregation
