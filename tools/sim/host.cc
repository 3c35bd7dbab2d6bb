#include "tools/sim/host.h"

#include <algorithm>

#include "tools/sim/soft_nic.h"

namespace millrace::sim {

namespace {

constexpr int kRoundsMax = 200;  // of a turn

// Doubles the window in a START message.
void widen(std::vector<uint8_t>& message) {
  if (message.size() < 6 || message[3] != 0x80) return;
  const unsigned window = 2u * (message[4] << 8 | message[5]);
  message[4] = static_cast<uint8_t>(window >> 8), message[5] = static_cast<uint8_t>(window);
}

NicConfig nic_config(const HostConfig& c, uint64_t seed) {
  NicConfig n;
  n.mac = c.stack.mac;
  n.addresses = {c.stack.ip4, c.stack.ip6};
  n.seed = seed;
  n.ca_guid = c.guid;
  n.first_psn = c.first_psn;
  n.gbit = c.gbit;
  return n;
}

}  // namespace

Host::Host(const HostConfig& config) : config_(config), stack_(config.stack) {
  if (config_.guid == 0) config_.guid = config_.seed ^ 0x5a5a5a5a5a5a5a5aull;
  restart(config.seed);
}
Host::~Host() {
  for (const Arrival& a : inbox_) network_->recycle(a.packet);
}

void Host::restart(uint64_t seed) {
  config_.seed = seed;
  processes_.clear();
  hubs_.clear();
  more_ = false;
  NicConfig n = nic_config(config_, seed);
  n.resolve = [this](const IpAddress& to) { return stack_.resolve(to, now_); };
  nic_ = config_.nic ? config_.nic(n) : SoftNic::make(n);
  crashed_ = false;
}

void Host::crash() { crashed_ = true; }

host::SoftEngine& Host::endpoint() { return dynamic_cast<SoftNic&>(*nic_).engine(); }

host::Communicator& Host::join(const host::CommunicatorConfig& config) {
  host::CommunicatorConfig c = config;
  c.nonce_seed = config_.seed * 31 + joins_++;
  Process p;
  p.rank = c.rank;
  if (c.combine) p.local = meet(c);
  host::Transport& transport = p.local ? *p.local : nic_->transport();
  p.communicator = std::make_unique<host::Communicator>(c, transport, network_->clock_of(*this));
  processes_.push_back(std::move(p));
  network_->touch(*this);
  return *processes_.back().communicator;
}

// The rank's place among those of this host; where nobody leads that it may join, it does.
std::unique_ptr<HubRank> Host::meet(const host::CommunicatorConfig& config) {
  for (HostHub& h : hubs_)
    if (h.takes(config)) return h.attach(config);
  host::HubConfig of_hub;
  of_hub.join = config;
  of_hub.host_name = "host";
  of_hub.operation_timeout = hub_patience_;
  hubs_.emplace_back(of_hub, nic_->transport(), shared_memory_, network_->clock_of(*this));
  return hubs_.back().attach(config);
}

bool Host::leads(const host::Communicator& communicator) const {
  for (const Process& p : processes_)
    if (p.communicator.get() == &communicator) return p.local != nullptr && p.local->leader() == p.rank;
  return false;
}

void Host::forget(const host::Communicator& communicator) {
  std::erase_if(processes_, [&](const Process& p) { return p.communicator.get() == &communicator; });
}

void Host::pump(Time) { network_->run_now(*this); }

void Host::send(std::span<const uint8_t> frame) { network_->send(*this, 0, frame); }

void Host::run(Time now) {
  now_ = now;
  for (const Arrival& a : inbox_) {
    const std::span<const uint8_t> frame = a.packet->span();
    const bool group = !frame.empty() && (frame[0] & 1);
    if (!group && (frame.size() < 14 || !std::equal(config_.stack.mac.bytes.begin(),
                                                    config_.stack.mac.bytes.end(), frame.begin())))
      foreign_++;
    else if (!stack_.receive(frame, now) && !group && !crashed_)
      nic_->receive(frame, now);
    network_->recycle(a.packet);
  }
  inbox_.clear();
  stack_.poll(*this);
  if (crashed_) return;
  // What ranks of this host tell each other takes no time.
  int rounds = 0;
  for (bool any = true; any && rounds < kRoundsMax; rounds++) any = pump_round(now) || rounds == 0;
  more_ = rounds == kRoundsMax;
  stack_.poll(*this);
  if (after_turn) after_turn(now);
}

// Whether there may be more to do at once.
bool Host::pump_round(Time now) {
  completions_.clear();
  nic_->transport().poll(completions_);
  if (eager_)
    for (host::Completion& c : completions_) widen(c.message);
  bool any = !completions_.empty();
  for (const host::Completion& c : completions_) {
    for (HostHub& h : hubs_)
      if (h.hub().owns(c.link)) h.hub().handle(c, now);
    for (Process& p : processes_)
      if (!p.local && p.communicator->owns(c.link)) {
        p.communicator->handle(c, now);
        break;
      }
  }
  any |= pump_local(now);
  for (Process& p : processes_) p.communicator->poll(now);
  nic_->poll(now, *this);
  return any;
}

bool Host::pump_local(Time now) {
  bool any = false;
  for (HostHub& h : hubs_) any |= h.turn(now);
  for (Process& p : processes_) {
    if (!p.local) continue;
    p.local->check_hub(now);
    completions_.clear();
    p.local->poll(completions_);
    any |= !completions_.empty();
    for (const host::Completion& c : completions_)
      if (p.communicator->owns(c.link)) p.communicator->handle(c, now);
  }
  hubs_.remove_if([](const HostHub& h) { return h.hub().over(); });
  return any;
}

Time Host::next_deadline() const {
  if (stack_.wants_to_send()) return now_;
  if (crashed_) return kNever;
  if (more_) return now_;
  Time t = nic_->next_deadline();
  for (const Process& p : processes_) {
    t = std::min(t, p.communicator->next_deadline());
    if (p.local) t = std::min(t, p.local->next_deadline());
  }
  for (const HostHub& h : hubs_)
    t = std::min(t, h.has_mail() || h.hub().behind() ? now_ : h.hub().next_deadline());
  return t;
}

}  // namespace millrace::sim
