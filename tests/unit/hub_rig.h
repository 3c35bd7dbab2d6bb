// Ranks on several hosts that combine, each host by the shipping hub, sockets, shared memory and
// communicators, under a root that is written from PROTOCOL.md's "Trees" and keeps no network between them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <list>
#include <map>

#include "aggregation/reduce.h"
#include "host/local_hub.h"
#include "host/local_transport.h"
#include "tools/perf_values.h"

namespace millrace::host {

using aggregation::Collective;
using aggregation::DataType;
using aggregation::RankRange;
using aggregation::RankSet;
using aggregation::ReduceOp;
using aggregation::SegmentHeader;

class TestRoot;

// A host's connection to the root.
class TestUplink final : public Transport {
 public:
  explicit TestUplink(TestRoot& root) : root_(root) {}

  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void*, size_t, Access) override {
    return {.id = ++regions, .lkey = regions, .rkey = regions};
  }
  void deregister_memory(const MemoryRegion&) override { deregistered++; }
  bool post_segment(LinkId link, uint64_t segment, const SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  bool post_message(LinkId link, std::span<const uint8_t> message) override;
  void close(LinkId link) override {
    Completion c{Completion::Kind::kClosed};
    c.link = link;
    completions.push_back(c);
    closed++;
  }
  void poll(std::vector<Completion>& out) override {
    out.insert(out.end(), completions.begin(), completions.end());
    completions.clear();
  }
  LinkStats stats(LinkId) const override { return {}; }

  struct Posted {
    SegmentHeader header;
    std::vector<uint8_t> payload;
  };
  std::vector<ConnectRequest> requests;   // link id − 1
  std::vector<std::deque<Posted>> queue;  // by stripe
  std::vector<Completion> completions;
  RankSet ranks;
  std::optional<aggregation::Terminal> terminal;  // that it has sent up
  std::optional<Completion> refusal;              // what it answers to connects
  uint32_t regions = 0, deregistered = 0, closed = 0;
  uint64_t payload_bytes = 0, messages = 0, results_bytes = 0;
  uint32_t full = 0;  // so many posts find the queue full

 private:
  friend class TestRoot;
  TestRoot& root_;
};

class TestRoot {
 public:
  uint16_t window = 3;
  uint32_t segment_bytes = 960;
  uint16_t world = 1;
  std::vector<TestUplink*> links;
  bool started = false;
  bool silent = false;  // gathers and gives no result

  void start_if_complete() {
    RankSet all;
    for (const TestUplink* u : links)
      for (const uint16_t r : u->ranks.ranks()) all.insert(r);
    if (started || all.size() != world) return;
    started = true;
    aggregation::Start s;
    s.window = window, s.group = 7, s.segment_bytes = segment_bytes, s.world = world;
    for (TestUplink* u : links) {
      s.weights.assign(u->requests[0].join.stripes, 1);
      tell(*u, encode(s));
    }
  }
  static void tell(TestUplink& u, const std::vector<uint8_t>& message) {
    for (size_t i = 0; i < u.requests.size(); i++) {
      Completion c{Completion::Kind::kMessage};
      c.link = static_cast<LinkId>(i + 1);
      c.message = message;
      u.completions.push_back(c);
    }
  }

  // Gives the results of segments that all have sent.
  void gather() {
    for (size_t stripe = 0; !silent && !links.empty() && stripe < links[0]->queue.size(); stripe++)
      while (gather(stripe)) {
      }
  }

 private:
  static size_t messages_of(const TestUplink& u, const SegmentHeader& h, uint16_t world) {
    const bool in_order =
        (h.flags & aggregation::kFlagDeterministic) != 0 && h.length.value() != 0 &&
        aggregation::order_matters(static_cast<DataType>(h.type), static_cast<ReduceOp>(h.op));
    return in_order ? u.ranks.subtrees(world).size() : 1;
  }

