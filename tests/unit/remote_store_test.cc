// Spilled packets in memory that others lend: the store that ships against the soft lender that ships, in
// virtual time, over wires that lose, repeat and reorder. What comes back is compared with copies kept here.
#include "buffering/remote_store.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "buffering/local_store.h"
#include "buffering/tiered_store.h"
#include "host/memd_soft.h"
#include "roce/error.h"
#include "tests/unit/allocation.h"

namespace millrace::buffering {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<uint8_t>;
using State = LenderStatus::State;

IpAddress ip(const std::string& text) { return *IpAddress::parse(text); }

// One server that lends.
struct Server {
  Server(const IpAddress& address, size_t bytes, uint32_t parts, uint64_t seed, uint32_t mtu_max = 4096)
      : memory(bytes), table(memory, parts), lender(config(address, seed, mtu_max), table, pool) {}
  static host::SoftLenderConfig config(const IpAddress& address, uint64_t seed, uint32_t mtu_max) {
    host::SoftLenderConfig c;
    c.address = address;
    c.mtu_max = mtu_max;
    c.ca_guid = seed;
    c.seed = seed;
    return c;
  }
  Bytes memory;
  HeapFramePool pool;
  host::LeaseTable table;
  host::SoftLender lender;
  bool alive = true;  // false: nothing comes in or goes out
};

struct Rig {
  explicit Rig(size_t count, size_t bytes = 64 * 4224, uint64_t s = 1) : random(s), seed(s) {
    config.mac = {{2, 0, 0, 0, 0, 1}};
    config.addresses = {ip("10.0.0.1")};
    config.ids = 4096;
    config.seed = seed;
    config.first_psn = 0xFFFFF0;
    for (size_t i = 0; i < count; i++) add(bytes);
  }
  void add(size_t bytes, uint32_t parts = 1, uint32_t mtu_max = 4096) {
    const IpAddress address = ip("10.0.1." + std::to_string(servers.size() + 1));
    config.lenders.push_back({address});
    const size_t whole = (bytes / parts + 4095) / 4096 * 4096 * parts;
    servers.push_back(std::make_unique<Server>(address, whole, parts, 100 + seed + servers.size(), mtu_max));
  }
  void start() { store = std::make_unique<RemoteStore>(config, pool); }
  void start_and_connect() {
    start();
    run_until([&] { return connected() == servers.size(); });
    ASSERT_EQ(connected(), servers.size());
  }
  size_t connected() const {
    size_t n = 0;
    for (size_t i = 0; i < store->lenders(); i++) n += store->status(i).state == State::kConnected;
    return n;
  }

