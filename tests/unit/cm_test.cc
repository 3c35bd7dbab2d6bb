#include "roce/cm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "roce/cm_message.h"
#include "roce/error.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace::roce {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Kind = CmEvent::Kind;
using Bytes = std::vector<uint8_t>;

constexpr uint64_t kService = tcp_service_id(18600);
constexpr CmQueuePair kQpA{.qpn = Qpn{0x100}, .first_psn = Psn(0xFFFFF0)};
constexpr CmQueuePair kQpB{.qpn = Qpn{0x200}, .first_psn = Psn(0x000123), .rnr_retry = 7};

IpAddress ip(const char* text) { return *IpAddress::parse(text); }

Path path_between(const char* from, const char* to) {
  Path p;
  p.src_mac = {{2, 0, 0, 0, 0, 1}};
  p.dst_mac = {{2, 0, 0, 0, 0, 2}};
  p.src_ip = ip(from);
  p.dst_ip = ip(to);
  p.src_port = 0xC123;
  return p;
}

Bytes bytes_of(Frame frame) {
  Bytes b(frame.total_length());
  frame.copy_to(b.data());
  return b;
}

std::vector<Bytes> drain(FrameList& out) {
  std::vector<Bytes> all;
  while (!out.empty()) all.push_back(bytes_of(out.pop()));
  return all;
}

CmMessage message_of(Bytes& frame) {
  Packet p;
  EXPECT_EQ(parse(frame, p), ParseVerdict::kOk);
  EXPECT_TRUE(icrc_ok(p));
  EXPECT_EQ(p.dest_qp(), kGsiQpn);
  EXPECT_EQ(p.bth->flags & 0x40, 0x40);  // MigReq
  EXPECT_EQ(p.deth->qkey.value(), kGsiQkey);
  EXPECT_EQ(p.deth->src_qp.value(), 1u);
  EXPECT_EQ(p.src_port, 0xC001);  // one flow for all of QP1
  const auto m = decode_cm(p.payload);
  EXPECT_TRUE(m);
  return m.value_or(CmMessage{});
}

// One agent with what its caller would do.
struct Node {
  Node(const char* own, const char* peer, const CmConfig& config)
      : path(path_between(own, peer)), agent(config, pool) {}
  std::vector<CmEvent> take(Kind kind) const {
    std::vector<CmEvent> some;
    std::copy_if(log.begin(), log.end(), std::back_inserter(some), [&](auto& e) { return e.kind == kind; });
    return some;
  }
  size_t count(Kind kind) const { return take(kind).size(); }
  void settle() {
    CmEvent e;
    while (agent.next_event(e)) {
      log.push_back(e);
      if (react) react(e);
    }
  }
  void receive(Bytes frame, Time now) {
    Packet p;
    ASSERT_EQ(parse(frame, p), ParseVerdict::kOk);
    ASSERT_TRUE(icrc_ok(p));
    agent.receive(p, now, out);
    settle();
  }
  // A message as if from `from`, straight in.
  void receive(const CmMessage& m, const Path& from, Time now, uint32_t qkey = kGsiQkey,
               uint16_t pkey = kDefaultPkey) {
    HeapFramePool other;
    const TransportFields f{
        .opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .pkey = pkey, .qkey = qkey, .src_qp = kGsiQpn};
    receive(bytes_of(build(other, from, f, encode_cm(m))), now);
  }
  std::vector<CmMessage> sent() {
    std::vector<CmMessage> all;
    for (Bytes& b : drain(out)) all.push_back(message_of(b));
    return all;
  }

  HeapFramePool pool;
  Path path;  // to the peer
  FrameList out;
  CmAgent agent;
  std::vector<CmEvent> log;
  std::function<void(const CmEvent&)> react;
};

struct Weather {
  double loss = 0, copies = 0;
  int64_t delay_us_max = 10;
};

// Two nodes, a wire between them and the time.
struct Net {
  explicit Net(uint64_t seed = 1, Weather w = {}, CmConfig a_config = {}, CmConfig b_config = {})
      : random(seed),
        weather(w),
        a("10.0.0.1", "10.0.0.2", named(a_config, 0xA, seed)),
        b("10.0.0.2", "10.0.0.1", named(b_config, 0xB, seed)) {
    b.agent.listen(kService);
    a.react = [this](const CmEvent& e) {
      if (e.kind == Kind::kReply) a.agent.confirm(e.id, now, a.out);
    };
    b.react = [this](const CmEvent& e) {
      if (e.kind == Kind::kRequest) b.agent.accept(e.id, kQpB, {}, now, b.out);
    };
  }
  static CmConfig named(CmConfig c, uint64_t guid, uint64_t seed) {
    c.ca_guid = guid;
    c.seed = seed * 2 + guid;
    return c;
  }
  CmId connect(const CmQueuePair& qp = kQpA, std::span<const uint8_t> data = {}) {
    const CmId id = a.agent.connect(a.path, kService, qp, 40000, data, now, a.out);
    flush();
    return id;
  }
  bool chance(double p) { return std::uniform_real_distribution<double>(0, 1)(random) < p; }
  void put(int to, const Bytes& frame) {
    const int copies = chance(weather.loss) ? 0 : chance(weather.copies) ? 2 : 1;
    for (int i = 0; i < copies; i++) {
      const Time delay =
          std::chrono::microseconds(random() % static_cast<uint64_t>(weather.delay_us_max) + 1);
      wire.emplace(now + delay, std::pair{to, frame});
    }
  }
  void flush() {
    for (Bytes& f : drain(a.out))
      if (!drop || !drop(message_of(f))) put(1, f);
    for (Bytes& f : drain(b.out))
      if (!drop || !drop(message_of(f))) put(0, f);
  }
  // Until `until`, or until nothing is left to happen.
  void run(Time until) {
    flush();
    for (;;) {
      const Time next = std::min(
          {wire.empty() ? kNever : wire.begin()->first, a.agent.next_deadline(), b.agent.next_deadline()});
      if (next > until || next == kNever) break;
      now = std::max(now, next);
      if (!wire.empty() && wire.begin()->first <= now) {
        const auto [to, frame] = wire.begin()->second;
        wire.erase(wire.begin());
        (to == 1 ? b : a).receive(frame, now);
      } else {
        a.agent.poll(now, a.out);
        b.agent.poll(now, b.out);
        a.settle();
        b.settle();
      }
      flush();
    }
    if (until != kNever) now = std::max(now, until);
  }
  void run_for(Time t) { run(now + t); }

