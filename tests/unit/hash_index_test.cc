#include "buffering/hash_index.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>

namespace millrace::buffering {
namespace {

// Against the standard library's map, with hashes that collide wholly or in part, at every filling.
TEST(HashIndex, FindsWhatIsInItAndNothingElse) {
  for (const uint64_t spread : {1ull, 7ull, 40ull, 1ull << 40}) {
    constexpr uint32_t kMax = 100;
    HashIndex index(kMax);
    std::unordered_map<uint32_t, uint64_t> model;  // entry → hash
    std::mt19937_64 random(spread);
    auto find = [&](uint32_t entry, uint64_t hash) {
      return index.find(hash, [&](uint32_t e) { return e == entry; });
    };
    for (int step = 0; step < 20000; step++) {
      const auto entry = static_cast<uint32_t>(random() % kMax);
      const auto it = model.find(entry);
      if (it == model.end()) {
        const uint64_t hash = random() % spread * 0x9E3779B97F4A7C15ull;
        EXPECT_EQ(find(entry, hash), HashIndex::kNone);
        index.insert(hash, entry);
        model[entry] = hash;
      } else if (random() % 2) {
        index.erase(it->second, entry);
        model.erase(it);
      }
      if (step % 500 != 0) continue;
      for (uint32_t e = 0; e < kMax; e++)
        for (const auto& [other, hash] : model)
          ASSERT_EQ(find(e, hash),
                    e == other || (model.contains(e) && model[e] == hash) ? e : HashIndex::kNone);
    }
  }
}

}  // namespace
}  // namespace millrace::buffering
