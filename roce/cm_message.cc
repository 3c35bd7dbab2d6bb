#include "roce/cm_message.h"

#include <algorithm>
#include <cassert>
#include <concepts>

namespace millrace::roce {

namespace {

constexpr uint32_t kHeaderBytes = 24;
constexpr uint8_t kBaseVersion = 1, kCmClass = 0x07, kCmClassVersion = 2, kMethodSend = 0x03;

// Fields as the wire's integers.
template <typename T>
uint64_t raw(T v) {
  return static_cast<uint64_t>(v);
}
uint64_t raw(Qpn v) { return v.value; }
uint64_t raw(Psn v) { return v.value(); }

template <typename T>
void assign(T& field, uint64_t v) {
  field = static_cast<T>(v);
}
void assign(Qpn& field, uint64_t v) { field = Qpn{static_cast<uint32_t>(v)}; }
void assign(Psn& field, uint64_t v) { field = Psn(static_cast<uint32_t>(v)); }

// Both directions walk the same layout(), so that they cannot disagree. Offsets are those of IBA's tables:
// bytes from the end of the MAD header, bits from the byte's most significant one.
class Reader {
 public:
  explicit Reader(const uint8_t* data) : data_(data) {}
  template <typename T>
  void bits(uint32_t byte, uint32_t bit, uint32_t width, T& field) const {
    uint64_t v = 0;
    for (uint32_t at = byte * 8 + bit, end = at + width; at < end;) {
      const uint32_t n = std::min(8 - at % 8, end - at);  // of this byte
      v = v << n | (data_[at / 8] >> (8 - at % 8 - n) & ((1u << n) - 1));
      at += n;
    }
    assign(field, v);
  }
  template <size_t N>
  void bytes(uint32_t byte, std::array<uint8_t, N>& field) const {
    std::memcpy(field.data(), data_ + byte, N);
  }

 private:
  const uint8_t* data_;
};

class Writer {
 public:
  explicit Writer(uint8_t* data) : data_(data) {}  // zeroed
  template <typename T>
  void bits(uint32_t byte, uint32_t bit, uint32_t width, const T& field) const {
    const uint64_t v = raw(field);
    assert((width == 64 || v >> width == 0) && "the value does not fit its field");
    for (uint32_t at = byte * 8 + bit, end = at + width; at < end;) {
      const uint32_t n = std::min(8 - at % 8, end - at);  // of this byte
      const uint64_t part = v >> (end - at - n) & ((1u << n) - 1);
      data_[at / 8] = static_cast<uint8_t>(data_[at / 8] | part << (8 - at % 8 - n));
      at += n;
    }
  }
  template <size_t N>
  void bytes(uint32_t byte, const std::array<uint8_t, N>& field) const {
    std::memcpy(data_ + byte, field.data(), N);
  }

 private:
  uint8_t* data_;
};

template <typename M, typename T>
concept Is = std::same_as<std::remove_const_t<M>, T>;

void layout(auto& c, Is<CmPathRecord> auto& p, uint32_t at) {
  c.bits(at + 0, 0, 16, p.local_lid);
  c.bits(at + 2, 0, 16, p.remote_lid);
  c.bytes(at + 4, p.local_gid.bytes);
  c.bytes(at + 20, p.remote_gid.bytes);
  c.bits(at + 36, 0, 20, p.flow_label);
  c.bits(at + 39, 2, 6, p.packet_rate);
  c.bits(at + 40, 0, 8, p.traffic_class);
  c.bits(at + 41, 0, 8, p.hop_limit);
  c.bits(at + 42, 0, 4, p.sl);
  c.bits(at + 42, 4, 1, p.subnet_local);
  c.bits(at + 43, 0, 5, p.local_ack_timeout);
}

void layout(auto& c, Is<ReqMessage> auto& m) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(5, 0, 24, m.vendor_id);
  c.bits(8, 0, 64, m.service_id);
  c.bits(16, 0, 64, m.local_ca_guid);
  c.bits(28, 0, 32, m.local_qkey);
  c.bits(32, 0, 24, m.local_qpn);
  c.bits(35, 0, 8, m.responder_resources);
  c.bits(36, 0, 24, m.local_eecn);
  c.bits(39, 0, 8, m.initiator_depth);
  c.bits(40, 0, 24, m.remote_eecn);
  c.bits(43, 0, 5, m.remote_cm_response_timeout);
  c.bits(43, 5, 2, m.transport_service);
  c.bits(43, 7, 1, m.end_to_end_flow_control);
  c.bits(44, 0, 24, m.starting_psn);
  c.bits(47, 0, 5, m.local_cm_response_timeout);
  c.bits(47, 5, 3, m.retry_count);
  c.bits(48, 0, 16, m.pkey);
  c.bits(50, 0, 4, m.path_mtu);
  c.bits(50, 4, 1, m.rdc_exists);
  c.bits(50, 5, 3, m.rnr_retry_count);
  c.bits(51, 0, 4, m.max_cm_retries);
  c.bits(51, 4, 1, m.srq);
  c.bits(51, 5, 3, m.extended_transport);
  layout(c, m.primary, 52);
  layout(c, m.alternate, 96);
  c.bits(139, 5, 1, m.sap_supported);
  c.bytes(140, m.private_data);
}

void layout(auto& c, Is<MraMessage> auto& m) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(4, 0, 32, m.remote_comm_id);
  c.bits(8, 0, 2, m.answered);
  c.bits(9, 0, 5, m.service_timeout);
  c.bytes(10, m.private_data);
}

