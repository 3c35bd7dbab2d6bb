#include "switch/control.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "roce/error.h"

namespace millrace::switching {

namespace {

using nlohmann::json;

constexpr size_t kClientsMax = 32;
constexpr size_t kLineMax = 64 << 10;

double seconds(Time t) { return std::chrono::duration<double>(t).count(); }

json capture_json(const CaptureCounters& c) {
  return {{"captured", c.captured},
          {"missed", c.missed},
          {"beyond_limit", c.beyond_limit},
          {"write_failed", c.write_failed},
          {"file_bytes", c.file_bytes}};
}

json impair_json(const ImpairConfig& config, const ImpairCounters& counters) {
  json j = {{"loss", config.loss},
            {"duplicate", config.duplicate},
            {"reorder", config.reorder},
            {"corrupt", config.corrupt},
            {"delay_us", config.delay / std::chrono::microseconds(1)},
            {"seed", config.seed}};
#define X(n) j["counters"][#n] = counters.n;
  MILLRACE_IMPAIR_COUNTERS(X)
#undef X
  return j;
}

json port_counters_json(const PortStatus& port) {
  json j;
#define X(n) j[#n] = port.counters.n;
  MILLRACE_PORT_COUNTERS(X)
#undef X
#define X(n) j["impair_rx"][#n] = port.rx_impair.n;
  MILLRACE_IMPAIR_COUNTERS(X)
#undef X
#define X(n) j["impair_tx"][#n] = port.tx_impair.n;
  MILLRACE_IMPAIR_COUNTERS(X)
#undef X
  if (port.capture) j["capture"] = capture_json(*port.capture);
  return j;
}

json group_json(const aggregation::GroupInfo& g) {
  json members = json::array();
  for (const aggregation::MemberInfo& m : g.members)
    members.push_back({{"rank", m.rank},
                       {"ranks", m.ranks},
                       {"address", m.address.to_string()},
                       {"qpn", m.qpn},
                       {"remote_qpn", m.remote_qpn},
                       {"connected", m.connected},
                       {"silent_s", seconds(m.silent_for)},
                       {"rate", m.rate},
                       {"segments", m.segments},
                       {"results", m.results},
                       {"waited_for", m.waited_for}});
  return {{"id", g.id},           {"key", g.key},
          {"state", g.state},     {"reason", g.reason},
          {"tenant", g.tenant},   {"world", g.world},
          {"stripes", g.stripes}, {"memory", g.memory},
          {"parent", g.parent},   {"operation", g.operation},
          {"what", g.what},       {"waiting_s", seconds(g.waiting_for)},
          {"members", members}};
}

// A direction's impairment from a request; what is left out is off.
ImpairConfig impair_from(const json& j, const std::string& direction) {
  if (!j.is_object()) throw Error(ErrorCode::kUsage, direction + " must be an object");
  ImpairConfig config;
  for (const auto& item : j.items()) {
    const std::string& key = item.key();
    const json& value = item.value();
    auto probability = [&](double& to) {
      if (!value.is_number() || !(value.get<double>() >= 0 && value.get<double>() <= 1))
        throw Error(ErrorCode::kUsage, direction + "." + key + " must be a number in 0 … 1");
      to = value.get<double>();
    };
    auto whole = [&](uint64_t max) {
      if (!value.is_number_unsigned() || value.get<uint64_t>() > max)
        throw Error(ErrorCode::kUsage,
                    direction + "." + key + " must be a whole number in 0 … " + std::to_string(max));
      return value.get<uint64_t>();
    };
    if (key == "loss") {
      probability(config.loss);
    } else if (key == "duplicate") {
      probability(config.duplicate);
    } else if (key == "reorder") {
      probability(config.reorder);
    } else if (key == "corrupt") {
      probability(config.corrupt);
    } else if (key == "delay_us") {
      config.delay = std::chrono::microseconds(whole(10'000'000));
    } else if (key == "seed") {
      config.seed = whole(UINT64_MAX);
    } else {
      throw Error(
          ErrorCode::kUsage,
          direction + "." + key + " is unknown (known: loss, duplicate, reorder, corrupt, delay_us, seed)");
    }
  }
  return config;
}

}  // namespace

json counters_json(const Snapshot& s) {
  json j;
  const PipelineCounters& p = s.pipeline;
  j["pipeline"] = {{"received", p.received},
                   {"from_engine", p.from_engine},
                   {"from_router", p.from_router},
                   {"emitted", p.emitted},
                   {"flood_copies", p.flood_copies},
                   {"flood_copies_failed", p.flood_copies_failed},
                   {"l2_learned", p.l2_learned},
                   {"l2_moved", p.l2_moved},
                   {"l2_move_refused", p.l2_move_refused},
                   {"l2_full", p.l2_full}};
  for (size_t i = 0; i < kFates; i++) {
    j["pipeline"][std::string(kFateNames[i])] = p.fates[i];
    j["engine_frames"][std::string(kFateNames[i])] = p.engine_fates[i];
    j["router_frames"][std::string(kFateNames[i])] = p.router_fates[i];
  }
  for (size_t i = 0; i < p.roce_drops.size(); i++) {
    const auto verdict = static_cast<roce::ParseVerdict>(i);
    if (verdict == roce::ParseVerdict::kOk || verdict == roce::ParseVerdict::kNotRoce) continue;
    j["roce"][std::string(roce::name(verdict))] = p.roce_drops[i];
  }
#define X(n) j["router"][#n] = s.router.n;
  MILLRACE_ROUTER_COUNTERS(X)
#undef X
#define X(n) j["aggregation"][#n] = s.aggregation.n;
  MILLRACE_AGGREGATION_COUNTERS(X)
#undef X
#define X(n) j["cm"][#n] = s.cm.n;
  MILLRACE_CM_COUNTERS(X)
#undef X
  j["ports"] = json::object();
  for (const PortStatus& port : s.ports) j["ports"][port.name] = port_counters_json(port);
  if (s.qos) {
    for (size_t i = 0; i < std::min(s.ports.size(), s.qos->ports.size()); i++)
      j["ports"][s.ports[i].name]["qos"] = port_qos_counters_json(s.qos->ports[i]);
    if (s.qos->spillway) {
      j["spillway"] = spill_counters_json(s.qos->spill);
      j["spillway"].erase("residence");  // a histogram, no counter: the command "spillway" has it
    }
  }
  if (s.capture) j["capture"] = capture_json(*s.capture);
  return j;
}

Control::Control(const Config& config, CommandRing& ring)
    : ring_(ring), requests_(config, [this](Command& command) { run(command); }) {
  try {
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0)
      throw Error(ErrorCode::kSystem, std::string("control: eventfd: ") + std::strerror(errno));
    if (!config.control_read.empty()) open_socket(config.control_read, false);
    if (!config.control_change.empty()) open_socket(config.control_change, true);
    thread_ = std::thread([this] {
      serve();
      finished_.store(true);
    });
  } catch (...) {
    close_all();
    throw;
  }
}

