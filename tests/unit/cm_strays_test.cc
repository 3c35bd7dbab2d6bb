// What the connection manager makes of strays, of wrong requests, of too many and of malformed ones.
#include <gtest/gtest.h>

#include "tests/unit/cm_net.h"

namespace millrace::roce {
namespace {

// ---- Who answers what it does not know.

TEST(Cm, ListeningAgentAnswersUnknownIds) {
  Net net;
  net.b.receive({{.transaction_id = 9}, DreqMessage{.local_comm_id = 1, .remote_comm_id = 2}}, net.a.path,
                net.now);
  net.b.receive(
      {{.transaction_id = 8}, RepMessage{.local_comm_id = 3, .remote_comm_id = 4, .local_qpn = Qpn{5}}},
      net.a.path, net.now);
  net.b.receive({{}, RtuMessage{.local_comm_id = 3, .remote_comm_id = 4}}, net.a.path, net.now);
  net.b.receive({{}, DrepMessage{.local_comm_id = 3, .remote_comm_id = 4}}, net.a.path, net.now);
  net.b.receive({{}, RejMessage{.local_comm_id = 3, .remote_comm_id = 4}}, net.a.path, net.now);
  net.b.receive({{}, MraMessage{.local_comm_id = 3, .remote_comm_id = 4}}, net.a.path, net.now);
  const auto sent = net.b.sent();
  ASSERT_EQ(sent.size(), 2u);
  EXPECT_EQ(std::get<DrepMessage>(sent[0].body), (DrepMessage{.local_comm_id = 2, .remote_comm_id = 1}));
  EXPECT_EQ(sent[0].header.transaction_id, 9u);
  EXPECT_EQ(std::get<RejMessage>(sent[1].body),
            (RejMessage{.local_comm_id = 4, .remote_comm_id = 3, .answered = CmAnswered::kRep, .reason = 6}));
  EXPECT_EQ(net.b.agent.counters().dreq_unknown, 1u);
  EXPECT_EQ(net.b.agent.counters().unknown_id, 5u);
}

TEST(Cm, AgentWithoutAServiceIsSilentAboutUnknownIds) {
  Net net;
  Node& a = net.a;
  a.receive({{}, DreqMessage{.local_comm_id = 1, .remote_comm_id = 2}}, net.b.path, net.now);
  a.receive({{}, RepMessage{.local_comm_id = 3, .remote_comm_id = 4, .local_qpn = Qpn{5}}}, net.b.path,
            net.now);
  a.receive({{}, ReqMessage{.local_comm_id = 3}}, net.b.path, net.now);
  a.receive({{}, RtuMessage{.local_comm_id = 3, .remote_comm_id = 4}}, net.b.path, net.now);
  EXPECT_EQ(a.sent().size(), 0u);
  EXPECT_EQ(a.agent.counters().unknown_id, 4u);
  EXPECT_TRUE(a.log.empty());
}

TEST(Cm, TimeOutRejFindsTheConnectionByGuid) {
  // Linux' active side that gives up before any REP knows no ID of ours.
  Net net;
  net.b.react = nullptr;
  const CmId id = net.connect();
  net.run_for(milliseconds(1));
  RejMessage rej{.local_comm_id = id.value, .answered = CmAnswered::kOther, .info_length = 8, .reason = 4};
  rej.info = {0, 0, 0, 0, 0, 0, 0, 0xA};
  net.b.receive({{}, rej}, net.a.path, net.now);
  ASSERT_EQ(net.b.count(Kind::kRejected), 1u);
  EXPECT_EQ(net.b.agent.connections(), 0u);
}

TEST(Cm, GivingUpTellsThePeerWhoWaits) {
  Net net;
  net.b.react = nullptr;  // a caller that never answers
  net.connect();
  net.run_for(seconds(10));
  EXPECT_EQ(net.a.count(Kind::kUnreachable), 1u);
  ASSERT_EQ(net.b.count(Kind::kRejected), 1u);
  EXPECT_EQ(net.b.take(Kind::kRejected)[0].reason, RejectReason::kTimeout);
  EXPECT_EQ(net.b.agent.connections(), 0u);
}

TEST(Cm, LateRepForAGivenUpReqIsRefused) {
  Net net(1, {.loss = 1.0});
  const CmId id = net.connect();
  net.run_for(seconds(10));
  ASSERT_EQ(net.a.count(Kind::kUnreachable), 1u);
  net.a.receive({{}, RepMessage{.local_comm_id = 6, .remote_comm_id = id.value, .local_qpn = Qpn{5}}},
                net.b.path, net.now);
  const auto sent = net.a.sent();
  ASSERT_EQ(sent.size(), 1u);
  const auto& rej = std::get<RejMessage>(sent[0].body);
  EXPECT_EQ(rej.remote_comm_id, 6u);
  EXPECT_EQ(rej.answered, CmAnswered::kRep);
}

TEST(Cm, ARejSaysWhatItAnswersAndShowsAnIdOnlyWhereThereIsOne) {
  const auto rej_of = [](Node& n) {
    const auto sent = n.sent();
    EXPECT_FALSE(sent.empty());
    return sent.empty() ? RejMessage{} : std::get<RejMessage>(sent.back().body);
  };
  {  // To a REQ.
    Net net;
    net.b.react = nullptr;
    net.connect();
    net.run_for(milliseconds(1));
    net.b.agent.disconnect(net.b.log[0].id, net.now, net.b.out);
    const RejMessage m = rej_of(net.b);
    EXPECT_EQ(m.answered, CmAnswered::kReq);
    EXPECT_EQ(m.local_comm_id, 0u);
    EXPECT_EQ(m.reason, 28);
  }
  {  // To a REP, and behind one.
    Net net;
    net.a.react = nullptr;
    const CmId id = net.connect();
    net.run_for(milliseconds(1));
    net.a.agent.disconnect(id, net.now, net.a.out);
    RejMessage m = rej_of(net.a);
    EXPECT_EQ(m.answered, CmAnswered::kRep);
    EXPECT_EQ(m.local_comm_id, id.value);
    EXPECT_EQ(m.remote_comm_id, net.b.log[0].id.value);
    net.b.agent.disconnect(net.b.log[0].id, net.now, net.b.out);
    m = rej_of(net.b);
    EXPECT_EQ(m.answered, CmAnswered::kOther);
    EXPECT_EQ(m.local_comm_id, net.b.log[0].id.value);
    EXPECT_EQ(m.remote_comm_id, id.value);
  }
  {  // Of our own REQ: the peer finds it by the GUID.
    Net net;
    const CmId id = net.a.agent.connect(net.a.path, kService, kQpA, 1, {}, net.now, net.a.out);
    net.a.agent.disconnect(id, net.now, net.a.out);
    const RejMessage m = rej_of(net.a);
    EXPECT_EQ(m.reason, 4);
    EXPECT_EQ(m.info_length, 8);
    EXPECT_EQ(m.info[7], 0xA);
  }
}

TEST(Cm, PathBackKeepsVlanAndTheReqsTrafficClass) {
  Node n("10.0.0.2", "10.0.0.1", {});
  n.agent.listen(kService);
  Path from = path_between("10.0.0.1", "10.0.0.2");
  from.has_vlan = true;
  from.vlan_tci = 0x6064;
  from.tos = 0x6A | 3;  // marked by the network
  CmMessage m = req_from(from, 5, 6);
  std::get<ReqMessage>(m.body).primary.traffic_class = 0x6A;
  n.receive(m, from, Time(1));
  ASSERT_EQ(n.log.size(), 1u);
  EXPECT_TRUE(n.log[0].path.has_vlan);
  EXPECT_EQ(n.log[0].path.vlan_tci, 0x6064);
  EXPECT_EQ(n.log[0].path.tos, 0x6A);
  EXPECT_EQ(n.log[0].path.src_port, flow_source_port(kGsiQpn, Qpn{6}));
  n.receive({{}, DreqMessage{.local_comm_id = 1, .remote_comm_id = 2}}, from, Time(1));
  const auto frames = drain(n.out);
  ASSERT_EQ(frames.size(), 1u);
  Bytes drep = frames[0];
  Packet p;
  ASSERT_EQ(parse(drep, p), ParseVerdict::kOk);
  EXPECT_EQ(p.vlan_tci, 0x6064);
  EXPECT_EQ(p.tos, 0x68);
  EXPECT_EQ(p.dst_ip, from.src_ip);
  EXPECT_EQ(p.dst_mac, from.src_mac);
}

TEST(Cm, StrangersMessagesDoNotTouchAConnection) {
  const Path stranger = path_between("10.0.0.3", "10.0.0.1");
  Net net;
  Node& a = net.a;
  const CmId id = a.agent.connect(a.path, kService, kQpA, 1, {}, net.now, a.out);
  const RepMessage rep{.local_comm_id = 5, .remote_comm_id = id.value, .local_qpn = Qpn{9}};
  const Time due = a.agent.next_deadline();
  a.receive({{}, rep}, stranger, net.now);
  a.receive({{}, RejMessage{.remote_comm_id = id.value, .reason = 28}}, stranger, net.now);
  a.receive({{}, MraMessage{.remote_comm_id = id.value, .service_timeout = 20}}, stranger, net.now);
  EXPECT_EQ(a.agent.counters().unknown_id, 3u);
  // From the peer, but not for this state, or without a queue pair.
  a.receive({{}, MraMessage{.remote_comm_id = id.value, .answered = CmAnswered::kRep, .service_timeout = 20}},
            net.b.path, net.now);
  a.receive({{}, RepMessage{.local_comm_id = 5, .remote_comm_id = id.value, .local_qpn = Qpn{1}}}, net.b.path,
            net.now);
  a.receive({{}, RepMessage{.remote_comm_id = id.value, .local_qpn = Qpn{9}}}, net.b.path, net.now);
  EXPECT_EQ(a.agent.counters().bad_mad, 2u);
  a.receive({{}, MraMessage{.remote_comm_id = id.value, .service_timeout = 0}}, net.b.path, net.now);
  EXPECT_EQ(a.agent.next_deadline(), due) << "an MRA never hastens";
  EXPECT_TRUE(a.log.empty());
  a.receive({{}, rep}, net.b.path, net.now);
  ASSERT_EQ(a.count(Kind::kReply), 1u);
  a.agent.confirm(id, net.now, a.out);
  a.sent();
  // Established: another ID than the peer's; a DREP that nobody asked for.
  a.receive({{}, RejMessage{.local_comm_id = 6, .remote_comm_id = id.value, .reason = 28}}, net.b.path,
            net.now);
  a.receive({{}, DrepMessage{.local_comm_id = 5, .remote_comm_id = id.value}}, net.b.path, net.now);
  EXPECT_EQ(a.log.size(), 1u);
  EXPECT_EQ(a.agent.connections(), 1u);
  EXPECT_EQ(a.sent().size(), 0u);
}

TEST(Cm, PassiveConnectionTakesOnlyItsPeersMessages) {
  Net net;
  Node& b = net.b;
  b.receive(req_from(net.a.path, 7, 8), net.a.path, net.now);
  const CmId id = b.log.at(0).id;
  b.sent();
  const Time due = b.agent.next_deadline();
  b.receive({{},
             MraMessage{.local_comm_id = 6,
                        .remote_comm_id = id.value,
                        .answered = CmAnswered::kRep,
                        .service_timeout = 20}},
            net.a.path, net.now);
  EXPECT_EQ(b.agent.next_deadline(), due);
  // A REP to a connection that sent one is nobody's.
  b.receive({{}, RepMessage{.local_comm_id = 7, .remote_comm_id = id.value, .local_qpn = Qpn{9}}}, net.a.path,
            net.now);
  const auto sent = b.sent();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(std::get<RejMessage>(sent[0].body).reason, 6);
  // A time-out REJ must carry the whole GUID.
  RejMessage rej{.local_comm_id = 7, .answered = CmAnswered::kOther, .info_length = 7, .reason = 4};
  rej.info = {0, 0, 0, 0, 0, 0, 0, 0xA};
  b.receive({{}, rej}, net.a.path, net.now);
  EXPECT_EQ(b.agent.connections(), 1u);
  rej.info_length = 8;
  b.receive({{}, rej}, net.a.path, net.now);
  EXPECT_EQ(b.agent.connections(), 0u);
}

TEST(Cm, DreqBeforeAcceptDisconnects) {
  Net net;
  Node& b = net.b;
  b.react = nullptr;
  b.receive(req_from(net.a.path, 7, 8), net.a.path, net.now);
  b.agent.mra(b.log.at(0).id, seconds(1), net.now, b.out);  // tells the peer our ID
  b.receive({{}, DreqMessage{.local_comm_id = 7, .remote_comm_id = b.log[0].id.value, .remote_qpn = Qpn{3}}},
            net.a.path, net.now);
  EXPECT_EQ(b.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(b.agent.connections(), 0u);
}

TEST(Cm, RepOfAPeerBehindAFinishedConnectionIsStale) {
  Net net;
  const CmId id = net.connect();
  net.run_for(milliseconds(100));
  net.a.agent.disconnect(id, net.now, net.a.out);
  net.run_for(milliseconds(100));
  const auto there = net.b.log.at(0).id.value;
  net.a.receive(
      {{},
       RepMessage{
           .local_comm_id = there, .remote_comm_id = id.value, .local_qpn = kQpB.qpn, .local_ca_guid = 0xB}},
      net.b.path, net.now);
  const auto sent = net.a.sent();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(std::get<RejMessage>(sent[0].body).reason, 10);
}

TEST(Cm, OnlyQp1sDatagramsFromRealAddressesAreMads) {
  Net net;
  HeapFramePool other;
  const Mad mad = encode_cm({{}, DreqMessage{.local_comm_id = 1, .remote_comm_id = 2}});
  TransportFields f{.opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .qkey = kGsiQkey, .src_qp = Qpn{2}};
  net.b.receive(bytes_of(build(other, net.a.path, f, mad)), net.now);
  f.src_qp = kGsiQpn;
  f.opcode = Opcode::kUdSendOnlyImm;
  net.b.receive(bytes_of(build(other, net.a.path, f, mad)), net.now);
  f.opcode = Opcode::kUdSendOnly;
  for (const char* from : {"0.0.0.0", "224.0.0.1", "255.255.255.255", "::", "ff02::1"})
    net.b.receive(
        bytes_of(build(other, path_between(from, ip(from).is_v4() ? "10.0.0.2" : "fd00::2"), f, mad)),
        net.now);
  EXPECT_EQ(net.b.agent.counters().bad_mad, 7u);
  EXPECT_EQ(net.b.sent().size(), 0u);
}

// ---- What a REQ must be.

TEST(Cm, UnfitReqsAreRefusedWithTheReason) {
  Node probe("10.0.0.1", "10.0.0.2", {.ca_guid = 1});
  probe.agent.connect(probe.path, kService, kQpA, 1, {}, Time(1), probe.out);
  const CmMessage good = probe.sent()[0];
  const auto verdict = [&](auto&& change) {
    Node n("10.0.0.2", "10.0.0.1", {});
    n.agent.listen(kService);
    CmMessage m = good;
    change(std::get<ReqMessage>(m.body));
    n.receive(m, probe.path, Time(1));
    const auto sent = n.sent();
    EXPECT_EQ(sent.size() + n.log.size(), 1u);
    return sent.empty() ? 0 : std::get<RejMessage>(sent[0].body).reason;
  };
  EXPECT_EQ(verdict([](ReqMessage&) {}), 0);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.service_id++; }), 8);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.transport_service = 1; }), 9);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.primary.local_gid = ip("10.0.0.7"); }), 12);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.primary.remote_gid = ip("10.0.0.7"); }), 12);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.path_mtu = 0; }), 26);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.path_mtu = 6; }), 26);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.local_qpn = Qpn{1}; }), 5);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.local_comm_id = 0; }), 5);
  EXPECT_EQ(verdict([](ReqMessage& m) { m.private_data[0] = 0x10; }), 5);  // rdma_cm of another major version
  EXPECT_EQ(verdict([](ReqMessage& m) { m.private_data[1] = 0x50; }), 5);
}

