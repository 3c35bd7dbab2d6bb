// What the pipeline counts, by name. A frame's fate is a name in one table, and a drop's name is its
// counter's. Single writer: the worker.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "roce/packet.h"

namespace millrace::switching {

// Every frame that enters the pipeline, from a port, the engine or the router, ends as exactly one of these.
#define MILLRACE_FATES(X)                                                                                \
  X(kForwarded, "forwarded")            /* to the one port that its destination was learned on */        \
  X(kFlooded, "flooded")                /* to every other port */                                        \
  X(kToEngine, "to_engine")             /* RoCE for us, its ICRC right: absorbed */                      \
  X(kToStore, "to_store")               /* of a connection to a lender of memory: absorbed */            \
  X(kRouted, "routed")                  /* by its IP address, one hop less, to the next hop's MAC */     \
  X(kNeighbourHeld, "neighbour_held")   /* taken until its next hop has answered: a router frame then */ \
  X(kNeighbourHeard, "neighbour_heard") /* an ARP reply or neighbour advertisement to us: absorbed */    \
  X(kPauseHeard, "pause_heard")         /* a PFC frame, obeyed where PFC is on: absorbed */              \
  X(kArpReplied, "arp_replied")         /* this and the next two: turned into the answer */              \
  X(kNdReplied, "nd_replied")                                                                            \
  X(kEchoReplied, "echo_replied")                                                                        \
  /* drops */                                                                                            \
  X(kL2Truncated, "l2_truncated")             /* shorter than an Ethernet header */                      \
  X(kL2SourceInvalid, "l2_source_invalid")    /* a group address, or zero */                             \
  X(kL2SourceOurs, "l2_source_ours")          /* our own MAC as source: a loop or a forgery */           \
  X(kReservedMulticast, "reserved_multicast") /* 01-80-C2-00-00-0x stays on its link (802.1D 7.12.6) */  \
  X(kHairpin, "hairpin")                      /* would leave by the port that it came in on */           \
  X(kNoEgress, "no_egress")                   /* to be flooded, but there is no other port */            \
  X(kFloodLimited, "flood_limited")                                                                      \
  X(kNotForUs, "not_for_us")               /* to our MAC, but not to an address of ours */               \
  X(kUnsupported, "unsupported")           /* to our address, but no protocol that we speak */           \
  X(kIpSourceInvalid, "ip_source_invalid") /* a group address, zero, ours; routed: link-local, too */    \
  X(kIpHeaderInvalid, "ip_header_invalid") /* this and those down to neighbour_unresolved: not routed */ \
  X(kIpChecksum, "ip_checksum")                                                                          \
  X(kIpDestinationInvalid, "ip_destination_invalid") /* broadcast, loopback, link-local */               \
  X(kTtlExpired, "ttl_expired")                                                                          \
  X(kNoRoute, "no_route")                                                                                \
  X(kNeighbourUnresolved, "neighbour_unresolved") /* the next hop does not answer, or too many wait */   \
  X(kNotBridged, "not_bridged")                   /* on a routed port, but not to us */                  \
  X(kTagOnRoutedPort, "tag_on_routed_port")       /* a VLAN's frame on a port that is in none */         \
  X(kIcmpChecksum, "icmp_checksum")                                                                      \
  X(kPoolEmpty, "pool_empty")     /* no buffer for the copy or answer */                                 \
  X(kRoceInvalid, "roce_invalid") /* to our MAC; roce_drops says why */

enum class Fate : uint8_t {
#define X(id, text) id,
  MILLRACE_FATES(X)
#undef X
      kCount
};
inline constexpr size_t kFates = static_cast<size_t>(Fate::kCount);
inline constexpr std::array<std::string_view, kFates> kFateNames = {
#define X(id, text) text,
    MILLRACE_FATES(X)
#undef X
};

// Of the table of neighbours.
#define MILLRACE_NEIGHBOUR_COUNTERS(X)                                            \
  X(arp_requests_sent)                                                            \
  X(solicitations_sent)                                                           \
  X(asks_not_built) /* the frame pool was empty */                                \
  X(learned)        /* neighbours whose address became known */                   \
  X(changed)        /* to another MAC address */                                  \
  X(change_refused) /* somebody else answered within a second */                  \
  X(lost)           /* did not answer any more */                                 \
  X(unanswered)     /* never answered */                                          \
  X(full)           /* no place in the table, or too many unanswered questions */ \
  X(hold_refused)   /* too many frames wait already */
// What the router counts beside the fates of frames.
#define MILLRACE_ROUTER_COUNTERS(X)                                  \
  X(icmp_errors_sent)    /* time exceeded and unreachable */         \
  X(icmp_errors_limited) /* not sent: too many, or no buffer */      \
  X(next_hops_avoided)   /* frames whose next hop did not answer and \
                            that took another of their route */      \
  MILLRACE_NEIGHBOUR_COUNTERS(X)
struct RouterCounters {
#define X(n) uint64_t n = 0;
  MILLRACE_ROUTER_COUNTERS(X)
#undef X
};

struct PipelineCounters {
  uint64_t received = 0;             // frames that came from ports
  uint64_t from_engine = 0;          // frames that the engine made
  uint64_t from_router = 0;          // frames that the IP side made, and those that it held
  uint64_t emitted = 0;              // frames that left for ports, or for their traffic manager
  uint64_t flood_copies = 0;         // emitted in addition to the original, one per further port
  uint64_t flood_copies_failed = 0;  // the pool was empty: that port did not get its copy
  uint64_t l2_learned = 0;
  uint64_t l2_moved = 0;
  uint64_t l2_move_refused = 0;                 // sources alive on another port: not learned on this one
  uint64_t l2_full = 0;                         // sources not learned
  std::array<uint64_t, kFates> fates{};         // of received frames
  std::array<uint64_t, kFates> engine_fates{};  // of the engine's
  std::array<uint64_t, kFates> router_fates{};
  std::array<uint64_t, static_cast<size_t>(roce::ParseVerdict::kCount)> roce_drops{};  // by verdict

  uint64_t fate(Fate f) const { return fates[static_cast<size_t>(f)]; }
  uint64_t roce_drop(roce::ParseVerdict v) const { return roce_drops[static_cast<size_t>(v)]; }
};

}  // namespace millrace::switching
