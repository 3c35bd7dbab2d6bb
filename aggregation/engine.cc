#include "aggregation/engine.h"

#include <algorithm>
#include <cstdio>

#include "aggregation/engine_impl.h"
#include "roce/error.h"

namespace millrace::aggregation {

using roce::Reception;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kPacketsPerTurn = 64;  // of one queue pair, before the next has its turn
constexpr Time kGroupTick = milliseconds(50);
// How long a parent's refusal waits for the ranks to come together below it.
constexpr Time kRefusalStands = std::chrono::seconds(2);
// So much longer a child waits for its parent to say who is missing.
constexpr Time kParentFirst = std::chrono::seconds(5);

roce::CmConfig cm_config(uint64_t seed) {
  roce::CmConfig cm;
  cm.ca_guid = seed ^ 0x6d696c6c72616365ull;
  cm.seed = seed;
  return cm;
}

void validate(const EngineConfig& c) {
  auto impossible = [](const std::string& what) { throw Error(ErrorCode::kConfig, "aggregation: " + what); };
  if (roce::mtu_code(c.mtu) == 0) impossible("mtu must be 256, 512, 1024, 2048 or 4096");
  const uint32_t first = c.mtu - kSegmentHeaderBytes;
  if (c.segment_bytes < first || (c.segment_bytes - first) % c.mtu != 0 || c.segment_bytes > (1u << 20))
    impossible("segment_bytes must be " + std::to_string(first) +
               " (the MTU less 64) plus a multiple of the MTU, "
               "at most 1 MiB");
  if (c.window < 1 || c.window > 1024) impossible("window must be 1 to 1024");
  if (c.parent && std::none_of(c.addresses.begin(), c.addresses.end(),
                               [&](auto& a) { return a.is_v4() == c.parent->is_v4(); }))
    impossible("the parent " + c.parent->to_string() +
               " is not of a family that this switch has an address of");
  if (c.world_max < 1 || c.world_max > 65535) impossible("world_max must be 1 to 65535");
}

}  // namespace

Engine::Impl::Impl(const EngineConfig& c, FramePool& p)
    : config(c), pool(p), cm(cm_config(c.seed), p), random(c.seed) {
  validate(c);
  next_qpn = static_cast<uint32_t>(random()) & 0xFFFFFF;
  next_group = static_cast<uint32_t>(random());
  cm.listen(roce::tcp_service_id(c.cm_port));
}

void Engine::Impl::queue(Link& link) {
  if (link.queued) return;
  link.queued = true;
  assert(active_size < active.size());
  active[(active_head + active_size++) % active.size()] = &link;
}

// What a completed result held has been let go of; the engine has nothing more to do about it.
void Engine::Impl::forget_completions(Link& link) {
  uint64_t id;
  while (link.qp.requester().next_completion(id)) {
  }
}

void Engine::Impl::receive(Frame frame, const roce::Packet& packet, Time now, FrameList& out) {
  counters.packets++;
  if (packet.dest_qp() == kGsiQpn) {
    cm.receive(packet, now, out);
    handle_cm_events(now, out);
    return;
  }
  const auto found = by_qpn.find(packet.dest_qp().value);
  if (found == by_qpn.end()) {
    counters.unknown_qp++;
    return;
  }
  Link& link = *found->second;
  switch (link.qp.receive(packet, now)) {
    case Reception::kSourceMismatch:
      counters.qp_source_mismatch++;
      return;
    case Reception::kPkeyMismatch:
      counters.pkey_mismatch++;
      return;
    case Reception::kBadOpcode:
      counters.bad_opcode++;
      return;
    case Reception::kCongestion:
      counters.cnps_received++;
      return;
    case Reception::kDuplicate:
    case Reception::kReadAgain:
      counters.duplicate_request++;
      break;
    case Reception::kGap:
      counters.out_of_sequence++;
      break;
    case Reception::kGapQuiet:
      counters.out_of_sequence++;
      return;
    case Reception::kInvalid:
      breach(link, "sent a packet that breaks the transport's rules", now);
      break;
    case Reception::kResponse: {
      forget_completions(link);
      if (link.qp.requester().failed()) lost(link, "refused a result with a NAK", now);
      next_tick = std::min(next_tick, link.qp.next_timer());
      break;
    }
    case Reception::kNewRequest:
      if (packet.ecn_ce() && link.qp.send_cnp(pool, now, out)) counters.cnps_sent++;
      handle_request(link, std::move(frame), packet, now);
      if (link.member->kind == Member::Kind::kChild && link.group->state == Group::State::kJoining) {
        // It may have said that ranks have come.
        report_members(*link.group);
        start_if_complete(*link.group, now, out);
      }
      break;
  }
  // The first valid packet on the queue pair counts as the RTU.
  if (!link.established) {
    cm.established(link.cm);
    arrived(link, now);
    start_if_complete(*link.group, now, out);
  }
  if (link.qp.wants_to_emit()) queue(link);
}

