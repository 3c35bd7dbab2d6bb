// How groups end: breaches, disagreement, lost members, departures, and what is freed when.
#include <algorithm>

#include "aggregation/engine_impl.h"

namespace millrace::aggregation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// How long to wait for the other members' headers once two disagree, so that the majority is known.
constexpr Time kJudgeAfter = milliseconds(500);
// Results and terminal messages stay retransmittable for so long after a failure.
constexpr Time kGoneAfter = seconds(2);

struct Field {
  const char* name;
  std::string (*text)(const SegmentHeader&);
};
constexpr Field kFields[] = {
    {"collective",
     [](const SegmentHeader& h) { return std::string(name(static_cast<Collective>(h.collective))); }},
    {"operator", [](const SegmentHeader& h) { return std::string(name(static_cast<ReduceOp>(h.op))); }},
    {"datatype", [](const SegmentHeader& h) { return std::string(name(static_cast<DataType>(h.type))); }},
    {"wire type",
     [](const SegmentHeader& h) { return std::string(name(static_cast<DataType>(h.wire_type))); }},
    {"flags", [](const SegmentHeader& h) { return std::to_string(h.flags & ~kFlagHeaderOnly & ~kFlagLast); }},
    {"root", [](const SegmentHeader& h) { return std::to_string(h.root.value()); }},
    {"operation", [](const SegmentHeader& h) { return std::to_string(h.operation.value()); }},
    {"total", [](const SegmentHeader& h) { return std::to_string(h.total.value()) + " B"; }},
    {"offset", [](const SegmentHeader& h) { return std::to_string(h.offset.value()); }},
    {"length", [](const SegmentHeader& h) { return std::to_string(h.length.value()); }},
};

bool same(const SegmentHeader& a, const SegmentHeader& b) {
  return std::all_of(std::begin(kFields), std::end(kFields),
                     [&](const Field& f) { return f.text(a) == f.text(b); });
}

std::string list(const std::vector<uint16_t>& ranks) {
  std::string s = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min<size_t>(16, ranks.size()); i++)
    s += (i ? ", " : "") + std::to_string(ranks[i]);
  return ranks.size() > 16 ? s + ", …" : s;
}

}  // namespace

std::string Engine::Impl::describe(const Member& m) const {
  return "rank " + std::to_string(m.rank) + " (" + m.address.to_string() + ")";
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
  for (Stripe& s : g.stripe) s.slots.clear();
  for (auto& m : g.members) {
    if (!m) continue;
    for (auto& l : m->links) {
      if (!l || l->disconnected) continue;
      roce::WorkRequest request;
      request.parts[0] = g.terminal;
      if (l->qp.requester().post(std::move(request))) counters.terminals_sent++;
      queue(*l);
    }
  }
  next_tick = std::min(next_tick, now);
}

void Engine::Impl::breach(Link& link, const std::string& what, Time now) {
  fail(*link.group, Code::kBreach, {link.member->rank}, describe(*link.member) + " " + what, now);
}

void Engine::Impl::lost(Link& link, const std::string& how, Time now) {
  fail(*link.group, Code::kMemberLost, {link.member->rank}, describe(*link.member) + " " + how, now);
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
    detach(*l, {Code::kMemberLost, 0, describe(m) + " did not answer when its rank joined again"}, now, out);
    g.joined--;
  }
  g.members[m.rank].reset();
  counters.members_evicted++;
  if (g.joined != 0) return;
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
  if (g.state == Group::State::kJoining && !goodbye) {
    link.disconnected = true;  // its CM connection has ended
    evict(m, now, out);
    return;
  }
  link.disconnected = true;
  by_cm.erase(link.cm.value);
  m.left = true;
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
      g.disagree_segment == segment && g.stripe[link.stripe].slots.slot(segment).headers == g.world)
    resolve_disagreement(g, now);
}

void Engine::Impl::resolve_disagreement(Group& g, Time now) {
  const SegmentSlot& slot = g.stripe[g.disagree_stripe].slots.slot(g.disagree_segment);
  // Camps of equal headers, in the order of their first rank.
  std::vector<std::vector<uint16_t>> camps;
  for (uint16_t r = 0; r < g.world; r++) {
    if (!slot.present[r]) continue;
    auto camp = std::find_if(camps.begin(), camps.end(),
                             [&](const auto& c) { return same(slot.header[c[0]], slot.header[r]); });
    if (camp == camps.end()) camp = camps.insert(camps.end(), std::vector<uint16_t>{});
    camp->push_back(r);
  }
  size_t largest = 0, of_that_size = 0;
  for (const auto& c : camps) largest = std::max(largest, c.size());
  for (const auto& c : camps) of_that_size += c.size() == largest;
  const bool majority = of_that_size == 1;
  const auto& reference =
      *std::find_if(camps.begin(), camps.end(), [&](auto& c) { return c.size() == largest; });

  std::vector<uint16_t> ranks;
  std::string text = "the ranks disagree about operation " +
                     std::to_string(slot.header[reference[0]].operation.value()) + ":";
  const char* separator = " ";
  for (const auto& c : camps) {
    if (&c == &reference) {
      if (!majority) ranks.insert(ranks.end(), c.begin(), c.end());
      continue;
    }
    ranks.insert(ranks.end(), c.begin(), c.end());
    for (const Field& f : kFields) {
      const std::string here = f.text(slot.header[c[0]]), there = f.text(slot.header[reference[0]]);
      if (here == there) continue;
      text += separator + list(c) + " " + f.name + " " + here + ", " +
              (majority ? "the others " : list(reference) + " ") + there;
      separator = "; ";
    }
  }
  std::sort(ranks.begin(), ranks.end());
  fail(g, Code::kMismatch, std::move(ranks), text, now);
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
    for (auto& m : g.members) {
      if (!m) continue;
      for (auto& l : m->links) {
        if (l) detach(*l, {g.code, 0, g.reason}, now, out);
      }
    }
    forget_queued(g, nullptr);
    memory -= g.memory;
    counters.groups_ended++;
    groups.erase(found);
  }
}

}  // namespace millrace::aggregation
