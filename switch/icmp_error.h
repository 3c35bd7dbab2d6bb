// ICMP and ICMPv6 error messages about a packet that could not be forwarded: who may be told (RFC
// 1122, 3.2.2; RFC 4443, 2.4), and the message. Pure; called by the worker; one frame of the pool each.
#pragma once

#include "roce/frame.h"
#include "switch/ip_messages.h"

namespace millrace::switching {

struct IcmpError {
  uint8_t type = 0, code = 0;
  MacAddress to_mac, from_mac;
  IpAddress from;  // of the packet's family
};

// Whether the packet at `at` of `frame`, whose header is whole, may be answered with an error at all. Its
// source has been checked to be one host.
bool may_be_reported(std::span<const uint8_t> frame, uint32_t at) noexcept;

// The error, with as much of the packet as the RFCs ask for; empty when the pool is.
Frame build_icmp_error(FramePool& pool, const IcmpError& error, std::span<const uint8_t> frame,
                       uint32_t at) noexcept;

}  // namespace millrace::switching
