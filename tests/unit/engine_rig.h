// The engine and members made by hand: a connection manager joins for each, and the test says, packet by
// packet, what they send and reads what they are sent.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "aggregation/engine.h"
#include "aggregation/protocol.h"

namespace millrace::aggregation {

inline EngineConfig config_of_one_address() {
  EngineConfig c;
  c.addresses = {*IpAddress::parse("10.0.0.9")};
  c.mac = {{2, 0, 0, 0, 0, 9}};
  c.mtu = 256;
  c.segment_bytes = 256 - 64 + 256;
  c.window = 2;
  return c;
}

class EngineRig : public testing::Test {
 protected:
  // A packet that the engine has sent, with its frame.
  struct Received {
    Frame frame;
    roce::Packet packet;
  };
  struct Member {
    uint16_t rank = 0;
    roce::Path path;
    std::unique_ptr<roce::CmAgent> agent;
    roce::CmEvent reply{};
    Psn psn;                     // of its next request
    std::deque<Received> inbox;  // without MADs
  };

  explicit EngineRig(const EngineConfig& config = config_of_one_address()) : config_(config) {}

  Engine& engine() {
    if (!engine_) engine_ = std::make_unique<Engine>(config_, pool_);
    return *engine_;
  }
  // Another engine, which knows nobody, by the configuration as changed.
  void restart(const std::function<void(EngineConfig&)>& change) {
    change(config_);
    engine_.reset();
    members_.clear();
  }
  // The member of this rank, at 10.0.0.(1 + rank).
  Member& member(uint16_t rank) {
    Member& m = members_[rank];
    if (m.agent) return m;
    m.rank = rank;
    m.path.src_mac = {{2, 0, 0, 0, 0, static_cast<uint8_t>(1 + rank)}}, m.path.dst_mac = config_.mac;
    const uint8_t address[] = {10, 0, 0, static_cast<uint8_t>(1 + rank)};
    m.path.src_ip = IpAddress::from_v4(address), m.path.dst_ip = config_.addresses[0];
    m.agent = std::make_unique<roce::CmAgent>(roce::CmConfig{.ca_guid = 1u + rank, .seed = 1u + rank}, pool_);
    return m;
  }
  Qpn own_qpn(const Member& m) const { return Qpn{0x100u + m.rank}; }
  JoinRequest join_of(uint16_t rank, uint16_t world) const {
    JoinRequest j;
    j.mtu_code = roce::mtu_code(config_.mtu);
    j.rank = rank, j.world = world;
    j.nonce = 1;
    return j;
  }
  // What comes of a connection with this private data.
  roce::CmEvent connect(Member& m, std::span<const uint8_t> data) {
    const roce::CmQueuePair qp{.qpn = own_qpn(m), .first_psn = Psn(5)};
    m.agent->connect(m.path, roce::tcp_service_id(config_.cm_port), qp, 40000, data, now_, to_engine_);
    run();
    roce::CmEvent event{};
    EXPECT_TRUE(m.agent->next_event(event));
    m.reply = event;
    m.psn = event.remote.first_psn;
    return event;
  }
  // Joins and says RTU; the group starts when all have.
  Member& join(uint16_t rank, uint16_t world) {
    Member& m = member(rank);
    EXPECT_EQ(connect(m, encode(join_of(rank, world))).kind, roce::CmEvent::Kind::kReply);
    m.agent->confirm(m.reply.id, now_, to_engine_);
    run();
    return m;
  }
  // All of `world` ranks, joined, and START acknowledged by them.
  void form(uint16_t world) {
    for (uint16_t r = 0; r < world; r++) join(r, world);
    for (uint16_t r = 0; r < world; r++) {
      ASSERT_EQ(member(r).inbox.size(), 1u) << "START";
      acknowledge(member(r), member(r).inbox.front().packet.psn());
      member(r).inbox.clear();
    }
  }
  // A packet of the member's connection, PSN and all; `change` has the last word.
  Frame packet(const Member& m, roce::Opcode opcode, std::span<const uint8_t> payload = {},
               const std::function<void(roce::TransportFields&, roce::Path&)>& change = {}) {
    roce::TransportFields f;
    f.opcode = opcode;
    f.dest_qp = m.reply.remote.qpn;
    f.psn = m.psn;
    roce::Path path = m.path;
    if (change) change(f, path);
    return roce::build(pool_, path, f, payload);
  }
  void give(Frame f) {
    roce::Packet p;
    ASSERT_EQ(roce::parse(f.bytes(), p), roce::ParseVerdict::kOk);
    engine().receive(std::move(f), p, now_, from_engine_);
  }
  // The member's next request.
  void send(Member& m, roce::Opcode opcode, std::span<const uint8_t> payload = {}, bool ack_request = false) {
    give(packet(m, opcode, payload, [&](auto& f, auto&) { f.ack_request = ack_request; }));
    ++m.psn;
    run();
  }
  void acknowledge(Member& m, Psn psn, uint8_t syndrome = roce::kAckUnlimited) {
    give(packet(m, roce::Opcode::kAcknowledge, {},
                [&](auto& f, auto&) { f.psn = psn, f.syndrome = syndrome; }));
    run();
  }
  // MADs go to and fro until nobody says any more; everything else lands in the members' inboxes.
  void run() {
    do {
      while (Frame f = to_engine_.pop()) give(std::move(f));
      engine().poll(now_, from_engine_);
      while (Frame f = from_engine_.pop()) deliver(std::move(f));
    } while (!to_engine_.empty());
  }
  void run_at(Time t) {
    now_ = t;
    run();
  }
  // The header of an all-reduce of i32 sums whose only segment is of `bytes` bytes.
  SegmentHeader header(const Member& m, uint32_t bytes, uint64_t operation = 0) {
    SegmentHeader h;
    h.magic = kMagic;
    h.version = kProtocolVersion;
    h.collective = static_cast<uint8_t>(Collective::kAllReduce);
    h.op = static_cast<uint8_t>(ReduceOp::kSum);
    h.type = h.wire_type = static_cast<uint8_t>(DataType::kI32);
    h.flags = kFlagLast;
    h.group = engine().groups(now_).at(0).id;
    h.rank = m.rank;
    h.operation = operation;
    h.total = uint64_t{bytes};
    h.length = h.payload_bytes = bytes;
    h.result_address = 0x1000'0000u + (uint64_t{m.rank} << 20);
    h.result_rkey = 0x700u + m.rank;
    return h;
  }
  static std::vector<uint8_t> message(const SegmentHeader& h, std::span<const uint8_t> payload) {
    std::vector<uint8_t> b(sizeof(h) + payload.size());
    std::memcpy(b.data(), &h, sizeof(h));
    std::copy(payload.begin(), payload.end(), b.begin() + sizeof(h));
    return b;
  }
  // `count` of i32 `value`, as payload.
  static std::vector<uint8_t> numbers(size_t count, int32_t value) {
    std::vector<uint8_t> b(4 * count);
    for (size_t i = 0; i < count; i++) std::memcpy(&b[4 * i], &value, 4);
    return b;
  }
  // Every counter that differs from what it was, by name: "bad_opcode +1 packets +1".
  std::string gained(const Counters& before) {
    const Counters after = engine().counters();
    std::string s;
#define X(n)               \
  if (after.n != before.n) \
    s += (s.empty() ? "" : " ") + std::string(#n) + " +" + std::to_string(after.n - before.n);
    MILLRACE_AGGREGATION_COUNTERS(X)
#undef X
    return s;
  }
  GroupInfo group() { return engine().groups(now_).at(0); }

  Time now_{std::chrono::seconds(1)};
  EngineConfig config_;
  HeapFramePool pool_{4608, UINT32_MAX, true};
  FrameList to_engine_, from_engine_;

 private:
  void deliver(Frame f) {
    own_payload(f.buffer());
    if (f.buffer()->shared != nullptr) {  // results share their payload
      Frame flat = Frame::allocate(pool_);
      f.copy_to(flat.buffer()->data());
      flat.buffer()->length = f.total_length();
      f = std::move(flat);
    }
    Received r{std::move(f), {}};
    ASSERT_EQ(roce::parse(r.frame.bytes(), r.packet), roce::ParseVerdict::kOk);
    EXPECT_TRUE(roce::icrc_ok(r.packet));
    for (auto& [rank, m] : members_) {
      if (m.path.src_ip != r.packet.dst_ip) continue;
      if (r.packet.dest_qp() == kGsiQpn)
        m.agent->receive(r.packet, now_, to_engine_);
      else
        m.inbox.push_back(std::move(r));
      return;
    }
    ADD_FAILURE() << "a frame to nobody: " << r.packet.dst_ip.to_string();
  }
  std::map<uint16_t, Member> members_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace millrace::aggregation
