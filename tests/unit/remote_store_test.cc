// Spilled packets in memory that others lend: how they get there and back.
#include "buffering/remote_store.h"

#include <gtest/gtest.h>

#include "buffering/local_store.h"
#include "buffering/tiered_store.h"
#include "tests/unit/allocation.h"
#include "tests/unit/remote_store_rig.h"

namespace millrace::buffering {
namespace {

using namespace lent_memory;

TEST(RemoteStore, WhatIsWrittenComesBack) {
  Rig r(1);
  r.start_and_connect();
  EXPECT_EQ(r.store->size(), 64u * 4224);
  for (uint32_t id = 0; id < 64; id++)
    ASSERT_TRUE(r.write(id, id == 0 ? 1 : id == 1 ? 4224 : 60 + r.dice(4164)));
  EXPECT_EQ(r.store->used(), r.store->size());
  for (uint32_t id = 64; id-- > 0;) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 64u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.pool.in_use(), 0u);
  const LenderStatus s = r.store->status(0);
  EXPECT_EQ(s.written, 64u);
  EXPECT_EQ(s.read, 64u);
  EXPECT_EQ(s.lost, 0u);
  EXPECT_EQ(s.retransmitted, 0u);
  const auto lease = r.servers[0]->table.leases().at(0);
  EXPECT_EQ(lease.bytes_written, s.bytes_written);
  EXPECT_EQ(lease.bytes_read, s.bytes_read);
  EXPECT_EQ(lease.borrower, ip("10.0.0.1"));
}

// A RoCE packet of full length is longer than the path MTU; were all of it sent, it would be two packets each
// way.
TEST(RemoteStore, APacketOfFullLengthCrossesAsOne) {
  for (const auto& [bytes, wanted] :
       {std::pair{4154u, 1u}, {4224u, 1u}, {4096u, 1u}, {4095u, 1u}, {1100u, 1u}}) {
    Rig r(1);
    r.start_and_connect();
    const uint64_t before = r.store->status(0).packets_sent;
    for (uint32_t id = 0; id < 32; id++) ASSERT_TRUE(r.write(id, bytes));
    for (uint32_t id = 0; id < 32; id++) r.read(id);
    r.run_until([&] { return r.kept.empty(); });
    EXPECT_EQ(r.back, 32u) << bytes;
    // And as many requests for them.
    EXPECT_EQ(r.store->status(0).packets_sent - before, 32u * wanted + 32u) << bytes;
    EXPECT_EQ(r.servers[0]->table.leases().at(0).bytes_written, 32u * std::min(bytes, 4096u)) << bytes;
  }
  // Of a small MTU's many packets, none is of a few bytes only; and what is no header is not kept here.
  for (const auto& [bytes, wanted] : {std::pair{4154u, 4u}, {1024u + 129u, 2u}, {1024u + 128u, 1u}}) {
    Rig r(1);
    r.config.mtu = 1024;
    r.start_and_connect();
    const uint64_t before = r.store->status(0).packets_sent;
    ASSERT_TRUE(r.write(0, bytes));
    r.read(0);
    r.run_until([&] { return r.kept.empty(); });
    EXPECT_EQ(r.store->status(0).packets_sent - before, wanted + 1) << bytes;
  }
}

TEST(RemoteStore, SmallPacketsThatComeTogetherShareSlotsWritesAndReads) {
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  const uint64_t before = r.store->status(0).packets_sent;
  // Four of 1000 bytes are one packet of 4000; what comes later does not join them.
  for (uint32_t id = 0; id < 30; id++) ASSERT_TRUE(r.write(id, 1000));
  EXPECT_EQ(r.store->used(), 8u * 4224);
  EXPECT_EQ(r.store->status(0).held, 30u);
  r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 8; });
  ASSERT_TRUE(r.write(30, 1000));
  EXPECT_EQ(r.store->used(), 9u * 4224);
  r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 9; });
  EXPECT_EQ(r.store->status(0).packets_sent - before, 9u);
  EXPECT_GT(r.store->reads_max(), 16u) << "packets, of which a READ brings several";
  for (uint32_t id = 0; id < 31; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 31u);
  EXPECT_EQ(r.servers[0]->table.leases().at(0).reads, 9u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.store->status(0).held, 0u);
  EXPECT_EQ(r.store->status(0).bytes_read, 31'000u);
  EXPECT_EQ(r.pool.in_use(), 0u);
}

