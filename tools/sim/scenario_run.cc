#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "aggregation/datatype.h"
#include "tools/sim/scenario.h"

namespace millrace::sim {

using host::Communicator;

namespace {

constexpr Time kLimit = std::chrono::hours(1);

// A rank that does what its group's trace says, and checks each result.
class Rank {
 public:
  struct Running {
    std::unique_ptr<host::Operation> operation;
    std::vector<uint8_t> send, recv;
    size_t step;
    Time called;
  };

  Rank(const ScenarioGroup& group, uint8_t key, uint16_t rank, Fabric& fabric, std::vector<StepReport>& steps,
       size_t first_step, ScenarioReport& report)
      : group_(group), rank_(rank), fabric_(fabric), steps_(steps), first_step_(first_step), report_(report) {
    host::CommunicatorConfig c;
    c.key.fill(key);
    c.rank = rank;
    c.world = static_cast<uint16_t>(group.hosts.size());
    c.stripes = group.stripes;
    c.switch_address = fabric.address(group.where, group.v6);
    communicator_ = &host().join(c);
  }

  bool running() const { return communicator_->state() == Communicator::State::kRunning; }
  bool failed() const { return communicator_->state() == Communicator::State::kFailed; }
  const std::string& text() const { return communicator_->text(); }
  bool over() const { return failed() || (step_ == group_.steps.size() && running_.empty()); }
  uint64_t retransmitted() const { return communicator_->stats().retransmitted; }
  uint16_t host_number() const { return group_.hosts[rank_]; }
  void begin() {
    begun_ = true;
    plan();
  }
  void step();

 private:
  Host& host() { return fabric_.host(group_.hosts[rank_]); }
  void plan() {
    if (step_ == group_.steps.size()) return;
    next_at_ = fabric_.now() + group_.steps[step_].gap;
    Host& h = host();
    Network& n = fabric_.network();
    n.at(next_at_, [&n, &h] { n.touch(h); });
  }
  check::Reduction reduction(const ScenarioStep& s) const {
    return {s.type,
            s.op,
            s.bytes / check::element_bytes(s.type),
            static_cast<uint32_t>(group_.hosts.size()),
            1,
            s.collective,
            s.root};
  }
  void submit();

