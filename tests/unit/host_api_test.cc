// The C API where no network is needed: what it refuses and the sentences it gives, and communicators of one
// rank.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "host/millrace.h"

namespace {

class HostApi : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(mr_init(nullptr, &context_), MR_OK) << mr_last_error(); }
  void TearDown() override { EXPECT_EQ(mr_finalize(context_), MR_OK) << mr_last_error(); }

  static mr_comm_config config(int rank, int size, const char* address) {
    mr_comm_config c{};
    c.rank = rank;
    c.size = size;
    c.switch_address = address;
    return c;
  }
  mr_comm* join_alone() {
    mr_comm_config c = config(0, 1, nullptr);
    mr_comm* comm = nullptr;
    EXPECT_EQ(mr_comm_create(context_, &c, &comm), MR_OK) << mr_last_error();
    return comm;
  }
  // The status is `status` and the sentence holds `part`.
  void expect_refused(const mr_comm_config& c, mr_status status, const std::string& part) {
    auto* comm = reinterpret_cast<mr_comm*>(1);
    EXPECT_EQ(mr_comm_create(context_, &c, &comm), status) << part;
    EXPECT_EQ(comm, nullptr);
    EXPECT_NE(std::string(mr_last_error()).find(part), std::string::npos) << mr_last_error();
  }

  mr_context* context_ = nullptr;
};

// A forked child has no progress thread: what needs it is refused there instead of waiting for ever.
TEST_F(HostApi, AForkedChildIsToldThatTheContextIsNotIts) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    float value = 0;
    mr_memory* memory;
    const bool refused = mr_register(context_, &value, sizeof value, &memory) == MR_ERR_USAGE &&
                         std::string(mr_last_error()).find("forked") != std::string::npos &&
                         mr_finalize(context_) == MR_ERR_USAGE;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(HostApi, ALinkLocalSwitchNeedsADevice) {
  mr_comm_config c = config(0, 2, "fe80::1");
  expect_refused(c, MR_ERR_USAGE, "link-local");
}

// A communicator of one rank with two buffers.
class HostApiAlone : public HostApi {
 protected:
  void SetUp() override {
    HostApi::SetUp();
    comm_ = join_alone();
    std::iota(send_.begin(), send_.end(), 1.0f);
  }
  void TearDown() override {
    EXPECT_EQ(mr_comm_destroy(comm_), MR_OK);
    HostApi::TearDown();
  }
  void expect_misused(mr_status status, const std::string& part) {
    EXPECT_EQ(status, MR_ERR_USAGE) << part;
    EXPECT_NE(std::string(mr_last_error()).find(part), std::string::npos) << mr_last_error();
  }
  mr_status all_reduce(const void* send, void* recv, size_t count, int type = MR_F32, int op = MR_SUM) {
    mr_request* request = nullptr;
    mr_status status =
        mr_all_reduce(comm_, send, recv, count, static_cast<mr_type>(type), static_cast<mr_op>(op), &request);
    EXPECT_EQ(request != nullptr, status == MR_OK);
    return status == MR_OK ? mr_wait(request, nullptr) : status;
  }

  mr_comm* comm_ = nullptr;
  std::array<float, 1000> send_{}, recv_{};
};

TEST_F(HostApi, UnknownTransportsAreRefused) {
  mr_context_config c{"carrier pigeon", nullptr};
  auto* context = reinterpret_cast<mr_context*>(1);
  EXPECT_EQ(mr_init(&c, &context), MR_ERR_USAGE);
  EXPECT_EQ(context, nullptr);
  EXPECT_NE(std::string(mr_last_error()).find("\"carrier pigeon\""), std::string::npos) << mr_last_error();
}

TEST_F(HostApi, DevicesThatAreNotThereAreNamed) {
  for (const char* device : {"mr-no-such", "a-name-longer-than-the-kernel-allows", "lo"}) {
    mr_context_config c{"soft", device};
    mr_context* context;
    EXPECT_NE(mr_init(&c, &context), MR_OK);
    EXPECT_NE(std::string(mr_last_error()).find(device), std::string::npos) << mr_last_error();
  }
}

TEST_F(HostApi, TheTransportSaysWhyItWasChosen) {
  EXPECT_EQ(std::string(mr_transport_name(context_)).substr(0, 5), "auto:");
  for (const char* name : {"soft", "verbs"}) {
    mr_context_config c{name, nullptr};
    mr_context* context;
    ASSERT_EQ(mr_init(&c, &context), MR_OK);
    EXPECT_EQ(mr_transport_name(context), std::string(name) + ": asked for");
    EXPECT_EQ(mr_finalize(context), MR_OK);
  }
}

