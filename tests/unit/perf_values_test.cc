// millrace-perf's closed form against plain arithmetic over the contributions themselves, and that it can say
// no.
#include "tools/perf_values.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <vector>

namespace millrace::perf {
namespace {

struct Bf16 {
  uint16_t bits;
  Bf16() = default;
  explicit Bf16(double v)
      : bits(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(v)) >> 16)) {}
  explicit operator double() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

template <typename T>
T reduce(mr_op op, T a, T b) {
  switch (op) {
    case MR_SUM:
      return static_cast<T>(a + b);
    case MR_PROD:
      return static_cast<T>(a * b);
    case MR_MIN:
      return std::min(a, b);
    case MR_MAX:
      return std::max(a, b);
    case MR_AVG:
      return static_cast<T>(a + b);  // divided at the end
    default:
      break;
  }
  if constexpr (std::is_integral_v<T>) {
    if (op == MR_BAND) return static_cast<T>(a & b);
    if (op == MR_BOR) return static_cast<T>(a | b);
    if (op == MR_BXOR) return static_cast<T>(a ^ b);
    if (op == MR_LAND) return static_cast<T>(a && b);
    if (op == MR_LOR) return static_cast<T>(a || b);
  }
  return a;
}

// Element of type T, reduced as A: integers in kind (they wrap), floats in double, where every step is exact.
template <typename T, typename A>
void check(mr_type type) {
  constexpr size_t n = 512;
  for (int world = 1; world <= kExactWorldMax; world++) {
    for (mr_op op : {MR_SUM, MR_PROD, MR_MIN, MR_MAX, MR_AVG, MR_BAND, MR_BOR, MR_BXOR, MR_LAND, MR_LOR}) {
      if (!has_values(type, op)) continue;
      std::vector<A> all(n);
      std::vector<T> one(n);
      for (int rank = 0; rank < world; rank++) {
        fill(type, op, 7, rank, world, one.data(), n);
        for (size_t i = 0; i < n; i++) {
          const auto v = static_cast<A>(one[i]);
          if (op == MR_LAND || op == MR_LOR)
            all[i] = rank == 0 ? static_cast<A>(v != 0) : reduce<A>(op, all[i], v);
          else
            all[i] = rank == 0 ? v : reduce<A>(op, all[i], v);
          if (op == MR_AVG && rank == world - 1) all[i] = static_cast<A>(all[i] / static_cast<A>(world));
        }
      }
      std::vector<T> result(n);
      for (size_t i = 0; i < n; i++) {
        result[i] = static_cast<T>(all[i]);
        ASSERT_EQ(static_cast<A>(result[i]), all[i]) << "not exact in its type";
      }
      ASSERT_EQ(count_wrong(type, op, 7, world, result.data(), n), 0u) << "world " << world << " op " << op;
      auto* bytes = reinterpret_cast<uint8_t*>(result.data());
      bytes[0] ^= 1;
      bytes[(n - 1) * sizeof(T)] ^= 4;
      ASSERT_EQ(count_wrong(type, op, 7, world, result.data(), n), 2u);
      poison(result.data(), n * sizeof(T));
      // A byte of poison may happen to be right in an 8-bit type.
      ASSERT_GE(count_wrong(type, op, 7, world, result.data(), n), n - n / 16);
    }
  }
}

TEST(PerfValues, IntegersMatchPlainArithmetic) {
  check<uint8_t, uint8_t>(MR_U8);
  check<int8_t, int8_t>(MR_I8);
  check<int32_t, int32_t>(MR_I32);
  check<uint32_t, uint32_t>(MR_U32);
  check<int64_t, int64_t>(MR_I64);
  check<uint64_t, uint64_t>(MR_U64);
}

TEST(PerfValues, FloatsMatchPlainArithmetic) {
  check<float, double>(MR_F32);
  check<double, double>(MR_F64);
  check<_Float16, double>(MR_F16);
  check<Bf16, double>(MR_BF16);
}

}  // namespace
}  // namespace millrace::perf
