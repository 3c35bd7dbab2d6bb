// The reliable connection: responder and requester alone, by the rules of IBA vol. 1, 9.7; sequences start
// near the wrap of the PSN.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "roce/queue_pair.h"

namespace millrace::roce {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint32_t kMtu = 256;

// A packet of our peer, parsed: kept with its frame.
struct Sent {
  Frame frame;
  Packet packet;
};

class Peer {
 public:
  Sent packet(Opcode op, uint32_t psn, size_t bytes, bool ack_request = false, uint64_t address = 0,
              uint32_t dma = 0) {
    TransportFields f;
    f.opcode = op;
    f.dest_qp = Qpn{77};
    f.psn = Psn(psn);
    f.ack_request = ack_request;
    f.remote_address = address;
    f.dma_length = dma;
    f.rkey = 5;
    const std::vector<uint8_t> payload(bytes, 0xAB);
    return wrap(build(pool, path, f, payload));
  }
  static Sent wrap(Frame frame) {
    Sent s{std::move(frame), {}};
    EXPECT_EQ(parse(s.frame.bytes(), s.packet), ParseVerdict::kOk);
    EXPECT_TRUE(icrc_ok(s.packet));
    return s;
  }
  HeapFramePool pool;
  Path path{{}, {}, *IpAddress::parse("10.0.0.2"), *IpAddress::parse("10.0.0.1")};
};

class Responder : public testing::Test, public Peer {
 protected:
  Arrival take(const Sent& s) {
    const Arrival a = responder.arrive(s.packet);
    if (a == Arrival::kNew) responder.accept(s.packet);
    return a;
  }
  void expect_ack(uint8_t syndrome, uint32_t psn, uint32_t msn) {
    const auto a = responder.take_acknowledgement();
    ASSERT_TRUE(a);
    EXPECT_EQ(a->syndrome, syndrome);
    EXPECT_EQ(a->psn.value(), psn & 0xFFFFFF);
    EXPECT_EQ(a->msn, msn);
    EXPECT_FALSE(responder.take_acknowledgement());
  }
  RcResponder responder{Psn(0xFFFFFE), kMtu};
};

TEST_F(Responder, AcknowledgesOnlyWhenAskedAndAcrossTheWrap) {
  EXPECT_EQ(take(packet(Opcode::kSendFirst, 0xFFFFFE, kMtu)), Arrival::kNew);
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(take(packet(Opcode::kSendMiddle, 0xFFFFFF, kMtu)), Arrival::kNew);
  EXPECT_EQ(take(packet(Opcode::kSendLast, 0, 10, true)), Arrival::kNew);
  expect_ack(kAckUnlimited, 0, 1);
}

TEST_F(Responder, SendsOneSequenceNakPerGap) {
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0, 8)), Arrival::kGap);
  expect_ack(kNakSequence, 0xFFFFFE, 0);
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 1, 8, true)), Arrival::kGapQuiet);
  EXPECT_FALSE(responder.take_acknowledgement());
  // What was asked for comes; the next gap is a new one.
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFE, 8)), Arrival::kNew);
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 5, 8)), Arrival::kGap);
  expect_ack(kNakSequence, 0xFFFFFF, 1);
}

TEST_F(Responder, ADuplicateIsAcknowledgedAgainWithTheNewestPsn) {
  take(packet(Opcode::kSendOnly, 0xFFFFFE, 8));
  take(packet(Opcode::kSendOnly, 0xFFFFFF, 8));
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFE, 8)), Arrival::kDuplicate);
  expect_ack(kAckUnlimited, 0xFFFFFF, 2);
}

TEST_F(Responder, AfterAnRnrNakWhatFollowsIsSilentAndTheRepeatIsTaken) {
  const Sent first = packet(Opcode::kSendOnly, 0xFFFFFE, 8, true);
  EXPECT_EQ(responder.arrive(first.packet), Arrival::kNew);
  responder.not_ready(12);
  expect_ack(kRnrNak | 12, 0xFFFFFE, 0);
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFF, 8)), Arrival::kGapQuiet);
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(take(first), Arrival::kNew);
  expect_ack(kAckUnlimited, 0xFFFFFE, 1);
}

