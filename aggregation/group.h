// A group as the engine sees it: members, their queue pairs (one per stripe), the stripes' slots, and its
// life: joining, running, failed. Plain state; engine*.cc acts on it.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "aggregation/engine.h"
#include "aggregation/slots.h"
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
  bool absorb = false;   // this message is dropped (mismatch), though acknowledged
  uint64_t results = 0;  // segments whose result has been handed to the requester
  Time cnp_sent{-1};
};

struct Member {
  uint16_t rank = 0;
  uint64_t nonce = 0;
  IpAddress address;
  std::vector<std::unique_ptr<Link>> links;  // by stripe; nullptr until joined
  bool left = false;
};

struct Stripe {
  explicit Stripe(SlotRing ring) : slots(std::move(ring)) {}
  SlotRing slots;
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
  bool in_table = true;        // joins still find it
  Member* departed = nullptr;  // the first that has left, by DREQ
  uint32_t joined = 0;         // links there
  Time created{};
  std::vector<std::unique_ptr<Member>> members;  // by rank; nullptr until joined
  std::vector<Stripe> stripe;
  uint64_t memory = 0;
  uint64_t operation = 0;
  std::vector<uint8_t> start, terminal;  // messages in flight; kept until the group is gone
  std::string reason;
  Code code{};               // of the failure
  Time resolve_at = kNever;  // kDisagreeing: when to judge with the headers that are there
  uint8_t disagree_stripe = 0;
  uint64_t disagree_segment = 0;
  Time gone_at = kNever;  // kFailed: when to give up on what is not acknowledged
};

}  // namespace millrace::aggregation
