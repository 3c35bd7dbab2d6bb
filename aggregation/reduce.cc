#include "aggregation/reduce.h"

#include <bit>

namespace millrace::aggregation {

// The kernels load wire elements as they lie in memory.
static_assert(std::endian::native == std::endian::little, "Millrace runs on little-endian machines only");

Reducer Reducer::get(DataType type, ReduceOp op) noexcept { return get(type, op, type); }

Reducer Reducer::get(DataType type, ReduceOp op, DataType wire) noexcept {
  assert(wire_supported(type, op, wire));
  const Kernels* kernels = find_kernels(type, op, wire);
  assert(kernels != nullptr);
  return Reducer(kernels);
}

}  // namespace millrace::aggregation
