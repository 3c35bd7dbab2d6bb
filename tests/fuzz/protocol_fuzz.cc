// The messages of the aggregation protocol: whatever bytes come, each decoder takes them or leaves them; what
// it takes is encoded and decoded again without loss. A segment header that passes the check must be one that
// the engine can act on.
#include <memory>

#include "aggregation/protocol.h"
#include "aggregation/reduce.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {
namespace {

using namespace aggregation;

void join_request(std::span<const uint8_t> bytes) {
  const auto m = decode_join_request(bytes);
  if (!m) return;
  FUZZ_CHECK(bytes.size() >= kJoinRequestBytes);
  const auto encoded = encode(*m);
  // Of a foreign version only the version is read.
  FUZZ_CHECK(encoded[4] == bytes[4]);
  FUZZ_CHECK(m->version != kProtocolVersion || std::equal(encoded.begin(), encoded.end(), bytes.begin()));
  const auto tag = join_tag(*m, text_of(bytes.subspan(kJoinRequestBytes)), {}, {}, 1);
  FUZZ_CHECK(tag == join_tag(*m, text_of(bytes.subspan(kJoinRequestBytes)), {}, {}, 1));
}

void join_reply(std::span<const uint8_t> bytes) {
  const auto m = decode_join_reply(bytes);
  if (!m) return;
  const auto again = decode_join_reply(encode(*m));
  FUZZ_CHECK(again && again->version == m->version && again->group == m->group);
  FUZZ_CHECK(again->window_limit == m->window_limit && again->segment_limit == m->segment_limit &&
             again->features == m->features);
}

void join_reject(std::span<const uint8_t> bytes) {
  const auto m = decode_join_reject(bytes);
  if (!m) return;
  FUZZ_CHECK(m->text.size() <= bytes.size() && !name(m->code).empty() == (m->code != Code{}));
  const auto encoded = encode(*m);
  FUZZ_CHECK(encoded.size() <= 148, "does not fit a REJ");
  const auto again = decode_join_reject(encoded);
  FUZZ_CHECK(again && again->code == m->code && again->mtu_code == m->mtu_code);
  FUZZ_CHECK(m->text.starts_with(again->text) && (m->text.size() > 140 || again->text == m->text));
}

void switch_message(std::span<const uint8_t> bytes) {
  const ControlMessage m = decode_control_message(bytes);
  FUZZ_CHECK(!(m.start && m.terminal));
  if (m.start) {
    FUZZ_CHECK(!m.start->weights.empty() && m.start->weights.size() <= kStripesMax);
    const auto encoded = encode(*m.start);
    FUZZ_CHECK(encoded.size() <= kMessageBytesMax);
    const auto again = decode_control_message(encoded).start;
    FUZZ_CHECK(again && again->window == m.start->window && again->mtu_code == m.start->mtu_code);
    FUZZ_CHECK(again->group == m.start->group && again->segment_bytes == m.start->segment_bytes);
    FUZZ_CHECK(again->world == m.start->world && again->weights == m.start->weights);
  }
  if (m.terminal) {
    FUZZ_CHECK(m.terminal->ranks.size() <= 16 && m.terminal->text.size() <= bytes.size());
    const auto encoded = encode(*m.terminal);
    FUZZ_CHECK(encoded.size() <= kMessageBytesMax);
    const auto again = decode_control_message(encoded).terminal;
    FUZZ_CHECK(again && again->code == m.terminal->code && again->group == m.terminal->group);
    FUZZ_CHECK(again->operation == m.terminal->operation && again->ranks == m.terminal->ranks);
    FUZZ_CHECK(m.terminal->text.starts_with(again->text));
  }
}

void segment_header(std::span<const uint8_t> bytes, uint32_t segment_bytes) {
  if (bytes.size() < kSegmentHeaderBytes) return;
  constexpr uint16_t world = 4;
  const auto& h = *reinterpret_cast<const SegmentHeader*>(bytes.data());
  const char* wrong = check(h, segment_bytes, world);
  FUZZ_CHECK(wrong == nullptr || *wrong != 0);
  if (wrong) return;
  const uint64_t length = h.length.value(), offset = h.offset.value(), total = h.total.value();
  FUZZ_CHECK(h.magic.value() == kMagic && h.version == kProtocolVersion);
  const SegmentShape s = shape(h, world);
  FUZZ_CHECK(s.payload <= segment_bytes && offset <= total && length <= total - offset);
  const auto mine = s.receives(h.rank.value());
  FUZZ_CHECK(mine.begin <= mine.end && mine.end <= s.payload);
  FUZZ_CHECK(h.result_address.value() + mine.bytes() >= h.result_address.value());
  FUZZ_CHECK(h.payload_bytes.value() == (s.contributes(h.rank.value()) ? s.payload : 0));
  // Every byte of a result goes to one rank, to all, or to all but the one that has it.
  uint64_t received = 0, contributors = 0;
  for (uint16_t r = 0; r < world; r++)
    received += s.receives(r).bytes(), contributors += s.contributes(r) ? 1 : 0;
  FUZZ_CHECK(contributors == s.contributors());
  FUZZ_CHECK(received == s.payload || received == uint64_t{world} * s.payload ||
             (contributors == 1 && received == uint64_t{world - 1} * s.payload));
  const auto type = static_cast<DataType>(h.type);
  const auto op = static_cast<ReduceOp>(h.op);
  FUZZ_CHECK(element_bytes(type) != 0 && length % element_bytes(type) == 0 &&
             offset % element_bytes(type) == 0);
  FUZZ_CHECK(!name(type).empty() && !name(op).empty() && !name(s.collective).empty());
  if (length == 0 || !reduces(s.collective)) return;
  // The payload behind the header, added to itself.
  const auto payload = bytes.subspan(kSegmentHeaderBytes);
  const size_t unit = s.wire == type ? element_bytes(type) : 64;
  const size_t n = std::min<size_t>(payload.size(), s.payload) / unit * unit;
  const Reducer reducer = Reducer::get(type, op, s.wire);
  Bytes sum(payload.begin(), payload.begin() + static_cast<ptrdiff_t>(n));
  if (is_wide(s.wire)) {
    std::vector<float> wide(wide_elements(s.wire, n));
    reducer.widen(wide.data(), payload.data(), n);
    reducer.accumulate_wide(wide.data(), payload.data(), n);
    reducer.finish_wide(wide.data(), n, world);
    reducer.narrow(sum.data(), wide.data(), n);
  } else {
    reducer.accumulate(sum.data(), payload.data(), n);
    reducer.finish(sum.data(), n, world);
  }
}

void run(std::span<const uint8_t> data) {
  Input in(data);
  const uint8_t what = in.byte();
  const auto rest = in.rest();
  if (rest.size() > 2048) return;
  const auto copy = std::make_unique<uint8_t[]>(rest.size());
  std::copy(rest.begin(), rest.end(), copy.get());
  const std::span<const uint8_t> bytes(copy.get(), rest.size());
  switch (what % 5) {
    case 0:
      return join_request(bytes);
    case 1:
      return join_reply(bytes);
    case 2:
      return join_reject(bytes);
    case 3:
      return switch_message(bytes);
    case 4:
      return segment_header(bytes, what & 0x80 ? 65472 : 192);
  }
}

}  // namespace
MILLRACE_FUZZ_TARGET("protocol", run)
}  // namespace millrace::fuzz
