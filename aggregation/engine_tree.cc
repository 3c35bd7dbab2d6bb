// Groups that are part of a tree of switches: the way to the parent, members that stand for several ranks,
// and partial sums (PROTOCOL.md, Trees).
#include <algorithm>
#include <cstring>

#include "aggregation/engine_impl.h"

namespace millrace::aggregation {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr Time kConnectAgain = seconds(1);
// A result's address is counted from its segment's: a segment is smaller than this.
constexpr uint32_t kAddressBits = 24;

// Where a chunk ends, in accumulators.
uint32_t wide_end(const SegmentSlot& slot, ChunkMap map, uint32_t chunk) {
  const uint32_t payload = slot.shape.payload;
  return static_cast<uint32_t>(wide_elements(slot.shape.wire, map.offset(chunk) + map.bytes(chunk, payload)));
}

}  // namespace

// --- the way to the parent ------------------------------------------------------------------------

void Engine::Impl::connect_up(Group& g, Time now, FrameList& out) {
  Uplink& up = *g.up;
  if (g.state != Group::State::kJoining || up.refusal) return;
  for (uint8_t i = 0; i < g.stripes; i++) {
    Uplink::Attempt& attempt = up.attempts[i];
    if (up.member.links[i] || attempt.cm.value != 0 || now < attempt.again) continue;
    attempt = {.cm = {}, .qpn = new_qpn(), .first_psn = new_psn(), .again = now + kConnectAgain};
    roce::Path path;
    path.src_mac = config.mac;
    path.dst_ip = up.member.address;
    path.src_ip = *std::find_if(config.addresses.begin(), config.addresses.end(),
                                [&](auto& a) { return a.is_v4() == path.dst_ip.is_v4(); });
    path.tos = roce::kEct0;
    path.src_port = roce::flow_source_port(kGsiQpn, kGsiQpn);
    JoinRequest join;
    join.child = true;
    join.wait = g.waits;
    join.key = g.key.key;
    join.tenant = g.key.tenant;
    join.stripe = i, join.stripes = g.stripes;
    join.mtu_code = roce::mtu_code(config.mtu);
    join.world = g.world;
    join.nonce = up.member.nonce;
    const auto tenant = config.tenants.find(join.tenant);
    if (tenant != config.tenants.end() && !tenant->second.secret.empty())
      join.tag = join_tag(join, tenant->second.secret, path.src_ip, path.dst_ip, attempt.qpn.value);
    roce::CmQueuePair local;
    local.qpn = attempt.qpn;
    local.first_psn = attempt.first_psn;
    local.mtu_code = join.mtu_code;
    const auto port = static_cast<uint16_t>(0xC000 | (random() & 0x3FFF));
    attempt.cm =
        cm.connect(path, roce::tcp_service_id(config.parent_port), local, port, encode(join), now, out);
    if (attempt.cm.value != 0) by_attempt[attempt.cm.value] = {&g, i};
  }
}

// What became of an attempt to connect.
void Engine::Impl::handle_up_event(Group& g, uint8_t stripe, const roce::CmEvent& e, Time now,
                                   FrameList& out) {
  using Kind = roce::CmEvent::Kind;
  Uplink& up = *g.up;
  Uplink::Attempt& attempt = up.attempts[stripe];
  by_attempt.erase(e.id.value);
  attempt.cm = {};
  if (e.kind != Kind::kReply) {
    if (e.kind != Kind::kRejected || up.refusal) return;  // again after a while, until the join time-out
    const auto refusal = decode_join_reject(e.private_data);
    if (!refusal || e.reason != roce::RejectReason::kConsumer) return;
    up.refusal = refusal;
    up.refused_at = now;
    next_tick = std::min(next_tick, now);
    return;
  }
  const auto reply = decode_join_reply(e.private_data);
  if (!reply || reply->version != kProtocolVersion || (up.group != 0 && up.group != reply->group)) {
    cm.disconnect(e.id, now, out);
    return;
  }
  up.group = reply->group;
  roce::QueuePairConfig qc = qp_config(e.path, attempt.qpn, attempt.first_psn, e.remote);
  qc.requester.requests_max = uplink_requests(g.world);
  up.member.links[stripe] = make_link(qc, g, up.member, stripe, e.id, now);
  cm.confirm(e.id, now, out);
  up.member.links[stripe]->established = true;
  const auto& links = up.member.links;
  up.member.here = std::all_of(links.begin(), links.end(), [](auto& l) { return l != nullptr; });
  report_members(g);
}

