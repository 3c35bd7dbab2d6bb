#include "buffering/lease.h"

#include <algorithm>

namespace millrace::buffering {

namespace {

constexpr uint32_t kMagic = 0x4D524C53;  // "MRLS"

struct Head {
  Be32 magic = kMagic;
  uint8_t version = kLeaseVersion;
  uint8_t code = 0;    // of a refusal
  uint8_t length = 0;  // of a refusal's text
  uint8_t reserved = 0;
};
struct RequestBytes {
  Head head;
  Be32 instance, reserved;
  Be64 bytes;
};
static_assert(sizeof(RequestBytes) == LeaseRequest::kBytes);
struct ReplyBytes {
  Head head;
  Be32 rkey, reserved;
  Be64 address, bytes;
};
static_assert(sizeof(ReplyBytes) == LeaseReply::kBytes);

template <typename T>
std::array<uint8_t, sizeof(T)> bytes_of(const T& t) {
  std::array<uint8_t, sizeof(T)> out;
  std::memcpy(out.data(), &t, sizeof(T));
  return out;
}

template <typename T>
bool read(std::span<const uint8_t> bytes, T& t) {
  if (bytes.size() < sizeof(T)) return false;
  std::memcpy(&t, bytes.data(), sizeof(T));
  return true;
}

std::optional<Head> head_of(std::span<const uint8_t> bytes) {
  Head head;
  if (!read(bytes, head) || head.magic.value() != kMagic) return std::nullopt;
  return head;
}

}  // namespace

std::array<uint8_t, LeaseRequest::kBytes> encode(const LeaseRequest& r) {
  return bytes_of(RequestBytes{{.version = r.version}, r.instance, uint32_t{0}, r.bytes});
}

std::array<uint8_t, LeaseReply::kBytes> encode(const LeaseReply& r) {
  return bytes_of(ReplyBytes{{.version = r.version}, r.rkey, uint32_t{0}, r.address, r.bytes});
}

std::vector<uint8_t> encode(const LeaseRefusal& r) {
  const std::string text = r.text.substr(0, LeaseRefusal::kTextBytesMax);
  const Head head{.version = r.version,
                  .code = static_cast<uint8_t>(r.code),
                  .length = static_cast<uint8_t>(text.size())};
  std::vector<uint8_t> out(sizeof head + text.size());
  std::memcpy(out.data(), &head, sizeof head);
  std::copy(text.begin(), text.end(), out.begin() + sizeof head);
  return out;
}

std::optional<LeaseRequest> decode_lease_request(std::span<const uint8_t> bytes) {
  const auto head = head_of(bytes);
  if (!head) return std::nullopt;
  LeaseRequest r{.version = head->version};
  if (r.version != kLeaseVersion) return r;
  RequestBytes b;
  if (!read(bytes, b)) return std::nullopt;
  r.instance = b.instance.value();
  r.bytes = b.bytes.value();
  return r;
}

std::optional<LeaseReply> decode_lease_reply(std::span<const uint8_t> bytes) {
  const auto head = head_of(bytes);
  if (!head) return std::nullopt;
  LeaseReply r{.version = head->version};
  if (r.version != kLeaseVersion) return r;
  ReplyBytes b;
  if (!read(bytes, b)) return std::nullopt;
  r.rkey = b.rkey.value();
  r.address = b.address.value();
  r.bytes = b.bytes.value();
  if (r.bytes > UINT64_MAX - r.address) return std::nullopt;
  return r;
}

std::optional<LeaseRefusal> decode_lease_refusal(std::span<const uint8_t> bytes) {
  const auto head = head_of(bytes);
  if (!head) return std::nullopt;
  LeaseRefusal r{.version = head->version};
  if (r.version != kLeaseVersion) return r;
  const auto text = bytes.subspan(sizeof(Head));
  if (head->length > text.size() || head->length > LeaseRefusal::kTextBytesMax) return std::nullopt;
  r.code = static_cast<LeaseCode>(head->code);
  // It ends up on a terminal.
  for (const uint8_t c : text.first(head->length))
    r.text += c >= 0x20 && c < 0x7F ? static_cast<char>(c) : '?';
  return r;
}

}  // namespace millrace::buffering