TEST_F(HostApi, ImpossibleMembershipsAreRefused) {
  expect_refused(config(0, 0, "10.77.0.100"), MR_ERR_USAGE, "size is 0");
  expect_refused(config(0, -4, "10.77.0.100"), MR_ERR_USAGE, "size is -4");
  expect_refused(config(0, 65536, "10.77.0.100"), MR_ERR_USAGE, "size is 65536");
  expect_refused(config(4, 4, "10.77.0.100"), MR_ERR_USAGE, "rank is 4");
  expect_refused(config(-1, 4, "10.77.0.100"), MR_ERR_USAGE, "rank is -1");
  expect_refused(config(0, 2, nullptr), MR_ERR_USAGE, "switch_address is NULL");
  mr_comm_config c = config(0, 2, "10.77.0.100");
  c.stripes = 17;
  expect_refused(c, MR_ERR_USAGE, "stripes is 17");
  c.stripes = 1;
  c.join_timeout_ms = -1;
  expect_refused(c, MR_ERR_USAGE, "negative");
}

TEST_F(HostApi, SwitchAddressesThatAreNoneAreRefused) {
  for (const char* address : {"",
                              "leaf1",
                              "10.77.0",
                              "10.77.0.100:",
                              "10.77.0.100:0",
                              "10.77.0.100:65536",
                              "10.77.0.100:x",
                              "10.77.0.100:1x",
                              "[fd77::100",
                              "[fd77::100]18600",
                              "[fd77::100]:",
                              "[10.77.0.100]:1",
                              "fd77::100%eth0",
                              ":18600",
                              "[]:18600",
                              "224.0.0.1",
                              "255.255.255.255",
                              "0.0.0.0",
                              "::",
                              "ff02::1"})
    expect_refused(config(0, 2, address), MR_ERR_USAGE, "\"" + std::string(address) + "\"");
}

TEST_F(HostApi, SwitchAddressesInAllFormsAreUnderstood) {
  // The loopback address is well-formed, and refused one step later.
  for (const char* address : {"127.0.0.1", "127.0.0.1:18600"})
    expect_refused(config(0, 2, address), MR_ERR_USAGE, "127.0.0.1 is an address of this host itself");
}

TEST_F(HostApi, AContextWithCommunicatorsIsNotFinalized) {
  mr_comm* comm = join_alone();
  EXPECT_EQ(mr_finalize(context_), MR_ERR_USAGE);
  EXPECT_NE(std::string(mr_last_error()).find("must be destroyed first"), std::string::npos);
  EXPECT_EQ(mr_comm_destroy(comm), MR_OK);
}