  Time now{1000};
  std::mt19937_64 random;
  Weather weather;
  std::multimap<Time, std::pair<int, Bytes>> wire;
  std::function<bool(const CmMessage&)> drop;
  Node a, b;
};

CmMessage req_from(const Path& from, uint32_t comm_id, uint32_t qpn) {
  ReqMessage m{.local_comm_id = comm_id,
               .service_id = kService,
               .local_ca_guid = 0xA,
               .local_qpn = Qpn{qpn},
               .path_mtu = 3};
  m.primary.local_gid = from.src_ip;
  m.primary.remote_gid = from.dst_ip;
  encode_rdma_cm({.src_ip = from.src_ip, .dst_ip = from.dst_ip}, std::span(m.private_data).first<36>());
  return {{}, m};
}

template <typename M>
bool is(const CmMessage& m) {
  return std::holds_alternative<M>(m.body);
}

bool terminal(Kind k) {
  return k == Kind::kRejected || k == Kind::kUnreachable || k == Kind::kDisconnected || k == Kind::kClosed;
}

// No event of a connection follows its end, and there is one end.
void expect_one_end_each(const Node& n) {
  std::set<uint32_t> ended;
  for (const CmEvent& e : n.log) {
    EXPECT_FALSE(ended.contains(e.id.value)) << "an event behind the end of a connection";
    if (terminal(e.kind)) ended.insert(e.id.value);
  }
}

// ---- Against Linux's own messages.

struct Captured {
  Captured(const std::string& file, size_t number) : bytes(vectors::read_pcap(file).at(number - 1)) {
    EXPECT_EQ(parse(bytes, packet), ParseVerdict::kOk);
    message = decode_cm(packet.payload).value_or(CmMessage{});
  }
  Path path() const {
    Path p;
    p.src_mac = packet.src_mac;
    p.dst_mac = packet.dst_mac;
    p.src_ip = packet.src_ip;
    p.dst_ip = packet.dst_ip;
    return p;
  }
  Bytes bytes;
  Packet packet;
  CmMessage message;
};

struct Dialogue {
  const char* file;
  size_t req, rep, rtu, dreq, drep;
};
constexpr Dialogue kDialogues[] = {{"rping-cm-10x256.pcap", 3, 4, 5, 126, 127},
                                   {"rping-cm-ipv6.pcap", 3, 6, 7, 44, 45}};

TEST(Cm, PassiveSideSpeaksToLinuxAsLinuxDoes) {
  for (const Dialogue& d : kDialogues) {
    const Captured req(d.file, d.req), rep(d.file, d.rep), rtu(d.file, d.rtu), dreq(d.file, d.dreq),
        drep(d.file, d.drep);
    const auto& theirs = std::get<RepMessage>(rep.message.body);
    Node n("10.0.0.9", "10.0.0.8", {.ca_guid = theirs.local_ca_guid});
    n.agent.listen(tcp_service_id(0x1c06));
    n.receive(req.bytes, Time(1));
    ASSERT_EQ(n.log.size(), 1u);
    const CmEvent e = n.log[0];
    const auto& asked = std::get<ReqMessage>(req.message.body);
    EXPECT_EQ(e.kind, Kind::kRequest);
    EXPECT_EQ(e.path.dst_ip, req.packet.src_ip);
    EXPECT_EQ(e.path.dst_mac, req.packet.src_mac);
    EXPECT_EQ(e.path.src_ip, req.packet.dst_ip);
    EXPECT_EQ(e.path.src_mac, req.packet.dst_mac);
    EXPECT_EQ(e.path.src_port, flow_label_port(asked.primary.flow_label));
    EXPECT_EQ(e.service_id, tcp_service_id(7174));
    EXPECT_EQ(e.remote.qpn, asked.local_qpn);
    EXPECT_EQ(e.remote.first_psn, asked.starting_psn);
    EXPECT_EQ(e.remote.mtu_code, 5);
    EXPECT_EQ(e.remote.retry_count, 7);
    EXPECT_EQ(e.remote.rnr_retry, 7);
    EXPECT_EQ(e.remote.ack_timeout, 0x13);
    EXPECT_EQ(e.remote.responder_resources, 1);
    EXPECT_EQ(e.remote.initiator_depth, 1);
    EXPECT_EQ(e.private_data, Bytes(56, 0));

    n.agent.accept(e.id,
                   {.qpn = theirs.local_qpn,
                    .first_psn = theirs.starting_psn,
                    .rnr_retry = 7,
                    .responder_resources = 1,
                    .initiator_depth = 1},
                   {}, Time(2), n.out);
    auto sent = n.sent();
    ASSERT_EQ(sent.size(), 1u);
    RepMessage ours = std::get<RepMessage>(sent[0].body);
    EXPECT_EQ(ours.local_comm_id, e.id.value);
    EXPECT_EQ(ours.target_ack_delay, 0);
    ours.local_comm_id = theirs.local_comm_id;
    ours.target_ack_delay = theirs.target_ack_delay;  // rxe says 15, we say 0
    EXPECT_EQ(ours, theirs);
    EXPECT_EQ(sent[0].header, rep.message.header);

    CmMessage m = rtu.message;
    std::get<RtuMessage>(m.body).remote_comm_id = e.id.value;
    n.receive(m, rtu.path(), Time(3));
    EXPECT_EQ(n.count(Kind::kEstablished), 1u);
    m = dreq.message;
    std::get<DreqMessage>(m.body).remote_comm_id = e.id.value;
    n.receive(m, dreq.path(), Time(4));
    EXPECT_EQ(n.count(Kind::kDisconnected), 1u);
    sent = n.sent();
    ASSERT_EQ(sent.size(), 1u);
    DrepMessage bye = std::get<DrepMessage>(sent[0].body);
    bye.local_comm_id = theirs.local_comm_id;
    EXPECT_EQ(bye, std::get<DrepMessage>(drep.message.body));
    EXPECT_EQ(sent[0].header, drep.message.header);
    EXPECT_EQ(n.agent.connections(), 0u);
  }
}

