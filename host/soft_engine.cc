#include "host/soft_engine.h"

#include <algorithm>
#include <cassert>
#include <deque>
#include <map>
#include <random>
#include <unordered_map>

#include "roce/queue_pair.h"

namespace millrace::host {

using aggregation::JoinRequest;
using roce::Reception;
using std::chrono::milliseconds;

namespace {

constexpr uint32_t kPacketsPerTurn = 64;
constexpr uint64_t kMessageId = roce::kProbeId - 1;  // of requests that are no segments
constexpr Time kResolveEvery = milliseconds(5);
// While no answer comes, the way is asked for again: a switch that was restarted may have another MAC
// address.
constexpr Time kResolveAgain = milliseconds(1000);

roce::CmConfig cm_config(const SoftConfig& c) {
  roce::CmConfig cm;
  cm.ca_guid = c.ca_guid;
  cm.seed = c.seed;
  cm.retries = 100000;  // connect_timeout ends an attempt, nothing else
  return cm;
}

}  // namespace

struct SoftEngine::Impl {
  enum class State : uint8_t { kResolving, kConnecting, kConnected, kClosing };
  struct Link {
    LinkId id = 0;
    State state = State::kResolving;
    ConnectRequest request;
    Time started = kNever, resolve_at{};  // from the first poll on: connect() is told no time
    Qpn qpn;
    Psn first_psn;  // where the switch shall begin
    roce::CmId cm{};
    std::unique_ptr<roce::QueuePair> qp;
    // Headers of segments in flight: a ring, reused once the SEND has completed.
    std::vector<aggregation::SegmentHeader> headers;
    uint64_t posted = 0;
    std::deque<std::vector<uint8_t>> messages;  // sent and not acknowledged
    std::vector<uint8_t> message;               // the SEND being received
    uint64_t duplicates = 0, gaps = 0, packets = 0, cnps = 0;
  };
  struct Region {
    uint8_t* base;
    size_t bytes;
  };

  Impl(const SoftConfig& c, FramePool& p, Resolver& r)
      : config(c), pool(p), resolver(r), cm(cm_config(c), p), random(c.seed) {
    next_qpn = static_cast<uint32_t>(random()) & 0xFFFFFF;
  }

  void receive(Frame frame, Time t, FrameList& out);
  void handle_request(Link& link, const roce::Packet& packet);
  bool write(Link& link, const roce::Packet& packet);
  void handle_cm_events(FrameList& out);
  void try_resolve(Link& link, FrameList& out);
  void resolve_again(Link& link);
  void poll(Time t, FrameList& out);
  void fail(Link& link, LinkError error, const std::string& text);
  void drop_link(Link& link, FrameList& out);
  std::string switch_name(const Link& link) const {
    return link.request.switch_address.to_string() + " port " + std::to_string(link.request.port);
  }

