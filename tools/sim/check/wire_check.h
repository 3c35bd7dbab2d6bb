// What our code puts on the wire, judged packet by packet: valid ICRCs, PSNs in the protocol's order, repeats
// that say the same, acknowledgements of what was sent with MSNs that count its messages, members within
// their window, no result before every member's header and every contributor's part have come, to each member
// the bytes that its collective has for it and nothing else, terminal messages down every queue pair, and a
// CNP from the switch for the first mark of congestion on a queue pair.
// It learns of connections by reading the CM's messages and START itself, and of operations by reading
// segment headers.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "tools/sim/check/violations.h"
#include "tools/sim/check/wire_packet.h"

namespace millrace::sim::check {

// How often each kind of packet was sent, as counted from the wire. [0]: by hosts, [1]: by switches.
struct WireCounts {
  uint64_t packets[2] = {}, acks[2] = {}, naks[2] = {}, rnr_naks[2] = {}, repeats[2] = {}, cnps[2] = {},
           fatal_naks[2] = {}, probes[2] = {};
  uint64_t req = 0, mra = 0, rej = 0, rep = 0, rtu = 0, dreq = 0, drep = 0, mad_repeats = 0;
  uint64_t starts = 0, terminals = 0, segments = 0, results = 0;
};

class WireCheck {
 public:
  explicit WireCheck(Violations& violations) : violations_(violations) {}

  // A host or switch that made the frame itself has put it on its wire. `from_switch`: the aggregating side.
  void sent(int64_t at_ns, std::span<const uint8_t> frame, bool from_switch);
  // A frame arrives where it is addressed to. A corrupted one is none.
  void arrived(int64_t at_ns, std::span<const uint8_t> frame);
  // A frame that a switch only passes on: its ICRC must still be right.
  void passed(int64_t at_ns, std::span<const uint8_t> frame);
  // This host does not keep its window, and is not expected to.
  void tolerate(const Address& host) { eager_.insert(host); }
  // A switch has been told that a link of its own is down, by which it reaches `to` from `from`, its
  // addresses. What it had queued for it, and what it makes for it until link_up(), never gets onto a wire: a
  // gap in the PSNs, which is filled afterwards, as go-back-N does it.
  void link_down(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to);
  void link_up(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to);
  // Switches may be children of others: a group's ranks need not all be behind one.
  void expect_trees() { trees_ = true; }
  // At the end of a run. Judges terminal messages and CNPs unless `blocked`: frames were so few that the
  // former may have had to wait and the latter could not be made.
  // With `congestion`, a terminal message may have had to wait for the acknowledgement of what was under way,
  // or in vain.
  void finish(int64_t at_ns, bool blocked, bool congestion);
  const WireCounts& counts() const { return counts_; }

 private:
  struct Sent {
    uint32_t messages;  // completed by this packet and those before it
    uint8_t opcode;
    bool arrived = false;
    uint32_t length;
    uint64_t hash;
  };
  // What a segment header says.
  struct Header {
    uint32_t collective = 0, op = 0, type = 0, wire_type = 0, flags = 0, root = 0, rank = 0;
    uint64_t operation = 0, total = 0, offset = 0, address = 0;
    uint32_t length = 0, payload = 0, rkey = 0;

