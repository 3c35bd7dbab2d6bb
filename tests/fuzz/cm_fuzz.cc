// The connection manager, both sides: two agents, a wire that the input delivers from, drops, repeats and
// mutates, a stranger who forges messages, callers who decide late or never, and time. A model of every
// connection's life stands beside each agent. Oracles: one end per connection and nothing behind it, calls
// out of place do nothing, one message at most per message in, and nothing left when time has passed.
#include <map>
#include <memory>

#include "roce/cm.h"
#include "roce/cm_message.h"
#include "roce/packet.h"
#include "tests/fuzz/wire.h"

namespace millrace::fuzz {
namespace {

using namespace roce;
using std::chrono::milliseconds;
using Kind = CmEvent::Kind;

constexpr uint64_t kService = tcp_service_id(18600);
constexpr size_t kWireMax = 48, kHistoryMax = 16;
constexpr size_t kTransportAt = 14 + 20 + 8;  // where the BTH of an untagged IPv4 packet is

IpAddress address(size_t n) {
  const uint8_t four[4] = {10, 0, 0, static_cast<uint8_t>(n + 1)};
  return IpAddress::from_v4(four);
}

Path path(size_t from, size_t to) {
  Path p;
  p.src_mac = {{2, 0, 0, 0, 0, static_cast<uint8_t>(from)}};
  p.dst_mac = {{2, 0, 0, 0, 0, static_cast<uint8_t>(to)}};
  p.src_ip = address(from), p.dst_ip = address(to);
  return p;
}

// What the caller knows of a connection, from the events that it has taken and the calls that it has made.
enum class Phase : uint8_t { kConnecting, kReplied, kRequested, kAccepted, kEstablished, kDisconnecting };

bool is_end(Kind k) {
  return k == Kind::kRejected || k == Kind::kUnreachable || k == Kind::kDisconnected || k == Kind::kClosed;
}

struct Node {
  Node(const CmConfig& config, uint32_t frames) : pool(640, frames, true), agent(config, pool) {}

  void take_events() {
    CmEvent e;
    while (agent.next_event(e)) {
      events++;
      const auto c = live.find(e.id.value);
      if (e.kind == Kind::kRequest) {
        FUZZ_CHECK(c == live.end() && e.id.value != 0 && e.service_id == kService);
        live[e.id.value] = Phase::kRequested;
        continue;
      }
      FUZZ_CHECK(c != live.end(), "an event of a connection that has ended");
      if (e.kind == Kind::kReply) {
        FUZZ_CHECK(c->second == Phase::kConnecting);
        c->second = Phase::kReplied;
      } else if (e.kind == Kind::kEstablished) {
        FUZZ_CHECK(c->second == Phase::kAccepted);
        c->second = Phase::kEstablished;
      } else {
        FUZZ_CHECK(is_end(e.kind));
        FUZZ_CHECK(e.kind != Kind::kClosed || c->second == Phase::kDisconnecting);
        live.erase(c);
      }
    }
    FUZZ_CHECK(agent.connections() == live.size());
  }

  HeapFramePool pool;
  FrameList out;
  CmAgent agent;
  std::map<uint32_t, Phase> live;
  size_t events = 0;
};

// What a message says is not lost on the way through our own codec.
void check_codec(std::span<const uint8_t> mad) {
  const auto m = decode_cm(mad);
  if (!m) return;
  const auto again = decode_cm(encode_cm(*m));
  FUZZ_CHECK(again && again->header == m->header && again->body == m->body);
}

class World {
 public:
  explicit World(Input& input) : in(input) {
    for (size_t n = 0; n < 2; n++) {
      CmConfig c;
      c.ca_guid = 0xA0 + n, c.seed = 7 + n;
      const uint8_t shape = in.byte();
      c.retries = shape & 3;
      c.disconnect_retries = shape >> 2 & 3;
      c.connections_max = 1 + (shape >> 4 & 7);
      c.half_open_max = shape & 0x80 ? 2 : 8;
      c.half_open_per_source = shape & 0x80 ? 1 : 4;
      nodes[n] = std::make_unique<Node>(c, in.flag() ? 2 : 64);
    }
    nodes[1]->agent.listen(kService);
    if (in.flag()) nodes[0]->agent.listen(kService);
  }

