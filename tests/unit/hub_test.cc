// Ranks of one host that combine through shared memory: what they get, what goes to the switch, and how it
// ends. Expected numbers are millrace-perf's, which know nothing of how they are reduced.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "host/combining.h"
#include "roce/error.h"
#include "tests/unit/hub_rig.h"

namespace millrace::host {
namespace {

constexpr Collective kAll[] = {Collective::kAllReduce,     Collective::kReduce,    Collective::kBroadcast,
                               Collective::kReduceScatter, Collective::kAllGather, Collective::kBarrier};
// 4 + 4, unequal numbers, ranks that are not next to each other, three hosts, one host.
const TestJob::Partition kPartitions[] = {
    {{0, 1, 2, 3}, {4, 5, 6, 7}}, {{2, 0, 1}, {3}},  {{0, 3}, {1, 2}},
    {{5, 0, 2}, {1}, {3, 4}},     {{1, 0, 2, 4, 3}}, {{0, 1, 2, 3, 4, 6, 10}, {5, 7, 8, 9}}};

struct Case {
  Collective collective = Collective::kAllReduce;
  mr_type type = MR_F32;
  mr_op op = MR_SUM;
  size_t count = 100;  // elements of the whole vector, or of each rank's part
  uint16_t root = 0;
  bool in_place = false, deterministic = false, bfp = false;
};

// One collective at all ranks, with buffers as an application would have them.
class Round {
 public:
  Round(TestJob& job, const Case& c, uint64_t seed) : job_(job), case_(c) {
    const uint16_t world = job.config.world;
    const bool reduces = aggregation::reduces(c.collective), barrier = c.collective == Collective::kBarrier;
    const size_t element = perf::element_bytes(c.type);
    part_ = barrier ? 0 : c.count * element;
    bytes_ = part_ * (aggregation::has_shards(c.collective) ? world : 1);
    values_ = {c.type, reduces ? c.op : perf::kNoOp,
               reduces ? perf::form_of(c.type, c.op, c.deterministic, c.bfp) : perf::Form::kExact, seed,
               world};
    for (uint16_t r = 0; r < world; r++) {
      Rank& x = ranks_.emplace_back();
      x.send.resize(bytes_ + 1);
      x.recv.resize(bytes_ + 1);
      perf::poison(x.recv.data(), x.recv.size());
      uint8_t* from = x.send.data();
      uint8_t* to = x.recv.data();
      const bool gathers = c.collective == Collective::kAllGather;
      if (c.in_place && gathers) from = to + r * part_;
      if (c.in_place && !gathers) to = from + (c.collective == Collective::kReduceScatter ? r * part_ : 0);
      x.at = to;
      perf::fill(values_, r, 0, from, (gathers ? part_ : bytes_) / element);
      x.operation.collective = c.collective;
      x.operation.type = barrier ? DataType::kU8 : static_cast<DataType>(c.type);
      x.operation.op = reduces ? static_cast<ReduceOp>(c.op) : ReduceOp::kNone;
      x.operation.deterministic = reduces && c.deterministic;
      x.operation.bfp = reduces && c.bfp;
      x.operation.root = aggregation::has_root(c.collective) ? c.root : uint16_t{0};
      x.operation.bytes = bytes_;
      x.operation.send = from;
      x.operation.recv = to;
    }
  }
  void submit(TestRank& r) { r.communicator->submit(&ranks_[r.rank].operation, job_.now); }
  void submit() {
    job_.for_each([&](TestRank& r) { submit(r); });
  }
  const Operation& operation(uint16_t rank) const { return ranks_[rank].operation; }
  bool done() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.operation.done; });
  }
  // Elements at all ranks that are not what they should be.
  uint64_t wrong() const {
    uint64_t sum = 0;
    const size_t element = perf::element_bytes(case_.type), count = bytes_ / element, part = part_ / element;
    for (uint16_t r = 0; r < ranks_.size(); r++) {
      const Rank& x = ranks_[r];
      if (x.operation.status != MR_OK) return UINT64_MAX;
      const bool at_all = case_.collective != Collective::kReduce || r == case_.root;
      switch (case_.collective) {
        case Collective::kAllReduce:
        case Collective::kReduce:
          sum += at_all           ? perf::count_wrong(values_, 0, x.at, count)
                 : case_.in_place ? perf::count_changed(values_, r, 0, x.at, count)
                                  : perf::count_not_poison(x.at, bytes_);
          break;
        case Collective::kBroadcast:
          sum += perf::count_changed(values_, case_.root, 0, x.at, count);
          break;
        case Collective::kReduceScatter:
          sum += perf::count_wrong(values_, r * part, x.at, part);
          break;
        case Collective::kAllGather:
          for (uint16_t s = 0; s < ranks_.size(); s++)
            sum += perf::count_changed(values_, s, 0, x.at + s * part_, part);
          break;
        case Collective::kBarrier:
          break;
      }
    }
    return sum;
  }

 private:
  struct Rank {
    std::vector<uint8_t> send, recv;
    uint8_t* at = nullptr;
    Operation operation;
  };
  TestJob& job_;
  Case case_;
  perf::Values values_;
  size_t part_ = 0, bytes_ = 0;
  std::deque<Rank> ranks_;
};

