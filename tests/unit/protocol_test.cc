// The aggregation protocol's bytes, against layouts written out by hand from the protocol's page.
#include "aggregation/protocol.h"

#include <gtest/gtest.h>

#include "aggregation/slots.h"

namespace millrace::aggregation {
namespace {

std::string hex(std::span<const uint8_t> bytes) {
  std::string s;
  char t[3];
  for (uint8_t b : bytes) std::snprintf(t, sizeof(t), "%02x", b), s += t;
  return s;
}

TEST(Protocol, JoinRequestLayout) {
  JoinRequest j;
  for (uint8_t i = 0; i < 16; i++)
    j.key[i] = static_cast<uint8_t>(0x10 + i), j.tag[i] = static_cast<uint8_t>(0xE0 + i);
  j.stripe = 2, j.stripes = 4, j.mtu_code = 5;
  j.rank = 0x0102, j.world = 0x0304, j.tenant = 0x05060708, j.nonce = 0x1112131415161718;
  EXPECT_EQ(hex(encode(j)),
            "4d4c52430102040510111213141516171819"
            "1a1b1c1d1e1f"
            "0102"
            "0304"
            "05060708"
            "1112131415161718"
            "e0e1e2e3e4e5e6e7e8e9eaebecedeeef");
  const auto back = decode_join_request(encode(j));
  ASSERT_TRUE(back);
  EXPECT_EQ(hex(encode(*back)), hex(encode(j)));
  EXPECT_FALSE(decode_join_request(std::vector<uint8_t>(56, 0)));
  EXPECT_FALSE(decode_join_request(std::vector<uint8_t>(3, 0x4d)));
}

// Computed with: python3 -c 'import hmac; print(hmac.new(b"wood", m, "sha256").hexdigest()[:32])' over the 76
// bytes.
TEST(Protocol, JoinTagIsHmacSha256) {
  JoinRequest j;
  j.key.fill(1), j.rank = 3, j.world = 8, j.tenant = 7, j.nonce = 0x0123456789ABCDEF;
  const auto tag =
      join_tag(j, "wood", *IpAddress::parse("10.77.0.4"), *IpAddress::parse("10.77.0.100"), 0x00ABCD);
  EXPECT_EQ(hex(tag), "29cc6f5a73ce42ae30930eaf87802f1e");
}

TEST(Protocol, StartLayout) {
  Start s{8, 5, 0xA1A2A3A4, 65472, 4, {1, 1}};
  const auto bytes = encode(s);
  EXPECT_EQ(hex(bytes),
            "4d520180"
            "0008"
            "05"
            "02"
            "a1a2a3a4"
            "0000ffc0"
            "0004"
            "0000"
            "0101");
  const auto back = decode_control_message(bytes).start;
  ASSERT_TRUE(back);
  EXPECT_EQ(hex(encode(*back)), hex(bytes));
}

TEST(Protocol, TerminalLayoutAndLimits) {
  Terminal t{Code::kMemberLost, 0xA1A2A3A4, 77, {2, 5}, "rank 2 is gone"};
  const auto bytes = encode(t);
  EXPECT_EQ(hex(std::span(bytes).first(28)),
            "4d520181"
            "0002"
            "000e"
            "a1a2a3a4"
            "0002"
            "0000"
            "000000000000004d"
            "0002"
            "0005");
  EXPECT_EQ(std::string(bytes.begin() + 56, bytes.end()), "rank 2 is gone");
  const auto back = decode_control_message(bytes).terminal;
  ASSERT_TRUE(back);
  EXPECT_EQ(back->ranks, t.ranks);
  EXPECT_EQ(back->text, t.text);
  t.text = std::string(455, 'x') + "\u00e9 and more";  // the limit falls inside a character
  EXPECT_EQ(encode(t).size(), 56u + 455u);
  t.ranks.assign(100, 1);
  EXPECT_EQ(decode_control_message(encode(t)).terminal->ranks.size(), 16u);
}

TEST(Protocol, RejectAndReplyLayout) {
  EXPECT_EQ(hex(encode(JoinReject{Code::kMtu, 5, "no"})),
            "4d4c524300080502"
            "6e6f");
  EXPECT_EQ(hex(encode(JoinReply{1, 9, 8, 65472, 0})),
            "4d4c5243"
            "01"
            "00"
            "0000"
            "00000009"
            "00000008"
            "0000ffc0"
            "00000000");
  EXPECT_EQ(encode(JoinReject{Code::kQuota, 0, std::string(500, 'y')}).size(),
            148u);  // what a CM REJ carries
}

TEST(Protocol, AnyTruncationOfAMessageIsHarmless) {
  for (const auto& whole :
       {encode(Start{8, 5, 1, 65472, 4, {1, 1, 1}}), encode(Terminal{Code::kLate, 1, 2, {3}, "text"})})
    for (size_t n = 0; n < whole.size(); n++) {
      auto exact = std::vector<uint8_t>(whole.begin(), whole.begin() + static_cast<ptrdiff_t>(n));
      exact.shrink_to_fit();
      decode_control_message(exact);
    }
}

SegmentHeader segment() {
  SegmentHeader h;
  h.magic = kMagic, h.version = 1, h.collective = 1, h.op = 1, h.type = 9, h.wire_type = 9,
  h.flags = kFlagLast;
  h.total = uint64_t{4096}, h.offset = uint64_t{4000}, h.length = uint32_t{96},
  h.payload_bytes = uint32_t{96};
  h.result_address = uint64_t{0x1000};
  return h;
}

TEST(Protocol, SegmentHeaderOffsets) {
  SegmentHeader h = segment();
  h.group = uint32_t{0x21222324}, h.rank = uint16_t{0x2526}, h.root = uint16_t{0x2728},
  h.operation = uint64_t{0x3132333435363738};
  h.result_rkey = uint32_t{0x41424344};
  EXPECT_EQ(hex({reinterpret_cast<uint8_t*>(&h), 64}),
            "4d52"
            "01"
            "01"
            "01"
            "09"
            "09"
            "02"
            "21222324"
            "2526"
            "2728"
            "3132333435363738"
            "0000000000001000"
            "0000000000000fa0"
            "00000060"
            "00000060"
            "0000000000001000"
            "41424344"
            "00000000");
}

// As a member of eight ranks, with segments of 65,472 bytes.
const char* fault(auto change) {
  SegmentHeader h = segment();
  change(h);
  return check(h, 65472, 8);
}

TEST(Protocol, EveryFaultOfASegmentHeaderIsSeen) {
  EXPECT_STREQ(fault([](auto&) {}), nullptr);
  EXPECT_STREQ(fault([](auto& h) { h.magic = uint16_t{1}; }), "wrong magic");
  EXPECT_STREQ(fault([](auto& h) { h.version = 2; }), "unknown version");
  EXPECT_STREQ(fault([](auto& h) { h.collective = 0; }), "unknown collective");
  EXPECT_STREQ(fault([](auto& h) { h.collective = 7; }), "unknown collective");
  EXPECT_STREQ(fault([](auto& h) { h.op = 0; }), "unsupported operator for the datatype");
  EXPECT_STREQ(fault([](auto& h) { h.op = 5; }), "unsupported operator for the datatype");
  EXPECT_STREQ(fault([](auto& h) { h.op = 200; }), "unsupported operator for the datatype");
  EXPECT_STREQ(fault([](auto& h) { h.type = 200; }), "unknown datatype");
  EXPECT_STREQ(fault([](auto& h) { h.type = 13; }), "unknown datatype");
  EXPECT_STREQ(fault([](auto& h) { h.wire_type = 8; }), "unsupported wire type");
  EXPECT_STREQ(fault([](auto& h) { h.flags |= 0x80; }), "unknown flags");
  EXPECT_STREQ(fault([](auto& h) { h.flags = 0; }), "the last flag does not match the offset");
  EXPECT_STREQ(fault([](auto& h) { h.root = uint16_t{1}; }), "a root that is no rank");
  EXPECT_STREQ(fault([](auto& h) {
                 h.length = uint32_t{94}, h.payload_bytes = uint32_t{94}, h.total = uint64_t{4094};
               }),
               "not a multiple of the element size");
  EXPECT_STREQ(fault([](auto& h) { h.offset = UINT64_MAX - 10; }), "offset and length exceed the total");
  EXPECT_STREQ(fault([](auto& h) { h.length = uint32_t{100}; }), "offset and length exceed the total");
  EXPECT_STREQ(fault([](auto& h) { h.payload_bytes = uint32_t{0}; }),
               "payload bytes do not match the length");
  EXPECT_STREQ(fault([](auto& h) { h.result_address = UINT64_MAX - 50; }), "result address wraps around");
  EXPECT_STREQ(fault([](auto& h) { h.zero = uint32_t{1}; }), "reserved bytes are not zero");
  EXPECT_STREQ(fault([](auto& h) {
                 h.length = h.payload_bytes = uint32_t{65476}, h.total = uint64_t{1} << 40, h.flags = 0;
               }),
               "length exceeds the segment size");
  EXPECT_STREQ(fault([](auto& h) { h.length = UINT32_MAX - 3; }), "length exceeds the segment size");
  EXPECT_STREQ(fault([](auto& h) { h.flags |= kFlagHeaderOnly; }),
               "header-only does not match the member's part");
}

// The part that each member plays, in the collectives where that is not the same for all. segment() is the
// last 96 bytes of 4096.
TEST(Protocol, EachMembersPartIsChecked) {
  const auto as = [](Collective c, uint16_t rank, uint16_t root) {
    return [=](SegmentHeader& h) {
      h.collective = static_cast<uint8_t>(c);
      if (c == Collective::kBroadcast || c == Collective::kAllGather) h.op = 0;
      h.rank = rank, h.root = root;
    };
  };
  const auto header_only = [](auto change) {
    return fault([=](SegmentHeader& h) {
      change(h);
      h.flags |= kFlagHeaderOnly;
      h.payload_bytes = uint32_t{0};
    });
  };
  const char* part = "header-only does not match the member's part";
  EXPECT_STREQ(fault(as(Collective::kReduce, 2, 7)), nullptr);
  EXPECT_STREQ(fault(as(Collective::kReduce, 2, 8)), "a root that is no rank");
  EXPECT_STREQ(header_only(as(Collective::kReduce, 2, 7)), part);
  EXPECT_STREQ(fault(as(Collective::kBroadcast, 3, 3)), nullptr);
  EXPECT_STREQ(fault(as(Collective::kBroadcast, 2, 3)), part);
  EXPECT_STREQ(header_only(as(Collective::kBroadcast, 2, 3)), nullptr);
  EXPECT_STREQ(header_only(as(Collective::kBroadcast, 3, 3)), part);
  // Of eight shards of 512 bytes the segment is in the last.
  EXPECT_STREQ(fault(as(Collective::kAllGather, 7, 0)), nullptr);
  EXPECT_STREQ(fault(as(Collective::kAllGather, 6, 0)), part);
  EXPECT_STREQ(header_only(as(Collective::kAllGather, 6, 0)), nullptr);
  EXPECT_STREQ(fault([&](SegmentHeader& h) {
                 as(Collective::kAllGather, 7, 0)(h);
                 h.offset = uint64_t{3500}, h.length = h.payload_bytes = uint32_t{596};
               }),
               "a segment that straddles shards");
  EXPECT_STREQ(fault([&](SegmentHeader& h) {
                 as(Collective::kAllGather, 7, 0)(h);
                 h.op = 1;
               }),
               "an operator where nothing is reduced");
  EXPECT_STREQ(fault([&](SegmentHeader& h) {
                 as(Collective::kReduceScatter, 7, 0)(h);
                 h.total = uint64_t{4100}, h.offset = uint64_t{4004};
               }),
               "a total that does not divide into shards");
  EXPECT_STREQ(fault([](auto& h) { h.collective = 6, h.op = 0; }), "a barrier carries data");
}

// Who receives which byte of a segment, byte by byte from the collectives' definitions.
TEST(SegmentShape, EveryByteGoesToWhomTheCollectiveSays) {
  for (const uint16_t world : {1, 2, 3, 5}) {
    for (uint8_t c = 1; c <= 5; c++) {
      const uint64_t shard = 7, total = world * shard;
      for (uint64_t offset = 0; offset < total; offset++) {
        for (uint32_t length = 1; offset + length <= total; length++) {
          SegmentShape s;
          s.collective = static_cast<Collective>(c);
          s.world = world, s.root = static_cast<uint16_t>(world / 2);
          s.total = total, s.offset = offset, s.length = s.payload = length;
          const uint64_t owner = offset / shard;
          if (c == 5 && (offset + length - 1) / shard != owner) continue;  // never straddles
          uint16_t contributors = 0;
          for (uint16_t r = 0; r < world; r++) {
            const bool gives = c == 3 ? r == s.root : c == 5 ? r == owner : true;
            EXPECT_EQ(s.contributes(r), gives);
            contributors = static_cast<uint16_t>(contributors + gives);
            for (uint32_t i = 0; i < length; i++) {
              const bool gets = c == 1   ? true
                                : c == 2 ? r == s.root
                                : c == 3 ? r != s.root
                                : c == 4 ? (offset + i) / shard == r
                                         : r != owner;
              const auto range = s.receives(r);
              ASSERT_EQ(range.begin <= i && i < range.end, gets)
                  << int{c} << " " << world << " " << offset << " " << length << " rank " << r << " byte "
                  << i;
            }
          }
          EXPECT_EQ(s.contributors(), contributors);
        }
      }
    }
  }
}

// Chunk 0 is the MTU less 64 bytes, later ones the MTU: together they are the payload, whatever its size.
TEST(ChunkMap, CoversThePayloadExactlyOnce) {
  for (uint32_t mtu : {256u, 1024u, 4096u}) {
    const ChunkMap map{mtu};
    for (uint32_t payload :
         {0u, 1u, mtu - 65, mtu - 64, mtu - 63, 2 * mtu - 64, 2 * mtu - 63, 7 * mtu, 65472u}) {
      uint32_t at = 0;
      for (uint32_t i = 0; i < map.count(payload); i++) {
        EXPECT_EQ(map.offset(i), at);
        at += map.bytes(i, payload);
        EXPECT_LE(map.bytes(i, payload) + (i == 0 ? 64 : 0), mtu);
      }
      EXPECT_EQ(at, payload) << mtu << " " << payload;
      EXPECT_EQ(map.count(payload), (64 + payload + mtu - 1) / mtu);  // as the transport cuts the message
    }
  }
}

}  // namespace
}  // namespace millrace::aggregation
