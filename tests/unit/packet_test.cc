// Malformed frames: each is named, none is read beyond its end.
#include "roce/packet.h"

#include <gtest/gtest.h>

#include "roce/build.h"

namespace millrace::roce {
namespace {

std::vector<uint8_t> good(bool v6 = false, bool vlan = false) {
  HeapFramePool pool;
  Path path;
  path.src_ip = *IpAddress::parse(v6 ? "fd77::1" : "10.77.0.1");
  path.dst_ip = *IpAddress::parse(v6 ? "fd77::2" : "10.77.0.2");
  path.has_vlan = vlan;
  path.vlan_tci = 0x6005;
  TransportFields f;
  f.opcode = Opcode::kWriteOnlyImm;
  f.dma_length = 5;
  const uint8_t payload[] = {1, 2, 3, 4, 5};
  const Frame frame = build(pool, path, f, payload);
  return {frame.bytes().begin(), frame.bytes().end()};
}

ParseVerdict verdict(std::vector<uint8_t> bytes) {
  Packet p;
  // An allocation of exactly this size, so that a sanitizer sees any read beyond.
  auto exact = std::make_unique<uint8_t[]>(bytes.size());
  std::copy(bytes.begin(), bytes.end(), exact.get());
  const ParseVerdict v = parse({exact.get(), bytes.size()}, p);
  return v == ParseVerdict::kOk && !icrc_ok(p) ? ParseVerdict::kBadIcrc : v;
}

// Repairs the IPv4 header checksum after a change.
void fix(std::vector<uint8_t>& b) {
  b[24] = b[25] = 0;
  const uint16_t c = internet_checksum({b.data() + 14, 20});
  b[24] = static_cast<uint8_t>(c >> 8), b[25] = static_cast<uint8_t>(c);
}

TEST(Parse, TakesWhatWeBuild) {
  for (bool v6 : {false, true})
    for (bool vlan : {false, true}) {
      std::vector<uint8_t> bytes = good(v6, vlan);
      Packet p;
      ASSERT_EQ(parse(bytes, p), ParseVerdict::kOk);
      EXPECT_TRUE(icrc_ok(p));
      EXPECT_EQ(p.payload.size(), 5u);
      EXPECT_EQ(p.payload[4], 5);
      EXPECT_EQ(p.has_vlan, vlan);
      EXPECT_EQ(p.src_ip.to_string(), v6 ? "fd77::1" : "10.77.0.1");
    }
}

// Whatever the opcode, its headers are as long as the table says.
TEST(Parse, EveryOpcodeThatWeBuildIsRead) {
  for (int opcode = 0; opcode < 256; opcode++) {
    if (!traits(static_cast<uint8_t>(opcode)).known) continue;
    HeapFramePool pool;
    TransportFields f;
    f.opcode = static_cast<Opcode>(opcode);
    f.rkey = 0x01020304;
    const uint8_t payload[] = {1, 2, 3, 4, 5};
    Path path;
    path.src_ip = *IpAddress::parse("10.77.0.1"), path.dst_ip = *IpAddress::parse("10.77.0.2");
    const Frame frame = build(pool, path, f, payload);
    Packet p;
    ASSERT_EQ(parse(frame.bytes(), p), ParseVerdict::kOk) << opcode_name(static_cast<uint8_t>(opcode));
    EXPECT_TRUE(icrc_ok(p));
    ASSERT_EQ(p.payload.size(), 5u);
    EXPECT_EQ(p.payload[4], 5);
    if (p.op->ieth) {
      EXPECT_EQ(p.payload.data()[-1], 4);
    }
  }
}

// Extended headers, byte by byte (IBA vol. 1, 9.3 and annex A17.9.3), built in a buffer full of ones.
TEST(Build, EveryHeaderByteIsWritten) {
  HeapFramePool pool(4608, 1);
  Path path;
  path.src_ip = *IpAddress::parse("10.77.0.1"), path.dst_ip = *IpAddress::parse("10.77.0.2");
  const auto transport = [&](const TransportFields& f, std::vector<uint8_t> payload = {}) {
    {
      const Frame dirty = Frame::allocate(pool);
      std::memset(dirty.buffer()->data(), 0xFF, 400);
      std::memset(dirty.buffer()->tail, 0xFF, sizeof(dirty.buffer()->tail));
    }
    const Frame frame = build(pool, path, f, payload);
    const auto b = frame.bytes().subspan(14 + 20 + 8);
    return std::vector<uint8_t>(b.begin(), b.end() - 4);
  };
  using Bytes = std::vector<uint8_t>;
  TransportFields f;
  f.dest_qp = Qpn{0x123456}, f.psn = Psn(0x789ABC), f.pkey = 0xFFFE;
  f.opcode = Opcode::kCnp;
  Bytes cnp{0x81, 0x40, 0xFF, 0xFE, 0x40, 0x12, 0x34, 0x56, 0x00, 0x78, 0x9A, 0xBC};
  cnp.resize(28);  // sixteen reserved bytes
  EXPECT_EQ(transport(f), cnp);
  f.opcode = Opcode::kSendOnly, f.ack_request = f.solicited = true, f.migrated = false;
  EXPECT_EQ(transport(f, {7}),
            (Bytes{0x04, 0xB0, 0xFF, 0xFE, 0x00, 0x12, 0x34, 0x56, 0x80, 0x78, 0x9A, 0xBC, 7, 0, 0, 0}));
  f.ack_request = f.solicited = false, f.migrated = true;
  const auto extended = [&](Opcode o) {
    f.opcode = o;
    const Bytes b = transport(f);
    return Bytes(b.begin() + 12, b.end());
  };
  f.remote_address = 0x0102030405060708, f.rkey = 0x11121314, f.dma_length = 0x21222324;
  f.immediate = 0x31323334, f.syndrome = 0x41, f.msn = 0x424344, f.qkey = 0x51525354,
  f.src_qp = Qpn{0x555657};
  f.swap_or_add = 0x6162636465666768, f.compare = 0x7172737475767778, f.original = 0x8182838485868788;
  const Bytes reth{1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x21, 0x22, 0x23, 0x24};
  EXPECT_EQ(extended(Opcode::kWriteFirst), reth);
  Bytes with_immediate = reth;
  with_immediate.insert(with_immediate.end(), {0x31, 0x32, 0x33, 0x34});
  EXPECT_EQ(extended(Opcode::kWriteOnlyImm), with_immediate);
  EXPECT_EQ(extended(Opcode::kAcknowledge), (Bytes{0x41, 0x42, 0x43, 0x44}));
  EXPECT_EQ(extended(Opcode::kUdSendOnly), (Bytes{0x51, 0x52, 0x53, 0x54, 0, 0x55, 0x56, 0x57}));
  EXPECT_EQ(extended(Opcode::kSendLastInvalidate), (Bytes{0x11, 0x12, 0x13, 0x14}));
  EXPECT_EQ(extended(Opcode::kSendLastImm), (Bytes{0x31, 0x32, 0x33, 0x34}));
  EXPECT_EQ(extended(Opcode::kCompareSwap),
            (Bytes{1,    2,    3,    4,    5,    6,    7,    8,    0x11, 0x12, 0x13, 0x14, 0x61, 0x62,
                   0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x71, 0x72, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78}));
  EXPECT_EQ(extended(Opcode::kAtomicAcknowledge),
            (Bytes{0x41, 0x42, 0x43, 0x44, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88}));
}

// And what is in front of them.
TEST(Build, NetworkHeadersAreAsTheirRfcsSay) {
  HeapFramePool pool(4608, 1);
  Path path;
  path.dst_mac = {{2, 0, 0, 0, 0, 1}}, path.src_mac = {{2, 0, 0, 0, 0, 2}};
  path.tos = 0x6A, path.hop_limit = 9, path.src_port = 0xC0DE, path.identification = 0x1234;
  path.has_vlan = true, path.vlan_tci = 0x6005;
  TransportFields f;
  const auto built = [&](size_t bytes) {
    {
      const Frame dirty = Frame::allocate(pool);
      std::memset(dirty.buffer()->data(), 0xFF, bytes + 10);
    }
    const Frame frame = build(pool, path, f, {});
    return std::vector<uint8_t>(frame.bytes().begin(), frame.bytes().begin() + static_cast<ptrdiff_t>(bytes));
  };
  using Bytes = std::vector<uint8_t>;
  path.src_ip = *IpAddress::parse("10.77.0.1"), path.dst_ip = *IpAddress::parse("10.77.0.2");
  // 0x4500 | 0x6A, 44 bytes, 0x1234, DF, TTL 9, UDP; the checksum by hand: the ones' complement of
  // 456A + 002C + 1234 + 4000 + 0911 + 0A4D + 0001 + 0A4D + 0002 = B578.
  EXPECT_EQ(built(14 + 4 + 20 + 8),
            (Bytes{2, 0, 0,    0,    0, 1,  2,    0,    0,    0,    0, 2,  0x81, 0,    0x60, 5,
                   8, 0, 0x45, 0x6A, 0, 44, 0x12, 0x34, 0x40, 0,    9, 17, 0x4A, 0x87, 10,   77,
                   0, 1, 10,   77,   0, 2,  0xC0, 0xDE, 0x12, 0xB7, 0, 24, 0,    0}));
  path.src_ip = *IpAddress::parse("fd77::1"), path.dst_ip = *IpAddress::parse("fd77::2");
  EXPECT_EQ(built(14 + 4 + 40 + 8),
            (Bytes{2,    0,    0,    0, 0, 1, 2,  0,    0,    0,    0,    2, 0x81, 0, 0x60, 5, 0x86,
                   0xDD, 0x66, 0xA0, 0, 0, 0, 24, 17,   9,    0xFD, 0x77, 0, 0,    0, 0,    0, 0,
                   0,    0,    0,    0, 0, 0, 0,  1,    0xFD, 0x77, 0,    0, 0,    0, 0,    0, 0,
                   0,    0,    0,    0, 0, 0, 2,  0xC0, 0xDE, 0x12, 0xB7, 0, 24,   0, 0}));
}

// A frame that its buffer has no room for is not built, and nothing is written behind its end.
TEST(Build, ABufferThatIsTooSmallIsRefused) {
  Path path;
  path.src_ip = *IpAddress::parse("10.77.0.1"), path.dst_ip = *IpAddress::parse("10.77.0.2");
  const std::vector<uint8_t> payload(101);
  // 128 of headroom, 66 for the longest network headers, 12 BTH, 101 and 3 pad, 4 ICRC.
  HeapFramePool enough(128 + 66 + 12 + 104 + 4), short_of_one(128 + 66 + 12 + 104 + 3);
  EXPECT_TRUE(build(enough, path, {}, payload));
  EXPECT_FALSE(build(short_of_one, path, {}, payload));
  EXPECT_EQ(short_of_one.in_use(), 0u);
}

// The CRC of two parts laid end to end is the whole's, for every length that a packet has.
TEST(Crc32, CombinesForEveryLength) {
  std::vector<uint8_t> bytes(4160);
  for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<uint8_t>(i * i >> 3);
  Crc32Combine combine;
  for (int round = 0; round < 2; round++)
    for (size_t n = 0; n <= 4096; n += 1 + 3 * static_cast<size_t>(round)) {
      const std::span<const uint8_t> b(bytes.data() + 32, n);
      ASSERT_EQ(combine(crc32(0, {bytes.data(), 32}), crc32(0, b), static_cast<uint32_t>(n)),
                crc32(0, {bytes.data(), 32 + n}))
          << n;
    }
}

TEST(Parse, LinkPaddingIsCutOff) {
  std::vector<uint8_t> bytes = good();
  bytes.resize(bytes.size() + 17, 0xEE);
  EXPECT_EQ(verdict(bytes), ParseVerdict::kOk);
}

TEST(Parse, EveryTruncationIsNamed) {
  for (bool v6 : {false, true}) {
    const std::vector<uint8_t> bytes = good(v6);
    for (size_t n = 0; n < bytes.size(); n++) {
      const ParseVerdict v = verdict({bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(n)});
      EXPECT_NE(v, ParseVerdict::kOk) << n;
      EXPECT_NE(v, ParseVerdict::kNotRoce) << n;
    }
  }
}

TEST(Parse, EachFaultHasItsName) {
  auto with = [](auto change) {
    std::vector<uint8_t> b = good();
    change(b);
    return verdict(b);
  };
  EXPECT_EQ(with([](auto& b) { b[12] = 0x08, b[13] = 0x06; }), ParseVerdict::kNotRoce);
  EXPECT_EQ(with([](auto& b) { b[14] = 0x65; }), ParseVerdict::kBadIpVersion);
  EXPECT_EQ(with([](auto& b) { b[14] = 0x46, fix(b); }),
            ParseVerdict::kNotRoce);  // ports read behind the options
  EXPECT_EQ(with([](auto& b) { b[14] = 0x44; }), ParseVerdict::kIpLength);
  EXPECT_EQ(with([](auto& b) { b[16] = 0xFF; }), ParseVerdict::kIpLength);
  // Without room for UDP; with just that, it is UDP's length that is wrong.
  EXPECT_EQ(with([](auto& b) { b[16] = 0, b[17] = 27, fix(b); }), ParseVerdict::kIpLength);
  EXPECT_EQ(with([](auto& b) { b[16] = 0, b[17] = 28, fix(b); }), ParseVerdict::kUdpLength);
  for (const uint8_t length : {7, 8}) {
    std::vector<uint8_t> b = good(true);
    b[18] = 0, b[19] = length;
    EXPECT_EQ(verdict(b), length == 7 ? ParseVerdict::kIpLength : ParseVerdict::kUdpLength);
  }
  EXPECT_EQ(with([](auto& b) { b[20] = 0x20, fix(b); }), ParseVerdict::kIpFragment);
  EXPECT_EQ(with([](auto& b) { b[23] = 6, fix(b); }), ParseVerdict::kNotRoce);
  EXPECT_EQ(with([](auto& b) { b[24] ^= 1; }), ParseVerdict::kIpChecksum);
  EXPECT_EQ(with([](auto& b) { b[36] ^= 1; }), ParseVerdict::kNotRoce);
  EXPECT_EQ(with([](auto& b) { b[39] ^= 4; }), ParseVerdict::kUdpLength);
  EXPECT_EQ(with([](auto& b) { b[42] = 0xE0; }), ParseVerdict::kUnknownOpcode);
  EXPECT_EQ(with([](auto& b) { b[43] |= 1; }), ParseVerdict::kBthVersion);
  EXPECT_EQ(with([](auto& b) { b[46] = 0xFF; }), ParseVerdict::kOk);  // FECN, BECN: masked
  EXPECT_EQ(with([](auto& b) { b[47] ^= 1; }), ParseVerdict::kBadIcrc);
  EXPECT_EQ(with([](auto& b) { b.back() ^= 1; }), ParseVerdict::kBadIcrc);
  EXPECT_EQ(with([](auto& b) { b[22] = 1, fix(b); }), ParseVerdict::kOk);     // TTL
  EXPECT_EQ(with([](auto& b) { b[15] = 0xFF, fix(b); }), ParseVerdict::kOk);  // TOS
}

// Inside, an IPv4-mapped address is an IPv4 host: in an IPv6 header it would speak for one that never sent
// this.
TEST(Parse, AnIpv6PacketDoesNotPassForAnIpv4Hosts) {
  const IpAddress mapped = *IpAddress::parse("10.77.0.1");
  for (const size_t at : {14 + 8, 14 + 24}) {
    std::vector<uint8_t> b = good(true);
    std::copy(mapped.bytes.begin(), mapped.bytes.end(), b.begin() + static_cast<ptrdiff_t>(at));
    EXPECT_EQ(verdict(b), ParseVerdict::kIpMapped);
  }
}

TEST(Psn, ComparesSignedModulo2To24) {
  EXPECT_EQ(Psn(0).distance(Psn(0xFFFFFF)), 1);
  EXPECT_EQ(Psn(0xFFFFFF).distance(Psn(0)), -1);
  EXPECT_EQ(Psn(0x7FFFFF).distance(Psn(0)), 0x7FFFFF);
  EXPECT_EQ(Psn(0x800000).distance(Psn(0)), -0x800000);
  EXPECT_EQ((Psn(0xFFFFFF) + 2).value(), 1u);
}

// IBA vol. 1, table 45, in units of 10 µs.
TEST(Rnr, TimerCodes) {
  constexpr int kTable[32] = {65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
                              48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
                              2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};
  for (uint8_t code = 0; code < 32; code++)
    EXPECT_EQ(rnr_wait(code), std::chrono::microseconds(10 * kTable[code])) << int{code};
}

TEST(Addresses, AreReadInEitherCaseAndNothingElse) {
  const auto mac = MacAddress::parse("0A:bC:De:09:9f:F0");
  ASSERT_TRUE(mac);
  EXPECT_EQ(mac->bytes, (std::array<uint8_t, 6>{0x0A, 0xBC, 0xDE, 0x09, 0x9F, 0xF0}));
  for (const char* wrong :
       {"", "0a:bc:de:09:9f", "0a:bc:de:09:9f:f0:11", "0g:bc:de:09:9f:f0", "0a:bc:de:09:9f:f/",
        "0a:bc:de:09:9f:@0", "0a-bc:de:09:9f:f0", "0a:bc:de:09:9f f0", "0a:bc:de:09:9f:`0"})
    EXPECT_FALSE(MacAddress::parse(wrong)) << wrong;
  EXPECT_EQ(IpAddress::parse("fd77::FF:1")->to_string(), "fd77::ff:1");
  EXPECT_EQ(IpAddress::parse("10.77.0.100")->to_string(), "10.77.0.100");
  for (const char* wrong : {"", "10.77.0", "10.77.0.256", "fd77::g", "fd77:::1"})
    EXPECT_FALSE(IpAddress::parse(wrong)) << wrong;
}

}  // namespace
}  // namespace millrace::roce
