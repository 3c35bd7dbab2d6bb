// Control's replies over real sockets, with a thread in the worker's place that carries out commands.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "roce/error.h"
#include "switch/control.h"

namespace millrace::switching {
namespace {

using nlohmann::json;

class ControlTest : public ::testing::Test {
 protected:
  ControlTest() {
    const std::string base = ::testing::TempDir() + "millrace_control_" + std::to_string(getpid());
    config_.name = "leaf1";
    config_.engine.addresses = {*IpAddress::parse("10.77.0.100")};
    config_.ports.resize(2);
    config_.ports[0].name = "p1";
    config_.ports[1].name = "p2";
    config_.control_read = base + ".sock";
    config_.control_change = base + ".change.sock";
  }
  // What the worker would answer, and with which commands it was asked.
  void start() {
    control_ = std::make_unique<Control>(config_, ring_);
    worker_ = std::thread([this] {
      while (!stop_) {
        Command* c = nullptr;
        if (!ring_.pop(c)) {
          usleep(100);
          continue;
        }
        c->ok = c->kind != Command::Kind::kAbort || c->group == 5;
        c->snapshot.frames = 100;
        c->snapshot.frames_available = 60;
        c->snapshot.frames_cached = 30;
        c->snapshot.ports.resize(1);
        c->snapshot.ports[0].name = "p1";
        c->snapshot.ports[0].counters.rx_frames = 17;
        if (c->kind == Command::Kind::kGroups) {
          c->groups.resize(1);
          c->groups[0].id = 5;
          c->groups[0].reason = "\xff not UTF-8";
          c->groups[0].parent = "10.255.1.1";
          c->groups[0].members.resize(2);
          c->groups[0].members[1].rank = 4;
          c->groups[0].members[1].ranks = "ranks 4-7";
        }
        if (c->kind == Command::Kind::kL2)
          c->l2.push_back({{{2, 0, 0, 0, 0, 1}}, 5, 1, std::chrono::seconds(3)});
        if (c->kind == Command::Kind::kRoutes) {
          c->routes.push_back({*Prefix::parse("10.77.0.0/24"), true, kBridge, {}});
          c->routes.push_back(
              {*Prefix::parse("0.0.0.0/0"), false, 0, {{*IpAddress::parse("10.255.0.1"), 1, "failed", 9}}});
        }
        if (c->kind == Command::Kind::kNeighbours) {
          c->neighbours.push_back({*IpAddress::parse("10.255.0.1"), 1, {}, "failed", true, kNever, 0});
          c->neighbours.push_back({*IpAddress::parse("10.77.0.1"),
                                   kBridge,
                                   {{2, 0, 0, 0, 0, 1}},
                                   "reachable",
                                   false,
                                   std::chrono::milliseconds(1500),
                                   2});
        }
        if (c->kind == Command::Kind::kQos && has_buffers_) {
          c->qos.emplace();
          c->qos->ports.resize(2);
          c->qos->pool_size = 4711;
        }
        if (c->kind == Command::Kind::kSnapshot) {
          QosStatus& qos = c->snapshot.qos.emplace();
          qos.ports.resize(1);
          qos.ports[0].queues[3].counters.drops[0].packets = 3;
          qos.spillway = true;
          qos.spill.refused[static_cast<size_t>(buffering::SpillDrop::kKeyFull)].packets = 7;
        }
        if (c->rx) rx_ = *c->rx;
        if (c->kind == Command::Kind::kImpair) impaired_port_ = c->port;
        why_ = c->why;
        c->done.release();
      }
    });
  }
  ~ControlTest() override {
    stop_ = true;
    if (worker_.joinable()) worker_.join();
    control_.reset();
    struct stat s;
    EXPECT_NE(lstat(config_.control_read.c_str(), &s), 0);
    EXPECT_NE(lstat(config_.control_change.c_str(), &s), 0);
  }
  static int connect_to(const std::string& path) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    path.copy(a.sun_path, sizeof(a.sun_path) - 1);
    EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&a), sizeof(a)), 0);
    return fd;
  }
  static json ask(int fd, const std::string& line) {
    EXPECT_EQ(send(fd, (line + "\n").data(), line.size() + 1, 0), static_cast<ssize_t>(line.size() + 1));
    std::string in;
    char c;
    while (recv(fd, &c, 1, 0) == 1 && c != '\n') in += c;
    return json::parse(in);
  }

  Config config_;
  CommandRing ring_;
  std::unique_ptr<Control> control_;
  std::thread worker_;
  std::atomic<bool> stop_{false};
  ImpairConfig rx_;
  uint16_t impaired_port_ = 99;
  std::atomic<bool> has_buffers_{true};
  std::string why_;
};

