// What a borrower does with the memory that it has been lent, as the lender sees it take effect: it keeps
// packets in slots that do not overlap, reads each back once, whole, and never what it has not written; and
// it comes for nothing after its lease.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "tools/sim/check/violations.h"

namespace millrace::sim::check {

class LenderCheck {
 public:
  explicit LenderCheck(Violations& violations) : violations_(violations) {}

  // A lease of one lender (`who`), by a number that this lender uses once.
  void begun(uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    leases_[{lender, lease}] = {address, bytes, {}};
  }
  void written(int64_t at_ns, uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    Lease* l = find(at_ns, lender, lease);
    if (l == nullptr) return;
    writes_++;
    if (address < l->address || bytes > l->bytes || address - l->address > l->bytes - bytes)
      accuse(at_ns, lender, "a packet is kept outside of the lease");
    // A packet that was given up leaves no trace here: its slot may be written again, but as a whole slot.
    const auto next = l->slots.lower_bound(address + 1);
    if (next != l->slots.end() && next->first < address + bytes)
      accuse(at_ns, lender, "a packet reaches into the slot of another");
    if (next != l->slots.begin()) {
      const auto before = std::prev(next);
      if (before->first < address && before->first + before->second.bytes > address)
        accuse(at_ns, lender, "a packet begins within the slot of another");
    }
    l->slots[address] = {bytes, false};
  }
  void read(int64_t at_ns, uint32_t lender, uint64_t lease, uint64_t address, uint64_t bytes) {
    Lease* l = find(at_ns, lender, lease);
    if (l == nullptr) return;
    reads_++;
    const auto slot = l->slots.find(address);
    if (slot == l->slots.end()) return accuse(at_ns, lender, "what was never written is read");
    if (slot->second.bytes != bytes) accuse(at_ns, lender, "a packet is not read as it was written");
    if (slot->second.read) accuse(at_ns, lender, "a packet is read twice");
    slot->second.read = true;
  }
  void ended(uint32_t lender, uint64_t lease) { leases_.erase({lender, lease}); }
  void wrong(int64_t at_ns, uint32_t lender, const std::string& what) { accuse(at_ns, lender, what); }
  // Packets written and not read back; those that were given up count.
  uint64_t kept(uint32_t lender) const {
    uint64_t n = 0;
    for (const auto& [key, l] : leases_)
      for (const auto& [address, slot] : l.slots) n += key.first == lender && !slot.read;
    return n;
  }
  uint64_t writes() const { return writes_; }
  uint64_t reads() const { return reads_; }

 private:
  struct Slot {
    uint64_t bytes;
    bool read;
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
  std::map<std::pair<uint32_t, uint64_t>, Lease> leases_;
  uint64_t writes_ = 0, reads_ = 0;
};

}  // namespace millrace::sim::check
