#include "switch/config_qos.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "switch/config_lenders.h"
#include "switch/port_setup.h"

namespace millrace::switching {

namespace {

using buffering::BufferProfile;
using buffering::kClasses;
using buffering::Scheduler;
using buffering::WredProfile;
using std::chrono::milliseconds;

constexpr uint64_t kMegabit = 1'000'000;
constexpr uint64_t kSpeedMax = 1'600'000;  // Mb/s
constexpr uint64_t kBytesMax = 1ull << 40;
constexpr size_t kNamesMax = 256;  // of one table
constexpr uint64_t kFramesMax = 1 << 24;

template <typename T>
using Named = std::map<std::string, T>;

std::optional<uint32_t> number_of(std::string_view text) {
  uint32_t v = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (text.empty() || error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return v;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == by)
      parts.emplace_back();
    else if (c != ' ')
      parts.back() += c;
  }
  return parts;
}

// "3", "3-4", "0,3-4": numbers up to `max`; std::nullopt for anything else.
std::optional<std::vector<uint32_t>> numbers_of(const std::string& text, uint32_t max) {
  std::vector<uint32_t> all;
  for (const std::string& part : split(text, ',')) {
    const auto ends = split(part, '-');
    const auto first = number_of(ends.front()), last = number_of(ends.back());
    if (ends.size() > 2 || !first || !last || *first > *last || *last > max) return std::nullopt;
    for (uint32_t n = *first; n <= *last; n++) all.push_back(n);
  }
  return all;
}

std::vector<std::string> keys_of(const YamlMap& map) {
  std::vector<std::string> keys;
  if (map.node().IsMap())
    for (const auto& entry : map.node()) keys.push_back(entry.first.Scalar());
  return keys;
}

template <typename T>
std::string names_of(const Named<T>& table) {
  std::string all;
  for (const auto& [name, value] : table) all += (all.empty() ? "" : ", ") + name;
  return all.empty() ? "nothing" : all;
}

// A field whose value is numbers, as one text or a list of them.
void numbers(YamlMap& map, const std::string& key, uint32_t max, const char* what,
             const std::function<void(uint32_t)>& each) {
  const YAML::Node node = map.get(key);
  if (!node.IsDefined()) return;
  auto take = [&](const YAML::Node& n) {
    const auto some = n.IsScalar() ? numbers_of(n.Scalar(), max) : std::nullopt;
    if (!some)
      map.fail_at(n, map.path_of(key) + ": " + (n.IsScalar() ? "'" + n.Scalar() + "'" : "this") + " is not " +
                         what + " in 0 … " + std::to_string(max) + ", nor several as \"3,4\" or \"8-15\"");
    for (const uint32_t v : *some) each(v);
  };
  if (!node.IsSequence()) return take(node);
  for (const auto& element : node) take(element);
}

bool boolean(YamlMap& map, const std::string& key, bool otherwise) {
  std::string text = otherwise ? "true" : "false";
  map.choice(key, {"true", "false"}, text);
  return text == "true";
}

class QosReader {
 public:
  QosReader(YamlMap& top, Config& config)
      : qos_(top.map("qos")), config_(config), buffering_(*config.buffers) {}

  void read() {
    read_common();
    read_pool();
    read_profiles();
    read_wred();
    read_schedulers();
    dscp_to_tc_ = read_map<64>("DSCP_TO_TC_MAP", "a DSCP");
    tc_to_queue_ = read_map<kClasses>("TC_TO_QUEUE_MAP", "a traffic class");
    tc_to_pg_ = read_map<kClasses>("TC_TO_PRIORITY_GROUP_MAP", "a traffic class");
    read_ports();
    read_buffers();
    read_queues();
    read_port_maps();
    read_watchdog();
    qos_.finish();
    check_lossless();
    check_reserved();
  }

 private:
  using Apply = std::function<void(buffering::PortConfig&, size_t)>;
  struct Target {
    std::vector<size_t> ports;
    std::vector<uint32_t> classes;
    bool all_ports = false;
  };

  void read_common() {
    qos_.number("frames_max", 64, config_.frame_count, buffering_.frames_max);
    // Acknowledgements stay with the READ responses of their queue pair: one that overtakes such a response
    // makes the requester ask for it again. CNPs are in no order.
    own_class("ack_tc", std::nullopt, buffering_.ack_tc);
    own_class("cnp_tc", 6, buffering_.cnp_tc);
  }