  bool gather(size_t stripe) {
    for (const TestUplink* u : links)
      if (stripe >= u->queue.size() || u->queue[stripe].empty() ||
          u->queue[stripe].size() < messages_of(*u, u->queue[stripe].front().header, world))
        return false;
    const SegmentHeader reference = links[0]->queue[stripe].front().header;
    const aggregation::SegmentShape shape = aggregation::shape(reference, world);
    std::map<uint16_t, std::pair<uint32_t, std::vector<uint8_t>>> parts;  // by first rank: ranks, payload
    std::vector<SegmentHeader> headers;
    for (TestUplink* u : links) {
      const size_t n = messages_of(*u, u->queue[stripe].front().header, world);
      headers.push_back(u->queue[stripe].front().header);
      for (size_t k = 0; k < n; k++) {
        TestUplink::Posted p = std::move(u->queue[stripe].front());
        u->queue[stripe].pop_front();
        EXPECT_STREQ(aggregation::check(p.header, segment_bytes, world, u->ranks), nullptr);
        EXPECT_EQ(p.payload.size(), p.header.payload_bytes.value());
        EXPECT_EQ(p.header.total.value(), reference.total.value());
        EXPECT_EQ(p.header.offset.value(), reference.offset.value());
        const RankRange range =
            n > 1 ? u->ranks.subtrees(world)[k] : RankRange{u->ranks.first(), u->ranks.size()};
        EXPECT_EQ(p.header.rank.value(), range.first);
        if (!p.payload.empty()) parts[range.first] = {range.count, std::move(p.payload)};
      }
    }
    const std::vector<uint8_t> result = reduce(shape, reference, parts);
    for (size_t i = 0; i < links.size(); i++) {
      const auto hull = shape.receives(links[i]->ranks);
      if (hull.bytes() != 0)
        std::memcpy(reinterpret_cast<void*>(headers[i].result_address.value()), result.data() + hull.begin,
                    hull.bytes());
      links[i]->results_bytes += hull.bytes();
      Completion c{Completion::Kind::kResult};
      c.link = static_cast<LinkId>(stripe + 1);
      c.immediate = aggregation::result_immediate(results_[stripe]);
      links[i]->completions.push_back(c);
    }
    results_[stripe]++;
    return true;
  }

  using Parts = std::map<uint16_t, std::pair<uint32_t, std::vector<uint8_t>>>;
  std::vector<uint8_t> reduce(const aggregation::SegmentShape& shape, const SegmentHeader& h, Parts& parts) {
    if (parts.empty()) return {};
    if (!aggregation::reduces(shape.collective)) return parts.begin()->second.second;
    const auto reducer = aggregation::Reducer::get(shape.type, static_cast<ReduceOp>(h.op), shape.wire);
    const bool wide = shape.partial_is_wide();
    const auto add = [&](std::vector<uint8_t>& a, const std::vector<uint8_t>& b) {
      if (wide)
        reducer.combine_wide(reinterpret_cast<float*>(a.data()), reinterpret_cast<const float*>(b.data()),
                             a.size() / sizeof(float));
      else
        reducer.accumulate(a.data(), b.data(), a.size());
    };
    std::vector<uint8_t> sum;
    const bool in_order = (h.flags & aggregation::kFlagDeterministic) != 0 &&
                          aggregation::order_matters(shape.type, static_cast<ReduceOp>(h.op));
    if (in_order) {
      const auto bracket = [&](auto& self, uint16_t first, uint32_t count) -> std::vector<uint8_t> {
        if (const auto p = parts.find(first); p != parts.end() && p->second.first == count)
          return p->second.second;
        const uint32_t left = aggregation::left_of(count);
        auto a = self(self, first, left);
        add(a, self(self, static_cast<uint16_t>(first + left), count - left));
        return a;
      };
      sum = bracket(bracket, 0, world);
    } else {
      for (auto& [first, part] : parts) {
        if (sum.empty())
          sum = part.second;
        else
          add(sum, part.second);
      }
    }
    if (!wide) {
      reducer.finish(sum.data(), sum.size(), world);
      return sum;
    }
    std::vector<uint8_t> out(shape.payload);
    auto* floats = reinterpret_cast<float*>(sum.data());
    reducer.finish_wide(floats, shape.payload, world);
    reducer.narrow(out.data(), floats, shape.payload);
    return out;
  }

  std::map<size_t, uint64_t> results_;
};

inline LinkId TestUplink::connect(const ConnectRequest& request) {
  requests.push_back(request);
  queue.resize(request.join.stripes);
  const auto link = static_cast<LinkId>(requests.size());
  Completion c{Completion::Kind::kConnected};
  if (refusal) c = *refusal;
  c.link = link;
  c.join_reply.group = 7;
  c.join_reply.window_limit = root_.window;
  c.join_reply.segment_limit = root_.segment_bytes;
  completions.push_back(c);
  return link;
}

inline bool TestUplink::post_segment(LinkId link, uint64_t segment, const SegmentHeader& header,
                                     std::span<const uint8_t> payload, const MemoryRegion&) {
  if (full != 0) {
    full--;
    return false;
  }
  queue[link - 1].push_back({header, {payload.begin(), payload.end()}});
  payload_bytes += payload.size();
  messages++;
  Completion c{Completion::Kind::kSent};
  c.link = link;
  c.segment = segment;
  completions.push_back(c);
  return true;
}

inline bool TestUplink::post_message(LinkId link, std::span<const uint8_t> message) {
  const auto m = aggregation::decode_control_message(message);
  if (m.terminal) terminal = m.terminal;
  if (m.members)
    for (const RankRange& r : m.members->ranks)
      for (uint32_t i = 0; i < r.count; i++) ranks.insert(static_cast<uint16_t>(r.first + i));
  Completion c{Completion::Kind::kMessageSent};
  c.link = link;
  completions.push_back(c);
  root_.start_if_complete();
  return true;
}

// One rank: its socket, its transport and its communicator.
struct TestRank {
  uint16_t rank = 0;
  std::unique_ptr<LocalTransport> transport;
  std::unique_ptr<Communicator> communicator;
  bool stopped = false;
};

struct TestHost {
  std::unique_ptr<TestUplink> up;
  std::unique_ptr<LocalHub> hub;
  std::string name;
  std::list<TestRank> ranks;
  bool stopped = false;  // the hub
};

// One job over hosts, in one thread and one clock.
class TestJob {
 public:
  using Partition = std::vector<std::vector<uint16_t>>;  // ranks by host, the leader first