TEST(Cm, ForeignKeysAreDroppedAndCounted) {
  Net net;
  const CmMessage dreq{{}, DreqMessage{.local_comm_id = 1, .remote_comm_id = 2}};
  net.b.receive(dreq, net.a.path, net.now, 0x11111111);
  EXPECT_EQ(net.b.agent.counters().bad_qkey, 1u);
  net.b.receive(dreq, net.a.path, net.now, kGsiQkey, 0x8001);
  EXPECT_EQ(net.b.agent.counters().bad_mad, 1u);
  EXPECT_EQ(net.b.sent().size(), 0u);
  net.b.receive(dreq, net.a.path, net.now, kGsiQkey, 0x7FFF);  // a limited member of the default partition
  EXPECT_EQ(net.b.sent().size(), 1u);
}

// ---- Bounds.

TEST(Cm, HalfOpenRequestsAreBoundedAndGoOnWhenThereIsRoom) {
  Net net(1, {}, {}, {.half_open_max = 16});
  net.b.react = nullptr;
  for (uint32_t i = 1; i <= 500; i++) net.b.receive(req_from(net.a.path, i, 100 + i), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 16u);
  EXPECT_EQ(net.b.agent.connections(), 16u);
  EXPECT_EQ(net.b.agent.counters().half_open_refused, 484u);
  EXPECT_EQ(net.b.sent().size(), 0u);
  // An accepted one is half-open still; an established or a refused one is not.
  const auto requests = net.b.take(Kind::kRequest);
  net.b.agent.accept(requests[0].id, kQpB, {}, net.now, net.b.out);
  net.b.receive(req_from(net.a.path, 600, 700), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 16u);
  net.b.agent.established(requests[0].id);
  net.b.agent.reject(requests[1].id, RejectReason::kConsumer, {}, net.now, net.b.out);
  for (uint32_t i = 0; i < 3; i++) net.b.receive(req_from(net.a.path, 600 + i, 700 + i), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 18u);
}

