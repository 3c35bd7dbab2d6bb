#include "tools/sim/swarm.h"

#include <algorithm>

#include "tools/sim/swarm_run.h"

namespace millrace::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// Whatever runs when all is healed ends within this: a host's join time-out, an operation's and the detection
// of a death, one after the other.
constexpr Time kSettleMax = seconds(20 + 30 + 10);
// The last round starts afresh, with nothing wrong.
constexpr Time kFinalMax = seconds(20);
// Until the CM's records have rested.
constexpr Time kRestMax = seconds(45);

}  // namespace

std::optional<check::Address> Swarm::address(std::span<const uint8_t> f, bool source) {
  check::Address a{};
  if (f.size() >= 34 && f[12] == 0x08 && f[13] == 0x00) {
    a[10] = a[11] = 0xFF;
    std::copy_n(f.begin() + (source ? 26 : 30), 4, a.begin() + 12);
    return a;
  }
  if (f.size() >= 54 && f[12] == 0x86 && f[13] == 0xDD) {
    std::copy_n(f.begin() + (source ? 22 : 38), 16, a.begin());
    return a;
  }
  return std::nullopt;
}

// All of a frame but addresses on the process's heap, where a communicator keeps segments that it sends in
// another form: those differ from run to run, and with them the ICRC.
void Swarm::hash_frame(std::span<const uint8_t> frame) {
  constexpr uint64_t kArenaEnd = 0x4000'0000'0000;  // what switches count as addresses is far below, too
  check::WirePacket p;
  const char* why;
  const uint8_t* at = nullptr;
  if (check::read_packet(frame, false, p, why) == check::WireKind::kRoce && p.request() && p.starts()) {
    const bool segment = p.send() && p.payload.size() >= 64 && (p.payload[3] & 0x80) == 0;
    at = segment ? p.payload.data() + 48 : p.send() ? nullptr : p.above_psn.data();
  }
  if (at == nullptr || check::be32(at) < kArenaEnd >> 32) return judges_.trace.bytes(frame);
  const auto before = static_cast<size_t>(at - frame.data()), behind = before + 8;
  judges_.trace.bytes(frame.first(before));
  judges_.trace.bytes(frame.subspan(behind, frame.size() - behind - 4));
}

void Swarm::sent(Time at, uint32_t node, uint32_t link, std::span<const uint8_t> frame, Fate fate) {
  judges_.trace.number(static_cast<uint64_t>(at.count()));
  judges_.trace.number(uint64_t{link} << 8 | static_cast<uint64_t>(fate));
  hash_frame(frame);
  if (dump_) {
    static constexpr const char* fates[] = {"", " LOST", " TAIL DROP", " LINK DOWN"};
    dump_(std::to_string(at.count()) + " " + fabric_.link_name(link) + ": " + check::describe_packet(frame) +
          fates[static_cast<size_t>(fate)]);
  }
  const auto source = address(frame, true);
  if (!source || lender_nodes_.contains(node)) return;
  const auto sink = address(frame, false);
  if (!switches_.contains(node)) {
    if (!of_switches_.contains(*sink)) return;  // passes by
    if (plan_.has[static_cast<size_t>(FaultKind::kLateCopy)] && !healed_) copy_later(node, frame);
    return wire_.sent(at.count(), frame, false);
  }
  // A new boot sends its announcements before it looks at its links.
  if (down_.contains(link) && restarting_ != node)
    judges_.violations.add("books", at.count(), "a switch sends to a link that it knows to be down");
  if (own_[node].contains(*source))
    return of_lenders_.contains(*sink) ? wire_.passed(at.count(), frame)
                                       : wire_.sent(at.count(), frame, true);
  // What is for the switch itself, but for the MAC address that it had before, is flooded; that is not
  // judged.
  if (!own_[node].contains(*sink)) passage_.left(at.count(), node, link, frame);
  // What was corrupted on its way is passed on as it is; only what came intact must leave intact.
  if (plan_.wire.corrupt == 0 || at > intact_from_) wire_.passed(at.count(), frame);
}

