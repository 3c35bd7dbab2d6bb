#include "tools/sim/scenario.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "aggregation/datatype.h"
#include "roce/error.h"
#include "switch/yaml_reader.h"

namespace millrace::sim {

using std::chrono::microseconds;
using std::chrono::nanoseconds;
using switching::YamlMap;

namespace {

void read_link(YamlMap map, LinkConfig& link) {
  map.number("gbit", 1, 3200, [&](uint64_t v) { link.gbit = static_cast<double>(v); });
  map.duration("delay_ns", nanoseconds(1), 0, 1000000000, link.delay);
  map.size("queue", 4608, UINT64_MAX / 2, link.queue_bytes);
  map.finish();
}

uint16_t host_number(const YamlMap& map, const std::string& text, uint16_t hosts) {
  char* end;
  const unsigned long v = std::strtoul(text.c_str(), &end, 10);
  if (text.empty() || *end != 0 || v >= hosts)
    map.fail("hosts", "'" + text + "' is not a host's number in 0 … " + std::to_string(hosts - 1));
  return static_cast<uint16_t>(v);
}

ScenarioStep read_step(YamlMap map, uint64_t world) {
  ScenarioStep s;
  std::string collective = "all-reduce", type = "f32", op = "sum", in_place = "no", deterministic = "no";
  map.choice("collective", {"all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather", "barrier"},
             collective);
  map.choice("type", {"u8", "i8", "i32", "u32", "i64", "u64", "f16", "bf16", "f32", "f64"}, type);
  map.choice("op", {"sum", "prod", "min", "max", "band", "bor", "bxor"}, op);
  map.choice("in_place", {"yes", "no"}, in_place);
  map.choice("deterministic", {"yes", "no"}, deterministic);
  map.number("root", 0, world - 1, s.root);
  map.size("size", 0, uint64_t{1} << 34, s.bytes);
  map.number("repeat", 1, 100000, s.repeat);
  map.duration("compute_us", microseconds(1), 0, 3600000000, s.gap);
  map.finish();
  while (check::collective_name(s.collective) != collective) s.collective++;
  s.deterministic = deterministic == "yes";
  s.in_place = in_place == "yes";
  s.type = static_cast<int>(*aggregation::parse_data_type(type));
  s.op = static_cast<int>(*aggregation::parse_reduce_op(op));
  const uint32_t size = check::element_bytes(s.type);
  if (s.collective == check::kBarrier) s.bytes = 0;
  const check::Reduction r{s.type, s.op, 0, 1, 1, s.collective};
  if (s.root != 0 && !r.has_root()) map.fail("root", "is of a reduce or a broadcast only");
  if (s.deterministic && !r.reduces()) map.fail("deterministic", "is of what reduces only");
  if (r.reduces() && !aggregation::supported(static_cast<aggregation::DataType>(s.type),
                                             static_cast<aggregation::ReduceOp>(s.op)))
    map.fail("op", op + " does not go with " + type);
  if (s.bytes % size != 0)
    map.fail("size", std::to_string(s.bytes) + " bytes are no whole number of " + type + ", which have " +
                         std::to_string(size));
  if (r.has_shards() && s.bytes % (size * world) != 0)
    map.fail("size", std::to_string(s.bytes) + " bytes of " + type + " do not fall into " +
                         std::to_string(world) + " equal shards");
  return s;
}

ScenarioGroup read_group(YamlMap map, const Scenario& scenario) {
  ScenarioGroup g;
  const FabricConfig& f = scenario.fabric;
  g.name = "group" + std::to_string(scenario.groups.size());
  map.text("name", g.name);
  std::vector<std::string> hosts;
  map.texts("hosts", hosts);
  for (const std::string& h : hosts) {
    const uint16_t n = host_number(map, h, f.hosts);
    if (std::find(g.hosts.begin(), g.hosts.end(), n) != g.hosts.end())
      map.fail("hosts", h + " is given twice");
    g.hosts.push_back(n);
  }
  for (uint16_t h = 0; hosts.empty() && h < f.hosts; h++) g.hosts.push_back(h);
  const uint64_t switches = f.leaves ? f.leaves + f.spines : 1;
  map.number("switch", 0, switches - 1, g.where);
  map.number("stripes", 1, aggregation::kStripesMax, g.stripes);
  map.number("in_flight", 1, 64, g.in_flight);
  std::string ip = "4";
  map.choice("ip", {"4", "6"}, ip);
  g.v6 = ip == "6";
  map.list("trace", [&](YamlMap step) { g.steps.push_back(read_step(std::move(step), g.hosts.size())); });
  if (g.steps.empty()) map.fail("trace", "must list what the group does");
  map.finish();
  return g;
}

Scenario read(YamlMap top) {
  Scenario s;
  FabricConfig& f = s.fabric;
  top.text("name", s.name);
  top.number("seed", 0, UINT64_MAX, f.seed);
  std::string topology = "star";
  top.choice("topology", {"star", "leaf-spine"}, topology);
  top.number("hosts", 1, 4096, f.hosts);
  if (topology == "leaf-spine") {
    f.leaves = 2, f.spines = 2;
    top.number("leaves", 1, 64, f.leaves);
    top.number("spines", 1, 16, f.spines);
  }
  f.engine.memory_limit = uint64_t{4} << 30;
  f.engine.world_max = 4096;
  YamlMap links = top.map("links");
  read_link(links.map("host"), f.host_link);
  f.trunk = f.host_link;
  read_link(links.map("trunk"), f.trunk);
  std::vector<std::string> speeds;
  links.texts("host_gbit", speeds);
  for (const std::string& v : speeds) {
    char* end;
    const double gbit = std::strtod(v.c_str(), &end);
    if (v.empty() || *end != 0 || !(gbit >= 1 && gbit <= 3200))
      links.fail("host_gbit", "'" + v + "' is not a rate in 1 … 3200");
    f.host_gbit.push_back(gbit);
  }
  links.number("loss_ppm", 0, 1000000, s.wire.loss);
  links.number("reorder_ppm", 0, 1000000, s.wire.reorder);
  links.number("duplicate_ppm", 0, 1000000, s.wire.duplicate);
  links.number("corrupt_ppm", 0, 1000000, s.wire.corrupt);
  links.duration("jitter_ns", nanoseconds(1), 0, 1000000000, s.wire.jitter);
  links.finish();
  YamlMap sw = top.map("aggregation");
  sw.number("mtu", 256, 4096, f.engine.mtu);
  sw.number("segment_bytes", 192, 1 << 20, f.engine.segment_bytes);
  sw.number("window", 1, 64, f.engine.window);
  sw.number("frames", 64, 1 << 24, f.switch_frames);
  sw.finish();
  if (roce::mtu_code(f.engine.mtu) == 0) sw.fail("mtu", "must be 256, 512, 1024, 2048 or 4096");
  if (f.engine.segment_bytes < f.engine.mtu - 64 || (f.engine.segment_bytes + 64) % f.engine.mtu != 0)
    sw.fail("segment_bytes", "must be the MTU less 64 plus a multiple of the MTU, as " +
                                 std::to_string(f.engine.mtu * 8 - 64));
  top.list("groups", [&](YamlMap group) { s.groups.push_back(read_group(std::move(group), s)); });
  if (s.groups.empty()) top.fail("groups", "must list the groups and what they do");
  top.finish();
  return s;
}

}  // namespace

Scenario parse_scenario(const std::string& text, const std::string& name) {
  YAML::Node node;
  try {
    node = YAML::Load(text);
  } catch (const YAML::Exception& e) {
    throw Error(ErrorCode::kConfig, name + ":" + std::to_string(e.mark.line + 1) + ": " + e.msg);
  }
  return read(YamlMap(name, "", node));
}

Scenario load_scenario(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw Error(ErrorCode::kConfig, file + ": cannot be read");
  std::stringstream text;
  text << in.rdbuf();
  Scenario s = parse_scenario(text.str(), file);
  if (s.name.empty()) s.name = file;
  return s;
}

}  // namespace millrace::sim
