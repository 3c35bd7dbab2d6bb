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
  kBfp8,  // wire only: 64-byte blocks of one exponent and 63 mantissas (bfp.h)
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

// Whether the type's elements are accumulated in f32 and rounded once, at the end: sums, products, averages.
bool is_wide(DataType type) noexcept;

// The same of an operation on elements of `type` that travel as `wire`: the least and the greatest of numbers
// of a type are numbers of it, and need no more room. Blocks of bfp8 have to be rounded anew all the same.
bool accumulates_wide(DataType type, ReduceOp op, DataType wire) noexcept;

// Whether results depend on the order in which contributions are combined: floating-point sums and products.
bool order_matters(DataType type, ReduceOp op) noexcept;

// A block of bfp8: one byte of exponent, then one byte for each mantissa.
inline constexpr size_t kBfp8BlockBytes = 64;
inline constexpr size_t kBfp8BlockElements = 63;

// Whether elements of `type` can travel as `wire` and be reduced so with that operator: as themselves where
// supported() says so, and f16, bf16 and f32 as bfp8 with all that is arithmetic. False for unknown codes.
bool wire_supported(DataType type, ReduceOp op, DataType wire) noexcept;

// Bytes on the wire of `bytes` bytes of elements of `type`: the same for wire == type; for bfp8 whole blocks,
// of which the last is padded. 0 where `type` cannot travel as `wire`.
size_t wire_bytes(DataType type, DataType wire, size_t bytes) noexcept;

// Accumulators (f32) that `bytes` bytes of wire type `wire` need, bfp8's padding included; 0 for types that
// are not wide. At most `bytes`.
size_t wide_elements(DataType wire, size_t bytes) noexcept;

}  // namespace millrace::aggregation