  void own_class(const std::string& key, std::optional<uint8_t> otherwise, std::optional<uint8_t>& tc) {
    tc = otherwise;
    std::string text;
    qos_.text(key, text);
    if (text == "none")
      tc.reset();
    else
      qos_.number(key, 0, kClasses - 1, [&](uint64_t v) { tc = static_cast<uint8_t>(v); });
    if (tc)
      for (auto& port : buffering_.ports) port.queues[*tc].scheduler.strict = true;
  }

  // The entries of a table of names, in their order in the file.
  void each(const std::string& table, const std::function<void(const std::string&, YamlMap&)>& read) {
    YamlMap entries = qos_.map(table);
    const auto keys = keys_of(entries);
    if (keys.size() > kNamesMax) qos_.fail(table, "has more than " + std::to_string(kNamesMax) + " entries");
    for (const std::string& key : keys) {
      YamlMap map = entries.map(key);
      read(key, map);
      map.finish();
    }
  }

  void read_pool() {
    bool given = false;
    each("BUFFER_POOL", [&](const std::string& name, YamlMap& map) {
      if (given)
        qos_.fail("BUFFER_POOL", "'" + name + "' is a second pool: this switch has one shared buffer");
      given = true;
      pool_ = name;
      map.size("size", 1 << 16, kBytesMax, buffering_.pool_size);
      map.size("xoff", 0, kBytesMax, buffering_.pool_xoff);
      // SONiC's, and all that this buffer is.
      std::string text;
      map.choice("type", {"ingress", "egress", "both"}, text);
      map.choice("mode", {"dynamic"}, text);
    });
  }

  void read_profiles() {
    each("BUFFER_PROFILE", [&](const std::string& name, YamlMap& map) {
      BufferProfile p;
      std::string pool;
      map.text("pool", pool);
      if (!pool.empty() && pool != pool_)
        map.fail("pool",
                 "'" + pool + "' is not in BUFFER_POOL (there: " + (pool_.empty() ? "nothing" : pool_) + ")");
      map.size("size", 0, kBytesMax, p.size);
      if (map.get("dynamic_th").IsDefined()) {
        std::string text;
        map.text("dynamic_th", text);
        const bool minus = text.starts_with('-');
        const auto v = number_of(std::string_view(text).substr(minus));
        if (!v || *v > (minus ? 8u : 7u))
          map.fail("dynamic_th",
                   "'" + text + "' is not a whole number in -8 … 7 (n: 2^n times what is free)");
        p.dynamic_th = minus ? -static_cast<int>(*v) : static_cast<int>(*v);
      }
      map.size("static_th", 0, kBytesMax, p.static_th);
      if (p.dynamic_th && map.get("static_th").IsDefined())
        map.fail("static_th", "a profile has dynamic_th or static_th, not both");
      map.size("xoff", 0, kBytesMax, p.xoff);
      map.size("xon", 0, kBytesMax, p.xon);
      map.size("xon_offset", 0, kBytesMax, p.xon_offset);
      for (const char* key : {"xon", "xon_offset"})
        if (map.get(key).IsDefined() && p.xoff == 0)
          map.fail(key, "is of a lossless profile: write xoff, the headroom, too");
      if (!p.dynamic_th && p.xon > p.static_th)
        map.fail("xon", "must not be more than static_th, at which the sender is paused");
      std::string action = "drop";
      map.choice("packet_discard_action", {"drop", "spill"}, action);
      p.spill = action == "spill";
      if (p.spill && p.xoff > 0)
        map.fail("packet_discard_action",
                 "a lossless profile (xoff) discards nothing, so nothing is spilled");
      profiles_[name] = p;
    });
  }

  void read_wred() {
    each("WRED_PROFILE", [&](const std::string& name, YamlMap& map) {
      WredProfile w;
      std::string ecn;
      map.choice("ecn", {"ecn_all"}, ecn);
      map.require("green_min_threshold");
      map.require("green_max_threshold");
      map.size("green_min_threshold", 1, kBytesMax, w.min_threshold);
      map.size("green_max_threshold", 1, kBytesMax, w.max_threshold);
      if (w.max_threshold < w.min_threshold)
        map.fail("green_max_threshold", "must not be less than green_min_threshold");
      map.number("green_drop_probability", 0, 100,
                 [&](uint64_t v) { w.probability = static_cast<double>(v) / 100; });
      wred_[name] = w;
    });
  }

