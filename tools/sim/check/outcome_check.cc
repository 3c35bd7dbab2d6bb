#include "tools/sim/check/outcome_check.h"

#include <algorithm>

namespace millrace::sim::check {

std::string OutcomeCheck::name(const Key& k) {
  return "group " + std::to_string(k.first.first) + " rank " + std::to_string(k.first.second) + " instance " +
         std::to_string(k.second);
}

void OutcomeCheck::joined(uint32_t group, uint32_t rank, uint32_t instance) {
  instances_[{{group, rank}, instance}];
}

void OutcomeCheck::submitted(uint32_t group, uint32_t rank, uint32_t instance, uint32_t operation) {
  instances_[{{group, rank}, instance}].operations[operation] = kInProgress;
}

void OutcomeCheck::excuse(uint32_t group, std::initializer_list<int> statuses,
                          const std::vector<uint32_t>& ranks) {
  Excuses& e = excuses_[group];
  e.statuses.insert(statuses.begin(), statuses.end());
  e.ranks.insert(ranks.begin(), ranks.end());
  e.all |= ranks.empty();
}

void OutcomeCheck::excuse_further(uint32_t group, uint32_t rank) {
  if (excuses_.contains(group)) excuse(group, {kMemberLost, kLate}, {rank});
}

void OutcomeCheck::judge(int64_t at_ns, uint32_t group, uint32_t rank, int status, const std::string& text) {
  auto accuse = [&](const std::string& what) {
    violations_.add("outcome", at_ns,
                    "group " + std::to_string(group) + " rank " + std::to_string(rank) + ": " + what +
                        " (status " + std::to_string(status) + ": " + text + ")");
  };
  if (text.empty()) accuse("an error without a sentence");
  const auto found = excuses_.find(group);
  if (found == excuses_.end()) return accuse("failed, though nothing was done to it");
  if (!found->second.statuses.contains(status)) return accuse("failed by what was not done to it");
  // "rank 3 (…)" and "ranks 1, 2 …": the first number counts.
  if (status != kMemberLost || found->second.all) return;
  const size_t at = text.find("rank");
  const size_t digit = at == std::string::npos ? at : text.find_first_of("0123456789", at);
  if (digit == std::string::npos) return accuse("a lost member is not named");
  if (!found->second.ranks.contains(static_cast<uint32_t>(std::stoul(text.substr(digit)))))
    accuse("blames a rank to which nothing was done");
}

void OutcomeCheck::ended(int64_t at_ns, uint32_t group, uint32_t rank, uint32_t instance, uint32_t operation,
                         int status, const std::string& text) {
  Instance& i = instances_[{{group, rank}, instance}];
  const auto found = i.operations.find(operation);
  auto accuse = [&](const std::string& what) {
    violations_.add(
        "outcome", at_ns,
        name({{group, rank}, instance}) + " operation " + std::to_string(operation) + ": " + what);
  };
  if (found == i.operations.end()) return accuse("ended, but was never submitted");
  if (found->second != kInProgress) accuse("ended twice");
  found->second = status;
  if (status == kOk) {
    ok_++;
    if (std::any_of(i.operations.begin(), i.operations.end(),
                    [](auto& o) { return o.second != kOk && o.second != kInProgress; }))
      accuse("succeeded after another of the same communicator had failed");
    return;
  }
  failed_++;
  judge(at_ns, group, rank, status, text);
}

void OutcomeCheck::over(int64_t at_ns, uint32_t group, uint32_t rank, uint32_t instance, int status,
                        const std::string& text) {
  Instance& i = instances_[{{group, rank}, instance}];
  i.over = true;
  i.status = status;
  i.vanished = status == kInProgress;
  if (i.vanished) return;
  for (const auto& [number, s] : i.operations)
    if (s == kInProgress)
      violations_.add("outcome", at_ns,
                      name({{group, rank}, instance}) + " is over, but operation " + std::to_string(number) +
                          " was never given back");
  if (status != kOk) judge(at_ns, group, rank, status, text);
}

void OutcomeCheck::finish(int64_t at_ns) {
  for (const auto& [key, i] : instances_) {
    if (!i.over) violations_.add("outcome", at_ns, name(key) + " was never told that it is over");
    if (i.vanished) continue;
    for (const auto& [number, status] : i.operations)
      if (status == kInProgress && !i.over)
        violations_.add("outcome", at_ns,
                        name(key) + " operation " + std::to_string(number) + " never ended");
  }
}

}  // namespace millrace::sim::check
