#include "roce/cm_message.h"

#include <gtest/gtest.h>

#include <random>

#include "roce/cm.h"
#include "roce/packet.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace::roce {
namespace {

// The CM MAD in a captured frame; the frame number is tshark's.
struct Captured {
  explicit Captured(const std::string& file, size_t number) : bytes(vectors::read_pcap(file).at(number - 1)) {
    EXPECT_EQ(parse(bytes, packet), ParseVerdict::kOk) << file << " frame " << number;
    const auto m = decode_cm(packet.payload);
    EXPECT_TRUE(m) << file << " frame " << number;
    if (m) message = *m;
  }
  template <typename M>
  const M& as() const {
    return std::get<M>(message.body);
  }
  std::vector<uint8_t> bytes;
  Packet packet;
  CmMessage message;
};

constexpr const char* kIpv4 = "rping-cm-10x256.pcap";
constexpr const char* kIpv6 = "rping-cm-ipv6.pcap";
constexpr const char* kReject = "rping-cm-reject.pcap";

IpAddress ip(const char* text) { return *IpAddress::parse(text); }

TEST(CmMessage, CapturedMadsReencodeToTheSameBytes) {
  size_t mads = 0;
  for (const char* file : {kIpv4, kIpv6, kReject}) {
    for (auto& frame : vectors::read_pcap(file)) {
      Packet p;
      const ParseVerdict v = parse(frame, p);
      if (v == ParseVerdict::kNotRoce) continue;  // neighbour discovery
      ASSERT_EQ(v, ParseVerdict::kOk);
      EXPECT_TRUE(icrc_ok(p));
      if (p.dest_qp() != kGsiQpn) continue;
      const auto m = decode_cm(p.payload);
      ASSERT_TRUE(m);
      const Mad again = encode_cm(*m);
      EXPECT_TRUE(std::equal(again.begin(), again.end(), p.payload.begin(), p.payload.end())) << file;
      EXPECT_EQ(p.deth->qkey.value(), kGsiQkey);
      mads++;
    }
  }
  EXPECT_EQ(mads, 12u);
}

TEST(CmMessage, ReqOfLinuxReadsAsTsharkSays) {  // rping-cm-10x256, frame 3
  const Captured c(kIpv4, 3);
  EXPECT_EQ(c.message.header.transaction_id, 0x24a681a80u);
  EXPECT_EQ(c.message.header.attribute_modifier, 0u);
  const auto& m = c.as<ReqMessage>();
  EXPECT_EQ(m.local_comm_id, 0x801a684au);
  EXPECT_EQ(m.service_id, tcp_service_id(0x1c06));
  EXPECT_EQ(m.local_ca_guid, 0x505400fffe770002u);
  EXPECT_EQ(m.local_qkey, 0u);
  EXPECT_EQ(m.local_qpn, Qpn{0x11});
  EXPECT_EQ(m.responder_resources, 1);
  EXPECT_EQ(m.initiator_depth, 1);
  EXPECT_EQ(m.remote_cm_response_timeout, 0x14);
  EXPECT_EQ(m.transport_service, 0);
  EXPECT_FALSE(m.end_to_end_flow_control);
  EXPECT_EQ(m.starting_psn, Psn(0xb18399));
  EXPECT_EQ(m.local_cm_response_timeout, 0x14);
  EXPECT_EQ(m.retry_count, 7);
  EXPECT_EQ(m.pkey, 0xffff);
  EXPECT_EQ(m.path_mtu, 5);
  EXPECT_FALSE(m.rdc_exists);
  EXPECT_EQ(m.rnr_retry_count, 7);
  EXPECT_EQ(m.max_cm_retries, 15);
  EXPECT_FALSE(m.srq);
  EXPECT_EQ(m.primary.local_lid, 65535);
  EXPECT_EQ(m.primary.remote_lid, 65535);
  EXPECT_EQ(m.primary.local_gid, ip("10.77.0.2"));
  EXPECT_EQ(m.primary.remote_gid, ip("10.77.0.1"));
  EXPECT_EQ(m.primary.flow_label, 0xaa1feu);  // bytes aa 1f e0 00, by table 106; see the vectors' README
  EXPECT_EQ(m.primary.packet_rate, 0);
  EXPECT_EQ(m.primary.traffic_class, 0);
  EXPECT_EQ(m.primary.hop_limit, 64);
  EXPECT_EQ(m.primary.sl, 0);
  EXPECT_FALSE(m.primary.subnet_local);
  EXPECT_EQ(m.primary.local_ack_timeout, 0x13);
  EXPECT_EQ(m.alternate, CmPathRecord{});
  const auto cma = decode_rdma_cm(std::span(m.private_data).first<36>());
  ASSERT_TRUE(cma);
  EXPECT_EQ(cma->version, 0);
  EXPECT_EQ(cma->ip_version, 4);
  EXPECT_EQ(cma->src_port, 0xdb08);
  EXPECT_EQ(cma->src_ip, ip("10.77.0.2"));
  EXPECT_EQ(cma->dst_ip, ip("10.77.0.1"));
}

TEST(CmMessage, RepOfLinuxReadsAsTsharkSays) {  // rping-cm-10x256, frame 4
  const Captured c(kIpv4, 4);
  EXPECT_EQ(c.message.header.transaction_id, 0x24a681a80u);
  const auto& m = c.as<RepMessage>();
  EXPECT_EQ(m.local_comm_id, 0x074cacdbu);
  EXPECT_EQ(m.remote_comm_id, 0x801a684au);
  EXPECT_EQ(m.local_qpn, Qpn{0x11});
  EXPECT_EQ(m.starting_psn, Psn(0xaf9d4e));
  EXPECT_EQ(m.responder_resources, 1);
  EXPECT_EQ(m.initiator_depth, 1);
  EXPECT_EQ(m.target_ack_delay, 0x0f);
  EXPECT_EQ(m.failover_accepted, 0);
  EXPECT_FALSE(m.end_to_end_flow_control);
  EXPECT_EQ(m.rnr_retry_count, 7);
  EXPECT_FALSE(m.srq);
  EXPECT_EQ(m.local_ca_guid, 0x505400fffe770001u);
  EXPECT_EQ(m.vendor_id, 0u);
}

TEST(CmMessage, RtuDreqDrepOfLinuxReadAsTsharkSays) {  // rping-cm-10x256, frames 5, 126, 127
  const Captured rtu(kIpv4, 5), dreq(kIpv4, 126), drep(kIpv4, 127);
  EXPECT_EQ(rtu.as<RtuMessage>().local_comm_id, 0x801a684au);
  EXPECT_EQ(rtu.as<RtuMessage>().remote_comm_id, 0x074cacdbu);
  EXPECT_EQ(dreq.as<DreqMessage>().local_comm_id, 0x801a684au);
  EXPECT_EQ(dreq.as<DreqMessage>().remote_comm_id, 0x074cacdbu);
  EXPECT_EQ(dreq.as<DreqMessage>().remote_qpn, Qpn{0x11});
  EXPECT_EQ(drep.as<DrepMessage>().local_comm_id, 0x074cacdbu);
  EXPECT_EQ(drep.as<DrepMessage>().remote_comm_id, 0x801a684au);
  EXPECT_EQ(drep.message.header.transaction_id, 0x24a681a80u);
}

TEST(CmMessage, RejOfLinuxReadsAsTsharkSays) {  // rping-cm-reject, frame 2
  const Captured c(kReject, 2);
  EXPECT_EQ(c.message.header.transaction_id, 0x24a681a8eu);
  const auto& m = c.as<RejMessage>();
  EXPECT_EQ(m.local_comm_id, 0u);
  EXPECT_EQ(m.remote_comm_id, 0x8e1a684au);
  EXPECT_EQ(m.answered, CmAnswered::kReq);
  EXPECT_EQ(m.info_length, 0);
  EXPECT_EQ(m.reason, static_cast<uint16_t>(RejectReason::kInvalidServiceId));
}

TEST(CmMessage, Ipv6ReqAndRepReadAsTsharkSays) {  // rping-cm-ipv6, frames 3 and 6
  const Captured req(kIpv6, 3), rep(kIpv6, 6);
  const auto& m = req.as<ReqMessage>();
  EXPECT_EQ(m.local_comm_id, 0xb613e793u);
  EXPECT_EQ(m.local_qpn, Qpn{0x28});
  EXPECT_EQ(m.starting_psn, Psn(0x6afe55));
  EXPECT_EQ(m.primary.local_gid, ip("fd77::2"));
  EXPECT_EQ(m.primary.remote_gid, ip("fd77::1"));
  EXPECT_EQ(m.primary.flow_label, 0x6920au);
  const auto cma = decode_rdma_cm(std::span(m.private_data).first<36>());
  ASSERT_TRUE(cma);
  EXPECT_EQ(cma->ip_version, 6);
  EXPECT_EQ(cma->src_port, 0xb97c);
  EXPECT_EQ(cma->src_ip, ip("fd77::2"));
  EXPECT_EQ(cma->dst_ip, ip("fd77::1"));
  EXPECT_EQ(rep.as<RepMessage>().local_comm_id, 0xc9f76208u);
  EXPECT_EQ(rep.as<RepMessage>().starting_psn, Psn(0x1ae629));
}

TEST(CmMessage, RdmaCmHeaderReencodesToTheSameBytes) {
  for (const auto& [file, frame] : {std::pair{kIpv4, 3u}, std::pair{kIpv6, 3u}, std::pair{kReject, 1u}}) {
    const Captured c(file, frame);
    const auto original = std::span(c.as<ReqMessage>().private_data).first<36>();
    std::array<uint8_t, 36> again;
    again.fill(0xEE);
    encode_rdma_cm(*decode_rdma_cm(original), again);
    EXPECT_TRUE(std::equal(again.begin(), again.end(), original.begin())) << file;
  }
}

// By hand from IBA vol. 1, 13.4.2: ours leave these fields 0, and so do Linux's.
TEST(CmMessage, TheMadHeaderIsAsIn1342) {
  const Mad mad = encode_cm({{.status = 0x2122,
                              .class_specific = 0x3132,
                              .transaction_id = 0x4142434445464748,
                              .attribute_modifier = 0x51525354},
                             RtuMessage{}});
  const uint8_t expected[] = {0x01, 0x07, 0x02, 0x03, 0x21, 0x22, 0x31, 0x32, 0x41, 0x42, 0x43, 0x44,
                              0x45, 0x46, 0x47, 0x48, 0x00, 0x14, 0,    0,    0x51, 0x52, 0x53, 0x54};
  EXPECT_TRUE(std::equal(std::begin(expected), std::end(expected), mad.begin()));
  const auto read = decode_cm(mad);
  ASSERT_TRUE(read);
  EXPECT_EQ(read->header.status, 0x2122);
  EXPECT_EQ(read->header.class_specific, 0x3132);
  EXPECT_EQ(read->header.transaction_id, 0x4142434445464748u);
  EXPECT_EQ(read->header.attribute_modifier, 0x51525354u);
}

// No capture has an MRA; these bytes were laid out by hand from IBA table 107.
TEST(CmMessage, MraHasTheBitsOfTable107) {
  const Mad mad = encode_cm({{.transaction_id = 0x1122334455667788},
                             MraMessage{.local_comm_id = 0xA1A2A3A4,
                                        .remote_comm_id = 0xB1B2B3B4,
                                        .answered = CmAnswered::kRep,
                                        .service_timeout = 24}});
  const uint8_t expected[] = {0x01, 0x07, 0x02, 0x03, 0,    0,    0,    0,    0x11, 0x22, 0x33, 0x44,
                              0x55, 0x66, 0x77, 0x88, 0x00, 0x11, 0,    0,    0,    0,    0,    0,
                              0xA1, 0xA2, 0xA3, 0xA4, 0xB1, 0xB2, 0xB3, 0xB4, 0x40, 0xC0, 0,    0};
  EXPECT_TRUE(std::equal(std::begin(expected), std::end(expected), mad.begin()));
}

// The bits that the captures leave 0, by hand from tables 106, 108 and 110.
TEST(CmMessage, RareBitsStandWhereTheTablesSay) {
  ReqMessage req;
  req.vendor_id = 0x010203;
  req.local_eecn = 0x111213;
  req.remote_eecn = 0x212223;
  req.transport_service = 3;
  req.end_to_end_flow_control = true;
  req.pkey = 0x8001;
  req.rdc_exists = true;
  req.srq = true;
  req.extended_transport = 1;
  req.sap_supported = true;
  req.primary = {
      .flow_label = 0xABCDE, .packet_rate = 0x2A, .traffic_class = 0x6A, .sl = 5, .subnet_local = true};
  req.alternate = {.local_lid = 0x3132, .flow_label = 1, .local_ack_timeout = 31};
  const Mad a = encode_cm({{}, req});
  const auto at = [](const Mad& mad, size_t i) { return static_cast<int>(mad[24 + i]); };
  EXPECT_EQ(at(a, 4), 0);
  EXPECT_EQ(at(a, 5) << 16 | at(a, 6) << 8 | at(a, 7), 0x010203);
  EXPECT_EQ(at(a, 36) << 16 | at(a, 37) << 8 | at(a, 38), 0x111213);
  EXPECT_EQ(at(a, 43), 0x07);
  EXPECT_EQ(at(a, 48) << 8 | at(a, 49), 0x8001);
  EXPECT_EQ(at(a, 50), 0x08);
  EXPECT_EQ(at(a, 51), 0x09);
  EXPECT_EQ(at(a, 88), 0xAB);
  EXPECT_EQ(at(a, 89), 0xCD);
  EXPECT_EQ(at(a, 90), 0xE0);
  EXPECT_EQ(at(a, 91), 0x2A);
  EXPECT_EQ(at(a, 92), 0x6A);
  EXPECT_EQ(at(a, 94), 0x58);
  EXPECT_EQ(at(a, 96) << 8 | at(a, 97), 0x3132);
  EXPECT_EQ(at(a, 134), 0x10);
  EXPECT_EQ(at(a, 139), 0xF8 | 0x04);
  const Mad b =
      encode_cm({{}, RejMessage{.answered = CmAnswered::kOther, .info_length = 72, .reason = 0x0104}});
  EXPECT_EQ(at(b, 8), 0x80);
  EXPECT_EQ(at(b, 9), 72 << 1);
  EXPECT_EQ(at(b, 10), 1);
  EXPECT_EQ(at(b, 11), 4);
  const Mad c = encode_cm({{},
                           RepMessage{.vendor_id = 0x414243,
                                      .local_eecn = 0x515253,
                                      .target_ack_delay = 0x1F,
                                      .failover_accepted = 1,
                                      .end_to_end_flow_control = true,
                                      .rnr_retry_count = 5,
                                      .srq = true}});
  EXPECT_EQ(at(c, 15), 0x41);
  EXPECT_EQ(at(c, 18), 0x53);
  EXPECT_EQ(at(c, 19), 0x42);
  EXPECT_EQ(at(c, 23), 0x43);
  EXPECT_EQ(at(c, 26), 0xFB);
  EXPECT_EQ(at(c, 27), 0xB0);
}

TEST(CmMessage, AnyBytesDecodeAndEncodeToTheSameFields) {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; i++) {
    Mad mad;
    for (auto& b : mad) b = static_cast<uint8_t>(random());
    const uint8_t header[] = {1, 7, 2, 3};
    std::copy(std::begin(header), std::end(header), mad.begin());
    mad[16] = 0;
    mad[17] = static_cast<uint8_t>(0x10 + random() % 7);
    const auto once = decode_cm(mad);
    ASSERT_TRUE(once);
    const auto twice = decode_cm(encode_cm(*once));
    ASSERT_TRUE(twice);
    EXPECT_EQ(once->header, twice->header);
    EXPECT_EQ(once->body, twice->body);
  }
}

