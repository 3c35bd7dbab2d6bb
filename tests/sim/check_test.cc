// The checkers notice: each is shown a doctored stream of events and must complain, and the same stream
// undoctored, and must not.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "roce/build.h"
#include "tools/sim/check/books_check.h"
#include "tools/sim/check/memory_check.h"
#include "tools/sim/check/outcome_check.h"
#include "tools/sim/check/passage_check.h"
#include "tools/sim/check/sum_check.h"
#include "tools/sim/check/wire_check.h"
#include "tools/sim/cluster.h"
#include "tools/sim/nic_wire.h"
#include "tools/sim/wire_marks.h"

namespace millrace::sim {
namespace {

using namespace check;
using Bytes = std::vector<uint8_t>;

// A conversation that really took place, as recorded from the wires of two hosts.
struct Event {
  int64_t at;
  bool arrives, from_switch;
  Bytes bytes;
};

class Recorder final : public Observer {
 public:
  std::vector<Event> events;
  void sent(Time at, uint32_t node, uint32_t, std::span<const uint8_t> f, Fate) override {
    events.push_back({at.count(), false, node == 0, {f.begin(), f.end()}});
  }
  void arrived(Time at, uint32_t node, uint32_t, std::span<const uint8_t> f) override {
    events.push_back({at.count(), true, node != 0, {f.begin(), f.end()}});
  }
};

constexpr size_t kBth = 42;  // of an IPv4 frame

// A link that the switch was told is down, before an event and for a moment.
struct Cut {
  size_t before = SIZE_MAX;
  Address from{}, to{};
};

class WireStream : public testing::Test {
 protected:
  static inline aggregation::Collective collective;
  void SetUp() override { collective = aggregation::Collective::kAllReduce; }
  static std::vector<Event> record() {
    ClusterConfig cc;
    cc.engine.mtu = 1024;
    cc.engine.segment_bytes = 2 * 1024 - 64;
    cc.engine.window = 2;
    Cluster c(cc);
    Recorder recorder;
    c.fabric().network().add_observer(recorder);
    host::Communicator* comms[2];
    for (uint16_t r = 0; r < 2; r++) {
      auto config = c.communicator(r, 2);
      config.stripes = 2;
      comms[r] = &c.host(r).join(config);
    }
    std::vector<float> data[2] = {std::vector<float>(6000, 1), std::vector<float>(6000, 2)};
    host::Operation op[2];
    for (uint16_t r = 0; r < 2; r++) {
      using enum aggregation::Collective;
      const bool reduces = collective == kAllReduce || collective == kReduce || collective == kReduceScatter;
      op[r].collective = collective;
      op[r].op = reduces ? aggregation::ReduceOp::kSum : aggregation::ReduceOp::kNone;
      op[r].type = collective == kBarrier ? aggregation::DataType::kU8 : aggregation::DataType::kF32;
      auto* base = reinterpret_cast<uint8_t*>(data[r].data());
      op[r].send = base + (collective == kAllGather ? r * 12000 : 0);
      op[r].recv = base + (collective == kReduceScatter ? r * 12000 : 0);
      op[r].bytes = collective == kBarrier ? 0 : 24000;
      comms[r]->submit(&op[r], c.now());
    }
    EXPECT_TRUE(c.run([&] { return op[0].done && op[1].done; }));
    c.fabric().at(0).act([](switching::Pipeline& p, Time now, FrameList& out) {
      p.abort_group(p.engine().groups(now)[0].id, "enough", now, out);
    });
    c.run_for(std::chrono::milliseconds(200));
    return std::move(recorder.events);
  }
  // What the checker says of the events.
  static std::string judge(const std::vector<Event>& events, const Cut& cut = {}) {
    Violations v;
    WireCheck w(v);
    for (size_t i = 0; i < events.size(); i++) {
      const Event& e = events[i];
      if (i == cut.before) {
        w.link_down(e.at, {cut.from}, {cut.to});
        w.link_up(e.at, {cut.from}, {cut.to});
      }
      e.arrives ? w.arrived(e.at, e.bytes) : w.sent(e.at, e.bytes, e.from_switch);
    }
    w.finish(events.back().at, false, false);
    std::string all;
    for (const std::string& t : v.texts()) all += t + "\n";
    return all;
  }
  static void seal(Bytes& b) {
    const uint32_t crc = compute_icrc(b, 14, b.size() - 4);
    for (size_t i = 0; i < 4; i++) b[b.size() - 4 + i] = static_cast<uint8_t>(crc >> 8 * i);
  }
  static bool is(const Event& e, bool from_switch, uint8_t opcode) {
    return !e.arrives && e.from_switch == from_switch && e.bytes.size() > kBth + 12 && e.bytes[12] == 8 &&
           e.bytes[13] == 0 && e.bytes[kBth] == opcode;
  }
  // Changes the n-th frame of an opcode that was sent, and seals it again.
  static std::vector<Event> doctored(bool from_switch, uint8_t opcode, int n,
                                     const std::function<void(Bytes&)>& what, bool sealed = true) {
    std::vector<Event> events = record();
    for (Event& e : events)
      if (is(e, from_switch, opcode) && n-- == 0) {
        what(e.bytes);
        if (sealed) seal(e.bytes);
        return events;
      }
    ADD_FAILURE() << "no such frame";
    return events;
  }
  // Changes every segment's header, as sent by one of the hosts or by both.
  static std::vector<Event> with_headers(const std::function<void(uint8_t*)>& what, bool both = true) {
    std::vector<Event> events = record();
    for (Event& e : events) {
      if (!is(e, false, 0x00) && !is(e, false, 0x04)) continue;
      if (!both && e.bytes[29] != 2) continue;
      what(e.bytes.data() + kBth + 12);
      seal(e.bytes);
    }
    return events;
  }
  static std::vector<Event> without(const std::function<bool(const Event&)>& which) {
    std::vector<Event> events = record();
    std::erase_if(events, which);
    return events;
  }
};

TEST_F(WireStream, AnHonestOneIsFine) { EXPECT_EQ(judge(record()), ""); }

TEST_F(WireStream, AnHonestOneOfAnyCollectiveIsFine) {
  for (int c = 1; c <= 6; c++) {
    collective = static_cast<aggregation::Collective>(c);
    EXPECT_EQ(judge(record()), "") << c;
  }
}
// Both members ask for the other root: what is sent goes to the wrong one.
TEST_F(WireStream, AResultToARankThatIsNotTheRootIsSeen) {
  collective = aggregation::Collective::kReduce;
  const std::string said = judge(with_headers([](uint8_t* h) { h[15] ^= 1; }));
  EXPECT_NE(said.find("of collective 2, is no packet of its own, or tells the segment's end where it is not"),
            std::string::npos)
      << said;
}
TEST_F(WireStream, AShardThatEndsElsewhereIsSeen) {
  collective = aggregation::Collective::kReduceScatter;
  const std::string said = judge(with_headers([](uint8_t* h) { h[31] ^= 8; }));
  EXPECT_NE(said.find("are this rank's"), std::string::npos) << said;
}
TEST_F(WireStream, AResultToAnotherAddressIsSeen) {
  for (const auto c : {aggregation::Collective::kAllReduce, aggregation::Collective::kReduceScatter,
                       aggregation::Collective::kAllGather, aggregation::Collective::kBroadcast}) {
    collective = c;
    const std::string said = judge(doctored(true, 0x0A, 2, [](Bytes& b) { b[kBth + 12 + 7] ^= 4; }));
    EXPECT_NE(said.find("another address"), std::string::npos) << said;
  }
}
TEST_F(WireStream, ABroadcastBeforeAReceiversHeaderIsSeen) {
  collective = aggregation::Collective::kBroadcast;
  const std::string said = judge(without([](const Event& e) {
    return e.arrives && !e.from_switch && e.bytes.size() > 100 && e.bytes[29] == 2 && e.bytes[kBth] == 4;
  }));
  EXPECT_NE(said.find("the header of rank 1 has not come"), std::string::npos) << said;
}
TEST_F(WireStream, ABroadcastBeforeTheRootsPartIsSeen) {
  collective = aggregation::Collective::kBroadcast;
  const std::string said = judge(without([](const Event& e) {
    return e.arrives && !e.from_switch && e.bytes.size() > 100 && e.bytes[29] == 1 && e.bytes[kBth] == 2;
  }));
  EXPECT_NE(said.find("the part of rank 0 has not come"), std::string::npos) << said;
}
TEST_F(WireStream, AResultOfMembersThatDisagreeIsSeen) {
  const std::string said = judge(with_headers([](uint8_t* h) { h[7] ^= 1; }, false));
  EXPECT_NE(said.find("disagrees with others"), std::string::npos) << said;
}
TEST_F(WireStream, AHeaderThatIsNotItsCollectivesIsSeen) {
  collective = aggregation::Collective::kAllGather;
  const std::string said = judge(with_headers([](uint8_t* h) { h[7] ^= 4; }, false));
  EXPECT_NE(said.find("what its collective asks"), std::string::npos) << said;
}

TEST_F(WireStream, AWrongIcrcIsSeen) {
  EXPECT_NE(judge(doctored(
                      true, 0x0A, 3, [](Bytes& b) { b[70] ^= 1; }, false))
                .find("a wrong ICRC"),
            std::string::npos);
}
TEST_F(WireStream, APsnThatJumpsIsSeen) {
  EXPECT_NE(judge(doctored(false, 0x02, 1, [](Bytes& b) { b[kBth + 11]++; })).find("is next"),
            std::string::npos);
}
// A result seems to be missing on the wire until the one behind it has been sent, and both come then:
// go-back-N where the switch was told that the link was down, and a violation else.
TEST_F(WireStream, AGapOfTheSwitchsIsExcusedByALinkThatIsDownAndOnlyThen) {
  std::vector<Event> events = record();
  int n = 2;
  const auto third = std::find_if(events.begin(), events.end(),
                                  [&](const Event& e) { return is(e, true, 0x0A) && n-- == 0; });
  ASSERT_NE(third, events.end());
  const Event missing = *third;
  const auto at = events.erase(third);
  WirePacket p;
  const char* why;
  ASSERT_EQ(read_packet(missing.bytes, true, p, why), WireKind::kRoce);
  const Cut cut{static_cast<size_t>(at - events.begin()), p.src, p.dst};
  // Of the same queue pair of the same host.
  const auto next = std::find_if(at, events.end(), [&](const Event& e) {
    return (is(e, true, 0x0A) || is(e, true, 0x0B)) &&
           std::equal(e.bytes.begin() + 30, e.bytes.begin() + 34, missing.bytes.begin() + 30) &&
           std::equal(e.bytes.begin() + kBth + 5, e.bytes.begin() + kBth + 8,
                      missing.bytes.begin() + kBth + 5);
  });
  ASSERT_NE(next, events.end());
  const Event again = *next;
  events.insert(next + 1, {missing, again});
  EXPECT_NE(judge(events).find("is next"), std::string::npos);
  EXPECT_EQ(judge(events, cut), "");
  // Another host's link is no excuse.
  Cut other = cut;
  other.to[15] ^= 3;
  EXPECT_NE(judge(events, other).find("is next"), std::string::npos);
}
TEST_F(WireStream, AResultRepeatedWithOtherBytesIsSeen) {
  std::vector<Event> events = record();
  for (size_t i = 0; i < events.size(); i++) {
    if (!is(events[i], true, 0x0A)) continue;
    Event again = events[i];
    again.bytes[kBth + 40] ^= 4;
    seal(again.bytes);
    events.insert(events.begin() + static_cast<ptrdiff_t>(i) + 1, again);
    break;
  }
  EXPECT_NE(judge(events).find("repeated with other bytes"), std::string::npos);
}
TEST_F(WireStream, AWrongMsnIsSeen) {
  EXPECT_NE(judge(doctored(true, 0x11, 2, [](Bytes& b) { b[kBth + 15]++; })).find("MSN"), std::string::npos);
}
TEST_F(WireStream, AnAcknowledgementOfWhatHasNotComeIsSeen) {
  EXPECT_NE(judge(doctored(false, 0x11, 1, [](Bytes& b) { b[kBth + 11] += 3; })).find("has not arrived"),
            std::string::npos);
}
TEST_F(WireStream, AWrongImmediateIsSeen) {
  EXPECT_NE(judge(doctored(true, 0x0B, 1, [](Bytes& b) { b[kBth + 12 + 16 + 3]++; })).find("immediate"),
            std::string::npos);
}
// One host's segments seem not to have come.
TEST_F(WireStream, AResultBeforeAMembersPartIsSeen) {
  const std::string said = judge(without([](const Event& e) {
    return e.arrives && !e.from_switch && e.bytes.size() > 100 && e.bytes[29] == 2 && e.bytes[kBth] <= 2;
  }));
  EXPECT_NE(said.find("has not come"), std::string::npos) << said;
}
// The results seem not to have reached a host, and yet it goes on.
TEST_F(WireStream, AMemberBeyondItsWindowIsSeen) {
  const std::string said = judge(without([](const Event& e) {
    return e.arrives && e.bytes.size() > kBth && e.bytes[12] == 8 && e.bytes[kBth] == 0x0B &&
           e.bytes[33] == 1;
  }));
  EXPECT_NE(said.find("a window of 2"), std::string::npos) << said;
}
TEST_F(WireStream, ATerminalMessageMissingOnOneStripeIsSeen) {
  bool done = false;
  const std::string said = judge(without([&](const Event& e) {
    const bool terminal = is(e, true, 0x04) && e.bytes[kBth + 12 + 3] == 0x81;
    return terminal && !std::exchange(done, true);
  }));
  EXPECT_NE(said.find("no terminal message"), std::string::npos) << said;
}

// A host's packet seems to have come with a mark: the switch, which saw none, has sent no CNP.
TEST_F(WireStream, AMarkThatDrawsNoCnpIsSeen) {
  std::vector<Event> events = record();
  const auto marked = std::find_if(events.begin(), events.end(), [](const Event& e) {
    return e.arrives && !e.from_switch && e.bytes.size() > 100 && e.bytes[kBth] == 0x02;
  });
  ASSERT_NE(marked, events.end());
  const auto at = marked - events.begin();
  const Event unmarked = *marked;
  ASSERT_TRUE(mark_congestion(marked->bytes));
  const std::string said = judge(events);
  EXPECT_NE(said.find("drew no CNP"), std::string::npos) << said;
  // It came twice, and without a mark the second time: that one may have been taken.
  std::vector<Event> twice = events;
  twice.insert(twice.begin() + at + 1, unmarked);
  EXPECT_EQ(judge(twice), "");
  // With the CNP that is due: to the queue pairs that the switch's SENDs to this host name.
  for (const Event& e : std::vector<Event>(events)) {
    if (!is(e, true, 0x04) || !std::equal(&e.bytes[30], &e.bytes[34], &unmarked.bytes[26])) continue;
    HeapFramePool pool;
    roce::Path path;
    path.src_ip = IpAddress::from_v4(&e.bytes[26]), path.dst_ip = IpAddress::from_v4(&e.bytes[30]);
    roce::TransportFields f;
    f.opcode = roce::Opcode::kCnp;
    f.dest_qp = Qpn{be24(&e.bytes[kBth + 5])};
    const Frame cnp = roce::build(pool, path, f, {});
    events.insert(events.begin() + at + 1,
                  {unmarked.at, false, true, {cnp.bytes().begin(), cnp.bytes().end()}});
  }
  EXPECT_EQ(judge(events), "");
}

TEST(SumCheck, NamesWhoIsMissingOrTwice) {
  for (int type = 1; type <= 10; type++) {
    Reduction r{type, 1, 1001, 5, 7};
    const Bytes right = expected_result(r);
    EXPECT_EQ(explain_difference(r, 0, right, right), "");
    const uint32_t size = element_bytes(type);
    // Element 10 without rank 3 and with it twice: 2^3 less and more of 31.
    for (const int sum : {23, 39}) {
      Bytes wrong = right;
      auto put = [&](auto v) { std::memcpy(wrong.data() + 10 * size, &v, size); };
      if (type <= 2) put(static_cast<uint8_t>(sum));
      if (type == 3 || type == 4) put(int32_t{sum});
      if (type == 5 || type == 6) put(int64_t{sum});
      if (type == 7) put(static_cast<_Float16>(sum));
      if (type == 8) put(static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(sum)) >> 16));
      if (type == 9) put(static_cast<float>(sum));
      if (type == 10) put(static_cast<double>(sum));
      const std::string said = explain_difference(r, 0, right, wrong);
      EXPECT_NE(said.find(sum < 31 ? "rank 3 is missing" : "rank 3 is counted twice"), std::string::npos)
          << said;
    }
  }
}

