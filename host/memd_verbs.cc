// The lender on an RDMA device: it makes queue pairs and registers memory, and from then on the device serves
// WRITEs and READs by itself. All that this process does meanwhile is a probe for each lease that is idle, so
// that a switch which vanished is noticed.
#include <fcntl.h>
#include <rdma/rdma_cma.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <system_error>

#include "host/memd_server.h"
#include "host/socket_address.h"
#include "host/verbs_device.h"
#include "roce/error.h"

namespace millrace::host {

namespace {

using buffering::LeaseCode;
using buffering::LeaseRefusal;
using std::chrono::seconds;

constexpr uint8_t kAckTimeout = 14;  // 67 ms
constexpr uint8_t kRetryCount = 7;
constexpr uint8_t kMinRnrTimer = 12;
constexpr int kBacklog = 64;
constexpr uint32_t kSends = 2;
constexpr Time kProbeAfter = seconds(1);
constexpr Time kPeerDead = seconds(5);  // Linux' rxe retries for ever
constexpr Time kGoodbyePatience = seconds(2);

std::string system_text(int error) { return std::system_category().message(error); }

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kSystem, what + ": " + system_text(errno));
}

struct Lease {
  VerbsPtr<rdma_cm_id, rdma_destroy_id> cm;
  VerbsPtr<ibv_mr, ibv_dereg_mr> memory;
  VerbsPtr<ibv_qp, ibv_destroy_qp> qp;  // goes first
  std::optional<uint32_t> part;
  bool established = false;
  bool probing = false;
  Time heard{};
  Time goodbye = kNever;  // a DREQ is out: until when an answer is waited for
};

class VerbsMemd final : public MemdServer {
 public:
  VerbsMemd(const MemdConfig& config, LeaseTable& table);
  ~VerbsMemd() override;

  std::string text() const override { return text_; }
  bool counts_bytes() const override { return false; }
  void prepare_to_wait(std::vector<pollfd>& descriptors) override;
  Time next_deadline() const override;
  void serve(Time now) override;
  void shutdown(Time now) override;
  bool idle() const override { return leases_.empty(); }
  MemdCounters counters() const override { return counters_; }

 private:
  void on_event(const rdma_cm_event& event, Time now);
  void on_request(const rdma_cm_event& event, Time now);
  // Empty, or why there is no lease.
  std::optional<LeaseRefusal> lend(Lease& lease, const buffering::LeaseRequest& request, uint8_t depth,
                                   Time now);
  bool modify(Lease& lease, ibv_qp_state state, uint8_t depth, std::string& why);
  void refuse(rdma_cm_id* id, const LeaseRefusal& why);
  // Nothing touches the part from here on. `tell`: by a DREQ, whose answer is waited for.
  void end(Lease& lease, bool tell, Time now);
  void poll_completions(Time now);
  void check(Lease& lease, Time now);
  void probe(Lease& lease);
  Lease* find(uint32_t qpn);

  LeaseTable& table_;
  std::unique_ptr<VerbsDevice> device_;
  VerbsPtr<rdma_event_channel, rdma_destroy_event_channel> channel_;
  VerbsPtr<rdma_cm_id, rdma_destroy_id> listener_;
  std::map<rdma_cm_id*, Lease> leases_;
  std::string text_;
  MemdCounters counters_;
  bool closing_ = false;
};

VerbsMemd::VerbsMemd(const MemdConfig& config, LeaseTable& table) : table_(table) {
  const IpAddress any = *IpAddress::parse("0.0.0.0");
  if (config.device.empty())
    throw Error(ErrorCode::kUsage, "say where to lend: --listen ADDRESS or --device NAME");
  device_ = VerbsDevice::open(config.device, config.address.value_or(any));
  channel_.reset(rdma_create_event_channel());
  if (!channel_ || fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK) != 0)
    fail("no connection manager (is the rdma_ucm module loaded?)");
  rdma_cm_id* id = nullptr;
  if (rdma_create_id(channel_.get(), &id, nullptr, RDMA_PS_TCP) != 0)
    fail("cannot make a listening connection");
  listener_.reset(id);
  SocketAddress address(config.address.value_or(any), config.port, device_->interface_index());
  if (rdma_bind_addr(id, address.get()) != 0 || rdma_listen(id, kBacklog) != 0)
    fail("cannot listen on port " + std::to_string(config.port) + " of the RDMA port space");
  if (ibv_req_notify_cq(device_->cq(), 0) != 0) fail("cannot wait for completions on " + device_->name());
  text_ = "verbs on " + device_->name() + " port " + std::to_string(device_->port()) + " (" +
          device_->interface() + ", RoCE path MTU up to " + std::to_string(device_->path_mtu_max()) +
          "): the device serves what is lent, this process does nothing";
}

VerbsMemd::~VerbsMemd() {
  for (auto& [id, lease] : leases_) lease.qp.reset();
}

void VerbsMemd::refuse(rdma_cm_id* id, const LeaseRefusal& why) {
  counters_.refused++;
  const auto data = encode(why);
  rdma_reject(id, data.data(), static_cast<uint8_t>(data.size()));
}