// A copy of some REQs comes again, long after.
void Swarm::copy_later(uint32_t node, std::span<const uint8_t> frame) {
  check::WirePacket p;
  const char* why;
  if (check::read_packet(frame, false, p, why) != check::WireKind::kRoce || !p.mad() ||
      check::be16(p.payload.data() + 16) != 0x10 || copies_left_ == 0 || !late_.one_in(3))
    return;
  copies_left_--;
  const Time when =
      fabric_.now() + std::chrono::microseconds(late_.between(10, late_.one_in(2) ? 20000 : 8000000));
  fabric_.network().at(when, [this, node, bytes = std::vector<uint8_t>(frame.begin(), frame.end())] {
    if (healed_) return;
    injected_[static_cast<size_t>(FaultKind::kLateCopy)]++;
    for (uint16_t h = 0; h < fabric_.hosts(); h++)
      if (fabric_.host(h).id() == node) fabric_.network().send(fabric_.host(h), 0, bytes);
  });
}

void Swarm::arrived(Time at, uint32_t node, uint32_t, std::span<const uint8_t> frame) {
  const auto to = address(frame, false);
  if (!to) return;
  if (switches_.contains(node) && !own_[node].contains(*to)) return passage_.came(node, frame);
  wire_.arrived(at.count(), frame);
}

void Swarm::occupancy(uint16_t s, uint32_t held) {
  const aggregation::EngineConfig& e = fabric_.at(s).config().engine;
  const uint64_t chunks = (e.segment_bytes + 64) / e.mtu;
  auto frames = [&](uint64_t stripes) { return 2 * uint64_t{e.window} * chunks * stripes; };
  // The router may hold some for neighbours that it has asked for.
  uint64_t most = fabric_.at(s).pipeline().router() != nullptr ? 64 : 0;
  if (const auto* buffers = fabric_.at(s).pipeline().buffers()) {
    check_spillway(s);
    // Each may keep the payload alive that it shares.
    most += 2 * uint64_t{buffers->frames_queued()};
    if (const auto* spillway = buffers->spillway()) most += spillway->counters().resident.packets;
    // A WRITE under way keeps its packet, a READ the frame that it fills.
    most += fabric_.lenders() * uint64_t{plan_.fabric.remote.writes_max + plan_.fabric.remote.reads_max};
  }
  if (held <= most) return;
  const auto& engine = fabric_.at(s).pipeline().engine();
  for (const auto& g : engine.groups(fabric_.network().clock_of(fabric_.at(s)))) {
    most += frames(g.stripes);
    for (const GroupPlan& p : plan_.groups)
      if (p.deterministic() && g.key.starts_with("0" + std::to_string(p.number + 1)))
        most += uint64_t{e.window} * chunks * g.stripes * g.world;
  }
  books_.held(now_ns(), "switch " + std::to_string(s), held, most);
  books_.reserved(now_ns(), "switch " + std::to_string(s), engine.memory_reserved(), e.memory_limit);
}

// Whoever is on the host may be lost to the others, or lose the switch.
void Swarm::excuse_host(uint16_t host) {
  for (const GroupPlan& g : plan_.groups)
    for (uint32_t r = 0; r < g.hosts.size(); r++)
      if (g.hosts[r] == host && !g.refused)
        judges_.outcome.excuse(g.number, {check::kMemberLost, check::kUnreachable, check::kLate}, {r});
}

// The same; nor does it reach a switch that would refuse it.
void Swarm::excuse_cut_off(uint16_t host) {
  excuse_host(host);
  for (const GroupPlan& g : plan_.groups)
    if (g.refused && g.hosts[0] == host) judges_.outcome.excuse(g.number, {check::kUnreachable}, {});
}

