// Memory registered with the model NIC. A key names one region; nothing depends on where a region lies.
#pragma once

#include <map>
#include <span>

#include "host/transport.h"
#include "tools/sim/nic_quirks.h"

namespace millrace::sim {

class NicMemory {
 public:
  explicit NicMemory(uint64_t seed) : dice_(seed) {}

  host::MemoryRegion add(const void* address, size_t bytes, host::Access access) {
    uint32_t key;
    do key = static_cast<uint32_t>(dice_.roll());
    while (key == 0 || regions_.contains(key));
    const bool writable = access == host::Access::kResult;
    regions_[key] = {reinterpret_cast<uintptr_t>(address), bytes, writable};
    return {.id = key, .lkey = key, .rkey = writable ? key : 0};
  }
  void remove(uint32_t key) { regions_.erase(key); }
  size_t size() const { return regions_.size(); }

  // Where a remote write of [address, address + bytes) goes; nullptr: it is not allowed.
  uint8_t* target(uint32_t rkey, uint64_t address, uint64_t bytes) const {
    const auto r = regions_.find(rkey);
    if (r == regions_.end() || !r->second.writable || !r->second.holds(address, bytes)) return nullptr;
    return reinterpret_cast<uint8_t*>(address);
  }
  bool readable(uint32_t lkey, std::span<const uint8_t> bytes) const {
    const auto r = regions_.find(lkey);
    return r != regions_.end() && r->second.holds(reinterpret_cast<uintptr_t>(bytes.data()), bytes.size());
  }

 private:
  struct Region {
    uint64_t address, bytes;
    bool writable;
    bool holds(uint64_t from, uint64_t n) const {
      return from >= address && n <= bytes && from - address <= bytes - n;
    }
  };
  std::map<uint32_t, Region> regions_;
  Dice dice_;
};

}  // namespace millrace::sim
