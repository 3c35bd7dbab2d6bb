// The aggregation protocol's messages, version 1: byte layouts, codes, encoding and checking. Shared by
// switch and host. Pure; the segment header is read in place on the hot path, everything else is encoded and
// decoded whole. The protocol is described in aggregation/PROTOCOL.md.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "aggregation/collective.h"
#include "aggregation/datatype.h"
#include "roce/types.h"

namespace millrace::aggregation {

inline constexpr uint8_t kProtocolVersion = 1;
inline constexpr uint16_t kMagic = 0x4D52;          // "MR"
inline constexpr uint32_t kJoinMagic = 0x4D4C5243;  // "MLRC"
inline constexpr uint32_t kChildMagic =
    0x4D4C5253;  // "MLRS": a REQ of a member that stands for several ranks
inline constexpr uint16_t kDefaultPort = 18600;
inline constexpr uint32_t kSegmentHeaderBytes = 64;
inline constexpr uint32_t kMessageBytesMax = 512;  // START and terminal messages
inline constexpr size_t kStripesMax = 16;

// Terminal and REJ codes.
enum class Code : uint16_t {
  kMismatch = 1,
  kMemberLost,
  kLate,
  kAborted,
  kQuota,
  kNotAuthorised,
  kVersion,
  kMtu,
  kDuplicateRank,
  kDisagree,
  kJoinTimeout,
  kShuttingDown,
  kBreach,
  kNoMemory
};
std::string_view name(Code) noexcept;

enum Flags : uint8_t { kFlagDeterministic = 1, kFlagLast = 2, kFlagHeaderOnly = 4, kFlagWide = 8 };
// Of these, what members need not agree on.
inline constexpr uint8_t kFlagsOfMember = kFlagHeaderOnly | kFlagWide;

// In front of every segment, member → switch.
struct SegmentHeader {
  Be16 magic;
  uint8_t version = 0, collective = 0, op = 0, type = 0, wire_type = 0, flags = 0;
  Be32 group;
  Be16 rank, root;
  Be64 operation, total, offset;
  Be32 length, payload_bytes;
  Be64 result_address;
  Be32 result_rkey, zero;
};
static_assert(sizeof(SegmentHeader) == kSegmentHeaderBytes && alignof(SegmentHeader) == 1);

// REQ private data, 56 bytes.
struct JoinRequest {
  std::array<uint8_t, 16> key{};
  bool child = false;  // the magic: a member that stands for several ranks
  uint8_t version = kProtocolVersion;
  bool wait = false;  // for memory, instead of a refusal
  uint8_t stripe = 0, stripes = 1, mtu_code = 5;
  uint16_t rank = 0, world = 1;
  uint32_t tenant = 0;
  uint64_t nonce = 0;
  std::array<uint8_t, 16> tag{};
};
inline constexpr size_t kJoinRequestBytes = 56;
std::array<uint8_t, kJoinRequestBytes> encode(const JoinRequest&);
// nullopt: not our magic, or too short. A foreign version decodes as far as `version` (the rest is left
// alone).
std::optional<JoinRequest> decode_join_request(std::span<const uint8_t>);
// First 16 bytes of HMAC-SHA256(secret, bytes 0–39 of the encoding, host GID, switch GID, u32 host QPN).
std::array<uint8_t, 16> join_tag(const JoinRequest&, std::string_view secret, const IpAddress& host_gid,
                                 const IpAddress& switch_gid, uint32_t host_qpn);

// REP private data.
struct JoinReply {
  uint8_t version = kProtocolVersion;
  uint32_t group = 0, window_limit = 0, segment_limit = 0, features = 0;
};
std::vector<uint8_t> encode(const JoinReply&);
std::optional<JoinReply> decode_join_reply(std::span<const uint8_t>);

// REJ private data (CM reason 28).
struct JoinReject {
  Code code{};
  uint8_t mtu_code = 0;  // the right one, with Code::kMtu
  std::string text;      // ≤ 140 bytes
};
std::vector<uint8_t> encode(const JoinReject&);
std::optional<JoinReject> decode_join_reject(std::span<const uint8_t>);

// START, switch → member, down every queue pair.
struct Start {
  uint16_t window = 0;
  uint8_t mtu_code = 5;
  uint32_t group = 0, segment_bytes = 0;
  uint16_t world = 0;
  std::vector<uint8_t> weights;  // one per stripe
};
std::vector<uint8_t> encode(const Start&);

// Terminal, switch → member, down every queue pair: the group is over.
struct Terminal {
  Code code{};
  uint32_t group = 0;
  uint64_t operation = 0;
  std::vector<uint16_t> ranks;  // ≤ 16 are carried, all are counted
  std::string text;
};
std::vector<uint8_t> encode(const Terminal&);

// MEMBERS, child → parent, before START: ranks have come to it, or are gone.
struct Members {
  uint16_t window = 0;  // the child's limits
  bool gone = false;
  uint32_t group = 0, segment_bytes = 0;
  std::vector<RankRange> ranks;
};
inline constexpr size_t kMembersRangesMax = 120;
std::vector<uint8_t> encode(const Members&);  // of at most kMembersRangesMax ranges

// What a SEND that is no segment is; none of them for anything else.
struct ControlMessage {
  std::optional<Start> start;
  std::optional<Terminal> terminal;
  std::optional<Members> members;
};
ControlMessage decode_control_message(std::span<const uint8_t>);
// Whether a SEND is one, by its first four bytes; segments are not.
bool is_control_message(std::span<const uint8_t>) noexcept;

// What every result's immediate says.
constexpr uint32_t result_immediate(uint64_t segment_counter) {
  return static_cast<uint32_t>(segment_counter & 0xFFFFFF);
}

// Checks a segment header on its own (not against other members') as one of a group of `world` ranks: a
// sentence's fragment naming the first wrong field ("not a multiple of the element size"), or nullptr. No
// allocation.
const char* check(const SegmentHeader&, uint32_t segment_bytes, uint16_t world) noexcept;
// The same of a child's, which stands for `ranks`.
const char* check(const SegmentHeader&, uint32_t segment_bytes, uint16_t world,
                  const RankSet& ranks) noexcept;
// What a header that has passed check() says of its segment.
SegmentShape shape(const SegmentHeader&, uint16_t world) noexcept;

}  // namespace millrace::aggregation
