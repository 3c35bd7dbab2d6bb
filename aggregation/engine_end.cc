// How groups end: breaches, disagreement, lost members, departures, and what is freed when.
#include <algorithm>

#include "aggregation/disagreement.h"
#include "aggregation/engine_impl.h"

namespace millrace::aggregation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// How long to wait for the other members' headers once two disagree, so that the majority is known.
constexpr Time kJudgeAfter = milliseconds(500);
// Results and terminal messages stay retransmittable for so long after a failure.
constexpr Time kGoneAfter = seconds(2);

std::string list(const std::vector<uint16_t>& ranks) {
  std::string s = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min<size_t>(16, ranks.size()); i++)
    s += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > 16 ? s + ", …" : s;
}

// What a member's end takes from the group: its own ranks, or with the parent those that are not here.
std::vector<uint16_t> ranks_of(const Group& g, const Member& m) {
  if (m.kind != Member::Kind::kParent) return m.ranks.ranks();
  std::vector<uint16_t> others;
  for (uint32_t r = 0; r < g.world; r++)
    if (!g.here.contains(static_cast<uint16_t>(r))) others.push_back(static_cast<uint16_t>(r));
  return others;
}

}  // namespace

std::string Engine::Impl::describe(const Member& m) {
  switch (m.kind) {
    case Member::Kind::kHost:
      return m.ranks.to_string() + " (" + m.address.to_string() + ")";
    case Member::Kind::kChild:
      return "the switch " + m.address.to_string() + " (" +
             (m.ranks.empty() ? "no rank" : m.ranks.to_string()) + ")";
    case Member::Kind::kParent:
      break;
  }
  return "the parent switch " + m.address.to_string();
}

void Engine::Impl::fail(Group& g, Code code, std::vector<uint16_t> ranks, const std::string& text, Time now) {
  if (g.state == Group::State::kFailed) return;
  g.state = Group::State::kFailed;
  g.reason = text;
  g.code = code;
  g.gone_at = now + kGoneAfter;
  if (g.in_table) table.erase(g.key);
  g.in_table = false;
  counters.groups_failed++;
  Terminal t;
  t.code = code;
  t.group = g.id;
  t.operation = g.operation;
  t.ranks = std::move(ranks);
  t.text = text;
  g.terminal = encode(t);
  if (g.up) t.group = g.up->group;
  g.terminal_up = encode(t);
  for (Stripe& s : g.stripe) s.slots.clear();
  g.each_link([&](Link& l) {
    if (l.disconnected) return;
    roce::WorkRequest request;
    request.parts[0] = l.member->kind == Member::Kind::kParent ? g.terminal_up : g.terminal;
    if (l.qp.requester().post(std::move(request))) counters.terminals_sent++;
    queue(l);
  });
  next_tick = std::min(next_tick, now);
}

void Engine::Impl::breach(Link& link, const std::string& what, Time now) {
  fail(*link.group, Code::kBreach, link.member->ranks.ranks(), describe(*link.member) + " " + what, now);
}

void Engine::Impl::lost(Link& link, const std::string& how, Time now) {
  const Group& g = *link.group;
  const std::vector<uint16_t> ranks = ranks_of(g, *link.member);
  std::string text = describe(*link.member) + " " + how;
  if (link.member->kind == Member::Kind::kParent && !ranks.empty()) text += "; behind it: " + list(ranks);
  fail(*link.group, Code::kMemberLost, ranks, text, now);
}

// A segment is in some members' hands and not in others'.
bool Engine::Impl::in_progress(const Group& g) const {
  return std::any_of(g.stripe.begin(), g.stripe.end(),
                     [](const Stripe& s) { return s.slots.slot(s.slots.released()).headers > 0; });
}

void Engine::Impl::detach(Link& l, const JoinReject& why, Time now, FrameList& out) {
  // Whoever is not connected yet, so that no terminal message reaches it, learns it by the REJ.
  if (!l.disconnected) cm.disconnect(l.cm, now, out, encode(why));
  add_counts(l.qp, counters);
  by_qpn.erase(l.qp.local().value);
  by_cm.erase(l.cm.value);
}

// Links of this group, or of one of its members, may still stand in the list of those with something to send.
void Engine::Impl::forget_queued(const Group& g, const Member* m) {
  size_t kept = 0;
  for (size_t i = 0; i < active_size; i++) {
    Link* l = active[(active_head + i) % active.size()];
    if (l->group != &g || (m != nullptr && l->member != m))
      active[(active_head + kept++) % active.size()] = l;
  }
  active_size = kept;
}

