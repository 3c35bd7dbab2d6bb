#include "host/verbs_link.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "host/socket_address.h"
#include "roce/error.h"
#include "roce/headers.h"

namespace millrace::host {

using aggregation::SegmentHeader;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// 4.096 µs × 2^14 = 67 ms; librdmacm's own 2.1 s would make each tail loss a stall.
constexpr uint8_t kAckTimeout = 14;
constexpr uint8_t kRetryCount = 7;
constexpr uint8_t kRnrRetryForEver = 7;  // back-pressure must not kill a queue pair
constexpr uint8_t kMinRnrTimer = 12;     // 0.64 ms; 0 would mean 655 ms
constexpr Time kProbeAfter = seconds(1);
// Not all devices give up by themselves: Linux' rxe takes a retry count of 7 for "for ever".
constexpr Time kPeerDead = seconds(5);
constexpr int kExtensionsMax = 6;
constexpr int kResolveMs = 250;
constexpr Time kResolveAgain = milliseconds(50);
// Flushes come within a moment; a queue pair that is destroyed touches nothing either.
constexpr Time kDrainPatience = milliseconds(500);
constexpr Time kGoodbyePatience = milliseconds(1500);

std::string system_text(int error) { return std::system_category().message(error); }
std::string milliseconds_text(Time t) {
  return std::to_string(std::chrono::duration_cast<milliseconds>(t).count()) + " ms";
}

// The names of rxe's counters, and of mlx5's where they differ; others have other ones or none.
LinkStats device_counts(const VerbsDevice& d) {
  LinkStats s;
  s.packets_sent = d.counter("sent_pkts") + d.counter("port_xmit_packets");
  s.packets_received = d.counter("rcvd_pkts") + d.counter("port_rcv_packets");
  s.retransmitted = d.counter("completer_retry_err");
  s.timeouts = d.counter("local_ack_timeout_err");
  s.naks_received = d.counter("rcvd_seq_err") + d.counter("packet_seq_err");
  s.rnr_naks_received = d.counter("rcvd_rnr_err") + d.counter("rnr_nak_retry_err");
  s.duplicates_received = d.counter("duplicate_request");
  s.out_of_sequence = d.counter("out_of_seq_request") + d.counter("out_of_sequence");
  s.cnps_received = d.counter("rp_cnp_handled");
  s.cnps_sent = d.counter("np_cnp_sent");
  return s;
}

}  // namespace

VerbsLink::VerbsLink(LinkId id, const ConnectRequest& request, VerbsDevice& device,
                     rdma_event_channel* channel, std::vector<Completion>& completions, Time now)
    : id_(id),
      request_(request),
      device_(device),
      completions_(completions),
      started_(now),
      deadline_(now + request.connect_timeout),
      counts_at_start_(request.join.stripe == 0 ? device_counts(device) : LinkStats{}) {
  rdma_cm_id* cm = nullptr;
  if (rdma_create_id(channel, &cm, this, RDMA_PS_TCP) != 0) {
    fail(LinkError::kUnreachable, "cannot make a connection: " + system_text(errno), now);
    return;
  }
  cm_.reset(cm);
  resolve(now);
}

VerbsLink::~VerbsLink() {
  qp_.reset();  // before what it works on
  device_.return_completions(completions_reserved_);
}

std::string VerbsLink::switch_name() const {
  return request_.switch_address.to_string() + " port " + std::to_string(request_.port);
}

Completion VerbsLink::completion(Completion::Kind kind) const {
  Completion c{kind};
  c.link = id_;
  return c;
}

// --- connecting ---

// The kernel overlooks a neighbour's answer that comes while it queues the request, and notices at its
// time-out: so that is short, and we ask again until ours is over.
void VerbsLink::resolve(Time now) {
  resolve_at_ = kNever;
  try {
    SocketAddress source(device_.source_towards(request_.switch_address), 0, device_.interface_index());
    SocketAddress target(request_.switch_address, request_.port, device_.interface_index());
    if (rdma_resolve_addr(cm_.get(), source.get(), target.get(), kResolveMs) != 0)
      fail(LinkError::kUnreachable, "cannot resolve the switch " + switch_name() + ": " + system_text(errno),
           now);
  } catch (const Error& e) {
    fail(LinkError::kUnreachable, e.what(), now);
  }
}

