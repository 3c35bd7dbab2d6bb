#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "roce/error.h"
#include "switch/config.h"

namespace millrace::switching {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kLeast = R"(name: leaf1
addresses: [10.77.0.100]
ports:
  - {name: p1, device: "net_null0"}
)";

std::string refusal(const std::string& text) {
  try {
    parse_config(text, "f.yaml");
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kConfig);
    return e.what();
  }
  return "accepted";
}

TEST(Config, TheLeastFileGetsTheDefaults) {
  const Config c = parse_config(kLeast, "f.yaml");
  EXPECT_EQ(c.name, "leaf1");
  EXPECT_EQ(c.engine.addresses.at(0).to_string(), "10.77.0.100");
  EXPECT_EQ(c.engine.mac.bytes[0], 0x02);
  EXPECT_NE(c.engine.mac, parse_config(kLeast, "f.yaml").engine.mac);  // random
  EXPECT_EQ(c.engine.cm_port, 18600);
  EXPECT_EQ(c.engine.window, 4);
  EXPECT_EQ(c.l2.entries_max, 16384u);
  EXPECT_EQ(c.idle.sleep_max, Time{});  // busy polling
  EXPECT_EQ(c.frame_count, 16384u);
  EXPECT_FALSE(c.capture.has_value());
  EXPECT_FALSE(c.lcore.has_value());
  EXPECT_EQ(c.ports.at(0).device, "net_null0");
}

TEST(Config, EveryKeyIsRead) {
  const std::string secret = ::testing::TempDir() + "millrace_secret_" + std::to_string(getpid());
  std::ofstream(secret) << "open sesame\n";
  const Config c = parse_config(R"(
name: leaf1
mac: 02:4d:52:00:00:01
addresses: [10.77.0.100, "fd77::100"]
aggregation:
  port: 18601
  mtu: 1024
  segment_bytes: 4032
  window: 4
  memory_limit: 32MiB
  groups_max: 7
  join_timeout_ms: 1
  operation_timeout_ms: 2
  peer_dead_ms: 4
  probe_after_ms: 3
  straggler_after_ms: 5
  retransmit_timeout_ms: 6
  first_psn: 0xfffff0
  tenants: {7: {name: blue, secret_file: )" +
                                    secret + R"(, memory_limit: 64MiB}}
ports:
  - name: p1
    device: "net_af_packet0,iface=sw1"
    capture: {file: /tmp/p1.pcapng, limit: 2GiB, snaplen: 128}
    impair: {rx: {loss: 0.01, duplicate: 0.02, reorder: 0.03, corrupt: 0.04, delay_us: 5, seed: 6}, tx: {loss: 1}}
capture: {file: all.pcapng}
l2: {ageing_s: 3, entries_max: 64, flood_pps: 10}
idle: {spin_us: 20, sleep_us_max: 100}
frames: {count: 20000, room: 2048}
eal: ["--no-huge", "-m", "256"]
lcore: 1
control: {read: /tmp/a.sock, change: /tmp/b.sock}
log: {level: debug}
)",
                                "f.yaml");
  std::remove(secret.c_str());
  const aggregation::EngineConfig& e = c.engine;
  EXPECT_EQ(e.mac, (MacAddress{{0x02, 0x4d, 0x52, 0, 0, 1}}));
  EXPECT_EQ(e.addresses.at(1).to_string(), "fd77::100");
  EXPECT_EQ(e.cm_port, 18601);
  EXPECT_EQ(e.mtu, 1024u);
  EXPECT_EQ(e.segment_bytes, 4032u);
  EXPECT_EQ(e.window, 4);
  EXPECT_EQ(e.memory_limit, 30'720'000u);  // three quarters of the frames
  EXPECT_EQ(c.notes.size(), 1u);
  EXPECT_EQ(e.groups_max, 7u);
  EXPECT_EQ(e.join_timeout, milliseconds(1));
  EXPECT_EQ(e.operation_timeout, milliseconds(2));
  EXPECT_EQ(e.probe_after, milliseconds(3));
  EXPECT_EQ(e.peer_dead, milliseconds(4));
  EXPECT_EQ(e.straggler_after, milliseconds(5));
  EXPECT_EQ(e.retransmit_timeout, milliseconds(6));
  EXPECT_EQ(e.first_psn, 0xfffff0u);
  EXPECT_EQ(e.tenants.at(7).name, "blue");
  EXPECT_EQ(e.tenants.at(7).secret, "open sesame");
  EXPECT_EQ(e.tenants.at(7).memory_limit, 64u << 20);
  const PortConfig& p = c.ports.at(0);
  EXPECT_EQ(p.device, "net_af_packet0,iface=sw1");
  EXPECT_EQ(p.capture->file, "/tmp/p1.pcapng");
  EXPECT_EQ(p.capture->limit, 2ull << 30);
  EXPECT_EQ(p.capture->snaplen, 128u);
  EXPECT_EQ(p.rx.loss, 0.01);
  EXPECT_EQ(p.rx.duplicate, 0.02);
  EXPECT_EQ(p.rx.reorder, 0.03);
  EXPECT_EQ(p.rx.corrupt, 0.04);
  EXPECT_EQ(p.rx.delay, microseconds(5));
  EXPECT_EQ(p.rx.seed, 6u);
  EXPECT_EQ(p.tx.loss, 1);
  EXPECT_EQ(c.capture->file, "all.pcapng");
  EXPECT_EQ(c.l2.ageing, seconds(3));
  EXPECT_EQ(c.l2.entries_max, 64u);
  EXPECT_EQ(c.l2.flood_pps, 10u);
  EXPECT_EQ(c.idle.spin, microseconds(20));
  EXPECT_EQ(c.idle.sleep_max, microseconds(100));
  EXPECT_EQ(c.frame_count, 20000u);
  EXPECT_EQ(c.frame_room, 2048u);
  EXPECT_EQ(c.eal, (std::vector<std::string>{"--no-huge", "-m", "256"}));
  EXPECT_EQ(c.lcore, 1u);
  EXPECT_EQ(c.control_read, "/tmp/a.sock");
  EXPECT_EQ(c.control_change, "/tmp/b.sock");
  EXPECT_EQ(c.log_level, "debug");
}

