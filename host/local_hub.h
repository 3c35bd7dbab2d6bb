// The leader's side of the combining on its host: a Hub, the sockets of its ranks and the memory that they
// share. It only moves messages. The progress thread is its only caller.
#pragma once

#include <poll.h>

#include <map>

#include "host/hub.h"
#include "host/local_socket.h"

namespace millrace::host {

class LocalHub {
 public:
  // `listener` is at the group's name; `up`, the transport to the switch, outlives the hub. Throws
  // millrace::Error.
  LocalHub(LocalSocket listener, const HubConfig& config, Transport& up, Time now);

  // Takes what ranks have said; whether there was anything.
  bool receive(Time now);
  // What is due, after receive() and handle().
  void poll(Time now);
  Time next_deadline() const { return hub_.next_deadline(); }
  // Appends what poll(2) should wait on. false: something has arrived meanwhile, do not wait.
  bool prepare_to_wait(std::vector<pollfd>& descriptors);

  Hub& hub() { return hub_; }
  const Hub& hub() const { return hub_; }
  uint16_t leader() const { return leader_; }

 private:
  struct Connection {
    LocalSocket socket;
    std::optional<uint32_t> seat;
    bool closed = false;
  };
  void watch(int fd, uint64_t key) const;
  void accept(Time now);
  void drain(uint64_t key, Connection& connection, Time now);
  void handle(uint64_t key, Connection& connection, const LocalMessage& message, Time now);
  void hello(uint64_t key, Connection& connection, const LocalHello& hello, Time now);
  void make_memory(const LocalLayout& layout, Time now);
  void tell_ranks();

  uint16_t leader_;
  std::optional<LocalSocket> listener_;
  FileDescriptor epoll_;
  std::optional<SharedMemory> memory_;  // outlives the hub
  LocalView view_;
  Hub hub_;
  std::map<uint64_t, Connection> connections_;  // by the key of their events
  std::vector<uint64_t> connection_of_;         // by seat
  uint64_t next_key_ = 1;
};

}  // namespace millrace::host
