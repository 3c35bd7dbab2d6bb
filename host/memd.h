// What millrace-memd lends, whatever the transport: its memory in equal parts, one for each switch that
// borrows. One thread; nothing here touches a device.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "buffering/lease.h"
#include "roce/types.h"

namespace millrace::host {

// Of one lease, for people. The counts are those of a lender whose CPU moves the bytes; a NIC tells nobody.
struct LeaseStatus {
  IpAddress borrower;
  uint32_t instance = 0;
  uint64_t bytes = 0;
  uint64_t bytes_written = 0, bytes_read = 0, writes = 0, reads = 0;
};

class LeaseTable {
 public:
  // `parts` ≥ 1; each is a whole number of pages, at least one. Throws Error (kUsage).
  LeaseTable(std::span<uint8_t> memory, uint32_t parts);

  // The part of a borrower that asks for `bytes` (0: a whole part, which is also the most), or a sentence
  // that says why there is none. The caller has ended the borrower's lease before, if find() names one.
  std::optional<uint32_t> take(const IpAddress& borrower, uint32_t instance, uint64_t bytes,
                               std::string& why);
  std::optional<uint32_t> find(const IpAddress& borrower, uint32_t instance) const;
  // Nothing writes to it any more.
  void release(uint32_t part) { leases_[part].reset(); }

  std::span<uint8_t> memory(uint32_t part) const {
    return memory_.subspan(part * part_bytes_, leases_[part]->bytes);
  }
  LeaseStatus& status(uint32_t part) { return *leases_[part]; }
  std::vector<LeaseStatus> leases() const;
  uint64_t part_bytes() const { return part_bytes_; }

 private:
  std::span<uint8_t> memory_;
  size_t part_bytes_;
  std::vector<std::optional<LeaseStatus>> leases_;
};

// Why a request for a lease comes to nothing before any memory is looked at, if so; `depth` is how many READs
// the borrower means to have in flight.
std::optional<buffering::LeaseRefusal> lease_objection(const std::optional<buffering::LeaseRequest>& request,
                                                       uint8_t depth);

}  // namespace millrace::host
