#include "host/local_message.h"

#include <algorithm>
#include <cstring>

namespace millrace::host {
namespace {

constexpr uint32_t kLocalMagic = 0x4D524C31;  // another program's socket is noticed

// Everything that has a fixed size; text and bytes follow.
struct LocalWire {
  uint32_t magic;
  LocalMessage::Kind kind;
  LinkError error;
  uint16_t rank;
  LocalHello hello;
  uint32_t seat;
  LocalLayout layout;
  aggregation::JoinReply join_reply;
  aggregation::Code code;
  uint16_t text_length, bytes_length;
};
static_assert(std::is_trivially_copyable_v<LocalWire>);

}  // namespace

std::vector<uint8_t> encode(const LocalMessage& m) {
  LocalWire w;
  std::memset(static_cast<void*>(&w), 0, sizeof w);
  w.magic = kLocalMagic;
  w.kind = m.kind;
  w.error = m.error;
  w.rank = m.rank;
  w.hello = m.hello;
  w.seat = m.seat;
  w.layout = m.layout;
  w.join_reply = m.join_reply;
  w.code = m.code;
  w.text_length = static_cast<uint16_t>(std::min<size_t>(m.text.size(), 512));
  w.bytes_length = static_cast<uint16_t>(std::min<size_t>(m.bytes.size(), aggregation::kMessageBytesMax));
  std::vector<uint8_t> out(sizeof w + w.text_length + w.bytes_length);
  uint8_t* at = out.data();
  std::memcpy(at, &w, sizeof w);
  std::copy_n(m.text.begin(), w.text_length, at + sizeof w);
  std::copy_n(m.bytes.begin(), w.bytes_length, at + sizeof w + w.text_length);
  return out;
}

std::optional<LocalMessage> decode_local_message(std::span<const uint8_t> bytes) {
  LocalWire w;
  if (bytes.size() < sizeof w) return std::nullopt;
  std::memcpy(static_cast<void*>(&w), bytes.data(), sizeof w);
  if (w.magic != kLocalMagic || bytes.size() != sizeof w + w.text_length + w.bytes_length)
    return std::nullopt;
  if (w.kind < LocalMessage::Kind::kHello || w.kind > LocalMessage::Kind::kGoodbye) return std::nullopt;
  LocalMessage m;
  m.kind = w.kind;
  m.error = w.error;
  m.rank = w.rank;
  m.hello = w.hello;
  m.seat = w.seat;
  m.layout = w.layout;
  m.join_reply = w.join_reply;
  m.code = w.code;
  const uint8_t* at = bytes.data() + sizeof w;
  m.text.assign(reinterpret_cast<const char*>(at), w.text_length);
  m.bytes.assign(at + w.text_length, at + w.text_length + w.bytes_length);
  return m;
}

}  // namespace millrace::host
