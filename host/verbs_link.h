// One stripe's connection by verbs: from the connection manager's first step to its goodbye. It owns the CM
// identifier, the queue pair, and the ring of segment headers and receive buffers. The endpoint's thread
// calls it; completions and events come to it by the endpoint.
#pragma once

#include <rdma/rdma_cma.h>

#include <memory>
#include <string>
#include <vector>

#include "host/transport.h"
#include "host/verbs_device.h"

namespace millrace::host {

class VerbsLink {
 public:
  // What a work request's id says: the link, the kind, and for sends which one.
  enum class Work : uint8_t { kSegment, kProbe, kReceive, kMessage };
  struct WorkId {
    LinkId link;
    Work work;
    uint64_t number;
    // 24 bits of link, 2 of kind, 38 of number.
    uint64_t encode() const {
      return uint64_t{link} << 40 | uint64_t{static_cast<uint8_t>(work)} << 38 | (number & kNumberMask);
    }
    static WorkId decode(uint64_t id) {
      return {static_cast<LinkId>(id >> 40), static_cast<Work>(id >> 38 & 3), id & kNumberMask};
    }
    static constexpr uint64_t kNumberMask = (uint64_t{1} << 38) - 1;
  };

  // Starts to connect. What goes wrong becomes a completion, also here.
  VerbsLink(LinkId id, const ConnectRequest& request, VerbsDevice& device, rdma_event_channel* channel,
            std::vector<Completion>& completions, Time now);
  ~VerbsLink();

  void on_cm_event(const rdma_cm_event& event, Time now);
  void on_completion(const ibv_wc& wc, Time now);
  void on_queue_pair_event(ibv_event_type type, Time now);
  void tick(Time now);
  Time next_deadline() const;

  bool post_segment(uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, uint32_t lkey);
  bool post_message(std::span<const uint8_t> message);
  void close(Time now);
  // The device is gone: nothing is waited for any more.
  void detach(Time now);
  bool over() const { return state_ == State::kOver; }
  LinkStats stats() const;

 private:
  enum class State : uint8_t {
    kResolving,   // address, then route
    kConnecting,  // REQ sent
    kConnected,
    kDraining,  // the queue pair is in ERR, its flushes come
    kGoodbye,   // DREQ sent
    kOver,
  };
  void resolve(Time now);
  void on_address_resolved(Time now);
  void on_route_resolved(Time now);
  void on_response(const rdma_cm_event& event, Time now);
  void on_rejected(const rdma_cm_event& event, Time now);
  bool make_queue_pair(std::string& why);
  bool modify(ibv_qp_state state, std::string& why);
  void post_receive(uint32_t buffer);
  bool post(ibv_send_wr& request);
  void send_probe();
  void check_peer(Time now);
  void fail(LinkError error, const std::string& text, Time now);
  void start_draining(Time now);
  void drained(Time now);
  void finish(Time now);
  Completion completion(Completion::Kind kind) const;
  std::string failure_text(const ibv_wc& wc) const;
  std::string switch_name() const;
  uint32_t sends_max() const { return 2u * request_.window + 2; }
  uint32_t receives_max() const { return request_.window + 3u; }
  static constexpr uint32_t kMessagesMax = 4;  // control messages in flight
  // Where things are in memory_.
  uint64_t receive_at(uint64_t buffer) const {
    return sends_max() * sizeof(aggregation::SegmentHeader) + buffer * aggregation::kMessageBytesMax;
  }
  uint64_t message_at(uint64_t number) const { return receive_at(receives_max() + number % kMessagesMax); }

  const LinkId id_;
  ConnectRequest request_;
  VerbsDevice& device_;
  std::vector<Completion>& completions_;
  State state_ = State::kResolving;
  VerbsPtr<rdma_cm_id, rdma_destroy_id> cm_;
  VerbsPtr<ibv_qp, ibv_destroy_qp> qp_;
  uint32_t completions_reserved_ = 0, inline_bytes_ = 0;

  // One registration: headers of segments in flight, a ring, then receive buffers, then control messages.
  std::vector<uint8_t> memory_;
  VerbsPtr<ibv_mr, ibv_dereg_mr> memory_region_;
  std::vector<uint64_t> segments_;  // by place in the header ring
  uint64_t posted_ = 0, sent_ = 0;  // segments
  uint64_t messages_posted_ = 0, messages_sent_ = 0;
  uint32_t sends_outstanding_ = 0, receives_outstanding_ = 0;

  bool established_ = false;  // a DREQ is owed
  bool close_requested_ = false;
  LinkError error_ = LinkError::kNone;
  Completion error_completion_{Completion::Kind::kError};
  int post_error_ = 0;  // a work request was not taken, and why
  Time started_, deadline_, heard_{}, extended_{};
  Time resolve_at_ = kNever;   // again
  uint64_t rnr_naks_ = 0;      // the count of the device when last looked at
  LinkStats counts_at_start_;  // what the kernel counts for the whole device
};

}  // namespace millrace::host
