// millrace-perf's command line and environment.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "host/millrace.h"
#include "tools/perf_cases.h"

namespace millrace::perf {

// A size as it was asked for: elements are of the type that is measured.
struct Size {
  uint64_t bytes = 0;
  int64_t elements = 0;  // more, or less
};

struct Options {
  // What is measured.
  std::vector<Kind> kinds;  // in the table's order; sensible ones only
  uint64_t bytes_min = 8, bytes_max = 64u << 20;
  uint64_t step_factor = 2, step_bytes = 0;  // step_bytes, if not 0, goes before
  std::vector<Size> size_list;               // if not empty, instead of all these
  bool deterministic = false, bfp8 = false;
  int iterations = 20, warmups = 5, inflight = 1;
  bool check = true;

  // Who we are.
  int rank = 0, size = 1, stripes = 0;
  std::string group, switch_address, transport = "auto", device;
  bool registered = true;  // buffers by mr_register, else by the library as it needs them
  std::array<uint8_t, 16> key{};
  uint32_t tenant = 0;
  std::string combine = "auto";  // with the other ranks of this host
  bool wait = false;             // for the switch's memory
  std::string secret;

  std::string json;  // file, "-": standard output; empty: none
  bool stats = false;

  // In bytes, before they are rounded to what a kind can do (extent_of).
  std::vector<uint64_t> sizes(mr_type type) const;
};

// The status to exit with, 0 or 2, when there is nothing to do (help, version, a usage error, which has been
// printed).
struct Exit {
  int status;
};
// Throws Exit.
Options parse_options(int argc, const char* const* argv);

}  // namespace millrace::perf
