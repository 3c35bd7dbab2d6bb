// What every fuzz target shares: how it is registered, how it reads its input and how it says what is wrong.
// A target is a function of bytes. Under libFuzzer it is a program of its own; in fuzz_smoke all of them
// replay the corpora. A target keeps nothing from one input to the next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace millrace::fuzz {

using Bytes = std::vector<uint8_t>;

// An oracle's word. libFuzzer takes the exception that nobody catches for a crash. No std::exception, so that
// no code under test takes it for one of its own.
struct Finding {
  std::string what;
};
[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  const Finding finding{std::string(file) + ":" + std::to_string(line) + ": " + what};
  std::fprintf(stderr, "finding: %s\n", finding.what.c_str());
  throw finding;
}
#define FUZZ_CHECK(condition, ...)           \
  if (!(condition))                          \
  ::millrace::fuzz::fail(__FILE__, __LINE__, \
                         std::string("not so: " #condition) __VA_OPT__(+" — " +) __VA_ARGS__)

// The input as a list of choices. At its end every choice is 0.
class Input {
 public:
  explicit Input(std::span<const uint8_t> bytes) : left_(bytes) {}
  bool empty() const { return left_.empty(); }
  size_t size() const { return left_.size(); }
  uint8_t byte() {
    if (left_.empty()) return 0;
    const uint8_t b = left_[0];
    left_ = left_.subspan(1);
    return b;
  }
  // 0 … n − 1.
  size_t below(size_t n) { return n <= 1 ? 0 : n <= 256 ? byte() % n : u16() % n; }
  bool flag() { return byte() & 1; }
  uint16_t u16() {
    const uint8_t high = byte();
    return static_cast<uint16_t>(high << 8 | byte());
  }
  uint32_t u32() {
    const uint32_t high = u16();
    return high << 16 | u16();
  }
  uint64_t u64() {
    const uint64_t high = u32();
    return high << 32 | u32();
  }
  std::span<const uint8_t> take(size_t n) {
    const auto taken = left_.first(std::min(n, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  std::span<const uint8_t> rest() { return take(left_.size()); }

 private:
  std::span<const uint8_t> left_;
};

inline std::string text_of(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Writes what an Input reads.
class Output {
 public:
  Output& byte(size_t v) {
    bytes_.push_back(static_cast<uint8_t>(v));
    return *this;
  }
  Output& u16(size_t v) { return byte(v >> 8).byte(v); }
  Output& u32(size_t v) { return u16(v >> 16).u16(v); }
  Output& u64(uint64_t v) { return u32(v >> 32).u32(v); }
  Output& bytes(std::span<const uint8_t> more) {
    bytes_.insert(bytes_.end(), more.begin(), more.end());
    return *this;
  }
  Output& text(const std::string& more) {
    bytes_.insert(bytes_.end(), more.begin(), more.end());
    return *this;
  }
  const Bytes& get() const { return bytes_; }

 private:
  Bytes bytes_;
};

struct Target {
  const char* name;
  void (*run)(std::span<const uint8_t> input);
};
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}
struct Registration {
  Registration(const char* name, void (*run)(std::span<const uint8_t>)) { targets().push_back({name, run}); }
};

#ifdef MILLRACE_LIBFUZZER
#define MILLRACE_FUZZ_TARGET(name, run)                                     \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);  \
  extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) { \
    run({data, size});                                                      \
    return 0;                                                               \
  }
#else
#define MILLRACE_FUZZ_TARGET(name, run) static const ::millrace::fuzz::Registration registration(name, run);
#endif

}  // namespace millrace::fuzz
