// millracectl: asks a running switch through its control sockets and prints the answer, as a table or as
// JSON.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "roce/error.h"

namespace millrace {
namespace {

using nlohmann::json;

constexpr int kAnswerTimeoutMs = 5000;

class Connection {
 public:
  explicit Connection(const std::string& path) : path_(path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path))
      throw Error(ErrorCode::kUsage, "'" + path + "' is too long for a socket's path");
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    fd_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd_ < 0 || connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      const int why = errno;
      if (fd_ >= 0) close(fd_);
      throw Error(ErrorCode::kUnreachable,
                  "no switch answers at '" + path + "' (" + std::strerror(why) + ")");
    }
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // One request, one reply; throws when the switch refuses.
  json ask(const json& request) {
    const std::string line = request.dump() + "\n";
    if (send(fd_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size())) throw lost();
    std::string answer;
    while (answer.find('\n') == std::string::npos) {
      pollfd waiting{fd_, POLLIN, 0};
      const int ready = poll(&waiting, 1, kAnswerTimeoutMs);
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0)
        throw Error(ErrorCode::kUnreachable, "the switch at '" + path_ + "' did not answer within " +
                                                 std::to_string(kAnswerTimeoutMs / 1000) + " s");
      char piece[65536];
      const ssize_t n = recv(fd_, piece, sizeof(piece), 0);
      if (n <= 0) throw lost();
      answer.append(piece, static_cast<size_t>(n));
    }
    json reply = json::parse(answer);
    if (!reply.value("ok", false))
      throw Error(ErrorCode::kRefused,
                  reply.value("error", std::string("the switch refused without a reason")));
    reply.erase("ok");
    return reply;
  }

 private:
  Error lost() const {
    return {ErrorCode::kUnreachable, "the switch at '" + path_ + "' closed the connection without an answer"};
  }
  std::string path_;
  int fd_ = -1;
};