// Of bytes, recomputed here in the plainest way: leaving any rank out changes the result, whatever the
// operator.
TEST(SumCheck, AMissingPartShowsInEveryOperator) {
  for (int op = 1; op <= 8; op++) {
    const Reduction r{1, op, 64, 4, 3};
    std::vector<Bytes> part(4, Bytes(64));
    for (uint32_t k = 0; k < 4; k++) fill_contribution(r, k, part[k].data());
    auto reduce = [&](uint32_t without) {
      Bytes out;
      for (size_t i = 0; i < 64; i++) {
        unsigned v = op == 2 ? 1 : op == 3 || op == 5 ? 255 : 0;
        for (uint32_t k = 0; k < 4; k++) {
          const unsigned x = part[k][i];
          if (k == without) continue;
          v = op == 1   ? v + x
              : op == 2 ? v * x
              : op == 3 ? std::min(v, x)
              : op == 4 ? std::max(v, x)
              : op == 5 ? v & x
              : op == 6 ? v | x
              : op == 7 ? v ^ x
                        : v + x;
        }
        out.push_back(static_cast<uint8_t>(op == 8 ? (v & 255) / 4 : v));
      }
      return out;
    };
    EXPECT_EQ(explain_difference(r, 0, expected_result(r), reduce(4)), "") << op;
    for (uint32_t k = 0; k < 4; k++)
      EXPECT_NE(explain_difference(r, 0, expected_result(r), reduce(k)), "") << op;
  }
}

