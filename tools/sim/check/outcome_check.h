// How operations end. Each ends once; whoever is in a group in which one failed is told; an error needs a
// cause among the faults that were injected, says so by its status, and names a rank that had one; a group
// that nothing happened to never fails.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tools/sim/check/violations.h"

namespace millrace::sim::check {

// The statuses are millrace.h's numbers.
enum Status : int {
  kOk = 0,
  kInProgress = 1,
  kUsage = 2,
  kSystem = 3,
  kUnreachable = 4,
  kRefused = 5,
  kMismatch = 6,
  kMemberLost = 7,
  kLate = 8,
  kAborted = 9,
  kProtocol = 10
};

class OutcomeCheck {
 public:
  explicit OutcomeCheck(Violations& violations) : violations_(violations) {}

  // A rank of a group has begun to take part, as a new instance (each join is one).
  void joined(uint32_t group, uint32_t rank, uint32_t instance);
  void submitted(uint32_t group, uint32_t rank, uint32_t instance, uint32_t operation);
  void ended(int64_t at_ns, uint32_t group, uint32_t rank, uint32_t instance, uint32_t operation, int status,
             const std::string& text);
  // The instance is over: left of its own will (kOk), failed, or vanished in a crash (kInProgress).
  void over(int64_t at_ns, uint32_t group, uint32_t rank, uint32_t instance, int status,
            const std::string& text);
  // From now on the group may end with one of these statuses, because of something done to these of its ranks
  // (none: to all).
  void excuse(uint32_t group, std::initializer_list<int> statuses, const std::vector<uint32_t>& ranks);
  // A rank of a group to which something was done has failed, by that: what follows from its absence is
  // excused, too.
  void excuse_further(uint32_t group, uint32_t rank);
  // Nothing more is excused.
  void healed() { excuses_.clear(); }
  // At the end: everything submitted by instances that did not vanish has ended.
  void finish(int64_t at_ns);

  uint64_t operations_ok() const { return ok_; }
  uint64_t operations_failed() const { return failed_; }

 private:
  struct Excuses {
    std::set<int> statuses;
    std::set<uint32_t> ranks;
    bool all = false;
  };
  struct Instance {
    std::map<uint32_t, int> operations;  // status by number
    int status = kInProgress;
    bool over = false, vanished = false;
  };
  using Key = std::pair<std::pair<uint32_t, uint32_t>, uint32_t>;  // group, rank, instance
  void judge(int64_t at_ns, uint32_t group, uint32_t rank, int status, const std::string& text);
  static std::string name(const Key& k);

  Violations& violations_;
  std::map<uint32_t, Excuses> excuses_;  // by group
  std::map<Key, Instance> instances_;
  uint64_t ok_ = 0, failed_ = 0;
};

}  // namespace millrace::sim::check
