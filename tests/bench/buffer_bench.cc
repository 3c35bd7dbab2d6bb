// What the traffic manager and the spillway cost per packet: RoCEv2 packets forwarded between ports of one
// pipeline, no wire, no DPDK. Bare forwarding, forwarding with the traffic manager uncongested, and spilling
// and draining take turns in one run, so that their ratios hold on a machine that others use, too.
//
//   buffer_bench [rounds]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <vector>

#include "buffering/local_store.h"
#include "roce/build.h"
#include "switch/pipeline.h"

namespace millrace {
namespace {

constexpr size_t kBurst = 32;
constexpr uint32_t kBursts = 2000;
constexpr uint16_t kPorts = 4;

double cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

MacAddress host_mac(uint16_t i) { return {{2, 0, 0, 1, 0, static_cast<uint8_t>(i)}}; }

// Three DWRR classes with WRED, as much accounting as there is.
buffering::Config configured(bool spill) {
  buffering::Config c;
  for (uint16_t i = 0; i < kPorts; i++) {
    buffering::PortConfig p;
    for (uint8_t d = 0; d < 64; d++) p.dscp_to_tc[d] = d % 3;
    for (uint8_t q = 0; q < 3; q++) {
      p.queues[q].wred = buffering::WredProfile{100'000, 400'000, 0.2};
      p.queues[q].scheduler.weight = static_cast<uint8_t>(20 * (q + 1));
      if (spill)
        p.queues[q].profile.static_th = 16384;
      else
        p.queues[q].profile.dynamic_th = 1;
      p.queues[q].profile.spill = true;
    }
    c.ports.push_back(p);
  }
  c.spillway.enabled = spill;
  c.spillway.dscp.set();
  c.spillway.max_residence = std::chrono::hours(1);
  return c;
}

class Bench {
 public:
  Bench(uint32_t payload, std::optional<buffering::Config> buffers) {
    switching::PipelineConfig pc;
    pc.ports = kPorts;
    pc.engine.mac = {{2, 0x53, 0, 0, 0, 1}};
    pc.engine.addresses = {*IpAddress::parse("10.77.0.1")};
    pc.buffers = std::move(buffers);
    pipeline_ = std::make_unique<switching::Pipeline>(pc, pool_);
    for (uint16_t port = 0; port < kPorts; port++) {
      Frame f = frame(port, (port + 1) % kPorts, 0, 0);
      f.set_port(port);
      FrameList in, out;
      in.push(std::move(f));
      pipeline_->process(in, now_, out);
    }
    payload_ = payload;
  }

  // Nanoseconds of CPU per packet.
  double forward() {
    double spent = 0;
    for (uint32_t b = 0; b < kBursts; b++) {
      FrameList in, out;
      for (uint32_t i = 0; i < kBurst; i++) in.push(frame(i % 2, 2 + i % 2, b + i, payload_));
      now_ += std::chrono::microseconds(1);
      const double start = cpu_ns();
      pipeline_->process(in, now_, out);
      spent += cpu_ns() - start;
      if (out.size() != kBurst) std::fprintf(stderr, "%zu left\n", out.size()), std::abort();
    }
    return spent / (kBurst * kBursts);
  }

  // The same packets while port 2 takes none, then all of them back: nanoseconds per packet for each.
  std::pair<double, double> spill_and_drain() {
    double spilling = 0, draining = 0;
    const auto& c = *pipeline_->buffers();
    const auto before = c.spillway()->counters();
    pipeline_->set_room(2, 0);
    for (uint32_t b = 0; b < kBursts / 4; b++) {
      FrameList in, out;
      for (uint32_t i = 0; i < kBurst; i++) in.push(frame(i % 2, 2, 0, payload_));
      now_ += std::chrono::microseconds(1);
      const double start = cpu_ns();
      pipeline_->process(in, now_, out);
      spilling += cpu_ns() - start;
    }
    const auto spilled = c.spillway()->counters().spilled.packets - before.spilled.packets;
    uint64_t left = 0;
    while (!c.empty()) {
      FrameList out;
      pipeline_->set_room(2, kBurst);
      now_ += std::chrono::microseconds(10);
      const double start = cpu_ns();
      pipeline_->poll(now_, out);
      draining += cpu_ns() - start;
      left += out.size();
    }
    if (left != kBursts / 4 * kBurst || spilled < left / 2) std::fprintf(stderr, "%lu left, %lu spilled\n", left, spilled), std::abort();
    return {spilling / static_cast<double>(left), draining / static_cast<double>(left)};
  }

 private:
  Frame frame(uint16_t from, uint16_t to, uint32_t n, uint32_t payload) {
    roce::Path path;
    path.src_mac = host_mac(from), path.dst_mac = host_mac(to);
    path.src_ip = *IpAddress::parse("10.77.0.10"), path.dst_ip = *IpAddress::parse("10.77.0.11");
    path.tos = static_cast<uint8_t>(n % 3 << 2 | 2);
    roce::TransportFields f;
    f.opcode = roce::Opcode::kSendMiddle;
    f.dest_qp = Qpn{7};
    f.psn = Psn(n);
    static const std::vector<uint8_t> zeros(4096);
    Frame made = roce::build(pool_, path, f, {zeros.data(), payload});
    own_payload(made.buffer());
    made.set_port(from);
    return made;
  }

  HeapFramePool pool_{2048, 65536};
  std::unique_ptr<switching::Pipeline> pipeline_;
  uint32_t payload_ = 0;
  Time now_ = std::chrono::seconds(1);
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

void compare(uint32_t payload, int rounds) {
  Bench bare(payload, std::nullopt), managed(payload, configured(false)), spilling(payload, configured(true));
  std::vector<double> b, m, s, d, ratio;
  for (int r = 0; r < rounds; r++) {
    b.push_back(bare.forward());
    m.push_back(managed.forward());
    ratio.push_back(m.back() / b.back());
    const auto [spill, drain] = spilling.spill_and_drain();
    s.push_back(spill), d.push_back(drain);
  }
  std::printf(
      "%5u B frames: bare %6.1f ns   managed %6.1f ns (median of ratios %.3f)   spill %6.1f ns   drain %6.1f "
      "ns"
      "   (spill + drain) / bare %.2f\n",
      14 + 20 + 8 + 12 + payload + 4, median(b), median(m), median(ratio), median(s), median(d),
      (median(s) + median(d)) / median(b));
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  millrace::compare(4, rounds);
  millrace::compare(1024 - 58, rounds);
}
