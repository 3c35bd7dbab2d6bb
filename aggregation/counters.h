// What the aggregation engine counts, by name; a drop's name is its counter's. Single writer: the worker.
#pragma once

#include <cstdint>

namespace millrace::aggregation {

#define MILLRACE_AGGREGATION_COUNTERS(X)                                                                   \
  /* drops */                                                                                              \
  X(unknown_qp)         /* no such queue pair, or one that is gone */                                      \
  X(qp_source_mismatch) /* a live queue pair, but from a foreign address */                                \
  X(pkey_mismatch)                                                                                         \
  X(bad_opcode)        /* no opcode of our service */                                                      \
  X(duplicate_request) /* acknowledged again, not executed */                                              \
  X(out_of_sequence)   /* a gap: NAKed once */                                                             \
  X(stale_ack)                                                                                             \
  X(group_failed) /* reached a queue pair whose group has failed */                                        \
  /* the transport */                                                                                      \
  X(packets)                                                                                               \
  X(acks_sent)                                                                                             \
  X(naks_sent)                                                                                             \
  X(rnr_naks_sent)                                                                                         \
  X(acks_received)                                                                                         \
  X(naks_received)                                                                                         \
  X(rnr_naks_received)                                                                                     \
  X(retransmitted_packets)                                                                                 \
  X(timeouts)                                                                                              \
  X(tail_probes)                                                                                           \
  X(cnps_received)                                                                                         \
  X(cnps_sent) X(probes_sent)                                                                              \
      X(results_not_built) /* the frame pool was empty: built again later */ /* the protocol */            \
      X(contributions) X(contribution_bytes) X(chunks_reduced) X(results_sent) X(result_bytes) X(segments) \
          X(window_breaches) X(groups_formed) X(groups_ended) X(groups_failed) X(joins_refused)            \
              X(partials_sent) X(results_received) /* to and from the parent */                            \
      X(stragglers) X(terminals_sent)                                                                      \
          X(members_evicted) /* from groups that had not started: gone, or a late copy of a REQ */

struct Counters {
#define X(n) uint64_t n = 0;
  MILLRACE_AGGREGATION_COUNTERS(X)
#undef X
};

}  // namespace millrace::aggregation
