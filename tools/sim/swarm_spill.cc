// What concerns switches' buffers in a run of the swarm: spillways and who lends them memory, streams that
// fill them, pauses, and links that go down.
#include "tools/sim/nic_wire.h"
#include "tools/sim/swarm_run.h"

namespace millrace::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

void Swarm::check_spillway(uint16_t s) {
  const auto* spillway = fabric_.at(s).pipeline().buffers()->spillway();
  if (spillway == nullptr) return;
  const buffering::SpillCounters c = spillway->counters();
  const buffering::Amount lost = c.lost_in_all();
  const std::string who = "switch " + std::to_string(s);
  books_.spilled(now_ns(), who,
                 {c.spilled.packets, c.drained.packets, c.rerouted.packets, c.resident.packets, lost.packets,
                  UINT64_MAX});
  books_.spilled(now_ns(), who,
                 {c.spilled.bytes, c.drained.bytes, c.rerouted.bytes, c.resident.bytes, lost.bytes,
                  fabric_.at(s).config().buffers->spillway.pool_size});
  books_.reserved(now_ns(), who + "'s store", spillway->store().used(), spillway->store().size());
  for (const auto& [where, cut] : cuts_) {
    if (where.first != s || !cut.told) continue;
    const buffering::SpillCounters& of = spillway->counters(where.second);
    if (cut.drained) books_.sent_down(now_ns(), who, *cut.drained, of.drained.packets);
    // What is read back from a lender may have to wait for that one's death.
    const Time patience = fabric_.lenders() == 0 ? Time{} : milliseconds(300);
    const Time since = std::max(cut.since, awake_from_[s]);
    books_.kept_down(now_ns(), who, of.resident.packets, (fabric_.now() - since).count(), patience.count());
  }
}

void Swarm::hear_lender(uint16_t i) {
  LenderNode& lender = fabric_.lender(i);
  lender_nodes_.insert(lender.id());
  of_lenders_.insert(lender.address().bytes);
  lender.tell = [this, i](const LeaseEvent& e) {
    using Kind = LeaseEvent::Kind;
    if (e.kind == Kind::kBegun) lent_.begun(i, e.lease, e.address, e.bytes);
    if (e.kind == Kind::kWritten) lent_.written(now_ns(), i, e.lease, e.address, e.bytes);
    if (e.kind == Kind::kRead) lent_.read(now_ns(), i, e.lease, e.address, e.bytes);
    if (e.kind == Kind::kWrong) lent_.wrong(now_ns(), i, e.text);
    if (e.kind == Kind::kEnded) lent_.ended(i, e.lease);
  };
}

// A first REQ may have to wait for neighbours to be asked, and for its turn to be sent again.
void Swarm::meet_lenders() {
  if (fabric_.lenders() == 0) return;
  const auto all = [&] {
    for (uint16_t s = 0; s < fabric_.switches(); s++) {
      const buffering::RemoteStore* remote = fabric_.at(s).pipeline().remote();
      for (size_t i = 0; remote != nullptr && i < remote->lenders(); i++)
        if (remote->status(i).state != buffering::LenderStatus::State::kConnected) return false;
    }
    return true;
  };
  for (uint16_t s = 0; s < fabric_.switches(); s++) fabric_.network().touch(fabric_.at(s));
  const Time patience = seconds(5);
  if (!fabric_.network().run(all, patience))
    judges_.violations.add("lender", now_ns(), "a switch has not got its leases within five seconds");
  begin_ = fabric_.now();
}

