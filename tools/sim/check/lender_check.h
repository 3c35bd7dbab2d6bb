// What a borrower does with the memory that it has been lent, as the lender sees it take effect: it writes
// within slots, reads back what it has written there last and nothing else, no packet twice, and it comes for
// nothing after its lease. Packets may share a slot and its WRITE; a READ brings some of them, from the first
// that is wanted to the last.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "tools/sim/check/violations.h"

namespace millrace::sim::check {

class LenderCheck {
 public:
  // Slots, of so many bytes, follow each other from where a lease begins.
  LenderCheck(Violations& violations, uint64_t slot_bytes)
      : violations_(violations), slot_bytes_(slot_bytes) {}

  // A lease, by a number that its lender uses once.
  void begun(uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    leases_[{lender, lease}] = {address, bytes, {}};
  }
  void written(int64_t at_ns, uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    Lease* l = find(at_ns, lender, lease);
    if (l == nullptr) return;
    writes_++;
    if (address < l->address || bytes > l->bytes || address - l->address > l->bytes - bytes)
      return accuse(at_ns, lender, "a packet is kept outside of the lease");
    const uint64_t slot = (address - l->address) / slot_bytes_;
    const uint64_t into = (address - l->address) % slot_bytes_;
    if (into > kHeadMax) accuse(at_ns, lender, "a packet begins within a slot");
    if (into + bytes > slot_bytes_) accuse(at_ns, lender, "a packet reaches into the next slot");
    // What was there has been read, or given up, which leaves no trace here.
    l->slots[slot] = {address, address + bytes, {}, {}};
  }
  void read(int64_t at_ns, uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    Lease* l = find(at_ns, lender, lease);
    if (l == nullptr) return;
    reads_++;
    const auto found = l->slots.find((address - l->address) / slot_bytes_);
    if (found == l->slots.end()) return accuse(at_ns, lender, "what was never written is read");
    Slot& s = found->second;
    const uint64_t end = address + bytes;
    if (address < s.begin || end > s.end || bytes == 0)
      return accuse(at_ns, lender, "more is read than was written");
    // The first packet of a READ and its last are wanted; others may only lie between.
    if (!s.begins.insert(address).second || !s.ends.insert(end).second)
      accuse(at_ns, lender, "a packet is read twice");
  }
  void ended(uint32_t lender, uint64_t lease) { leases_.erase({lender, lease}); }
  void wrong(int64_t at_ns, uint32_t lender, const std::string& what) { accuse(at_ns, lender, what); }
  uint64_t writes() const { return writes_; }
  uint64_t reads() const { return reads_; }

 private:
  static constexpr uint64_t kHeadMax = 128;  // of a packet, which stay with the borrower
  struct Slot {
    uint64_t begin, end;              // what was written there last
    std::set<uint64_t> begins, ends;  // of READs since
  };
  struct Lease {
    uint64_t address = 0, bytes = 0;
    std::map<uint64_t, Slot> slots;
  };
  Lease* find(int64_t at_ns, uint32_t lender, uint64_t lease) {
    const auto found = leases_.find({lender, lease});
    if (found != leases_.end()) return &found->second;
    accuse(at_ns, lender, "something is done by a lease that is over");
    return nullptr;
  }
  void accuse(int64_t at_ns, uint32_t lender, const std::string& what) {
    violations_.add("lender", at_ns, "lender " + std::to_string(lender) + ": " + what);
  }

  Violations& violations_;
  uint64_t slot_bytes_;
  std::map<std::pair<uint32_t, uint64_t>, Lease> leases_;
  uint64_t writes_ = 0, reads_ = 0;
};

}  // namespace millrace::sim::check
