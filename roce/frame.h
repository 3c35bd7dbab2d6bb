// Owning handles for packet buffers, and the pools that they come from. In the switch a FrameBuffer lives in
// the private area of an rte_mbuf; in simulation and on hosts in front of a heap slab. All of a pool's frames
// are used by one thread: the owner count is a plain integer. Nothing here knows DPDK.
#pragma once

#include <cassert>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>

#include "roce/types.h"

namespace millrace {

class FramePool;

// Bookkeeping of one buffer. A frame on its way out is up to three pieces: its own bytes, a range of another
// buffer that it keeps alive (the payload shared by several results), and a tail of up to 8 bytes (pad,
// ICRC).
struct FrameBuffer {
  FramePool* pool = nullptr;
  FrameBuffer* next = nullptr;    // link of a FrameList or of the pool's free list
  uint8_t* room = nullptr;        // first byte of the buffer
  FrameBuffer* shared = nullptr;  // buffer that holds the payload, this frame being one of its owners
  const uint8_t* shared_data = nullptr;
  uint32_t room_bytes = 0;
  uint32_t offset = 0;  // of the first own byte in the room
  uint32_t length = 0;  // own bytes
  uint32_t shared_length = 0;
  uint32_t owners = 0;
  uint16_t port = 0;  // ingress port on receive, egress port on transmit
  // Of the traffic manager, while the frame waits in a queue: the port and priority group that it is charged
  // to.
  uint16_t source = 0;
  uint8_t group = 0;
  uint8_t tail_length = 0;
  uint8_t tail[8] = {};

  uint8_t* data() { return room + offset; }
  const uint8_t* data() const { return room + offset; }
  uint32_t total_length() const { return length + shared_length + tail_length; }
};

// A pool hands out buffers of one thread from an intrusive list; the list is refilled from and returned to
// the backing store in batches, so that the store's virtual calls and atomics are not paid per packet.
class FramePool {
 public:
  FramePool() = default;
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;
  virtual ~FramePool() = default;

  // A buffer with `kHeadroom` bytes of room before its (empty) data, one owner; nullptr when the store is
  // empty.
  FrameBuffer* take() noexcept {
    if (free_ == nullptr) refill();
    FrameBuffer* b = free_;
    if (b == nullptr) return nullptr;
    free_ = b->next;
    cached_--;
    reset(b);
    return b;
  }
  void give(FrameBuffer* b) noexcept {
    b->next = free_;
    free_ = b;
    if (++cached_ > cache_max_) spill(cache_max_ / 2);
  }
  // Makes a buffer that came from the store by another way (a driver's receive) a fresh one with one owner.
  static void reset(FrameBuffer* b) noexcept {
    b->next = nullptr;
    b->shared = nullptr;
    b->shared_length = 0;
    b->tail_length = 0;
    b->offset = kHeadroom;
    b->length = 0;
    b->owners = 1;
  }
  uint32_t cached() const { return cached_; }
  // Gives everything cached back to the store, so that the store's own count is the truth.
  void flush() noexcept { spill(0); }

  static constexpr uint32_t kHeadroom = 128;

 protected:
  virtual void refill() noexcept = 0;              // adds some buffers with push(), or none
  virtual void spill(uint32_t keep) noexcept = 0;  // removes with pop() until `keep` remain
  void push(FrameBuffer* b) noexcept {
    b->next = free_;
    free_ = b;
    cached_++;
  }
  FrameBuffer* pop() noexcept {
    FrameBuffer* b = free_;
    free_ = b->next;
    cached_--;
    return b;
  }
  uint32_t cache_max_ = 512;

 private:
  FrameBuffer* free_ = nullptr;
  uint32_t cached_ = 0;
};

// Makes a borrowed payload, and the tail behind it, the frame's own; there is room for them, whoever borrowed
// saw to that. A payload that is shared stays so.
inline void own_payload(FrameBuffer* b) noexcept {
  if (b->shared != nullptr) return;
  assert(b->offset + b->total_length() <= b->room_bytes);
  uint8_t* end = b->data() + b->length;
  if (b->shared_length != 0) std::memcpy(end, b->shared_data, b->shared_length);
  std::memcpy(end + b->shared_length, b->tail, b->tail_length);
  b->length = b->total_length();
  b->shared_length = 0;
  b->tail_length = 0;
}

inline void unref(FrameBuffer* b) noexcept {
  assert(b->owners > 0);
  if (--b->owners != 0) return;
  if (FrameBuffer* shared = b->shared) {
    b->shared = nullptr;
    unref(shared);
  }
  b->pool->give(b);
}

// Keeps a buffer alive, nothing more: what a slot or an unacknowledged result holds. Copying adds an owner.
class FrameRef {
 public:
  FrameRef() = default;
  explicit FrameRef(FrameBuffer* b) : b_(b) {
    if (b_) b_->owners++;
  }
  FrameRef(const FrameRef& o) : FrameRef(o.b_) {}
  FrameRef(FrameRef&& o) noexcept : b_(std::exchange(o.b_, nullptr)) {}
  FrameRef& operator=(FrameRef o) noexcept {
    std::swap(b_, o.b_);
    return *this;
  }
  ~FrameRef() { reset(); }
  void reset() {
    if (FrameBuffer* b = std::exchange(b_, nullptr)) unref(b);
  }
  explicit operator bool() const { return b_ != nullptr; }
  FrameBuffer* buffer() const { return b_; }

