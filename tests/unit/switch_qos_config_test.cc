// The configuration's `qos` and `spillway`: what a short file gets, what a full one means, and every refusal.
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "roce/error.h"
#include "switch/config.h"

namespace millrace::switching {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

const std::string kBase = R"(name: leaf1
addresses: [10.77.0.100]
ports:
  - {name: p1, device: "net_null0"}
  - {name: p2, device: "net_null1"}
  - {name: p3, device: "net_null2"}
)";

buffering::Config parse(const std::string& more) {
  return parse_config(kBase + more, "f.yaml").buffers.value();
}

// Line 7 is the first of `more`.
std::string refusal(const std::string& more) {
  try {
    parse_config(kBase + more, "f.yaml");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kConfig);
    return e.what();
  }
  return "accepted";
}

TEST(QosConfig, WithoutItThereIsNoTrafficManager) {
  for (const char* more : {"", "qos:\n", "qos:\nspillway:\n"}) {
    const Config c = parse_config(kBase + more, "f.yaml");
    EXPECT_FALSE(c.buffers) << more;
    EXPECT_EQ(c.engine.line_rate, 100'000'000'000u);
  }
}

TEST(QosConfig, AnEmptyMapLimitsNothingButFrames) {
  const Config c = parse_config(kBase + "qos: {}\n", "f.yaml");
  ASSERT_TRUE(c.buffers);
  ASSERT_EQ(c.buffers->ports.size(), 3u);
  EXPECT_EQ(c.buffers->mac, c.engine.mac);
  EXPECT_EQ(c.buffers->mtu, 4200u);
  EXPECT_EQ(c.buffers->frames_max, 2048u) << "an eighth";
  EXPECT_FALSE(c.buffers->spillway.enabled);
  EXPECT_EQ(c.engine.line_rate, 100'000'000'000u);
  for (const auto& port : c.buffers->ports) {
    EXPECT_EQ(port.rate_bps, 0u);
    EXPECT_TRUE(port.pfc.none());
    for (const auto& q : port.queues) {
      EXPECT_EQ(q.profile.static_th, buffering::kNoLimit);
      EXPECT_FALSE(q.profile.dynamic_th || q.profile.spill || q.wred);
    }
  }
}

TEST(QosConfig, AShortFileGivesCnpsAClassOfTheirOwnAndLeavesAcknowledgementsWithTheirData) {
  const buffering::Config b = parse(R"(qos:
  PORT: {"*": {rate_mbps: 1000}}
)");
  EXPECT_FALSE(b.ack_tc);
  EXPECT_EQ(b.cnp_tc, 6);
  for (const auto& port : b.ports) {
    EXPECT_EQ(port.rate_bps, 1'000'000'000u);
    for (size_t q = 0; q < 8; q++) EXPECT_EQ(port.queues[q].scheduler.strict, q == 6);
  }
  const buffering::Config own = parse("qos: {ack_tc: 5, cnp_tc: 2}\n");
  EXPECT_EQ(own.ack_tc, 5);
  EXPECT_EQ(own.cnp_tc, 2);
  EXPECT_TRUE(own.ports[0].queues[2].scheduler.strict);
  EXPECT_TRUE(own.ports[0].queues[5].scheduler.strict);
  EXPECT_FALSE(own.ports[0].queues[6].scheduler.strict);
  EXPECT_FALSE(parse("qos: {cnp_tc: none}\n").cnp_tc);
}

const std::string kFull = R"(qos:
  frames_max: 512
  ack_tc: 7
  cnp_tc: 6
  PORT:
    "*": {speed: 25000}
    p1: {rate_mbps: 1000}
  BUFFER_POOL:
    shared: {type: both, mode: dynamic, size: 8MiB, xoff: 1MiB}
  BUFFER_PROFILE:
    lossless: {pool: shared, size: 4096, dynamic_th: -3, xoff: 40KiB, xon: 0, xon_offset: 8192}
    lossy: {pool: shared, dynamic_th: 7}
    spilling: {static_th: 100000, packet_discard_action: spill}
    dropping: {size: 1KiB, static_th: 64KiB, packet_discard_action: drop}
  WRED_PROFILE:
    early: {ecn: ecn_all, green_min_threshold: 20KiB, green_max_threshold: 80KiB, green_drop_probability: 5}
  SCHEDULER:
    first: {type: STRICT}
    third: {type: DWRR, weight: 30}
  DSCP_TO_TC_MAP:
    rdma: {26: 3, "8-15": 4, "48,56-57": 6}
  TC_TO_QUEUE_MAP:
    fold: {4: 3}
  TC_TO_PRIORITY_GROUP_MAP:
    fold: {4: 3, 0: 7}
  BUFFER_PG:
    "*|0-2": {profile: lossy}
    "p2|3": {profile: lossless}
  BUFFER_QUEUE:
    "p1,p2|0": {profile: spilling}
    "*|0": {profile: dropping}
  QUEUE:
    "*|3-4": {scheduler: third, wred_profile: early}
    "p3|4": {scheduler: first}
  PORT_QOS_MAP:
    "*": {dscp_to_tc_map: rdma, tc_to_queue_map: fold, tc_to_pg_map: fold}
    p2: {pfc_enable: "3,5-6"}
  PFC_WD:
    "*": {action: drop, detection_time: 100, restoration_time: 300}
    p3: {action: none}
spillway:
  spill_dscp: [10, "16-18"]
  spill_src_prefix: [10.78.0.0/16, "fd78::/64"]
  spill_pool_size: 64MiB
  spill_key_limit: 1MiB
  spill_max_keys: 9
  drain_on_bytes: 10KiB
  drain_off_bytes: 20KiB
  drain_check_interval_us: 20
  drain_hold_checks: 3
  drain_rate_mbps: 500
  drain_burst: 9000
  spill_mark_ce: false
  fast_cnp: true
  fast_cnp_interval_us: 70
  fast_cnp_dscp: 46
  max_residence_ms: 50
)";

TEST(QosConfig, TheWholeOfItIsRead) {
  const Config c = parse_config(kBase + kFull, "f.yaml");
  const buffering::Config& b = *c.buffers;
  EXPECT_EQ(b.frames_max, 512u);
  EXPECT_EQ(b.ack_tc, 7);
  EXPECT_EQ(b.cnp_tc, 6);
  EXPECT_EQ(b.pool_size, 8u << 20);
  EXPECT_EQ(b.pool_xoff, 1u << 20);
  const auto &p1 = b.ports[0], &p2 = b.ports[1], &p3 = b.ports[2];
  EXPECT_EQ(p1.rate_bps, 1'000'000'000u);
  EXPECT_EQ(p2.rate_bps, 0u);
  EXPECT_EQ(p1.speed_bps, 25'000'000'000u) << "of all ports, and kept";
  EXPECT_EQ(c.engine.line_rate, 25'000'000'000u);
  const auto& lossless = p2.groups[3];
  EXPECT_EQ(lossless.size, 4096u);
  EXPECT_EQ(lossless.dynamic_th, -3);
  EXPECT_EQ(lossless.xoff, 40u << 10);
  EXPECT_EQ(lossless.xon, 0u);
  EXPECT_EQ(lossless.xon_offset, 8192u);
  EXPECT_EQ(p1.groups[3].xoff, 0u);
  for (const size_t g : {0, 1, 2}) EXPECT_EQ(p3.groups[g].dynamic_th, 7);
  EXPECT_FALSE(p3.groups[3].dynamic_th);
  for (const auto* p : {&p1, &p2}) {
    EXPECT_TRUE(p->queues[0].profile.spill) << "what is said of a port goes before what is said of all";
    EXPECT_EQ(p->queues[0].profile.static_th, 100'000u);
  }
  EXPECT_FALSE(p3.queues[0].profile.spill);
  EXPECT_EQ(p3.queues[0].profile.size, 1024u);
  EXPECT_EQ(p3.queues[0].profile.static_th, 65536u);
  for (const size_t q : {3, 4}) {
    EXPECT_EQ(p1.queues[q].scheduler.weight, 30);
    EXPECT_FALSE(p1.queues[q].scheduler.strict);
    ASSERT_TRUE(p3.queues[q].wred) << "another entry's scheduler leaves it";
    EXPECT_EQ(p3.queues[q].wred->min_threshold, 20u << 10);
    EXPECT_EQ(p3.queues[q].wred->max_threshold, 80u << 10);
    EXPECT_EQ(p3.queues[q].wred->probability, 0.05);
  }
  EXPECT_TRUE(p3.queues[4].scheduler.strict);
  EXPECT_FALSE(p1.queues[0].wred);
  for (unsigned d = 0; d < 64; d++) {
    const int tc = d == 26 ? 3 : d >= 8 && d <= 15 ? 4 : d == 48 || d == 56 || d == 57 ? 6 : 0;
    EXPECT_EQ(p1.dscp_to_tc[d], tc) << d;
  }
  EXPECT_EQ(p1.tc_to_queue, (std::array<uint8_t, 8>{0, 1, 2, 3, 3, 5, 6, 7}));
  EXPECT_EQ(p1.tc_to_pg, (std::array<uint8_t, 8>{7, 1, 2, 3, 3, 5, 6, 7}));
  EXPECT_EQ(p2.pfc.to_ulong(), 0b1101000u);
  EXPECT_EQ(p2.dscp_to_tc[26], 3) << "its own entry says nothing of it";
  EXPECT_TRUE(p1.pfc.none());
  EXPECT_EQ(b.watchdog.detection, milliseconds(100));
  EXPECT_EQ(b.watchdog.restoration, milliseconds(300));
  EXPECT_TRUE(p2.watchdog);
  EXPECT_FALSE(p3.watchdog);
}

TEST(QosConfig, TheWholeSpillwayIsRead) {
  const buffering::SpillwayConfig s = parse(kFull).spillway;
  EXPECT_TRUE(s.enabled);
  EXPECT_EQ(s.dscp.to_ullong(), 1ull << 10 | 7ull << 16);
  ASSERT_EQ(s.source_prefixes.size(), 2u);
  EXPECT_EQ(s.source_prefixes[0].address.to_string(), "10.78.0.0");
  EXPECT_EQ(s.source_prefixes[0].bits, 112);
  EXPECT_EQ(s.source_prefixes[1].bits, 64);
  EXPECT_EQ(s.pool_size, 64u << 20);
  EXPECT_EQ(s.key_limit, 1u << 20);
  EXPECT_EQ(s.keys_max, 9u);
  EXPECT_EQ(s.drain_on, 10u << 10);
  EXPECT_EQ(s.drain_off, 20u << 10);
  EXPECT_EQ(s.drain_check_interval, microseconds(20));
  EXPECT_EQ(s.drain_hold_checks, 3u);
  EXPECT_EQ(s.drain_rate_bps, 500'000'000u);
  EXPECT_EQ(s.drain_burst, 9000u);
  EXPECT_FALSE(s.mark_ce);
  EXPECT_TRUE(s.fast_cnp);
  EXPECT_EQ(s.fast_cnp_interval, microseconds(70));
  EXPECT_EQ(s.fast_cnp_dscp, 46);
  EXPECT_EQ(s.max_residence, milliseconds(50));
}

TEST(QosConfig, TheManualsExampleIsRight) {
  std::ifstream file(std::string(MILLRACE_SOURCE_ROOT) + "/switch/OPERATIONS.md");
  std::ostringstream text;
  text << file.rdbuf();
  const std::string manual = text.str(), fence = "```yaml\n";
  const size_t inside = manual.find("\nspillway:\n  spill_dscp: [10]\n");
  ASSERT_NE(inside, std::string::npos);
  const size_t from = manual.rfind(fence, inside) + fence.size();
  const std::string example = manual.substr(from, manual.find("```", from) - from);
  const buffering::Config b = parse_config(example, "example").buffers.value();
  EXPECT_EQ(b.ports[2].rate_bps, 25'000'000'000u);
  EXPECT_TRUE(b.ports[0].queues[1].profile.spill);
  EXPECT_EQ(b.ports[0].groups[3].xoff, 96u << 10);
  EXPECT_EQ(b.ports[1].queues[3].wred->probability, 0.1);
  EXPECT_EQ(b.ports[1].dscp_to_tc[10], 1);
  EXPECT_TRUE(b.spillway.enabled);
}

const std::string kSpills = R"(qos:
  BUFFER_PROFILE: {q: {static_th: 100000, packet_discard_action: spill}}
  BUFFER_QUEUE: {"*|0": {profile: q}}
)";

TEST(QosConfig, AShortSpillwayHasTheDefaults) {
  const buffering::SpillwayConfig s = parse(kSpills + "spillway: {spill_dscp: 10}\n").spillway, d;
  EXPECT_TRUE(s.enabled);
  EXPECT_EQ(s.dscp.to_ullong(), 1ull << 10);
  EXPECT_TRUE(s.source_prefixes.empty());
  EXPECT_EQ(s.pool_size, d.pool_size);
  EXPECT_EQ(s.drain_hold_checks, 2u);
  EXPECT_EQ(s.max_residence, milliseconds(100));
  EXPECT_TRUE(s.mark_ce);
  EXPECT_FALSE(s.fast_cnp);
  const auto on = parse(kSpills + "spillway: {spill_dscp: 10, fast_cnp: true}\n").spillway;
  EXPECT_TRUE(on.fast_cnp);
  EXPECT_EQ(on.fast_cnp_interval, microseconds(50));
  EXPECT_EQ(on.fast_cnp_dscp, 48);
  EXPECT_FALSE(parse("qos: {}\nspillway: {enabled: false}\n").spillway.enabled);
}

// What is spilled must not take the buffers that receive rings and groups live on.
TEST(QosConfig, ThePoolGetsBuffersForWhatIsSpilled) {
  const auto whole = [](const std::string& more) { return parse_config(kBase + more, "f.yaml"); };
  EXPECT_EQ(whole(kSpills).spill_frames, 0u);
  const Config c = whole(kSpills +
                         "spillway: {spill_dscp: 10, spill_pool_size: 65536}\n"
                         "aggregation: {memory_limit: 1GiB}\n");
  EXPECT_EQ(c.spill_frames, 16u) << "of 4200 bytes";
  EXPECT_EQ(c.buffers->spillway.frames_max, 16u);
  EXPECT_EQ(c.frame_count, 16384u);
  EXPECT_EQ(c.engine.memory_limit, 16384u * 4608 / 4 * 3) << "groups have no part in them";
  EXPECT_EQ(whole(kSpills + "spillway: {spill_dscp: 10, spill_frames_max: 99}\n").spill_frames, 99u);
  EXPECT_EQ(whole(kSpills + "spillway: {spill_dscp: 10}\n").spill_frames, ((256u << 20) + 4199) / 4200);
  EXPECT_EQ(whole(kSpills + "spillway: {enabled: false}\n").spill_frames, 0u);
}

struct Case {
  const char* text;
  const char* says;  // what the refusal contains
};

void expect_refused(const std::string& before, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    const std::string said = refusal(before + c.text);
    EXPECT_NE(said.find(c.says), std::string::npos) << c.text << "\n  " << said;
    EXPECT_EQ(said.find('\n'), std::string::npos) << said;
  }
}

TEST(QosConfig, EveryMistakeIsRefusedWithItsLine) {
  expect_refused(
      "",
      {
          {"qos: 5\n", "f.yaml:7: qos: must be a map"},
          {"qos: {BUFFERS: {}}\n", "f.yaml:7: qos.BUFFERS: unknown key (known here: frames_max"},
          {"qos:\n  frames_max: 63\n", "f.yaml:8: qos.frames_max: '63' is not a whole number in 64 … 16384"},
          {"qos: {ack_tc: 8}\n", "f.yaml:7: qos.ack_tc: '8' is not a whole number in 0 … 7"},
          {"qos: {cnp_tc: nil}\n", "qos.cnp_tc: 'nil' is not a whole number in 0 … 7"},
          {"qos:\n  BUFFER_POOL: {a: {size: 1MiB}, b: {}}\n",
           "f.yaml:8: qos.BUFFER_POOL: 'b' is a second pool"},
          {"qos: {BUFFER_POOL: {a: {size: 1}}}\n",
           "qos.BUFFER_POOL.a.size: '1' is not a size in 65536 … 1099511627776 bytes"},
          {"qos: {BUFFER_POOL: {a: {mode: static}}}\n", "'static' is not one of dynamic"},
          {"qos: {BUFFER_POOL: {a: {type: inner}}}\n", "'inner' is not one of ingress, egress, both"},
          {"qos: {BUFFER_PROFILE: {q: {pool: x}}}\n",
           "qos.BUFFER_PROFILE.q.pool: 'x' is not in BUFFER_POOL (there: nothing)"},
          {"qos: {BUFFER_PROFILE: {q: {dynamic_th: 8}}}\n",
           "qos.BUFFER_PROFILE.q.dynamic_th: '8' is not a whole number in -8 … 7"},
          {"qos: {BUFFER_PROFILE: {q: {dynamic_th: -9}}}\n", "'-9' is not a whole number in -8 … 7"},
          {"qos: {BUFFER_PROFILE: {q: {dynamic_th: --1}}}\n", "'--1' is not a whole number in -8 … 7"},
          {"qos: {BUFFER_PROFILE: {q: {dynamic_th: 0, static_th: 1}}}\n", "static_th: a profile has"},
          {"qos: {BUFFER_PROFILE: {q: {static_th: x}}}\n", "'x' is not a size in 0 …"},
          {"qos: {BUFFER_PROFILE: {q: {xon: 1}}}\n", "xon: is of a lossless profile"},
          {"qos: {BUFFER_PROFILE: {q: {xon_offset: 1}}}\n", "xon_offset: is of a lossless profile"},
          {"qos: {BUFFER_PROFILE: {q: {static_th: 1, xoff: 9, xon: 2}}}\n", "xon: must not be more than"},
          {"qos: {BUFFER_PROFILE: {q: {packet_discard_action: trim}}}\n", "'trim' is not one of drop, spill"},
          {"qos: {BUFFER_PROFILE: {q: {packet_discard_action: spill, xoff: 1}}}\n", "discards nothing"},
          {"qos: {BUFFER_PROFILE: {q: {sise: 1}}}\n", "qos.BUFFER_PROFILE.q.sise: unknown key"},
          {"qos: {WRED_PROFILE: {w: {green_min_threshold: 1}}}\n",
           "qos.WRED_PROFILE.w.green_max_threshold: missing"},
          {"qos: {WRED_PROFILE: {w: {green_min_threshold: 2, green_max_threshold: 1}}}\n",
           "green_max_threshold: must not be less than green_min_threshold"},
          {"qos: {WRED_PROFILE: {w: {green_min_threshold: 1, green_max_threshold: 2, green_drop_probability: "
           "101}}}\n",
           "'101' is not a whole number in 0 … 100"},
          {"qos: {WRED_PROFILE: {w: {green_min_threshold: 1, green_max_threshold: 2, ecn: ecn_none}}}\n",
           "'ecn_none' is not one of ecn_all"},
          {"qos: {SCHEDULER: {s: {weight: 1}}}\n", "qos.SCHEDULER.s.type: missing"},
          {"qos: {SCHEDULER: {s: {type: WRR}}}\n", "'WRR' is not one of STRICT, DWRR"},
          {"qos: {SCHEDULER: {s: {type: DWRR, weight: 0}}}\n",
           "weight: '0' is not a whole number in 1 … 100"},
          {"qos: {SCHEDULER: {s: {type: STRICT, weight: 1}}}\n", "weight: is DWRR's"},
          {"qos:\n  DSCP_TO_TC_MAP:\n    m:\n      64: 0\n",
           "f.yaml:10: qos.DSCP_TO_TC_MAP.m.64: the key is not a DSCP in 0 … 63"},
          {"qos: {DSCP_TO_TC_MAP: {m: {9-8: 0}}}\n", "the key is not a DSCP"},
          {"qos: {DSCP_TO_TC_MAP: {m: {8: 8}}}\n", "m.8: '8' is not a whole number in 0 … 7"},
          {"qos: {DSCP_TO_TC_MAP: {m: {8: 1, 0-63: 1}}}\n", "8 is given twice"},
          {"qos: {TC_TO_QUEUE_MAP: {m: {8: 0}}}\n", "the key is not a traffic class in 0 … 7"},
          {"qos: {TC_TO_PRIORITY_GROUP_MAP: {m: {0: -1}}}\n", "m.0: '-1' is not a whole number in 0 … 7"},
          {"qos: {PORT: {p9: {speed: 1}}}\n", "qos.PORT.p9: there is no port 'p9'"},
          {"qos: {PORT: {p1: {pfc_hardware: maybe}}}\n", "pfc_hardware"},
          {"qos: {PORT: {p1: {pfc_hardware: on}}}\n",
           "pfc_hardware is on, but no priority group of p1 is lossless"},
          {"qos: {PORT: {\"p1|0\": {speed: 1}}}\n", "the key must be a port's name"},
          {"qos: {PORT: {p1: {rate_mbps: 0}}}\n", "rate_mbps: '0' is not a whole number in 1 … 1600000"},
          {"qos: {PORT: {p1: {rate_mbps: 1}, \"p2,p1\": {rate_mbps: 2}}}\n", "p1 is given twice"},
          {"qos: {BUFFER_PG: {\"p1|0\": {}}}\n", "qos.BUFFER_PG.p1|0.profile: missing"},
          {"qos: {BUFFER_PG: {p1: {profile: x}}}\n", "the key must be PORT|NUMBERS"},
          {"qos: {BUFFER_PG: {\"p1|8\": {profile: x}}}\n", "'8' is not a number in 0 … 7"},
          {"qos: {BUFFER_PG: {\"p1|0\": {profile: x}}}\n",
           "qos.BUFFER_PG.p1|0.profile: 'x' is not in BUFFER_PROFILE (there: nothing)"},
          {"qos:\n  BUFFER_PROFILE: {a: {}, b: {}}\n  BUFFER_QUEUE:\n    \"*|0-7\": {profile: a}\n    "
           "\"p1|0-3\": {profile: b}\n    \"p1|3\": {profile: b}\n",
           "f.yaml:12: qos.BUFFER_QUEUE.p1|3: p1|3 is given twice"},
          {"qos: {BUFFER_PROFILE: {a: {xoff: 1}}, BUFFER_QUEUE: {\"p1|0\": {profile: a}}}\n",
           "xoff is a priority group's"},
          {"qos: {BUFFER_PROFILE: {a: {packet_discard_action: spill}}, BUFFER_PG: {\"p1|0\": {profile: "
           "a}}}\n",
           "a priority group does not spill"},
          {"qos: {SCHEDULER: {s: {type: DWRR}}, QUEUE: {\"*|0\": {scheduler: t}}}\n",
           "qos.QUEUE.*|0.scheduler: 't' is not in SCHEDULER (there: s)"},
          {"qos: {QUEUE: {\"*|0\": {wred_profile: t}}}\n", "'t' is not in WRED_PROFILE"},
          {"qos: {PORT_QOS_MAP: {p1: {dscp_to_tc_map: t}}}\n", "'t' is not in DSCP_TO_TC_MAP"},
          {"qos: {PORT_QOS_MAP: {p1: {tc_to_queue_map: t}}}\n", "'t' is not in TC_TO_QUEUE_MAP"},
          {"qos: {PORT_QOS_MAP: {p1: {tc_to_pg_map: t}}}\n", "'t' is not in TC_TO_PRIORITY_GROUP_MAP"},
          {"qos: {PORT_QOS_MAP: {p1: {pfc_enable: 8}}}\n",
           "pfc_enable: '8' is not a priority in 0 … 7, nor several"},
          {"qos: {PORT_QOS_MAP: {p1: {pfc_enable: {}}}}\n", "pfc_enable: this is not a priority"},
          {"qos: {PFC_WD: {p1: {detection_time: 0}}}\n", "'0' is not a whole number in 1 … 60000"},
          {"qos: {PFC_WD: {p1: {detection_time: 200}, p2: {detection_time: 201}}}\n",
           "qos.PFC_WD.p2.detection_time: is another than before"},
          {"qos: {PFC_WD: {p1: {action: forward}}}\n", "'forward' is not one of drop, none"},
          {"qos: {BUFFER_PROFILE: {a: {xoff: 1}}, BUFFER_PG: {\"p2|3\": {profile: a}}, PORT_QOS_MAP: {p2: "
           "{pfc_enable: 4}}}\n",
           "qos.BUFFER_PG: priority group 3 of p2 is lossless"},
          {"qos: {BUFFER_POOL: {b: {size: 64KiB}}, BUFFER_PROFILE: {a: {size: 3KiB}}, BUFFER_PG: {\"*|0-7\": "
           "{profile: a}}}\n",
           "f.yaml:7: qos.BUFFER_POOL: the profiles of all priority groups reserve 73728 bytes"},
          {"qos: {BUFFER_POOL: {b: {size: 64KiB}}, BUFFER_PROFILE: {a: {size: 33KiB}}, BUFFER_QUEUE: "
           "{\"p1,p2|0\": "
           "{profile: a}}}\n",
           "the profiles of all queues reserve 67584 bytes"},
      });
}

TEST(QosConfig, EveryMistakeOfTheSpillwayIsRefusedWithItsLine) {
  expect_refused(
      "", {{"spillway: {spill_dscp: 10}\n", "f.yaml:7: spillway: there is no traffic manager"},
           {"qos:\n  WRED_PROFILE: {w: {green_min_threshold: 4199, green_max_threshold: 9999}}\n"
            "  BUFFER_PROFILE: {q: {packet_discard_action: spill}}\n"
            "  BUFFER_QUEUE: {\"p2|3\": {profile: q}}\n  QUEUE: {\"*|3\": {wred_profile: w}}\n"
            "spillway: {spill_dscp: 10}\n",
            "f.yaml:12: spillway.drain_off_bytes: missing: queue 3 of p2 spills and its WRED profile "
            "begins at 4199 bytes, less than a frame of 4200"},
           {"qos: {}\nspillway: {spill_dscp: 10}\n", "f.yaml:8: spillway.spill_dscp: no queue spills"}});
  expect_refused(
      kSpills,
      {
          {"spillway: [1]\n", "f.yaml:10: spillway: must be a map"},
          {"spillway: {spill_pool_size: 1MiB}\n", "f.yaml:10: spillway.spill_dscp: missing"},
          {"spillway:\n  spill_dscp: [64]\n", "f.yaml:11: spillway.spill_dscp: '64' is not a DSCP in 0 … 63"},
          {"spillway: {enabled: yes}\n", "spillway.enabled: 'yes' is not one of true, false"},
          {"spillway: {spill_dscp: 1, spill_src_prefix: [10.78.0.0/16, 10.78.0.1/16]}\n",
           "spillway.spill_src_prefix: '10.78.0.1/16' is not a prefix"},
          {"spillway: {spill_dscp: 1, spill_src_prefix: [x]}\n", "'x' is not a prefix"},
          {"spillway: {spill_dscp: 1, spill_pool_size: 1}\n",
           "spill_pool_size: '1' is not a size in 65536 …"},
          {"spillway: {spill_dscp: 1, spill_key_limit: 1}\n", "spill_key_limit: '1' is not a size in 8192 …"},
          {"spillway: {spill_dscp: 1, spill_max_keys: 0}\n", "'0' is not a whole number in 1 … 1048576"},
          {"spillway: {spill_dscp: 1, spill_pool_size: 100GiB}\n",
           "spill_pool_size: needs 25565282 buffers of the frame pool, more than 16777216"},
          {"spillway: {spill_dscp: 1, spill_frames_max: 63}\n",
           "'63' is not a whole number in 64 … 16777216"},
          {"spillway: {spill_dscp: 1, drain_on_bytes: 0}\n", "drain_on_bytes: '0' is not a size in 1 …"},
          {"spillway: {spill_dscp: 1, drain_on_bytes: 4201, drain_off_bytes: 4200}\n",
           "drain_on_bytes: must not be more than drain_off_bytes"},
          {"spillway: {spill_dscp: 1, drain_off_bytes: 4199}\n",
           "drain_off_bytes: '4199' is not a size in 4200 …"},
          {"spillway: {spill_dscp: 1, drain_check_interval_us: 0}\n", "in 1 … 1000000"},
          {"spillway: {spill_dscp: 1, drain_hold_checks: 0}\n", "in 1 … 1000"},
          {"spillway: {spill_dscp: 1, drain_rate_mbps: 0}\n", "in 1 … 1600000"},
          {"spillway: {spill_dscp: 1, drain_burst: 1}\n", "drain_burst: '1' is not a size in 64 …"},
          {"spillway: {spill_dscp: 1, spill_mark_ce: 1}\n", "spill_mark_ce: '1' is not one of true, false"},
          {"spillway: {spill_dscp: 1, fast_cnp: on}\n", "fast_cnp: 'on' is not one of true, false"},
          {"spillway: {spill_dscp: 1, fast_cnp: true, fast_cnp_interval_us: 0}\n", "in 1 … 1000000"},
          {"spillway: {spill_dscp: 1, fast_cnp: true, fast_cnp_dscp: 64}\n", "in 0 … 63"},
          {"spillway: {spill_dscp: 1, fast_cnp_interval_us: 50}\n",
           "fast_cnp_interval_us: is of fast_cnp, which is off"},
          {"spillway: {spill_dscp: 1, fast_cnp: false, fast_cnp_dscp: 48}\n",
           "fast_cnp_dscp: is of fast_cnp, which is off"},
          {"spillway: {spill_dscp: 1, max_residence_ms: 0}\n", "in 1 … 3600000"},
          {"spillway: {spill_dscp: 1, spil: 0}\n", "spillway.spil: unknown key"},
      });
}

}  // namespace
}  // namespace millrace::switching
