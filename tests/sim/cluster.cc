#include "tests/sim/cluster.h"

#include <algorithm>

namespace millrace::sim {

using std::chrono::microseconds;
using std::chrono::nanoseconds;

namespace {
constexpr MacAddress kSwitchMac{{2, 0, 0, 0, 0, 1}};

Frame frame_of(FramePool& pool, std::span<const uint8_t> bytes) {
  Frame f = Frame::allocate(pool);
  if (!f) return f;
  std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
  f.buffer()->length = static_cast<uint32_t>(bytes.size());
  return f;
}
}  // namespace

Host::Host(Cluster& cluster, uint16_t index, uint64_t seed)
    : cluster_(cluster), index_(index), seed_(seed), pool_(4608, UINT32_MAX, true) {
  host::SoftConfig c;
  c.seed = seed;
  c.ca_guid = seed;
  c.first_psn = cluster.config_.engine.first_psn;
  endpoint_ = std::make_unique<host::SoftEngine>(c, pool_, *this);
}

std::optional<roce::Path> Host::resolve(const IpAddress& to, std::string& error) {
  if (to != cluster_.switch_address()) {
    error = "no answer to ARP for " + to.to_string();
    return std::nullopt;
  }
  roce::Path p;
  p.src_mac = Cluster::host_mac(index_);
  p.dst_mac = kSwitchMac;
  p.src_ip = cluster_.host_address(index_);
  p.dst_ip = to;
  return p;
}

host::Communicator& Host::join(const host::CommunicatorConfig& config) {
  host::CommunicatorConfig c = config;
  c.nonce_seed = seed_ * 31 + communicators_.size();
  communicators_.push_back(std::make_unique<host::Communicator>(c, *endpoint_, cluster_.now()));
  return *communicators_.back();
}

void Host::pump(Time now) {
  FrameList out;
  if (crashed_) {
    inbox_.clear();
    return;
  }
  while (!inbox_.empty()) endpoint_->receive(inbox_.pop(), now, out);
  for (int round = 0; round < 2; round++) {
    std::vector<host::Completion> completions;
    static_cast<host::Transport&>(*endpoint_).poll(completions);
    for (const host::Completion& c : completions)
      for (auto& comm : communicators_)
        if (comm->owns(c.link)) {
          comm->handle(c, now);
          break;
        }
    for (auto& comm : communicators_) comm->poll(now);
    endpoint_->poll(now, out);
  }
  cluster_.carry(out, index_, true);
}

Time Host::next_deadline() const {
  if (crashed_) return kNever;
  Time t = endpoint_->next_deadline();
  for (const auto& c : communicators_) t = std::min(t, c->next_deadline());
  return t;
}

Cluster::Cluster(const ClusterConfig& config)
    : config_(config),
      random_(config.seed),
      switch_pool_(4608, config.switch_frames, config.switch_frames == UINT32_MAX) {
  switching::PipelineConfig pc;
  pc.ports = config.hosts;
  config_.engine.addresses = {*IpAddress::parse("10.77.0.100"), *IpAddress::parse("fd77::100")};
  config_.engine.mac = kSwitchMac;
  config_.engine.seed = random_();
  pc.engine = config_.engine;
  pipeline_ = std::make_unique<switching::Pipeline>(pc, switch_pool_);
  counts_.bytes_to_host.resize(config.hosts);
  counts_.bytes_to_switch.resize(config.hosts);
  for (auto& w : wire_free_) w.resize(config.hosts);
  for (uint16_t i = 0; i < config.hosts; i++) hosts_.push_back(std::make_unique<Host>(*this, i, random_()));
}

Cluster::~Cluster() = default;

Host& Cluster::restart_host(uint16_t i) {
  hosts_[i] = std::make_unique<Host>(*this, i, random_());
  return *hosts_[i];
}

IpAddress Cluster::switch_address() const { return config_.engine.addresses[config_.ipv6 ? 1 : 0]; }

IpAddress Cluster::host_address(uint16_t i) const {
  return *IpAddress::parse(config_.ipv6 ? "fd77::" + std::to_string(i + 1)
                                        : "10.77.0." + std::to_string(i + 1));
}

host::CommunicatorConfig Cluster::communicator(uint16_t rank, uint16_t world, uint8_t key) const {
  host::CommunicatorConfig c;
  c.key.fill(key);
  c.rank = rank;
  c.world = world;
  c.switch_address = switch_address();
  c.mtu = config_.engine.mtu;
  return c;
}

void Cluster::launch(std::vector<uint8_t> bytes, uint16_t host, bool to_switch) {
  auto chance = [&](double p) { return p > 0 && std::uniform_real_distribution<>(0, 1)(random_) < p; };
  const WireConfig& w = config_.wire;
  if (tap) tap(host, to_switch, bytes);
  counts_.frames++;
  (to_switch ? counts_.bytes_to_switch : counts_.bytes_to_host)[host] += bytes.size();
  Time& free = wire_free_[to_switch][host];
  free = std::max(free, now_) +
         nanoseconds(static_cast<int64_t>(static_cast<double>(bytes.size() + 24) * 8 / w.gbit));
  if (chance(w.loss) || (hosts_are_deaf && !to_switch)) {
    counts_.lost++;
    return;
  }
  Time at = free + w.delay;
  if (chance(w.corrupt)) {
    counts_.corrupted++;
    const size_t bit = random_() % (bytes.size() * 8);
    bytes[bit / 8] ^= static_cast<uint8_t>(1 << bit % 8);
  }
  if (chance(w.duplicate)) {
    counts_.duplicated++;
    flights_.push({at + microseconds(random_() % 100), order_++, host, to_switch, bytes});
  }
  if (chance(w.reorder)) {
    counts_.reordered++;
    at += microseconds(1 + random_() % 200);
  }
  flights_.push({at, order_++, host, to_switch, std::move(bytes)});
}

void Cluster::carry(FrameList& frames, uint16_t host, bool to_switch) {
  while (!frames.empty()) {
    const Frame f = frames.pop();
    std::vector<uint8_t> bytes(f.total_length());
    f.copy_to(bytes.data());
    launch(std::move(bytes), to_switch ? host : f.port(), to_switch);
  }
}

void Cluster::inject(uint16_t from_host, std::span<const uint8_t> frame) {
  launch({frame.begin(), frame.end()}, from_host, true);
}

void Cluster::run_switch() {
  FrameList out;
  if (around_pipeline) around_pipeline(true);
  pipeline_->process(switch_inbox_, now_, out);
  if (now_ >= pipeline_->next_deadline()) pipeline_->poll(now_, out);
  if (around_pipeline) around_pipeline(false);
  carry(out, 0, false);
}

bool Cluster::step(Time end) {
  Time next = std::min(flights_.empty() ? kNever : flights_.top().at, pipeline_->next_deadline());
  for (const auto& h : hosts_) next = std::min(next, h->next_deadline());
  next = std::max(next, now_);
  // What has just been submitted is pumped once even without a deadline.
  if (next > end) {
    now_ = end;
    for (const auto& h : hosts_) h->pump(now_);
    if (flights_.empty() || flights_.top().at > end) return false;
    return true;
  }
  // Time never stands still, or a state machine that asks for "now" for ever would hang the run.
  now_ = next > now_ ? next : now_ + nanoseconds(100);
  while (!flights_.empty() && flights_.top().at <= now_) {
    const Flight& f = flights_.top();
    if (f.to_switch) {
      Frame frame = frame_of(switch_pool_, f.bytes);
      if (frame) {
        frame.set_port(f.host);
        switch_inbox_.push(std::move(frame));
      }
    } else if (Frame frame = frame_of(hosts_[f.host]->pool_, f.bytes)) {
      hosts_[f.host]->inbox_.push(std::move(frame));
    }
    flights_.pop();
  }
  if (!switch_inbox_.empty() || now_ >= pipeline_->next_deadline()) run_switch();
  for (const auto& h : hosts_)
    if (!h->inbox_.empty() || now_ >= h->next_deadline()) h->pump(now_);
  return true;
}

}  // namespace millrace::sim