  void read_schedulers() {
    each("SCHEDULER", [&](const std::string& name, YamlMap& map) {
      Scheduler s;
      std::string type;
      map.require("type");
      map.choice("type", {"STRICT", "DWRR"}, type);
      s.strict = type == "STRICT";
      map.number("weight", 1, 100, s.weight);
      if (s.strict && map.get("weight").IsDefined()) map.fail("weight", "is DWRR's: STRICT has none");
      schedulers_[name] = s;
    });
  }

  // What is not named keeps what it has without a map.
  template <size_t N>
  Named<std::map<uint32_t, uint8_t>> read_map(const std::string& table, const char* what) {
    Named<std::map<uint32_t, uint8_t>> all;
    each(table, [&](const std::string& name, YamlMap& map) {
      for (const std::string& key : keys_of(map)) {
        const auto from = numbers_of(key, N - 1);
        if (!from)
          map.fail(key, std::string("the key is not ") + what + " in 0 … " + std::to_string(N - 1) +
                            ", nor several as \"8-15\"");
        uint8_t to = 0;
        map.number(key, 0, kClasses - 1, to);
        for (const uint32_t v : *from)
          if (!all[name].emplace(v, to).second) map.fail(key, std::to_string(v) + " is given twice");
      }
    });
    return all;
  }

  // "p1", "p1,p2" or "*", with the classes behind a bar where there are any: "p1|3-4".
  Target target_of(const YamlMap& entries, const std::string& key, bool with_classes) const {
    const size_t bar = key.find('|');
    if ((bar != std::string::npos) != with_classes)
      entries.fail(key, with_classes ? "the key must be PORT|NUMBERS, as \"p1|3-4\" or \"*|0\""
                                     : "the key must be a port's name, several as \"p1,p2\", or \"*\"");
    Target t;
    const std::string names = key.substr(0, bar);
    t.all_ports = names == "*";
    for (const std::string& name : split(names, ',')) {
      const size_t before = t.ports.size();
      for (size_t i = 0; i < config_.ports.size(); i++)
        if (t.all_ports || config_.ports[i].name == name) t.ports.push_back(i);
      if (t.ports.size() == before) entries.fail(key, "there is no port '" + name + "'");
    }
    t.classes = {0};
    if (!with_classes) return t;
    const auto classes = numbers_of(key.substr(bar + 1), kClasses - 1);
    if (!classes)
      entries.fail(key, "'" + key.substr(bar + 1) + "' is not a number in 0 … 7, nor several as \"3-4\"");
    t.classes = *classes;
    return t;
  }

  // What is said of a port goes before what is said of all.
  void per_target(const std::string& table, bool with_classes, const std::function<Apply(YamlMap&)>& read) {
    YamlMap entries = qos_.map(table);
    for (const bool all_ports : {true, false}) {
      std::set<std::pair<size_t, uint32_t>> given;
      for (const std::string& key : keys_of(entries)) {
        const Target t = target_of(entries, key, with_classes);
        if (t.all_ports != all_ports) continue;
        YamlMap map = entries.map(key);
        const Apply apply = read(map);
        map.finish();
        for (const size_t port : t.ports)
          for (const uint32_t c : t.classes) {
            if (!given.emplace(port, c).second)
              entries.fail(key, config_.ports[port].name +
                                    (with_classes ? "|" + std::to_string(c) : std::string()) +
                                    " is given twice");
            apply(buffering_.ports[port], c);
          }
      }
    }
  }

  // nullptr when the field is not there.
  template <typename T>
  const T* reference(YamlMap& map, const std::string& key, const char* table, const Named<T>& from) const {
    if (!map.get(key).IsDefined()) return nullptr;
    std::string name;
    map.text(key, name);
    const auto found = from.find(name);
    if (found == from.end())
      map.fail(key, "'" + name + "' is not in " + table + " (there: " + names_of(from) + ")");
    return &found->second;
  }

