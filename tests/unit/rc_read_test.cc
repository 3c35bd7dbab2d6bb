// RDMA READ, requester and responder alone and then one against the other over a wire that loses, repeats and
// reorders. PSNs are worked out by hand from IBA vol. 1, 9.7.3 and 9.7.5.1; sequences start near the wrap.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "tests/unit/rc_rig.h"

namespace millrace::roce {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint64_t kBase = 0x10000;

// "RD fffffe +0 600 | WO 1": what a list of packets is, in short.
std::string text_of(const Packet& p) {
  char text[64];
  const auto psn = p.psn().value();
  switch (p.opcode()) {
    case Opcode::kReadRequest:
      std::snprintf(text, sizeof(text), "RD %x +%llu %u", psn,
                    static_cast<unsigned long long>(p.reth->address.value() - kBase), p.reth->length.value());
      break;
    case Opcode::kReadResponseFirst:
    case Opcode::kReadResponseMiddle:
    case Opcode::kReadResponseLast:
    case Opcode::kReadResponseOnly:
      std::snprintf(text, sizeof(text), "%c %x %zu",
                    p.op->only    ? 'O'
                    : p.op->first ? 'F'
                    : p.op->last  ? 'L'
                                  : 'M',
                    psn, p.payload.size());
      break;
    case Opcode::kAcknowledge:
      std::snprintf(text, sizeof(text), "A%x %x", p.aeth->syndrome, psn);
      break;
    default:
      std::snprintf(text, sizeof(text), "%c %x", p.op->write ? 'W' : 'S', psn);
  }
  return text;
}
std::string text_of(FrameList& list) {
  std::string s;
  while (!list.empty()) s += (s.empty() ? "" : " | ") + text_of(wrap(list.pop()).packet);
  return s;
}

class Read : public testing::Test, public Peer {
 protected:
  Read() {
    for (size_t i = 0; i < memory.size(); i++) memory[i] = static_cast<uint8_t>(i * 7 + i / 256);
  }
  Sent packet(Opcode op, uint32_t psn, std::span<const uint8_t> payload = {}, uint64_t address = 0,
              uint32_t length = 0, bool ask = false) {
    return Peer::packet(op, psn, payload, ask, kBase + address, length, 9);
  }
  std::span<const uint8_t> lent(uint64_t at, size_t n) const { return std::span(memory).subspan(at, n); }

  std::vector<uint8_t> memory = std::vector<uint8_t>(16384);
};

// --- requester ---------------------------------------------------------------------------------------

class ReadRequester : public Read {
 protected:
  ReadRequester() {
    config.first_psn = Psn(0xFFFFFE);
    config.mtu = kMtu;
    config.requests_max = 16;
    config.retransmit_timeout = milliseconds(60);
    config.reads_max = 4;
    requester = std::make_unique<RcRequester>(config);
  }
  void read(size_t bytes, uint64_t id) {
    WorkRequest r;
    r.kind = WorkRequest::Kind::kRead;
    r.id = id;
    r.remote_address = kBase;
    r.rkey = 9;
    auto& to = into[id];
    to.assign(bytes, 0xEE);
    r.into = to;
    ASSERT_TRUE(requester->post(std::move(r)));
  }
  void write(size_t bytes, uint64_t id) {
    WorkRequest r;
    r.kind = WorkRequest::Kind::kWrite;
    r.id = id;
    r.parts[0] = {memory.data(), bytes};
    ASSERT_TRUE(requester->post(std::move(r)));
  }
  std::string send(uint32_t budget = 100) {
    FrameList out;
    requester->transmit(wire, pool, combine, budget, now, out);
    return text_of(out);
  }
  void response(Opcode op, uint32_t psn, std::span<const uint8_t> payload) {
    requester->read_response(packet(op, psn, payload).packet, now);
  }
  std::string completions() {
    std::string s;
    for (uint64_t id; requester->next_completion(id);) s += std::to_string(id) + " ";
    return s;
  }
  void ack(uint32_t psn, uint8_t syndrome = kAckUnlimited) {
    requester->acknowledge(Psn(psn), syndrome, now);
  }

