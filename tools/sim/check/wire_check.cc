#include "tools/sim/check/wire_check.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "tools/sim/check/hash.h"

namespace millrace::sim::check {

namespace {

constexpr size_t kMadHeader = 24;
constexpr int64_t kTerminalTurn_ns = 1000000;  // in which a terminal message must go down every queue pair
// The same where CNPs keep packets back until what is under way is acknowledged, perhaps sent again.
constexpr int64_t kCongestedTurn_ns = 1000000000;
constexpr int64_t kRnr_ns = 10000000;        // the longest that a NIC here asks for, and a repeat
constexpr int64_t kLongCut_ns = 1000000000;  // after which a switch repeats itself rarely
constexpr int64_t kLinger_ns = 2000000000;   // for which what has ended is kept for repeats

uint32_t distance(uint32_t psn, uint32_t from) { return (psn - from) & 0xFFFFFF; }

std::string text_of(const Address& a) {
  char t[40];
  if (a[10] == 0xFF)
    std::snprintf(t, sizeof(t), "%u.%u.%u.%u", a[12], a[13], a[14], a[15]);
  else
    std::snprintf(t, sizeof(t), "%02x%02x::%02x%02x", a[0], a[1], a[14], a[15]);
  return t;
}

uint64_t be64(const uint8_t* p) { return uint64_t{be32(p)} << 32 | be32(p + 4); }

}  // namespace

WireCheck::Header WireCheck::Header::read(std::span<const uint8_t> m) {
  const uint8_t* p = m.data();
  Header h;
  h.collective = p[3], h.op = p[4], h.type = p[5], h.wire_type = p[6], h.flags = p[7];
  h.rank = be16(p + 12), h.root = be16(p + 14);
  h.operation = be64(p + 16), h.total = be64(p + 24), h.offset = be64(p + 32);
  h.length = be32(p + 40), h.payload = be32(p + 44);
  h.address = be64(p + 48), h.rkey = be32(p + 56);
  return h;
}

bool WireCheck::Header::agrees(const Header& o) const {
  return collective == o.collective && op == o.op && type == o.type && wire_type == o.wire_type &&
         ((flags ^ o.flags) & 3) == 0 && root == o.root && operation == o.operation && total == o.total &&
         offset == o.offset && length == o.length;
}

// In another form than its type's it is blocks of 64 bytes for 63 elements, of which the last is padded.
uint32_t WireCheck::Header::wire_bytes() const {
  return wire_type == type ? length : (length / element_bytes() + 62) / 63 * 64;
}
uint32_t WireCheck::Header::wide_bytes() const {
  return 4 * (wire_type == type ? length / element_bytes() : wire_bytes() / 64 * 63);
}
bool WireCheck::Header::sums_wide() const {
  const bool narrow_float = type == 7 || type == 8 || type == 11 || type == 12, extreme = op == 3 || op == 4;
  const bool reduces = (collective == 1 || collective == 2 || collective == 4) && length != 0;
  return reduces && (wire_type != type || (narrow_float && !extreme));
}
uint32_t WireCheck::Header::element_bytes() const {
  static constexpr uint32_t bytes[] = {1, 1, 1, 4, 4, 8, 8, 2, 2, 4, 8, 1, 1};
  return type < 13 ? bytes[type] : 1;
}

// All-reduce 1, reduce 2, broadcast 3, reduce-scatter 4, all-gather 5, barrier 6.
uint32_t WireCheck::Header::source(uint32_t world) const {
  return collective == 5 ? static_cast<uint32_t>(offset / std::max<uint64_t>(1, total / world)) : root;
}

bool WireCheck::Header::contributes(uint32_t who, uint32_t world) const {
  if (length == 0 || collective == 6) return false;
  return (collective != 3 && collective != 5) || who == source(world);
}

bool WireCheck::Header::contributes(const std::set<uint32_t>& ranks, uint32_t world) const {
  return std::any_of(ranks.begin(), ranks.end(), [&](uint32_t r) { return contributes(r, world); });
}

std::pair<uint32_t, uint32_t> WireCheck::Header::receives(const std::set<uint32_t>& ranks, uint32_t world,
                                                          uint32_t bytes) const {
  if (ranks.empty()) return {0, 0};
  if (collective == 4 && length != 0) {
    // From the first's shard to the last's, whoever's is between.
    const uint64_t shard = total / world;
    const uint64_t first = std::max(offset, *ranks.begin() * shard);
    const uint64_t behind = std::min(offset + length, (*ranks.rbegin() + 1) * shard);
    if (first >= behind) return {0, 0};
    if (wire_type != type) return {0, bytes};
    return {static_cast<uint32_t>(first - offset), static_cast<uint32_t>(behind - offset)};
  }
  for (const uint32_t r : ranks) {
    const auto one = receives(r, world, bytes);
    if (one.first != one.second) return one;  // there is nothing between all and nothing
  }
  return {0, 0};
}

std::pair<uint32_t, uint32_t> WireCheck::Header::receives(uint32_t who, uint32_t world,
                                                          uint32_t bytes) const {
  const std::pair<uint32_t, uint32_t> all{0, bytes}, nothing{0, 0};
  if (length == 0) return nothing;
  switch (collective) {
    case 1:
      return all;
    case 2:
      return who == root ? all : nothing;
    case 3:
    case 5:
      return who == source(world) ? nothing : all;
    case 4: {
      const uint64_t shard = total / world, first = std::max(offset, who * shard);
      const uint64_t behind = std::min(offset + length, (who + 1) * shard);
      if (first >= behind) return nothing;
      if (wire_type != type) return all;  // segments then lie within shards
      return {static_cast<uint32_t>(first - offset), static_cast<uint32_t>(behind - offset)};
    }
    default:
      return nothing;
  }
}

std::string WireCheck::name(const Connection& c) {
  return (c.child ? "child of ranks from " + (c.ranks.empty() ? "none" : std::to_string(*c.ranks.begin()))
                  : "rank " + std::to_string(c.rank)) +
         " stripe " + std::to_string(c.stripe) + " (" + text_of(c.host) + " QP " +
         std::to_string(c.host_qpn) + ", switch " + text_of(c.sw) + " QP " + std::to_string(c.switch_qpn) +
         ")";
}

void WireCheck::accuse(int64_t at_ns, const Stream& s, const std::string& what) {
  violations_.add(
      "wire", at_ns,
      name(*s.connection) + ", " + (s.of_switch ? "the switch's" : "the host's") + " side: " + what);
}

WireCheck::Stream* WireCheck::find(const Address& src, const Address& dst, uint32_t qpn) {
  const auto it = streams_.find({src, dst, qpn});
  return it == streams_.end() ? nullptr : it->second;
}

void WireCheck::sent(int64_t at_ns, std::span<const uint8_t> frame, bool from_switch) {
  WirePacket p;
  const char* why;
  const WireKind kind = read_packet(frame, true, p, why);
  if (kind == WireKind::kMalformed)
    violations_.add("wire", at_ns, std::string("a frame was sent with ") + why);
  if (kind != WireKind::kRoce) return;
  counts_.packets[from_switch]++;
  if (p.mad()) return mad(at_ns, p);
  if (p.cnp()) {
    counts_.cnps[from_switch]++;
    if (Stream* s = find(p.src, p.dst, p.dest_qp); s != nullptr && s->of_switch) s->connection->cnp = true;
    return;
  }
  if (p.acknowledge()) return acknowledgement(at_ns, p, from_switch);
  if (!p.request()) return violations_.add("wire", at_ns, "opcode " + std::to_string(p.opcode) + " was sent");
  if (Stream* s = find(p.src, p.dst, p.dest_qp)) return request(at_ns, p, *s);
  violations_.add("wire", at_ns, "a request to a queue pair that no connection has made");
}

void WireCheck::passed(int64_t at_ns, std::span<const uint8_t> frame) {
  WirePacket p;
  const char* why;
  if (read_packet(frame, true, p, why) == WireKind::kMalformed)
    violations_.add("wire", at_ns, std::string("a frame was passed on with ") + why);
}

// Connections: what a REQ and its REP say.
void WireCheck::mad(int64_t at_ns, const WirePacket& p) {
  if (p.payload.size() < 256) return violations_.add("wire", at_ns, "a MAD that is too short");
  const uint8_t* m = p.payload.data() + kMadHeader;
  const uint32_t attribute = be16(p.payload.data() + 16), local = be32(m), remote = be32(m + 4);
  if (mads_[hash_of(p.payload)]++ > 0) counts_.mad_repeats++;
  switch (attribute) {
    case 0x10: {
      counts_.req++;
      auto& known = by_comm_id_[{p.src, p.dst, local}];
      if (known != nullptr && known->host_qpn == be24(m + 32)) break;
      connections_.push_back(std::make_unique<Connection>());
      Connection& c = *(known = connections_.back().get());
      c.host = p.src, c.sw = p.dst;
      c.host_comm_id = local;
      c.host_qpn = be24(m + 32);
      c.from_switch.first_psn = be24(m + 44);  // where the *other* side shall begin
      c.stripe = m[140 + 36 + 5];
      c.rank = static_cast<uint16_t>(be16(m + 140 + 36 + 24));
      c.nonce = be64(m + 140 + 36 + 32);
      c.child = be32(m + 140 + 36) == 0x4D4C5253;
      if (!c.child) c.ranks = {c.rank};
      for (auto& other : connections_)
        if (c.child && other.get() != &c && other->host == c.host && other->sw == c.sw &&
            other->nonce == c.nonce)
          c.ranks = other->ranks;
      c.from_switch.connection = &c;
      c.from_switch.of_switch = true;
      // From now on the switch may tell that the group is over, although there may be no frame for its REP.
      streams_.try_emplace({c.sw, c.host, c.host_qpn}, &c.from_switch);
      break;
    }
    case 0x13: {
      counts_.rep++;
      const auto it = by_comm_id_.find({p.dst, p.src, remote});
      if (it == by_comm_id_.end()) return violations_.add("wire", at_ns, "a REP without a REQ");
      Connection* c = it->second;
      if (c->switch_qpn == be24(m + 12) && c->switch_comm_id == local) break;
      if (c->switch_qpn != 0) {
        // Another boot of the switch has taken the same REQ: another connection.
        connections_.push_back(std::make_unique<Connection>());
        Connection* again = connections_.back().get();
        again->host = c->host, again->sw = c->sw, again->host_qpn = c->host_qpn;
        again->host_comm_id = c->host_comm_id, again->rank = c->rank, again->stripe = c->stripe;
        again->child = c->child, again->nonce = c->nonce;
        if (!c->child) again->ranks = c->ranks;
        again->from_switch.first_psn = c->from_switch.first_psn;
        it->second = c = again;
      }
      c->switch_comm_id = local;
      c->switch_qpn = be24(m + 12);
      c->from_host.first_psn = be24(m + 20);
      c->from_host.connection = c->from_switch.connection = c;
      c->from_switch.of_switch = true;
      streams_[{c->host, c->sw, c->switch_qpn}] = &c->from_host;
      streams_[{c->sw, c->host, c->host_qpn}] = &c->from_switch;
      break;
    }
    case 0x11:
      counts_.mra++;
      break;
    case 0x12:
      counts_.rej++;
      break;
    case 0x14:
      counts_.rtu++;
      break;
    case 0x15: {
      counts_.dreq++;
      const auto it = by_comm_id_.find({p.src, p.dst, local});
      if (it != by_comm_id_.end() && it->second->goodbye_at == INT64_MAX) it->second->goodbye_at = at_ns;
      break;
    }
    case 0x16:
      counts_.drep++;
      break;
    default:
      violations_.add("wire", at_ns, "a MAD with attribute " + std::to_string(attribute));
  }
}

void WireCheck::request(int64_t at_ns, const WirePacket& p, Stream& s) {
  const uint32_t n = distance(p.psn, s.first_psn);
  if (n == s.sent.size()) {
    if (n >= s.beyond && !is_cut(*s.connection, s.of_switch)) s.gap = false;
    return fresh(at_ns, p, s);
  }
  if (n > s.sent.size() && missing(s, n)) return;
  if (n > s.sent.size())
    return accuse(at_ns, s,
                  "PSN " + std::to_string(p.psn) + " was sent, " +
                      std::to_string((s.first_psn + s.sent.size()) & 0xFFFFFF) + " is next");
  counts_.repeats[s.of_switch]++;
  const Sent& before = s.sent[n];
  if (before.opcode != p.opcode || before.length != p.payload.size())
    accuse(at_ns, s, "PSN " + std::to_string(p.psn) + " was repeated with another opcode or length");
  // A host's memory may have changed under it (in place), when its peer has it already; a result may not.
  else if (s.of_switch && before.hash != hash_of(p.above_psn))
    accuse(at_ns, s, "PSN " + std::to_string(p.psn) + " was repeated with other bytes");
}

bool WireCheck::is_cut(const Connection& c, bool of_switch) const {
  const auto found = cuts_.find(of_switch ? std::pair(c.sw, c.host) : std::pair(c.host, c.sw));
  return found != cuts_.end() && found->second > 0;
}

// A packet behind a gap that a link's going down has made: it is looked at when it comes again in its place.
bool WireCheck::missing(Stream& s, uint32_t n) {
  if (!s.gap && !is_cut(*s.connection, s.of_switch)) return false;
  s.gap = true;
  s.beyond = std::max(s.beyond, n + 1);
  return true;
}

void WireCheck::cut(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to, bool down) {
  for (const Address& f : from)
    for (const Address& t : to) {
      uint32_t& n = cuts_[{f, t}];
      down ? n++ : n -= n > 0;
    }
  for (auto& c : connections_)
    for (Stream* s : {&c->from_switch, &c->from_host}) {
      const Address &source = s == &c->from_switch ? c->sw : c->host,
                    &sink = s == &c->from_switch ? c->host : c->sw;
      if (!from.contains(source) || !to.contains(sink)) continue;
      s->gap = true;
      if (down)
        s->down_at = at_ns;
      else
        s->up_at = at_ns, s->down_at = std::min(s->down_at, at_ns);
      c->cnp = true;  // it may be among what is missing
    }
}

void WireCheck::link_down(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to) {
  cut(at_ns, from, to, true);
}
void WireCheck::link_up(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to) {
  cut(at_ns, from, to, false);
}

// A packet that was never sent before: it must be the protocol's next.
void WireCheck::fresh(int64_t at_ns, const WirePacket& p, Stream& s) {
  const uint32_t family = p.send() ? 1 : 2;
  if (p.starts() ? s.open != 0 : s.open != family) accuse(at_ns, s, "a packet out of its message's order");
  if (!p.ends()) {
    if (s.mtu == 0) s.mtu = static_cast<uint32_t>(p.payload.size());
    if (p.payload.size() != s.mtu)
      accuse(at_ns, s, "a packet that is not its message's last is not of the MTU");
  } else if (p.last() && p.payload.empty()) {
    accuse(at_ns, s, "an empty last packet");
  }
  s.open = p.ends() ? 0 : family;
  const uint32_t before = s.sent.empty() ? 0 : s.sent.back().messages;
  s.sent.push_back({before + (p.ends() ? 1u : 0u), p.opcode, false, static_cast<uint32_t>(p.payload.size()),
                    s.of_switch ? hash_of(p.above_psn) : 0});
  Connection& c = *s.connection;
  if (!s.of_switch) {
    if (p.opcode == 0x0A && p.payload.empty()) counts_.probes[0]++;
    if (p.send() && p.starts()) segment(at_ns, p, s);
    return;
  }
  if (p.send())
    message(at_ns, p, c);
  else if (p.opcode == 0x0A && p.payload.empty() && be32(p.above_psn.data() + 8) == 0)
    counts_.probes[1]++;
  else
    result(at_ns, p, c);
}

// A SEND of a member's begins: a segment, or what children have to say besides.
void WireCheck::segment(int64_t at_ns, const WirePacket& p, Stream& s) {
  Connection& c = *s.connection;
  if (c.child && p.payload.size() >= 20 && be16(p.payload.data()) == 0x4D52 && p.payload[3] & 0x80) {
    if (p.payload[3] == 0x82) members(c, p.payload);
    c.has_ended |= p.payload[3] == 0x81;
    return;
  }
  counts_.segments++;
  const bool has_header = p.payload.size() >= 64;
  if (!has_header) accuse(at_ns, s, "a segment without a header");
  const Header h = has_header ? Header::read(p.payload) : Header{};
  // Of a deterministic segment a child may send several partial sums.
  if (c.child && h.flags & 1 && !s.headers.empty() && h.same_segment(s.headers.back())) return;
  s.message_at.push_back(static_cast<uint32_t>(s.sent.size() - 1));
  s.headers.push_back(h);
  const bool wide = c.child && h.sums_wide();
  if (c.started && (!c.ranks.contains(h.rank) || h.header_only() == h.contributes(c.ranks, c.world) ||
                    wide != ((h.flags & 8) != 0) ||
                    (h.header_only() && (h.payload != 0 || !p.only() || p.payload.size() > 64)) ||
                    (!h.header_only() && h.payload != (wide ? h.wide_bytes() : h.wire_bytes()))))
    accuse(at_ns, s, "a segment header that is not what its collective asks of the rank");
  if (!c.started)
    accuse(at_ns, s, "a segment was sent before START");
  else if (!eager_.contains(c.host) && s.message_at.size() > c.from_switch.results_arrived + c.window)
    accuse(at_ns, s,
           std::to_string(s.message_at.size()) + " segments were begun with " +
               std::to_string(c.from_switch.results_arrived) + " results seen and a window of " +
               std::to_string(c.window));
}

// Which ranks have come to a child, or are gone again.
void WireCheck::members(Connection& c, std::span<const uint8_t> m) {
  for (uint32_t i = 0; i < be16(m.data() + 16) && 24 + 4 * i <= m.size(); i++)
    for (uint32_t r = be16(m.data() + 20 + 4 * i); r <= be16(m.data() + 22 + 4 * i); r++)
      m[6] & 1 ? void(c.ranks.erase(r)) : void(c.ranks.insert(r));
  // The connections of other stripes stand for the same.
  for (auto& other : connections_)
    if (other->child && other->host == c.host && other->sw == c.sw && other->nonce == c.nonce)
      other->ranks = c.ranks;
}

// START or a terminal message.
void WireCheck::message(int64_t at_ns, const WirePacket& p, Connection& c) {
  const uint8_t* m = p.payload.data();
  if (!p.only()) {  // of an MTU of 256; what stands in the first packet is enough
    if (!p.first()) return;
  }
  if (p.payload.size() < 20 || be16(m) != 0x4D52)
    return accuse(at_ns, c.from_switch, "a SEND that is no message");
  Group& g = groups_[{c.sw, {be32(m + 8), c.stripe}}];
  if (m[3] == 0x80) {
    counts_.starts++;
    if (c.switch_qpn == 0) accuse(at_ns, c.from_switch, "START was sent before a REP");
    c.started = true;
    c.window = static_cast<uint16_t>(be16(m + 4));
    c.mtu = 128u << m[6];
    c.group = be32(m + 8);
    c.world = static_cast<uint16_t>(be16(m + 16));
    g.members.push_back(&c);
    g.name = "group " + std::to_string(c.group) + " of " + text_of(c.sw);
  } else {
    counts_.terminals++;
    if (c.terminal) accuse(at_ns, c.from_switch, "a second terminal message");
    c.terminal = true;
    c.terminal_at = at_ns;
    for (auto& [key, group] : groups_)
      if (key.first == c.sw && key.second.first == be32(m + 8) && at_ns < group.terminal_at)
        group.terminal_at = at_ns;
  }
}

// Whether a chunk of the member's next result may have been made: all headers have come, which agree, and all
// parts of it.
bool WireCheck::all_there(int64_t at_ns, const Group& g, Connection& c, uint32_t chunk) {
  const uint32_t segment = c.result_segment;
  const std::string what = "the result of segment " + std::to_string(segment) + " chunk " +
                           std::to_string(chunk) + " was sent, but ";
  size_t ranks = 0;
  for (const Connection* m : g.members) ranks += m->ranks.size();
  if (trees_ ? ranks > c.world : ranks != c.world) {
    accuse(at_ns, c.from_switch, "a result in a group that has not started everywhere");
    return false;
  }
  for (const Connection* m : g.members) {
    const Stream& s = m->from_host;
    const std::string rank = "rank " + std::to_string(m->rank);
    if (segment >= s.message_at.size() || s.arrived <= s.message_at[segment]) {
      accuse(at_ns, c.from_switch, what + "the header of " + rank + " has not come");
      return false;
    }
    const Header& h = s.headers[segment];
    if (!h.agrees(g.members[0]->from_host.headers[segment])) {
      accuse(at_ns, c.from_switch, what + rank + " disagrees with others");
      return false;
    }
    // Where a child's accumulators are wider, its packets hold other ranges.
    if (!(h.flags & 8) && h.contributes(m->ranks, c.world) && s.arrived <= s.message_at[segment] + chunk) {
      accuse(at_ns, c.from_switch, what + "the part of " + rank + " has not come");
      return false;
    }
  }
  return true;
}

void WireCheck::result(int64_t at_ns, const WirePacket& p, Connection& c) {
  counts_.results++;
  const uint32_t segment = c.result_segment;
  if (c.terminal) accuse(at_ns, c.from_switch, "a result behind the terminal message");
  if (p.with_immediate() && p.immediate != (segment & 0xFFFFFF))
    accuse(at_ns, c.from_switch,
           "immediate " + std::to_string(p.immediate) + " where " + std::to_string(segment) + " is next");
  const Group& g = groups_[{c.sw, {c.group, c.stripe}}];
  if (all_there(at_ns, g, c, c.result_chunk)) {
    const Header& h = c.from_host.headers[segment];
    const uint32_t bytes = h.wire_bytes();
    const auto range = h.receives(c.ranks, c.world, bytes);
    auto begin = [&](uint32_t chunk) { return chunk == 0 ? 0 : chunk * c.mtu - 64; };
    // Chunks with nothing for this member are passed over, but for the last.
    uint32_t chunk = c.result_chunk, from, to;
    for (;; chunk++) {
      from = std::max(range.first, begin(chunk)), to = std::min(range.second, begin(chunk + 1));
      if (from < to || begin(chunk + 1) >= bytes) break;
    }
    const bool last = begin(chunk + 1) >= bytes;
    const uint32_t length = from < to ? to - from : 0;
    const std::string what = "the result of segment " + std::to_string(segment) + " chunk " +
                             std::to_string(chunk) + ", of collective " + std::to_string(h.collective) + ", ";
    if (chunk != c.result_chunk) all_there(at_ns, g, c, chunk);
    if (!p.only() || p.with_immediate() != last)
      accuse(at_ns, c.from_switch,
             what + "is no packet of its own, or tells the segment's end where it is not");
    else if (p.payload.size() != length)
      accuse(at_ns, c.from_switch,
             what + "has " + std::to_string(p.payload.size()) + " bytes where " + std::to_string(length) +
                 " are this rank's");
    else if (length != 0 && (be64(p.above_psn.data()) != h.address + (from - range.first) ||
                             be32(p.above_psn.data() + 8) != h.rkey))
      accuse(at_ns, c.from_switch, what + "goes to another address than it belongs to");
    c.result_chunk = chunk;
  }
  c.result_chunk++;
  if (p.with_immediate()) c.result_segment++, c.result_chunk = 0;
}

void WireCheck::acknowledgement(int64_t at_ns, const WirePacket& p, bool from_switch) {
  const uint32_t kind = p.syndrome & 0xE0;
  (kind == 0            ? counts_.acks
   : kind == 0x20       ? counts_.rnr_naks
   : p.syndrome == 0x60 ? counts_.naks
                        : counts_.fatal_naks)[from_switch]++;
  // The requests it answers are those of the other side of its connection.
  Stream* mine = find(p.src, p.dst, p.dest_qp);
  if (mine == nullptr) return violations_.add("wire", at_ns, "an acknowledgement to a queue pair of nobody");
  Connection& c = *mine->connection;
  Stream* s = mine->of_switch ? &c.from_host : &c.from_switch;
  // A late copy of a REQ may have made another connection to the same queue pair of the host's, which cannot
  // tell its requests apart: it may answer those of either.
  if (Stream* newest = find(c.sw, c.host, c.host_qpn); !mine->of_switch && !objection(p, *s).empty())
    s = newest;
  if (const std::string why = objection(p, *s); !why.empty()) accuse(at_ns, *s, why);
  const int64_t taken = taken_by(p, *s);
  if (taken > static_cast<int64_t>(s->arrived)) return;
  if (taken > s->acked) s->acked = taken, s->acked_at = at_ns;
  // What is acknowledged again before the packet that was not taken says nothing about that one.
  if (kind == 0x20)
    s->rnr_at = at_ns, s->rnr_taken = taken;
  else if (taken > s->rnr_taken)
    s->rnr_at = -1;
  // The CNP leaves in the turn that takes the marked packet, before its acknowledgement. Later ones may be
  // held back by the rate limit, by the switch's own clock.
  if (s->marked >= 0 && taken > s->marked) {
    c.mark_ignored |= !c.cnp;
    s->marked = -1;
  }
}

// How many packets of a stream an acknowledgement says have been taken.
int64_t WireCheck::taken_by(const WirePacket& p, const Stream& s) {
  return (p.syndrome & 0xE0) == 0 ? distance(p.psn + 1, s.first_psn) : distance(p.psn, s.first_psn);
}

// What is wrong with an acknowledgement of a stream; nothing, if it is an empty string.
std::string WireCheck::objection(const WirePacket& p, const Stream& s) {
  const int64_t taken = taken_by(p, s);
  if (taken > static_cast<int64_t>(s.arrived))
    return "PSN " + std::to_string(p.psn) + " was acknowledged (syndrome " + std::to_string(p.syndrome) +
           ") and has not arrived";
  if (taken < s.acked) return "an acknowledgement went back, to PSN " + std::to_string(p.psn);
  const uint32_t messages = taken == 0 ? 0 : s.sent[static_cast<size_t>(taken - 1)].messages;
  if (p.msn != (messages & 0xFFFFFF))
    return "MSN " + std::to_string(p.msn) + " with PSN " + std::to_string(p.psn) + ", where " +
           std::to_string(messages) + " messages were complete";
  return {};
}

void WireCheck::arrived(int64_t, std::span<const uint8_t> frame) {
  WirePacket p;
  const char* why;
  if (read_packet(frame, true, p, why) != WireKind::kRoce || !p.request()) return;
  Stream* s = find(p.src, p.dst, p.dest_qp);
  if (s == nullptr) return;
  const uint32_t n = distance(p.psn, s->first_psn);
  if (n >= s->sent.size()) return;
  if (s->sent[n].arrived) {
    if (s->marked == n) s->marked = -1;  // which of the two was taken is not known
    return;
  }
  s->sent[n].arrived = true;
  if (p.marked && !s->of_switch && s->marked < 0) s->marked = n;
  if (n >= s->arrived) s->arrived = n + 1;
  if (p.with_immediate()) s->results_arrived++;
}

void WireCheck::finish(int64_t at_ns, bool blocked, bool congestion) {
  if (blocked) return;
  const int64_t turn_ns = congestion ? kCongestedTurn_ns : kTerminalTurn_ns;
  for (const auto& c : connections_)
    if (c->mark_ignored)
      violations_.add("wire", at_ns, "a packet marked by congestion drew no CNP for " + name(*c));
  for (const auto& [key, g] : groups_) {
    if (g.terminal_at == INT64_MAX) continue;
    for (const Connection* c : g.members) {
      // A receiver that was not ready is told later.
      int64_t from = g.terminal_at;
      if (c->from_switch.rnr_at >= 0) from = std::max(from, c->from_switch.rnr_at + kRnr_ns);
      // Whoever has said so itself need not be told.
      if (c->goodbye_at <= from || c->has_ended) continue;
      // What an eager host claims to have seen, and lost with a link, is not sent again: the gap stays.
      if (!c->terminal && c->from_switch.gap && eager_.contains(c->host)) continue;
      if (const Stream& s = c->from_switch; congestion) {
        from = std::max(from, s.acked < static_cast<int64_t>(s.sent.size()) ? INT64_MAX : s.acked_at);
        if (!c->terminal && from > g.terminal_at + kLinger_ns) continue;
        from = std::min(from, g.terminal_at + kLinger_ns);
      }
      // It may have been made while the link was down; it is repeated for as long as the switch lingers, but
      // after a long silence so rarely that none of the repeats need fall behind it.
      const Stream& s = c->from_switch;
      const int64_t up_at = s.up_at >= s.down_at ? s.up_at : INT64_MAX, lingers = g.terminal_at + kLinger_ns;
      if (s.down_at <= lingers && up_at >= g.terminal_at) {
        if (!c->terminal && (up_at > lingers - turn_ns || up_at - s.down_at >= kLongCut_ns)) continue;
        // One that was told down another stripe, as the link came up, has said goodbye to all.
        if (!c->terminal && c->goodbye_at <= std::min(up_at, lingers) + turn_ns) continue;
        from = std::max(from, std::min(up_at, lingers));
      }
      if (!c->terminal || c->terminal_at > from + turn_ns)
        violations_.add("wire", at_ns,
                        g.name + " ended at " + std::to_string(g.terminal_at) +
                            " ns, but no terminal message went to " + name(*c));
    }
  }
}

}  // namespace millrace::sim::check