TEST(RemoteStore, OfASharedSlotAnyPacketMayBeReadOrGivenUp) {
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  const auto give_up = [&](uint32_t id) {
    r.store->discard(id);
    r.kept.erase(id), r.asked.erase(id);
  };
  for (uint32_t id = 0; id < 8; id++) ASSERT_TRUE(r.write(id, 500));
  give_up(7), give_up(3);  // while they are gathered, the last one and one in the middle
  ASSERT_TRUE(r.write(8, 90));
  r.read(5);  // before the WRITE has gone
  r.run_until([&] { return !r.kept.contains(5); });
  r.read(2), r.read(6), r.read(0);
  r.step();
  give_up(0);  // whose READ is under way, and whose frame it fills
  r.run_until([&] { return !r.kept.contains(2) && !r.kept.contains(6); });
  EXPECT_EQ(r.store->used(), 4224u);
  r.read(1), r.read(4), r.read(8);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.back, 6u);
  // All of it given up while it is gathered.
  ASSERT_TRUE(r.write(1, 500) && r.write(2, 500));
  give_up(1), give_up(2);
  r.run_for(milliseconds(1));
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.pool.in_use(), 0u);
}

// Two RoCE packets of 2048 B are longer than 4096 by their headers: of these, the first one's stay here.
TEST(RemoteStore, TwoPacketsOfHalfTheMtuAndTheirHeadersAreOnePacket) {
  const std::vector<std::vector<uint32_t>> slots = {
      {2106, 2106}, {62, 2000, 2096}, {128, 2048, 2048}, {2112, 1000}};
  for (const auto& lengths : slots)
    for (uint32_t without = 0; without <= lengths.size(); without++)
      for (const bool early : {true, false}) {
        Rig r(1);
        r.one_turn = true;
        r.start_and_connect();
        const auto give_up = [&] {
          if (without == lengths.size()) return;
          r.store->discard(without);
          r.kept.erase(without);
        };
        const uint64_t before = r.store->status(0).packets_sent;
        for (uint32_t id = 0; id < lengths.size(); id++) ASSERT_TRUE(r.write(id, lengths[id]));
        EXPECT_EQ(r.store->used(), 4224u);
        if (early) give_up();
        r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 1; });
        if (!early) give_up();
        EXPECT_EQ(r.store->status(0).packets_sent - before, 1u);
        // One by one, the last one first.
        for (uint32_t id = static_cast<uint32_t>(lengths.size()); id-- > 0;) {
          if (!r.kept.contains(id)) continue;
          r.read(id);
          r.run_until([&] { return !r.kept.contains(id); });
        }
        EXPECT_EQ(r.store->used(), 0u);
        EXPECT_EQ(r.pool.in_use(), 0u);
      }
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  ASSERT_TRUE(r.write(0, 62) && r.write(1, 2000) && r.write(2, 2097));  // one byte more than the first one's
  EXPECT_EQ(r.store->used(), 2u * 4224);
  for (uint32_t id = 0; id < 3; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 3u);
}

TEST(RemoteStore, ADeathLosesWhatIsGatheredAskedForAndUnderWay) {
  Rig r(1);
  r.one_turn = true;
  r.config.ids = 4096;
  r.start_and_connect();
  for (uint32_t id = 0; id < 100; id++) ASSERT_TRUE(r.write(id, 700));
  r.run_for(milliseconds(1));
  for (uint32_t id = 0; id < 90; id++) r.read(id);
  r.servers[0]->alive = false;
  r.run_for(microseconds(100));
  for (uint32_t id = 100; id < 103; id++) ASSERT_TRUE(r.write(id, 200));
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.lost.size() + r.back, 103u);
  EXPECT_GT(r.lost.size(), 12u);
  EXPECT_EQ(r.store->status(0).held, 0u);
  r.wire.clear();
  EXPECT_EQ(r.pool.in_use(), 0u);
  // And one that ends with all of this in it gives the frames back.
  Rig other(1);
  other.one_turn = true;
  other.start_and_connect();
  for (uint32_t id = 0; id < 50; id++) ASSERT_TRUE(other.write(id, 700));
  FrameList out;
  other.store->poll(other.now, out);
  for (uint32_t id = 0; id < 30; id++) other.read(id);
  other.store->poll(other.now, out);
  ASSERT_TRUE(other.write(50, 100));
  other.store.reset();
  out.clear();
  EXPECT_EQ(other.pool.in_use(), 0u);
}