bool VerbsMemd::modify(Lease& l, ibv_qp_state state, uint8_t depth, std::string& why) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  int mask = 0;
  if (rdma_init_qp_attr(l.cm.get(), &attributes, &mask) != 0) {
    why = "cannot take the queue pair's attributes from the connection manager: " + system_text(errno);
    return false;
  }
  if (state == IBV_QPS_INIT)
    attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (state == IBV_QPS_RTR) {
    attributes.min_rnr_timer = kMinRnrTimer;
    attributes.max_dest_rd_atomic = depth;
    if ((128u << attributes.path_mtu) > device_->path_mtu_max()) {
      why = "the path MTU is at most " + std::to_string(device_->path_mtu_max()) +
            " here, the switch asks for " + std::to_string(128u << attributes.path_mtu);
      return false;
    }
    why = device_->gid_objection(attributes.ah_attr.grh.sgid_index);
    if (!why.empty()) return false;
  }
  if (state == IBV_QPS_RTS) {
    attributes.timeout = kAckTimeout;
    attributes.retry_cnt = kRetryCount;
    attributes.max_rd_atomic = 0;
  }
  if (ibv_modify_qp(l.qp.get(), &attributes, mask) == 0) return true;
  why = "cannot bring the queue pair on " + device_->name() + " to state " + std::to_string(state) + ": " +
        system_text(errno);
  return false;
}