  SoftConfig config;
  FramePool& pool;
  Resolver& resolver;
  roce::CmAgent cm;
  roce::Crc32Combine combine;
  std::mt19937_64 random;
  std::map<LinkId, std::unique_ptr<Link>> links;  // in an order that is the same in every run
  std::unordered_map<uint32_t, Link*> by_qpn, by_cm;
  std::unordered_map<uint32_t, Region> regions;  // by rkey
  std::vector<Completion> completions;
  std::vector<LinkId> finished;  // links to destroy at the next poll
  LinkId next_link = 1;
  uint32_t next_qpn;
  Time now{};
  bool work = false;  // something may be ready to send
};

void SoftEngine::Impl::fail(Link& link, LinkError error, const std::string& text) {
  if (link.state == State::kClosing) return;
  link.state = State::kClosing;
  Completion c{Completion::Kind::kError};
  c.link = link.id;
  c.error = error;
  c.text = text;
  completions.push_back(std::move(c));
  finished.push_back(link.id);
}

bool SoftEngine::Impl::write(Link& link, const roce::Packet& p) {
  if (p.payload.empty()) return true;
  const roce::WritePlace place = link.qp->responder().place(p);
  const auto region = regions.find(place.rkey);
  if (region == regions.end()) return false;
  const auto base = reinterpret_cast<uintptr_t>(region->second.base);
  const uint64_t n = p.payload.size();
  if (place.address < base || place.address - base > region->second.bytes ||
      n > region->second.bytes - (place.address - base))
    return false;
  std::memcpy(region->second.base + (place.address - base), p.payload.data(), n);
  return true;
}

void SoftEngine::Impl::handle_request(Link& link, const roce::Packet& p) {
  roce::RcResponder& responder = link.qp->responder();
  if (p.op->write) {
    if (!write(link, p)) {
      responder.refuse(roce::kNakRemoteAccess);
      fail(link, LinkError::kBroken, "the switch wrote a result outside the memory it was offered");
      return;
    }
    responder.accept(p);
    if (p.op->imm) {
      Completion c{Completion::Kind::kResult};
      c.link = link.id;
      c.immediate = p.immediate->value();
      completions.push_back(std::move(c));
    }
    return;
  }
  if (p.op->starts()) link.message.clear();
  if (link.message.size() + p.payload.size() > aggregation::kMessageBytesMax) {
    responder.refuse(roce::kNakInvalidRequest);
    fail(link, LinkError::kBroken, "the switch sent a message longer than a receive buffer");
    return;
  }
  link.message.insert(link.message.end(), p.payload.begin(), p.payload.end());
  responder.accept(p);
  if (!p.op->ends()) return;
  Completion c{Completion::Kind::kMessage};
  c.link = link.id;
  c.message = std::move(link.message);
  completions.push_back(std::move(c));
}

void SoftEngine::Impl::receive(Frame frame, Time t, FrameList& out) {
  now = t;
  roce::Packet p;
  if (roce::parse(frame.bytes(), p) != roce::ParseVerdict::kOk || !roce::icrc_ok(p)) return;
  if (p.dest_qp() == kGsiQpn) {
    cm.receive(p, now, out);
    handle_cm_events(out);
    return;
  }
  const auto found = by_qpn.find(p.dest_qp().value);
  if (found == by_qpn.end()) return;
  Link& link = *found->second;
  if (!link.qp || link.state != State::kConnected) return;
  link.packets++;
  work = true;
  switch (link.qp->receive(p, now)) {
    case Reception::kNewRequest:
      if (p.ecn_ce() && link.qp->send_cnp(pool, now, out)) link.cnps++;
      handle_request(link, p);
      break;
    case Reception::kDuplicate:
      link.duplicates++;
      break;
    case Reception::kGap:
    case Reception::kGapQuiet:
      link.gaps++;
      break;
    case Reception::kInvalid:
      fail(link, LinkError::kBroken, "the switch sent a packet that breaks the transport's rules");
      break;
    case Reception::kResponse: {
      uint64_t segment;
      while (link.qp->requester().next_completion(segment)) {
        if (segment == roce::kProbeId) continue;
        if (segment == kMessageId) link.messages.pop_front();
        Completion c{segment == kMessageId ? Completion::Kind::kMessageSent : Completion::Kind::kSent};
        c.link = link.id;
        c.segment = segment;
        completions.push_back(std::move(c));
      }
      if (link.qp->requester().failed())
        fail(link, LinkError::kBroken,
             "the switch refused a segment (NAK syndrome " +
                 std::to_string(link.qp->requester().fail_syndrome()) + ")");
      break;
    }
    default:
      break;
  }
}

void SoftEngine::Impl::handle_cm_events(FrameList& out) {
  roce::CmEvent e;
  while (cm.next_event(e)) {
    const auto found = by_cm.find(e.id.value);
    if (found == by_cm.end()) continue;
    Link& link = *found->second;
    using Kind = roce::CmEvent::Kind;
    switch (e.kind) {
      case Kind::kReply: {
        if (link.state != State::kConnecting) break;
        const auto reply = aggregation::decode_join_reply(e.private_data);
        if (!reply || reply->version != aggregation::kProtocolVersion) {
          fail(link, LinkError::kBroken, switch_name(link) + " accepted, but does not speak this protocol");
          break;
        }
        roce::QueuePairConfig qc;
        qc.local = link.qpn;
        qc.wire.path = e.path;
        qc.wire.path.src_port = roce::flow_source_port(link.qpn, e.remote.qpn);
        qc.wire.remote_qpn = e.remote.qpn;
        qc.expected_psn = link.first_psn;
        qc.requester.first_psn = e.remote.first_psn;
        qc.requester.mtu = link.request.mtu;
        qc.requester.requests_max = static_cast<uint32_t>(link.headers.size()) + 1;
        qc.requester.retransmit_timeout = config.retransmit_timeout;
        qc.requester.dcqcn.line_rate = config.line_rate;
        qc.probe_after = config.probe_after;
        qc.peer_dead = config.peer_dead;
        link.qp = std::make_unique<roce::QueuePair>(qc, now);
        link.state = State::kConnected;
        cm.confirm(link.cm, now, out);
        Completion c{Completion::Kind::kConnected};
        c.link = link.id;
        c.join_reply = *reply;
        completions.push_back(std::move(c));
        break;
      }
      case Kind::kRejected: {
        by_cm.erase(found);
        const auto refusal = aggregation::decode_join_reject(e.private_data);
        const size_t before = completions.size();
        if (refusal && e.reason == roce::RejectReason::kConsumer) {
          fail(link, LinkError::kRefused, refusal->text);
          if (completions.size() > before) {
            completions.back().code = refusal->code;
            completions.back().mtu_wanted = refusal->mtu_code;
          }
        } else {
          fail(link, LinkError::kRefused,
               switch_name(link) + " rejected the connection (CM reason " +
                   std::to_string(static_cast<int>(e.reason)) + "): is a Millrace switch listening there?");
        }
        break;
      }
      case Kind::kUnreachable:
        by_cm.erase(found);
        fail(link, LinkError::kUnreachable,
             "no answer from the switch at " + switch_name(link) +
                 ": is millrace-switch running there, and does its port match?");
        break;
      case Kind::kDisconnected:
        by_cm.erase(found);
        fail(link, LinkError::kDisconnected, "the switch at " + switch_name(link) + " closed the connection");
        break;
      case Kind::kClosed:
        by_cm.erase(found);
        break;
      default:
        break;
    }
  }
}

void SoftEngine::Impl::try_resolve(Link& link, FrameList& out) {
  std::string why;
  std::optional<roce::Path> path = resolver.resolve(link.request.switch_address, why);
  if (!path) {
    if (now - link.started >= link.request.connect_timeout)
      fail(link, LinkError::kUnreachable,
           why.empty() ? "no way to " + link.request.switch_address.to_string() + " was found in time" : why);
    link.resolve_at = now + kResolveEvery;
    return;
  }
  // The switch answers in the class that it is asked in, so this holds for results, too.
  path->tos |= roce::kEct0;
  do next_qpn = (next_qpn + 1) & 0xFFFFFF;
  while (next_qpn < 16 || by_qpn.contains(next_qpn));
  link.qpn = Qpn{next_qpn};
  link.first_psn = Psn(config.first_psn ? *config.first_psn : static_cast<uint32_t>(random()));
  by_qpn[next_qpn] = &link;
  JoinRequest& join = link.request.join;
  join.mtu_code = roce::mtu_code(link.request.mtu);
  if (!link.request.secret.empty())
    join.tag = aggregation::join_tag(join, link.request.secret, path->src_ip, path->dst_ip, link.qpn.value);
  roce::CmQueuePair local;
  local.qpn = link.qpn;
  local.first_psn = link.first_psn;
  local.mtu_code = join.mtu_code;
  const auto data = aggregation::encode(join);
  const auto port = static_cast<uint16_t>(0xC000 | (random() & 0x3FFF));
  path->src_port = roce::flow_source_port(kGsiQpn, kGsiQpn);
  link.cm = cm.connect(*path, roce::tcp_service_id(link.request.port), local, port, data, now, out);
  by_cm[link.cm.value] = &link;
  link.state = State::kConnecting;
  link.resolve_at = now + kResolveAgain;
}

void SoftEngine::Impl::resolve_again(Link& link) {
  std::string why;
  if (const auto path = resolver.resolve(link.request.switch_address, why))
    cm.redirect(link.cm, path->dst_mac);
  link.resolve_at = now + kResolveAgain;
}

// Forgets the queue pair at once; a connection that exists is taken down by the CM in the background.
void SoftEngine::Impl::drop_link(Link& link, FrameList& out) {
  if (link.qpn.value != 0) by_qpn.erase(link.qpn.value);
  const auto found = by_cm.find(link.cm.value);
  if (link.cm.value != 0 && found != by_cm.end() && found->second == &link) {
    by_cm.erase(found);
    cm.disconnect(link.cm, now, out);
  }
  links.erase(link.id);
}

void SoftEngine::Impl::poll(Time t, FrameList& out) {
  now = t;
  if (now >= cm.next_deadline()) cm.poll(now, out);
  handle_cm_events(out);
  work = false;
  for (auto& [id, link] : links) {
    if (link->started == kNever) link->started = now;
    if (link->state == State::kResolving && now >= link->resolve_at) {
      try_resolve(*link, out);
    } else if (link->state == State::kConnecting && now - link->started >= link->request.connect_timeout) {
      fail(*link, LinkError::kUnreachable,
           "no answer from the switch at " + switch_name(*link) + " within " +
               std::to_string(
                   std::chrono::duration_cast<milliseconds>(link->request.connect_timeout).count()) +
               " ms: is millrace-switch running there, and does its port match?");
    } else if (link->state == State::kConnecting && now >= link->resolve_at) {
      resolve_again(*link);
    } else if (link->state == State::kConnected) {
      roce::QueuePair& qp = *link->qp;
      if (now >= qp.next_deadline()) {
        qp.tick(now);
        if (qp.dead(now)) {
          fail(
              *link, LinkError::kUnreachable,
              "the switch at " + switch_name(*link) + " has not acknowledged anything for " +
                  std::to_string(std::chrono::duration_cast<std::chrono::seconds>(config.peer_dead).count()) +
                  " s: it is down, or the network to it is");
          continue;
        }
      }
      work |= qp.emit(pool, combine, kPacketsPerTurn, now, out);
    }
    if (link->state == State::kClosing && link->qp && link->qp->wants_to_emit())
      link->qp->emit(pool, combine, 0, now, out);  // a last NAK
  }
  for (LinkId id : finished) {
    const auto found = links.find(id);
    if (found != links.end()) drop_link(*found->second, out);
  }
  finished.clear();
}

SoftEngine::SoftEngine(const SoftConfig& config, FramePool& pool, Resolver& resolver)
    : impl_(std::make_unique<Impl>(config, pool, resolver)) {}
SoftEngine::~SoftEngine() = default;

void SoftEngine::receive(Frame frame, Time now, FrameList& out) {
  impl_->receive(std::move(frame), now, out);
}
void SoftEngine::poll(Time now, FrameList& out) { impl_->poll(now, out); }

Time SoftEngine::next_deadline() const {
  if (impl_->work || !impl_->finished.empty()) return impl_->now;
  Time t = impl_->cm.next_deadline();
  for (const auto& [id, link] : impl_->links) {
    if (link->state == Impl::State::kResolving) t = std::min(t, link->resolve_at);
    if (link->state == Impl::State::kConnecting)
      t = std::min({t, link->resolve_at, link->started + link->request.connect_timeout});
    if (link->state == Impl::State::kConnected) t = std::min(t, link->qp->next_deadline());
  }
  return t;
}

bool SoftEngine::idle() const { return impl_->links.empty() && impl_->cm.connections() == 0; }

LinkId SoftEngine::connect(const ConnectRequest& request) {
  auto link = std::make_unique<Impl::Link>();
  link->id = impl_->next_link++;
  link->request = request;
  // Send queue 2 × window + 2 segments.
  link->headers.resize(2u * request.window + 2);
  const LinkId id = link->id;
  impl_->links[id] = std::move(link);
  impl_->work = true;
  return id;
}

MemoryRegion SoftEngine::register_memory(const void* address, size_t bytes, Access access) {
  if (access == Access::kSend) return {};  // sends borrow from wherever the caller's memory is
  uint32_t rkey;
  do rkey = static_cast<uint32_t>(impl_->random());
  while (rkey == 0 || impl_->regions.contains(rkey));
  impl_->regions[rkey] = {static_cast<uint8_t*>(const_cast<void*>(address)), bytes};
  return {.id = rkey, .lkey = 0, .rkey = rkey};
}

void SoftEngine::deregister_memory(const MemoryRegion& region) { impl_->regions.erase(region.id); }

bool SoftEngine::post_segment(LinkId id, uint64_t segment, const aggregation::SegmentHeader& header,
                              std::span<const uint8_t> payload, const MemoryRegion&) {
  const auto found = impl_->links.find(id);
  if (found == impl_->links.end() || found->second->state != Impl::State::kConnected) return false;
  Impl::Link& link = *found->second;
  // One request of room is kept for a probe.
  if (link.qp->requester().room() <= 1) return false;
  aggregation::SegmentHeader& kept = link.headers[link.posted++ % link.headers.size()];
  kept = header;
  roce::WorkRequest request;
  request.id = segment;
  request.parts[0] = {reinterpret_cast<const uint8_t*>(&kept), sizeof(kept)};
  request.parts[1] = payload;
  request.borrow = true;
  impl_->work = true;
  return link.qp->requester().post(std::move(request));
}

bool SoftEngine::post_message(LinkId id, std::span<const uint8_t> message) {
  const auto found = impl_->links.find(id);
  if (found == impl_->links.end() || found->second->state != Impl::State::kConnected) return false;
  Impl::Link& link = *found->second;
  if (link.qp->requester().room() <= 1) return false;
  roce::WorkRequest request;
  request.id = kMessageId;
  request.parts[0] = link.messages.emplace_back(message.begin(), message.end());
  impl_->work = true;
  return link.qp->requester().post(std::move(request));
}

void SoftEngine::close(LinkId id) {
  const auto found = impl_->links.find(id);
  if (found == impl_->links.end() || found->second->state == Impl::State::kClosing) return;
  found->second->state = Impl::State::kClosing;
  Completion c{Completion::Kind::kClosed};
  c.link = id;
  impl_->completions.push_back(std::move(c));
  impl_->finished.push_back(id);
}

void SoftEngine::poll(std::vector<Completion>& completions) {
  completions.insert(completions.end(), std::make_move_iterator(impl_->completions.begin()),
                     std::make_move_iterator(impl_->completions.end()));
  impl_->completions.clear();
}

LinkStats SoftEngine::stats(LinkId id) const {
  LinkStats s;
  const auto found = impl_->links.find(id);
  if (found == impl_->links.end()) return s;
  const Impl::Link& link = *found->second;
  s.packets_received = link.packets;
  s.duplicates_received = link.duplicates;
  s.out_of_sequence = link.gaps;
  if (!link.qp) return s;
  const roce::RequesterCounters& r = link.qp->requester().counters();
  s.packets_sent = r.packets_sent + link.qp->acks_sent() + link.cnps;
  s.retransmitted = r.retransmitted;
  s.timeouts = r.timeouts;
  s.naks_received = r.naks;
  s.rnr_naks_received = r.rnr_naks;
  s.cnps_received = r.cnps;
  s.cnps_sent = link.cnps;
  return s;
}

}  // namespace millrace::host
