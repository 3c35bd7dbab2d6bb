// What a switch and a lender of memory say to each other while they connect (REMOTE.md): private data of the
// connection manager's REQ, REP and REJ. Plain values and their bytes; no bytes make decoding throw.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "roce/types.h"

namespace millrace::buffering {

inline constexpr uint8_t kLeaseVersion = 1;
inline constexpr uint16_t kLenderPort = 18616;  // of rdma_cm's TCP port space

struct LeaseRequest {
  static constexpr size_t kBytes = 24;
  uint8_t version = kLeaseVersion;
  // Which of the borrowers behind one address this is. A new lease of the same borrower replaces the old one.
  uint32_t instance = 0;
  uint64_t bytes = 0;  // wanted; 0: as much as the lender gives
  friend bool operator==(const LeaseRequest&, const LeaseRequest&) = default;
};

struct LeaseReply {
  static constexpr size_t kBytes = 32;
  uint8_t version = kLeaseVersion;
  uint32_t rkey = 0;
  uint64_t address = 0;
  uint64_t bytes = 0;
  friend bool operator==(const LeaseReply&, const LeaseReply&) = default;
};

enum class LeaseCode : uint8_t {
  kVersion = 1,  // the text names both
  kFull = 2,     // nothing is left to lend
  kMtu = 3,      // the path MTU asked for is more than the lender's device carries
  kReads = 4,    // without READs in flight there is nothing to lend for
  kBroken = 5,   // the lender cannot: the text says why
};
struct LeaseRefusal {
  static constexpr size_t kTextBytesMax = 120;
  uint8_t version = kLeaseVersion;
  LeaseCode code = LeaseCode::kBroken;
  std::string text;  // printable ASCII; cut to kTextBytesMax
};

std::array<uint8_t, LeaseRequest::kBytes> encode(const LeaseRequest& request);
std::array<uint8_t, LeaseReply::kBytes> encode(const LeaseReply& reply);
std::vector<uint8_t> encode(const LeaseRefusal& refusal);

// std::nullopt for what is none of these. Of a version that is not ours nothing but the version is read.
std::optional<LeaseRequest> decode_lease_request(std::span<const uint8_t> bytes);
std::optional<LeaseReply> decode_lease_reply(std::span<const uint8_t> bytes);
std::optional<LeaseRefusal> decode_lease_refusal(std::span<const uint8_t> bytes);

}  // namespace millrace::buffering
