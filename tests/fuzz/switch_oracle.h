// What must be true of everything that goes into and comes out of a switch, whoever sends it: told of each
// frame as it passes, it keeps its own books of connections and contributions. It knows no engine, only
// packets.
#pragma once

#include <map>
#include <vector>

#include "aggregation/protocol.h"
#include "roce/cm_message.h"
#include "roce/packet.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {

class SwitchOracle {
 public:
  SwitchOracle(const MacAddress& mac, uint16_t ports) : mac_(mac), ports_(ports) {}

  // A frame that is about to enter. It may yet be dropped: what is noted here is the most that can have come.
  void enters(std::span<uint8_t> frame) {
    roce::Packet p;
    if (roce::parse(frame, p) != roce::ParseVerdict::kOk || !roce::icrc_ok(p) || p.dst_mac != mac_) return;
    if (p.dest_qp() == kGsiQpn) {
      const auto m = roce::decode_cm(p.payload);
      if (const auto* req = m ? std::get_if<roce::ReqMessage>(&m->body) : nullptr)
        note_request(p, m->header, *req);
      return;
    }
    const auto link = links_.find(p.dest_qp().value);
    if (link != links_.end() && p.src_ip == link->second.ip && p.op->rc && p.op->request)
      note_contribution(link->second, p.psn(), p.op->send);
  }

  // `packet` is what was parsed of the frame, nullptr if it did not; `message` the MAD in it, if it holds
  // one.
  void leaves(std::span<const uint8_t> frame, uint16_t port, const roce::Packet* packet,
              const roce::CmMessage* message) {
    FUZZ_CHECK(port < ports_);
    FUZZ_CHECK(frame.size() >= sizeof(roce::EthernetHeader));
    // A frame that passes through need not be well formed; what we make ourselves must be.
    if (packet == nullptr || packet->src_mac != mac_ || !own(packet->src_ip)) return;
    const roce::Packet& p = *packet;
    FUZZ_CHECK(roce::icrc_ok(p));
    if (p.dest_qp() == kGsiQpn) {
      FUZZ_CHECK(message != nullptr, "a MAD of ours that nobody can read");
      if (const auto* rep = std::get_if<roce::RepMessage>(&message->body))
        note_reply(p, message->header, *rep);
      return;
    }
    FUZZ_CHECK(asked(p), "sent to a queue pair that never asked to join");
    if (p.op->rc && p.op->request) note_result(p);
  }

  void own_addresses(const std::vector<IpAddress>& all) { own_ = all; }
  size_t results() const { return results_; }

 private:
  struct Request {
    IpAddress ip;
    uint32_t comm_id;
    uint64_t transaction;
    Qpn qpn;
    Psn first_psn;
    aggregation::JoinRequest join;
  };
  struct Link {
    IpAddress ip;
    Qpn remote;
    uint32_t group = 0;
    aggregation::JoinRequest join;
    Psn in_next, out_next;
    std::map<uint32_t, bool> seen;  // PSNs that came, and whether one of them was a SEND
    uint64_t sends = 0;             // in the gapless row of PSNs from the first on: the most contributions
    uint64_t results = 0;
  };

  bool own(const IpAddress& a) const { return std::find(own_.begin(), own_.end(), a) != own_.end(); }

  void note_request(const roce::Packet& p, const roce::MadHeader& h, const roce::ReqMessage& m) {
    const auto join = aggregation::decode_join_request(std::span(m.private_data).subspan(36));
    if (!join) return;
    requests_.push_back({p.src_ip, m.local_comm_id, h.transaction_id, m.local_qpn, m.starting_psn, *join});
  }

  bool asked(const roce::Packet& p) const {
    return std::any_of(requests_.begin(), requests_.end(),
                       [&](const Request& r) { return r.ip == p.dst_ip && r.qpn == p.dest_qp(); });
  }

  void note_reply(const roce::Packet& p, const roce::MadHeader& h, const roce::RepMessage& m) {
    if (links_.contains(m.local_qpn.value)) return;  // a repeat
    const Request* request = nullptr;
    bool ambiguous = false;
    for (const Request& r : requests_) {
      if (r.ip != p.dst_ip || r.comm_id != m.remote_comm_id || r.transaction != h.transaction_id) continue;
      ambiguous |= request && (request->qpn != r.qpn || request->first_psn != r.first_psn ||
                               encode(request->join) != encode(r.join));
      request = &r;
    }
    FUZZ_CHECK(request != nullptr, "a REP without a REQ");
    const auto reply = aggregation::decode_join_reply(m.private_data);
    FUZZ_CHECK(reply);
    // Who may be two is not judged, nor is whoever shares a group with such a one.
    for (const auto& [qpn, l] : links_) {
      if (l.ip != request->ip || l.remote != request->qpn) continue;
      ambiguous = true;
      unsure_.push_back(l.group);
    }
    for (const auto& [ip, qpn] : early_) ambiguous |= ip == request->ip && qpn == request->qpn;
    if (ambiguous) unsure_.push_back(reply->group);
    Link l;
    l.ip = request->ip, l.remote = request->qpn;
    l.group = reply->group;
    l.join = request->join;
    l.in_next = m.starting_psn, l.out_next = request->first_psn;
    links_[m.local_qpn.value] = std::move(l);
  }

  static void note_contribution(Link& l, Psn psn, bool send) {
    const bool counted = psn.distance(l.in_next) < 0;
    bool& was_send = l.seen[psn.value()];
    if (counted && send && !was_send) l.sends++;
    was_send |= send;
    for (auto s = l.seen.find(l.in_next.value()); s != l.seen.end(); s = l.seen.find(l.in_next.value())) {
      l.sends += s->second;
      ++l.in_next;
    }
  }

  void note_result(const roce::Packet& p) {
    Link* link = nullptr;
    for (auto& [qpn, l] : links_)
      if (l.ip == p.dst_ip && l.remote == p.dest_qp()) link = &l;
    if (link == nullptr) {
      // For want of a frame its REP is still to come; where its PSNs began will not be known.
      early_.emplace_back(p.dst_ip, p.dest_qp());
      return;
    }
    if (std::find(unsure_.begin(), unsure_.end(), link->group) != unsure_.end()) return;
    const int32_t distance = p.psn().distance(link->out_next);
    FUZZ_CHECK(distance <= 0, "a PSN left out");
    if (distance < 0) return;  // a repeat
    ++link->out_next;
    const bool probe = p.op->write && !p.op->imm && p.payload.empty();
    if (!p.op->write || probe) return;
    // The n-th result is of the n-th chunk, and each chunk takes one packet of each member.
    link->results++;
    results_++;
    size_t members = 0;
    for (const auto& [qpn, l] : links_) {
      if (l.group != link->group || l.join.stripe != link->join.stripe) continue;
      members++;
      FUZZ_CHECK(l.sends >= link->results,
                 "a result lacks the contribution of rank " + std::to_string(l.join.rank));
    }
    FUZZ_CHECK(members == link->join.world, "a result of a group that is not complete");
  }

  MacAddress mac_;
  uint16_t ports_;
  std::vector<IpAddress> own_;
  std::vector<Request> requests_;
  std::map<uint32_t, Link> links_;  // by the switch's queue pair number
  std::vector<uint32_t> unsure_;    // groups
  std::vector<std::pair<IpAddress, Qpn>> early_;
  size_t results_ = 0;
};

}  // namespace millrace::fuzz