  uint32_t dice(uint32_t n) { return static_cast<uint32_t>(random() % n); }
  void put(FrameList& out, bool to_store, size_t server) {
    while (!out.empty()) {
      Frame f = out.pop();
      packets++;
      Bytes bytes(f.total_length());
      f.copy_to(bytes.data());
      roce::Packet p;
      ASSERT_EQ(roce::parse(bytes, p), roce::ParseVerdict::kOk);
      ASSERT_TRUE(roce::icrc_ok(p));
      if (!to_store)
        server = std::find_if(servers.begin(), servers.end(),
                              [&](auto& s) { return config.lenders[index(s.get())].address == p.dst_ip; }) -
                 servers.begin();
      ASSERT_LT(server, servers.size());
      cnps[to_store] += p.opcode() == roce::Opcode::kCnp;
      if (marking && p.opcode() != roce::Opcode::kCnp && p.dest_qp() != kGsiQpn) {
        bytes[15] |= 3;  // CE, and the header's checksum anew
        bytes[24] = bytes[25] = 0;
        const uint16_t sum = roce::internet_checksum(std::span(bytes).subspan(14, 20));
        bytes[24] = static_cast<uint8_t>(sum >> 8), bytes[25] = static_cast<uint8_t>(sum);
      }
      if (dice(100) < loss || !servers[server]->alive) continue;
      const uint32_t copies = dice(100) < repeat ? 2 : 1;
      for (uint32_t i = 0; i < copies; i++)
        wire.emplace(now + delay + microseconds(dice(100) < reorder ? dice(30) : 0),
                     OnWire{to_store, server, bytes});
    }
  }
  size_t index(const Server* s) const {
    for (size_t i = 0; i < servers.size(); i++)
      if (servers[i].get() == s) return i;
    return servers.size();
  }
  void step() {
    Time next = store->next_deadline();
    for (auto& s : servers)
      if (s->alive) next = std::min(next, s->lender.next_deadline());
    if (!wire.empty()) next = std::min(next, wire.begin()->first);
    if (next != kNever) now = std::max(now + microseconds(next <= now), next);
    FrameList out;
    while (!wire.empty() && wire.begin()->first <= now) {
      OnWire w = std::move(wire.begin()->second);
      wire.erase(wire.begin());
      Server& s = *servers[w.server];
      if (!s.alive) continue;
      if (w.to_store) {
        roce::Packet p;
        ASSERT_EQ(roce::parse(w.bytes, p), roce::ParseVerdict::kOk);
        // What concerns a connection that it has forgotten goes to the engine, which answers for the address.
        EXPECT_TRUE(store->receive(p, now, out) || p.dest_qp() == kGsiQpn);
        put(out, false, 0);
      } else {
        Frame f = Frame::allocate(s.pool);
        f.buffer()->length = static_cast<uint32_t>(w.bytes.size());
        std::copy(w.bytes.begin(), w.bytes.end(), f.buffer()->data());
        s.lender.receive(std::move(f), now, out);
        put(out, true, w.server);
      }
    }
    store->poll(now, out);
    put(out, false, 0);
    for (size_t i = 0; i < servers.size(); i++) {
      if (!servers[i]->alive) continue;
      servers[i]->lender.poll(now, out);
      put(out, true, i);
    }
    StoreEvent e;
    while (store->next_event(e)) take(e);
  }
  void take(StoreEvent& e) {
    ASSERT_TRUE(kept.contains(e.id)) << e.id;
    if (e.kind == StoreEvent::Kind::kRead) {
      ASSERT_TRUE(asked.contains(e.id));
      ASSERT_EQ(Bytes(e.frame.bytes().begin(), e.frame.bytes().end()), kept[e.id]) << e.id;
      back++;
    } else {
      ASSERT_FALSE(e.frame);
      lost.insert(e.id);
    }
    kept.erase(e.id);
    asked.erase(e.id);
  }
  void run_until(const std::function<bool()>& done, Time patience = seconds(30)) {
    const Time end = now + patience;
    while (!done() && now < end && !testing::Test::HasFatalFailure()) step();
  }
  void run_for(Time t) {
    const Time end = now + t;
    run_until([&] { return now >= end; }, t);
  }
  bool write(uint32_t id, size_t bytes) {
    Frame f = Frame::allocate(pool);
    f.buffer()->length = static_cast<uint32_t>(bytes);
    for (uint8_t& b : f.bytes()) b = static_cast<uint8_t>(random());
    Bytes copy(f.bytes().begin(), f.bytes().end());
    const bool taken = store->write(id, f, now);
    EXPECT_EQ(taken, !f);
    if (taken) kept[id] = std::move(copy);
    if (!one_turn) {
      FrameList out;
      store->poll(now, out);
      put(out, false, 0);
    }
    return taken;
  }
  void read(uint32_t id) {
    asked.insert(id);
    store->read(id, now);
  }