TEST(CmMessage, OtherMadsAreRefused) {
  const Captured c(kIpv4, 3);
  const Mad good = encode_cm(c.message);
  EXPECT_TRUE(decode_cm(good));
  EXPECT_FALSE(decode_cm(std::span(good).first(255)));
  EXPECT_FALSE(decode_cm({}));
  const auto broken = [&](size_t at, uint8_t value) {
    Mad mad = good;
    mad[at] = value;
    return decode_cm(mad).has_value();
  };
  EXPECT_FALSE(broken(0, 2));      // base version
  EXPECT_FALSE(broken(1, 3));      // subnet administration
  EXPECT_FALSE(broken(2, 1));      // class version
  EXPECT_FALSE(broken(3, 1));      // method Get
  EXPECT_FALSE(broken(17, 0x17));  // SIDR_REQ
  EXPECT_FALSE(broken(16, 1));
}

TEST(CmMessage, TimeCodesRoundUp) {
  EXPECT_EQ(cm_time(0), Time(4096));
  EXPECT_EQ(cm_time(20), Time(int64_t{4096} << 20));  // 4.29 s, Linux's default
  EXPECT_EQ(cm_time_code(Time(4096)), 0);
  EXPECT_EQ(cm_time_code(Time(4097)), 1);
  EXPECT_EQ(cm_time_code(std::chrono::milliseconds(400)), 17);
  EXPECT_EQ(cm_time_code(std::chrono::hours(100)), 31);
  EXPECT_EQ(cm_time_code(Time::min()), 0);
}

TEST(CmMessage, FlowLabelAndPortFitEachOther) {
  for (uint32_t port = 0xC000; port <= 0xFFFF; port++)
    EXPECT_EQ(flow_label_port(port_flow_label(static_cast<uint16_t>(port))), port);
  EXPECT_EQ(flow_label_port(0xFC000), 0xC000 | 0x3F);
}

}  // namespace
}  // namespace millrace::roce
