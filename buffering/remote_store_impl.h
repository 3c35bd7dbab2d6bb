// What the two halves of RemoteStore share: packets (remote_store.cc) and leases (remote_store_lease.cc).
// Nobody else includes it.
#pragma once

#include <algorithm>
#include <array>
#include <random>
#include <string>

#include "buffering/lazy_array.h"
#include "buffering/remote_store.h"
#include "buffering/slots.h"

namespace millrace::buffering {

namespace lent {

inline constexpr uint32_t kNone = Slots::kNone;
inline constexpr uint32_t kPacketsPerTurn = 64;
inline constexpr Time kStarvedFor = std::chrono::microseconds(100);
inline constexpr uint32_t kLendersMax = 64;
// By one READ, that are worth asking for ahead: of RoCE packets of 1 KiB as many bytes as of long ones. They
// wait for their port in frames, so no more.
inline constexpr uint32_t kReadPacketsMax = 4;
inline constexpr uint32_t kSlotsMax = 1u << 24;  // of one lender

// A packet of full length is longer than the path MTU by its headers. These few bytes stay here, or each
// packet would cross the network as two, there and back.
inline constexpr uint32_t kHeadMax = 128;
using Head = std::array<uint8_t, kHeadMax>;

// Where a packet is. Each but kFree is a list that it stands in.
enum class Where : uint8_t { kFree, kHeld, kAsked, kReading, kEvent };

struct Entry {
  uint32_t before, after;  // in its list
  uint32_t slot;
  uint32_t mate;     // the next one in the slot
  uint32_t request;  // of kReading: the READ that brings it, so that no other's bytes are taken for it
  // Of an event the packet, or nullptr when it is lost; of kReading where it goes, unless it is the first of
  // its READ, which has a frame already.
  FrameBuffer* frame;
  uint16_t length, offset;  // in the slot
  uint8_t lender;
  Where where;
};

struct List {
  uint32_t first = kNone, last = kNone;
};

// A work request that is not complete. A WRITE keeps its packets, a READ the frame that it fills.
struct Request {
  uint32_t slot = 0, bytes = 0;
  uint32_t start = 0;  // of a READ, in the slot
  bool read = false;
  Frame frame;
};

}  // namespace lent

struct RemoteStore::Impl {
  using Entry = lent::Entry;
  using Head = lent::Head;
  using List = lent::List;
  using Request = lent::Request;
  using Where = lent::Where;
  static constexpr uint32_t kNone = lent::kNone;
  using State = LenderStatus::State;
  struct Lender {
    LenderConfig config;
    State state = State::kWaiting;
    roce::CmId cm{};
    Qpn qpn;
    Psn first_psn;  // where the lender shall begin
    Time again{}, backoff{}, since{};
    std::unique_ptr<roce::QueuePair> qp;
    uint32_t rkey = 0;
    uint64_t address = 0;
    std::unique_ptr<Slots> slots;
    uint32_t packets = 0;  // in them
    // The slot that small packets are gathered for, its last one, and their bytes.
    uint32_t open = kNone, open_last = kNone, open_room = 0;
    Frame gathered;
    uint32_t depth = 0, reads = 0;  // READs that may be and that are in flight
    std::vector<Request> requests;  // a ring
    uint64_t head = 0, tail = 0;
    List held, asked, reading;
    LenderStatus counts;  // of counters and `why` only

    std::string who() const { return "the lender at " + config.address.to_string(); }
    uint32_t slots_free() const { return slots ? slots->free() : 0; }
    uint64_t slots_used() const { return slots ? slots->used() : 0; }
    Request& at(uint64_t n) { return requests[n & (requests.size() - 1)]; }
  };

  Impl(const RemoteStoreConfig& c, FramePool& p);
  ~Impl();

  void push(List& list, uint32_t id);
  void unlink(List& list, uint32_t id);
  List& list_of(const Entry& e);
  void move(uint32_t id, Where where);
  void let_go(uint32_t id);
  void enter_slot(Lender& l, uint32_t id, uint32_t slot, uint32_t behind, uint32_t offset, uint32_t bytes);
  void leave_slot(Lender& l, uint32_t id);

  uint32_t head_bytes(uint32_t packet) const {
    const uint32_t over = packet % config.mtu;
    return packet > config.mtu && over <= lent::kHeadMax ? over : 0;
  }
  uint64_t address_of(const Lender& l, uint32_t slot) const {
    return l.address + uint64_t{slot} * config.slot_bytes;
  }
  // Of what a shared slot may have beyond the path MTU. It stays here, and is of the first packet.
  uint32_t shared_head_max() const {
    return config.slot_bytes <= config.mtu ? 0 : std::min(config.slot_bytes - config.mtu, lent::kHeadMax);
  }
  uint32_t shared_bytes() const { return std::min(config.mtu, config.slot_bytes) + shared_head_max(); }
  Lender* choose(uint32_t bytes);
  Lender* choose_open(uint32_t bytes);
  bool write(uint32_t id, Frame& frame);
  void post_write(Lender& l, uint32_t slot, Frame frame, uint32_t head);
  void close(Lender& l);
  void pump(Lender& l);
  bool ask(Lender& l, uint32_t slot);
  void complete(Lender& l);
  void bring(Lender& l, uint32_t request, Request& done);

  void connect(Lender& l, Time now, FrameList& out);
  void handle_events(Time now, FrameList& out);
  void handle_reply(Lender& l, const roce::CmEvent& e, Time now, FrameList& out);
  void handle_request(Lender& l, const roce::Packet& packet, Time now, FrameList& out);
  void part(Lender& l, const std::string& why, Time now, FrameList& out);
  void clear(Lender& l);
  std::string refused(const Lender& l, const roce::CmEvent& e) const;

  RemoteStoreConfig config;
  FramePool& pool;
  roce::CmAgent cm;
  roce::Crc32Combine combine;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Lender>> lenders;
  LazyArray<Entry> entries;
  LazyArray<Head> heads;  // by id
  List events;
  uint32_t next_qpn = 0;
  bool closing = false;
  bool work = false;     // something may be ready to send
  bool starved = false;  // a READ waits for a frame to fill
  Time now{};
};

}  // namespace millrace::buffering
