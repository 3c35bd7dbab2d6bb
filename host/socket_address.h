// An IpAddress and a port as the socket API wants them. Any thread.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>

#include "roce/types.h"

namespace millrace::host {

inline bool is_link_local(const IpAddress& a) { return a.bytes[0] == 0xFE && (a.bytes[1] & 0xC0) == 0x80; }

struct SocketAddress {
  SocketAddress() = default;
  // `interface_index` counts for link-local IPv6 addresses.
  SocketAddress(const IpAddress& address, uint16_t port, int interface_index) {
    if (address.is_v4()) {
      sockaddr_in in{};
      in.sin_family = AF_INET;
      in.sin_port = htons(port);
      std::memcpy(&in.sin_addr, address.v4(), 4);
      std::memcpy(&storage, &in, sizeof in);
      return;
    }
    sockaddr_in6 in6{};
    in6.sin6_family = AF_INET6;
    in6.sin6_port = htons(port);
    std::memcpy(&in6.sin6_addr, address.bytes.data(), 16);
    if (is_link_local(address)) in6.sin6_scope_id = static_cast<uint32_t>(interface_index);
    std::memcpy(&storage, &in6, sizeof in6);
  }

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  socklen_t length() const {
    return storage.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  }
  IpAddress ip() const {
    if (storage.ss_family == AF_INET) {
      sockaddr_in in;
      std::memcpy(&in, &storage, sizeof in);
      uint8_t bytes[4];
      std::memcpy(bytes, &in.sin_addr, 4);
      return IpAddress::from_v4(bytes);
    }
    sockaddr_in6 in6;
    std::memcpy(&in6, &storage, sizeof in6);
    IpAddress address;
    std::memcpy(address.bytes.data(), &in6.sin6_addr, 16);
    return address;
  }

  sockaddr_storage storage{};
};

}  // namespace millrace::host
