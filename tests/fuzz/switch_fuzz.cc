// A whole switch: the pipeline with a small pool, four ports, and on each a host that speaks as a member
// should unless the input has it do otherwise. The input is a list of steps of conversations (joins,
// segments, acknowledgements, NAKs, goodbyes, ARP, neighbour discovery, pings, time), any frame of which may
// be mutated, repaired and repeated. Oracles: the pipeline's own books, SwitchOracle's, a bound on what one
// call sends, and that nothing is left once everybody is silent.
#include <memory>

#include "roce/build.h"
#include "roce/cm.h"
#include "roce/cm_message.h"
#include "switch/pipeline.h"
#include "tests/fuzz/frames.h"
#include "tests/fuzz/switch_oracle.h"

namespace millrace::fuzz {
namespace {

using namespace roce;
using namespace aggregation;
using std::chrono::milliseconds;

constexpr MacAddress kSwitchMac{{2, 0, 0, 0, 0, 1}};
constexpr uint16_t kPorts = 4;
constexpr uint32_t kMtu = 256, kSegment = 448;
constexpr uint16_t kWindow = 2;
constexpr size_t kHistoryMax = 24, kStepsMax = 120;
// Requests of one queue pair, each of at most two packets, and its acknowledgement.
constexpr size_t kBurstOfLink = 2 * (2 * kWindow * 2 + 8) + 2;

MacAddress host_mac(size_t n) { return {{2, 0, 0, 0, 1, static_cast<uint8_t>(n + 1)}}; }
IpAddress address_of(size_t n, bool v6) {
  const uint8_t four[4] = {10, 77, 0, static_cast<uint8_t>(n + 1)};
  uint8_t sixteen[16] = {0xFD, 0x77};
  sixteen[15] = static_cast<uint8_t>(n + 1);
  return v6 ? IpAddress::from_v6(sixteen) : IpAddress::from_v4(four);
}
IpAddress switch_address(bool v6) { return address_of(99, v6); }

// One connection of a host: what a NIC would keep.
struct Member {
  uint16_t rank = 0;
  uint8_t stripe = 0;
  uint32_t comm_id = 0, group = 0;
  Qpn qpn, switch_qpn;
  Psn in_first, in_next, out_next;
  uint64_t transaction = 0, nonce = 0;
  uint64_t segment = 0;
  uint32_t packet = 0;
};

// What segment `n` of every group is, when its members agree.
struct Plan {
  Collective collective = Collective::kAllReduce;
  ReduceOp op = ReduceOp::kSum;
  DataType type = DataType::kI32;
  uint32_t length = 0;
};
Plan plan(uint64_t n) {
  switch (n % 5) {
    case 0:
      return {Collective::kAllReduce, ReduceOp::kSum, DataType::kF32, 100};
    case 1:
      return {Collective::kAllReduce, ReduceOp::kMax, DataType::kF16, kSegment};
    case 2:
      return {Collective::kBarrier, ReduceOp::kNone, DataType::kU8, 0};
    case 3:
      return {Collective::kAllReduce, ReduceOp::kProd, DataType::kI64, 200};
    default:
      return {Collective::kAllReduce, ReduceOp::kMin, DataType::kBf16, 192};
  }
}

class World {
 public:
  explicit World(Input& input) : in(input) {
    const uint8_t shape = in.byte(), more = in.byte();
    v6 = shape & 1;
    world = shape & 2 ? 3 : 2;
    stripes = shape & 4 ? 2 : 1;
    pool = std::make_unique<HeapFramePool>(768, shape & 8 ? 24 : 512, true);
    switching::PipelineConfig c;
    c.ports = kPorts;
    c.l2.entries_max = 64;
    if (more & 1) c.l2.move_guard = Time{};
    congested = more & 2;
    c.engine.addresses = {switch_address(false), switch_address(true)};
    c.engine.mac = kSwitchMac;
    c.engine.mtu = kMtu, c.engine.segment_bytes = kSegment, c.engine.window = kWindow;
    c.engine.world_max = 8, c.engine.groups_max = 4;
    c.engine.memory_limit = shape & 16 ? 40000 : 1 << 20;
    c.engine.join_timeout = milliseconds(1000), c.engine.operation_timeout = milliseconds(2000);
    c.engine.straggler_after = milliseconds(500), c.engine.probe_after = milliseconds(200);
    c.engine.peer_dead = milliseconds(1000);
    if (shape & 32) c.engine.first_psn = 0xFFFFFE;
    if (shape & 64) c.engine.tenants[7] = {"blue", "open sesame", 100000};
    tenant = shape & 64 ? 7 : 0;
    if (shape & 128) {
      // A router between the bridge and its last port.
      for (const bool six : {false, true})
        c.routing.interfaces.push_back(
            {{switch_address(six), static_cast<uint8_t>(six ? 64 : 24)}, switching::kBridge, true});
      c.routing.interfaces.push_back({*switching::Prefix::parse("10.255.0.0/31"), 3, true});
      c.engine.addresses.push_back(*IpAddress::parse("10.255.0.0"));
      c.routing.routes.push_back(
          {*switching::Prefix::parse("10.78.0.0/24"), {*IpAddress::parse("10.255.0.1")}});
    }
    oracle.own_addresses(c.engine.addresses);
    pipeline = std::make_unique<switching::Pipeline>(c, *pool);
    for (size_t h = 0; h < kPorts; h++)
      for (uint8_t s = 0; s < stripes; s++) members[h].push_back(fresh(h, s));
  }

