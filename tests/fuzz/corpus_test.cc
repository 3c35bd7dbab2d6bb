// Every file of tests/fuzz/corpus through its target, under whatever compiler and sanitizers this is built
// with.
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "tests/fuzz/target.h"

// Of the sanitizers' run-time library, where there is one.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*)());

namespace millrace::fuzz {
namespace {

namespace fs = std::filesystem;

// The file being replayed, for the last words of a program that an assertion or a sanitizer ends.
char current[512];
void tell() {
  (void)!write(2, "while replaying ", 16);
  (void)!write(2, current, std::strlen(current));
  (void)!write(2, "\n", 1);
}

class Corpus : public ::testing::TestWithParam<Target> {};

TEST_P(Corpus, HoldsNoFinding) {
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(tell);
  std::signal(SIGABRT, [](int) { tell(); });
  const fs::path folder = fs::path(MILLRACE_SOURCE_ROOT) / "tests/fuzz/corpus" / GetParam().name;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  EXPECT_GT(files.size(), 5u);
  for (const fs::path& file : files) {
    std::snprintf(current, sizeof(current), "%s", file.c_str());
    std::ifstream in(file, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(in)), {});
    try {
      GetParam().run({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
    } catch (const Finding& f) {
      ADD_FAILURE() << file << ": " << f.what;
    } catch (const std::exception& e) {
      ADD_FAILURE() << file << ": " << e.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Fuzz, Corpus, ::testing::ValuesIn(targets()),
                         [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace millrace::fuzz
