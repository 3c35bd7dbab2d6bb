// How fast one contribution is added, in bytes of input: one chunk at a time out of sets that overflow L1 and
// fill half (wide types: most, and with 8 bits more than all) of a 1 MiB L2, payloads at the odd offset they
// have behind Ethernet, IP, UDP and BTH headers. memcpy and the plain loop that a compiler vectorizes by
// itself run in the same process, as the yardsticks.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "aggregation/bfp.h"
#include "aggregation/reduce.h"

namespace millrace::aggregation {
namespace {

constexpr size_t kSetBytes = size_t{256} * 1024;  // of input; the accumulators are another set
constexpr size_t kPayloadOffset = 54;             // Ethernet 14, IPv4 20, UDP 8, BTH 12

// Chunks laid out as in a frame pool, each with its headers in front.
struct Chunks {
  explicit Chunks(size_t chunk_bytes)
      : bytes(chunk_bytes),
        stride(chunk_bytes + 128),
        count(kSetBytes / chunk_bytes),
        memory(count * stride, 1) {}
  uint8_t* payload(size_t i) { return memory.data() + i * stride + kPayloadOffset; }

  size_t bytes;
  size_t stride;
  size_t count;
  std::vector<uint8_t> memory;
};

template <class Body>
void run(benchmark::State& state, size_t input_bytes_per_chunk, size_t count, Body body) {
  size_t i = 0;
  for (auto _ : state) {
    body(i);
    benchmark::ClobberMemory();
    i = i + 1 < count ? i + 1 : 0;
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(input_bytes_per_chunk));
}

void memcpy_chunk(benchmark::State& state) {
  Chunks acc(static_cast<size_t>(state.range(0)));
  Chunks in(acc.bytes);
  run(state, in.bytes, in.count, [&](size_t i) { std::memcpy(acc.payload(i), in.payload(i), in.bytes); });
}

// What one would write without a library. Payloads are misaligned, hence the copies, which compile to loads.
template <class T>
[[gnu::optimize("O3"), gnu::noinline]] void plain_add(uint8_t* __restrict acc, const uint8_t* __restrict in,
                                                      size_t bytes) {
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T a;
    T b;
    std::memcpy(&a, acc + at, sizeof(T));
    std::memcpy(&b, in + at, sizeof(T));
    a += b;
    std::memcpy(acc + at, &a, sizeof(T));
  }
}

[[gnu::optimize("O3"), gnu::noinline]] void plain_add_bf16(float* __restrict wide,
                                                           const uint8_t* __restrict in, size_t bytes) {
  for (size_t i = 0; i < bytes / 2; ++i) {
    uint16_t half;
    std::memcpy(&half, in + 2 * i, 2);
    const uint32_t bits = uint32_t{half} << 16;
    float v;
    std::memcpy(&v, &bits, 4);
    wide[i] += v;
  }
}

template <class T>
void plain(benchmark::State& state) {
  Chunks acc(static_cast<size_t>(state.range(0)));
  Chunks in(acc.bytes);
  run(state, in.bytes, in.count, [&](size_t i) { plain_add<T>(acc.payload(i), in.payload(i), in.bytes); });
}

void plain_bf16(benchmark::State& state) {
  Chunks in(static_cast<size_t>(state.range(0)));
  std::vector<float> wide(kSetBytes / 2);
  run(state, in.bytes, in.count,
      [&](size_t i) { plain_add_bf16(wide.data() + i * in.bytes / 2, in.payload(i), in.bytes); });
}

void accumulate(benchmark::State& state, DataType type, ReduceOp op) {
  const Reducer reducer = Reducer::get(type, op);
  Chunks acc(static_cast<size_t>(state.range(0)));
  Chunks in(acc.bytes);
  state.SetLabel(reducer.target());
  run(state, in.bytes, in.count,
      [&](size_t i) { reducer.accumulate(acc.payload(i), in.payload(i), in.bytes); });
}

enum class WideStep { kWiden, kAccumulate, kNarrow };

void wide(benchmark::State& state, DataType type, ReduceOp op, DataType wire, WideStep step) {
  const Reducer reducer = Reducer::get(type, op, wire);
  Chunks in(static_cast<size_t>(state.range(0)));
  const size_t elements = wide_elements(wire, in.bytes);
  std::vector<float> sums(in.count * elements, 1.0F);
  state.SetLabel(reducer.target());
  run(state, in.bytes, in.count, [&](size_t i) {
    float* sum = sums.data() + i * elements;
    switch (step) {
      case WideStep::kWiden:
        return reducer.widen(sum, in.payload(i), in.bytes);
      case WideStep::kAccumulate:
        return reducer.accumulate_wide(sum, in.payload(i), in.bytes);
      case WideStep::kNarrow:
        return reducer.narrow(in.payload(i), sum, in.bytes);
    }
  });
}

// The hosts' codec, in bytes of blocks like the switch's loops, so that the figures compare.
void codec(benchmark::State& state, DataType type, bool encode) {
  Chunks blocks(static_cast<size_t>(state.range(0)));
  const size_t count = wide_elements(DataType::kBfp8, blocks.bytes);
  std::vector<uint8_t> elements(blocks.count * count * element_bytes(type), 1);
  state.SetLabel(Reducer::get(type, ReduceOp::kSum, DataType::kBfp8).target());
  run(state, blocks.bytes, blocks.count, [&](size_t i) {
    uint8_t* chunk = elements.data() + i * count * element_bytes(type);
    if (encode) {
      bfp8_encode(type, chunk, count, blocks.payload(i));
    } else {
      bfp8_decode(type, blocks.payload(i), count, chunk);
    }
  });
}

void finish(benchmark::State& state, DataType type) {
  const Reducer reducer = Reducer::get(type, ReduceOp::kAvg);
  Chunks acc(static_cast<size_t>(state.range(0)));
  state.SetLabel(reducer.target());
  run(state, acc.bytes, acc.count, [&](size_t i) { reducer.finish(acc.payload(i), acc.bytes, 3); });
}

template <class... Args>
void add(const std::string& label, Args... args) {
  benchmark::RegisterBenchmark(label.c_str(), args...)->Arg(1024)->Arg(4096);
}

void add_all() {
  add("memcpy", memcpy_chunk);
  add("plain -O3 f32 sum", plain<float>);
  add("plain -O3 i32 sum", plain<uint32_t>);
  add("plain -O3 bf16 sum into f32", plain_bf16);
  for (const DataType type :
       {DataType::kF32, DataType::kF64, DataType::kI32, DataType::kI64, DataType::kU8}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin}) {
      add(std::string(name(type)) + ' ' + std::string(name(op)), accumulate, type, op);
    }
  }
  for (const DataType type :
       {DataType::kF32, DataType::kF64, DataType::kI32, DataType::kI64, DataType::kU8}) {
    add(std::string(name(type)) + " division of avg", finish, type);
  }
  const auto add_wide = [](const std::string& prefix, DataType type, DataType wire) {
    add(prefix + " widen", wide, type, ReduceOp::kSum, wire, WideStep::kWiden);
    add(prefix + " sum", wide, type, ReduceOp::kSum, wire, WideStep::kAccumulate);
    add(prefix + " min", wide, type, ReduceOp::kMin, wire, WideStep::kAccumulate);
    add(prefix + " narrow", wide, type, ReduceOp::kSum, wire, WideStep::kNarrow);
  };
  for (const DataType type : {DataType::kF16, DataType::kBf16, DataType::kF8E4M3, DataType::kF8E5M2}) {
    add_wide(std::string(name(type)), type, type);
  }
  add_wide("bfp8", DataType::kF32, DataType::kBfp8);
  for (const DataType type : {DataType::kF16, DataType::kBf16, DataType::kF32}) {
    add("bfp8 encode " + std::string(name(type)), codec, type, true);
    add("bfp8 decode " + std::string(name(type)), codec, type, false);
  }
}

}  // namespace
}  // namespace millrace::aggregation

int main(int argc, char** argv) {
  millrace::aggregation::add_all();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