// Tells the parent which ranks have come and gone since it was told last.
void Engine::Impl::report_members(Group& g) {
  if (!g.up || !g.up->member.here || g.state != Group::State::kJoining) return;
  Uplink& up = *g.up;
  Link& link = *up.member.links[0];
  for (const bool gone : {true, false}) {
    const RankSet& from = gone ? up.reported : g.here;
    const RankSet& without = gone ? g.here : up.reported;
    RankSet changed;
    for (const uint16_t r : from.ranks())
      if (!without.contains(r)) changed.insert(r);
    const auto& ranges = changed.ranges();
    for (size_t i = 0; i < ranges.size(); i += kMembersRangesMax) {
      Members m;
      m.window = g.window;
      m.segment_bytes = g.segment_bytes;
      m.gone = gone;
      m.group = up.group;
      m.ranks.assign(ranges.begin() + static_cast<ptrdiff_t>(i),
                     ranges.begin() + static_cast<ptrdiff_t>(std::min(i + kMembersRangesMax, ranges.size())));
      up.messages.push_back(encode(m));
      roce::WorkRequest request;
      request.parts[0] = up.messages.back();
      if (!link.qp.requester().post(std::move(request))) {  // again with the next tick
        up.messages.pop_back();
        return queue(link);
      }
      for (const RankRange& r : m.ranks)
        for (uint32_t k = 0; k < r.count; k++) {
          const auto rank = static_cast<uint16_t>(r.first + k);
          gone ? up.reported.erase(rank) : up.reported.insert(rank);
        }
    }
  }
  queue(link);
}

// This switch is the root of the group after all.
void Engine::Impl::forget_parent(Group& g, Time now, FrameList& out) {
  if (!g.up) return;
  for (Uplink::Attempt& a : g.up->attempts) {
    if (a.cm.value == 0) continue;
    by_attempt.erase(a.cm.value);
    cm.disconnect(a.cm, now, out);
  }
  forget_queued(g, &g.up->member);
  for (auto& l : g.up->member.links)
    if (l) detach(*l, {}, now, out);
  g.up.reset();
}

// --- messages --------------------------------------------------------------------------------------

// A message that is no segment has come as a whole, from a child or from the parent.
void Engine::Impl::handle_control(Link& link, Time now) {
  Group& g = *link.group;
  const Member& from = *link.member;
  const ControlMessage m = decode_control_message(link.message);
  link.message.clear();
  if (g.state == Group::State::kFailed) return;
  if (m.terminal) return fail(g, m.terminal->code, m.terminal->ranks, m.terminal->text, now);
  if (m.members && from.kind == Member::Kind::kChild && g.state == Group::State::kJoining)
    return handle_members(link, *m.members, now);
  if (m.start && from.kind == Member::Kind::kParent) {
    if (g.state != Group::State::kJoining) return;  // another stripe's
    const Start& s = *m.start;
    if (s.window == 0 || s.window > g.window || s.segment_bytes > g.segment_bytes ||
        s.mtu_code != roce::mtu_code(config.mtu) || s.world != g.world || s.weights.size() != g.stripes)
      return breach(
          link, "started the group with a window, segments, ranks or stripes that it was not offered", now);
    g.window = s.window;
    g.segment_bytes = s.segment_bytes;
    return start(g, now);
  }
  breach(link, "sent a message that makes no sense now", now);
}

void Engine::Impl::handle_members(Link& link, const Members& m, Time now) {
  Group& g = *link.group;
  Member& child = *link.member;
  const uint32_t first = config.mtu - kSegmentHeaderBytes;
  if (m.group != g.id || m.window == 0 || m.segment_bytes < first ||
      (m.segment_bytes - first) % config.mtu != 0)
    return breach(link, "offered limits that make no sense", now);
  g.window = std::min(g.window, m.window);
  g.segment_bytes = std::min(g.segment_bytes, m.segment_bytes);
  for (const RankRange& range : m.ranks) {
    if (range.first + range.count > g.world) return breach(link, "has a rank that is none", now);
    for (uint32_t i = 0; i < range.count; i++) {
      const auto rank = static_cast<uint16_t>(range.first + i);
      if (m.gone) {
        child.ranks.erase(rank);
        if (child.here) g.here.erase(rank);
        continue;
      }
      for (const auto& other : g.members) {
        if (!other || other.get() == &child || !other->ranks.contains(rank)) continue;
        return fail(g, Code::kDuplicateRank, {rank},
                    "rank " + std::to_string(rank) + " has joined by " + other->address.to_string() +
                        " and by " + child.address.to_string(),
                    now);
      }
      child.ranks.insert(rank);
      if (child.here) g.here.insert(rank);
    }
  }
}