std::optional<LeaseRefusal> VerbsMemd::lend(Lease& l, const buffering::LeaseRequest& request, uint8_t depth,
                                            Time now) {
  const auto no = [](const std::string& why) {
    return LeaseRefusal{.code = LeaseCode::kBroken, .text = why};
  };
  if (l.cm->verbs == nullptr || ibv_get_device_name(l.cm->verbs->device) != device_->name())
    return no("the request came by another device than " + device_->name());
  SocketAddress peer;
  const sockaddr* from = rdma_get_peer_addr(l.cm.get());
  std::memcpy(&peer.storage, from, from->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  const IpAddress borrower = peer.ip();
  if (const auto old = table_.find(borrower, request.instance)) {
    counters_.replaced++;
    for (auto& [id, lease] : leases_)
      if (lease.part == old) end(lease, true, now);
  }
  std::string why;
  l.part = table_.take(borrower, request.instance, request.bytes, why);
  if (!l.part) return LeaseRefusal{.code = LeaseCode::kFull, .text = why};
  const std::span<uint8_t> memory = table_.memory(*l.part);
  l.memory.reset(ibv_reg_mr(device_->pd(), memory.data(), memory.size(),
                            IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ));
  if (!l.memory) return no("memory cannot be registered: " + system_text(errno) + " (see ulimit -l)");
  ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = device_->cq();
  init.qp_type = IBV_QPT_RC;
  init.cap.max_send_wr = kSends;
  init.cap.max_recv_wr = 1;
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  l.qp.reset(ibv_create_qp(device_->pd(), &init));
  if (!l.qp) return no("no queue pair: " + system_text(errno));
  if (!modify(l, IBV_QPS_INIT, depth, why) || !modify(l, IBV_QPS_RTR, depth, why) ||
      !modify(l, IBV_QPS_RTS, depth, why))
    return LeaseRefusal{.code = why.starts_with("the path MTU") ? LeaseCode::kMtu : LeaseCode::kBroken,
                        .text = why};
  const auto reply = encode(buffering::LeaseReply{
      .rkey = l.memory->rkey, .address = reinterpret_cast<uintptr_t>(memory.data()), .bytes = memory.size()});
  rdma_conn_param parameters{};
  parameters.private_data = reply.data();
  parameters.private_data_len = static_cast<uint8_t>(reply.size());
  parameters.responder_resources = depth;
  parameters.rnr_retry_count = 7;
  parameters.qp_num = l.qp->qp_num;
  l.heard = now;
  if (rdma_accept(l.cm.get(), &parameters) != 0)
    return no("the connection cannot be accepted: " + system_text(errno));
  return std::nullopt;
}

void VerbsMemd::on_request(const rdma_cm_event& event, Time now) {
  const auto* data = static_cast<const uint8_t*>(event.param.conn.private_data);
  const auto request =
      buffering::decode_lease_request({data, data != nullptr ? event.param.conn.private_data_len : 0u});
  // What the peer means to have in flight, which the kernel tells as what it asks of us.
  uint8_t depth = event.param.conn.responder_resources;
  auto objection = lease_objection(request, depth);
  if (!objection && closing_)
    objection = LeaseRefusal{.code = LeaseCode::kFull, .text = "the lender is ending"};
  depth = static_cast<uint8_t>(std::min<int>(depth, device_->limits().max_qp_rd_atom));
  Lease& l = leases_[event.id];
  l.cm.reset(event.id);
  if (!objection) objection = lend(l, *request, depth, now);
  if (!objection) {
    counters_.leases++;
    return;
  }
  refuse(event.id, *objection);
  end(l, false, now);
}

void VerbsMemd::end(Lease& l, bool tell, Time now) {
  l.qp.reset();
  l.memory.reset();
  if (l.part) table_.release(*l.part);
  l.part.reset();
  // What is over is destroyed behind the events that may still name it.
  l.goodbye = tell && rdma_disconnect(l.cm.get()) == 0 ? now + kGoodbyePatience : now;
}

void VerbsMemd::on_event(const rdma_cm_event& event, Time now) {
  if (event.event == RDMA_CM_EVENT_CONNECT_REQUEST) return on_request(event, now);
  if (event.event == RDMA_CM_EVENT_DEVICE_REMOVAL)
    throw Error(ErrorCode::kSystem, device_->name() + " was removed from this host");
  const auto found = leases_.find(event.id);
  if (found == leases_.end()) return;
  Lease& l = found->second;
  switch (event.event) {
    case RDMA_CM_EVENT_ESTABLISHED:
      l.established = true;
      l.heard = now;
      return;
    case RDMA_CM_EVENT_DISCONNECTED:
    case RDMA_CM_EVENT_REJECTED:
    case RDMA_CM_EVENT_UNREACHABLE:
    case RDMA_CM_EVENT_CONNECT_ERROR:
      if (l.part) {
        counters_.ended++;
        // Answers a DREQ; the kernel repeats the answer as long as it is asked.
        if (event.event == RDMA_CM_EVENT_DISCONNECTED) rdma_disconnect(l.cm.get());
        end(l, false, now);
      }
      l.goodbye = now;
      return;
    default:
      return;
  }
}

Lease* VerbsMemd::find(uint32_t qpn) {
  for (auto& [id, l] : leases_)
    if (l.qp && l.qp->qp_num == qpn) return &l;
  return nullptr;
}

void VerbsMemd::poll_completions(Time now) {
  ibv_cq* cq = nullptr;
  void* context = nullptr;
  while (ibv_get_cq_event(device_->channel(), &cq, &context) == 0) ibv_ack_cq_events(cq, 1);
  if (ibv_req_notify_cq(device_->cq(), 0) != 0) fail("cannot wait for completions on " + device_->name());
  std::array<ibv_wc, 16> done;
  for (int n; (n = ibv_poll_cq(device_->cq(), static_cast<int>(done.size()), done.data())) > 0;)
    for (int i = 0; i < n; i++) {
      Lease* l = find(done[static_cast<size_t>(i)].qp_num);
      if (l == nullptr) continue;
      l->probing = false;
      if (done[static_cast<size_t>(i)].status == IBV_WC_SUCCESS) {
        l->heard = now;
        continue;
      }
      counters_.died++;
      end(*l, true, now);
    }
}

// A zero-length RDMA WRITE, which any peer acknowledges and which touches no memory.
void VerbsMemd::probe(Lease& l) {
  ibv_send_wr request{}, *bad;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  l.probing = ibv_post_send(l.qp.get(), &request, &bad) == 0;
}

void VerbsMemd::check(Lease& l, Time now) {
  if (!l.qp || !l.established) return;
  if (!l.probing && now - l.heard >= kProbeAfter) {
    // Counted from here, not from before this process may have been stopped.
    l.heard = now;
    return probe(l);
  }
  if (!l.probing || now - l.heard < kPeerDead) return;
  counters_.died++;
  end(l, true, now);
}

void VerbsMemd::serve(Time now) {
  poll_completions(now);
  rdma_cm_event* event = nullptr;
  while (rdma_get_cm_event(channel_.get(), &event) == 0) {
    // Acknowledged first: an identifier is not destroyed while an event of it is not.
    const rdma_cm_event copy = *event;
    std::array<uint8_t, 256> data{};
    rdma_cm_event mine = copy;
    if (copy.param.conn.private_data != nullptr) {
      std::memcpy(data.data(), copy.param.conn.private_data, copy.param.conn.private_data_len);
      mine.param.conn.private_data = data.data();
    }
    rdma_ack_cm_event(event);
    on_event(mine, now);
  }
  for (auto& [id, l] : leases_) check(l, now);
  std::erase_if(leases_, [&](const auto& l) { return now >= l.second.goodbye; });
}

void VerbsMemd::prepare_to_wait(std::vector<pollfd>& descriptors) {
  descriptors.push_back({channel_->fd, POLLIN, 0});
  descriptors.push_back({device_->channel()->fd, POLLIN, 0});
}

Time VerbsMemd::next_deadline() const {
  Time t = kNever;
  for (const auto& [id, l] : leases_) {
    t = std::min(t, l.goodbye);
    if (l.qp && l.established) t = std::min(t, l.heard + (l.probing ? kPeerDead : kProbeAfter));
  }
  return t;
}

void VerbsMemd::shutdown(Time now) {
  closing_ = true;
  for (auto& [id, l] : leases_)
    if (l.part) end(l, true, now);
}

}  // namespace

std::unique_ptr<MemdServer> make_verbs_memd(const MemdConfig& config, LeaseTable& table) {
  return std::make_unique<VerbsMemd>(config, table);
}

}  // namespace millrace::host