// The numbers of f8 types by OCP's tables: bits of exponent, bits of mantissa.
double f8_number(uint8_t bits, int exponent, int mantissa) {
  const int e = bits >> mantissa & ((1 << exponent) - 1), m = bits & ((1 << mantissa) - 1);
  const int bias = (1 << (exponent - 1)) - 1;
  const double v =
      e == 0 ? std::ldexp(m, 1 - bias - mantissa) : std::ldexp((1 << mantissa) + m, e - bias - mantissa);
  return bits & 0x80 ? -v : v;
}

// Sums and averages of types that the checker rounds to itself, or sends in blocks: within half a unit of
// what doubles come to, and never without a rank.
TEST(SumCheck, RoundsToTheNearestWhereItMust) {
  struct Kind {
    int type;
    bool bfp;
    double unit;  // of a result, by its own or its block's magnitude
  };
  for (const Kind k : {Kind{11, false, 0x1p-4}, Kind{12, false, 0x1p-3}, Kind{9, true, 1 / 126.5}})
    for (const int op : {1, 8})
      for (const uint32_t world : {2u, 3u, 7u, 24u}) {
        Reduction r{k.type, op, 700, world, 5};
        r.bfp = k.bfp;
        const uint32_t size = element_bytes(r.type);
        auto number = [&](const uint8_t* at) {
          float f;
          std::memcpy(&f, at, sizeof f * (size == 4));
          return size == 4 ? double{f} : k.type == 11 ? f8_number(*at, 4, 3) : f8_number(*at, 5, 2);
        };
        std::vector<double> sum(r.count);
        for (uint32_t rank = 0; rank < world; rank++) {
          Bytes part(r.count * size);
          fill_contribution(r, rank, part.data());
          for (size_t i = 0; i < r.count; i++) {
            EXPECT_NE(number(part.data() + i * size), 0) << "nothing to miss";
            sum[i] += number(part.data() + i * size);
          }
        }
        const Bytes got = expected_result(r);
        for (size_t i = 0; i < r.count; i++) {
          const double right = sum[i] / (op == 8 ? world : 1);
          double most = std::abs(right);
          for (size_t j = i / 63 * 63; k.bfp && j < std::min<size_t>(r.count, i / 63 * 63 + 63); j++)
            most = std::max(most, std::abs(sum[j]) / (op == 8 ? world : 1));
          EXPECT_LE(std::abs(number(got.data() + i * size) - right), most * k.unit) << k.type << " " << i;
        }
      }
}

