// The whole table of tests/sim/two_dc.h: round trips, sizes, buffers, kinds of burst, DCQCN off and on; with
// drops, with the spillway and with PFC.
#include <cstdio>

#include "tests/sim/two_dc.h"

int main() {
  using namespace millrace::sim;
  std::printf(
      "port C 10 Gb/s, cross flow 9.5 Gb/s, burst 20 Gb/s for 10 ms, unrelated flow 0.4 Gb/s; DCQCN: Kmin 50 "
      "KB, Kmax 200 KB, Pmax 0.1, g 1/256,\n"
      "55 us timers, 10 MB, F 5, R_AI 40 Mb/s, R_HAI 200 Mb/s; go-back-N, time-out 67 ms; PFC: dynamic_th "
      "-1, headroom of the long link half of the buffer\n\n");
  std::printf("%6s %6s %7s %6s %8s %6s %9s %7s %9s %8s %8s %8s %8s %9s %7s %9s\n", "RTT ms", "S MiB",
              "buf MB", "burst", "DCQCN", "relief", "cross ms", "/ideal", "burst ms", "drops", "retx",
              "b.retx", "timeouts", "peak MB", "/P", "other Gb/s");
  int wrong = 0;
  for (const int rtt : {1, 5, 20})
    for (const int mib : {32, 256})
      for (const double buffer : {1e6, 12e6})
        for (const bool short_flows : {false, true})
          for (const Control dcqcn : {Control::kOff, Control::kOn, Control::kUnmarked})
            for (const Relief relief : {Relief::kSpill, Relief::kDrop, Relief::kPfc}) {
              if (dcqcn == Control::kUnmarked && relief != Relief::kSpill) continue;
              TwoDcCase c{relief,
                          std::chrono::milliseconds(rtt),
                          static_cast<uint64_t>(mib) << 20,
                          static_cast<uint64_t>(buffer),
                          short_flows,
                          dcqcn};
              const TwoDcResult r = run_two_dc(c);
              auto ms = [](millrace::Time t) { return static_cast<double>(t.count()) / 1e6; };
              static constexpr const char *kNames[] = {"drop", "spill", "PFC"},
                                          *kControls[] = {"off", "on", "unmarked"};
              std::printf(
                  "%6d %6d %7.0f %6s %8s %6s %9.2f %7.3f %9.2f %8lu %8lu %8lu %8lu %9.2f %7.3f %9.3f\n", rtt,
                  mib, buffer / 1e6, short_flows ? "short" : "long", kControls[static_cast<int>(dcqcn)],
                  kNames[static_cast<int>(relief)], r.finished ? ms(r.cross) : -1, ms(r.cross) / ms(r.ideal),
                  ms(r.burst), r.drops, r.cross_retransmitted, r.burst_retransmitted, r.timeouts,
                  static_cast<double>(r.peak_bytes) / 1e6,
                  r.peak_expected != 0
                      ? static_cast<double>(r.peak_bytes) / static_cast<double>(r.peak_expected)
                      : 0,
                  r.unrelated_gbit);
              std::fflush(stdout);
              wrong += !r.finished;
            }
  return wrong == 0 ? 0 : 1;
}