  const ScenarioGroup& group_;
  uint16_t rank_;
  Fabric& fabric_;
  std::vector<StepReport>& steps_;
  size_t first_step_;
  ScenarioReport& report_;
  Communicator* communicator_;
  bool begun_ = false;
  size_t step_ = 0;
  uint32_t done_of_step_ = 0;
  Time next_at_{};
  std::vector<Running> running_;
};

void Rank::submit() {
  const ScenarioStep& s = group_.steps[step_];
  Running r{std::make_unique<host::Operation>(), {}, {}, first_step_ + step_, fabric_.now()};
  const check::Reduction x = reduction(s);
  const uint64_t give = check::contribution_bytes(x, rank_), get = check::result_bytes(x, rank_);
  const bool shared = s.in_place && give != 0 && get != 0;
  r.send.resize(shared ? std::max(give, get) : give);
  if (!shared) r.recv.resize(get);
  uint8_t* from = r.send.data() + (shared && s.collective == check::kAllGather ? rank_ * give : 0);
  check::fill_contribution(x, rank_, from);
  host::Operation& o = *r.operation;
  o.collective = static_cast<aggregation::Collective>(s.collective);
  o.type = s.collective == check::kBarrier ? aggregation::DataType::kU8
                                           : static_cast<aggregation::DataType>(s.type);
  o.op = x.reduces() ? static_cast<aggregation::ReduceOp>(s.op) : aggregation::ReduceOp::kNone;
  o.root = s.root;
  o.deterministic = s.deterministic;
  o.send = from;
  o.recv =
      !shared ? r.recv.data() : r.send.data() + (s.collective == check::kReduceScatter ? rank_ * get : 0);
  o.bytes = s.bytes;
  communicator_->submit(&o, fabric_.now());
  fabric_.network().touch(host());
  running_.push_back(std::move(r));
  if (++done_of_step_ == s.repeat) step_++, done_of_step_ = 0;
  plan();
}

void Rank::step() {
  for (size_t i = 0; i < running_.size();) {
    Running& r = running_[i];
    if (!r.operation->done) {
      i++;
      continue;
    }
    const ScenarioStep& s = group_.steps[r.step - first_step_];
    if (r.operation->status == MR_OK) {
      steps_[r.step].us.push_back(
          std::chrono::duration<double, std::micro>(fabric_.now() - r.called).count());
      static thread_local check::Reduction known;
      static thread_local std::vector<uint8_t> expected;
      const check::Reduction x = reduction(s);
      if (known != x) expected = check::expected_result(x), known = x;
      const uint64_t get = check::result_bytes(x, rank_);
      report_.wrong += !check::explain_difference(x, rank_, expected, {r.operation->recv, get}).empty();
    }
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(i));
  }
  while (begun_ && !failed() && step_ < group_.steps.size() && running_.size() < group_.in_flight &&
         fabric_.now() >= next_at_)
    submit();
}

std::string what(const ScenarioStep& s) {
  std::string text(check::collective_name(s.collective));
  if (s.collective == check::kBarrier) return text;
  const bool reduces = check::Reduction{s.type, s.op, 0, 1, 1, s.collective}.reduces();
  if (reduces) text += " " + std::string(name(static_cast<aggregation::ReduceOp>(s.op)));
  return text + " " + std::string(name(static_cast<aggregation::DataType>(s.type)));
}

void report_links(Fabric& fabric, Time from, const std::vector<LinkStats>& before, ScenarioReport& r) {
  Network& n = fabric.network();
  const auto ps = static_cast<double>((n.now() - from).count()) * 1000;
  for (uint32_t l = 0; l < n.links(); l++) {
    const LinkStats &s = n.stats(l), &b = before[l];
    LinkReport k;
    k.name = fabric.link_name(l);
    k.gbit = n.config(l).gbit;
    k.frames = s.frames - b.frames, k.bytes = s.bytes - b.bytes;
    k.utilisation = ps > 0 ? static_cast<double>(s.busy_ps - b.busy_ps) / ps : 0;
    k.queue_peak = s.queue_peak, k.tail_drops = s.tail_drops, k.lost = s.lost;
    r.links.push_back(std::move(k));
  }
}

struct Quartet {
  double min = 0, median = 0, max = 0;
  explicit Quartet(std::vector<double> v) {
    if (v.empty()) return;
    std::sort(v.begin(), v.end());
    min = v.front(), median = v[v.size() / 2], max = v.back();
  }
};

}  // namespace

ScenarioReport run_scenario(const Scenario& scenario) {
  ScenarioReport r;
  r.name = scenario.name;
  Fabric fabric(scenario.fabric);
  Network& n = fabric.network();
  std::vector<std::unique_ptr<Rank>> ranks;
  for (size_t g = 0; g < scenario.groups.size(); g++) {
    const ScenarioGroup& group = scenario.groups[g];
    const size_t first = r.steps.size();
    for (const ScenarioStep& s : group.steps) r.steps.push_back({group.name, what(s), s.bytes, {}});
    for (uint16_t k = 0; k < group.hosts.size(); k++)
      ranks.push_back(
          std::make_unique<Rank>(group, static_cast<uint8_t>(g + 1), k, fabric, r.steps, first, r));
  }
  for (uint16_t h = 0; h < fabric.hosts(); h++)
    fabric.host(h).after_turn = [&ranks, h](Time) {
      for (auto& rank : ranks)
        if (rank->host_number() == h) rank->step();
    };
  auto all = [&](auto what_holds) { return std::all_of(ranks.begin(), ranks.end(), what_holds); };
  auto trouble = [&] {
    for (auto& rank : ranks)
      if (rank->failed()) return rank->text();
    return std::string();
  };
  n.run([&] { return all([](auto& k) { return k->running() || k->failed(); }); }, std::chrono::seconds(100));
  r.trouble = trouble();
  for (uint32_t l = 0; l < n.links(); l++) n.faults(l) = scenario.wire;
  std::vector<LinkStats> before;
  for (uint32_t l = 0; l < n.links(); l++) before.push_back(n.stats(l));
  const Time from = n.now();
  const uint64_t frames = n.frames();
  for (auto& rank : ranks) rank->begin();
  for (uint16_t h = 0; h < fabric.hosts(); h++) n.touch(fabric.host(h));
  if (r.trouble.empty() && !n.run([&] { return all([](auto& k) { return k->over(); }); }, kLimit))
    r.trouble = "the trace was not over after an hour of virtual time";
  if (r.trouble.empty()) r.trouble = trouble();
  if (r.trouble.empty() && r.wrong != 0) r.trouble = std::to_string(r.wrong) + " results were wrong";
  r.duration_us = std::chrono::duration<double, std::micro>(n.now() - from).count();
  r.frames = n.frames() - frames;
  for (auto& rank : ranks) r.retransmitted += rank->retransmitted();
  for (uint16_t s = 0; s < fabric.switches(); s++) {
    const aggregation::Counters c = fabric.at(s).pipeline().engine().counters();
    r.retransmitted += c.retransmitted_packets;
    r.naks += c.naks_sent + c.naks_received, r.rnr_naks += c.rnr_naks_sent, r.timeouts += c.timeouts;
  }
  report_links(fabric, from, before, r);
  return r;
}