Control::~Control() {
  stop_.store(true);
  const uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof(one));
  while (!finished_.load()) {
    Command* command = nullptr;
    while (ring_.pop(command)) command->done.release();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  thread_.join();
  close_all();
}

void Control::close_all() {
  for (const Client& client : clients_) close(client.fd);
  for (const Listener& listener : listeners_) {
    close(listener.fd);
    unlink(listener.path.c_str());
  }
  if (wake_fd_ >= 0) close(wake_fd_);
}

void Control::open_socket(const std::string& path, bool may_change) {
  const std::string what = std::string("control.") + (may_change ? "change" : "read") + ": '" + path + "': ";
  const auto parent = std::filesystem::path(path).parent_path();
  std::error_code ignored;
  if (!parent.empty()) std::filesystem::create_directory(parent, ignored);

  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const auto* raw = reinterpret_cast<const sockaddr*>(&address);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw Error(ErrorCode::kSystem, what + std::strerror(errno));
  struct stat file {};
  if (lstat(path.c_str(), &file) == 0) {
    // A socket that nobody answers was left by a killed switch; anything else is not ours to remove.
    const bool served = S_ISSOCK(file.st_mode) && (connect(fd, raw, sizeof(address)) == 0 || errno == EAGAIN);
    if (served || !S_ISSOCK(file.st_mode)) {
      close(fd);
      throw Error(ErrorCode::kState,
                  what + (served ? "another switch is serving it" : "exists and is no socket"));
    }
    unlink(path.c_str());
  }
  // The permissions hold from the moment that the file exists.
  const mode_t mask = umask(may_change ? 0177 : 0111);
  const int bound = bind(fd, raw, sizeof(address));
  const int error = errno;
  umask(mask);
  if (bound != 0 || listen(fd, 16) != 0) {
    const int why = bound != 0 ? error : errno;
    close(fd);
    throw Error(ErrorCode::kSystem, what + std::strerror(why));
  }
  listeners_.push_back({fd, path, may_change});
}

