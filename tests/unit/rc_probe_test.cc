// The requester's probe of the tail, where it meets an acknowledgement on its way: found by tests/fuzz.
#include <gtest/gtest.h>

#include "roce/rc_requester.h"

namespace millrace::roce {
namespace {

using std::chrono::milliseconds;

// A probe is due, and before it is sent what it would repeat is acknowledged. It is not sent then, least of
// all by what lies at the same place of the ring by now.
TEST(RcProbe, WhatIsAcknowledgedMeanwhileIsNotProbed) {
  RequesterConfig config;
  config.first_psn = Psn(0xFFFFFE);
  config.mtu = 256;
  config.requests_max = 4;  // as many as the ring has places
  RcRequester requester(config);
  HeapFramePool pool;
  Crc32Combine combine;
  Wire wire;
  wire.path.src_ip = *IpAddress::parse("10.0.0.1");
  wire.path.dst_ip = *IpAddress::parse("10.0.0.2");
  const std::vector<uint8_t> data(256, 0x5A);
  uint64_t posted = 0;
  const auto post = [&] {
    WorkRequest r;
    r.kind = WorkRequest::Kind::kWrite;
    r.id = posted++;
    r.parts[0] = data;
    ASSERT_TRUE(requester.post(std::move(r)));
  };
  std::vector<uint32_t> sent;
  const auto send = [&](Time now) {
    FrameList out;
    requester.transmit(wire, pool, combine, 16, now, out);
    while (Frame f = out.pop()) {
      Packet p;
      ASSERT_EQ(parse(f.bytes(), p), ParseVerdict::kOk);
      EXPECT_EQ(p.opcode(), Opcode::kWriteOnly);
      EXPECT_EQ(p.payload.size(), 256u);
      sent.push_back(p.psn().value());
    }
  };
  post();
  send(Time{});
  const Time tail = requester.next_deadline();
  requester.tick(tail);
  EXPECT_TRUE(requester.wants_to_send()) << "the probe";
  requester.acknowledge(Psn(0xFFFFFE), kAckUnlimited, tail);
  EXPECT_FALSE(requester.wants_to_send());
  uint64_t id;
  ASSERT_TRUE(requester.next_completion(id));
  for (int i = 0; i < 4; i++) post();
  send(tail);
  EXPECT_EQ(sent, (std::vector<uint32_t>{0xFFFFFE, 0xFFFFFF, 0, 1, 2}));
  EXPECT_EQ(requester.counters().tail_probes, 0u);
}

}  // namespace
}  // namespace millrace::roce