  void step() {
    const uint8_t op = in.byte();
    const size_t n = op >> 7;
    switch (op & 15) {
      case 0:
        return connect(n);
      case 1:
        return deliver_next();
      case 2:
        if (!wire.empty()) deliver(Flight(wire[in.below(wire.size())]));
        return;
      case 3:
        if (!wire.empty()) wire.erase(wire.begin() + static_cast<ptrdiff_t>(in.below(wire.size())));
        return;
      case 4:
        return deliver_mutated(wire);
      case 5:
        return pass_time();
      case 6:
      case 7:
      case 8:
      case 9:
      case 10:
      case 11:
        return call(n, op & 15);
      case 12:
        return forge(n);
      case 13:
        if (!history.empty()) deliver(Flight(history[in.below(history.size())]));
        return;
      case 14:
        return deliver_mutated(history);
      case 15:
        return deliver_all();
    }
  }

  // Everybody lets go; nothing arrives any more.
  void end() {
    for (auto& node : nodes) {
      std::vector<uint32_t> ids;
      for (const auto& [id, phase] : node->live) ids.push_back(id);
      for (const uint32_t id : ids)
        node->agent.disconnect(CmId{id}, now, node->out), note_disconnect(*node, id);
      settle(*node, node->out.size());
    }
    for (auto& node : nodes) {
      for (int polls = 0;; polls++) {
        FUZZ_CHECK(polls < 1000, "timers without end");
        const Time next = node->agent.next_deadline();
        if (next == kNever) break;
        now = std::max(now, next);
        node->agent.poll(now, node->out);
        FUZZ_CHECK(node->agent.next_deadline() > now);
        settle(*node, node->out.size());
      }
      FUZZ_CHECK(node->live.empty(), "a connection never ends");
      FUZZ_CHECK(node->agent.records() == 0);
      FUZZ_CHECK(node->pool.in_use() == 0);
    }
  }

 private:
  // Puts what the node has sent onto the wire.
  void settle(Node& node, size_t sent_max) {
    FUZZ_CHECK(node.out.size() <= sent_max);
    while (Frame f = node.out.pop()) {
      Bytes b(f.total_length());
      f.copy_to(b.data());
      Packet p;
      FUZZ_CHECK(parse(b, p) == ParseVerdict::kOk && icrc_ok(p) && p.dest_qp() == kGsiQpn);
      FUZZ_CHECK(p.payload.size() == kMadBytes && p.deth->qkey.value() == kGsiQkey);
      for (size_t to = 0; to < 2; to++)
        if (p.dst_ip == address(to) && wire.size() < kWireMax) wire.push_back({to, b});
    }
    node.take_events();
  }

  void connect(size_t n) {
    Node& node = *nodes[n];
    const uint8_t what = in.byte();
    CmQueuePair qp;
    qp.qpn = Qpn{16u + (what & 3)};  // few, so that they come again
    qp.first_psn = Psn(what >> 2 & 1);
    const uint64_t service = what & 0x80 ? tcp_service_id(1) : kService;
    const Bytes data(what & 0x40 ? 56 : 0, 0x55);
    const CmId id = node.agent.connect(path(n, 1 - n), service, qp, 40000, data, now, node.out);
    if (id.value != 0) {
      FUZZ_CHECK(!node.live.contains(id.value));
      node.live[id.value] = Phase::kConnecting;
    }
    settle(node, 1);
  }