void VerbsLink::on_cm_event(const rdma_cm_event& event, Time now) {
  const std::string address = request_.switch_address.to_string();
  switch (event.event) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
      return on_address_resolved(now);
    case RDMA_CM_EVENT_ADDR_ERROR:
      if (state_ == State::kResolving) resolve_at_ = now + kResolveAgain;
      return;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
      return on_route_resolved(now);
    case RDMA_CM_EVENT_ROUTE_ERROR:
      return fail(LinkError::kUnreachable,
                  "no RDMA route to " + address + " by " + device_.name() + ": " + system_text(-event.status),
                  now);
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
      return on_response(event, now);
    case RDMA_CM_EVENT_REJECTED:
      return on_rejected(event, now);
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      return fail(LinkError::kUnreachable,
                  "no answer from the switch at " + switch_name() + " (" + system_text(-event.status) +
                      "): is millrace-switch running there, and does its port match?",
                  now);
    case RDMA_CM_EVENT_DISCONNECTED:
      if (state_ == State::kGoodbye) return finish(now);
      return fail(LinkError::kDisconnected, "the switch at " + switch_name() + " closed the connection", now);
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
      return fail(LinkError::kUnreachable, device_.name() + " was removed from this host", now);
    default:
      return;  // TIMEWAIT_EXIT, ADDR_CHANGE
  }
}

void VerbsLink::on_address_resolved(Time now) {
  if (state_ != State::kResolving) return;
  resolve_at_ = kNever;
  const char* name = cm_->verbs ? ibv_get_device_name(cm_->verbs->device) : "no RDMA device";
  if (name != device_.name())
    return fail(LinkError::kUnreachable,
                "the kernel would reach " + request_.switch_address.to_string() + " by " + name +
                    ", not by " + device_.name() + ": check the routes",
                now);
  uint8_t timeout = kAckTimeout;
  // Kernels before 5.2 have no such option: slower after losses, not wrong.
  rdma_set_option(cm_.get(), RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout);
  const auto patience = std::chrono::duration_cast<milliseconds>(deadline_ - now).count();
  if (rdma_resolve_route(cm_.get(), static_cast<int>(std::max<int64_t>(patience, 1))) != 0)
    fail(LinkError::kUnreachable,
         "cannot resolve the route to the switch " + switch_name() + ": " + system_text(errno), now);
}

bool VerbsLink::make_queue_pair(std::string& why) {
  try {
    device_.reserve_completions(sends_max() + receives_max());
    completions_reserved_ = sends_max() + receives_max();
  } catch (const Error& e) {
    why = e.what();
    return false;
  }
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = device_.cq();
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = sends_max();
  init.cap.max_recv_wr = receives_max();
  init.cap.max_send_sge = 2;
  init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = sizeof(SegmentHeader);
  init.qp_context = this;
  qp_.reset(ibv_create_qp(device_.pd(), &init));
  if (!qp_) {  // some devices send nothing inline
    init.cap.max_inline_data = 0;
    qp_.reset(ibv_create_qp(device_.pd(), &init));
  }
  why = "cannot create a queue pair of " + std::to_string(sends_max()) + " sends and " +
        std::to_string(receives_max()) + " receives on " + device_.name() + ": " + system_text(errno);
  if (!qp_) return false;
  inline_bytes_ = init.cap.max_inline_data;

  segments_.resize(sends_max());
  memory_.resize(receive_at(receives_max() + kMessagesMax));
  memory_region_.reset(ibv_reg_mr(device_.pd(), memory_.data(), memory_.size(), IBV_ACCESS_LOCAL_WRITE));
  why = "cannot register memory on " + device_.name() + ": " + system_text(errno) +
        " (raise the limit of locked memory, `ulimit -l`)";
  if (!memory_region_) return false;
  // Results and the switch's probes may be written to whatever has been registered for that.
  return modify(IBV_QPS_INIT, why);
}

