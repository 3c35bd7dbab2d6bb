// Priority flow control by receive queue is not yet in DPDK's stable interface.
#define ALLOW_EXPERIMENTAL_API
#include "switch/port.h"

#include <net/if.h>
#include <rte_bus.h>
#include <rte_dev.h>
#include <rte_errno.h>
#include <rte_ether.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <new>

#include "roce/error.h"
#include "switch/copy.h"

namespace millrace::switching {

static_assert(FramePool::kHeadroom == RTE_PKTMBUF_HEADROOM);
static_assert(sizeof(MbufPrivate) % RTE_MBUF_PRIV_ALIGN == 0);

namespace {

constexpr uint16_t kDescriptors = 1024;
constexpr uint32_t kMempoolCache = 256;
constexpr uint32_t kBulk = 64;

std::string dpdk_error(int code) { return rte_strerror(code < 0 ? -code : code); }

// The value of `key=` in a devargs string; empty when it is not there.
std::string devarg(const std::string& device, const std::string& key) {
  const size_t at = device.find("," + key + "=");
  if (at == std::string::npos) return {};
  const size_t from = at + key.size() + 2;
  return device.substr(from, device.find(',', from) - from);
}

// The MTU of a network interface; 0 when there is none of this name.
uint32_t interface_mtu(const std::string& interface) {
  ifreq request{};
  interface.copy(request.ifr_name, sizeof(request.ifr_name) - 1);
  const int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return 0;
  const int rc = ioctl(fd, SIOCGIFMTU, &request);
  close(fd);
  return rc == 0 ? static_cast<uint32_t>(request.ifr_mtu) : 0;
}

class DpdkPfc final : public PfcDevice {
 public:
  explicit DpdkPfc(uint16_t id) : id_(id) {}
  int queue_abilities(PfcQueueAbilities& abilities) override {
    rte_eth_pfc_queue_info info{};
    const int rc = rte_eth_dev_priority_flow_ctrl_queue_info_get(id_, &info);
    abilities.classes = info.tc_max;
    abilities.sends = info.mode_capa == RTE_ETH_FC_FULL || info.mode_capa == RTE_ETH_FC_TX_PAUSE;
    return rc;
  }
  int queue_configure(const PfcRequest& request) override {
    rte_eth_pfc_queue_conf conf{};
    conf.mode = request.on ? RTE_ETH_FC_TX_PAUSE : RTE_ETH_FC_NONE;
    conf.tx_pause.pause_time = request.pause_time;
    conf.tx_pause.rx_qid = request.rx_queue;
    conf.tx_pause.tc = request.priority;
    return rte_eth_dev_priority_flow_ctrl_queue_configure(id_, &conf);
  }
  int priority_set(const PfcRequest& request) override {
    rte_eth_pfc_conf conf{};
    conf.priority = request.priority;
    conf.fc.mode = request.on ? RTE_ETH_FC_TX_PAUSE : RTE_ETH_FC_NONE;
    conf.fc.high_water = request.high_water;
    conf.fc.low_water = request.low_water;
    conf.fc.pause_time = request.pause_time;
    conf.fc.mac_ctrl_frame_fwd = 1;
    return rte_eth_dev_priority_flow_ctrl_set(id_, &conf);
  }
  int pass_pauses_up() override {
    rte_eth_fc_conf conf{};
    if (const int rc = rte_eth_dev_flow_ctrl_get(id_, &conf); rc != 0) return rc;
    conf.mode = RTE_ETH_FC_NONE;
    conf.mac_ctrl_frame_fwd = 1;
    return rte_eth_dev_flow_ctrl_set(id_, &conf);
  }

