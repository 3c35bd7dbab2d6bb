#include "tools/sim/plan.h"

#include <algorithm>

#include "tools/sim/nic_model.h"

namespace millrace::sim {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr size_t kWorldMax = 24;  // up to which the checker's contributions are exact in all types

class Drawer {
 public:
  explicit Drawer(uint64_t seed) : random_(seed) { plan_.seed = seed; }

  Plan draw() {
    fabric();
    nics();
    wire();
    groups();
    discrete();
    extras();
    eager();
    buffers();
    by_time();
    plan_.final_round = !plan_.faults.empty() || below(4) == 0;
    if (below(2)) plan_.rest_before_final = milliseconds(below(4000));
    spilled();
    links();
    by_time();
    plan_.final_round |= !plan_.faults.empty();
    return plan_;
  }

 private:
  uint64_t below(uint64_t n) { return random_.below(n); }
  uint64_t between(uint64_t a, uint64_t b) { return random_.between(a, b); }
  Time time_up_to(Time t) { return Time(static_cast<int64_t>(below(static_cast<uint64_t>(t.count()) + 1))); }
  void has(FaultKind k) { plan_.has[static_cast<size_t>(k)] = true; }
  void by_time() {
    std::stable_sort(plan_.faults.begin(), plan_.faults.end(),
                     [](const Fault& a, const Fault& b) { return a.at < b.at; });
  }

  void fabric() {
    FabricConfig& f = plan_.fabric;
    f.seed = random_.next();
    const bool routed = below(4) == 0;
    f.hosts = static_cast<uint16_t>(below(8) == 0 ? between(9, 16) : between(1, 8));
    if (routed) {
      f.leaves = static_cast<uint16_t>(between(2, 3)), f.spines = static_cast<uint16_t>(between(1, 2));
      f.tree = below(3) != 0;
      f.core = f.tree && below(3) == 0;
      f.tree_ipv6 = below(2);
      f.hosts = std::max<uint16_t>(f.hosts, 2);
      f.trunk.gbit = below(2) ? 100 : 400;
      f.trunk.delay = microseconds(between(1, 5));
    }
    static constexpr double kSpeeds[] = {10, 25, 40, 100, 200, 400};
    f.host_link.gbit = kSpeeds[below(6)];
    f.host_link.delay = std::chrono::nanoseconds(between(200, 20000));
    if (below(2))
      for (uint16_t h = 0; h < f.hosts; h++) f.host_gbit.push_back(kSpeeds[below(6)]);
    f.warm_neighbours = below(2);
    aggregation::EngineConfig& e = f.engine;
    static constexpr uint32_t kMtus[] = {256, 256, 512, 512, 1024, 1024, 2048, 4096};
    e.mtu = kMtus[below(8)];
    e.segment_bytes = e.mtu - 64 + e.mtu * static_cast<uint32_t>(below(below(2) ? 3 : 16));
    e.window = static_cast<uint16_t>(between(1, 8));
    if (below(2)) e.first_psn = 0xFFFFFF - static_cast<uint32_t>(below(400));
    e.join_timeout = seconds(between(6, 10));
    e.operation_timeout = seconds(30);
    e.world_max = 20000;
    if (below(8) == 0) e.tenants[7] = {"blue", "wood", 0};
  }

  // Hosts' NICs: in half of the runs the soft transport alone, else the model everywhere or here and there.
  void nics() {
    FabricConfig& f = plan_.fabric;
    const uint64_t kind = below(4);
    std::vector<bool> modelled(f.hosts);
    for (uint16_t h = 0; h < f.hosts; h++) {
      modelled[h] = kind == 0 || (kind == 1 && below(2));
      if (modelled[h]) plan_.modelled.push_back(h);
    }
    if (kind >= 2) return;
    f.nic = [modelled](uint16_t h) { return modelled[h] ? NicFactory(NicModel::make) : NicFactory(); };
  }

