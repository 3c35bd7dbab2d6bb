#include "tools/sim/cluster.h"

#include <cmath>

namespace millrace::sim {

namespace {

FabricConfig fabric_config(const ClusterConfig& c) {
  FabricConfig f;
  f.seed = c.seed;
  f.hosts = c.hosts;
  f.host_link = {c.wire.gbit, c.wire.delay, UINT64_MAX};
  f.engine = c.engine;
  f.switch_frames = c.switch_frames;
  return f;
}

uint32_t ppm(double probability) { return static_cast<uint32_t>(std::lround(probability * 1e6)); }

}  // namespace

Cluster::Cluster(const ClusterConfig& config) : config_(config), fabric_(fabric_config(config)) {
  fabric_.network().add_observer(*this);
  fabric_.at(0).around_pipeline = [this](bool inside) {
    if (around_pipeline) around_pipeline(inside);
  };
  set_wire(config.wire);
}

Cluster::~Cluster() = default;

Host& Cluster::restart_host(uint16_t i) {
  fabric_.host(i).restart(fabric_.draw());
  return fabric_.host(i);
}

void Cluster::set_wire(const WireConfig& w) {
  for (uint32_t l = 0; l < fabric_.network().links(); l++) {
    LinkFaults& f = fabric_.network().faults(l);
    f.loss = ppm(w.loss), f.duplicate = ppm(w.duplicate), f.reorder = ppm(w.reorder),
    f.corrupt = ppm(w.corrupt);
  }
}

void Cluster::set_hosts_deaf(bool deaf) {
  for (uint16_t h = 0; h < fabric_.hosts(); h++) fabric_.network().set_down(fabric_.downlink(h), deaf);
}

WireCounts Cluster::wire() {
  WireCounts c;
  for (uint16_t h = 0; h < fabric_.hosts(); h++) {
    for (const uint32_t l : {fabric_.uplink(h), fabric_.downlink(h)}) {
      const LinkStats& s = fabric_.network().stats(l);
      c.frames += s.frames, c.lost += s.lost, c.duplicated += s.duplicated;
      c.reordered += s.reordered, c.corrupted += s.corrupted;
    }
    c.bytes_to_switch.push_back(fabric_.network().stats(fabric_.uplink(h)).bytes);
    c.bytes_to_host.push_back(fabric_.network().stats(fabric_.downlink(h)).bytes);
  }
  return c;
}

roce::Path Cluster::path(uint16_t host) {
  roce::Path p;
  p.src_mac = host_mac(host);
  p.dst_mac = fabric_.at(0).config().engine.mac;
  p.src_ip = host_address(host);
  p.dst_ip = switch_address();
  return p;
}

host::CommunicatorConfig Cluster::communicator(uint16_t rank, uint16_t world, uint8_t key) const {
  host::CommunicatorConfig c;
  c.key.fill(key);
  c.rank = rank;
  c.world = world;
  c.switch_address = switch_address();
  c.mtu = config_.engine.mtu;
  return c;
}

void Cluster::sent(Time, uint32_t, uint32_t link, std::span<const uint8_t> frame, Fate) {
  if (tap) tap(static_cast<uint16_t>(link / 2), link % 2 == 0, frame);
}

void Cluster::inject(uint16_t from_host, std::span<const uint8_t> frame) {
  fabric_.network().send(fabric_.host(from_host), 0, frame);
}

}  // namespace millrace::sim
