#include "aggregation/protocol.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <cstring>

namespace millrace::aggregation {
namespace {

constexpr uint8_t kTypeStart = 0x80, kTypeTerminal = 0x81, kTypeMembers = 0x82;
constexpr uint8_t kMembersGone = 1;
constexpr uint8_t kMtuWait = 0x80;  // beside the MTU's code

struct JoinRequestWire {
  Be32 magic;
  uint8_t version, stripe, stripes, mtu;
  uint8_t key[16];
  Be16 rank, world;
  Be32 tenant;
  Be64 nonce;
  uint8_t tag[16];
};
static_assert(sizeof(JoinRequestWire) == kJoinRequestBytes);

struct JoinReplyWire {
  Be32 magic;
  uint8_t version, zero8;
  Be16 zero16;
  Be32 group, window_limit, segment_limit, features;
};
static_assert(sizeof(JoinReplyWire) == 24);

struct JoinRejectWire {
  Be32 magic;
  Be16 code;
  uint8_t mtu, text_length;
};
static_assert(sizeof(JoinRejectWire) == 8);
constexpr size_t kRejectTextMax = 140;

struct StartWire {
  Be16 magic;
  uint8_t version, type;
  Be16 window;
  uint8_t mtu, stripes;
  Be32 group, segment_bytes;
  Be16 world, zero;
};
static_assert(sizeof(StartWire) == 20);

struct MembersWire {
  Be16 magic;
  uint8_t version, type;
  Be16 window;
  uint8_t flags, zero8;
  Be32 group, segment_bytes;
  Be16 ranges, zero;
};
static_assert(sizeof(MembersWire) == 20);

struct RangeWire {
  Be16 first, last;
};
static_assert(sizeof(MembersWire) + kMembersRangesMax * sizeof(RangeWire) <= kMessageBytesMax);

struct TerminalWire {
  Be16 magic;
  uint8_t version, type;
  Be16 code, text_length;
  Be32 group;
  Be16 ranks, zero;
  Be64 operation;
  Be16 rank[16];
};
static_assert(sizeof(TerminalWire) == 56);
constexpr size_t kTerminalTextMax = kMessageBytesMax - sizeof(TerminalWire);

// At most `max` bytes of UTF-8, never ending inside a character.
std::string_view shorten(std::string_view text, size_t max) {
  if (text.size() <= max) return text;
  while (max > 0 && (static_cast<uint8_t>(text[max]) & 0xC0) == 0x80) max--;
  return text.substr(0, max);
}

template <typename Wire>
std::vector<uint8_t> bytes_of(const Wire& w, std::span<const uint8_t> more = {}) {
  std::vector<uint8_t> out(sizeof(w) + more.size());
  std::memcpy(out.data(), &w, sizeof(w));
  if (!more.empty()) std::memcpy(out.data() + sizeof(w), more.data(), more.size());
  return out;
}

template <typename Wire>
bool read(std::span<const uint8_t> bytes, Wire& w) {
  if (bytes.size() < sizeof(w)) return false;
  std::memcpy(&w, bytes.data(), sizeof(w));
  return true;
}

std::span<const uint8_t> as_bytes(std::string_view s) {
  return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
}

std::string text_of(std::span<const uint8_t> bytes, size_t at, size_t length) {
  if (at > bytes.size()) return {};
  length = std::min(length, bytes.size() - at);
  return {reinterpret_cast<const char*>(bytes.data()) + at, length};
}

}  // namespace

std::string_view name(Code code) noexcept {
  static constexpr std::string_view names[] = {"",
                                               "mismatch",
                                               "member lost",
                                               "late",
                                               "aborted",
                                               "quota",
                                               "not authorised",
                                               "version",
                                               "MTU",
                                               "duplicate rank",
                                               "disagreement",
                                               "join time-out",
                                               "shutting down",
                                               "protocol breach",
                                               "no memory"};
  const auto i = static_cast<size_t>(code);
  return i < std::size(names) ? names[i] : "unknown code";
}

std::array<uint8_t, kJoinRequestBytes> encode(const JoinRequest& j) {
  JoinRequestWire w{};
  w.magic = j.child ? kChildMagic : kJoinMagic;
  w.version = j.version;
  w.stripe = j.stripe;
  w.stripes = j.stripes;
  w.mtu = static_cast<uint8_t>(j.mtu_code | (j.wait ? kMtuWait : 0));
  std::copy(j.key.begin(), j.key.end(), w.key);
  w.rank = j.rank;
  w.world = j.world;
  w.tenant = j.tenant;
  w.nonce = j.nonce;
  std::copy(j.tag.begin(), j.tag.end(), w.tag);
  return std::bit_cast<std::array<uint8_t, kJoinRequestBytes>>(w);
}

std::optional<JoinRequest> decode_join_request(std::span<const uint8_t> bytes) {
  JoinRequestWire w;
  if (!read(bytes, w) || (w.magic.value() != kJoinMagic && w.magic.value() != kChildMagic))
    return std::nullopt;
  JoinRequest j;
  j.child = w.magic.value() == kChildMagic;
  j.version = w.version;
  if (j.version != kProtocolVersion) return j;
  std::copy(w.key, w.key + 16, j.key.begin());
  j.stripe = w.stripe;
  j.stripes = w.stripes;
  j.wait = (w.mtu & kMtuWait) != 0;
  j.mtu_code = w.mtu & ~kMtuWait;
  j.rank = w.rank.value();
  j.world = w.world.value();
  j.tenant = w.tenant.value();
  j.nonce = w.nonce.value();
  std::copy(w.tag, w.tag + 16, j.tag.begin());
  return j;
}

std::array<uint8_t, 16> join_tag(const JoinRequest& j, std::string_view secret, const IpAddress& host_gid,
                                 const IpAddress& switch_gid, uint32_t host_qpn) {
  uint8_t message[40 + 16 + 16 + 4];
  const auto encoded = encode(j);
  std::memcpy(message, encoded.data(), 40);
  std::memcpy(message + 40, host_gid.bytes.data(), 16);
  std::memcpy(message + 56, switch_gid.bytes.data(), 16);
  const Be32 qpn = host_qpn;
  std::memcpy(message + 72, &qpn, 4);
  uint8_t digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), message, sizeof(message), digest,
       &length);
  std::array<uint8_t, 16> tag;
  std::copy(digest, digest + 16, tag.begin());
  return tag;
}