// A NIC of the model may have used up its retries after a quarter of a second without an answer.
void Swarm::excuse_impatient(Time without_answer, std::optional<uint16_t> host) {
  if (without_answer < milliseconds(200)) return;
  for (const uint16_t h : plan_.modelled)
    if (!host || *host == h) excuse_host(h);
}

// The rank that a fault is about, and those whose hub it ends: what comes of it may be told of all of them.
std::vector<uint32_t> Swarm::together_with(const Fault& f) const {
  const GroupPlan& g = plan_.groups[f.target];
  std::vector<uint32_t> ranks{f.rank};
  for (uint32_t r = 0; r < g.hosts.size() && g.combine; r++)
    if (r != f.rank && g.hosts[r] == g.hosts[f.rank]) ranks.push_back(r);
  return ranks;
}

void Swarm::excuse_switch(uint16_t s) {
  for (const GroupPlan& g : plan_.groups) {
    // A spine's or another leaf's death cuts members off as well.
    if (g.where != s && !fabric_.routed()) continue;
    judges_.outcome.excuse(g.number, {check::kMemberLost, check::kUnreachable, check::kLate}, {});
    // The model's connection manager gives up after some seconds, and so may the switch's when it is back.
    if (!plan_.modelled.empty()) judges_.outcome.excuse(g.number, {check::kRefused}, {});
  }
}

void Swarm::crash(uint16_t host, Time until) {
  if (fabric_.host(host).crashed()) return;
  excuse_host(host);
  // A router that still asks for its neighbours may give the last packets of the dead on a moment later: a
  // switch then takes the process for alive that the new one wants to replace (seed 20654).
  if (fabric_.routed() && fabric_.now() - begin_ < milliseconds(500))
    for (const GroupPlan& g : plan_.groups)
      for (uint32_t r = 0; r < g.hosts.size(); r++)
        if (g.hosts[r] == host) judges_.outcome.excuse(g.number, {check::kRefused}, {r});
  crashed_at_[host] = fabric_.network().now();
  fabric_.host(host).crash();
  each([&](GroupRun&, Member& m) {
    if (m.host() == host) m.crashed();
  });
  fabric_.network().at(until, [this, host] { restart(host); });
}

void Swarm::restart(uint16_t host) {
  if (!fabric_.host(host).crashed()) return;
  fabric_.host(host).restart(fabric_.draw());
  fabric_.network().touch(fabric_.host(host));
  if (!healed_) stand_by();
}

void Swarm::stand_by() {
  each([&](GroupRun& g, Member& m) {
    if (!m.behind() || g.plan->refused || fabric_.host(m.host()).crashed()) return;
    const auto most = static_cast<uint64_t>(g.plan->rejoin_after_max.count());
    m.join_at(fabric_.now() + Time(static_cast<int64_t>(fabric_.random().below(most + 1))));
  });
}