void Engine::Impl::handle_cm_events(Time now, FrameList& out) {
  roce::CmEvent event;
  while (cm.next_event(event)) {
    using Kind = roce::CmEvent::Kind;
    if (event.kind == Kind::kRequest) {
      join(event, now, out);
      continue;
    }
    if (const auto attempt = by_attempt.find(event.id.value); attempt != by_attempt.end()) {
      const auto [group, stripe] = attempt->second;
      handle_up_event(*group, stripe, event, now, out);
      continue;
    }
    const auto found = by_cm.find(event.id.value);
    if (found == by_cm.end()) {
      // A join that was not decided, and whose asker gave up.
      contested.remove_if([&](const Contested& c) { return c.request.id == event.id; });
      queued_joins.remove_if([&](const Waiting& w) { return w.request.id == event.id; });
      continue;
    }
    Link& link = *found->second;
    if (event.kind == Kind::kEstablished) {
      arrived(link, now);
      start_if_complete(*link.group, now, out);
    }
    if (event.kind == Kind::kDisconnected)
      leave(link, true, now, out);
    else if (event.kind == Kind::kUnreachable || event.kind == Kind::kRejected)
      leave(link, false, now, out);
  }
}

// Since when somebody waits for the others. Who joined first may be gone, or never have been heard of: that
// takes nothing from the time of those who are here.
static Time waiting_since(const Group& g) {
  Time first = kNever;
  for (const auto& m : g.members)
    if (m && m->here) first = std::min(first, m->arrived);
  return first == kNever ? g.created : first;
}

void Engine::Impl::tick_group(Group& g, Time now, FrameList& out) {
  if (g.state == Group::State::kJoining && g.up) {
    if (g.up->refusal && now - g.up->refused_at >= kRefusalStands)
      return fail(g, g.up->refusal->code, {}, describe(g.up->member) + ": " + g.up->refusal->text, now);
    connect_up(g, now, out);
    report_members(g);
  }
  // Only the root knows who is missing.
  const Time patience = config.join_timeout + (g.up && g.up->member.here ? kParentFirst : Time{});
  if (g.state == Group::State::kJoining && now - waiting_since(g) >= patience) {
    std::vector<uint16_t> missing;
    std::string names;
    for (uint16_t r = 0; r < g.world; r++) {
      if (g.here.contains(r)) continue;
      if (missing.size() < 16) names += (missing.empty() ? "" : ", ") + std::to_string(r);
      missing.push_back(r);
    }
    if (missing.size() > 16) names += ", …";
    fail(g, Code::kJoinTimeout, missing,
         "ranks missing after the join time-out of " +
             std::to_string(std::chrono::duration_cast<std::chrono::seconds>(config.join_timeout).count()) +
             " s: " + names +
             (g.up && !g.up->member.here ? "; " + describe(g.up->member) + " does not answer" : ""),
         now);
  }
  if (g.state == Group::State::kDisagreeing && now >= g.resolve_at) resolve_disagreement(g, now);
  if (g.state == Group::State::kRunning) {
    for (uint8_t i = 0; i < g.stripes; i++) {
      SlotRing& slots = g.stripe[i].slots;
      SegmentSlot& slot = slots.slot(slots.released());
      if (slot.headers == 0) continue;
      const Time waiting = now - slot.since;
      if (waiting >= config.straggler_after && !slot.straggling) {
        slot.straggling = true;
        counters.stragglers++;
      }
      if (waiting < config.operation_timeout) continue;
      std::vector<uint16_t> late;
      std::string names;
      for (const auto& m : g.members) {
        // Whoever is still at this segment has not contributed all of it.
        if (!m || m->links[i]->segment > slots.released()) continue;
        if (late.size() < 16) names += (late.empty() ? "" : ", ") + describe(*m);
        const auto ranks = m->ranks.ranks();
        late.insert(late.end(), ranks.begin(), ranks.end());
      }
      if (late.empty()) continue;  // it is for the parent to say for whom it waits
      fail(g, Code::kLate, late,
           "operation " + std::to_string(slot.reference().operation.value()) + " timed out waiting for " +
               names,
           now);
      break;
    }
  }
}

