// Memory that is lent: leases as bytes, how they come and end, and what a lender guards.
#include "buffering/lease.h"

#include <gtest/gtest.h>

#include "roce/error.h"
#include "tests/unit/remote_store_rig.h"

namespace millrace::buffering {
namespace {

using namespace lent_memory;

TEST(Lease, IsBytes) {
  const auto request = encode(LeaseRequest{.instance = 7, .bytes = 0x0102030405060708});
  EXPECT_EQ(Bytes(request.begin(), request.end()),
            (Bytes{'M', 'R', 'L', 'S', 1, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(decode_lease_request(request), (LeaseRequest{.instance = 7, .bytes = 0x0102030405060708}));
  const auto reply = encode(LeaseReply{.rkey = 0xAABBCCDD, .address = 0x1000, .bytes = 0x200});
  EXPECT_EQ(Bytes(reply.begin(), reply.end()),
            (Bytes{'M', 'R', 'L', 'S', 1, 0, 0,    0, 0xAA, 0xBB, 0xCC, 0xDD, 0, 0, 0, 0,
                   0,   0,   0,   0,   0, 0, 0x10, 0, 0,    0,    0,    0,    0, 0, 2, 0}));
  EXPECT_EQ(decode_lease_reply(reply), (LeaseReply{.rkey = 0xAABBCCDD, .address = 0x1000, .bytes = 0x200}));
  const auto no = encode(LeaseRefusal{.code = LeaseCode::kFull, .text = "all\x1b[2J is lent"});
  const auto read = decode_lease_refusal(no);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->code, LeaseCode::kFull);
  EXPECT_EQ(read->text, "all?[2J is lent");  // it may come from anybody and ends up on a terminal
  EXPECT_LE(encode(LeaseRefusal{.text = std::string(500, 'x')}).size(), 148u);  // a REJ's private data
}

TEST(Lease, WhatIsNoneIsNotRead) {
  for (size_t n = 0; n < LeaseRequest::kBytes; n++) {
    const auto request = encode(LeaseRequest{.instance = 7});
    EXPECT_FALSE(decode_lease_request(std::span(request).first(n)));
  }
  auto reply = encode(LeaseReply{.address = UINT64_MAX, .bytes = 2});
  EXPECT_FALSE(decode_lease_reply(reply));  // it wraps
  reply[0] = 'X';
  EXPECT_FALSE(decode_lease_reply(reply));
  auto no = encode(LeaseRefusal{.text = "no"});
  no[6] = 3;  // longer than it is
  EXPECT_FALSE(decode_lease_refusal(no));
  auto other = encode(LeaseRequest{.version = 2, .bytes = 5});
  EXPECT_EQ(decode_lease_request(other)->version, 2);
}

TEST(RemoteStore, LendersAreAPoolSpreadByRoom) {
  Rig r(0);
  r.add(10 * 4224), r.add(30 * 4224), r.add(20 * 4224);
  r.start_and_connect();
  uint32_t id = 0;
  for (; id < 30; id++) ASSERT_TRUE(r.write(id, 500));
  // The larger ones first, until all have as much left.
  const auto used = [&](size_t i) { return r.store->status(i).used / 4224; };
  EXPECT_EQ(used(0), 0u);
  EXPECT_NEAR(static_cast<double>(used(1)), 20, 1);
  EXPECT_NEAR(static_cast<double>(used(2)), 10, 1);
  while (r.write(id, 500)) id++;
  EXPECT_EQ(r.store->used(), r.store->size());
  for (uint32_t i = 0; i < id; i++) r.read(i);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, id);
  EXPECT_EQ(r.store->reads_max(), 48u);
}

// A lender that falls silent: exactly what it held is lost, also what was asked for; the rest comes back; it
// is tried again, and lends again.
TEST(RemoteStore, ALendersDeathLosesWhatItHeldAndNoMore) {
  Rig r(3);
  r.start_and_connect();
  for (uint32_t id = 0; id < 90; id++) ASSERT_TRUE(r.write(id, 700));
  r.run_for(milliseconds(5));
  const LenderStatus before = r.store->status(1);
  ASSERT_EQ(before.held, 30u);
  r.servers[1]->alive = false;
  for (uint32_t id = 0; id < 45; id++) r.read(id);  // of all three
  r.run_until([&] { return r.lost.size() >= 30; });
  const LenderStatus after = r.store->status(1);
  EXPECT_EQ(r.lost.size(), 30u);
  EXPECT_EQ(after.lost, 30u);
  EXPECT_EQ(after.deaths, 1u);
  EXPECT_NE(after.state, State::kConnected);
  EXPECT_NE(after.why.find("10.0.1.2"), std::string::npos) << after.why;
  EXPECT_EQ(after.bytes, 0u);
  for (uint32_t id = 45; id < 90; id++)
    if (!r.lost.contains(id)) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 60u);
  EXPECT_EQ(r.lost.size(), 30u);
  EXPECT_EQ(r.store->status(0).lost + r.store->status(2).lost, 0u);
  // Alive again, with another memory of its own.
  r.run_for(seconds(3));
  r.servers[1]->alive = true;
  r.run_until([&] { return r.connected() == 3; });
  EXPECT_EQ(r.connected(), 3u);
  EXPECT_TRUE(r.store->status(1).why.empty());
  for (uint32_t id = 0; id < 90; id++) ASSERT_TRUE(r.write(id, 900));
  for (uint32_t id = 0; id < 90; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 150u);
  r.run_for(seconds(1));
  EXPECT_EQ(r.pool.in_use(), 0u);
}

TEST(RemoteStore, AnIdleLendersDeathIsNoticed) {
  Rig r(1);
  r.start_and_connect();
  r.run_for(seconds(3));
  EXPECT_EQ(r.store->status(0).state, State::kConnected);
  r.servers[0]->alive = false;
  const Time died = r.now;
  r.run_until([&] { return r.connected() == 0; });
  EXPECT_LE(r.now - died, milliseconds(1100));  // probe_after + peer_dead, and the time-outs between
  EXPECT_EQ(r.store->size(), 0u);
}

TEST(RemoteStore, ALeaseEndsCleanlyFromEitherSide) {
  Rig r(2);
  r.start_and_connect();
  for (uint32_t id = 0; id < 10; id++) ASSERT_TRUE(r.write(id, 700));
  r.run_for(milliseconds(1));
  FrameList out;
  r.servers[0]->lender.shutdown(r.now, out);
  r.put(out, true, 0);
  r.run_until([&] { return r.lost.size() == 5; }, milliseconds(100));
  EXPECT_EQ(r.lost.size(), 5u);
  EXPECT_NE(r.store->status(0).why.find("ended the lease"), std::string::npos) << r.store->status(0).why;
  r.run_until([&] { return r.servers[0]->lender.idle(); });
  EXPECT_TRUE(r.servers[0]->lender.idle());
  EXPECT_EQ(r.servers[0]->table.leases().size(), 0u);
  // And the switch's side.
  r.store->shutdown(r.now, out);
  r.put(out, false, 0);
  r.run_until([&] { return r.store->idle() && r.servers[1]->table.leases().empty(); });
  EXPECT_TRUE(r.store->idle());
  EXPECT_EQ(r.servers[1]->lender.counters().ended, 1u);
  EXPECT_EQ(r.lost.size(), 10u);
  EXPECT_EQ(r.pool.in_use(), 0u);
}

TEST(RemoteStore, ASwitchThatBeginsAnewGetsItsPartAgain) {
  Rig r(1);
  r.start_and_connect();
  for (uint32_t id = 0; id < 10; id++) ASSERT_TRUE(r.write(id, 700));
  r.run_for(milliseconds(1));
  r.kept.clear();
  r.wire.clear();
  r.config.seed = 77;  // killed: nobody was told
  r.start();
  r.run_until([&] { return r.connected() == 1; }, seconds(1));
  EXPECT_EQ(r.connected(), 1u);
  EXPECT_EQ(r.servers[0]->lender.counters().replaced, 1u);
  EXPECT_EQ(r.servers[0]->table.leases().size(), 1u);
  EXPECT_TRUE(r.write(0, 700));
  r.read(0);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 1u);
}

TEST(RemoteStore, ARefusalSaysWhyAndIsTriedAgainWithBackOff) {
  Rig r(0);
  r.add(8 * 4224, 1, 1024);
  r.start();
  r.run_until([&] { return r.store->status(0).refusals == 1; });
  EXPECT_NE(r.store->status(0).why.find("path MTU is at most 1024"), std::string::npos)
      << r.store->status(0).why;
  const Time first = r.now;
  r.run_until([&] { return r.store->status(0).refusals == 4; });
  EXPECT_GE(r.now - first, milliseconds(100 + 200 + 400));
  EXPECT_LE(r.now - first, milliseconds(100 + 200 + 400 + 50));
}

TEST(RemoteStore, PartsAreLentToSeveralSwitchesAndThenNoMore) {
  Bytes memory(4 * 8192);
  host::LeaseTable table(memory, 2);
  EXPECT_EQ(table.part_bytes(), 16384u);
  std::string why;
  const auto a = table.take(ip("10.0.0.1"), 0, 0, why), b = table.take(ip("10.0.0.1"), 1, 5000, why);
  ASSERT_TRUE(a && b);
  EXPECT_EQ(table.memory(*a).data(), memory.data());
  EXPECT_EQ(table.memory(*b).data(), memory.data() + 16384);
  EXPECT_EQ(table.memory(*b).size(), 5000u);
  EXPECT_FALSE(table.take(ip("10.0.0.2"), 0, 0, why));
  EXPECT_EQ(why, "all is lent: 2 of 2 parts");
  EXPECT_EQ(table.find(ip("10.0.0.1"), 1), b);
  table.release(*a);
  EXPECT_EQ(table.take(ip("10.0.0.2"), 0, 0, why), a);
  EXPECT_THROW(host::LeaseTable(memory, 9), Error);
  EXPECT_THROW(host::LeaseTable(memory, 0), Error);
}

TEST(RemoteStore, NonsenseInItsConfigurationIsRefused) {
  const auto with = [](auto change) {
    Rig r(1);
    change(r.config);
    EXPECT_THROW(r.start(), Error);
  };
  with([](auto& c) { c.lenders.clear(); });
  with([](auto& c) { c.mtu = 1500; });
  with([](auto& c) { c.slot_bytes = 0; });
  with([](auto& c) { c.reads_max = 0; });
  with([](auto& c) { c.lenders[0].address = ip("fd00::1"); });
}

// Whatever a borrower asks for outside its part is refused, and its lease ends.
TEST(RemoteStore, TheLargestThatItsConfigurationAllowsIsTaken) {
  Rig r(1);
  r.config.slot_bytes = 65535, r.config.reads_max = 255, r.config.again_max = r.config.again_min;
  EXPECT_NO_THROW(r.start());
  for (int i = 0; i < 2; i++) {
    Rig more(1);
    i == 0 ? more.config.slot_bytes = 65536 : more.config.reads_max = 256;
    EXPECT_THROW(more.start(), Error);
  }
}

TEST(SoftLender, GuardsWhatItLends) {
  const struct {
    uint64_t address;
    uint32_t length;
    bool right_key;
    bool read;
    bool good;
  } cases[] = {{0, 4096, true, true, true},
               {4096, 4096, true, true, true},
               {8191, 1, true, true, true},
               {8191, 2, true, true, false},
               {8192, 1, true, true, false},
               {0, 8, false, true, false},
               {UINT64_MAX - 7, 4, true, true, false},
               {0, 4096, true, false, true},
               {8185, 8, true, false, false},
               {4096, 5000, true, false, false},  // of two packets, of which the first would fit
               {0, 8, false, false, false},
               {8192, 0, false, false, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(std::to_string(c.address) + " " + std::to_string(c.length) + (c.read ? " read" : " write"));
    Server s(ip("10.0.1.1"), 8192, 1, 5);
    HeapFramePool pool;
    roce::CmConfig cc;
    roce::CmAgent cm(cc, pool);
    roce::Path path;
    path.src_ip = ip("10.0.0.1"), path.dst_ip = ip("10.0.1.1");
    FrameList to, from;
    const auto exchange = [&](auto deliver) {
      for (int i = 0; i < 8; i++) {
        while (Frame f = to.pop()) s.lender.receive(std::move(f), Time{}, from);
        s.lender.poll(Time{}, from);
        while (Frame f = from.pop()) {
          roce::Packet p;
          ASSERT_EQ(roce::parse(f.bytes(), p), roce::ParseVerdict::kOk);
          deliver(p);
        }
      }
    };
    cm.connect(path, roce::tcp_service_id(kLenderPort),
               {.qpn = Qpn{50}, .first_psn = Psn(3), .initiator_depth = 1}, 1, encode(LeaseRequest{}), Time{},
               to);
    exchange([&](const roce::Packet& p) { cm.receive(p, Time{}, to); });
    roce::CmEvent e;
    ASSERT_TRUE(cm.next_event(e));
    ASSERT_EQ(e.kind, roce::CmEvent::Kind::kReply);
    EXPECT_EQ(e.remote.responder_resources, 1);
    const auto reply = decode_lease_reply(e.private_data);
    ASSERT_TRUE(reply);
    EXPECT_EQ(reply->bytes, 8192u);
    cm.confirm(e.id, Time{}, to);
    roce::QueuePairConfig qc;
    qc.local = Qpn{50};
    qc.wire.path = path;
    qc.wire.remote_qpn = e.remote.qpn;
    qc.expected_psn = Psn(3);
    qc.requester.first_psn = e.remote.first_psn;
    qc.requester.reads_max = 1;
    roce::QueuePair qp(qc, Time{});
    Bytes data(c.length, 0x5A);
    roce::WorkRequest w;
    w.kind = c.read ? roce::WorkRequest::Kind::kRead : roce::WorkRequest::Kind::kWrite;
    w.into = data, w.parts[0] = data;
    w.remote_address = reply->address + c.address;
    w.rkey = reply->rkey ^ !c.right_key;
    ASSERT_TRUE(qp.requester().post(std::move(w)));
    roce::Crc32Combine combine;
    qp.emit(pool, combine, 8, Time{}, to);
    exchange([&](const roce::Packet& p) {
      if (p.dest_qp() != kGsiQpn) qp.receive(p, Time{});
    });
    uint64_t id;
    EXPECT_EQ(qp.requester().next_completion(id), c.good);
    EXPECT_EQ(qp.requester().failed(), !c.good);
    if (!c.good) {
      EXPECT_EQ(qp.requester().fail_syndrome(), roce::kNakRemoteAccess);
    }
    EXPECT_EQ(s.table.leases().size(), c.good ? 1u : 0u);
    const bool written = std::any_of(s.memory.begin(), s.memory.end(), [](uint8_t x) { return x != 0; });
    EXPECT_EQ(written, c.good && !c.read && c.length != 0);
  }
}

}  // namespace
}  // namespace millrace::buffering