void layout(auto& c, Is<RejMessage> auto& m) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(4, 0, 32, m.remote_comm_id);
  c.bits(8, 0, 2, m.answered);
  c.bits(9, 0, 7, m.info_length);
  c.bits(10, 0, 16, m.reason);
  c.bytes(12, m.info);
  c.bytes(84, m.private_data);
}

void layout(auto& c, Is<DreqMessage> auto& m) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(4, 0, 32, m.remote_comm_id);
  c.bits(8, 0, 24, m.remote_qpn);
  c.bytes(12, m.private_data);
}

template <typename M>
requires Is<M, RtuMessage> || Is<M, DrepMessage>
void layout(auto& c, M& m) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(4, 0, 32, m.remote_comm_id);
  c.bytes(8, m.private_data);
}

// The vendor ID's bytes lie apart, in what were the reserved bytes behind three 24-bit fields.
void layout(auto& c, Is<RepMessage> auto& m, auto& vendor_high, auto& vendor_middle, auto& vendor_low) {
  c.bits(0, 0, 32, m.local_comm_id);
  c.bits(4, 0, 32, m.remote_comm_id);
  c.bits(8, 0, 32, m.local_qkey);
  c.bits(12, 0, 24, m.local_qpn);
  c.bits(15, 0, 8, vendor_high);
  c.bits(16, 0, 24, m.local_eecn);
  c.bits(19, 0, 8, vendor_middle);
  c.bits(20, 0, 24, m.starting_psn);
  c.bits(23, 0, 8, vendor_low);
  c.bits(24, 0, 8, m.responder_resources);
  c.bits(25, 0, 8, m.initiator_depth);
  c.bits(26, 0, 5, m.target_ack_delay);
  c.bits(26, 5, 2, m.failover_accepted);
  c.bits(26, 7, 1, m.end_to_end_flow_control);
  c.bits(27, 0, 3, m.rnr_retry_count);
  c.bits(27, 3, 1, m.srq);
  c.bits(28, 0, 64, m.local_ca_guid);
  c.bytes(36, m.private_data);
}

void layout(Reader& c, RepMessage& m) {
  uint8_t high = 0, middle = 0, low = 0;
  layout(c, m, high, middle, low);
  m.vendor_id = static_cast<uint32_t>(high << 16 | middle << 8 | low);
}

void layout(Writer& c, const RepMessage& m) {
  const uint32_t high = m.vendor_id >> 16, middle = m.vendor_id >> 8 & 0xFF, low = m.vendor_id & 0xFF;
  layout(c, m, high, middle, low);
}

