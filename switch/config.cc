#include "switch/config.h"

#include <sys/un.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include "switch/config_qos.h"
#include "switch/config_routing.h"
#include "switch/yaml_reader.h"

namespace millrace::switching {

namespace {

constexpr Time kMicrosecond = std::chrono::microseconds(1), kMillisecond = std::chrono::milliseconds(1),
               kSecond = std::chrono::seconds(1);
constexpr uint64_t kDayMs = 86'400'000;

uint64_t random_seed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

std::string read_file(const std::string& file, const std::string& what) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf()))
    throw Error(ErrorCode::kConfig,
                what + ": cannot read '" + file + "' (does it exist, and may you read it?)");
  return text.str();
}

void read_identity(YamlMap& top, Config& config) {
  top.require("name");
  top.text("name", config.name);
  const bool plain = std::all_of(config.name.begin(), config.name.end(), [](unsigned char c) {
    return std::isalnum(c) || c == '-' || c == '_' || c == '.';
  });
  if (!plain || config.name.size() > 64) top.fail("name", "must be 1 … 64 letters, digits, '-', '_' or '.'");

  config.engine.seed = random_seed();
  uint64_t random = random_seed();
  for (uint8_t& byte : config.engine.mac.bytes) byte = static_cast<uint8_t>(random), random >>= 8;
  config.engine.mac.bytes[0] = 0x02;  // locally administered, an individual's
  if (const YAML::Node node = top.get("mac"); node.IsDefined()) {
    const auto mac = node.IsScalar() ? MacAddress::parse(node.Scalar()) : std::nullopt;
    if (!mac || mac->is_multicast() || *mac == MacAddress{})
      top.fail("mac", "must be an individual's MAC address, as 02:4d:52:00:00:01");
    config.engine.mac = *mac;
  }

  if (top.get("addresses").IsDefined()) read_interface(top, kBridge, config);
}

void read_tenants(YamlMap& aggregation, Config& config) {
  YamlMap tenants = aggregation.map("tenants");
  if (!tenants.node().IsMap()) return;
  std::vector<std::string> ids;
  for (const auto& entry : tenants.node()) ids.push_back(entry.first.Scalar());
  for (const std::string& id : ids) {
    uint32_t value = 0;
    const auto number = parse_size(id);
    if (!number || *number > UINT32_MAX)
      tenants.fail(id, "a tenant's key is its id, a number in 0 … 4294967295");
    value = static_cast<uint32_t>(*number);
    YamlMap map = tenants.map(id);
    aggregation::Tenant tenant;
    tenant.name = id;
    map.text("name", tenant.name);
    std::string file;
    map.text("secret_file", file);
    if (!file.empty()) {
      try {
        tenant.secret = read_file(file, map.path_of("secret_file"));
      } catch (const Error& e) {
        map.fail_at(map.get("secret_file"), e.what());
      }
      while (tenant.secret.ends_with('\n') || tenant.secret.ends_with('\r')) tenant.secret.pop_back();
      if (tenant.secret.empty()) map.fail("secret_file", "'" + file + "' holds no secret");
    }
    map.size("memory_limit", 1 << 16, 1ull << 40, tenant.memory_limit);
    map.finish();
    config.engine.tenants[value] = tenant;
  }
}

