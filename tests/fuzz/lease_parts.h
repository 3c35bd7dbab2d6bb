// Who is there in the lease target: lenders, genuine ones and fakes, and the stranger's connections to them.
#pragma once

#include <memory>
#include <vector>

#include "buffering/lease.h"
#include "host/memd_soft.h"
#include "tests/fuzz/wire.h"

namespace millrace::fuzz::lease {

inline constexpr uint32_t kMtu = 256, kSlot = 300, kIds = 16;
inline constexpr size_t kPart = 4096, kGuard = 64;
inline constexpr size_t kWireMax = 96, kHistoryMax = 16, kStepsMax = 120;
inline constexpr uint8_t kGuardByte = 0xC7;
inline constexpr size_t kStore = 0, kStranger = 3;  // between them the lenders

// A server that lends, or one that says that it does.
struct Lender {
  Lender(uint32_t parts_of_it, bool fake_one)
      : parts(parts_of_it), fake(fake_one), memory(2 * kGuard + parts * kPart, kGuardByte) {}
  std::span<uint8_t> lent() { return std::span(memory).subspan(kGuard, parts * kPart); }

  uint32_t parts;
  bool fake, alive = true;
  Bytes memory;
  HeapFramePool pool{1024, 512, true};
  std::unique_ptr<host::LeaseTable> table;
  std::unique_ptr<host::SoftLender> lender;
  std::unique_ptr<roce::CmAgent> agent;  // a fake's
};

// The stranger's connection to a lender.
struct Borrowed {
  Qpn qpn;
  Psn next;  // where he goes on
  buffering::LeaseReply lease;
  struct Question {
    Psn first;
    uint32_t packets;
    uint64_t address, bytes;
  };
  std::vector<Question> asked;
};

}  // namespace millrace::fuzz::lease