// False: the link is gone, and its member with it.
bool Engine::Impl::tick_link(Link& link, Time now, FrameList& out) {
  if (link.disconnected) return true;  // it has said goodbye and owes nothing
  if (now >= link.qp.next_timer()) {
    const bool joining = link.group->state == Group::State::kJoining;
    if (link.qp.dead(now) && joining && (!link.established || link.member->kind == Member::Kind::kChild)) {
      evict(*link.member, now, out);
      return false;
    }
    if (link.qp.dead(now) && link.group->state != Group::State::kFailed)
      lost(link,
           "has not acknowledged anything for " +
               std::to_string(std::chrono::duration_cast<std::chrono::seconds>(config.peer_dead).count()) +
               " s",
           now);
    link.qp.tick(now);
    if (link.qp.wants_to_emit()) queue(link);
  }
  const Time deadline = link.qp.next_timer();
  if (deadline > now) next_tick = std::min(next_tick, deadline);
  return true;
}

void Engine::Impl::tick(Time now, FrameList& out) {
  next_tick = groups.empty() ? kNever : now + kGroupTick;
  for (auto& [id, group] : groups) {
    for (auto& m : group->members)
      for (size_t i = 0; m && i < m->links.size(); i++)
        if (m->links[i] && !tick_link(*m->links[i], now, out)) break;
    if (group->up)
      for (auto& l : group->up->member.links)
        if (l) tick_link(*l, now, out);
  }
  for (auto& [id, group] : groups) {
    tick_group(*group, now, out);
    if (group->state != Group::State::kFailed) continue;
    bool waiting = false;
    group->each_link([&](Link& l) { waiting |= !l.disconnected && !(l.qp.over() || l.qp.dead(now)); });
    if (!waiting || now >= group->gone_at) ended.push_back(id);
  }
}

void Engine::Impl::poll(Time now, FrameList& out) {
  polled = now;
  if (now >= cm.next_deadline()) cm.poll(now, out);
  handle_cm_events(now, out);
  if (!contested.empty()) settle_contested(now, out);
  if (now >= next_tick) tick(now, out);
  next_paced = kNever;
  for (size_t turns = active_size; turns > 0; turns--) {
    Link& link = *active[active_head];
    active_head = (active_head + 1) % active.size();
    active_size--;
    link.queued = false;
    if (link.disconnected) continue;
    const bool more = link.qp.emit(pool, combine, kPacketsPerTurn, now, out);
    // Whoever its pace holds back stays in line: ticks, which visit every link, are too dear for each packet.
    const Time held = link.qp.requester().held_until();
    if (more || held != kNever) queue(link);
    next_paced = std::min(next_paced, held);
    next_tick = std::min(next_tick, link.qp.next_timer());
  }
  if (!ended.empty()) bury(now, out);
  if (!queued_joins.empty()) settle_waiting(now, out);
}

Time Engine::Impl::next_deadline() const {
  Time t = std::min({cm.next_deadline(), next_tick, next_paced});
  if (active_size > 0) t = std::min(t, polled + microseconds(50));
  if (!contested.empty() || !queued_joins.empty()) t = std::min(t, polled + milliseconds(50));
  return t;
}

void Engine::Impl::add_counts(const roce::QueuePair& qp, Counters& c) {
  const roce::RequesterCounters& r = qp.requester().counters();
  c.acks_sent += qp.acks_sent();
  c.naks_sent += qp.naks_sent();
  c.rnr_naks_sent += qp.rnr_naks_sent();
  c.probes_sent += qp.probes_sent();
  c.acks_received += r.acks;
  c.naks_received += r.naks;
  c.rnr_naks_received += r.rnr_naks;
  c.retransmitted_packets += r.retransmitted;
  c.timeouts += r.timeouts;
  c.tail_probes += r.tail_probes;
  c.stale_ack += r.stale_acks;
  c.results_not_built += r.not_built;
}

Counters Engine::Impl::totals() const {
  Counters c = counters;
  for (const auto& [qpn, link] : by_qpn) add_counts(link->qp, c);
  return c;
}