  // `world`: of all ranks, where some come later; 0: those of the partition.
  explicit TestJob(const Partition& partition, uint8_t stripes = 1, uint16_t world = 0) {
    uint16_t all = 0;
    for (const auto& host : partition) all = static_cast<uint16_t>(all + host.size());
    config.world = root.world = world ? world : all;
    config.stripes = stripes;
    static int job = 0;
    for (const auto& ranks : partition) {
      TestHost& h = hosts.emplace_back();
      h.up = std::make_unique<TestUplink>(root);
      root.links.push_back(h.up.get());
      h.name = "millrace-hub-test-" + std::to_string(getpid()) + "-" + std::to_string(job++);
      HubConfig hub;
      hub.join = config;
      hub.join.rank = ranks[0];
      hub.host_name = "here";
      h.hub = std::make_unique<LocalHub>(*LocalSocket::listen(h.name), hub, *h.up, now);
      for (const uint16_t r : ranks) join(h, r);
    }
  }

  LocalMessage knock(TestHost& h, LocalSocket& socket, const LocalHello& hello) {
    LocalMessage m;
    m.kind = LocalMessage::Kind::kHello;
    m.hello = hello;
    EXPECT_TRUE(socket.send(m));
    h.hub->receive(now);
    h.hub->poll(now);
    LocalMessage answer;
    EXPECT_EQ(socket.wait(answer, 1000), LocalSocket::Received::kMessage);
    return answer;
  }
  LocalHello hello(uint16_t rank) const {
    LocalHello h;
    h.rank = rank, h.world = config.world, h.stripes = config.stripes;
    return h;
  }
  void join(TestHost& h, uint16_t rank) {
    LocalSocket socket = *LocalSocket::connect(h.name);
    const LocalMessage answer = knock(h, socket, hello(rank));
    ASSERT_EQ(answer.kind, LocalMessage::Kind::kAccepted);
    TestRank& r = h.ranks.emplace_back();
    r.rank = rank;
    r.transport = std::make_unique<LocalTransport>(std::move(socket), answer.rank);
    CommunicatorConfig c = config;
    c.rank = rank;
    r.communicator = std::make_unique<Communicator>(c, *r.transport, now);
  }

  void turn() {
    for (TestHost& h : hosts) {
      std::vector<Completion> completions;
      h.up->poll(completions);
      if (h.hub && !h.stopped) {
        h.hub->receive(now);
        for (const Completion& c : completions) h.hub->hub().handle(c, now);
        h.hub->poll(now);
      }
      for (TestRank& r : h.ranks) {
        if (!r.transport || r.stopped) continue;
        r.transport->receive(now);
        completions.clear();
        r.transport->poll(completions);
        for (const Completion& c : completions) r.communicator->handle(c, now);
        r.communicator->poll(now);
      }
    }
    root.gather();
  }
  template <typename Condition>
  bool run_until(Condition condition, int turns = 20000) {
    for (int i = 0; i < turns; i++) {
      if (condition()) return true;
      turn();
      now += std::chrono::microseconds(10);
    }
    return condition();
  }
  template <typename F>
  void for_each(F f) {
    for (TestHost& h : hosts)
      for (TestRank& r : h.ranks)
        if (r.communicator) f(r);
  }
  bool start() {
    return run_until([&] {
      bool all = true;
      for_each([&](TestRank& r) { all &= r.communicator->status() != MR_IN_PROGRESS; });
      return all;
    });
  }
  TestRank& rank(uint16_t number) {
    for (TestHost& h : hosts)
      for (TestRank& r : h.ranks)
        if (r.rank == number) return r;
    std::abort();
  }

  TestRoot root;
  CommunicatorConfig config;
  std::list<TestHost> hosts;
  Time now{std::chrono::seconds(1)};
};

}  // namespace millrace::host
