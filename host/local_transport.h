// A LocalRank's socket and memory: what a rank needs of the kernel to combine with the other ranks of its
// host. The progress thread is its only caller.
#pragma once

#include <poll.h>

#include "host/local_rank.h"
#include "host/local_socket.h"

namespace millrace::host {

class LocalTransport final : public LocalRank {
 public:
  // Of a connection that a hub has accepted; `leader`: the rank whose process has it.
  LocalTransport(LocalSocket socket, uint16_t leader);
  ~LocalTransport() override;

  // Takes the hub's messages; whether there were any.
  bool receive(Time now);
  // Appends what poll(2) should wait on. false: something has arrived meanwhile, do not wait.
  bool prepare_to_wait(std::vector<pollfd>& descriptors);

 private:
  void say(const LocalMessage& message) override { socket_.send(message); }
  void hang_up() override { socket_.shut(); }
  void start(const LocalMessage& message, FileDescriptor file, Time now);

  LocalSocket socket_;
  std::optional<SharedMemory> memory_;
};

}  // namespace millrace::host