void Control::serve() {
  std::vector<pollfd> fds;
  while (!stop_.load()) {
    fds.clear();
    fds.push_back({wake_fd_, POLLIN, 0});
    for (const Listener& l : listeners_) fds.push_back({l.fd, POLLIN, 0});
    for (const Client& c : clients_)
      fds.push_back({c.fd, static_cast<short>(c.out.empty() ? POLLIN : POLLOUT), 0});
    if (::poll(fds.data(), fds.size(), -1) < 0) continue;
    // Clients first: accepting changes their number.
    const size_t first = 1 + listeners_.size();
    std::vector<Client> kept;
    for (size_t i = 0; i < clients_.size(); i++) {
      Client& c = clients_[i];
      bool alive = true;
      if (fds[first + i].revents != 0) alive = c.out.empty() ? read_client(c) : write_client(c);
      if (alive) {
        kept.push_back(std::move(c));
      } else {
        close(c.fd);
      }
    }
    clients_ = std::move(kept);
    for (size_t i = 0; i < listeners_.size(); i++)
      if (fds[1 + i].revents & POLLIN) accept_client(listeners_[i]);
  }
}

void Control::accept_client(const Listener& listener) {
  const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return;
  if (clients_.size() >= kClientsMax) {
    close(fd);
    return;
  }
  clients_.push_back({fd, listener.may_change, {}, {}});
}

bool Control::read_client(Client& c) {
  char piece[4096];
  const ssize_t n = recv(c.fd, piece, sizeof(piece), 0);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
  if (n > 0) c.in.append(piece, static_cast<size_t>(n));
  for (size_t end = c.in.find('\n'); end != std::string::npos; end = c.in.find('\n')) {
    c.out += requests_.reply(c.in.substr(0, end), c.may_change) + "\n";
    c.in.erase(0, end + 1);
  }
  if (c.in.size() > kLineMax) return false;
  return c.out.empty() || write_client(c);
}

bool Control::write_client(Client& c) {
  const ssize_t n = send(c.fd, c.out.data(), c.out.size(), MSG_NOSIGNAL);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  c.out.erase(0, static_cast<size_t>(n));
  return true;
}

// Waits for the worker without a bound: the command lives on this stack, and the worker (or the destructor in
// its place) always answers.
void Control::run(Command& command) {
  if (!ring_.push(&command)) throw Error(ErrorCode::kState, "too many commands are waiting");
  command.done.acquire();
  if (!command.ok && stop_.load()) throw Error(ErrorCode::kState, "the switch is shutting down");
}

std::string Requests::reply(const std::string& line, bool may_change) {
  json result;
  try {
    result = answer(json::parse(line), may_change);
    result["ok"] = true;
  } catch (const json::exception& e) {
    result = {{"ok", false}, {"error", std::string("the request is not as it should be: ") + e.what()}};
  } catch (const std::exception& e) {
    result = {{"ok", false}, {"error", e.what()}};
  }
  // Names and reasons come from outside and need not be UTF-8.
  return result.dump(-1, ' ', false, json::error_handler_t::replace);
}

