// Every packet that the kernel's rxe driver sent in the captures: it parses, its ICRC is right, and our
// builder makes the same bytes from the same fields.
#include <gtest/gtest.h>

#include <map>

#include "roce/build.h"
#include "roce/cm_message.h"
#include "roce/packet.h"
#include "roce/rc_requester.h"
#include "roce/rc_responder.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace::roce {
namespace {

class Capture : public testing::TestWithParam<const char*> {};

TransportFields fields_of(const Packet& p) {
  TransportFields f;
  f.opcode = p.opcode();
  f.dest_qp = p.dest_qp();
  f.psn = p.psn();
  f.ack_request = p.ack_request();
  f.solicited = p.bth->flags & 0x80;
  f.migrated = p.bth->flags & 0x40;
  f.pkey = p.bth->pkey.value();
  if (p.reth)
    f.remote_address = p.reth->address.value(), f.rkey = p.reth->rkey.value(),
    f.dma_length = p.reth->length.value();
  if (p.aeth) f.syndrome = p.aeth->syndrome, f.msn = p.aeth->msn.value();
  if (p.deth) f.qkey = p.deth->qkey.value(), f.src_qp = Qpn{p.deth->src_qp.value()};
  if (p.immediate) f.immediate = p.immediate->value();
  if (p.atomic)
    f.remote_address = p.atomic->address.value(), f.rkey = p.atomic->rkey.value(),
    f.swap_or_add = p.atomic->swap_or_add.value(), f.compare = p.atomic->compare.value();
  if (p.atomic_ack) f.original = p.atomic_ack->original.value();
  return f;
}

TEST_P(Capture, ParsesVerifiesAndIsReproduced) {
  HeapFramePool pool;
  Crc32Combine combine;
  size_t packets = 0, reproduced = 0;
  for (auto& bytes : vectors::read_pcap(GetParam())) {
    Packet p;
    const ParseVerdict verdict = parse(bytes, p);
    if (verdict == ParseVerdict::kNotRoce) continue;  // ARP, ND, ICMP, TCP
    packets++;
    SCOPED_TRACE("packet " + std::to_string(packets) + " " +
                 std::string(opcode_name(p.bth ? p.bth->opcode : 0xFF)));
    ASSERT_EQ(verdict, ParseVerdict::kOk) << name(verdict);
    ASSERT_TRUE(icrc_ok(p));
    // What may change in flight does not matter to the ICRC, anything else does.
    bytes[static_cast<size_t>(p.ip.data() - bytes.data()) + (p.src_ip.is_v4() ? 8 : 7)] ^=
        0xFF;  // TTL, hop limit
    ASSERT_TRUE(icrc_ok(p));
    bytes[static_cast<size_t>(p.ip.data() - bytes.data()) + (p.src_ip.is_v4() ? 8 : 7)] ^= 0xFF;
    const size_t at = packets * 7 % p.ip.size();
    if (at >= (p.src_ip.is_v4() ? 28u : 48u) + 5) {  // beyond the masked fields: BTH byte 5 on
      p.ip[at] ^= 0x10;
      ASSERT_FALSE(icrc_ok(p)) << "byte " << at;
      p.ip[at] ^= 0x10;
    }
    Path path;
    path.src_mac = p.src_mac, path.dst_mac = p.dst_mac;
    path.src_ip = p.src_ip, path.dst_ip = p.dst_ip;
    path.src_port = p.src_port;
    path.tos = p.tos;
    path.hop_limit = p.ip[p.src_ip.is_v4() ? 8 : 7];
    if (p.src_ip.is_v4()) path.identification = static_cast<uint16_t>(p.ip[4] << 8 | p.ip[5]);
    const size_t wire = static_cast<size_t>(p.ip.data() + p.ip.size() - bytes.data());
    const Frame flat = build(pool, path, fields_of(p), p.payload);
    ASSERT_TRUE(flat);
    ASSERT_EQ(std::vector<uint8_t>(flat.bytes().begin(), flat.bytes().end()),
              std::vector<uint8_t>(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(wire)));
    // And with the payload shared instead of copied.
    Frame owner = Frame::allocate(pool);
    std::copy(p.payload.begin(), p.payload.end(), owner.buffer()->data());
    const std::span<const uint8_t> payload{owner.buffer()->data(), p.payload.size()};
    const Frame shared =
        build_shared(pool, path, fields_of(p), owner.buffer(), payload, crc32(0, payload), combine);
    std::vector<uint8_t> joined(shared.total_length());
    shared.copy_to(joined.data());
    ASSERT_EQ(joined, std::vector<uint8_t>(flat.bytes().begin(), flat.bytes().end()));
    reproduced++;
  }
  EXPECT_GT(packets, 0u);
  EXPECT_EQ(reproduced, packets);
}

INSTANTIATE_TEST_SUITE_P(
    Rxe, Capture,
    testing::Values("rping-cm-10x256.pcap", "rping-cm-ipv6.pcap", "rping-cm-reject.pcap",
                    "rping-cm-pmtu1024-3x4500.pcap", "rping-cm-pmtu4096-3x4500.pcap",
                    "rstream-write-imm.pcap", "ib_write_bw-rc-R-pmtu4096-odd1027.pcap",
                    "ib_read_bw-rc-R-pmtu4096-odd1027.pcap", "ib_write_bw-rc-R-pmtu4096-tos106.pcap",
                    "ib_send_bw-rnr.pcap", "ibv_ud_pingpong.pcap", "ibv_rc_pingpong.pcap",
                    "ib_atomic_bw-rc-R.pcap", "ib_atomic_bw-rc-cas-R.pcap", "ib_send_bw-loss.pcap",
                    "ib_read_bw-loss.pcap", "ib_send_bw-rc-R-pmtu1024.pcap"),
    [](const auto& i) {
      std::string s = i.param;
      std::replace_if(
          s.begin(), s.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
      return s;
    });

// The source port that rxe derives from the two QPNs where there is no flow label (ibv_rc_pingpong sets
// none).
TEST(FlowSourcePort, IsTheOneTheKernelUses) {
  std::map<uint32_t, uint16_t> seen;  // destination QPN → source port
  for (auto& bytes : vectors::read_pcap("ibv_rc_pingpong.pcap")) {
    Packet p;
    if (parse(bytes, p) == ParseVerdict::kOk) seen[p.dest_qp().value] = p.src_port;
  }
  ASSERT_EQ(seen.size(), 2u);
  const auto [a, port] = *seen.begin();
  const uint32_t b = seen.rbegin()->first;
  EXPECT_EQ(flow_source_port(Qpn{a}, Qpn{b}), port);
  EXPECT_EQ(flow_source_port(Qpn{b}, Qpn{a}), seen.rbegin()->second);
}

// What "starting PSN" in a REQ and a REP is: where its receiver begins to send, not where its sender does.
TEST(StartingPsn, IsTheOtherSides) {
  for (const char* file : {"rping-cm-10x256.pcap", "rping-cm-ipv6.pcap"}) {
    SCOPED_TRACE(file);
    std::map<IpAddress, Psn> announced, first;  // by sender
    for (auto& bytes : vectors::read_pcap(file)) {
      Packet p;
      if (parse(bytes, p) != ParseVerdict::kOk) continue;
      if (p.dest_qp() == kGsiQpn) {
        const auto message = decode_cm(p.payload);
        ASSERT_TRUE(message);
        if (const auto* req = std::get_if<ReqMessage>(&message->body))
          announced[p.src_ip] = req->starting_psn;
        if (const auto* rep = std::get_if<RepMessage>(&message->body))
          announced[p.src_ip] = rep->starting_psn;
      } else if (p.aeth == nullptr) {  // a request
        first.try_emplace(p.src_ip, p.psn());
      }
    }
    ASSERT_EQ(announced.size(), 2u);
    ASSERT_EQ(first.size(), 2u);
    const auto [one, other] = std::pair{announced.begin(), std::next(announced.begin())};
    EXPECT_EQ(first.at(one->first), other->second);
    EXPECT_EQ(first.at(other->first), one->second);
  }
}

// A sequence NAK for each gap, naming the packet wanted, once: the kernel's, with 3 % of the sender's packets
// lost on the way, and our responder's, given the packets that arrived.
TEST(Loss, TheKernelsSequenceNaksAreOurs) {
  std::optional<RcResponder> responder;
  std::vector<uint32_t> theirs, ours;
  for (auto& bytes : vectors::read_pcap("ib_send_bw-loss.pcap")) {
    Packet p;
    if (parse(bytes, p) != ParseVerdict::kOk || !p.op->rc) continue;
    if (p.aeth && p.aeth->syndrome == kNakSequence) theirs.push_back(p.psn().value());
    if (!p.op->request) continue;
    if (!responder) responder.emplace(p.psn(), 1024);
    const Arrival arrival = responder->arrive(p);
    ASSERT_NE(arrival, Arrival::kInvalid);
    if (arrival == Arrival::kNew) responder->accept(p);
    if (const auto owed = responder->take_acknowledgement(); owed && owed->syndrome == kNakSequence)
      ours.push_back(owed->psn.value());
  }
  EXPECT_GT(theirs.size(), 2u);
  // The file ends between the last gap and its NAK, or does not.
  theirs.resize(std::min(theirs.size(), ours.size()));
  ours.resize(theirs.size());
  EXPECT_EQ(ours, theirs);
}

// The kernel's answers to RDMA READs and ours to the same requests: opcodes, PSNs, message numbers, lengths.
TEST(Read, TheKernelsResponsesAreOurs) {
  const std::pair<const char*, uint32_t> files[] = {{"rping-cm-pmtu1024-3x4500.pcap", 1024},
                                                    {"rping-cm-pmtu4096-3x4500.pcap", 4096},
                                                    {"rping-cm-10x256.pcap", 1024},
                                                    {"ib_read_bw-rc-R-pmtu4096-odd1027.pcap", 4096}};
  for (const auto& [file, mtu] : files) {
    SCOPED_TRACE(file);
    HeapFramePool pool;
    const std::vector<uint8_t> memory(65536);
    std::map<std::pair<IpAddress, uint32_t>, RcResponder> responders;  // by address and QPN
    std::map<IpAddress, std::vector<std::string>> theirs, ours;
    const auto text = [](const Packet& p) {
      return std::string(opcode_name(p.bth->opcode)) + " " + std::to_string(p.psn().value()) + " " +
             (p.aeth ? std::to_string(p.aeth->syndrome) + " " + std::to_string(p.aeth->msn.value()) : "") +
             " " + std::to_string(p.payload.size());
    };
    for (auto& bytes : vectors::read_pcap(file)) {
      Packet p;
      if (parse(bytes, p) != ParseVerdict::kOk || !p.op->rc) continue;
      if (p.op->response && p.opcode() != Opcode::kAcknowledge) theirs[p.src_ip].push_back(text(p));
      if (!p.op->request) continue;
      RcResponder& responder =
          responders.try_emplace({p.dst_ip, p.dest_qp().value}, p.psn(), mtu, 128).first->second;
      ASSERT_EQ(responder.arrive(p), Arrival::kNew);
      if (p.opcode() != Opcode::kReadRequest) {
        responder.accept(p);
        continue;
      }
      responder.accept_read(p, std::span(memory).first(p.reth->length.value()));
      FrameList out;
      Pace pace{DcqcnConfig{}};
      responder.respond(Wire{}, pool, 1000, pace, Time{}, out);
      while (!out.empty()) {
        Frame f = out.pop();
        Packet mine;
        // The path of a Wire that was given none is IPv6's, which does for what is compared here.
        ASSERT_EQ(parse(f.bytes(), mine), ParseVerdict::kOk);
        ours[p.dst_ip].push_back(text(mine));
      }
    }
    for (auto& [ip, list] : ours) {
      ASSERT_GT(theirs[ip].size(), 2u);
      list.resize(std::min(list.size(), theirs[ip].size()));  // the file may end between request and answer
    }
    EXPECT_EQ(ours, theirs);
  }
}

// What is asked for again after a gap in the answers, with 3 % of the packets lost: the kernel's requests and
// ours, given the answers that arrived (frames 1 to 140; tshark shows 9865261 to be the first missing).
TEST(Read, TheKernelsSecondRequestsAreOurs) {
  struct Asked {
    uint32_t psn;
    uint64_t address;
    uint32_t length;
    bool operator==(const Asked&) const = default;
  };
  const auto asked_by = [](const Packet& p) {
    return Asked{p.psn().value(), p.reth->address.value(), p.reth->length.value()};
  };
  std::vector<Asked> first, again, ours;
  std::optional<RcRequester> requester;
  HeapFramePool pool;
  Crc32Combine combine;
  FrameList out;
  std::vector<uint8_t> into(8192);
  size_t frame = 0;
  for (auto& bytes : vectors::read_pcap("ib_read_bw-loss.pcap")) {
    frame++;
    Packet p;
    if (parse(bytes, p) != ParseVerdict::kOk || !p.op->rc) continue;
    if (frame <= 17) {
      first.push_back(asked_by(p));
      if (!requester) {
        RequesterConfig config;
        config.first_psn = p.psn();
        config.mtu = 1024;
        config.reads_max = 128;
        requester.emplace(config);
      }
      WorkRequest r;
      r.kind = WorkRequest::Kind::kRead;
      r.remote_address = p.reth->address.value();
      r.into = into;
      ASSERT_TRUE(requester->post(std::move(r)));
    } else if (frame <= 122) {
      if (frame == 18) requester->transmit(Wire{}, pool, combine, 100, Time{}, out);
      requester->read_response(p, Time{});
    } else if (frame >= 125 && frame <= 138) {
      again.push_back(asked_by(p));
    }
  }
  const auto drain = [&] {
    std::vector<Asked> list;
    while (!out.empty()) {
      Frame f = out.pop();
      Packet p;
      EXPECT_EQ(parse(f.bytes(), p), ParseVerdict::kOk);
      list.push_back(asked_by(p));
    }
    return list;
  };
  EXPECT_EQ(drain(), first);
  requester->transmit(Wire{}, pool, combine, 100, Time{}, out);
  ours = drain();
  ASSERT_FALSE(ours.empty());
  EXPECT_EQ(ours.front(), again.front());
  EXPECT_EQ(ours.front().psn, 9865261u);
  EXPECT_EQ(ours.front().length, 3072u);
  // Of the kernel's some were lost before they came by.
  EXPECT_EQ(ours.size(), 15u);
  for (const Asked& a : again) EXPECT_EQ(std::count(ours.begin(), ours.end(), a), 1) << a.psn;
}

// The kernel's answers to messages that find no receive posted, read off with tshark (frame 57): syndrome 44,
// an RNR NAK with timer code 12. Our requester waits and repeats; it neither goes back at once nor gives up.
TEST(Rnr, TheKernelsNakIsReadAsRnrAndNotAsASequenceNak) {
  size_t rnr = 0;
  HeapFramePool pool;
  Crc32Combine combine;
  for (auto& bytes : vectors::read_pcap("ib_send_bw-rnr.pcap")) {
    Packet p;
    if (parse(bytes, p) != ParseVerdict::kOk || !p.aeth || p.aeth->syndrome != 44) continue;
    rnr++;
    RequesterConfig config;
    config.first_psn = p.psn();
    RcRequester requester(config);
    requester.post(WorkRequest{});
    FrameList out;
    ASSERT_EQ(requester.transmit(Wire{}, pool, combine, 1, Time{}, out), 1u);
    requester.acknowledge(p.psn(), p.aeth->syndrome, Time{});
    EXPECT_EQ(requester.counters().rnr_naks, 1u);
    EXPECT_EQ(requester.counters().naks, 0u);
    EXPECT_FALSE(requester.failed());
    EXPECT_FALSE(requester.wants_to_send());
    EXPECT_EQ(requester.next_deadline(), std::chrono::microseconds(640));
  }
  EXPECT_GT(rnr, 0u);
}

}  // namespace
}  // namespace millrace::roce
