#include "host/local_socket.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "roce/error.h"

namespace millrace::host {
namespace {

Error failure(const std::string& doing, int error) {
  return Error(ErrorCode::kSystem, "cannot " + doing + ": " + std::system_category().message(error));
}

struct Address {
  sockaddr_un address{};
  socklen_t length;

  explicit Address(const std::string& name) {
    address.sun_family = AF_UNIX;
    // The first byte stays 0: an abstract name.
    const size_t n = name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + n);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

int make_socket() {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) throw failure("make a Unix socket", errno);
  return fd;
}

}  // namespace

// --- memory ---

SharedMemory SharedMemory::create(size_t bytes) {
  const int fd = memfd_create("millrace", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw failure("make memory for the ranks of this host", errno);
  FileDescriptor file(fd);
  const std::string doing =
      "reserve " + std::to_string(bytes >> 10) + " KiB of memory for the ranks of this host";
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw failure(doing, errno);
  if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes)); error != 0)
    throw failure(doing, error);
  // Whoever maps it need not fear that it gets shorter under its feet.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) throw failure(doing, errno);
  return map(std::move(file), bytes);
}

SharedMemory SharedMemory::map(FileDescriptor file, size_t bytes) {
  struct stat status {};
  if (fstat(file.get(), &status) != 0 || static_cast<size_t>(status.st_size) < bytes ||
      (fcntl(file.get(), F_GET_SEALS) & F_SEAL_SHRINK) == 0)
    throw Error(ErrorCode::kSystem, "the memory that this host's leading rank gave is not what it said");
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (base == MAP_FAILED) throw failure("map the memory of this host's ranks", errno);
  SharedMemory memory;
  memory.file_ = std::move(file);
  memory.base_ = static_cast<uint8_t*>(base);
  memory.bytes_ = bytes;
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& o) noexcept
    : file_(std::move(o.file_)), base_(std::exchange(o.base_, nullptr)), bytes_(o.bytes_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& o) noexcept {
  std::swap(file_, o.file_);
  std::swap(base_, o.base_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) munmap(base_, bytes_);
}

// --- sockets ---

std::string LocalSocket::name_of(const CommunicatorConfig& c) {
  std::string what =
      c.switch_address.to_string() + " " + std::to_string(c.port) + " " + std::to_string(c.tenant) + " ";
  what.append(c.key.begin(), c.key.end());
  std::array<uint8_t, EVP_MAX_MD_SIZE> digest{};
  EVP_Digest(what.data(), what.size(), digest.data(), nullptr, EVP_sha256(), nullptr);
  std::string name = "millrace-" + std::to_string(geteuid()) + "-";
  for (size_t i = 0; i < 16; i++) {
    constexpr const char* kDigits = "0123456789abcdef";
    name += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  }
  return name;
}

// Only processes of the same user are met. false: it was over before that could be seen.
bool LocalSocket::meet() {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    throw failure("see who is at the other end of a Unix socket", errno);
  if (peer.uid != geteuid())
    throw Error(ErrorCode::kRefused, "process " + std::to_string(peer.pid) + " of user " +
                                         std::to_string(peer.uid) +
                                         " holds the name at which this host's ranks meet");
  process_ = static_cast<uint32_t>(peer.pid);
  if (peer.pid <= 0) return true;  // of another PID namespace: its end shows in the socket only
  const auto fd = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
  if (fd >= 0) process_fd_ = FileDescriptor(fd);
  return fd >= 0 || errno != ESRCH;
}

std::optional<LocalSocket> LocalSocket::listen(const std::string& name) {
  LocalSocket s(make_socket());
  const Address address(name);
  if (bind(s.fd(), address.get(), address.length) != 0) {
    if (errno == EADDRINUSE) return std::nullopt;
    throw failure("bind a Unix socket", errno);
  }
  if (::listen(s.fd(), SOMAXCONN) != 0) throw failure("listen on a Unix socket", errno);
  return s;
}

std::optional<LocalSocket> LocalSocket::connect(const std::string& name) {
  LocalSocket s(make_socket());
  const Address address(name);
  if (::connect(s.fd(), address.get(), address.length) != 0) {
    if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return std::nullopt;
    throw failure("connect to the rank that leads on this host", errno);
  }
  if (!s.meet()) return std::nullopt;
  return s;
}

std::optional<LocalSocket> LocalSocket::accept() const {
  const int fd = accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) return std::nullopt;
  LocalSocket s(fd);
  try {
    if (s.meet()) return s;
  } catch (const Error&) {  // another user's: not our affair
  }
  return accept();
}

bool LocalSocket::send(const LocalMessage& message, int file) const {
  std::vector<uint8_t> bytes = encode(message);
  iovec piece{bytes.data(), bytes.size()};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (file >= 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* c = CMSG_FIRSTHDR(&header);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(c), &file, sizeof file);
  }
  // Messages are so few that a full socket is one that nobody reads; a doorbell in it need not be repeated.
  if (sendmsg(fd_.get(), &header, MSG_NOSIGNAL) >= 0) return true;
  return errno == EAGAIN && message.kind == LocalMessage::Kind::kDoorbell;
}

LocalSocket::Received LocalSocket::receive(LocalMessage& message, FileDescriptor& file) const {
  std::array<uint8_t, kLocalMessageBytesMax> bytes;
  iovec piece{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  const ssize_t n = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Received::kNothing;
  if (n <= 0) return Received::kClosed;
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    int fd;
    std::memcpy(&fd, CMSG_DATA(c), sizeof fd);
    file = FileDescriptor(fd);
  }
  std::optional<LocalMessage> decoded = decode_local_message({bytes.data(), static_cast<size_t>(n)});
  if (!decoded) return Received::kClosed;  // no peer of ours
  message = std::move(*decoded);
  return Received::kMessage;
}

LocalSocket::Received LocalSocket::wait(LocalMessage& message, int timeout_ms) const {
  pollfd both[2] = {{fd(), POLLIN, 0}, {process_fd(), POLLIN, 0}};
  ::poll(both, process_fd() >= 0 ? 2 : 1, timeout_ms);
  FileDescriptor file;
  const Received r = receive(message, file);
  return r == Received::kNothing && process_over() ? Received::kClosed : r;
}

bool LocalSocket::process_over() const {
  if (process_fd() < 0) return false;
  pollfd one{process_fd(), POLLIN, 0};
  return ::poll(&one, 1, 0) > 0;
}

void LocalSocket::shut() const { shutdown(fd(), SHUT_RDWR); }

}  // namespace millrace::host
