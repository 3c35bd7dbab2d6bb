// Reads a classic pcap file (either byte order, Ethernet) whole, for tests. Throws std::runtime_error for
// anything else: a broken vector is a broken test.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace millrace::vectors {

// The frames in order; tshark's frame n is element n − 1.
inline std::vector<std::vector<uint8_t>> read_pcap(const std::string& file) {
  const auto path = std::filesystem::path(MILLRACE_SOURCE_ROOT) / "tests/vectors" / file;
  std::ifstream in(path, std::ios::binary);
  const std::string all((std::istreambuf_iterator<char>(in)), {});
  const auto fail = [&](const char* why) { throw std::runtime_error(path.string() + ": " + why); };
  bool swapped = false;
  const auto word = [&](size_t at) {
    uint32_t v = 0;
    if (at + sizeof(v) > all.size()) fail("truncated");
    std::memcpy(&v, all.data() + at, sizeof(v));
    return swapped ? __builtin_bswap32(v) : v;
  };
  if (!in) fail("cannot be opened");
  swapped = word(0) == 0xD4C3B2A1;
  if (word(0) != 0xA1B2C3D4) fail("is no classic pcap");
  if (word(20) != 1) fail("is not of Ethernet");
  std::vector<std::vector<uint8_t>> frames;
  for (size_t at = 24; at < all.size();) {
    const size_t length = word(at + 8);
    at += 16;
    if (at + length > all.size()) fail("truncated");
    frames.emplace_back(all.begin() + static_cast<ptrdiff_t>(at),
                        all.begin() + static_cast<ptrdiff_t>(at + length));
    at += length;
  }
  return frames;
}

}  // namespace millrace::vectors