  struct OnWire {
    bool to_store;
    size_t server;
    Bytes bytes;
  };
  std::mt19937_64 random;
  uint64_t seed;
  uint32_t loss = 0, repeat = 0, reorder = 0;
  Time now{}, delay = microseconds(10);
  uint64_t packets = 0, back = 0;
  bool one_turn = false;      // all that is written is: small packets share slots; else each has its own
  bool marking = false;       // everything arrives marked "congestion experienced"
  uint64_t cnps[2] = {0, 0};  // to lenders, to the store
  HeapFramePool pool{8192};
  RemoteStoreConfig config;
  std::unique_ptr<RemoteStore> store;
  std::vector<std::unique_ptr<Server>> servers;
  std::multimap<Time, OnWire> wire;
  std::map<uint32_t, Bytes> kept;
  std::set<uint32_t> asked, lost;
};

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

TEST(RemoteStore, WhatIsWrittenComesBack) {
  Rig r(1);
  r.start_and_connect();
  EXPECT_EQ(r.store->size(), 64u * 4224);
  for (uint32_t id = 0; id < 64; id++)
    ASSERT_TRUE(r.write(id, id == 0 ? 1 : id == 1 ? 4224 : 60 + r.dice(4164)));
  EXPECT_EQ(r.store->used(), r.store->size());
  for (uint32_t id = 64; id-- > 0;) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 64u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.pool.in_use(), 0u);
  const LenderStatus s = r.store->status(0);
  EXPECT_EQ(s.written, 64u);
  EXPECT_EQ(s.read, 64u);
  EXPECT_EQ(s.lost, 0u);
  EXPECT_EQ(s.retransmitted, 0u);
  const auto lease = r.servers[0]->table.leases().at(0);
  EXPECT_EQ(lease.bytes_written, s.bytes_written);
  EXPECT_EQ(lease.bytes_read, s.bytes_read);
  EXPECT_EQ(lease.borrower, ip("10.0.0.1"));
}

// A RoCE packet of full length is longer than the path MTU; were all of it sent, it would be two packets each
// way.
TEST(RemoteStore, APacketOfFullLengthCrossesAsOne) {
  for (const auto& [bytes, wanted] :
       {std::pair{4154u, 1u}, {4224u, 1u}, {4096u, 1u}, {4095u, 1u}, {1100u, 1u}}) {
    Rig r(1);
    r.start_and_connect();
    const uint64_t before = r.store->status(0).packets_sent;
    for (uint32_t id = 0; id < 32; id++) ASSERT_TRUE(r.write(id, bytes));
    for (uint32_t id = 0; id < 32; id++) r.read(id);
    r.run_until([&] { return r.kept.empty(); });
    EXPECT_EQ(r.back, 32u) << bytes;
    // And as many requests for them.
    EXPECT_EQ(r.store->status(0).packets_sent - before, 32u * wanted + 32u) << bytes;
    EXPECT_EQ(r.servers[0]->table.leases().at(0).bytes_written, 32u * std::min(bytes, 4096u)) << bytes;
  }
  // Of a small MTU's many packets, none is of a few bytes only; and what is no header is not kept here.
  for (const auto& [bytes, wanted] : {std::pair{4154u, 4u}, {1024u + 129u, 2u}, {1024u + 128u, 1u}}) {
    Rig r(1);
    r.config.mtu = 1024;
    r.start_and_connect();
    const uint64_t before = r.store->status(0).packets_sent;
    ASSERT_TRUE(r.write(0, bytes));
    r.read(0);
    r.run_until([&] { return r.kept.empty(); });
    EXPECT_EQ(r.store->status(0).packets_sent - before, wanted + 1) << bytes;
  }
}

TEST(RemoteStore, SmallPacketsThatComeTogetherShareSlotsWritesAndReads) {
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  const uint64_t before = r.store->status(0).packets_sent;
  // Four of 1000 bytes are one packet of 4000; what comes later does not join them.
  for (uint32_t id = 0; id < 30; id++) ASSERT_TRUE(r.write(id, 1000));
  EXPECT_EQ(r.store->used(), 8u * 4224);
  EXPECT_EQ(r.store->status(0).held, 30u);
  r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 8; });
  ASSERT_TRUE(r.write(30, 1000));
  EXPECT_EQ(r.store->used(), 9u * 4224);
  r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 9; });
  EXPECT_EQ(r.store->status(0).packets_sent - before, 9u);
  EXPECT_GT(r.store->reads_max(), 16u) << "packets, of which a READ brings several";
  for (uint32_t id = 0; id < 31; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 31u);
  EXPECT_EQ(r.servers[0]->table.leases().at(0).reads, 9u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.store->status(0).held, 0u);
  EXPECT_EQ(r.store->status(0).bytes_read, 31'000u);
  EXPECT_EQ(r.pool.in_use(), 0u);
}