// What each rank must hold, by the plainest rule, and what is said of another place's or rank's data.
TEST(SumCheck, KnowsWhatEachRankReceives) {
  for (int collective = 1; collective <= 6; collective++) {
    const Reduction r{3, 1, 40, 4, 3, collective, collective == 2 || collective == 3 ? 2u : 0u};
    std::vector<Bytes> part(4);
    for (uint32_t k = 0; k < 4; k++) {
      part[k].resize(contribution_bytes(r, k));
      fill_contribution(r, k, part[k].data());
    }
    Bytes all;  // the vector
    if (collective == 3) all = part[2];
    if (collective == 5)
      for (const Bytes& p : part) all.insert(all.end(), p.begin(), p.end());
    if (collective == 1 || collective == 2 || collective == 4) {
      for (size_t i = 0; i < 40; i++) {
        int32_t sum = 0, v;
        for (const Bytes& p : part) std::memcpy(&v, p.data() + 4 * i, 4), sum += v;
        all.insert(all.end(), reinterpret_cast<uint8_t*>(&sum), reinterpret_cast<uint8_t*>(&sum) + 4);
      }
    }
    for (uint32_t k = 0; k < 4; k++) {
      const bool shard = collective == 4, none = collective == 6 || (collective == 2 && k != 2);
      Bytes mine(all.begin() + (shard ? k * 40 : 0), none    ? all.begin()
                                                     : shard ? all.begin() + (k + 1) * 40
                                                             : all.end());
      EXPECT_EQ(mine.size(), result_bytes(r, k));
      EXPECT_EQ(explain_difference(r, k, expected_result(r), mine), "") << collective;
      if (none) continue;
      // One element further on.
      std::memmove(mine.data(), mine.data() + 4, mine.size() - 4);
      const std::string said = explain_difference(r, k, expected_result(r), mine);
      const std::string place = std::to_string((shard ? 10 * k : 0) + 1);
      EXPECT_NE(said.find("what belongs at " + place + " of the vector"), std::string::npos) << said;
    }
  }
}

