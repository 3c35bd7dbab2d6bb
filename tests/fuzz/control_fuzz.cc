// The control sockets' requests. The first byte says which socket asks and what the worker would answer, the
// rest are lines. Each draws one line of JSON, an object that says ok or why not, and nothing changes by way
// of the socket that may only read.
#include <nlohmann/json.hpp>

#include "roce/error.h"
#include "switch/control.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {
namespace {

using namespace switching;
using nlohmann::json;

struct Worker {
  uint8_t mood = 0;
  bool may_change = false;
  const Config& config;

  void operator()(Command& c) const {
    using Kind = Command::Kind;
    FUZZ_CHECK(may_change || (c.kind != Kind::kAbort && c.kind != Kind::kImpair));
    if (mood & 2) throw Error(ErrorCode::kState, "too many commands are waiting");
    c.ok = c.kind != Kind::kAbort || c.group == 5;
    if (c.kind == Kind::kImpair) {
      FUZZ_CHECK(c.port < config.ports.size() && (c.rx || c.tx));
      for (const auto& i : {c.rx, c.tx}) {
        if (!i) continue;
        for (const double p : {i->loss, i->duplicate, i->reorder, i->corrupt}) FUZZ_CHECK(p >= 0 && p <= 1);
        FUZZ_CHECK(i->delay >= Time{} && i->delay <= std::chrono::seconds(10));
      }
    }
    if (!(mood & 4)) return;
    c.snapshot.ports.resize(2);
    c.snapshot.ports[0].name = "p1";
    c.snapshot.ports[1].name = "p\xff\"\n";
    c.snapshot.ports[1].capture.emplace();
    c.snapshot.capture.emplace();
    c.groups.resize(1);
    c.groups[0].reason = "rank 1 said \xc3\x28\r\n and left";
    c.groups[0].members.resize(2);
    c.groups[0].members[1].silent_for = kNever;
    c.l2.push_back({{{2, 0, 0, 0, 0, 1}}, 5, 1, std::chrono::seconds(3)});
    c.l2.push_back({{{2, 0, 0, 0, 0, 2}}, routed_domain(1), 1, {}});
    c.routes.push_back({*Prefix::parse("10.77.0.0/24"), true, kBridge, {}});
    c.routes.push_back({*Prefix::parse("::/0"), false, 0, {{*IpAddress::parse("fd00::1"), 1, "failed", 9}}});
    c.neighbours.push_back({*IpAddress::parse("10.255.0.1"), 1, {}, "failed", true, kNever, 0});
  }
};

Config config_of_two_ports() {
  Config c;
  c.name = "leaf1";
  c.engine.addresses = {*IpAddress::parse("10.77.0.100")};
  c.ports.resize(2);
  c.ports[0].name = "p1";
  c.ports[1].name = "p2";
  c.control_change = "/run/change.sock";
  return c;
}

void run(std::span<const uint8_t> data) {
  static const Config config = config_of_two_ports();
  Input in(data);
  const uint8_t mood = in.byte();
  const bool may_change = mood & 1;
  const std::string all = text_of(in.rest());
  if (all.size() > 8192) return;
  Requests requests(config, Worker{mood, may_change, config});
  for (size_t at = 0, lines = 0; at <= all.size() && lines < 2; lines++) {
    const size_t end = std::min(all.find('\n', at), all.size());
    const std::string reply = requests.reply(all.substr(at, end - at), may_change);
    at = end + 1;
    FUZZ_CHECK(reply.find('\n') == reply.npos && reply.size() < (32 << 10));
    const json answer = json::parse(reply, nullptr, false);
    FUZZ_CHECK(answer.is_object() && answer.contains("ok") && answer["ok"].is_boolean(), reply);
    FUZZ_CHECK(answer["ok"] || (answer.contains("error") && answer["error"] != ""), reply);
    FUZZ_CHECK(!(mood & 2) || !answer["ok"], reply);
  }
}

}  // namespace
MILLRACE_FUZZ_TARGET("control", run)
}  // namespace millrace::fuzz