TEST(RemoteStore, OfASharedSlotAnyPacketMayBeReadOrGivenUp) {
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  const auto give_up = [&](uint32_t id) {
    r.store->discard(id);
    r.kept.erase(id), r.asked.erase(id);
  };
  for (uint32_t id = 0; id < 8; id++) ASSERT_TRUE(r.write(id, 500));
  give_up(7), give_up(3);  // while they are gathered, the last one and one in the middle
  ASSERT_TRUE(r.write(8, 90));
  r.read(5);  // before the WRITE has gone
  r.run_until([&] { return !r.kept.contains(5); });
  r.read(2), r.read(6), r.read(0);
  r.step();
  give_up(0);  // whose READ is under way, and whose frame it fills
  r.run_until([&] { return !r.kept.contains(2) && !r.kept.contains(6); });
  EXPECT_EQ(r.store->used(), 4224u);
  r.read(1), r.read(4), r.read(8);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.back, 6u);
  // All of it given up while it is gathered.
  ASSERT_TRUE(r.write(1, 500) && r.write(2, 500));
  give_up(1), give_up(2);
  r.run_for(milliseconds(1));
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.pool.in_use(), 0u);
}

// Two RoCE packets of 2048 B are longer than 4096 by their headers: of these, the first one's stay here.
TEST(RemoteStore, TwoPacketsOfHalfTheMtuAndTheirHeadersAreOnePacket) {
  const std::vector<std::vector<uint32_t>> slots = {
      {2106, 2106}, {62, 2000, 2096}, {128, 2048, 2048}, {2112, 1000}};
  for (const auto& lengths : slots)
    for (uint32_t without = 0; without <= lengths.size(); without++)
      for (const bool early : {true, false}) {
        Rig r(1);
        r.one_turn = true;
        r.start_and_connect();
        const auto give_up = [&] {
          if (without == lengths.size()) return;
          r.store->discard(without);
          r.kept.erase(without);
        };
        const uint64_t before = r.store->status(0).packets_sent;
        for (uint32_t id = 0; id < lengths.size(); id++) ASSERT_TRUE(r.write(id, lengths[id]));
        EXPECT_EQ(r.store->used(), 4224u);
        if (early) give_up();
        r.run_until([&] { return r.servers[0]->table.leases().at(0).writes == 1; });
        if (!early) give_up();
        EXPECT_EQ(r.store->status(0).packets_sent - before, 1u);
        // One by one, the last one first.
        for (uint32_t id = static_cast<uint32_t>(lengths.size()); id-- > 0;) {
          if (!r.kept.contains(id)) continue;
          r.read(id);
          r.run_until([&] { return !r.kept.contains(id); });
        }
        EXPECT_EQ(r.store->used(), 0u);
        EXPECT_EQ(r.pool.in_use(), 0u);
      }
  Rig r(1);
  r.one_turn = true;
  r.start_and_connect();
  ASSERT_TRUE(r.write(0, 62) && r.write(1, 2000) && r.write(2, 2097));  // one byte more than the first one's
  EXPECT_EQ(r.store->used(), 2u * 4224);
  for (uint32_t id = 0; id < 3; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 3u);
}

