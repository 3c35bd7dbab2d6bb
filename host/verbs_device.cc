#include "host/verbs_device.h"

#include <fcntl.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <system_error>

#include "host/kernel_resolver.h"
#include "host/socket_address.h"
#include "roce/error.h"

namespace millrace::host {

namespace {

constexpr int kFirstCompletions = 8192;  // some forty links; several drivers cannot resize a queue later

std::string system_text(int error) { return std::system_category().message(error); }

struct DeviceList {
  DeviceList() { all = ibv_get_device_list(&count); }
  ~DeviceList() {
    if (all) ibv_free_device_list(all);
  }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ibv_device* find(const std::string& name) const {
    for (int i = 0; i < count; i++)
      if (name == ibv_get_device_name(all[i])) return all[i];
    return nullptr;
  }
  ibv_device** all;
  int count = 0;
};

IpAddress address_of(const ibv_gid& gid) {
  IpAddress a;
  std::memcpy(a.bytes.data(), gid.raw, 16);
  return a;
}

std::vector<ibv_gid_entry> query_gids(ibv_context* context) {
  std::vector<ibv_gid_entry> gids(1024);
  const ssize_t n = ibv_query_gid_table(context, gids.data(), gids.size(), 0);
  gids.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return gids;
}

// One port of a device that carries RoCE for the interface, or, where that is 0, for any.
struct Candidate {
  VerbsPtr<ibv_context, ibv_close_device> context;
  ibv_gid_entry gid{};
};

// Why the device will not do; empty where it will, and then `candidate` is filled in.
std::string consider(ibv_device* device, unsigned interface_index, bool v4, Candidate& candidate) {
  const std::string name = ibv_get_device_name(device);
  VerbsPtr<ibv_context, ibv_close_device> context(ibv_open_device(device));
  if (!context)
    return name + " cannot be opened (" + system_text(errno) + "): may this user read /dev/infiniband?";
  bool of_interface = false, v2 = false;
  std::optional<ibv_gid_entry> best;  // a link-local one only where there is no other
  for (const ibv_gid_entry& gid : query_gids(context.get())) {
    if (interface_index != 0 && gid.ndev_ifindex != interface_index) continue;
    of_interface = true;
    if (gid.gid_type != IBV_GID_TYPE_ROCE_V2) continue;
    v2 = true;
    if (address_of(gid.gid).is_v4() != v4) continue;
    if (!best || is_link_local(address_of(best->gid))) best = gid;
  }
  char interface[IF_NAMESIZE] = "that interface";
  if (interface_index != 0) if_indextoname(interface_index, interface);
  if (!of_interface)
    return name + " does not belong to " + interface + " (`rdma link` shows what it belongs to)";
  if (!v2) return name + " has no RoCE v2 GID (`rdma link`, /sys/class/infiniband/*/ports/*/gid_attrs/types)";
  if (!best)
    return name + " has no RoCE v2 GID of the switch's family: give its interface an " +
           (v4 ? "IPv4" : "IPv6") + " address";
  ibv_port_attr port{};
  if (ibv_query_port(context.get(), static_cast<uint8_t>(best->port_num), &port) != 0 ||
      port.state != IBV_PORT_ACTIVE)
    return name + " port " + std::to_string(best->port_num) + " is down: bring its network interface up";
  candidate = {std::move(context), *best};
  return "";
}

}  // namespace

void VerbsDevice::check_name(const std::string& name) {
  if (DeviceList().find(name) == nullptr) query_interface(name);
}

std::unique_ptr<VerbsDevice> VerbsDevice::open(const std::string& name, const IpAddress& switch_address) {
  // Registered memory must survive the application's fork(); a no-op where the kernel sees to that.
  ibv_fork_init();
  const DeviceList devices;
  if (devices.all == nullptr || devices.count == 0)
    throw Error(ErrorCode::kSystem,
                "no RDMA device (for Soft-RoCE: rdma link add rxe0 type rxe netdev <interface>)");
  Candidate candidate;
  std::string why;
  if (ibv_device* named = name.empty() ? nullptr : devices.find(name)) {
    // Of its ports, VLANs and addresses those of the interface that routes there, if it is one of them.
    try {
      const std::string interface = KernelResolver::device_towards(switch_address);
      why = consider(named, if_nametoindex(interface.c_str()), switch_address.is_v4(), candidate);
    } catch (const Error&) {
    }
    if (!candidate.context) why = consider(named, 0, switch_address.is_v4(), candidate);
  } else {
    const std::string interface = name.empty() ? KernelResolver::device_towards(switch_address) : name;
    query_interface(interface);
    for (int i = 0; i < devices.count && !candidate.context; i++) {
      const std::string objection =
          consider(devices.all[i], if_nametoindex(interface.c_str()), switch_address.is_v4(), candidate);
      if (!objection.empty()) why += (why.empty() ? "" : "; ") + objection;
    }
  }
  if (!candidate.context) throw Error(ErrorCode::kSystem, "no usable RDMA device: " + why);

  std::unique_ptr<VerbsDevice> d(new VerbsDevice());
  d->context_ = std::move(candidate.context);
  d->name_ = ibv_get_device_name(d->context_->device);
  d->port_ = static_cast<uint8_t>(candidate.gid.port_num);
  d->interface_index_ = static_cast<int>(candidate.gid.ndev_ifindex);
  std::array<char, IF_NAMESIZE> interface {};
  if (if_indextoname(candidate.gid.ndev_ifindex, interface.data()) != nullptr)
    d->interface_ = interface.data();
  auto must = [&](bool good, const char* what) {
    if (!good)
      throw Error(ErrorCode::kSystem,
                  std::string("cannot ") + what + " on " + d->name_ + ": " + system_text(errno));
  };
  ibv_port_attr port{};
  must(ibv_query_device(d->context(), &d->limits_) == 0 && ibv_query_port(d->context(), d->port_, &port) == 0,
       "query the device");
  d->path_mtu_max_ = 128u << port.active_mtu;
  d->pd_.reset(ibv_alloc_pd(d->context()));
  must(d->pd_ != nullptr, "allocate a protection domain");
  d->channel_.reset(ibv_create_comp_channel(d->context()));
  must(d->channel_ != nullptr, "create a completion channel");
  d->cq_.reset(
      ibv_create_cq(d->context(), std::min(d->limits_.max_cqe, kFirstCompletions), nullptr, d->channel(), 0));
  must(d->cq_ != nullptr, "create a completion queue");
  for (const int fd : {d->channel()->fd, d->context()->async_fd})
    must(fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0, "prepare event descriptors");
  return d;
}

std::vector<ibv_gid_entry> VerbsDevice::gids() const { return query_gids(context()); }

void VerbsDevice::reserve_completions(uint32_t entries) {
  const uint32_t wanted = reserved_ + entries, has = static_cast<uint32_t>(cq()->cqe);
  if (wanted > has) {
    const uint32_t most = static_cast<uint32_t>(limits_.max_cqe);
    if (wanted > most ||
        ibv_resize_cq(cq(), static_cast<int>(std::min(most, std::max(wanted, 2 * has)))) != 0)
      throw Error(ErrorCode::kSystem, name_ + " has no completion queue of " + std::to_string(wanted) +
                                          " entries: use fewer stripes or communicators");
  }
  reserved_ = wanted;
}

IpAddress VerbsDevice::source_towards(const IpAddress& to) const {
  const FileDescriptor socket(::socket(to.is_v4() ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const SocketAddress target(to, 4791, interface_index_);
  SocketAddress source;
  socklen_t length = sizeof(source.storage);
  if (!socket || connect(socket.get(), target.get(), target.length()) != 0 ||
      getsockname(socket.get(), source.get(), &length) != 0)
    throw Error(ErrorCode::kUnreachable, "no route to the switch " + to.to_string() + " (" +
                                             system_text(errno) + "): give " + interface_ +
                                             " an address in that network");
  std::optional<IpAddress> any;
  for (const ibv_gid_entry& gid : gids()) {
    const IpAddress address = address_of(gid.gid);
    if (gid.gid_type != IBV_GID_TYPE_ROCE_V2 || gid.port_num != port_ ||
        gid.ndev_ifindex != static_cast<uint32_t>(interface_index_) || address.is_v4() != to.is_v4())
      continue;
    if (address == source.ip()) return address;
    if (!is_link_local(address)) any = address;
  }
  // The route goes elsewhere, but this is the interface that was asked for.
  if (any) return *any;
  throw Error(ErrorCode::kUnreachable, "packets to the switch " + to.to_string() + " would come from " +
                                           source.ip().to_string() + ", which is no RoCE v2 address of " +
                                           name_ + ": give " + interface_ +
                                           " an address in the switch's network");
}

std::string VerbsDevice::gid_objection(uint8_t index) const {
  ibv_gid_entry gid{};
  if (ibv_query_gid_ex(context(), port_, index, &gid, 0) != 0) return "";  // the queue pair will tell
  if (gid.gid_type == IBV_GID_TYPE_ROCE_V2) return "";
  return "librdmacm has chosen a RoCE v1 GID of " + name_ + ": set the default to v2 (cma_roce_mode -d " +
         name_ + " -p " + std::to_string(port_) + " -m 2)";
}

uint64_t VerbsDevice::counter(const char* counter) const {
  for (const char* folder : {"hw_counters", "counters"}) {
    std::ifstream file("/sys/class/infiniband/" + name_ + "/ports/" + std::to_string(port_) + "/" + folder +
                       "/" + counter);
    uint64_t value;
    if (file >> value) return value;
  }
  return 0;
}

}  // namespace millrace::host
