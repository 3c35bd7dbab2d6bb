#include "host/soft_endpoint.h"

#include <algorithm>

namespace millrace::host {

namespace {

SoftConfig config(uint64_t ca_guid, uint64_t seed, uint64_t speed) {
  SoftConfig c;
  c.ca_guid = ca_guid;
  c.seed = seed;
  if (speed != 0) c.line_rate = speed;
  return c;
}

}  // namespace

SoftEndpoint::SoftEndpoint(const std::string& device, uint64_t ca_guid, uint64_t seed)
    : socket_(device, pool_),
      engine_(config(ca_guid, seed, socket_.speed()), pool_, socket_.resolver()),
      text_("soft on " + device + " (RoCE path MTU up to " + std::to_string(socket_.path_mtu_max()) + ")") {}

bool SoftEndpoint::receive(Time now) {
  if (detached_) return false;
  const uint32_t n = socket_.receive(received_);
  while (Frame frame = received_.pop()) engine_.receive(std::move(frame), now, out_);
  return n == SoftSocket::kBurst;
}

void SoftEndpoint::send(Time now) {
  engine_.poll(now, out_);
  if (detached_)
    out_.clear();
  else
    socket_.send(out_, now);
}

void SoftEndpoint::detach() {
  detached_ = true;
  out_.clear();
  received_.clear();
}

Time SoftEndpoint::next_deadline() const {
  return detached_ ? engine_.next_deadline() : std::min(engine_.next_deadline(), socket_.retry_at());
}

bool SoftEndpoint::prepare_to_wait(std::vector<pollfd>& descriptors) {
  if (detached_) return true;
  const short room = socket_.waits_for_room() ? POLLOUT : 0;
  descriptors.push_back({socket_.fd(), static_cast<short>(POLLIN | room), 0});
  return true;
}

}  // namespace millrace::host