// A READ behind its WRITE of the same slot, the slot used over and over, whatever the wires do.
class Wires : public testing::TestWithParam<uint64_t> {};
TEST_P(Wires, WhatIsWrittenComesBack) {
  Rig r(1 + GetParam() % 3, 24 * 4224, GetParam());
  if (GetParam() % 5 != 0) r.loss = r.dice(5), r.repeat = r.dice(6);
  if (GetParam() % 4 == 0) r.reorder = r.dice(10);
  r.config.mtu = GetParam() % 2 ? 4096 : 1024;
  r.config.peer_dead = seconds(20);  // what is lost here are packets, not lenders
  r.one_turn = GetParam() % 3 != 0;
  r.start_and_connect();
  uint32_t written = 0, next_id = 0;
  std::vector<uint32_t> held;
  while (written < 600 && !testing::Test::HasFatalFailure()) {
    for (uint32_t i = r.dice(20); i > 0; i--) {
      const uint32_t id = next_id % 100;
      if (r.kept.contains(id) || !r.write(id, 60 + r.dice(r.dice(2) ? 4165 : 1200))) break;
      next_id++, written++;
      held.push_back(id);
    }
    for (uint32_t i = r.dice(20); i > 0 && !held.empty(); i--) {
      const size_t at = r.dice(static_cast<uint32_t>(held.size()));
      const uint32_t id = held[at];
      held.erase(held.begin() + static_cast<ptrdiff_t>(at));
      if (r.dice(10) == 0) {
        r.store->discard(id);
        r.kept.erase(id);
      } else {
        r.read(id);
      }
    }
    for (uint32_t i = r.dice(30); i > 0; i--) r.step();
    ASSERT_LE(r.store->used(), r.store->size());
  }
  for (const uint32_t id : held) r.read(id);
  r.run_until([&] { return r.kept.empty(); }, seconds(100));
  EXPECT_TRUE(r.kept.empty());
  EXPECT_TRUE(r.lost.empty());
  EXPECT_EQ(r.store->used(), 0u);
  r.run_for(seconds(1));
  EXPECT_EQ(r.pool.in_use(), 0u);
  for (size_t i = 0; i < r.store->lenders(); i++) EXPECT_EQ(r.store->status(i).deaths, 0u);
}
INSTANTIATE_TEST_SUITE_P(Seeds, Wires, testing::Range(uint64_t{1}, uint64_t{31}));

TEST(RemoteStore, FullIsNoMoreAndTheFrameStaysTheCallers) {
  Rig r(1, 4 * 4224);
  r.start();
  EXPECT_FALSE(r.write(0, 100));  // nobody lends yet
  EXPECT_EQ(r.store->size(), 0u);
  r.run_until([&] { return r.connected() == 1; });
  ASSERT_EQ(r.store->size() / 4224, 4u);  // the part ends with less than a slot, or not
  for (uint32_t id = 0; id < 4; id++) EXPECT_TRUE(r.write(id, 100));
  EXPECT_FALSE(r.write(9, 100));
  EXPECT_FALSE(r.write(9, 4225));
  r.store->discard(2);
  r.kept.erase(2);
  EXPECT_TRUE(r.write(9, 100));
  for (const uint32_t id : {0u, 1u, 3u, 9u}) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 4u);
}

// Frames that wait for acknowledgements are bounded, and READs have their place in the queue all the same.
TEST(RemoteStore, WritesUnderWayAreBounded) {
  Rig r(1, 256 * 4224);
  r.config.writes_max = 16;
  r.start_and_connect();
  uint32_t id = 0;
  while (r.write(id, 1000)) id++;
  EXPECT_EQ(id, 16u);
  for (uint32_t i = 0; i < 16; i++) r.read(i);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 16u);
  EXPECT_TRUE(r.write(0, 1000));
}

// Sixteen READs in flight: a packet takes a sixteenth of the round trip, as the wire itself takes no time
// here.
TEST(RemoteStore, SeveralReadsAreInFlight) {
  for (const uint32_t depth : {1u, 16u}) {
    Rig r(1, 256 * 4224);
    r.delay = microseconds(50);
    r.config.reads_max = depth;
    r.start_and_connect();
    EXPECT_EQ(r.store->reads_max(), depth);
    for (uint32_t id = 0; id < 160; id++) ASSERT_TRUE(r.write(id, 4200));
    r.run_for(milliseconds(5));
    const Time begin = r.now;
    for (uint32_t id = 0; id < 160; id++) r.read(id);
    r.run_until([&] { return r.kept.empty(); });
    const auto round_trips = (r.now - begin) / microseconds(100);
    EXPECT_GE(round_trips, 160 / depth);
    EXPECT_LE(round_trips, 160 / depth + 160 / depth / 5 + 2);
  }
}