std::vector<uint8_t> encode(const JoinReply& r) {
  JoinReplyWire w{};
  w.magic = kJoinMagic;
  w.version = r.version;
  w.group = r.group;
  w.window_limit = r.window_limit;
  w.segment_limit = r.segment_limit;
  w.features = r.features;
  return bytes_of(w);
}

std::optional<JoinReply> decode_join_reply(std::span<const uint8_t> bytes) {
  JoinReplyWire w;
  if (!read(bytes, w) || w.magic.value() != kJoinMagic) return std::nullopt;
  return JoinReply{w.version, w.group.value(), w.window_limit.value(), w.segment_limit.value(),
                   w.features.value()};
}

std::vector<uint8_t> encode(const JoinReject& r) {
  const std::string_view text = shorten(r.text, kRejectTextMax);
  JoinRejectWire w{};
  w.magic = kJoinMagic;
  w.code = static_cast<uint16_t>(r.code);
  w.mtu = r.mtu_code;
  w.text_length = static_cast<uint8_t>(text.size());
  return bytes_of(w, as_bytes(text));
}

std::optional<JoinReject> decode_join_reject(std::span<const uint8_t> bytes) {
  JoinRejectWire w;
  if (!read(bytes, w) || w.magic.value() != kJoinMagic) return std::nullopt;
  return JoinReject{static_cast<Code>(w.code.value()), w.mtu, text_of(bytes, sizeof(w), w.text_length)};
}

std::vector<uint8_t> encode(const Start& s) {
  StartWire w{};
  w.magic = kMagic;
  w.version = kProtocolVersion;
  w.type = kTypeStart;
  w.window = s.window;
  w.mtu = s.mtu_code;
  w.stripes = static_cast<uint8_t>(s.weights.size());
  w.group = s.group;
  w.segment_bytes = s.segment_bytes;
  w.world = s.world;
  return bytes_of(w, s.weights);
}