TEST(Config, MistakesNameFileLineKeyAndRange) {
  struct Case {
    std::string text;
    std::vector<std::string> expected;
  };
  const std::string port = "  - {name: p2, device: d2";
  const Case cases[] = {
      {kLeast + "colour: red\n", {"f.yaml:5: colour: unknown key", "known here: name, mac"}},
      {kLeast + "aggregation:\n  windw: 8\n", {"f.yaml:6: aggregation.windw: unknown key"}},
      {kLeast + "aggregation:\n  mtu: 4096\n  window: 0\n",
       {"f.yaml:7: aggregation.window: '0'", "1 … 1024"}},
      {kLeast + "aggregation: {window: -1}\n", {"f.yaml:5: aggregation.window: '-1'", "1 … 1024"}},
      {kLeast + "aggregation: {window: 8x}\n", {"f.yaml:5: aggregation.window: '8x'"}},
      {kLeast + "aggregation: {mtu: 1500}\n", {"f.yaml:5: aggregation.mtu", "1024, 2048 or 4096"}},
      {kLeast + "aggregation: {segment_bytes: 65536}\n", {"f.yaml:5: aggregation.segment_bytes", "65472"}},
      {kLeast + "aggregation: {memory_limit: 12MB}\n", {"f.yaml:5: aggregation.memory_limit: '12MB'", "MiB"}},
      {kLeast + "aggregation: {peer_dead_ms: 10}\n",
       {"f.yaml:5: aggregation.peer_dead_ms", "probe_after_ms"}},
      {kLeast + "aggregation: {first_psn: 0x1000000}\n", {"f.yaml:5: aggregation.first_psn", "16777215"}},
      {kLeast + "aggregation: {tenants: {blue: {}}}\n", {"f.yaml:5: aggregation.tenants.blue", "a number"}},
      {kLeast + "aggregation: {tenants: {7: {secret_file: /nowhere}}}\n",
       {"f.yaml:5: aggregation.tenants.7.secret_file", "/nowhere"}},
      {kLeast + "aggregation: [1]\n", {"f.yaml:5: aggregation: must be a map"}},
      {kLeast + port + ", impair: {rx: {loss: 1.5}}}\n",
       {"f.yaml:5: ports[1].impair.rx.loss: '1.5'", "0 … 1"}},
      {kLeast + port + ", impair: {rx: {loss: nan}}}\n", {"f.yaml:5: ports[1].impair.rx.loss: 'nan'"}},
      {kLeast + port + ", impair: {both: {}}}\n", {"f.yaml:5: ports[1].impair.both: unknown key"}},
      {kLeast + port + ", capture: {limit: 1GiB}}\n", {"f.yaml:5: ports[1].capture.file: missing"}},
      {kLeast + port + ", capture: {file: a}}\ncapture: {file: a}\n", {"p2: capture file 'a' is used twice"}},
      {kLeast + "  - {name: p1, device: d2}\n", {"f.yaml:5: ports[1].name: 'p1'"}},
      {kLeast + "  - {name: p2, device: \"net_null0,x=1\"}\n", {"f.yaml:5: ports[1].device: 'net_null0'"}},
      {kLeast + "  - {name: p2}\n", {"f.yaml:5: ports[1].device: missing"}},
      {kLeast + "name: again\n", {"f.yaml:5: name: given twice"}},
      {kLeast + "mac: 01:00:00:00:00:00\n", {"f.yaml:5: mac:"}},
      {kLeast + "frames: {room: 4096}\n", {"f.yaml:5: frames.room: 4096 is too small", "4330"}},
      {kLeast + "log: {level: loud}\n", {"f.yaml:5: log.level: 'loud' is not one of trace, debug"}},
      {kLeast + "control: {read: /a, change: /a}\n", {"f.yaml:5: control.change"}},
      {kLeast + "control: {read: " + std::string(200, 'x') + "}\n", {"f.yaml:5: control.read", "shorter"}},
      {kLeast + "eal: -m\n", {"f.yaml:5: eal: must be a list"}},
      {kLeast + "l2: {ageing_s: }\n", {"f.yaml:5: l2.ageing_s: must be a number"}},
      {"name: a\naddresses: [10.0.0.300]\nports: [{name: p, device: d}]\n",
       {"f.yaml:2: addresses: '10.0.0.300'"}},
      {"name: a\naddresses: [10.0.0.1/33]\nports: [{name: p, device: d}]\n",
       {"f.yaml:2: addresses: '10.0.0.1/33'"}},
      {"name: a\naddresses: [fd00::1, \"fd00:0::1\"]\nports: [{name: p, device: d}]\n", {"given twice"}},
      {"name: a b\naddresses: [10.0.0.1]\nports: [{name: p, device: d}]\n", {"f.yaml:1: name:"}},
      {"name: a\naddresses: [10.0.0.1]\nports: []\n", {"f.yaml:3: ports: must be 1"}},
      {"name: a\naddresses: [10.0.0.1]\n", {"ports: missing"}},
      {"name: a\n\taddresses: 1\n", {"f.yaml:2: not YAML"}},
      {"", {"f.yaml: name: missing"}},
      {"just words\n", {"f.yaml:1: the file: must be a map"}},
  };
  for (const Case& c : cases) {
    const std::string said = refusal(c.text);
    for (const std::string& part : c.expected)
      EXPECT_NE(said.find(part), std::string::npos) << "expected: " << part << "\nsaid:     " << said;
  }
}

TEST(Config, AMissingFileIsNamed) {
  try {
    load_config("/nowhere/leaf1.yaml");
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("/nowhere/leaf1.yaml"), std::string::npos);
  }
}

TEST(Config, SizesTakeUnits) {
  EXPECT_EQ(parse_size("4096"), 4096u);
  EXPECT_EQ(parse_size("64KiB"), 65536u);
  EXPECT_EQ(parse_size("3 MiB"), 3u << 20);
  EXPECT_EQ(parse_size("1GiB"), 1u << 30);
  for (const char* bad : {"", "KiB", "1KB", "1.5MiB", "-1", "99999999999GiB"})
    EXPECT_EQ(parse_size(bad), std::nullopt) << bad;
}

}  // namespace
}  // namespace millrace::switching
