// The model NIC's wire code against bytes that Linux's rxe and ib_cm made, and against roce/, which was
// written apart from it.
#include "tools/sim/nic_wire.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "roce/cm_message.h"
#include "roce/packet.h"
#include "tests/vectors/pcap_reader.h"
#include "tools/sim/nic_cm.h"

namespace millrace::sim {
namespace {

using Bytes = std::vector<uint8_t>;

// Both parsers find the same in a packet.
void expect_same(const NicPacket& a, const roce::Packet& b) {
  EXPECT_EQ(a.to_mac, b.dst_mac);
  EXPECT_EQ(a.from_mac, b.src_mac);
  EXPECT_EQ(a.to, b.dst_ip);
  EXPECT_EQ(a.from, b.src_ip);
  EXPECT_EQ(a.traffic_class, b.tos);
  EXPECT_EQ(a.udp_port, b.src_port);
  EXPECT_EQ(a.opcode, b.bth->opcode);
  EXPECT_EQ(a.qpn, b.dest_qp().value);
  EXPECT_EQ(a.psn, b.psn().value());
  EXPECT_EQ(a.ack_request, b.ack_request());
  EXPECT_EQ(a.pkey, b.bth->pkey.value());
  if (b.reth != nullptr) {
    EXPECT_EQ(a.address, b.reth->address.value());
    EXPECT_EQ(a.rkey, b.reth->rkey.value());
    EXPECT_EQ(a.length, b.reth->length.value());
  }
  if (b.aeth != nullptr) {
    EXPECT_EQ(a.syndrome, b.aeth->syndrome);
    EXPECT_EQ(a.msn, b.aeth->msn.value());
  }
  if (b.deth != nullptr) {
    EXPECT_EQ(a.qkey, b.deth->qkey.value());
    EXPECT_EQ(a.source_qp, b.deth->src_qp.value());
  }
  if (b.immediate != nullptr) {
    EXPECT_EQ(a.immediate, b.immediate->value());
  }
  EXPECT_TRUE(std::ranges::equal(a.payload, b.payload));
}

void expect_same(const CmMad& a, const roce::CmMessage& b) {
  EXPECT_EQ(a.transaction, b.header.transaction_id);
  if (const auto* m = std::get_if<roce::ReqMessage>(&b.body)) {
    EXPECT_EQ(a.kind, CmKind::kReq);
    EXPECT_EQ(a.local_id, m->local_comm_id);
    EXPECT_EQ(a.service, m->service_id);
    EXPECT_EQ(a.ca_guid, m->local_ca_guid);
    EXPECT_EQ(a.qpn, m->local_qpn.value);
    EXPECT_EQ(a.starting_psn, m->starting_psn.value());
    EXPECT_EQ(a.mtu, m->path_mtu);
    EXPECT_EQ(a.retry_count, m->retry_count);
    EXPECT_EQ(a.rnr_retry, m->rnr_retry_count);
    EXPECT_EQ(a.max_cm_retries, m->max_cm_retries);
    EXPECT_EQ(a.local_timeout, m->local_cm_response_timeout);
    EXPECT_EQ(a.remote_timeout, m->remote_cm_response_timeout);
    EXPECT_EQ(a.local_gid, m->primary.local_gid);
    EXPECT_EQ(a.remote_gid, m->primary.remote_gid);
    EXPECT_EQ(a.flow_label, m->primary.flow_label);
    EXPECT_EQ(a.ack_timeout, m->primary.local_ack_timeout);
    EXPECT_EQ(a.hop_limit, m->primary.hop_limit);
    EXPECT_TRUE(std::ranges::equal(a.private_data, m->private_data));
  } else if (const auto* rep = std::get_if<roce::RepMessage>(&b.body)) {
    EXPECT_EQ(a.kind, CmKind::kRep);
    EXPECT_EQ(a.local_id, rep->local_comm_id);
    EXPECT_EQ(a.remote_id, rep->remote_comm_id);
    EXPECT_EQ(a.qpn, rep->local_qpn.value);
    EXPECT_EQ(a.starting_psn, rep->starting_psn.value());
    EXPECT_EQ(a.target_ack_delay, rep->target_ack_delay);
    EXPECT_EQ(a.rnr_retry, rep->rnr_retry_count);
    EXPECT_EQ(a.ca_guid, rep->local_ca_guid);
    EXPECT_TRUE(std::ranges::equal(a.private_data, rep->private_data));
  } else if (const auto* rej = std::get_if<roce::RejMessage>(&b.body)) {
    EXPECT_EQ(a.kind, CmKind::kRej);
    EXPECT_EQ(a.reason, rej->reason);
    EXPECT_EQ(a.answered, static_cast<uint8_t>(rej->answered));
    EXPECT_EQ(a.remote_id, rej->remote_comm_id);
  } else if (const auto* dreq = std::get_if<roce::DreqMessage>(&b.body)) {
    EXPECT_EQ(a.kind, CmKind::kDreq);
    EXPECT_EQ(a.local_id, dreq->local_comm_id);
    EXPECT_EQ(a.remote_id, dreq->remote_comm_id);
    EXPECT_EQ(a.qpn, dreq->remote_qpn.value);
  }
}

class NicWire : public testing::TestWithParam<const char*> {};

TEST_P(NicWire, EveryCapturedPacketIsMadeAgainFromItsFields) {
  size_t packets = 0, mads = 0;
  for (Bytes& bytes : vectors::read_pcap(GetParam())) {
    NicPacket p;
    const Reading reading = read_frame(bytes, p);
    if (reading == Reading::kForeign) continue;  // ARP, ND, ICMP, TCP
    packets++;
    SCOPED_TRACE("packet " + std::to_string(packets));
    ASSERT_EQ(reading, Reading::kGood);
    roce::Packet other;
    ASSERT_EQ(roce::parse(bytes, other), roce::ParseVerdict::kOk);
    expect_same(p, other);
    Bytes again;
    if (p.qpn == 1) {
      CmMad mad;
      ASSERT_TRUE(read_mad(p.payload, mad));
      expect_same(mad, roce::decode_cm(other.payload).value());
      const auto whole = write_mad(mad);
      NicPacket head = p;
      head.payload = std::span(whole).first(100);
      again = make_frame(head, std::span(whole).subspan(100));
      mads++;
    } else {
      again = make_frame(p);
    }
    ASSERT_EQ(again, bytes);
  }
  EXPECT_GT(packets, 10u);
  if (std::string(GetParam()).starts_with("rping-cm-")) {
    EXPECT_EQ(mads, 5u);
  }
}

INSTANTIATE_TEST_SUITE_P(Rxe, NicWire,
                         testing::Values("rping-cm-10x256.pcap", "rping-cm-ipv6.pcap",
                                         "rping-cm-pmtu1024-3x4500.pcap", "rstream-write-imm.pcap",
                                         "ib_write_bw-rc-R-pmtu4096-odd1027.pcap",
                                         "ib_write_bw-rc-R-pmtu4096-tos106.pcap", "ib_send_bw-rnr.pcap",
                                         "ibv_ud_pingpong.pcap", "ib_send_bw-rc-R-pmtu1024.pcap"),
                         [](const auto& i) {
                           std::string s = i.param;
                           std::replace_if(
                               s.begin(), s.end(),
                               [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
                           return s;
                         });

// What tshark 4.0 reads in frames 3 to 5 of the capture.
TEST(NicCm, FieldsAreWhereTsharkFindsThem) {
  const auto frames = vectors::read_pcap("rping-cm-10x256.pcap");
  NicPacket p;
  CmMad mad;
  ASSERT_EQ(read_frame(frames.at(2), p), Reading::kGood);
  ASSERT_TRUE(read_mad(p.payload, mad));
  EXPECT_EQ(mad.kind, CmKind::kReq);
  EXPECT_EQ(mad.local_id, 0x801a684au);
  EXPECT_EQ(mad.service, 0x0000000001061c06u);
  EXPECT_EQ(mad.ca_guid, 0x505400fffe770002u);
  EXPECT_EQ(mad.qpn, 0x11u);
  EXPECT_EQ(mad.starting_psn, 0xb18399u);
  EXPECT_EQ(mad.remote_timeout, 20);
  EXPECT_EQ(mad.local_timeout, 20);
  EXPECT_EQ(mad.retry_count, 7);
  EXPECT_EQ(mad.mtu, 5);
  EXPECT_EQ(mad.max_cm_retries, 15);
  EXPECT_EQ(mad.hop_limit, 64);
  EXPECT_EQ(mad.ack_timeout, 19);
  // Linux's own cma header, from 10.77.0.2 port 0xdb08 to 10.77.0.1.
  EXPECT_EQ(mad.private_data, rdma_cm_data(*IpAddress::parse("10.77.0.2"), *IpAddress::parse("10.77.0.1"),
                                           static_cast<uint16_t>(get_be(&mad.private_data[2], 2)), {}));
  ASSERT_EQ(read_frame(frames.at(3), p), Reading::kGood);
  ASSERT_TRUE(read_mad(p.payload, mad));
  EXPECT_EQ(mad.kind, CmKind::kRep);
  EXPECT_EQ(mad.local_id, 0x074cacdbu);
  EXPECT_EQ(mad.remote_id, 0x801a684au);
  EXPECT_EQ(mad.starting_psn, 0xaf9d4eu);
  EXPECT_EQ(mad.target_ack_delay, 15);
  EXPECT_EQ(mad.rnr_retry, 7);

  const auto ipv6 = vectors::read_pcap("rping-cm-ipv6.pcap");
  ASSERT_EQ(read_frame(ipv6.at(2), p), Reading::kGood);
  ASSERT_TRUE(read_mad(p.payload, mad));
  EXPECT_EQ(mad.private_data, rdma_cm_data(*IpAddress::parse("fd77::2"), *IpAddress::parse("fd77::1"),
                                           static_cast<uint16_t>(get_be(&mad.private_data[2], 2)), {}));
}

TEST(NicWire, OnlyWhatRoutersChangeMayChange) {
  for (const char* file : {"rping-cm-10x256.pcap", "rping-cm-ipv6.pcap"}) {
    size_t tried = 0;
    for (const Bytes& good : vectors::read_pcap(file)) {
      NicPacket p;
      if (read_frame(good, p) != Reading::kGood) continue;
      const bool v4 = p.to.is_v4();
      const size_t udp = v4 ? 34 : 54;
      for (size_t at = 14; at < good.size(); at++) {
        Bytes bad = good;
        bad[at] ^= 0x04;
        // IPv6's class, label and hop limit; UDP's checksum; BTH byte 4. IPv4's own checksum guards the rest.
        const bool masked =
            at == udp + 6 || at == udp + 7 || at == udp + 12 || (!v4 && (at < 18 || at == 21));
        EXPECT_EQ(read_frame(bad, p) == Reading::kGood, masked) << file << " byte " << at;
      }
      if (v4) {  // TTL with its checksum, as a router does it
        Bytes hop = good;
        hop[22]--;
        const uint64_t sum = get_be(&hop[24], 2) + 0x100;
        set_be(&hop[24], 2, sum + (sum >> 16));
        EXPECT_EQ(read_frame(hop, p), Reading::kGood);
      }
      if (++tried == 12) break;
    }
    EXPECT_EQ(tried, 12u);
  }
}

TEST(NicWire, NoBytesAreReadBeyondTheFrame) {
  for (const char* file : {"rping-cm-10x256.pcap", "rping-cm-ipv6.pcap"})
    for (const Bytes& good : vectors::read_pcap(file))
      for (size_t n = 0; n < good.size(); n++) {
        const Bytes cut(good.begin(), good.begin() + static_cast<ptrdiff_t>(n));  // ASan sees its end
        NicPacket p;
        EXPECT_NE(read_frame(cut, p), Reading::kGood);
      }
}

// --- the connection manager's client ---

struct Client {
  explicit Client(uint8_t retries = 15)
      : quirks{.cm_timeout = 17, .cm_retries = retries}, cm(request(), quirks, now) {}
  static CmMad request() {
    CmMad m;
    m.kind = CmKind::kReq;
    m.local_id = 0xA;
    m.transaction = 0x77;
    m.ca_guid = 0x1234;
    m.qpn = 0x100;
    return m;
  }
  static CmMad from_peer(CmKind kind) {
    CmMad m;
    m.kind = kind;
    m.local_id = 0xB, m.remote_id = 0xA;
    m.qpn = kind == CmKind::kDreq ? 0x100 : 0x200;
    return m;
  }
  std::vector<CmMad> sent() { return std::exchange(cm.out, {}); }
  CmKind only() {
    const auto all = sent();
    return all.size() == 1 ? all[0].kind : CmKind{};
  }
  Time now{};
  NicQuirks quirks;
  CmClient cm;
};
using Outcome = CmClient::Outcome;

TEST(NicCm, RepeatsARequestThenGivesUpWithARejection) {
  Client c(2);
  EXPECT_EQ(c.only(), CmKind::kReq);
  for (int i = 0; i < 2; i++) {
    EXPECT_EQ(c.cm.poll(c.now = c.cm.next_deadline()), Outcome::kNothing);
    EXPECT_EQ(c.only(), CmKind::kReq);
  }
  EXPECT_EQ(c.now, 2 * Time(4096 << 17));
  EXPECT_EQ(c.cm.poll(c.cm.next_deadline()), Outcome::kUnreachable);
  const auto last = c.sent();
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(last[0].kind, CmKind::kRej);
  EXPECT_EQ(last[0].reason, 4);
  EXPECT_EQ(get_be(last[0].reject_info.data(), 8), 0x1234u);
  EXPECT_TRUE(c.cm.over());
}

TEST(NicCm, WaitsAsLongAsAnMraAsks) {
  Client c;
  CmMad mra = Client::from_peer(CmKind::kMra);
  mra.service_timeout = 20;
  c.cm.receive(mra, c.now = Time(1000));
  EXPECT_EQ(c.cm.next_deadline(), Time(1000) + Time(int64_t{4096} << 20) + Time(4096 << 17));
}

TEST(NicCm, ConfirmsEveryRepetitionOfTheReply) {
  Client c;
  c.sent();
  EXPECT_EQ(c.cm.receive(Client::from_peer(CmKind::kRep), c.now), Outcome::kReply);
  EXPECT_TRUE(c.sent().empty());
  EXPECT_EQ(c.cm.receive(Client::from_peer(CmKind::kRep), c.now), Outcome::kNothing);
  EXPECT_EQ(c.only(), CmKind::kMra);
  c.cm.confirm();
  EXPECT_EQ(c.only(), CmKind::kRtu);
  c.cm.receive(Client::from_peer(CmKind::kRep), c.now);
  EXPECT_EQ(c.only(), CmKind::kRtu);
  CmMad other = Client::from_peer(CmKind::kRep);
  other.local_id = 0xC;
  c.cm.receive(other, c.now);
  EXPECT_TRUE(c.sent().empty());
}

TEST(NicCm, AnswersAGoodbyeForItsQueuePairOnly) {
  Client c;
  c.cm.receive(Client::from_peer(CmKind::kRep), c.now);
  c.cm.confirm();
  c.sent();
  CmMad dreq = Client::from_peer(CmKind::kDreq);
  dreq.qpn = 0x101;
  EXPECT_EQ(c.cm.receive(dreq, c.now), Outcome::kNothing);
  EXPECT_TRUE(c.sent().empty());
  dreq.qpn = 0x100;
  EXPECT_EQ(c.cm.receive(dreq, c.now), Outcome::kDisconnected);
  EXPECT_EQ(c.only(), CmKind::kDrep);
  EXPECT_TRUE(c.cm.over());
}

TEST(NicCm, SaysGoodbyeUntilItIsAnswered) {
  Client c;
  c.cm.receive(Client::from_peer(CmKind::kRep), c.now);
  c.cm.confirm();
  c.sent();
  c.cm.disconnect(c.now);
  const auto first = c.sent();
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].qpn, 0x200u);
  c.cm.poll(c.cm.next_deadline());
  EXPECT_EQ(c.only(), CmKind::kDreq);
  EXPECT_FALSE(c.cm.over());
  c.cm.receive(Client::from_peer(CmKind::kDrep), c.now);
  EXPECT_TRUE(c.cm.over());
}

}  // namespace
}  // namespace millrace::sim