void expect_exact(TestJob& job, const Case& c) {
  static uint64_t seed = 1;
  Round round(job, c, seed++);
  round.submit();
  ASSERT_TRUE(job.run_until([&] { return round.done(); })) << "it hangs";
  ASSERT_EQ(round.wrong(), 0u) << aggregation::name(c.collective) << " of " << c.count << " "
                               << perf::name(c.type) << " " << perf::name(c.op) << ", root " << c.root;
}

class Combining : public testing::TestWithParam<TestJob::Partition> {};

TEST_P(Combining, EveryCollectiveIsExactAtEverySize) {
  TestJob job(GetParam());
  ASSERT_TRUE(job.start());
  for (const Collective collective : kAll)
    for (const mr_type type : {MR_F32, MR_BF16, MR_I32})
      for (const size_t count : {0, 1, 7, 239, 240, 241, 1500})
        for (const bool in_place : {false, true})
          for (uint16_t root = 0; root < (aggregation::has_root(collective) ? job.config.world : 1); root++) {
            Case c;
            c.collective = collective, c.type = type, c.count = count, c.root = root, c.in_place = in_place;
            expect_exact(job, c);
            if (HasFatalFailure()) return;
          }
}

TEST_P(Combining, DeterministicSumsAreThoseOfTheOneOrder) {
  TestJob job(GetParam());
  ASSERT_TRUE(job.start());
  for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter})
    for (const mr_type type : {MR_F16, MR_BF16, MR_F32, MR_F64, MR_F8E4M3, MR_F8E5M2, MR_I32})
      for (const mr_op op : {MR_SUM, MR_PROD, MR_AVG, MR_MAX})
        for (const size_t count : {0, 1, 500}) {
          Case c;
          c.collective = collective, c.type = type, c.op = op, c.count = count, c.deterministic = true;
          expect_exact(job, c);
          if (HasFatalFailure()) return;
        }
}

INSTANTIATE_TEST_SUITE_P(Of, Combining, testing::ValuesIn(kPartitions));

TEST(Hub, EveryTypeAndOperatorIsExact) {
  TestJob job({{0, 1, 2}, {3}});
  ASSERT_TRUE(job.start());
  for (const mr_type type : perf::kTypes)
    for (const mr_op op : perf::kOps) {
      if (!perf::goes_with(type, op) || op == MR_LAND || op == MR_LOR)
        continue;  // those are bits to a switch
      Case c;
      c.type = type, c.op = op, c.count = 777;
      expect_exact(job, c);
      if (HasFatalFailure()) return;
    }
}

