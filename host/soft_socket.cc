#include "host/soft_socket.h"

#include <linux/filter.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <netinet/in.h>
#include <sys/uio.h>

#include <system_error>

#include "roce/error.h"
#include "roce/headers.h"

namespace millrace::host {
namespace {

// The kernel counts a packet with its bookkeeping, about 8 KiB for one of 4 KiB, and doubles what is asked
// for here: this holds about 1 MiB of packets. It is what a shaped link holds back, so much more would only
// add delay.
constexpr int kSendBufferBytes = 1 << 20;
// Several queue pairs' windows of results, all arriving while this thread does not run. Only a limit: memory
// is taken by packets alone.
constexpr int kReceiveBufferBytes = 16 << 20;
// How long to leave a queueing discipline alone that has just dropped what it was given.
constexpr Time kRetryAfter = std::chrono::microseconds(200);

constexpr sock_filter statement(uint16_t code, uint32_t k) { return {code, 0, 0, k}; }
constexpr sock_filter jump(uint16_t code, uint32_t k, uint8_t if_true, uint8_t if_false) {
  return {code, if_true, if_false, k};
}

// Passes UDP packets to port 4791 that the link layer addressed to this host. A VLAN tag that the kernel has
// stripped is not in the bytes; one that it has left there is stepped over. IPv4 options and fragments are
// not RoCE (annex A17).
constexpr uint8_t kDrop = 255;  // a jump to the last statement, put in below
constexpr std::array kRoceFilter = [] {
  constexpr uint32_t kPacketType = static_cast<uint32_t>(SKF_AD_OFF + SKF_AD_PKTTYPE);
  std::array code = {
      statement(BPF_LD | BPF_W | BPF_ABS, kPacketType),
      jump(BPF_JMP | BPF_JEQ | BPF_K, PACKET_HOST, 0, kDrop),
      statement(BPF_LDX | BPF_IMM, 0),
      statement(BPF_LD | BPF_H | BPF_ABS, 12),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kEtherTypeVlan, 0, 2),
      statement(BPF_LDX | BPF_IMM, 4),
      statement(BPF_LD | BPF_H | BPF_ABS, 16),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kEtherTypeIpv6, 8, 0),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kEtherTypeIpv4, 0, kDrop),
      statement(BPF_LD | BPF_B | BPF_IND, 14),
      jump(BPF_JMP | BPF_JEQ | BPF_K, 0x45, 0, kDrop),
      statement(BPF_LD | BPF_H | BPF_IND, 20),
      jump(BPF_JMP | BPF_JSET | BPF_K, 0x3FFF, kDrop, 0),
      statement(BPF_LD | BPF_B | BPF_IND, 23),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kIpProtoUdp, 0, kDrop),
      jump(BPF_JMP | BPF_JA, 4, 0, 0),  // to the IPv4 port
      statement(BPF_LD | BPF_B | BPF_IND, 20),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kIpProtoUdp, 0, kDrop),
      statement(BPF_LD | BPF_H | BPF_IND, 56),
      jump(BPF_JMP | BPF_JA, 1, 0, 0),  // to the comparison
      statement(BPF_LD | BPF_H | BPF_IND, 36),
      jump(BPF_JMP | BPF_JEQ | BPF_K, roce::kRoceUdpPort, 0, kDrop),
      statement(BPF_RET | BPF_K, 0xFFFFFFFF),
      statement(BPF_RET | BPF_K, 0),
  };
  for (size_t i = 0; i < code.size(); i++) {
    uint8_t to_end = static_cast<uint8_t>(code.size() - 1 - (i + 1));
    if (code[i].jt == kDrop) code[i].jt = to_end;
    if (code[i].jf == kDrop) code[i].jf = to_end;
  }
  return code;
}();
constexpr std::array kNothingFilter = {statement(BPF_RET | BPF_K, 0)};

template <size_t N>
bool attach(int fd, const std::array<sock_filter, N>& code) {
  sock_fprog program{N, const_cast<sock_filter*>(code.data())};
  return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0;
}