  void step() {
    const uint8_t op = in.byte();
    const size_t host = op >> 5 & 3;
    holds = op & 0x80;
    switch (op & 31) {
      case 0:
        return join(host, in.byte());
      case 1:
        return each_link(host, [&](Member& m) { ready_to_use(host, m); });
      case 2:
        return each_link(host, [&](Member& m) { send_packet(host, m); });
      case 3:
        return each_link(host, [&](Member& m) { acknowledge(host, m, kAckUnlimited, m.in_next - 1); });
      case 4: {
        const uint8_t syndrome = in.byte(), back = in.byte();
        return acknowledge(host, members[host][back % stripes], syndrome,
                           members[host][back % stripes].in_next - back / 4);
      }
      case 5:
        return each_link(host, [&](Member& m) { goodbye(host, m); });
      case 6:
        return pass_time(in.byte());
      case 7:
        return mutated();
      case 8:
        if (!history.empty()) put(history[in.below(history.size())]);
        return;
      case 9:
        return small_talk(host, in.byte());
      case 10:
        return raw(host);
      case 11:
        return any_packet(host);
      case 12: {
        FrameList out;
        const auto groups = pipeline->engine().groups(now);
        if (!groups.empty())
          pipeline->abort_group(groups[in.below(groups.size())].id, "by the fuzzer", now, out);
        return leave(out, 0);
      }
      case 13: {
        FrameList out;
        if ((in.byte() & 7) == 7) pipeline->shutdown(now, out);
        return leave(out, 0);
      }
      case 14:
        for (size_t h = 0; h < world; h++) join(h, 0);
        for (size_t h = 0; h < world; h++) each_link(h, [&](Member& m) { ready_to_use(h, m); });
        for (size_t h = 0; h < world; h++)
          each_link(h, [&](Member& m) { acknowledge(h, m, kAckUnlimited, m.in_next - 1); });
        return;
      case 15:
        for (int packets = 0; packets < 2; packets++)
          for (size_t h = 0; h < world; h++) each_link(h, [&](Member& m) { send_packet(h, m); });
        return;
      case 16:
        for (size_t h = 0; h < world; h++)
          each_link(h, [&](Member& m) { acknowledge(h, m, kAckUnlimited, m.in_next - 1); });
        return;
      case 17:
        return each_link(host, [&](Member& m) { m = fresh(host, m.stripe); });
      case 18: {
        // The member goes back, as after a NAK, or skips.
        const uint8_t by = in.byte();
        Member& m = members[host][by % stripes];
        m.out_next = by & 0x80 ? m.out_next + (by & 3) : m.out_next - (by >> 2 & 7);
        return;
      }
      case 19:
        return forge_mad(host);
      default:
        return flush();
    }
  }