  void read_ports() {
    per_target("PORT", false, [&](YamlMap& map) -> Apply {
      using Hardware = buffering::PortConfig::PfcHardware;
      std::optional<uint64_t> speed, rate;
      std::string hardware;
      map.number("speed", 1, kSpeedMax, [&](uint64_t v) { speed = v * kMegabit; });
      map.number("rate_mbps", 1, kSpeedMax, [&](uint64_t v) { rate = v * kMegabit; });
      map.choice("pfc_hardware", {"auto", "on", "off"}, hardware);
      return [=](buffering::PortConfig& port, size_t) {
        if (speed) port.speed_bps = *speed, port.speed_given = true;
        if (!hardware.empty())
          port.pfc_hardware = hardware == "on"    ? Hardware::kOn
                              : hardware == "off" ? Hardware::kOff
                                                  : Hardware::kAuto;
        if (rate) port.rate_bps = *rate;
      };
    });
  }

  void read_buffers() {
    per_target("BUFFER_PG", true, [&](YamlMap& map) -> Apply {
      map.require("profile");
      const BufferProfile profile = *reference(map, "profile", "BUFFER_PROFILE", profiles_);
      if (profile.spill)
        map.fail("profile", "packet_discard_action spill is a queue's: a priority group does not spill");
      return [=](buffering::PortConfig& port, size_t c) { port.groups[c] = profile; };
    });
    per_target("BUFFER_QUEUE", true, [&](YamlMap& map) -> Apply {
      map.require("profile");
      const BufferProfile profile = *reference(map, "profile", "BUFFER_PROFILE", profiles_);
      if (profile.xoff > 0)
        map.fail("profile", "xoff is a priority group's: a queue has no headroom and pauses nobody");
      return [=](buffering::PortConfig& port, size_t c) { port.queues[c].profile = profile; };
    });
  }

  void read_queues() {
    per_target("QUEUE", true, [&](YamlMap& map) -> Apply {
      const Scheduler* scheduler = reference(map, "scheduler", "SCHEDULER", schedulers_);
      const WredProfile* wred = reference(map, "wred_profile", "WRED_PROFILE", wred_);
      return [=](buffering::PortConfig& port, size_t c) {
        if (scheduler != nullptr) port.queues[c].scheduler = *scheduler;
        if (wred != nullptr) port.queues[c].wred = *wred;
      };
    });
  }

  void read_port_maps() {
    per_target("PORT_QOS_MAP", false, [&](YamlMap& map) -> Apply {
      const auto* dscp = reference(map, "dscp_to_tc_map", "DSCP_TO_TC_MAP", dscp_to_tc_);
      const auto* queue = reference(map, "tc_to_queue_map", "TC_TO_QUEUE_MAP", tc_to_queue_);
      const auto* pg = reference(map, "tc_to_pg_map", "TC_TO_PRIORITY_GROUP_MAP", tc_to_pg_);
      std::bitset<kClasses> pfc;
      numbers(map, "pfc_enable", kClasses - 1, "a priority", [&](uint32_t v) { pfc.set(v); });
      const bool pfc_given = map.get("pfc_enable").IsDefined();
      return [=](buffering::PortConfig& port, size_t) {
        if (dscp != nullptr)
          for (const auto& [from, to] : *dscp) port.dscp_to_tc[from] = to;
        if (queue != nullptr)
          for (const auto& [from, to] : *queue) port.tc_to_queue[from] = to;
        if (pg != nullptr)
          for (const auto& [from, to] : *pg) port.tc_to_pg[from] = to;
        if (pfc_given) port.pfc = pfc;
      };
    });
  }

  void read_watchdog() {
    std::optional<Time> detection, restoration;
    // One clock checks all ports.
    auto time = [](YamlMap& map, const std::string& key, std::optional<Time>& value) {
      map.number(key, 1, 60'000, [&](uint64_t v) {
        const Time t = milliseconds(v);
        if (value && *value != t) map.fail(key, "is another than before: there is one for all ports");
        value = t;
      });
    };
    per_target("PFC_WD", false, [&](YamlMap& map) -> Apply {
      time(map, "detection_time", detection);
      time(map, "restoration_time", restoration);
      std::string action = "drop";
      map.choice("action", {"drop", "none"}, action);
      return [=](buffering::PortConfig& port, size_t) { port.watchdog = action == "drop"; };
    });
    if (detection) buffering_.watchdog.detection = *detection;
    if (restoration) buffering_.watchdog.restoration = *restoration;
  }

