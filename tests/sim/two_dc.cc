#include "tests/sim/two_dc.h"

#include <algorithm>

namespace millrace::sim {

namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint32_t kPayload = 4096;
constexpr double kPort = 10, kCross = 9.5, kUnrelated = 0.4;
constexpr uint16_t kFar = 0, kNear = 1, kTo = 3, kElsewhere = 4;
constexpr Time kBurst = milliseconds(10);
// DCQCN's switch side, as Zhu et al. set it for 40 Gb/s, scaled to 10 Gb/s.
constexpr buffering::WredProfile kWred{50'000, 200'000, 0.1};

LabConfig lab_of(const TwoDcCase& c) {
  LabConfig lab;
  lab.hosts = 5;
  lab.host_gbit = kPort;
  lab.delay = {c.round_trip / 2, microseconds(1), microseconds(1), microseconds(1), microseconds(1)};
  lab.buffers.pool_size = c.buffer_bytes;
  lab.buffers.mtu = 4200;
  for (uint16_t h = 0; h < lab.hosts; h++) {
    buffering::PortConfig port = lab_port(kPort, buffering::kNoLimit, c.relief == Relief::kSpill);
    port.queues[3].profile.dynamic_th = 0;
    if (c.dcqcn != Control::kOff) port.queues[3].wred = kWred;
    if (c.dcqcn == Control::kUnmarked) {
      port.queues[3].profile.dynamic_th.reset();
      port.queues[3].profile.static_th = kWred.min_threshold;
    }
    if (c.relief == Relief::kPfc) {
      port.pfc[3] = true;
      port.queues[3].profile.dynamic_th.reset();
      port.groups[3].dynamic_th = -1;
      port.groups[3].xon_offset = 8400;
      // What may still be under way: of the far end, half of the buffer is all that there is.
      port.groups[3].xoff = h == kFar ? c.buffer_bytes / 2 : 30'000;
    }
    lab.buffers.ports.push_back(port);
  }
  lab.buffers.spillway.enabled = c.relief == Relief::kSpill;
  lab.buffers.spillway.dscp[26] = true;
  lab.buffers.spillway.mark_ce = c.dcqcn == Control::kOn;
  lab.buffers.spillway.fast_cnp = c.fast_cnp;
  lab.buffers.spillway.drain_off = kWred.min_threshold;
  lab.buffers.spillway.drain_on = kWred.min_threshold / 2;
  return lab;
}

StreamConfig flow(uint16_t from, uint64_t bytes, double gbit, Time start, const TwoDcCase& c) {
  StreamConfig s;
  s.from = from, s.to = kTo, s.gbit = gbit, s.start = start;
  s.payload = kPayload;
  s.packets = (bytes + kPayload - 1) / kPayload;
  s.closed = true;
  s.dcqcn = c.dcqcn != Control::kOff;
  s.reaction = c.reaction;
  s.ecn = s.dcqcn ? 2 : 0;
  return s;
}

}  // namespace

TwoDcResult run_two_dc(const TwoDcCase& c) {
  Lab lab(lab_of(c));
  const Time begin = milliseconds(1) + 2 * c.round_trip,
             burst_at = begin + c.round_trip / 2 + milliseconds(5);
  Stream& cross = lab.add(flow(kFar, c.cross_bytes, kCross, begin, c));
  const uint64_t wire = cross.wire_bytes();
  const auto burst_packets =
      static_cast<uint64_t>(2 * kPort * static_cast<double>(kBurst.count()) / 8 / static_cast<double>(wire));
  const uint64_t flow_packets = c.short_flows ? 125'000 / kPayload : burst_packets / 4;
  std::vector<Stream*> burst;
  for (uint64_t left = burst_packets, i = 0; left > 0; i++) {
    const uint64_t n = std::min(left, flow_packets + (c.short_flows ? 0 : burst_packets % 4));
    burst.push_back(&lab.add(flow(static_cast<uint16_t>(kNear + i % 2), n * kPayload, kPort, burst_at, c)));
    left -= n;
  }
  if (c.fast_cnp)
    for (const auto& s : lab.streams()) lab.connect(*s, microseconds(10));
  StreamConfig other;
  other.from = kFar, other.to = kElsewhere, other.gbit = kUnrelated, other.start = begin;
  other.length = milliseconds(5) + kBurst, other.payload = kPayload, other.ecn = 0;
  Stream& unrelated = lab.add(other);

  TwoDcResult r;
  r.finished = lab.run(std::chrono::seconds(10));
  r.cross = cross.done_at - begin;
  const double bits = static_cast<double>((cross.packets() + burst_packets) * wire * 8);
  r.ideal = c.round_trip + Time(static_cast<int64_t>(bits / kPort));
  for (const Stream* s : burst) {
    r.burst = std::max(r.burst, s->done_at - burst_at);
    r.burst_retransmitted += s->retransmitted;
    r.timeouts += s->timeouts;
    r.marked += s->marked;
  }
  r.cross_retransmitted = cross.retransmitted, r.cross_naks = cross.naks;
  r.timeouts += cross.timeouts, r.marked += cross.marked;
  for (uint16_t p = 0; p < 5; p++)
    for (const auto& d : lab.buffers().counters(p, 3).drops) r.drops += d.packets;
  if (const auto* spillway = lab.buffers().spillway()) {
    const buffering::SpillCounters s = spillway->counters();
    r.drops += s.refused_in_all().packets + s.lost_in_all().packets;
    r.peak_bytes = s.resident_bytes_max / cross.frame_bytes() * wire;
    r.peak_expected =
        static_cast<uint64_t>((kCross + 2 * kPort - kPort) * static_cast<double>(kBurst.count()) / 8) -
        kWred.min_threshold;
  }
  // On time, its last packet would come `length` after the first.
  const double took = static_cast<double>((unrelated.last_at - begin - c.round_trip / 2).count());
  r.unrelated_gbit = kUnrelated * static_cast<double>(other.length.count()) / took *
                     static_cast<double>(unrelated.received) / static_cast<double>(unrelated.packets());
  return r;
}

}  // namespace millrace::sim
