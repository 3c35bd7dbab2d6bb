// Reads the file back with a reader of its own, written from the pcapng draft.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "roce/error.h"
#include "switch/capture.h"

namespace millrace::switching {
namespace {

using Bytes = std::vector<uint8_t>;

struct Block {
  uint32_t type;
  Bytes body;
};
struct Packet {
  uint32_t interface;
  uint64_t time;
  uint32_t length;
  uint32_t flags;
  Bytes bytes;
};

uint32_t u32(const Bytes& b, size_t at) {
  uint32_t v;
  std::memcpy(&v, b.data() + at, sizeof(v));
  return v;
}
uint16_t u16(const Bytes& b, size_t at) {
  uint16_t v;
  std::memcpy(&v, b.data() + at, sizeof(v));
  return v;
}

std::vector<Block> read_blocks(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  const Bytes all{std::istreambuf_iterator<char>(in), {}};
  std::vector<Block> blocks;
  for (size_t at = 0; at < all.size();) {
    const uint32_t type = u32(all, at), total = u32(all, at + 4);
    EXPECT_EQ(total % 4, 0u);
    EXPECT_LE(at + total, all.size());
    if (total < 12 || at + total > all.size()) break;
    EXPECT_EQ(u32(all, at + total - 4), total);
    blocks.push_back({type, Bytes(all.begin() + static_cast<long>(at) + 8,
                                  all.begin() + static_cast<long>(at + total) - 4)});
    at += total;
  }
  return blocks;
}

// The options behind `at`, by code.
std::vector<std::pair<uint16_t, Bytes>> read_options(const Bytes& body, size_t at) {
  std::vector<std::pair<uint16_t, Bytes>> options;
  while (at + 4 <= body.size()) {
    const uint16_t code = u16(body, at), length = u16(body, at + 2);
    if (code == 0) break;
    options.push_back({code, Bytes(body.begin() + static_cast<long>(at) + 4,
                                   body.begin() + static_cast<long>(at) + 4 + length)});
    at += 4 + (length + 3u) / 4 * 4;
  }
  return options;
}

Packet read_packet(const Bytes& body) {
  Packet p;
  p.interface = u32(body, 0);
  p.time = static_cast<uint64_t>(u32(body, 4)) << 32 | u32(body, 8);
  const uint32_t captured = u32(body, 12);
  p.length = u32(body, 16);
  p.bytes.assign(body.begin() + 20, body.begin() + 20 + captured);
  const auto options = read_options(body, 20 + (captured + 3) / 4 * 4);
  EXPECT_EQ(options.size(), 1u);
  EXPECT_EQ(options.at(0).first, 2);
  p.flags = u32(options.at(0).second, 0);
  return p;
}

class CaptureTest : public ::testing::Test {
 protected:
  CaptureTest() {
    config_.file = ::testing::TempDir() + "millrace_capture_" + std::to_string(getpid()) + ".pcapng";
  }
  ~CaptureTest() override {
    std::remove(config_.file.c_str());
    EXPECT_EQ(pool_.in_use(), 0u);
  }
  Frame frame(const std::string& text) {
    Frame f = Frame::allocate(pool_);
    std::memcpy(f.buffer()->data(), text.data(), text.size());
    f.buffer()->length = static_cast<uint32_t>(text.size());
    return f;
  }
  std::vector<Packet> packets() {
    std::vector<Packet> all;
    for (const Block& b : read_blocks(config_.file))
      if (b.type == 6) all.push_back(read_packet(b.body));
    return all;
  }