TEST(Cm, OneSourceDoesNotKeepOthersOut) {
  Net net(1, {}, {}, {.half_open_max = 64, .half_open_per_source = 16});
  net.b.react = nullptr;
  for (uint32_t i = 1; i <= 100; i++) net.b.receive(req_from(net.a.path, i, 100 + i), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 16u);
  Path other = net.a.path;
  other.src_ip = *IpAddress::parse("10.77.0.77");
  net.b.receive(req_from(other, 1, 101), other, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 17u);
  // Refused ones make room again.
  for (const CmEvent& e : net.b.take(Kind::kRequest))
    net.b.agent.reject(e.id, RejectReason::kConsumer, {}, net.now, net.b.out);
  net.b.receive(req_from(net.a.path, 200, 300), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 18u);
}

TEST(Cm, LiveConnectionsAreBounded) {
  Net net(1, {}, {.connections_max = 8}, {.connections_max = 8});
  CmQueuePair theirs = kQpB;
  net.b.react = [&](const CmEvent& e) {
    if (e.kind != Kind::kRequest) return;
    theirs.qpn.value++;
    net.b.agent.accept(e.id, theirs, {}, net.now, net.b.out);
  };
  for (uint32_t i = 0; i < 20; i++) {
    CmQueuePair qp = kQpA;
    qp.qpn.value += i;
    EXPECT_EQ(net.connect(qp) == CmId{}, i >= 8);
    net.run_for(milliseconds(1));
  }
  EXPECT_EQ(net.b.agent.connections(), 8u);
  net.b.receive(req_from(net.a.path, 1000, 5000), net.a.path, net.now);
  EXPECT_EQ(net.b.agent.counters().half_open_refused, 1u);
}