 private:
  FrameBuffer* b_ = nullptr;
};

// The one owner of a frame on its journey; movable only, so that a frame leaves each place exactly once.
class Frame {
 public:
  Frame() = default;
  explicit Frame(FrameBuffer* b) : b_(b) {}  // takes over the caller's ownership
  Frame(Frame&& o) noexcept : b_(std::exchange(o.b_, nullptr)) {}
  Frame& operator=(Frame&& o) noexcept {
    if (this != &o) {
      if (b_) unref(b_);
      b_ = std::exchange(o.b_, nullptr);
    }
    return *this;
  }
  ~Frame() {
    if (b_) unref(b_);
  }
  static Frame allocate(FramePool& pool) { return Frame(pool.take()); }

  explicit operator bool() const { return b_ != nullptr; }
  FrameBuffer* buffer() const { return b_; }
  FrameBuffer* release() { return std::exchange(b_, nullptr); }
  std::span<uint8_t> bytes() const { return {b_->data(), b_->length}; }  // the frame's own bytes
  uint32_t total_length() const { return b_->total_length(); }
  uint16_t port() const { return b_->port; }
  void set_port(uint16_t port) { b_->port = port; }
  // Copies all pieces in order; `to` has room for total_length() bytes.
  void copy_to(uint8_t* to) const {
    std::memcpy(to, b_->data(), b_->length);
    to += b_->length;
    if (b_->shared_length) std::memcpy(to, b_->shared_data, b_->shared_length);
    to += b_->shared_length;
    if (b_->tail_length) std::memcpy(to, b_->tail, b_->tail_length);
  }

 private:
  FrameBuffer* b_ = nullptr;
};

// A first-in first-out queue of frames linked through the buffers themselves: no allocation, no bound.
class FrameList {
 public:
  FrameList() = default;
  FrameList(FrameList&& o) noexcept { splice(o); }
  FrameList& operator=(FrameList&& o) noexcept {
    clear();
    splice(o);
    return *this;
  }
  ~FrameList() { clear(); }
  void push(Frame f) noexcept {
    FrameBuffer* b = f.release();
    b->next = nullptr;
    (tail_ ? tail_->next : head_) = b;
    tail_ = b;
    size_++;
  }
  Frame pop() noexcept {
    FrameBuffer* b = head_;
    if (b == nullptr) return {};
    head_ = b->next;
    if (head_ == nullptr) tail_ = nullptr;
    b->next = nullptr;
    size_--;
    return Frame(b);
  }
  void splice(FrameList& other) noexcept {
    if (other.head_ == nullptr) return;
    (tail_ ? tail_->next : head_) = other.head_;
    tail_ = other.tail_;
    size_ += other.size_;
    other.head_ = other.tail_ = nullptr;
    other.size_ = 0;
  }
  bool empty() const { return head_ == nullptr; }
  size_t size() const { return size_; }
  const FrameBuffer* front() const { return head_; }
  template <typename F>
  void for_each(F f) {
    for (FrameBuffer* b = head_; b != nullptr; b = b->next) f(b);
  }
  void clear() noexcept {
    while (head_) pop();
  }

 private:
  FrameBuffer* head_ = nullptr;
  FrameBuffer* tail_ = nullptr;
  size_t size_ = 0;
};

// A pool over the heap, for hosts, simulation and tests. `limit` bounds the buffers that exist at once.
class HeapFramePool final : public FramePool {
 public:
  // With `strict`, every frame is its own allocation, freed as soon as it is given back, so that a sanitizer
  // sees each use after release.
  explicit HeapFramePool(uint32_t room_bytes = 4608, uint32_t limit = UINT32_MAX, bool strict = false);
  ~HeapFramePool() override;
  uint32_t in_use() const { return existing_ - cached(); }

 private:
  void refill() noexcept override;
  void spill(uint32_t keep) noexcept override;

  uint32_t room_bytes_;
  uint32_t limit_;
  uint32_t existing_ = 0;
  bool strict_;
};

}  // namespace millrace