 private:
  uint16_t id_;
};

void unref_payload(void*, void* payload) { unref(static_cast<FrameBuffer*>(payload)); }

}  // namespace

MbufPool::MbufPool(uint32_t count, uint32_t room) : count_(count), room_(room) {
  store_ = rte_pktmbuf_pool_create("frames", count, kMempoolCache, sizeof(MbufPrivate),
                                   static_cast<uint16_t>(room), SOCKET_ID_ANY);
  if (store_ == nullptr)
    throw Error(ErrorCode::kSystem, "frames: no memory for " + std::to_string(count) + " frames of " +
                                        std::to_string(room) + " bytes (" + dpdk_error(rte_errno) +
                                        "): lower frames.count, or give more with eal: [\"-m\", MEGABYTES]");
  rte_mempool_obj_iter(
      store_,
      [](rte_mempool*, void* self, void* object, unsigned) {
        auto* m = static_cast<rte_mbuf*>(object);
        auto* priv = new (private_of(m)) MbufPrivate{};
        priv->frame.pool = static_cast<MbufPool*>(self);
        priv->frame.room = static_cast<uint8_t*>(m->buf_addr);
        priv->frame.room_bytes = m->buf_len;
      },
      this);
}

MbufPool::~MbufPool() {
  flush();
  rte_mempool_free(store_);
}

void MbufPool::refill() noexcept {
  void* objects[kBulk];
  // Near the end of the store a whole bulk may not be there: then one by one.
  const uint32_t n = rte_mempool_get_bulk(store_, objects, kBulk) == 0 ? kBulk : 1;
  if (n == 1 && rte_mempool_get(store_, objects) != 0) return;
  for (uint32_t i = 0; i < n; i++) push(&private_of(static_cast<rte_mbuf*>(objects[i]))->frame);
}

void MbufPool::spill(uint32_t keep) noexcept {
  void* objects[kBulk];
  while (cached() > keep) {
    uint32_t n = 0;
    while (n < kBulk && cached() > keep) objects[n++] = mbuf_of(pop());
    rte_mempool_put_bulk(store_, objects, n);
  }
}

Port::Port(const PortConfig& config, uint16_t index, MbufPool& pool)
    : name_(config.name), device_(config.device), index_(index), pool_(pool) {
  const std::string what = "port " + name_ + ": device '" + device_ + "': ";
  const std::string interface = devarg(device_, "iface");
  const uint32_t mtu = interface.empty() ? 0 : interface_mtu(interface);
  if (!interface.empty() && mtu == 0)
    throw Error(ErrorCode::kNoDevice, what + "there is no interface '" + interface + "' in this namespace");
  // af_packet cuts longer frames off without a word: 96 bytes are its own header's.
  const std::string frame_size = devarg(device_, "framesz");
  const uint32_t needed = mtu + RTE_ETHER_HDR_LEN + 4 + 96;
  if (device_.starts_with("net_af_packet") &&
      std::atol(frame_size.empty() ? "2048" : frame_size.c_str()) < needed)
    throw Error(ErrorCode::kNoDevice, what + "framesz must be at least " + std::to_string(needed) +
                                          " for the interface's MTU of " + std::to_string(mtu) +
                                          ", or longer frames are cut off");

  const int rc = rte_dev_probe(device_.c_str());
  if (rc != 0 && rc != -EEXIST)
    throw Error(ErrorCode::kNoDevice, what + "cannot be opened (" + dpdk_error(rc) + ")");
  const std::string device_name = device_.substr(0, device_.find(','));
  if (rte_eth_dev_get_port_by_name(device_name.c_str(), &id_) != 0)
    throw Error(ErrorCode::kNoDevice, what + "was opened, but is no Ethernet device");
  frame_bytes_max_ = mtu != 0 ? mtu + RTE_ETHER_HDR_LEN : 0;
  try {
    configure();
  } catch (const Error& e) {
    stop();
    throw Error(e.code(), what + e.what());
  }
}

void Port::configure() {
  auto check = [](int rc, const char* step) {
    if (rc != 0) throw Error(ErrorCode::kNoDevice, std::string(step) + " failed (" + dpdk_error(rc) + ")");
  };
  rte_eth_dev_info info;
  check(rte_eth_dev_info_get(id_, &info), "reading its abilities");
  rte_eth_conf conf{};
  multi_segments_ = (info.tx_offload_capa & RTE_ETH_TX_OFFLOAD_MULTI_SEGS) != 0;
  if (multi_segments_) conf.txmode.offloads |= RTE_ETH_TX_OFFLOAD_MULTI_SEGS;
  check(rte_eth_dev_configure(id_, 1, 1, &conf), "configuring it");
  uint16_t rx = kDescriptors, tx = kDescriptors;
  check(rte_eth_dev_adjust_nb_rx_tx_desc(id_, &rx, &tx), "sizing its rings");
  const int node = rte_eth_dev_socket_id(id_);
  const auto socket = static_cast<unsigned>(node);
  check(rte_eth_rx_queue_setup(id_, 0, rx, socket, nullptr, pool_.store()), "setting up its receive queue");
  check(rte_eth_tx_queue_setup(id_, 0, tx, socket, nullptr), "setting up its transmit queue");
  if (frame_bytes_max_ == 0) {
    // No kernel interface behind it that has an MTU of its own: as long as our buffers allow.
    uint16_t mtu = static_cast<uint16_t>(
        std::min<uint32_t>(info.max_mtu, pool_.room() - RTE_PKTMBUF_HEADROOM - RTE_ETHER_HDR_LEN - 8));
    if (rte_eth_dev_set_mtu(id_, mtu) != 0 && rte_eth_dev_get_mtu(id_, &mtu) != 0) mtu = RTE_ETHER_MTU;
    frame_bytes_max_ = mtu + uint32_t{RTE_ETHER_HDR_LEN};
  }
  check(rte_eth_dev_start(id_), "starting it");
  started_ = true;
  // Some virtual devices have no such mode, as they see every frame anyway.
  const int promiscuous = rte_eth_promiscuous_enable(id_);
  if (promiscuous != -ENOTSUP) check(promiscuous, "enabling promiscuous mode");
}

void Port::stop() noexcept {
  queue_.clear();
  rte_pktmbuf_free_bulk(refused_, refused_count_);
  refused_count_ = 0;
  if (id_ == RTE_MAX_ETHPORTS) return;
  if (started_) rte_eth_dev_stop(id_);
  rte_eth_dev_close(id_);
  id_ = RTE_MAX_ETHPORTS;
}

Port::~Port() { stop(); }

uint32_t Port::receive(FrameList& to) noexcept {
  rte_mbuf* burst[kBurst];
  const uint16_t n = rte_eth_rx_burst(id_, 0, burst, kBurst);
  for (uint16_t i = 0; i < n; i++) {
    rte_mbuf* m = burst[i];
    counters_.rx_frames++;
    counters_.rx_bytes += m->pkt_len;
    // A tag that the device took off belongs to the frame.
    const bool tag_lost = (m->ol_flags & RTE_MBUF_F_RX_VLAN_STRIPPED) && rte_vlan_insert(&m) != 0;
    if (tag_lost || (m->nb_segs > 1 && rte_pktmbuf_linearize(m) != 0)) {
      counters_.rx_too_long++;
      rte_pktmbuf_free(m);
      continue;
    }
    Frame frame = MbufPool::wrap(m);
    frame.set_port(index_);
    to.push(std::move(frame));
  }
  return n;
}

bool Port::admits(const Frame& frame) noexcept {
  if (const uint32_t bytes = frame.total_length(); bytes > frame_bytes_max_) {
    // A tag comes on top of the MTU.
    const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(frame.bytes().data());
    if (eth.ether_type.value() != roce::kEtherTypeVlan || bytes > frame_bytes_max_ + sizeof(roce::VlanTag)) {
      counters_.tx_too_long++;
      return false;
    }
  }
  if (queue_.size() >= kQueueMax) {
    counters_.tx_queue_full++;
    return false;
  }
  return true;
}

void Port::flush() noexcept {
  while (has_queued()) {
    while (refused_count_ < kBurst && !queue_.empty()) {
      rte_mbuf* m = to_mbuf(queue_.pop());
      if (m == nullptr) {
        counters_.tx_pool_empty++;
        continue;
      }
      refused_[refused_count_++] = m;
    }
    if (refused_count_ == 0) return;
    uint32_t bytes[kBurst];
    for (uint16_t i = 0; i < refused_count_; i++)
      bytes[i] = refused_[i]->pkt_len;  // the driver frees what it takes
    const uint16_t sent = rte_eth_tx_burst(id_, 0, refused_, refused_count_);
    for (uint16_t i = 0; i < sent; i++) counters_.tx_bytes += bytes[i];
    counters_.tx_frames += sent;
    refused_count_ = static_cast<uint16_t>(refused_count_ - sent);
    std::memmove(refused_, refused_ + sent, refused_count_ * sizeof(refused_[0]));
    if (refused_count_ > 0) return;  // its ring is full: again in the next loop
  }
}

// The frame as the driver wants it; nullptr when the pool is empty. MbufPool's comment says who owns what.
rte_mbuf* Port::to_mbuf(Frame frame) noexcept {
  FrameBuffer* b = frame.buffer();
  const bool foreign = b->pool != &pool_ || (b->shared != nullptr && b->shared->pool != &pool_);
  const bool pieces = b->shared != nullptr || b->tail_length > 0;
  const bool chainable = multi_segments_ && b->shared_length > 0 && b->total_length() > kCopyMax;
  const bool copy = foreign || b->owners > 1 || (pieces && !chainable);
  if (copy) {
    frame = copy_flat(pool_, frame);
    if (!frame) return nullptr;
    b = frame.buffer();
  } else if (pieces) {
    return chain(frame.release());
  }
  rte_mbuf* m = MbufPool::mbuf_of(frame.release());
  rte_pktmbuf_reset(m);
  m->data_off = static_cast<uint16_t>(b->offset);
  m->data_len = static_cast<uint16_t>(b->length);
  m->pkt_len = b->length;
  return m;
}

// [headers] → [attachment to the shared payload] → [pad and ICRC, at least the latter's four bytes].
rte_mbuf* Port::chain(FrameBuffer* b) noexcept {
  Frame frame(b);
  assert(b->shared_length > 0 && b->tail_length > 0);
  Frame second = Frame::allocate(pool_), third = Frame::allocate(pool_);
  if (!second || !third) return nullptr;

  FrameBuffer* payload = b->shared;
  auto* info = &MbufPool::private_of(MbufPool::mbuf_of(second.buffer()))->shared_info;
  info->free_cb = unref_payload;
  info->fcb_opaque = payload;
  rte_mbuf_ext_refcnt_set(info, 1);
  // Our count on the payload passes to the attachment.
  b->shared = nullptr;

  rte_mbuf* middle = MbufPool::mbuf_of(second.release());
  rte_pktmbuf_reset(middle);
  const rte_iova_t iova =
      rte_mbuf_iova_get(MbufPool::mbuf_of(payload)) + static_cast<uint64_t>(b->shared_data - payload->room);
  rte_pktmbuf_attach_extbuf(middle, const_cast<uint8_t*>(b->shared_data), iova,
                            static_cast<uint16_t>(b->shared_length), info);
  middle->data_len = static_cast<uint16_t>(b->shared_length);

  std::memcpy(third.buffer()->data(), b->tail, b->tail_length);
  rte_mbuf* tail = MbufPool::mbuf_of(third.release());
  rte_pktmbuf_reset(tail);
  tail->data_len = b->tail_length;

  rte_mbuf* head = MbufPool::mbuf_of(frame.release());
  rte_pktmbuf_reset(head);
  head->data_off = static_cast<uint16_t>(b->offset);
  head->data_len = static_cast<uint16_t>(b->length);
  head->pkt_len = b->length + b->shared_length + b->tail_length;
  head->nb_segs = 3;
  head->next = middle;
  middle->next = tail;
  counters_.tx_chained++;
  return head;
}

bool Port::link_up() const noexcept {
  rte_eth_link link{};
  // A device that cannot tell has its link up.
  return rte_eth_link_get_nowait(id_, &link) != 0 || link.link_status == RTE_ETH_LINK_UP;
}

void Port::set_up_pfc(const buffering::PortConfig& config) {
  DpdkPfc device(id_);
  try {
    pfc_ = configure_pfc(device, config);
  } catch (const Error& e) {
    throw Error(e.code(), "port " + name_ + ": device '" + device_ + "': " + e.what());
  }
}

uint64_t Port::link_bps() const noexcept {
  rte_eth_link link{};
  if (rte_eth_link_get_nowait(id_, &link) != 0 || link.link_status != RTE_ETH_LINK_UP) return 0;
  return link.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN ? 0 : link.link_speed * uint64_t{1'000'000};
}

PortStatus Port::status() const {
  PortStatus status;
  status.name = name_;
  status.device = device_;
  status.frame_bytes_max = frame_bytes_max_;
  status.multi_segments = multi_segments_;
  status.counters = counters_;
  rte_eth_link link{};
  if (rte_eth_link_get_nowait(id_, &link) == 0) {
    status.link_up = link.link_status == RTE_ETH_LINK_UP;
    status.speed_mbps = link.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN ? 0 : link.link_speed;
  }
  rte_eth_stats stats{};
  if (rte_eth_stats_get(id_, &stats) == 0) {
    status.counters.device_missed = stats.imissed;
    status.counters.device_rx_errors = stats.ierrors;
    status.counters.device_tx_errors = stats.oerrors;
    status.counters.device_no_buffer = stats.rx_nombuf;
  }
  return status;
}

}  // namespace millrace::switching