TEST(Hub, BlockFloatingPointIsWithinItsBound) {
  for (const bool deterministic : {false, true}) {
    TestJob job({{0, 1, 4}, {2, 3}});
    ASSERT_TRUE(job.start());
    for (const mr_type type : {MR_F16, MR_BF16, MR_F32})
      for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter}) {
        Case c;
        c.collective = collective, c.type = type, c.count = 2000, c.bfp = true;
        c.deterministic = deterministic;
        expect_exact(job, c);
        if (HasFatalFailure()) return;
      }
  }
}

// The point of it all: as many bytes as one rank's go up and come down.
TEST(Hub, OneContributionAndOneResultPerHostCrossItsLink) {
  for (const mr_type type : {MR_F32, MR_I32, MR_F64}) {
    TestJob job({{0, 1, 2, 3}, {4, 5, 6, 7}});
    ASSERT_TRUE(job.start());
    Case c;
    c.type = type, c.count = 10000;
    expect_exact(job, c);
    const uint64_t bytes = c.count * perf::element_bytes(type);
    for (const TestHost& h : job.hosts) {
      EXPECT_EQ(h.up->payload_bytes, bytes);
      EXPECT_EQ(h.up->results_bytes, bytes);
      EXPECT_EQ(h.up->messages, (bytes + job.root.segment_bytes - 1) / job.root.segment_bytes);
    }
  }
}

TEST(Hub, OperationsInFlightOnSeveralStripesKeepTheirOrder) {
  TestJob job({{0, 1, 2}, {3, 4}}, 3);
  ASSERT_TRUE(job.start());
  std::deque<Round> rounds;
  for (uint64_t i = 0; i < 12; i++) {
    Case c;
    c.collective = kAll[i % std::size(kAll)];
    c.count = 100 + 400 * i;
    c.in_place = i % 2 != 0;
    rounds.emplace_back(job, c, 100 + i);
  }
  for (Round& r : rounds) r.submit();
  ASSERT_TRUE(job.run_until(
      [&] { return std::all_of(rounds.begin(), rounds.end(), [](Round& r) { return r.done(); }); }));
  for (Round& r : rounds) EXPECT_EQ(r.wrong(), 0u);
}

TEST(Hub, AFullSendQueueDelaysAndLosesNothing) {
  TestJob job({{0, 2}, {1, 3}});
  ASSERT_TRUE(job.start());
  for (TestHost& h : job.hosts) h.up->full = 7;
  Case c;
  c.count = 3000, c.deterministic = true;
  expect_exact(job, c);
}

TEST(Hub, RanksMayComeUntilStart) {
  TestJob job({{0, 1}, {2}}, 1, 4);
  job.run_until([] { return false; }, 50);
  EXPECT_EQ(job.rank(0).communicator->status(), MR_IN_PROGRESS);
  job.join(job.hosts.back(), 3);
  ASSERT_TRUE(job.start());
  EXPECT_TRUE(job.hosts.front().up->requests[0].join.child);
  EXPECT_EQ(job.rank(3).transport->ranks(), 2u);
  EXPECT_EQ(job.rank(3).transport->leader(), 2u);
  expect_exact(job, {});
}

TEST(Hub, AGroupOfOneHostNeedsNoSwitch) {
  TestJob job({{1, 0, 2}});
  ASSERT_TRUE(job.start());
  for (const mr_type type : {MR_F32, MR_BF16, MR_I64})
    for (const Collective collective : kAll) {
      Case c;
      c.collective = collective, c.type = type, c.count = 40000, c.op = MR_AVG;
      expect_exact(job, c);
    }
  const TestHost& h = job.hosts.front();
  EXPECT_TRUE(h.up->ranks.empty());
  EXPECT_EQ(h.up->closed, 1u);
  EXPECT_EQ(h.up->messages, 0u);
}