  // `strange`: no agent has sent it so.
  void deliver(Flight flight, bool strange = false) {
    Node& node = *nodes[flight.to];
    // Its own allocation, so that the sanitizer sees a step behind its end.
    const auto copy = std::make_unique<uint8_t[]>(flight.bytes.size());
    std::copy(flight.bytes.begin(), flight.bytes.end(), copy.get());
    Packet p;
    if (parse({copy.get(), flight.bytes.size()}, p) != ParseVerdict::kOk) return;
    if (strange) check_codec(p.payload);
    node.agent.receive(p, now, node.out);
    settle(node, 1);
    if (history.size() == kHistoryMax) history.erase(history.begin());
    history.push_back(std::move(flight));
  }

  void deliver_next() {
    if (wire.empty()) return;
    Flight f = std::move(wire.front());
    wire.erase(wire.begin());
    deliver(std::move(f));
  }

  void deliver_all() {
    for (int n = 0; n < 12 && !wire.empty(); n++) {
      deliver_next();
      for (size_t k = 0; k < 2; k++) {
        call_first(k, Phase::kRequested, 6);
        call_first(k, Phase::kReplied, 9);
      }
    }
  }

  void deliver_mutated(std::vector<Flight>& from) {
    if (from.empty()) return;
    Flight f = from[in.below(from.size())];
    for (size_t n = 1 + in.below(4); n > 0; n--) {
      // Anywhere behind the UDP header.
      const size_t at = kTransportAt + in.u16() % (f.bytes.size() - kTransportAt);
      f.bytes[at] ^= in.byte();
    }
    if (in.byte() & 1) f.to = 1 - f.to;
    deliver(std::move(f), true);
  }

  void pass_time() {
    static constexpr int64_t kSteps[] = {1, 50, 400, 401, 1300, 5000, 29000, 31000};
    now += milliseconds(kSteps[in.byte() % std::size(kSteps)]);
    for (auto& node : nodes) {
      const size_t due = node->agent.connections();
      node->agent.poll(now, node->out);
      settle(*node, due);
    }
  }

  static void note_disconnect(Node& node, uint32_t id) { node.live[id] = Phase::kDisconnecting; }

  void call_first(size_t n, Phase phase, int what) {
    for (const auto& [id, p] : nodes[n]->live)
      if (p == phase) return call(n, id, what, false);
  }
  void call(size_t n, int what) {
    Node& node = *nodes[n];
    const uint8_t which = in.byte();
    if (node.live.empty() || which == 0xFF) return call(n, in.u32(), what, false);
    auto c = node.live.begin();
    std::advance(c, (which & 0x7F) % node.live.size());
    call(n, c->first, what, which & 0x80);
  }

  void call(size_t n, uint32_t id, int what, bool data) {
    Node& node = *nodes[n];
    const auto c = node.live.find(id);
    const bool known = c != node.live.end();
    const auto in_phase = [&](Phase p) { return known && c->second == p; };
    const size_t events = node.events;
    bool acts = false;
    switch (what) {
      case 6: {
        acts = in_phase(Phase::kRequested);
        CmQueuePair qp;
        qp.qpn = Qpn{32u + (id & 3)};
        node.agent.accept(CmId{id}, qp, Bytes(data ? 196 : 24, 0x66), now, node.out);
        if (acts) c->second = Phase::kAccepted;
        break;
      }
      case 7:
        acts = in_phase(Phase::kRequested);
        node.agent.reject(CmId{id}, RejectReason::kConsumer, Bytes(data ? 148 : 0, 0x77), now, node.out);
        if (acts) node.live.erase(c);
        break;
      case 8:
        acts = in_phase(Phase::kRequested) || in_phase(Phase::kReplied);
        node.agent.mra(CmId{id}, milliseconds(data ? 100000 : 1500), now, node.out);
        break;
      case 9:
        acts = in_phase(Phase::kReplied);
        node.agent.confirm(CmId{id}, now, node.out);
        if (acts) c->second = Phase::kEstablished;
        break;
      case 10:
        acts = known && !in_phase(Phase::kDisconnecting);
        if (known) note_disconnect(node, id);
        node.agent.disconnect(CmId{id}, now, node.out);
        break;
      case 11:
        acts = in_phase(Phase::kAccepted);
        node.agent.established(CmId{id});
        break;
    }
    settle(node, acts ? 1 : 0);
    FUZZ_CHECK(acts || node.events == events, "a call out of place did something");
  }