  void wire() {
    LinkFaults& w = plan_.wire;
    // Most seeds have some of it, each with a probability up to its own most.
    auto chance = [&](FaultKind kind, uint32_t& ppm, uint32_t most) {
      if (below(5) < 2) return;
      ppm = static_cast<uint32_t>(1 + below(below(3) ? most / 8 : most));
      has(kind);
    };
    chance(FaultKind::kLoss, w.loss, 30000);
    chance(FaultKind::kDuplication, w.duplicate, 20000);
    chance(FaultKind::kReordering, w.reorder, 20000);
    chance(FaultKind::kCorruption, w.corrupt, 5000);
    w.reorder_max = microseconds(between(1, below(4) ? 100 : 2000));
    if (below(3) == 0) {
      w.jitter = microseconds(between(1, 20));
      has(FaultKind::kJitter);
    }
    if (below(6) == 0) chance(FaultKind::kMarking, w.mark, 50000);
    if (below(6) == 0) {
      plan_.fabric.host_link.queue_bytes = between(16 << 10, 128 << 10);
      has(FaultKind::kTailDrop);
    }
  }

  void groups() {
    const FabricConfig& f = plan_.fabric;
    const uint64_t n = f.hosts == 1 ? 1 : between(1, 3);
    frames_ = between(5000, 7500);
    for (uint64_t i = 0; i < n; i++) {
      GroupPlan g;
      g.number = static_cast<uint32_t>(i);
      if (f.leaves > 0) g.where = static_cast<uint16_t>(below(f.leaves + f.spines));
      g.tree = f.tree && below(4) != 0;
      g.v6 = below(2);
      std::vector<uint16_t> hosts;
      for (uint16_t h = 0; h < f.hosts; h++) hosts.push_back(h);
      for (size_t k = hosts.size(); k > 1; k--) std::swap(hosts[k - 1], hosts[below(k)]);
      hosts.resize(between(std::min<uint64_t>(2, f.hosts), f.hosts));
      g.hosts = hosts;
      crowd(g);
      g.world = static_cast<uint16_t>(g.hosts.size());
      g.stripes = static_cast<uint8_t>(below(2) ? 1 : between(2, 4));
      if (!f.engine.tenants.empty()) g.tenant = 7, g.secret = "wood";
      g.in_flight = static_cast<uint32_t>(between(1, 4));
      g.gap_max = below(2) ? microseconds(between(0, 100)) : milliseconds(between(0, 5));
      g.generations = static_cast<uint32_t>(between(1, 3));
      g.rejoin_after_max = below(2) ? milliseconds(between(0, 50)) : milliseconds(between(0, 1500));
      for (size_t r = 0; r < g.world; r++) g.join_at.push_back(time_up_to(milliseconds(5)));
      operations(g, frames_ / n);
      plan_.groups.push_back(std::move(g));
    }
  }

  // Several ranks on some hosts, which mostly combine; now and then all ranks of a group on one host.
  void crowd(GroupPlan& g) {
    if (below(3) != 0) return;
    g.combine = below(4) != 0;
    if (below(6) == 0) g.hosts.resize(1);
    const std::vector<uint16_t> hosts = g.hosts;
    for (const uint16_t h : hosts)
      for (uint64_t more = below(4); more > 0 && g.hosts.size() < kWorldMax; more--) g.hosts.push_back(h);
    for (size_t k = g.hosts.size(); k > 1; k--) std::swap(g.hosts[k - 1], g.hosts[below(k)]);
  }

  void eager() {
    const FabricConfig& f = plan_.fabric;
    if (below(6) == 0) has(FaultKind::kLateCopy);
    if (below(10) != 0 || f.hosts < 2) return;
    plan_.eager.push_back(static_cast<uint16_t>(below(f.hosts)));
    has(FaultKind::kEager);
  }

