// The engine against a connection manager alone: joins that no host of ours would make.
#include "roce/error.h"
#include "tests/unit/engine_rig.h"

namespace millrace::aggregation {
namespace {

using Kind = roce::CmEvent::Kind;

class EngineJoin : public EngineRig {};

TEST_F(EngineJoin, WhoSpeaksAnotherProtocolIsRefusedAsForAnUnknownService) {
  const std::vector<uint8_t> foreign(56, 0x42);
  const auto event = connect(member(0), foreign);
  EXPECT_EQ(event.kind, Kind::kRejected);
  EXPECT_EQ(event.reason, roce::RejectReason::kInvalidServiceId);
  EXPECT_EQ(engine().counters().joins_refused, 1u);
  EXPECT_EQ(engine().queue_pairs(), 0u);
}

TEST_F(EngineJoin, AForeignVersionIsToldOurs) {
  JoinRequest join;
  join.version = 2;
  const auto event = connect(member(0), encode(join));
  EXPECT_EQ(event.kind, Kind::kRejected);
  const auto reject = decode_join_reject(event.private_data);
  ASSERT_TRUE(reject);
  EXPECT_EQ(reject->code, Code::kVersion);
  EXPECT_NE(reject->text.find("speaks protocol version 1, the host version 2"), std::string::npos)
      << reject->text;
}

TEST_F(EngineJoin, ASendWithImmediateEndsTheGroup) {
  form(1);
  send(member(0), roce::Opcode::kSendOnlyImm, std::vector<uint8_t>(kSegmentHeaderBytes));
  EXPECT_EQ(group().state, "failed");
  EXPECT_EQ(group().reason, "rank 0 (10.0.0.1) sent a SEND with immediate");
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
