// What the checkers of a simulated run find wrong. The checkers in this folder judge bytes, times and
// numbers: they include nothing of roce/, aggregation/, buffering/, switch/ or host/, so that no mistake
// there can hide itself. A test holds that.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace millrace::sim::check {

class Violations {
 public:
  // `at_ns`: virtual time. The first few are kept, all are counted.
  void add(const char* checker, int64_t at_ns, const std::string& what) {
    if (count_++ < kKept)
      texts_.push_back(std::string(checker) + " at " + std::to_string(at_ns) + " ns: " + what);
  }
  uint64_t count() const { return count_; }
  const std::vector<std::string>& texts() const { return texts_; }

 private:
  static constexpr uint64_t kKept = 20;
  uint64_t count_ = 0;
  std::vector<std::string> texts_;
};

}  // namespace millrace::sim::check
