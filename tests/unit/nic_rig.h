// Hosts with model NICs and shipping communicators around a shipping pipeline, in virtual time, on wires that
// lose, repeat, reorder, corrupt and mark by a seed.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <queue>

#include "host/communicator.h"
#include "switch/pipeline.h"
#include "tools/sim/nic_model.h"
#include "tools/sim/soft_nic.h"

namespace millrace::sim {

using host::Communicator;
using host::Completion;
using host::LinkError;
using host::Operation;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<uint8_t>;

// Per million frames; `mark`: of those that say they are ECN-capable, which the switch's results do not, so
// that only a network that marks them all the same draws CNPs from a NIC.
struct Weather {
  uint32_t loss = 0, duplicate = 0, reorder = 0, corrupt = 0, mark = 0;
  bool mark_all = false;
  double gbit = 25;
  Time delay = microseconds(1);
};

struct RigConfig {
  uint64_t seed = 1;
  uint16_t hosts = 2;
  bool ipv6 = false;
  Time turn{1};  // everybody acts at multiples of this only
  Weather weather;
  aggregation::EngineConfig engine;
  std::function<void(uint16_t host, NicConfig&, NicQuirks&)> adjust = [](uint16_t, NicConfig&, NicQuirks&) {};
  std::function<bool(uint16_t host)> soft = [](uint16_t) { return false; };  // hosts with the soft transport
};

class Rig {
 public:
  struct Host final : FrameSink {
    Rig* rig = nullptr;
    uint16_t index = 0;
    std::unique_ptr<Nic> nic;
    NicModel* model = nullptr;  // nullptr: a soft one
    std::vector<std::unique_ptr<Communicator>> communicators;
    std::vector<Completion> strays;  // completions of no communicator's
    std::deque<Bytes> inbox;
    bool touched = false;
    void send(std::span<const uint8_t> frame) override {
      rig->launch({frame.begin(), frame.end()}, index, true);
    }
  };

  explicit Rig(const RigConfig& config) : config_(config), dice_(config.seed * 77 + 5) {
    switching::PipelineConfig pc;
    pc.ports = config.hosts;
    pc.engine = config.engine;
    pc.engine.addresses = {*IpAddress::parse("10.77.0.100"), *IpAddress::parse("fd77::100")};
    pc.engine.mac = kSwitchMac;
    pc.engine.seed = dice_.roll();
    pipeline_ = std::make_unique<switching::Pipeline>(pc, pool_);
    free_[0].resize(config.hosts), free_[1].resize(config.hosts);
    for (uint16_t i = 0; i < config.hosts; i++) add_host(i);
  }

  IpAddress switch_address() const { return *IpAddress::parse(config_.ipv6 ? "fd77::100" : "10.77.0.100"); }
  Host& host(uint16_t i) { return *hosts_[i]; }
  Time now() const { return now_; }
  Weather& weather() { return config_.weather; }
  const aggregation::Engine& engine() const { return pipeline_->engine(); }
  bool switch_gone = false;
  std::function<void(uint16_t host, bool up, const Bytes&)> tap;   // all that is put on a wire
  std::function<bool(uint16_t host, bool up, const Bytes&)> lose;  // of which this is lost

  Communicator& join(uint16_t rank, uint16_t world, uint8_t key = 1, uint8_t stripes = 1,
                     std::function<void(host::CommunicatorConfig&)> change = {}) {
    host::CommunicatorConfig c;
    c.key.fill(key);
    c.rank = rank;
    c.world = world;
    c.stripes = stripes;
    c.switch_address = switch_address();
    c.mtu = config_.engine.mtu;
    c.connect_timeout = seconds(60);
    c.nonce_seed = config_.seed * 100 + rank;
    if (change) change(c);
    Host& h = *hosts_[rank];
    h.communicators.push_back(std::make_unique<Communicator>(c, h.nic->transport(), now_));
    h.touched = true;
    return *h.communicators.back();
  }
  std::vector<Communicator*> join_all(uint8_t stripes = 1) {
    std::vector<Communicator*> all;
    for (uint16_t r = 0; r < config_.hosts; r++) all.push_back(&join(r, config_.hosts, 1, stripes));
    EXPECT_TRUE(run([&] {
      return std::ranges::all_of(all, [](auto* c) { return c->state() == Communicator::State::kRunning; });
    })) << all[0]->text();
    return all;
  }

  // A new process and a new NIC on the host's machine; the old ones are gone without a word.
  void restart(uint16_t i) { add_host(i); }
  void shut_switch_down() {
    FrameList out;
    pipeline_->shutdown(now_, out);
    carry(out);
  }

