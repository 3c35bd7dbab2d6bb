// How groups come to be: REQs judged, ranks gathered, START sent.
#include <algorithm>

#include "aggregation/engine_impl.h"

namespace millrace::aggregation {

using std::chrono::milliseconds;

namespace {

// How long the connection that holds a contested rank has to answer a probe.
constexpr Time kContestTime = milliseconds(1500);
// What a kept frame costs beyond its payload: room before and behind it.
constexpr uint32_t kFrameOverhead = 512;

// What the asker is told that it may take until it hears of its join again; its REQ, repeated then, draws the
// same.
constexpr Time kWaitTime = milliseconds(4000);
constexpr size_t kWaitingMax = 4096;

std::string mebibytes(uint64_t bytes) {
  if (bytes < (1u << 20)) return std::to_string((bytes + 1023) >> 10) + " KiB";
  return std::to_string((bytes + (1u << 20) - 1) >> 20) + " MiB";
}

}  // namespace

uint64_t Engine::Impl::link_memory(uint32_t requests) {
  return sizeof(Link) + roce::RcRequester::bytes(requests);
}

// All partials of the segments in the window, where ranks are not too scattered, and messages.
uint32_t Engine::Impl::uplink_requests(uint16_t world) const {
  return config.window * std::min<uint32_t>(world, 256) + 64;
}

uint64_t Engine::Impl::memory_needed(uint16_t world, uint8_t stripes) const {
  const uint32_t chunks = chunks_per_segment();
  // 2 × window segments of frames per stripe: those that gather, and those whose results are not
  // acknowledged.
  const uint64_t frames = uint64_t{2} * config.window * chunks * (config.mtu + kFrameOverhead);
  const uint64_t link = link_memory(requests_per_link());
  return stripes * (frames + SlotRing::bytes(config.window, chunks, world, config.mtu) + world * link);
}

// "tenant blue: 60 MiB of 64 MiB", where that much more is more than is allowed.
std::optional<std::string> Engine::Impl::over_quota(uint32_t tenant, uint64_t more) const {
  const auto found = config.tenants.find(tenant);
  if (found != config.tenants.end() && found->second.memory_limit != 0) {
    uint64_t used = 0;
    for (const auto& [id, g] : groups) used += g->key.tenant == tenant ? g->memory : 0;
    if (used + more > found->second.memory_limit)
      return "tenant " + found->second.name + ": " + mebibytes(used) + " of " +
             mebibytes(found->second.memory_limit);
  }
  if (memory + more <= config.memory_limit) return std::nullopt;
  return "the switch: " + mebibytes(memory) + " of " + mebibytes(config.memory_limit);
}

// Whether a group has room where no other is.
bool Engine::Impl::ever_fits(const JoinRequest& j) const {
  const auto tenant = config.tenants.find(j.tenant);
  const uint64_t limit = tenant == config.tenants.end() || tenant->second.memory_limit == 0
                             ? config.memory_limit
                             : std::min(config.memory_limit, tenant->second.memory_limit);
  return memory_needed(j.world, j.stripes) <= limit;
}

// In the order of ranks, every rank's contribution to what is in the window has to be kept, not one.
bool Engine::Impl::reserve_to_hold(Group& g, SlotRing& slots, Time now) {
  const uint64_t needed =
      uint64_t{config.window} * chunks_per_segment() * g.world * (sizeof(Held) + config.mtu + kFrameOverhead);
  if (const auto full = over_quota(g.key.tenant, needed)) {
    fail(g, Code::kQuota, {},
         *full + " used, this group's first deterministic operation needs " + mebibytes(needed) + " more",
         now);
    return false;
  }
  slots.hold();
  g.memory += needed;
  memory += needed;
  return true;
}

// The results of `window` segments, since a member's segment s + window acknowledges result s; START, a
// terminal message, a probe.
uint32_t Engine::Impl::requests_per_link() const { return config.window * chunks_per_segment() + 8; }

bool Engine::Impl::authorised(const roce::CmEvent& request, const JoinRequest& join) const {
  const auto tenant = config.tenants.find(join.tenant);
  if (tenant == config.tenants.end()) return config.tenants.empty();
  if (tenant->second.secret.empty()) return true;
  const auto tag = join_tag(join, tenant->second.secret, request.path.dst_ip, request.path.src_ip,
                            request.remote.qpn.value);
  uint8_t difference = 0;  // in constant time
  for (size_t i = 0; i < tag.size(); i++) difference |= static_cast<uint8_t>(tag[i] ^ join.tag[i]);
  return difference == 0;
}

void Engine::Impl::refuse(roce::CmId id, const JoinReject& refusal, Time now, FrameList& out) {
  counters.joins_refused++;
  cm.reject(id, roce::RejectReason::kConsumer, encode(refusal), now, out);
}

void Engine::Impl::join(const roce::CmEvent& request, Time now, FrameList& out) {
  const std::optional<JoinRequest> decoded = decode_join_request(request.private_data);
  if (!decoded) {
    counters.joins_refused++;
    cm.reject(request.id, roce::RejectReason::kInvalidServiceId, {}, now, out);
    return;
  }
  const JoinRequest& j = *decoded;
  auto no = [&](Code code, const std::string& text, uint8_t mtu = 0) {
    refuse(request.id, {code, mtu, text}, now, out);
  };
  if (j.version != kProtocolVersion)
    return no(Code::kVersion, "the switch speaks protocol version " + std::to_string(kProtocolVersion) +
                                  ", the host version " + std::to_string(j.version));
  if (shutting_down) return no(Code::kShuttingDown, "the switch is shutting down");
  if (!authorised(request, j))
    return no(Code::kNotAuthorised, "tenant " + std::to_string(j.tenant) +
                                        " is not known here, or the tag was made with another secret");
  const uint8_t mtu = roce::mtu_code(config.mtu);
  // The REQ's own MTU is what the host's interface could do (librdmacm takes it from there); the queue pair's
  // is the join's.
  if (j.mtu_code != mtu || request.remote.mtu_code < mtu)
    return no(Code::kMtu, "this switch's groups use a path MTU of " + std::to_string(config.mtu), mtu);
  if (j.world == 0 || j.world > config.world_max || j.rank >= j.world || j.stripes == 0 ||
      j.stripes > kStripesMax || j.stripe >= j.stripes)
    return no(Code::kBreach, "rank " + std::to_string(j.rank) + " of " + std::to_string(j.world) +
                                 ", stripe " + std::to_string(j.stripe) + " of " + std::to_string(j.stripes) +
                                 " makes no sense here (at most " + std::to_string(config.world_max) +
                                 " ranks)");
  admit(request, j, now, out);
}

Qpn Engine::Impl::new_qpn() {
  do next_qpn = (next_qpn + 1) & 0xFFFFFF;
  while (next_qpn < 16 || next_qpn >= roce::kStoreQpnFirst || by_qpn.contains(next_qpn));
  return Qpn{next_qpn};
}

Psn Engine::Impl::new_psn() {
  return Psn(config.first_psn ? *config.first_psn : static_cast<uint32_t>(random()));
}

roce::QueuePairConfig Engine::Impl::qp_config(const roce::Path& path, Qpn local, Psn expected,
                                              const roce::CmQueuePair& remote) const {
  roce::QueuePairConfig qc;
  qc.local = local;
  qc.wire.path = path;
  qc.wire.path.src_port = roce::flow_source_port(local, remote.qpn);
  qc.wire.remote_qpn = remote.qpn;
  qc.expected_psn = expected;
  qc.requester.first_psn = remote.first_psn;
  qc.requester.mtu = config.mtu;
  qc.requester.retransmit_timeout = config.retransmit_timeout;
  qc.requester.dcqcn.line_rate = config.line_rate;
  qc.probe_after = config.probe_after;
  qc.peer_dead = config.peer_dead;
  return qc;
}

std::unique_ptr<Link> Engine::Impl::make_link(const roce::QueuePairConfig& qc, Group& g, Member& m,
                                              uint8_t stripe, roce::CmId id, Time now) {
  auto link = std::make_unique<Link>(qc, now);
  link->cm = id;
  link->group = &g;
  link->member = &m;
  link->stripe = stripe;
  by_qpn[qc.local.value] = link.get();
  by_cm[id.value] = link.get();
  // The ring of links with something to send has room for every link.
  std::rotate(active.begin(), active.begin() + static_cast<ptrdiff_t>(active_head), active.end());
  active_head = 0;
  if (active.size() < by_qpn.size() + 1) active.resize(2 * by_qpn.size() + 2);
  return link;
}

// A child that begins anew from the same address takes the place of what it was: the group as its REQ finds
// it, nullptr where that has ended.
Group* Engine::Impl::admit_child(Group* g, const JoinRequest& j, const IpAddress& from, Time now,
                                 FrameList& out) {
  for (size_t i = g->world; i < g->members.size(); i++) {
    Member* old = g->members[i].get();
    if (old == nullptr || old->address != from || old->nonce == j.nonce) continue;
    const auto any = std::find_if(old->links.begin(), old->links.end(), [](auto& l) { return l != nullptr; });
    if (g->state == Group::State::kJoining)
      evict(*old, now, out);
    else
      lost(**any, "has begun anew", now);
    if (!g->in_table) return nullptr;
  }
  return g;
}

Group* Engine::Impl::form(const GroupKey& key, const JoinRequest& j, Time now, JoinReject& refusal) {
  if (groups.size() >= config.groups_max) {
    refusal = {Code::kNoMemory, 0,
               std::to_string(config.groups_max) + " groups exist already, no more are allowed"};
    return nullptr;
  }
  const uint64_t needed = memory_needed(j.world, j.stripes) +
                          (config.parent ? j.stripes * link_memory(uplink_requests(j.world)) : 0);
  if (const auto full = over_quota(j.tenant, needed)) {
    refusal = {Code::kQuota, 0, *full + " used, this group needs " + mebibytes(needed)};
    return nullptr;
  }
  auto group = std::make_unique<Group>();
  do group->id = next_group++;
  while (groups.contains(group->id));
  group->key = key;
  group->world = j.world;
  group->stripes = j.stripes;
  group->created = now;
  group->members.resize(j.world);
  group->memory = needed;
  for (uint8_t i = 0; i < j.stripes; i++)
    group->stripe.emplace_back(SlotRing(config.window, chunks_per_segment(), j.world, config.mtu));
  memory += needed;
  counters.groups_formed++;
  next_tick = std::min(next_tick, now);
  group->waits = j.wait;
  group->window = config.window;
  group->segment_bytes = config.segment_bytes;
  Group* g = group.get();
  if (config.parent) {
    g->up = std::make_unique<Uplink>();
    g->up->member.kind = Member::Kind::kParent;
    g->up->member.address = *config.parent;
    g->up->member.nonce = random();
    g->up->member.links.resize(j.stripes);
    g->up->attempts.resize(j.stripes);
    do g->up->rkey = static_cast<uint32_t>(random());
    while (g->up->rkey == 0);
  }
  table[key] = g;
  groups[g->id] = std::move(group);
  return g;
}

void Engine::Impl::admit(const roce::CmEvent& request, const JoinRequest& j, Time now, FrameList& out) {
  const GroupKey key{j.tenant, j.key};
  const auto found = table.find(key);
  Group* g = found == table.end() ? nullptr : found->second;
  if (g != nullptr) {
    if (g->world != j.world || g->stripes != j.stripes) {
      refuse(request.id,
             {Code::kDisagree, 0,
              "rank " + std::to_string(j.rank) + " says " + std::to_string(j.world) + " ranks and " +
                  std::to_string(j.stripes) + " stripes, the group has " + std::to_string(g->world) +
                  " and " + std::to_string(g->stripes)},
             now, out);
      return;
    }
    if (j.child) g = admit_child(g, j, request.path.dst_ip, now, out);
  }
  Member* m = nullptr;
  if (g != nullptr && j.child) {
    const auto known = std::find_if(g->members.begin() + g->world, g->members.end(), [&](auto& c) {
      return c && c->nonce == j.nonce && c->address == request.path.dst_ip;
    });
    if (known != g->members.end()) m = known->get();
    if (g->state != Group::State::kJoining || (m != nullptr && m->links[j.stripe] != nullptr))
      return refuse(request.id,
                    {Code::kDuplicateRank, 0, "the group has started, or the stripe is connected"}, now, out);
  } else if (g != nullptr) {
    m = g->members[j.rank].get();
    for (auto c = g->members.begin() + g->world; c != g->members.end(); ++c) {
      if (*c == nullptr || !(*c)->ranks.contains(j.rank)) continue;
      return refuse(
          request.id,
          {Code::kDuplicateRank, 0,
           "rank " + std::to_string(j.rank) + " has joined by the switch " + (*c)->address.to_string()},
          now, out);
    }
    if (m != nullptr && (m->nonce != j.nonce || m->links[j.stripe] != nullptr)) {
      // The rank is taken: is the one that holds it alive?
      Link* old = nullptr;
      for (auto& l : m->links)
        if (l) old = l.get();
      old->qp.probe();
      queue(*old);
      contested.push_back({request, j, old->qp.local().value, now, now + kContestTime});
      cm.mra(request.id, kContestTime, now, out);
      return;
    }
  }
  if (g == nullptr) {
    JoinReject refusal;
    const bool may_wait = j.wait && ever_fits(j) && queued_joins.size() < kWaitingMax;
    if (may_wait && !queued_joins.empty())
      refusal = {Code::kQuota, 0, "others have asked for memory before"};
    else
      g = form(key, j, now, refusal);
    if (g == nullptr && may_wait) {
      queued_joins.push_back({request, j, now, refusal.text});
      return cm.mra(request.id, kWaitTime, now, out);
    }
    if (g == nullptr) return refuse(request.id, refusal, now, out);
  }
  if (j.child) {
    // Hosts' connections are in the group's memory from the start.
    const uint64_t needed = link_memory(requests_per_link());
    if (const auto full = over_quota(j.tenant, needed))
      return refuse(request.id,
                    {Code::kQuota, 0, *full + " used, another connection needs " + mebibytes(needed)}, now,
                    out);
    g->memory += needed;
    memory += needed;
  }
  if (m == nullptr) {
    auto member = std::make_unique<Member>();
    m = member.get();
    m->kind = j.child ? Member::Kind::kChild : Member::Kind::kHost;
    m->nonce = j.nonce;
    m->address = request.path.dst_ip;
    m->links.resize(j.stripes);
    if (j.child) {
      m->seat = static_cast<uint32_t>(g->members.size());
      g->members.push_back(std::move(member));
    } else {
      m->seat = m->rank = j.rank;
      m->ranks.insert(j.rank);
      g->members[j.rank] = std::move(member);
    }
    g->seated++;
  }
  const Psn first_psn = new_psn();
  roce::QueuePairConfig qc = qp_config(request.path, new_qpn(), first_psn, request.remote);
  qc.requester.requests_max = requests_per_link();
  m->links[j.stripe] = make_link(qc, *g, *m, j.stripe, request.id, now);
  g->links++;

  roce::CmQueuePair local;
  local.qpn = qc.local;
  local.first_psn = first_psn;
  local.rnr_retry = 7;
  JoinReply reply;
  reply.group = g->id;
  reply.window_limit = config.window;
  reply.segment_limit = config.segment_bytes;
  cm.accept(request.id, local, encode(reply), now, out);
}

// A link of a member is established. Whoever has never been heard of may be no more than a late copy of a
// dead process's REQ: the others must not start with it. And a NIC that has not sent its RTU may not be ready
// for START.
void Engine::Impl::arrived(Link& link, Time now) {
  link.established = true;
  Member& m = *link.member;
  if (m.here || m.kind == Member::Kind::kParent) return;
  m.here = std::all_of(m.links.begin(), m.links.end(), [](auto& l) { return l && l->established; });
  if (!m.here) return;
  m.arrived = now;
  for (const uint16_t r : m.ranks.ranks()) link.group->here.insert(r);
  report_members(*link.group);
}

void Engine::Impl::start_if_complete(Group& g, Time now, FrameList& out) {
  if (g.state != Group::State::kJoining || g.here.size() != g.world) return;
  // The root is the lowest switch where all ranks are: one child that has them all is lower.
  if (std::any_of(g.members.begin() + g.world, g.members.end(),
                  [&](auto& m) { return m && m->ranks.size() == g.world; }))
    return;
  forget_parent(g, now, out);
  start(g, now);
}

// All ranks are together, here or above.
void Engine::Impl::start(Group& g, Time now) {
  // Of those that stand for nobody, which cannot take part, the parent's START says that they are not needed.
  for (auto m = g.members.begin() + g.world; m != g.members.end(); ++m)
    if (*m && (*m)->ranks.empty())
      return fail(g, Code::kBreach, {}, describe(**m) + " has joined without a rank", now);
  prepare_tree(g, now);
  if (g.state != Group::State::kJoining) return;
  g.state = Group::State::kRunning;
  Start s;
  s.window = g.window;
  s.mtu_code = roce::mtu_code(config.mtu);
  s.group = g.id;
  s.segment_bytes = g.segment_bytes;
  s.world = g.world;
  s.weights.assign(g.stripes, 1);
  g.start = encode(s);
  for (auto& m : g.members) {
    if (!m) continue;
    for (auto& l : m->links) {
      roce::WorkRequest request;
      request.parts[0] = g.start;
      l->qp.requester().post(std::move(request));
      queue(*l);
    }
  }
}

// Memory may be free now, or a group that joins wait for may exist.
void Engine::Impl::settle_waiting(Time now, FrameList& out) {
  for (auto it = queued_joins.begin(); it != queued_joins.end();) {
    const bool joins = table.contains(GroupKey{it->join.tenant, it->join.key});
    const bool first = it == queued_joins.begin();
    if (shutting_down || now - it->asked >= config.join_timeout) {
      const std::string why =
          it->why + "; waited " +
          std::to_string(std::chrono::duration_cast<std::chrono::seconds>(now - it->asked).count()) + " s";
      refuse(it->request.id,
             shutting_down ? JoinReject{Code::kShuttingDown, 0, "the switch is shutting down"}
                           : JoinReject{Code::kQuota, 0, why},
             now, out);
      it = queued_joins.erase(it);
      continue;
    }
    if (joins || first) {
      const Waiting w = *it;
      JoinReject refusal;
      if (!joins && form(GroupKey{w.join.tenant, w.join.key}, w.join, now, refusal) == nullptr) {
        ++it;
        continue;
      }
      it = queued_joins.erase(it);
      admit(w.request, w.join, now, out);
      continue;
    }
    ++it;
  }
}

void Engine::Impl::settle_contested(Time now, FrameList& out) {
  for (auto it = contested.begin(); it != contested.end();) {
    const auto old = by_qpn.find(it->old_qpn);
    const bool alive =
        old != by_qpn.end() && old->second->group->in_table && old->second->qp.heard() > it->asked;
    const bool gone = old == by_qpn.end() || !old->second->group->in_table;
    if (!alive && !gone && now < it->until) {
      ++it;
      continue;
    }
    const Contested c = std::move(*it);
    it = contested.erase(it);
    if (alive) {
      refuse(c.request.id,
             {Code::kDuplicateRank, 0,
              "rank " + std::to_string(c.join.rank) + " is taken by " +
                  old->second->member->address.to_string() + ", which is alive"},
             now, out);
      continue;
    }
    if (!gone && old->second->group->state == Group::State::kJoining)
      evict(*old->second->member, now, out);
    else if (!gone)
      lost(*old->second, "did not answer when its rank joined again", now);
    if (shutting_down) {
      refuse(c.request.id, {Code::kShuttingDown, 0, "the switch is shutting down"}, now, out);
      continue;
    }
    admit(c.request, c.join, now, out);
  }
}

}  // namespace millrace::aggregation
