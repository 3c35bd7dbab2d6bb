#include "aggregation/datatype.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

namespace millrace::aggregation {
namespace {

// From protocol.md, "Byte layout": code, name, and the bytes the name says.
struct Expected {
  int code;
  const char* name;
  size_t bytes;
};
constexpr std::array<Expected, 13> kTypes = {{
    {1, "u8", 1},
    {2, "i8", 1},
    {3, "i32", 4},
    {4, "u32", 4},
    {5, "i64", 8},
    {6, "u64", 8},
    {7, "f16", 2},
    {8, "bf16", 2},
    {9, "f32", 4},
    {10, "f64", 8},
    {11, "f8e4m3", 1},
    {12, "f8e5m2", 1},
    {13, "bfp8", 0},
}};

DataType type_of(int code) { return static_cast<DataType>(code); }
ReduceOp op_of(int code) { return static_cast<ReduceOp>(code); }

TEST(DataType, CodesNamesAndSizesAreTheProtocols) {
  for (const Expected& row : kTypes) {
    EXPECT_EQ(name(type_of(row.code)), row.name);
    EXPECT_EQ(element_bytes(type_of(row.code)), row.bytes) << row.name;
  }
}

TEST(DataType, OperatorAndCollectiveCodesAreTheProtocols) {
  const std::array ops = {"none", "sum", "prod", "min", "max", "band", "bor", "bxor", "avg"};
  for (size_t code = 0; code < ops.size(); ++code) EXPECT_EQ(name(static_cast<ReduceOp>(code)), ops[code]);
  const std::array collectives = {"all-reduce",     "reduce",     "broadcast",
                                  "reduce-scatter", "all-gather", "barrier"};
  for (size_t i = 0; i < collectives.size(); ++i) {
    EXPECT_EQ(name(static_cast<Collective>(i + 1)), collectives[i]);
  }
}

TEST(DataType, EveryNameParsesToItself) {
  for (int code = 1; code <= 13; ++code) EXPECT_EQ(parse_data_type(name(type_of(code))), type_of(code));
  for (int code = 0; code <= 8; ++code) EXPECT_EQ(parse_reduce_op(name(op_of(code))), op_of(code));
}

TEST(DataType, NamesOfNcclTestsParse) {
  const std::array<std::pair<const char*, DataType>, 12> names = {{
      {"int8", DataType::kI8},
      {"uint8", DataType::kU8},
      {"int32", DataType::kI32},
      {"uint32", DataType::kU32},
      {"int64", DataType::kI64},
      {"uint64", DataType::kU64},
      {"half", DataType::kF16},
      {"float", DataType::kF32},
      {"double", DataType::kF64},
      {"bfloat16", DataType::kBf16},
      {"f8e4m3", DataType::kF8E4M3},
      {"f8e5m2", DataType::kF8E5M2},
  }};
  for (const auto& [text, type] : names) EXPECT_EQ(parse_data_type(text), type) << text;
}

TEST(DataType, OtherNamesDoNotParse) {
  for (const char* text : {"", "f", "f3", "f322", "F32", " f32", "f32 ", "unknown", "none", "sum"}) {
    EXPECT_EQ(parse_data_type(text), std::nullopt) << '"' << text << '"';
  }
  for (const char* text : {"", "su", "sums", "SUM", "unknown", "mulsum", "f32"}) {
    EXPECT_EQ(parse_reduce_op(text), std::nullopt) << '"' << text << '"';
  }
  EXPECT_EQ(parse_data_type(std::string("f32\0", 4)), std::nullopt);
}

TEST(DataType, EveryByteOfAPacketIsASafeCode) {
  for (int code = 0; code < 256; ++code) {
    const bool is_type = code >= 1 && code <= 13;
    EXPECT_EQ(name(type_of(code)) == "unknown", !is_type) << code;
    if (!is_type) {
      EXPECT_EQ(element_bytes(type_of(code)), 0U) << code;
      EXPECT_FALSE(is_wide(type_of(code))) << code;
    }
    EXPECT_EQ(name(op_of(code)) == "unknown", code > 8) << code;
    EXPECT_EQ(name(static_cast<Collective>(code)) == "unknown", code < 1 || code > 6) << code;
    for (int op = 0; op < 256; ++op) {
      const bool known = is_type && op >= 1 && op <= 8;
      if (!known) {
        EXPECT_FALSE(supported(type_of(code), op_of(op))) << code << ' ' << op;
        EXPECT_FALSE(wire_supported(type_of(code), op_of(op), DataType::kBfp8)) << code << ' ' << op;
      }
    }
  }
}

TEST(DataType, SupportedIsWhatThisVersionPromises) {
  const auto row = [](DataType type) {
    std::string ops;
    for (int op = 0; op <= 8; ++op) {
      if (supported(type, op_of(op))) ops += std::string(name(op_of(op))) + ' ';
    }
    return ops;
  };
  for (const int integer : {1, 2, 3, 4, 5, 6}) {
    EXPECT_EQ(row(type_of(integer)), "sum prod min max band bor bxor avg ") << integer;
  }
  for (const int floating : {7, 8, 9, 10, 11, 12}) {
    EXPECT_EQ(row(type_of(floating)), "sum prod min max avg ") << floating;
  }
  EXPECT_EQ(row(DataType::kBfp8), "");
}

TEST(DataType, ThreeTypesTravelAsBlocks) {
  for (int code = 1; code <= 13; ++code) {
    for (int wire = 1; wire <= 13; ++wire) {
      for (int op = 0; op <= 8; ++op) {
        const bool blocks = wire == 13 && code >= 7 && code <= 9 && ((op >= 1 && op <= 4) || op == 8);
        const bool expected = wire == code ? supported(type_of(code), op_of(op)) : blocks;
        EXPECT_EQ(wire_supported(type_of(code), op_of(op), type_of(wire)), expected)
            << code << ' ' << wire << ' ' << op;
      }
    }
  }
}

TEST(DataType, SizesOnTheWire) {
  for (const auto& [type, bytes] :
       {std::pair{DataType::kF16, 2}, {DataType::kBf16, 2}, {DataType::kF32, 4}}) {
    const auto blocks = [&](size_t elements) {
      return wire_bytes(type, DataType::kBfp8, elements * static_cast<size_t>(bytes));
    };
    EXPECT_EQ(blocks(0), 0U);
    EXPECT_EQ(blocks(1), 64U);
    EXPECT_EQ(blocks(62), 64U);
    EXPECT_EQ(blocks(63), 64U);
    EXPECT_EQ(blocks(64), 128U);
    EXPECT_EQ(blocks(126), 128U);
    EXPECT_EQ(blocks(63 * 1000 + 1), 64064U);
  }
  for (int code = 1; code <= 12; ++code) EXPECT_EQ(wire_bytes(type_of(code), type_of(code), 4096), 4096U);
  EXPECT_EQ(wire_bytes(DataType::kF64, DataType::kBfp8, 4096), 0U);
  EXPECT_EQ(wire_bytes(DataType::kF16, DataType::kF32, 4096), 0U);
  EXPECT_EQ(wire_bytes(DataType::kBfp8, DataType::kBfp8, 4096), 0U);
  EXPECT_EQ(wire_bytes(type_of(0), type_of(0), 4096), 0U);
}

TEST(DataType, AccumulatorsOfWireBytes) {
  for (const DataType type : {DataType::kF16, DataType::kBf16}) EXPECT_EQ(wide_elements(type, 4096), 2048U);
  for (const DataType type : {DataType::kF8E4M3, DataType::kF8E5M2})
    EXPECT_EQ(wide_elements(type, 4096), 4096U);
  EXPECT_EQ(wide_elements(DataType::kBfp8, 4096), 4032U);
  EXPECT_EQ(wide_elements(DataType::kBfp8, 64), 63U);
  for (const int other : {0, 1, 2, 3, 4, 5, 6, 9, 10, 14, 255}) {
    EXPECT_EQ(wide_elements(type_of(other), 4096), 0U) << other;
  }
}

TEST(DataType, OnlySmallFloatsAreWide) {
  for (const int wide : {7, 8, 11, 12, 13}) EXPECT_TRUE(is_wide(type_of(wide))) << wide;
  for (const int in_kind : {1, 2, 3, 4, 5, 6, 9, 10}) EXPECT_FALSE(is_wide(type_of(in_kind))) << in_kind;
}

}  // namespace
}  // namespace millrace::aggregation
