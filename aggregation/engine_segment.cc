// The data path of the engine: a request packet of a member becomes a contribution, the last one a result.
#include <algorithm>

#include "aggregation/disagreement.h"
#include "aggregation/engine_impl.h"
#include "roce/icrc.h"

namespace millrace::aggregation {

namespace {

// The RNR NAK timer code of a breached window: 0.64 ms.
constexpr uint8_t kRnrTimerCode = 12;

// Whether the contributions to a segment are reduced in the order of ranks, and not as they come.
bool in_order_of_ranks(const SegmentHeader& h) {
  return (h.flags & kFlagDeterministic) != 0 && h.length.value() != 0 &&
         reduces(static_cast<Collective>(h.collective)) &&
         order_matters(static_cast<DataType>(h.type), static_cast<ReduceOp>(h.op));
}

// The id of a segment's last result among a queue pair's requests.
constexpr uint64_t result_id(uint64_t segment) { return segment + 1; }

}  // namespace

// Whether the window allows the link's next segment: result s − window has left for this member. Such a
// segment says that the member has seen that result, whether or not its ACK has come, so at most window
// results are left unacknowledged when the next is posted.
bool Engine::Impl::may_begin(Link& link, Time now) {
  const SlotRing& slots = link.group->stripe[link.stripe].slots;
  if (!slots.admits(link.segment)) return false;
  if (link.segment < slots.window()) return true;
  const bool seen = link.qp.requester().acknowledge_through(result_id(link.segment - slots.window()), now);
  forget_completions(link);
  return seen;
}

// Enters the header of a segment's first packet into its slot. False: a breach, which has failed the group.
bool Engine::Impl::begin_segment(Link& link, const roce::Packet& p, Time now) {
  Group& g = *link.group;
  SlotRing& slots = g.stripe[link.stripe].slots;
  if (p.payload.size() < kSegmentHeaderBytes) {
    breach(link, "sent a message shorter than a segment header", now);
    return false;
  }
  const auto& h = *reinterpret_cast<const SegmentHeader*>(p.payload.data());
  if (const char* wrong = wrong_header(link, h)) {
    breach(link, std::string("sent a segment header with a fault: ") + wrong, now);
    return false;
  }
  SegmentSlot& slot = slots.slot(link.segment);
  const uint32_t seat = link.member->seat;
  if (slot.headers == 0) {
    slot.counter = link.segment;
    slot.first_seat = seat;
    slot.since = now;
    if (!open_slot(g, link.stripe, slot, h, now)) return false;
  }
  if (link.part == 0) {
    slot.header[seat] = h;
    slot.present[seat] = true;
    slot.headers++;
    link.chunk = 0;
    const bool subtrees = !link.member->host() && in_order_of_ranks(h);
    link.parts = subtrees ? static_cast<uint32_t>(link.member->partials.size()) : 1;
  }
  link.packet = 0;
  link.payload = h.payload_bytes.value();
  link.absorb = false;
  g.operation = std::max(g.operation, h.operation.value());
  // The last header settles a disagreement also where it agrees.
  if (g.state == Group::State::kDisagreeing || !agree(slot.reference(), h)) disagree(link, link.segment, now);
  return true;
}

// The first thing that is wrong with a header of this member's, or nullptr.
const char* Engine::Impl::wrong_header(const Link& link, const SegmentHeader& h) const {
  const Group& g = *link.group;
  const Member& m = *link.member;
  const char* wrong =
      m.host() ? check(h, g.segment_bytes, g.world) : check(h, g.segment_bytes, g.world, m.ranks);
  if (wrong != nullptr) return wrong;
  if (h.group.value() != g.id) return "another group's id";
  const bool subtrees = !m.host() && in_order_of_ranks(h);
  if (link.part != 0 && !subtrees) return "a partial sum too many";
  if (h.rank.value() != (subtrees ? m.partials[link.part].first : m.ranks.first()))
    return "another member's rank";
  return nullptr;
}

// Prepares a slot for the segment that its first header describes. False: there is no memory for it, which
// has failed the group.
bool Engine::Impl::open_slot(Group& g, uint8_t stripe, SegmentSlot& slot, const SegmentHeader& h, Time now) {
  const auto op = static_cast<ReduceOp>(h.op);
  slot.shape = shape(h, g.world);
  slot.reducer = {};
  slot.wide = slot.hold = false;
  if (g.tree) {
    slot.contributors = static_cast<uint32_t>(std::count_if(
        g.members.begin(), g.members.end(), [&](auto& m) { return m && slot.shape.contributes(m->ranks); }));
  }
  if (!reduces(slot.shape.collective) || slot.shape.length == 0) return true;
  slot.reducer = Reducer::get(slot.shape.type, op, slot.shape.wire);
  slot.wide = accumulates_wide(slot.shape.type, op, slot.shape.wire);
  slot.hold = in_order_of_ranks(h);
  if (!slot.hold) return true;
  Stripe& s = g.stripe[stripe];
  if (g.tree) return s.store->partials() == g.partials.size() || reserve_partials(g, *s.store, now);
  return s.slots.holds() || reserve_to_hold(g, s.slots, now);
}

void Engine::Impl::handle_request(Link& link, Frame frame, const roce::Packet& p, Time now) {
  Group& g = *link.group;
  roce::RcResponder& responder = link.qp.responder();
  if (link.member->kind == Member::Kind::kParent) return handle_from_parent(link, std::move(frame), p, now);
  if (p.op->write) {
    // Only the zero-length probe: nothing a member sends can make the switch write into its memory.
    if (p.payload.empty() && p.op->only && !p.op->imm) {
      responder.accept(p);
    } else {
      responder.refuse(roce::kNakRemoteAccess);
      breach(link, "sent an RDMA WRITE", now);
    }
    return;
  }
  if (p.op->starts()) {
    link.control = link.member->kind == Member::Kind::kChild && is_control_message(p.payload);
    link.message.clear();
  }
  if (link.control) {
    responder.accept(p);
    if (link.message.size() + p.payload.size() > kMessageBytesMax)
      return breach(link, "sent too long a message", now);
    link.message.insert(link.message.end(), p.payload.begin(), p.payload.end());
    if (p.op->ends()) handle_control(link, now);
    return;
  }
  const bool gathers = g.state == Group::State::kRunning || g.state == Group::State::kDisagreeing;
  if (p.op->starts() && gathers && link.part == 0 && !may_begin(link, now)) {
    counters.window_breaches++;
    responder.not_ready(kRnrTimerCode);
    return;
  }
  responder.accept(p);
  if (g.state == Group::State::kFailed) {
    // Taken and forgotten, so that the member's sends complete while the terminal message is on its way.
    counters.group_failed++;
    return;
  }
  if (g.state == Group::State::kJoining) {
    breach(link, "sent a segment before START", now);
    return;
  }
  if (p.op->imm) {
    breach(link, "sent a SEND with immediate", now);
    return;
  }
  if (g.departed != nullptr) {
    fail(g, Code::kMemberLost, g.departed->ranks.ranks(), describe(*g.departed) + " has left the group", now);
    return;
  }
  if (p.op->starts() && !begin_segment(link, p, now)) return;
  // The header may have shown a disagreement, or even settled one: nothing is summed any more.
  if (g.state != Group::State::kRunning) link.absorb = true;

  std::span<uint8_t> data = p.payload;
  if (p.op->starts()) data = data.subspan(kSegmentHeaderBytes);
  const ChunkMap map{config.mtu};
  const uint32_t chunks = map.count(link.payload);
  const bool fits = link.packet < chunks && data.size() == map.bytes(link.packet, link.payload) &&
                    p.op->ends() == (link.packet + 1 == chunks);
  if (!fits) {
    breach(link, "sent a segment whose packets do not match its payload bytes", now);
    return;
  }
  const bool last_part = link.part + 1 == link.parts;
  if (!link.absorb && g.tree)
    contribute_in_tree(link, data, p.op->ends(), now);
  else if (!link.absorb)
    contribute(link, std::move(frame), data);
  link.packet++;
  if (!p.op->ends()) return;
  link.part = last_part ? 0 : link.part + 1;
  if (last_part) {
    link.segment++;
    counters.segments++;
  }
}

void Engine::Impl::contribute(Link& link, Frame frame, std::span<uint8_t> data) {
  Group& g = *link.group;
  SlotRing& slots = g.stripe[link.stripe].slots;
  SegmentSlot& slot = slots.slot(link.segment);
  if (!data.empty()) {
    Chunk& chunk = slot.chunks[link.packet];
    counters.contributions++;
    counters.contribution_bytes += data.size();
    const bool complete = ++chunk.contributions == slot.shape.contributors();
    if (slot.hold) {
      slots.held(link.segment, link.packet, link.member->rank) = {FrameRef(frame.buffer()), data};
      if (complete) reduce_held(g, slots, slot, link.packet);
    } else {
      if (chunk.contributions == 1) chunk.sum = {FrameRef(frame.buffer()), data};
      if (slot.reducer) reduce(g, slots, slot, link.packet, data, complete);
    }
  }
  // Those chunks may be complete that waited for this member's header.
  const uint32_t count = ChunkMap{config.mtu}.count(slot.shape.payload);
  while (slot.headers == g.seated &&
         slot.chunks[slot.chunks_released].contributions == slot.shape.contributors()) {
    const bool last = slot.chunks_released + 1 == count;
    release_chunk(g, link.stripe, slot, slot.chunks_released);
    if (last) break;
  }
}

// The frame is the accumulator: the first contribution is kept as it came, the others are added into it.
void Engine::Impl::reduce(const Group& g, SlotRing& slots, SegmentSlot& slot, uint32_t index,
                          std::span<const uint8_t> data, bool complete) {
  Chunk& chunk = slot.chunks[index];
  uint8_t* sum = chunk.sum.data.data();
  if (!slot.wide) {
    if (chunk.contributions > 1) slot.reducer.accumulate(sum, data.data(), data.size());
    if (complete) slot.reducer.finish(sum, data.size(), g.world);
    return;
  }
  float* wide = slots.wide(slot.counter, index);
  if (chunk.contributions == 1)
    slot.reducer.widen(wide, data.data(), data.size());
  else
    slot.reducer.accumulate_wide(wide, data.data(), data.size());
  if (!complete) return;
  slot.reducer.finish_wide(wide, data.size(), g.world);
  slot.reducer.narrow(sum, wide, data.size());
}

// Sums what all ranks have contributed to a chunk in the canonical order: ranks [0, n) are those below the
// largest power of two smaller than n and the rest, each summed likewise.
void Engine::Impl::reduce_held(const Group& g, SlotRing& slots, SegmentSlot& slot, uint32_t index) {
  const std::span<Held> held(&slots.held(slot.counter, index, 0), g.world);
  const size_t bytes = held[0].data.size();
  if (slot.wide) {
    sum_wide(slot, held, 0);
    slot.reducer.finish_wide(scratch[0].data(), bytes, g.world);
    slot.reducer.narrow(held[0].data.data(), scratch[0].data(), bytes);
  } else {
    sum_in_place(slot, held);
    slot.reducer.finish(held[0].data.data(), bytes, g.world);
  }
  slot.chunks[index].sum = std::move(held[0]);
  for (Held& h : held) h = Held{};
}

void Engine::Impl::sum_in_place(const SegmentSlot& slot, std::span<Held> ranks) {
  if (ranks.size() == 1) return;
  const size_t left = left_of(static_cast<uint32_t>(ranks.size()));
  sum_in_place(slot, ranks.first(left));
  sum_in_place(slot, ranks.subspan(left));
  slot.reducer.accumulate(ranks[0].data.data(), ranks[left].data.data(), ranks[0].data.size());
}

void Engine::Impl::sum_wide(const SegmentSlot& slot, std::span<Held> ranks, size_t level) {
  if (scratch.size() <= level) scratch.resize(level + 1, std::vector<float>(config.mtu));
  const std::span<uint8_t> first = ranks[0].data;
  if (ranks.size() == 1) return slot.reducer.widen(scratch[level].data(), first.data(), first.size());
  const size_t left = left_of(static_cast<uint32_t>(ranks.size()));
  sum_wide(slot, ranks.first(left), level);
  if (ranks.size() == left + 1)
    return slot.reducer.accumulate_wide(scratch[level].data(), ranks[left].data.data(), first.size());
  sum_wide(slot, ranks.subspan(left), level + 1);
  slot.reducer.combine_wide(scratch[level].data(), scratch[level + 1].data(),
                            wide_elements(slot.shape.wire, first.size()));
}

void Engine::Impl::release_chunk(Group& g, uint8_t stripe, SegmentSlot& slot, uint32_t index) {
  const Held sum = std::move(slot.chunks[index].sum);
  post_chunk(g, stripe, slot, index, sum.data, slot.shape.payload ? ChunkMap{config.mtu}.offset(index) : 0,
             sum.frame);
}

void Engine::Impl::post_chunk(Group& g, uint8_t stripe, SegmentSlot& slot, uint32_t index,
                              std::span<uint8_t> data, uint32_t begin, const FrameRef& frame) {
  Stripe& s = g.stripe[stripe];
  assert(slot.counter == s.slots.released() && index == slot.chunks_released && slot.headers == g.seated);
  const bool last = index + 1 == ChunkMap{config.mtu}.count(slot.shape.payload);
  const auto end = static_cast<uint32_t>(begin + data.size());

  roce::WorkRequest request;
  request.kind = last ? roce::WorkRequest::Kind::kWriteImmediate : roce::WorkRequest::Kind::kWrite;
  request.ack_request = last;
  request.id = last ? result_id(slot.counter) : 0;  // what acknowledge_through() goes by; 0 says nothing
  request.immediate = result_immediate(slot.counter);
  std::span<uint8_t> part;  // whose CRC request.payload_crc is
  request.payload_crc = 0;
  counters.chunks_reduced++;
  for (auto& member : g.members) {
    if (!member) continue;
    // What of this chunk the member receives; the last one tells it in any case.
    const SegmentShape::Range all =
        member->host() ? slot.shape.receives(member->rank) : slot.shape.receives(member->ranks);
    const uint32_t from = std::max(all.begin, begin), to = std::max(from, std::min(all.end, end));
    if (from == to && !last) continue;
    const SegmentHeader& h = slot.header[member->seat];
    Link& link = *member->links[stripe];
    request.shared = from < to ? frame : FrameRef{};
    request.parts[0] = from < to ? data.subspan(from - begin, to - from) : std::span<uint8_t>{};
    if (request.parts[0].data() != part.data() || request.parts[0].size() != part.size()) {
      part = data.subspan(from < to ? from - begin : 0, to - from);
      request.payload_crc = roce::crc32(0, part);
    }
    request.remote_address = h.result_address.value() + (from < to ? from - all.begin : 0);
    request.rkey = h.result_rkey.value();
    const bool posted = link.qp.requester().post(request);
    // Room for the results of `window` segments is reserved, and the member's own segments acknowledge all
    // but those.
    assert(posted);
    (void)posted;
    counters.results_sent++;
    counters.result_bytes += to - from;
    if (last) link.results++;
    queue(link);
  }
  slot.chunks[index] = Chunk{};
  slot.chunks_released++;
  if (!last) return;
  if (s.store) {
    s.store->clear(slot.counter);
    for (Chunk& c : slot.chunks) c.contributions = 0;
  }
  s.slots.release(slot);
}

}  // namespace millrace::aggregation
