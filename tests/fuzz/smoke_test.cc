// A short fuzz of everything that reads bytes from the wire: random and mutated input, fixed seeds, bounded
// time. MILLRACE_FUZZ scales the number of inputs (default 1). Sanitizers judge memory; the tests judge
// effects.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>

#include "roce/build.h"
#include "roce/packet.h"
#include "tools/sim/cluster.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace {
namespace {

size_t inputs(size_t n) {
  const char* s = std::getenv("MILLRACE_FUZZ");
  return s ? static_cast<size_t>(static_cast<double>(n) * std::atof(s)) : n;
}

void mutate(std::vector<uint8_t>& bytes, std::mt19937_64& random) {
  for (uint64_t n = 1 + random() % 4; n > 0 && !bytes.empty(); n--) {
    const size_t at = random() % bytes.size();
    switch (random() % 5) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1 << random() % 8);
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(random());
        break;
      case 2:
        bytes[at] = random() % 2 ? 0xFF : 0;
        break;
      case 3:
        bytes.resize(at);
        break;
      case 4:
        bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at), static_cast<uint8_t>(random()));
        break;
    }
  }
}

// Makes lengths, checksum and ICRC of a mutated IPv4 RoCE frame right again, so that it reaches what lies
// behind.
void repair(std::vector<uint8_t>& b) {
  if (b.size() < 14 + 20 + 8 + 12 + 4 || b[12] != 8 || b[13] != 0) return;
  const size_t ip = b.size() - 14;
  b[14] = 0x45;
  b[16] = static_cast<uint8_t>(ip >> 8), b[17] = static_cast<uint8_t>(ip);
  b[20] = 0x40, b[21] = 0;
  b[23] = 17;
  b[24] = b[25] = 0;
  const uint16_t sum = roce::internet_checksum({b.data() + 14, 20});
  b[24] = static_cast<uint8_t>(sum >> 8), b[25] = static_cast<uint8_t>(sum);
  b[36] = 4791 >> 8, b[37] = 4791 & 0xFF;
  b[38] = static_cast<uint8_t>((ip - 20) >> 8), b[39] = static_cast<uint8_t>(ip - 20);
  roce::Packet p;
  if (roce::parse(b, p) != roce::ParseVerdict::kOk) return;
  roce::store_icrc(b.data() + b.size() - 4, roce::icrc(p.ip.first(p.ip.size() - 4), p.header_bytes));
}

TEST(Fuzz, TheParserNamesWhateverComes) {
  std::mt19937_64 random(1);
  std::vector<std::vector<uint8_t>> seeds;
  for (const char* f : {"rping-cm-10x256.pcap", "rping-cm-ipv6.pcap", "rstream-write-imm.pcap"})
    for (auto& frame : vectors::read_pcap(f)) seeds.push_back(frame);
  for (size_t i = 0, n = inputs(300000); i < n; i++) {
    std::vector<uint8_t> bytes;
    if (i % 4 == 0) {
      bytes.resize(random() % 200);
      for (auto& b : bytes) b = static_cast<uint8_t>(random());
    } else {
      bytes = seeds[random() % seeds.size()];
      mutate(bytes, random);
    }
    bytes.shrink_to_fit();
    roce::Packet p;
    if (roce::parse(bytes, p) == roce::ParseVerdict::kOk) roce::icrc_ok(p);
  }
}

TEST(Fuzz, TheProtocolsDecodersTakeWhateverComes) {
  std::mt19937_64 random(2);
  const auto start = aggregation::encode(aggregation::Start{8, 5, 1, 65472, 4, {1, 1, 1, 1}});
  const auto terminal =
      aggregation::encode(aggregation::Terminal{aggregation::Code::kLate, 1, 2, {1, 2, 3}, "some text"});
  const auto reject = aggregation::encode(aggregation::JoinReject{aggregation::Code::kQuota, 0, "some text"});
  const auto join = aggregation::encode(aggregation::JoinRequest{});
  for (size_t i = 0, n = inputs(300000); i < n; i++) {
    std::vector<uint8_t> bytes = i % 4 == 0   ? start
                                 : i % 4 == 1 ? terminal
                                 : i % 4 == 2 ? reject
                                              : std::vector<uint8_t>(join.begin(), join.end());
    mutate(bytes, random);
    bytes.shrink_to_fit();
    aggregation::decode_control_message(bytes);
    aggregation::decode_join_reject(bytes);
    aggregation::decode_join_reply(bytes);
    aggregation::decode_join_request(bytes);
    if (bytes.size() >= 64)
      aggregation::check(*reinterpret_cast<const aggregation::SegmentHeader*>(bytes.data()), 65472, 4);
  }
}