TEST(Cm, ActiveSideSpeaksToLinuxAsLinuxDoes) {
  for (const Dialogue& d : kDialogues) {
    const Captured req(d.file, d.req), rep(d.file, d.rep), rtu(d.file, d.rtu), dreq(d.file, d.dreq),
        drep(d.file, d.drep);
    const auto& theirs = std::get<ReqMessage>(req.message.body);
    Node n("10.0.0.9", "10.0.0.8", {.ca_guid = theirs.local_ca_guid, .response_timeout = cm_time(20)});
    Path to = req.path();
    to.src_port = flow_label_port(theirs.primary.flow_label);
    const auto port = decode_rdma_cm(std::span(theirs.private_data).first<36>())->src_port;
    const CmId id = n.agent.connect(to, tcp_service_id(0x1c06),
                                    {.qpn = theirs.local_qpn,
                                     .first_psn = theirs.starting_psn,
                                     .mtu_code = 5,
                                     .ack_timeout = 0x13,
                                     .responder_resources = 1,
                                     .initiator_depth = 1},
                                    port, {}, Time(1), n.out);
    auto sent = n.sent();
    ASSERT_EQ(sent.size(), 1u);
    ReqMessage ours = std::get<ReqMessage>(sent[0].body);
    EXPECT_EQ(ours.local_comm_id, id.value);
    EXPECT_EQ(flow_label_port(ours.primary.flow_label), to.src_port);
    ours.local_comm_id = theirs.local_comm_id;
    ours.primary.flow_label = theirs.primary.flow_label;
    EXPECT_EQ(ours, theirs);
    const uint64_t transaction = sent[0].header.transaction_id;

    CmMessage m = rep.message;
    std::get<RepMessage>(m.body).remote_comm_id = id.value;
    n.receive(m, rep.path(), Time(2));
    ASSERT_EQ(n.count(Kind::kReply), 1u);
    const CmEvent reply = n.take(Kind::kReply)[0];
    const auto& answered = std::get<RepMessage>(rep.message.body);
    EXPECT_EQ(reply.remote.qpn, answered.local_qpn);
    EXPECT_EQ(reply.remote.first_psn, answered.starting_psn);
    EXPECT_EQ(reply.private_data, Bytes(196, 0));
    n.agent.confirm(id, Time(3), n.out);
    n.agent.disconnect(id, Time(4), n.out);
    sent = n.sent();
    ASSERT_EQ(sent.size(), 2u);
    RtuMessage our_rtu = std::get<RtuMessage>(sent[0].body);
    our_rtu.local_comm_id = theirs.local_comm_id;
    EXPECT_EQ(our_rtu, std::get<RtuMessage>(rtu.message.body));
    EXPECT_EQ(sent[0].header.transaction_id, transaction);
    DreqMessage our_dreq = std::get<DreqMessage>(sent[1].body);
    our_dreq.local_comm_id = theirs.local_comm_id;
    EXPECT_EQ(our_dreq, std::get<DreqMessage>(dreq.message.body));
    EXPECT_EQ(transaction & 0xFFFFFFFF, id.value);
    EXPECT_NE(transaction >> 32, 0u);
    EXPECT_EQ(sent[1].header.transaction_id, transaction);
    m = drep.message;
    std::get<DrepMessage>(m.body).remote_comm_id = id.value;
    n.receive(m, drep.path(), Time(5));
    EXPECT_EQ(n.count(Kind::kClosed), 1u);
    EXPECT_EQ(n.agent.connections(), 0u);
  }
}

TEST(Cm, UnknownServiceIsRejectedAsLinuxDoes) {
  const Captured req("rping-cm-reject.pcap", 1), rej("rping-cm-reject.pcap", 2);
  Node n("10.0.0.9", "10.0.0.8", {});
  n.agent.listen(kService);
  n.receive(req.bytes, Time(1));
  auto sent = n.sent();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(sent[0].header, rej.message.header);
  EXPECT_EQ(sent[0].body, rej.message.body);
  EXPECT_TRUE(n.log.empty());
  EXPECT_EQ(n.agent.connections(), 0u);
}