    static Header read(std::span<const uint8_t> message);
    bool header_only() const { return flags & 4; }
    // The segment's data as it crosses the wire.
    uint32_t wire_bytes() const;
    // Whether a child's accumulators are wider, and how long they are then.
    bool sums_wide() const;
    uint32_t wide_bytes() const;
    uint32_t element_bytes() const;
    // What members must agree on.
    bool agrees(const Header& o) const;
    bool same_segment(const Header& o) const { return operation == o.operation && offset == o.offset; }
    bool contributes(uint32_t rank, uint32_t world) const;
    bool contributes(const std::set<uint32_t>& ranks, uint32_t world) const;
    // What of `bytes` bytes of the segment's data a rank receives: begin and end. Of several ranks, from the
    // first's to the last's.
    std::pair<uint32_t, uint32_t> receives(uint32_t rank, uint32_t world, uint32_t bytes) const;
    std::pair<uint32_t, uint32_t> receives(const std::set<uint32_t>& ranks, uint32_t world,
                                           uint32_t bytes) const;
    uint32_t source(uint32_t world) const;
  };
  struct Connection;
  // The requests of one direction of a connection, by their distance from its first PSN.
  struct Stream {
    Connection* connection = nullptr;
    bool of_switch = false;
    uint32_t first_psn = 0;
    std::vector<Sent> sent;
    std::vector<uint32_t> message_at;  // the first packet of each segment's SEND, or of each result's segment
    std::vector<Header> headers;       // of those segments
    uint32_t arrived = 0;              // one past the highest that has arrived
    uint32_t results_arrived = 0;      // of the switch's: immediates
    uint32_t open = 0;                 // 0: between messages, else the opcode family of the one begun
    uint32_t mtu = 0;
    int64_t acked = -1;      // the highest acknowledged by the other side
    int64_t acked_at = 0;    // when that last moved on
    int64_t rnr_at = -1;     // the last RNR NAK, unless what it refused was acknowledged since
    int64_t rnr_taken = -1;  // what had been taken then
    int64_t marked = -1;     // of the host's: a packet that arrived with a mark, and once only
    bool over = false;       // ended by a NAK
    bool gap = false;        // what comes next may be missing until it is repeated
    uint32_t beyond = 0;     // one past the highest that was seen behind the gap
    int64_t down_at = INT64_MAX, up_at = -1;  // when it was cut off the last time
  };
  struct Connection {
    Address host, sw;
    uint32_t host_qpn = 0, switch_qpn = 0, host_comm_id = 0, switch_comm_id = 0;
    uint16_t rank = 0;
    bool child = false;        // a switch, which stands for several ranks
    bool has_ended = false;    // it has sent a terminal message itself
    std::set<uint32_t> ranks;  // that it stands for
    uint64_t nonce = 0;
    uint8_t stripe = 0;
    Stream from_host, from_switch;
    bool started = false, terminal = false;
    uint32_t group = 0;
    uint16_t window = 0, world = 0;
    uint32_t mtu = 0;
    uint32_t result_segment = 0, result_chunk = 0;  // the next result's
    int64_t goodbye_at = INT64_MAX, terminal_at = INT64_MAX;
    bool cnp = false;           // the switch has sent one
    bool mark_ignored = false;  // before it did, it had taken a marked packet
  };
  struct Key {
    Address src, dst;
    uint32_t number;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Group {
    std::vector<Connection*> members;
    int64_t terminal_at = INT64_MAX;
    std::string name;
  };

  void mad(int64_t at_ns, const WirePacket& p);
  void request(int64_t at_ns, const WirePacket& p, Stream& s);
  void fresh(int64_t at_ns, const WirePacket& p, Stream& s);
  void segment(int64_t at_ns, const WirePacket& p, Stream& s);
  void members(Connection& c, std::span<const uint8_t> message);
  void message(int64_t at_ns, const WirePacket& p, Connection& c);
  void result(int64_t at_ns, const WirePacket& p, Connection& c);
  bool all_there(int64_t at_ns, const Group& g, Connection& c, uint32_t chunk);
  void acknowledgement(int64_t at_ns, const WirePacket& p, bool from_switch);
  void cut(int64_t at_ns, const std::set<Address>& from, const std::set<Address>& to, bool down);
  bool is_cut(const Connection& c, bool of_switch) const;
  bool missing(Stream& s, uint32_t n);
  static int64_t taken_by(const WirePacket& p, const Stream& s);
  static std::string objection(const WirePacket& p, const Stream& s);
  void accuse(int64_t at_ns, const Stream& s, const std::string& what);
  Stream* find(const Address& src, const Address& dst, uint32_t qpn);
  static std::string name(const Connection& c);

  Violations& violations_;
  std::set<Address> eager_;
  bool trees_ = false;
  WireCounts counts_;
  std::map<Key, Connection*> by_comm_id_;  // host, switch, the host's communication ID: the newest
  std::map<Key, Stream*> streams_;         // by source, destination, destination QPN
  // By the switch's address, group ID and stripe.
  std::map<std::pair<Address, std::pair<uint32_t, uint8_t>>, Group> groups_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<uint64_t, uint32_t> mads_;
  std::map<std::pair<Address, Address>, uint32_t> cuts_;  // from, to: links that are down between them
};

}  // namespace millrace::sim::check