// --- ends ---

class HubEnds : public testing::Test {
 protected:
  HubEnds() : job_({{2, 0, 1}, {3, 4}}) { EXPECT_TRUE(job_.start()); }

  void expect_all(mr_status status, const std::string& words) {
    ASSERT_TRUE(job_.run_until([&] {
      bool all = true;
      job_.for_each([&](TestRank& r) { all &= r.communicator->status() != MR_OK; });
      return all;
    })) << "somebody hangs";
    job_.for_each([&](TestRank& r) { expect_one(r, status, words); });
  }
  void expect_one(TestRank& r, mr_status status, const std::string& words) {
    EXPECT_TRUE(job_.run_until([&] { return r.communicator->status() > MR_IN_PROGRESS; }));
    EXPECT_EQ(r.communicator->status(), status) << "rank " << r.rank << ": " << r.communicator->text();
    EXPECT_NE(r.communicator->text().find(words), std::string::npos)
        << "rank " << r.rank << ": " << r.communicator->text();
  }
  // What one host's hub has sent up goes to the other, as a switch would see to it.
  void pass_terminals() {
    for (TestHost& h : job_.hosts)
      if (h.up->terminal)
        for (TestHost& other : job_.hosts)
          if (&other != &h) TestRoot::tell(*other.up, encode(*h.up->terminal));
  }
  void kill(uint16_t rank) {
    job_.rank(rank).communicator.reset();
    job_.rank(rank).transport.reset();
  }
  TestJob job_;
};

TEST_F(HubEnds, ARankThatDiesIsNamedEverywhere) {
  kill(1);
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  EXPECT_EQ(job_.hosts.front().up->terminal->ranks, std::vector<uint16_t>{1});
  pass_terminals();
  expect_all(MR_ERR_MEMBER_LOST, "rank 1 (process " + std::to_string(getpid()) + " on here) died");
}

TEST_F(HubEnds, ARankThatDiesInTheMiddleOfAnOperationIsNamedEverywhere) {
  job_.root.silent = true;
  Round round(job_, {}, 5);
  round.submit();
  job_.run_until([] { return false; }, 20);
  kill(1);
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  pass_terminals();
  expect_all(MR_ERR_MEMBER_LOST, "rank 1");
}

TEST_F(HubEnds, ALeaderThatDiesIsNamedAtItsRanks) {
  job_.hosts.front().hub.reset();
  kill(2);
  ASSERT_TRUE(job_.run_until([&] { return job_.rank(0).communicator->status() != MR_OK; }));
  for (const uint16_t rank : {0, 1})
    expect_one(job_.rank(rank), MR_ERR_MEMBER_LOST, "rank 2, which combines for the ranks of this host");
}

TEST_F(HubEnds, ATerminalMessageOfTheSwitchReachesEveryRank) {
  aggregation::Terminal t;
  t.code = aggregation::Code::kAborted;
  t.text = "the cleaners need this socket";
  for (TestHost& h : job_.hosts) TestRoot::tell(*h.up, encode(t));
  expect_all(MR_ERR_ABORTED, "the cleaners need this socket");
  for (TestHost& h : job_.hosts) {
    EXPECT_FALSE(h.up->terminal.has_value()) << "it came from there";
    EXPECT_TRUE(job_.run_until([&] { return h.hub->hub().over(); }));
    EXPECT_EQ(h.up->regions, h.up->deregistered);
  }
}

TEST_F(HubEnds, ALostSwitchIsToldToEveryRank) {
  for (TestHost& h : job_.hosts) {
    Completion c{Completion::Kind::kError};
    c.link = 1;
    c.error = LinkError::kUnreachable;
    c.text = "the switch is down";
    h.up->completions.push_back(c);
  }
  expect_all(MR_ERR_UNREACHABLE, "the switch is down");
}