std::vector<GroupInfo> Engine::Impl::groups_info(Time now) const {
  std::vector<GroupInfo> out;
  for (const auto& [id, g] : groups) {
    GroupInfo info;
    info.id = id;
    for (uint8_t b : g->key.key) {
      char hex[3];
      std::snprintf(hex, sizeof(hex), "%02x", b);
      info.key += hex;
    }
    static constexpr const char* states[] = {"joining", "running", "disagreeing", "failed"};
    info.state = states[static_cast<size_t>(g->state)];
    info.reason = g->reason;
    info.tenant = g->key.tenant;
    info.world = g->world;
    info.stripes = g->stripes;
    info.memory = g->memory;
    info.operation = g->operation;
    if (g->up) info.parent = g->up->member.address.to_string();
    for (size_t i = 0; i < g->stripe.size(); i++) {
      const SlotRing& slots = g->stripe[i].slots;
      const SegmentSlot& slot = slots.slot(slots.released());
      if (slot.headers == 0) continue;
      const SegmentHeader& h = slot.reference();
      info.what = std::string(name(static_cast<Collective>(h.collective)));
      if (h.op != 0) info.what += " " + std::string(name(static_cast<ReduceOp>(h.op)));
      if (h.total.value() != 0)
        info.what += " " + std::string(name(static_cast<DataType>(h.type))) + " " +
                     std::to_string(h.total.value()) + " B";
      info.waiting_for = std::max(info.waiting_for, now - slot.since);
    }
    for (const auto& m : g->members) {
      if (!m) continue;
      MemberInfo mi;
      if (!m->ranks.empty()) mi.rank = m->ranks.first();
      if (!m->host()) mi.ranks = m->ranks.empty() ? "no rank yet" : m->ranks.to_string();
      mi.address = m->address;
      mi.connected = !m->left;
      mi.silent_for = Time::max();
      for (size_t i = 0; i < m->links.size(); i++) {
        const Link* l = m->links[i].get();
        if (!l) {
          mi.connected = false;
          continue;
        }
        if (mi.qpn == 0) mi.qpn = l->qp.local().value, mi.remote_qpn = l->qp.wire().remote_qpn.value;
        mi.silent_for = std::min(mi.silent_for, now - l->qp.heard());
        if (const uint64_t rate = l->qp.requester().dcqcn().rate(now); rate < config.line_rate)
          mi.rate = mi.rate == 0 ? rate : std::min(mi.rate, rate);
        mi.segments += l->segment;
        mi.results += l->results;
        if (!g->stripe.empty()) {
          const SlotRing& slots = g->stripe[i].slots;
          mi.waited_for |= slots.slot(slots.released()).headers > 0 && l->segment <= slots.released();
        }
      }
      info.members.push_back(mi);
    }
    out.push_back(std::move(info));
  }
  std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.id < b.id; });
  return out;
}

Engine::Engine(const EngineConfig& config, FramePool& pool) : impl_(std::make_unique<Impl>(config, pool)) {}
Engine::~Engine() = default;

void Engine::receive(Frame frame, const roce::Packet& packet, Time now, FrameList& out) {
  impl_->receive(std::move(frame), packet, now, out);
}
void Engine::poll(Time now, FrameList& out) { impl_->poll(now, out); }
Time Engine::next_deadline() const { return impl_->next_deadline(); }

void Engine::shutdown(Time now, FrameList& out) {
  impl_->shutting_down = true;
  for (auto& [id, group] : impl_->groups)
    if (group->state != Group::State::kFailed)
      impl_->fail(*group, Code::kShuttingDown, {}, "the switch is shutting down", now);
  impl_->poll(now, out);
}

bool Engine::drained() const { return impl_->groups.empty() && impl_->cm.connections() == 0; }

bool Engine::abort_group(uint32_t id, const std::string& why, Time now, FrameList& out) {
  const auto found = impl_->groups.find(id);
  if (found == impl_->groups.end() || found->second->state == Group::State::kFailed) return false;
  impl_->fail(*found->second, Code::kAborted, {},
              "aborted by the administrator" + (why.empty() ? "" : ": " + why), now);
  impl_->poll(now, out);
  return true;
}

std::vector<GroupInfo> Engine::groups(Time now) const { return impl_->groups_info(now); }
Counters Engine::counters() const { return impl_->totals(); }
const roce::CmCounters& Engine::cm_counters() const { return impl_->cm.counters(); }
uint64_t Engine::memory_reserved() const { return impl_->memory; }
size_t Engine::queue_pairs() const { return impl_->by_qpn.size(); }
size_t Engine::cm_records() const { return impl_->cm.records(); }

}  // namespace millrace::aggregation