// The whole MAD header, IBA 13.4.2; offsets from the MAD's first byte.
void layout_header(auto& c, auto& h, auto& base_version, auto& mgmt_class, auto& class_version, auto& method,
                   auto& attribute) {
  c.bits(0, 0, 8, base_version);
  c.bits(1, 0, 8, mgmt_class);
  c.bits(2, 0, 8, class_version);
  c.bits(3, 0, 8, method);
  c.bits(4, 0, 16, h.status);
  c.bits(6, 0, 16, h.class_specific);
  c.bits(8, 0, 64, h.transaction_id);
  c.bits(16, 0, 16, attribute);
  c.bits(20, 0, 32, h.attribute_modifier);
}

template <typename M>
void read_body(const uint8_t* data, CmBody& body) {
  Reader reader(data);
  layout(reader, body.emplace<M>());
}

}  // namespace

std::optional<CmMessage> decode_cm(std::span<const uint8_t> mad) noexcept {
  if (mad.size() != kMadBytes) return std::nullopt;
  CmMessage m;
  uint8_t base_version = 0, mgmt_class = 0, class_version = 0, method = 0;
  uint16_t attribute = 0;
  Reader reader(mad.data());
  layout_header(reader, m.header, base_version, mgmt_class, class_version, method, attribute);
  if (base_version != kBaseVersion || mgmt_class != kCmClass || class_version != kCmClassVersion ||
      method != kMethodSend)
    return std::nullopt;
  const uint8_t* data = mad.data() + kHeaderBytes;
  switch (attribute) {
    case ReqMessage::kAttribute:
      read_body<ReqMessage>(data, m.body);
      break;
    case MraMessage::kAttribute:
      read_body<MraMessage>(data, m.body);
      break;
    case RejMessage::kAttribute:
      read_body<RejMessage>(data, m.body);
      break;
    case RepMessage::kAttribute:
      read_body<RepMessage>(data, m.body);
      break;
    case RtuMessage::kAttribute:
      read_body<RtuMessage>(data, m.body);
      break;
    case DreqMessage::kAttribute:
      read_body<DreqMessage>(data, m.body);
      break;
    case DrepMessage::kAttribute:
      read_body<DrepMessage>(data, m.body);
      break;
    default:
      return std::nullopt;
  }
  return m;
}

Mad encode_cm(const CmMessage& message) noexcept {
  Mad mad{};
  const uint16_t attribute = std::visit([](const auto& body) { return body.kAttribute; }, message.body);
  Writer header(mad.data());
  layout_header(header, message.header, kBaseVersion, kCmClass, kCmClassVersion, kMethodSend, attribute);
  Writer writer(mad.data() + kHeaderBytes);
  std::visit([&](const auto& body) { layout(writer, body); }, message.body);
  return mad;
}

std::optional<RdmaCmHeader> decode_rdma_cm(std::span<const uint8_t, RdmaCmHeader::kBytes> bytes) noexcept {
  RdmaCmHeader h;
  h.version = bytes[0];
  h.ip_version = bytes[1] >> 4;
  if (h.ip_version != 4 && h.ip_version != 6) return std::nullopt;
  h.src_port = static_cast<uint16_t>(bytes[2] << 8 | bytes[3]);
  const auto address = [&](size_t at) {
    return h.ip_version == 4 ? IpAddress::from_v4(&bytes[at + 12]) : IpAddress::from_v6(&bytes[at]);
  };
  h.src_ip = address(4);
  h.dst_ip = address(20);
  return h;
}

void encode_rdma_cm(const RdmaCmHeader& h, std::span<uint8_t, RdmaCmHeader::kBytes> bytes) noexcept {
  std::memset(bytes.data(), 0, bytes.size());
  bytes[0] = h.version;
  bytes[1] = static_cast<uint8_t>(h.ip_version << 4);
  bytes[2] = static_cast<uint8_t>(h.src_port >> 8);
  bytes[3] = static_cast<uint8_t>(h.src_port);
  const size_t skip = h.ip_version == 4 ? 12 : 0;
  std::memcpy(&bytes[4 + skip], h.src_ip.bytes.data() + skip, 16 - skip);
  std::memcpy(&bytes[20 + skip], h.dst_ip.bytes.data() + skip, 16 - skip);
}

Time cm_time(uint8_t code) noexcept { return Time(int64_t{4096} << (code & 31)); }

uint8_t cm_time_code(Time time) noexcept {
  uint8_t code = 0;
  while (code < 31 && cm_time(code) < time) code++;
  return code;
}

}  // namespace millrace::roce