// The packet's path allocates nothing but frames of the pool.
TEST(RemoteStore, APacketsJourneyAllocatesNothing) {
  Rig r(1);
  r.start_and_connect();
  const auto journey = [&](bool forbidden) {
    FrameList out;
    Frame f = Frame::allocate(r.pool);
    f.buffer()->length = 1000;
    for (uint8_t& b : f.bytes()) b = 7;
    StoreEvent e;
    bool back = false;
    allocation_forbidden = forbidden;
    r.store->write(1, f, r.now);
    r.store->read(1, r.now);
    for (int i = 0; i < 20 && !back; i++) {
      r.store->poll(r.now, out);
      allocation_forbidden = false;  // wire and lender may
      while (Frame sent = out.pop()) {
        Frame copy = Frame::allocate(r.servers[0]->pool);
        copy.buffer()->length = sent.total_length();
        sent.copy_to(copy.buffer()->data());
        r.servers[0]->lender.receive(std::move(copy), r.now, out);
      }
      r.servers[0]->lender.poll(r.now, out);
      FrameList answers;
      answers.splice(out);
      while (Frame answer = answers.pop()) {
        roce::Packet p;
        ASSERT_EQ(roce::parse(answer.bytes(), p), roce::ParseVerdict::kOk);
        allocation_forbidden = forbidden;
        r.store->receive(p, r.now, out);
        allocation_forbidden = false;
      }
      allocation_forbidden = forbidden;
      back = r.store->next_event(e);
    }
    allocation_forbidden = false;
    ASSERT_TRUE(back);
    ASSERT_EQ(e.kind, StoreEvent::Kind::kRead);
    ASSERT_EQ(e.frame.bytes().size(), 1000u);
  };
  journey(false);  // fills the pools
  journey(true);
}

TEST(RemoteStore, TheLendersDepthIsKept) {
  Rig r(0);
  r.config.reads_max = 64;
  r.add(64 * 4224);  // grants 16
  r.start_and_connect();
  EXPECT_EQ(r.store->reads_max(), 16u);
  for (uint32_t id = 0; id < 60; id++) ASSERT_TRUE(r.write(id, 800));
  for (uint32_t id = 0; id < 60; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 60u);
  EXPECT_EQ(r.servers[0]->lender.counters().naks, 0u);
}

// What a READ under way brings for a packet that was given up is not the next packet's of that number.
TEST(RemoteStore, AnAnswerThatIsTooLateIsNobodysPacket) {
  Rig r(1);
  r.start_and_connect();
  ASSERT_TRUE(r.write(7, 900));
  r.run_for(milliseconds(1));
  r.read(7);
  r.step();  // the request is on the wire
  r.store->discard(7);
  r.kept.erase(7), r.asked.erase(7);
  ASSERT_TRUE(r.write(7, 900));
  r.read(7);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 1u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.store->status(0).read, 1u);
}

// Marked data draws CNPs, at most one in 50 µs, from either side; they are obeyed, and nothing is lost by it.
TEST(RemoteStore, CongestionIsToldToWhoeverSends) {
  Rig r(1);
  r.start_and_connect();
  r.marking = true;
  const Time begin = r.now;
  for (uint32_t id = 0; id < 60; id++) ASSERT_TRUE(r.write(id, 4000));
  for (uint32_t id = 0; id < 60; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 60u);
  const auto most = static_cast<uint64_t>((r.now - begin) / microseconds(50)) + 1;
  for (const uint64_t n : r.cnps) {
    EXPECT_GT(n, 0u);
    EXPECT_LE(n, most);
  }
}

TEST(TieredStore, TheSecondTakesWhatTheFirstHasNoRoomFor) {
  Rig r(1);
  r.start_and_connect();
  auto first = std::make_unique<LocalStore>(10 * 1024, 10, 4096);
  const LocalStore& local = *first;
  RemoteStore& remote = *r.store;
  TieredStore both(std::move(first), std::move(r.store), 4096);
  r.store.reset(&remote);  // given back below
  EXPECT_EQ(both.size(), local.size() + r.store->size());
  std::map<uint32_t, Bytes> kept;
  for (uint32_t id = 0; id < 30; id++) {
    Frame f = Frame::allocate(r.pool);
    f.buffer()->length = 1024;
    for (uint8_t& b : f.bytes()) b = static_cast<uint8_t>(r.random());
    kept[id] = Bytes(f.bytes().begin(), f.bytes().end());
    ASSERT_TRUE(both.write(id, f, r.now));
  }
  EXPECT_EQ(local.used(), local.size());
  EXPECT_EQ(r.store->used(), 5u * 4224);  // four share a slot
  EXPECT_EQ(both.used(), local.used() + r.store->used());
  both.discard(3), both.discard(25);
  kept.erase(3), kept.erase(25);
  for (const auto& [id, bytes] : kept) both.read(id, r.now);
  // Events are taken here, not by the rig.
  for (int i = 0; i < 400 && !kept.empty(); i++) {
    StoreEvent e;
    while (both.next_event(e)) {
      ASSERT_EQ(e.kind, StoreEvent::Kind::kRead);
      ASSERT_EQ(Bytes(e.frame.bytes().begin(), e.frame.bytes().end()), kept[e.id]);
      kept.erase(e.id);
    }
    r.kept = kept, r.asked.clear();
    for (const auto& [id, bytes] : kept) r.asked.insert(id);
    const uint64_t before = r.back;
    r.step();
    if (r.back != before) kept = r.kept;
  }
  EXPECT_TRUE(kept.empty());
  EXPECT_EQ(both.used(), 0u);
  (void)r.store.release();  // it is both's
}

}  // namespace
}  // namespace millrace::buffering