  void operations(GroupPlan& g, uint64_t frames) {
    const aggregation::EngineConfig& e = plan_.fabric.engine;
    const uint64_t n = between(4, 12);
    uint64_t large = 0;
    std::vector<bool> is_large;
    for (uint64_t i = 0; i < n; i++) {
      is_large.push_back(i == n - 1 ? large == 0 : below(2));
      large += is_large.back();
    }
    // Each chunk goes up and down, each segment draws an acknowledgement either way; behind a leaf more than
    // once.
    const uint64_t per_segment = (e.segment_bytes + 64) / e.mtu, hops = plan_.fabric.leaves ? 3 : 1;
    const uint64_t chunks = frames * per_segment / ((2 * per_segment + 2) * g.world * large * hops) + 1;
    for (uint64_t i = 0; i < n; i++) {
      OperationPlan o;
      check::Reduction& r = o.reduction;
      r.type = static_cast<int>(between(1, 12));
      r.op = static_cast<int>(below(2) ? 1 : between(2, r.type <= 6 ? 8 : 5));
      if (r.type > 6 && r.op == 5) r.op = 8;  // bits only of integers, averages of all
      r.world = g.world;
      r.seed = random_.next();
      r.collective = collective(is_large[i]);
      if (r.has_root()) r.root = static_cast<uint32_t>(below(g.world));
      o.deterministic = r.reduces() && below(4) == 0;
      r.bfp = r.reduces() && r.type >= 7 && r.type <= 9 && below(3) == 0;
      o.in_place = below(2);
      const uint32_t size = check::element_bytes(r.type);
      const uint64_t segment = e.segment_bytes / size;
      if (is_large[i]) {
        r.count = chunks * scale(r) * e.mtu / size + below(segment);
      } else {
        const uint64_t kinds[] = {0,           1,           1 + 2 * below(20),     segment,
                                  segment - 1, segment + 1, 2 * segment + below(9)};
        r.count = kinds[below(7)];
        // Of the whole vector, or of each shard.
        if (r.has_shards() && below(2)) r.count *= g.world;
      }
      if (r.has_shards()) r.count -= r.count % g.world;
      if (r.collective == check::kBarrier) r.count = 0;
      g.operations.push_back(o);
    }
  }

  int collective(bool large) {
    static constexpr int kOften[] = {
        check::kAllReduce, check::kAllReduce,     check::kAllReduce,     check::kAllReduce, check::kReduce,
        check::kBroadcast, check::kReduceScatter, check::kReduceScatter, check::kAllGather, check::kBarrier};
    return kOften[below(large ? 9 : 10)];
  }
  // What of an all-reduce's frames others spare, they get in bytes: one direction is all but empty.
  static uint64_t scale(const check::Reduction& r) { return r.collective == check::kAllReduce ? 1 : 2; }

  void add(FaultKind kind, Time at, Time duration, uint32_t target, uint32_t rank = 0) {
    plan_.faults.push_back({kind, at, duration, target, rank});
    has(kind);
    plan_.heal_at = std::max(plan_.heal_at, at + duration);
  }

  // How long the groups are busy, roughly.
  Time busy() const {
    Time t = milliseconds(10);
    for (const GroupPlan& g : plan_.groups)
      t = std::max(t, milliseconds(8) + g.gap_max * static_cast<int64_t>(g.operations.size()) / 2);
    return t;
  }

