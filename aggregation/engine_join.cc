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

std::string mebibytes(uint64_t bytes) {
  if (bytes < (1u << 20)) return std::to_string((bytes + 1023) >> 10) + " KiB";
  return std::to_string((bytes + (1u << 20) - 1) >> 20) + " MiB";
}

}  // namespace

uint64_t Engine::Impl::memory_needed(uint16_t world, uint8_t stripes) const {
  const uint32_t chunks = chunks_per_segment();
  // 2 × window segments of frames per stripe: those that gather, and those whose results are not
  // acknowledged.
  const uint64_t frames = uint64_t{2} * config.window * chunks * (config.mtu + kFrameOverhead);
  const uint64_t link = sizeof(Link) + roce::RcRequester::bytes(requests_per_link());
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

Group* Engine::Impl::form(const GroupKey& key, const JoinRequest& j, Time now, JoinReject& refusal) {
  if (groups.size() >= config.groups_max) {
    refusal = {Code::kNoMemory, 0,
               std::to_string(config.groups_max) + " groups exist already, no more are allowed"};
    return nullptr;
  }
  const uint64_t needed = memory_needed(j.world, j.stripes);
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
  Group* g = group.get();
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
    Member* m = g->members[j.rank].get();
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
    g = form(key, j, now, refusal);
    if (g == nullptr) return refuse(request.id, refusal, now, out);
  }
  if (g->members[j.rank] == nullptr) {
    auto member = std::make_unique<Member>();
    member->rank = j.rank;
    member->nonce = j.nonce;
    member->address = request.path.dst_ip;
    member->links.resize(j.stripes);
    g->members[j.rank] = std::move(member);
  }
  Member& m = *g->members[j.rank];

  do next_qpn = (next_qpn + 1) & 0xFFFFFF;
  while (next_qpn < 16 || by_qpn.contains(next_qpn));
  const Psn first_psn(config.first_psn ? *config.first_psn : static_cast<uint32_t>(random()));
  roce::QueuePairConfig qc;
  qc.local = Qpn{next_qpn};
  qc.wire.path = request.path;
  qc.wire.path.src_port = roce::flow_source_port(qc.local, request.remote.qpn);
  qc.wire.remote_qpn = request.remote.qpn;
  qc.expected_psn = first_psn;
  qc.requester.first_psn = request.remote.first_psn;
  qc.requester.mtu = config.mtu;
  qc.requester.requests_max = requests_per_link();
  qc.requester.retransmit_timeout = config.retransmit_timeout;
  qc.probe_after = config.probe_after;
  qc.peer_dead = config.peer_dead;
  auto link = std::make_unique<Link>(qc, now);
  link->cm = request.id;
  link->group = g;
  link->member = &m;
  link->stripe = j.stripe;
  by_qpn[next_qpn] = link.get();
  by_cm[request.id.value] = link.get();
  m.links[j.stripe] = std::move(link);
  g->joined++;
  // The ring of links with something to send has room for every link.
  std::rotate(active.begin(), active.begin() + static_cast<ptrdiff_t>(active_head), active.end());
  active_head = 0;
  if (active.size() < by_qpn.size() + 1) active.resize(2 * by_qpn.size() + 2);

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

void Engine::Impl::start_if_complete(Group& g) {
  if (g.state != Group::State::kJoining || g.joined != static_cast<uint32_t>(g.world) * g.stripes) return;
  // Whoever has never been heard of may be no more than a late copy of a dead process's REQ: the others must not
  // start with it. And a NIC that has not sent its RTU may not be ready for START.
  for (const auto& m : g.members)
    for (const auto& l : m->links)
      if (!l->established) return;
  g.state = Group::State::kRunning;
  Start s;
  s.window = config.window;
  s.mtu_code = roce::mtu_code(config.mtu);
  s.group = g.id;
  s.segment_bytes = config.segment_bytes;
  s.world = g.world;
  s.weights.assign(g.stripes, 1);
  g.start = encode(s);
  for (auto& m : g.members) {
    for (auto& l : m->links) {
      roce::WorkRequest request;
      request.parts[0] = g.start;
      l->qp.requester().post(std::move(request));
      queue(*l);
    }
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