// To the next state, with what the connection manager knows, our path MTU and our RNR timer.
bool VerbsLink::modify(ibv_qp_state state, std::string& why) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  int mask = 0;
  if (rdma_init_qp_attr(cm_.get(), &attributes, &mask) != 0) {
    why = "cannot take the queue pair's attributes from the connection manager: " + system_text(errno);
    return false;
  }
  if (state == IBV_QPS_INIT) attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (state == IBV_QPS_RTR) {
    attributes.path_mtu = static_cast<ibv_mtu>(request_.join.mtu_code);
    attributes.min_rnr_timer = kMinRnrTimer;
    why = device_.gid_objection(attributes.ah_attr.grh.sgid_index);
    if (!why.empty()) return false;
  }
  if (ibv_modify_qp(qp_.get(), &attributes, mask) == 0) return true;
  why = "cannot bring the queue pair on " + device_.name() + " to state " + std::to_string(state) + ": " +
        system_text(errno);
  return false;
}

void VerbsLink::on_route_resolved(Time now) {
  if (state_ != State::kResolving) return;
  request_.join.mtu_code = roce::mtu_code(request_.mtu);
  std::string why;
  if (!make_queue_pair(why)) return fail(LinkError::kUnreachable, why, now);
  for (uint32_t i = 0; i < receives_max(); i++) post_receive(i);
  aggregation::JoinRequest& join = request_.join;
  if (!request_.secret.empty()) {
    IpAddress own;
    std::memcpy(own.bytes.data(), cm_->route.addr.addr.ibaddr.sgid.raw, own.bytes.size());
    join.tag = aggregation::join_tag(join, request_.secret, own, request_.switch_address, qp_->qp_num);
  }
  const auto data = aggregation::encode(join);
  rdma_conn_param parameters{};
  parameters.private_data = data.data();
  parameters.private_data_len = static_cast<uint8_t>(data.size());
  parameters.retry_count = kRetryCount;
  parameters.rnr_retry_count = kRnrRetryForEver;
  parameters.qp_num = qp_->qp_num;
  state_ = State::kConnecting;
  if (rdma_connect(cm_.get(), &parameters) != 0)
    fail(LinkError::kUnreachable, "cannot connect to the switch " + switch_name() + ": " + system_text(errno),
         now);
}

void VerbsLink::on_response(const rdma_cm_event& event, Time now) {
  if (state_ != State::kConnecting) return;
  const auto* data = static_cast<const uint8_t*>(event.param.conn.private_data);
  const auto reply = aggregation::decode_join_reply({data, data ? event.param.conn.private_data_len : 0u});
  established_ = true;  // for the switch it is; from here on a DREQ ends it
  if (!reply || reply->version != aggregation::kProtocolVersion)
    return fail(LinkError::kBroken, switch_name() + " accepted, but does not speak this protocol", now);
  std::string why;
  if (!modify(IBV_QPS_RTR, why) || !modify(IBV_QPS_RTS, why)) return fail(LinkError::kUnreachable, why, now);
  if (rdma_establish(cm_.get()) != 0)
    return fail(LinkError::kUnreachable,
                "cannot confirm the connection to the switch " + switch_name() + ": " + system_text(errno),
                now);
  state_ = State::kConnected;
  heard_ = now;
  rnr_naks_ = device_counts(device_).rnr_naks_received;
  Completion c = completion(Completion::Kind::kConnected);
  c.join_reply = *reply;
  completions_.push_back(std::move(c));
}

void VerbsLink::on_rejected(const rdma_cm_event& event, Time now) {
  if (state_ != State::kConnecting) return;
  const auto* data = static_cast<const uint8_t*>(event.param.conn.private_data);
  const auto refusal = aggregation::decode_join_reject({data, data ? event.param.conn.private_data_len : 0u});
  constexpr int kConsumer = 28;
  if (refusal && event.status == kConsumer) {
    error_completion_.code = refusal->code;
    error_completion_.mtu_wanted = refusal->mtu_code;
    return fail(LinkError::kRefused, refusal->text, now);
  }
  fail(LinkError::kRefused,
       switch_name() + " rejected the connection (CM reason " + std::to_string(event.status) +
           "): is a Millrace switch listening there?",
       now);
}