TEST(Cm, APeerThatReplacesItselfWithoutEndStaysBounded) {
  HeapFramePool pool;
  CmAgent agent({.connections_max = 32}, pool);
  agent.listen(kService);
  Node source("10.0.0.1", "10.0.0.2", {});
  FrameList out;
  size_t events = 0;
  for (uint32_t i = 1; i <= 5000; i++) {
    const TransportFields f{
        .opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .qkey = kGsiQkey, .src_qp = kGsiQpn};
    Bytes b = bytes_of(build(source.pool, source.path, f, encode_cm(req_from(source.path, i, 7))));
    Packet p;
    ASSERT_EQ(parse(b, p), ParseVerdict::kOk);
    agent.receive(p, Time(i), out);
    EXPECT_LE(agent.connections(), 1u);
    EXPECT_LE(agent.records(), 200u);
    if (i == 2500) {  // so far nobody has taken the events
      for (CmEvent e; agent.next_event(e);) events++;
      EXPECT_LE(events, 32u + 3u);
    }
    if (i >= 2500)
      for (CmEvent e; agent.next_event(e);) events++;
  }
  EXPECT_GT(events, 4000u);
  // At most connections_max rest: they are forgotten one by one, each at its time.
  size_t rested = 0;
  for (; agent.next_deadline() != kNever; rested++) agent.poll(agent.next_deadline(), out);
  EXPECT_LE(rested, 32u);
}

