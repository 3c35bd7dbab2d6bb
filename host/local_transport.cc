#include "host/local_transport.h"

#include <utility>

#include "roce/error.h"

namespace millrace::host {

LocalTransport::LocalTransport(LocalSocket socket, uint16_t leader)
    : LocalRank(leader, socket.process()), socket_(std::move(socket)) {}

LocalTransport::~LocalTransport() = default;

bool LocalTransport::receive(Time now) {
  if (over()) return false;
  set_sleeping(false);
  bool any = false;
  while (!over()) {
    LocalMessage message;
    FileDescriptor file;
    switch (socket_.receive(message, file)) {
      case LocalSocket::Received::kNothing:
        if (socket_.process_over()) hub_gone();
        check_hub(now);
        return any;
      case LocalSocket::Received::kClosed:
        hub_gone();
        return true;
      case LocalSocket::Received::kMessage:
        any = true;
        if (message.kind == LocalMessage::Kind::kStart)
          start(message, std::move(file), now);
        else
          handle(std::move(message), now);
        break;
    }
  }
  return any;
}

void LocalTransport::start(const LocalMessage& m, FileDescriptor file, Time now) {
  try {
    if (memory_ || !file)
      throw Error(ErrorCode::kSystem, "this host's leading rank sent a START without memory");
    memory_ = SharedMemory::map(std::move(file), m.layout.bytes());
    LocalRank::start(m, LocalView(m.layout, memory_->base()), now);
  } catch (const Error& e) {
    start_failed(e.what());
  }
}

bool LocalTransport::prepare_to_wait(std::vector<pollfd>& descriptors) {
  if (has_pending()) return false;
  if (over()) return true;
  set_sleeping(true);
  if (results_waiting()) return false;
  descriptors.push_back({socket_.fd(), POLLIN, 0});
  if (socket_.process_fd() >= 0) descriptors.push_back({socket_.process_fd(), POLLIN, 0});
  return true;
}

}  // namespace millrace::host
