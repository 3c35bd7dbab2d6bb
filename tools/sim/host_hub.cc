#include "tools/sim/host_hub.h"

#include <cassert>
#include <utility>

namespace millrace::sim {

using host::LocalMessage;
using Kind = LocalMessage::Kind;

namespace {

host::LocalHello hello(const host::CommunicatorConfig& c) {
  host::LocalHello h;
  h.rank = c.rank, h.world = c.world, h.stripes = c.stripes;
  h.tenant = c.tenant;
  h.key = c.key;
  return h;
}

// What stands in sentences.
uint32_t process_of(uint16_t rank) { return 1000u + rank; }

}  // namespace

HubRank::~HubRank() {
  if (hub_ == nullptr) return;
  hub_->ranks_[seat_] = nullptr;
  hub_->died_.push_back(seat_);
}

void HubRank::say(const LocalMessage& message) {
  if (hub_ != nullptr) hub_->inbox_.push_back({seat_, message});
}

HostHub::HostHub(const host::HubConfig& config, host::Transport& up, Memory memory, Time now)
    : config_(config), memory_(std::move(memory)), hub_(config, up, now) {}

HostHub::~HostHub() {
  for (HubRank* r : ranks_)
    if (r != nullptr) r->hub_ = nullptr;
}

bool HostHub::takes(const host::CommunicatorConfig& config) const {
  return hub_.joining() && config.key == config_.join.key && !hub_.objection(hello(config));
}

std::unique_ptr<HubRank> HostHub::attach(const host::CommunicatorConfig& config) {
  const uint32_t seat = hub_.attach(hello(config), process_of(config.rank));
  assert(seat == ranks_.size());
  auto rank = std::make_unique<HubRank>(*this, seat, leader(), process_of(leader()));
  ranks_.push_back(rank.get());
  departed_.push_back(false);
  return rank;
}

void HostHub::hear(const Mail& mail, Time now) {
  if (departed_[mail.seat]) return;
  hub_.heard(mail.seat, now);
  if (mail.message.kind == Kind::kProbe && ranks_[mail.seat] != nullptr) {
    LocalMessage alive;
    alive.kind = Kind::kAlive;
    ranks_[mail.seat]->handle(alive, now);
  }
  if (mail.message.kind != Kind::kGoodbye) return;
  departed_[mail.seat] = true;
  hub_.depart(mail.seat, now);
}

void HostHub::make_memory(Time now) {
  const auto layout = hub_.wants_memory();
  if (!layout) return;
  view_ = host::LocalView(*layout, memory_(layout->bytes()));
  hub_.give_memory(view_, now);
}

bool HostHub::turn(Time now) {
  bool any = !inbox_.empty() || !died_.empty() || hub_.behind();
  for (const Mail& mail : std::exchange(inbox_, {})) hear(mail, now);
  for (const uint32_t seat : std::exchange(died_, {})) {
    if (!departed_[seat]) hub_.lose(seat, "died", now);
    departed_[seat] = true;
  }
  hub_.poll(now);
  make_memory(now);
  for (host::Hub::Outgoing& o : hub_.take_messages()) {
    any = true;
    HubRank* rank = ranks_[o.seat];
    if (rank == nullptr) continue;
    if (o.message.kind == Kind::kStart)
      rank->start(o.message, view_, now);
    else
      rank->handle(std::move(o.message), now);
  }
  return hub_.take_published() || any;
}

}  // namespace millrace::sim
