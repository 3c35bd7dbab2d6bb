// Spilled packets in memory that other servers lend over RDMA (REMOTE.md): a packet is written into a slot of
// a lender's memory by RDMA WRITE, small ones together, and comes back by RDMA READ, several at a time; a
// READ behind its WRITE on one connection is in order. The lenders are a pool; one that dies loses what it
// held, and nothing else. Pure; one worker. It allocates when a connection comes and goes, never for a
// packet.
//
// What the pipeline does for it: each RoCE packet for our address whose ICRC is right is offered to receive()
// before the aggregation engine sees it; what receive() and poll() put out is sent as the engine's frames
// are, whose Ethernet destination is zero until the router knows it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "buffering/lease.h"
#include "buffering/store.h"
#include "roce/cm.h"
#include "roce/queue_pair.h"

namespace millrace::buffering {

struct LenderConfig {
  IpAddress address;
  uint16_t port = kLenderPort;
};

struct RemoteStoreConfig {
  MacAddress mac;                    // ours
  std::vector<IpAddress> addresses;  // ours: one of each family that a lender has
  std::vector<LenderConfig> lenders;
  uint32_t ids = 0;            // the caller's, see Store::write()
  uint32_t slot_bytes = 4224;  // the longest packet; a slot is taken whole
  uint32_t mtu = 4096;         // path MTU of the connections
  uint32_t writes_max = 1024;  // packets written to one lender and not acknowledged: each keeps its frame
  uint32_t reads_max = 16;     // in flight from one lender, if it grants as many
  uint64_t bytes_wanted = 0;   // of each lender; 0: what it gives
  uint32_t instance = 0;       // tells borrowers apart that share an address: the worker's number
  uint8_t tos = 0;
  Time connect_timeout = std::chrono::seconds(2);
  Time again_min = std::chrono::milliseconds(100), again_max = std::chrono::seconds(10);
  Time retransmit_timeout = std::chrono::milliseconds(8);
  // A lender that is idle is asked for a sign of life after the one, and is dead after as much silence as the
  // other. What waits behind what it holds waits so long: less than the spillway's max_residence.
  Time probe_after = std::chrono::milliseconds(200);
  Time peer_dead = std::chrono::milliseconds(80);
  uint64_t ca_guid = 0;
  uint64_t seed = 1;
  std::optional<uint32_t> first_psn;  // of tests
};

// Of one lender, for people.
struct LenderStatus {
  enum class State : uint8_t { kWaiting, kConnecting, kConnected };
  LenderConfig lender;
  State state = State::kWaiting;
  uint64_t bytes = 0, used = 0;  // in slots, as size() and used()
  uint64_t held = 0;             // packets
  uint64_t written = 0, read = 0, lost = 0, bytes_written = 0, bytes_read = 0;
  uint64_t connects = 0, deaths = 0, refusals = 0;
  uint64_t packets_sent = 0, retransmitted = 0, reads_again = 0;
  std::string why;  // it is not connected, or was not the last time: a sentence
};

class RemoteStore final : public Store {
 public:
  // QPNs from here on are its own; the aggregation engine gives out those below.
  static constexpr uint32_t kFirstQpn = roce::kStoreQpnFirst;

  // Throws Error (kConfig). `pool` outlives the store. Connecting begins with the first poll().
  RemoteStore(const RemoteStoreConfig& config, FramePool& pool);
  ~RemoteStore() override;

  // Whether the packet is one of its connections', the manager's messages included; then it has been dealt
  // with.
  bool receive(const roce::Packet& packet, Time now, FrameList& out) noexcept;
  // Ends the leases; what is still held is lost. Go on with receive() and poll() until idle().
  void shutdown(Time now, FrameList& out) noexcept;
  bool closing() const;  // shutdown() was called
  bool idle() const;     // and all lenders know

  bool write(uint32_t id, Frame& frame, Time now) noexcept override;
  void read(uint32_t id, Time now) noexcept override;
  void discard(uint32_t id) noexcept override;
  bool next_event(StoreEvent& event) noexcept override;
  void poll(Time now, FrameList& out) noexcept override;
  Time next_deadline() const override;
  uint64_t size() const override;
  uint64_t used() const override;
  uint32_t reads_max() const override;

  size_t lenders() const;
  LenderStatus status(size_t lender) const;
  const roce::CmCounters& cm_counters() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::buffering