  // Everybody is silent, some of them after a goodbye of the switch; time passes.
  void end(bool shutdown) {
    flush();
    history.clear();
    FrameList out;
    if (shutdown) pipeline->shutdown(now, out);
    out.clear();
    const Time silent = now;
    const auto nothing_left = [&] { return pipeline->drained() && pipeline->engine().queue_pairs() == 0; };
    for (int polls = 0; !nothing_left() || pool->in_use() != 0; polls++) {
      FUZZ_CHECK(polls < 4000, "timers without end");
      FUZZ_CHECK(now - silent < std::chrono::seconds(60), "something is never let go");
      now = std::max(now + std::chrono::microseconds(1), pipeline->next_deadline());
      pipeline->poll(now, out);
      out.clear();
    }
    FUZZ_CHECK(pipeline->engine().groups(now).empty());
    FUZZ_CHECK(pipeline->engine().memory_reserved() == 0);
  }

 private:
  struct Put {
    std::shared_ptr<const Bytes> bytes;
    uint16_t port;
  };

  Member fresh(size_t host, uint8_t stripe) {
    Member m;
    m.rank = static_cast<uint16_t>(host);
    m.stripe = stripe;
    m.comm_id = ++last_id;
    m.qpn = Qpn{0x100 + last_id};
    m.in_first = m.in_next = Psn(0xFFFFFF - (last_id & 1));
    m.transaction = last_id;
    m.nonce = stripe == 0 ? last_id : members[host][0].nonce;
    return m;
  }
  template <typename F>
  void each_link(size_t host, F f) {
    for (Member& m : members[host]) f(m);
  }

  Path path(size_t host) const {
    Path p;
    p.src_mac = host_mac(host), p.dst_mac = kSwitchMac;
    p.src_ip = address_of(host, v6), p.dst_ip = switch_address(v6);
    p.tos = congested ? 3 : 0;
    return p;
  }
  void send(size_t host, const TransportFields& f, std::span<const uint8_t> payload,
            std::span<const uint8_t> more = {}) {
    const Frame frame = build(host_pool, path(host), f, payload, more);
    if (!frame) return;
    Bytes b(frame.total_length());
    frame.copy_to(b.data());
    put(std::move(b), static_cast<uint16_t>(host));
  }

  void put(Bytes bytes, uint16_t port) { put({std::make_shared<const Bytes>(std::move(bytes)), port}); }
  void put(Put p) {
    if (history.size() == kHistoryMax) history.erase(history.begin());
    history.push_back(p);
    waiting.push_back(std::move(p));
    if (!holds) flush();
  }

  // Gives the switch what waits, as one burst.
  void flush() {
    FrameList burst, out;
    const size_t frames = waiting.size();
    for (Put& p : waiting) {
      Frame f = Frame::allocate(*pool);
      if (!f || p.bytes->size() > 768 - FramePool::kHeadroom) continue;  // the driver has no buffer for it
      std::copy(p.bytes->begin(), p.bytes->end(), f.buffer()->data());
      f.buffer()->length = static_cast<uint32_t>(p.bytes->size());
      f.set_port(p.port);
      oracle.enters(f.bytes());
      burst.push(std::move(f));
    }
    waiting.clear();
    now += std::chrono::microseconds(1);
    pipeline->process(burst, now, out);
    leave(out, frames);
    FUZZ_CHECK(burst.empty());
  }