// A running group, with a copy of everything that its members sent.
class Conversation : public testing::Test {
 protected:
  void start(uint64_t seed) {
    sim::ClusterConfig cc;
    cc.seed = seed;
    cc.hosts = 3;  // two members and one stranger
    cc.engine.mtu = 256;
    cc.engine.segment_bytes = 256 * 4 - 64;
    cluster = std::make_unique<sim::Cluster>(cc);
    cluster->tap = [this](uint16_t host, bool to_switch, std::span<const uint8_t> f) {
      if (to_switch && host < 2 && recorded.size() < 5000) recorded.emplace_back(f.begin(), f.end());
    };
    comms.clear(), recorded.clear();
    for (uint16_t r = 0; r < 2; r++) comms.push_back(&cluster->host(r).join(cluster->communicator(r, 2)));
    ASSERT_TRUE(cluster->run([&] {
      return comms[0]->state() == host::Communicator::State::kRunning &&
             comms[1]->state() == host::Communicator::State::kRunning;
    }));
  }
  // Submits one sum of 32-bit integers at both ranks.
  void submit(size_t count) {
    for (int r = 0; r < 2; r++) {
      in[r].resize(count), out[r].assign(count, -1);
      for (size_t i = 0; i < count; i++)
        in[r][i] = static_cast<int32_t>(i * 7 + static_cast<size_t>(r) * 1000003);
      op[r] = host::Operation{};
      op[r].op = aggregation::ReduceOp::kSum;
      op[r].type = aggregation::DataType::kI32;
      op[r].send = reinterpret_cast<const uint8_t*>(in[r].data());
      op[r].recv = reinterpret_cast<uint8_t*>(out[r].data());
      op[r].bytes = count * 4;
      comms[r]->submit(&op[r], cluster->now());
      cluster->host(static_cast<uint16_t>(r)).pump(cluster->now());
    }
  }
  void expect_exact() {
    for (int r = 0; r < 2; r++) {
      ASSERT_EQ(op[r].status, MR_OK) << op[r].text;
      for (size_t i = 0; i < out[r].size(); i++) ASSERT_EQ(out[r][i], in[0][i] + in[1][i]) << i;
    }
  }
  std::unique_ptr<sim::Cluster> cluster;
  std::vector<host::Communicator*> comms;
  std::vector<std::vector<uint8_t>> recorded;
  std::vector<int32_t> in[2], out[2];
  host::Operation op[2];
};

// A stranger replays and mutates what members sent (right ICRC, live queue pairs, PSNs in the window), from
// its own address: drop counters move, sums do not.
TEST_F(Conversation, AStrangerChangesNothing) {
  start(3);
  std::mt19937_64 random(3);
  submit(2000);
  ASSERT_TRUE(cluster->run([&] { return op[0].done && op[1].done; }));
  expect_exact();
  for (size_t rounds = 0, n = inputs(40); rounds < n; rounds++) {
    submit(2000);
    for (int i = 0; i < 500; i++) {
      std::vector<uint8_t> f = recorded[random() % recorded.size()];
      const MacAddress mac = sim::Cluster::host_mac(2);
      std::copy(mac.bytes.begin(), mac.bytes.end(), f.begin() + 6);
      if (f.size() > 30 && f[12] == 8) f[29] = 3;  // 10.77.0.3
      if (f.size() > 50) {
        // Data only: a stranger's CM messages may well open connections of its own.
        const bool data = !(f[47] == 0 && f[48] == 0 && f[49] == 1);
        if (!data) continue;
      }
      if (random() % 2) mutate(f, random);
      if (f.size() > 30 && f[12] == 8) f[26] = 10, f[27] = 77, f[28] = 0, f[29] = 3;
      if (f.size() > 12) std::copy(mac.bytes.begin(), mac.bytes.end(), f.begin() + 6);
      repair(f);
      cluster->inject(2, f);
      if (i % 50 == 0) cluster->run_for(std::chrono::microseconds(20));
    }
    ASSERT_TRUE(cluster->run([&] { return op[0].done && op[1].done; }));
    expect_exact();
  }
  const auto counters = cluster->pipeline().engine().counters();
  EXPECT_GT(counters.qp_source_mismatch, 100u);
  EXPECT_EQ(counters.groups_failed, 0u);
}

// A member itself goes mad: groups may fail, nothing else may.
TEST_F(Conversation, AMadMemberBreaksNothingButItsGroup) {
  std::mt19937_64 random(4);
  size_t failed = 0;
  for (size_t rounds = 0, n = inputs(150); rounds < n; rounds++) {
    start(100 + rounds);
    submit(20000);
    cluster->run_for(std::chrono::microseconds(random() % 100));
    for (int i = 0; i < 300; i++) {
      // Half of them recent and with a PSN moved on a little, so that some are exactly what is expected next.
      const size_t recent = std::min<size_t>(recorded.size(), 40);
      const bool next = random() % 2;
      std::vector<uint8_t> f =
          recorded[next ? recorded.size() - 1 - random() % recent : random() % recorded.size()];
      const uint16_t from = f.size() > 11 && f[11] == 1 ? 1 : 0;
      if (next && f.size() > 53) f[53] = static_cast<uint8_t>(f[53] + random() % 6);
      if (!next || random() % 4) mutate(f, random);
      if (random() % 8) repair(f);
      cluster->inject(from, f);
      if (i % 20 == 0) cluster->run_for(std::chrono::microseconds(5));
    }
    // Every operation ends: as a sum, or as an error.
    ASSERT_TRUE(cluster->run([&] { return op[0].done && op[1].done; }, std::chrono::seconds(700)));
    failed += cluster->pipeline().engine().counters().groups_failed;
    for (auto* c : comms) c->close(cluster->now());
    cluster->host(0).pump(cluster->now()), cluster->host(1).pump(cluster->now());
    cluster->run([&] { return cluster->pipeline().engine().groups(cluster->now()).empty(); },
                 std::chrono::seconds(70));
    ASSERT_EQ(cluster->pipeline().engine().memory_reserved(), 0u);
    ASSERT_EQ(cluster->switch_pool().in_use(), 0u);
  }
  EXPECT_GT(failed, 0u) << "the mutations reach nothing";
}

}  // namespace
}  // namespace millrace
