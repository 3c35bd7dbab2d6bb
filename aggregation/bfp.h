// Block floating point: how f16, bf16 and f32 travel at about 8 bits an element (wire type bfp8). This is the
// hosts' side, which packs and unpacks; the switch reduces the blocks as they are (Reducer::get with a wire
// type). The layout, what becomes of special values, and the bound of the error are in NUMERICS.md.
//
// Pure functions for any thread. They allocate nothing, give the same bits on every instruction set, and
// touch no byte outside their ranges, which may start at any address and must be disjoint.
#pragma once

#include <cstddef>
#include <cstdint>

#include "aggregation/datatype.h"

namespace millrace::aggregation {

// Packs `count` elements of `type` (f16, bf16 or f32; anything else asserts) into `out`, which has
// wire_bytes(type, kBfp8, count * element_bytes(type)) bytes. The last block is padded with zeros.
void bfp8_encode(DataType type, const uint8_t* in, size_t count, uint8_t* out) noexcept;

// The inverse: unpacks the first `count` elements of the blocks at `in`, rounding to `type`, to nearest even.
// Any bytes are blocks, so there are no errors.
void bfp8_decode(DataType type, const uint8_t* in, size_t count, uint8_t* out) noexcept;

}  // namespace millrace::aggregation