  // Until done(), or until `limit` has passed; whether done() was reached.
  bool run(const std::function<bool()>& done, Time limit = seconds(60)) {
    const Time end = now_ + limit;
    while (!done())
      if (!step(end)) return done();
    return true;
  }
  void run_for(Time t) {
    run([] { return false; }, t);
  }
  // All leave; nothing stays behind.
  void close() {
    for (auto& h : hosts_)
      for (auto& c : h->communicators) c->close(now_), h->touched = true;
    EXPECT_TRUE(run([&] {
      return std::ranges::all_of(hosts_, [](auto& h) { return h->nic->idle(); }) &&
             engine().queue_pairs() == 0;
    })) << engine().queue_pairs();
    for (auto& h : hosts_) {
      if (h->model == nullptr) continue;
      EXPECT_EQ(h->model->regions(), 0u);
      EXPECT_EQ(h->model->counts().wrong_msn, 0u) << "the switch counts messages otherwise than we do";
    }
  }

 private:
  static constexpr MacAddress kSwitchMac{{2, 0, 0, 0, 0, 1}};
  struct Flight {
    Time at;
    uint64_t order;
    uint16_t host;
    bool up;
    Bytes bytes;
    bool operator>(const Flight& o) const { return at != o.at ? at > o.at : order > o.order; }
  };

  void add_host(uint16_t i) {
    auto h = std::make_unique<Host>();
    h->rig = this;
    h->index = i;
    NicConfig c;
    c.mac = {{2, 0, 0, 1, 0, static_cast<uint8_t>(i)}};
    c.addresses = {*IpAddress::parse("10.77.0." + std::to_string(i + 1)),
                   *IpAddress::parse("fd77::" + std::to_string(i + 1))};
    c.seed = dice_.roll();
    c.ca_guid = c.seed;
    c.gbit = config_.weather.gbit;
    c.first_psn = config_.engine.first_psn;
    c.resolve = [this, addresses = c.addresses](const IpAddress& to) -> std::optional<Resolved> {
      if (to != switch_address()) return std::nullopt;
      return Resolved{kSwitchMac, addresses[to.is_v4() ? 0 : 1]};
    };
    NicQuirks quirks = draw_quirks(c.seed);
    config_.adjust(i, c, quirks);
    if (config_.soft(i)) {
      h->nic = SoftNic::make(c);
    } else {
      auto model = std::make_unique<NicModel>(c, quirks);
      h->model = model.get();
      h->nic = std::move(model);
    }
    if (hosts_.size() <= i) hosts_.resize(i + 1u);
    hosts_[i] = std::move(h);
  }

  bool chance(uint32_t per_million) { return per_million != 0 && dice_.below(1'000'000) < per_million; }