  void discrete() {
    const FabricConfig& f = plan_.fabric;
    const Time busy_time = busy();
    plan_.heal_at = busy_time;
    for (uint64_t n = below(3) ? between(1, 3) : 0; n > 0; n--) {
      const Time at = time_up_to(below(5) ? busy_time : busy_time * 4);
      const Time brief = microseconds(between(10, below(2) ? 5000 : 600000)),
                 ages = milliseconds(between(6000, 9000));
      const auto host = static_cast<uint32_t>(below(f.hosts));
      const auto sw = static_cast<uint32_t>(f.leaves ? below(f.leaves + f.spines + f.core) : 0);
      const auto group = static_cast<uint32_t>(below(plan_.groups.size()));
      const auto rank = static_cast<uint32_t>(below(plan_.groups[group].world));
      switch (below(20)) {
        case 0:
        case 1:
        case 2:
          if (const auto g = std::find_if(plan_.groups.begin(), plan_.groups.end(),
                                          [](const GroupPlan& p) { return p.combine; });
              g != plan_.groups.end() && below(2)) {
            add(FaultKind::kRankCrash, time_up_to(busy_time), Time{}, g->number,
                static_cast<uint32_t>(below(g->world)));
            break;
          }
          add(FaultKind::kCrash, at, below(2) ? brief : milliseconds(between(1000, 7000)), host);
          break;
        case 3:
          add(FaultKind::kSwitchRestart, at, Time{}, sw);
          break;
        case 4:
          add(FaultKind::kSwitchNewMac, at, Time{}, sw);
          break;
        case 5:
        case 6:
          add(FaultKind::kFlap, at, brief, host);
          break;
        case 7:
          add(FaultKind::kOutage, at, ages, host);
          break;
        case 8:
          if (f.leaves)
            add(FaultKind::kTrunkFlap, at, brief, static_cast<uint32_t>(below(f.leaves * f.spines)));
          break;
        case 9:
          add(FaultKind::kStall, at, brief, host);
          break;
        case 10:
          add(FaultKind::kClockStop, at, brief, host);
          break;
        case 11:
          add(below(2) ? FaultKind::kLongStall : FaultKind::kLongClockStop, at, ages, host);
          break;
        case 12:
          add(below(2) ? FaultKind::kSwitchStall : FaultKind::kSwitchClockStop, at, brief, sw);
          break;
        case 13:
          add(FaultKind::kLongSwitchStall, at, ages, sw, static_cast<uint32_t>(below(2)));
          break;
        case 14:
          add(FaultKind::kAbort, at, Time{}, group);
          break;
        case 15:
          add(below(2) ? FaultKind::kLocalAbort : FaultKind::kLeave, at, Time{}, group, rank);
          break;
        case 16:
          // One rank of a group: two could disagree with the others in the same way, and be all there are.
          if (plan_.groups[group].world > 1 &&
              std::none_of(plan_.faults.begin(), plan_.faults.end(), [&](const Fault& x) {
                return x.kind == FaultKind::kMismatch && x.target == group;
              }))
            add(FaultKind::kMismatch, Time{}, Time{}, group, rank);
          break;
        case 17:
          add(FaultKind::kStraggler, Time{}, milliseconds(between(1100, 1700)), group, rank);
          break;
        case 18:
          if (plan_.groups[group].world > 1) {
            plan_.fabric.engine.operation_timeout = seconds(4);
            add(FaultKind::kLate, Time{}, seconds(6), group, rank);
          }
          break;
        default:
          plan_.groups[group].join_at[rank] = milliseconds(between(500, 4000));
          add(FaultKind::kLateJoiner, plan_.groups[group].join_at[rank], Time{}, group, rank);
          break;
      }
    }
  }

  // Groups that must be refused, and few frames.
  void extras() {
    FabricConfig& f = plan_.fabric;
    auto refused = [&](FaultKind kind) {
      GroupPlan g;
      g.number = static_cast<uint32_t>(plan_.groups.size());
      g.where = plan_.groups[0].where;
      g.hosts = {static_cast<uint16_t>(below(f.hosts))};
      g.refused = true;
      g.join_at = {time_up_to(milliseconds(10))};
      g.operations = {OperationPlan{}};
      if (kind == FaultKind::kQuota) {
        g.world = 20000, g.stripes = 16;  // far more than any switch here may promise
        if (!f.engine.tenants.empty()) g.tenant = 7, g.secret = "wood";
      } else {
        g.tenant = 7, g.secret = "stone";
      }
      plan_.groups.push_back(std::move(g));
      has(kind);
    };
    if (below(8) == 0) refused(FaultKind::kQuota);
    if (!f.engine.tenants.empty() && below(2)) refused(FaultKind::kSecret);
    if (below(8) == 0) {
      // What the groups of one switch may hold, and a few frames to receive with.
      uint64_t frames = 0;
      for (const GroupPlan& g : plan_.groups)
        if (!g.refused)
          frames += (uint64_t{2} + (g.deterministic() ? g.world : 0)) * f.engine.window *
                    ((f.engine.segment_bytes + 64) / f.engine.mtu) * g.stripes;
      f.switch_frames = static_cast<uint32_t>(frames + between(8, 40));
      has(FaultKind::kFewFrames);
    }
  }