// Columns as wide as their widest cell; numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(const std::vector<json>& cells) {
    std::vector<std::string> row;
    for (const json& cell : cells) row.push_back(cell.is_string() ? cell.get<std::string>() : cell.dump());
    rows_.push_back(std::move(row));
  }
  void print() const {
    std::vector<size_t> width(rows_[0].size());
    for (const auto& row : rows_)
      for (size_t i = 0; i < row.size(); i++) width[i] = std::max(width[i], row[i].size());
    for (const auto& row : rows_) {
      std::string line;
      for (size_t i = 0; i < row.size(); i++) {
        const bool number = rows_.size() > 1 && !rows_[1][i].empty() &&
                            std::isdigit(static_cast<unsigned char>(rows_[1][i][0])) &&
                            rows_[1][i].find_first_not_of("0123456789.") == std::string::npos;
        const std::string fill(width[i] - row[i].size(), ' ');
        line += (i > 0 ? "  " : "") + (number ? fill + row[i] : row[i] + fill);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      std::printf("%s\n", line.c_str());
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

std::string mebibytes(const json& bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", bytes.get<double>() / (1 << 20));
  return text;
}

std::string fixed(const json& seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f", seconds.get<double>());
  return text;
}

// What congestion control holds a member to; "-" when it does not.
std::string rate(const json& bits) {
  if (bits == 0) return "-";
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f Gb/s", bits.get<double>() / 1e9);
  return text;
}

// "loss 0.01 delay_us 5", or "-".
std::string faults(const json& direction) {
  std::string text;
  for (const char* key : {"loss", "duplicate", "reorder", "corrupt", "delay_us"})
    if (direction.at(key) != 0)
      text += std::string(text.empty() ? "" : " ") + key + " " + direction.at(key).dump();
  return text.empty() ? "-" : text;
}

void print_status(const json& s) {
  std::string addresses;
  for (const json& a : s.at("addresses")) addresses += " " + a.get<std::string>();
  std::printf("%s  version %s  up %s s  mac %s  addresses%s\n", s.at("name").get<std::string>().c_str(),
              s.at("version").get<std::string>().c_str(), fixed(s.at("uptime_s")).c_str(),
              s.at("mac").get<std::string>().c_str(), addresses.c_str());
  const json &frames = s.at("frames"), &memory = s.at("group_memory");
  std::printf("frames %s of %s in use  group memory %s of %s MiB  queue pairs %s  learned addresses %s\n\n",
              frames.at("in_use").dump().c_str(), frames.at("size").dump().c_str(),
              mebibytes(memory.at("reserved")).c_str(), mebibytes(memory.at("limit")).c_str(),
              s.at("queue_pairs").dump().c_str(), s.at("l2_entries").dump().c_str());
  Table table({"PORT", "LINK", "RX PACKETS", "RX MiB", "MISSED", "TX PACKETS", "TX MiB", "DROPPED",
               "FAULTS RX", "FAULTS TX"});
  for (const json& p : s.at("ports"))
    table.add({p.at("name"), p.at("link"), p.at("rx_packets"), mebibytes(p.at("rx_bytes")), p.at("rx_missed"),
               p.at("tx_packets"), mebibytes(p.at("tx_bytes")), p.at("tx_dropped"),
               faults(p.at("impair").at("rx")), faults(p.at("impair").at("tx"))});
  table.print();
}

// A host's rank, or which ranks a child switch stands for.
std::string who(const json& member) {
  const std::string ranks = member.at("ranks").get<std::string>();
  return ranks.empty() ? "rank " + member.at("rank").dump() : ranks;
}

// Of a group whose oldest segment is not complete: the members that it waits for, or, where all of them have
// contributed, the parent.
std::string waited_for(const json& group) {
  std::string all;
  for (const json& m : group.at("members")) {
    if (!m.at("waited_for")) continue;
    all += (all.empty() ? "" : ", ") + who(m);
    if (m.at("ranks") != "") all += " of switch " + m.at("address").get<std::string>();
  }
  if (all.empty() && group.at("what") != "" && group.at("parent") != "")
    all = "the parent " + group.at("parent").get<std::string>();
  return all;
}

void print_groups(const json& reply) {
  if (reply.at("groups").empty()) std::printf("no groups\n");
  for (const json& g : reply.at("groups")) {
    const std::string what = g.at("what").get<std::string>(), reason = g.at("reason").get<std::string>(),
                      parent = g.at("parent").get<std::string>();
    std::printf("group %s  %s  %zu members, %s ranks%s  tenant %s  memory %s MiB  operation %s%s%s\n",
                g.at("id").dump().c_str(), g.at("state").get<std::string>().c_str(), g.at("members").size(),
                g.at("world").dump().c_str(), parent.empty() ? "" : ("  parent " + parent).c_str(),
                g.at("tenant").dump().c_str(), mebibytes(g.at("memory")).c_str(),
                g.at("operation").dump().c_str(), what.empty() ? "" : ("  " + what).c_str(),
                reason.empty() ? "" : ("  " + reason).c_str());
    if (const std::string whom = waited_for(g); !whom.empty())
      std::printf("  waiting for %s s for %s\n", fixed(g.at("waiting_s")).c_str(), whom.c_str());
    Table table({"  MEMBER", "ADDRESS", "CONNECTED", "SILENT s", "SEGMENTS", "RESULTS", "HELD TO"});
    for (const json& m : g.at("members"))
      table.add({"  " + who(m) + (m.at("ranks") == "" ? "" : " (switch)"), m.at("address"),
                 m.at("connected").get<bool>() ? "yes" : "no", fixed(m.at("silent_s")), m.at("segments"),
                 m.at("results"), rate(m.at("rate"))});
    table.print();
  }
}

void print_buffers(const json& reply) {
  const json &pool = reply.at("pool"), &frames = reply.at("frames");
  std::printf("shared buffer %s of %s MiB in use  headroom %s MiB  frames queued %s of %s\n\n",
              mebibytes(pool.at("used")).c_str(), mebibytes(pool.at("size")).c_str(),
              mebibytes(pool.at("headroom_used")).c_str(), frames.at("queued").dump().c_str(),
              frames.at("max").dump().c_str());
  Table table(
      {"PORT", "QUEUE", "BYTES", "MAX", "SENT", "DRAINED", "SPILLWAY", "DROPPED", "WHY", "MARKED", "STATE"});
  for (const json& p : reply.at("ports"))
    for (const json& q : p.at("queues")) {
      const std::string state = q.at("storm") ? "storm" : q.at("paused") ? "paused" : "-";
      if (q.at("arrived").at("packets") == 0 && q.at("drained").at("packets") == 0 && state == "-") continue;
      std::string why;
      for (const auto& [reason, amount] : q.at("dropped_by").items())
        why += (why.empty() ? "" : ", ") + reason + " " + amount.at("packets").dump();
      table.add({p.at("name"), q.at("queue"), q.at("bytes"), q.at("bytes_max"), q.at("sent").at("packets"),
                 q.at("drained").at("packets"), q.at("to_spillway").at("packets"),
                 q.at("dropped").at("packets"), why.empty() ? "-" : why, q.at("ce_marked"), state});
    }
  table.print();
  for (const json& p : reply.at("ports"))
    if (p.at("pfc_mode") != "off")
      std::printf("%s%s  pfc: %s (%s)\n", &p == &reply.at("ports").front() ? "\n" : "",
                  p.at("name").get<std::string>().c_str(), p.at("pfc_mode").get<std::string>().c_str(),
                  p.at("pfc_why").get<std::string>().c_str());
  Table pauses({"PORT", "PAUSES IN", "RESUMES IN", "PAUSES OUT", "RESUMES OUT", "PAUSING"});
  bool any = false;
  for (const json& p : reply.at("ports")) {
    const json& pfc = p.at("pfc");
    std::string pausing;
    for (const json& g : p.at("priority_groups"))
      if (g.at("pausing")) pausing += (pausing.empty() ? "" : ",") + g.at("group").dump();
    any |= pfc.at("pauses_received") != 0 || pfc.at("pauses_sent") != 0;
    pauses.add({p.at("name"), pfc.at("pauses_received"), pfc.at("resumes_received"), pfc.at("pauses_sent"),
                pfc.at("resumes_sent"), pausing.empty() ? "-" : pausing});
  }
  if (!any) return;
  std::printf("\n");
  pauses.print();
}

void print_spillway(const json& reply) {
  if (!reply.at("enabled")) {
    std::printf("no spillway: the configuration has none\n");
    return;
  }
  const json &all = reply.at("all"), &store = reply.at("store");
  std::printf(
      "store %s of %s MiB in use  keys %s of %s  transitions %s  marked %s  acknowledgements held %s\n",
      mebibytes(store.at("used")).c_str(), mebibytes(store.at("size")).c_str(),
      reply.at("keys_count").dump().c_str(), reply.at("keys_max").dump().c_str(),
      all.at("transitions").dump().c_str(), all.at("ce_marked").dump().c_str(),
      all.at("acks_held").dump().c_str());
  if (const json& fast = reply.at("fast_cnp"); fast.at("enabled")) {
    std::printf("CNPs sent %s  connections known %s", all.at("cnps_sent").dump().c_str(),
                fast.at("connections").dump().c_str());
    for (const auto& [reason, n] : all.at("cnps_suppressed").items())
      if (n != 0) std::printf("  not sent (%s) %s", reason.c_str(), n.dump().c_str());
    std::printf("\n");
  }
  for (const auto& [what, from] : {std::pair{"refused", "refused_by"}, {"lost", "lost_by"}})
    for (const auto& [reason, amount] : all.at(from).items())
      std::printf("%s (%s): %s packets, %s bytes\n", what, reason.c_str(),
                  amount.at("packets").dump().c_str(), amount.at("bytes").dump().c_str());
  std::printf("\n");
  Table ports({"PORT", "SPILLED", "DRAINED", "REROUTED", "RESIDENT", "RESIDENT MAX B", "REFUSED", "LOST"});
  for (const json& p : reply.at("ports"))
    ports.add({p.at("name"), p.at("spilled").at("packets"), p.at("drained").at("packets"),
               p.at("rerouted").at("packets"), p.at("resident").at("packets"), p.at("resident_bytes_max"),
               p.at("refused").at("packets"), p.at("lost").at("packets")});
  ports.print();
  if (!reply.at("lenders").empty()) {
    std::printf("\n");
    Table lenders({"LENDER", "STATE", "MiB", "USED", "WRITTEN", "READ", "LOST", "DEATHS", "AGAIN", "WHY"});
    for (const json& l : reply.at("lenders"))
      lenders.add({l.at("address"), l.at("state"), mebibytes(l.at("size")), mebibytes(l.at("used")),
                   l.at("written"), l.at("read"), l.at("lost"), l.at("deaths"), l.at("retransmitted"),
                   l.at("why")});
    lenders.print();
  }
  if (reply.at("keys").empty()) return;
  std::printf("\n");
  Table keys({"PORT", "QUEUE", "DESTINATION", "STATE", "RESIDENT", "BYTES", "OLDEST ms"});
  for (const json& k : reply.at("keys"))
    keys.add({k.at("port"), k.at("queue"), k.at("destination"), k.at("state"), k.at("resident").at("packets"),
              k.at("resident").at("bytes"), fixed(k.at("oldest_ms"))});
  keys.print();
}

void print_counters(const json& j, const std::string& path, Table& table) {
  for (const auto& [key, value] : j.items()) {
    const std::string name = path.empty() ? key : path + "." + key;
    if (value.is_object()) {
      print_counters(value, name, table);
    } else if (value != 0) {
      table.add({name, value});
    }
  }
}

void print_l2(const json& reply) {
  Table table({"MAC", "VLAN", "PORT", "AGE s"});
  for (const json& e : reply.at("entries"))
    table.add({e.at("mac"),
               e.at("vlan").is_null() ? json("routed")
               : e.at("vlan") == 0    ? json("-")
                                      : e.at("vlan"),
               e.at("port"), fixed(e.at("age_s"))});
  table.print();
}

void print_routes(const json& reply) {
  if (!reply.at("routing")) std::printf("nothing is routed: no address has a prefix length\n");
  Table table({"PREFIX", "VIA", "INTERFACE", "STATE", "PACKETS"});
  for (const json& r : reply.at("routes")) {
    if (r.at("kind") == "connected") table.add({r.at("prefix"), "connected", r.at("interface"), "-", "-"});
    json prefix = r.at("prefix");
    for (const json& w : r.at("via")) {
      table.add({prefix, w.at("address"), w.at("interface"), w.at("state"), w.at("packets")});
      prefix = "";
    }
  }
  table.print();
}

void print_neighbours(const json& reply) {
  Table table({"ADDRESS", "MAC", "INTERFACE", "STATE", "NEXT HOP", "ANSWERED s", "HELD"});
  for (const json& n : reply.at("neighbours"))
    table.add({n.at("address"), n.at("mac").is_null() ? json("-") : n.at("mac"), n.at("interface"),
               n.at("state"), n.at("next_hop").get<bool>() ? "yes" : "no",
               n.at("answered_s").is_null() ? "-" : fixed(n.at("answered_s")), n.at("held")});
  table.print();
}

struct Impair {
  double loss = 0, duplicate = 0, reorder = 0, corrupt = 0;
  uint64_t delay_us = 0, seed = 1;
  std::string direction = "both";
};

json impair_request(const std::string& port, const Impair& i) {
  const json faults_json = {{"loss", i.loss},       {"duplicate", i.duplicate}, {"reorder", i.reorder},
                            {"corrupt", i.corrupt}, {"delay_us", i.delay_us},   {"seed", i.seed}};
  json request = {{"cmd", "impair"}, {"port", port}};
  if (i.direction != "tx") request["rx"] = faults_json;
  if (i.direction != "rx") request["tx"] = faults_json;
  return request;
}

int main(int argc, char** argv) {
  CLI::App app("Asks and changes a running millrace-switch.", "millracectl");
  app.set_version_flag("--version", "millracectl " MILLRACE_VERSION);
  std::string path = "/run/millrace/switch.sock";
  bool as_json = false;
  app.add_option("--socket", path, "control socket of the switch; abort and impair need its change socket")
      ->envname("MILLRACE_SOCKET")
      ->capture_default_str();
  app.add_flag("--json", as_json, "print the switch's answer as JSON");
  app.require_subcommand(1);
  app.fallthrough();
  app.add_subcommand("status", "ports, frames and memory");
  app.add_subcommand("groups", "groups, their members, and who waits for whom");
  app.add_subcommand("counters", "every counter that is not zero (with --json: all)");
  app.add_subcommand("l2", "the addresses that were learned");
  app.add_subcommand("routes", "which way each prefix goes, and which next hops answer");
  app.add_subcommand("neighbours", "the MAC addresses of IP neighbours");
  app.add_subcommand("buffers", "queues, the shared buffer, marks, drops and pauses");
  app.add_subcommand("spillway", "what is spilled, where to, and how it drains");
  auto* abort = app.add_subcommand("abort", "end a group; its members get an error");
  uint32_t group = 0;
  std::string why;
  abort->add_option("group", group, "the group's id, as groups prints it")->required();
  abort->add_option("--why", why, "told to every member");
  auto* impair = app.add_subcommand("impair", "set a port's faults; what is not given is off");
  std::string port;
  Impair faults_wanted;
  impair->add_option("port", port, "the port's name")->required();
  impair->add_option("--direction", faults_wanted.direction, "rx, tx or both")
      ->check(CLI::IsMember({"rx", "tx", "both"}))
      ->capture_default_str();
  for (auto [name, value] : {std::pair{"--loss", &faults_wanted.loss},
                             {"--duplicate", &faults_wanted.duplicate},
                             {"--reorder", &faults_wanted.reorder},
                             {"--corrupt", &faults_wanted.corrupt}})
    impair->add_option(name, *value, "probability per frame")->check(CLI::Range(0.0, 1.0));
  impair->add_option("--delay-us", faults_wanted.delay_us, "of every frame")
      ->check(CLI::Range(0, 10'000'000));
  impair->add_option("--seed", faults_wanted.seed, "of the dice");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }

  const std::string cmd = app.get_subcommands().front()->get_name();
  json request = {{"cmd", cmd}};
  if (cmd == "abort") request["group"] = group;
  if (cmd == "abort" && !why.empty()) request["why"] = why;
  if (cmd == "impair") request = impair_request(port, faults_wanted);
  try {
    const json reply = Connection(path).ask(request);
    if (as_json) {
      std::printf("%s\n", reply.dump(2).c_str());
    } else if (cmd == "status") {
      print_status(reply);
    } else if (cmd == "groups") {
      print_groups(reply);
    } else if (cmd == "l2") {
      print_l2(reply);
    } else if (cmd == "routes") {
      print_routes(reply);
    } else if (cmd == "neighbours") {
      print_neighbours(reply);
    } else if (cmd == "buffers") {
      print_buffers(reply);
    } else if (cmd == "spillway") {
      print_spillway(reply);
    } else if (cmd == "counters") {
      Table table({"COUNTER", "VALUE"});
      print_counters(reply.at("counters"), "", table);
      table.print();
    } else {
      std::printf("done\n");
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "millracectl: %s\n", e.what());
    return 1;
  }
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) { return millrace::main(argc, argv); }
