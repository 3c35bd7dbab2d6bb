// Frames, their lists and their pools: who owns what, and when it goes back.
#include "roce/frame.h"

#include <gtest/gtest.h>

#include <numeric>

#include "roce/build.h"

namespace millrace {
namespace {

Frame frame_of(FramePool& pool, std::initializer_list<uint8_t> bytes) {
  Frame f = Frame::allocate(pool);
  std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
  f.buffer()->length = static_cast<uint32_t>(bytes.size());
  return f;
}

std::string drained(FrameList& list) {
  std::string s;
  while (Frame f = list.pop()) s += static_cast<char>(f.bytes()[0]);
  return s;
}

TEST(FrameList, IsFirstInFirstOutAndLosesNothingWhenMoved) {
  HeapFramePool pool;
  FrameList a;
  EXPECT_TRUE(a.empty());
  EXPECT_FALSE(a.pop());
  for (const uint8_t c : {'1', '2', '3'}) a.push(frame_of(pool, {c}));
  EXPECT_EQ(a.size(), 3u);
  FrameList b = std::move(a);
  EXPECT_TRUE(a.empty());
  EXPECT_EQ(a.size(), 0u);
  EXPECT_EQ(b.size(), 3u);
  a.push(frame_of(pool, {'4'}));
  b.splice(a);
  b.splice(a);  // nothing
  EXPECT_EQ(b.size(), 4u);
  FrameList c;
  c.push(frame_of(pool, {'x'}));
  c = std::move(b);
  EXPECT_EQ(pool.in_use(), 4u) << "what it held is given back";
  EXPECT_EQ(c.size(), 4u);
  std::string seen;
  c.for_each([&](FrameBuffer* f) { seen += static_cast<char>(f->data()[0]); });
  EXPECT_EQ(seen, "1234");
  EXPECT_EQ(drained(c), "1234");
  EXPECT_EQ(c.size(), 0u);
  c.push(frame_of(pool, {'5'}));  // its end is right again
  EXPECT_EQ(drained(c), "5");
  { FrameList d = std::move(c); }
  EXPECT_EQ(pool.in_use(), 0u);
}

TEST(Frame, MovingAndAssigningGiveBackOnce) {
  HeapFramePool pool;
  Frame a = frame_of(pool, {1}), b = frame_of(pool, {2});
  a = std::move(b);
  EXPECT_FALSE(b);
  EXPECT_EQ(a.bytes()[0], 2);
  EXPECT_EQ(pool.in_use(), 1u);
  Frame& same = a;
  a = std::move(same);
  EXPECT_TRUE(a);
  EXPECT_EQ(pool.in_use(), 1u);
  Frame again(a.release());
  EXPECT_FALSE(a);
  EXPECT_EQ(pool.in_use(), 1u);
  again.set_port(7);
  EXPECT_EQ(again.port(), 7);
}

TEST(FrameRef, KeepsTheBufferUntilTheLastIsGone) {
  HeapFramePool pool;
  Frame f = frame_of(pool, {1});
  FrameBuffer* buffer = f.buffer();
  FrameRef a(buffer);
  FrameRef b = a;
  EXPECT_EQ(buffer->owners, 3u);
  f = Frame();
  a.reset();
  a.reset();
  EXPECT_EQ(buffer->owners, 1u);
  FrameRef c = std::move(b);
  EXPECT_FALSE(b);
  EXPECT_EQ(buffer->owners, 1u);
  b = c;
  EXPECT_EQ(buffer->owners, 2u);
  c = FrameRef();
  EXPECT_EQ(pool.in_use(), 1u);
  b = FrameRef();
  EXPECT_EQ(pool.in_use(), 0u);
}

TEST(Frame, ASharedPayloadLivesAsLongAsItsFrames) {
  HeapFramePool pool;
  Frame owner = frame_of(pool, {9, 8, 7, 6, 5});
  roce::Path path;
  path.src_ip = *IpAddress::parse("10.0.0.1"), path.dst_ip = *IpAddress::parse("10.0.0.2");
  roce::TransportFields f;
  roce::Crc32Combine combine;
  Frame shares = roce::build_shared(pool, path, f, owner.buffer(), owner.bytes(),
                                    roce::crc32(0, owner.bytes()), combine);
  ASSERT_TRUE(shares);
  owner = Frame();
  EXPECT_EQ(pool.in_use(), 2u);
  // 14 Ethernet, 20 IPv4, 8 UDP, 12 BTH; 5 shared; 3 pad, 4 ICRC.
  EXPECT_EQ(shares.total_length(), 66u);
  std::vector<uint8_t> flat(66);
  shares.copy_to(flat.data());
  EXPECT_EQ(flat[54], 9);
  EXPECT_EQ(flat[58], 5);
  EXPECT_EQ(flat[59] + flat[60] + flat[61], 0);
  own_payload(shares.buffer());  // a shared payload stays where it is
  EXPECT_EQ(shares.bytes().size(), 54u);
  shares = Frame();
  EXPECT_EQ(pool.in_use(), 0u);
}

// What was left in a buffer by its last user is not in the next frame.
TEST(FramePool, ABufferComesBackFresh) {
  HeapFramePool pool(4608, 1);
  FrameBuffer* buffer = nullptr;
  {
    Frame owner = frame_of(pool, {1, 2, 3});
    buffer = owner.buffer();
    buffer->offset = 7, buffer->tail_length = 5, buffer->shared_length = 4, buffer->owners = 1;
  }
  Frame f = Frame::allocate(pool);
  ASSERT_EQ(f.buffer(), buffer);
  EXPECT_EQ(f.total_length(), 0u);
  EXPECT_EQ(buffer->data() - buffer->room, 128) << "headroom";
  EXPECT_EQ(buffer->owners, 1u);
  EXPECT_EQ(buffer->shared, nullptr);
  EXPECT_EQ(buffer->room_bytes, 4608u);
}

TEST(FramePool, ABoundedOneHasSoManyAndKeepsThem) {
  HeapFramePool pool(256, 3);
  std::vector<Frame> frames;
  for (int i = 0; i < 3; i++) ASSERT_TRUE(frames.emplace_back(Frame::allocate(pool)));
  EXPECT_FALSE(Frame::allocate(pool));
  EXPECT_EQ(pool.in_use(), 3u);
  frames.pop_back();
  EXPECT_EQ(pool.in_use(), 2u);
  EXPECT_EQ(pool.cached(), 1u);
  frames.clear();
  EXPECT_EQ(pool.cached(), 3u);
  pool.flush();
  EXPECT_EQ(pool.cached(), 0u);
  EXPECT_TRUE(Frame::allocate(pool));
}

// 512 buffers lie ready at most; one more, and half of them go back to the store.
TEST(FramePool, AnUnboundedOneGivesBackWhatItDoesNotNeed) {
  HeapFramePool pool(256);
  std::vector<Frame> frames;
  for (int i = 0; i < 640; i++) frames.push_back(Frame::allocate(pool));  // ten refills of 64
  EXPECT_EQ(pool.cached(), 0u);
  for (int i = 0; i < 512; i++) frames.pop_back();
  EXPECT_EQ(pool.cached(), 512u);
  frames.pop_back();
  EXPECT_EQ(pool.cached(), 256u);
  EXPECT_EQ(pool.in_use(), 127u);
}

TEST(FramePool, AStrictOneKeepsNothing) {
  HeapFramePool pool(256, UINT32_MAX, true);
  { const Frame a = Frame::allocate(pool), b = Frame::allocate(pool); }
  EXPECT_EQ(pool.cached(), 0u);
  EXPECT_EQ(pool.in_use(), 0u);
}

}  // namespace
}  // namespace millrace