// ---- Between two of our own.

TEST(Cm, ConnectsCarriesPrivateDataAndDisconnects) {
  Net net;
  Bytes hello(56), welcome(196);
  for (size_t i = 0; i < hello.size(); i++) hello[i] = static_cast<uint8_t>(i + 1);
  for (size_t i = 0; i < welcome.size(); i++) welcome[i] = static_cast<uint8_t>(255 - i);
  net.b.react = [&](const CmEvent& e) {
    if (e.kind == Kind::kRequest) net.b.agent.accept(e.id, kQpB, welcome, net.now, net.b.out);
  };
  const CmId id = net.connect(kQpA, hello);
  net.run_for(seconds(1));
  ASSERT_EQ(net.b.log.size(), 2u);
  EXPECT_EQ(net.b.log[0].kind, Kind::kRequest);
  EXPECT_EQ(net.b.log[0].private_data, hello);
  EXPECT_EQ(net.b.log[0].remote.qpn, kQpA.qpn);
  EXPECT_EQ(net.b.log[0].remote.first_psn, kQpA.first_psn);
  EXPECT_EQ(net.b.log[0].path.src_port, net.a.path.src_port);
  EXPECT_EQ(net.b.log[1].kind, Kind::kEstablished);
  ASSERT_EQ(net.a.log.size(), 1u);
  EXPECT_EQ(net.a.log[0].private_data, welcome);
  EXPECT_EQ(net.a.log[0].remote.qpn, kQpB.qpn);
  EXPECT_EQ(net.a.agent.counters().mads_sent, 2u);
  EXPECT_EQ(net.b.agent.counters().mads_sent, 1u);
  net.a.agent.disconnect(id, net.now, net.a.out);
  net.run_for(seconds(1));
  EXPECT_EQ(net.a.count(Kind::kClosed), 1u);
  EXPECT_EQ(net.b.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(net.a.agent.connections() + net.b.agent.connections(), 0u);
}

TEST(Cm, PsnOfQp1Increases) {
  Net net;
  std::vector<uint32_t> psns;
  for (int i = 0; i < 5; i++) net.a.agent.connect(net.a.path, kService, kQpA, 1, {}, net.now, net.a.out);
  for (Bytes& f : drain(net.a.out)) {
    Packet p;
    ASSERT_EQ(parse(f, p), ParseVerdict::kOk);
    psns.push_back(p.psn().value());
  }
  for (size_t i = 1; i < psns.size(); i++) EXPECT_EQ(Psn(psns[i]).distance(Psn(psns[i - 1])), 1);
}

TEST(Cm, AThousandConnectionsLeaveNothing) {
  Net net;
  std::set<uint32_t> ids;
  for (uint32_t i = 0; i < 1000; i++) {
    CmQueuePair qp = kQpA;
    qp.qpn.value = 0x100 + i % 7;  // the same numbers again and again
    const CmId id = net.connect(qp);
    net.run_for(milliseconds(1));
    ids.insert(id.value);
    ASSERT_EQ(net.b.count(Kind::kEstablished), i + 1);
    if (i % 2 == 0)
      net.a.agent.disconnect(id, net.now, net.a.out);
    else
      net.b.agent.disconnect(net.b.take(Kind::kEstablished).back().id, net.now, net.b.out);
    net.run_for(milliseconds(1));
    ASSERT_EQ(net.a.agent.connections() + net.b.agent.connections(), 0u) << i;
  }
  EXPECT_EQ(ids.size(), 1000u) << "an ID was used again while it should rest";
  expect_one_end_each(net.a);
  expect_one_end_each(net.b);
  EXPECT_NE(net.a.agent.next_deadline(), kNever);
  net.run_for(seconds(31));
  EXPECT_EQ(net.a.agent.next_deadline(), kNever);
  EXPECT_EQ(net.b.agent.next_deadline(), kNever);
  EXPECT_EQ(net.a.agent.records() + net.b.agent.records(), 0u);
  EXPECT_EQ(net.a.pool.in_use() + net.b.pool.in_use(), 0u);
  EXPECT_EQ(net.a.agent.counters().unknown_id + net.b.agent.counters().unknown_id, 0u);
}

// Safety: at most one REQ becomes an event, nothing follows an end. Liveness: within the bound of all repeats
// both sides know how it went, and both know the same unless every RTU and every REJ behind it was lost.
TEST(Cm, FiveHundredBadWiresEndConnectedOrWithABoundedError) {
  size_t connected = 0;
  for (uint64_t seed = 1; seed <= 500; seed++) {
    Net net(seed, {.loss = static_cast<double>(seed % 7) * 0.1,
                   .copies = static_cast<double>(seed % 5) * 0.1,
                   .delay_us_max = seed % 3 == 0 ? 1'500'000 : 300'000});
    const bool refuse = seed % 11 == 0, ask_for_time = seed % 13 == 0;
    std::map<uint32_t, Time> later;
    net.b.react = [&](const CmEvent& e) {
      if (e.kind != Kind::kRequest) return;
      if (ask_for_time) net.b.agent.mra(e.id, seconds(1), net.now, net.b.out);
      if (refuse)
        net.b.agent.reject(e.id, RejectReason::kConsumer, Bytes{1, 2, 3}, net.now, net.b.out);
      else
        net.b.agent.accept(e.id, kQpB, {}, net.now, net.b.out);
    };
    const CmId id = net.connect();
    net.run_for(seconds(60));
    ASSERT_LE(net.b.count(Kind::kRequest), 1u) << seed;
    const bool a_up = net.a.count(Kind::kReply) == 1 && net.a.agent.connections() == 1;
    const bool b_up = net.b.agent.connections() == 1;
    if (!a_up) {
      ASSERT_EQ(std::count_if(net.a.log.begin(), net.a.log.end(), [](auto& e) { return terminal(e.kind); }),
                1)
          << seed;
    }
    if (a_up && b_up) {
      connected++;
      ASSERT_FALSE(refuse);
      ASSERT_EQ(net.b.count(Kind::kEstablished), 1u) << seed;
    }
    if (refuse && net.a.count(Kind::kRejected) == 1) {
      const CmEvent e = net.a.take(Kind::kRejected)[0];
      EXPECT_EQ(e.reason, RejectReason::kConsumer);
      EXPECT_EQ(Bytes(e.private_data.begin(), e.private_data.begin() + 4), (Bytes{1, 2, 3, 0}));
    }
    // Either side, or both at once, hangs up.
    if (seed % 2 == 0 || !b_up) net.a.agent.disconnect(id, net.now, net.a.out);
    if (seed % 3 == 0 || !a_up)
      for (const CmEvent& e : net.b.take(Kind::kRequest)) net.b.agent.disconnect(e.id, net.now, net.b.out);
    net.a.settle();
    net.b.settle();
    net.run_for(seconds(10));
    for (const CmEvent& e : net.b.take(Kind::kRequest)) net.b.agent.disconnect(e.id, net.now, net.b.out);
    net.a.agent.disconnect(id, net.now, net.a.out);
    net.run_for(seconds(70));
    ASSERT_EQ(net.a.agent.connections(), 0u) << seed;
    ASSERT_EQ(net.b.agent.connections(), 0u) << seed;
    ASSERT_EQ(net.a.agent.next_deadline(), kNever) << seed;
    ASSERT_EQ(net.b.agent.next_deadline(), kNever) << seed;
    ASSERT_EQ(net.a.agent.records() + net.b.agent.records(), 0u) << seed;
    ASSERT_EQ(net.a.pool.in_use() + net.b.pool.in_use(), 0u);
    expect_one_end_each(net.a);
    expect_one_end_each(net.b);
  }
  // Of the 455 that are not refused, up to 60 % loss: 16 tries each.
  EXPECT_GE(connected, 440u);
}

TEST(Cm, PeerThatNeverAnswersIsUnreachableInBoundedTime) {
  Net net(1, {.loss = 1.0});
  net.connect();
  const Time start = net.now;
  net.run(start + milliseconds(400) * 16 - Time(1));
  EXPECT_TRUE(net.a.log.empty());
  EXPECT_EQ(net.a.agent.counters().retries, 15u);
  net.run(start + milliseconds(400) * 16);
  ASSERT_EQ(net.a.log.size(), 1u);
  EXPECT_EQ(net.a.log[0].kind, Kind::kUnreachable);
  EXPECT_EQ(net.a.agent.connections(), 0u);
}

TEST(Cm, LostRejIsIssuedAgain) {
  Net net;
  int rejs = 0;
  net.drop = [&](const CmMessage& m) { return is<RejMessage>(m) && rejs++ < 2; };
  const Bytes sentence{'q', 'u', 'o', 't', 'a'};
  net.b.react = [&](const CmEvent& e) {
    if (e.kind == Kind::kRequest)
      net.b.agent.reject(e.id, RejectReason::kConsumer, sentence, net.now, net.b.out);
  };
  net.connect();
  net.run_for(seconds(5));
  EXPECT_EQ(net.b.count(Kind::kRequest), 1u);
  EXPECT_EQ(net.b.agent.counters().rej_repeated, 2u);
  ASSERT_EQ(net.a.log.size(), 1u);
  EXPECT_EQ(net.a.log[0].kind, Kind::kRejected);
  EXPECT_EQ(net.a.log[0].reason, RejectReason::kConsumer);
  EXPECT_EQ(net.a.log[0].private_data.size(), 148u);
  EXPECT_TRUE(std::equal(sentence.begin(), sentence.end(), net.a.log[0].private_data.begin()));
  EXPECT_EQ(net.a.agent.connections() + net.b.agent.connections(), 0u);
}

TEST(Cm, LostRepIsRepeatedOnItsTimerAndOnTheReq) {
  Net net;
  int reps = 0;
  net.drop = [&](const CmMessage& m) { return is<RepMessage>(m) && reps++ < 5; };
  net.connect();
  net.run_for(seconds(5));
  EXPECT_EQ(net.b.count(Kind::kEstablished), 1u);
  EXPECT_EQ(net.b.count(Kind::kRequest), 1u);
  EXPECT_GE(net.b.agent.counters().req_repeated, 1u);
  EXPECT_GE(net.b.agent.counters().retries, 1u);
}

TEST(Cm, LostRtuIsSentAgainForEachRep) {
  Net net;
  int rtus = 0;
  net.drop = [&](const CmMessage& m) { return is<RtuMessage>(m) && rtus++ < 3; };
  net.connect();
  net.run_for(seconds(5));
  EXPECT_EQ(net.b.count(Kind::kEstablished), 1u);
  EXPECT_EQ(net.a.count(Kind::kReply), 1u);
  EXPECT_EQ(net.a.agent.counters().rep_repeated, 3u);
}

TEST(Cm, FirstPacketOnTheQueuePairCountsAsRtu) {
  Net net;
  net.drop = [](const CmMessage& m) { return is<RtuMessage>(m); };
  net.connect();
  net.run_for(seconds(1));
  ASSERT_EQ(net.b.count(Kind::kEstablished), 0u);
  const CmId id = net.b.take(Kind::kRequest)[0].id;
  net.b.agent.established(id);
  net.b.agent.established(id);
  net.b.settle();
  EXPECT_EQ(net.b.count(Kind::kEstablished), 1u);
  const auto sent = net.b.agent.counters().mads_sent;
  net.drop = nullptr;
  net.run_for(seconds(20));
  EXPECT_EQ(net.b.agent.counters().mads_sent, sent) << "the REP is repeated behind the RTU";
  EXPECT_EQ(net.b.agent.connections(), 1u);
  EXPECT_EQ(net.a.agent.connections(), 1u);
}

TEST(Cm, RepWithoutRtuGivesUpAndTellsThePeer) {
  Net net;
  net.drop = [](const CmMessage& m) { return is<RtuMessage>(m); };
  net.connect();
  net.run_for(seconds(10));
  EXPECT_EQ(net.b.count(Kind::kUnreachable), 1u);
  EXPECT_EQ(net.a.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(net.a.agent.connections() + net.b.agent.connections(), 0u);
}

TEST(Cm, RestartedPeerReplacesItsOldConnection) {
  for (const bool confirmed : {true, false}) {
    Net net;
    if (!confirmed) net.drop = [](const CmMessage& m) { return is<RtuMessage>(m); };
    net.connect();
    net.run_for(milliseconds(100));
    net.drop = nullptr;
    const CmId old = net.b.take(Kind::kRequest)[0].id;
    // The host's process dies; the next one has its address, its GUID and its queue pair number.
    CmAgent reborn({.ca_guid = 0xA, .seed = 99}, net.a.pool);
    reborn.connect(net.a.path, kService, kQpA, 1, {}, net.now, net.a.out);
    net.a.react = nullptr;
    for (const Bytes& f : drain(net.a.out)) net.b.receive(f, net.now);
    ASSERT_EQ(net.b.count(Kind::kDisconnected), 1u);
    EXPECT_EQ(net.b.take(Kind::kDisconnected)[0].id, old);
    ASSERT_EQ(net.b.count(Kind::kRequest), 2u);
    EXPECT_NE(net.b.take(Kind::kRequest)[1].id, old);
    EXPECT_EQ(net.b.agent.counters().stale_replaced, 1u);
    EXPECT_EQ(net.b.agent.connections(), 1u);
    expect_one_end_each(net.b);
  }
}

TEST(Cm, RestartedPeerThatCountsItsIdsAnewIsANewPeer) {
  for (const CmQueuePair& other : {CmQueuePair{.qpn = Qpn{0x101}, .first_psn = kQpA.first_psn},
                                   CmQueuePair{.qpn = kQpA.qpn, .first_psn = Psn(5)}}) {
    Net net;
    net.connect();
    net.run_for(milliseconds(100));
    // Same seed, so the same communication ID; another queue pair, or the same number with another PSN.
    CmAgent reborn(Net::named({}, 0xA, 1), net.a.pool);
    const CmId again = reborn.connect(net.a.path, kService, other, 1, {}, net.now, net.a.out);
    EXPECT_EQ(again, net.a.take(Kind::kReply)[0].id);
    const auto req = drain(net.a.out);
    net.b.receive(req[0], net.now);
    EXPECT_EQ(net.b.count(Kind::kDisconnected), 1u);
    EXPECT_EQ(net.b.count(Kind::kRequest), 2u);
    EXPECT_EQ(net.b.agent.counters().req_repeated, 0u);
    // That the old one is forgotten does not make the agent forget the new one.
    net.drop = [](const CmMessage&) { return true; };
    net.b.agent.established(net.b.take(Kind::kRequest)[1].id);
    net.run_for(seconds(31));
    net.b.receive(req[0], net.now);
    EXPECT_EQ(net.b.count(Kind::kRequest), 2u);
    EXPECT_EQ(net.b.agent.counters().req_repeated, 1u);
  }
}

TEST(Cm, RestartedPeerClosesAConnectionThatIsBeingDisconnected) {
  Net net;
  net.connect();
  net.run_for(milliseconds(100));
  net.b.agent.disconnect(net.b.take(Kind::kRequest)[0].id, net.now, net.b.out);
  net.b.sent();
  net.b.receive(req_from(net.a.path, 77, kQpA.qpn.value), net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kClosed), 1u);
  EXPECT_EQ(net.b.count(Kind::kDisconnected), 0u);
  EXPECT_EQ(net.b.count(Kind::kRequest), 2u);
}

TEST(Cm, RestartedResponderReplacesTheOldConnectionInItsRep) {
  Net net;
  const CmId old = net.connect();
  net.run_for(milliseconds(100));
  const CmId id = net.a.agent.connect(net.a.path, kService, {.qpn = Qpn{0x101}}, 1, {}, net.now, net.a.out);
  net.a.sent();
  net.a.receive(
      {{},
       RepMessage{
           .local_comm_id = 77, .remote_comm_id = id.value, .local_qpn = kQpB.qpn, .local_ca_guid = 0xB}},
      net.b.path, net.now);
  ASSERT_EQ(net.a.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(net.a.take(Kind::kDisconnected)[0].id, old);
  EXPECT_EQ(net.a.count(Kind::kReply), 2u);
}

TEST(Cm, OldReqOfAFinishedConnectionIsStale) {
  Net net;
  net.a.agent.connect(net.a.path, kService, kQpA, 1, {}, net.now, net.a.out);
  const auto frames = drain(net.a.out);
  for (const Bytes& f : frames) net.b.receive(f, net.now);
  net.run_for(milliseconds(100));
  ASSERT_EQ(net.b.count(Kind::kEstablished), 1u);
  net.b.agent.disconnect(net.b.take(Kind::kRequest)[0].id, net.now, net.b.out);
  net.run_for(milliseconds(100));
  net.b.receive(frames[0], net.now);
  const auto sent = net.b.sent();
  ASSERT_EQ(sent.size(), 1u);
  EXPECT_EQ(std::get<RejMessage>(sent[0].body).reason, 10);
  EXPECT_EQ(net.b.count(Kind::kRequest), 1u);
  // Once the ID has rested, the same bytes are a request like any.
  net.run_for(seconds(31));
  net.b.receive(frames[0], net.now);
  EXPECT_EQ(net.b.count(Kind::kRequest), 2u);
}

TEST(Cm, MraHoldsTheRepeatsBackUpToTheCap) {
  Net net;
  net.b.react = [&](const CmEvent& e) {
    if (e.kind == Kind::kRequest) net.b.agent.mra(e.id, seconds(2), net.now, net.b.out);
  };
  net.connect();
  net.run_for(seconds(2));
  EXPECT_EQ(net.a.agent.counters().mra_received, 1u);
  EXPECT_EQ(net.a.agent.counters().retries, 0u) << "2 s were asked for";
  net.b.agent.accept(net.b.take(Kind::kRequest)[0].id, kQpB, {}, net.now, net.b.out);
  net.run_for(seconds(1));
  EXPECT_EQ(net.b.count(Kind::kEstablished), 1u);
}

TEST(Cm, MraIsCapped) {
  Net net;
  Node& a = net.a;
  const CmId id = a.agent.connect(a.path, kService, kQpA, 1, {}, net.now, a.out);
  a.sent();
  // 2.4 hours, and again and again: one extension for each transmission, of 10 s at most.
  const CmMessage mra{{}, MraMessage{.local_comm_id = 5, .remote_comm_id = id.value, .service_timeout = 31}};
  const Time start = net.now;
  Time now = start;
  while (a.agent.connections() == 1 && now < start + std::chrono::hours(1)) {
    a.receive(mra, net.b.path, now);
    now += milliseconds(100);
    a.agent.poll(now, a.out);
    a.settle();
    a.sent();
  }
  EXPECT_EQ(a.count(Kind::kUnreachable), 1u);
  EXPECT_GE(now - start, seconds(10) * 16);
  EXPECT_LE(now - start, seconds(10) * 16 + seconds(2));
}

TEST(Cm, MraIsRepeatedForARepeatedReq) {
  Net net;
  int mras = 0;
  net.drop = [&](const CmMessage& m) { return is<MraMessage>(m) && mras++ == 0; };
  net.b.react = [&](const CmEvent& e) {
    if (e.kind == Kind::kRequest) net.b.agent.mra(e.id, seconds(4), net.now, net.b.out);
  };
  net.connect();
  net.run_for(seconds(4));
  EXPECT_EQ(net.a.agent.counters().retries, 1u);
  EXPECT_EQ(net.b.agent.counters().mra_sent, 2u);
}

TEST(Cm, MraOfTheActiveSideHoldsTheRepBack) {
  Net net;
  net.a.react = [&](const CmEvent& e) {
    if (e.kind == Kind::kReply) net.a.agent.mra(e.id, seconds(3), net.now, net.a.out);
  };
  const CmId id = net.connect();
  net.run_for(seconds(3));
  EXPECT_EQ(net.b.agent.counters().retries, 0u);
  net.a.agent.confirm(id, net.now, net.a.out);
  net.run_for(seconds(1));
  EXPECT_EQ(net.b.count(Kind::kEstablished), 1u);
}

// ---- Disconnecting.

struct Stop {
  const char* name;
  std::function<bool(const CmMessage&)> drop;
  bool a_confirms = true, b_accepts = true;
};

TEST(Cm, DisconnectFromEveryStateEndsBothSides) {
  const Stop stops[] = {
      {"REQ sent", [](const CmMessage& m) { return is<ReqMessage>(m); }},
      {"REP lost", [](const CmMessage& m) { return is<RepMessage>(m); }},
      {"REQ received", nullptr, true, false},
      {"REP received", nullptr, false, true},
      {"RTU lost", [](const CmMessage& m) { return is<RtuMessage>(m); }},
      {"established", nullptr},
      {"DREQ sent", [](const CmMessage& m) { return is<DreqMessage>(m); }},
  };
  for (const Stop& stop : stops) {
    for (const int who : {0, 1, 2}) {
      SCOPED_TRACE(std::string(stop.name) + (who == 0 ? ", active" : who == 1 ? ", passive" : ", both"));
      Net net;
      net.drop = stop.drop;
      if (!stop.a_confirms) net.a.react = nullptr;
      if (!stop.b_accepts) net.b.react = nullptr;
      const CmId id = net.connect();
      net.run_for(milliseconds(100));
      const auto requests = net.b.take(Kind::kRequest);
      if (who != 1) net.a.agent.disconnect(id, net.now, net.a.out);
      if (who != 0 && !requests.empty()) net.b.agent.disconnect(requests[0].id, net.now, net.b.out);
      // Twice is once.
      net.a.settle();
      net.b.settle();
      if (who != 1) net.a.agent.disconnect(id, net.now, net.a.out);
      net.flush();
      net.drop = nullptr;
      net.run_for(seconds(9));
      if (who == 1 && requests.empty()) continue;  // nothing to disconnect; the connection just comes up
      EXPECT_EQ(net.a.agent.connections(), 0u);
      EXPECT_EQ(net.b.agent.connections(), 0u);
      if (who != 1) {
        EXPECT_EQ(net.a.count(Kind::kClosed), 1u);
      }
      if (who != 0 && !requests.empty()) {
        EXPECT_EQ(net.b.count(Kind::kClosed), 1u);
      }
      // Then the rest: the ID is a stranger's, no call does anything.
      const auto before = net.a.agent.counters().mads_sent;
      net.a.agent.disconnect(id, net.now, net.a.out);
      net.a.agent.confirm(id, net.now, net.a.out);
      net.a.agent.mra(id, seconds(1), net.now, net.a.out);
      net.a.settle();
      EXPECT_EQ(net.a.agent.counters().mads_sent, before);
      expect_one_end_each(net.a);
      expect_one_end_each(net.b);
      net.run_for(seconds(31));
      EXPECT_EQ(net.a.agent.next_deadline(), kNever);
      EXPECT_EQ(net.b.agent.next_deadline(), kNever);
    }
  }
}

TEST(Cm, LostRejAfterARepIsRepeatedForTheRtu) {
  Net net;
  net.drop = [](const CmMessage& m) { return is<RtuMessage>(m) || is<RejMessage>(m); };
  net.connect();
  net.run_for(milliseconds(100));
  net.b.agent.disconnect(net.b.take(Kind::kRequest)[0].id, net.now, net.b.out);
  net.flush();
  net.drop = nullptr;
  // The active side hears a copy of the REP and says RTU again.
  const CmEvent up = net.a.take(Kind::kReply)[0];
  net.a.receive({{},
                 RepMessage{.local_comm_id = net.b.take(Kind::kRequest)[0].id.value,
                            .remote_comm_id = up.id.value,
                            .local_qpn = kQpB.qpn,
                            .local_ca_guid = 0xB}},
                net.b.path, net.now);
  net.run_for(seconds(1));
  EXPECT_EQ(net.a.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(net.b.agent.counters().rej_repeated, 1u);
}

TEST(Cm, RepeatedDreqGetsDrepAgain) {
  Net net;
  int dreps = 0;
  net.drop = [&](const CmMessage& m) { return is<DrepMessage>(m) && dreps++ < 2; };
  const CmId id = net.connect();
  net.run_for(milliseconds(100));
  net.a.agent.disconnect(id, net.now, net.a.out);
  net.run_for(seconds(3));
  EXPECT_EQ(net.a.count(Kind::kClosed), 1u);
  EXPECT_EQ(net.b.count(Kind::kDisconnected), 1u);
  EXPECT_EQ(net.b.agent.counters().dreq_received, 3u);
  EXPECT_EQ(net.b.agent.counters().dreq_unknown, 0u);
}

TEST(Cm, DisconnectFromADeadPeerClosesInBoundedTime) {
  Net net;
  const CmId id = net.connect();
  net.run_for(milliseconds(100));
  net.drop = [](const CmMessage&) { return true; };
  net.a.agent.disconnect(id, net.now, net.a.out);
  net.run_for(milliseconds(400) * 6);
  EXPECT_EQ(net.a.count(Kind::kClosed), 1u);
  EXPECT_EQ(net.a.agent.counters().retries, 5u);
}

TEST(Cm, DreqOfAWrongQueuePairOrAddressDoesNotDisconnect) {
  Net net;
  const CmId id = net.connect();
  net.run_for(milliseconds(100));
  const CmId there = net.b.take(Kind::kRequest)[0].id;
  DreqMessage dreq{.local_comm_id = id.value, .remote_comm_id = there.value, .remote_qpn = Qpn{0x999}};
  net.b.receive({{}, dreq}, net.a.path, net.now);
  dreq.remote_qpn = kQpB.qpn;
  net.b.receive({{}, dreq}, path_between("10.0.0.3", "10.0.0.2"), net.now);
  dreq.local_comm_id++;
  net.b.receive({{}, dreq}, net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kDisconnected), 0u);
  dreq.local_comm_id--;
  net.b.receive({{}, dreq}, net.a.path, net.now);
  EXPECT_EQ(net.b.count(Kind::kDisconnected), 1u);
}

TEST(Cm, IdZeroNamesNoConnection) {
  Net net;
  const CmId id = net.a.agent.connect(net.a.path, kService, kQpA, 1, {}, net.now, net.a.out);
  net.a.receive({{}, DreqMessage{.remote_comm_id = id.value, .remote_qpn = kQpA.qpn}}, net.b.path, net.now);
  net.a.receive({{}, RtuMessage{.remote_comm_id = id.value}}, net.b.path, net.now);
  EXPECT_TRUE(net.a.log.empty());
  EXPECT_EQ(net.a.agent.connections(), 1u);
}

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
  for (uint32_t i = 1; i <= 100; i++)
    net.b.receive(req_from(net.a.path, i, 100 + i), net.a.path, net.now);
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