void Swarm::inject(const Fault& f) {
  Network& n = fabric_.network();
  injected_[static_cast<size_t>(f.kind)]++;
  const auto host = static_cast<uint16_t>(f.target), sw = host;
  const Time until = n.now() + f.duration;
  auto member = [&]() -> Member& { return *groups_[f.target]->members[f.rank]; };
  switch (f.kind) {
    case FaultKind::kCrash:
      return crash(host, until);
    case FaultKind::kRankCrash:
      if (!member().die()) injected_[static_cast<size_t>(f.kind)]--;
      return judges_.outcome.excuse(f.target, {check::kMemberLost, check::kLate}, together_with(f));
    case FaultKind::kSwitchRestart:
    case FaultKind::kSwitchNewMac:
      excuse_switch(sw);
      switch_back_at_ = n.now();
      restarting_ = fabric_.at(sw).id();
      fabric_.restart_switch(sw, f.kind == FaultKind::kSwitchNewMac);
      restarting_.reset();
      return tell_restarted(sw);
    case FaultKind::kLenderDeath:
    case FaultKind::kLenderEnd:
      return lender_fault(f);
    case FaultKind::kLinkDown:
      return link_fault(f);
    case FaultKind::kPause:
      return pause(host, f.duration);
    case FaultKind::kOutage:
      excuse_cut_off(host);
      [[fallthrough]];
    case FaultKind::kFlap:
    case FaultKind::kTrunkFlap: {
      excuse_impatient(f.duration, f.kind == FaultKind::kTrunkFlap ? std::nullopt : std::optional(host));
      const uint32_t link =
          f.kind == FaultKind::kTrunkFlap ? 2 * (fabric_.hosts() + f.target) : fabric_.uplink(host);
      n.set_down(link, true), n.set_down(link + 1, true);
      return n.at(until, [&n, link] { n.set_down(link, false), n.set_down(link + 1, false); });
    }
    case FaultKind::kLongStall:
    case FaultKind::kLongClockStop:
      excuse_host(host);
      [[fallthrough]];
    case FaultKind::kStall:
    case FaultKind::kClockStop:
      return n.stall(fabric_.host(host), until,
                     f.kind == FaultKind::kClockStop || f.kind == FaultKind::kLongClockStop);
    case FaultKind::kLongSwitchStall:
      excuse_switch(sw);
      switch_back_at_ = std::max(switch_back_at_, until);
      awake_from_[sw] = std::max(awake_from_[sw], until);
      return n.stall(fabric_.at(sw), until, f.rank == 1);
    case FaultKind::kSwitchStall:
    case FaultKind::kSwitchClockStop:
      excuse_impatient(f.duration);
      awake_from_[sw] = std::max(awake_from_[sw], until);
      return n.stall(fabric_.at(sw), until, f.kind == FaultKind::kSwitchClockStop);
    case FaultKind::kAbort: {
      judges_.outcome.excuse(f.target, {check::kAborted}, {});
      // Of a tree, where its first rank is.
      const GroupPlan& g = plan_.groups[f.target];
      return fabric_.at(g.tree ? fabric_.leaf_of(g.hosts[0]) : g.where)
          .act([&](switching::Pipeline& p, Time now, FrameList& out) {
            for (const auto& there : p.engine().groups(now))
              if (there.key.starts_with("0" + std::to_string(f.target + 1)))
                p.abort_group(there.id, "drained", now, out);
          });
    }
    case FaultKind::kLocalAbort:
    case FaultKind::kLeave:
      judges_.outcome.excuse(f.target, {check::kMemberLost, check::kAborted, check::kLate}, together_with(f));
      return f.kind == FaultKind::kLeave ? member().leave() : member().abort();
    case FaultKind::kMismatch:
      judges_.outcome.excuse(f.target, {check::kMismatch}, {f.rank});
      return member().disagree();
    case FaultKind::kLate:
      judges_.outcome.excuse(f.target, {check::kLate}, {f.rank});
      [[fallthrough]];
    case FaultKind::kStraggler:
      return member().delay(1, f.duration);
    default:
      return;
  }
}

void Swarm::safety() {
  Network& n = fabric_.network();
  meet_lenders();
  for (uint32_t l = 0; l < n.links(); l++) n.faults(l) = plan_.wire;
  for (const Fault& f : plan_.faults) n.at(begin_ + f.at, [this, &f] { inject(f); });
  for (uint32_t i = 0; i < plan_.streams.size(); i++)
    n.at(begin_ + plan_.streams[i].at, [this, i] { send_stream(plan_.streams[i], i, 0); });
  for (auto& g : groups_) {
    if (g->plan->refused) judges_.outcome.excuse(g->plan->number, {check::kRefused}, {});
    for (auto& m : g->members) m->join_at(begin_ + g->plan->join_at[m->rank()]);
  }
  // Until the last fault is over and, unless that takes long, all is done.
  const Time heal_at = begin_ + plan_.heal_at, end = heal_at + milliseconds(300);
  while (n.now() < end) {
    n.run([&] { return settled(); },
          std::min(milliseconds(5), milliseconds((end - n.now()).count() / 1000000 + 1)));
    stand_by();
    if (settled() && n.now() >= heal_at) break;
    if (settled()) n.run_for(std::min<Time>(milliseconds(5), end - n.now()));
  }
}