  // Queues and a spillway in the switches. Of draws of its own, so that the others stay what they were.
  void buffers() {
    Random random(plan_.seed ^ 0x627566666572);
    if (!random.one_in(3)) return;
    FabricConfig& f = plan_.fabric;
    buffering::Config& b = f.buffers.emplace();
    buffering::PortConfig& port = b.ports.emplace_back();
    static constexpr double kRates[] = {0, 2e9, 5e9, 10e9, 20e9};
    port.rate_bps = static_cast<uint64_t>(kRates[random.below(5)]);
    port.speed_bps = static_cast<uint64_t>(f.host_link.gbit * 1e9);
    b.pool_size = 1 << 30;
    // What passes through is bounded by its ingress port's group. The switch's own frames, which the wire's
    // checker follows from the first to the last, are only made to wait.
    for (auto& q : port.queues) q.profile.spill = true;
    for (auto& g : port.groups) g.static_th = random.between(8 << 10, 128 << 10);
    if (random.one_in(2))
      for (auto& q : port.queues) q.wred = buffering::WredProfile{8 << 10, 64 << 10, 0.3};
    b.spillway.enabled = !random.one_in(4);
    b.spillway.dscp.set();
    b.spillway.pool_size = random.between(64 << 10, 4 << 20);
    if (random.one_in(4)) b.spillway.keys_max = static_cast<uint32_t>(random.between(1, 4));
    if (random.one_in(3)) b.spillway.key_limit = random.between(16 << 10, 256 << 10);
    b.spillway.drain_off = random.between(8 << 10, 32 << 10);
    b.spillway.drain_on = b.spillway.drain_off / random.between(1, 4);
    b.spillway.max_residence = random.one_in(4) ? milliseconds(random.between(1, 20)) : milliseconds(100);
    has(FaultKind::kBuffers);
    if (random.one_in(2)) return;
    port.pfc.set();
    for (uint64_t n = random.between(1, 6); n > 0; n--) {
      const auto at =
          Time(static_cast<int64_t>(random.below(static_cast<uint64_t>(plan_.heal_at.count()) + 1)));
      Fault fault{FaultKind::kPause, at, microseconds(random.between(5, random.one_in(2) ? 200 : 30000)),
                  static_cast<uint32_t>(random.below(f.hosts))};
      plan_.faults.push_back(fault);
    }
    has(FaultKind::kPause);
  }

  // What fills the spillways, and memory that others lend to half of them. Of draws of its own, too.
  void spilled() {
    Random random(plan_.seed ^ 0x6c656e646572);
    FabricConfig& f = plan_.fabric;
    if (!f.buffers || !f.buffers->spillway.enabled) return;
    const bool lent = random.one_in(2);
    if (!lent && random.one_in(2)) return;
    buffering::PortConfig& port = f.buffers->ports[0];
    if (port.rate_bps == 0) port.rate_bps = random.between(2, 20) * 1'000'000'000;
    streams(random, static_cast<double>(port.rate_bps) / 1e9);
    if (!lent) return;
    for (auto& g : port.groups) g.static_th = random.between(4 << 10, 48 << 10);
    lenders(random);
    deaths(random);
  }

