#include "switch/fib.h"

#include <algorithm>
#include <bit>
#include <charconv>

#include "roce/prefix.h"

namespace millrace::switching {

namespace {

constexpr unsigned kMappedBits = 96;  // of ::ffff:0:0, in front of an IPv4 address

unsigned full_length(const Prefix& p) { return p.length + (p.address.is_v4() ? kMappedBits : 0); }

IpAddress masked(const IpAddress& address, unsigned bits) {
  IpAddress a;
  for (unsigned i = 0; i < 16; i++) {
    const unsigned kept = std::clamp<int>(static_cast<int>(bits) - static_cast<int>(8 * i), 0, 8);
    a.bytes[i] = static_cast<uint8_t>(address.bytes[i] & (0xFF00u >> kept));
  }
  return a;
}

}  // namespace

std::optional<Prefix> Prefix::parse(std::string_view text) {
  const size_t slash = text.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const auto address = IpAddress::parse(text.substr(0, slash));
  const std::string_view digits = text.substr(slash + 1);
  unsigned length = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), length);
  if (!address || digits.empty() || error != std::errc{} || end != digits.data() + digits.size() ||
      length > (address->is_v4() ? 32u : 128u))
    return std::nullopt;
  return Prefix{*address, static_cast<uint8_t>(length)};
}

std::string Prefix::to_string() const { return address.to_string() + "/" + std::to_string(length); }

IpAddress Prefix::network() const { return masked(address, full_length(*this)); }

bool Prefix::contains(const IpAddress& other) const { return in_prefix(other, address, full_length(*this)); }

bool Prefix::is_network_or_broadcast(const IpAddress& other) const {
  if (!address.is_v4() || length > 30 || !contains(other)) return false;
  bool zeros = true, ones = true;
  for (unsigned bit = length; bit < 32; bit++) {
    const bool set = other.v4()[bit / 8] >> (7 - bit % 8) & 1;
    zeros &= !set, ones &= set;
  }
  return zeros || ones;
}

Fib::Bits Fib::bits_of(const IpAddress& address) {
  Bits b;
  std::memcpy(&b.high, address.bytes.data(), 8);
  std::memcpy(&b.low, address.bytes.data() + 8, 8);
  return b;
}

Fib::Level Fib::level_of(const Prefix& prefix) {
  const unsigned length = full_length(prefix);
  IpAddress ones;
  ones.bytes.fill(0xFF);
  return {bits_of(masked(ones, length)), static_cast<uint8_t>(length)};
}

size_t Fib::hash(const Bits& network, uint8_t length) {
  uint64_t h = (network.high ^ length) * 0x9E3779B97F4A7C15ull;
  h = (h ^ h >> 32 ^ network.low) * 0xC4CEB9FE1A85EC53ull;
  return h ^ h >> 32;
}

Fib::Fib(const std::vector<InterfaceAddress>& interfaces, const std::vector<StaticRoute>& routes) {
  for (const InterfaceAddress& i : interfaces) {
    const Prefix subnet{i.prefix.network(), i.prefix.length};
    auto same = [&](const Entry& e) {
      return e.prefix.address == subnet.address && e.prefix.length == subnet.length;
    };
    if (!i.has_subnet || std::any_of(entries_.begin(), entries_.end(), same)) continue;
    entries_.push_back({subnet, true, i.interface, i.prefix.address, {}});
  }
  const size_t connected = entries_.size();
  for (const StaticRoute& route : routes) {
    Entry entry{route.prefix, false, kBridge, {}, {}};
    for (const IpAddress& via : route.via) {
      size_t hop = 0;
      while (hop < next_hops_.size() && next_hops_[hop].address != via) hop++;
      for (size_t i = 0; hop == next_hops_.size() && i < connected; i++)
        if (entries_[i].prefix.contains(via))
          next_hops_.push_back({via, entries_[i].interface, entries_[i].own});
      if (hop < next_hops_.size()) entry.ways.push_back(static_cast<uint32_t>(hop));
    }
    entries_.push_back(std::move(entry));
  }
  slots_.resize(std::bit_ceil(entries_.size() * 2 + 1));
  mask_ = slots_.size() - 1;
  for (uint32_t i = 0; i < entries_.size(); i++) insert(i);
  for (auto& levels : levels_)
    std::sort(levels.begin(), levels.end(),
              [](const Level& a, const Level& b) { return a.length > b.length; });
}

void Fib::insert(uint32_t entry) {
  const Prefix& prefix = entries_[entry].prefix;
  const Level level = level_of(prefix);
  auto& levels = levels_[prefix.address.is_v4() ? 0 : 1];
  if (std::none_of(levels.begin(), levels.end(), [&](const Level& l) { return l.length == level.length; }))
    levels.push_back(level);
  const Bits network = bits_of(prefix.network());
  size_t at = hash(network, level.length) & mask_;
  while (slots_[at].used) at = (at + 1) & mask_;
  slots_[at] = {network, entry, level.length, true};
}

const Fib::Entry* Fib::lookup(const IpAddress& address) const noexcept {
  const Bits bits = bits_of(address);
  for (const Level& level : levels_[address.is_v4() ? 0 : 1]) {
    const Bits network{bits.high & level.mask.high, bits.low & level.mask.low};
    for (size_t at = hash(network, level.length) & mask_; slots_[at].used; at = (at + 1) & mask_)
      if (slots_[at].network == network && slots_[at].length == level.length)
        return &entries_[slots_[at].entry];
  }
  return nullptr;
}

}  // namespace millrace::switching