  // What the switch has sent: judged, and heard by the hosts.
  void leave(FrameList& out, size_t frames_in) {
    const size_t links = pipeline->engine().queue_pairs();
    FUZZ_CHECK(out.size() <= frames_in * (kPorts + 4) + (links + ended_links) * kBurstOfLink + 64,
               std::to_string(out.size()) + " frames out");
    ended_links = links;
    while (Frame f = out.pop()) {
      Bytes b(f.total_length());
      f.copy_to(b.data());
      Packet p;
      const bool roce = parse(b, p) == ParseVerdict::kOk;
      const auto mad = roce && p.dest_qp() == kGsiQpn ? decode_cm(p.payload) : std::nullopt;
      oracle.leaves(b, f.port(), roce ? &p : nullptr, mad ? &*mad : nullptr);
      if (roce && p.dst_mac == host_mac(f.port())) hear(p, mad, f.port());
    }
  }

  void hear(const Packet& p, const std::optional<CmMessage>& mad, size_t host) {
    if (p.dest_qp() == kGsiQpn) {
      const auto* rep = mad ? std::get_if<RepMessage>(&mad->body) : nullptr;
      if (!rep) return;
      for (Member& member : members[host]) {
        if (member.comm_id != rep->remote_comm_id || member.switch_qpn.value != 0) continue;
        member.switch_qpn = rep->local_qpn;
        member.out_next = rep->starting_psn;
        switch_ids[host][member.stripe] = rep->local_comm_id;
        if (const auto reply = decode_join_reply(rep->private_data)) member.group = reply->group;
      }
      return;
    }
    for (Member& member : members[host])
      if (member.qpn == p.dest_qp() && p.op->request && p.psn() == member.in_next) ++member.in_next;
  }

  void send_mad(size_t host, const CmBody& body, uint64_t transaction) {
    const TransportFields f{
        .opcode = Opcode::kUdSendOnly, .dest_qp = kGsiQpn, .qkey = kGsiQkey, .src_qp = kGsiQpn};
    send(host, f, encode_cm({{.transaction_id = transaction}, body}));
  }

  void join(size_t host, uint8_t how) {
    for (Member& m : members[host]) {
      JoinRequest j;
      j.key.fill(how >> 6);
      j.stripe = m.stripe, j.stripes = stripes;
      j.mtu_code = 1;
      j.rank = how & 1 ? static_cast<uint16_t>(how >> 1 & 3) : m.rank;
      j.world = static_cast<uint16_t>(world + (how & 8 ? 1 : 0));
      j.tenant = tenant;
      j.nonce = how & 16 ? 1 : m.nonce;
      if (tenant)
        j.tag = join_tag(j, how & 32 ? "" : "open sesame", path(host).src_ip, path(host).dst_ip, m.qpn.value);
      ReqMessage req{.local_comm_id = m.comm_id,
                     .service_id = tcp_service,
                     .local_ca_guid = 0xB0 + host,
                     .local_qpn = m.qpn,
                     .starting_psn = m.in_first,
                     .path_mtu = 3};
      req.primary.local_gid = path(host).src_ip, req.primary.remote_gid = path(host).dst_ip;
      encode_rdma_cm({.ip_version = static_cast<uint8_t>(v6 ? 6 : 4),
                      .src_ip = path(host).src_ip,
                      .dst_ip = path(host).dst_ip},
                     std::span(req.private_data).first<36>());
      const auto data = encode(j);
      std::copy(data.begin(), data.end(), req.private_data.begin() + 36);
      send_mad(host, req, m.transaction);
    }
  }
  void ready_to_use(size_t host, const Member& m) {
    send_mad(host, RtuMessage{.local_comm_id = m.comm_id, .remote_comm_id = switch_ids[host][m.stripe]},
             m.transaction);
  }
  void goodbye(size_t host, const Member& m) {
    send_mad(host,
             DreqMessage{.local_comm_id = m.comm_id,
                         .remote_comm_id = switch_ids[host][m.stripe],
                         .remote_qpn = m.switch_qpn},
             m.transaction + 1000);
  }
  void forge_mad(size_t host) {
    const uint8_t what = in.byte();
    const Member& m = members[host][what >> 3 & (stripes - 1u)];
    const uint32_t theirs = switch_ids[host][m.stripe];
    if ((what & 3) == 0) return send_mad(host, DrepMessage{m.comm_id, theirs}, m.transaction);
    if ((what & 3) == 1)
      return send_mad(host,
                      MraMessage{m.comm_id, theirs, static_cast<CmAnswered>(what >> 4 & 3),
                                 static_cast<uint8_t>(in.byte() & 31)},
                      1);
    RejMessage rej{.local_comm_id = m.comm_id, .remote_comm_id = theirs, .reason = in.byte()};
    send_mad(host, rej, m.transaction);
  }

