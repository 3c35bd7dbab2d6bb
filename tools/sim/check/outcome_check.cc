#include "tools/sim/check/outcome_check.h"

#include <algorithm>
#include <cctype>
#include <set>

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

// Of "rank 3 (…)": 3; of "(ranks 1, 4-6) …", those behind a switch or hub that is at fault as a whole: all
// four.
static std::set<uint32_t> ranks_in(const std::string& text) {
  std::set<uint32_t> ranks;
  const bool several = text.find("(ranks ") != std::string::npos;
  size_t at = text.find(several ? "(ranks " : "rank");
  if (at == std::string::npos) return ranks;
  at = text.find_first_of("0123456789", at);
  while (at < text.size() && std::isdigit(static_cast<unsigned char>(text[at]))) {
    size_t end;
    const auto first = static_cast<uint32_t>(std::stoul(text.substr(at), &end));
    auto last = first;
    at += end;
    if (several && text[at] == '-') {
      last = static_cast<uint32_t>(std::stoul(text.substr(at + 1), &end));
      at += end + 1;
    }
    for (uint32_t r = first; r <= last; r++) ranks.insert(r);
    if (!several) break;
    at = text.find_first_not_of(", ", at);
  }
  return ranks;
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
  if (status != kMemberLost || found->second.all) return;
  // Whoever joins for several has not said yet for whom.
  if (text.find("(no rank)") != std::string::npos) return;
  const std::set<uint32_t> named = ranks_in(text);
  if (named.empty()) return accuse("a lost member is not named");
  const std::set<uint32_t>& guilty = found->second.ranks;
  if (std::none_of(named.begin(), named.end(), [&](uint32_t r) { return guilty.contains(r); }))
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
    const auto failed = std::find_if(i.operations.begin(), i.operations.end(),
                                     [](auto& o) { return o.second != kOk && o.second != kInProgress; });
    if (failed != i.operations.end())
      accuse("succeeded after operation " + std::to_string(failed->first) +
             " of the same communicator had failed with status " + std::to_string(failed->second));
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
