// A small laboratory for the traffic manager and the spillway: the shipping pipeline between hosts that send
// RoCEv2 streams, either at a fixed rate or as go-back-N with DCQCN, written from the specification and apart
// from roce/. Every packet carries its number; receivers judge order, loss and marks.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "tools/sim/network.h"
#include "tools/sim/nic_cm.h"
#include "tools/sim/nic_dcqcn.h"
#include "tools/sim/nic_wire.h"
#include "tools/sim/switch_node.h"

namespace millrace::sim {

struct StreamConfig {
  uint16_t from = 0, to = 1;
  double gbit = 1;          // on the wire, of an open loop; the NIC's line rate of a closed one
  Time start{}, length{};   // of an open loop
  uint64_t packets = 0;     // instead of a length, and always of a closed loop
  uint32_t payload = 1024;  // bytes
  uint8_t dscp = 26, ecn = 2;
  uint8_t odd_dscp = 26;  // of every second packet
  uint8_t opcode = kOpSendMiddle;
  bool closed = false;  // go-back-N: waits for acknowledgements, repeats
  bool dcqcn = false;
  DcqcnParameters reaction{.least_gbit = 0.01};  // its line rate is `gbit`
  Time timeout = std::chrono::milliseconds(67);
  uint32_t window = 1u << 20;  // packets in flight
};

// What both ends know of a stream.
struct Stream {
  StreamConfig config;
  uint32_t qpn = 0, sender_qpn = 0;  // the receiver's and the sender's
  // Sender.
  uint64_t sent = 0, retransmitted = 0, timeouts = 0, naks = 0, cnps = 0;
  uint64_t una = 0, next = 0;
  Time next_at{}, timer = kNever, done_at = kNever;
  std::vector<Time> sent_at;  // first time, by number
  std::optional<Dcqcn> rate;
  // Receiver.
  uint64_t received = 0, in_order = 0, overtaken = 0, gaps = 0, duplicates = 0, marked = 0, expected = 0;
  int64_t last = -1;
  bool nak_out = false;
  Time last_at{}, latency_max{}, cnp_at{-1'000'000'000};

  uint64_t frame_bytes() const { return 14 + 20 + 8 + 12 + config.payload + 4; }
  uint64_t wire_bytes() const { return frame_bytes() + kEthernetOverhead; }
  uint64_t packets() const {
    if (config.packets != 0) return config.packets;
    const double bits = static_cast<double>(config.length.count()) * config.gbit;
    return static_cast<uint64_t>(bits / 8 / static_cast<double>(wire_bytes()) + 0.5);
  }
  bool finished() const { return config.closed ? una >= packets() : next >= packets(); }
};

class LabHost final : public Node {
 public:
  LabHost(uint16_t index, double gbit) : index_(index), ns_per_byte_(8 / gbit) {}

  MacAddress mac() const { return {{2, 0, 0, 1, 0, static_cast<uint8_t>(index_)}}; }
  IpAddress address() const {
    const uint8_t four[4] = {10, 77, 0, static_cast<uint8_t>(10 + index_)};
    return IpAddress::from_v4(four);
  }
  void pause_us(uint8_t priority, Time when, uint16_t quanta) {
    frames_.push_back({when, pause_frame(priority, quanta)});
  }
  void send_at(Time when, std::vector<uint8_t> frame) { frames_.push_back({when, std::move(frame)}); }
  std::vector<uint8_t> pause_frame(uint8_t priority, uint16_t quanta) const;

  std::vector<Stream*> out, in;
  std::vector<std::vector<uint8_t>> seen;  // everything, if `keep`
  bool keep = false;
  bool obeys_pause = true;
  uint64_t pauses = 0, resumes = 0;
  Time paused_until{};

 private:
  friend class Lab;
  struct Timed {
    Time at;
    std::vector<uint8_t> frame;
  };
  void run(Time now) override;
  Time next_deadline() const override;
  void receive(std::span<const uint8_t> bytes, Time now);
  void take_data(Stream& s, const NicPacket& p, Time now);
  void take_ack(Stream& s, const NicPacket& p, Time now);
  void answer(const Stream& s, uint8_t opcode, uint8_t syndrome, uint64_t number);
  bool may_send(const Stream& s, Time now) const;
  void send_one(Stream& s, Time now);
  void put(std::span<const uint8_t> frame, Time now);
  NicPacket packet(const Stream& s) const;

  uint16_t index_;
  double ns_per_byte_;
  std::vector<Timed> frames_;
  std::vector<LabHost*> peers_;
  Time free_at_{};
  size_t turn_ = 0;
};

struct LabConfig {
  uint16_t hosts = 3;
  double host_gbit = 10;
  std::vector<Time> delay;    // of each host's link; empty: 1 µs
  buffering::Config buffers;  // ports are filled up to `hosts`
  bool buffered = true;
  uint64_t seed = 1;
};

class Lab {
 public:
  explicit Lab(const LabConfig& config);
  ~Lab();

  Stream& add(const StreamConfig& config);
  // The connection manager's exchange of a stream, its request at `when`; both ends have heard it two round
  // trips later.
  void connect(const Stream& s, Time when);
  // Until all streams have been sent and nothing is on its way, or `limit`.
  bool run(Time limit);
  void run_until(Time when) {
    network_.run([] { return false; }, when - network_.now());
  }

  Network& network() { return network_; }
  LabHost& host(uint16_t i) { return *hosts_[i]; }
  SwitchNode& at() { return *switch_; }
  const buffering::TrafficManager& buffers() const { return *switch_->pipeline().buffers(); }
  const buffering::Spillway& spillway() const { return *buffers().spillway(); }
  std::vector<std::unique_ptr<Stream>>& streams() { return streams_; }

 private:
  std::vector<uint8_t> cm_frame(const LabHost& from, const LabHost& to, const CmMad& mad) const;

  LabConfig config_;
  Network network_;
  std::unique_ptr<SwitchNode> switch_;
  std::vector<std::unique_ptr<LabHost>> hosts_;
  std::vector<std::unique_ptr<Stream>> streams_;
};

// Ports as the scenarios have them: one lossy class, DSCP 26 in queue 3.
buffering::PortConfig lab_port(double rate_gbit, uint64_t queue_limit, bool spill);

}  // namespace millrace::sim