json Requests::answer(const json& request, bool may_change) {
  const std::string cmd = request.at("cmd").get<std::string>();
  if (cmd == "status") return status();
  if (cmd == "groups") return groups();
  if (cmd == "l2") return l2();
  if (cmd == "routes") return routes();
  if (cmd == "neighbours") return neighbours();
  if (cmd == "buffers" || cmd == "spillway") return qos(cmd == "spillway");
  if (cmd == "counters") {
    Command command;
    run_(command);
    return {{"name", config_.name}, {"counters", counters_json(command.snapshot)}};
  }
  if (cmd == "abort" || cmd == "impair") {
    if (!may_change)
      throw Error(ErrorCode::kRefused, "'" + cmd + "' changes the switch: use its change socket" +
                                           (config_.control_change.empty() ? " (none is configured)"
                                                                           : " " + config_.control_change));
    return cmd == "abort" ? abort(request) : impair(request);
  }
  throw Error(
      ErrorCode::kUsage,
      "unknown command '" + cmd +
          "' (known: status, groups, counters, l2, routes, neighbours, buffers, spillway, abort, impair)");
}

json Requests::qos(bool spillway) {
  Command command;
  command.kind = Command::Kind::kQos;
  run_(command);
  if (!command.qos)
    throw Error(ErrorCode::kState, "the switch has no traffic manager: its configuration is without qos");
  std::vector<std::string> names;
  for (const PortConfig& p : config_.ports) names.push_back(p.name);
  json j = spillway ? spillway_json(*command.qos, names) : buffers_json(*command.qos, names);
  j["name"] = config_.name;
  return j;
}

json Requests::status() {
  Command command;
  run_(command);
  const Snapshot& s = command.snapshot;
  json addresses = json::array(), ports = json::array();
  for (const IpAddress& a : config_.engine.addresses) addresses.push_back(a.to_string());
  for (const PortStatus& p : s.ports) {
    const PortCounters& c = p.counters;
    json port = {
        {"name", p.name},
        {"addresses", json::array()},
        {"device", p.device},
        {"link", p.link_up ? "up" : "down"},
        {"speed_mbps", p.speed_mbps},
        {"frame_bytes_max", p.frame_bytes_max},
        {"multi_segments", p.multi_segments},
        {"rx_packets", c.rx_frames},
        {"rx_bytes", c.rx_bytes},
        {"rx_missed", c.device_missed + c.device_no_buffer},
        {"rx_errors", c.device_rx_errors + c.rx_too_long},
        {"tx_packets", c.tx_frames},
        {"tx_bytes", c.tx_bytes},
        {"tx_dropped", c.tx_queue_full + c.tx_too_long + c.tx_pool_empty},
        {"tx_errors", c.device_tx_errors},
        {"impair",
         {{"rx", impair_json(p.rx_config, p.rx_impair)}, {"tx", impair_json(p.tx_config, p.tx_impair)}}}};
    for (const InterfaceAddress& a : config_.routing.interfaces)
      if (a.interface == ports.size()) port["addresses"].push_back(a.prefix.to_string());
    if (p.capture) port["capture"] = capture_json(*p.capture);
    ports.push_back(std::move(port));
  }
  json j = {{"name", config_.name},
            {"version", MILLRACE_VERSION},
            {"uptime_s", seconds(s.uptime)},
            {"mac", config_.engine.mac.to_string()},
            {"addresses", addresses},
            {"routing", config_.routing.enabled()},
            {"ports", ports},
            {"frames",
             {{"size", s.frames},
              {"available", s.frames_available + s.frames_cached},
              {"in_use", s.frames - s.frames_available - s.frames_cached},
              {"room", config_.frame_room}}},
            {"group_memory", {{"reserved", s.memory_reserved}, {"limit", config_.engine.memory_limit}}},
            {"queue_pairs", s.queue_pairs},
            {"l2_entries", s.l2_entries}};
  if (s.capture) j["capture"] = capture_json(*s.capture);
  return j;
}