std::vector<uint8_t> encode(const Terminal& t) {
  const std::string_view text = shorten(t.text, kTerminalTextMax);
  TerminalWire w{};
  w.magic = kMagic;
  w.version = kProtocolVersion;
  w.type = kTypeTerminal;
  w.code = static_cast<uint16_t>(t.code);
  w.text_length = static_cast<uint16_t>(text.size());
  w.group = t.group;
  w.ranks = static_cast<uint16_t>(t.ranks.size());
  w.operation = t.operation;
  for (size_t i = 0; i < std::min<size_t>(16, t.ranks.size()); i++) w.rank[i] = t.ranks[i];
  return bytes_of(w, as_bytes(text));
}

std::vector<uint8_t> encode(const Members& m) {
  MembersWire w{};
  w.magic = kMagic;
  w.version = kProtocolVersion;
  w.type = kTypeMembers;
  w.window = m.window;
  w.flags = m.gone ? kMembersGone : 0;
  w.group = m.group;
  w.segment_bytes = m.segment_bytes;
  w.ranges = static_cast<uint16_t>(m.ranks.size());
  std::vector<uint8_t> out = bytes_of(w);
  for (const RankRange& r : m.ranks) {
    const RangeWire range{r.first, static_cast<uint16_t>(r.first + r.count - 1)};
    const auto* at = reinterpret_cast<const uint8_t*>(&range);
    out.insert(out.end(), at, at + sizeof(range));
  }
  return out;
}

bool is_control_message(std::span<const uint8_t> bytes) noexcept {
  return bytes.size() >= 4 && bytes[0] == kMagic >> 8 && bytes[1] == (kMagic & 0xFF) &&
         bytes[2] == kProtocolVersion && (bytes[3] & 0x80) != 0;
}

ControlMessage decode_control_message(std::span<const uint8_t> bytes) {
  ControlMessage m;
  if (!is_control_message(bytes)) return m;
  StartWire s;
  TerminalWire t;
  MembersWire w;
  if (bytes[3] == kTypeStart && read(bytes, s)) {
    if (s.stripes == 0 || s.stripes > kStripesMax || bytes.size() < sizeof(s) + s.stripes) return m;
    const uint8_t* weights = bytes.data() + sizeof(s);
    m.start = Start{s.window.value(),        s.mtu,           s.group.value(),
                    s.segment_bytes.value(), s.world.value(), {weights, weights + s.stripes}};
  } else if (bytes[3] == kTypeTerminal && read(bytes, t)) {
    Terminal out{static_cast<Code>(t.code.value()),
                 t.group.value(),
                 t.operation.value(),
                 {},
                 text_of(bytes, sizeof(t), t.text_length.value())};
    for (size_t i = 0; i < std::min<size_t>(16, t.ranks.value()); i++) out.ranks.push_back(t.rank[i].value());
    m.terminal = std::move(out);
  } else if (bytes[3] == kTypeMembers && read(bytes, w)) {
    const size_t n = w.ranges.value();
    if (n > kMembersRangesMax || bytes.size() < sizeof(w) + n * sizeof(RangeWire)) return m;
    Members out{
        w.window.value(), (w.flags & kMembersGone) != 0, w.group.value(), w.segment_bytes.value(), {}};
    for (size_t i = 0; i < n; i++) {
      RangeWire r;
      std::memcpy(&r, bytes.data() + sizeof(w) + i * sizeof(r), sizeof(r));
      if (r.first.value() > r.last.value()) return m;
      out.ranks.push_back({r.first.value(), uint32_t{r.last.value()} - r.first.value() + 1});
    }
    m.members = std::move(out);
  }
  return m;
}

SegmentShape shape(const SegmentHeader& h, uint16_t world) noexcept {
  SegmentShape s;
  s.collective = static_cast<Collective>(h.collective);
  s.op = static_cast<ReduceOp>(h.op);
  s.type = static_cast<DataType>(h.type);
  s.wire = static_cast<DataType>(h.wire_type);
  s.world = world;
  s.root = h.root.value();
  s.total = h.total.value();
  s.offset = h.offset.value();
  s.length = h.length.value();
  s.payload = static_cast<uint32_t>(wire_bytes(s.type, s.wire, s.length));
  return s;
}

