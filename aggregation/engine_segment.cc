// The data path of the engine: a request packet of a member becomes a contribution, the last one a result.
#include <algorithm>

#include "aggregation/engine_impl.h"
#include "roce/icrc.h"

namespace millrace::aggregation {

namespace {

// The RNR NAK timer code of a breached window: 0.64 ms.
constexpr uint8_t kRnrTimerCode = 12;

// What members must agree on; the header-only flag is each member's own.
bool agree(const SegmentHeader& a, const SegmentHeader& b) {
  constexpr uint8_t shared_flags = static_cast<uint8_t>(~kFlagHeaderOnly);
  return a.collective == b.collective && a.op == b.op && a.type == b.type && a.wire_type == b.wire_type &&
         ((a.flags ^ b.flags) & shared_flags) == 0 && a.root == b.root && a.operation == b.operation &&
         a.total == b.total && a.offset == b.offset && a.length == b.length;
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
  const char* wrong = check(h, config.segment_bytes);
  if (wrong == nullptr && h.group.value() != g.id) wrong = "another group's id";
  if (wrong == nullptr && h.rank.value() != link.member->rank) wrong = "another member's rank";
  if (wrong != nullptr) {
    breach(link, std::string("sent a segment header with a fault: ") + wrong, now);
    return false;
  }
  SegmentSlot& slot = slots.slot(link.segment);
  if (slot.headers == 0) {
    slot.counter = link.segment;
    slot.first_rank = link.member->rank;
    slot.since = now;
    slot.reducer = {};
    if (h.length.value() != 0)
      slot.reducer = Reducer::get(static_cast<DataType>(h.type), static_cast<ReduceOp>(h.op));
  }
  slot.header[link.member->rank] = h;
  slot.present[link.member->rank] = true;
  slot.headers++;
  link.packet = 0;
  link.payload = h.payload_bytes.value();
  link.absorb = false;
  g.operation = std::max(g.operation, h.operation.value());
  if (!agree(slot.reference(), h)) disagree(link, link.segment, now);
  return true;
}

void Engine::Impl::handle_request(Link& link, Frame frame, const roce::Packet& p, Time now) {
  Group& g = *link.group;
  roce::RcResponder& responder = link.qp.responder();
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
  const bool gathers = g.state == Group::State::kRunning || g.state == Group::State::kDisagreeing;
  if (p.op->starts() && gathers && !may_begin(link, now)) {
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
    fail(g, Code::kMemberLost, {g.departed->rank}, describe(*g.departed) + " has left the group", now);
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
  if (!link.absorb) contribute(link, std::move(frame), data);
  link.packet++;
  if (p.op->ends()) {
    link.segment++;
    counters.segments++;
  }
}

void Engine::Impl::contribute(Link& link, Frame frame, std::span<uint8_t> data) {
  Group& g = *link.group;
  SlotRing& slots = g.stripe[link.stripe].slots;
  SegmentSlot& slot = slots.slot(link.segment);
  Chunk& chunk = slot.chunks[link.packet];
  counters.contributions++;
  counters.contribution_bytes += data.size();
  if (!data.empty()) {
    const Reducer reducer = slot.reducer;
    float* wide = is_wide(static_cast<DataType>(slot.reference().type))
                      ? slots.wide(link.segment, link.packet)
                      : nullptr;
    if (chunk.contributions == 0) {
      // The frame is the accumulator: kept as it came, the others are added into it.
      chunk.frame = FrameRef(frame.buffer());
      chunk.data = data;
      if (wide) reducer.widen(wide, data.data(), data.size());
    } else if (wide) {
      reducer.accumulate_wide(wide, data.data(), data.size());
    } else {
      reducer.accumulate(chunk.data.data(), data.data(), data.size());
    }
    if (chunk.contributions + 1 == g.world && wide) reducer.narrow(chunk.data.data(), wide, data.size());
  }
  if (++chunk.contributions == g.world) release_chunk(g, link.stripe, slot, link.packet);
}

void Engine::Impl::release_chunk(Group& g, uint8_t stripe, SegmentSlot& slot, uint32_t index) {
  SlotRing& slots = g.stripe[stripe].slots;
  assert(slot.counter == slots.released() && index == slot.chunks_released && slot.headers == g.world);
  Chunk& chunk = slot.chunks[index];
  const ChunkMap map{config.mtu};
  const uint32_t payload = slot.reference().payload_bytes.value();
  const bool last = index + 1 == map.count(payload);

  roce::WorkRequest request;
  request.kind = last ? roce::WorkRequest::Kind::kWriteImmediate : roce::WorkRequest::Kind::kWrite;
  request.ack_request = last;
  request.id = last ? result_id(slot.counter) : 0;  // what acknowledge_through() goes by; 0 says nothing
  request.immediate = result_immediate(slot.counter);
  request.parts[0] = chunk.data;
  request.payload_crc = roce::crc32(0, chunk.data);
  counters.chunks_reduced++;
  for (auto& member : g.members) {
    const SegmentHeader& h = slot.header[member->rank];
    Link& link = *member->links[stripe];
    request.shared = chunk.frame;
    request.remote_address = h.result_address.value() + (payload ? map.offset(index) : 0);
    request.rkey = h.result_rkey.value();
    const bool posted = link.qp.requester().post(request);
    // Room for 2 × window segments is reserved, and the member's own segments acknowledge all but the last
    // window.
    assert(posted);
    (void)posted;
    if (last) link.results++;
    queue(link);
  }
  counters.results_sent += g.world;
  counters.result_bytes += chunk.data.size() * g.world;
  chunk = Chunk{};
  slot.chunks_released++;
  if (last) slots.release(slot);
}

}  // namespace millrace::aggregation
