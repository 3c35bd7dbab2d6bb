// A rank of a group in a swarm: a process on a host that joins, calls the group's operations one after the
// other, checks each result, leaves, and comes back when its group forms again. What it does is decided by
// the plan and its own generator.
#pragma once

#include <array>
#include <memory>

#include "tools/sim/arena.h"
#include "tools/sim/check/hash.h"
#include "tools/sim/check/memory_check.h"
#include "tools/sim/check/outcome_check.h"
#include "tools/sim/plan.h"

namespace millrace::sim {

// Operations that ended well, of which kind they were.
struct ExactCounts {
  std::array<uint64_t, check::kBarrier + 1> collective{};
  std::array<uint64_t, 13> type{};  // what was reduced
  std::array<uint64_t, 9> op{};
  uint64_t bfp = 0, deterministic = 0;
  uint64_t combined = 0;  // with other ranks of the host
  uint64_t alone = 0;     // of those, where the whole group is on one host
  uint64_t modelled = 0;  // over a NIC of the model
  void add(const ExactCounts& o);
};

// What all members of a run report to.
struct Judges {
  check::Violations violations;
  check::MemoryCheck memory{violations};
  check::OutcomeCheck outcome{violations};
  check::Hash trace;
  ExactCounts exact;
};

class Member;

// A group through all of its generations.
struct GroupRun {
  const GroupPlan* plan = nullptr;
  uint32_t generation = 1;
  uint32_t generations_max = 1;
  std::vector<std::vector<uint8_t>> expected;  // by operation; computed when first needed
  std::vector<std::unique_ptr<Member>> members;
  bool not_refused = false;  // though it had to be
  const std::vector<uint8_t>& expected_of(size_t operation);
  bool settled() const;
  uint64_t formed_again = 0;
};

class Member {
 public:
  Member(GroupRun& group, uint16_t rank, Fabric& fabric, Arena& arena, Judges& judges);
  ~Member();

  uint16_t rank() const { return rank_; }
  uint16_t host() const { return host_; }
  // Joins at a time, unless it is in the group already or its host is down.
  void join_at(Time when);
  // After each turn of the host.
  void step(Time now);
  // The process has died with its host.
  void crashed();
  // It dies alone, unless it leads the other ranks of its host, which would lose the NIC with it.
  bool die();
  void leave();  // without a word to its application's other ranks
  void abort();
  // Its next operation disagrees with the others'.
  void disagree() { disagree_ = true; }
  // What was to be done to it and has not been is forgotten.
  void heal() { disagree_ = false, delayed_ = UINT32_MAX; }
  // Its operation `number` is called so much later.
  void delay(uint32_t number, Time by) { delayed_ = number, delay_ = by; }
  bool over() const { return communicator_ == nullptr && !joining_; }
  // Whether it has to come back, since its group forms again.
  bool behind() const { return over() && generation_ < group_.generation; }
  uint64_t joins() const { return instance_; }

 private:
  struct Running {
    std::unique_ptr<host::Operation> operation;
    uint32_t number;
    check::Reduction reduction;  // as submitted: perhaps not what the others do
    std::vector<size_t> buffers;
  };
  Time clock() const { return fabric_.network().clock_of(fabric_.host(host_)); }
  int64_t now_ns() const { return fabric_.now().count(); }
  void join();
  void submit();
  size_t add_buffer(const check::Reduction& r, uint64_t bytes, const char* what);
  void add_buffers(Running& r, bool in_place);
  void make_disagree(check::Reduction& r, bool& deterministic);
  void give_back(const Running& r);
  void finish(Running& r);
  void count(const OperationPlan& o);
  void end(int status, const std::string& text);
  void plan_next();

  GroupRun& group_;
  const GroupPlan& plan_;
  uint16_t rank_, host_;
  Fabric& fabric_;
  Arena& arena_;
  Judges& judges_;
  Random random_;
  host::Communicator* communicator_ = nullptr;
  bool joining_ = false, leaving_ = false, disagree_ = false;
  uint32_t instance_ = 0, generation_ = 0;
  uint32_t next_ = 0;
  Time next_at_{};
  uint32_t delayed_ = UINT32_MAX;
  Time delay_{};
  std::vector<Running> running_;
  std::vector<std::unique_ptr<host::Operation>> abandoned_;  // of crashed processes
};

}  // namespace millrace::sim
