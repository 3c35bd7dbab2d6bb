// The engine, packet by packet: what each is counted as and drawn in answer, what a group says of itself, and
// the timers, to the nanosecond.
#include <chrono>

#include "tests/unit/engine_rig.h"

namespace millrace::aggregation {
namespace {

using roce::Opcode;
using roce::Path;
using roce::TransportFields;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

class EnginePackets : public EngineRig {};

// A stray is counted under its one name and answered by nothing; in particular it is no RTU.
TEST_F(EnginePackets, AStrayIsCountedOnceAndIsNoSignOfItsMember) {
  Member& m = member(0);
  ASSERT_EQ(connect(m, encode(join_of(0, 1))).kind, roce::CmEvent::Kind::kReply);
  struct Stray {
    const char* counted;
    Opcode opcode;
    std::function<void(TransportFields&, Path&)> change;
  };
  const Stray strays[] = {
      {"unknown_qp +1 packets +1", Opcode::kSendOnly, [](auto& f, auto&) { f.dest_qp.value ^= 1; }},
      {"qp_source_mismatch +1 packets +1", Opcode::kSendOnly,
       [](auto&, auto& p) { p.src_ip = *IpAddress::parse("10.0.0.77"); }},
      {"pkey_mismatch +1 packets +1", Opcode::kSendOnly, [](auto& f, auto&) { f.pkey = 0x8001; }},
      {"bad_opcode +1 packets +1", Opcode::kUdSendOnly, {}},
      {"bad_opcode +1 packets +1", Opcode::kReadResponseOnly, {}},
      {"packets +1 cnps_received +1", Opcode::kCnp, {}},
  };
  for (const Stray& s : strays) {
    const Counters before = engine().counters();
    give(packet(m, s.opcode, {}, s.change));
    run();
    EXPECT_EQ(gained(before), s.counted);
    EXPECT_TRUE(m.inbox.empty()) << s.counted;
    EXPECT_EQ(group().state, "joining") << s.counted;
  }
}

TEST_F(EnginePackets, TheFirstRequestStandsForTheRtu) {
  Member& m = member(0);
  ASSERT_EQ(connect(m, encode(join_of(0, 1))).kind, roce::CmEvent::Kind::kReply);
  send(m, Opcode::kWriteOnly, {}, true);  // a probe
  EXPECT_EQ(group().state, "running");
  ASSERT_EQ(m.inbox.size(), 2u);
  EXPECT_EQ(m.inbox[0].packet.opcode(), Opcode::kAcknowledge);
  EXPECT_EQ(m.inbox[1].packet.opcode(), Opcode::kSendOnly);  // START
}

// IBA vol. 1, 9.7.5.1.1 and 9.7.5.1.2: a duplicate is acknowledged again, with the newest PSN; a gap draws
// one NAK, and what follows it nothing.
TEST_F(EnginePackets, DuplicatesAndGapsAreAnsweredAndNotExecuted) {
  form(2);
  Member& m = member(0);
  const auto data = message(header(m, 8), numbers(2, 5));
  const Psn first = m.psn;
  send(m, Opcode::kSendOnly, data, true);
  ASSERT_EQ(m.inbox.size(), 1u);
  m.inbox.clear();

  Counters before = engine().counters();
  m.psn = first;
  send(m, Opcode::kSendOnly, data, true);
  EXPECT_EQ(gained(before), "duplicate_request +1 packets +1 acks_sent +1");
  ASSERT_EQ(m.inbox.size(), 1u);
  EXPECT_EQ(m.inbox[0].packet.psn(), first);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kAckUnlimited);
  EXPECT_EQ(m.inbox[0].packet.aeth->msn.value(), 1u);
  m.inbox.clear();

  before = engine().counters();
  m.psn = first + 3;
  send(m, Opcode::kSendOnly, data, true);
  send(m, Opcode::kSendOnly, data, true);
  EXPECT_EQ(gained(before), "out_of_sequence +2 packets +2 naks_sent +1");
  ASSERT_EQ(m.inbox.size(), 1u);
  EXPECT_EQ(m.inbox[0].packet.psn(), first + 1);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kNakSequence);
  EXPECT_EQ(group().members[0].segments, 1u);
}

