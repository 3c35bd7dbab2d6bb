#include "tools/sim/host.h"

#include <algorithm>

#include "tools/sim/soft_nic.h"

namespace millrace::sim {

namespace {

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
  communicators_.clear();
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
  communicators_.push_back(
      std::make_unique<host::Communicator>(c, nic_->transport(), network_->clock_of(*this)));
  network_->touch(*this);
  return *communicators_.back();
}

void Host::forget(const host::Communicator& communicator) {
  std::erase_if(communicators_, [&](const auto& c) { return c.get() == &communicator; });
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
  for (int round = 0; round < 2; round++) {
    completions_.clear();
    nic_->transport().poll(completions_);
    if (eager_)
      for (host::Completion& c : completions_) widen(c.message);
    for (const host::Completion& c : completions_)
      for (auto& comm : communicators_)
        if (comm->owns(c.link)) {
          comm->handle(c, now);
          break;
        }
    for (auto& comm : communicators_) comm->poll(now);
    nic_->poll(now, *this);
  }
  stack_.poll(*this);
  if (after_turn) after_turn(now);
}

Time Host::next_deadline() const {
  if (stack_.wants_to_send()) return now_;
  if (crashed_) return kNever;
  Time t = nic_->next_deadline();
  for (const auto& c : communicators_) t = std::min(t, c->next_deadline());
  return t;
}

}  // namespace millrace::sim