void Swarm::heal() {
  healed_ = true;
  intact_from_ = fabric_.now() + seconds(1);  // as long as a spillway may keep something
  Network& n = fabric_.network();
  for (uint32_t l = 0; l < n.links(); l++) {
    n.faults(l) = LinkFaults{};
    n.set_down(l, false);
  }
  for (auto& [where, cut] : cuts_) {
    cut.times = 0;
    tell_link(where.first, where.second);
  }
  for (uint16_t i = 0; i < fabric_.lenders(); i++)
    if (fabric_.lender(i).gone()) fabric_.lender(i).restart(late_.next());
  for (auto& g : groups_) g->generations_max = 0;
  each([](GroupRun&, Member& m) { m.heal(); });
  for (uint16_t h = 0; h < fabric_.hosts(); h++) restart(h);
  for (const uint16_t h : plan_.eager) fabric_.host(h).set_eager(false);
  // Who has missed that a switch has another MAC address learns of it. The soft transport asks while it
  // connects; librdmacm does not, nor does the model.
  for (const uint16_t h : plan_.modelled) fabric_.host(h).stack().forget();
}

void Swarm::liveness() {
  Network& n = fabric_.network();
  const Time from = n.now();
  if (!n.run([&] { return settled(); }, kSettleMax)) {
    each([&](GroupRun& g, Member& m) {
      if (!m.over())
        judges_.violations.add("liveness", now_ns(),
                               "group " + std::to_string(g.plan->number) + " rank " +
                                   std::to_string(m.rank()) + " has not come to an end within " +
                                   std::to_string((n.now() - from).count() / 1000000) + " ms of healing");
    });
  }
  for (auto& g : groups_)
    if (g->not_refused)
      judges_.violations.add("outcome", now_ns(),
                             "group " + std::to_string(g->plan->number) + " was not refused");
}

void Swarm::final_round() {
  if (!plan_.final_round || judges_.violations.count() != 0) return;
  Network& n = fabric_.network();
  n.run_for(plan_.rest_before_final);
  judges_.outcome.healed();
  // A dead process holds its rank until the switch has given it up: who is called for meanwhile may still
  // lose it.
  for (const auto& [host, at] : crashed_at_)
    if (n.now() - at < plan_.fabric.engine.peer_dead + seconds(2)) excuse_host(host);
  // So may a switch hold what its children, and hosts that have given it up meanwhile, have forgotten.
  if (switch_back_at_ >= Time{} && n.now() - switch_back_at_ < plan_.fabric.engine.peer_dead + seconds(2))
    for (const GroupPlan& g : plan_.groups)
      if (g.tree || !plan_.modelled.empty())
        judges_.outcome.excuse(g.number, {check::kMemberLost, check::kUnreachable, check::kLate}, {});
  for (auto& g : groups_) {
    if (g->plan->refused) continue;
    g->generation++;
    for (auto& m : g->members)
      m->join_at(n.now() + Time(static_cast<int64_t>(fabric_.random().below(1000000))));
  }
  if (!n.run([&] { return settled(); }, kFinalMax))
    judges_.violations.add("liveness", now_ns(), "the last round, without faults, did not come to its end");
}

