// What the control sockets say of a traffic manager whose queues were filled by hand.
#include <gtest/gtest.h>

#include "buffering/local_store.h"
#include "roce/build.h"
#include "switch/qos_status.h"

namespace millrace::switching {
namespace {

using nlohmann::json;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kBytes = 14 + 20 + 8 + 12 + 940 + 4;  // of each frame
const std::vector<std::string> kPorts = {"p1", "p2"};

class QosStatusTest : public ::testing::Test {
 protected:
  QosStatusTest() {
    config_.pool_size = 1 << 20;
    config_.ports.resize(2);
    buffering::PortConfig& p = config_.ports[1];
    p.rate_bps = 1'000'000'000;
    p.dscp_to_tc[10] = 3;
    p.queues[3].profile.static_th = 5 * kBytes;
    p.queues[3].wred = buffering::WredProfile{1, 1, 1};
    config_.ports[0] = p;
    config_.ports[0].groups[3] = {.static_th = 3 * kBytes, .xoff = 10000};
    config_.ports[0].pfc.set(3);
  }
  void start(bool spill) {
    config_.ports[1].queues[3].profile.spill = spill;
    config_.spillway.enabled = spill;
    config_.spillway.dscp.set(10);
    config_.spillway.fast_cnp = spill;
    config_.spillway.drain_off = 3 * kBytes;
    config_.spillway.pool_size = kSpillBytes;
    std::unique_ptr<buffering::Store> store;
    if (spill)
      store = std::make_unique<buffering::LocalStore>(kSpillBytes, UINT32_MAX,
                                                      buffering::Spillway::ids_max(config_.spillway));
    manager_.emplace(config_, pool_, std::move(store));
  }
  // A RoCE request of DSCP 10, ECN-capable.
  void send(uint16_t source) {
    roce::Path path;
    path.src_ip = *IpAddress::parse("10.78.0.1");
    path.dst_ip = *IpAddress::parse("10.77.0.1");
    path.tos = 10 << 2 | roce::kEct0;
    const std::vector<uint8_t> payload(940);
    roce::TransportFields f;
    f.opcode = roce::Opcode::kSendMiddle;
    Frame frame = roce::build(pool_, path, f, payload);
    ASSERT_EQ(frame.total_length(), uint32_t{kBytes});
    manager_->enqueue(std::move(frame), 1, source, Time{}, out_);
  }
  json buffers() { return buffers_json(qos_status(*manager_, true, milliseconds(1)), kPorts); }
  json spillway() { return spillway_json(qos_status(*manager_, true, milliseconds(1)), kPorts); }
  static json amount(uint64_t packets) { return {{"packets", packets}, {"bytes", packets * kBytes}}; }

