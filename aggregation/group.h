// A group as the engine sees it: members, their queue pairs (one per stripe), the stripes' slots, and its
// life: joining, running, failed. Plain state; engine*.cc acts on it.
#pragma once

#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "aggregation/engine.h"
#include "aggregation/slots.h"
#include "aggregation/tree.h"
#include "roce/queue_pair.h"

namespace millrace::aggregation {

struct Group;
struct Member;

// One queue pair: a member's connection for one stripe.
struct Link {
  Link(const roce::QueuePairConfig& config, Time now) : qp(config, now) {}

  roce::QueuePair qp;
  roce::CmId cm;
  Group* group = nullptr;
  Member* member = nullptr;
  uint8_t stripe = 0;
  bool established = false;
  bool disconnected = false;  // by DREQ, or given up
  bool queued = false;        // in the engine's list of links with something to send
  // The segment being received: its counter in the stripe, the next packet's index, what is still to come.
  uint64_t segment = 0;
  uint32_t packet = 0;
  uint32_t payload = 0;
  bool absorb = false;           // this message is dropped (mismatch), though acknowledged
  uint32_t part = 0, parts = 1;  // of a child: which of its partials of the segment is being received
  uint32_t chunk = 0;            // of a child: the first chunk that it has not contributed all of
  bool control = false;          // this message is no segment
  std::vector<uint8_t> message;  // of those, what has come
  uint64_t results = 0;          // segments whose result has been handed to the requester
};

struct Member {
  enum class Kind : uint8_t { kHost, kChild, kParent };
  Kind kind = Kind::kHost;
  uint32_t seat = 0;  // its place in Group::members; a host's is its rank
  uint16_t rank = 0;  // a host's
  RankSet ranks;      // that it stands for; of a host that one
  uint64_t nonce = 0;
  IpAddress address;
  std::vector<std::unique_ptr<Link>> links;  // by stripe; nullptr until joined
  bool here = false;                         // all of them, and established
  Time arrived{};                            // since when
  bool left = false;
  // Of the group's partials in deterministic operations, this member's, from when the group starts.
  uint32_t first_partial = 0;
  std::vector<RankRange> partials;

  bool host() const { return kind == Kind::kHost; }
};

// What a partial of a deterministic operation is of, and where it is kept.
struct Partial {
  RankRange node;
  uint32_t index = 0;
};

// The way to the parent, while a group is there.
struct Uplink {
  struct Attempt {
    roce::CmId cm{};  // 0: none is under way
    Qpn qpn;
    Psn first_psn;
    Time again{};  // when to try next
  };
  Member member;                  // the parent; its links are our queue pairs to it
  std::vector<Attempt> attempts;  // by stripe
  uint32_t group = 0;             // its ID of the group
  uint32_t rkey = 0;              // the cookie that its results must have
  RankSet reported;
  std::optional<JoinReject> refusal;
  Time refused_at{};
  std::vector<RankRange> subtrees;           // what we send of a deterministic segment
  std::list<std::vector<uint8_t>> messages;  // in flight; kept until the group is gone
};

struct Stripe {
  explicit Stripe(SlotRing ring) : slots(std::move(ring)) {}
  SlotRing slots;
  std::optional<PartialStore> store;  // of a group that is part of a tree
};

struct GroupKey {
  uint32_t tenant = 0;
  std::array<uint8_t, 16> key{};
  friend auto operator<=>(const GroupKey&, const GroupKey&) = default;
};

struct Group {
  enum class State : uint8_t { kJoining, kRunning, kDisagreeing, kFailed };
  uint32_t id = 0;
  GroupKey key;
  uint16_t world = 0;
  uint8_t stripes = 0;
  State state = State::kJoining;
  bool waits = false;          // for memory at the parent
  bool in_table = true;        // joins still find it
  Member* departed = nullptr;  // the first that has left, by DREQ
  uint32_t links = 0;          // there
  uint32_t seated = 0;         // members there
  RankSet here;                // ranks of members that are here
  uint16_t window = 0;         // the least of ours and our children's; once started, the group's
  uint32_t segment_bytes = 0;  // likewise
  Time created{};
  // By seat: hosts by rank, nullptr until joined, then children.
  std::vector<std::unique_ptr<Member>> members;
  std::unique_ptr<Uplink> up;     // to the parent, unless we are the root
  bool tree = false;              // from START on: has children or a parent
  std::vector<Partial> partials;  // of deterministic operations, by first rank
  std::vector<Stripe> stripe;
  uint64_t memory = 0;
  uint64_t operation = 0;
  std::vector<uint8_t> start, terminal, terminal_up;  // messages in flight; kept until the group is gone
  std::string reason;
  Code code{};               // of the failure
  Time resolve_at = kNever;  // kDisagreeing: when to judge with the headers that are there
  uint8_t disagree_stripe = 0;
  uint64_t disagree_segment = 0;
  Time gone_at = kNever;  // kFailed: when to give up on what is not acknowledged

  // Every queue pair, those to the parent included.
  template <typename Do>
  void each_link(Do&& act) {
    for (auto& m : members)
      if (m)
        for (auto& l : m->links)
          if (l) act(*l);
    if (up)
      for (auto& l : up->member.links)
        if (l) act(*l);
  }
};

}  // namespace millrace::aggregation