void Swarm::epilogue() {
  Network& n = fabric_.network();
  auto over = [&] {
    for (uint16_t s = 0; s < fabric_.switches(); s++) {
      const auto& e = fabric_.at(s).pipeline().engine();
      if (e.queue_pairs() != 0 || e.memory_reserved() != 0 || e.cm_records() != 0) return false;
    }
    for (uint16_t h = 0; h < fabric_.hosts(); h++)
      if (!fabric_.host(h).nic().idle() || fabric_.host(h).combines()) return false;
    return true;
  };
  n.run(over, kRestMax);
  end_leases();
  for (uint16_t s = 0; s < fabric_.switches(); s++) {
    const std::string who = "switch " + std::to_string(s) + " ";
    SwitchNode& sw = fabric_.at(s);
    const auto& e = sw.pipeline().engine();
    books_.left(now_ns(), who + "groups", e.groups(n.now()).size());
    books_.left(now_ns(), who + "queue pairs", e.queue_pairs());
    books_.left(now_ns(), who + "memory", e.memory_reserved());
    books_.left(now_ns(), who + "CM records", e.cm_records());
    books_.left(now_ns(), who + "frames", sw.pool().in_use());
    if (const auto* buffers = sw.pipeline().buffers()) {
      books_.left(now_ns(), who + "bytes of the shared buffer", buffers->buffer().used());
      const auto* spillway = buffers->spillway();
      if (spillway == nullptr) continue;
      books_.left(now_ns(), who + "spilled packets", spillway->counters().resident.packets);
      books_.left(now_ns(), who + "keys of the spillway", spillway->keys_count());
      books_.left(now_ns(), who + "bytes in the spillway's store", spillway->store().used());
    }
  }
  for (uint16_t h = 0; h < fabric_.hosts(); h++)
    books_.left(now_ns(), "host " + std::to_string(h) + " connections", !fabric_.host(h).nic().idle());
  for (uint16_t h = 0; h < fabric_.hosts(); h++)
    books_.left(now_ns(), "host " + std::to_string(h) + " hubs", fabric_.host(h).combines());
  judges_.memory.sweep(now_ns());
  judges_.outcome.finish(now_ns());
  // What a switch's queues held when it began anew is gone, and may have been a last message.
  const bool emptied = plan_.fabric.buffers && (plan_.has[static_cast<size_t>(FaultKind::kSwitchRestart)] ||
                                                plan_.has[static_cast<size_t>(FaultKind::kSwitchNewMac)]);
  wire_.finish(now_ns(), plan_.has[static_cast<size_t>(FaultKind::kFewFrames)] || emptied,
               plan_.has[static_cast<size_t>(FaultKind::kMarking)] || plan_.fabric.buffers);
}