TEST_F(HubEnds, DisagreementNamesTheRankAndTheField) {
  Round sum(job_, {}, 5), max(job_, {.op = MR_MAX}, 5);
  job_.for_each([&](TestRank& r) { (r.rank == 0 ? max : sum).submit(r); });
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  EXPECT_EQ(job_.hosts.front().up->terminal->ranks, std::vector<uint16_t>{0});
  pass_terminals();
  expect_all(MR_ERR_MISMATCH, "rank 0 operator max, the others sum");
}

TEST_F(HubEnds, ALateRankIsNamed) {
  Round round(job_, {}, 5);
  job_.for_each([&](TestRank& r) {
    if (r.rank != 0) round.submit(r);
  });
  job_.run_until([] { return false; }, 20);
  EXPECT_FALSE(job_.hosts.front().up->terminal.has_value());
  for (int second = 0; second < 601; second++) {  // it answers all the time
    job_.now += std::chrono::seconds(1);
    job_.run_until([] { return false; }, 3);
  }
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  EXPECT_EQ(job_.hosts.front().up->terminal->ranks, std::vector<uint16_t>{0});
  EXPECT_EQ(job_.hosts.front().up->terminal->code, aggregation::Code::kLate);
}

TEST_F(HubEnds, ARankThatIsStoppedIsNamedAfterFiveSeconds) {
  Round round(job_, {}, 5);
  job_.for_each([&](TestRank& r) {
    if (r.rank != 0) round.submit(r);
  });
  job_.rank(0).stopped = true;
  const Time began = job_.now;
  ASSERT_TRUE(job_.run_until([&] {
    job_.now += std::chrono::milliseconds(10);
    return job_.hosts.front().up->terminal.has_value();
  }));
  EXPECT_EQ(job_.hosts.front().up->terminal->ranks, std::vector<uint16_t>{0});
  EXPECT_NEAR(std::chrono::duration<double>(job_.now - began).count(), 5.0, 0.5);
}

TEST_F(HubEnds, ALeaderThatIsStoppedIsNamedAfterSixSeconds) {
  job_.root.silent = true;
  Round round(job_, {}, 5);
  round.submit();
  job_.run_until([] { return false; }, 20);
  job_.hosts.front().stopped = true;
  const Time began = job_.now;
  ASSERT_TRUE(job_.run_until([&] {
    job_.now += std::chrono::milliseconds(10);
    return job_.rank(0).communicator->status() > MR_IN_PROGRESS;
  }));
  expect_one(job_.rank(0), MR_ERR_MEMBER_LOST, "rank 2, which combines");
  EXPECT_NEAR(std::chrono::duration<double>(job_.now - began).count(), 6.0, 0.5);
}

TEST_F(HubEnds, ARankThatLeavesIsMissedByTheNextOperationOnly) {
  Round round(job_, {}, 9);
  round.submit();
  ASSERT_TRUE(job_.run_until([&] { return round.done(); }));
  job_.rank(1).communicator->close(job_.now);
  job_.run_until([] { return false; }, 50);
  EXPECT_EQ(job_.rank(0).communicator->status(), MR_OK);
  EXPECT_FALSE(job_.hosts.front().up->terminal.has_value());
  Round next(job_, {}, 10);
  next.submit();
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  expect_one(job_.rank(0), MR_ERR_MEMBER_LOST, "rank 1");
}

TEST_F(HubEnds, WhatARankHasPostedBeforeItLeavesCounts) {
  Round round(job_, {}, 9);
  job_.for_each([&](TestRank& r) {
    if (r.rank != 1) round.submit(r);
  });
  job_.run_until([] { return false; }, 20);
  round.submit(job_.rank(1));
  job_.rank(1).communicator->poll(job_.now);
  job_.rank(1).communicator->abort("enough", job_.now);
  ASSERT_TRUE(job_.run_until([&] { return round.done(); }));
  for (const uint16_t rank : {0, 2, 3, 4}) EXPECT_EQ(round.operation(rank).status, MR_OK) << rank;
  EXPECT_FALSE(job_.hosts.front().up->terminal.has_value());
}

