// The whole switch's loop on DPDK ring ports, without a wire: receive bursts, the pipeline, transmit bursts;
// plain forwarding beside spilling (the egress port takes nothing) and draining. Prints packets per second of
// one core and ratios; takes turns in one run.
//
//   ring_bench [rounds]
#include <rte_eal.h>
#include <rte_eth_ring.h>
#include <rte_ring.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>

#include "roce/build.h"
#include "switch/pipeline.h"
#include "switch/port.h"

namespace millrace::switching {
namespace {

constexpr uint32_t kPackets = 16384, kBurst = 32;

double cpu_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

struct Wire {
  explicit Wire(const char* name) {
    in = rte_ring_create((std::string(name) + "i").c_str(), 2 * kPackets, SOCKET_ID_ANY, 0);
    out = rte_ring_create((std::string(name) + "o").c_str(), 2 * kPackets, SOCKET_ID_ANY, 0);
    if (in == nullptr || out == nullptr || rte_eth_from_rings(name, &in, 1, &out, 1, 0) < 0)
      std::fprintf(stderr, "no rings\n"), std::abort();
  }
  rte_ring *in, *out;
};

class Bench {
 public:
  explicit Bench(uint32_t payload) : payload_(payload) {
    PipelineConfig pc;
    pc.ports = 2;
    pc.engine.mac = {{2, 0x53, 0, 0, 0, 1}};
    pc.engine.addresses = {*IpAddress::parse("10.77.0.1")};
    plain_ = std::make_unique<Pipeline>(pc, pool_);
    buffering::Config& c = pc.buffers.emplace();
    buffering::PortConfig port;
    for (auto& q : port.queues) q.profile.spill = true, q.profile.static_th = 16384;
    c.ports = {port, port};
    c.spillway.enabled = true;
    c.spillway.dscp.set();
    c.spillway.drain_off = 16384;
    c.spillway.max_residence = std::chrono::hours(1);
    spilling_ = std::make_unique<Pipeline>(pc, pool_);
    for (Pipeline* p : {plain_.get(), spilling_.get()}) {
      FrameList in, out;
      Frame f = frame(1, 0);
      f.set_port(1);
      in.push(std::move(f));
      p->process(in, now_, out);
    }
    for (int i = 0; i < 2; i++) {
      switching::PortConfig config;
      config.name = i == 0 ? "in" : "out";
      config.device = i == 0 ? "net_ring_a" : "net_ring_b";
      ports_[i] = std::make_unique<Port>(config, static_cast<uint16_t>(i), pool_);
    }
  }
  // Nanoseconds per packet.
  double forward() {
    fill();
    const double start = cpu_ns();
    while (turn(*plain_, true)) {
    }
    return (cpu_ns() - start) / drain_wire();
  }
  std::pair<double, double> spill_and_drain() {
    fill();
    double start = cpu_ns();
    while (turn(*spilling_, false)) {
    }
    const double spill = (cpu_ns() - start) / kPackets;
    start = cpu_ns();
    while (!spilling_->buffers()->empty()) turn(*spilling_, true);
    const double drain = (cpu_ns() - start) / kPackets;
    if (const double left = drain_wire(); left != kPackets)
      std::fprintf(stderr, "%f left\n", left), std::abort();
    return {spill, drain};
  }

 private:
  void fill() {
    for (uint32_t i = 0; i < kPackets; i++) {
      rte_mbuf* m = MbufPool::mbuf_of(frame(0, 1).release());
      FrameBuffer* b = &MbufPool::private_of(m)->frame;
      rte_pktmbuf_reset(m);
      m->data_off = static_cast<uint16_t>(b->offset);
      m->data_len = static_cast<uint16_t>(b->length);
      m->pkt_len = b->length;
      if (rte_ring_enqueue(a_.in, m) != 0) std::fprintf(stderr, "full\n"), std::abort();
    }
  }
  bool turn(Pipeline& p, bool open) {
    now_ += std::chrono::microseconds(5);
    FrameList in, out;
    ports_[0]->receive(in);
    const bool worked = !in.empty();
    p.set_room(1, open ? ports_[1]->room() : 0);
    if (worked) p.process(in, now_, out);
    if (now_ >= p.next_deadline() || p.waits_for_room()) p.poll(now_, out);
    while (Frame f = out.pop())
      if (ports_[f.port()]->admits(f)) ports_[f.port()]->send(std::move(f));
    ports_[1]->flush();
    return worked;
  }
  double drain_wire() {
    double n = 0;
    for (void* m = nullptr; rte_ring_dequeue(b_.out, &m) == 0; n++)
      rte_pktmbuf_free(static_cast<rte_mbuf*>(m));
    return n;
  }
  Frame frame(uint16_t from, uint16_t to) {
    roce::Path path;
    path.src_mac = {{2, 0, 0, 1, 0, static_cast<uint8_t>(from)}},
    path.dst_mac = {{2, 0, 0, 1, 0, static_cast<uint8_t>(to)}};
    path.src_ip = *IpAddress::parse("10.77.0.10"), path.dst_ip = *IpAddress::parse("10.77.0.11");
    path.tos = 2;
    roce::TransportFields f;
    f.opcode = roce::Opcode::kSendMiddle;
    f.dest_qp = Qpn{7};
    static const std::vector<uint8_t> zeros(4096);
    Frame made = roce::build(pool_, path, f, {zeros.data(), payload_});
    own_payload(made.buffer());
    return made;
  }

  MbufPool pool_{4 * kPackets, 2048};
  Wire a_{"a"}, b_{"b"};  // as DPDK names their devices: net_ring_a, net_ring_b
  uint32_t payload_;
  std::unique_ptr<Pipeline> plain_, spilling_;
  std::unique_ptr<Port> ports_[2];
  Time now_ = std::chrono::seconds(1);
};

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 15;
  const uint32_t payload = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : 966;
  const char* eal[] = {"ring_bench", "--no-huge", "--no-pci",       "--no-shconf",        "--no-telemetry",
                       "-m",         "512",       "--iova-mode=va", "--log-level=warning"};
  if (rte_eal_init(9, const_cast<char**>(eal)) < 0) return 1;
  Bench bench(payload);
  std::vector<double> plain, spill, drain;
  for (int r = 0; r < rounds; r++) {
    plain.push_back(bench.forward());
    const auto [s, d] = bench.spill_and_drain();
    spill.push_back(s), drain.push_back(d);
  }
  const double p = median(plain), s = median(spill), d = median(drain);
  std::printf(
      "%u B frames: plain %.1f ns (%.2f Mpps)   spill %.1f ns (%.2f of plain's rate)   drain %.1f ns "
      "(%.2f)\n",
      58 + payload, p, 1e3 / p, s, p / s, d, p / d);
  return 0;
}

}  // namespace
}  // namespace millrace::switching

int main(int argc, char** argv) { return millrace::switching::main(argc, argv); }