  // A group that is lossless by its profile, and whose sender would never be told to pause.
  void check_lossless() const {
    for (size_t i = 0; i < buffering_.ports.size(); i++) {
      const buffering::PortConfig& port = buffering_.ports[i];
      if (port.pfc_hardware == buffering::PortConfig::PfcHardware::kOn &&
          std::none_of(port.groups.begin(), port.groups.end(), [](auto& g) { return g.xoff > 0; }))
        qos_.fail("PORT", "pfc_hardware is on, but no priority group of " + config_.ports[i].name +
                              " is lossless: give one a BUFFER_PROFILE with xoff in BUFFER_PG");
      for (size_t c = 0; c < kClasses; c++) {
        if (port.groups[c].xoff > 0 && !port.pfc.test(c))
          qos_.fail("BUFFER_PG", "priority group " + std::to_string(c) + " of " + config_.ports[i].name +
                                     " is lossless (its profile has xoff), but PORT_QOS_MAP's pfc_enable of "
                                     "that port is without " +
                                     std::to_string(c));
      }
    }
  }

  // Queues and priority groups are two views of the same bytes.
  void check_reserved() const {
    uint64_t queues = 0, groups = 0;
    for (const auto& port : buffering_.ports)
      for (size_t c = 0; c < kClasses; c++) {
        queues += port.queues[c].profile.size;
        groups += port.groups[c].size;
      }
    for (const auto& [reserved, whose] : {std::pair{queues, "queues"}, {groups, "priority groups"}})
      if (reserved > buffering_.pool_size)
        qos_.fail("BUFFER_POOL", "the profiles of all " + std::string(whose) + " reserve " +
                                     std::to_string(reserved) + " bytes (size), more than the pool's " +
                                     std::to_string(buffering_.pool_size));
  }

  YamlMap qos_;
  Config& config_;
  buffering::Config& buffering_;
  std::string pool_;
  Named<BufferProfile> profiles_;
  Named<WredProfile> wred_;
  Named<Scheduler> schedulers_;
  Named<std::map<uint32_t, uint8_t>> dscp_to_tc_, tc_to_queue_, tc_to_pg_;
};

void read_prefixes(YamlMap& map, buffering::SpillwayConfig& spillway) {
  std::vector<std::string> texts;
  map.texts("spill_src_prefix", texts);
  if (texts.size() > kNamesMax)
    map.fail("spill_src_prefix", "has more than " + std::to_string(kNamesMax) + " prefixes");
  for (size_t i = 0; i < texts.size(); i++) {
    const auto prefix = Prefix::parse(texts[i]);
    if (!prefix || prefix->address != prefix->network())
      map.fail_at(map.get("spill_src_prefix")[i],
                  map.path_of("spill_src_prefix") + ": '" + texts[i] +
                      "' is not a prefix, as 10.78.0.0/16 or fd78::/64" +
                      (prefix ? ", without bits behind its length" : " (/0 … /32, /128 of IPv6)"));
    const unsigned before = prefix->address.is_v4() ? 96 : 0;
    spillway.source_prefixes.push_back({prefix->address, static_cast<uint8_t>(before + prefix->length)});
  }
}

void read_fast_cnp(YamlMap& map, buffering::SpillwayConfig& s) {
  s.fast_cnp = boolean(map, "fast_cnp", s.fast_cnp);
  map.duration("fast_cnp_interval_us", std::chrono::microseconds(1), 1, 1'000'000, s.fast_cnp_interval);
  map.number("fast_cnp_dscp", 0, 63, s.fast_cnp_dscp);
  for (const char* key : {"fast_cnp_interval_us", "fast_cnp_dscp"})
    if (!s.fast_cnp && map.get(key).IsDefined()) map.fail(key, "is of fast_cnp, which is off");
}

// What stays in the switch stays in the buffers that it came in, one for each packet, which the pool gets on
// top of frames.count: as many as hold packets of full length.
void read_spill_frames(YamlMap& map, Config& config) {
  buffering::SpillwayConfig& s = config.buffers->spillway;
  const uint64_t here = config.lenders ? config.spill_local : s.pool_size;
  const uint64_t needed = (here + config.buffers->mtu - 1) / config.buffers->mtu;
  if (needed > kFramesMax && !map.get("spill_frames_max").IsDefined())
    map.fail(config.lenders ? "spill_local_size" : "spill_pool_size",
             "needs " + std::to_string(needed) + " buffers of the frame pool, more than " +
                 std::to_string(kFramesMax));
  s.frames_max = static_cast<uint32_t>(std::min(needed, kFramesMax));
  map.number("spill_frames_max", 64, kFramesMax, s.frames_max);
  if (s.enabled && here != 0) config.spill_frames = s.frames_max;
}

