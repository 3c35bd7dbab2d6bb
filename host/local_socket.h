// What the ranks of one user on one host need of the kernel to find each other and to share memory: an
// abstract Unix socket whose name is the group's, packets with descriptors, a memory file. Abstract names
// belong to the network namespace and end with their process, so nothing is ever left behind. Nothing here
// blocks.
#pragma once

#include <optional>
#include <string>

#include "host/communicator.h"
#include "host/file_descriptor.h"
#include "host/local_message.h"

namespace millrace::host {

// Memory that several processes map: by whoever makes it, then by those who get its descriptor.
class SharedMemory {
 public:
  SharedMemory() = default;
  // Zeroed, and reserved: what the system has no room for shows here. Throws millrace::Error.
  static SharedMemory create(size_t bytes);
  // Throws millrace::Error.
  static SharedMemory map(FileDescriptor file, size_t bytes);
  SharedMemory(SharedMemory&& o) noexcept;
  SharedMemory& operator=(SharedMemory&& o) noexcept;
  ~SharedMemory();

  uint8_t* base() const { return base_; }
  int file() const { return file_.get(); }

 private:
  FileDescriptor file_;
  uint8_t* base_ = nullptr;
  size_t bytes_ = 0;
};

class LocalSocket {
 public:
  LocalSocket() = default;
  // Of the group whose ranks meet: equal at all of them, different for anybody else.
  static std::string name_of(const CommunicatorConfig& config);
  // Those that return nothing: the name is taken; nobody listens; nobody has connected. All throw
  // millrace::Error for anything else, another user at the other end included.
  static std::optional<LocalSocket> listen(const std::string& name);
  static std::optional<LocalSocket> connect(const std::string& name);
  std::optional<LocalSocket> accept() const;

  // false: the other end is gone.
  bool send(const LocalMessage& message, int file = -1) const;
  enum class Received : uint8_t { kNothing, kMessage, kClosed };
  // `file`: the descriptor that came along.
  Received receive(LocalMessage& message, FileDescriptor& file) const;
  // Waits for a message; kNothing after the time-out.
  Received wait(LocalMessage& message, int timeout_ms) const;

  int fd() const { return fd_.get(); }
  // Readable once the other end's process is over, even where a forked child still holds the socket; -1 where
  // the kernel does not tell.
  int process_fd() const { return process_fd_.get(); }
  bool process_over() const;
  uint32_t process() const { return process_; }
  // For the other end, at once and whoever else holds the socket.
  void shut() const;

 private:
  explicit LocalSocket(int fd) : fd_(fd) {}
  bool meet();

  FileDescriptor fd_, process_fd_;
  uint32_t process_ = 0;
};

}  // namespace millrace::host