void read_aggregation(YamlMap& top, Config& config) {
  YamlMap map = top.map("aggregation");
  aggregation::EngineConfig& e = config.engine;
  map.number("port", 1, 65535, e.cm_port);
  map.get("parent");  // read_parent()
  map.number("parent_port", 1, 65535, e.parent_port);
  if (map.get("parent_port").IsDefined() && !map.get("parent").IsDefined())
    map.fail("parent_port", "is the port of a parent, and there is none: write parent, too");
  map.number("mtu", 256, 4096, e.mtu);
  if (!std::has_single_bit(e.mtu)) map.fail("mtu", "must be 256, 512, 1024, 2048 or 4096");
  map.number("segment_bytes", 192, 1 << 20, e.segment_bytes);
  if ((e.segment_bytes + 64) % e.mtu != 0)
    map.fail("segment_bytes", "must be a multiple of mtu (" + std::to_string(e.mtu) +
                                  ") less the 64 bytes of the segment's header, as " +
                                  std::to_string(65536 / e.mtu * e.mtu - 64));
  map.number("window", 1, 1024, e.window);
  map.size("memory_limit", 1 << 16, 1ull << 40, e.memory_limit);
  map.number("groups_max", 1, 65536, e.groups_max);
  map.number("world_max", 1, 65535, e.world_max);
  map.duration("join_timeout_ms", kMillisecond, 1, kDayMs, e.join_timeout);
  map.duration("operation_timeout_ms", kMillisecond, 1, 7 * kDayMs, e.operation_timeout);
  map.duration("peer_dead_ms", kMillisecond, 1, kDayMs, e.peer_dead);
  map.duration("probe_after_ms", kMillisecond, 1, kDayMs, e.probe_after);
  map.duration("straggler_after_ms", kMillisecond, 1, kDayMs, e.straggler_after);
  map.duration("retransmit_timeout_ms", kMillisecond, 1, 60'000, e.retransmit_timeout);
  if (e.probe_after >= e.peer_dead)
    map.fail(map.get("probe_after_ms").IsDefined() ? "probe_after_ms" : "peer_dead_ms",
             "probe_after_ms must be less than peer_dead_ms, or every silent peer is given up unasked");
  map.number("first_psn", 0, 0xFFFFFF, [&](uint64_t v) { e.first_psn = static_cast<uint32_t>(v); });
  read_tenants(map, config);
  map.finish();
}

std::optional<CaptureConfig> read_capture(YamlMap& parent) {
  if (const YAML::Node node = parent.get("capture"); !node.IsDefined() || node.IsNull()) return std::nullopt;
  YamlMap map = parent.map("capture");
  CaptureConfig capture;
  map.require("file");
  map.text("file", capture.file);
  map.size("limit", 64 << 10, 1ull << 44, capture.limit);
  map.number("snaplen", 64, 262144, capture.snaplen);
  map.size("ring", 1 << 20, 1ull << 34, capture.ring);
  map.finish();
  return capture;
}

void read_direction(YamlMap& impair, const std::string& key, ImpairConfig& config) {
  YamlMap map = impair.map(key);
  map.probability("loss", config.loss);
  map.probability("duplicate", config.duplicate);
  map.probability("reorder", config.reorder);
  map.probability("corrupt", config.corrupt);
  map.duration("delay_us", kMicrosecond, 0, 10'000'000, config.delay);
  map.number("seed", 0, UINT64_MAX, config.seed);
  map.finish();
}

void read_ports(YamlMap& top, Config& config) {
  top.require("ports");
  std::set<std::string> names, devices;
  top.list("ports", [&](YamlMap map) {
    PortConfig port;
    map.require("name");
    map.require("device");
    map.text("name", port.name);
    map.text("device", port.device);
    if (!names.insert(port.name).second) map.fail("name", "'" + port.name + "' is another port's name");
    // Two vdevs differ in the part before the first comma, which is their name.
    const std::string device = port.device.substr(0, port.device.find(','));
    if (!devices.insert(device).second) map.fail("device", "'" + device + "' is another port's device");
    port.capture = read_capture(map);
    YamlMap impair = map.map("impair");
    read_direction(impair, "rx", port.rx);
    read_direction(impair, "tx", port.tx);
    impair.finish();
    if (map.get("addresses").IsDefined())
      read_interface(map, static_cast<uint16_t>(config.ports.size()), config);
    map.finish();
    config.ports.push_back(std::move(port));
  });
  if (config.ports.empty() || config.ports.size() > 256) top.fail("ports", "must be 1 … 256 ports");
}

void read_forwarding(YamlMap& top, Config& config) {
  YamlMap l2 = top.map("l2");
  l2.duration("ageing_s", kSecond, 1, 1'000'000, config.l2.ageing);
  l2.number("entries_max", 16, 1 << 20, config.l2.entries_max);
  l2.number("flood_pps", 1, 1'000'000'000, config.l2.flood_pps);
  l2.duration("move_guard_ms", kMillisecond, 0, 3'600'000, config.l2.move_guard);
  l2.finish();
}

void read_worker(YamlMap& top, Config& config) {
  if (const YAML::Node node = top.get("idle"); node.IsDefined() && !node.IsNull()) {
    YamlMap idle = top.map("idle");
    config.idle = {std::chrono::microseconds(20), std::chrono::microseconds(100)};
    idle.duration("spin_us", kMicrosecond, 0, 1'000'000, config.idle.spin);
    idle.duration("sleep_us_max", kMicrosecond, 1, 100'000, config.idle.sleep_max);
    idle.finish();
  }
  YamlMap frames = top.map("frames");
  frames.number("count", 1024, 1 << 24, config.frame_count);
  frames.number("room", 512, 65535, config.frame_room);
  // Headroom, the longest headers of a packet (Ethernet with a tag, IPv6, UDP, BTH, RETH, immediate) and its
  // ICRC.
  const uint32_t needed = FramePool::kHeadroom + 66 + 32 + config.engine.mtu + 8;
  if (config.frame_room < needed)
    frames.fail("room", std::to_string(config.frame_room) + " is too small for aggregation.mtu " +
                            std::to_string(config.engine.mtu) + ": it must be at least " +
                            std::to_string(needed));
  frames.finish();
  top.texts("eal", config.eal);
  top.number("lcore", 0, 1023, [&](uint64_t v) { config.lcore = static_cast<uint32_t>(v); });
}

void read_control(YamlMap& top, Config& config) {
  YamlMap control = top.map("control");
  for (auto [key, path] : {std::pair{"read", &config.control_read}, {"change", &config.control_change}}) {
    control.text(key, *path);
    if (path->size() >= sizeof(sockaddr_un::sun_path))
      control.fail(
          key, "the path must be shorter than " + std::to_string(sizeof(sockaddr_un::sun_path)) + " bytes");
  }
  if (!config.control_read.empty() && config.control_read == config.control_change)
    control.fail("change", "must be another path than control.read's: permissions tell the two apart");
  control.finish();
  YamlMap log = top.map("log");
  log.choice("level", {"trace", "debug", "info", "warn", "error", "off"}, config.log_level);
  log.finish();
}

// Two writers in one file would ruin it.
void check_captures(const YamlMap& top, const Config& config) {
  std::set<std::string> files;
  if (config.capture) files.insert(config.capture->file);
  for (const PortConfig& port : config.ports)
    if (port.capture && !files.insert(port.capture->file).second)
      top.fail("ports", port.name + ": capture file '" + port.capture->file + "' is used twice");
}

// What groups reserve lies in frames, and reception needs a share of its own: retained slots must never
// starve the receive rings.
void bound_memory(Config& config) {
  const uint64_t most = uint64_t{config.frame_count} * config.frame_room / 4 * 3;
  if (config.engine.memory_limit <= most) return;
  config.notes.push_back(
      "aggregation.memory_limit: " + std::to_string(config.engine.memory_limit >> 10) +
      " KiB is more than three quarters of the frames (frames.count × frames.room): groups get " +
      std::to_string(most >> 10) + " KiB");
  config.engine.memory_limit = most;
}

}  // namespace

Config parse_config(const std::string& text, const std::string& name) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& e) {
    throw Error(ErrorCode::kConfig, name + ":" + std::to_string(e.mark.line + 1) + ": not YAML: " + e.msg);
  }
  Config config;
  try {
    YamlMap top(name, "", root);
    read_identity(top, config);
    read_aggregation(top, config);
    read_ports(top, config);
    read_routing(top, config);
    read_parent(top, config);
    config.capture = read_capture(top);
    check_captures(top, config);
    read_forwarding(top, config);
    read_worker(top, config);
    read_qos(top, config);
    read_spillway(top, config);
    read_control(top, config);
    top.finish();
  } catch (const YAML::Exception& e) {
    throw Error(ErrorCode::kConfig, name + ":" + std::to_string(e.mark.line + 1) + ": " + e.msg);
  }
  bound_memory(config);
  return config;
}

Config load_config(const std::string& file) { return parse_config(read_file(file, "--config"), file); }

}  // namespace millrace::switching