// Anything from the parent's queue pairs: START, a terminal message, results.
void Engine::Impl::handle_from_parent(Link& link, Frame frame, const roce::Packet& p, Time now) {
  roce::RcResponder& responder = link.qp.responder();
  Group& g = *link.group;
  if (p.op->write) {
    const bool probe = p.payload.empty() && p.op->only && !p.op->imm;
    if (probe || g.state == Group::State::kFailed) return responder.accept(p);
    return handle_result(link, std::move(frame), p, now);
  }
  responder.accept(p);
  if (p.op->starts()) link.message.clear();
  if (link.message.size() + p.payload.size() > kMessageBytesMax)
    return breach(link, "sent too long a message", now);
  link.message.insert(link.message.end(), p.payload.begin(), p.payload.end());
  if (p.op->ends()) handle_control(link, now);
}

// A chunk's result, which is passed on in the frame that brought it.
void Engine::Impl::handle_result(Link& link, Frame frame, const roce::Packet& p, Time now) {
  Group& g = *link.group;
  Stripe& stripe = g.stripe[link.stripe];
  SegmentSlot& slot = stripe.slots.slot(stripe.slots.released());
  const bool due = g.tree && g.state != Group::State::kJoining && slot.headers != 0 && slot.sent_up;
  const ChunkMap map{config.mtu};
  uint32_t chunk = slot.chunks_released, from = 0, to = 0;
  bool last = false;
  if (due) {
    // The next chunk that has something for us; the last one comes in any case.
    const uint32_t payload = slot.shape.payload, count = map.count(payload);
    const SegmentShape::Range all = slot.shape.receives(g.here);
    for (;; chunk++) {
      const uint32_t begin = payload ? map.offset(chunk) : 0;
      const uint32_t end = payload ? begin + map.bytes(chunk, payload) : 0;
      from = std::max(all.begin, begin), to = std::max(from, std::min(all.end, end));
      last = chunk + 1 == count;
      if (from != to || last) break;
    }
    const uint64_t address = (slot.counter << kAddressBits) + (from < to ? from - all.begin : 0);
    const bool right = p.op->only && p.reth->rkey.value() == g.up->rkey &&
                       p.reth->address.value() == address && p.payload.size() == to - from &&
                       p.op->imm == last && (!last || p.immediate->value() == result_immediate(slot.counter));
    if (!right) last = false, chunk = UINT32_MAX;
  }
  if (!due || chunk == UINT32_MAX) {
    link.qp.responder().refuse(roce::kNakRemoteAccess);
    return breach(link, "wrote a result that is not the one due", now);
  }
  link.qp.responder().accept(p);
  counters.results_received++;
  const uint64_t counter = slot.counter;
  const FrameRef held = p.payload.empty() ? FrameRef{} : FrameRef(frame.buffer());
  slot.chunks_released = chunk;
  post_chunk(g, link.stripe, slot, chunk, p.payload, from, held);
  if (!last) return;
  // With the result, the parent has our partials, whether or not their ACKs have come.
  const uint32_t parts = static_cast<uint32_t>(g.up->subtrees.size());
  for (uint32_t i = 0; i < parts; i++) link.qp.requester().acknowledge_through(counter * parts + i + 1, now);
  forget_completions(link);
}

// --- segments --------------------------------------------------------------------------------------

// Members, limits and ranks are settled: the rings and stores for them.
void Engine::Impl::prepare_tree(Group& g, Time now) {
  g.tree = g.up != nullptr || g.members.size() > g.world;
  if (!g.tree && g.window == config.window && g.segment_bytes == config.segment_bytes) return;
  for (auto& m : g.members) {
    if (!m) continue;
    m->first_partial = static_cast<uint32_t>(g.partials.size());
    m->partials = m->host() ? std::vector<RankRange>{{m->ranks.first(), 1}} : m->ranks.subtrees(g.world);
    for (const RankRange& node : m->partials)
      g.partials.push_back({node, static_cast<uint32_t>(g.partials.size())});
  }
  std::sort(g.partials.begin(), g.partials.end(),
            [](const Partial& a, const Partial& b) { return a.node.first < b.node.first; });
  if (g.up) g.up->subtrees = g.here.subtrees(g.world);
  const uint32_t up = g.up ? static_cast<uint32_t>(g.up->subtrees.size()) : 0;
  const uint64_t more = g.stripes * PartialStore::bytes(g.window, g.segment_bytes, 1);
  if (const auto full = over_quota(g.key.tenant, more))
    return fail(g, Code::kQuota, {},
                *full + " used, a tree of switches needs " + std::to_string(more) + " B more", now);
  g.memory += more;
  memory += more;
  const uint32_t chunks = ChunkMap{config.mtu}.count(g.segment_bytes);
  for (Stripe& s : g.stripe) {
    s.slots = SlotRing(g.window, chunks, static_cast<uint32_t>(g.members.size()), config.mtu);
    s.store.emplace(g.window, g.segment_bytes, up);
  }
}

