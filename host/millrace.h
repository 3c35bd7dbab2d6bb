/* Millrace: collectives reduced in the network. The one public header of libmillrace, plain C.
 *
 * A process makes one context (a transport with its own progress thread), joins communicators on it, and
 * issues operations, which run without further calls; test or wait tells when an operation is over. All
 * functions may be called from any thread; the operations of one communicator must be issued in the same
 * order by all ranks. Sizes are in bytes unless the name says count. Nothing falls back in silence:
 * mr_request_info() says which path a call took. */
#ifndef MILLRACE_H
#define MILLRACE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mr_status {
  MR_OK = 0,
  MR_IN_PROGRESS = 1,
  MR_ERR_USAGE = 2,       /* the call's arguments are wrong; nothing was done */
  MR_ERR_SYSTEM = 3,      /* the operating system refused something */
  MR_ERR_UNREACHABLE = 4, /* the switch did not answer, or stopped answering */
  MR_ERR_REFUSED = 5,     /* the switch refused the join; the error text is its sentence */
  MR_ERR_MISMATCH = 6,    /* the ranks disagree about an operation */
  MR_ERR_MEMBER_LOST = 7, /* another rank is gone */
  MR_ERR_LATE = 8,        /* another rank did not take part in time */
  MR_ERR_ABORTED = 9,     /* mr_abort() here, or an administrator's abort */
  MR_ERR_PROTOCOL = 10    /* what came back makes no sense: a bug here or there */
} mr_status;

/* The protocol's codes. */
typedef enum mr_type {
  MR_U8 = 1,
  MR_I8,
  MR_I32,
  MR_U32,
  MR_I64,
  MR_U64,
  MR_F16,
  MR_BF16,
  MR_F32,
  MR_F64,
  MR_F8E4M3, /* OCP 8-bit floating point: 4 bits of exponent, no infinities */
  MR_F8E5M2
} mr_type;
/* Which goes with what: MR_AVG is the sum divided by the number of ranks (integers: towards zero, after the
 * sum has wrapped), for every type; bitwise and logical operators are for integers. MR_LAND and MR_LOR give 0
 * or 1 and are reduced as bits, after the host has turned what is not 0 into 1. */
typedef enum mr_op {
  MR_SUM = 1,
  MR_PROD,
  MR_MIN,
  MR_MAX,
  MR_BAND,
  MR_BOR,
  MR_BXOR,
  MR_AVG,
  MR_LAND,
  MR_LOR
} mr_op;
/* In which form elements cross the network in collectives that reduce. */
typedef enum mr_wire {
  MR_WIRE_EXACT = 0, /* as they are */
  MR_WIRE_BFP8 = 1   /* block floating point: blocks of 63 elements that share an exponent, 8 bits each; for
                        f16,   bf16 and f32. The error bound is in aggregation/NUMERICS.md */
} mr_wire;

typedef struct mr_context mr_context;
typedef struct mr_comm mr_comm;
typedef struct mr_memory mr_memory;
typedef struct mr_request mr_request;

typedef struct mr_context_config {
  const char*
      transport;      /* "verbs" (an RDMA NIC's own queue pairs), "soft" (a user-space RoCEv2 endpoint on an
                         AF_PACKET socket), "auto" (verbs where there is a usable device, else soft); NULL: auto */
  const char* device; /* network interface ("eth0") or RDMA device ("mlx5_0"); NULL: the one that routes to
                         the first switch joined */
} mr_context_config;

typedef struct mr_comm_config {
  uint8_t key[16]; /* chosen by the job, the same at all ranks (as an ncclUniqueId is); not a secret */
  int rank, size;
  const char*
      switch_address; /* "10.77.0.100", "fd77::100", either with ":port" or "[..]:port"; default port 18600 */
  int stripes;        /* queue pairs to the switch, 1 … 16; 0: 1 */
  uint32_t tenant;
  const char* secret;     /* the tenant's, or NULL where the switch runs open */
  int connect_timeout_ms; /* until the switch has answered the join; 0: 10,000 */
  int join_timeout_ms;    /* until all ranks are there; 0: 90,000 (the switch's own is 60,000) */
  const char* combine; /* "on": with the other ranks of this user on this host that say so too, through shared
                          memory, so that one contribution crosses the host's link; "off"; "auto": on where a
                          launcher's environment says that several ranks are here (Open MPI, MPICH, Slurm,
                          torchrun); NULL: MILLRACE_COMBINE, else auto */
  int wait; /* 1: where the switch has no memory left, the join waits for it, in turn and as long as the switch's
               join time-out, instead of being refused */
} mr_comm_config;

typedef struct mr_request_info {
  const char* path;   /* "network": reduced by the switch; "shared memory, then network": by this host's ranks
                         first; "local": a communicator of one rank */
  const char* memory; /* "registered": straight from the caller's buffer; "staged": through a copy, and why */
  uint64_t bytes, segments, operation;
} mr_request_info;

typedef struct mr_comm_stats {
  uint64_t packets_sent, packets_received, retransmitted, timeouts, naks_received, rnr_naks_received,
      duplicates_received, out_of_sequence;
  uint64_t cnps_received, cnps_sent; /* of congestion control (DCQCN) */
} mr_comm_stats;

/* What the switch decided when the group started. */
typedef struct mr_comm_info {
  uint32_t group;         /* as millracectl shows it */
  uint32_t path_mtu;      /* bytes of payload per packet */
  uint32_t segment_bytes; /* of an operation in one message */
  uint32_t window;        /* segments outstanding per stripe */
  uint32_t stripes;
  uint32_t combined_ranks; /* of this host, which share its contributions; 0: this rank sends its own */
  int combining_rank;      /* the one of them whose process is connected to the switch; else -1 */
  const char* combining;   /* "off: MILLRACE_COMBINE", "on: asked for"; lives as long as the communicator */
} mr_comm_info;