TEST_F(ControlTest, AnswersRequestsLineByLine) {
  start();
  const int fd = connect_to(config_.control_read);
  const json status = ask(fd, R"({"cmd":"status"})");
  EXPECT_EQ(status.at("ok"), true);
  EXPECT_EQ(status.at("name"), "leaf1");
  EXPECT_EQ(status.at("frames").at("in_use"), 10);
  EXPECT_EQ(status.at("ports").at(0).at("rx_packets"), 17);
  const json counters = ask(fd, R"({"cmd":"counters"})");
  for (const char* room :
       {"pipeline", "engine_frames", "router_frames", "router", "roce", "aggregation", "cm", "ports"})
    EXPECT_TRUE(counters.at("counters").contains(room)) << room;
  EXPECT_EQ(counters.at("counters").at("roce").at("bad_icrc"), 0);
  const json group = ask(fd, R"({"cmd":"groups"})").at("groups").at(0);
  EXPECT_EQ(group.at("id"), 5);
  EXPECT_EQ(group.at("parent"), "10.255.1.1");
  EXPECT_EQ(group.at("members").at(0).at("ranks"), "");
  EXPECT_EQ(group.at("members").at(1).at("rank"), 4);
  EXPECT_EQ(group.at("members").at(1).at("ranks"), "ranks 4-7");
  EXPECT_EQ(ask(fd, R"({"cmd":"l2"})").at("entries").at(0).at("port"), "p2");
  EXPECT_EQ(ask(fd, R"({"cmd":"l2"})").at("entries").at(0).at("vlan"), 5);
  close(fd);
}

TEST_F(ControlTest, TellsOfRoutesAndNeighbours) {
  start();
  const int fd = connect_to(config_.control_read);
  const json routes = ask(fd, R"({"cmd":"routes"})").at("routes");
  EXPECT_EQ(routes.at(0),
            json::parse(R"({"prefix":"10.77.0.0/24","kind":"connected","interface":"bridge","via":[]})"));
  EXPECT_EQ(routes.at(1), json::parse(R"({"prefix":"0.0.0.0/0","kind":"static","via":[
      {"address":"10.255.0.1","interface":"p2","state":"failed","packets":9}]})"));
  const json neighbours = ask(fd, R"({"cmd":"neighbours"})").at("neighbours");
  EXPECT_EQ(neighbours.at(0),
            json::parse(R"({"address":"10.255.0.1","interface":"p2","mac":null,"state":"failed",
      "next_hop":true,"answered_s":null,"held":0})"));
  EXPECT_EQ(neighbours.at(1),
            json::parse(R"({"address":"10.77.0.1","interface":"bridge","mac":"02:00:00:00:00:01",
      "state":"reachable","next_hop":false,"answered_s":1.5,"held":2})"));
  close(fd);
}

TEST_F(ControlTest, TellsOfBuffersAndTheSpillwayWhereThereAreAny) {
  start();
  const int fd = connect_to(config_.control_read);
  const json counters = ask(fd, R"({"cmd":"counters"})").at("counters");
  EXPECT_EQ(counters.at("ports").at("p1").at("qos").at("dropped").at("queue_full").at("packets"), 3);
  EXPECT_EQ(counters.at("spillway").at("refused_by").at("key_full").at("packets"), 7);
  EXPECT_FALSE(counters.at("spillway").contains("residence"));
  const json buffers = ask(fd, R"({"cmd":"buffers"})");
  EXPECT_EQ(buffers.at("name"), "leaf1");
  EXPECT_EQ(buffers.at("pool").at("size"), 4711);
  EXPECT_EQ(buffers.at("ports").at(1).at("name"), "p2");
  EXPECT_EQ(buffers.at("ports").at(1).at("queues").size(), 8u);
  EXPECT_EQ(ask(fd, R"({"cmd":"spillway"})").at("enabled"), false);
  has_buffers_ = false;
  for (const char* cmd : {R"({"cmd":"buffers"})", R"({"cmd":"spillway"})"}) {
    const json refused = ask(fd, cmd);
    EXPECT_EQ(refused.at("ok"), false);
    EXPECT_EQ(refused.at("error"), "the switch has no traffic manager: its configuration is without qos");
  }
  close(fd);
}

