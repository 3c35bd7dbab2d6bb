// Ports and packet buffers on DPDK: with worker and main the only files that know it. A FrameBuffer lives in
// the private area of an rte_mbuf, so a received mbuf is a frame without a copy or an allocation. One worker
// thread receives, sends, and frees on all ports; a pool and its frames are that thread's.
#pragma once

#include <rte_ethdev.h>
#include <rte_mbuf.h>

#include <string>

#include "roce/frame.h"
#include "switch/config.h"
#include "switch/control.h"
#include "switch/port_setup.h"

namespace millrace::switching {

// The private area of each of our mbufs.
struct MbufPrivate {
  FrameBuffer frame;
  rte_mbuf_ext_shared_info shared_info;  // of the payload that this mbuf has attached while it is being sent
};

// Frames in mbufs. Who holds what, in terms of DPDK's reference count and ours:
//  - In the mempool, in this pool's list and while a Frame is alive, an mbuf is a single direct segment with
//    refcnt 1; DPDK's count does not change, FrameBuffer::owners counts our owners. So mbufs move between the
//    mempool and the list in bulk, without being touched.
//  - Receiving: the driver hands over an mbuf with refcnt 1; wrap() gives it one owner.
//  - Sending (Port::to_mbuf): a frame with one owner and no shared payload *becomes* the driver's mbuf; the
//    driver's free returns it to the mempool, and its FrameBuffer means nothing until it is taken again. A
//    frame with further owners is copied, as the driver would free it under them.
//  - A shared payload leaves as the second segment of a chain: an mbuf of its own, attached to the payload's
//    bytes as an external buffer. The owner count that the frame held on the payload's FrameBuffer passes to
//    that attachment, and its free callback gives it up. The attachment has a shared_info of its own with
//    count 1, so freeing it takes DPDK's path without an atomic, and the payload's own mbuf is never touched.
//    The callback runs inside the driver's transmit or in stop(), both on the worker's thread: our plain
//    count is safe.
class MbufPool final : public FramePool {
 public:
  // Throws millrace::Error when there is no memory.
  MbufPool(uint32_t count, uint32_t room);
  // All frames are back, or the driver's.
  ~MbufPool() override;

  rte_mempool* store() const { return store_; }
  uint32_t count() const { return count_; }
  uint32_t room() const { return room_; }
  uint32_t available() const { return rte_mempool_avail_count(store_); }  // without cached()

  // A received mbuf of one segment.
  static Frame wrap(rte_mbuf* m) noexcept {
    FrameBuffer* b = &private_of(m)->frame;
    FramePool::reset(b);
    b->offset = m->data_off;
    b->length = m->data_len;
    return Frame(b);
  }
  static MbufPrivate* private_of(rte_mbuf* m) { return static_cast<MbufPrivate*>(rte_mbuf_to_priv(m)); }
  static rte_mbuf* mbuf_of(FrameBuffer* b) {
    return reinterpret_cast<rte_mbuf*>(reinterpret_cast<uint8_t*>(b) - sizeof(rte_mbuf));
  }

 private:
  void refill() noexcept override;
  void spill(uint32_t keep) noexcept override;

  uint32_t count_, room_;
  rte_mempool* store_;
};

class Port {
 public:
  // Probes, configures and starts the device; throws millrace::Error. `index` is the port's number in the
  // pipeline.
  Port(const PortConfig& config, uint16_t index, MbufPool& pool);
  ~Port();
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;

  // Once, before the first burst: see configure_pfc().
  void set_up_pfc(const buffering::PortConfig& config);
  const PfcOutcome& pfc() const { return pfc_; }
  // Bit/s; 0: the device cannot tell, or its link is down.
  uint64_t link_bps() const noexcept;
  const std::string& name() const { return name_; }

  // One burst, appended to `to`; the number of frames.
  uint32_t receive(FrameList& to) noexcept;
  // Whether the frame may be sent now; if not, the reason is counted and the frame is to be dropped.
  bool admits(const Frame& frame) noexcept;
  // Queues a frame that was admitted; flush() hands it to the driver.
  void send(Frame frame) noexcept { queue_.push(std::move(frame)); }
  // What the driver does not take stays for the next call.
  void flush() noexcept;
  // How many frames the traffic manager may send here now: few, so that they wait in its queues, not in ours.
  uint32_t room() const { return has_queued() ? 0 : kRoom; }
  bool link_up() const noexcept;
  bool has_queued() const { return !queue_.empty() || refused_count_ > 0; }
  // Drops what is queued and stops the device.
  void stop() noexcept;

  PortStatus status() const;  // without impairment and capture

 private:
  static constexpr uint16_t kBurst = 32;
  static constexpr size_t kQueueMax = 4096;  // frames waiting for the driver
  static constexpr uint32_t kRoom = 512;
  static constexpr uint32_t kCopyMax = 256;  // up to this size a copy is cheaper than a chain

  void configure();
  rte_mbuf* to_mbuf(Frame frame) noexcept;
  rte_mbuf* chain(FrameBuffer* b) noexcept;

  std::string name_, device_;
  uint16_t index_;
  uint16_t id_ = RTE_MAX_ETHPORTS;  // DPDK's
  MbufPool& pool_;
  bool multi_segments_ = false;
  bool started_ = false;
  uint32_t frame_bytes_max_ = 0;  // of an untagged frame
  FrameList queue_;
  rte_mbuf* refused_[kBurst] = {};  // converted, but the driver's ring was full
  uint16_t refused_count_ = 0;
  PortCounters counters_;
  PfcOutcome pfc_;
};

}  // namespace millrace::switching
