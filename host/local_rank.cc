#include "host/local_rank.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace millrace::host {

using aggregation::SegmentHeader;
using Kind = LocalMessage::Kind;

LinkId LocalRank::connect(const ConnectRequest& request) {
  const uint8_t stripe = request.join.stripe;
  links_[stripe].open = true;
  world_ = request.join.world;
  if (reply_) {
    Completion c{Completion::Kind::kConnected};
    c.link = stripe + 1u;
    c.join_reply = *reply_;
    tell(std::move(c));
  }
  return stripe + 1u;
}

void LocalRank::tell(Completion completion) { pending_.push_back(std::move(completion)); }

void LocalRank::tell_open(Completion completion) {
  for (uint32_t i = 0; i < links_.size(); i++) {
    if (!links_[i].open) continue;
    completion.link = i + 1;
    tell(completion);
  }
}

void LocalRank::handle(LocalMessage m, Time now) {
  heard_ = now;
  switch (m.kind) {
    case Kind::kConnected: {
      reply_ = m.join_reply;
      Completion c{Completion::Kind::kConnected};
      c.join_reply = m.join_reply;
      return tell_open(std::move(c));
    }
    case Kind::kTerminal: {
      Completion c{Completion::Kind::kMessage};
      c.message = std::move(m.bytes);
      return tell_open(std::move(c));
    }
    case Kind::kLinkError: {
      Completion c{Completion::Kind::kError};
      c.error = m.error;
      c.code = m.code;
      c.text = m.text;
      tell_open(std::move(c));
      for (Link& l : links_) l.open = false;
      return;
    }
    case Kind::kProbe: {
      LocalMessage alive;
      alive.kind = Kind::kAlive;
      return say(alive);
    }
    case Kind::kGoodbye:
      hub_left_ = true;
      if (outstanding()) end("has left the group");
      return;
    default:
      return;  // a doorbell, an answer
  }
}

void LocalRank::start(const LocalMessage& m, const LocalView& memory, Time now) {
  heard_ = now;
  const LocalLayout& l = m.layout;
  if (view_ || l.stripes == 0 || l.stripes > links_.size() || l.window == 0 || m.seat >= l.ranks)
    return start_failed("this host's leading rank sent a START that makes no sense");
  view_ = memory;
  seat_ = m.seat;
  for (uint32_t i = 0; i < l.stripes; i++) links_[i].targets.resize(l.window);
  Completion c{Completion::Kind::kMessage};
  c.message = m.bytes;
  tell_open(std::move(c));
}

void LocalRank::start_failed(const std::string& why) {
  Completion c{Completion::Kind::kError};
  c.error = LinkError::kBroken;
  c.text = why;
  tell_open(std::move(c));
}

// As a switch would say it.
void LocalRank::end(const std::string& how) {
  if (std::exchange(ended_, true)) return;
  aggregation::Terminal t;
  t.code = aggregation::Code::kMemberLost;
  t.ranks = {leader_};
  t.text = "rank " + std::to_string(leader_) + ", which combines for the ranks of this host (process " +
           std::to_string(process_) + "), " + how;
  Completion c{Completion::Kind::kMessage};
  c.message = encode(t);
  tell_open(std::move(c));
}

void LocalRank::check_hub(Time now) {
  if (!outstanding() || results_waiting()) {
    heard_ = now;
    probed_ = kNever;
  } else if (probed_ == kNever || heard_ >= probed_) {
    if (now - heard_ < kLocalProbeAfter) return;
    probed_ = now;
    LocalMessage probe;
    probe.kind = Kind::kProbe;
    say(probe);
  } else if (now - probed_ >= kLocalPeerDead) {
    end("has not answered for 5 s: is its process stopped?");
  }
}

Time LocalRank::next_deadline() const {
  if (ended_ || said_goodbye_ || !outstanding()) return kNever;
  return probed_ == kNever || heard_ >= probed_ ? heard_ + kLocalProbeAfter : probed_ + kLocalPeerDead;
}

bool LocalRank::outstanding() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const Link& l) { return l.open && l.posted != l.results; });
}

bool LocalRank::post_segment(LinkId id, uint64_t segment, const SegmentHeader& header,
                             std::span<const uint8_t> payload, const MemoryRegion&) {
  Link& link = links_[id - 1];
  if (!link.open || !view_ || ended_ || link.posted - link.results >= view_.layout().window) return false;
  assert(segment == link.posted && payload.size() <= view_.layout().segment_bytes);
  if (hub_left_) {
    end("has left the group");
    return false;
  }
  view_.header(seat_, id - 1, segment) = header;
  if (!payload.empty()) std::memcpy(view_.payload(seat_, id - 1, segment), payload.data(), payload.size());
  const auto part = aggregation::shape(header, world_).receives(header.rank.value());
  link.targets[segment % view_.layout().window] = {
      reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(header.result_address.value())), part.begin,
      part.bytes()};
  view_.rank(seat_).counts[id - 1].publish(++link.posted);
  if (view_.hub().sleeping.exchange(0) != 0) {
    LocalMessage doorbell;
    doorbell.kind = Kind::kDoorbell;
    say(doorbell);
  }
  Completion c{Completion::Kind::kSent};
  c.link = id;
  c.segment = segment;
  tell(std::move(c));
  return true;
}

void LocalRank::take_results(std::vector<Completion>& completions) {
  if (!view_) return;
  const uint32_t window = view_.layout().window;
  for (uint32_t i = 0; i < view_.layout().stripes; i++) {
    Link& link = links_[i];
    for (const uint64_t there = view_.hub().counts[i].read(); link.open && link.results < there;) {
      // A hub that counts beyond what was posted is broken; the communicator finds the result out of order.
      if (link.results < link.posted) {
        const Target& t = link.targets[link.results % window];
        if (t.bytes != 0) std::memcpy(t.address, view_.result(i, link.results) + t.begin, t.bytes);
      }
      Completion c{Completion::Kind::kResult};
      c.link = i + 1;
      c.immediate = aggregation::result_immediate(link.results++);
      completions.push_back(std::move(c));
      if (link.results > link.posted) return;
    }
  }
}

// What was published before the hub's last word counts.
void LocalRank::poll(std::vector<Completion>& completions) {
  take_results(completions);
  completions.insert(completions.end(), std::make_move_iterator(pending_.begin()),
                     std::make_move_iterator(pending_.end()));
  pending_.clear();
}

// Only take_results() writes to memory of operations, and it leaves closed links alone.
void LocalRank::close(LinkId id) {
  links_[id - 1].open = false;
  Completion c{Completion::Kind::kClosed};
  c.link = id;
  tell(std::move(c));
  if (std::any_of(links_.begin(), links_.end(), [](const Link& l) { return l.open; })) return;
  if (std::exchange(said_goodbye_, true)) return;
  LocalMessage goodbye;
  goodbye.kind = Kind::kGoodbye;
  say(goodbye);
  hang_up();
}

bool LocalRank::results_waiting() const {
  if (!view_) return false;
  for (uint32_t i = 0; i < view_.layout().stripes; i++)
    if (links_[i].open && view_.hub().counts[i].read() != links_[i].results) return true;
  return false;
}

}  // namespace millrace::host
