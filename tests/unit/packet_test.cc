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
