// millrace-perf's command line and environment.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "host/millrace.h"

namespace millrace::perf {

enum class Collective : uint8_t { kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather, kBarrier };

struct Options {
  // What is measured.
  std::vector<Collective> collectives;
  int root = 0;  // -1: every rank in turn
  bool deterministic = false;
  uint64_t bytes_min = 8, bytes_max = 64u << 20;
  uint64_t step_factor = 2, step_bytes = 0;  // step_bytes, if not 0, goes before
  std::vector<mr_type> types;
  std::vector<mr_op> ops;
  int iterations = 20, warmups = 5, inflight = 1;
  bool check = true;

  // Who we are.
  int rank = 0, size = 1, stripes = 0;
  std::string group, switch_address, transport = "auto", device;
  bool registered = true;  // buffers by mr_register, else by the library as it needs them
  std::array<uint8_t, 16> key{};
  uint32_t tenant = 0;
  std::string secret;

  std::string json;  // file, "-": standard output; empty: none
  bool stats = false;

  std::vector<uint64_t> sizes() const;
};

// The status to exit with, 0 or 2, when there is nothing to do (help, version, a usage error, which has been
// printed).
struct Exit {
  int status;
};
// Throws Exit.
Options parse_options(int argc, char** argv);

const char* name(Collective collective);
bool reduces(Collective collective);
bool has_root(Collective collective);
// Whether the vector falls into one part per rank.
bool has_shards(Collective collective);
const char* name(mr_type type);
const char* name(mr_op op);

}  // namespace millrace::perf