std::string to_text(const ScenarioReport& r) {
  std::string out;
  auto line = [&](const char* format, auto... values) {
    char text[512];
    std::snprintf(text, sizeof(text), format, values...);
    out += text;
    out += '\n';
  };
  auto n = [](uint64_t v) { return static_cast<unsigned long long>(v); };
  line(
      "# %s: %.1f us, %llu frames, %llu sent again, %llu NAKs, %llu RNR NAKs, %llu time-outs, %llu results "
      "wrong",
      r.name.c_str(), r.duration_us, n(r.frames), n(r.retransmitted), n(r.naks), n(r.rnr_naks), n(r.timeouts),
      n(r.wrong));
  line("%-14s %-22s %12s %6s %11s %11s %11s %9s", "group", "operation", "bytes", "times", "min us",
       "median us", "max us", "GB/s");
  for (const StepReport& s : r.steps) {
    const Quartet q(s.us);
    line("%-14s %-22s %12llu %6zu %11.1f %11.1f %11.1f %9.3f", s.group.c_str(), s.what.c_str(), n(s.bytes),
         s.us.size(), q.min, q.median, q.max,
         q.median > 0 ? static_cast<double>(s.bytes) / q.median / 1e3 : 0.0);
  }
  line("%-20s %8s %7s %12s %14s %12s %9s %7s", "link", "Gb/s", "used", "frames", "bytes", "queue peak",
       "dropped", "lost");
  for (const LinkReport& l : r.links)
    line("%-20s %8g %6.1f%% %12llu %14llu %12llu %9llu %7llu", l.name.c_str(), l.gbit, 100 * l.utilisation,
         n(l.frames), n(l.bytes), n(l.queue_peak), n(l.tail_drops), n(l.lost));
  if (!r.trouble.empty()) line("TROUBLE: %.400s", r.trouble.c_str());
  return out;
}

std::string to_json(const ScenarioReport& r) {
  nlohmann::json j = {{"name", r.name},         {"duration_us", r.duration_us},
                      {"frames", r.frames},     {"retransmitted", r.retransmitted},
                      {"naks", r.naks},         {"rnr_naks", r.rnr_naks},
                      {"timeouts", r.timeouts}, {"wrong", r.wrong},
                      {"trouble", r.trouble}};
  for (const StepReport& s : r.steps) {
    const Quartet q(s.us);
    j["operations"].push_back({{"group", s.group},
                               {"what", s.what},
                               {"bytes", s.bytes},
                               {"completions", s.us.size()},
                               {"min_us", q.min},
                               {"median_us", q.median},
                               {"max_us", q.max}});
  }
  for (const LinkReport& l : r.links)
    j["links"].push_back({{"name", l.name},
                          {"gbit", l.gbit},
                          {"utilisation", l.utilisation},
                          {"frames", l.frames},
                          {"bytes", l.bytes},
                          {"queue_peak", l.queue_peak},
                          {"tail_drops", l.tail_drops},
                          {"lost", l.lost}});
  return j.dump(2) + "\n";
}

}  // namespace millrace::sim
