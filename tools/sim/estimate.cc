#include "tools/sim/estimate.h"

#include <algorithm>
#include <cstdio>

namespace millrace::sim {

namespace {
// Ethernet, IPv4, UDP, BTH, RETH, ICRC, and FCS, preamble and gap.
constexpr double kHeader = 14 + 20 + 8 + 12 + 16 + 4 + 24;
}  // namespace

Estimate estimate(const EstimateInput& in) {
  Estimate e;
  const double n = in.hosts, s = static_cast<double>(in.bytes), mtu = in.mtu;
  const double wire = (mtu + kHeader) / mtu, us_per_byte = 8e-3 / in.gbit * wire;
  e.header_share = kHeader / (mtu + kHeader);
  const check::Reduction kind{9, 1, 0, in.hosts, 1, in.collective};
  const double passes = in.collective == check::kAllReduce || in.collective == check::kBarrier ? 2 : 1;
  const double share = kind.has_root() ? 1 : passes * (n - 1) / n;
  e.ring_us = in.hosts < 2 ? 0 : share * s * us_per_byte + passes * (n - 1) * in.latency_us;
  // A window's worth goes out and comes back before the next may go.
  const double round_trip = in.latency_us + std::min(mtu, s) * us_per_byte;
  const double window = static_cast<double>(in.window_bytes);
  // Of the busier direction: nobody receives its own shard.
  const double through = in.collective == check::kAllGather ? (n - 1) / n : 1;
  const double by_rate = through * s * us_per_byte, by_window = s / window * round_trip;
  e.window_bound = by_window > by_rate;
  e.network_us = std::max(by_rate, by_window) + round_trip;
  return e;
}

std::string describe(const EstimateInput& in, const Estimate& e) {
  char text[1024];
  const double mib = static_cast<double>(in.bytes) / (1 << 20);
  auto rate = [&](double us) { return us > 0 ? static_cast<double>(in.bytes) / us / 1e3 : 0; };
  std::snprintf(text, sizeof(text),
                "%s of %.3f MiB over %u hosts at %g Gb/s, path MTU %u, %g us one way\n"
                "  ring                                    %12.1f us  %8.3f GB/s\n"
                "  in the network                          %12.1f us  %8.3f GB/s\n"
                "  the network is faster by                %12.2f times\n"
                "  of the wire, headers take %.1f %%%s\n",
                check::collective_name(in.collective).data(), mib, in.hosts, in.gbit, in.mtu, in.latency_us,
                e.ring_us, rate(e.ring_us), e.network_us, rate(e.network_us),
                e.network_us > 0 ? e.ring_us / e.network_us : 0, 100 * e.header_share,
                e.window_bound ? "; the window is smaller than rate times round trip and holds it back" : "");
  return text;
}

}  // namespace millrace::sim
