// millrace-perf's command line: what is measured, and what is refused, in one line.
#include "tools/perf_options.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace millrace::perf {
namespace {

std::vector<const char*> of_four_ranks(std::initializer_list<const char*> arguments) {
  std::vector<const char*> all = {"millrace-perf", "--rank", "1",        "--size", "4",
                                  "--group",       "g",      "--switch", "::1"};
  all.insert(all.end(), arguments);
  return all;
}

Options parse(std::initializer_list<const char*> arguments) {
  const auto all = of_four_ranks(arguments);
  try {
    return parse_options(static_cast<int>(all.size()), all.data());
  } catch (const Exit&) {
    ADD_FAILURE() << "refused";
    return {};
  }
}

// What it says as it refuses.
std::string refusal(std::initializer_list<const char*> arguments) {
  const auto all = of_four_ranks(arguments);
  testing::internal::CaptureStderr();
  int status = -1;
  try {
    parse_options(static_cast<int>(all.size()), all.data());
  } catch (const Exit& e) {
    status = e.status;
  }
  std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(status, 2);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 1) << text;
  EXPECT_TRUE(text.starts_with("millrace-perf: ")) << text;
  return text;
}

#define EXPECT_REFUSED(words, ...) EXPECT_NE(refusal({__VA_ARGS__}).find(words), std::string::npos)

TEST(PerfOptions, WithoutAnyItIsAnAllReduceOfFloats) {
  const Options o = parse({});
  EXPECT_EQ(o.kinds, (std::vector<Kind>{{Collective::kAllReduce, MR_F32, MR_SUM, -1}}));
  EXPECT_EQ(o.sizes(MR_F32).front(), 8u);
  EXPECT_EQ(o.sizes(MR_F32).back(), 64u << 20);
  EXPECT_FALSE(o.deterministic);
  EXPECT_FALSE(o.bfp8);
}

TEST(PerfOptions, SeveralOfEachAreCombinedInTheirOrder) {
  const Options o = parse({"--collective", "broadcast,all-reduce", "--type", "i32,u8", "--op", "bxor,sum"});
  EXPECT_EQ(o.kinds, (std::vector<Kind>{{Collective::kBroadcast, MR_I32, kNoOp, 0},
                                        {Collective::kBroadcast, MR_U8, kNoOp, 0},
                                        {Collective::kAllReduce, MR_I32, MR_BXOR, -1},
                                        {Collective::kAllReduce, MR_I32, MR_SUM, -1},
                                        {Collective::kAllReduce, MR_U8, MR_BXOR, -1},
                                        {Collective::kAllReduce, MR_U8, MR_SUM, -1}}));
}

TEST(PerfOptions, NamesOfNcclTestsWorkToo) {
  const Options o = parse({"-p", "reduce_scatter", "-d", "half", "-o", "avg"});
  EXPECT_EQ(o.kinds, (std::vector<Kind>{{Collective::kReduceScatter, MR_F16, MR_AVG, -1}}));
}

TEST(PerfOptions, AllLeavesOutWhatMakesNoSense) {
  // Reductions: 6 integer types by 10 operators and 6 others by 5; reduce for each of four roots.
  const size_t reductions = 90;
  EXPECT_EQ(parse({"-d", "all", "-o", "all"}).kinds.size(), reductions);
  EXPECT_EQ(parse({"-p", "all", "-d", "all", "-o", "all", "-r", "all"}).kinds.size(),
            reductions * (1 + 4 + 1) + 12 * 4 + 12 + 1);
  EXPECT_EQ(parse({"-d", "all", "-o", "band"}).kinds.size(), 6u);
  EXPECT_EQ(parse({"-d", "f8e4m3", "-o", "all"}).kinds.size(), 5u);
  EXPECT_EQ(parse({"-d", "all", "-o", "all", "--wire", "bfp8"}).kinds.size(), 15u);
  // What is always exact goes on under another wire form.
  EXPECT_EQ(parse({"-p", "all", "--wire", "bfp8"}).kinds.size(), 6u);
}

