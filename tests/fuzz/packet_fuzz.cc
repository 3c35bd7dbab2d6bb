// The parser of RoCEv2 packets. The first byte says whether lengths, checksums and ICRC are repaired first,
// so that inputs get past them; the rest is the frame. What parses is built again and must come out the same,
// and its ICRC is computed once more here, bit by bit.
#include <algorithm>
#include <memory>

#include "roce/build.h"
#include "roce/packet.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {
namespace {

using namespace roce;

void put16(std::span<uint8_t> b, size_t at, size_t v) {
  b[at] = static_cast<uint8_t>(v >> 8), b[at + 1] = static_cast<uint8_t>(v);
}

// Where the IP header of an untagged or tagged frame begins.
size_t ip_at(std::span<const uint8_t> b) { return b[12] == 0x81 && b[13] == 0 ? 18 : 14; }

void repair(std::span<uint8_t> b, uint8_t how) {
  if (b.size() < 14 + 4 + 40 + 8) return;
  const size_t at = ip_at(b), ip = b.size() - at;
  const bool v4 = b[at - 1] == 0;
  b[at - 2] = v4 ? 0x08 : 0x86, b[at - 1] = v4 ? 0x00 : 0xDD;
  const size_t udp = at + (v4 ? 20 : 40);
  if (how & 2) put16(b, udp + 4, b.size() - udp);
  if (how & 4) put16(b, udp + 2, kRoceUdpPort);
  if (v4) {
    if (how & 2) put16(b, at + 2, ip);
    if (how & 8) b[at] = 0x45, b[at + 9] = kIpProtoUdp, b[at + 6] &= 0x40, b[at + 7] = 0;
    put16(b, at + 10, 0);
    put16(b, at + 10, internet_checksum(b.subspan(at, 20)));
  } else {
    if (how & 2) put16(b, at + 4, ip - 40);
    if (how & 8) b[at] = static_cast<uint8_t>(0x60 | (b[at] & 15)), b[at + 6] = kIpProtoUdp;
  }
  Packet p;
  if ((how & 16) && parse(b, p) == ParseVerdict::kOk)
    store_icrc(p.ip.data() + p.ip.size() - kIcrcBytes,
               icrc(p.ip.first(p.ip.size() - kIcrcBytes), p.header_bytes));
}

// Annex A17.3.3 in the plainest way: eight bytes of ones, then the packet with its variant fields as ones.
uint32_t plain_icrc(const Packet& p) {
  Bytes covered(8 + p.ip.size() - kIcrcBytes, 0xFF);
  std::copy(p.ip.begin(), p.ip.end() - kIcrcBytes, covered.begin() + 8);
  uint8_t* ip = covered.data() + 8;
  const bool v4 = ip[0] >> 4 == 4;
  if (v4) {
    ip[1] = ip[8] = ip[10] = ip[11] = 0xFF;
  } else {
    ip[0] |= 0x0F, ip[1] = ip[2] = ip[3] = ip[7] = 0xFF;
  }
  uint8_t* udp = ip + (v4 ? 20 : 40);
  udp[6] = udp[7] = 0xFF;
  udp[8 + 4] = 0xFF;
  uint32_t crc = 0xFFFFFFFF;
  for (const uint8_t byte : covered) {
    crc ^= byte;
    for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320 : 0);
  }
  return ~crc;
}

TransportFields fields_of(const Packet& p) {
  TransportFields f;
  f.opcode = p.opcode();
  f.dest_qp = p.dest_qp();
  f.psn = p.psn();
  f.ack_request = p.ack_request();
  f.solicited = p.bth->flags & 0x80;
  f.migrated = p.bth->flags & 0x40;
  f.pkey = p.bth->pkey.value();
  if (p.reth)
    f.remote_address = p.reth->address.value(), f.rkey = p.reth->rkey.value(),
    f.dma_length = p.reth->length.value();
  if (p.aeth) f.syndrome = p.aeth->syndrome, f.msn = p.aeth->msn.value();
  if (p.deth) f.qkey = p.deth->qkey.value(), f.src_qp = Qpn{p.deth->src_qp.value()};
  if (p.immediate) f.immediate = p.immediate->value();
  if (p.atomic) {
    f.remote_address = p.atomic->address.value(), f.rkey = p.atomic->rkey.value();
    f.swap_or_add = p.atomic->swap_or_add.value(), f.compare = p.atomic->compare.value();
  }
  // What SEND with invalidate carries last; nobody looks at it.
  if (p.op->ieth) f.rkey = reinterpret_cast<const Be32*>(p.ip.data() + p.header_bytes - 4)->value();
  if (p.atomic_ack) f.original = p.atomic_ack->original.value();
  return f;
}

Path path_of(const Packet& p) {
  Path path;
  path.src_mac = p.src_mac, path.dst_mac = p.dst_mac;
  path.src_ip = p.src_ip, path.dst_ip = p.dst_ip;
  path.src_port = p.src_port;
  path.tos = p.tos;
  path.has_vlan = p.has_vlan, path.vlan_tci = p.vlan_tci;
  return path;
}