// In the order of ranks, every partial of what is in the window has to be kept.
bool Engine::Impl::reserve_partials(Group& g, PartialStore& store, Time now) {
  const auto partials = static_cast<uint32_t>(g.partials.size());
  const uint64_t needed = PartialStore::bytes(g.window, g.segment_bytes, partials) -
                          PartialStore::bytes(g.window, g.segment_bytes, 1);
  if (const auto full = over_quota(g.key.tenant, needed)) {
    fail(g, Code::kQuota, {},
         *full + " used, this group's first deterministic operation needs " +
             std::to_string((needed + 1023) / 1024) + " KiB more",
         now);
    return false;
  }
  store.hold(partials);
  g.memory += needed;
  memory += needed;
  return true;
}

void Engine::Impl::contribute_in_tree(Link& link, std::span<const uint8_t> data, bool ends, Time now) {
  Group& g = *link.group;
  const Member& m = *link.member;
  Stripe& stripe = g.stripe[link.stripe];
  SegmentSlot& slot = stripe.slots.slot(link.segment);
  const bool contributes = slot.shape.contributes(m.ranks);
  if (!data.empty()) {
    counters.contributions++;
    counters.contribution_bytes += data.size();
    const ChunkMap map{config.mtu};
    const bool wide_data = slot.wide && !m.host();
    uint32_t begin = map.offset(link.packet), end = static_cast<uint32_t>(begin + data.size());
    if (wide_data) {
      begin /= sizeof(float), end /= sizeof(float);
    } else if (slot.wide) {
      begin = static_cast<uint32_t>(wide_elements(slot.shape.wire, begin));
      end = static_cast<uint32_t>(wide_elements(slot.shape.wire, end));
    }
    add(slot, *stripe.store, slot.hold ? m.first_partial + link.part : 0, begin, end, data.data(), wide_data);
    const uint32_t count = map.count(slot.shape.payload);
    if (!wide_data)
      slot.chunks[link.packet].contributions++;
    else
      while (link.chunk < count && wide_end(slot, map, link.chunk) <= end)
        slot.chunks[link.chunk++].contributions++;
  }
  if (ends && contributes && link.part + 1 == link.parts) slot.contributed++;
  complete_in_tree(g, link.stripe, slot, now);
}

// data (op) into elements [begin, end) of a partial; those that have no value yet take it.
void Engine::Impl::add(const SegmentSlot& slot, PartialStore& store, uint32_t partial, uint32_t begin,
                       uint32_t end, const uint8_t* data, bool wide_data) {
  uint32_t& filled = store.filled(slot.counter, partial);
  const uint32_t both = std::clamp(filled, begin, end);  // up to here there is a value
  if (!slot.wide) {
    uint8_t* sum = store.sum(slot.counter, partial);
    if (both > begin) slot.reducer.accumulate(sum + begin, data, both - begin);
    std::memcpy(sum + both, data + (both - begin), end - both);
  } else {
    float* sum = store.wide(slot.counter, partial);
    const auto* in = reinterpret_cast<const float*>(data);
    const uint32_t bytes = static_cast<uint32_t>(wide_data ? 0
                                                 : slot.shape.wire == DataType::kBfp8
                                                     ? (end - begin) / kBfp8BlockElements * kBfp8BlockBytes
                                                     : (end - begin) * element_bytes(slot.shape.wire));
    if (!wide_data && both == begin) {
      slot.reducer.widen(sum + begin, data, bytes);
    } else if (!wide_data && both == end) {
      slot.reducer.accumulate_wide(sum + begin, data, bytes);
    } else {
      if (!wide_data) {
        if (scratch.empty()) scratch.resize(1, std::vector<float>(config.mtu));
        slot.reducer.widen(scratch[0].data(), data, bytes);
        in = scratch[0].data();
      }
      if (both > begin) slot.reducer.combine_wide(sum + begin, in, both - begin);
      std::memcpy(sum + both, reinterpret_cast<const uint8_t*>(in) + (both - begin) * sizeof(float),
                  (end - both) * sizeof(float));
    }
  }
  filled = std::max(filled, end);
}