TEST(PerfOptions, RootsAreOneOrAll) {
  EXPECT_EQ(parse({"-p", "reduce", "--root", "3"}).kinds,
            (std::vector<Kind>{{Collective::kReduce, MR_F32, MR_SUM, 3}}));
  const auto kinds = parse({"-p", "broadcast", "--root", "all"}).kinds;
  ASSERT_EQ(kinds.size(), 4u);
  for (int r = 0; r < 4; r++) EXPECT_EQ(kinds[static_cast<size_t>(r)].root, r);
  EXPECT_REFUSED("0 to 3", "-p", "reduce", "--root", "4");
  EXPECT_REFUSED("0 to 3", "-p", "reduce", "--root", "-1");
  EXPECT_REFUSED("has no root", "--root", "2");
}

TEST(PerfOptions, SizesMayBeListedInBytesAndElements) {
  const Options o = parse({"--sizes", "0,1e,3e,1001,65472-1e,64K+2e,1M"});
  EXPECT_EQ(o.sizes(MR_F32), (std::vector<uint64_t>{0, 4, 12, 1001, 65468, 65544, 1 << 20}));
  EXPECT_EQ(o.sizes(MR_U8), (std::vector<uint64_t>{0, 1, 3, 1001, 65471, 65538, 1 << 20}));
  EXPECT_EQ(parse({"--sizes", "4-2e"}).sizes(MR_F32), (std::vector<uint64_t>{0}));
  for (const char* wrong : {"", "1,", "e", "x", "3f", "1e2", "64K-e", "1--1e", "12Q"})
    EXPECT_REFUSED("is no size", "--sizes", wrong) << wrong;
  EXPECT_REFUSED("excludes", "--sizes", "8", "-b", "4");
}

TEST(PerfOptions, SizesMayBeARange) {
  EXPECT_EQ(parse({"-b", "0", "-e", "4"}).sizes(MR_F32), (std::vector<uint64_t>{0, 2, 4}));
  EXPECT_EQ(parse({"-b", "1K", "-e", "3K", "-i", "1K"}).sizes(MR_F32),
            (std::vector<uint64_t>{1024, 2048, 3072}));
}

TEST(PerfOptions, WhatIsNamedAndMakesNoSenseIsRefused) {
  EXPECT_REFUSED("band does not go with f32", "-o", "band");
  EXPECT_REFUSED("lor does not go with bf16", "-d", "i32,bf16", "-o", "sum,lor");
  EXPECT_REFUSED("broadcast reduces nothing", "-p", "broadcast", "-o", "max");
  EXPECT_REFUSED("not for f64", "-d", "f64", "--wire", "bfp8");
  EXPECT_REFUSED("not for i32", "-d", "f32,i32", "--wire", "bfp8");
  EXPECT_REFUSED("all-gather is none", "-p", "all-gather", "--wire", "bfp8");
  EXPECT_REFUSED("broadcast is none", "-p", "all-reduce,broadcast", "--wire", "bfp8");
  EXPECT_REFUSED("a barrier has no data", "-p", "barrier", "-d", "f64");
  EXPECT_REFUSED("is no collective", "-p", "all-to-all");
  EXPECT_REFUSED("is no operator", "-o", "sub");
  EXPECT_REFUSED("is no type", "-d", "f31");
  EXPECT_REFUSED("is no type", "-d", "bfp8");
  EXPECT_REFUSED("--wire", "--wire", "fp4");
}

TEST(PerfOptions, ModesAreTakenOver) {
  const Options o = parse({"-p", "all", "--deterministic", "--wire", "bfp8"});
  EXPECT_TRUE(o.deterministic);
  EXPECT_TRUE(o.bfp8);
}

}  // namespace
}  // namespace millrace::perf