// A member of a group that has not started is gone, or never was: a late copy of a dead process's REQ.
// Nothing has been reduced, so its place is free again and the others go on waiting for its rank.
void Engine::Impl::evict(Member& m, Time now, FrameList& out) {
  const auto any = std::find_if(m.links.begin(), m.links.end(), [](auto& l) { return l != nullptr; });
  Group& g = *(*any)->group;
  forget_queued(g, &m);
  for (auto& l : m.links) {
    if (!l) continue;
    detach(*l, {Code::kMemberLost, 0, describe(m) + " did not answer while the group was forming"}, now, out);
    g.links--;
    if (m.kind != Member::Kind::kChild) continue;
    g.memory -= link_memory(requests_per_link());
    memory -= link_memory(requests_per_link());
  }
  if (m.here)
    for (const uint16_t r : m.ranks.ranks()) g.here.erase(r);
  g.seated--;
  g.members[m.seat].reset();
  report_members(g);
  counters.members_evicted++;
  if (g.links != 0) return;
  // Nobody is left: whoever joins next forms another group, and this one's memory is free at once.
  if (g.in_table) table.erase(g.key);
  g.in_table = false;
  g.state = Group::State::kFailed;
  g.code = Code::kMemberLost;
  g.reason = "nobody is left";
  g.gone_at = now;
  next_tick = std::min(next_tick, now);
}

void Engine::Impl::leave(Link& link, bool goodbye, Time now, FrameList& out) {
  Group& g = *link.group;
  Member& m = *link.member;
  link.disconnected = true;
  if (m.kind == Member::Kind::kParent) {
    by_cm.erase(link.cm.value);
    return lost(link, goodbye ? "has left the group" : "did not answer", now);
  }
  // Children take their leave of groups that have all ranks below them.
  if (g.state == Group::State::kJoining && (!goodbye || m.kind == Member::Kind::kChild)) {
    evict(m, now, out);
    return;
  }
  by_cm.erase(link.cm.value);
  m.left = true;
  if (m.kind == Member::Kind::kParent)
    return lost(link, goodbye ? "has left the group" : "did not answer", now);
  if (g.departed == nullptr) g.departed = &m;
  if (g.in_table) table.erase(g.key);
  g.in_table = false;
  if (g.state == Group::State::kJoining)
    lost(link, "left before all ranks had joined", now);
  else if (!goodbye)
    lost(link, "did not complete its connection", now);
  else if (g.state == Group::State::kDisagreeing)
    resolve_disagreement(g, now);
  else if (in_progress(g))
    lost(link, "left in the middle of an operation", now);
  bool all_left = true;
  for (auto& member : g.members)
    if (member)
      for (auto& l : member->links) all_left &= !l || l->disconnected;
  if (all_left) ended.push_back(g.id);
}

void Engine::Impl::disagree(Link& link, uint64_t segment, Time now) {
  Group& g = *link.group;
  if (g.state == Group::State::kRunning) {
    g.state = Group::State::kDisagreeing;
    g.disagree_stripe = link.stripe;
    g.disagree_segment = segment;
    g.resolve_at = now + kJudgeAfter;
  }
  if (g.state == Group::State::kDisagreeing && g.disagree_stripe == link.stripe &&
      g.disagree_segment == segment && g.stripe[link.stripe].slots.slot(segment).headers == g.seated)
    resolve_disagreement(g, now);
}

void Engine::Impl::resolve_disagreement(Group& g, Time now) {
  const SegmentSlot& slot = g.stripe[g.disagree_stripe].slots.slot(g.disagree_segment);
  std::vector<std::pair<uint16_t, SegmentHeader>> headers;
  for (size_t seat = 0; seat < slot.present.size(); seat++) {
    if (!slot.present[seat] || !g.members[seat]) continue;
    for (const uint16_t r : g.members[seat]->ranks.ranks()) headers.push_back({r, slot.header[seat]});
  }
  std::stable_sort(headers.begin(), headers.end(), [](auto& a, auto& b) { return a.first < b.first; });
  Disagreement d = judge(headers);
  fail(g, Code::kMismatch, std::move(d.ranks), d.text, now);
}

// Destroys the groups that have ended: their frames go back to the pool, their memory to the quota.
void Engine::Impl::bury(Time now, FrameList& out) {
  std::vector<uint32_t> ids;
  ids.swap(ended);
  for (uint32_t id : ids) {
    const auto found = groups.find(id);
    if (found == groups.end()) continue;
    Group& g = *found->second;
    if (g.in_table) table.erase(g.key);
    g.each_link([&](Link& l) { detach(l, {g.code, 0, g.reason}, now, out); });
    if (g.up) {
      for (const Uplink::Attempt& a : g.up->attempts) {
        if (a.cm.value == 0) continue;
        by_attempt.erase(a.cm.value);
        cm.disconnect(a.cm, now, out);
      }
    }
    forget_queued(g, nullptr);
    memory -= g.memory;
    counters.groups_ended++;
    groups.erase(found);
  }
}

}  // namespace millrace::aggregation