struct BadRequest {
  const char* what;
  Opcode op;
  size_t bytes;
  uint64_t address;
  uint32_t dma;
  bool inside_send;  // after a SEND FIRST
};
class Invalid : public testing::TestWithParam<BadRequest>, public Peer {};
TEST_P(Invalid, IsRefusedAndEndsTheQueuePair) {
  const BadRequest& b = GetParam();
  RcResponder responder(Psn(9), kMtu);
  uint32_t psn = 9;
  if (b.inside_send) {
    const Sent first = packet(Opcode::kSendFirst, psn++, kMtu);
    ASSERT_EQ(responder.arrive(first.packet), Arrival::kNew);
    responder.accept(first.packet);
  }
  const Sent bad = packet(b.op, psn, b.bytes, true, b.address, b.dma);
  EXPECT_EQ(responder.arrive(bad.packet), Arrival::kInvalid);
  EXPECT_TRUE(responder.over());
  EXPECT_EQ(responder.take_acknowledgement()->syndrome, kNakInvalidRequest);
  const Sent next = packet(Opcode::kSendOnly, psn, 8, true);
  EXPECT_EQ(responder.arrive(next.packet), Arrival::kGapQuiet);
}
INSTANTIATE_TEST_SUITE_P(
    Rules, Invalid,
    testing::Values(BadRequest{"middle_without_first", Opcode::kSendMiddle, kMtu, 0, 0, false},
                    BadRequest{"last_without_first", Opcode::kSendLast, 8, 0, 0, false},
                    BadRequest{"first_inside_message", Opcode::kSendFirst, kMtu, 0, 0, true},
                    BadRequest{"only_inside_message", Opcode::kSendOnly, 8, 0, 0, true},
                    BadRequest{"write_inside_send", Opcode::kWriteLast, 8, 0, 0, true},
                    BadRequest{"short_first", Opcode::kSendFirst, kMtu - 4, 0, 0, false},
                    BadRequest{"short_middle", Opcode::kSendMiddle, kMtu - 1, 0, 0, true},
                    BadRequest{"empty_last", Opcode::kSendLast, 0, 0, 0, true},
                    BadRequest{"long_only", Opcode::kSendOnly, kMtu + 4, 0, 0, false},
                    BadRequest{"write_longer_than_reth", Opcode::kWriteOnly, 16, 0, 8, false},
                    BadRequest{"write_first_that_is_all", Opcode::kWriteFirst, kMtu, 0, kMtu, false},
                    BadRequest{"write_that_wraps", Opcode::kWriteOnly, 16, UINT64_MAX - 7, 16, false},
                    BadRequest{"read_request", Opcode::kReadRequest, 0, 0, 8, false}),
    [](const auto& i) { return i.param.what; });

TEST_F(Responder, AWriteOfSeveralPacketsIsPlacedInOrder) {
  const Sent first = packet(Opcode::kWriteFirst, 0xFFFFFE, kMtu, false, 0x1000, 2 * kMtu + 3);
  ASSERT_EQ(responder.arrive(first.packet), Arrival::kNew);
  EXPECT_EQ(responder.place(first.packet).address, 0x1000u);
  responder.accept(first.packet);
  const Sent middle = packet(Opcode::kWriteMiddle, 0xFFFFFF, kMtu);
  ASSERT_EQ(responder.arrive(middle.packet), Arrival::kNew);
  EXPECT_EQ(responder.place(middle.packet).address, 0x1000u + kMtu);
  EXPECT_EQ(responder.place(middle.packet).rkey, 5u);
  responder.accept(middle.packet);
  const Sent last = packet(Opcode::kWriteLast, 0, 3, true);
  ASSERT_EQ(responder.arrive(last.packet), Arrival::kNew);
  EXPECT_EQ(responder.place(last.packet).address, 0x1000u + 2 * kMtu);
}