  void launch(Bytes bytes, uint16_t host, bool up) {
    if (tap) tap(host, up, bytes);
    const Weather& w = config_.weather;
    Time& free = free_[up][host];
    free = std::max(free, now_) +
           Time(static_cast<int64_t>(static_cast<double>(bytes.size() + 24) * 8 / w.gbit));
    if (chance(w.loss) || (lose && lose(host, up, bytes))) return;
    Time at = free + w.delay;
    if (chance(w.mark)) mark(bytes, w.mark_all);
    if (chance(w.corrupt)) {  // not the MAC addresses, which only the FCS guards
      const size_t which = 14 + dice_.below(static_cast<uint32_t>(bytes.size() - 14));
      bytes[which] ^= static_cast<uint8_t>(1 << dice_.below(8));
    }
    if (chance(w.duplicate)) flights_.push({at + Time(dice_.below(100'000)), order_++, host, up, bytes});
    if (chance(w.reorder)) at += Time(1'000 + dice_.below(200'000));
    flights_.push({at, order_++, host, up, std::move(bytes)});
  }

  // CE on what is ECN-capable, as a congested switch on the way would (RFC 3168, RFC 1624 for the checksum).
  static void mark(Bytes& b, bool all) {
    if (b[12] == 0x08 && b[13] == 0x00 && (all || (b[15] & 3) != 0) && (b[15] & 3) != 3) {
      const uint32_t change = 3u - (b[15] & 3);
      b[15] |= 3;
      const uint64_t sum = get_be(&b[24], 2) + 0xFFFF - change;
      set_be(&b[24], 2, (sum & 0xFFFF) + (sum >> 16));
    } else if (b[12] == 0x86 && (all || (b[15] & 0x30) != 0)) {
      b[15] |= 0x30;
    }
  }

  void carry(FrameList& out) {
    while (!out.empty()) {
      const Frame f = out.pop();
      Bytes bytes(f.total_length());
      f.copy_to(bytes.data());
      launch(std::move(bytes), f.port(), false);
    }
  }

  bool step(Time end) {
    Time next = flights_.empty() ? kNever : flights_.top().at;
    if (!switch_gone) next = std::min(next, pipeline_->next_deadline());
    for (const auto& h : hosts_) {
      next = std::min(next, h->touched ? now_ : h->nic->next_deadline());
      for (const auto& c : h->communicators) next = std::min(next, c->next_deadline());
    }
    if (next > end) {
      now_ = end;
      return false;
    }
    now_ = next > now_ ? next : now_ + Time(100);  // time never stands still
    now_ += (config_.turn - now_ % config_.turn) % config_.turn;
    FrameList in, out;
    for (; !flights_.empty() && flights_.top().at <= now_; flights_.pop()) {
      const Flight& f = flights_.top();
      if (!f.up) {
        hosts_[f.host]->inbox.push_back(f.bytes);
        continue;
      }
      Frame frame = Frame::allocate(pool_);
      std::copy(f.bytes.begin(), f.bytes.end(), frame.buffer()->data());
      frame.buffer()->length = static_cast<uint32_t>(f.bytes.size());
      frame.set_port(f.host);
      in.push(std::move(frame));
    }
    if (switch_gone) {
      in.clear();
    } else {
      if (!in.empty()) pipeline_->process(in, now_, out);
      if (now_ >= pipeline_->next_deadline()) pipeline_->poll(now_, out);
    }
    carry(out);
    for (const auto& h : hosts_)
      if (h->touched || !h->inbox.empty() || now_ >= h->nic->next_deadline()) pump(*h);
    return true;
  }

  // The order of nic.h.
  void pump(Host& h) {
    h.touched = false;
    for (; !h.inbox.empty(); h.inbox.pop_front()) h.nic->receive(h.inbox.front(), now_);
    std::vector<Completion> completions;
    h.nic->transport().poll(completions);
    for (const Completion& c : completions) {
      const auto owner = std::ranges::find_if(h.communicators, [&](auto& x) { return x->owns(c.link); });
      if (owner != h.communicators.end())
        (*owner)->handle(c, now_);
      else
        h.strays.push_back(c);
    }
    for (auto& c : h.communicators) c->poll(now_);
    h.nic->poll(now_, h);
  }

  RigConfig config_;
  Dice dice_;
  HeapFramePool pool_;
  std::unique_ptr<switching::Pipeline> pipeline_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::priority_queue<Flight, std::vector<Flight>, std::greater<>> flights_;
  std::vector<Time> free_[2];
  Time now_ = seconds(1);
  uint64_t order_ = 0;
};

// An all-reduce of whole numbers, whose sums are exact in each of these types.
struct Sum {
  aggregation::DataType type = aggregation::DataType::kF32;
  size_t count = 1;
  bool in_place = false;
  uint64_t seed = 1;
  std::vector<Bytes> send, recv;
  std::vector<std::unique_ptr<Operation>> operation;

  int value(size_t rank, size_t i) const {
    return static_cast<int>(Dice(seed * 1'000'003 + rank * 7919 + i).roll() % 2001) - 1000;
  }
  void store(uint8_t* at, int v) const {
    const auto put = [&](auto x) { std::memcpy(at, &x, sizeof x); };
    if (type == aggregation::DataType::kF32) put(static_cast<float>(v));
    if (type == aggregation::DataType::kF64) put(static_cast<double>(v));
    if (type == aggregation::DataType::kI32) put(static_cast<int32_t>(v));
    if (type == aggregation::DataType::kI64) put(static_cast<int64_t>(v));
  }
  size_t element() const { return aggregation::element_bytes(type); }

  void prepare(size_t world) {
    for (size_t r = 0; r < world; r++) {
      Bytes& from = send.emplace_back(count * element() + 8, uint8_t{0xA5});
      for (size_t i = 0; i < count; i++) store(&from[i * element()], value(r, i));
      recv.emplace_back(from.size(), uint8_t{0xA5});
    }
    for (size_t r = 0; r < world; r++) {
      auto o = std::make_unique<Operation>();
      o->type = type;
      o->op = aggregation::ReduceOp::kSum;
      o->send = send[r].data();
      o->recv = in_place ? send[r].data() : recv[r].data();
      o->bytes = count * element();
      operation.push_back(std::move(o));
    }
  }
  void submit(Rig& rig, const std::vector<Communicator*>& comms) {
    prepare(comms.size());
    for (size_t r = 0; r < comms.size(); r++) {
      comms[r]->submit(operation[r].get(), rig.now());
      rig.host(static_cast<uint16_t>(r)).touched = true;
    }
  }
  bool done() const {
    return std::ranges::all_of(operation, [](auto& o) { return o->done; });
  }
  void check() const {
    Bytes expected(count * element());
    for (size_t i = 0; i < count; i++) {
      int sum = 0;
      for (size_t r = 0; r < operation.size(); r++) sum += value(r, i);
      store(&expected[i * element()], sum);
    }
    for (const auto& o : operation) {
      ASSERT_EQ(o->status, MR_OK) << o->text;
      for (size_t i = 0; i < count; i++) {
        // Of two zeros either sign is right.
        double zero = 1;
        if (type == aggregation::DataType::kF32) {
          float f;
          std::memcpy(&f, o->recv + i * 4, 4);
          zero = f;
        }
        if (type == aggregation::DataType::kF64) std::memcpy(&zero, o->recv + i * 8, 8);
        const uint8_t* right = &expected[i * element()];
        const bool both_zero =
            zero == 0 && std::all_of(right, right + element(), [](uint8_t b) { return b == 0; });
        ASSERT_TRUE(both_zero || std::memcmp(o->recv + i * element(), right, element()) == 0)
            << "element " << i;
      }
      for (size_t i = 0; i < 8; i++) ASSERT_EQ(o->recv[o->bytes + i], 0xA5) << "written past the end";
    }
  }
};

}  // namespace millrace::sim