class Memory : public testing::Test {
 protected:
  Memory() : room(4 * MemoryCheck::kGuard + 200), check(violations) {
    buffer = check.add(room.data() + MemoryCheck::kGuard, 200, "it");
    std::fill_n(check.base(buffer), 200, uint8_t{7});
  }
  Bytes room;
  Violations violations;
  MemoryCheck check;
  size_t buffer;
};
TEST_F(Memory, AnHonestOneIsFine) {
  check.offered(buffer, {});
  check.base(buffer)[5] = 1;
  check.returned(buffer, 0);
  check.sweep(0);
  EXPECT_EQ(violations.count(), 0u);
}
TEST_F(Memory, AWriteBehindTheEndIsSeen) {
  check.offered(buffer, {});
  check.base(buffer)[200] = 1;
  check.returned(buffer, 0);
  EXPECT_EQ(violations.count(), 1u);
}
TEST_F(Memory, AWriteInFrontIsSeen) {
  check.base(buffer)[-1] = 1;
  check.sweep(0);
  EXPECT_EQ(violations.count(), 1u);
}
TEST_F(Memory, AWriteToWhatMayBeReadOnlyIsSeen) {
  check.offered(buffer, {{0, 200}});
  check.base(buffer)[17]++;
  check.returned(buffer, 0);
  EXPECT_EQ(violations.count(), 1u);
}
TEST_F(Memory, AWriteToAnothersShardInPlaceIsSeen) {
  for (const size_t at : {49, 50, 99, 100}) {
    const uint64_t before = violations.count();
    buffer = check.add(check.base(0), 200, "again");
    check.offered(buffer, {{0, 50}, {100, 200}});
    check.base(buffer)[at]++;
    check.returned(buffer, 0);
    EXPECT_EQ(violations.count() - before, at < 50 || at >= 100) << at;
  }
}
TEST_F(Memory, AWriteAfterItWasGivenBackIsSeen) {
  check.offered(buffer, {});
  check.returned(buffer, 0);
  check.base(buffer)[100] = 3;
  check.sweep(0);
  EXPECT_EQ(violations.count(), 1u);
}