TEST_F(ControlTest, MistakesGetAReasonAndTheConnectionLives) {
  start();
  const int fd = connect_to(config_.control_change);
  for (const auto& [line, reason] : std::vector<std::pair<std::string, std::string>>{
           {"nonsense", "parse error"},
           {"{}", "cmd"},
           {R"({"cmd":"dance"})", "unknown command 'dance'"},
           {R"({"cmd":"abort"})", "group"},
           {R"({"cmd":"abort","group":-5})", "a number"},
           {R"({"cmd":"abort","group":6})", "there is no group 6"},
           {R"({"cmd":"impair","port":"p9","rx":{}})", "there is no port 'p9'"},
           {R"({"cmd":"impair","port":"p1"})", "needs rx, tx or both"},
           {R"({"cmd":"impair","port":"p1","rx":{"loss":2}})", "rx.loss must be a number in 0 … 1"},
           {R"({"cmd":"impair","port":"p1","tx":{"lost":1}})", "tx.lost is unknown"},
           {R"({"cmd":"impair","port":"p1","tx":{"delay_us":-1}})", "tx.delay_us must be a whole number"}}) {
    const json reply = ask(fd, line);
    EXPECT_EQ(reply.at("ok"), false);
    EXPECT_NE(reply.at("error").get<std::string>().find(reason), std::string::npos) << reply;
  }
  close(fd);
}

TEST_F(ControlTest, OnlyTheChangeSocketChanges) {
  start();
  const int reader = connect_to(config_.control_read), changer = connect_to(config_.control_change);
  EXPECT_EQ(ask(reader, R"({"cmd":"abort","group":5})").at("ok"), false);
  EXPECT_EQ(ask(changer, R"({"cmd":"abort","group":5,"why":"for a test"})").at("ok"), true);
  EXPECT_EQ(why_, "for a test");
  EXPECT_EQ(ask(reader, R"({"cmd":"impair","port":"p2","rx":{"loss":1}})").at("ok"), false);
  EXPECT_EQ(ask(changer, R"({"cmd":"impair","port":"p2","rx":{"loss":1,"delay_us":7}})").at("ok"), true);
  EXPECT_EQ(impaired_port_, 1);
  EXPECT_EQ(rx_.loss, 1);
  EXPECT_EQ(rx_.delay, std::chrono::microseconds(7));
  struct stat s;
  ASSERT_EQ(stat(config_.control_change.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 0777, 0600u);
  close(reader);
  close(changer);
}

TEST_F(ControlTest, AStaleSocketIsReplacedALiveOneIsNot) {
  {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    config_.control_read.copy(a.sun_path, sizeof(a.sun_path) - 1);
    ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&a), sizeof(a)), 0);
    close(fd);  // the file stays, as after a kill
  }
  start();
  CommandRing other_ring;
  EXPECT_THROW(Control(config_, other_ring), Error);
  const int fd = connect_to(config_.control_read);  // the first one still serves
  EXPECT_EQ(ask(fd, R"({"cmd":"status"})").at("ok"), true);
  close(fd);
}

TEST_F(ControlTest, ACommandThatNobodyCarriesOutIsRefusedAtTheEnd) {
  control_ = std::make_unique<Control>(config_, ring_);
  const int fd = connect_to(config_.control_read);
  ASSERT_EQ(send(fd, "{\"cmd\":\"status\"}\n", 17, 0), 17);
  while (ring_.read_available() == 0) usleep(1000);
  control_.reset();  // must not hang
  close(fd);
}

}  // namespace
}  // namespace millrace::switching
