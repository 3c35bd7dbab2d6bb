// What a host's RDMA NIC is to the simulated network, whoever wrote it: raw frames in, raw frames out, a
// virtual clock, and the verbs-shaped Transport that a communicator drives. Two kinds exist: SoftNic (the
// shipping soft transport) and NicModel (an independent go-back-N NIC, which shares no code with roce/).
// Single-threaded.
//
// The host (host.h) owns its NIC and calls it in this order, each time with the same `now`:
//   receive() for each frame that has arrived, then transport().poll() and the communicators, then poll().
// A NIC never looks at a clock, draws randomness from NicConfig::seed only, and never iterates in an order
// that depends on addresses in memory: the same calls with the same bytes must give the same frames.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "host/transport.h"
#include "roce/types.h"

namespace millrace::sim {

// The way to an address, as the host's own stack (ARP, neighbour discovery, routes) has resolved it.
struct Resolved {
  MacAddress mac;  // of the destination, or of the gateway to it
  IpAddress source;
};

struct NicConfig {
  MacAddress mac;
  std::vector<IpAddress> addresses;   // its own: one IPv4 and one IPv6
  uint64_t seed = 1;                  // of everything random: QPNs, PSNs, rkeys, CM IDs
  uint64_t ca_guid = 1;               // unique per NIC; a new process on the host has the same
  std::optional<uint32_t> first_psn;  // fixes every first PSN, for tests of the wrap
  double gbit = 100;                  // line rate, for pacing
  // Asked again every few milliseconds while a connect waits for it; nullopt: not known yet.
  std::function<std::optional<Resolved>(const IpAddress& to)> resolve;
};

// Takes what a NIC puts on its wire. Frames are whole Ethernet frames without FCS, from the destination MAC
// to the ICRC. They queue on the host's link, which serialises them at its rate and drops none of them.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  // The bytes are copied before it returns.
  virtual void send(std::span<const uint8_t> frame) = 0;
};

class Nic {
 public:
  virtual ~Nic() = default;
  // One frame off the wire, addressed to our MAC; what the host's stack answers itself (ARP, ND) never comes
  // here. It may be corrupted, repeated, or anybody's: the NIC checks. The bytes are gone when it returns.
  virtual void receive(std::span<const uint8_t> frame, Time now) = 0;
  // Everything due by time, by receive() and by calls of the transport.
  virtual void poll(Time now, FrameSink& out) = 0;
  // When to call poll() again without anything having come; kNever: not before something comes. A time that
  // is not in the future asks to be called at the next instant.
  virtual Time next_deadline() const = 0;
  // Stays the same object for the NIC's life.
  virtual host::Transport& transport() = 0;
  // Whether no connection is left, goodbyes included. The swarm waits for it at the end of a run.
  virtual bool idle() const = 0;
};

using NicFactory = std::function<std::unique_ptr<Nic>(const NicConfig&)>;

}  // namespace millrace::sim