class Requester : public testing::Test {
 protected:
  Requester() {
    wire.path.src_ip = *IpAddress::parse("10.0.0.1");
    wire.path.dst_ip = *IpAddress::parse("10.0.0.2");
    wire.remote_qpn = Qpn{5};
    config.first_psn = Psn(0xFFFFFE);
    config.mtu = kMtu;
    config.requests_max = 8;
    config.retransmit_timeout = milliseconds(60);
    requester = std::make_unique<RcRequester>(config);
  }
  void post(size_t bytes, uint64_t id) {
    WorkRequest r;
    r.id = id;
    r.parts[0] = {data.data(), bytes};
    ASSERT_TRUE(requester->post(std::move(r)));
  }
  // The PSNs sent now, as a string such as "fffffe ffffff 0!" (! asks for an acknowledgement).
  std::string send(uint32_t budget = 100) {
    FrameList out;
    requester->transmit(wire, pool, combine, budget, now, out);
    std::string s;
    while (!out.empty()) {
      const Sent sent = Peer::wrap(out.pop());
      char text[16];
      std::snprintf(text, sizeof(text), "%s%x%s", s.empty() ? "" : " ", sent.packet.psn().value(),
                    sent.packet.ack_request() ? "!" : "");
      s += text;
    }
    return s;
  }
  std::string completions() {
    std::string s;
    for (uint64_t id; requester->next_completion(id);) s += std::to_string(id) + " ";
    return s;
  }
  void ack(uint32_t psn, uint8_t syndrome = kAckUnlimited) {
    requester->acknowledge(Psn(psn), syndrome, now);
  }

  HeapFramePool pool;
  Crc32Combine combine;
  Wire wire;
  RequesterConfig config;
  std::vector<uint8_t> data = std::vector<uint8_t>(4096, 7);
  std::unique_ptr<RcRequester> requester;
  Time now{};
};

TEST_F(Requester, CutsMessagesAndACoalescedAckCompletesThem) {
  post(2 * kMtu + 1, 1);
  post(0, 2);
  post(kMtu, 3);
  EXPECT_EQ(send(), "fffffe ffffff 0! 1! 2!");
  ack(1);
  EXPECT_EQ(completions(), "1 2 ");
  ack(2);
  EXPECT_EQ(completions(), "3 ");
  EXPECT_TRUE(requester->idle());
}

TEST_F(Requester, ASequenceNakGoesBackAndAcknowledgesWhatCameBefore) {
  post(8, 1), post(3 * kMtu, 2);
  EXPECT_EQ(send(), "fffffe! ffffff 0 1!");
  ack(0, kNakSequence);
  EXPECT_EQ(completions(), "1 ");
  EXPECT_EQ(send(), "0 1!");
  EXPECT_EQ(requester->counters().retransmitted, 2u);
  ack(1);
  EXPECT_EQ(completions(), "2 ");
}

TEST_F(Requester, AnRnrNakWaitsForItsTimer) {
  post(8, 1), post(8, 2);
  EXPECT_EQ(send(), "fffffe! ffffff!");
  ack(0xFFFFFE, kRnrNak | 12);  // 0.64 ms, IBA table 45
  EXPECT_EQ(send(), "");
  now += microseconds(639);
  requester->tick(now);
  EXPECT_EQ(send(), "");
  now += microseconds(1);
  requester->tick(now);
  EXPECT_EQ(send(), "fffffe! ffffff!");
  EXPECT_FALSE(requester->failed());
}

TEST_F(Requester, ATailLossIsProbedBeforeTheTimerAndThenTimesOut) {
  post(2 * kMtu, 1);
  EXPECT_EQ(send(), "fffffe ffffff!");
  now = requester->next_deadline();
  EXPECT_LT(now, milliseconds(60));
  requester->tick(now);
  EXPECT_EQ(send(), "ffffff!");
  now = milliseconds(60);
  requester->tick(now);
  EXPECT_EQ(send(), "fffffe ffffff!");
  EXPECT_EQ(requester->counters().timeouts, 1u);
  EXPECT_EQ(requester->waiting_since(), Time{});
}

