// The reliable connection: responder and requester alone, by the rules of IBA vol. 1, 9.7; sequences start
// near the wrap of the PSN.
#include <algorithm>

#include "tests/unit/rc_rig.h"

namespace millrace::roce {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;

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
                    BadRequest{"send_with_invalidate", Opcode::kSendOnlyInvalidate, 8, 0, 0, false},
                    BadRequest{"write_first_longer_than_reth", Opcode::kWriteFirst, kMtu, 0, kMtu - 1, false},
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

// A WRITE's packets carry what its RETH has announced, no more and no less (IBA vol. 1, 9.7.4.1.6).
TEST_F(Responder, AWriteEndsWhereItsLengthSays) {
  const struct {
    Opcode op;
    size_t bytes;
    Arrival is;
  } second[] = {{Opcode::kWriteLast, 3, Arrival::kNew},          {Opcode::kWriteLast, 2, Arrival::kInvalid},
                {Opcode::kWriteLast, 4, Arrival::kInvalid},      {Opcode::kWriteLastImm, 3, Arrival::kNew},
                {Opcode::kWriteMiddle, kMtu, Arrival::kInvalid}, {Opcode::kSendLast, 3, Arrival::kInvalid}};
  for (const auto& s : second) {
    RcResponder r(Psn(9), kMtu);
    const Sent first = packet(Opcode::kWriteFirst, 9, kMtu, false, 0x1000, kMtu + 3);
    ASSERT_EQ(r.arrive(first.packet), Arrival::kNew);
    r.accept(first.packet);
    EXPECT_EQ(r.arrive(packet(s.op, 10, s.bytes).packet), s.is)
        << opcode_name(static_cast<uint8_t>(s.op)) << s.bytes;
  }
  // Up to the last byte of the address space.
  EXPECT_EQ(take(packet(Opcode::kWriteOnly, 0xFFFFFE, 16, false, UINT64_MAX - 15, 16)), Arrival::kInvalid);
  RcResponder r(Psn(9), kMtu);
  EXPECT_EQ(r.arrive(packet(Opcode::kWriteOnly, 9, 16, false, UINT64_MAX - 16, 16).packet), Arrival::kNew);
}

TEST_F(Responder, MessagesAreCountedModulo2To24) {
  for (uint32_t n = 0; n < 3; n++) take(packet(Opcode::kSendOnly, 0xFFFFFE + n, 8));
  EXPECT_EQ(responder.messages(), 3u);
  take(packet(Opcode::kSendFirst, 1, kMtu));
  EXPECT_EQ(responder.messages(), 3u);
  take(packet(Opcode::kSendLast, 2, 8, true));
  expect_ack(kAckUnlimited, 2, 4);
}

TEST_F(Responder, ANakThatHasNotGoneOutIsVoidOnceTheGapIsFilled) {
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFF, 8)), Arrival::kGap);
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFE, 8)), Arrival::kNew);
  expect_ack(kAckUnlimited, 0xFFFFFE, 1);
}

TEST_F(Responder, ADuplicateDoesNotTakeTheNaksPlace) {
  take(packet(Opcode::kSendOnly, 0xFFFFFE, 8));
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 1, 8)), Arrival::kGap);
  EXPECT_EQ(take(packet(Opcode::kSendOnly, 0xFFFFFE, 8, true)), Arrival::kDuplicate);
  expect_ack(kNakSequence, 0xFFFFFF, 1);
}

TEST_F(Responder, BehindItsEndEverythingIsSilent) {
  ASSERT_EQ(responder.arrive(packet(Opcode::kSendOnly, 0xFFFFFE, 8).packet), Arrival::kNew);
  responder.refuse(kNakRemoteAccess);
  expect_ack(kNakRemoteAccess, 0xFFFFFE, 0);
  for (const uint32_t psn : {0xFFFFFDu, 0xFFFFFEu, 0xFFFFFFu})
    EXPECT_EQ(responder.arrive(packet(Opcode::kSendOnly, psn, 8, true).packet), Arrival::kGapQuiet);
  EXPECT_FALSE(responder.take_acknowledgement());
}

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

// Also of a message that asked for nothing: without an answer the probe would be for nothing.
TEST_F(Requester, ATailProbeAsksForAnAcknowledgement) {
  for (uint64_t id = 1; id <= 2; id++) {
    WorkRequest r;
    r.id = id;
    r.ack_request = false;
    r.parts[0] = {data.data(), 8};
    ASSERT_TRUE(requester->post(std::move(r)));
  }
  EXPECT_EQ(send(), "fffffe ffffff");
  now = milliseconds(15);  // no round trip is known: a quarter of the time-out
  EXPECT_EQ(requester->next_deadline(), now);
  requester->tick(now);
  EXPECT_EQ(send(), "ffffff!");
  EXPECT_EQ(requester->counters().tail_probes, 1u);
  EXPECT_EQ(requester->counters().packets_sent, 3u);
  EXPECT_EQ(requester->counters().retransmitted, 1u);
  EXPECT_EQ(requester->next_deadline(), milliseconds(60)) << "one probe, then the timer";
}

// While anything is still to be sent, that tells; a probe is for the tail.
TEST_F(Requester, WhatIsNotTheTailIsNotProbed) {
  post(8, 1), post(8, 2);
  EXPECT_EQ(send(1), "fffffe!");
  now = milliseconds(15);
  requester->tick(now);
  EXPECT_EQ(send(), "ffffff!");
  EXPECT_EQ(requester->counters().tail_probes, 0u);
}

