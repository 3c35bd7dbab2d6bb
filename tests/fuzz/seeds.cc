// Writes seed inputs for the fuzz targets: fuzz_seeds DIRECTORY makes DIRECTORY/<target>/<seed>. Packets come
// from the captured vectors, messages from our encoders, texts and scripts from here. What libFuzzer then
// finds and -merge=1 keeps is the corpus that is checked in.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "aggregation/protocol.h"
#include "roce/packet.h"
#include "tests/fuzz/target.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace::fuzz {
namespace {

namespace fs = std::filesystem;

class Seeds {
 public:
  Seeds(const fs::path& root, const std::string& target) : directory_(root / target) {
    fs::create_directories(directory_);
  }
  void add(const std::string& name, const Bytes& bytes) {
    std::ofstream(directory_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    count_++;
  }
  void add(const Bytes& bytes) { add("seed-" + std::to_string(count_), bytes); }

 private:
  fs::path directory_;
  size_t count_ = 0;
};

// One packet of each opcode and rough size in each capture; long ones are cut, to be repaired by the target.
void packets(const fs::path& root) {
  Seeds seeds(root, "packet");
  for (const auto& entry : fs::directory_iterator(fs::path(MILLRACE_SOURCE_ROOT) / "tests/vectors")) {
    if (entry.path().extension() != ".pcap") continue;
    std::set<std::pair<int, size_t>> seen;
    for (Bytes frame : vectors::read_pcap(entry.path().filename())) {
      roce::Packet p;
      const bool ok = roce::parse(frame, p) == roce::ParseVerdict::kOk;
      if (!seen.insert({ok ? static_cast<int>(p.opcode()) : -1, frame.size() > 400}).second) continue;
      const bool cut = frame.size() > 400;
      if (cut) frame.resize(200);
      seeds.add(Output().byte(cut ? 0x1F : 0).bytes(frame).get());
    }
  }
}

void messages(const fs::path& root) {
  using namespace aggregation;
  Seeds seeds(root, "protocol");
  const auto add = [&](uint8_t kind, std::span<const uint8_t> bytes) {
    seeds.add(Output().byte(kind).bytes(bytes).get());
  };
  JoinRequest join;
  join.rank = 3, join.world = 8, join.nonce = 7;
  add(0, encode(join));
  join.version = 2;
  add(0, encode(join));
  add(1, encode(JoinReply{1, 5, 4, 65472, 0}));
  add(2, encode(JoinReject{Code::kMtu, 3, "this switch's groups use a path MTU of 1024"}));
  add(3, encode(Start{8, 5, 1, 65472, 4, {1, 1, 1, 1}}));
  add(3, encode(Terminal{Code::kLate, 1, 2, {1, 2, 3}, "operation 2 timed out waiting for rank 3"}));
  for (int type = 1; type <= 13; type++) {
    for (int op = 0; op <= 8; op++) {
      SegmentHeader h;
      h.magic = kMagic;
      h.version = kProtocolVersion;
      h.collective = op == 0 ? 6 : 1;
      h.op = static_cast<uint8_t>(op);
      h.type = h.wire_type = static_cast<uint8_t>(type);
      const uint32_t length = op == 0 ? 0 : 32;
      h.flags = op == 0 ? kFlagLast | kFlagHeaderOnly : kFlagLast;
      h.total = uint64_t{length};
      h.length = h.payload_bytes = length;
      Output o;
      o.byte(4).bytes({reinterpret_cast<const uint8_t*>(&h), sizeof(h)});
      for (uint32_t i = 0; i < length; i++) o.byte(i * 37 + 1);
      seeds.add(o.get());
    }
  }
}

void configurations(const fs::path& root) {
  Seeds seeds(root, "config");
  const std::string least =
      "name: leaf1\naddresses: [10.77.0.100]\nports:\n  - {name: p1, device: \"net_null0\"}\n";
  for (const std::string& more : std::initializer_list<std::string>{
           "", "mac: 02:4d:52:00:00:01\n",
           "aggregation: {port: 18601, mtu: 1024, segment_bytes: 4032, window: 4, memory_limit: 32MiB}\n",
           "aggregation:\n  groups_max: 7\n  world_max: 16\n  join_timeout_ms: 1\n  operation_timeout_ms: 2\n"
           "  peer_dead_ms: 4\n  probe_after_ms: 3\n  straggler_after_ms: 5\n  retransmit_timeout_ms: 6\n"
           "  first_psn: 0xfffff0\n",
           "aggregation: {tenants: {7: {name: blue, memory_limit: 64MiB}, 8: {secret_file: none}}}\n",
           "  - {name: p2, device: net_null1, capture: {file: /tmp/p1.pcapng, limit: 2GiB, snaplen: 128, "
           "ring: 1MiB}}\n"
           "capture: {file: all.pcapng}\n",
           "  - name: p2\n    device: net_null1\n    impair: {rx: {loss: 0.01, duplicate: 0.02, reorder: "
           "0.03,"
           " corrupt: 0.04, delay_us: 5, seed: 6}, tx: {loss: 1}}\n",
           "l2: {ageing_s: 3, entries_max: 64, flood_pps: 10, move_guard_ms: 0}\nidle: {spin_us: 20, "
           "sleep_us_max: 100}\n"
           "frames: {count: 20000, room: 4700}\neal: [--no-huge, -m, 64]\nlcore: 1\n",
           "control: {read: /run/a.sock, change: /run/b.sock}\nlog: {level: debug}\n"})
    seeds.add(Output().text(least + more).get());
  seeds.add(Output()
                .text("name: spine\naddresses: [10.77.0.100/24, \"fd77::100/64\"]\nports:\n"
                      "  - {name: p1, device: d1}\n  - {name: p2, device: d2, addresses: [10.255.0.0/31, "
                      "\"fd00::/127\"]}\n"
                      "routes:\n  - {prefix: 10.78.0.0/24, via: [10.255.0.1]}\n"
                      "  - {prefix: \"::/0\", via: [\"fd00::1\", \"fd77::1\"]}\n"
                      "routing: {ecmp_seed: 1, icmp_errors_pps: 10, neighbours_max: 16, reachable_ms: 1000,"
                      " next_hop_probe_ms: 10}\n")
                .get());
  seeds.add(Output().text("&a [*a, {x: !!binary y}, ? [1, 2] : |\n  text\n, \"\\u00e9\"]\n--- {}\n").get());
}

void requests(const fs::path& root) {
  Seeds seeds(root, "control");
  for (const char* cmd : {"status", "groups", "l2", "routes", "neighbours", "counters"})
    seeds.add(Output().byte(4).text(std::string("{\"cmd\":\"") + cmd + "\"}").get());
  for (const char* line : {R"({"cmd":"abort","group":5,"why":"for a test"})", R"({"cmd":"abort","group":6})",
                           R"({"cmd":"impair","port":"p1","rx":{"loss":0.5,"delay_us":7},"tx":{"seed":1}})",
                           R"({"cmd":"impair","port":"p2","tx":{"duplicate":1,"reorder":1e-3,"corrupt":0}})",
                           R"({"cmd":["status"],"cmd":null})"})
    for (const int mood : {0, 1, 3, 5})
      seeds.add(
          Output().byte(static_cast<size_t>(mood)).text(std::string(line) + "\n{\"cmd\":\"status\"}").get());
}

void captures(const fs::path& root) {
  Seeds seeds(root, "pcapng");
  for (const size_t snaplen : {63u, 255u, 599u}) {
    Output o;
    o.u16(snaplen).byte(40).byte(30);                     // bounds of file and ring
    o.byte(1).byte(2).text("p1").byte(6).text("uplink");  // interfaces
    o.u64(1'700'000'000'000'000'000);
    for (size_t n = 0; n < 12; n++) {
      o.byte(n % 5 == 4 ? 0 : 1 + 2 * (n % 2) + 8 * n + (n % 3 ? 0x80 : 0));
      if (n % 5 == 4) continue;
      o.byte(20 * n).bytes(Bytes(20 * n, static_cast<uint8_t>(n))).byte(n % 4 + 16 * n);
      if (n % 4 & 1) o.byte(10 * n);
      if (n % 4 & 2) o.byte(4);
    }
    seeds.add(o.get());
  }
}

// Scripts of cm_fuzz.cc's operations.
void conversations_of_agents(const fs::path& root) {
  Seeds seeds(root, "cm");
  const Bytes start = {0x7F, 0, 0x7F, 0,
                       0};  // many connections, plenty of frames, on both sides; one listens
  enum : uint8_t {
    kConnect = 0,
    kNext = 1,
    kCopy = 2,
    kDrop = 3,
    kMutate = 4,
    kTime = 5,
    kAccept = 6,
    kReject = 7,
    kMra = 8,
    kConfirm = 9,
    kDisconnect = 10,
    kEstablished = 11,
    kForge = 12,
    kAgain = 13,
    kAll = 15,
    kB = 0x80
  };
  const auto add = [&](const Bytes& script) { seeds.add(Output().bytes(start).bytes(script).get()); };
  const Bytes up = {kConnect, 0, kNext, kB | kAccept, 0, kNext, kConfirm, 0, kNext};
  add(up);
  const auto with = [&](const Bytes& more) { add(Output().bytes(up).bytes(more).get()); };
  with({kDisconnect, 0, kNext, kNext, kTime, 7, kTime, 7});
  with({kB | kDisconnect, 0, kDrop, 0, kTime, 2, kNext, kNext, kAgain, 3, kTime, 7});
  with({kConnect, 0, kNext, kB | kAccept, 0, kAll, kTime, 5, kAll});  // the same queue pair again
  with({kForge, 5, 0x00, 0, kForge, 4, 0, 0, kForge, 6, 1, 0});
  add({kConnect, 1, kNext, kB | kReject, 0x80, kNext, kTime, 3, kAgain, 0, kNext, kTime, 7});
  add({kConnect,
       2,
       kNext,
       kB | kMra,
       0,
       kNext,
       kTime,
       4,
       kB | kAccept,
       0x80,
       kNext,
       kMra,
       0,
       kNext,
       kConfirm,
       0,
       kDrop,
       0,
       kTime,
       2,
       kNext,
       kNext,
       kB | kEstablished,
       0});
  add({kConnect, 0, kDrop, 0, kTime, 2, kTime, 2, kTime, 2, kTime, 2, kTime, 7});
  add({kConnect, 0, kConnect, 1, kConnect, 2, kConnect, 3, kAll, kB | kDisconnect, 1, kDisconnect, 2, kAll,
       kTime, 6});
  add({kConnect, 0x80, kNext, kNext, kConnect, 0, kMutate, 0, 1, 0, 60, 1, 0, 90, 2, 0, kNext});
  for (uint8_t kind = 0; kind < 7; kind++)
    with({kForge, kind, 0, 0x55, kForge, static_cast<uint8_t>(0x80 | kind), 1, 0xAA, kB | kForge, kind, 0,
          0x55, kAll});
}

// Scripts of switch_fuzz.cc's steps, for every shape of switch.
void conversations_with_a_switch(const fs::path& root) {
  Seeds seeds(root, "switch");
  enum : uint8_t {
    kJoin = 0,
    kReady = 1,
    kPacket = 2,
    kAck = 3,
    kSyndrome = 4,
    kBye = 5,
    kTime = 6,
    kMutate = 7,
    kAgain = 8,
    kTalk = 9,
    kRaw = 10,
    kAny = 11,
    kAbort = 12,
    kShutdown = 13,
    kAllJoin = 14,
    kAllSend = 15,
    kAllAck = 16,
    kFresh = 17,
    kGoBack = 18,
    kMad = 19,
    kOther = 0x20,
    kHold = 0x80
  };
  const std::vector<Bytes> scripts = {
      {kAllJoin, kAllSend, kAllAck, kAllSend, kAllAck, kAllSend, kAllSend, kAllAck, kAllSend, kAllAck, kTime,
       4, kBye, kOther | kBye, kTime, 4},
      {kAllJoin, kAllSend, kSyndrome, 0x60, 8, kSyndrome, 0x2C, 4, kTime, 2, kAllSend, kTime, 4, kAllAck,
       kTime, 5},
      {kAllJoin, kPacket, kPacket, kPacket, kPacket, kPacket, kPacket, kTime, 6, kTime, 7, kTime, 7},
      {kAllJoin, kHold | kPacket, kHold | kPacket, kHold | kOther | kPacket, kOther | kPacket, kGoBack, 8,
       kPacket, kGoBack, 0x81, kPacket, kAgain, 0, kAllAck},
      {kAllJoin, kFresh, kJoin, 0, kReady, kTime, 7, kTime, 6, kAllSend},
      {kJoin, 9, kOther | kJoin, 1, kJoin, 0x40, kTime, 7, kTime, 4, kJoin, 8},
      {kAllJoin, kAllSend, kMutate, 0x14, 0, 120, 3, kMutate, 0x11, 0, 50, 1, 0, 60, 2, kAllAck},
      {kAllJoin, kAny, 0x0A, 0x12, kAny, 0x81, 0, kAny, 0x0C, 2, kAny, 0x06, 8, kAllSend},
      {kAllJoin, kAllSend, kAbort, 0, kAllAck, kTime, 4, kShutdown, 7, kTime, 7},
      {kAllJoin, kMad, 2, 28, kMad, 1, 20, kMad, 0, kOther | kBye, kAllSend, kTime, 3},
      {kRaw, 20, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 2, 0, 0, 0, 1, 1, 8, 6, 0, 1, 8, 0, 6, 4, kAllJoin},
  };
  for (const uint8_t shape : {0, 1, 2, 4, 8, 16, 32, 64, 128, 129, 47})
    for (const Bytes& script : scripts) seeds.add(Output().byte(shape).byte(shape >> 1).bytes(script).get());
  for (const uint8_t shape : {0, 128}) {
    Output talk;
    talk.byte(shape).byte(0);
    for (size_t what = 0; what < 256; what += 3) talk.byte(kTalk | (what % 4 << 5)).byte(what);
    seeds.add(talk.byte(kTime).byte(7).byte(kTime).byte(7).get());
  }
}

// Scripts of read_fuzz.cc's steps, for every shape of its world.
void conversations_of_reads(const fs::path& root) {
  Seeds seeds(root, "read");
  enum : uint8_t {
    kRead = 0,  // its low nibble; the high one says how much
    kWrite = 2,
    kAsk = 3,
    kAnswer = 4,
    kNext = 5,
    kAnyOf = 6,
    kDrop = 7,
    kAgain = 8,
    kMutate = 9,
    kForgeAnswer = 10,
    kForgeRequest = 11,
    kTime = 12,
    kConverse = 13,
    kBusy = 14,
    kDeaf = 15
  };
  const auto n = [](uint8_t step, size_t more) { return static_cast<uint8_t>(step | more << 4); };
  const std::vector<Bytes> scripts = {
      {n(kWrite, 3), 1, 0, n(kRead, 3), 1, 0, n(kConverse, 4), n(kRead, 6), 0, 9, n(kConverse, 4)},
      {n(kRead, 5),   3,           200,
       n(kRead, 1),   0,           7,
       n(kRead, 2),   0,           8,
       n(kAsk, 9),    kNext,       kNext,
       n(kAnswer, 1), kDrop,       0,
       n(kAnswer, 9), kNext,       kNext,
       kNext,         n(kTime, 5), n(kConverse, 9)},
      {n(kRead, 4),
       3,
       255,
       n(kWrite, 2),
       4,
       4,
       n(kWrite, 9),
       0,
       2,
       n(kAsk, 15),
       kAnyOf,
       2,
       kAnyOf,
       1,
       n(kAnswer, 15),
       kAnyOf,
       3,
       kAgain,
       0,
       kAgain,
       1,
       n(kTime, 4),
       n(kConverse, 3)},
      {n(kBusy, 2),
       n(kWrite, 2),
       2,
       2,
       n(kRead, 6),
       1,
       1,
       n(kConverse, 2),
       n(kTime, 2),
       n(kConverse, 2),
       n(kDeaf, 1),
       n(kRead, 3),
       2,
       9,
       n(kAsk, 4),
       kNext,
       n(kAnswer, 4),
       kDrop,
       0,
       n(kTime, 5),
       n(kConverse, 2),
       n(kDeaf, 0)},
      {n(kRead, 5), 3, 200, n(kAsk, 2), kNext, n(kAnswer, 3), n(kMutate, 0), 0, 0, 0, 16, 1, 0,
       n(kConverse, 2)},
      {n(kRead, 3), 2, 77, n(kAsk, 2), n(kForgeAnswer, 0), 0x80, 0, n(kForgeAnswer, 0), 0x82, 1,
       n(kForgeAnswer, 1), 4, 0, 0x60, n(kConverse, 3)},
      {n(kForgeRequest, 0),
       0,
       0,
       1,
       0,
       2,
       0,
       n(kForgeRequest, 1),
       0,
       0,
       1,
       0,
       1,
       0,
       n(kAnswer, 15),
       n(kForgeRequest, 2),
       3,
       0,
       0,
       9,
       0,
       10,
       0,
       10,
       n(kConverse, 1)},
      {n(kTime, 7), n(kConverse, 1), n(kRead, 7), 0, 0, n(kConverse, 1), n(kTime, 7), n(kTime, 7),
       n(kConverse, 2)}};
  for (const uint8_t shape : {0x06, 0x00, 0x09, 0x12, 0x26, 0x46, 0x9E})
    for (const Bytes& script : scripts) seeds.add(Output().byte(shape).bytes(script).get());
}

// Scripts of lease_fuzz.cc's steps: a store and its lenders.
void conversations_of_lenders(const fs::path& root) {
  Seeds seeds(root, "lease");
  enum : uint8_t {
    kWrite = 0,  // its low nibble; the high one says how much
    kRead = 1,
    kDiscard = 2,
    kNext = 3,
    kAnyOf = 4,
    kDrop = 5,
    kAgain = 6,
    kMutate = 7,
    kTime = 8,
    kConverse = 9,
    kBorrow = 10,
    kAskFor = 11,
    kForge = 12,
    kPower = 13,
    kDecode = 14,
    kPoll = 15
  };
  const auto n = [](uint8_t step, size_t more) { return static_cast<uint8_t>(step | more << 4); };
  Output fill;
  fill.byte(n(kConverse, 5));
  for (size_t id = 0; id < 14; id++) fill.byte(n(kWrite, id + 2)).byte(id);
  fill.byte(n(kConverse, 3));
  const auto then = [&](const Bytes& more) { return Output().bytes(fill.get()).bytes(more).get(); };
  const std::vector<Bytes> scripts = {
      then({n(kRead, 12), n(kRead, 13), n(kConverse, 5), n(kDiscard, 1), n(kWrite, 9), 2, n(kRead, 15),
            n(kConverse, 9), n(kPoll, 15), n(kConverse, 4)}),
      then({n(kRead, 12), kPoll, kDrop, 0, kNext, kNext, n(kTime, 3), n(kConverse, 4), kAgain, 2, kAgain, 3,
            n(kRead, 12), n(kConverse, 2), n(kTime, 6), n(kConverse, 2)}),
      then({n(kRead, 8), n(kPower, 0), n(kTime, 5), n(kTime, 5), n(kPower, 4), n(kTime, 5), n(kConverse, 9),
            n(kWrite, 3), 1, n(kPower, 8), n(kConverse, 1), n(kTime, 5), n(kConverse, 9)}),
      then({n(kPower, 12), n(kConverse, 2), n(kTime, 6), n(kPower, 8), n(kTime, 7), n(kConverse, 9),
            n(kWrite, 15), 0}),
      then({n(kBorrow, 0),
            7,
            0x20,
            0,
            n(kConverse, 3),
            n(kAskFor, 0),
            0,
            4,
            140,
            n(kAskFor, 0),
            0x10,
            64,
            200,
            1,
            0,
            n(kAskFor, 0),
            1,
            0,
            140,
            8,
            4,
            n(kConverse, 3),
            n(kAskFor, 0),
            0x10,
            6,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            9,
            n(kConverse, 3),
            n(kRead, 15)}),
      then(
          {n(kForge, 2), 0x11, 0, 0, 0, 0, 0, 130, 9, n(kForge, 0), 7, 0, 0, 0, 0, 0, 0, 9, n(kConverse, 3)}),
      then({n(kRead, 4), kPoll, n(kMutate, 0), 0, 0, 0, 3, 1, 0, n(kConverse, 3), n(kMutate, 1), 2, 0, 0, 9,
            0xFF, 0}),
      {kPoll, n(kMutate, 0), 0, 1, 0, 100, 3, 0, 180, 7, 0, n(kConverse, 3), n(kTime, 5), n(kTime, 5),
       n(kConverse, 4)},
      {kDecode, 24, 'M', 'R', 'L', 'S', 1,       0,  0,   0,   0,   0,   0,   7,    0,   0,  0, 0, 0, 0,
       0,       0,  0,   0,   16,  0,   kDecode, 32, 'M', 'R', 'L', 'S', 1,   0,    0,   0,  1, 2, 3, 4,
       0,       0,  0,   0,   0,   0,   0,       0,  0,   1,   0,   0,   0,   0,    0,   0,  0, 0, 2, 0,
       kDecode, 14, 'M', 'R', 'L', 'S', 1,       2,  6,   0,   'n', 'o', ' ', 0x1B, '[', 'J'}};
  for (const uint16_t shape : {0x0010, 0x0110, 0x0218, 0x0758, 0x3810, 0xC010, 0x4400, 0x9012, 0x0030})
    for (const Bytes& script : scripts) seeds.add(Output().u16(shape).bytes(script).get());
  // A stranger with a part of his own, who writes and reads beyond its end and before its beginning.
  for (const Bytes& wish :
       {Bytes{0x11, 0x14, 120}, Bytes{0x10, 0x44, 120, 1, 0}, Bytes{0x10, 0x40, 100, 1, 0},
        Bytes{0x11, 0x10, 130}, Bytes{0x12, 0x54, 90, 1, 1}})
    for (const uint16_t shape : {0x0410, 0x0610, 0x0500})
      seeds.add(Output()
                    .u16(shape)
                    .bytes(fill.get())
                    .bytes(Bytes{n(kBorrow, 0), 7, 0x20, 0, n(kBorrow, 1), 7, 0x20, 0, n(kConverse, 3),
                                 n(kAskFor, 0)})
                    .bytes(wish)
                    .byte(n(kAskFor, 1))
                    .bytes(wish)
                    .bytes(Bytes{n(kConverse, 3), n(kRead, 15), n(kConverse, 9)})
                    .get());
  // A fake lender's answers: a lease, one that lies, a refusal, bytes.
  for (const Bytes& answer :
       {Bytes{0x0C, 0, 9, 8, 0}, Bytes{0x1C, 0, 9, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xF0, 0, 8, 0},
        Bytes{0x90, 4, 'f', 'u', 'l', 'l'}, Bytes{0x84, 3, 'M', 'R', 'L'}, Bytes{0x04, 0}})
    seeds.add(Output()
                  .u16(0x0017)
                  .byte(n(kConverse, 0))
                  .byte(kPoll)
                  .byte(kNext)
                  .bytes(answer)
                  .bytes(fill.get())
                  .get());
}

}  // namespace
}  // namespace millrace::fuzz

int main(int argc, char** argv) {
  using namespace millrace::fuzz;
  if (argc != 2) {
    std::fprintf(stderr, "usage: fuzz_seeds DIRECTORY\n");
    return 2;
  }
  packets(argv[1]);
  messages(argv[1]);
  configurations(argv[1]);
  requests(argv[1]);
  captures(argv[1]);
  conversations_of_agents(argv[1]);
  conversations_with_a_switch(argv[1]);
  conversations_of_reads(argv[1]);
  conversations_of_lenders(argv[1]);
  return 0;
}
