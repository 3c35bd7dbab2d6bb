// The arrows between rooms: who may include whom. Root-relative includes only.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <set>

namespace {

namespace fs = std::filesystem;

// A room is a folder, but for switch/'s DPDK shell.
std::string room_of(const std::string& path) {
  static const std::set<std::string> shell = {"switch/port.h", "switch/port.cc", "switch/worker.h",
                                              "switch/worker.cc", "switch/main.cc"};
  return shell.contains(path) ? "shell" : path.substr(0, path.find('/'));
}

const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"roce", {}},
    {"aggregation", {"roce"}},
    {"buffering", {"roce"}},
    {"switch", {"aggregation", "buffering", "roce"}},
    {"shell", {"switch", "aggregation", "buffering", "roce"}},
    {"host", {"roce", "aggregation", "buffering"}},
    {"tools", {"host", "roce", "aggregation", "buffering", "switch"}},
    {"tests", {"roce", "aggregation", "buffering", "switch", "shell", "host", "tools"}},
};
// Of aggregation, hosts see what both sides share and not the switch's engine.
const std::set<std::string> kSharedAggregation = {"aggregation/protocol.h",    "aggregation/datatype.h",
                                                  "aggregation/reduce.h",      "aggregation/collective.h",
                                                  "aggregation/bfp.h",         "aggregation/ranks.h",
                                                  "aggregation/disagreement.h"};

// And of buffering what a switch and a lender of memory say to each other.
const std::set<std::string> kSharedBuffering = {"buffering/lease.h"};

TEST(Architecture, RoomsIncludeOnlyWhatTheirArrowsAllow) {
  const fs::path root = MILLRACE_SOURCE_ROOT;
  size_t files = 0;
  for (const auto& [folder, unused] : kMayInclude) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string ext = entry.path().extension();
      if (ext != ".h" && ext != ".cc") continue;
      files++;
      const std::string self = fs::relative(entry.path(), root);
      const std::string room = room_of(self);
      std::ifstream in(entry.path());
      for (std::string line; std::getline(in, line);) {
        if (line.rfind("#include ", 0) != 0) continue;
        const bool angle = line[9] == '<';
        const std::string target = line.substr(10, line.find(angle ? '>' : '"', 10) - 10);
        const bool dpdk = target.rfind("rte_", 0) == 0;
        // The one bench that drives the shell's ports.
        EXPECT_FALSE(dpdk && room != "shell" && self != "tests/bench/ring_bench.cc")
            << self << " includes " << target << ": only the shell knows DPDK";
        // Highway asks for quotes, so that its per-target re-inclusion works.
        if (angle || target.rfind("hwy/", 0) == 0) continue;
        EXPECT_TRUE(fs::exists(root / target)) << self << ": \"" << target << "\" is not root-relative";
        const std::string other = room_of(target);
        // The simulator's checkers judge bytes and numbers, and know nothing of what they judge.
        if (self.starts_with("tools/sim/check/")) {
          EXPECT_TRUE(target.starts_with("tools/sim/check/")) << self << " must not include " << target;
        }
        if (other == room) continue;
        EXPECT_TRUE(kMayInclude.at(room).contains(other)) << self << " must not include " << target;
        if (room == "host" && other == "aggregation") {
          EXPECT_TRUE(kSharedAggregation.contains(target)) << self << " includes " << target;
        }
        if (room == "host" && other == "buffering") {
          EXPECT_TRUE(kSharedBuffering.contains(target)) << self << " includes " << target;
        }
      }
    }
  }
  EXPECT_GT(files, 40u);
}

// The simulator's model NIC is of use because it was written apart: plain values, the seam and the messages
// of the protocol are all that it shares with what it is tested against.
TEST(Architecture, TheModelNicSharesNoTransport) {
  const fs::path root = MILLRACE_SOURCE_ROOT;
  const std::set<std::string> shared = {"roce/types.h", "host/transport.h", "aggregation/protocol.h",
                                        "tools/sim/nic.h"};
  size_t files = 0;
  for (const auto& entry : fs::directory_iterator(root / "tools/sim")) {
    if (entry.path().filename().string().rfind("nic_", 0) != 0) continue;
    files++;
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);) {
      if (line.rfind("#include \"", 0) != 0) continue;
      const std::string target = line.substr(10, line.find('"', 10) - 10);
      EXPECT_TRUE(shared.contains(target) || target.rfind("tools/sim/nic_", 0) == 0)
          << entry.path() << " must not include " << target;
    }
  }
  EXPECT_GT(files, 5u);
}

}  // namespace