// --- work requests ---

void VerbsLink::post_receive(uint32_t buffer) {
  ibv_sge piece{reinterpret_cast<uintptr_t>(memory_.data()) + receive_at(buffer),
                aggregation::kMessageBytesMax, memory_region_->lkey};
  ibv_recv_wr request{}, *bad;
  request.wr_id = WorkId{id_, Work::kReceive, buffer}.encode();
  request.sg_list = &piece;
  request.num_sge = 1;
  const int error = ibv_post_recv(qp_.get(), &request, &bad);
  if (error == 0)
    receives_outstanding_++;
  else
    post_error_ = error;
}

bool VerbsLink::post(ibv_send_wr& request) {
  ibv_send_wr* bad;
  request.send_flags |= IBV_SEND_SIGNALED;
  // There is room by our own count, so this is no full queue.
  if (const int error = ibv_post_send(qp_.get(), &request, &bad); error != 0) {
    post_error_ = error;
    return false;
  }
  sends_outstanding_++;
  return true;
}

bool VerbsLink::post_segment(uint64_t segment, const SegmentHeader& header, std::span<const uint8_t> payload,
                             uint32_t lkey) {
  // One request of room is kept for a probe.
  if (state_ != State::kConnected || sends_outstanding_ + 1 >= sends_max()) return false;
  const uint64_t place = posted_ % sends_max();
  uint8_t* kept = memory_.data() + place * sizeof header;
  std::memcpy(kept, &header, sizeof header);
  ibv_sge pieces[2] = {
      {reinterpret_cast<uintptr_t>(kept), sizeof header, memory_region_->lkey},
      {reinterpret_cast<uintptr_t>(payload.data()), static_cast<uint32_t>(payload.size()), lkey}};
  ibv_send_wr request{};
  request.wr_id = WorkId{id_, Work::kSegment, posted_}.encode();
  request.opcode = IBV_WR_SEND;
  request.sg_list = pieces;
  request.num_sge = payload.empty() ? 1 : 2;
  if (payload.empty() && inline_bytes_ >= sizeof header) request.send_flags = IBV_SEND_INLINE;
  if (!post(request)) return false;
  segments_[place] = segment;
  posted_++;
  return true;
}

bool VerbsLink::post_message(std::span<const uint8_t> message) {
  if (state_ != State::kConnected || sends_outstanding_ + 1 >= sends_max() ||
      messages_posted_ - messages_sent_ >= kMessagesMax)
    return false;
  assert(message.size() <= aggregation::kMessageBytesMax);
  uint8_t* kept = memory_.data() + message_at(messages_posted_);
  std::memcpy(kept, message.data(), message.size());
  ibv_sge piece{reinterpret_cast<uintptr_t>(kept), static_cast<uint32_t>(message.size()),
                memory_region_->lkey};
  ibv_send_wr request{};
  request.wr_id = WorkId{id_, Work::kMessage, messages_posted_}.encode();
  request.opcode = IBV_WR_SEND;
  request.sg_list = &piece;
  request.num_sge = 1;
  if (!post(request)) return false;
  messages_posted_++;
  return true;
}

// A zero-length RDMA WRITE: any NIC acknowledges it, nothing is written.
void VerbsLink::send_probe() {
  ibv_send_wr request{};
  request.wr_id = WorkId{id_, Work::kProbe, 0}.encode();
  request.opcode = IBV_WR_RDMA_WRITE;
  post(request);
}

