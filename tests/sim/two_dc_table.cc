// The whole table of tests/sim/two_dc.h: round trips, sizes, buffers, kinds of burst, DCQCN off and on; with
// drops, with the spillway and with PFC; of the spillway also other parameters and fast CNPs.
#include <cstdio>

#include "tests/sim/two_dc.h"

namespace {

using namespace millrace::sim;

// What the senders' reaction points are told, by name; the first is the paper's.
struct Reaction {
  const char* name;
  DcqcnParameters parameters;
};

std::vector<Reaction> reactions() {
  DcqcnParameters paper = TwoDcCase{}.reaction, steep = paper, timer = paper;
  steep.additive_gbit = 0.4, steep.clamp_target = false;
  timer.increase_period = std::chrono::microseconds(10);
  return {{"paper", paper}, {"AI=.4", steep}, {"T=10us", timer}};
}

void print(const TwoDcCase& c, const char* reaction, bool& finished) {
  const TwoDcResult r = run_two_dc(c);
  auto ms = [](millrace::Time t) { return static_cast<double>(t.count()) / 1e6; };
  static constexpr const char *kNames[] = {"drop", "spill", "PFC"}, *kControls[] = {"off", "on", "unmarked"};
  const bool peak = r.peak_expected != 0;
  std::printf(
      "%6.0f %6lu %7.0f %6s %8s %7s %5s %6s %9.2f %7.3f %9.2f %8lu %8lu %8lu %8lu %9.2f %7.3f %9.3f\n",
      ms(c.round_trip), c.cross_bytes >> 20, static_cast<double>(c.buffer_bytes) / 1e6,
      c.short_flows ? "short" : "long", kControls[static_cast<int>(c.dcqcn)],
      c.dcqcn == Control::kOff ? "-" : reaction, c.fast_cnp ? "yes" : "no",
      kNames[static_cast<int>(c.relief)], r.finished ? ms(r.cross) : -1, ms(r.cross) / ms(r.ideal),
      ms(r.burst), r.drops, r.cross_retransmitted, r.burst_retransmitted, r.timeouts,
      static_cast<double>(r.peak_bytes) / 1e6,
      peak ? static_cast<double>(r.peak_bytes) / static_cast<double>(r.peak_expected) : 0, r.unrelated_gbit);
  std::fflush(stdout);
  finished &= r.finished;
}

// Of one scenario: every relief, with the paper's parameters; with the spillway also the others, and CNPs
// of the switch's own beside its marks and instead of them.
void print_all(TwoDcCase c, bool& finished) {
  for (const Reaction& reaction : reactions()) {
    c.reaction = reaction.parameters;
    const bool first = reaction.name == std::string_view("paper");
    for (c.dcqcn = Control::kOff; c.dcqcn <= Control::kUnmarked;
         c.dcqcn = static_cast<Control>(static_cast<int>(c.dcqcn) + 1))
      for (c.relief = Relief::kDrop; c.relief <= Relief::kPfc;
           c.relief = static_cast<Relief>(static_cast<int>(c.relief) + 1))
        for (const bool fast : {false, true}) {
          const bool spills = c.relief == Relief::kSpill, on = c.dcqcn != Control::kOff;
          if ((c.dcqcn == Control::kUnmarked || !first || fast) && !(spills && on)) continue;
          c.fast_cnp = fast;
          print(c, reaction.name, finished);
        }
  }
}

}  // namespace

int main() {
  std::printf(
      "port C 10 Gb/s, cross flow 9.5 Gb/s, burst 20 Gb/s for 10 ms, unrelated flow 0.4 Gb/s; DCQCN: Kmin 50 "
      "KB, Kmax 200 KB, Pmax 0.1, g 1/256,\n"
      "55 us timers, 10 MB, F 5, R_AI 40 Mb/s, R_HAI 200 Mb/s (\"paper\"); AI=.4: R_AI 400 Mb/s, and "
      "only the first of a row of CNPs lowers the target (mlx5's clamp_tgt_rate 0); T=10us: the timer of the "
      "increase;\n"
      "go-back-N, time-out 67 ms;\nPFC: dynamic_th -1, headroom of the long link half of the buffer; fast: "
      "fast_cnp\n\n");
  std::printf("%6s %6s %7s %6s %8s %7s %5s %6s %9s %7s %9s %8s %8s %8s %8s %9s %7s %9s\n", "RTT ms", "S MiB",
              "buf MB", "burst", "DCQCN", "sender", "fast", "relief", "cross ms", "/ideal", "burst ms",
              "drops", "retx", "b.retx", "timeouts", "peak MB", "/P", "other Gb/s");
  bool finished = true;
  for (const int rtt : {1, 5, 20})
    for (const int mib : {32, 256})
      for (const double buffer : {1e6, 12e6})
        for (const bool short_flows : {false, true}) {
          TwoDcCase c;
          c.round_trip = std::chrono::milliseconds(rtt);
          c.cross_bytes = static_cast<uint64_t>(mib) << 20;
          c.buffer_bytes = static_cast<uint64_t>(buffer);
          c.short_flows = short_flows;
          print_all(c, finished);
        }
  return finished ? 0 : 1;
}