const char* mr_version(void);
const char* mr_status_text(mr_status status); /* a name such as "member lost" */
/* The sentence for this thread's last failed call without an object of its own to ask (mr_init,
 * mr_comm_create). */
const char* mr_last_error(void);

mr_status mr_init(const mr_context_config* config, mr_context** context); /* config may be NULL */
/* Ends the progress thread. Communicators must have been destroyed (else MR_ERR_USAGE). */
mr_status mr_finalize(mr_context* context);
/* Which transport on what device, and why: "soft on eth0 (RoCE path MTU up to 4096): no RDMA device (asked
 * for auto)". Chosen when the first communicator of more than one rank joins; before, what was asked for. */
const char* mr_transport_name(mr_context* context);

/* Connects, joins and waits until all ranks are there. On failure *comm is NULL and mr_last_error() has the
 * sentence: the switch's own where it refused. */
mr_status mr_comm_create(mr_context* context, const mr_comm_config* config, mr_comm** comm);
/* Leaves the group (DREQ). Requests not yet over end as aborted first; they stay valid until freed. */
mr_status mr_comm_destroy(mr_comm* comm);
/* Ends all of the communicator's operations, here as MR_ERR_ABORTED, elsewhere as MR_ERR_MEMBER_LOST. */
mr_status mr_abort(mr_comm* comm);
/* MR_OK while the communicator can be used, else what ended it; the sentence names ranks. */
mr_status mr_comm_error(mr_comm* comm, const char** text);
/* Of ranks that combine, the network's counts are those of combining_rank. */
mr_status mr_comm_get_stats(mr_comm* comm, mr_comm_stats* stats);
/* All zero for a communicator of one rank that was made without a switch. */
mr_status mr_comm_get_info(mr_comm* comm, mr_comm_info* info);
/* Of the operations issued from now on; all ranks alike (else MR_ERR_MISMATCH). Deterministic: floating-point
 * results are bitwise equal from run to run, in whatever order contributions come; it costs the switch memory
 * for every rank's contribution instead of one. Off at first. */
mr_status mr_comm_set_deterministic(mr_comm* comm, int on);
/* MR_WIRE_EXACT at first. It applies to collectives that reduce; broadcast and all-gather are always exact.
 * With another wire form the data is staged through the host, and mr_request_info says so. */
mr_status mr_comm_set_wire(mr_comm* comm, mr_wire wire);
int mr_comm_rank(const mr_comm* comm);
int mr_comm_size(const mr_comm* comm);

/* Registration is optional: it saves nothing with the soft transport, and time with verbs, which otherwise
 * registers what an operation meets and keeps that while the memory lasts. A buffer within one registration
 * uses it. */
mr_status mr_register(mr_context* context, void* address, size_t bytes, mr_memory** memory);
mr_status mr_deregister(mr_memory* memory);

/* --- Collectives ---
 *
 * `count` is in elements. Buffers belong to the library until the request is over. On success *request must
 * be freed by mr_wait() or mr_request_free(). Send and receive buffers are disjoint or, in place, as each
 * says; other overlaps are MR_ERR_USAGE. A buffer that a rank does not need may be NULL. */

/* recv[i] = op over ranks of send[i], i < count, at every rank. In place: send == recv. */
mr_status mr_all_reduce(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                        mr_request** request);
/* The same at `root` only; the other ranks' recv is not used. In place (at the root): send == recv. */
mr_status mr_reduce(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                    int root, mr_request** request);
/* recv[i] = the root's send[i] at every rank; the other ranks' send is not used. In place (at the root):
 * send == recv. */
mr_status mr_broadcast(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, int root,
                       mr_request** request);
/* recv[i] = op over ranks of send[rank × recv_count + i], i < recv_count: send has size × recv_count
 * elements. In place: recv == send + rank × recv_count. */
mr_status mr_reduce_scatter(mr_comm* comm, const void* send, void* recv, size_t recv_count, mr_type type,
                            mr_op op, mr_request** request);
/* recv[r × send_count + i] = rank r's send[i]: recv has size × send_count elements. In place: send == recv +
 * rank × send_count. */
mr_status mr_all_gather(mr_comm* comm, const void* send, void* recv, size_t send_count, mr_type type,
                        mr_request** request);
mr_status mr_barrier(mr_comm* comm, mr_request** request);
/* MR_IN_PROGRESS, MR_OK or the error; does not free. */
mr_status mr_test(mr_request* request);
/* Blocks until over, frees the request; the operation's status. text (may be NULL) stays valid until this
 * thread's next call. */
mr_status mr_wait(mr_request* request, const char** text);
void mr_request_free(mr_request* request); /* of a request that is over */
mr_status mr_request_get_info(const mr_request* request, mr_request_info* info);
const char* mr_request_error(const mr_request* request);

/* Blocking forms. */
mr_status mr_all_reduce_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type,
                             mr_op op);
mr_status mr_reduce_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                         int root);
mr_status mr_broadcast_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type,
                            int root);
mr_status mr_reduce_scatter_wait(mr_comm* comm, const void* send, void* recv, size_t recv_count, mr_type type,
                                 mr_op op);
mr_status mr_all_gather_wait(mr_comm* comm, const void* send, void* recv, size_t send_count, mr_type type);
mr_status mr_barrier_wait(mr_comm* comm);

#ifdef __cplusplus
}
#endif
#endif
