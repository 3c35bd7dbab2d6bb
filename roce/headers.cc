#include "roce/headers.h"

namespace millrace::roce {
namespace {

enum : unsigned {  // what a row of the table says about its opcode
  kF = 1 << 0,
  kM = 1 << 1,
  kL = 1 << 2,
  kO = 1 << 3,  // place in the message
  kS = 1 << 4,
  kW = 1 << 5,
  kReq = 1 << 6,
  kRsp = 1 << 7,  // kind
  kReth = 1 << 8,
  kAeth = 1 << 9,
  kImm = 1 << 10,
  kDeth = 1 << 11,
  kIeth = 1 << 12,
  kAtomic = 1 << 13,
  kAtomicAck = 1 << 14,
  kOther = 1 << 15,  // kOther: not RC
  kCnpBody = 1 << 16
};
struct Row {
  Opcode opcode;
  std::string_view name;
  unsigned what;
};
constexpr Row kRows[] = {
    {Opcode::kSendFirst, "SEND First", kReq | kS | kF},
    {Opcode::kSendMiddle, "SEND Middle", kReq | kS | kM},
    {Opcode::kSendLast, "SEND Last", kReq | kS | kL},
    {Opcode::kSendLastImm, "SEND Last Immediate", kReq | kS | kL | kImm},
    {Opcode::kSendOnly, "SEND Only", kReq | kS | kO},
    {Opcode::kSendOnlyImm, "SEND Only Immediate", kReq | kS | kO | kImm},
    {Opcode::kWriteFirst, "RDMA WRITE First", kReq | kW | kF | kReth},
    {Opcode::kWriteMiddle, "RDMA WRITE Middle", kReq | kW | kM},
    {Opcode::kWriteLast, "RDMA WRITE Last", kReq | kW | kL},
    {Opcode::kWriteLastImm, "RDMA WRITE Last Immediate", kReq | kW | kL | kImm},
    {Opcode::kWriteOnly, "RDMA WRITE Only", kReq | kW | kO | kReth},
    {Opcode::kWriteOnlyImm, "RDMA WRITE Only Immediate", kReq | kW | kO | kReth | kImm},
    {Opcode::kReadRequest, "RDMA READ Request", kReq | kO | kReth},
    {Opcode::kReadResponseFirst, "RDMA READ Response First", kRsp | kF | kAeth},
    {Opcode::kReadResponseMiddle, "RDMA READ Response Middle", kRsp | kM},
    {Opcode::kReadResponseLast, "RDMA READ Response Last", kRsp | kL | kAeth},
    {Opcode::kReadResponseOnly, "RDMA READ Response Only", kRsp | kO | kAeth},
    {Opcode::kAcknowledge, "Acknowledge", kRsp | kO | kAeth},
    {Opcode::kAtomicAcknowledge, "ATOMIC Acknowledge", kRsp | kO | kAeth | kAtomicAck},
    {Opcode::kCompareSwap, "CmpSwap", kReq | kO | kAtomic},
    {Opcode::kFetchAdd, "FetchAdd", kReq | kO | kAtomic},
    {Opcode::kSendLastInvalidate, "SEND Last Invalidate", kReq | kS | kL | kIeth},
    {Opcode::kSendOnlyInvalidate, "SEND Only Invalidate", kReq | kS | kO | kIeth},
    {Opcode::kUdSendOnly, "UD SEND Only", kOther | kReq | kS | kO | kDeth},
    {Opcode::kUdSendOnlyImm, "UD SEND Only Immediate", kOther | kReq | kS | kO | kDeth | kImm},
    {Opcode::kCnp, "CNP", kOther | kCnpBody},
};

struct Table {
  OpcodeTraits traits[256];
  std::string_view names[256];
  constexpr Table() {
    for (const Row& r : kRows) {
      OpcodeTraits& t = traits[static_cast<uint8_t>(r.opcode)];
      const unsigned w = r.what;
      t.known = true;
      t.rc = !(w & kOther);
      t.request = w & kReq, t.response = w & kRsp;
      t.first = w & kF, t.middle = w & kM, t.last = w & kL, t.only = w & kO;
      t.send = w & kS, t.write = w & kW;
      t.reth = w & kReth, t.aeth = w & kAeth, t.imm = w & kImm, t.deth = w & kDeth, t.ieth = w & kIeth;
      t.atomic = w & kAtomic, t.atomic_ack = w & kAtomicAck;
      t.header_bytes = static_cast<uint8_t>((t.reth ? 16 : 0) + (t.aeth ? 4 : 0) + (t.imm ? 4 : 0) +
                                            (t.deth ? 8 : 0) + (t.ieth ? 4 : 0) + (t.atomic ? 28 : 0) +
                                            (t.atomic_ack ? 8 : 0) + (w & kCnpBody ? 16 : 0));
      names[static_cast<uint8_t>(r.opcode)] = r.name;
    }
  }
};
constexpr Table kTable;

}  // namespace

const OpcodeTraits& traits(uint8_t opcode) noexcept { return kTable.traits[opcode]; }

std::string_view opcode_name(uint8_t opcode) noexcept {
  return kTable.names[opcode].empty() ? "unknown" : kTable.names[opcode];
}

Time rnr_wait(uint8_t timer_code) noexcept {
  static constexpr uint32_t ten_us[32] = {
      65536, 1,   2,   3,   4,    6,    8,    12,   16,   24,   32,   48,    64,    96,    128,   192,
      256,   384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return std::chrono::microseconds(10 * static_cast<int64_t>(ten_us[timer_code & 31]));
}

uint32_t mtu_bytes(uint8_t code) noexcept { return code >= 1 && code <= 5 ? 128u << code : 0; }

uint8_t mtu_code(uint32_t bytes) noexcept {
  for (uint8_t c = 1; c <= 5; c++)
    if (mtu_bytes(c) == bytes) return c;
  return 0;
}

}  // namespace millrace::roce