TEST(RemoteStore, ADeathLosesWhatIsGatheredAskedForAndUnderWay) {
  Rig r(1);
  r.one_turn = true;
  r.config.ids = 4096;
  r.start_and_connect();
  for (uint32_t id = 0; id < 100; id++) ASSERT_TRUE(r.write(id, 700));
  r.run_for(milliseconds(1));
  for (uint32_t id = 0; id < 90; id++) r.read(id);
  r.servers[0]->alive = false;
  r.run_for(microseconds(100));
  for (uint32_t id = 100; id < 103; id++) ASSERT_TRUE(r.write(id, 200));
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.lost.size() + r.back, 103u);
  EXPECT_GT(r.lost.size(), 12u);
  EXPECT_EQ(r.store->status(0).held, 0u);
  r.wire.clear();
  EXPECT_EQ(r.pool.in_use(), 0u);
  // And one that ends with all of this in it gives the frames back.
  Rig other(1);
  other.one_turn = true;
  other.start_and_connect();
  for (uint32_t id = 0; id < 50; id++) ASSERT_TRUE(other.write(id, 700));
  FrameList out;
  other.store->poll(other.now, out);
  for (uint32_t id = 0; id < 30; id++) other.read(id);
  other.store->poll(other.now, out);
  ASSERT_TRUE(other.write(50, 100));
  other.store.reset();
  out.clear();
  EXPECT_EQ(other.pool.in_use(), 0u);
}

// A READ behind its WRITE of the same slot, the slot used over and over, whatever the wires do.
class Wires : public testing::TestWithParam<uint64_t> {};
TEST_P(Wires, WhatIsWrittenComesBack) {
  Rig r(1 + GetParam() % 3, 24 * 4224, GetParam());
  if (GetParam() % 5 != 0) r.loss = r.dice(5), r.repeat = r.dice(6);
  if (GetParam() % 4 == 0) r.reorder = r.dice(10);
  r.config.mtu = GetParam() % 2 ? 4096 : 1024;
  r.config.peer_dead = seconds(20);  // what is lost here are packets, not lenders
  r.one_turn = GetParam() % 3 != 0;
  r.start_and_connect();
  uint32_t written = 0, next_id = 0;
  std::vector<uint32_t> held;
  while (written < 600 && !testing::Test::HasFatalFailure()) {
    for (uint32_t i = r.dice(20); i > 0; i--) {
      const uint32_t id = next_id % 100;
      if (r.kept.contains(id) || !r.write(id, 60 + r.dice(r.dice(2) ? 4165 : 1200))) break;
      next_id++, written++;
      held.push_back(id);
    }
    for (uint32_t i = r.dice(20); i > 0 && !held.empty(); i--) {
      const size_t at = r.dice(static_cast<uint32_t>(held.size()));
      const uint32_t id = held[at];
      held.erase(held.begin() + static_cast<ptrdiff_t>(at));
      if (r.dice(10) == 0) {
        r.store->discard(id);
        r.kept.erase(id);
      } else {
        r.read(id);
      }
    }
    for (uint32_t i = r.dice(30); i > 0; i--) r.step();
    ASSERT_LE(r.store->used(), r.store->size());
  }
  for (const uint32_t id : held) r.read(id);
  r.run_until([&] { return r.kept.empty(); }, seconds(100));
  EXPECT_TRUE(r.kept.empty());
  EXPECT_TRUE(r.lost.empty());
  EXPECT_EQ(r.store->used(), 0u);
  r.run_for(seconds(1));
  EXPECT_EQ(r.pool.in_use(), 0u);
  for (size_t i = 0; i < r.store->lenders(); i++) EXPECT_EQ(r.store->status(i).deaths, 0u);
}
INSTANTIATE_TEST_SUITE_P(Seeds, Wires, testing::Range(uint64_t{1}, uint64_t{31}));

