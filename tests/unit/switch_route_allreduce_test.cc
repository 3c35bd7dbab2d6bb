// Members behind a routed path: the shipping soft endpoint and communicator on hosts of the leaf-spine
// fabric, all joined on an address of the first leaf.
#include "host/communicator.h"
#include "host/soft_engine.h"
#include "tests/unit/switch_fabric.h"

namespace millrace::switching {
namespace {

using namespace test;

class Member final : public host::Resolver {
 public:
  Member(LeafSpine& lab, int number, const host::CommunicatorConfig& config, bool v6)
      : lab_(lab), number_(number), v6_(v6) {
    host::SoftConfig soft;
    soft.seed = soft.ca_guid = static_cast<uint64_t>(number) + 1;
    endpoint_ = std::make_unique<host::SoftEngine>(soft, pool_, *this);
    communicator_ = std::make_unique<host::Communicator>(config, *endpoint_, lab.net.now());
  }
  // By the leaf in front of the host, as a default gateway.
  std::optional<roce::Path> resolve(const IpAddress& to, std::string&) override {
    roce::Path p;
    p.src_mac = lab_.h(number_).mac;
    p.dst_mac = lab_.net.sw(lab_.leaf[number_ / 2]).mac;
    p.src_ip = lab_.address(number_, v6_);
    p.dst_ip = to;
    return p;
  }
  void receive(const Bytes& b) { endpoint_->receive(frame_of(pool_, b, 0), lab_.net.now(), out_); }
  void pump() {
    for (int round = 0; round < 2; round++) {
      std::vector<host::Completion> completions;
      static_cast<host::Transport&>(*endpoint_).poll(completions);
      for (const host::Completion& c : completions) communicator_->handle(c, lab_.net.now());
      communicator_->poll(lab_.net.now());
      endpoint_->poll(lab_.net.now(), out_);
    }
    while (Frame f = out_.pop()) lab_.net.carry({-1 - lab_.host[number_], 0}, bytes_of(f));
  }
  host::Communicator& communicator() { return *communicator_; }

 private:
  LeafSpine& lab_;
  int number_;
  bool v6_;
  HeapFramePool pool_;
  FrameList out_;
  std::unique_ptr<host::SoftEngine> endpoint_;
  std::unique_ptr<host::Communicator> communicator_;
};

class RoutedAllReduce : public ::testing::TestWithParam<const char*> {
 protected:
  RoutedAllReduce() {
    host::CommunicatorConfig config;
    config.key.fill(7);
    config.world = 4;
    config.stripes = 4;
    config.switch_address = ip(GetParam());
    for (uint16_t rank = 0; rank < 4; rank++) {
      config.rank = rank;
      config.nonce_seed = rank + 1;
      members.push_back(std::make_unique<Member>(lab, rank, config, !config.switch_address.is_v4()));
    }
    lab.net.deliver = [this](int number, const Bytes& b) {
      for (int rank = 0; rank < 4; rank++)
        if (lab.host[rank] == number) members[static_cast<size_t>(rank)]->receive(b);
      return true;
    };
  }
  ~RoutedAllReduce() override {
    lab.net.deliver = [](int, const Bytes&) { return true; };
  }
  bool run(const std::function<bool()>& until, Time limit = seconds(30)) {
    for (const Time end = lab.net.now() + limit; lab.net.now() < end;) {
      for (auto& m : members) m->pump();
      lab.net.settle();
      if (until()) return true;
      lab.net.run(milliseconds(1));
    }
    return false;
  }
  // The sum of four vectors of whole numbers, whose closed form is 4·i + 6.
  void reduce(size_t count) {
    std::vector<std::vector<float>> send(4, std::vector<float>(count)), recv = send;
    std::vector<host::Operation> operations(4);
    for (size_t r = 0; r < 4; r++) {
      for (size_t i = 0; i < count; i++) send[r][i] = static_cast<float>(i % 1000 + r);
      host::Operation& o = operations[r];
      o.op = aggregation::ReduceOp::kSum;
      o.type = aggregation::DataType::kF32;
      o.send = reinterpret_cast<const uint8_t*>(send[r].data());
      o.recv = reinterpret_cast<uint8_t*>(recv[r].data());
      o.bytes = count * sizeof(float);
      members[r]->communicator().submit(&o, lab.net.now());
    }
    ASSERT_TRUE(run(
        [&] { return std::all_of(operations.begin(), operations.end(), [](auto& o) { return o.done; }); }));
    for (size_t r = 0; r < 4; r++) {
      ASSERT_EQ(operations[r].status, MR_OK) << operations[r].text;
      for (size_t i = 0; i < count; i++)
        ASSERT_EQ(recv[r][i], static_cast<float>(4 * (i % 1000) + 6)) << r << " " << i;
    }
  }
  // RoCE frames from each spine to the first leaf, and from that to the spine.
  std::array<size_t, 4> crossed() {
    std::array<size_t, 4> n{};
    for (size_t s = 0; s < 2; s++) {
      n[s] = lab.net.count([&](auto& p) {
        return p.from.node == lab.spine[s] && p.to.node == lab.leaf[0] && p.bytes.size() > 90;
      });
      n[2 + s] = lab.net.count([&](auto& p) {
        return p.from.node == lab.leaf[0] && p.to.node == lab.spine[s] && p.bytes.size() > 90;
      });
    }
    return n;
  }

  LeafSpine lab;
  std::vector<std::unique_ptr<Member>> members;
};
INSTANTIATE_TEST_SUITE_P(Addresses, RoutedAllReduce,
                         ::testing::Values("10.77.1.1", "fd77:1::1", "192.0.2.1"));

TEST_P(RoutedAllReduce, IsExactAndSurvivesTheLossOfASpine) {
  auto running = [&] {
    return std::all_of(members.begin(), members.end(), [](auto& m) {
      return m->communicator().state() == host::Communicator::State::kRunning;
    });
  };
  ASSERT_TRUE(run(running)) << members[2]->communicator().text();
  lab.net.passed.clear();
  reduce(200'000);
  EXPECT_EQ(lab.net.sw(lab.leaf[0]).pipeline->counters().engine_fates[static_cast<size_t>(Fate::kFlooded)],
            0u);
  const auto before = crossed();
  EXPECT_GT(before[0] + before[1], 0u);
  // Whichever spine carries the results is lost; they go by the other one, to members that asked by the
  // first.
  const int lost = before[2] > before[3] ? 0 : 1;
  EXPECT_GT(before[2 + static_cast<size_t>(lost)], 0u);
  for (uint16_t l = 0; l < 2; l++) lab.net.cut({lab.spine[lost], l});
  lab.net.passed.clear();
  reduce(20'000);
  const auto after = crossed();
  EXPECT_GT(after[static_cast<size_t>(3 - lost)], 0u);
  for (auto& m : members) m->communicator().close(lab.net.now());
  EXPECT_TRUE(run([&] { return lab.net.sw(lab.leaf[0]).pipeline->engine().queue_pairs() == 0; }));
}

}  // namespace
}  // namespace millrace::switching
