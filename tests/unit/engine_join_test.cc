// The engine against a connection manager alone: joins that no host of ours would make.
#include <gtest/gtest.h>

#include "aggregation/engine.h"
#include "aggregation/protocol.h"
#include "roce/error.h"

namespace millrace::aggregation {
namespace {

using Kind = roce::CmEvent::Kind;

EngineConfig config_of_one_address() {
  EngineConfig c;
  c.addresses = {*IpAddress::parse("10.0.0.9")};
  c.mac = {{2, 0, 0, 0, 0, 9}};
  return c;
}

class EngineJoin : public testing::Test {
 protected:
  EngineJoin() {
    path_.src_mac = {{2, 0, 0, 0, 0, 1}}, path_.dst_mac = config_.mac;
    path_.src_ip = *IpAddress::parse("10.0.0.1"), path_.dst_ip = config_.addresses[0];
  }
  // What comes of a connection with this private data.
  roce::CmEvent connect(std::span<const uint8_t> data) {
    FrameList out;
    const roce::CmQueuePair qp{.qpn = Qpn{0x100}, .first_psn = Psn(5)};
    agent_.connect(path_, roce::tcp_service_id(config_.cm_port), qp, 40000, data, now_, out);
    exchange(out);
    roce::CmEvent event;
    EXPECT_TRUE(agent_.next_event(event));
    return event;
  }
  // To the engine, and its MADs back.
  void exchange(FrameList& out) {
    while (Frame f = out.pop()) give(std::move(f));
    FrameList replies;
    engine_.poll(now_, replies);
    replies_.splice(replies);
    while (Frame f = replies_.pop()) {
      roce::Packet p;
      own_payload(f.buffer());
      ASSERT_EQ(roce::parse(f.bytes(), p), roce::ParseVerdict::kOk);
      if (p.dest_qp() == kGsiQpn) agent_.receive(p, now_, out);
    }
  }
  void give(Frame f) {
    roce::Packet p;
    ASSERT_EQ(roce::parse(f.bytes(), p), roce::ParseVerdict::kOk);
    engine_.receive(std::move(f), p, now_, replies_);
  }

  Time now_{std::chrono::seconds(1)};
  EngineConfig config_ = config_of_one_address();
  HeapFramePool pool_{4608, UINT32_MAX, true};
  Engine engine_{config_, pool_};
  roce::CmAgent agent_{{.ca_guid = 1}, pool_};
  roce::Path path_;
  FrameList replies_;
};

TEST_F(EngineJoin, WhoSpeaksAnotherProtocolIsRefusedAsForAnUnknownService) {
  const std::vector<uint8_t> foreign(56, 0x42);
  const auto event = connect(foreign);
  EXPECT_EQ(event.kind, Kind::kRejected);
  EXPECT_EQ(event.reason, roce::RejectReason::kInvalidServiceId);
  EXPECT_EQ(engine_.counters().joins_refused, 1u);
  EXPECT_EQ(engine_.queue_pairs(), 0u);
}

TEST_F(EngineJoin, AForeignVersionIsToldOurs) {
  JoinRequest join;
  join.version = 2;
  const auto event = connect(encode(join));
  EXPECT_EQ(event.kind, Kind::kRejected);
  const auto reject = decode_join_reject(event.private_data);
  ASSERT_TRUE(reject);
  EXPECT_EQ(reject->code, Code::kVersion);
  EXPECT_NE(reject->text.find("speaks protocol version 1, the host version 2"), std::string::npos)
      << reject->text;
}

TEST_F(EngineJoin, ASendWithImmediateEndsTheGroup) {
  const auto event = connect(encode(JoinRequest{}));
  ASSERT_EQ(event.kind, Kind::kReply);
  FrameList rtu;
  agent_.confirm(event.id, now_, rtu);
  exchange(rtu);
  ASSERT_EQ(engine_.groups(now_).at(0).state, "running");
  roce::TransportFields f;
  f.opcode = roce::Opcode::kSendOnlyImm;
  f.dest_qp = event.remote.qpn;
  f.psn = event.remote.first_psn;
  const std::vector<uint8_t> header(kSegmentHeaderBytes);
  give(roce::build(pool_, path_, f, header));
  const auto group = engine_.groups(now_).at(0);
  EXPECT_EQ(group.state, "failed");
  EXPECT_EQ(group.reason, "rank 0 (10.0.0.1) sent a SEND with immediate");
}

TEST(EngineConfig, ImpossibleValuesAreRefused) {
  HeapFramePool pool;
  const auto refused = [&](auto change) {
    EngineConfig c = config_of_one_address();
    change(c);
    EXPECT_THROW(Engine(c, pool), Error);
  };
  refused([](auto& c) { c.mtu = 1000; });
  refused([](auto& c) { c.segment_bytes = 65536; });
  refused([](auto& c) { c.window = 0; });
  refused([](auto& c) { c.world_max = 0; });
}

}  // namespace
}  // namespace millrace::aggregation