class Outcome : public testing::Test {
 protected:
  Outcome() : check(violations) {
    check.joined(0, 1, 1);
    check.submitted(0, 1, 1, 0);
  }
  std::string said() { return violations.texts().empty() ? "" : violations.texts()[0]; }
  Violations violations;
  OutcomeCheck check;
};
TEST_F(Outcome, AnHonestOneIsFine) {
  check.ended(0, 0, 1, 1, 0, kOk, "");
  check.over(0, 0, 1, 1, kOk, "");
  check.joined(0, 1, 2);
  check.submitted(0, 1, 2, 0);
  check.excuse(0, {kMemberLost}, {3});
  check.ended(0, 0, 1, 2, 0, kMemberLost, "rank 3 (10.0.0.4) is gone");
  check.over(0, 0, 1, 2, kMemberLost, "rank 3 (10.0.0.4) is gone");
  check.finish(0);
  EXPECT_EQ(said(), "");
}
TEST_F(Outcome, AnOperationThatNeverEndsIsSeen) {
  check.finish(0);
  EXPECT_NE(said(), "");
}
TEST_F(Outcome, AMemberThatIsNotToldIsSeen) {
  check.excuse(0, {kMemberLost}, {3});
  check.over(0, 0, 1, 1, kMemberLost, "rank 3 is gone");
  EXPECT_NE(said().find("never given back"), std::string::npos) << said();
}
TEST_F(Outcome, AnErrorWithoutACauseIsSeen) {
  check.ended(0, 0, 1, 1, 0, kMemberLost, "rank 3 is gone");
  EXPECT_NE(said().find("nothing was done to it"), std::string::npos) << said();
}
TEST_F(Outcome, AnErrorOfAnotherKindIsSeen) {
  check.excuse(0, {kAborted}, {});
  check.ended(0, 0, 1, 1, 0, kProtocol, "a result came out of order");
  EXPECT_NE(said().find("by what was not done"), std::string::npos) << said();
}
TEST_F(Outcome, AnInnocentRankBlamedIsSeen) {
  check.excuse(0, {kMemberLost}, {3});
  check.ended(0, 0, 1, 1, 0, kMemberLost, "rank 2 (10.0.0.3) is gone");
  EXPECT_NE(said().find("blames"), std::string::npos) << said();
}
TEST_F(Outcome, AnErrorWithoutASentenceIsSeen) {
  check.excuse(0, {kAborted}, {});
  check.ended(0, 0, 1, 1, 0, kAborted, "");
  EXPECT_NE(said().find("without a sentence"), std::string::npos) << said();
}
TEST_F(Outcome, SuccessAfterFailureIsSeen) {
  check.submitted(0, 1, 1, 1);
  check.excuse(0, {kAborted}, {});
  check.ended(0, 0, 1, 1, 0, kAborted, "enough");
  check.ended(0, 0, 1, 1, 1, kOk, "");
  EXPECT_NE(said().find("succeeded after"), std::string::npos) << said();
}
TEST_F(Outcome, EndingTwiceIsSeen) {
  check.ended(0, 0, 1, 1, 0, kOk, "");
  check.ended(0, 0, 1, 1, 0, kOk, "");
  EXPECT_NE(said().find("ended twice"), std::string::npos) << said();
}

