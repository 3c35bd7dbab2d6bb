// The model NIC with a shipping communicator on top, against the shipping switch: two implementations of the
// transport that share no code.
#include "tools/sim/nic_model.h"

#include <cstdlib>
#include <map>
#include <set>

#include "tests/unit/nic_rig.h"
#include "tools/sim/nic_cm.h"

namespace millrace::sim {
namespace {

using aggregation::DataType;

// MILLRACE_NIC_SEEDS: how many, for longer runs.
uint64_t seeds(uint64_t usual) {
  const char* more = std::getenv("MILLRACE_NIC_SEEDS");
  return more != nullptr ? std::strtoull(more, nullptr, 10) : usual;
}

struct Totals {
  QueuePairCounts all;
  void add(const QueuePairCounts& c) {
    all.retransmitted += c.retransmitted;
    all.timeouts += c.timeouts;
    all.sequence_naks += c.sequence_naks;
    all.rnr_naks_sent += c.rnr_naks_sent;
    all.duplicates += c.duplicates;
    all.naks_sent += c.naks_sent;
    all.cnps_sent += c.cnps_sent;
    all.cnps_received += c.cnps_received;
    all.packets_sent += c.packets_sent;
  }
};

RigConfig draw(uint64_t seed) {
  Dice dice(seed);
  RigConfig c;
  c.seed = seed;
  c.hosts = static_cast<uint16_t>(2 + dice.below(3));
  c.ipv6 = dice.one_in(3);
  const uint32_t mtu = 256u << dice.below(5);
  c.engine.mtu = mtu;
  // A header and whole packets.
  c.engine.segment_bytes = mtu - 64 + mtu * dice.below(mtu >= 2048 ? 4 : 16);
  c.engine.window = static_cast<uint16_t>(1 + dice.below(6));
  if (dice.one_in(2)) c.engine.first_psn = 0xFFFFFF - dice.below(40);
  c.weather.gbit = dice.one_in(2) ? 100 : 10;
  return c;
}

void run_sums(Rig& rig, uint64_t seed, uint16_t hosts, Totals* totals = nullptr) {
  Dice dice(seed * 31 + 7);
  const auto comms = rig.join_all(static_cast<uint8_t>(1 + dice.below(3)));
  if (testing::Test::HasFailure()) return;
  constexpr DataType types[] = {DataType::kF32, DataType::kF64, DataType::kI32, DataType::kI64};
  std::vector<std::unique_ptr<Sum>> sums;
  for (uint32_t n = 2 + dice.below(3); n > 0; n--) {
    auto s = std::make_unique<Sum>();
    s->type = types[dice.below(4)];
    s->count = 1 + dice.below(dice.one_in(3) ? 6000 : 400);
    s->in_place = dice.one_in(2);
    s->seed = dice.roll();
    s->submit(rig, comms);
    sums.push_back(std::move(s));
  }
  ASSERT_TRUE(rig.run([&] { return std::ranges::all_of(sums, [](auto& s) { return s->done(); }); }))
      << comms[0]->text();
  for (auto& s : sums) s->check();
  rig.close();
  for (uint16_t i = 0; totals != nullptr && i < hosts; i++)
    if (rig.host(i).model != nullptr) totals->add(rig.host(i).model->counts());
}

TEST(NicModel, SumsAreExactOnGoodWires) {
  for (uint64_t seed = 1; seed <= seeds(300); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RigConfig c = draw(seed);
    c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.rnr_one_in = 0; };
    Rig rig(c);
    Totals totals;
    run_sums(rig, seed, c.hosts, &totals);
    if (HasFailure()) return;
    // Nothing is lost, so nothing may be asked for twice: neither side has an excuse.
    EXPECT_EQ(totals.all.sequence_naks, 0u);
    EXPECT_EQ(totals.all.naks_sent, 0u);
    EXPECT_EQ(totals.all.duplicates, 0u);
    EXPECT_EQ(totals.all.timeouts, 0u);
  }
}

TEST(NicModel, SumsAreExactOnBadWires) {
  Totals totals;
  for (uint64_t seed = 1; seed <= seeds(500); seed++) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RigConfig c = draw(seed);
    Dice dice(seed ^ 0xBAD);
    c.weather.loss = dice.below(30'000);
    c.weather.duplicate = dice.below(20'000);
    c.weather.reorder = dice.one_in(2) ? dice.below(20'000) : 0;
    c.weather.corrupt = dice.below(5'000);
    c.weather.mark = dice.one_in(3) ? 100'000 : 0;
    c.weather.mark_all = dice.one_in(2);
    c.soft = [seed](uint16_t host) { return seed % 5 == 0 && host == 1; };  // both kinds in one group
    Rig rig(c);
    run_sums(rig, seed, c.hosts, &totals);
    if (HasFailure()) return;
  }
  // The weather was what it should be.
  EXPECT_GT(totals.all.sequence_naks, 100u);
  EXPECT_GT(totals.all.timeouts, 10u);
  EXPECT_GT(totals.all.naks_sent, 100u);
  EXPECT_GT(totals.all.duplicates, 100u);
  EXPECT_GT(totals.all.rnr_naks_sent, 10u);
  EXPECT_GT(totals.all.cnps_sent, 10u);
  EXPECT_GT(totals.all.cnps_received, 10u);
}

// The same seed gives the same frames, wherever memory lies.
TEST(NicModel, ASeedGivesTheSameFramesAgain) {
  const auto trace = [](size_t shift) {
    const Bytes ballast(shift, 1);
    RigConfig c = draw(11);
    c.weather.loss = c.weather.reorder = 20'000;
    Rig rig(c);
    uint64_t hash = 0, frames = 0;
    // Result addresses are the host's, and the ICRC and the rkey's order depend on nothing else.
    rig.tap = [&](uint16_t host, bool up, const Bytes& b) {
      NicPacket p;
      EXPECT_EQ(read_frame(b, p), Reading::kGood);
      for (const uint64_t v : {uint64_t{host}, uint64_t{up}, uint64_t{p.opcode}, uint64_t{p.psn},
                               uint64_t{p.qpn}, uint64_t{p.udp_port}, uint64_t{p.syndrome}, uint64_t{p.rkey},
                               uint64_t{p.payload.size()}, static_cast<uint64_t>(rig.now().count())})
        hash = Dice(hash ^ v).roll();
      frames++;
    };
    run_sums(rig, 11, c.hosts);
    EXPECT_GT(frames, 100u);
    return hash;
  };
  EXPECT_EQ(trace(1), trace(1'234'567));
}

// IBA 12.6.5: the first packet that we send has the REP's starting PSN, the first that we take the REQ's.
TEST(NicModel, BeginsWhereTheSwitchSays) {
  RigConfig c;
  c.adjust = [](uint16_t host, NicConfig& nic, NicQuirks&) { nic.first_psn = 0x1000u + host; };
  c.engine.first_psn = 0x5000;
  Rig rig(c);
  std::optional<uint32_t> up, down;
  rig.tap = [&](uint16_t host, bool is_up, const Bytes& b) {
    NicPacket p;
    if (host != 0 || read_frame(b, p) != Reading::kGood || p.qpn == 1 || p.opcode == kOpAck) return;
    std::optional<uint32_t>& first = is_up ? up : down;
    if (!first) first = p.psn;
  };
  Sum sum;
  sum.submit(rig, rig.join_all());
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  EXPECT_EQ(up, 0x5000u);
  EXPECT_EQ(down, 0x1000u);
}

TEST(NicModel, ProbesASilentSwitchAndStaysConnected) {
  Rig rig({});
  const auto comms = rig.join_all();
  rig.run_for(seconds(20));
  for (uint16_t i = 0; i < 2; i++) {
    EXPECT_EQ(comms[i]->state(), Communicator::State::kRunning) << comms[i]->text();
    EXPECT_GT(rig.host(i).model->counts().probes_sent + rig.host(i).model->counts().packets_received, 15u);
  }
  Sum sum;
  sum.submit(rig, comms);
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  rig.close();
}

TEST(NicModel, IsNotReadyNowAndThenAndNothingIsLost) {
  RigConfig c;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.rnr_one_in = 3, q.rnr_timer = 1; };
  c.engine.segment_bytes = 4032;
  Rig rig(c);
  Sum sum;
  sum.count = 100'000;
  sum.submit(rig, rig.join_all());
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  EXPECT_GT(rig.host(0).model->counts().rnr_naks_sent, 20u);
  EXPECT_EQ(rig.engine().counters().rnr_naks_received,
            rig.host(0).model->counts().rnr_naks_sent + rig.host(1).model->counts().rnr_naks_sent);
  rig.close();
}

// The wait that an RNR NAK asks for is the least there may be.
TEST(NicModel, TheSwitchWaitsAsLongAsItIsAsked) {
  RigConfig c;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.rnr_one_in = 5, q.rnr_timer = 12; };
  c.engine.segment_bytes = 4032;
  Rig rig(c);
  Time quiet_from = kNever, quiet_until{};
  size_t waits = 0;
  rig.tap = [&](uint16_t host, bool up, const Bytes& b) {
    NicPacket p;
    if (host != 0 || read_frame(b, p) != Reading::kGood || p.qpn == 1) return;
    if (up && p.opcode == kOpAck && p.syndrome >> 5 == 1) {
      waits++;
      quiet_from = rig.now() + microseconds(3);  // its way there
      quiet_until = rig.now() + rnr_wait_time(12);
    } else if (!up && p.opcode < 0x0C) {
      EXPECT_FALSE(rig.now() > quiet_from && rig.now() < quiet_until) << (rig.now() - quiet_from).count();
    }
  };
  Sum sum;
  sum.count = 100'000;
  sum.submit(rig, rig.join_all());
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  EXPECT_GT(waits, 10u);
  rig.close();
}

// Without an RTU, the first packet on the queue pair stands for it: our probe, here. The switch must not go
// on to wait for one.
TEST(NicModel, IsConnectedThoughEveryRtuIsLost) {
  Rig rig({});
  rig.lose = [](uint16_t, bool, const Bytes& b) {
    NicPacket p;
    CmMad mad;
    return read_frame(b, p) == Reading::kGood && p.qpn == 1 && read_mad(p.payload, mad) &&
           mad.kind == CmKind::kRtu;
  };
  const Time begun = rig.now();
  Sum sum;
  sum.submit(rig, rig.join_all());
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  EXPECT_LT(rig.now() - begun, milliseconds(1'100));
  sum.check();
  rig.run_for(seconds(10));
  Sum again;
  again.submit(rig, {rig.host(0).communicators[0].get(), rig.host(1).communicators[0].get()});
  ASSERT_TRUE(rig.run([&] { return again.done(); }));
  again.check();
  rig.close();
}

// Although it is called only every 100 ns, and a packet takes 84: the line never waits for the NIC.
TEST(NicModel, FillsItsLine) {
  RigConfig c;
  c.turn = Time(100);
  c.weather.gbit = 400;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q = {}; };
  Rig rig(c);
  const auto comms = rig.join_all();
  Sum sum;
  sum.count = 1 << 20;
  sum.prepare(2);
  const Time begun = rig.now();
  for (uint16_t r = 0; r < 2; r++)
    comms[r]->submit(sum.operation[r].get(), rig.now()), rig.host(r).touched = true;
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  // 4 MiB in packets of 4096 with 98 bytes around each (with RETH, FCS, preamble, gap), and 4 µs of way.
  const double ideal_ns = 1024 * (4096 + 98) * 8 / 400.0;
  EXPECT_GT(static_cast<double>((rig.now() - begun).count()), ideal_ns);
  EXPECT_LT(static_cast<double>((rig.now() - begun).count()), ideal_ns * 1.03 + 4000);
  rig.close();
}

// --- what fails ---

TEST(NicModel, ASwitchThatDisappearsIsUnreachable) {
  for (const bool for_ever : {false, true}) {
    for (const bool busy : {false, true}) {
      SCOPED_TRACE(std::string(for_ever ? "retries for ever, " : "seven retries, ") +
                   (busy ? "busy" : "idle"));
      RigConfig c;
      c.adjust = [&](uint16_t, NicConfig&, NicQuirks& q) {
        q.retry_for_ever = for_ever;
        q.first_timeout = milliseconds(4);
      };
      Rig rig(c);
      const auto comms = rig.join_all();
      Sum sum;
      sum.count = 4'000'000;
      if (busy) {
        sum.submit(rig, comms);
        rig.run_for(microseconds(200));
        EXPECT_FALSE(sum.done());
      }
      rig.switch_gone = true;
      const Time gone = rig.now();
      ASSERT_TRUE(rig.run([&] {
        return std::ranges::all_of(comms, [](auto* x) { return x->state() == Communicator::State::kFailed; });
      }));
      const Time took = rig.now() - gone;
      // A second of silence until the probe, if need be; seven retries are 0.33 s, death is 5 s.
      EXPECT_LT(took, (busy ? Time{} : seconds(1)) + (for_ever ? milliseconds(5'100) : milliseconds(330)));
      EXPECT_GT(took, for_ever ? milliseconds(4'900) : milliseconds(320));
      EXPECT_EQ(comms[0]->status(), MR_ERR_UNREACHABLE);
      EXPECT_NE(
          comms[0]->text().find(for_ever ? "has not acknowledged anything for 5 s" : "through 7 retries"),
          std::string::npos)
          << comms[0]->text();
      if (busy) {
        EXPECT_TRUE(sum.done());
        EXPECT_EQ(rig.host(0).model->regions(), 0u);
      }
      rig.run_for(seconds(2));
      EXPECT_TRUE(rig.host(0).nic->idle()) << "a goodbye that nobody answers ends, too";
    }
  }
}

TEST(NicModel, NoSwitchIsUnreachable) {
  Rig rig({});
  rig.switch_gone = true;
  Communicator& c = rig.join(0, 2, 1, 1, [](auto& x) { x.connect_timeout = seconds(3); });
  const Time begun = rig.now();
  ASSERT_TRUE(rig.run([&] { return c.state() == Communicator::State::kFailed; }));
  EXPECT_NEAR(static_cast<double>((rig.now() - begun).count()), 3e9, 1e7);
  EXPECT_EQ(c.status(), MR_ERR_UNREACHABLE);
  EXPECT_EQ(c.text(),
            "no answer from the switch at 10.77.0.100 port 18600 within 3000 ms: is millrace-switch running "
            "there, and "
            "does its port match?");
  rig.run_for(milliseconds(1));
  EXPECT_TRUE(rig.host(0).nic->idle());

  Communicator& nowhere = rig.join(1, 2, 1, 1, [](auto& x) {
    x.connect_timeout = seconds(1);
    x.switch_address = *IpAddress::parse("10.77.0.99");
  });
  ASSERT_TRUE(rig.run([&] { return nowhere.state() == Communicator::State::kFailed; }));
  EXPECT_NE(nowhere.text().find("no answer to ARP for 10.77.0.99"), std::string::npos) << nowhere.text();
}

TEST(NicModel, ARefusalIsTheSwitchsOwnSentence) {
  RigConfig c;
  c.hosts = 3;
  c.engine.tenants[7] = {.name = "blue", .secret = "right", .memory_limit = 0};
  Rig rig(c);
  Communicator& stranger = rig.join(0, 3, 1, 1, [](auto& x) { x.tenant = 8; });
  Communicator& wrong = rig.join(1, 3, 2, 1, [](auto& x) { x.tenant = 7, x.secret = "wrong"; });
  Communicator& service = rig.join(2, 3, 3, 1, [](auto& x) { x.port = 18601; });
  ASSERT_TRUE(rig.run([&] {
    return stranger.state() == Communicator::State::kFailed &&
           wrong.state() == Communicator::State::kFailed && service.state() == Communicator::State::kFailed;
  }));
  EXPECT_EQ(stranger.status(), MR_ERR_REFUSED);
  EXPECT_NE(stranger.text().find("tenant"), std::string::npos) << stranger.text();
  EXPECT_EQ(wrong.status(), MR_ERR_REFUSED);
  EXPECT_NE(wrong.text().find("another secret"), std::string::npos) << wrong.text();
  EXPECT_EQ(
      service.text(),
      "10.77.0.100 port 18601 rejected the connection (CM reason 8): is a Millrace switch listening there?");
  rig.run_for(milliseconds(100));
  for (uint16_t i = 0; i < 3; i++) EXPECT_TRUE(rig.host(i).nic->idle());
}

// A tag is over our GID, the switch's and our queue pair number: all three are what the switch sees.
TEST(NicModel, JoinsWithATenantsSecret) {
  for (const bool v6 : {false, true}) {
    RigConfig c;
    c.ipv6 = v6;
    c.engine.tenants[7] = {.name = "blue", .secret = "right", .memory_limit = 0};
    Rig rig(c);
    std::vector<Communicator*> comms;
    for (uint16_t r = 0; r < 2; r++)
      comms.push_back(&rig.join(r, 2, 1, 1, [](auto& x) { x.tenant = 7, x.secret = "right"; }));
    Sum sum;
    sum.submit(rig, comms);
    ASSERT_TRUE(rig.run([&] { return sum.done(); }));
    sum.check();
    rig.close();
  }
}

TEST(NicModel, AnotherMtuIsTriedOnce) {
  RigConfig c;
  c.engine.mtu = 1024;
  c.engine.segment_bytes = 960;
  Rig rig(c);
  std::vector<Communicator*> comms;
  for (uint16_t r = 0; r < 2; r++) comms.push_back(&rig.join(r, 2, 1, 1, [](auto& x) { x.mtu = 4096; }));
  Sum sum;
  sum.count = 5000;
  sum.submit(rig, comms);
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  rig.close();
}

TEST(NicModel, AResultOutsideRegisteredMemoryEndsTheGroup) {
  Rig rig({});
  const auto comms = rig.join_all();
  Sum sum;
  sum.count = 1000;
  sum.prepare(2);
  // Host 0 offers memory that is no longer registered when the result comes.
  host::Transport& transport = rig.host(0).nic->transport();
  const auto region = transport.register_memory(sum.recv[0].data(), 4000, host::Access::kResult);
  sum.operation[0]->recv_region = region;
  transport.deregister_memory(region);
  for (uint16_t r = 0; r < 2; r++)
    comms[r]->submit(sum.operation[r].get(), rig.now()), rig.host(r).touched = true;
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  EXPECT_EQ(sum.operation[0]->status, MR_ERR_PROTOCOL);
  EXPECT_NE(sum.operation[0]->text.find("wrote a result outside the memory it was offered"),
            std::string::npos);
  EXPECT_EQ(sum.recv[0], Bytes(sum.recv[0].size(), 0xA5));
  // The other has its result, or hears of it: the first is lost.
  EXPECT_TRUE(rig.run([&] { return comms[1]->state() == Communicator::State::kFailed; }));
  EXPECT_EQ(comms[1]->status(), MR_ERR_MEMBER_LOST) << comms[1]->text();
  rig.close();
}

TEST(NicModel, AGroupThatIsAbortedHearsWhyBeforeTheGoodbye) {
  RigConfig c;
  c.engine.join_timeout = seconds(2);
  c.hosts = 2;
  Rig rig(c);
  Communicator& alone = rig.join(0, 2);
  ASSERT_TRUE(rig.run([&] { return alone.state() == Communicator::State::kFailed; }, seconds(10)));
  EXPECT_EQ(alone.status(), MR_ERR_LATE) << alone.text();
  rig.close();
}

TEST(NicModel, ASwitchThatShutsDownSaysSo) {
  Rig rig({});
  const auto comms = rig.join_all();
  rig.shut_switch_down();
  ASSERT_TRUE(rig.run([&] {
    return std::ranges::all_of(comms, [](auto* x) { return x->state() == Communicator::State::kFailed; });
  }));
  EXPECT_EQ(comms[0]->status(), MR_ERR_UNREACHABLE);
  EXPECT_NE(comms[0]->text().find("shut"), std::string::npos) << comms[0]->text();
  rig.close();
}

// The switch asks with MRAs for time to find out whether the old rank is alive.
TEST(NicModel, ARestartedRankWaitsUntilTheOldOneIsFoundDead) {
  RigConfig c;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.cm_timeout = 17, q.cm_retries = 1; };
  Rig rig(c);
  auto comms = rig.join_all();
  size_t mras = 0;
  rig.tap = [&](uint16_t, bool up, const Bytes& b) {
    NicPacket p;
    CmMad mad;
    mras += !up && read_frame(b, p) == Reading::kGood && p.qpn == 1 && read_mad(p.payload, mad) &&
            mad.kind == CmKind::kMra;
  };
  rig.restart(0);
  comms[0] = &rig.join(0, 2);
  const Time begun = rig.now();
  ASSERT_TRUE(rig.run([&] { return comms[1]->state() == Communicator::State::kFailed; }));
  EXPECT_EQ(comms[1]->status(), MR_ERR_MEMBER_LOST) << comms[1]->text();
  EXPECT_GT(mras, 0u);
  comms[1] = &rig.join(1, 2);
  Sum sum;
  sum.submit(rig, comms);
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  EXPECT_GT(rig.now() - begun, Time(2 * 4096 << 17)) << "beyond the time of all repeats without an MRA";
  sum.check();
  rig.close();
}

TEST(NicModel, ARankThatLivesIsNotReplaced) {
  Rig rig({});
  const auto comms = rig.join_all();
  Communicator& second = rig.join(0, 2);
  ASSERT_TRUE(rig.run([&] { return second.state() == Communicator::State::kFailed; }));
  EXPECT_EQ(second.status(), MR_ERR_REFUSED) << second.text();
  EXPECT_NE(second.text().find("rank 0"), std::string::npos) << second.text();
  Sum sum;
  sum.submit(rig, comms);
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  sum.check();
  rig.close();
}

// Once the operation has its error, its memory is the caller's again.
TEST(NicModel, NothingIsWrittenAfterTheEnd) {
  RigConfig c;
  c.engine.segment_bytes = 4032;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.drain_delay = microseconds(50); };
  for (int after_us = 5; after_us < 110; after_us += 5) {
    Rig rig(c);
    const auto comms = rig.join_all();
    Sum sum;
    sum.count = 100'000;
    sum.submit(rig, comms);
    rig.run_for(microseconds(after_us));
    ASSERT_FALSE(sum.done());
    comms[0]->abort("enough", rig.now());
    rig.host(0).touched = true;
    const Time asked = rig.now();
    ASSERT_TRUE(rig.run([&] { return sum.operation[0]->done; }));
    EXPECT_GE(rig.now() - asked, microseconds(50));
    EXPECT_EQ(sum.operation[0]->status, MR_ERR_ABORTED);
    const Bytes then = sum.recv[0];
    rig.run_for(seconds(1));
    EXPECT_EQ(sum.recv[0], then);
    EXPECT_EQ(comms[1]->status(), MR_ERR_MEMBER_LOST) << comms[1]->text();
    rig.close();
  }
}

// What spreads flows over queues and paths goes by the UDP source port: one queue pair has one.
TEST(NicModel, AQueuePairHasOneUdpPort) {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    RigConfig c = draw(seed);
    c.weather.loss = 10'000;
    Rig rig(c);
    std::map<uint32_t, std::set<uint16_t>> ports;
    rig.tap = [&](uint16_t, bool up, const Bytes& b) {
      NicPacket p;
      if (up && read_frame(b, p) == Reading::kGood)
        ports[p.qpn * 8 + (p.qpn == 1 ? p.from.bytes[15] : 0)].insert(p.udp_port);
    };
    run_sums(rig, seed, c.hosts);
    EXPECT_GT(ports.size(), 2u);
    for (const auto& [qpn, seen] : ports) {
      EXPECT_EQ(seen.size(), 1u);
      EXPECT_GE(*seen.begin(), 0xC000);
    }
  }
}

// A host that breaks the window: the switch is not ready (RNR), the NIC waits and repeats, nothing worse.
TEST(NicModel, ABreachOfTheWindowIsWaitedOut) {
  RigConfig c;
  c.engine.window = 2;
  c.engine.segment_bytes = 4032;
  Rig rig(c);
  host::Transport& raw = rig.host(0).nic->transport();
  host::ConnectRequest request;
  request.switch_address = rig.switch_address();
  request.join.key.fill(1);
  request.join.world = 2;
  const host::LinkId link = raw.connect(request);
  rig.host(0).touched = true;
  Communicator& other = rig.join(1, 2);
  ASSERT_TRUE(rig.run([&] { return other.state() == Communicator::State::kRunning; }));
  ASSERT_TRUE(rig.run([&] { return rig.host(0).strays.size() == 2; }));
  const auto start = aggregation::decode_control_message(rig.host(0).strays[1].message).start;
  ASSERT_TRUE(start);
  EXPECT_EQ(start->window, 2);

  Sum sum;
  sum.type = DataType::kI32;
  sum.count = 5 * 1008;  // five segments
  sum.prepare(2);
  const auto region = raw.register_memory(sum.recv[0].data(), 5 * 4032, host::Access::kResult);
  const auto source = raw.register_memory(sum.send[0].data(), 5 * 4032, host::Access::kSend);
  for (uint32_t s = 0; s < 5; s++) {
    aggregation::SegmentHeader h;
    h.magic = aggregation::kMagic;
    h.version = aggregation::kProtocolVersion;
    h.collective = static_cast<uint8_t>(aggregation::Collective::kAllReduce);
    h.op = static_cast<uint8_t>(aggregation::ReduceOp::kSum);
    h.type = h.wire_type = static_cast<uint8_t>(DataType::kI32);
    h.flags = s == 4 ? uint8_t{aggregation::kFlagLast} : uint8_t{0};
    h.group = start->group;
    h.total = 5 * 4032;
    h.offset = s * 4032;
    h.length = h.payload_bytes = 4032;
    h.result_address = reinterpret_cast<uintptr_t>(sum.recv[0].data()) + s * 4032;
    h.result_rkey = region.rkey;
    ASSERT_TRUE(raw.post_segment(link, s, h, std::span(sum.send[0]).subspan(s * 4032, 4032), source));
  }
  rig.host(0).touched = true;
  rig.run_for(seconds(8));  // longer than a switch is given that says nothing
  EXPECT_GT(rig.host(0).model->counts().rnr_naks, 8'000 / 0.65);  // each 0.64 ms
  EXPECT_LT(rig.host(0).model->counts().rnr_naks, 8'000 / 0.64);
  EXPECT_EQ(rig.host(0).strays.size(), 2 + 2u) << "the two segments within the window have been taken";
  other.submit(sum.operation[1].get(), rig.now());
  rig.host(1).touched = true;
  ASSERT_TRUE(rig.run([&] { return sum.operation[1]->done && rig.host(0).strays.size() == 12; }));
  // What a communicator would have said of it.
  sum.operation[0]->status = MR_OK;
  sum.check();
  raw.deregister_memory(region), raw.deregister_memory(source);
  raw.close(link);
  rig.host(0).touched = true;
  rig.close();
  EXPECT_EQ(rig.host(0).strays.back().kind, Completion::Kind::kClosed);
}

// --- congestion ---

TEST(NicModel, TheSwitchSaysOnceIn50MicrosecondsThatItSawMarks) {
  RigConfig c;
  c.weather.mark = 1'000'000;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) { q.traffic_class = 0x6A; };
  Rig rig(c);
  std::map<uint32_t, Time> last;
  size_t cnps = 0;
  rig.tap = [&](uint16_t, bool up, const Bytes& b) {
    NicPacket p;
    if (up || read_frame(b, p) != Reading::kGood || p.opcode != kOpCnp) return;
    cnps++;
    if (last.contains(p.qpn)) {
      EXPECT_GE(rig.now() - last[p.qpn], microseconds(50));
    }
    last[p.qpn] = rig.now();
  };
  Sum sum;
  sum.count = 300'000;
  sum.submit(rig, rig.join_all(2));
  ASSERT_TRUE(rig.run([&] { return sum.done(); }));
  EXPECT_EQ(last.size(), 4u);
  EXPECT_GT(cnps, 20u);
  rig.close();
}

TEST(NicModel, MarksSlowItDownAndItRecovers) {
  RigConfig c;
  c.weather.gbit = 100;
  c.weather.mark = 1'000'000;
  c.adjust = [](uint16_t, NicConfig&, NicQuirks& q) {
    q.dcqcn = true, q.traffic_class = 0x6A, q.rnr_one_in = 0;
  };
  Rig rig(c);
  const auto comms = rig.join_all();
  Sum sum;
  sum.count = 1'000'000;
  sum.submit(rig, comms);
  double slowest = 100;
  ASSERT_TRUE(rig.run([&] {
    slowest = std::min(slowest, rig.host(0).model->gbit(1, rig.now()));  // link 1 is the only one
    return sum.done();
  }));
  sum.check();
  const QueuePairCounts n = rig.host(0).model->counts();
  EXPECT_GT(n.cnps_received, 5u);
  EXPECT_LE(n.cnps_received, rig.engine().counters().cnps_sent);
  EXPECT_GT(n.cnps_sent, 5u) << "results are in the class that the host asked for, and so can be marked";
  EXPECT_LT(slowest, 60);
  rig.weather().mark = 0;
  rig.run_for(milliseconds(200));
  EXPECT_EQ(rig.host(0).model->gbit(1, rig.now()), 100);
  rig.close();
}

// The shipping endpoints alone: marks both ways draw CNPs from either side, which pace the other.
TEST(SoftTransport, MarksSlowBothDirectionsAndTheyRecover) {
  RigConfig c;
  c.weather.gbit = 100;
  c.weather.mark = 1'000'000;  // of what says that it is ECN-capable
  c.soft = [](uint16_t) { return true; };
  Rig rig(c);
  const auto comms = rig.join_all();
  Sum sum;
  sum.count = 1'000'000;
  sum.submit(rig, comms);
  uint64_t slowest = UINT64_MAX;
  const auto rate = [&](size_t rank) { return rig.engine().groups(rig.now()).at(0).members.at(rank).rate; };
  ASSERT_TRUE(rig.run([&] {
    if (const uint64_t r = rate(0); r != 0) slowest = std::min(slowest, r);
    return sum.done();
  }));
  sum.check();
  host::LinkStats all;
  for (uint16_t i = 0; i < 2; i++) all += rig.host(i).nic->transport().stats(1);
  EXPECT_GT(all.cnps_sent, 10u);
  EXPECT_GT(all.cnps_received, 10u);
  EXPECT_EQ(all.retransmitted, 0u);
  rig.run_for(milliseconds(1));  // what is under way
  all = {};
  for (uint16_t i = 0; i < 2; i++) all += rig.host(i).nic->transport().stats(1);
  EXPECT_EQ(all.cnps_sent, rig.engine().counters().cnps_received);
  EXPECT_EQ(all.cnps_received, rig.engine().counters().cnps_sent);
  EXPECT_LT(slowest, 60'000'000'000u);
  EXPECT_GE(slowest, 100'000'000u);
  rig.weather().mark = 0;
  rig.run_for(milliseconds(200));
  EXPECT_EQ(rate(0), 0u);
  rig.close();
}

}  // namespace
}  // namespace millrace::sim