bool set(int fd, int level, int option, int value) {
  return setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// The administrator's limits (net.core.rmem_max) bind those who may not go over them.
void set_buffer(int fd, int force_option, int option, int bytes) {
  if (!set(fd, SOL_SOCKET, force_option, bytes)) set(fd, SOL_SOCKET, option, bytes);
}

std::string system_text(int error) { return std::system_category().message(error); }

}  // namespace

SoftSocket::SoftSocket(const std::string& device, FramePool& pool)
    : device_(device),
      pool_(pool),
      resolver_(device),
      interface_(query_interface(device)),
      path_mtu_max_(host::path_mtu_max(device, interface_.mtu)) {
  hold_udp_port(AF_INET);
  hold_udp_port(AF_INET6);
  open_packet_socket();
  for (uint32_t i = 0; i < kBurst; i++) {
    receive_messages_[i].msg_hdr.msg_iov = &receive_pieces_[i];
    receive_messages_[i].msg_hdr.msg_iovlen = 1;
    send_messages_[i].msg_hdr.msg_iov = send_pieces_[i].data();
    prepare_receive(i);
  }
}

SoftSocket::~SoftSocket() = default;

void SoftSocket::open_packet_socket() {
  // Protocol 0 receives nothing until bind(), so that no packet comes in before the filter is there.
  packet_ = FileDescriptor(socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!packet_ && (errno == EPERM || errno == EACCES))
    throw Error(
        ErrorCode::kSystem,
        "the soft transport needs a packet socket, which this user may not open: run as root, or give the "
        "program the capability (setcap cap_net_raw,cap_net_admin+ep PROGRAM)");
  if (!packet_) fail("open a packet socket on", errno);
  int fd = packet_.get();
  if (!attach(fd, kRoceFilter)) fail("attach the packet filter on", errno);
  if (!set(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)) fail("ignore outgoing packets on", errno);
  set_buffer(fd, SO_SNDBUFFORCE, SO_SNDBUF, kSendBufferBytes);
  set_buffer(fd, SO_RCVBUFFORCE, SO_RCVBUF, kReceiveBufferBytes);
  sockaddr_ll address{};
  address.sll_family = AF_PACKET;
  address.sll_protocol = htons(ETH_P_ALL);
  address.sll_ifindex = interface_.index;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) < 0)
    fail("bind a packet socket to", errno);
}

void SoftSocket::hold_udp_port(int family) {
  FileDescriptor& fd = family == AF_INET ? udp4_ : udp6_;
  fd = FileDescriptor(socket(family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd && family == AF_INET6 && errno == EAFNOSUPPORT) return;  // no IPv6 in this kernel, nobody to answer
  if (!fd) fail("open a UDP socket for", errno);
  // Both, so that several ranks on one host can hold the port, also next to a listener of another make.
  set(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  set(fd.get(), SOL_SOCKET, SO_REUSEPORT, 1);
  if (!attach(fd.get(), kNothingFilter)) fail("attach a packet filter for", errno);
  sockaddr_storage storage{};
  socklen_t length;
  if (family == AF_INET) {
    auto* address = reinterpret_cast<sockaddr_in*>(&storage);
    address->sin_family = AF_INET;
    address->sin_port = htons(roce::kRoceUdpPort);
    length = sizeof(sockaddr_in);
  } else {
    set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
    auto* address = reinterpret_cast<sockaddr_in6*>(&storage);
    address->sin6_family = AF_INET6;
    address->sin6_port = htons(roce::kRoceUdpPort);
    length = sizeof(sockaddr_in6);
  }
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&storage), length) == 0) return;
  if (family == AF_INET6 && errno == EADDRNOTAVAIL) {  // IPv6 is switched off here
    fd = FileDescriptor();
    return;
  }
  if (errno == EADDRINUSE)
    throw Error(
        ErrorCode::kSystem,
        "UDP port 4791 is taken, by the kernel's soft RoCE (`rdma link`; rmmod rdma_rxe) or by another "
        "user's process (`ss -lup`): the soft transport needs it");
  fail("hold UDP port 4791 for", errno);
}