Bytes bytes_of(const Frame& frame) {
  Bytes b(frame.total_length());
  frame.copy_to(b.data());
  return b;
}

template <typename T>
bool same(const T* a, const T* b) {
  return (a == nullptr) == (b == nullptr) && (a == nullptr || std::memcmp(a, b, sizeof(T)) == 0);
}

// Everything that a receiver can see of the one must be in the other.
void compare(const Packet& a, const Packet& b) {
  FUZZ_CHECK(a.src_mac == b.src_mac && a.dst_mac == b.dst_mac);
  FUZZ_CHECK(a.src_ip == b.src_ip && a.dst_ip == b.dst_ip && a.tos == b.tos && a.src_port == b.src_port);
  FUZZ_CHECK(a.has_vlan == b.has_vlan && a.vlan_tci == b.vlan_tci);
  FUZZ_CHECK(a.opcode() == b.opcode() && a.psn() == b.psn() && a.dest_qp() == b.dest_qp());
  FUZZ_CHECK(a.ack_request() == b.ack_request() && a.bth->pkey == b.bth->pkey);
  FUZZ_CHECK(((a.bth->flags ^ b.bth->flags) & 0xC0) == 0);
  FUZZ_CHECK(same(a.reth, b.reth) && same(a.aeth, b.aeth) && same(a.immediate, b.immediate));
  FUZZ_CHECK(same(a.atomic, b.atomic) && same(a.atomic_ack, b.atomic_ack));
  FUZZ_CHECK((a.deth == nullptr) == (b.deth == nullptr));
  FUZZ_CHECK(!a.deth || (a.deth->qkey == b.deth->qkey && a.deth->src_qp == b.deth->src_qp));
  FUZZ_CHECK(a.header_bytes == b.header_bytes);
  FUZZ_CHECK(!a.op->ieth || std::memcmp(a.payload.data() - 4, b.payload.data() - 4, 4) == 0);
  FUZZ_CHECK(std::equal(a.payload.begin(), a.payload.end(), b.payload.begin(), b.payload.end()));
}

// The three builders, fed with what was parsed.
void rebuild(const Packet& p) {
  HeapFramePool pool(4608, UINT32_MAX, true);
  const Path path = path_of(p);
  const TransportFields fields = fields_of(p);
  Bytes built = bytes_of(build(pool, path, fields, p.payload));
  Packet again;
  FUZZ_CHECK(parse(built, again) == ParseVerdict::kOk);
  FUZZ_CHECK(icrc_ok(again));
  FUZZ_CHECK(again.ip.data() + again.ip.size() == built.data() + built.size());
  compare(p, again);

  const size_t half = p.payload.size() / 2;
  Frame owner = Frame::allocate(pool);
  std::copy(p.payload.begin(), p.payload.end(), owner.bytes().data());
  owner.buffer()->length = static_cast<uint32_t>(p.payload.size());
  Crc32Combine combine;
  FUZZ_CHECK(bytes_of(build_shared(pool, path, fields, owner.buffer(), owner.bytes(), crc32(0, owner.bytes()),
                                   combine)) == built);
  Frame borrowed = build_borrowed(pool, path, fields, p.payload.first(half), p.payload.subspan(half));
  FUZZ_CHECK(bytes_of(borrowed) == built);
  own_payload(borrowed.buffer());
  FUZZ_CHECK(bytes_of(borrowed) == built);
}

void run(std::span<const uint8_t> data) {
  Input in(data);
  const uint8_t how = in.byte();
  const auto frame = in.rest();
  if (frame.size() > 4200) return;
  // Its own allocation, so that the sanitizer sees a step behind its end.
  const auto copy = std::make_unique<uint8_t[]>(frame.size());
  const std::span<uint8_t> bytes(copy.get(), frame.size());
  std::copy(frame.begin(), frame.end(), bytes.begin());
  if (how & 1) repair(bytes, how);

  Packet p;
  const ParseVerdict verdict = parse(bytes, p);
  FUZZ_CHECK(verdict < ParseVerdict::kCount && !name(verdict).empty());
  if (verdict != ParseVerdict::kOk) return;
  const uint32_t pad = p.bth->flags >> 4 & 3;
  FUZZ_CHECK(p.header_bytes + p.payload.size() + pad + kIcrcBytes == p.ip.size());
  FUZZ_CHECK(p.payload.data() == p.ip.data() + p.header_bytes);
  FUZZ_CHECK(p.op->known && !opcode_name(p.bth->opcode).empty());
  FUZZ_CHECK(icrc(p.ip.first(p.ip.size() - kIcrcBytes), p.header_bytes) == plain_icrc(p));
  FUZZ_CHECK(icrc_ok(p) == (load_icrc(p.ip.data() + p.ip.size() - kIcrcBytes) == plain_icrc(p)));
  rebuild(p);
}

}  // namespace
MILLRACE_FUZZ_TARGET("packet", run)
}  // namespace millrace::fuzz
