#include "roce/build.h"

#include "roce/packet.h"

namespace millrace::roce {

uint16_t flow_source_port(Qpn local, Qpn remote) noexcept {
  uint64_t v = static_cast<uint64_t>(local.value) * remote.value;
  v ^= v >> 20;
  v ^= v >> 40;
  const uint32_t label = v & 0xFFFFF;
  return static_cast<uint16_t>(0xC000 | ((label & 0x3FFF) ^ (label >> 14)));
}

namespace {

// Writes Ethernet, IP and UDP for a UDP payload of `udp_payload` bytes. Returns the bytes written; `ip_at`
// is where IP starts.
uint32_t write_network(uint8_t* at, const Path& p, uint32_t udp_payload, uint32_t& ip_at) noexcept {
  uint8_t* const start = at;
  auto* eth = reinterpret_cast<EthernetHeader*>(at);
  eth->dst = p.dst_mac;
  eth->src = p.src_mac;
  const bool v4 = p.dst_ip.is_v4();
  const uint16_t type = v4 ? kEtherTypeIpv4 : kEtherTypeIpv6;
  at += sizeof(EthernetHeader);
  eth->ether_type = p.has_vlan ? kEtherTypeVlan : type;
  if (p.has_vlan) {
    auto* tag = reinterpret_cast<VlanTag*>(at);
    tag->tci = p.vlan_tci;
    tag->ether_type = type;
    at += sizeof(VlanTag);
  }
  ip_at = static_cast<uint32_t>(at - start);
  const uint32_t udp_bytes = static_cast<uint32_t>(sizeof(UdpHeader)) + udp_payload;
  if (v4) {
    auto* h = reinterpret_cast<Ipv4Header*>(at);
    h->version_ihl = 0x45;
    h->tos = p.tos;
    h->total_length = static_cast<uint16_t>(sizeof(Ipv4Header) + udp_bytes);
    h->identification = p.identification;
    h->fragment = uint16_t{0x4000};  // do not fragment
    h->ttl = p.hop_limit;
    h->protocol = kIpProtoUdp;
    h->checksum = uint16_t{0};
    std::memcpy(h->src, p.src_ip.v4(), 4);
    std::memcpy(h->dst, p.dst_ip.v4(), 4);
    h->checksum = internet_checksum({at, sizeof(Ipv4Header)});
    at += sizeof(Ipv4Header);
  } else {
    auto* h = reinterpret_cast<Ipv6Header*>(at);
    h->version_class_label = 6u << 28 | static_cast<uint32_t>(p.tos) << 20;
    h->payload_length = static_cast<uint16_t>(udp_bytes);
    h->next_header = kIpProtoUdp;
    h->hop_limit = p.hop_limit;
    std::memcpy(h->src, p.src_ip.bytes.data(), 16);
    std::memcpy(h->dst, p.dst_ip.bytes.data(), 16);
    at += sizeof(Ipv6Header);
  }
  auto* udp = reinterpret_cast<UdpHeader*>(at);
  udp->src_port = p.src_port;
  udp->dst_port = kRoceUdpPort;
  udp->length = static_cast<uint16_t>(udp_bytes);
  udp->checksum = uint16_t{0};
  return static_cast<uint32_t>(at - start + static_cast<ptrdiff_t>(sizeof(UdpHeader)));
}

uint32_t write_transport(uint8_t* at, const TransportFields& f, uint32_t pad) noexcept {
  const OpcodeTraits& t = traits(f.opcode);
  uint8_t* const start = at;
  auto* bth = reinterpret_cast<Bth*>(at);
  bth->opcode = static_cast<uint8_t>(f.opcode);
  bth->flags = static_cast<uint8_t>((f.solicited ? 0x80 : 0) | (f.migrated ? 0x40 : 0) | pad << 4);
  bth->pkey = f.pkey;
  bth->fecn_becn = f.opcode == Opcode::kCnp ? 0x40 : 0;
  bth->dest_qp = f.dest_qp.value;
  bth->ack_request = f.ack_request ? 0x80 : 0;
  bth->psn = f.psn.value();
  at += sizeof(Bth);
  if (t.deth) {
    auto* deth = reinterpret_cast<Deth*>(at);
    deth->qkey = f.qkey;
    deth->reserved = 0;
    deth->src_qp = f.src_qp.value;
    at += sizeof(Deth);
  }
  if (t.reth) {
    auto* reth = reinterpret_cast<Reth*>(at);
    reth->address = f.remote_address;
    reth->rkey = f.rkey;
    reth->length = f.dma_length;
    at += sizeof(Reth);
  }
  if (t.aeth) {
    auto* aeth = reinterpret_cast<Aeth*>(at);
    aeth->syndrome = f.syndrome;
    aeth->msn = f.msn;
    at += sizeof(Aeth);
  }
  if (t.atomic) {
    *reinterpret_cast<AtomicEth*>(at) = {f.remote_address, f.rkey, f.swap_or_add, f.compare};
    at += sizeof(AtomicEth);
  }
  if (t.atomic_ack) {
    *reinterpret_cast<AtomicAckEth*>(at) = {f.original};
    at += sizeof(AtomicAckEth);
  }
  if (t.imm || t.ieth) {
    *reinterpret_cast<Be32*>(at) = t.imm ? f.immediate : f.rkey;
    at += sizeof(Be32);
  }
  if (f.opcode == Opcode::kCnp) {
    std::memset(at, 0, 16);
    at += 16;
  }
  return static_cast<uint32_t>(at - start);
}

constexpr uint32_t pad_for(size_t payload) { return static_cast<uint32_t>(-payload & 3); }

// Headers for a payload of `payload` bytes into a fresh frame; ip_at and header_bytes describe what the ICRC
// covers.
Frame build_headers(FramePool& pool, const Path& path, const TransportFields& f, size_t payload,
                    size_t copied, uint32_t& ip_at, uint32_t& header_bytes) noexcept {
  const uint32_t pad = pad_for(payload);
  const uint32_t transport = static_cast<uint32_t>(sizeof(Bth)) + traits(f.opcode).header_bytes;
  Frame frame = Frame::allocate(pool);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  // 66: the longest network headers (Ethernet 14, VLAN 4, IPv6 40, UDP 8).
  if (b->offset + 66 + transport + copied + pad + kIcrcBytes > b->room_bytes) return {};
  uint32_t n =
      write_network(b->data(), path, transport + static_cast<uint32_t>(payload) + pad + kIcrcBytes, ip_at);
  n += write_transport(b->data() + n, f, pad);
  b->length = n;
  header_bytes = n - ip_at;
  return frame;
}

}  // namespace

Frame build(FramePool& pool, const Path& path, const TransportFields& fields,
            std::span<const uint8_t> payload, std::span<const uint8_t> more) noexcept {
  Frame frame = build_borrowed(pool, path, fields, payload, more);
  if (frame) own_payload(frame.buffer());
  return frame;
}

Frame build_shared(FramePool& pool, const Path& path, const TransportFields& fields, FrameBuffer* owner,
                   std::span<const uint8_t> payload, uint32_t payload_crc, Crc32Combine& combine) noexcept {
  uint32_t ip_at = 0, header_bytes = 0;
  Frame frame = build_headers(pool, path, fields, payload.size(), 0, ip_at, header_bytes);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  owner->owners++;
  b->shared = owner;
  b->shared_data = payload.data();
  b->shared_length = static_cast<uint32_t>(payload.size());
  const uint32_t pad = pad_for(payload.size());
  std::memset(b->tail, 0, pad);
  uint32_t crc = combine(icrc_headers({b->data() + ip_at, header_bytes}), payload_crc, b->shared_length);
  crc = crc32(crc, {b->tail, pad});
  store_icrc(b->tail + pad, crc);
  b->tail_length = static_cast<uint8_t>(pad + kIcrcBytes);
  return frame;
}

Frame build_borrowed(FramePool& pool, const Path& path, const TransportFields& fields,
                     std::span<const uint8_t> copied, std::span<const uint8_t> borrowed) noexcept {
  uint32_t ip_at = 0, header_bytes = 0;
  const size_t total = copied.size() + borrowed.size();
  Frame frame = build_headers(pool, path, fields, total, total, ip_at, header_bytes);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  if (!copied.empty()) std::memcpy(b->data() + b->length, copied.data(), copied.size());
  b->length += static_cast<uint32_t>(copied.size());
  b->shared_data = borrowed.data();
  b->shared_length = static_cast<uint32_t>(borrowed.size());
  const uint32_t pad = pad_for(total);
  std::memset(b->tail, 0, pad);
  uint32_t crc = icrc({b->data() + ip_at, b->length - ip_at}, header_bytes);
  crc = crc32(crc32(crc, borrowed), {b->tail, pad});
  store_icrc(b->tail + pad, crc);
  b->tail_length = static_cast<uint8_t>(pad + kIcrcBytes);
  return frame;
}

}  // namespace millrace::roce