void SoftSocket::fail(const char* doing, int error) const {
  if (error == ENETDOWN) throw Error(ErrorCode::kNoDevice, device_ + " went down");
  if (error == ENODEV || error == ENXIO) throw Error(ErrorCode::kNoDevice, device_ + " is gone");
  if (error == EMSGSIZE)
    throw Error(ErrorCode::kNoDevice,
                device_ +
                    " did not take a packet for its size: its MTU must be at least the RoCE path MTU + " +
                    std::to_string(kRoceOverheadBytes) + " bytes (ip link set " + device_ + " mtu 4200)");
  throw Error(ErrorCode::kSystem, std::string("cannot ") + doing + " " + device_ + ": " + system_text(error));
}

void SoftSocket::prepare_receive(uint32_t i) {
  empty_[i] = Frame::allocate(pool_);
  FrameBuffer* b = empty_[i].buffer();
  if (b == nullptr) throw Error(ErrorCode::kSystem, "out of memory for packets to receive");
  receive_pieces_[i] = {b->data(), b->room_bytes - b->offset};
}

uint32_t SoftSocket::receive(FrameList& frames) {
  int n = recvmmsg(packet_.get(), receive_messages_.data(), kBurst, MSG_DONTWAIT | MSG_TRUNC, nullptr);
  if (n < 0) {
    if (errno == EAGAIN || errno == EINTR) return 0;
    fail("receive on", errno);
  }
  for (uint32_t i = 0; i < static_cast<uint32_t>(n); i++) {
    const mmsghdr& message = receive_messages_[i];
    if (message.msg_len > receive_pieces_[i].iov_len) {
      counters_.truncated++;
      continue;
    }
    counters_.bytes_received += message.msg_len;
    empty_[i].buffer()->length = message.msg_len;
    frames.push(std::move(empty_[i]));
    prepare_receive(i);
  }
  counters_.received += static_cast<uint32_t>(n);
  return static_cast<uint32_t>(n);
}

bool SoftSocket::fill_batch() {
  if (batch_begin_ != batch_end_) return true;
  batch_begin_ = batch_end_ = 0;
  while (batch_end_ < kBurst && !waiting_.empty()) {
    batch_[batch_end_] = waiting_.pop();
    describe(batch_end_++);
  }
  return batch_end_ != 0;
}

void SoftSocket::describe(size_t i) {
  FrameBuffer* b = batch_[i].buffer();
  auto& pieces = send_pieces_[i];
  size_t n = 0;
  pieces[n++] = {b->data(), b->length};
  if (b->shared_length) pieces[n++] = {const_cast<uint8_t*>(b->shared_data), b->shared_length};
  if (b->tail_length) pieces[n++] = {b->tail, b->tail_length};
  send_messages_[i].msg_hdr.msg_iovlen = n;
}

void SoftSocket::own_payloads() {
  waiting_.for_each(own_payload);
  for (size_t i = batch_begin_; i < batch_end_; i++) {
    own_payload(batch_[i].buffer());
    describe(i);
  }
}

void SoftSocket::send(FrameList& frames, Time now) {
  waiting_.splice(frames);
  if (retry_at_ && now < *retry_at_) return;
  retry_at_.reset();
  waits_for_room_ = false;
  while (fill_batch()) {
    int n = sendmmsg(packet_.get(), &send_messages_[batch_begin_], batch_end_ - batch_begin_, MSG_DONTWAIT);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) {  // the send buffer is full: packets of ours wait in the queueing discipline
        waits_for_room_ = true;
      } else if (errno == ENOBUFS ||
                 errno == ENOMEM) {  // the queueing discipline is full and dropped the packet
        retry_at_ = now + kRetryAfter;
      } else {
        fail("send on", errno);
      }
      counters_.back_pressure++;
      return;
    }
    for (int i = 0; i < n; i++) {
      Frame sent = std::move(batch_[batch_begin_++]);
      counters_.bytes_sent += sent.total_length();
    }
    counters_.sent += static_cast<uint32_t>(n);
  }
}

uint64_t SoftSocket::take_kernel_drops() {
  tpacket_stats statistics{};
  socklen_t length = sizeof statistics;
  if (getsockopt(packet_.get(), SOL_PACKET, PACKET_STATISTICS, &statistics, &length) < 0) return 0;
  return statistics.tp_drops;
}

}  // namespace millrace::host