TEST_F(HostApi, NullIsRefusedEverywhere) {
  mr_comm* comm;
  mr_request* request;
  mr_memory* memory;
  EXPECT_EQ(mr_init(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_finalize(nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_create(context_, nullptr, &comm), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_destroy(nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_abort(nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_error(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_get_stats(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_get_info(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_register(context_, nullptr, 8, &memory), MR_ERR_USAGE);
  EXPECT_EQ(mr_register(context_, &memory, 0, &memory), MR_ERR_USAGE);
  EXPECT_EQ(mr_register(context_, &memory, SIZE_MAX, &memory), MR_ERR_USAGE);
  EXPECT_EQ(mr_deregister(nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_all_reduce(nullptr, nullptr, nullptr, 0, MR_F32, MR_SUM, &request), MR_ERR_USAGE);
  EXPECT_EQ(mr_barrier(nullptr, &request), MR_ERR_USAGE);
  EXPECT_EQ(mr_test(nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_wait(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_request_get_info(nullptr, nullptr), MR_ERR_USAGE);
  EXPECT_EQ(mr_comm_rank(nullptr), -1);
  EXPECT_STREQ(mr_request_error(nullptr), "");
  mr_request_free(nullptr);
}

TEST_F(HostApi, EachThreadHasItsOwnLastError) {
  expect_refused(config(0, 0, "10.77.0.100"), MR_ERR_USAGE, "size is 0");
  std::thread([&] {
    EXPECT_STREQ(mr_last_error(), "");
    expect_refused(config(9, 4, "10.77.0.100"), MR_ERR_USAGE, "rank is 9");
  }).join();
  EXPECT_NE(std::string(mr_last_error()).find("size is 0"), std::string::npos);
}

TEST_F(HostApi, EveryStatusHasAName) {
  std::set<std::string> names;
  for (int s = MR_OK; s <= MR_ERR_PROTOCOL; s++) names.insert(mr_status_text(static_cast<mr_status>(s)));
  EXPECT_EQ(names.size(), MR_ERR_PROTOCOL + 1u);
  EXPECT_EQ(names.count("unknown"), 0u);
  EXPECT_STREQ(mr_status_text(static_cast<mr_status>(15)), "unknown");
}

TEST_F(HostApi, MemoryIsRegisteredWithoutADevice) {
  std::vector<uint8_t> bytes(4096);
  mr_memory* memory;
  ASSERT_EQ(mr_register(context_, bytes.data(), bytes.size(), &memory), MR_OK);
  EXPECT_EQ(mr_deregister(memory), MR_OK);
}

TEST_F(HostApiAlone, WrongArgumentsOfAnAllReduceAreNamed) {
  float* s = send_.data();
  float* r = recv_.data();
  expect_misused(all_reduce(s, r, 1, 0), "type 0");
  expect_misused(all_reduce(s, r, 1, 13), "no element type");  // bfp8 is for the wire only
  expect_misused(all_reduce(s, r, 1, MR_F32, 0), "operator 0");
  expect_misused(all_reduce(s, r, 1, MR_F32, 11), "operator 11");
  expect_misused(all_reduce(s, r, 1, MR_F32, MR_BAND), "f32 cannot be reduced by band");
  expect_misused(all_reduce(s, r, 1, MR_BF16, MR_LOR), "bf16 cannot be reduced by a logical operator");
  expect_misused(all_reduce(s, r, SIZE_MAX / 4 + 1), "more bytes than there can be");
  expect_misused(all_reduce(nullptr, r, 1), "NULL");
  expect_misused(all_reduce(s, nullptr, 1), "NULL");
  expect_misused(mr_all_reduce(comm_, s, r, 1, MR_F32, MR_SUM, nullptr), "request is NULL");
}

TEST_F(HostApiAlone, BuffersAreTheSameOrDisjoint) {
  float* s = send_.data();
  expect_misused(all_reduce(s, s + 1, 2), "overlap");
  expect_misused(all_reduce(s + 1, s, 2), "overlap");
  expect_misused(all_reduce(s, reinterpret_cast<uint8_t*>(s) + 7, 2), "overlap");
  // A count that no memory holds.
  expect_misused(all_reduce(s, s, SIZE_MAX / 4), "more bytes than there can be");
  EXPECT_EQ(all_reduce(s, s + 2, 2), MR_OK);
  EXPECT_EQ(all_reduce(s + 2, s, 2), MR_OK);
  EXPECT_EQ(all_reduce(s, s, 2), MR_OK);
}

TEST_F(HostApiAlone, WrongArgumentsOfTheOtherCollectivesAreNamed) {
  float* s = send_.data();
  mr_request* request;
  expect_misused(mr_reduce(comm_, s, s, 1, MR_F32, MR_SUM, 1, &request), "mr_reduce: root is 1");
  expect_misused(mr_broadcast(comm_, s, s, 1, MR_F32, -1, &request), "mr_broadcast: root is -1");
  expect_misused(mr_reduce_scatter(comm_, s, nullptr, 1, MR_F32, MR_SUM, &request),
                 "mr_reduce_scatter: a buffer");
  expect_misused(mr_reduce_scatter(comm_, s, s + 1, 2, MR_F32, MR_SUM, &request), "rank × recv_count");
  expect_misused(mr_all_gather(comm_, s, s + 1, 2, MR_F32, &request), "rank × send_count");
  expect_misused(mr_all_gather(comm_, s, s, 1, MR_F32, nullptr), "mr_all_gather: request is NULL");
  expect_misused(mr_comm_set_wire(comm_, static_cast<mr_wire>(2)), "mr_comm_set_wire: 2");
  ASSERT_EQ(mr_comm_set_wire(comm_, MR_WIRE_BFP8), MR_OK);
  expect_misused(all_reduce(s, s, 1, MR_F64), "f64 does not go in block floating point");
  EXPECT_EQ(all_reduce(s, s, 1, MR_F32), MR_OK);
}

TEST_F(HostApiAlone, LogicalOperatorsGiveZeroAndOneOfOneRank) {
  const std::array<int64_t, 4> in = {0, 5, -1, INT64_MIN};
  std::array<int64_t, 4> out{};
  ASSERT_EQ(mr_all_reduce_wait(comm_, in.data(), out.data(), 4, MR_I64, MR_LAND), MR_OK);
  EXPECT_EQ(out, (std::array<int64_t, 4>{0, 1, 1, 1}));
}

TEST_F(HostApiAlone, OneRanksResultIsItsContribution) {
  EXPECT_EQ(mr_comm_rank(comm_), 0);
  EXPECT_EQ(mr_comm_size(comm_), 1);
  for (int type = MR_U8; type <= MR_F64; type++)
    for (int op = MR_SUM; op <= MR_MAX; op++) {
      recv_.fill(-1);
      EXPECT_EQ(all_reduce(send_.data(), recv_.data(), 100, type, op), MR_OK) << type << " " << op;
      EXPECT_EQ(recv_[0], send_[0]);
    }
  EXPECT_EQ(mr_all_reduce_wait(comm_, send_.data(), recv_.data(), send_.size(), MR_F32, MR_SUM), MR_OK);
  EXPECT_EQ(recv_, send_);
}

TEST_F(HostApiAlone, ItsOperationsSayThatTheyWereLocal) {
  mr_request* request;
  ASSERT_EQ(mr_all_reduce(comm_, send_.data(), recv_.data(), 10, MR_F32, MR_SUM, &request), MR_OK);
  EXPECT_EQ(mr_test(request), MR_OK);
  mr_request_info info;
  ASSERT_EQ(mr_request_get_info(request, &info), MR_OK);
  EXPECT_STREQ(info.path, "local");
  EXPECT_EQ(info.bytes, 40u);
  EXPECT_EQ(info.operation, 0u);
  mr_request_free(request);
  ASSERT_EQ(mr_barrier(comm_, &request), MR_OK);
  ASSERT_EQ(mr_request_get_info(request, &info), MR_OK);
  EXPECT_EQ(info.operation, 1u);
  const char* text = nullptr;
  EXPECT_EQ(mr_wait(request, &text), MR_OK);
  EXPECT_STREQ(text, "");
}

TEST_F(HostApiAlone, NothingIsReducedWithNoElements) {
  EXPECT_EQ(all_reduce(nullptr, nullptr, 0), MR_OK);
  EXPECT_EQ(mr_barrier_wait(comm_), MR_OK);
}

TEST_F(HostApiAlone, AfterAbortItSaysSo) {
  const char* text;
  EXPECT_EQ(mr_comm_error(comm_, &text), MR_OK);
  EXPECT_EQ(mr_abort(comm_), MR_OK);
  EXPECT_EQ(mr_comm_error(comm_, &text), MR_ERR_ABORTED);
  EXPECT_NE(std::string(text).find("aborted"), std::string::npos);
  EXPECT_EQ(all_reduce(send_.data(), recv_.data(), 1), MR_ERR_ABORTED);
  EXPECT_EQ(mr_barrier_wait(comm_), MR_ERR_ABORTED);
}

TEST_F(HostApiAlone, ItNeverTouchedTheNetwork) {
  mr_comm_stats stats;
  ASSERT_EQ(mr_comm_get_stats(comm_, &stats), MR_OK);
  mr_comm_info info{1, 2, 3, 4, 5};
  ASSERT_EQ(mr_comm_get_info(comm_, &info), MR_OK);
  EXPECT_EQ(info.group, 0u);
  EXPECT_EQ(info.path_mtu, 0u);
  EXPECT_EQ(stats.packets_sent + stats.packets_received, 0u);
}

// Everything that goes to the progress thread, from several threads at once; for the sanitizers.
TEST_F(HostApi, ThreadsShareAContext) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      mr_comm* comm = join_alone();
      std::vector<int32_t> data(256, 7);
      for (int i = 0; i < 200; i++) {
        mr_memory* memory;
        EXPECT_EQ(mr_register(context_, data.data(), data.size() * 4, &memory), MR_OK);
        EXPECT_EQ(mr_all_reduce_wait(comm, data.data(), data.data(), data.size(), MR_I32, MR_SUM), MR_OK);
        EXPECT_EQ(mr_deregister(memory), MR_OK);
      }
      EXPECT_EQ(mr_comm_destroy(comm), MR_OK);
    });
  for (std::thread& t : threads) t.join();
}

}  // namespace