  HeapFramePool pool_;
  static constexpr uint64_t kSpillBytes = 1 << 20;
  buffering::Config config_;
  std::optional<buffering::TrafficManager> manager_;
  FrameList out_;
};

// One packet passes, five fit, the rest does not. All that stood behind another is marked.
TEST_F(QosStatusTest, BuffersSayWhatIsQueuedMarkedAndDropped) {
  start(false);
  for (int i = 0; i < 8; i++) send(buffering::kNoSource);
  json b = buffers();
  EXPECT_EQ(b["pool"], (json{{"size", 1 << 20}, {"used", 5 * kBytes}, {"headroom_used", 0}}));
  EXPECT_EQ(b["frames"]["queued"], 5);
  ASSERT_EQ(b["ports"].size(), 2u);
  EXPECT_EQ(b["ports"][1]["name"], "p2");
  const json& q = b["ports"][1]["queues"][3];
  EXPECT_EQ(q["queue"], 3);
  EXPECT_EQ(q["bytes"], 5 * kBytes);
  EXPECT_EQ(q["bytes_max"], 5 * kBytes);
  EXPECT_EQ(q["arrived"], amount(8));
  EXPECT_EQ(q["sent"], amount(1));
  EXPECT_EQ(q["dropped"], amount(2));
  EXPECT_EQ(q["dropped_by"], (json{{"queue_full", amount(2)}}));
  EXPECT_EQ(q["ce_marked"], 0) << "our own are never marked";
  EXPECT_EQ(q["paused"], false);
  EXPECT_EQ(b["ports"][1]["queues"][2]["arrived"], amount(0));
  EXPECT_EQ(spillway(), (json{{"enabled", false}}));
  const json counted = port_qos_counters_json(qos_status(*manager_, false, Time{}).ports[1]);
  EXPECT_EQ(counted["dropped"]["queue_full"], amount(2));
  EXPECT_EQ(counted["dropped"]["pool_full"], amount(0)) << "counters have all names";
}

// From p1, whose group may have three: with the fourth that waits, p1's neighbour is told to pause.
TEST_F(QosStatusTest, BuffersSayWhoIsToldToPause) {
  start(false);
  for (int i = 0; i < 5; i++) send(0);
  const json b = buffers();
  const json& g = b["ports"][0]["priority_groups"][3];
  EXPECT_EQ(g["bytes"], 4 * kBytes);
  EXPECT_EQ(g["headroom_bytes"], kBytes);
  EXPECT_EQ(g["lossless"], true);
  EXPECT_EQ(g["pausing"], true);
  EXPECT_EQ(b["ports"][0]["pfc"]["pauses_sent"], 1);
  EXPECT_EQ(b["ports"][1]["priority_groups"][3]["lossless"], false);
  EXPECT_EQ(b["pool"]["headroom_used"], kBytes);
  EXPECT_GE(b["ports"][1]["queues"][3]["ce_marked"], 3);
}

TEST_F(QosStatusTest, TheSpillwaySaysWhatItHoldsAndOfWhom) {
  config_.ports[0].groups[3] = {};
  start(true);
  for (int i = 0; i < 9; i++) send(0);
  json s = spillway();
  EXPECT_EQ(s["enabled"], true);
  EXPECT_EQ(s["all"]["spilled"], amount(3));
  EXPECT_EQ(s["all"]["resident"], amount(3));
  EXPECT_EQ(s["all"]["drained"], amount(0));
  EXPECT_EQ(s["fast_cnp"], json({{"enabled", true}, {"connections", 0}, {"connections_max", 16384}}));
  EXPECT_EQ(s["all"]["cnps_sent"], 0);
  EXPECT_EQ(s["ports"][1]["cnps_suppressed"],
            json({{"unknown_qp", 3}, {"interval", 0}, {"shrinking", 0}, {"no_frames", 0}}));
  EXPECT_EQ(s["ports"][1]["name"], "p2");
  EXPECT_EQ(s["ports"][1]["resident_bytes_max"], 3 * kBytes);
  EXPECT_EQ(s["ports"][0]["spilled"], amount(0));
  EXPECT_EQ(s["keys_count"], 1);
  ASSERT_EQ(s["keys"].size(), 1u);
  EXPECT_EQ(s["keys"][0]["port"], "p2");
  EXPECT_EQ(s["keys"][0]["queue"], 3);
  EXPECT_EQ(s["keys"][0]["destination"], "10.77.0.1");
  EXPECT_EQ(s["keys"][0]["state"], "spill");
  EXPECT_EQ(s["keys"][0]["resident"], amount(3));
  EXPECT_EQ(s["keys"][0]["oldest_ms"], 1.0);
  EXPECT_GE(s["store"]["used"], 3 * kBytes);
  EXPECT_EQ(buffers()["ports"][1]["queues"][3]["to_spillway"], amount(3));
  // 9 packets of 1022 bytes on the wire take 73.6 µs; the checks some more.
  for (Time now{}; now < milliseconds(1); now += microseconds(1)) manager_->poll(now, out_);
  s = spillway();
  EXPECT_EQ(out_.size(), 9u);
  EXPECT_EQ(s["all"]["drained"], amount(3));
  EXPECT_EQ(s["all"]["resident"], amount(0));
  EXPECT_TRUE(s["keys"].empty());
  uint64_t held = 0;
  for (const json& r : s["all"]["residence"]) held += r["packets"].get<uint64_t>();
  EXPECT_EQ(held, 3u);
}

}  // namespace
}  // namespace millrace::switching