  // A message made up by the peer or by a stranger, with identifiers that exist.
  void forge(size_t to) {
    const Node& node = *nodes[to];
    const uint8_t what = in.byte(), who = in.byte();
    uint32_t ours = who >> 4, theirs = who >> 2 & 3;
    if (!node.live.empty() && (what & 0x80) == 0) {
      auto c = node.live.begin();
      std::advance(c, ours % node.live.size());
      ours = c->first;
    }
    const Node& peer = *nodes[1 - to];
    if (!peer.live.empty() && (what & 0x40) == 0) {
      auto c = peer.live.begin();
      std::advance(c, theirs % peer.live.size());
      theirs = c->first;
    }
    const size_t from = who & 1 ? 2 : 1 - to;
    HeapFramePool pool(640, 1, true);
    const TransportFields f{
        .opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .qkey = kGsiQkey, .src_qp = kGsiQpn};
    const CmMessage m{{.transaction_id = in.byte()}, body(what & 7, ours, theirs, from, to)};
    const Frame frame = build(pool, path(from, to), f, encode_cm(m));
    Bytes b(frame.total_length());
    frame.copy_to(b.data());
    deliver({to, std::move(b)}, true);
  }

  CmBody body(int kind, uint32_t ours, uint32_t theirs, size_t from, size_t to) {
    const uint8_t x = in.byte();
    switch (kind) {
      case 0:
      case 7: {
        ReqMessage m{.local_comm_id = theirs,
                     .service_id = x & 0x80 ? 7 : kService,
                     .local_ca_guid = x & 0x40 ? 0xA0u + (1 - to % 2) : 0xA9,
                     .local_qpn = Qpn{15u + (x & 7)},
                     .starting_psn = Psn(x >> 3 & 1),
                     .path_mtu = static_cast<uint8_t>(x >> 4 & 3 ? 5 : 0)};
        m.primary.local_gid = address(from);
        m.primary.remote_gid = address(to);
        encode_rdma_cm({.src_ip = address(from), .dst_ip = address(to)},
                       std::span(m.private_data).first<36>());
        return m;
      }
      case 1:
        return MraMessage{.local_comm_id = theirs,
                          .remote_comm_id = ours,
                          .answered = static_cast<CmAnswered>(x >> 5 & 3),
                          .service_timeout = static_cast<uint8_t>(x & 31)};
      case 2: {
        RejMessage m{.local_comm_id = theirs,
                     .remote_comm_id = x & 1 ? 0 : ours,
                     .answered = static_cast<CmAnswered>(x >> 1 & 3),
                     .info_length = static_cast<uint8_t>(x & 8 ? 8 : 0),
                     .reason = static_cast<uint16_t>(x >> 4)};
        m.info[7] = static_cast<uint8_t>(0xA0 + (1 - to % 2));
        return m;
      }
      case 3:
        return RepMessage{.local_comm_id = theirs,
                          .remote_comm_id = ours,
                          .local_qpn = Qpn{x & 7u},
                          .local_ca_guid = 0xA0u + (1 - to % 2)};
      case 4:
        return RtuMessage{.local_comm_id = theirs, .remote_comm_id = ours};
      case 5:
        return DreqMessage{
            .local_comm_id = theirs, .remote_comm_id = ours, .remote_qpn = Qpn{16u + (x & 31)}};
      default:
        return DrepMessage{.local_comm_id = theirs, .remote_comm_id = ours};
    }
  }

  Input& in;
  Time now{milliseconds(1)};
  std::unique_ptr<Node> nodes[2];
  std::vector<Flight> wire, history;
};

void run(std::span<const uint8_t> data) {
  if (data.size() > 1024) return;
  Input in(data);
  World world(in);
  while (!in.empty()) world.step();
  world.end();
}

}  // namespace
MILLRACE_FUZZ_TARGET("cm", run)
}  // namespace millrace::fuzz
