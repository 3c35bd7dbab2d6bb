// The element types, operators and collectives of the aggregation protocol, and which type goes with which
// operator. Pure tables: every function here may be called from any thread and none allocates. It moves no
// data; that is reduce.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace millrace::aggregation {

// The values of these three are the codes on the wire (protocol.md, "Byte layout"). A field read from a
// packet may be cast to them unchecked: every function below accepts codes that have no name.
enum class DataType : uint8_t {
  kU8 = 1,
  kI8,
  kI32,
  kU32,
  kI64,
  kU64,
  kF16,
  kBf16,
  kF32,
  kF64,
  kF8E4M3,
  kF8E5M2,
  kBfp8,  // wire only: 64-byte blocks of one exponent and 63 mantissas
};

enum class ReduceOp : uint8_t { kNone = 0, kSum, kProd, kMin, kMax, kBand, kBor, kBxor, kAvg };

enum class Collective : uint8_t { kAllReduce = 1, kReduce, kBroadcast, kReduceScatter, kAllGather, kBarrier };

// Bytes of one element; 0 for an unknown code, and for bfp8, whose elements have no bytes of their own.
size_t element_bytes(DataType type) noexcept;

// The short name ("f32", "sum", "all-reduce"), or "unknown". The view lives for ever.
std::string_view name(DataType type) noexcept;
std::string_view name(ReduceOp op) noexcept;
std::string_view name(Collective collective) noexcept;

// The inverse of name(), case-sensitive; types also by the names nccl-tests and numpy use ("float", "half",
// "bfloat16", "int32", ...). Nothing for a name that is neither: what to tell the user is the caller's
// affair.
std::optional<DataType> parse_data_type(std::string_view text) noexcept;
std::optional<ReduceOp> parse_reduce_op(std::string_view text) noexcept;

// Whether this version can reduce that type with that operator; false for unknown codes.
bool supported(DataType type, ReduceOp op) noexcept;

// Whether the type's elements are accumulated in f32 and rounded once, at the end.
bool is_wide(DataType type) noexcept;

}  // namespace millrace::aggregation
