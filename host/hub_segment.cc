// The data path of the hub: what ranks post becomes one segment for the switch, its result theirs.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>

#include "host/hub_impl.h"
#include "roce/error.h"

namespace millrace::host {

using aggregation::Code;
using aggregation::RankRange;
using aggregation::SegmentHeader;

namespace {

// How long to wait for the other ranks' headers once two disagree, so that the majority is known.
constexpr Time kJudgeAfter = std::chrono::milliseconds(500);
constexpr Time kLookEvery = std::chrono::seconds(1);

}  // namespace

void Hub::Impl::poll(Time now) {
  announce();
  take_all(now);
  for (Stripe& s : stripes)
    if (state == State::kRunning) post(s, now);
  tick(now);
}

void Hub::Impl::take_all(Time now) {
  for (uint32_t seat = 0; seat < seats.size(); seat++)
    for (uint8_t i = 0; i < stripes.size() && running(); i++)
      for (uint64_t posts = memory.rank(seat).counts[i].read(); running() && seats[seat].taken[i] < posts;)
        take(seat, i, now);
}

// A rank's next segment.
void Hub::Impl::take(uint32_t seat, uint8_t i, Time now) {
  Seat& s = seats[seat];
  Stripe& stripe = stripes[i];
  const uint64_t segment = s.taken[i];
  const SegmentHeader h = memory.header(seat, i, segment);  // a copy: it is another process's memory
  const char* wrong = aggregation::check(h, start->segment_bytes, config.join.world);
  if (wrong == nullptr && h.group.value() != start->group) wrong = "another group's id";
  if (wrong == nullptr && h.rank.value() != s.rank) wrong = "another rank's number";
  if (wrong == nullptr && segment >= stripe.results + start->window) wrong = "one more than the window";
  if (wrong != nullptr)
    return fail(Code::kBreach, {s.rank}, describe(s) + " posted a segment header with a fault: " + wrong,
                now);
  if (departed != UINT32_MAX)
    return fail(Code::kMemberLost, {seats[departed].rank}, describe(seats[departed]) + " has left the group",
                now);
  s.taken[i]++;
  operation = std::max(operation, h.operation.value());
  Gather& g = stripe.window[segment % start->window];
  if (g.headers == 0 && !open(g, h, now)) return;
  g.headers++;
  if (!aggregation::agree(g.reference, h) && state == State::kRunning) {
    state = State::kDisagreeing;
    disagree_stripe = i;
    disagree_segment = segment;
    resolve_at = now + kJudgeAfter;
  }
  if (state == State::kDisagreeing) {  // nothing is summed any more
    if (i == disagree_stripe && segment == disagree_segment && g.headers == seats.size()) judge(now);
    return;
  }
  if (g.shape.contributes(s.rank)) contribute(g, i, segment, memory.payload(seat, i, segment));
  if (g.headers == seats.size() && g.hold) sum_held(g, i, segment);
}

// For the segment that its first header describes. False: there is no memory, which has failed the group.
bool Hub::Impl::open(Gather& g, const SegmentHeader& h, Time now) {
  const auto op = static_cast<aggregation::ReduceOp>(h.op);
  g = {};
  g.reference = h;
  g.shape = aggregation::shape(h, config.join.world);
  g.since = now;
  if (!aggregation::reduces(g.shape.collective) || g.shape.length == 0) return true;
  g.reducer = aggregation::Reducer::get(g.shape.type, op, g.shape.wire);
  g.wide = g.shape.partial_is_wide();
  g.hold = (h.flags & aggregation::kFlagDeterministic) != 0 && aggregation::order_matters(g.shape.type, op);
  if (g.hold) g.messages = static_cast<uint32_t>(subtrees.size());
  return !g.wide || make_wide(g.messages, now);
}

// Room for sums in floats, each of a whole segment, for so many messages in each place of the windows.
bool Hub::Impl::make_wide(uint32_t sums, Time now) {
  Wide& w = wides[sums > 1];
  if (!w.floats.empty()) return true;
  try {
    w.floats.resize(memory.layout().places() * sums * start->segment_bytes);
    w.region = up.register_memory(w.floats.data(), w.floats.size() * sizeof(float), Access::kSend);
    return true;
  } catch (const std::bad_alloc&) {
    fail(Code::kNoMemory, {}, config.host_name + " has no memory left for the sums of its ranks", now);
  } catch (const Error& e) {
    fail(Code::kNoMemory, {}, e.what(), now);
  }
  return false;
}

float* Hub::Impl::wide_sum(const Gather& g, uint8_t stripe, uint64_t segment, uint32_t message) {
  const size_t place = size_t{stripe} * start->window + segment % start->window;
  return wides[g.messages > 1].floats.data() + (place * g.messages + message) * start->segment_bytes;
}

// The first contribution is kept where its rank has put it, the others are added into it.
void Hub::Impl::contribute(Gather& g, uint8_t stripe, uint64_t segment, uint8_t* payload) {
  const uint32_t bytes = g.shape.payload;
  const bool first = g.contributions++ == 0;
  if (g.hold) return;
  if (!g.wide && first)
    g.sum = payload;
  else if (!g.wide)
    g.reducer.accumulate(g.sum, payload, bytes);
  else if (first)
    g.reducer.widen(wide_sum(g, stripe, segment, 0), payload, bytes);
  else
    g.reducer.accumulate_wide(wide_sum(g, stripe, segment, 0), payload, bytes);
}

// In the canonical order of ranks: one sum for each subtree.
void Hub::Impl::sum_held(const Gather& g, uint8_t stripe, uint64_t segment) {
  for (uint32_t k = 0; k < g.messages; k++) {
    if (g.wide)
      sum_wide(g, stripe, segment, subtrees[k], wide_sum(g, stripe, segment, k), 0);
    else
      sum_in_place(g, stripe, segment, subtrees[k]);
  }
}

void Hub::Impl::sum_in_place(const Gather& g, uint8_t stripe, uint64_t segment, const RankRange& range) {
  if (range.count == 1) return;
  const uint32_t left = aggregation::left_of(range.count);
  const auto middle = static_cast<uint16_t>(range.first + left);
  sum_in_place(g, stripe, segment, {range.first, left});
  sum_in_place(g, stripe, segment, {middle, range.count - left});
  g.reducer.accumulate(payload_of(range.first, stripe, segment), payload_of(middle, stripe, segment),
                       g.shape.payload);
}

void Hub::Impl::sum_wide(const Gather& g, uint8_t stripe, uint64_t segment, const RankRange& range, float* to,
                         size_t level) {
  const uint32_t bytes = g.shape.payload;
  if (range.count == 1) return g.reducer.widen(to, payload_of(range.first, stripe, segment), bytes);
  const uint32_t left = aggregation::left_of(range.count);
  const RankRange right{static_cast<uint16_t>(range.first + left), range.count - left};
  sum_wide(g, stripe, segment, {range.first, left}, to, level);
  if (right.count == 1) return g.reducer.accumulate_wide(to, payload_of(right.first, stripe, segment), bytes);
  if (scratch.size() <= level) scratch.resize(level + 1);
  scratch[level].resize(start->segment_bytes);
  sum_wide(g, stripe, segment, right, scratch[level].data(), level + 1);
  g.reducer.combine_wide(to, scratch[level].data(), aggregation::wide_elements(g.shape.wire, bytes));
}

// Hands up what is complete, in order, while the transport takes it.
void Hub::Impl::post(Stripe& stripe, Time now) {
  while (true) {
    Gather& g = stripe.window[stripe.posted % start->window];
    if (g.headers != seats.size()) return;
    if (root) {
      finish(stripe, g);
      g.headers = 0;
      stripe.posted++;
      publish(stripe);
      continue;
    }
    try {
      for (; g.posted < g.messages; g.posted++)
        if (!post_message(stripe, g)) return;
    } catch (const Error& e) {
      return fail(Code::kMemberLost, {config.join.rank}, e.what(), now);
    }
    g.headers = 0;
    stripe.posted++;
  }
}

bool Hub::Impl::post_message(Stripe& stripe, const Gather& g) {
  const uint8_t i = index(stripe);
  const uint64_t segment = stripe.posted;
  const bool contributes = g.shape.contributes(ranks);
  const auto hull = g.shape.receives(ranks);
  SegmentHeader h = g.reference;
  h.flags = static_cast<uint8_t>((h.flags & ~aggregation::kFlagsOfMember) |
                                 (contributes ? 0 : aggregation::kFlagHeaderOnly) |
                                 (g.wide ? aggregation::kFlagWide : 0));
  h.rank = g.messages > 1 ? subtrees[g.posted].first : ranks.first();
  h.payload_bytes = contributes ? g.shape.partial_bytes() : 0;
  h.result_address =
      hull.bytes() != 0 ? reinterpret_cast<uintptr_t>(memory.result(i, segment)) + hull.begin : 0;
  h.result_rkey = hull.bytes() != 0 ? results_region.rkey : 0;
  const uint8_t* payload = nullptr;
  if (g.wide)
    payload = reinterpret_cast<const uint8_t*>(wide_sum(g, i, segment, g.posted));
  else if (contributes)
    payload = g.hold ? payload_of(subtrees[g.posted].first, i, segment) : g.sum;
  return up.post_segment(stripe.link, segment, h, {payload, h.payload_bytes.value()},
                         g.wide ? wides[g.messages > 1].region : contributions_region);
}

void Hub::Impl::result(Stripe& stripe, uint32_t immediate, Time now) {
  if (!running()) return;
  if (stripe.results >= stripe.posted || immediate != aggregation::result_immediate(stripe.results))
    return fail(Code::kBreach, {},
                "a result came out of order (immediate " + std::to_string(immediate) + ", expected " +
                    std::to_string(stripe.results & 0xFFFFFF) + ")",
                now);
  publish(stripe);
}

void Hub::Impl::publish(Stripe& stripe) {
  memory.hub().counts[index(stripe)].publish(++stripe.results);
  published = true;
}

// The result of a segment to which all ranks of the group have contributed here.
void Hub::Impl::finish(Stripe& stripe, const Gather& g) {
  const uint32_t bytes = g.shape.payload;
  if (bytes == 0) return;
  const uint64_t segment = stripe.posted;
  uint8_t* result = memory.result(index(stripe), segment);
  if (g.wide) {
    float* sum = wide_sum(g, index(stripe), segment, 0);
    g.reducer.finish_wide(sum, bytes, config.join.world);
    return g.reducer.narrow(result, sum, bytes);
  }
  uint8_t* sum = g.hold ? payload_of(0, index(stripe), segment) : g.sum;
  if (g.reducer) g.reducer.finish(sum, bytes, config.join.world);
  std::memcpy(result, sum, bytes);
}

void Hub::Impl::judge(Time now) {
  std::vector<std::pair<uint16_t, SegmentHeader>> headers;
  for (const uint16_t rank : ranks.ranks())
    if (seats[seat_of[rank]].taken[disagree_stripe] > disagree_segment)
      headers.emplace_back(rank, memory.header(seat_of[rank], disagree_stripe, disagree_segment));
  aggregation::Disagreement d = aggregation::judge(headers);
  fail(Code::kMismatch, std::move(d.ranks), d.text, now);
}

// Others have posted a segment that this rank has not.
bool Hub::Impl::waited_for(const Seat& seat) const {
  return std::any_of(stripes.begin(), stripes.end(), [&](const Stripe& stripe) {
    const Gather& g = stripe.window[stripe.posted % start->window];
    return g.headers != 0 && g.headers != seats.size() && seat.taken[index(stripe)] <= stripe.posted;
  });
}

// Asks those that are waited for whether they are alive, and gives up on who does not answer.
void Hub::Impl::probe_silent(Time now) {
  for (uint32_t seat = 0; seat < seats.size() && state == State::kRunning; seat++) {
    Seat& s = seats[seat];
    if (!s.present || !waited_for(s)) {
      s.probed = kNever;
      continue;
    }
    if (s.probed == kNever || (s.heard >= s.probed && now - s.heard >= kLocalProbeAfter)) {
      s.probed = now;
      LocalMessage probe;
      probe.kind = LocalMessage::Kind::kProbe;
      tell(seat, probe);
    } else if (s.heard < s.probed && now - s.probed >= kLocalPeerDead) {
      gone(seat, "has not answered for 5 s: is its process stopped?", false, now);
    }
  }
}

void Hub::Impl::look_for_late(Time now) {
  look_at = now + kLookEvery;
  for (const Stripe& stripe : stripes) {
    const Gather& g = stripe.window[stripe.posted % start->window];
    if (g.headers == 0 || g.headers == seats.size() || now - g.since < config.operation_timeout) continue;
    std::vector<uint16_t> late;
    std::string names;
    for (const Seat& s : seats) {
      if (s.taken[index(stripe)] > stripe.posted) continue;
      if (late.size() < 16) names += (late.empty() ? "" : ", ") + describe(s);
      late.push_back(s.rank);
    }
    return fail(
        Code::kLate, late,
        "operation " + std::to_string(g.reference.operation.value()) + " timed out waiting for " + names,
        now);
  }
}

}  // namespace millrace::host