void Swarm::send_stream(const StreamPlan& s, uint32_t number, uint32_t psn) {
  Network& n = fabric_.network();
  if (healed_ || n.now() > begin_ + s.at + s.length) return;
  const bool near = !fabric_.routed() || fabric_.leaf_of(s.from) == fabric_.leaf_of(s.to);
  NicPacket p;
  p.to_mac = near ? Fabric::host_mac(s.to) : fabric_.at(fabric_.leaf_of(s.from)).config().engine.mac;
  p.from_mac = Fabric::host_mac(s.from);
  p.to = fabric_.host(s.to).address(s.v6), p.from = fabric_.host(s.from).address(s.v6);
  p.udp_port = static_cast<uint16_t>(0xC000 + number);
  p.traffic_class = s.traffic_class;
  // Now and then an acknowledgement, which must stay in order with the rest.
  p.opcode = psn % 8 == 7 ? kOpAck : kOpSendMiddle;
  p.qpn = 0xABC000 + number;
  p.psn = psn & 0xFFFFFF;
  std::vector<uint8_t> data(p.opcode == kOpAck ? 0 : s.payload, static_cast<uint8_t>(psn));
  p.payload = data;
  const auto frame = make_frame(p);
  injected_[static_cast<size_t>(FaultKind::kPassersBy)]++;
  n.send(fabric_.host(s.from), 0, frame);
  const auto gap = static_cast<int64_t>(static_cast<double>(frame.size() + kEthernetOverhead) * 8 / s.gbit);
  n.at(n.now() + Time(gap), [this, &s, number, psn] { send_stream(s, number, psn + 1); });
}

void Swarm::lender_fault(const Fault& f) {
  LenderNode& lender = fabric_.lender(static_cast<uint16_t>(f.target));
  if (lender.gone()) {
    injected_[static_cast<size_t>(f.kind)]--;
    return;
  }
  if (f.kind == FaultKind::kLenderDeath)
    lender.die();
  else
    f.rank == 0 ? lender.end() : lender.revoke();
  fabric_.network().at(fabric_.now() + f.duration, [this, &lender] {
    if (lender.gone()) lender.restart(late_.next());
  });
}

// Whom switch `s` reaches by the link that the fault is about; some may have another way.
std::set<check::Address> Swarm::beyond(uint16_t s, const Fault& f) const {
  std::set<check::Address> to;
  auto host = [&](uint16_t h) {
    for (const bool v6 : {false, true}) to.insert(fabric_.host(h).address(v6).bytes);
  };
  const auto target = static_cast<uint16_t>(f.target);
  if (f.rank == kLinkOfHost) host(target);
  if (f.rank != kLinkOfTrunk) return to;
  const uint16_t leaf = target / plan_.fabric.spines;
  for (uint16_t h = 0; h < fabric_.hosts(); h++)
    if ((fabric_.leaf_of(h) == leaf) != (s == leaf)) host(h);
  for (uint16_t other = 0; other < fabric_.switches(); other++)
    if (other != s && (s == leaf || other == leaf))
      for (const IpAddress& a : fabric_.at(other).config().engine.addresses) to.insert(a.bytes);
  return to;
}

void Swarm::link_fault(const Fault& f) {
  const auto target = static_cast<uint16_t>(f.target);
  const uint32_t link = f.rank == kLinkOfHost    ? fabric_.uplink(target)
                        : f.rank == kLinkOfTrunk ? 2 * (fabric_.hosts() + f.target)
                                                 : fabric_.lender_link(target);
  if (f.rank == kLinkOfHost && f.duration >= seconds(2)) excuse_cut_off(target);
  if (f.rank == kLinkOfHost) excuse_impatient(f.duration, target);
  if (f.rank == kLinkOfTrunk) excuse_impatient(f.duration);
  set_link(link, f, false);
  fabric_.network().at(fabric_.now() + f.duration, [this, link, &f] {
    if (!healed_) set_link(link, f, true);
  });
}

void Swarm::set_link(uint32_t link, const Fault& f, bool up) {
  Network& n = fabric_.network();
  n.set_down(link, !up), n.set_down(link + 1, !up);
  for (uint16_t s = 0; s < fabric_.switches(); s++) {
    const SwitchNode& node = fabric_.at(s);
    for (uint16_t port = 0; port < node.config().ports; port++) {
      if (n.link_of(node, port) / 2 != link / 2) continue;
      Cut& cut = cuts_[{s, port}];
      cut.to = beyond(s, f);
      cut.times = up ? cut.times - 1 : cut.times + 1;
      tell_link(s, port);
    }
  }
}