TEST_F(HubEnds, ARankThatLeavesInTheMiddleIsNamedAtOnce) {
  Round round(job_, {}, 9);
  round.submit(job_.rank(1));
  job_.run_until([] { return false; }, 20);
  job_.rank(1).communicator->abort("enough", job_.now);
  ASSERT_TRUE(job_.run_until([&] { return job_.hosts.front().up->terminal.has_value(); }));
  expect_one(job_.rank(0), MR_ERR_MEMBER_LOST, "left in the middle of an operation");
}

TEST_F(HubEnds, OnceAllHaveLeftNothingIsLeft) {
  Round round(job_, {}, 9);
  round.submit();
  ASSERT_TRUE(job_.run_until([&] { return round.done(); }));
  job_.for_each([&](TestRank& r) { r.communicator->close(job_.now); });
  for (TestHost& h : job_.hosts) {
    EXPECT_TRUE(job_.run_until([&] { return h.hub->hub().over(); }));
    EXPECT_FALSE(h.up->terminal.has_value());
    EXPECT_EQ(h.up->closed, 1u);
    EXPECT_EQ(h.up->regions, h.up->deregistered);
    EXPECT_TRUE(LocalSocket::listen(h.name).has_value()) << "the name is still taken";
  }
}

TEST(HubJoin, OnlyRanksOfTheSameGroupMeet) {
  CommunicatorConfig c;
  const std::string name = LocalSocket::name_of(c);
  EXPECT_EQ(LocalSocket::name_of(c), name);
  CommunicatorConfig other = c;
  other.key[15] = 1;
  EXPECT_NE(LocalSocket::name_of(other), name);
  other = c;
  other.tenant = 1;
  EXPECT_NE(LocalSocket::name_of(other), name);
  other = c;
  other.port++;
  EXPECT_NE(LocalSocket::name_of(other), name);
  other = c;
  other.switch_address = *IpAddress::parse("10.77.0.100");
  EXPECT_NE(LocalSocket::name_of(other), name);
}

TEST(HubJoin, WhatALauncherSaysDecidesWhereNothingIsAskedFor) {
  unsetenv("MILLRACE_COMBINE");
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE",
                           "SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE"})
    unsetenv(name);
  EXPECT_FALSE(choose_combining(nullptr).combine);
  setenv("LOCAL_WORLD_SIZE", "1", 1);
  EXPECT_FALSE(choose_combining("auto").combine);
  setenv("LOCAL_WORLD_SIZE", "4", 1);
  EXPECT_TRUE(choose_combining("auto").combine);
  EXPECT_EQ(choose_combining(nullptr).why, "LOCAL_WORLD_SIZE is 4 (asked for auto)");
  EXPECT_FALSE(choose_combining("off").combine);
  setenv("MILLRACE_COMBINE", "off", 1);
  EXPECT_FALSE(choose_combining(nullptr).combine);
  EXPECT_TRUE(choose_combining("on").combine);
  EXPECT_THROW(choose_combining("perhaps"), Error);
  unsetenv("MILLRACE_COMBINE");
  unsetenv("LOCAL_WORLD_SIZE");
}

TEST(HubJoin, MessagesThatAreNoneAreNotTaken) {
  LocalMessage m;
  m.kind = LocalMessage::Kind::kTerminal;
  m.text = "a sentence";
  m.bytes = {1, 2, 3};
  const std::vector<uint8_t> bytes = encode(m);
  const auto again = decode_local_message(bytes);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->text, m.text);
  EXPECT_EQ(again->bytes, m.bytes);
  for (size_t n = 0; n < bytes.size(); n++)
    EXPECT_FALSE(decode_local_message(std::span(bytes).first(n)).has_value()) << n;
  for (size_t at : {size_t{0}, size_t{4}}) {  // magic, kind
    std::vector<uint8_t> wrong = bytes;
    wrong[at] = 0xFF;
    EXPECT_FALSE(decode_local_message(wrong).has_value()) << at;
  }
}

