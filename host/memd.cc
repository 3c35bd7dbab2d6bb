#include "host/memd.h"

#include <algorithm>

#include "roce/error.h"

namespace millrace::host {

namespace {

constexpr size_t kPage = 4096;

}  // namespace

LeaseTable::LeaseTable(std::span<uint8_t> memory, uint32_t parts)
    : memory_(memory), part_bytes_(parts == 0 ? 0 : memory.size() / parts / kPage * kPage), leases_(parts) {
  if (part_bytes_ == 0)
    throw Error(ErrorCode::kUsage, std::to_string(memory.size()) + " B cannot be lent in " +
                                       std::to_string(parts) +
                                       " parts of at least 4096 B: lend more, or to fewer switches");
}

std::optional<uint32_t> LeaseTable::find(const IpAddress& borrower, uint32_t instance) const {
  for (uint32_t i = 0; i < leases_.size(); i++)
    if (leases_[i] && leases_[i]->borrower == borrower && leases_[i]->instance == instance) return i;
  return std::nullopt;
}

std::optional<uint32_t> LeaseTable::take(const IpAddress& borrower, uint32_t instance, uint64_t bytes,
                                         std::string& why) {
  const auto free = std::find(leases_.begin(), leases_.end(), std::nullopt);
  if (free == leases_.end()) {
    why =
        "all is lent: " + std::to_string(leases_.size()) + " of " + std::to_string(leases_.size()) + " parts";
    return std::nullopt;
  }
  *free = LeaseStatus{.borrower = borrower,
                      .instance = instance,
                      .bytes = bytes == 0 ? part_bytes_ : std::min<uint64_t>(bytes, part_bytes_)};
  return static_cast<uint32_t>(free - leases_.begin());
}

std::vector<LeaseStatus> LeaseTable::leases() const {
  std::vector<LeaseStatus> all;
  for (const auto& l : leases_)
    if (l) all.push_back(*l);
  return all;
}

std::optional<buffering::LeaseRefusal> lease_objection(const std::optional<buffering::LeaseRequest>& request,
                                                       uint8_t depth) {
  using buffering::LeaseCode;
  if (!request)
    return buffering::LeaseRefusal{.code = LeaseCode::kBroken, .text = "this is no request for a lease"};
  if (request->version != buffering::kLeaseVersion)
    return buffering::LeaseRefusal{
        .code = LeaseCode::kVersion,
        .text = "this lender speaks version " + std::to_string(buffering::kLeaseVersion) +
                " of the lease, the switch version " + std::to_string(request->version)};
  if (depth == 0)
    return buffering::LeaseRefusal{.code = LeaseCode::kReads,
                                   .text = "the switch means to have no RDMA READ in flight"};
  return std::nullopt;
}

}  // namespace millrace::host