TEST_F(EnginePackets, AResultIsEachMembersOwnWriteAndItsSegmentIsCounted) {
  form(2);
  const Counters before = engine().counters();
  // 300 bytes: 192 in the header's packet, 108 in the next.
  for (uint16_t r = 0; r < 2; r++) {
    Member& m = member(r);
    const auto data = message(header(m, 300, 41), numbers(75, r == 0 ? 1000 : -7));
    send(m, Opcode::kSendFirst, std::span(data).first(256));
    send(m, Opcode::kSendLast, std::span(data).subspan(256), true);
  }
  EXPECT_EQ(
      gained(before),
      "packets +4 acks_sent +2 contributions +4 contribution_bytes +600 chunks_reduced +2 results_sent +4 "
      "result_bytes +600 segments +2");
  for (uint16_t r = 0; r < 2; r++) {
    auto& inbox = member(r).inbox;
    std::erase_if(inbox, [](auto& i) { return i.packet.opcode() == Opcode::kAcknowledge; });
    ASSERT_EQ(inbox.size(), 2u) << r;
    EXPECT_EQ(inbox[0].packet.opcode(), Opcode::kWriteOnly);
    EXPECT_EQ(inbox[0].packet.reth->address.value(), 0x1000'0000u + (r << 20));
    EXPECT_EQ(inbox[0].packet.reth->length.value(), 192u);
    EXPECT_FALSE(inbox[0].packet.ack_request());
    EXPECT_EQ(inbox[1].packet.opcode(), Opcode::kWriteOnlyImm);
    EXPECT_EQ(inbox[1].packet.reth->address.value(), 0x1000'0000u + (r << 20) + 192);
    EXPECT_EQ(inbox[1].packet.reth->length.value(), 108u);
    EXPECT_EQ(inbox[1].packet.immediate->value(), 0u);  // the queue pair's first segment
    EXPECT_TRUE(inbox[1].packet.ack_request());
    for (auto& i : inbox) {
      EXPECT_EQ(i.packet.reth->rkey.value(), 0x700u + r);
      EXPECT_EQ(i.packet.dest_qp(), own_qpn(member(r)));
      const auto expected = numbers(i.packet.payload.size() / 4, 993);
      EXPECT_TRUE(std::ranges::equal(i.packet.payload, expected));
    }
  }
  EXPECT_EQ(group().members[1].segments, 1u);
  EXPECT_EQ(group().members[1].results, 1u);
}

TEST_F(EnginePackets, AGroupSaysWhatItIsDoingAndForWhom) {
  config_.tenants[7] = {"blue", "", 0};
  Member& a = member(0);
  JoinRequest j = join_of(0, 2);
  j.tenant = 7;
  for (size_t i = 0; i < 16; i++) j.key[i] = static_cast<uint8_t>(0xF0 + i);
  ASSERT_EQ(connect(a, encode(j)).kind, roce::CmEvent::Kind::kReply);
  a.agent->confirm(a.reply.id, now_, to_engine_);
  run();
  GroupInfo g = group();
  EXPECT_EQ(g.key, "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff");
  EXPECT_EQ(g.state, "joining");
  EXPECT_EQ(g.tenant, 7u);
  EXPECT_EQ(g.world, 2u);
  EXPECT_EQ(g.stripes, 1u);
  EXPECT_EQ(g.what, "");
  EXPECT_EQ(g.memory, engine().memory_reserved());
  ASSERT_EQ(g.members.size(), 1u);
  EXPECT_TRUE(g.members[0].connected);
  EXPECT_EQ(g.members[0].qpn, a.reply.remote.qpn.value);
  EXPECT_EQ(g.members[0].remote_qpn, 0x100u);

  Member& b = member(1);
  j.rank = 1;
  ASSERT_EQ(connect(b, encode(j)).kind, roce::CmEvent::Kind::kReply);
  b.agent->confirm(b.reply.id, now_, to_engine_);
  run();
  for (Member* m : {&a, &b}) acknowledge(*m, m->inbox.front().packet.psn()), m->inbox.clear();
  const Time start = now_;
  send(a, Opcode::kSendOnly, message(header(a, 64, 12345), numbers(16, 1)));
  now_ = start + milliseconds(30);
  g = group();
  EXPECT_EQ(g.state, "running");
  EXPECT_EQ(g.operation, 12345u);
  EXPECT_EQ(g.what, "all-reduce sum i32 64 B");
  EXPECT_EQ(g.waiting_for, milliseconds(30));
  EXPECT_FALSE(g.members[0].waited_for);
  EXPECT_TRUE(g.members[1].waited_for);
  EXPECT_EQ(g.members[1].silent_for, milliseconds(30));
  send(b, Opcode::kSendOnly, message(header(b, 64, 12345), numbers(16, 2)));
  g = group();
  EXPECT_EQ(g.what, "");
  EXPECT_EQ(g.waiting_for, Time{});
  EXPECT_EQ(g.operation, 12345u);
  EXPECT_FALSE(g.members[1].waited_for);
  EXPECT_EQ(g.members[1].silent_for, Time{});
  // A barrier has neither operator nor type nor bytes.
  SegmentHeader h = header(a, 0, 12346);
  h.collective = static_cast<uint8_t>(Collective::kBarrier);
  h.op = 0;
  h.type = h.wire_type = static_cast<uint8_t>(DataType::kU8);
  h.flags = kFlagLast | kFlagHeaderOnly;
  send(a, Opcode::kSendOnly, message(h, {}));
  EXPECT_EQ(group().what, "barrier");
}

// DCQCN's notification point: at most one CNP in 50 µs, for contributions only.
TEST_F(EnginePackets, AMarkDrawsACnpAtMostOnceIn50Microseconds) {
  form(1);
  Member& m = member(0);
  const auto marked = [&](Time at, uint8_t tos) {
    now_ = at;
    SegmentHeader h = header(m, 8);
    give(packet(m, Opcode::kSendOnly, message(h, numbers(2, 1)), [&](auto&, auto& p) { p.tos = tos; }));
    ++m.psn;
    run();
    size_t cnps = 0;
    for (auto& r : m.inbox) {
      if (r.packet.opcode() == Opcode::kCnp) {
        cnps++;
        EXPECT_EQ(r.packet.dest_qp(), own_qpn(m));
        EXPECT_TRUE(std::ranges::all_of(std::span(r.packet.ip).subspan(20 + 8 + 12, 16),
                                        [](uint8_t b) { return b == 0; }));
      }
      if (r.packet.op->write) acknowledge(m, r.packet.psn());
    }
    m.inbox.clear();
    return cnps;
  };
  const Time t = now_;
  EXPECT_EQ(marked(t, 2), 0u);  // ECT(0), not marked
  EXPECT_EQ(marked(t, 1), 0u);  // ECT(1)
  EXPECT_EQ(marked(t, 3), 1u);
  EXPECT_EQ(marked(t + microseconds(50) - nanoseconds(1), 3), 0u);
  EXPECT_EQ(marked(t + microseconds(50), 3), 1u);
  EXPECT_EQ(marked(t + microseconds(99), 3), 0u);
  EXPECT_EQ(marked(t + microseconds(100), 0x6B), 1u);
  EXPECT_EQ(engine().counters().cnps_sent, 3u);
}

// A CNP at 2 Gb/s leaves 1 Gb/s: 8 ns a byte. Acknowledgements are not held back.
TEST_F(EnginePackets, ACnpPacesTheResultsToItsSender) {
  restart([](EngineConfig& c) { c.line_rate = 2'000'000'000; });
  form(2);
  EXPECT_EQ(group().members[0].rate, 0u);
  give(packet(member(0), Opcode::kCnp));
  EXPECT_EQ(group().members[0].rate, 1'000'000'000u);
  EXPECT_EQ(group().members[1].rate, 0u);
  for (uint64_t segment = 0; segment < 2; segment++)
    for (uint16_t r = 0; r < 2; r++) {
      const auto data = message(header(member(r), 300, segment), numbers(75, 1));
      send(member(r), Opcode::kSendFirst, std::span(data).first(256));
      send(member(r), Opcode::kSendLast, std::span(data).subspan(256), true);
    }
  auto& held = member(0).inbox;
  EXPECT_EQ(std::erase_if(held, [](auto& i) { return i.packet.opcode() == Opcode::kAcknowledge; }), 2u);
  std::erase_if(member(1).inbox, [](auto& i) { return i.packet.opcode() == Opcode::kAcknowledge; });
  EXPECT_EQ(member(1).inbox.size(), 4u);
  for (size_t sent = 1; sent < 4; sent++) {
    ASSERT_EQ(held.size(), sent);
    const Time next = now_ + nanoseconds(8 * held.back().frame.total_length());
    EXPECT_EQ(engine().next_deadline(), next);
    run_at(next - nanoseconds(1));
    EXPECT_EQ(held.size(), sent);
    run_at(next);
  }
  EXPECT_EQ(held.size(), 4u);
  EXPECT_EQ(engine().counters().cnps_received, 1u);
}

// What reaches a failed group is acknowledged, so that the member's sends complete, counted, and forgotten.
TEST_F(EnginePackets, WhatReachesAFailedGroupIsTakenAndForgotten) {
  form(2);
  Member& m = member(0);
  ASSERT_TRUE(engine().abort_group(group().id, "", now_, from_engine_));
  EXPECT_FALSE(engine().abort_group(group().id, "", now_, from_engine_)) << "it has failed already";
  run();
  EXPECT_EQ(group().reason, "aborted by the administrator");
  ASSERT_EQ(m.inbox.size(), 1u);
  const Terminal said = *decode_control_message(m.inbox[0].packet.payload).terminal;
  EXPECT_EQ(said.code, Code::kAborted);
  m.inbox.clear();
  const Counters before = engine().counters();
  send(m, Opcode::kSendOnlyImm, message(header(m, 8), numbers(2, 5)), true);  // even what would be a breach
  EXPECT_EQ(gained(before), "group_failed +1 packets +1 acks_sent +1");
  ASSERT_EQ(m.inbox.size(), 1u);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kAckUnlimited);
  EXPECT_EQ(group().reason, "aborted by the administrator");
  EXPECT_FALSE(engine().abort_group(group().id + 1, "", now_, from_engine_)) << "no such group";
}

TEST_F(EnginePackets, ASegmentBeforeStartEndsTheGroup) {
  Member& m = join(0, 2);
  SegmentHeader h = header(m, 8);
  send(m, Opcode::kSendOnly, message(h, numbers(2, 5)));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a segment before START");
  EXPECT_EQ(engine().counters().groups_failed, 1u);
}

TEST_F(EnginePackets, AWriteIsRefusedUnlessItIsAProbe) {
  form(1);
  Member& m = member(0);
  send(m, Opcode::kWriteOnly, {}, true);
  ASSERT_EQ(m.inbox.size(), 1u);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kAckUnlimited);
  EXPECT_EQ(group().state, "running");
  m.inbox.clear();
  give(packet(m, Opcode::kWriteOnlyImm));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent an RDMA WRITE");
  run();
  ASSERT_FALSE(m.inbox.empty());
  EXPECT_EQ(m.inbox[0].packet.opcode(), Opcode::kAcknowledge);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kNakRemoteAccess);
  EXPECT_EQ(m.inbox[0].packet.psn(), m.psn);
  EXPECT_TRUE(engine().groups(now_).empty()) << "no member is left whom a terminal message could reach";
}

TEST_F(EnginePackets, PacketsThatDoNotFitTheirHeaderEndTheGroup) {
  form(1);
  send(member(0), Opcode::kSendOnly, message(header(member(0), 8), numbers(3, 1)));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a segment whose packets do not match its payload bytes");
}

TEST_F(EnginePackets, AMessageWithoutRoomForAHeaderEndsTheGroup) {
  form(1);
  send(member(0), Opcode::kSendOnly, std::vector<uint8_t>(63));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a message shorter than a segment header");
}

TEST_F(EnginePackets, AnothersHeaderEndsTheGroup) {
  form(1);
  SegmentHeader h = header(member(0), 8);
  h.group = h.group.value() + 1;
  send(member(0), Opcode::kSendOnly, message(h, numbers(2, 1)));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a segment header with a fault: another group's id");
}

TEST_F(EnginePackets, AnothersRankEndsTheGroup) {
  form(2);
  SegmentHeader h = header(member(0), 8);
  h.rank = uint16_t{1};
  send(member(0), Opcode::kSendOnly, message(h, numbers(2, 1)));
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a segment header with a fault: another member's rank");
}

TEST_F(EnginePackets, AFatalNakOfAResultEndsTheGroup) {
  form(2);
  for (uint16_t r = 0; r < 2; r++)
    send(member(r), Opcode::kSendOnly, message(header(member(r), 8), numbers(2, 1)));
  Member& m = member(1);
  ASSERT_EQ(m.inbox.size(), 1u);
  acknowledge(m, m.inbox[0].packet.psn(), roce::kNakRemoteAccess);
  EXPECT_EQ(group().state, "failed");
  EXPECT_EQ(group().reason, "rank 1 (10.0.0.2) refused a result with a NAK");
}

// PROTOCOL.md: segment s + window only after result s. RNR NAK with timer code 12, and then silence.
TEST_F(EnginePackets, TheWindowIsKeptToTheSegment) {
  form(2);
  Member& m = member(0);
  const auto segment = [&](uint64_t n) {
    SegmentHeader h = header(m, 8, n);
    return message(h, numbers(2, 1));
  };
  send(m, Opcode::kSendOnly, segment(0), true);
  send(m, Opcode::kSendOnly, segment(1), true);
  m.inbox.clear();
  Counters before = engine().counters();
  const Psn third = m.psn;
  send(m, Opcode::kSendOnly, segment(2), true);
  send(m, Opcode::kSendOnly, segment(3), true);
  EXPECT_EQ(gained(before), "out_of_sequence +1 packets +2 rnr_naks_sent +1 window_breaches +1");
  ASSERT_EQ(m.inbox.size(), 1u);
  EXPECT_EQ(m.inbox[0].packet.psn(), third);
  EXPECT_EQ(m.inbox[0].packet.aeth->syndrome, roce::kRnrNak | 12);
  m.inbox.clear();
  // The other member's segment 0 lets result 0 leave; then the third may begin, and acknowledges that result.
  Member& other = member(1);
  send(other, Opcode::kSendOnly, message(header(other, 8, 0), numbers(2, 1)));
  before = engine().counters();
  m.psn = third;
  send(m, Opcode::kSendOnly, segment(2), true);
  EXPECT_EQ(gained(before), "packets +1 acks_sent +1 contributions +1 contribution_bytes +8 segments +1");
  // But not the fourth.
  send(m, Opcode::kSendOnly, segment(3), true);
  EXPECT_EQ(engine().counters().window_breaches, 2u);
}

// Everybody's segments acknowledge results, so that no ACK ever has to: room for `window` results is enough.
TEST_F(EnginePackets, MembersThatNeverAcknowledgeAreServedAllTheSame) {
  form(2);
  for (uint64_t n = 0; n < 300; n++) {
    for (uint16_t r = 0; r < 2; r++) {
      Member& m = member(r);
      const auto data = message(header(m, 448, n), numbers(112, static_cast<int32_t>(n)));
      send(m, Opcode::kSendFirst, std::span(data).first(256));
      send(m, Opcode::kSendLast, std::span(data).subspan(256));
    }
  }
  for (uint16_t r = 0; r < 2; r++) {
    const auto& inbox = member(r).inbox;
    EXPECT_EQ(inbox.size(), 600u);
    EXPECT_EQ(inbox.back().packet.immediate->value(), 299u);
    EXPECT_TRUE(std::ranges::equal(inbox.back().packet.payload, numbers(64, 598)));
  }
  EXPECT_EQ(engine().counters().groups_failed, 0u);
}

TEST_F(EnginePackets, AnAcknowledgedResultLetsGoOfItsFrame) {
  form(2);
  const uint32_t idle = pool_.in_use();
  for (uint16_t r = 0; r < 2; r++)
    send(member(r), Opcode::kSendOnly, message(header(member(r), 8), numbers(2, 1)));
  const Psn psns[] = {member(0).inbox[0].packet.psn(), member(1).inbox[0].packet.psn()};
  member(0).inbox.clear(), member(1).inbox.clear();
  EXPECT_EQ(pool_.in_use(), idle + 1) << "the sum, which both results share";
  acknowledge(member(0), psns[0]);
  EXPECT_EQ(pool_.in_use(), idle + 1);
  acknowledge(member(1), psns[1]);
  EXPECT_EQ(pool_.in_use(), idle);
}

// A slot is used again by an operation that reduces nothing: its last reducer must not have a hand in that.
TEST_F(EnginePackets, ABroadcastInAnAveragesSlotIsNotDivided) {
  form(2);
  for (uint64_t n = 0; n < 3; n++) {
    for (uint16_t r = 0; r < 2; r++) {
      SegmentHeader h = header(member(r), 16, n);
      h.op = static_cast<uint8_t>(ReduceOp::kAvg);
      if (n < 2) {
        send(member(r), Opcode::kSendOnly, message(h, numbers(4, 6)));
        continue;
      }
      h.collective = static_cast<uint8_t>(Collective::kBroadcast);
      h.op = 0;
      if (r == 1) h.flags = kFlagLast | kFlagHeaderOnly, h.payload_bytes = 0u;
      send(member(r), Opcode::kSendOnly, message(h, r == 0 ? numbers(4, 1000) : std::vector<uint8_t>{}));
    }
  }
  ASSERT_EQ(member(1).inbox.size(), 3u) << group().reason;
  EXPECT_TRUE(std::ranges::equal(member(1).inbox[1].packet.payload, numbers(4, 6)));
  EXPECT_TRUE(std::ranges::equal(member(1).inbox[2].packet.payload, numbers(4, 1000)));
  ASSERT_EQ(member(0).inbox.size(), 3u);
  EXPECT_TRUE(member(0).inbox[2].packet.payload.empty()) << "the root has it";
}

// What a group takes of the quota is its own tenant's, to the byte.
TEST_F(EnginePackets, ATenantsQuotaIsForItsOwnGroups) {
  config_.tenants[1] = {"blue", "", 0}, config_.tenants[2] = {"red", "", 0};
  JoinRequest first = join_of(0, 2);
  first.tenant = 2;
  ASSERT_EQ(connect(member(0), encode(first)).kind, roce::CmEvent::Kind::kReply);
  const uint64_t one = engine().memory_reserved();
  ASSERT_GT(one, 0u);
  for (const uint64_t limit : {one, one - 1}) {
    restart([&](EngineConfig& c) { c.tenants[1].memory_limit = limit; });
    for (const uint32_t tenant : {2u, 2u, 1u}) {
      Member& m = member(static_cast<uint16_t>(10 + engine().groups(now_).size()));
      JoinRequest j = join_of(0, 2);
      j.tenant = tenant;
      j.key[0] = static_cast<uint8_t>(engine().groups(now_).size());
      const auto event = connect(m, encode(j));
      if (tenant == 2 || limit == one) {
        EXPECT_EQ(event.kind, roce::CmEvent::Kind::kReply);
        continue;
      }
      ASSERT_EQ(event.kind, roce::CmEvent::Kind::kRejected);
      const auto reject = decode_join_reject(event.private_data);
      ASSERT_TRUE(reject);
      EXPECT_EQ(reject->code, Code::kQuota);
      EXPECT_EQ(reject->text.find("tenant blue: 0 KiB of "), 0u) << reject->text;
    }
    EXPECT_EQ(engine().memory_reserved(), (limit == one ? 3 : 2) * one);
  }
}

// PROTOCOL.md, code 1: the ranks that differ from the majority, or both of two equal camps.
TEST_F(EnginePackets, AMinorityIsNamedAndOfTwoEqualCampsBoth) {
  const struct {
    uint16_t world;
    std::vector<uint16_t> of_min;  // the others' operator is a sum
    std::vector<uint16_t> ranks;
    const char* said;
  } cases[] = {
      {3, {1}, {1}, "rank 1 operator min, the others sum"},
      {3, {0}, {0}, "rank 0 operator min, the others sum"},
      {5, {1, 3}, {1, 3}, "ranks 1, 3 operator min, the others sum"},
      {2, {1}, {0, 1}, "rank 1 operator min, rank 0 sum"},
      {4, {2, 3}, {0, 1, 2, 3}, "ranks 2, 3 operator min, ranks 0, 1 sum"},
  };
  for (const auto& c : cases) {
    restart([](auto&) {});
    form(c.world);
    for (uint16_t r = 0; r < c.world; r++) {
      SegmentHeader h = header(member(r), 8, 6);
      if (std::ranges::find(c.of_min, r) != c.of_min.end()) h.op = static_cast<uint8_t>(ReduceOp::kMin);
      send(member(r), Opcode::kSendOnly, message(h, numbers(2, 1)));
    }
    run_at(now_ + milliseconds(550));  // the last header settles it at once only where it is another
    EXPECT_EQ(group().reason, std::string("the ranks disagree about operation 6: ") + c.said);
    ASSERT_FALSE(member(0).inbox.empty());
    const auto said = decode_control_message(member(0).inbox.back().packet.payload).terminal;
    ASSERT_TRUE(said);
    EXPECT_EQ(said->code, Code::kMismatch);
    EXPECT_EQ(said->operation, 6u);
    EXPECT_EQ(said->ranks, c.ranks);
  }
}

// --- timers ---

// Half a second is given to those whose headers would decide.
TEST_F(EnginePackets, ADisagreementIsJudgedWithoutThoseWhoDoNotCome) {
  form(3);
  SegmentHeader other = header(member(1), 8, 6);
  other.op = static_cast<uint8_t>(ReduceOp::kMax);
  const Time begun = now_;
  send(member(0), Opcode::kSendOnly, message(header(member(0), 8, 6), numbers(2, 1)));
  send(member(1), Opcode::kSendOnly, message(other, numbers(2, 1)));
  EXPECT_EQ(group().state, "disagreeing");
  for (const Time end = begun + milliseconds(500) - nanoseconds(1); now_ < end;)
    run_at(std::min(std::max(engine().next_deadline(), now_ + nanoseconds(1)), end));
  EXPECT_EQ(group().state, "disagreeing");
  run_at(begun + milliseconds(550));
  EXPECT_EQ(group().state, "failed");
  EXPECT_EQ(group().reason, "the ranks disagree about operation 6: rank 1 operator max, rank 0 sum");
}

// Whoever has said goodbye is not waited for, but it does not speak for the others.
TEST_F(EnginePackets, AFailedGroupWaitsForThoseWhoHaveNotHeardYet) {
  form(3);
  const uint32_t id = group().id;
  ASSERT_TRUE(engine().abort_group(id, "", now_, from_engine_));
  run();
  const Time told = now_;
  for (const uint16_t r : {uint16_t{1}, uint16_t{2}}) {
    member(r).agent->disconnect(member(r).reply.id, now_, to_engine_);
    run();
  }
  run_at(told + milliseconds(100));
  ASSERT_EQ(engine().groups(now_).size(), 1u) << "rank 0 has not acknowledged the terminal message";
  member(0).agent->disconnect(member(0).reply.id, now_, to_engine_);
  run();
  EXPECT_TRUE(engine().groups(now_).empty());
}

TEST_F(EnginePackets, ASilentMemberIsProbedAndThenLost) {
  form(2);
  const Time heard = now_;
  member(0).inbox.clear();
  run_at(heard + seconds(1) - nanoseconds(1));
  EXPECT_TRUE(member(0).inbox.empty());
  EXPECT_LE(engine().next_deadline(), heard + seconds(1));
  run_at(heard + seconds(1));
  for (uint16_t r = 0; r < 2; r++) {
    ASSERT_EQ(member(r).inbox.size(), 1u);
    const roce::Packet& probe = member(r).inbox[0].packet;
    EXPECT_EQ(probe.opcode(), Opcode::kWriteOnly);
    EXPECT_EQ(probe.reth->address.value() + probe.reth->rkey.value() + probe.reth->length.value(), 0u);
    EXPECT_TRUE(probe.ack_request());
  }
  EXPECT_EQ(engine().counters().probes_sent, 2u);
  acknowledge(member(0), member(0).inbox[0].packet.psn());
  // Rank 1 says nothing; the probe was sent at 1 s and is owed an answer for 5 s.
  Time t = now_;
  while (t < heard + seconds(6) - nanoseconds(1)) {
    t = std::min(std::max(engine().next_deadline(), t + nanoseconds(1)), heard + seconds(6) - nanoseconds(1));
    run_at(t);
    for (auto& r : member(0).inbox)
      if (r.packet.op->request) acknowledge(member(0), r.packet.psn());
    member(0).inbox.clear();
  }
  EXPECT_EQ(group().state, "running");
  run_at(heard + seconds(6));
  EXPECT_EQ(group().state, "failed");
  EXPECT_EQ(group().reason, "rank 1 (10.0.0.2) has not acknowledged anything for 5 s");
  ASSERT_FALSE(member(0).inbox.empty());
  const auto said = decode_control_message(member(0).inbox.back().packet.payload).terminal;
  ASSERT_TRUE(said);
  EXPECT_EQ(said->code, Code::kMemberLost);
  EXPECT_EQ(said->ranks, std::vector<uint16_t>{1});
}

// Of a rank that has joined and never said a word: it may be a dead process's REQ. Its place becomes free,
// and with nobody left, so does the group's memory.
TEST_F(EnginePackets, AMemberThatNeverSpeaksIsEvictedAndNotMissed) {
  Member& ghost = member(1);
  ASSERT_EQ(connect(ghost, encode(join_of(1, 2))).kind, roce::CmEvent::Kind::kReply);
  EXPECT_EQ(engine().queue_pairs(), 1u);
  const Time joined = now_;
  while (engine().queue_pairs() > 0 && now_ < joined + seconds(20))
    run_at(std::max(engine().next_deadline(), now_ + nanoseconds(1)));
  EXPECT_LE(now_ - joined, seconds(7));
  EXPECT_EQ(engine().counters().members_evicted, 1u);
  EXPECT_EQ(engine().counters().groups_failed, 0u);
  run_at(now_ + milliseconds(50));
  EXPECT_TRUE(engine().groups(now_).empty());
  EXPECT_EQ(engine().memory_reserved(), 0u);
}

TEST_F(EnginePackets, AMissingRankIsNamedWhenTheTimeIsOverAndNotBefore) {
  Member& m = join(1, 20);
  const Time formed = now_;
  const auto until = [&](Time end) {
    while (now_ < end) {
      run_at(std::min(std::max(engine().next_deadline(), now_ + nanoseconds(1)), end));
      for (auto& r : m.inbox)
        if (r.packet.op->request) acknowledge(m, r.packet.psn());
      if (group().state == "joining") m.inbox.clear();
    }
  };
  until(formed + seconds(60) - nanoseconds(1));
  EXPECT_EQ(group().state, "joining");
  until(formed + seconds(60) + milliseconds(50));
  EXPECT_EQ(group().state, "failed");
  EXPECT_EQ(
      group().reason,
      "ranks missing after the join time-out of 60 s: 0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, "
      "16, …");
}

TEST_F(EnginePackets, ExactlyTheMissingRanksAreNamed) {
  config_.join_timeout = seconds(2);
  Member& m = join(1, 3);
  for (const Time end = now_ + seconds(2) + milliseconds(50); now_ < end;) {
    run_at(std::min(std::max(engine().next_deadline(), now_ + nanoseconds(1)), end));
    for (auto& r : m.inbox)
      if (r.packet.op->write) acknowledge(m, r.packet.psn());
  }
  EXPECT_EQ(group().reason, "ranks missing after the join time-out of 2 s: 0, 2");
  const auto said = decode_control_message(m.inbox.back().packet.payload).terminal;
  ASSERT_TRUE(said);
  EXPECT_EQ(said->code, Code::kJoinTimeout);
  EXPECT_EQ(said->ranks, (std::vector<uint16_t>{0, 2}));
}

// A REQ of the past makes a member of which nothing is heard. Whoever joins later waits for as long as it
// would have without it.
TEST_F(EnginePackets, TheJoinTimeOutCountsFromTheFirstWhoIsHere) {
  config_.join_timeout = seconds(2);
  const Time formed = now_;
  ASSERT_EQ(connect(member(1), encode(join_of(1, 2))).kind, roce::CmEvent::Kind::kReply);
  run_at(formed + milliseconds(1500));
  Member& m = join(0, 2);
  const Time joined = now_;
  const auto until = [&](Time end) {
    while (now_ < end) {
      run_at(std::min(std::max(engine().next_deadline(), now_ + nanoseconds(1)), end));
      for (auto& r : m.inbox)
        if (r.packet.op->write) acknowledge(m, r.packet.psn());
    }
  };
  until(joined + seconds(2) - nanoseconds(1));
  EXPECT_EQ(group().state, "joining");
  until(joined + seconds(2) + milliseconds(50));
  EXPECT_EQ(group().reason, "ranks missing after the join time-out of 2 s: 1");
}

TEST_F(EnginePackets, AnOperationIsLateWhenItsTimeIsOverAndNotBefore) {
  config_.operation_timeout = seconds(3);
  form(2);
  Member& m = member(0);
  const Time begun = now_;
  send(m, Opcode::kSendOnly, message(header(m, 8, 77), numbers(2, 1)));
  const auto until = [&](Time end) {
    while (now_ < end) {
      run_at(std::min(std::max(engine().next_deadline(), now_ + nanoseconds(1)), end));
      for (uint16_t r = 0; r < 2; r++) {
        for (auto& i : member(r).inbox)
          if (i.packet.op->request) acknowledge(member(r), i.packet.psn());
        member(r).inbox.clear();
      }
    }
  };
  until(begun + seconds(1) - nanoseconds(1));
  EXPECT_EQ(engine().counters().stragglers, 0u);
  until(begun + seconds(1) + milliseconds(50));
  EXPECT_EQ(engine().counters().stragglers, 1u);
  until(begun + seconds(3) - nanoseconds(1));
  EXPECT_EQ(engine().counters().stragglers, 1u) << "counted once";
  EXPECT_EQ(group().state, "running");
  until(begun + seconds(3) + milliseconds(50));
  EXPECT_EQ(group().reason, "operation 77 timed out waiting for rank 1 (10.0.0.2)");
}

// A rank that is taken: its holder is asked for a sign of life, the asker told to wait meanwhile.
TEST_F(EnginePackets, ATakenRankIsFreedWhenItsHolderDoesNotAnswer) {
  join(0, 2);
  Member& thief = member(5);
  thief.agent->connect(thief.path, roce::tcp_service_id(config_.cm_port),
                       {.qpn = Qpn{0x999}, .first_psn = Psn(5)}, 40000, encode([&] {
                         JoinRequest j = join_of(0, 2);
                         j.nonce = 2;
                         return j;
                       }()),
                       now_, to_engine_);
  run();
  EXPECT_EQ(thief.agent->counters().mra_received, 1u);
  const Time asked = now_;
  EXPECT_LE(engine().next_deadline(), asked + milliseconds(50));
  ASSERT_EQ(member(0).inbox.size(), 1u);
  EXPECT_EQ(member(0).inbox[0].packet.opcode(), Opcode::kWriteOnly) << "the probe";
  run_at(asked + milliseconds(1500) - nanoseconds(1));
  roce::CmEvent event;
  EXPECT_FALSE(thief.agent->next_event(event));
  run_at(asked + milliseconds(1500));
  ASSERT_TRUE(thief.agent->next_event(event));
  EXPECT_EQ(event.kind, roce::CmEvent::Kind::kReply);
  EXPECT_EQ(engine().counters().members_evicted, 1u);
  EXPECT_EQ(group().members.at(0).address.to_string(), "10.0.0.6");
}

TEST_F(EnginePackets, ATakenRankStaysItsHoldersWhoAnswers) {
  Member& holder = join(0, 2);
  Member& thief = member(5);
  JoinRequest j = join_of(0, 2);
  j.nonce = 2;
  thief.agent->connect(thief.path, roce::tcp_service_id(config_.cm_port),
                       {.qpn = Qpn{0x999}, .first_psn = Psn(5)}, 40000, encode(j), now_, to_engine_);
  run();
  ASSERT_EQ(holder.inbox.size(), 1u);
  now_ += milliseconds(1);
  acknowledge(holder, holder.inbox[0].packet.psn());
  roce::CmEvent event;
  ASSERT_TRUE(thief.agent->next_event(event));
  EXPECT_EQ(event.kind, roce::CmEvent::Kind::kRejected);
  const auto reject = decode_join_reject(event.private_data);
  ASSERT_TRUE(reject);
  EXPECT_EQ(reject->code, Code::kDuplicateRank);
  EXPECT_EQ(reject->text, "rank 0 is taken by 10.0.0.1, which is alive");
  EXPECT_EQ(engine().counters().joins_refused, 1u);
  EXPECT_EQ(engine().counters().members_evicted, 0u);
}

TEST_F(EnginePackets, ASwitchThatShutsDownTellsItsMembersAndRefusesOthers) {
  form(1);
  Member& m = member(0);
  engine().shutdown(now_, from_engine_);
  EXPECT_FALSE(engine().drained());
  run();
  ASSERT_EQ(m.inbox.size(), 1u);
  const auto said = decode_control_message(m.inbox[0].packet.payload).terminal;
  ASSERT_TRUE(said);
  EXPECT_EQ(said->code, Code::kShuttingDown);
  EXPECT_EQ(engine().counters().terminals_sent, 1u);
  const auto event = connect(member(1), encode(join_of(0, 1)));
  EXPECT_EQ(event.kind, roce::CmEvent::Kind::kRejected);
  EXPECT_EQ(decode_join_reject(event.private_data)->code, Code::kShuttingDown);
  // For 2 s it could be sent again; then the switch says goodbye.
  acknowledge(m, m.inbox[0].packet.psn());
  const Time told = now_;
  run_at(told + seconds(2) - nanoseconds(1));
  EXPECT_EQ(engine().groups(now_).size(), 1u);
  EXPECT_FALSE(engine().drained());
  run_at(told + seconds(2) + milliseconds(50));
  EXPECT_TRUE(engine().groups(now_).empty());
  EXPECT_TRUE(engine().drained());
  EXPECT_EQ(engine().queue_pairs(), 0u);
  EXPECT_EQ(engine().memory_reserved(), 0u);
  EXPECT_EQ(engine().counters().groups_ended, 1u);
}

}  // namespace
}  // namespace millrace::aggregation