RunResult Swarm::result() {
  RunResult r;
  Network& n = fabric_.network();
  SwarmStats& s = r.stats;
  r.seed = plan_.seed;
  r.trace = judges_.trace.value();
  r.violations = judges_.violations.count();
  r.texts = judges_.violations.texts();
  s.runs = 1;
  s.operations_ok = judges_.outcome.operations_ok();
  s.operations_failed = judges_.outcome.operations_failed();
  s.injected = injected_;
  s.exact = judges_.exact;
  auto wire = [&](FaultKind k) -> uint64_t& { return s.injected[static_cast<size_t>(k)]; };
  for (uint32_t l = 0; l < n.links(); l++) {
    const LinkStats& x = n.stats(l);
    wire(FaultKind::kLoss) += x.lost, wire(FaultKind::kDuplication) += x.duplicated;
    wire(FaultKind::kReordering) += x.reordered, wire(FaultKind::kCorruption) += x.corrupted;
    wire(FaultKind::kJitter) += x.jittered, wire(FaultKind::kMarking) += x.marked;
    wire(FaultKind::kTailDrop) += x.tail_drops;
  }
  for (const GroupPlan& g : plan_.groups)
    if (g.refused) wire(g.world == 20000 ? FaultKind::kQuota : FaultKind::kSecret)++;
  for (uint16_t i = 0; i < fabric_.switches(); i++) {
    SwitchNode& sw = fabric_.at(i);
    add(s.engine, sw.past());
    add(s.engine, sw.pipeline().engine().counters());
    add(s.cm, sw.past_cm());
    add(s.cm, sw.pipeline().engine().cm_counters());
    s.rx_drops += sw.rx_drops();
    if (const auto* buffers = sw.pipeline().buffers()) {
      for (uint16_t p = 0; p < sw.config().ports; p++)
        for (uint8_t q = 0; q < buffering::kClasses; q++)
          for (const auto& d : buffers->counters(p, q).drops) wire(FaultKind::kBuffers) += d.packets;
      if (const auto* spillway = buffers->spillway()) {
        const buffering::SpillCounters c = spillway->counters();
        wire(FaultKind::kBuffers) += c.refused_in_all().packets + c.lost_in_all().packets;
        wire(FaultKind::kSpilled) += c.drained.packets;
      }
    }
    s.spill.add(sw.spill_stats());
  }
  wire(FaultKind::kRerouted) += s.spill.rerouted;
  wire(FaultKind::kStoreLost) += s.spill.store_lost;
  wire(FaultKind::kEager) += s.engine.window_breaches;
  wire(FaultKind::kFewFrames) += s.rx_drops + s.engine.results_not_built;
  for (size_t k = 0; k < kFaultKinds; k++) s.seeds_with[k] = s.injected[k] > 0;
  s.wire = wire_.counts();
  s.ring_drops = n.ring_drops();
  s.frames_peak = books_.frames_peak();
  for (const auto& g : groups_) s.formed_again += g->formed_again;
  s.frames = {n.frames()};
  uint32_t kinds = 0;
  for (const uint64_t v : s.seeds_with) kinds += v != 0;
  s.kinds = {kinds};
  s.virtual_time = n.now();
  return r;
}

void SwarmStats::add(const SwarmStats& o) {
  runs += o.runs, operations_ok += o.operations_ok, operations_failed += o.operations_failed;
  formed_again += o.formed_again;
  for (size_t k = 0; k < kFaultKinds; k++) seeds_with[k] += o.seeds_with[k], injected[k] += o.injected[k];
  exact.add(o.exact);
  sim::add(engine, o.engine);
  sim::add(cm, o.cm);
  spill.add(o.spill);
  for (int i = 0; i < 2; i++) {
    wire.packets[i] += o.wire.packets[i], wire.acks[i] += o.wire.acks[i], wire.naks[i] += o.wire.naks[i];
    wire.rnr_naks[i] += o.wire.rnr_naks[i], wire.repeats[i] += o.wire.repeats[i],
        wire.cnps[i] += o.wire.cnps[i];
    wire.fatal_naks[i] += o.wire.fatal_naks[i], wire.probes[i] += o.wire.probes[i];
  }
  wire.req += o.wire.req, wire.mra += o.wire.mra, wire.rej += o.wire.rej, wire.rep += o.wire.rep;
  wire.rtu += o.wire.rtu, wire.dreq += o.wire.dreq, wire.drep += o.wire.drep;
  wire.mad_repeats += o.wire.mad_repeats, wire.starts += o.wire.starts, wire.terminals += o.wire.terminals;
  wire.segments += o.wire.segments, wire.results += o.wire.results;
  rx_drops += o.rx_drops, ring_drops += o.ring_drops;
  frames_peak = std::max(frames_peak, o.frames_peak);
  frames.insert(frames.end(), o.frames.begin(), o.frames.end());
  kinds.insert(kinds.end(), o.kinds.begin(), o.kinds.end());
  virtual_time += o.virtual_time;
}

RunResult run_plan(const Plan& plan, Arena& arena, const Dump& dump) {
  arena.reset();
  return Swarm(plan, arena, dump).run();
}

RunResult run_seed(uint64_t seed, Arena& arena, const NicChooser& nic, const Dump& dump) {
  Plan plan = draw_plan(seed);
  if (nic) plan.fabric.nic = nic;
  return run_plan(plan, arena, dump);
}

}  // namespace millrace::sim