TEST_F(Requester, WhatAnAckCoversAfterATimeoutIsNotRepeated) {
  post(3 * kMtu, 1);
  EXPECT_EQ(send(), "fffffe ffffff 0!");
  now = milliseconds(60);
  requester->tick(now);
  EXPECT_EQ(requester->counters().timeouts, 1u);
  ack(0xFFFFFE);  // late: the message's first packet had arrived
  EXPECT_EQ(send(), "ffffff 0!");
  ack(0);
  EXPECT_EQ(completions(), "1 ");
}

TEST_F(Requester, AcksOutsideWhatIsOutstandingAreStale) {
  post(8, 1);
  send();
  ack(0xFFFFFF), ack(5), ack(0x800000), ack(0xFFFFF0, kNakSequence);
  EXPECT_EQ(requester->counters().stale_acks, 4u);
  EXPECT_EQ(completions(), "");
  ack(0xFFFFFE);
  EXPECT_EQ(completions(), "1 ");
}

TEST_F(Requester, AFatalNakEndsIt) {
  post(8, 1);
  send();
  ack(0xFFFFFE, kNakRemoteAccess);
  EXPECT_TRUE(requester->failed());
  EXPECT_EQ(requester->fail_syndrome(), kNakRemoteAccess);
  EXPECT_EQ(requester->next_deadline(), kNever);
}

TEST_F(Requester, KeepsWithinItsQueueAndWindow) {
  config.packets_max = 4;
  requester = std::make_unique<RcRequester>(config);
  for (uint64_t i = 0; i < 8; i++) post(8, i);
  EXPECT_FALSE(requester->post({}));
  EXPECT_EQ(send(), "fffffe! ffffff! 0! 1!");
  ack(0xFFFFFF);
  EXPECT_EQ(send(), "2! 3!");
  EXPECT_FALSE(requester->post({}));  // completions not taken yet
  completions();
  post(8, 9);
}

TEST_F(Requester, ACnpHalvesWhatIsInFlightAndAcksBringItBack) {
  config.requests_max = 64;
  requester = std::make_unique<RcRequester>(config);
  for (uint64_t i = 0; i < 40; i++) post(8, i);
  EXPECT_EQ(std::ranges::count(send(16), '!'), 16);
  requester->congestion(now);
  requester->congestion(now);  // within 50 µs: the same event
  EXPECT_EQ(send(), "");
  ack(0xFFFFFE + 11);                             // 12 acknowledged, 4 in flight: 8 are allowed
  EXPECT_EQ(std::ranges::count(send(), '!'), 5);  // a whole window acknowledged: one more
  // From then on one more for each whole window of nine, ten, eleven, and none in between: 21 packets are
  // out.
  ack(0xFFFFFE + 12);
  EXPECT_EQ(std::ranges::count(send(), '!'), 1);
  ack(0xFFFFFE + 19);  // 4 and 1 and 7 of nine and more: one is left over
  EXPECT_EQ(std::ranges::count(send(), '!'), 8);
  ack(0xFFFFFE + 28);
  EXPECT_EQ(std::ranges::count(send(), '!'), 10);
}

TEST_F(Requester, ASharedPayloadIsSentWithoutACopyAndKeptUntilAcknowledged) {
  Frame owner = Frame::allocate(pool);
  FrameBuffer* buffer = owner.buffer();
  buffer->length = 100;
  std::fill_n(buffer->data(), 100, 0x42);
  WorkRequest r;
  r.kind = WorkRequest::Kind::kWriteImmediate;
  r.parts[0] = {buffer->data(), 100};
  r.payload_crc = crc32(0, r.parts[0]);
  r.shared = FrameRef(buffer);
  ASSERT_TRUE(requester->post(std::move(r)));
  owner = Frame();
  EXPECT_EQ(buffer->owners, 1u);
  FrameList out;
  requester->transmit(wire, pool, combine, 1, now, out);
  const Frame sent = out.pop();
  EXPECT_EQ(sent.buffer()->shared_data, buffer->data());
  EXPECT_EQ(buffer->owners, 2u);
  ack(0xFFFFFE);
  completions();
  EXPECT_EQ(buffer->owners, 1u);
}

