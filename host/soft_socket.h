// Moves frames between the soft endpoint and one Ethernet interface, by a packet socket that sees only RoCE
// packets addressed to this host, and holds UDP port 4791 so that the kernel does not answer those packets
// with ICMP. Owned by the context's progress thread. It sends through the interface's queueing discipline,
// never around it, and never drops a frame that the kernel has not taken.
#pragma once

#include <sys/socket.h>

#include <array>
#include <optional>
#include <string>

#include "host/file_descriptor.h"
#include "host/kernel_resolver.h"
#include "roce/frame.h"

namespace millrace::host {

class SoftSocket {
 public:
  static constexpr uint32_t kBurst = 64;

  struct Counters {
    uint64_t received = 0, sent = 0, bytes_received = 0, bytes_sent = 0;
    uint64_t truncated = 0;      // longer than a frame buffer: not what any path MTU here allows; dropped
    uint64_t back_pressure = 0;  // times the kernel would not take more
  };

  // Throws millrace::Error with a sentence that says what to do. `pool` outlives the socket.
  SoftSocket(const std::string& device, FramePool& pool);
  ~SoftSocket();
  SoftSocket(const SoftSocket&) = delete;
  SoftSocket& operator=(const SoftSocket&) = delete;

  // Appends what has arrived, at most one burst; returns how many. Throws when the interface is gone or down.
  uint32_t receive(FrameList& frames);
  // Takes all frames; what the kernel does not take now is kept, in order, for the next call. Throws as
  // receive().
  void send(FrameList& frames, Time now);

  // For poll(2): readable, and writable while the send buffer is what holds frames back. Where a full
  // queueing discipline does, there is nothing to wait for but time: retry_at().
  int fd() const { return packet_.get(); }
  bool waits_for_room() const { return waits_for_room_; }
  Time retry_at() const { return retry_at_.value_or(kNever); }
  // Frames that still wait take copies of payloads that they borrow; before that memory is given back.
  void own_payloads();
  size_t backlog() const { return waiting_.size() + batch_end_ - batch_begin_; }

  const std::string& device() const { return device_; }
  uint32_t path_mtu_max() const { return path_mtu_max_; }
  uint64_t speed() const { return interface_.speed; }  // bit/s; 0: unknown
  Resolver& resolver() { return resolver_; }
  const Counters& counters() const { return counters_; }
  // Packets that the kernel had no room for in the receive buffer, since the last call.
  uint64_t take_kernel_drops();

 private:
  void open_packet_socket();
  void hold_udp_port(int family);
  bool fill_batch();
  void describe(size_t i);  // batch_[i]'s pieces, for sendmmsg
  void prepare_receive(uint32_t i);
  [[noreturn]] void fail(const char* doing, int error) const;

  std::string device_;
  FramePool& pool_;
  KernelResolver resolver_;
  Interface interface_;
  uint32_t path_mtu_max_;
  FileDescriptor packet_, udp4_, udp6_;
  Counters counters_;

  // Receive: buffers that wait for packets; only those that a packet filled are replaced.
  std::array<Frame, kBurst> empty_;
  std::array<iovec, kBurst> receive_pieces_{};
  std::array<mmsghdr, kBurst> receive_messages_{};

  // Send: frames given to sendmmsg() and not yet taken, then those behind them.
  std::array<Frame, kBurst> batch_;
  std::array<std::array<iovec, 3>, kBurst> send_pieces_{};
  std::array<mmsghdr, kBurst> send_messages_{};
  uint32_t batch_begin_ = 0, batch_end_ = 0;
  FrameList waiting_;
  bool waits_for_room_ = false;
  std::optional<Time> retry_at_;
};

}  // namespace millrace::host