  void lenders(Random& random) {
    FabricConfig& f = plan_.fabric;
    for (uint64_t n = random.between(1, 3); n > 0; n--) {
      FabricLender l;
      l.bytes = random.between(4, random.one_in(2) ? 16 : 256) << 12;
      l.reads_max = static_cast<uint8_t>(random.between(1, 16));
      l.ack_every = static_cast<uint32_t>(random.between(1, 4));
      l.v6 = random.one_in(2);
      l.link.gbit = random.one_in(2) ? 10 : 100;
      l.link.delay = std::chrono::nanoseconds(random.between(200, 20000));
      f.lenders.push_back(l);
    }
    buffering::RemoteStoreConfig& r = f.remote;
    r.mtu = f.engine.mtu;
    r.writes_max = 1u << random.between(3, 8);
    r.reads_max = static_cast<uint32_t>(random.between(1, 16));
    if (random.one_in(3)) r.bytes_wanted = random.between(2, 64) << 12;
    if (random.one_in(2)) r.first_psn = 0xFFFFFF - static_cast<uint32_t>(random.below(400));
    if (random.one_in(2)) f.spill_local = random.between(8 << 10, f.buffers->spillway.pool_size / 2);
  }

  void streams(Random& random, double port_gbit) {
    const FabricConfig& f = plan_.fabric;
    if (f.hosts < 2) return;
    const auto to = static_cast<uint16_t>(random.below(f.hosts));
    const Time at(static_cast<int64_t>(random.below(4'000'000)));
    for (uint64_t n = random.between(1, 4); n > 0; n--) {
      StreamPlan s;
      s.to = random.one_in(3) ? static_cast<uint16_t>(random.below(f.hosts)) : to;
      s.from = static_cast<uint16_t>((s.to + random.between(1, f.hosts - 1u)) % f.hosts);
      // Mostly by way of a spine.
      if (f.leaves && s.from % f.leaves == s.to % f.leaves && !random.one_in(4))
        s.from = static_cast<uint16_t>((s.to + 1u) % f.hosts);
      s.v6 = random.one_in(2);
      s.traffic_class = static_cast<uint8_t>(random.one_in(3) ? 0 : 2);
      s.payload = static_cast<uint32_t>(random.between(64, 2048)) & ~3u;
      s.gbit = port_gbit * static_cast<double>(random.between(6, 20)) / 10;
      s.at = at + microseconds(random.below(1000));
      // Some hundred packets.
      s.length = Time(
          static_cast<int64_t>(static_cast<double>(random.between(50, 800)) * (s.payload + 82) * 8 / s.gbit));
      plan_.streams.push_back(s);
    }
    has(FaultKind::kPassersBy);
  }