TEST(RemoteStore, FullIsNoMoreAndTheFrameStaysTheCallers) {
  Rig r(1, 4 * 4224);
  r.start();
  EXPECT_FALSE(r.write(0, 100));  // nobody lends yet
  EXPECT_EQ(r.store->size(), 0u);
  r.run_until([&] { return r.connected() == 1; });
  ASSERT_EQ(r.store->size() / 4224, 4u);  // the part ends with less than a slot, or not
  for (uint32_t id = 0; id < 4; id++) EXPECT_TRUE(r.write(id, 100));
  EXPECT_FALSE(r.write(9, 100));
  EXPECT_FALSE(r.write(9, 4225));
  r.store->discard(2);
  r.kept.erase(2);
  EXPECT_TRUE(r.write(9, 100));
  for (const uint32_t id : {0u, 1u, 3u, 9u}) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 4u);
}

// Frames that wait for acknowledgements are bounded, and READs have their place in the queue all the same.
TEST(RemoteStore, WritesUnderWayAreBounded) {
  Rig r(1, 256 * 4224);
  r.config.writes_max = 16;
  r.start_and_connect();
  uint32_t id = 0;
  while (r.write(id, 1000)) id++;
  EXPECT_EQ(id, 16u);
  for (uint32_t i = 0; i < 16; i++) r.read(i);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 16u);
  EXPECT_TRUE(r.write(0, 1000));
}

// Sixteen READs in flight: a packet takes a sixteenth of the round trip, as the wire itself takes no time
// here.
TEST(RemoteStore, SeveralReadsAreInFlight) {
  for (const uint32_t depth : {1u, 16u}) {
    Rig r(1, 256 * 4224);
    r.delay = microseconds(50);
    r.config.reads_max = depth;
    r.start_and_connect();
    EXPECT_EQ(r.store->reads_max(), depth);
    for (uint32_t id = 0; id < 160; id++) ASSERT_TRUE(r.write(id, 4200));
    r.run_for(milliseconds(5));
    const Time begin = r.now;
    for (uint32_t id = 0; id < 160; id++) r.read(id);
    r.run_until([&] { return r.kept.empty(); });
    const auto round_trips = (r.now - begin) / microseconds(100);
    EXPECT_GE(round_trips, 160 / depth);
    EXPECT_LE(round_trips, 160 / depth + 160 / depth / 5 + 2);
  }
}

// The packet's path allocates nothing but frames of the pool.
TEST(RemoteStore, APacketsJourneyAllocatesNothing) {
  Rig r(1);
  r.start_and_connect();
  const auto journey = [&](bool forbidden) {
    FrameList out;
    Frame f = Frame::allocate(r.pool);
    f.buffer()->length = 1000;
    for (uint8_t& b : f.bytes()) b = 7;
    StoreEvent e;
    bool back = false;
    allocation_forbidden = forbidden;
    r.store->write(1, f, r.now);
    r.store->read(1, r.now);
    for (int i = 0; i < 20 && !back; i++) {
      r.store->poll(r.now, out);
      allocation_forbidden = false;  // wire and lender may
      while (Frame sent = out.pop()) {
        Frame copy = Frame::allocate(r.servers[0]->pool);
        copy.buffer()->length = sent.total_length();
        sent.copy_to(copy.buffer()->data());
        r.servers[0]->lender.receive(std::move(copy), r.now, out);
      }
      r.servers[0]->lender.poll(r.now, out);
      FrameList answers;
      answers.splice(out);
      while (Frame answer = answers.pop()) {
        roce::Packet p;
        ASSERT_EQ(roce::parse(answer.bytes(), p), roce::ParseVerdict::kOk);
        allocation_forbidden = forbidden;
        r.store->receive(p, r.now, out);
        allocation_forbidden = false;
      }
      allocation_forbidden = forbidden;
      back = r.store->next_event(e);
    }
    allocation_forbidden = false;
    ASSERT_TRUE(back);
    ASSERT_EQ(e.kind, StoreEvent::Kind::kRead);
    ASSERT_EQ(e.frame.bytes().size(), 1000u);
  };
  journey(false);  // fills the pools
  journey(true);
}