  RequesterConfig config;
  std::unique_ptr<RcRequester> requester;
  std::map<uint64_t, std::vector<uint8_t>> into;
};

TEST_F(ReadRequester, TakesAsManyPsnsAsItsResponseHasPackets) {
  write(8, 1), read(2 * kMtu + 88, 2), write(8, 3), read(0, 4), write(8, 5);
  EXPECT_EQ(send(), "W fffffe | RD ffffff +0 600 | W 2 | RD 3 +0 0 | W 4");
  response(Opcode::kReadResponseFirst, 0xFFFFFF, lent(0, kMtu));
  EXPECT_EQ(completions(), "1 ");  // what came before the READ has arrived
  response(Opcode::kReadResponseMiddle, 0, lent(kMtu, kMtu));
  response(Opcode::kReadResponseLast, 1, lent(2 * kMtu, 88));
  EXPECT_EQ(completions(), "2 ");
  EXPECT_TRUE(std::equal(into[2].begin(), into[2].end(), memory.begin()));
  response(Opcode::kReadResponseOnly, 3, {});
  EXPECT_EQ(completions(), "3 4 ");
  ack(4);
  EXPECT_EQ(completions(), "5 ");
  EXPECT_TRUE(requester->idle());
  EXPECT_EQ(requester->next_deadline(), kNever);
}

TEST_F(ReadRequester, KeepsToTheDepthThatThePeerGrants) {
  for (uint64_t id = 1; id <= 6; id++) read(8, id);
  write(8, 7);
  EXPECT_EQ(send(), "RD fffffe +0 8 | RD ffffff +0 8 | RD 0 +0 8 | RD 1 +0 8");
  EXPECT_FALSE(requester->wants_to_send());
  response(Opcode::kReadResponseOnly, 0xFFFFFE, lent(0, 8));
  EXPECT_EQ(send(), "RD 2 +0 8");
  response(Opcode::kReadResponseOnly, 0xFFFFFF, lent(0, 8));
  EXPECT_EQ(send(), "RD 3 +0 8 | W 4");
  for (const uint32_t psn : {0u, 1u, 2u, 3u}) response(Opcode::kReadResponseOnly, psn, lent(0, 8));
  ack(4);
  EXPECT_EQ(completions(), "1 2 3 4 5 6 7 ");
}

// Also after going back: the READs that are asked for again count once.
TEST_F(ReadRequester, GoingBackDoesNotUseTheDepthUp) {
  for (uint64_t id = 1; id <= 5; id++) read(8, id);
  send();
  for (int round = 0; round < 3; round++) {
    now = requester->next_deadline();
    requester->tick(now);  // a tail probe, then the timer
    send();
    now += milliseconds(500);
    requester->tick(now);
    EXPECT_EQ(send(), "RD fffffe +0 8 | RD ffffff +0 8 | RD 0 +0 8 | RD 1 +0 8");
  }
  for (const uint32_t psn : {0xFFFFFEu, 0xFFFFFFu, 0u, 1u})
    response(Opcode::kReadResponseOnly, psn, lent(0, 8));
  EXPECT_EQ(send(), "RD 2 +0 8");
}

TEST_F(ReadRequester, AGapIsAskedForFromTheFirstByteMissingOnce) {
  read(4 * kMtu + 1, 1), write(8, 2), read(kMtu, 3);
  EXPECT_EQ(send(), "RD fffffe +0 1025 | W 3 | RD 4 +0 256");
  response(Opcode::kReadResponseFirst, 0xFFFFFE, lent(0, kMtu));
  response(Opcode::kReadResponseMiddle, 0, lent(2 * kMtu, kMtu));  // ffffff is missing
  EXPECT_EQ(send(), "RD ffffff +256 769 | W 3 | RD 4 +0 256");
  response(Opcode::kReadResponseMiddle, 1, lent(3 * kMtu, kMtu));
  response(Opcode::kReadResponseLast, 2, lent(4 * kMtu, 1));
  ack(3);
  response(Opcode::kReadResponseOnly, 4, lent(0, kMtu));
  EXPECT_EQ(send(), "");
  EXPECT_EQ(completions(), "");
  EXPECT_EQ(into[1][kMtu], 0xEE);
  // The answer to the second request begins anew with FIRST, in the middle of the READ.
  response(Opcode::kReadResponseFirst, 0xFFFFFF, lent(kMtu, kMtu));
  response(Opcode::kReadResponseMiddle, 0, lent(2 * kMtu, kMtu));
  response(Opcode::kReadResponseMiddle, 1, lent(3 * kMtu, kMtu));
  response(Opcode::kReadResponseLast, 2, lent(4 * kMtu, 1));
  EXPECT_EQ(completions(), "1 ");
  EXPECT_TRUE(std::equal(into[1].begin(), into[1].end(), memory.begin()));
  response(Opcode::kReadResponseOnly, 4, lent(0, kMtu));
  EXPECT_EQ(completions(), "2 3 ");
  EXPECT_EQ(requester->counters().reads_again, 1u);
  EXPECT_FALSE(requester->failed());
}

// A coalesced ACK completes writes and never a READ; that it comes at all means that the answer was lost.
TEST_F(ReadRequester, AnAckBehindItDoesNotCompleteIt) {
  write(8, 1), read(kMtu + 1, 2), write(8, 3);
  EXPECT_EQ(send(), "W fffffe | RD ffffff +0 257 | W 1");
  ack(1);
  EXPECT_EQ(completions(), "1 ");
  EXPECT_EQ(send(), "RD ffffff +0 257 | W 1");
  ack(1);
  EXPECT_EQ(send(), "");
  response(Opcode::kReadResponseFirst, 0xFFFFFF, lent(0, kMtu));
  ack(1);  // its second half is missing
  EXPECT_EQ(send(), "RD 0 +256 1 | W 1");
  response(Opcode::kReadResponseOnly, 0, lent(kMtu, 1));
  ack(1);
  EXPECT_EQ(completions(), "2 3 ");
  EXPECT_TRUE(std::equal(into[2].begin(), into[2].end(), memory.begin()));
}

TEST_F(ReadRequester, ANakBehindItAsksForItFirst) {
  read(kMtu, 1), write(8, 2), write(8, 3);
  EXPECT_EQ(send(), "RD fffffe +0 256 | W ffffff | W 0");
  ack(0, kNakSequence);
  EXPECT_EQ(completions(), "");
  EXPECT_EQ(send(), "RD fffffe +0 256 | W ffffff | W 0");
}

TEST_F(ReadRequester, ANakOfItsOwnPsnSendsItAgain) {
  write(8, 1), read(kMtu, 2);
  send();
  ack(0xFFFFFF, kNakSequence);
  EXPECT_EQ(completions(), "1 ");
  EXPECT_EQ(send(), "RD ffffff +0 256");
}

TEST_F(ReadRequester, ARefusalEndsIt) {
  read(kMtu, 1);
  send();
  ack(0xFFFFFE, kNakRemoteAccess);
  EXPECT_TRUE(requester->failed());
  EXPECT_EQ(requester->fail_syndrome(), kNakRemoteAccess);
  EXPECT_EQ(completions(), "");
}

TEST_F(ReadRequester, WhatIsStaleOrUnaskedChangesNothing) {
  read(2 * kMtu, 1);
  response(Opcode::kReadResponseFirst, 0xFFFFFE, lent(0, kMtu));  // not asked yet
  send();
  response(Opcode::kReadResponseFirst, 0xFFFFFE, lent(0, kMtu));
  response(Opcode::kReadResponseFirst, 0xFFFFFE, lent(kMtu, kMtu));  // again, and not even the same
  response(Opcode::kReadResponseLast, 0, lent(kMtu, kMtu));          // behind its end
  EXPECT_EQ(completions(), "");
  response(Opcode::kReadResponseLast, 0xFFFFFF, lent(kMtu, kMtu));
  EXPECT_EQ(completions(), "1 ");
  EXPECT_TRUE(std::equal(into[1].begin(), into[1].end(), memory.begin()));
  EXPECT_EQ(requester->counters().stale_acks, 3u);
}

TEST_F(ReadRequester, AResponseThatIsNotWhatWasAskedForEndsIt) {
  const struct {
    Opcode op;
    uint32_t psn;
    size_t bytes;
  } bad[] = {{Opcode::kReadResponseFirst, 0xFFFFFF, kMtu - 4},
             {Opcode::kReadResponseOnly, 0xFFFFFF, kMtu},
             {Opcode::kReadResponseLast, 0xFFFFFF, 10},
             {Opcode::kReadResponseMiddle, 0xFFFFFF, 0},
             {Opcode::kReadResponseOnly, 0xFFFFFE, 8}};
  for (const auto& b : bad) {
    requester = std::make_unique<RcRequester>(config);
    write(8, 1), read(kMtu + 10, 2);
    send();
    response(b.op, b.psn, lent(0, b.bytes));
    EXPECT_TRUE(requester->failed()) << opcode_name(static_cast<uint8_t>(b.op)) << b.bytes;
    EXPECT_EQ(requester->fail_syndrome(), kBadReadResponse);
    EXPECT_TRUE(std::all_of(into[2].begin(), into[2].end(), [](uint8_t x) { return x == 0xEE; }));
  }
}

// Of a peer that acknowledges for ever and never answers, the time of its last sign of life stands still.
TEST_F(ReadRequester, AcknowledgementsWithoutAnAnswerAreNoSignOfLife) {
  read(8, 1), write(8, 2);
  send();
  for (int i = 1; i <= 20; i++) {
    now = i * milliseconds(300);
    ack(0xFFFFFF);
    requester->tick(now);
    send();
  }
  EXPECT_EQ(requester->waiting_since(), Time{});
}

// --- responder ---------------------------------------------------------------------------------------

class ReadResponder : public Read {
 protected:
  uint32_t respond(FramePool& from, uint32_t budget, FrameList& out) {
    return responder.respond(wire, from, budget, pace, now, out);
  }
  Arrival ask(uint32_t psn, uint64_t at, uint32_t bytes) {
    const Sent s = packet(Opcode::kReadRequest, psn, {}, at, bytes);
    const Arrival a = responder.arrive(s.packet);
    if (a == Arrival::kNew || a == Arrival::kReadAgain) {
      EXPECT_EQ(responder.place(s.packet).address, kBase + at);
      EXPECT_EQ(responder.place(s.packet).rkey, 9u);
    }
    if (a == Arrival::kNew) responder.accept_read(s.packet, lent(at, bytes));
    if (a == Arrival::kReadAgain) responder.read_again(s.packet, lent(at, bytes));
    return a;
  }
  Arrival write(uint32_t psn, bool asks = true) {
    const Sent s = packet(Opcode::kWriteOnly, psn, lent(0, 8), 0, 8, asks);
    const Arrival a = responder.arrive(s.packet);
    if (a == Arrival::kNew) responder.accept(s.packet);
    return a;
  }
  std::string respond(uint32_t budget = 100) {
    FrameList out;
    respond(pool, budget, out);
    return text_of(out);
  }
  RcResponder responder{Psn(0xFFFFFE), kMtu, 3};
  Pace pace{DcqcnConfig{}};
};

TEST_F(ReadResponder, AnswersFromMemoryUnderABudget) {
  EXPECT_EQ(ask(0xFFFFFE, 100, 2 * kMtu + 1), Arrival::kNew);
  EXPECT_EQ(responder.expected().value(), 1u);
  EXPECT_EQ(ask(1, 0, 0), Arrival::kNew);
  FrameList out;
  EXPECT_EQ(respond(pool, 2, out), 2u);
  const Sent first = wrap(out.pop());
  EXPECT_EQ(text_of(first.packet), "F fffffe 256");
  EXPECT_EQ(first.packet.aeth->syndrome, kAckUnlimited);
  EXPECT_EQ(first.packet.aeth->msn.value(), 1u);
  EXPECT_EQ(first.packet.dest_qp().value, 5u);
  EXPECT_TRUE(std::equal(first.packet.payload.begin(), first.packet.payload.end(), memory.begin() + 100));
  EXPECT_EQ(text_of(out), "M ffffff 256");
  EXPECT_EQ(respond(), "L 0 1 | O 1 0");
  EXPECT_FALSE(responder.responding());
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(responder.messages(), 2u);
  EXPECT_EQ(responder.responses_sent(), 4u);
}

// Halved by the first CNP: 1 bit each ns.
TEST_F(ReadResponder, ItsAnswersKeepToThePace) {
  pace = Pace({.line_rate = 2'000'000'000});
  ask(0xFFFFFE, 0, 3 * kMtu);
  pace.notified(now);
  FrameList out;
  EXPECT_EQ(respond(pool, 8, out), 1u);
  const Time next = now + std::chrono::nanoseconds(8 * out.pop().total_length());
  EXPECT_EQ(pace.held_until(), next);
  EXPECT_EQ(respond(pool, 8, out), 0u);
  now = next;
  pace.release(now);
  EXPECT_EQ(respond(pool, 8, out), 1u);
  EXPECT_EQ(text_of(out), "M ffffff 256");
}

TEST_F(ReadResponder, AnAcknowledgementWaitsForTheAnswersBeforeIt) {
  ask(0xFFFFFE, 0, kMtu + 1);
  EXPECT_EQ(write(0), Arrival::kNew);
  EXPECT_FALSE(responder.acknowledgement_owed());
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(respond(1), "F fffffe 256");
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(respond(1), "L ffffff 1");
  const auto a = responder.take_acknowledgement();
  ASSERT_TRUE(a);
  EXPECT_EQ(a->psn.value(), 0u);
  EXPECT_EQ(a->msn, 2u);
}

// So does a NAK, which acknowledges as much.
TEST_F(ReadResponder, ANakWaitsForTheAnswersBeforeIt) {
  ask(0xFFFFFE, 0, 8);
  EXPECT_EQ(write(5), Arrival::kGap);
  EXPECT_FALSE(responder.take_acknowledgement());
  EXPECT_EQ(respond(), "O fffffe 8");
  EXPECT_EQ(responder.take_acknowledgement()->syndrome, kNakSequence);
}

TEST_F(ReadResponder, ARepeatIsAnsweredAgainAlsoInPart) {
  ask(0xFFFFFE, 0, 3 * kMtu);
  EXPECT_EQ(respond(), "F fffffe 256 | M ffffff 256 | L 0 256");
  EXPECT_EQ(ask(0xFFFFFF, kMtu, 2 * kMtu), Arrival::kReadAgain);
  EXPECT_EQ(respond(), "F ffffff 256 | L 0 256");
  memory[2 * kMtu] = 0x77;  // as it is now
  ask(0, 2 * kMtu, kMtu);
  FrameList out;
  respond(pool, 8, out);
  const Sent only = wrap(out.pop());
  EXPECT_EQ(text_of(only.packet), "O 0 256");
  EXPECT_EQ(only.packet.payload[0], 0x77);
  EXPECT_EQ(responder.messages(), 1u);
  EXPECT_EQ(responder.expected().value(), 1u);
}

// What is still to come is not sent twice, what was sent is, and all of it in order.
TEST_F(ReadResponder, ARepeatOfWhatIsUnderWay) {
  ask(0xFFFFFE, 0, 4 * kMtu), ask(2, 0, 8);
  EXPECT_EQ(respond(2), "F fffffe 256 | M ffffff 256");
  EXPECT_EQ(ask(0, 2 * kMtu, 2 * kMtu), Arrival::kReadAgain);  // not sent yet
  ask(2, 0, 8);
  EXPECT_EQ(respond(1), "M 0 256");
  ask(0xFFFFFF, kMtu, 3 * kMtu);
  EXPECT_EQ(respond(), "F ffffff 256 | M 0 256 | L 1 256 | O 2 8");
  ask(2, 0, 8), ask(0xFFFFFE, 0, 4 * kMtu);
  EXPECT_EQ(respond(), "F fffffe 256 | M ffffff 256 | M 0 256 | L 1 256 | O 2 8");
}

TEST_F(ReadResponder, WhatIsNoRepeatIsNotAnswered) {
  ask(0xFFFFFE, 0, 2 * kMtu);
  respond();
  EXPECT_EQ(ask(0xFFFFFF, 0, 2 * kMtu), Arrival::kGapQuiet);  // more than was accepted
  EXPECT_EQ(ask(0xFFFFFF, 0, 1u << 31), Arrival::kGapQuiet);
  EXPECT_EQ(respond(), "");
  EXPECT_FALSE(responder.over());
}

TEST_F(ReadResponder, OneMoreThanAgreedIsRefused) {
  for (uint32_t i = 0; i < 3; i++) EXPECT_EQ(ask(0xFFFFFE + i, 0, 8), Arrival::kNew);
  EXPECT_EQ(ask(1, 0, 8), Arrival::kInvalid);
  EXPECT_TRUE(responder.over());
  EXPECT_EQ(respond(), "O fffffe 8 | O ffffff 8 | O 0 8");  // those before it still count
  EXPECT_EQ(responder.take_acknowledgement()->syndrome, kNakInvalidRequest);
}

// The peer may have asked again for what was only late, and then have got it: new ones are within the limit.
TEST_F(ReadResponder, RepeatsUnderWayDoNotCountAgainstTheLimit) {
  for (uint32_t i = 0; i < 3; i++) ask(0xFFFFFE + i, 0, 8);
  respond();
  for (uint32_t i = 0; i < 3; i++) EXPECT_EQ(ask(0xFFFFFE + i, 0, 8), Arrival::kReadAgain);
  EXPECT_EQ(ask(1, 0, 8), Arrival::kNew);
  EXPECT_EQ(ask(2, 0, 8), Arrival::kNew);
  EXPECT_EQ(ask(3, 0, 8), Arrival::kNew);
  EXPECT_EQ(ask(4, 0, 8), Arrival::kInvalid);
  EXPECT_EQ(respond(), "O 1 8 | O 2 8 | O 3 8");
}

// One that has never been answered whole counts, however often it was begun.
TEST_F(ReadResponder, OneBegunAgainStillCountsAgainstTheLimit) {
  ask(0xFFFFFE, 0, 2 * kMtu), ask(0, 0, 8), ask(1, 0, 8);
  EXPECT_EQ(respond(1), "F fffffe 256");
  EXPECT_EQ(ask(0xFFFFFE, 0, 2 * kMtu), Arrival::kReadAgain);
  EXPECT_EQ(ask(2, 0, 8), Arrival::kInvalid);
}

TEST_F(ReadResponder, BreachesAreRefused) {
  const uint8_t one[1] = {1};
  const Sent bad[] = {packet(Opcode::kReadRequest, 9, one, 0, 8),
                      packet(Opcode::kReadRequest, 9, {}, 0, (1u << 31) + 1),
                      packet(Opcode::kReadRequest, 9, {}, UINT64_MAX - kBase - 7, 16)};
  for (const Sent& s : bad) {
    RcResponder r(Psn(9), kMtu, 4);
    EXPECT_EQ(r.arrive(s.packet), Arrival::kInvalid);
    EXPECT_EQ(r.take_acknowledgement()->syndrome, kNakInvalidRequest);
  }
  RcResponder none(Psn(9), kMtu);
  EXPECT_EQ(none.arrive(packet(Opcode::kReadRequest, 9, {}, 0, 8).packet), Arrival::kInvalid);
  // In the middle of a message.
  RcResponder r(Psn(9), kMtu, 4);
  const Sent first = packet(Opcode::kWriteFirst, 9, lent(0, kMtu), 0, kMtu + 1);
  ASSERT_EQ(r.arrive(first.packet), Arrival::kNew);
  r.accept(first.packet);
  EXPECT_EQ(r.arrive(packet(Opcode::kReadRequest, 10, {}, 0, 8).packet), Arrival::kInvalid);
}

TEST_F(ReadResponder, WithoutFramesItGoesOnLater) {
  ask(0xFFFFFE, 0, 3 * kMtu);
  HeapFramePool tiny(4608, 2);
  FrameList out;
  EXPECT_EQ(respond(tiny, 8, out), 2u);
  EXPECT_EQ(text_of(out), "F fffffe 256 | M ffffff 256");
  EXPECT_EQ(respond(tiny, 8, out), 1u);
  EXPECT_EQ(text_of(out), "L 0 256");
}

// --- both --------------------------------------------------------------------------------------------

// Two queue pairs and a wire that loses, repeats and delays packets at random. The requester writes to places
// and reads them back; a READ behind a WRITE of the same place brings what was written, whatever was lost.
class Conversation : public testing::TestWithParam<uint32_t> {
 protected:
  struct InFlight {
    Time at;
    Frame frame;
  };
  static QueuePairConfig side(const char* from, const char* to, uint32_t local, uint32_t remote) {
    QueuePairConfig c;
    c.local = Qpn{local};
    c.wire.path.src_ip = *IpAddress::parse(from);
    c.wire.path.dst_ip = *IpAddress::parse(to);
    c.wire.remote_qpn = Qpn{remote};
    c.expected_psn = Psn(0xFFFFF0);
    c.requester.first_psn = Psn(0xFFFFF0);
    c.requester.mtu = kMtu;
    c.requester.requests_max = 32;
    c.requester.reads_max = 4;
    c.requester.retransmit_timeout = milliseconds(4);
    c.reads_max = 4;
    return c;
  }
  uint32_t dice(uint32_t n) { return static_cast<uint32_t>(random() % n); }
  void send(QueuePair& from, std::deque<InFlight>& to) {
    FrameList out;
    from.emit(pool, combine, 1 + dice(6), now, out);
    while (!out.empty()) {
      Frame f = out.pop();
      if (dice(100) < loss) continue;
      const Time delay = microseconds(10 + (dice(100) < reorder ? dice(40) : 0));
      if (dice(100) < repeat) {
        Frame copy = Frame::allocate(pool);
        copy.buffer()->length = f.total_length();
        f.copy_to(copy.buffer()->data());
        to.push_back({now + delay + microseconds(dice(30)), std::move(copy)});
      }
      to.push_back({now + delay, std::move(f)});
    }
  }
  void take(QueuePair& qp, std::deque<InFlight>& from, bool lender) {
    for (size_t i = 0; i < from.size();) {
      if (from[i].at > now) {
        i++;
        continue;
      }
      const Sent s = wrap(std::move(from[i].frame));
      from.erase(from.begin() + static_cast<ptrdiff_t>(i));
      const Reception r = qp.receive(s.packet, now);
      if (!lender) continue;
      const Packet& p = s.packet;
      if (r == Reception::kNewRequest && p.op->write) {
        const WritePlace place = qp.responder().place(p);
        std::copy(p.payload.begin(), p.payload.end(), memory.begin() + static_cast<ptrdiff_t>(place.address));
        qp.responder().accept(p);
      } else if (r == Reception::kNewRequest || r == Reception::kReadAgain) {
        const auto lent =
            std::span<const uint8_t>(memory).subspan(p.reth->address.value(), p.reth->length.value());
        r == Reception::kNewRequest ? qp.responder().accept_read(p, lent)
                                    : qp.responder().read_again(p, lent);
      }
    }
  }

  uint32_t loss = 0, repeat = 0, reorder = 0;
  std::mt19937 random{GetParam()};
  HeapFramePool pool;
  Crc32Combine combine;
  Time now{};
  std::vector<uint8_t> memory = std::vector<uint8_t>(64 * 2048);
};

TEST_P(Conversation, WhatIsReadIsWhatWasWritten) {
  loss = dice(8), repeat = dice(8), reorder = GetParam() % 3 == 0 ? dice(20) : 0;
  QueuePair requester(side("10.0.0.1", "10.0.0.2", 5, 77), now);
  QueuePair lender(side("10.0.0.2", "10.0.0.1", 77, 5), now);
  std::deque<InFlight> to_lender, to_requester;
  constexpr uint64_t kOperations = 400;
  std::map<uint64_t, std::vector<uint8_t>> written, into;
  std::map<uint64_t, uint64_t> write_of;  // READ → WRITE
  uint64_t posted = 0, completed = 0, last_write = 0;
  while (completed < kOperations) {
    ASSERT_LT(now, std::chrono::seconds(60)) << "no end in sight";
    while (posted < kOperations && requester.requester().room() > 1) {
      WorkRequest r;
      r.id = posted;
      r.rkey = 9;
      if (posted % 2 == 0) {
        auto& data = written[posted];
        data.resize(1 + dice(5 * kMtu));
        for (uint8_t& x : data) x = static_cast<uint8_t>(random());
        r.kind = WorkRequest::Kind::kWrite;
        r.ack_request = dice(4) != 0;
        r.remote_address = posted % 64 * 2048;
        r.parts[0] = data;
        last_write = posted;
      } else {
        auto& data = into[posted];
        data.resize(written[last_write].size());
        write_of[posted] = last_write;
        r.kind = WorkRequest::Kind::kRead;
        r.remote_address = last_write % 64 * 2048;
        r.into = data;
      }
      ASSERT_TRUE(requester.requester().post(std::move(r)));
      posted++;
    }
    send(requester, to_lender);
    take(lender, to_lender, true);
    send(lender, to_requester);
    take(requester, to_requester, false);
    for (uint64_t id; requester.requester().next_completion(id);) {
      ASSERT_EQ(id, completed);
      completed++;
      if (id % 2 == 1) {
        ASSERT_EQ(into[id], written[write_of[id]]) << id;
      }
    }
    ASSERT_FALSE(requester.over() || lender.over());
    now += microseconds(5);
    if (now >= requester.next_deadline()) requester.tick(now);
    if (now >= lender.next_deadline()) lender.tick(now);
  }
  EXPECT_GT(requester.requester().counters().read_responses, 0u);
}
INSTANTIATE_TEST_SUITE_P(Seeds, Conversation, testing::Range(1u, 41u));

}  // namespace
}  // namespace millrace::roce