namespace {

// What is the same for every member; `child`: with ranks of its own.
const char* check_segment(const SegmentHeader& h, uint32_t segment_bytes, uint16_t world,
                          bool child) noexcept {
  if (h.magic.value() != kMagic) return "wrong magic";
  if (h.version != kProtocolVersion) return "unknown version";
  const auto collective = static_cast<Collective>(h.collective);
  const auto type = static_cast<DataType>(h.type), wire = static_cast<DataType>(h.wire_type);
  const auto op = static_cast<ReduceOp>(h.op);
  if (collective < Collective::kAllReduce || collective > Collective::kBarrier) return "unknown collective";
  const size_t element = element_bytes(type);
  if (element == 0) return "unknown datatype";
  if (h.flags & ~(kFlagDeterministic | kFlagLast | kFlagHeaderOnly | (child ? kFlagWide : 0)))
    return "unknown flags";
  if (h.zero.value() != 0) return "reserved bytes are not zero";
  if (reduces(collective)) {
    if (!supported(type, op)) return "unsupported operator for the datatype";
    if (!wire_supported(type, op, wire)) return "unsupported wire type";
  } else {
    if (op != ReduceOp::kNone) return "an operator where nothing is reduced";
    if (wire != type) return "unsupported wire type";
  }
  const uint16_t root = h.root.value();
  if (has_root(collective) ? root >= world : root != 0) return "a root that is no rank";
  const uint64_t total = h.total.value(), offset = h.offset.value();
  const uint32_t length = h.length.value();
  // The first comparison keeps the second from overflowing.
  if (length > uint64_t{64} * segment_bytes || wire_bytes(type, wire, length) > segment_bytes)
    return "length exceeds the segment size";
  if (offset > total || length > total - offset) return "offset and length exceed the total";
  if (total % element || offset % element || length % element) return "not a multiple of the element size";
  if (collective == Collective::kBarrier && total != 0) return "a barrier carries data";
  if (has_shards(collective) && total % (world * element) != 0)
    return "a total that does not divide into shards";
  const uint64_t shard = total / world;
  if (length != 0 && (collective == Collective::kAllGather || (has_shards(collective) && wire != type)) &&
      offset / shard != (offset + length - 1) / shard)
    return "a segment that straddles shards";
  if (((h.flags & kFlagLast) != 0) != (offset + length == total))
    return "the last flag does not match the offset";
  return nullptr;
}

// What depends on the member's part.
const char* check_part(const SegmentHeader& h, bool contributes, uint32_t payload,
                       uint32_t received) noexcept {
  const uint64_t address = h.result_address.value();
  if (address + received < address) return "result address wraps around";
  const bool header_only = h.flags & kFlagHeaderOnly;
  if (header_only == contributes) return "header-only does not match the member's part";
  if (h.payload_bytes.value() != (header_only ? 0 : payload)) return "payload bytes do not match the length";
  return nullptr;
}

}  // namespace

const char* check(const SegmentHeader& h, uint32_t segment_bytes, uint16_t world) noexcept {
  if (const char* wrong = check_segment(h, segment_bytes, world, false)) return wrong;
  const SegmentShape s = shape(h, world);
  const uint16_t rank = h.rank.value();
  return check_part(h, s.contributes(rank), s.payload, s.receives(rank).bytes());
}

const char* check(const SegmentHeader& h, uint32_t segment_bytes, uint16_t world,
                  const RankSet& ranks) noexcept {
  if (const char* wrong = check_segment(h, segment_bytes, world, true)) return wrong;
  const SegmentShape s = shape(h, world);
  const bool wide = s.partial_is_wide();
  if (((h.flags & kFlagWide) != 0) != wide) return "a partial that is not as wide as its type asks for";
  return check_part(h, s.contributes(ranks), s.partial_bytes(), s.receives(ranks).bytes());
}

}  // namespace millrace::aggregation