TEST(HubJoin, MemoryThatIsNotWhatWasSaidIsNotMapped) {
  SharedMemory memory = SharedMemory::create(8192);
  EXPECT_EQ(memory.base()[8191], 0);
  EXPECT_NO_THROW(SharedMemory::map(FileDescriptor(dup(memory.file())), 8192));
  EXPECT_THROW(SharedMemory::map(FileDescriptor(dup(memory.file())), 8193), Error);
  FileDescriptor unsealed(memfd_create("t", 0));
  ASSERT_EQ(ftruncate(unsealed.get(), 8192), 0);
  EXPECT_THROW(SharedMemory::map(std::move(unsealed), 8192), Error);
}

TEST(HubJoin, ARankThatIsTakenOrDisagreesIsRefused) {
  TestJob job({{0, 1}, {2}}, 1, 5);
  TestHost& h = job.hosts.front();
  const auto refused = [&](const LocalHello& hello, const std::string& words) {
    LocalSocket socket = *LocalSocket::connect(h.name);
    const LocalMessage answer = job.knock(h, socket, hello);
    EXPECT_EQ(answer.kind, LocalMessage::Kind::kRefused);
    EXPECT_NE(answer.text.find(words), std::string::npos) << answer.text;
  };
  refused(job.hello(1), "rank 1 is taken by process");
  LocalHello hello = job.hello(3);
  hello.world = 4;
  refused(hello, "rank 3 says 4 ranks and 1 stripes, the group has 5 and 1");
  hello = job.hello(3);
  hello.version++;
  refused(hello, "different versions");
  job.join(h, 3);
  EXPECT_EQ(h.hub->hub().ranks(), 3u);
}

TEST(HubJoin, ARefusalOfTheSwitchIsToldToEveryRank) {
  TestJob job({{0, 1, 2}}, 1, 4);
  TestHost& h = job.hosts.front();
  h.up->completions.clear();
  Completion c{Completion::Kind::kError};
  c.link = 1;
  c.error = LinkError::kRefused;
  c.code = aggregation::Code::kQuota;
  c.text = "tenant blue: 60 MiB of 64 MiB";
  h.up->completions.push_back(c);
  ASSERT_TRUE(job.start());
  job.for_each([](TestRank& r) {
    EXPECT_EQ(r.communicator->status(), MR_ERR_REFUSED);
    EXPECT_EQ(r.communicator->text(), "tenant blue: 60 MiB of 64 MiB");
  });
}

TEST(HubJoin, AnotherMtuIsTriedOnce) {
  TestJob job({{0, 1}}, 1, 4);
  TestHost& h = job.hosts.front();
  h.up->completions.clear();
  Completion c{Completion::Kind::kError};
  c.link = 1;
  c.error = LinkError::kRefused;
  c.code = aggregation::Code::kMtu;
  c.mtu_wanted = 3;
  h.up->completions.push_back(c);
  job.turn();
  ASSERT_EQ(h.up->requests.size(), 2u);
  EXPECT_EQ(h.up->requests[1].mtu, 1024u);
}

TEST(HubJoin, ARankThatDiesWhileOthersAreAwaitedEndsTheGroup) {
  TestJob job({{0, 1}, {2}}, 1, 4);
  job.run_until([] { return false; }, 20);
  job.rank(1).communicator.reset();
  job.rank(1).transport.reset();
  ASSERT_TRUE(job.run_until([&] { return job.rank(0).communicator->status() != MR_IN_PROGRESS; }));
  EXPECT_NE(job.rank(0).communicator->text().find("rank 1"), std::string::npos);
}

}  // namespace
}  // namespace millrace::host
