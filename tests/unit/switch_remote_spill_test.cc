// The spillway over lent memory, in a whole pipeline in virtual time: a burst towards a slow port is written
// to lenders by RDMA and comes back in order. Rates and losses follow from arithmetic; the lenders are
// millrace-memd's soft ones.
#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "host/memd_soft.h"
#include "roce/build.h"
#include "switch/pipeline.h"
#include "tests/fuzz/frames.h"

namespace millrace::switching {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using Bytes = std::vector<uint8_t>;

constexpr MacAddress kSender{{2, 0, 0, 0, 1, 1}}, kReceiver{{2, 0, 0, 0, 1, 2}};
IpAddress ip(const std::string& text) { return *IpAddress::parse(text); }
MacAddress lender_mac(size_t i) { return {{2, 0, 0, 0, 2, static_cast<uint8_t>(i)}}; }
IpAddress lender_ip(size_t i, bool v6) { return ip((v6 ? "fd00::" : "10.0.0.") + std::to_string(50 + i)); }

// Port 0 sends, port 1 receives at 1 Gb/s, ports from 2 on have a lender each, known by an IPv4 address or by
// an IPv6 one.
struct Rig {
  explicit Rig(size_t lenders, bool six = false) : v6(six) {
    config.ports = static_cast<uint16_t>(2 + lenders);
    config.engine.mac = {{2, 0, 0, 0, 0, 1}};
    config.engine.addresses = {ip("10.0.0.1"), ip("fd00::1")};
    config.routing.interfaces = {{Prefix::parse("10.0.0.1/24").value(), kBridge, true},
                                 {Prefix::parse("fd00::1/64").value(), kBridge, true}};
    buffering::Config b;
    b.ports.resize(config.ports);
    b.ports[1].rate_bps = 1'000'000'000;
    for (auto& q : b.ports[1].queues) q.profile.static_th = 100'000, q.profile.spill = true;
    b.spillway.enabled = true;
    b.spillway.dscp.set(0);
    b.spillway.mark_ce = false;
    config.buffers = b;
    config.remote.emplace();
    for (size_t i = 0; i < lenders; i++) {
      config.remote->lenders.push_back({lender_ip(i, v6)});
      servers.push_back(std::make_unique<Server>(i, v6));
    }
  }
  struct Server {
    explicit Server(size_t i, bool six = false)
        : memory(8 << 20), table(memory, 1), lender(settings(i, six), table, pool) {}
    static host::SoftLenderConfig settings(size_t i, bool six) {
      host::SoftLenderConfig c;
      c.address = lender_ip(i, six);
      c.seed = c.ca_guid = 9 + i;
      return c;
    }
    Bytes memory;
    HeapFramePool pool;
    host::LeaseTable table;
    host::SoftLender lender;
    bool alive = true;
  };
  void start() {
    pipeline = std::make_unique<Pipeline>(config, pool);
    // Where hosts are is learned from what they send.
    Bytes hello(60);
    std::copy_n(config.engine.mac.bytes.begin(), 6, hello.begin());
    std::copy_n(kReceiver.bytes.begin(), 6, hello.begin() + 6);
    hello[12] = 0x88, hello[13] = 0xB5;
    feed(1, hello);
    run(milliseconds(600));  // the first REQ may go the way of ARP
    for (size_t i = 0; i < servers.size(); i++)
      ASSERT_EQ(pipeline->remote()->status(i).state, buffering::LenderStatus::State::kConnected)
          << pipeline->remote()->status(i).why;
  }
  Frame frame(uint16_t port, const Bytes& bytes) {
    Frame f = Frame::allocate(pool);
    f.buffer()->length = static_cast<uint32_t>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
    f.set_port(port);
    return f;
  }
  void feed(uint16_t port, const Bytes& bytes) {
    FrameList in, out;
    in.push(frame(port, bytes));
    pipeline->process(in, now, out);
    leave(out);
  }
  // A WRITE of 1,024 bytes of the sender to the receiver: 1,098 bytes of frame.
  void send_data() {
    roce::Path path;
    path.src_mac = kSender, path.dst_mac = kReceiver;
    path.src_ip = ip("10.0.0.10"), path.dst_ip = ip("10.0.0.11");
    roce::TransportFields f;
    f.opcode = roce::Opcode::kWriteOnly;
    f.dest_qp = Qpn{77};
    f.psn = Psn(sent++);
    f.dma_length = 1024;
    Bytes payload(1024);
    for (size_t i = 0; i < payload.size(); i++) payload[i] = static_cast<uint8_t>(sent * 31 + i);
    FrameList in, out;
    Frame packet = roce::build(pool, path, f, payload);
    packet.set_port(0);
    in.push(std::move(packet));
    pipeline->process(in, now, out);
    leave(out);
  }
  void leave(FrameList& out) {
    while (!out.empty()) {
      Frame f = out.pop();
      Bytes bytes(f.total_length());
      f.copy_to(bytes.data());
      if (f.port() == 1)
        receive(bytes);
      else if (f.port() >= 2)
        wire.push_back({now + microseconds(5), f.port(), bytes});
    }
  }
  void receive(Bytes& bytes) {
    roce::Packet p;
    if (roce::parse(bytes, p) != roce::ParseVerdict::kOk || p.dest_qp() != Qpn{77}) return;
    ASSERT_TRUE(roce::icrc_ok(p));
    ASSERT_EQ(p.payload[5], static_cast<uint8_t>((p.psn().value() + 1) * 31 + 5));
    const uint32_t psn = p.psn().value();
    if (psn < next) disordered++;
    missing += psn - next;
    next = psn + 1;
    received++;
  }
  // Asks who has the address: the lender's host answers (RFC 826 and RFC 4861).
  bool answer_arp(size_t i, Bytes b) {
    if (b.size() >= 78 && b[12] == 0x86 && b[20] == 58) {
      if (b[54] != 135 || IpAddress::from_v6(&b[62]) != lender_ip(i, true)) return true;
      MacAddress asker;
      std::copy_n(b.begin() + 6, 6, asker.bytes.begin());
      solicitations++;
      feed(static_cast<uint16_t>(2 + i),
           fuzz::neighbour(136, lender_mac(i), lender_ip(i, true), ip("fd00::1"), lender_ip(i, true), asker));
      return true;
    }
    if (b.size() < 42 || b[12] != 0x08 || b[13] != 0x06) return false;
    if (b[21] != 1 || IpAddress::from_v4(&b[38]) != lender_ip(i, false)) return true;
    const Bytes asker(b.begin() + 22, b.begin() + 32);
    const MacAddress mac = lender_mac(i);
    std::copy_n(asker.begin(), 6, b.begin());
    std::copy_n(mac.bytes.begin(), 6, b.begin() + 6);
    b[21] = 2;
    std::copy_n(mac.bytes.begin(), 6, b.begin() + 22);
    std::copy_n(lender_ip(i, false).v4(), 4, b.begin() + 28);
    std::copy(asker.begin(), asker.end(), b.begin() + 32);
    feed(static_cast<uint16_t>(2 + i), b);
    return true;
  }
  void serve(size_t i, FrameList& out) {
    while (!out.empty()) {
      Frame f = out.pop();
      Bytes bytes(f.total_length());
      f.copy_to(bytes.data());
      // Its Ethernet header is what the host's stack would make of it.
      std::copy_n(config.engine.mac.bytes.begin(), 6, bytes.begin());
      std::copy_n(lender_mac(i).bytes.begin(), 6, bytes.begin() + 6);
      feed(static_cast<uint16_t>(2 + i), bytes);
    }
  }
  void run(Time t, Time every = kNever) {
    const Time end = now + t;
    Time due = every == kNever ? kNever : now;
    for (; now < end && !testing::Test::HasFatalFailure(); now += nanoseconds(500)) {
      for (; due <= now; due += every) send_data();
      while (!wire.empty() && wire.front().at <= now) {
        const OnWire w = std::move(wire.front());
        wire.pop_front();
        const size_t i = w.port - 2u;
        Server& s = *servers[i];
        if (!s.alive || answer_arp(i, w.bytes)) continue;
        Frame f = Frame::allocate(s.pool);
        f.buffer()->length = static_cast<uint32_t>(w.bytes.size());
        std::copy(w.bytes.begin(), w.bytes.end(), f.buffer()->data());
        FrameList out;
        s.lender.receive(std::move(f), now, out);
        s.lender.poll(now, out);
        serve(i, out);
      }
      for (size_t i = 0; i < servers.size(); i++) {
        if (!servers[i]->alive || now < servers[i]->lender.next_deadline()) continue;
        FrameList out;
        servers[i]->lender.poll(now, out);
        serve(i, out);
      }
      if (now < pipeline->next_deadline()) continue;
      FrameList out;
      pipeline->poll(now, out);
      leave(out);
    }
  }
  const buffering::SpillCounters spill() const { return pipeline->buffers()->spillway()->counters(); }

