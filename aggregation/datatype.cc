#include "aggregation/datatype.h"

#include <array>
#include <initializer_list>
#include <utility>

namespace millrace::aggregation {
namespace {

using OpSet = uint16_t;

constexpr OpSet ops(std::initializer_list<ReduceOp> list) {
  OpSet set = 0;
  for (const ReduceOp op : list) set = static_cast<OpSet>(set | 1U << static_cast<unsigned>(op));
  return set;
}

constexpr OpSet kNoOps = 0;
constexpr OpSet kArithmetic =
    ops({ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kAvg});
constexpr OpSet kBitwise = ops({ReduceOp::kBand, ReduceOp::kBor, ReduceOp::kBxor});

struct TypeRow {
  DataType type;
  std::string_view name;
  uint8_t bytes;
  bool wide;
  OpSet supported;
};

// A type or operator is added to the version here; reduce_kernels.cc then has to have a kernel for it, which
// Reduce.EverySupportedPairHasKernels holds.
constexpr std::array kTypes = {
    TypeRow{DataType::kU8, "u8", 1, false, kArithmetic | kBitwise},
    TypeRow{DataType::kI8, "i8", 1, false, kArithmetic | kBitwise},
    TypeRow{DataType::kI32, "i32", 4, false, kArithmetic | kBitwise},
    TypeRow{DataType::kU32, "u32", 4, false, kArithmetic | kBitwise},
    TypeRow{DataType::kI64, "i64", 8, false, kArithmetic | kBitwise},
    TypeRow{DataType::kU64, "u64", 8, false, kArithmetic | kBitwise},
    TypeRow{DataType::kF16, "f16", 2, true, kArithmetic},
    TypeRow{DataType::kBf16, "bf16", 2, true, kArithmetic},
    TypeRow{DataType::kF32, "f32", 4, false, kArithmetic},
    TypeRow{DataType::kF64, "f64", 8, false, kArithmetic},
    TypeRow{DataType::kF8E4M3, "f8e4m3", 1, true, kArithmetic},
    TypeRow{DataType::kF8E5M2, "f8e5m2", 1, true, kArithmetic},
    TypeRow{DataType::kBfp8, "bfp8", 0, true, kNoOps},
};

// Names of types in nccl-tests and numpy where they differ from ours.
constexpr std::array<std::pair<std::string_view, DataType>, 18> kTypeAliases = {{
    {"uint8", DataType::kU8},
    {"int8", DataType::kI8},
    {"char", DataType::kI8},
    {"int32", DataType::kI32},
    {"int", DataType::kI32},
    {"uint32", DataType::kU32},
    {"int64", DataType::kI64},
    {"uint64", DataType::kU64},
    {"half", DataType::kF16},
    {"float16", DataType::kF16},
    {"bfloat16", DataType::kBf16},
    {"bfloat", DataType::kBf16},
    {"float", DataType::kF32},
    {"float32", DataType::kF32},
    {"double", DataType::kF64},
    {"float64", DataType::kF64},
    {"fp8_e4m3", DataType::kF8E4M3},
    {"fp8_e5m2", DataType::kF8E5M2},
}};

// Indexed by code; kCollectives by code minus one.
constexpr std::array<std::string_view, 9> kOps = {"none", "sum", "prod", "min", "max",
                                                  "band", "bor", "bxor", "avg"};
constexpr std::array<std::string_view, 6> kCollectives = {"all-reduce",     "reduce",     "broadcast",
                                                          "reduce-scatter", "all-gather", "barrier"};

constexpr std::string_view kUnknown = "unknown";

// Rows are in code order from 1 on, so that a lookup on the hot path is one index.
constexpr bool in_code_order() {
  for (size_t i = 0; i < kTypes.size(); ++i) {
    if (static_cast<size_t>(kTypes[i].type) != i + 1) return false;
  }
  return true;
}
static_assert(in_code_order());

constexpr bool travels_as_bfp8(DataType type) {
  return type == DataType::kF16 || type == DataType::kBf16 || type == DataType::kF32;
}

constexpr const TypeRow* find(DataType type) {
  const size_t index = static_cast<size_t>(type) - 1;  // code 0 wraps and is out of range
  return index < kTypes.size() ? &kTypes[index] : nullptr;
}

}  // namespace

size_t element_bytes(DataType type) noexcept {
  const TypeRow* row = find(type);
  return row != nullptr ? row->bytes : 0;
}

std::string_view name(DataType type) noexcept {
  const TypeRow* row = find(type);
  return row != nullptr ? row->name : kUnknown;
}

std::string_view name(ReduceOp op) noexcept {
  const auto index = static_cast<size_t>(op);
  return index < kOps.size() ? kOps[index] : kUnknown;
}

std::string_view name(Collective collective) noexcept {
  const size_t index = static_cast<size_t>(collective) - 1;
  return index < kCollectives.size() ? kCollectives[index] : kUnknown;
}

std::optional<DataType> parse_data_type(std::string_view text) noexcept {
  for (const TypeRow& row : kTypes) {
    if (row.name == text) return row.type;
  }
  for (const auto& [alias, type] : kTypeAliases) {
    if (alias == text) return type;
  }
  return std::nullopt;
}

std::optional<ReduceOp> parse_reduce_op(std::string_view text) noexcept {
  for (size_t i = 0; i < kOps.size(); ++i) {
    if (kOps[i] == text) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

bool supported(DataType type, ReduceOp op) noexcept {
  const TypeRow* row = find(type);
  const auto bit = static_cast<unsigned>(op);
  return row != nullptr && bit < kOps.size() && (row->supported >> bit & 1U) != 0;
}

bool order_matters(DataType type, ReduceOp op) noexcept {
  const bool floating = is_wide(type) || type == DataType::kF32 || type == DataType::kF64;
  return floating && (op == ReduceOp::kSum || op == ReduceOp::kProd || op == ReduceOp::kAvg);
}

bool is_wide(DataType type) noexcept {
  const TypeRow* row = find(type);
  return row != nullptr && row->wide;
}

bool accumulates_wide(DataType type, ReduceOp op, DataType wire) noexcept {
  return is_wide(wire) && !(wire == type && (op == ReduceOp::kMin || op == ReduceOp::kMax));
}

bool wire_supported(DataType type, ReduceOp op, DataType wire) noexcept {
  if (wire == type) return supported(type, op);
  const auto bit = static_cast<unsigned>(op);
  return wire == DataType::kBfp8 && travels_as_bfp8(type) && bit < kOps.size() && (kArithmetic >> bit & 1U);
}

size_t wire_bytes(DataType type, DataType wire, size_t bytes) noexcept {
  if (element_bytes(type) == 0) return 0;
  if (wire == type) return bytes;
  if (wire != DataType::kBfp8 || !travels_as_bfp8(type)) return 0;
  const size_t elements = bytes / element_bytes(type);
  const size_t blocks = elements / kBfp8BlockElements + (elements % kBfp8BlockElements != 0 ? 1 : 0);
  return blocks * kBfp8BlockBytes;
}

size_t wide_elements(DataType wire, size_t bytes) noexcept {
  if (wire == DataType::kBfp8) return bytes / kBfp8BlockBytes * kBfp8BlockElements;
  return is_wide(wire) ? bytes / element_bytes(wire) : 0;
}

}  // namespace millrace::aggregation
