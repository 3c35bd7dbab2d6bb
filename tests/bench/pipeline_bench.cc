// What the switch's pipeline costs per packet when it reduces: real members (soft endpoints) in one process,
// no wire, no DPDK; only the time inside Pipeline::process and poll is counted. Prints one line per case,
// with the cost of a plain memcpy and of the ICRC alone beside it, so that figures of different machines
// compare.
//
//   pipeline_bench [MiB per all-reduce]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <vector>

#include "host/communicator.h"
#include "host/soft_engine.h"
#include "roce/icrc.h"
#include "switch/pipeline.h"

namespace millrace {
namespace {

// CPU time of this thread: what other processes do on a shared machine does not count.
struct Clock {
  static std::chrono::nanoseconds now() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return std::chrono::seconds(t.tv_sec) + std::chrono::nanoseconds(t.tv_nsec);
  }
};

struct Member final : host::Resolver {
  explicit Member(uint16_t i) : index(i) {
    host::SoftConfig c;
    c.seed = c.ca_guid = 100u + i;
    endpoint = std::make_unique<host::SoftEngine>(c, pool, *this);
  }
  std::optional<roce::Path> resolve(const IpAddress& to, std::string&) override {
    roce::Path p;
    p.src_mac = {{2, 0, 0, 1, 0, static_cast<uint8_t>(index)}};
    p.dst_mac = {{2, 0, 0, 0, 0, 1}};
    p.src_ip = *IpAddress::parse("10.77.0." + std::to_string(index + 1));
    p.dst_ip = to;
    return p;
  }
  uint16_t index;
  HeapFramePool pool{4608, 4096};
  std::unique_ptr<host::SoftEngine> endpoint;
  std::unique_ptr<host::Communicator> comm;
};

struct Result {
  double seconds = 0;
  uint64_t packets = 0;
};

class Bench {
 public:
  Bench(uint16_t members, uint32_t mtu) {
    switching::PipelineConfig pc;
    pc.ports = members;
    pc.engine.addresses = {*IpAddress::parse("10.77.0.100")};
    pc.engine.mac = {{2, 0, 0, 0, 0, 1}};
    pc.engine.mtu = mtu;
    pc.engine.segment_bytes = mtu - 64 + mtu * (65536 / mtu - 1);
    pipeline_ = std::make_unique<switching::Pipeline>(pc, pool_);
    for (uint16_t i = 0; i < members; i++) {
      members_.push_back(std::make_unique<Member>(i));
      host::CommunicatorConfig c;
      c.rank = i, c.world = members, c.mtu = mtu, c.nonce_seed = i + 1u;
      c.switch_address = pc.engine.addresses[0];
      members_[i]->comm = std::make_unique<host::Communicator>(c, *members_[i]->endpoint, now_);
    }
    while (std::any_of(members_.begin(), members_.end(),
                       [](auto& m) { return m->comm->state() != host::Communicator::State::kRunning; }))
      turn();
  }
  Result all_reduce(aggregation::DataType type, size_t bytes) {
    std::vector<std::vector<uint8_t>> buffers(members_.size(), std::vector<uint8_t>(bytes));
    std::vector<host::Operation> ops(members_.size());
    for (size_t i = 0; i < members_.size(); i++) {
      ops[i].type = type;
      ops[i].op = aggregation::ReduceOp::kSum;
      ops[i].send = ops[i].recv = buffers[i].data();
      ops[i].bytes = bytes;
      members_[i]->comm->submit(&ops[i], now_);
    }
    result_ = {};
    while (!std::all_of(ops.begin(), ops.end(), [](auto& o) { return o.done; })) turn();
    return result_;
  }

 private:
  void turn() {
    now_ += std::chrono::microseconds(20);
    for (auto& m : members_) {
      FrameList out;
      std::vector<host::Completion> completions;
      static_cast<host::Transport&>(*m->endpoint).poll(completions);
      for (auto& c : completions) m->comm->handle(c, now_);
      m->comm->poll(now_);
      m->endpoint->poll(now_, out);
      while (Frame f = out.pop()) {
        // As the driver does it: into a buffer of the switch's pool.
        Frame in = Frame::allocate(pool_);
        f.copy_to(in.buffer()->data());
        in.buffer()->length = f.total_length();
        in.set_port(m->index);
        arriving_.push(std::move(in));
      }
    }
    while (!arriving_.empty() || now_ >= pipeline_->next_deadline()) {
      FrameList burst, out;
      while (!arriving_.empty() && burst.size() < 32) burst.push(arriving_.pop());
      result_.packets += burst.size();
      const auto start = Clock::now();
      pipeline_->process(burst, now_, out);
      if (now_ >= pipeline_->next_deadline()) pipeline_->poll(now_, out);
      result_.seconds += std::chrono::duration<double>(Clock::now() - start).count();
      while (Frame f = out.pop()) {
        Member& m = *members_[f.port()];
        Frame in = Frame::allocate(m.pool);
        f.copy_to(in.buffer()->data());
        in.buffer()->length = f.total_length();
        FrameList replies;
        m.endpoint->receive(std::move(in), now_, replies);
      }
    }
  }

  HeapFramePool pool_{4608, 16384};  // bounded: it keeps what it has made, as a mempool does
  std::unique_ptr<switching::Pipeline> pipeline_;
  std::vector<std::unique_ptr<Member>> members_;
  FrameList arriving_;
  Time now_{};
  Result result_;
};

template <typename F>
double nanoseconds_each(F f) {
  constexpr int n = 200000;
  const auto start = Clock::now();
  for (int i = 0; i < n; i++) f(i);
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / n;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  using namespace millrace;
  const size_t bytes = static_cast<size_t>(argc > 1 ? std::atoi(argv[1]) : 64) << 20;
  std::printf("%8s %6s %6s %14s %16s %12s %12s\n", "members", "mtu", "type", "ns/packet in", "input Gb/s",
              "crc ns", "memcpy ns");
  for (uint32_t mtu : {4096u, 1024u}) {
    std::vector<uint8_t> block(mtu * 64), to(mtu * 64);
    volatile uint32_t sink = 0;
    const double crc = nanoseconds_each([&](int i) {
      sink = sink + roce::crc32(0, {block.data() + mtu * static_cast<size_t>(i % 64), mtu});
    });
    const double copy = nanoseconds_each([&](int i) {
      std::copy_n(block.data() + mtu * static_cast<size_t>(i % 64), mtu,
                  to.data() + mtu * static_cast<size_t>(i % 64));
      sink = sink + to[static_cast<size_t>(i) % to.size()];
    });
    for (uint16_t members : {2, 8}) {
      for (auto type : {aggregation::DataType::kF32, aggregation::DataType::kBf16}) {
        Bench bench(members, mtu);
        bench.all_reduce(type, bytes / 8);  // warm
        const Result r = bench.all_reduce(type, bytes);
        std::printf("%8u %6u %6s %14.0f %16.1f %12.0f %12.0f\n", members, mtu,
                    std::string(aggregation::name(type)).c_str(),
                    r.seconds * 1e9 / static_cast<double>(r.packets),
                    static_cast<double>(bytes) * members * 8 / r.seconds / 1e9, crc, copy);
      }
    }
  }
}