void VerbsLink::on_completion(const ibv_wc& wc, Time now) {
  const WorkId id = WorkId::decode(wc.wr_id);
  (id.work == Work::kReceive ? receives_outstanding_ : sends_outstanding_)--;
  if (state_ == State::kConnected && wc.status == IBV_WC_SUCCESS) {
    heard_ = now;
    if (id.work == Work::kSegment) {
      Completion c = completion(Completion::Kind::kSent);
      c.segment = segments_[sent_++ % sends_max()];
      completions_.push_back(std::move(c));
    } else if (id.work == Work::kMessage) {
      messages_sent_++;
      completions_.push_back(completion(Completion::Kind::kMessageSent));
    } else if (id.work == Work::kReceive) {
      Completion c =
          completion(wc.opcode == IBV_WC_RECV ? Completion::Kind::kMessage : Completion::Kind::kResult);
      if (wc.opcode == IBV_WC_RECV) {
        const uint8_t* at = memory_.data() + receive_at(id.number);
        c.message.assign(at, at + std::min<uint32_t>(wc.byte_len, aggregation::kMessageBytesMax));
      } else {
        c.immediate = ntohl(wc.imm_data);
      }
      post_receive(static_cast<uint32_t>(id.number));  // before the caller can post what it answers to
      completions_.push_back(std::move(c));
    }
    return;
  }
  if (state_ == State::kConnected && wc.status != IBV_WC_WR_FLUSH_ERR) {
    const bool lost = wc.status == IBV_WC_RETRY_EXC_ERR;
    return fail(lost ? LinkError::kUnreachable : LinkError::kBroken, failure_text(wc), now);
  }
  if (sends_outstanding_ != 0 || receives_outstanding_ != 0) return;
  if (state_ == State::kDraining) return drained(now);
  // Flushed without a word of why: a responder's error shows in an event of the queue pair, or not at all.
  if (state_ == State::kConnected)
    fail(LinkError::kBroken,
         "the queue pair " + std::to_string(qp_->qp_num) + " on " + device_.name() +
             " went into its error state: see `dmesg` and `rdma statistic`",
         now);
}

void VerbsLink::on_queue_pair_event(ibv_event_type type, Time now) {
  if (state_ != State::kConnected) return;
  if (type == IBV_EVENT_QP_ACCESS_ERR)
    fail(LinkError::kBroken,
         "the switch at " + switch_name() + " wrote a result outside the memory it was offered", now);
  if (type == IBV_EVENT_QP_REQ_ERR)
    fail(LinkError::kBroken,
         "the switch at " + switch_name() + " sent a packet that " + device_.name() + " took for invalid",
         now);
  if (type == IBV_EVENT_QP_FATAL)
    fail(LinkError::kBroken, device_.name() + " reported a fatal error of the queue pair", now);
}

std::string VerbsLink::failure_text(const ibv_wc& wc) const {
  const std::string who = "the switch at " + switch_name(),
                    where = " (queue pair " + std::to_string(qp_->qp_num) + " on " + device_.name() + ", " +
                            ibv_wc_status_str(wc.status) + ")";
  switch (wc.status) {
    case IBV_WC_RETRY_EXC_ERR:
      return who + " has not acknowledged anything through " + std::to_string(kRetryCount) +
             " retries: it is down, or the network to it is" + where;
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return who + " stayed not ready" + where;
    case IBV_WC_REM_ACCESS_ERR:
    case IBV_WC_REM_INV_REQ_ERR:
    case IBV_WC_REM_OP_ERR:
      return who + " refused a segment as invalid: a bug here or there, or two of different versions" + where;
    case IBV_WC_LOC_PROT_ERR:
      return "a buffer of an operation is no longer what was registered: it must stay mapped until the "
             "operation is over" +
             where;
    case IBV_WC_LOC_LEN_ERR:
      return who + " sent a message longer than a receive buffer, or the path MTU is wrong" + where;
    case IBV_WC_LOC_ACCESS_ERR:
      return who + " wrote a result outside the memory it was offered" + where;
    default:
      return "the connection to " + who + " broke" + where;
  }
}

// --- ends ---

void VerbsLink::fail(LinkError error, const std::string& text, Time now) {
  if (state_ >= State::kDraining) return;
  error_ = error;
  error_completion_.link = id_;
  error_completion_.error = error;
  error_completion_.text = text;
  start_draining(now);
}

void VerbsLink::close(Time now) {
  if (state_ > State::kDraining) return;
  close_requested_ = true;
  if (state_ < State::kDraining) start_draining(now);
}

void VerbsLink::start_draining(Time now) {
  state_ = State::kDraining;
  resolve_at_ = kNever;
  deadline_ = now + kDrainPatience;
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_ERR;
  if (!qp_ || ibv_modify_qp(qp_.get(), &attributes, IBV_QP_STATE) != 0 ||
      (sends_outstanding_ == 0 && receives_outstanding_ == 0))
    drained(now);
}