// As it is by then: a switch that stands still sees it when it goes on.
void Swarm::tell_link(uint16_t s, uint16_t port) {
  Network& n = fabric_.network();
  SwitchNode& node = fabric_.at(s);
  if (n.stalled(node)) return n.at(n.now() + milliseconds(1), [this, s, port] { tell_link(s, port); });
  Cut& cut = cuts_[{s, port}];
  const bool down = cut.times > 0;
  if (down == cut.told) return;
  cut.told = down;
  const uint32_t link = n.link_of(node, port);
  const auto* buffers = node.pipeline().buffers();
  if (!down) {
    down_.erase(link);
  } else {
    cut.since = n.now();
    if (buffers != nullptr) down_.insert(link);
    wire_.link_down(now_ns(), own_[node.id()], cut.to);
  }
  node.act([&](switching::Pipeline& p, Time now, FrameList& out) { p.set_link(port, !down, now, out); });
  if (!down) return wire_.link_up(now_ns(), own_[node.id()], cut.to);
  if (buffers != nullptr && buffers->spillway() != nullptr)
    cut.drained = buffers->spillway()->counters(port).drained.packets;
  if (node.pipeline().remote() != nullptr) passage_.detour(node.id());
}

// A new boot sees its links as they are.
void Swarm::tell_restarted(uint16_t s) {
  for (auto& [where, cut] : cuts_) {
    if (where.first != s || !cut.told) continue;
    cut.drained = 0;
    cut.since = fabric_.now();
    fabric_.at(s).act([port = where.second](switching::Pipeline& p, Time now, FrameList& out) {
      p.set_link(port, false, now, out);
    });
  }
}

// IEEE 802.1Qbb: every priority, for as long as said at the port's speed.
void Swarm::pause(uint16_t host, Time duration) {
  std::vector<uint8_t> f(60, 0);
  const uint8_t head[] = {0x01, 0x80, 0xC2, 0x00, 0x00, 0x01};
  std::copy_n(head, 6, f.begin());
  const MacAddress mac = Fabric::host_mac(host);
  std::copy_n(mac.bytes.begin(), 6, f.begin() + 6);
  f[12] = 0x88, f[13] = 0x08, f[14] = 0x01, f[15] = 0x01, f[17] = 0xFF;
  const auto& port = plan_.fabric.buffers->ports.at(0);
  const auto bps = static_cast<double>(port.rate_bps != 0 ? port.rate_bps : port.speed_bps);
  const auto quanta =
      static_cast<uint32_t>(std::min(65535.0, static_cast<double>(duration.count()) * bps / 512e9 + 1));
  for (size_t i = 0; i < 8; i++)
    f[18 + 2 * i] = static_cast<uint8_t>(quanta >> 8), f[19 + 2 * i] = static_cast<uint8_t>(quanta);
  fabric_.network().send(fabric_.host(host), 0, f);
}

// The switches end as an administrator ends them: each gives back what it was lent.
void Swarm::end_leases() {
  if (fabric_.lenders() == 0) return;
  Network& n = fabric_.network();
  for (uint16_t s = 0; s < fabric_.switches(); s++)
    fabric_.at(s).act([](switching::Pipeline& p, Time now, FrameList& out) { p.shutdown(now, out); });
  const auto over = [&] {
    for (uint16_t s = 0; s < fabric_.switches(); s++)
      if (!fabric_.at(s).pipeline().drained()) return false;
    for (uint16_t i = 0; i < fabric_.lenders(); i++)
      if (fabric_.lender(i).model().leases() != 0) return false;
    return true;
  };
  n.run(over, seconds(5));
  for (uint16_t s = 0; s < fabric_.switches(); s++)
    books_.left(now_ns(), "switch " + std::to_string(s) + " leases", !fabric_.at(s).pipeline().drained());
  for (uint16_t i = 0; i < fabric_.lenders(); i++)
    books_.left(now_ns(), "lender " + std::to_string(i) + " leases", fabric_.lender(i).model().leases());
}

}  // namespace millrace::sim