  // The next packet of the member's segments.
  void send_packet(size_t host, Member& m) {
    const Plan p = plan(m.segment);
    const uint32_t chunks = chunk_count(p.length);
    const bool first = m.packet == 0, last = m.packet + 1 == chunks;
    TransportFields f;
    f.opcode = first ? (last ? Opcode::kSendOnly : Opcode::kSendFirst)
                     : (last ? Opcode::kSendLast : Opcode::kSendMiddle);
    f.dest_qp = m.switch_qpn;
    f.psn = m.out_next;
    f.ack_request = last;
    SegmentHeader h;
    h.magic = kMagic;
    h.version = kProtocolVersion;
    h.collective = static_cast<uint8_t>(p.collective);
    h.op = static_cast<uint8_t>(p.op);
    h.type = h.wire_type = static_cast<uint8_t>(p.type);
    h.flags = static_cast<uint8_t>(kFlagLast | (p.length == 0 ? kFlagHeaderOnly : 0));
    h.group = m.group;
    h.rank = m.rank;
    h.operation = m.segment;
    h.total = uint64_t{p.length};
    h.length = h.payload_bytes = p.length;
    h.result_address = uint64_t{0x1000};
    h.result_rkey = m.qpn.value;
    const uint32_t from = first ? 0 : m.packet * kMtu - kSegmentHeaderBytes;
    const uint32_t to = std::min(p.length, (m.packet + 1) * kMtu - kSegmentHeaderBytes);
    const Bytes payload(to - from, static_cast<uint8_t>(host + 1));
    const std::span<const uint8_t> header(reinterpret_cast<const uint8_t*>(&h), sizeof(h));
    send(host, f, first ? header : std::span<const uint8_t>(), payload);
    ++m.out_next;
    m.packet++;
    if (last) m.packet = 0, m.segment++;
  }
  static uint32_t chunk_count(uint32_t length) {
    return length <= kMtu - kSegmentHeaderBytes ? 1 : 2 + (length - (kMtu - kSegmentHeaderBytes) - 1) / kMtu;
  }

  void acknowledge(size_t host, const Member& m, uint8_t syndrome, Psn psn) {
    TransportFields f;
    f.opcode = Opcode::kAcknowledge;
    f.dest_qp = m.switch_qpn;
    f.psn = psn;
    f.syndrome = syndrome;
    send(host, f, {});
  }

  void any_packet(size_t host) {
    const uint8_t opcode = in.byte(), what = in.byte();
    Member& m = members[host][what & (stripes - 1u)];
    TransportFields f;
    f.opcode = static_cast<Opcode>(opcode);
    if (!traits(opcode).known) f.opcode = opcode & 1 ? Opcode::kCnp : Opcode::kWriteOnly;
    f.dest_qp = m.switch_qpn;
    f.psn = m.out_next;
    f.ack_request = what & 2;
    const Bytes payload(what & 4 ? in.u16() % 300 : 0, 0x11);
    f.dma_length = static_cast<uint32_t>(what & 8 ? 1000 : payload.size());
    send(host, f, payload);
    if (what & 16) ++m.out_next;
  }

