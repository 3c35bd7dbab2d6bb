// What a size comes to, which type goes with which operator, and nccl-tests' factors, by hand.
#include "tools/perf_cases.h"

#include <gtest/gtest.h>

namespace millrace::perf {
namespace {

TEST(PerfCases, BusFactorsAreThoseOfNcclTests) {
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllReduce, 4), 1.5);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllReduce, 2), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kReduceScatter, 4), 0.75);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllGather, 8), 0.875);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kBroadcast, 8), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kReduce, 3), 1);
  EXPECT_DOUBLE_EQ(bus_factor(Collective::kAllReduce, 1), 0);  // nothing crosses a link
}

TEST(PerfCases, SizesAreOfTheWholeVectorAndRoundedDown) {
  EXPECT_EQ(extent_of(1000, Collective::kAllReduce, MR_F32, 3), (Extent{1000, 250}));
  EXPECT_EQ(extent_of(1003, Collective::kBroadcast, MR_F32, 3), (Extent{1000, 250}));
  EXPECT_EQ(extent_of(3, Collective::kReduce, MR_F32, 3), (Extent{0, 0}));
  // Three parts of 83 floats: 996 bytes.
  EXPECT_EQ(extent_of(1000, Collective::kReduceScatter, MR_F32, 3), (Extent{996, 83}));
  EXPECT_EQ(extent_of(1000, Collective::kAllGather, MR_F64, 4), (Extent{992, 31}));
  EXPECT_EQ(extent_of(7, Collective::kAllGather, MR_U8, 8), (Extent{0, 0}));
  EXPECT_EQ(extent_of(8, Collective::kAllGather, MR_U8, 8), (Extent{8, 1}));
  EXPECT_EQ(extent_of(6, Collective::kReduceScatter, MR_F8E4M3, 2), (Extent{6, 3}));
}

TEST(PerfCases, BitwiseAndLogicalOperatorsAreForIntegers) {
  int pairs = 0;
  for (mr_type type : kTypes)
    for (mr_op op : kOps) pairs += goes_with(type, op);
  EXPECT_EQ(pairs, 6 * 10 + 6 * 5);
  EXPECT_TRUE(goes_with(MR_U64, MR_LAND));
  EXPECT_FALSE(goes_with(MR_F16, MR_LAND));
  EXPECT_FALSE(goes_with(MR_F8E5M2, MR_BXOR));
  EXPECT_TRUE(goes_with(MR_F8E5M2, MR_AVG));
}

TEST(PerfCases, NamesAreThoseOfTheProtocol) {
  EXPECT_STREQ(name(Collective::kReduceScatter), "reduce-scatter");
  EXPECT_STREQ(name(MR_F8E4M3), "f8e4m3");
  EXPECT_STREQ(name(MR_BXOR), "bxor");
  EXPECT_STREQ(name(MR_LAND), "land");
  EXPECT_STREQ(name(MR_LOR), "lor");
  EXPECT_STREQ(name(kNoOp), "none");
}

}  // namespace
}  // namespace millrace::perf
