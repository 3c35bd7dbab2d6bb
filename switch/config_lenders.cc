#include "switch/config_lenders.h"

#include <algorithm>

namespace millrace::switching {

namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 46;
constexpr size_t kLendersMax = 64;

// Connections begin at an address of ours in a known subnet, as only then the way to a lender can be asked
// for.
bool reachable(const Config& config, const IpAddress& lender) {
  return std::any_of(
      config.routing.interfaces.begin(), config.routing.interfaces.end(),
      [&](const InterfaceAddress& i) { return i.has_subnet && i.prefix.address.is_v4() == lender.is_v4(); });
}

}  // namespace

void read_lenders(YamlMap& map, Config& config) {
  buffering::RemoteStoreConfig remote;
  map.list("spill_lenders", [&](YamlMap each) {
    std::string text;
    each.require("address");
    each.text("address", text);
    const auto address = IpAddress::parse(text);
    if (!address) each.fail("address", "'" + text + "' is no IP address");
    buffering::LenderConfig lender{*address};
    each.number("port", 1, 65535, lender.port);
    each.finish();
    if (!reachable(config, *address))
      each.fail("address", text + " cannot be reached: give the switch an " +
                               (address->is_v4() ? "IPv4" : "IPv6") + " address with a prefix length");
    for (const auto& other : remote.lenders)
      if (other.address == lender.address && other.port == lender.port)
        each.fail("address", text + " is there twice");
    if (remote.lenders.size() == kLendersMax)
      map.fail("spill_lenders", "has more than " + std::to_string(kLendersMax) + " lenders");
    remote.lenders.push_back(lender);
  });
  const bool any = !remote.lenders.empty();
  for (const char* key : {"spill_local_size", "spill_lender_size", "spill_lender_reads",
                          "spill_lender_dead_ms", "spill_lender_dscp"})
    if (!any && map.get(key).IsDefined()) map.fail(key, "there is nobody in spill_lenders");
  map.size("spill_local_size", 1 << 16, config.buffers->spillway.pool_size, config.spill_local);
  map.size("spill_lender_size", 1 << 16, kBytesMax, remote.bytes_wanted);
  map.number("spill_lender_reads", 1, 128, remote.reads_max);
  map.duration("spill_lender_dead_ms", std::chrono::milliseconds(1), 10, 60'000, remote.peer_dead);
  uint32_t dscp = 0;
  map.number("spill_lender_dscp", 0, 63, dscp);
  remote.tos = static_cast<uint8_t>(dscp << 2 | 2);  // ECT(0): a switch in between may mark it
  if (!any) return;
  remote.mtu = config.engine.mtu;
  remote.slot_bytes = (config.buffers->mtu + 63) / 64 * 64;
  config.lenders = remote;
}

}  // namespace millrace::switching