// Three packets of one queue pair on their way through a switch.
class Passage : public testing::Test {
 protected:
  static Bytes packet(uint32_t psn, uint8_t ttl = 64) {
    NicPacket p;
    p.to = *IpAddress::parse("10.0.0.2"), p.from = *IpAddress::parse("10.0.0.1");
    p.opcode = kOpSendMiddle, p.qpn = 9, p.psn = psn, p.hops = ttl;
    const uint8_t data[4] = {1, 2, 3, 4};
    p.payload = data;
    return make_frame(p);
  }
  // What is said of those that leave, when 1, 2 and 3 have come.
  std::string judge(const std::vector<std::pair<uint32_t, uint32_t>>& leaving) {  // link, PSN
    Violations v;
    PassageCheck check(v);
    for (const uint32_t psn : {1, 2, 3}) check.came(5, packet(psn));
    for (const auto& [link, psn] : leaving) check.left(0, 5, link, packet(psn, 63));
    EXPECT_EQ(check.passed(), leaving.size());
    return v.count() == 0 ? "" : v.texts().front();
  }
};

TEST_F(Passage, InOrderWithGapsAndFloodedIsFine) {
  EXPECT_EQ(judge({{1, 1}, {1, 2}, {1, 3}}), "");
  EXPECT_EQ(judge({{1, 1}, {1, 3}}), "");
  EXPECT_EQ(judge({{1, 1}, {2, 1}, {2, 2}, {1, 2}}), "");
}