  HeapFramePool pool_{4608, UINT32_MAX, true};
  CaptureConfig config_;
};

TEST_F(CaptureTest, WritesOneSectionWithItsInterfacesAndPackets) {
  {
    Capture capture(config_, {"p1", "uplink"}, std::chrono::seconds(1'700'000'000));
    capture.record(frame("first"), 0, Direction::kIn, std::chrono::nanoseconds(123));
    capture.record(frame("second!!"), 1, Direction::kOut, std::chrono::seconds(2));
    capture.finish();
    EXPECT_EQ(capture.counters().captured, 2u);
  }
  const auto blocks = read_blocks(config_.file);
  ASSERT_EQ(blocks.size(), 7u);
  EXPECT_EQ(blocks[0].type, 0x0A0D0D0Au);
  EXPECT_EQ(u32(blocks[0].body, 0), 0x1A2B3C4Du);
  EXPECT_EQ(u16(blocks[0].body, 4), 1);  // version 1.0
  EXPECT_EQ(u16(blocks[0].body, 6), 0);
  for (size_t i = 0; i < 2; i++) {
    const Bytes& body = blocks[1 + i].body;
    EXPECT_EQ(blocks[1 + i].type, 1u);
    EXPECT_EQ(u16(body, 0), 1);  // Ethernet
    EXPECT_EQ(u32(body, 4), 65535u);
    const auto options = read_options(body, 8);
    ASSERT_EQ(options.size(), 2u);
    EXPECT_EQ(options[0].first, 2);
    EXPECT_EQ(std::string(options[0].second.begin(), options[0].second.end()), i == 0 ? "p1" : "uplink");
    EXPECT_EQ(options[1], (std::pair<uint16_t, Bytes>{9, {9}}));  // nanoseconds
  }
  const auto all = packets();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].interface, 0u);
  EXPECT_EQ(all[0].time, 1'700'000'000'000'000'123u);
  EXPECT_EQ(all[0].flags, 1u);
  EXPECT_EQ(std::string(all[0].bytes.begin(), all[0].bytes.end()), "first");
  EXPECT_EQ(all[1].interface, 1u);
  EXPECT_EQ(all[1].time, 1'700'000'002'000'000'000u);
  EXPECT_EQ(all[1].flags, 2u);
  EXPECT_EQ(std::string(all[1].bytes.begin(), all[1].bytes.end()), "second!!");
  EXPECT_EQ(blocks[5].type, 5u);
  const auto statistics = read_options(blocks[6].body, 12);
  EXPECT_EQ(statistics.at(0), (std::pair<uint16_t, Bytes>{4, {1, 0, 0, 0, 0, 0, 0, 0}}));
  EXPECT_EQ(statistics.at(1), (std::pair<uint16_t, Bytes>{5, {0, 0, 0, 0, 0, 0, 0, 0}}));
}

TEST_F(CaptureTest, JoinsPiecesAndCutsAtTheSnapLength) {
  config_.snaplen = 64;
  {
    Capture capture(config_, {"p"}, {});
    for (const uint32_t shared : {10u, 100u}) {
      Frame payload = frame(std::string(shared, 'x'));
      Frame f = frame("head");
      f.buffer()->shared = payload.buffer();
      payload.buffer()->owners++;
      f.buffer()->shared_data = payload.buffer()->data();
      f.buffer()->shared_length = shared;
      std::memcpy(f.buffer()->tail, "tail", 4);
      f.buffer()->tail_length = 4;
      capture.record(f, 0, Direction::kOut, {});
    }
    capture.finish();
  }
  const auto all = packets();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(std::string(all[0].bytes.begin(), all[0].bytes.end()), "head" + std::string(10, 'x') + "tail");
  EXPECT_EQ(all[1].length, 108u);
  EXPECT_EQ(std::string(all[1].bytes.begin(), all[1].bytes.end()), "head" + std::string(60, 'x'));
}

TEST_F(CaptureTest, TheFileIsBoundedAndWholeAtItsLimit) {
  config_.limit = 64 << 10;
  {
    Capture capture(config_, {"p"}, {});
    for (int i = 0; i < 100; i++) capture.record(frame(std::string(1000, 'y')), 0, Direction::kIn, {});
    capture.finish();
    const CaptureCounters c = capture.counters();
    EXPECT_EQ(c.captured, 100u);
    EXPECT_GT(c.beyond_limit, 30u);
    EXPECT_EQ(packets().size(), 100 - c.beyond_limit);
  }
  std::ifstream in(config_.file, std::ios::ate);
  EXPECT_LE(in.tellg(), (64 << 10) + 100);  // the statistics at the end come on top
}

TEST_F(CaptureTest, AFullRingIsCountedAndNeverWaitedFor) {
  config_.ring = 1 << 20;
  Capture capture(config_, {"p"}, {});
  for (int i = 0; i < 2000; i++) capture.record(frame(std::string(1000, 'z')), 0, Direction::kIn, {});
  const CaptureCounters c = capture.counters();
  EXPECT_EQ(c.captured + c.missed, 2000u);
  EXPECT_NEAR(static_cast<double>(c.captured), (1 << 20) / 1032.0, 10);
  capture.finish();
  EXPECT_EQ(packets().size(), c.captured);
}

// The writer's thread runs while frames of many sizes wrap a small ring often.
TEST_F(CaptureTest, TheThreadWritesEverythingInOrder) {
  config_.ring = 1 << 20;
  constexpr uint32_t kFrames = 20000;
  Capture capture(config_, {"p"}, {});
  {
    CaptureWriter writer({&capture});
    for (uint32_t i = 0; i < kFrames; i++) {
      std::string text(4 + i * 37 % 1500, static_cast<char>(i));
      std::memcpy(text.data(), &i, 4);
      const Frame f = frame(text);
      const uint64_t before = capture.counters().captured;
      while (capture.counters().captured == before) {
        capture.record(f, 0, Direction::kIn, {});
        if (capture.counters().captured == before) usleep(100);
      }
    }
  }
  const auto all = packets();
  ASSERT_EQ(all.size(), kFrames);
  for (uint32_t i = 0; i < kFrames; i++) {
    ASSERT_EQ(all[i].bytes.size(), 4 + i * 37 % 1500);
    ASSERT_EQ(u32(all[i].bytes, 0), i);
  }
}

TEST_F(CaptureTest, AFileThatCannotBeCreatedIsNamed) {
  config_.file = "/nowhere/at/all.pcapng";
  try {
    Capture capture(config_, {"p"}, {});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("/nowhere/at/all.pcapng"), std::string::npos);
  }
}

TEST(RecordRing, KeepsOrderOverManyTurns) {
  RecordRing ring(4096);
  uint32_t in = 0, out = 0;
  for (int turn = 0; turn < 20000; turn++) {
    for (uint32_t n = 0; n < 1 + in % 5; n++) {
      const uint32_t bytes = 4 + in * 31 % 700;
      const auto to = ring.reserve(bytes);
      if (to.empty()) break;
      ASSERT_EQ(to.size(), bytes);
      std::memcpy(to.data(), &in, 4);
      ring.commit();
      in++;
    }
    while (out + turn % 3 < in) {
      const auto from = ring.front();
      ASSERT_EQ(from.size(), 4 + out * 31 % 700);
      uint32_t v;
      std::memcpy(&v, from.data(), 4);
      ASSERT_EQ(v, out++);
      ring.release();
    }
  }
  EXPECT_GT(out, 20000u);
}

}  // namespace
}  // namespace millrace::switching