TEST(Cm, AnEmptyPoolIsAsALossyWire) {
  Net net;
  HeapFramePool one(4608, 1);
  CmAgent agent({.ca_guid = 0xA}, one);
  const Frame held = Frame::allocate(one);
  {
    FrameList out;
    agent.connect(net.a.path, kService, kQpA, 1, {}, net.now, out);
    EXPECT_TRUE(out.empty());
    EXPECT_EQ(agent.counters().send_failed, 1u);
  }
  const_cast<Frame&>(held) = Frame();
  FrameList out;
  agent.poll(net.now + milliseconds(400), out);
  EXPECT_EQ(out.size(), 1u);
}

TEST(Cm, UnusableConfigurationIsRefused) {
  HeapFramePool pool;
  EXPECT_THROW(CmAgent({.response_timeout = Time(0)}, pool), Error);
  EXPECT_THROW(CmAgent({.id_reuse = Time(0)}, pool), Error);
  EXPECT_THROW(CmAgent({.connections_max = 0}, pool), Error);
  EXPECT_THROW(CmAgent({.half_open_max = 0}, pool), Error);
}

TEST(CmDeathTest, PrivateDataThatDoesNotFitIsABug) {
  Net net;
  net.b.react = nullptr;
  net.connect();
  net.run_for(milliseconds(1));
  EXPECT_DEATH(net.b.agent.accept(net.b.log.at(0).id, kQpB, Bytes(197), net.now, net.b.out), "private data");
  EXPECT_DEATH(net.connect(kQpA, Bytes(57)), "private data");
}