  void small_talk(size_t host, uint8_t what) {
    const MacAddress mac = host_mac(host);
    const bool six = what & 0x80;
    // A neighbour, a router's peer, somebody behind it, or us.
    const IpAddress targets[] = {switch_address(six), address_of((host + 1) % kPorts, six),
                                 address_of(50, six), *IpAddress::parse("10.255.0.1"),
                                 *IpAddress::parse("10.78.0.9")};
    const IpAddress own = what & 0x40 ? *IpAddress::parse("10.255.0.1") : address_of(host, six);
    const IpAddress target = targets[what / 8 % std::size(targets)];
    const auto port = static_cast<uint16_t>(host);
    if (own.is_v4() != target.is_v4() && what % 8 != 2) return;
    switch (what % 8) {
      case 0:
      case 1:
        if (own.is_v4())
          return put(arp(1 + what % 2, mac, own, target, what % 8 ? kSwitchMac : kBroadcastMac), port);
        return put(neighbour(what % 2 ? 136 : 135, mac, own, target, what % 2 ? own : target, kSwitchMac),
                   port);
      case 2:
        return put(
            neighbour(135, mac, address_of(host, true), target, target, {{0x33, 0x33, 0xFF, 0, 0, 0x64}}),
            port);
      case 3:
        return put(echo(kSwitchMac, mac, target, own, 64), port);
      case 4:
        return put(echo(kSwitchMac, mac, target, own, 1), port);
      case 5:
        return put(echo(host_mac((host + 1) % kPorts), mac, target, own, 64), port);
      case 6: {
        Bytes b = echo(kSwitchMac, mac, target, own, 64);
        const Bytes tag = {0x81, 0, 0, 5};
        b.insert(b.begin() + 12, tag.begin(), tag.end());
        return put(std::move(b), port);
      }
      default:
        return put(echo(kBroadcastMac, mac, target, own, 64), port);
    }
  }

  void raw(size_t host) {
    const auto bytes = in.take(in.below(200));
    put(Bytes(bytes.begin(), bytes.end()), static_cast<uint16_t>(host));
  }

  void mutated() {
    if (history.empty()) return;
    const uint8_t how = in.byte();
    const Put& from = history[how < 0x80 ? history.size() - 1 : in.below(history.size())];
    Bytes b = *from.bytes;
    uint16_t port = from.port;
    for (size_t n = 1 + (how & 3); n > 0 && !b.empty(); n--) {
      const size_t at = in.u16() % b.size();
      const uint8_t value = in.byte();
      switch (how >> 2 & 7) {
        case 0:
          b.resize(at);
          break;
        case 1:
          b.insert(b.begin() + static_cast<ptrdiff_t>(at), 1 + value % 16, value);
          break;
        case 2:
          b[at] = value;
          break;
        case 3:
          b[at] = static_cast<uint8_t>(b[at] + (value & 1 ? 1 : -1));
          break;
        default:
          b[at] ^= value;
      }
    }
    if (how & 0x20) port = static_cast<uint16_t>((port + 1) % kPorts);
    if (!(how & 0x40)) repair(b);
    put(std::move(b), port);
  }

  void pass_time(uint8_t how) {
    static constexpr int64_t kSteps[] = {10, 70, 700, 5000, 70000, 210000, 600000, 1100000};  // µs
    flush();
    now += std::chrono::microseconds(kSteps[how & 7]);
    FrameList out;
    pipeline->poll(now, out);
    leave(out, 0);
  }

  Input& in;
  bool v6 = false, holds = false, congested = false;
  uint16_t world = 2;
  uint8_t stripes = 1;
  uint32_t tenant = 0;
  uint32_t last_id = 0;
  const uint64_t tcp_service = tcp_service_id(18600);
  Time now{std::chrono::seconds(1)};
  HeapFramePool host_pool{1024, 1};
  std::unique_ptr<HeapFramePool> pool;
  std::unique_ptr<switching::Pipeline> pipeline;
  SwitchOracle oracle{kSwitchMac, kPorts};
  std::vector<Member> members[kPorts];
  uint32_t switch_ids[kPorts][2] = {};
  std::vector<Put> history, waiting;
  size_t ended_links = 0;
};

void run(std::span<const uint8_t> data) {
  if (data.size() > 1500) return;
  Input in(data);
  World world(in);
  for (size_t n = 0; n < kStepsMax && !in.empty(); n++) world.step();
  world.end(in.size() & 1);
}

}  // namespace
MILLRACE_FUZZ_TARGET("switch", run)
}  // namespace millrace::fuzz
