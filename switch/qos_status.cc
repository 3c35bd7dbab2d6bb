#include "switch/qos_status.h"

#include <algorithm>

namespace millrace::switching {

namespace {

using buffering::Amount;
using nlohmann::json;

constexpr size_t kKeysShown = 1024;

double milliseconds(Time t) { return std::chrono::duration<double, std::milli>(t).count(); }

json amount_json(const Amount& a) { return {{"packets", a.packets}, {"bytes", a.bytes}}; }

// Only reasons that there were.
template <size_t N>
json reasons_json(const std::array<Amount, N>& all, const std::array<std::string_view, N>& names) {
  json j = json::object();
  for (size_t i = 0; i < N; i++)
    if (all[i].packets > 0) j[std::string(names[i])] = amount_json(all[i]);
  return j;
}

template <size_t N>
Amount sum(const std::array<Amount, N>& all) {
  Amount a;
  for (const Amount& one : all) a.packets += one.packets, a.bytes += one.bytes;
  return a;
}

json queue_json(const QueueStatus& q, size_t number) {
  const buffering::QueueCounters& c = q.counters;
  return {{"queue", number},
          {"bytes", q.bytes},
          {"bytes_max", c.bytes_max},
          {"paused", q.paused},
          {"storm", q.storm},
          {"storms", c.storms},
          {"arrived", amount_json(c.arrived)},
          {"sent", amount_json(c.sent)},
          {"drained", amount_json(c.drained)},
          {"to_spillway", amount_json(c.to_spillway)},
          {"dropped", amount_json(sum(c.drops))},
          {"dropped_by", reasons_json(c.drops, buffering::kQueueDropNames)},
          {"ce_marked", c.ce_marked}};
}

json group_json(const GroupStatus& g, size_t number) {
  return {{"group", number},
          {"bytes", g.bytes},
          {"headroom_bytes", g.headroom_bytes},
          {"lossless", g.lossless},
          {"pausing", g.pausing}};
}

json pfc_json(const buffering::PfcCounters& c) {
  return {{"pauses_received", c.pauses_received},
          {"resumes_received", c.resumes_received},
          {"pauses_sent", c.pauses_sent},
          {"resumes_sent", c.resumes_sent},
          {"not_built", c.not_built}};
}

const char* name(buffering::SpillState s) {
  static constexpr const char* kNames[] = {"pass", "spill", "drain", "flush"};
  return kNames[static_cast<size_t>(s)];
}

}  // namespace

QosStatus qos_status(const buffering::TrafficManager& manager, bool with_keys, Time now,
                     const buffering::RemoteStore* remote) {
  QosStatus s;
  s.pool_size = manager.buffer().size();
  s.pool_used = manager.buffer().used();
  s.headroom_used = manager.buffer().headroom_used();
  s.frames_queued = manager.frames_queued();
  s.frames_max = manager.config().frames_max;
  const buffering::Spillway* spillway = manager.spillway();
  for (uint16_t i = 0; i < manager.config().ports.size(); i++) {
    PortQos& port = s.ports.emplace_back();
    for (uint8_t c = 0; c < buffering::kClasses; c++) {
      port.queues[c] = {manager.queue_bytes(i, c), manager.paused(i, c), manager.storm(i, c),
                        manager.counters(i, c)};
      port.groups[c] = {manager.buffer().group_bytes(i, c), manager.buffer().headroom_bytes(i, c),
                        manager.config().ports[i].groups[c].xoff > 0, manager.pausing(i, c)};
    }
    port.pfc = manager.pfc_counters(i);
    if (spillway != nullptr) port.spill = spillway->counters(i);
  }
  if (spillway == nullptr) return s;
  s.spillway = true;
  s.spill = spillway->counters();
  s.store_size = spillway->store().size();
  s.store_used = spillway->store().used();
  for (size_t i = 0; remote != nullptr && i < remote->lenders(); i++) s.lenders.push_back(remote->status(i));
  s.fast_cnp = spillway->fast_cnp() != nullptr;
  if (s.fast_cnp) s.cnp_connections = spillway->fast_cnp()->connections();
  s.keys = spillway->keys_count();
  s.keys_max = manager.config().spillway.keys_max;
  if (!with_keys) return s;
  // The fullest first.
  s.key_list = spillway->keys(now);
  std::stable_sort(s.key_list.begin(), s.key_list.end(),
                   [](auto& a, auto& b) { return a.resident.bytes > b.resident.bytes; });
  if (s.key_list.size() > kKeysShown) s.key_list.resize(kKeysShown);
  return s;
}

json buffers_json(const QosStatus& s, const std::vector<std::string>& names) {
  json ports = json::array();
  for (size_t i = 0; i < s.ports.size(); i++) {
    json queues = json::array(), groups = json::array();
    for (size_t c = 0; c < buffering::kClasses; c++) {
      queues.push_back(queue_json(s.ports[i].queues[c], c));
      groups.push_back(group_json(s.ports[i].groups[c], c));
    }
    ports.push_back({{"name", names.at(i)},
                     {"queues", std::move(queues)},
                     {"priority_groups", std::move(groups)},
                     {"pfc", pfc_json(s.ports[i].pfc)},
                     {"pfc_mode", s.ports[i].pfc_mode},
                     {"pfc_why", s.ports[i].pfc_why}});
  }
  return {{"pool", {{"size", s.pool_size}, {"used", s.pool_used}, {"headroom_used", s.headroom_used}}},
          {"frames", {{"queued", s.frames_queued}, {"max", s.frames_max}}},
          {"ports", std::move(ports)}};
}

json spill_counters_json(const buffering::SpillCounters& c) {
  json residence = json::array(), suppressed = json::object();
  for (size_t i = 0; i < buffering::kCnpSuppressions; i++)
    suppressed[std::string(buffering::kCnpSuppressionNames[i])] = c.cnps_suppressed[i];
  for (size_t i = 0; i < c.residence.size(); i++)
    if (c.residence[i] > 0)
      residence.push_back({{"below_us", uint64_t{1} << i}, {"packets", c.residence[i]}});
  return {{"offered", amount_json(c.offered)},
          {"spilled", amount_json(c.spilled)},
          {"drained", amount_json(c.drained)},
          {"rerouted", amount_json(c.rerouted)},
          {"resident", amount_json(c.resident)},
          {"resident_bytes_max", c.resident_bytes_max},
          {"refused", amount_json(c.refused_in_all())},
          {"refused_by", reasons_json(c.refused, buffering::kSpillDropNames)},
          {"lost", amount_json(c.lost_in_all())},
          {"lost_by", reasons_json(c.lost, buffering::kSpillDropNames)},
          {"transitions", c.transitions},
          {"ce_marked", c.ce_marked},
          {"cnps_sent", c.cnps_sent},
          {"cnps_suppressed", std::move(suppressed)},
          {"acks_held", c.acks_held},
          {"held_by_pfc_ms", milliseconds(c.held_by_pfc)},
          {"residence", std::move(residence)}};
}

json lender_json(const buffering::LenderStatus& l) {
  using State = buffering::LenderStatus::State;
  return {{"address", l.lender.address.to_string()},
          {"port", l.lender.port},
          {"state", l.state == State::kConnected    ? "connected"
                    : l.state == State::kConnecting ? "connecting"
                                                    : "waiting"},
          {"why", l.why},
          {"size", l.bytes},
          {"used", l.used},
          {"held", l.held},
          {"written", l.written},
          {"read", l.read},
          {"lost", l.lost},
          {"bytes_written", l.bytes_written},
          {"bytes_read", l.bytes_read},
          {"connects", l.connects},
          {"deaths", l.deaths},
          {"refusals", l.refusals},
          {"packets_sent", l.packets_sent},
          {"retransmitted", l.retransmitted},
          {"reads_again", l.reads_again}};
}

json spillway_json(const QosStatus& s, const std::vector<std::string>& names) {
  json j = {{"enabled", s.spillway}};
  if (!s.spillway) return j;
  json ports = json::array(), keys = json::array();
  for (size_t i = 0; i < s.ports.size(); i++) {
    json port = spill_counters_json(s.ports[i].spill);
    port["name"] = names.at(i);
    ports.push_back(std::move(port));
  }
  for (const buffering::SpillKeyStatus& k : s.key_list)
    keys.push_back({{"port", names.at(k.port)},
                    {"queue", k.queue},
                    {"destination", k.destination.to_string()},
                    {"state", name(k.state)},
                    {"resident", amount_json(k.resident)},
                    {"resident_bytes_max", k.resident_bytes_max},
                    {"spilled", amount_json(k.spilled)},
                    {"drained", amount_json(k.drained)},
                    {"dropped", amount_json(k.dropped)},
                    {"oldest_ms", milliseconds(k.oldest)}});
  j["store"] = {{"size", s.store_size}, {"used", s.store_used}};
  j["lenders"] = json::array();
  for (const buffering::LenderStatus& l : s.lenders) j["lenders"].push_back(lender_json(l));
  j["fast_cnp"] = {{"enabled", s.fast_cnp},
                   {"connections", s.cnp_connections},
                   {"connections_max", s.fast_cnp ? buffering::FastCnp::kConnectionsMax : 0}};
  j["keys_count"] = s.keys;
  j["keys_max"] = s.keys_max;
  j["keys"] = std::move(keys);
  j["all"] = spill_counters_json(s.spill);
  j["ports"] = std::move(ports);
  return j;
}

json port_qos_counters_json(const PortQos& port) {
  json j = json::object();
  Amount drops[buffering::kQueueDrops] = {};
  uint64_t marked = 0, storms = 0, to_spillway = 0, drained = 0;
  for (const QueueStatus& q : port.queues) {
    marked += q.counters.ce_marked;
    storms += q.counters.storms;
    to_spillway += q.counters.to_spillway.packets;
    drained += q.counters.drained.packets;
    for (size_t i = 0; i < buffering::kQueueDrops; i++) {
      drops[i].packets += q.counters.drops[i].packets;
      drops[i].bytes += q.counters.drops[i].bytes;
    }
  }
  for (size_t i = 0; i < buffering::kQueueDrops; i++)
    j["dropped"][std::string(buffering::kQueueDropNames[i])] = amount_json(drops[i]);
  j["ce_marked"] = marked;
  j["storms"] = storms;
  j["to_spillway"] = to_spillway;
  j["drained"] = drained;
  j["pfc"] = pfc_json(port.pfc);
  return j;
}

}  // namespace millrace::switching