TEST_F(Requester, AnEmptyPoolDelaysAndLosesNothing) {
  HeapFramePool tiny(4608, 1);
  post(8, 1), post(8, 2);
  FrameList out;
  EXPECT_EQ(requester->transmit(wire, tiny, combine, 10, now, out), 1u);
  EXPECT_TRUE(requester->wants_to_send());
  out.clear();
  EXPECT_EQ(requester->transmit(wire, tiny, combine, 10, now, out), 1u);
  ack(0xFFFFFF);
  EXPECT_EQ(completions(), "1 2 ");
}

class Pair : public testing::Test, public Peer {
 protected:
  Pair() {
    config.local = Qpn{77};
    config.wire.path.src_ip = *IpAddress::parse("10.0.0.1");
    config.wire.path.dst_ip = *IpAddress::parse("10.0.0.2");
    config.wire.remote_qpn = Qpn{5};
    config.expected_psn = Psn(100);
    config.requester.mtu = kMtu;
  }
  QueuePairConfig config;
};

TEST_F(Pair, AForeignSourceOrPartitionChangesNothing) {
  QueuePair qp(config, Time{});
  path.src_ip = *IpAddress::parse("10.0.0.3");
  EXPECT_EQ(qp.receive(packet(Opcode::kSendOnly, 100, 8).packet, Time{}), Reception::kSourceMismatch);
  path.src_ip = *IpAddress::parse("10.0.0.2");
  config.wire.pkey = 0x8001;
  QueuePair other(config, Time{});
  EXPECT_EQ(other.receive(packet(Opcode::kSendOnly, 100, 8).packet, Time{}), Reception::kPkeyMismatch);
  EXPECT_EQ(qp.receive(packet(Opcode::kSendOnly, 100, 8).packet, Time{}), Reception::kNewRequest);
}

TEST_F(Requester, ABorrowedPayloadIsSentFromWhereItLiesOnceAndCopiedWhenRepeated) {
  WorkRequest r;
  r.borrow = true;
  r.parts[0] = {data.data(), 64};
  r.parts[1] = {data.data() + 64, 301};
  ASSERT_TRUE(requester->post(std::move(r)));
  FrameList out;
  requester->transmit(wire, pool, combine, 10, now, out);
  const Frame first = out.pop();
  Frame last = out.pop();
  EXPECT_EQ(first.buffer()->shared_data, data.data() + 64);
  EXPECT_EQ(last.buffer()->shared_data, data.data() + 256);
  std::vector<uint8_t> before(last.total_length());
  last.copy_to(before.data());
  own_payload(last.buffer());
  EXPECT_EQ(last.bytes().size(), before.size());
  const Sent owned = Peer::wrap(std::move(last));  // parses, and its ICRC is right
  EXPECT_TRUE(std::equal(before.begin(), before.end(), owned.frame.bytes().begin()));
  ack(0xFFFFFE, kNakSequence);
  requester->transmit(wire, pool, combine, 10, now, out);
  EXPECT_EQ(out.size(), 2u);
  EXPECT_EQ(out.pop().buffer()->shared_length, 0u);
}

TEST_F(Pair, ASilentPeerIsProbedAndThenDead) {
  QueuePair qp(config, Time{});
  EXPECT_EQ(qp.next_deadline(), seconds(1));
  qp.tick(seconds(1));
  FrameList out;
  Crc32Combine combine;
  qp.emit(pool, combine, 8, seconds(1), out);
  ASSERT_EQ(out.size(), 1u);
  const Sent probe = wrap(out.pop());
  EXPECT_EQ(probe.packet.opcode(), Opcode::kWriteOnly);
  EXPECT_EQ(probe.packet.reth->length.value(), 0u);
  EXPECT_TRUE(probe.packet.ack_request());
  EXPECT_FALSE(qp.dead(milliseconds(5999)));
  EXPECT_TRUE(qp.dead(seconds(6)));
}

}  // namespace
}  // namespace millrace::roce