json Requests::groups() {
  Command command;
  command.kind = Command::Kind::kGroups;
  run_(command);
  json all = json::array();
  for (const aggregation::GroupInfo& g : command.groups) all.push_back(group_json(g));
  return {{"name", config_.name}, {"groups", all}};
}

json Requests::l2() {
  Command command;
  command.kind = Command::Kind::kL2;
  run_(command);
  json all = json::array();
  for (const L2Table::Entry& e : command.l2) {
    json entry = {
        {"mac", e.mac.to_string()}, {"port", config_.ports[e.port].name}, {"age_s", seconds(e.age)}};
    // A routed port is in no VLAN.
    entry["vlan"] = e.domain < kVlans ? json(e.domain) : json();
    all.push_back(std::move(entry));
  }
  return {{"name", config_.name}, {"entries", all}, {"entries_max", config_.l2.entries_max}};
}

std::string Requests::interface_name(uint16_t interface) const {
  return interface == kBridge ? "bridge" : config_.ports[interface].name;
}

json Requests::routes() {
  Command command;
  command.kind = Command::Kind::kRoutes;
  run_(command);
  json all = json::array();
  for (const Router::RouteInfo& r : command.routes) {
    json route = {{"prefix", r.prefix.to_string()}, {"kind", r.connected ? "connected" : "static"}};
    if (r.connected) route["interface"] = interface_name(r.interface);
    route["via"] = json::array();
    for (const Router::RouteInfo::Way& w : r.ways)
      route["via"].push_back({{"address", w.address.to_string()},
                              {"interface", interface_name(w.interface)},
                              {"state", w.state},
                              {"packets", w.packets}});
    all.push_back(std::move(route));
  }
  return {{"name", config_.name}, {"routing", config_.routing.enabled()}, {"routes", all}};
}

json Requests::neighbours() {
  Command command;
  command.kind = Command::Kind::kNeighbours;
  run_(command);
  json all = json::array();
  for (const NeighbourTable::Info& n : command.neighbours)
    all.push_back({{"address", n.address.to_string()},
                   {"interface", interface_name(n.interface)},
                   {"mac", n.mac == MacAddress{} ? json() : json(n.mac.to_string())},
                   {"state", n.state},
                   {"next_hop", n.next_hop},
                   {"answered_s", n.age == kNever ? json() : json(seconds(n.age))},
                   {"held", n.held}});
  return {{"name", config_.name}, {"neighbours", all}};
}

json Requests::abort(const json& request) {
  Command command;
  command.kind = Command::Kind::kAbort;
  const json& group = request.at("group");
  if (!group.is_number_unsigned() || group.get<uint64_t>() > UINT32_MAX)
    throw Error(ErrorCode::kUsage, "group must be a group's id, a number");
  command.group = group.get<uint32_t>();
  command.why = request.value("why", "by the administrator");
  run_(command);
  if (!command.ok) throw Error(ErrorCode::kState, "there is no group " + std::to_string(command.group));
  return {{"group", command.group}};
}

json Requests::impair(const json& request) {
  Command command;
  command.kind = Command::Kind::kImpair;
  const std::string name = request.at("port").get<std::string>();
  size_t port = 0;
  while (port < config_.ports.size() && config_.ports[port].name != name) port++;
  if (port == config_.ports.size()) throw Error(ErrorCode::kUsage, "there is no port '" + name + "'");
  command.port = static_cast<uint16_t>(port);
  if (request.contains("rx")) command.rx = impair_from(request["rx"], "rx");
  if (request.contains("tx")) command.tx = impair_from(request["tx"], "tx");
  if (!command.rx && !command.tx) throw Error(ErrorCode::kUsage, "impair needs rx, tx or both");
  run_(command);
  return {{"port", name}};
}

}  // namespace millrace::switching