// RFC 6298, 2.2 and 2.3, with a millisecond for the receiver and no less than that, no more than half the
// time-out. By hand.
TEST_F(Requester, TheTailTimerFollowsTheRoundTrip) {
  const auto round = [&](uint32_t psn, Time rtt) {
    post(8, psn);
    send();
    now += rtt;
    ack(psn);
    completions();
  };
  const auto tail = [&] {
    post(8, 99);
    send();
    const Time due = requester->next_deadline() - now;
    return due;
  };
  round(0xFFFFFE, milliseconds(4));  // smooth 4, variance 2
  round(0xFFFFFF, milliseconds(8));  // variance (3·2 + 4) / 4 = 2.5, smooth (7·4 + 8) / 8 = 4.5
  EXPECT_EQ(tail(), microseconds(15'500));
  now += milliseconds(2);  // variance (7.5 + 2.5) / 4 = 2.5, smooth (31.5 + 2) / 8 = 4.1875
  ack(0);
  completions();
  EXPECT_EQ(tail(), microseconds(15'187) + std::chrono::nanoseconds(500));
  now += milliseconds(100);  // out of all proportion: half the time-out
  ack(1);
  completions();
  EXPECT_EQ(tail(), milliseconds(30));
}

// Karn: what has been sent twice measures nothing.
TEST_F(Requester, AnAnswerToARepeatedPacketMeasuresNothing) {
  post(8, 1);
  send();
  now = milliseconds(60);
  requester->tick(now);
  EXPECT_EQ(send(), "fffffe!");
  now += milliseconds(1);
  ack(0xFFFFFE);
  completions();
  post(8, 2);
  send();
  EXPECT_EQ(requester->next_deadline() - now, milliseconds(15)) << "nothing is known of the round trip";
}

TEST_F(Requester, TheTimeOutDoublesThreeTimesAndAnAckPutsItBack) {
  post(8, 1), post(8, 2);
  send();
  for (const int wait_ms : {60, 120, 240, 480, 480, 480}) {
    const Time sent = now;
    // The tail's probe comes in between.
    requester->tick(requester->next_deadline());
    send();
    now = sent + milliseconds(wait_ms) - std::chrono::nanoseconds(1);
    const uint64_t before = requester->counters().timeouts;
    requester->tick(now);
    EXPECT_EQ(requester->counters().timeouts, before) << wait_ms;
    now += std::chrono::nanoseconds(1);
    requester->tick(now);
    EXPECT_EQ(requester->counters().timeouts, before + 1) << wait_ms;
    EXPECT_EQ(send(), "fffffe! ffffff!");
  }
  ack(0xFFFFFE);
  const Time heard = now;
  requester->tick(requester->next_deadline());  // the probe
  send();
  EXPECT_EQ(requester->next_deadline(), heard + milliseconds(60));
}

// An RNR NAK is a sign of life: nothing is timed until its wait is over, then everything anew.
TEST_F(Requester, WhileItWaitsForAnRnrTimerNoOtherRuns) {
  post(8, 1);
  send();
  now = milliseconds(3);
  ack(0xFFFFFE, kRnrNak | 0);  // 655.36 ms, IBA table 45
  EXPECT_EQ(requester->counters().rnr_naks, 1u);
  EXPECT_EQ(requester->next_deadline(), milliseconds(3) + microseconds(655'360));
  EXPECT_EQ(requester->waiting_since(), milliseconds(3));
  now = milliseconds(600);
  requester->tick(now);
  EXPECT_EQ(requester->counters().timeouts, 0u);
  EXPECT_EQ(send(), "");
  now = milliseconds(3) + microseconds(655'360);
  requester->tick(now);
  EXPECT_EQ(send(), "fffffe!");
  EXPECT_EQ(requester->counters().timeouts, 0u);
  const Time again = now;
  requester->tick(requester->next_deadline());  // the probe
  send();
  EXPECT_EQ(requester->next_deadline(), again + milliseconds(60));
}

// An old ACK once more acknowledges nothing and puts no timer back; it is a sign of life all the same.
TEST_F(Requester, ARepeatedAckMovesNoTimer) {
  post(8, 1);
  send();
  ack(0xFFFFFE);
  completions();
  EXPECT_EQ(requester->next_deadline(), kNever);
  now = milliseconds(100);
  post(8, 2);
  send();
  now = milliseconds(110);
  ack(0xFFFFFE);
  EXPECT_EQ(requester->counters().stale_acks, 0u);
  EXPECT_EQ(requester->counters().acks, 2u);
  EXPECT_EQ(requester->waiting_since(), milliseconds(110));
  EXPECT_TRUE(requester->outstanding());
  while (requester->next_deadline() < milliseconds(160)) {
    now = requester->next_deadline();
    requester->tick(now);
    send();
  }
  EXPECT_EQ(requester->next_deadline(), milliseconds(160));
}

TEST_F(Requester, WhatItsPeerHasShownToHaveIsAcknowledged) {
  for (uint64_t id = 1; id <= 4; id++) post(8, id);
  EXPECT_EQ(send(3), "fffffe! ffffff! 0!");
  EXPECT_FALSE(requester->acknowledge_through(4, now)) << "not sent yet";
  EXPECT_EQ(completions(), "");
  now = milliseconds(7);
  EXPECT_TRUE(requester->acknowledge_through(2, now));
  EXPECT_EQ(completions(), "1 2 ");
  EXPECT_EQ(requester->waiting_since(), now);
  EXPECT_TRUE(requester->acknowledge_through(2, now)) << "nothing of it is outstanding";
  EXPECT_EQ(completions(), "");
  EXPECT_EQ(send(), "1!");
  ack(1);
  EXPECT_EQ(completions(), "3 4 ");
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
  const Sent owned = wrap(std::move(last));  // parses, and its ICRC is right
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