TEST(RemoteStore, TheLendersDepthIsKept) {
  Rig r(0);
  r.config.reads_max = 64;
  r.add(64 * 4224);  // grants 16
  r.start_and_connect();
  EXPECT_EQ(r.store->reads_max(), 16u);
  for (uint32_t id = 0; id < 60; id++) ASSERT_TRUE(r.write(id, 800));
  for (uint32_t id = 0; id < 60; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 60u);
  EXPECT_EQ(r.servers[0]->lender.counters().naks, 0u);
}

// What a READ under way brings for a packet that was given up is not the next packet's of that number.
TEST(RemoteStore, AnAnswerThatIsTooLateIsNobodysPacket) {
  Rig r(1);
  r.start_and_connect();
  ASSERT_TRUE(r.write(7, 900));
  r.run_for(milliseconds(1));
  r.read(7);
  r.step();  // the request is on the wire
  r.store->discard(7);
  r.kept.erase(7), r.asked.erase(7);
  ASSERT_TRUE(r.write(7, 900));
  r.read(7);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 1u);
  EXPECT_EQ(r.store->used(), 0u);
  EXPECT_EQ(r.store->status(0).read, 1u);
}

// Marked data draws CNPs, at most one in 50 µs, from either side; they are obeyed, and nothing is lost by it.
TEST(RemoteStore, CongestionIsToldToWhoeverSends) {
  Rig r(1);
  r.start_and_connect();
  r.marking = true;
  const Time begin = r.now;
  for (uint32_t id = 0; id < 60; id++) ASSERT_TRUE(r.write(id, 4000));
  for (uint32_t id = 0; id < 60; id++) r.read(id);
  r.run_until([&] { return r.kept.empty(); });
  EXPECT_EQ(r.back, 60u);
  const auto most = static_cast<uint64_t>((r.now - begin) / microseconds(50)) + 1;
  for (const uint64_t n : r.cnps) {
    EXPECT_GT(n, 0u);
    EXPECT_LE(n, most);
  }
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

TEST(TieredStore, TheSecondTakesWhatTheFirstHasNoRoomFor) {
  Rig r(1);
  r.start_and_connect();
  auto first = std::make_unique<LocalStore>(10 * 1024, 10, 4096);
  const LocalStore& local = *first;
  RemoteStore& remote = *r.store;
  TieredStore both(std::move(first), std::move(r.store), 4096);
  r.store.reset(&remote);  // given back below
  EXPECT_EQ(both.size(), local.size() + r.store->size());
  std::map<uint32_t, Bytes> kept;
  for (uint32_t id = 0; id < 30; id++) {
    Frame f = Frame::allocate(r.pool);
    f.buffer()->length = 1024;
    for (uint8_t& b : f.bytes()) b = static_cast<uint8_t>(r.random());
    kept[id] = Bytes(f.bytes().begin(), f.bytes().end());
    ASSERT_TRUE(both.write(id, f, r.now));
  }
  EXPECT_EQ(local.used(), local.size());
  EXPECT_EQ(r.store->used(), 5u * 4224);  // four share a slot
  EXPECT_EQ(both.used(), local.used() + r.store->used());
  both.discard(3), both.discard(25);
  kept.erase(3), kept.erase(25);
  for (const auto& [id, bytes] : kept) both.read(id, r.now);
  // Events are taken here, not by the rig.
  for (int i = 0; i < 400 && !kept.empty(); i++) {
    StoreEvent e;
    while (both.next_event(e)) {
      ASSERT_EQ(e.kind, StoreEvent::Kind::kRead);
      ASSERT_EQ(Bytes(e.frame.bytes().begin(), e.frame.bytes().end()), kept[e.id]);
      kept.erase(e.id);
    }
    r.kept = kept, r.asked.clear();
    for (const auto& [id, bytes] : kept) r.asked.insert(id);
    const uint64_t before = r.back;
    r.step();
    if (r.back != before) kept = r.kept;
  }
  EXPECT_TRUE(kept.empty());
  EXPECT_EQ(both.used(), 0u);
  (void)r.store.release();  // it is both's
}

}  // namespace
}  // namespace millrace::buffering
