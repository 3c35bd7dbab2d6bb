// All-reduce of f32 by Gloo over TCP, the figure that Millrace is compared with: one rank, which prints one JSON
// line when it is rank 0.
//   gloo_allreduce RANK SIZE STORE-FOLDER INTERFACE BYTES ITERATIONS ring|ring-chunked
#include <gloo/allreduce.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

// Small integers: every partial sum is exact, so the expected value does not depend on the order.
float input(int rank, size_t index) { return float(rank + 1) + float(index & 7); }

float expected(int size, size_t index) {
  return float(size * (size + 1) / 2) + float(size) * float(index & 7);
}

int run(char** arguments) {
  const int rank = std::stoi(arguments[1]), size = std::stoi(arguments[2]);
  const size_t count = std::stoull(arguments[5]) / sizeof(float);
  const int iterations = std::stoi(arguments[6]);
  const std::string algorithm = arguments[7];

  gloo::transport::tcp::attr attributes;
  attributes.iface = arguments[4];
  auto device = gloo::transport::tcp::CreateDevice(attributes);
  gloo::rendezvous::FileStore store(arguments[3]);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  context->connectFullMesh(store, device);

  std::vector<float> data(count);
  std::unique_ptr<gloo::Algorithm> chunked;
  std::function<void()> reduce;
  if (algorithm == "ring-chunked") {
    chunked = std::make_unique<gloo::AllreduceRingChunked<float>>(context, std::vector<float*>{data.data()},
                                                                  int(count));
    reduce = [&] { chunked->run(); };
  } else {
    reduce = [&] {
      gloo::AllreduceOptions options(context);
      options.setOutput(data.data(), count);
      options.setAlgorithm(gloo::AllreduceOptions::Algorithm::RING);
      options.setReduceFunction(static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
      gloo::allreduce(options);
    };
  }
  auto barrier = [&] {
    gloo::BarrierOptions options(context);
    gloo::barrier(options);
  };

  std::vector<double> seconds;
  size_t wrong = 0;
  for (int i = -1; i < iterations; i++) {  // the first is a warm-up
    for (size_t k = 0; k < count; k++) data[k] = input(rank, k);
    barrier();
    const auto start = Clock::now();
    reduce();
    const double elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    barrier();
    if (i >= 0) seconds.push_back(elapsed);
    for (size_t k = 0; k < count; k++) wrong += data[k] != expected(size, k);
  }
  std::sort(seconds.begin(), seconds.end());
  if (rank == 0) printf("{\"seconds\": %.6f, \"wrong\": %zu}\n", seconds[seconds.size() / 2], wrong);
  return wrong ? 1 : 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 8) {
    fprintf(stderr, "usage: gloo_allreduce RANK SIZE STORE-FOLDER INTERFACE BYTES ITERATIONS ring|ring-chunked\n");
    return 2;
  }
  try {
    return run(arguments);
  } catch (const std::exception& error) {
    fprintf(stderr, "gloo_allreduce: %s\n", error.what());
    return 1;
  }
}
