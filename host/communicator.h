// One communicator's state machine: joins through a transport, cuts operations into segments, keeps the
// window, orders results, and turns everything that can go wrong into one sentence. Pure: it sees completions
// and a time, and calls the transport; the context's progress thread is its only caller.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include "aggregation/datatype.h"
#include "host/millrace.h"
#include "host/transport.h"

namespace millrace::host {

// Sizes the transport's queues before START tells the real window, which is cut to it.
inline constexpr uint16_t kWindowMax = 64;

struct CommunicatorConfig {
  std::array<uint8_t, 16> key{};
  uint16_t rank = 0, world = 1;
  uint8_t stripes = 1;
  IpAddress switch_address;
  uint16_t port = 18600;
  uint32_t tenant = 0;
  std::string secret;
  uint32_t mtu = 4096;  // the first one tried; the switch's REJ names another
  Time connect_timeout = std::chrono::seconds(10);
  Time join_timeout = std::chrono::seconds(90);
  bool wait = false;  // for the switch's memory, as long as join_timeout, instead of being refused
  uint64_t nonce_seed = 1;
  // With the other ranks of this host, through memory; what the communicator is given is then their hub's
  // transport.
  bool combine = false;
};

// One operation, from submit() until `done`.
struct Operation {
  aggregation::Collective collective = aggregation::Collective::kAllReduce;
  aggregation::ReduceOp op = aggregation::ReduceOp::kNone;
  aggregation::DataType type = aggregation::DataType::kU8;
  bool bfp =
      false;  // f16, bf16 and f32 cross the network in block floating point; where something is reduced
  bool deterministic = false;
  // What is not 0 is sent as 1: the logical operators, which the switch reduces as bits.
  bool logical = false;
  uint16_t root = 0;
  const uint8_t* send = nullptr;
  uint8_t* recv = nullptr;
  uint64_t bytes = 0;  // of the whole vector: before a reduce-scatter's split, after an all-gather
  // Of send and recv (one for both where one lies within the other); nullopt: registered by the communicator
  // for the call.
  std::optional<MemoryRegion> send_region, recv_region;

  // What of the caller's memory a rank sends from, and what results and its own part are written to.
  uint64_t send_bytes(uint16_t rank, uint16_t world) const;
  uint64_t recv_bytes(uint16_t rank, uint16_t world) const;
  // Data goes through memory of the communicator's, in another form.
  bool staged() const { return bfp || logical; }
  aggregation::DataType wire() const { return bfp ? aggregation::DataType::kBfp8 : type; }

  // Set by the communicator.
  bool done = false;
  mr_status status = MR_IN_PROGRESS;
  std::string text;
  uint64_t sequence = 0, segments = 0;
};

// out[i] = in[i] != 0, of an integer type; in == out is allowed.
void as_logical(aggregation::DataType type, const uint8_t* in, size_t count, uint8_t* out);

class Communicator {
 public:
  // Starts joining at once. `transport` outlives the communicator.
  Communicator(const CommunicatorConfig& config, Transport& transport, Time now);
  ~Communicator();

  enum class State { kJoining, kRunning, kFailed, kClosed };
  State state() const;
  mr_status status() const;         // MR_IN_PROGRESS while joining, MR_OK, or what ended it
  const std::string& text() const;  // the sentence of a failure

  // Queues an operation; the caller keeps it alive and in place until `done`.
  void submit(Operation* operation, Time now);
  // A completion of one of our links.
  void handle(const Completion& completion, Time now);
  bool owns(LinkId link) const;
  // Posts what the window allows, and timers.
  void poll(Time now);
  Time next_deadline() const;
  // Operations end as aborted, links close; kClosed once they have.
  void abort(const std::string& why, Time now);
  void close(Time now);
  LinkStats stats() const;
  // The switch's START; empty before it.
  const std::optional<aggregation::Start>& start() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::host