void check_spilling_queues(YamlMap& map, const Config& config) {
  const buffering::SpillwayConfig& s = config.buffers->spillway;
  const uint64_t frame = config.buffers->mtu;
  bool spills = false;
  for (size_t i = 0; i < config.ports.size(); i++)
    for (size_t c = 0; c < kClasses; c++) {
      const buffering::QueueConfig& queue = config.buffers->ports[i].queues[c];
      if (!queue.profile.spill) continue;
      spills = true;
      if (s.drain_off == 0 && queue.wred && queue.wred->min_threshold < frame)
        map.fail_at(map.node(), map.path_of("drain_off_bytes") + ": missing: queue " + std::to_string(c) +
                                    " of " + config.ports[i].name +
                                    " spills and its WRED profile begins at " +
                                    std::to_string(queue.wred->min_threshold) +
                                    " bytes, less than a frame of " + std::to_string(frame));
    }
  if (s.enabled && !spills)
    map.fail_at(map.node(),
                map.path_of("spill_dscp") +
                    ": no queue spills: give one a BUFFER_PROFILE with packet_discard_action: spill");
}

}  // namespace

void read_qos(YamlMap& top, Config& config) {
  if (const YAML::Node node = top.get("qos"); !node.IsDefined() || node.IsNull()) return;
  buffering::Config& b = config.buffers.emplace();
  b.ports.resize(config.ports.size());
  b.mac = config.engine.mac;
  b.seed = config.engine.seed;
  b.mtu = config.engine.mtu + 104;  // the longest headers of a RoCE packet
  // Groups may have three quarters, and receive rings need some.
  b.frames_max = config.frame_count / 8;
  QosReader(top, config).read();
  // As far as the file says; the worker, which asks the devices, knows better.
  const uint64_t fastest = adopt_speeds(b.ports, std::vector<uint64_t>(b.ports.size()));
  if (fastest != 0) config.engine.line_rate = fastest;
}

void read_spillway(YamlMap& top, Config& config) {
  const YAML::Node node = top.get("spillway");
  if (!node.IsDefined() || node.IsNull()) return;
  YamlMap map = top.map("spillway");
  if (!config.buffers)
    map.fail_at(map.node(), "spillway: there is no traffic manager that could spill: write qos, too");
  buffering::SpillwayConfig& s = config.buffers->spillway;
  s.enabled = boolean(map, "enabled", true);
  numbers(map, "spill_dscp", 63, "a DSCP", [&](uint32_t v) { s.dscp.set(v); });
  if (s.enabled && s.dscp.none())
    map.fail_at(map.node(), map.path_of("spill_dscp") + ": missing: without one, nothing is ever spilled");
  read_prefixes(map, s);
  map.size("spill_pool_size", 1 << 16, kBytesMax, s.pool_size);
  map.size("spill_key_limit", 1 << 13, kBytesMax, s.key_limit);
  map.number("spill_max_keys", 1, 1 << 20, s.keys_max);
  map.size("drain_on_bytes", 1, kBytesMax, s.drain_on);
  // With less, no frame of full length would fit when it is to be drained.
  const uint64_t frame = config.buffers->mtu;
  map.size("drain_off_bytes", frame, kBytesMax, s.drain_off);
  if (s.drain_off != 0 && s.drain_on > s.drain_off)
    map.fail("drain_on_bytes", "must not be more than drain_off_bytes, or draining would stop as it begins");
  map.duration("drain_check_interval_us", std::chrono::microseconds(1), 1, 1'000'000, s.drain_check_interval);
  map.number("drain_hold_checks", 1, 1000, s.drain_hold_checks);
  map.number("drain_rate_mbps", 1, kSpeedMax, [&](uint64_t v) { s.drain_rate_bps = v * kMegabit; });
  map.size("drain_burst", 64, kBytesMax, s.drain_burst);
  s.mark_ce = boolean(map, "spill_mark_ce", s.mark_ce);
  read_fast_cnp(map, s);
  map.duration("max_residence_ms", milliseconds(1), 1, 3'600'000, s.max_residence);
  read_lenders(map, config);
  read_spill_frames(map, config);
  map.finish();
  check_spilling_queues(map, config);
}

}  // namespace millrace::switching