// ---- Malformed input.

TEST(Cm, FiftyThousandMutatedMadsHarmNothing) {
  std::mt19937 random(42);
  std::vector<Mad> seeds;
  for (const char* file : {"rping-cm-10x256.pcap", "rping-cm-ipv6.pcap", "rping-cm-reject.pcap"})
    for (Bytes& frame : vectors::read_pcap(file)) {
      Packet p;
      if (parse(frame, p) != ParseVerdict::kOk || p.dest_qp() != kGsiQpn) continue;
      std::copy(p.payload.begin(), p.payload.end(), seeds.emplace_back().begin());
    }
  seeds.push_back(encode_cm({{}, MraMessage{.local_comm_id = 1}}));
  const Path from = path_between("10.77.0.2", "10.77.0.1");
  Node n("10.77.0.1", "10.77.0.2", {.connections_max = 64, .half_open_max = 16});
  n.agent.listen(tcp_service_id(0x1c06));
  HeapFramePool source(4608, UINT32_MAX, true);  // a fresh allocation each, for the sanitizer
  std::vector<CmId> ids;
  Time now{1};
  n.react = [&](const CmEvent& e) {
    if (ids.size() > 200) ids.clear();
    ids.push_back(e.id);
    if (e.kind == Kind::kReply && random() % 2) n.agent.confirm(e.id, now, n.out);
    if (e.kind != Kind::kRequest) return;
    switch (random() % 4) {
      case 0:
        n.agent.accept(e.id, kQpB, {}, now, n.out);
        break;
      case 1:
        n.agent.reject(e.id, RejectReason::kConsumer, Bytes(148, 7), now, n.out);
        break;
      case 2:
        n.agent.mra(e.id, seconds(1), now, n.out);
        break;
      default:
        break;
    }
  };
  for (int i = 0; i < 50000; i++) {
    now += milliseconds(random() % 50);
    Mad mad = seeds[random() % seeds.size()];
    if (random() % 2 && !ids.empty()) {  // at a connection that there is, from the peer that it knows or not
      const uint32_t id = ids[random() % ids.size()].value;
      for (int k = 0; k < 4; k++) mad[static_cast<size_t>(28 + k)] = static_cast<uint8_t>(id >> (24 - 8 * k));
    }
    if (random() % 4 == 0) mad[17] = static_cast<uint8_t>(0x10 + random() % 8);
    for (uint32_t k = random() % 6; k > 0; k--) mad[random() % mad.size()] = static_cast<uint8_t>(random());
    if (random() % 4 == 0) mad[24 + random() % 120] ^= static_cast<uint8_t>(1 << random() % 8);
    const size_t length = random() % 16 == 0 ? random() % 257 : mad.size();
    const TransportFields f{.opcode = random() % 64 == 0 ? Opcode::kSendOnly : Opcode::kUdSendOnly,
                            .dest_qp = kGsiQpn,
                            .qkey = random() % 64 == 0 ? 0 : kGsiQkey,
                            .src_qp = random() % 64 == 0 ? Qpn{2} : kGsiQpn};
    {
      Frame frame = build(source, from, f, std::span(mad).first(length));
      Packet p;
      ASSERT_EQ(parse(frame.bytes(), p), ParseVerdict::kOk);
      n.agent.receive(p, now, n.out);
    }
    if (random() % 8 == 0) n.agent.connect(n.path, kService, kQpA, 1, {}, now, n.out);
    if (random() % 16 == 0 && !ids.empty()) n.agent.disconnect(ids[random() % ids.size()], now, n.out);
    n.agent.poll(now, n.out);
    n.settle();
    n.sent();  // whatever it says is well-formed
    ASSERT_LE(n.agent.connections(), 64u);
  }
  expect_one_end_each(n);
  const CmCounters& c = n.agent.counters();
  EXPECT_GT(c.req_received, 1000u);
  EXPECT_GT(c.bad_mad, 1000u);
  EXPECT_GT(n.count(Kind::kRequest), 100u);
  // And it goes on as before.
  for (const CmEvent& e : n.log) n.agent.disconnect(e.id, now, n.out);
  for (int i = 0; i < 2000 && n.agent.next_deadline() != kNever; i++) {
    now = std::max(now, n.agent.next_deadline());
    n.agent.poll(now, n.out);
    n.settle();
    n.sent();
  }
  EXPECT_EQ(n.agent.connections(), 0u);
  const Captured req("rping-cm-10x256.pcap", 3);
  const auto before = n.count(Kind::kRequest);
  n.receive(req.bytes, now);
  EXPECT_EQ(n.count(Kind::kRequest), before + 1);
}

}  // namespace
}  // namespace millrace::roce