// The sum of all ranks of a node of the canonical bracketing; returns in which partial it is.
uint32_t Engine::Impl::sum_partials(const Group& g, const SegmentSlot& slot, PartialStore& store,
                                    RankRange node) {
  const auto p = std::partition_point(g.partials.begin(), g.partials.end(),
                                      [&](const Partial& x) { return x.node.first < node.first; });
  if (p->node == node) return p->index;
  const uint32_t left = left_of(node.count);
  const uint32_t a = sum_partials(g, slot, store, {node.first, left});
  const uint32_t b =
      sum_partials(g, slot, store, {static_cast<uint16_t>(node.first + left), node.count - left});
  const uint32_t payload = slot.shape.payload;
  if (slot.wide)
    slot.reducer.combine_wide(store.wide(slot.counter, a), store.wide(slot.counter, b),
                              wide_elements(slot.shape.wire, payload));
  else
    slot.reducer.accumulate(store.sum(slot.counter, a), store.sum(slot.counter, b), payload);
  return a;
}

// Something has been added to a segment: up with it, or down, as far as it is complete.
void Engine::Impl::complete_in_tree(Group& g, uint8_t stripe, SegmentSlot& slot, Time now) {
  if (slot.headers != g.seated) return;
  const bool all = slot.contributed == slot.contributors;
  if (g.up) {
    if (all && !slot.sent_up) send_up(g, stripe, slot, now);
    return;
  }
  if (slot.hold && !all) return;
  PartialStore& store = *g.stripe[stripe].store;
  const ChunkMap map{config.mtu};
  const uint32_t payload = slot.shape.payload, count = map.count(payload);
  const uint32_t partial = slot.hold ? sum_partials(g, slot, store, {0, g.world}) : 0;
  for (bool last = false; !last;) {
    const uint32_t index = slot.chunks_released;
    if (!slot.hold && slot.chunks[index].contributions != slot.contributors) return;
    last = index + 1 == count;
    const uint32_t begin = payload ? map.offset(index) : 0, bytes = payload ? map.bytes(index, payload) : 0;
    uint8_t* result = store.result(slot.counter) + begin;
    if (slot.wide) {
      float* wide = store.wide(slot.counter, partial) + wide_elements(slot.shape.wire, begin);
      slot.reducer.finish_wide(wide, bytes, g.world);
      slot.reducer.narrow(result, wide, bytes);
    } else {
      std::memcpy(result, store.sum(slot.counter, partial) + begin, bytes);
      if (slot.reducer) slot.reducer.finish(result, bytes, g.world);
    }
    post_chunk(g, stripe, slot, index, {result, bytes}, begin, {});
  }
}

// The segment as far as we have it goes to the parent: header and partial, or one of each per subtree.
void Engine::Impl::send_up(Group& g, uint8_t stripe, SegmentSlot& slot, Time now) {
  const Uplink& up = *g.up;
  Link& link = *up.member.links[stripe];
  PartialStore& store = *g.stripe[stripe].store;
  const bool contributes = slot.shape.contributes(g.here);
  const auto subtrees = static_cast<uint32_t>(up.subtrees.size());
  const uint32_t parts = slot.hold ? subtrees : 1;
  slot.sent_up = true;
  for (uint32_t i = 0; i < parts; i++) {
    SegmentHeader& h = store.header(slot.counter, i);
    h = slot.reference();
    h.flags = static_cast<uint8_t>((h.flags & ~kFlagsOfMember) | (contributes ? 0 : kFlagHeaderOnly) |
                                   (slot.shape.partial_is_wide() ? kFlagWide : 0));
    h.group = up.group;
    h.rank = slot.hold ? up.subtrees[i].first : g.here.first();
    h.payload_bytes = contributes ? slot.shape.partial_bytes() : 0;
    h.result_address = slot.counter << kAddressBits;
    h.result_rkey = up.rkey;
    roce::WorkRequest request;
    request.id = slot.counter * subtrees + i + 1;
    request.parts[0] = {reinterpret_cast<const uint8_t*>(&h), sizeof(h)};
    if (contributes) {
      const uint32_t partial = slot.hold ? sum_partials(g, slot, store, up.subtrees[i]) : 0;
      request.parts[1] = {store.sum(slot.counter, partial), slot.shape.partial_bytes()};
    }
    // The parent's results acknowledge all before the window, so that this is about how scattered our ranks
    // are.
    if (!link.qp.requester().post(std::move(request)))
      return fail(g, Code::kNoMemory, {},
                  "deterministic operations of ranks so scattered over switches (" + std::to_string(parts) +
                      " partial sums) do not fit the queue",
                  now);
    counters.partials_sent++;
  }
  queue(link);
}

}  // namespace millrace::aggregation
