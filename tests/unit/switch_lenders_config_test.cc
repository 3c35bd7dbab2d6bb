// `spillway.spill_lenders` and what belongs to it: what is read, and what each mistake is told.
#include <gtest/gtest.h>

#include "roce/error.h"
#include "switch/config.h"

namespace millrace::switching {
namespace {

Config parse(const std::string& lenders, const std::string& address = "10.77.0.100/24") {
  return parse_config("name: leaf1\naddresses: [" + address +
                          "]\nports: [{name: p1, device: net_null0}]\nqos:\n"
                          "  BUFFER_PROFILE: {spilling: {packet_discard_action: spill}}\n"
                          "  BUFFER_QUEUE: {\"*|0\": {profile: spilling}}\n"
                          "spillway:\n  spill_dscp: [10]\n" +
                          lenders,
                      "leaf1.yaml");
}

TEST(LendersConfig, WithoutAnyThereAreNone) {
  EXPECT_FALSE(parse("").lenders);
  EXPECT_EQ(parse("").spill_local, 0u);
}

TEST(LendersConfig, EverythingIsRead) {
  const Config c = parse(
      "  spill_lenders:\n    - {address: 10.77.0.7}\n    - {address: 10.77.0.8, port: 18700}\n"
      "  spill_local_size: 64MiB\n  spill_lender_size: 2GiB\n  spill_lender_reads: 32\n"
      "  spill_lender_dead_ms: 50\n  spill_lender_dscp: 26\n");
  ASSERT_TRUE(c.lenders);
  const buffering::RemoteStoreConfig& r = *c.lenders;
  ASSERT_EQ(r.lenders.size(), 2u);
  EXPECT_EQ(r.lenders[0].address, *IpAddress::parse("10.77.0.7"));
  EXPECT_EQ(r.lenders[0].port, 18616);
  EXPECT_EQ(r.lenders[1].port, 18700);
  EXPECT_EQ(c.spill_local, uint64_t{64} << 20);
  EXPECT_EQ(r.bytes_wanted, uint64_t{2} << 30);
  EXPECT_EQ(r.reads_max, 32u);
  EXPECT_EQ(r.peer_dead, std::chrono::milliseconds(50));
  EXPECT_EQ(r.tos, 26 << 2 | 2);  // ECN-capable
  EXPECT_EQ(r.mtu, c.engine.mtu);
  EXPECT_GE(r.slot_bytes, c.engine.mtu + 104);
}

TEST(LendersConfig, MistakesAreTold) {
  const struct {
    const char* text;
    const char* told;
  } cases[] = {
      {"  spill_lenders: [{port: 5}]\n", "leaf1.yaml:9: spillway.spill_lenders[0].address"},
      {"  spill_lenders: [{address: lender}]\n", "'lender' is no IP address"},
      {"  spill_lenders: [{address: 10.77.0.7, port: 0}]\n", "'0' is not a whole number in 1 … 65535"},
      {"  spill_lenders: [{address: 10.77.0.7, speed: 5}]\n", "speed"},
      {"  spill_lenders: [{address: 10.77.0.7}, {address: 10.77.0.7}]\n", "10.77.0.7 is there twice"},
      {"  spill_lenders: [{address: \"fd77::7\"}]\n", "give the switch an IPv6 address with a prefix length"},
      {"  spill_local_size: 1MiB\n", "there is nobody in spill_lenders"},
      {"  spill_lenders: [{address: 10.77.0.7}]\n  spill_local_size: 1GiB\n", "spill_local_size"},
      {"  spill_lenders: [{address: 10.77.0.7}]\n  spill_lender_reads: 129\n",
       "'129' is not a whole number in 1 … 128"},
      {"  spill_lenders: [{address: 10.77.0.7}]\n  spill_lender_dead_ms: 5\n",
       "'5' is not a whole number in 10 … 60000"}};
  for (const auto& c : cases) try {
      parse(c.text);
      ADD_FAILURE() << c.text;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(c.told), std::string::npos) << e.what();
    }
  EXPECT_THROW(parse("  spill_lenders: [{address: 10.77.0.7}]\n", "10.77.0.100"), Error);  // no subnet
}

}  // namespace
}  // namespace millrace::switching
