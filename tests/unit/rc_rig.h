// What the tests of the reliable connection share: a peer whose packets are built and parsed, a requester
// alone, and the configuration of a queue pair. Sequences start near the wrap of the PSN.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "roce/queue_pair.h"

namespace millrace::roce {

inline constexpr uint32_t kMtu = 256;

// A packet, parsed: kept with its frame.
struct Sent {
  Frame frame;
  Packet packet;
};

inline Sent wrap(Frame frame) {
  Sent s{std::move(frame), {}};
  EXPECT_EQ(parse(s.frame.bytes(), s.packet), ParseVerdict::kOk);
  EXPECT_TRUE(icrc_ok(s.packet));
  return s;
}

class Peer {
 public:
  Peer() {
    wire.path.src_ip = path.dst_ip, wire.path.dst_ip = path.src_ip;
    wire.remote_qpn = Qpn{5};
  }
  Sent packet(Opcode op, uint32_t psn, std::span<const uint8_t> payload, bool ack_request = false,
              uint64_t address = 0, uint32_t dma = 0, uint32_t rkey = 5) {
    TransportFields f;
    f.opcode = op;
    f.dest_qp = Qpn{77};
    f.psn = Psn(psn);
    f.ack_request = ack_request;
    f.remote_address = address;
    f.dma_length = dma;
    f.rkey = rkey;
    f.syndrome = kAckUnlimited;
    return wrap(build(pool, path, f, payload));
  }
  Sent packet(Opcode op, uint32_t psn, size_t bytes, bool ack_request = false, uint64_t address = 0,
              uint32_t dma = 0) {
    const std::vector<uint8_t> payload(bytes, 0xAB);
    return packet(op, psn, std::span<const uint8_t>(payload), ack_request, address, dma);
  }

  HeapFramePool pool;
  Crc32Combine combine;
  Path path{{}, {}, *IpAddress::parse("10.0.0.2"), *IpAddress::parse("10.0.0.1")};  // theirs
  Wire wire;                                                                        // ours
  Time now{};
};

class Requester : public testing::Test, public Peer {
 protected:
  Requester() {
    config.first_psn = Psn(0xFFFFFE);
    config.mtu = kMtu;
    config.requests_max = 8;
    config.retransmit_timeout = std::chrono::milliseconds(60);
    requester = std::make_unique<RcRequester>(config);
  }
  void post(size_t bytes, uint64_t id) {
    WorkRequest r;
    r.id = id;
    r.parts[0] = {data.data(), bytes};
    ASSERT_TRUE(requester->post(std::move(r)));
  }
  // The PSNs sent now, as a string such as "fffffe ffffff 0!" (! asks for an acknowledgement).
  std::string send(uint32_t budget = 100) {
    FrameList out;
    requester->transmit(wire, pool, combine, budget, now, out);
    std::string s;
    while (!out.empty()) {
      const Sent sent = wrap(out.pop());
      char text[16];
      std::snprintf(text, sizeof(text), "%s%x%s", s.empty() ? "" : " ", sent.packet.psn().value(),
                    sent.packet.ack_request() ? "!" : "");
      s += text;
    }
    return s;
  }
  std::string completions() {
    std::string s;
    for (uint64_t id; requester->next_completion(id);) s += std::to_string(id) + " ";
    return s;
  }
  void ack(uint32_t psn, uint8_t syndrome = kAckUnlimited) {
    requester->acknowledge(Psn(psn), syndrome, now);
  }

  RequesterConfig config;
  std::vector<uint8_t> data = std::vector<uint8_t>(4096, 7);
  std::unique_ptr<RcRequester> requester;
};

class Pair : public testing::Test, public Peer {
 protected:
  Pair() {
    config.local = Qpn{77};
    config.wire = wire;
    config.expected_psn = Psn(100);
    config.requester.mtu = kMtu;
  }
  QueuePairConfig config;
};

}  // namespace millrace::roce
