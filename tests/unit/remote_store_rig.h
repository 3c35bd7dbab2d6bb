// One store and the soft lenders that ship, in virtual time, over wires that lose, repeat and reorder. What
// comes back is compared with copies kept here.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "buffering/remote_store.h"
#include "host/memd_soft.h"

namespace millrace::buffering::lent_memory {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<uint8_t>;
using State = LenderStatus::State;

inline IpAddress ip(const std::string& text) { return *IpAddress::parse(text); }

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

}  // namespace millrace::buffering::lent_memory
