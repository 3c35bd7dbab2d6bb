// What the connection manager's tests share: agents with what their callers would do, a wire between two of
// them that loses, repeats and reorders, and messages as if from a peer.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "roce/cm.h"
#include "roce/cm_message.h"
#include "roce/error.h"
#include "tests/vectors/pcap_reader.h"

namespace millrace::roce {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Kind = CmEvent::Kind;
using Bytes = std::vector<uint8_t>;

constexpr uint64_t kService = tcp_service_id(18600);
constexpr CmQueuePair kQpA{.qpn = Qpn{0x100}, .first_psn = Psn(0xFFFFF0)};
constexpr CmQueuePair kQpB{.qpn = Qpn{0x200}, .first_psn = Psn(0x000123), .rnr_retry = 7};

inline IpAddress ip(const char* text) { return *IpAddress::parse(text); }

inline Path path_between(const char* from, const char* to) {
  Path p;
  p.src_mac = {{2, 0, 0, 0, 0, 1}};
  p.dst_mac = {{2, 0, 0, 0, 0, 2}};
  p.src_ip = ip(from);
  p.dst_ip = ip(to);
  p.src_port = 0xC123;
  return p;
}

inline Bytes bytes_of(Frame frame) {
  Bytes b(frame.total_length());
  frame.copy_to(b.data());
  return b;
}

inline std::vector<Bytes> drain(FrameList& out) {
  std::vector<Bytes> all;
  while (!out.empty()) all.push_back(bytes_of(out.pop()));
  return all;
}

inline CmMessage message_of(Bytes& frame) {
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

inline CmMessage req_from(const Path& from, uint32_t comm_id, uint32_t qpn) {
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
inline bool is(const CmMessage& m) {
  return std::holds_alternative<M>(m.body);
}

inline bool terminal(Kind k) {
  return k == Kind::kRejected || k == Kind::kUnreachable || k == Kind::kDisconnected || k == Kind::kClosed;
}

// No event of a connection follows its end, and there is one end.
inline void expect_one_end_each(const Node& n) {
  std::set<uint32_t> ended;
  for (const CmEvent& e : n.log) {
    EXPECT_FALSE(ended.contains(e.id.value)) << "an event behind the end of a connection";
    if (terminal(e.kind)) ended.insert(e.id.value);
  }
}

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

}  // namespace millrace::roce