  struct OnWire {
    Time at;
    uint16_t port;
    Bytes bytes;
  };
  bool v6;
  Time now = seconds(1);
  HeapFramePool pool{8192};
  PipelineConfig config;
  std::unique_ptr<Pipeline> pipeline;
  std::vector<std::unique_ptr<Server>> servers;
  std::deque<OnWire> wire;
  uint32_t sent = 0, next = 0, received = 0, missing = 0, disordered = 0;
  uint32_t solicitations = 0;
};

// 2 Gb/s onto 1 Gb/s for 5 ms, with 100 KB of queue: what does not fit, about (2 − 1) Gb/s × 5 ms − 100 KB =
// 525 KB, goes to the lenders and comes back, none of it lost, none of it out of order.
TEST(RemoteSpill, ABurstGoesToTheLendersAndComesBackInOrder) {
  Rig r(2);
  r.start();
  const uint32_t frames_before = r.pool.in_use();
  r.run(milliseconds(5), nanoseconds(4392));
  const auto& remote = *r.pipeline->remote();
  EXPECT_GT(remote.used(), 300u * 4224);
  EXPECT_NEAR(static_cast<double>(remote.status(0).held), static_cast<double>(remote.status(1).held), 4);
  r.run(milliseconds(12));
  EXPECT_GT(r.sent, 1100u);
  EXPECT_EQ(r.received, r.sent);
  EXPECT_EQ(r.disordered, 0u);
  const auto written = remote.status(0).written + remote.status(1).written;
  EXPECT_GE(written, (525'000u - 20'000u) / 1098);
  EXPECT_EQ(remote.status(0).read + remote.status(1).read, written);
  EXPECT_EQ(r.spill().drained.packets, written);
  EXPECT_EQ(remote.used(), 0u);
  EXPECT_GT(r.pipeline->counters().fate(Fate::kToStore), 0u);
  EXPECT_EQ(r.pool.in_use(), frames_before);
  // The port was never idle in between: the remote spill keeps up with it.
  const Time wire_time = nanoseconds(static_cast<int64_t>(r.sent) * (1098 + 24) * 8);
  EXPECT_LT(wire_time, milliseconds(11));
}

// The same to lenders that are known by IPv6 addresses: found by neighbour discovery, never by ARP; the data
// that is spilled is of IPv4 all the same.
TEST(RemoteSpill, LendersOfIpv6AreAsGood) {
  Rig r(2, true);
  r.start();
  EXPECT_GE(r.solicitations, 2u);
  const uint32_t frames_before = r.pool.in_use();
  r.run(milliseconds(5), nanoseconds(4392));
  r.run(milliseconds(12));
  EXPECT_GT(r.sent, 1100u);
  EXPECT_EQ(r.received, r.sent);
  EXPECT_EQ(r.disordered, 0u);
  uint64_t written = 0, bytes = 0;
  for (size_t i = 0; i < 2; i++) {
    const auto s = r.pipeline->remote()->status(i);
    const auto lease = r.servers[i]->table.leases().at(0);
    EXPECT_EQ(lease.borrower, ip("fd00::1"));
    EXPECT_EQ(lease.writes, s.written);
    EXPECT_EQ(s.read, s.written);
    written += s.written, bytes += lease.bytes_written;
  }
  EXPECT_GE(written, (525'000u - 20'000u) / 1098);
  EXPECT_EQ(bytes, written * 1098);
  EXPECT_EQ(r.spill().drained.packets, written);
  EXPECT_EQ(r.pipeline->remote()->used(), 0u);
  EXPECT_EQ(r.pool.in_use(), frames_before);
}

// Scenario 17: a lender dies mid-spill. Only what it held is lost, and counted; the rest drains in order.
TEST(RemoteSpill, ALenderThatDiesMidSpillLosesOnlyWhatItHeld) {
  Rig r(2);
  r.start();
  r.run(milliseconds(5), nanoseconds(4392));
  r.run(microseconds(100));
  r.servers[1]->alive = false;
  r.run(milliseconds(100));
  const auto lost = r.pipeline->remote()->status(1).lost;
  EXPECT_GT(lost, 100u);
  EXPECT_EQ(r.received + lost, r.sent);
  EXPECT_EQ(r.missing + (r.sent - r.next), lost);  // the last ones leave no gap
  EXPECT_EQ(r.disordered, 0u);
  EXPECT_EQ(r.spill().lost[static_cast<size_t>(buffering::SpillDrop::kStoreLost)].packets, lost);
  EXPECT_EQ(r.spill().spilled.packets, r.spill().drained.packets + lost);
  EXPECT_EQ(r.pipeline->remote()->status(0).lost, 0u);
  // It comes back, empty, and takes its part again.
  r.servers[1] = std::make_unique<Rig::Server>(1);
  r.run(seconds(1));
  r.run(milliseconds(5), nanoseconds(4392));
  r.run(milliseconds(12));
  EXPECT_EQ(r.received + lost, r.sent);
  EXPECT_GT(r.servers[1]->table.leases().at(0).bytes_read, 100'000u);
}

TEST(RemoteSpill, AtItsEndTheLeasesEnd) {
  Rig r(2);
  r.start();
  r.run(milliseconds(2), nanoseconds(4392));
  FrameList out;
  r.pipeline->shutdown(r.now, out);
  r.leave(out);
  EXPECT_FALSE(r.pipeline->drained());
  r.run(milliseconds(20));
  EXPECT_TRUE(r.pipeline->drained());
  EXPECT_EQ(r.received, r.sent);
  for (auto& s : r.servers) {
    EXPECT_TRUE(s->table.leases().empty());
    EXPECT_EQ(s->lender.counters().ended, 1u);
  }
}

// Local memory first: a spill that fits there asks no lender for anything.
TEST(RemoteSpill, LocalMemoryComesFirst) {
  for (const size_t local : {size_t{4} << 20, size_t{128} << 10}) {
    Rig r(1);
    r.config.spill_local = local;
    r.start();
    r.run(milliseconds(5), nanoseconds(4392));
    r.run(milliseconds(12));
    EXPECT_EQ(r.received, r.sent);
    EXPECT_EQ(r.disordered, 0u);
    EXPECT_EQ(r.pipeline->remote()->status(0).written > 0, local < 500'000) << local;
  }
}

}  // namespace
}  // namespace millrace::switching