  // Mostly while there is something to lose.
  void deaths(Random& random) {
    for (uint64_t n = random.below(4); n > 0; n--) {
      Time at(static_cast<int64_t>(random.below(static_cast<uint64_t>(plan_.heal_at.count()) + 1)));
      if (!plan_.streams.empty() && !random.one_in(4)) {
        const StreamPlan& s = plan_.streams[random.below(plan_.streams.size())];
        at = s.at + Time(static_cast<int64_t>(random.below(2 * static_cast<uint64_t>(s.length.count()))));
      }
      const Time gone = random.one_in(2) ? microseconds(random.between(10, 30'000))
                                         : milliseconds(random.between(30, 1500));
      const auto lender = static_cast<uint32_t>(random.below(plan_.fabric.lenders.size()));
      if (random.one_in(3))
        add(FaultKind::kLenderEnd, at, gone, lender, static_cast<uint32_t>(random.below(2)));
      else
        add(FaultKind::kLenderDeath, at, gone, lender);
    }
  }

  // Mostly one that the stream may have taken.
  uint32_t trunk(Random& random, const StreamPlan* by) const {
    const FabricConfig& f = plan_.fabric;
    const uint64_t leaf = by != nullptr && !random.one_in(3) ? by->from % f.leaves : random.below(f.leaves);
    return static_cast<uint32_t>(leaf * f.spines + random.below(f.spines));
  }

  // Links that go down as ports tell it, which matters where there are queues, or other ways.
  void links() {
    Random random(plan_.seed ^ 0x6c696e6b73);
    const FabricConfig& f = plan_.fabric;
    const bool another_way = f.spines > 1 && !plan_.streams.empty();
    if (!another_way && !random.one_in(f.buffers ? 2 : 16)) return;
    for (uint64_t n = random.between(1, 3); n > 0; n--) {
      Time at(static_cast<int64_t>(random.below(static_cast<uint64_t>(busy().count()) + 1)));
      const StreamPlan* by = nullptr;
      if (!plan_.streams.empty() && !random.one_in(4)) {
        by = &plan_.streams[random.below(plan_.streams.size())];
        at = by->at + Time(static_cast<int64_t>(random.below(2 * static_cast<uint64_t>(by->length.count()))));
      }
      const Time brief = microseconds(random.between(10, random.one_in(2) ? 5000 : 600000)),
                 ages = milliseconds(random.between(6000, 9000));
      if (!f.lenders.empty() && random.one_in(4))
        add(FaultKind::kLinkDown, at, brief, static_cast<uint32_t>(random.below(f.lenders.size())),
            kLinkOfLender);
      else if (f.leaves && (another_way ? !random.one_in(4) : random.one_in(2)))
        add(FaultKind::kLinkDown, at, brief, trunk(random, by), kLinkOfTrunk);
      else
        add(FaultKind::kLinkDown, at, random.one_in(8) ? ages : brief,
            static_cast<uint32_t>(random.below(f.hosts)), kLinkOfHost);
    }
  }

  Random random_;
  Plan plan_;
  uint64_t frames_ = 0;
};

}  // namespace

Plan draw_plan(uint64_t seed) { return Drawer(seed).draw(); }

std::string describe(const Plan& p) {
  const FabricConfig& f = p.fabric;
  std::string s = std::to_string(f.hosts) + " hosts, " +
                  (f.leaves ? std::to_string(f.leaves) + " leaves, " + std::to_string(f.spines) + " spines" +
                                  (f.core ? ", core" : "") + (f.tree ? ", tree" : "")
                            : std::string("star")) +
                  ", MTU " + std::to_string(f.engine.mtu) + ", segment " +
                  std::to_string(f.engine.segment_bytes) + ", window " + std::to_string(f.engine.window) +
                  "; groups";
  for (const GroupPlan& g : p.groups)
    s += " " + std::to_string(g.world) + "×" + std::to_string(g.stripes) + (g.v6 ? "/IPv6" : "") +
         (g.tree ? "/tree" : "") + (g.combine ? "/combine" : "") + (g.refused ? " (to be refused)" : "");
  if (!p.modelled.empty()) s += "; " + std::to_string(p.modelled.size()) + " hosts with the NIC model";
  if (f.buffers) s += f.buffers->spillway.enabled ? "; queues and a spillway" : "; queues";
  if (f.lenders.empty() && !p.streams.empty()) s += ", " + std::to_string(p.streams.size()) + " streams pass";
  if (!f.lenders.empty())
    s += " with " + std::to_string(f.lenders.size()) + " lenders" +
         (f.spill_local ? " behind local memory" : "") + ", " + std::to_string(p.streams.size()) +
         " streams pass";
  s += "; faults";
  for (size_t k = 0; k < kFaultKinds; k++)
    if (p.has[k]) s += " " + std::string(kFaultNames[k]);
  for (const Fault& x : p.faults)
    s += "; " + std::string(kFaultNames[static_cast<size_t>(x.kind)]) + " of " + std::to_string(x.target) +
         "/" + std::to_string(x.rank) + " at " + std::to_string(x.at.count() / 1000) + " us for " +
         std::to_string(x.duration.count() / 1000) + " us";
  return s;
}

}  // namespace millrace::sim
