#include "host/verbs_endpoint.h"

#include <fcntl.h>

#include <array>
#include <cassert>
#include <cerrno>
#include <system_error>

#include "host/verbs_link.h"
#include "roce/error.h"

namespace millrace::host {

namespace {

constexpr int kBurst = 64;
// Completions taken in one turn, so that events and timers have theirs.
constexpr int kBurstsPerTurn = 16;

std::string system_text(int error) { return std::system_category().message(error); }

}  // namespace

VerbsEndpoint::VerbsEndpoint(std::unique_ptr<VerbsDevice> device)
    : device_(std::move(device)), cm_channel_(rdma_create_event_channel()), cache_(*this) {
  if (!cm_channel_ || fcntl(cm_channel_->fd, F_SETFL, fcntl(cm_channel_->fd, F_GETFL) | O_NONBLOCK) != 0)
    throw Error(ErrorCode::kSystem,
                "the RDMA connection manager cannot be used (" + system_text(errno) +
                    "): modprobe rdma_ucm, and may this user open /dev/infiniband/rdma_cm?");
  text_ = "verbs on " + device_->name() + " port " + std::to_string(device_->port()) + " (" +
          device_->interface() + ", RoCE path MTU up to " + std::to_string(device_->path_mtu_max()) + ")";
  if (!cache_.objection().empty()) text_ += ", buffers registered for each call (" + cache_.objection() + ")";
}

VerbsEndpoint::~VerbsEndpoint() = default;

VerbsLink* VerbsEndpoint::find(LinkId id) const {
  const auto found = links_.find(id);
  return found == links_.end() ? nullptr : found->second.get();
}

// --- the endpoint ---

bool VerbsEndpoint::receive(Time now) {
  now_ = now;
  if (detached_) return false;
  // Completions first: a terminal message explains the disconnect that follows it.
  const bool more = poll_completion_queue(now);
  take_cm_events(now);
  take_device_events(now);
  return more;
}

bool VerbsEndpoint::poll_completion_queue(Time now) {
  std::array<ibv_wc, kBurst> done;
  for (int burst = 0; burst < kBurstsPerTurn; burst++) {
    const int n = ibv_poll_cq(device_->cq(), kBurst, done.data());
    if (n < 0) throw Error(ErrorCode::kNoDevice, device_->name() + ": its completion queue cannot be polled");
    for (int i = 0; i < n; i++)
      if (VerbsLink* link = find(VerbsLink::WorkId::decode(done[static_cast<size_t>(i)].wr_id).link))
        link->on_completion(done[static_cast<size_t>(i)], now);
    if (n < kBurst) return false;
  }
  return true;
}

void VerbsEndpoint::take_cm_events(Time now) {
  rdma_cm_event* event;
  while (rdma_get_cm_event(cm_channel_.get(), &event) == 0) {
    // A copy, since a link may destroy its identifier, which waits for the acknowledgement.
    rdma_cm_event copy = *event;
    std::array<uint8_t, 256> data;
    if (copy.param.conn.private_data != nullptr) {
      std::memcpy(data.data(), copy.param.conn.private_data, copy.param.conn.private_data_len);
      copy.param.conn.private_data = data.data();
    }
    auto* link = static_cast<VerbsLink*>(copy.id->context);
    rdma_ack_cm_event(event);
    // A terminal message came before the DREQ, but perhaps after the last look at the queue.
    if (copy.event == RDMA_CM_EVENT_DISCONNECTED) poll_completion_queue(now);
    link->on_cm_event(copy, now);
  }
}

void VerbsEndpoint::take_device_events(Time now) {
  ibv_async_event event;
  while (ibv_get_async_event(device_->context(), &event) == 0) {
    const ibv_event_type type = event.event_type;
    const bool of_queue_pair =
        type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR || type == IBV_EVENT_QP_ACCESS_ERR;
    auto* link = of_queue_pair ? static_cast<VerbsLink*>(event.element.qp->qp_context) : nullptr;
    ibv_ack_async_event(&event);
    if (link) link->on_queue_pair_event(type, now);
    if (type == IBV_EVENT_DEVICE_FATAL)
      throw Error(ErrorCode::kNoDevice, device_->name() + " reported a fatal error, or was removed");
    if (type == IBV_EVENT_CQ_ERR)
      throw Error(ErrorCode::kNoDevice, device_->name() + ": its completion queue overflowed");
    // A port that is down shows in retries.
  }
}

void VerbsEndpoint::send(Time now) {
  now_ = now;
  for (auto link = links_.begin(); link != links_.end();) {
    link->second->tick(now);
    link = link->second->over() ? links_.erase(link) : std::next(link);
  }
  cache_.sweep();
}

void VerbsEndpoint::detach() {
  detached_ = true;
  for (auto& [id, link] : links_) link->detach(now_);
}

Time VerbsEndpoint::next_deadline() const {
  Time next = kNever;
  for (const auto& [id, link] : links_) next = std::min(next, link->next_deadline());
  return next;
}

bool VerbsEndpoint::prepare_to_wait(std::vector<pollfd>& descriptors) {
  if (detached_) return true;
  ibv_cq* cq;
  void* context;
  while (ibv_get_cq_event(device_->channel(), &cq, &context) == 0) ibv_ack_cq_events(cq, 1);
  if (ibv_req_notify_cq(device_->cq(), 0) != 0)
    throw Error(ErrorCode::kNoDevice, device_->name() + " gives no completion events");
  // What came before it was armed makes no event.
  const size_t before = completions_.size();
  const bool more = poll_completion_queue(now_);
  for (const int fd : {device_->channel()->fd, cm_channel_->fd, device_->context()->async_fd})
    descriptors.push_back({fd, POLLIN, 0});
  return !more && completions_.size() == before;
}

// --- the transport ---

LinkId VerbsEndpoint::connect(const ConnectRequest& request) {
  const LinkId id = next_link_;
  next_link_ = (next_link_ & 0xFFFFFF) % 0xFFFFFF + 1;
  links_[id] = std::make_unique<VerbsLink>(id, request, *device_, cm_channel_.get(), completions_, now_);
  return id;
}

bool VerbsEndpoint::post_segment(LinkId id, uint64_t segment, const aggregation::SegmentHeader& header,
                                 std::span<const uint8_t> payload, const MemoryRegion& source) {
  VerbsLink* link = find(id);
  return link && link->post_segment(segment, header, payload, source.lkey);
}

bool VerbsEndpoint::post_message(LinkId id, std::span<const uint8_t> message) {
  VerbsLink* link = find(id);
  return link && link->post_message(message);
}

void VerbsEndpoint::close(LinkId id) {
  if (VerbsLink* link = find(id)) link->close(now_);
}

void VerbsEndpoint::poll(std::vector<Completion>& completions) {
  completions.insert(completions.end(), std::make_move_iterator(completions_.begin()),
                     std::make_move_iterator(completions_.end()));
  completions_.clear();
}

LinkStats VerbsEndpoint::stats(LinkId id) const {
  const VerbsLink* link = find(id);
  return link ? link->stats() : LinkStats{};
}

// --- memory ---

MemoryRegion VerbsEndpoint::register_memory(const void* address, size_t bytes, Access access) {
  return cache_.acquire(address, bytes, access);
}

void VerbsEndpoint::deregister_memory(const MemoryRegion& region) { cache_.release(region); }

MemoryRegion VerbsEndpoint::enroll(const void* address, size_t bytes, Access access, void*& handle) {
  const int flags = access == Access::kResult ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE : 0;
  ibv_mr* region = ibv_reg_mr(device_->pd(), const_cast<void*>(address), bytes, flags);
  if (region == nullptr) {
    const int error = errno;
    throw Error(ErrorCode::kSystem, "cannot register " + std::to_string(bytes) + " bytes at " +
                                        std::to_string(reinterpret_cast<uintptr_t>(address)) + " with " +
                                        device_->name() + ": " + system_text(error) +
                                        (error == ENOMEM ? " (raise the limit of locked memory, `ulimit -l`)"
                                         : error == EFAULT || error == EACCES
                                             ? " (is it all mapped, and writable where results go?)"
                                             : ""));
  }
  handle = region;
  return {.id = 0, .lkey = region->lkey, .rkey = access == Access::kResult ? region->rkey : 0};
}

void VerbsEndpoint::dismiss(void* handle) { ibv_dereg_mr(static_cast<ibv_mr*>(handle)); }

}  // namespace millrace::host