// Nothing is sent from memory or written to it any more: so much the caller may now be told.
void VerbsLink::drained(Time now) {
  qp_.reset();
  completions_.push_back(error_ == LinkError::kNone || close_requested_
                             ? completion(Completion::Kind::kClosed)
                             : std::move(error_completion_));
  state_ = State::kGoodbye;
  deadline_ = now + kGoodbyePatience;
  // Also the answer to the switch's own DREQ.
  if (!established_ || rdma_disconnect(cm_.get()) != 0 || error_ == LinkError::kDisconnected) finish(now);
}

void VerbsLink::finish(Time) { state_ = State::kOver; }

void VerbsLink::detach(Time now) {
  if (state_ < State::kDraining) start_draining(now);
  if (state_ == State::kDraining) drained(now);
  finish(now);
}

// Probes a silent switch, gives a dead one up. RNR NAKs make no completion, but count as life: the kernel's
// counter is asked before the last word.
void VerbsLink::check_peer(Time now) {
  if (post_error_ != 0)
    return fail(LinkError::kBroken, "cannot post to " + device_.name() + ": " + system_text(post_error_),
                now);
  if (sends_outstanding_ == 0) {
    if (now - heard_ >= kProbeAfter) send_probe();
    return;
  }
  if (now - std::max(heard_, extended_) < kPeerDead) return;
  // The count is the whole device's, so it may be another switch's doing: not for ever.
  const uint64_t rnr_naks = device_counts(device_).rnr_naks_received;
  if (rnr_naks != std::exchange(rnr_naks_, rnr_naks) && now - heard_ < kExtensionsMax * kPeerDead) {
    extended_ = now;
    return;
  }
  fail(LinkError::kUnreachable,
       "the switch at " + switch_name() + " has not acknowledged anything for " +
           std::to_string(std::chrono::duration_cast<seconds>(kPeerDead).count()) +
           " s: it is down, or the network to it is",
       now);
}

void VerbsLink::tick(Time now) {
  if (state_ == State::kConnected) return check_peer(now);
  if (now >= resolve_at_ && now < deadline_) return resolve(now);
  if (state_ == State::kOver || now < deadline_) return;
  if (state_ == State::kDraining) return drained(now);
  if (state_ == State::kGoodbye) return finish(now);
  const std::string within = " within " + milliseconds_text(request_.connect_timeout);
  fail(LinkError::kUnreachable,
       state_ == State::kResolving
           ? std::string("no answer to ") +
                 (request_.switch_address.is_v4() ? "ARP" : "neighbour discovery") + " for " +
                 request_.switch_address.to_string() + " on " + device_.interface() + within +
                 ": is the switch up and on this network?"
           : "no answer from the switch at " + switch_name() + within +
                 ": is millrace-switch running there, and does its port match?",
       now);
}

Time VerbsLink::next_deadline() const {
  if (state_ == State::kConnected) {
    if (post_error_ != 0) return started_;
    return sends_outstanding_ == 0 ? heard_ + kProbeAfter : std::max(heard_, extended_) + kPeerDead;
  }
  return state_ == State::kOver ? started_ : std::min(deadline_, resolve_at_);
}

LinkStats VerbsLink::stats() const {
  if (request_.join.stripe != 0) return {};  // the device's counts are told once for all stripes
  LinkStats s = device_counts(device_);
  const LinkStats& before = counts_at_start_;
  s.packets_sent -= before.packets_sent;
  s.packets_received -= before.packets_received;
  s.retransmitted -= before.retransmitted;
  s.timeouts -= before.timeouts;
  s.naks_received -= before.naks_received;
  s.rnr_naks_received -= before.rnr_naks_received;
  s.duplicates_received -= before.duplicates_received;
  s.out_of_sequence -= before.out_of_sequence;
  s.cnps_received -= before.cnps_received;
  s.cnps_sent -= before.cnps_sent;
  return s;
}

}  // namespace millrace::host
