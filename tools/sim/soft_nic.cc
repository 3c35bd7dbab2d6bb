#include "tools/sim/soft_nic.h"

#include <algorithm>

#include "tools/sim/strict_pools.h"

namespace millrace::sim {

namespace {

host::SoftConfig soft_config(const NicConfig& c) {
  host::SoftConfig s;
  s.ca_guid = c.ca_guid;
  s.seed = c.seed;
  s.first_psn = c.first_psn;
  return s;
}

}  // namespace

SoftNic::SoftNic(const NicConfig& config)
    : config_(config), pool_(4608, UINT32_MAX, kStrictPools), engine_(soft_config(config), pool_, *this) {}

std::optional<roce::Path> SoftNic::resolve(const IpAddress& to, std::string& error) {
  const std::optional<Resolved> way = config_.resolve(to);
  if (!way) {
    error = "no answer to ARP for " + to.to_string();
    return std::nullopt;
  }
  roce::Path p;
  p.src_mac = config_.mac;
  p.dst_mac = way->mac;
  p.src_ip = way->source;
  p.dst_ip = to;
  return p;
}

void SoftNic::receive(std::span<const uint8_t> frame, Time now) {
  Frame f = Frame::allocate(pool_);
  if (!f || frame.size() > f.buffer()->room_bytes - f.buffer()->offset) return;
  std::copy(frame.begin(), frame.end(), f.buffer()->data());
  f.buffer()->length = static_cast<uint32_t>(frame.size());
  engine_.receive(std::move(f), now, out_);
}

void SoftNic::poll(Time now, FrameSink& out) {
  engine_.poll(now, out_);
  while (const Frame f = out_.pop()) {
    bytes_.resize(f.total_length());
    f.copy_to(bytes_.data());
    out.send(bytes_);
  }
}

Time SoftNic::next_deadline() const { return engine_.next_deadline(); }

}  // namespace millrace::sim
