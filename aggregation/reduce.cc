#include "aggregation/reduce.h"

#include <bit>

namespace millrace::aggregation {

// The kernels load wire elements as they lie in memory.
static_assert(std::endian::native == std::endian::little, "Millrace runs on little-endian machines only");

Reducer Reducer::get(DataType type, ReduceOp op) noexcept {
  assert(supported(type, op));
  const Kernels* kernels = find_kernels(type, op);
  assert(kernels != nullptr);
  return Reducer(kernels);
}

}  // namespace millrace::aggregation
