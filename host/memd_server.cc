#include "host/memd_server.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>

#include "host/memd_soft.h"
#include "host/socket_address.h"
#include "host/soft_socket.h"
#include "roce/error.h"

namespace millrace::host {

namespace {

// The interface that has the address; throws where none has.
std::string interface_of(const IpAddress& address) {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) throw Error(ErrorCode::kSystem, "cannot ask for the addresses of this host");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(all, freeifaddrs);
  for (const ifaddrs* a = all; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr || (a->ifa_addr->sa_family != AF_INET && a->ifa_addr->sa_family != AF_INET6))
      continue;
    SocketAddress s;
    std::memcpy(&s.storage, a->ifa_addr,
                a->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (s.ip() == address) return a->ifa_name;
  }
  throw Error(ErrorCode::kUsage, "no interface of this host has the address " + address.to_string() +
                                     ": `ip address` shows those that there are");
}

class SoftMemd final : public MemdServer {
 public:
  SoftMemd(const MemdConfig& c, LeaseTable& table, const std::string& device)
      : socket_(device, pool_), lender_(lender_config(c), table, pool_) {
    text_ = "soft on " + device + " (RoCE path MTU up to " + std::to_string(socket_.path_mtu_max()) +
            "): this process answers every packet itself";
  }
  std::string text() const override { return text_; }
  bool counts_bytes() const override { return true; }
  void prepare_to_wait(std::vector<pollfd>& descriptors) override {
    const short room = socket_.waits_for_room() ? POLLOUT : 0;
    descriptors.push_back({socket_.fd(), static_cast<short>(POLLIN | room), 0});
  }
  Time next_deadline() const override { return std::min(lender_.next_deadline(), socket_.retry_at()); }
  void serve(Time now) override {
    FrameList received;
    // Bounded, so that signals and the status get their turn.
    for (uint32_t burst = 0; burst < 16; burst++) {
      const uint32_t n = socket_.receive(received);
      while (Frame frame = received.pop()) lender_.receive(std::move(frame), now, out_);
      lender_.poll(now, out_);
      socket_.send(out_, now);
      if (n < SoftSocket::kBurst) break;
    }
  }
  void shutdown(Time now) override {
    lender_.shutdown(now, out_);
    socket_.send(out_, now);
  }
  bool idle() const override { return lender_.idle() && socket_.backlog() == 0; }
  MemdCounters counters() const override {
    const SoftLender::Counters& c = lender_.counters();
    return {c.leases, c.refused, c.ended, c.died + c.broken, c.replaced};
  }

 private:
  SoftLenderConfig lender_config(const MemdConfig& c) const {
    SoftLenderConfig l;
    l.address = c.address;
    l.port = c.port;
    l.mtu_max = socket_.path_mtu_max();
    l.ca_guid = c.seed;
    l.seed = c.seed;
    return l;
  }
  HeapFramePool pool_;  // outlives all frames
  SoftSocket socket_;
  SoftLender lender_;
  std::string text_;
  FrameList out_;
};

}  // namespace

std::unique_ptr<MemdServer> make_soft_memd(const MemdConfig& config, LeaseTable& table) {
  if (config.device.empty() && !config.address)
    throw Error(ErrorCode::kUsage, "say where to lend: --listen ADDRESS or --device INTERFACE");
  return std::make_unique<SoftMemd>(config, table,
                                    config.device.empty() ? interface_of(*config.address) : config.device);
}

std::unique_ptr<MemdServer> make_memd_server(const MemdConfig& config, LeaseTable& table) {
  MemdConfig c = config;
  if (c.device.empty() && c.address) c.device = interface_of(*c.address);
  if (c.transport == "verbs") return make_verbs_memd(c, table);
  if (c.transport == "soft") return make_soft_memd(c, table);
  try {
    return make_verbs_memd(c, table);
  } catch (const Error& no_verbs) {
    struct Named final : MemdServer {
      Named(std::unique_ptr<MemdServer> s, std::string w) : soft(std::move(s)), why(std::move(w)) {}
      std::string text() const override { return soft->text() + "; no verbs: " + why + " (asked for auto)"; }
      bool counts_bytes() const override { return soft->counts_bytes(); }
      void prepare_to_wait(std::vector<pollfd>& d) override { soft->prepare_to_wait(d); }
      Time next_deadline() const override { return soft->next_deadline(); }
      void serve(Time now) override { soft->serve(now); }
      void shutdown(Time now) override { soft->shutdown(now); }
      bool idle() const override { return soft->idle(); }
      MemdCounters counters() const override { return soft->counters(); }
      std::unique_ptr<MemdServer> soft;
      std::string why;
    };
    return std::make_unique<Named>(make_soft_memd(c, table), no_verbs.what());
  }
}

}  // namespace millrace::host
