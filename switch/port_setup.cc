#include "switch/port_setup.h"

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "buffering/pfc.h"
#include "roce/error.h"

namespace millrace::switching {

namespace {

using buffering::kClasses;

std::string text_of(int rc) { return std::system_category().message(rc < 0 ? -rc : rc); }

std::vector<uint8_t> lossless(const buffering::PortConfig& port) {
  std::vector<uint8_t> all;
  for (uint8_t n = 0; n < kClasses; n++)
    if (port.pfc[n] && port.groups[n].xoff > 0) all.push_back(n);
  return all;
}

int apply(PfcDevice& device, const PfcRequest& request) {
  return request.kind == PfcRequest::Kind::kQueue ? device.queue_configure(request)
                                                  : device.priority_set(request);
}

// 0, or the first error; then nothing is left of what was done before it.
int apply_all(PfcDevice& device, const std::vector<PfcRequest>& plan, std::string& why) {
  for (size_t i = 0; i < plan.size(); i++) {
    const int rc = apply(device, plan[i]);
    if (rc == 0) continue;
    why += (why.empty() ? "" : "; ") +
           std::string(plan[i].kind == PfcRequest::Kind::kQueue ? "by receive queue" : "by priority") +
           ": priority " + std::to_string(plan[i].priority) + ": " + text_of(rc);
    for (size_t back = i; back-- > 0;) {
      PfcRequest undo = plan[back];
      undo.on = false;
      if (const int failed = apply(device, undo); failed != 0)
        why += "; priority " + std::to_string(undo.priority) + " could not be taken back: " + text_of(failed);
    }
    return rc;
  }
  return 0;
}

std::string names(const std::vector<uint8_t>& priorities) {
  std::string all;
  for (const uint8_t n : priorities) all += (all.empty() ? "" : ",") + std::to_string(n);
  return all;
}

}  // namespace

std::vector<PfcRequest> plan_pfc(const buffering::PortConfig& port, PfcRequest::Kind kind,
                                 const PfcQueueAbilities& abilities) {
  const std::vector<uint8_t> priorities = lossless(port);
  if (kind == PfcRequest::Kind::kQueue &&
      (priorities.size() != 1 || !abilities.sends || priorities[0] >= abilities.classes))
    return {};
  std::vector<PfcRequest> plan;
  for (const uint8_t n : priorities) {
    PfcRequest r{.kind = kind, .priority = n, .pause_time = buffering::kQuantaMax};
    if (kind == PfcRequest::Kind::kPriority) {
      const auto kib = [](uint64_t bytes) {
        return static_cast<uint32_t>(std::min<uint64_t>((bytes + 1023) / 1024, UINT32_MAX));
      };
      const buffering::BufferProfile& p = port.groups[n];
      r.high_water = std::max(kib(p.xoff), 2u);
      r.low_water = p.xon == 0 ? r.high_water / 2 : std::clamp(kib(p.xon), 1u, r.high_water - 1);
    }
    plan.push_back(r);
  }
  return plan;
}

PfcOutcome configure_pfc(PfcDevice& device, const buffering::PortConfig& port) {
  using Hardware = buffering::PortConfig::PfcHardware;
  PfcOutcome outcome;
  outcome.wanted = port.pfc.any();
  if (!outcome.wanted) return outcome;
  // Devices that have no flow control have nothing that could keep pauses from us.
  std::string doubt;
  if (const int rc = device.pass_pauses_up(); rc != 0 && rc != -ENOTSUP && rc != -ENOSYS)
    doubt = "; whether it passes pauses up is not known (" + text_of(rc) + ")";
  const std::vector<uint8_t> priorities = lossless(port);
  if (priorities.empty() || port.pfc_hardware == Hardware::kOff) {
    outcome.why = (priorities.empty() ? "no priority group is lossless" : "pfc_hardware is off") + doubt;
    return outcome;
  }
  PfcQueueAbilities abilities;
  const int asked = device.queue_abilities(abilities);
  std::string cannot;
  for (const auto kind : {PfcRequest::Kind::kQueue, PfcRequest::Kind::kPriority}) {
    const auto plan = plan_pfc(port, kind, asked == 0 ? abilities : PfcQueueAbilities{});
    if (plan.empty() || apply_all(device, plan, cannot) != 0) continue;
    outcome.hardware = true;
    outcome.why = "the device, too, sends pauses of priority " + names(priorities) +
                  (kind == PfcRequest::Kind::kQueue ? ", by receive queue" : "") + doubt;
    return outcome;
  }
  outcome.why =
      "the device does not send pauses of priority " + names(priorities) + " (" + cannot + ")" + doubt;
  if (port.pfc_hardware == Hardware::kOn)
    throw Error(ErrorCode::kNoDevice, "pfc_hardware is on, but " + outcome.why +
                                          ": write auto, and the traffic manager does it alone");
  return outcome;
}

uint64_t adopt_speeds(std::vector<buffering::PortConfig>& ports, const std::vector<uint64_t>& links) {
  uint64_t fastest = 0;
  for (size_t i = 0; i < links.size(); i++) {
    uint64_t rate = links[i];
    if (i < ports.size()) {
      buffering::PortConfig& p = ports[i];
      if (!p.speed_given && links[i] != 0) p.speed_bps = links[i];
      rate = p.rate_bps != 0 ? p.rate_bps : p.speed_given ? p.speed_bps : links[i];
    }
    fastest = std::max(fastest, rate);
  }
  return fastest;
}

}  // namespace millrace::switching