TEST_F(Passage, OneThatOvertakesIsSeen) {
  EXPECT_NE(judge({{1, 1}, {1, 3}, {1, 2}}).find("PSN 000002"), std::string::npos);
}

TEST_F(Passage, OneThatLeavesTwiceOrNeverCameIsSeen) {
  EXPECT_NE(judge({{1, 1}, {1, 1}}), "");
  EXPECT_NE(judge({{1, 4}}), "");
}

TEST(Books, ASpillwayThatForgetsOrHoldsTooMuchIsSeen) {
  auto judge = [](const BooksCheck::Spilled& s) {
    Violations v;
    BooksCheck(v).spilled(0, "switch 0", s);
    return v.count();
  };
  const BooksCheck::Spilled right{.in = 10, .drained = 4, .rerouted = 1, .resident = 3, .lost = 2, .size = 3};
  EXPECT_EQ(judge(right), 0u);
  for (uint64_t BooksCheck::Spilled::*part :
       {&BooksCheck::Spilled::drained, &BooksCheck::Spilled::rerouted, &BooksCheck::Spilled::resident,
        &BooksCheck::Spilled::lost, &BooksCheck::Spilled::in}) {
    BooksCheck::Spilled wrong = right;
    (wrong.*part)--;
    EXPECT_EQ(judge(wrong), 1u);
  }
  BooksCheck::Spilled full = right;
  full.size = 2;
  EXPECT_EQ(judge(full), 1u);
}

TEST(Books, LeftoversAndTooMuchAreSeen) {
  Violations v;
  BooksCheck b(v);
  b.held(0, "switch", 10, 10);
  b.reserved(0, "switch", 5, 5);
  b.left(0, "frames", 0);
  EXPECT_EQ(v.count(), 0u);
  b.held(0, "switch", 11, 10);
  b.reserved(0, "switch", 6, 5);
  b.left(0, "frames", 1);
  EXPECT_EQ(v.count(), 3u);
}

}  // namespace
}  // namespace millrace::sim
