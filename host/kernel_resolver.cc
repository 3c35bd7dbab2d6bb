#include "host/kernel_resolver.h"

#include <libmnl/libmnl.h>
#include <linux/ethtool.h>
#include <linux/rtnetlink.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "host/file_descriptor.h"
#include "host/socket_address.h"
#include "roce/error.h"

namespace millrace::host {
namespace {

// Between two datagrams to a neighbour that does not answer: the kernel itself repeats ARP once a second,
// three times, before it calls the entry failed.
constexpr Time kProvokeInterval = std::chrono::milliseconds(500);

constexpr uint16_t kUsable = NUD_PERMANENT | NUD_NOARP | NUD_REACHABLE;
constexpr uint16_t kUnverified = NUD_STALE | NUD_DELAY;

Time clock_now() {
  return std::chrono::duration_cast<Time>(std::chrono::steady_clock::now().time_since_epoch());
}

std::string system_text(int error) { return std::system_category().message(error); }

uint8_t family_of(const IpAddress& a) { return a.is_v4() ? AF_INET : AF_INET6; }

void put_address(nlmsghdr* message, uint16_t attribute, const IpAddress& a) {
  if (a.is_v4())
    mnl_attr_put(message, attribute, 4, a.v4());
  else
    mnl_attr_put(message, attribute, 16, a.bytes.data());
}

std::optional<IpAddress> read_address(const void* bytes, size_t length) {
  if (length == 4) return IpAddress::from_v4(static_cast<const uint8_t*>(bytes));
  if (length == 16) return IpAddress::from_v6(static_cast<const uint8_t*>(bytes));
  return std::nullopt;
}

std::optional<IpAddress> read_address(const nlattr* attribute) {
  return read_address(mnl_attr_get_payload(attribute), mnl_attr_get_payload_len(attribute));
}

// libmnl's own mnl_attr_for_each is not C++.
template <typename F>
void for_each_attribute(const nlmsghdr* message, size_t header_bytes, F visit) {
  auto* attribute = static_cast<const nlattr*>(mnl_nlmsg_get_payload_offset(message, header_bytes));
  auto* end = static_cast<const char*>(mnl_nlmsg_get_payload_tail(message));
  while (mnl_attr_ok(attribute, static_cast<int>(end - reinterpret_cast<const char*>(attribute)))) {
    visit(attribute);
    attribute = mnl_attr_next(attribute);
  }
}

// Sends one request and hands each reply to `on_reply`; 0 or the kernel's errno.
int exchange(mnl_socket* socket, nlmsghdr* request, uint32_t sequence, mnl_cb_t on_reply, void* data) {
  request->nlmsg_seq = sequence;
  if (mnl_socket_sendto(socket, request, request->nlmsg_len) < 0) return errno;
  alignas(nlmsghdr) char reply[8192];
  while (true) {
    ssize_t n = mnl_socket_recvfrom(socket, reply, sizeof reply);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    // A late reply to an earlier request is passed over.
    if (reinterpret_cast<nlmsghdr*>(reply)->nlmsg_seq != sequence) continue;
    if (mnl_cb_run(reply, static_cast<size_t>(n), sequence, mnl_socket_get_portid(socket), on_reply, data) <
        0)
      return errno;
    return 0;
  }
}

// bit/s, as the driver tells ethtool; 0 where it does not.
uint64_t link_speed(int socket, const std::string& device) {
  ethtool_cmd command{};
  command.cmd = ETHTOOL_GSET;
  ifreq request{};
  device.copy(request.ifr_name, IFNAMSIZ - 1);
  request.ifr_data = reinterpret_cast<char*>(&command);
  if (ioctl(socket, SIOCETHTOOL, &request) < 0) return 0;
  const uint32_t megabits = ethtool_cmd_speed(&command);
  return megabits == static_cast<uint32_t>(SPEED_UNKNOWN) ? 0 : megabits * uint64_t{1'000'000};
}

}  // namespace

Interface query_interface(const std::string& device) {
  if (device.empty() || device.size() >= IFNAMSIZ)
    throw Error(ErrorCode::kUsage,
                "\"" + device + "\" is not the name of a network interface: see `ip link`");
  FileDescriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) throw Error(ErrorCode::kSystem, "cannot open a socket: " + system_text(errno));

  auto ask = [&](unsigned long what) {
    ifreq request{};
    device.copy(request.ifr_name, IFNAMSIZ - 1);
    if (ioctl(socket.get(), what, &request) < 0)
      throw Error(ErrorCode::kNoDevice, errno == ENODEV
                                            ? "there is no network interface " + device + ": see `ip link`"
                                            : "cannot query " + device + ": " + system_text(errno));
    return request;
  };
  Interface result;
  result.index = ask(SIOCGIFINDEX).ifr_ifindex;
  result.mtu = static_cast<uint32_t>(ask(SIOCGIFMTU).ifr_mtu);
  ifreq hardware = ask(SIOCGIFHWADDR);
  if (hardware.ifr_hwaddr.sa_family != ARPHRD_ETHER)
    throw Error(ErrorCode::kNoDevice,
                device + " is not an Ethernet interface: name one that is (see `ip link`)");
  std::memcpy(result.mac.bytes.data(), hardware.ifr_hwaddr.sa_data, 6);
  if (!(ask(SIOCGIFFLAGS).ifr_flags & IFF_UP))
    throw Error(ErrorCode::kNoDevice, device + " is down: ip link set " + device + " up");
  result.speed = link_speed(socket.get(), device);
  return result;
}

std::string mtu_too_small(const std::string& device, uint32_t interface_mtu, uint32_t path_mtu) {
  uint32_t needed = path_mtu + kRoceOverheadBytes;
  return device + " has an MTU of " + std::to_string(interface_mtu) + ", but a RoCE path MTU of " +
         std::to_string(path_mtu) + " needs " + std::to_string(needed) + ": ip link set " + device + " mtu " +
         std::to_string((needed + 99) / 100 * 100);
}

uint32_t path_mtu_max(const std::string& device, uint32_t interface_mtu) {
  for (uint32_t mtu = 4096; mtu >= 256; mtu /= 2)
    if (mtu + kRoceOverheadBytes <= interface_mtu) return mtu;
  throw Error(ErrorCode::kNoDevice, mtu_too_small(device, interface_mtu, 256));
}

void KernelResolver::SocketCloser::operator()(mnl_socket* socket) const { mnl_socket_close(socket); }

KernelResolver::KernelResolver() : socket_(mnl_socket_open2(NETLINK_ROUTE, SOCK_CLOEXEC)) {
  if (!socket_ || mnl_socket_bind(socket_.get(), 0, MNL_SOCKET_AUTOPID) < 0)
    throw Error(ErrorCode::kSystem, "cannot open a netlink socket: " + system_text(errno));
  // The kernel answers before send returns; this only keeps a bug from hanging the thread.
  timeval patience{1, 0};
  setsockopt(mnl_socket_get_fd(socket_.get()), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
}

KernelResolver::KernelResolver(const std::string& device) : KernelResolver() {
  device_ = device;
  interface_ = query_interface(device);
}

KernelResolver::~KernelResolver() = default;

int KernelResolver::ask_route(const IpAddress& to, int interface_index, bool only_if_in_table, Route& route) {
  alignas(nlmsghdr) char buffer[256] = {};
  nlmsghdr* request = mnl_nlmsg_put_header(buffer);
  request->nlmsg_type = RTM_GETROUTE;
  request->nlmsg_flags = NLM_F_REQUEST;
  auto* message = static_cast<rtmsg*>(mnl_nlmsg_put_extra_header(request, sizeof(rtmsg)));
  message->rtm_family = family_of(to);
  message->rtm_dst_len = to.is_v4() ? 32 : 128;
  if (only_if_in_table) message->rtm_flags = RTM_F_FIB_MATCH;
  put_address(request, RTA_DST, to);
  if (interface_index) mnl_attr_put_u32(request, RTA_OIF, static_cast<uint32_t>(interface_index));

  auto on_reply = [](const nlmsghdr* reply, void* data) {
    auto* out = static_cast<Route*>(data);
    out->type = static_cast<const rtmsg*>(mnl_nlmsg_get_payload(reply))->rtm_type;
    for_each_attribute(reply, sizeof(rtmsg), [out](const nlattr* attribute) {
      switch (mnl_attr_get_type(attribute)) {
        case RTA_OIF:
          out->interface_index = static_cast<int>(mnl_attr_get_u32(attribute));
          break;
        case RTA_PREFSRC:
          out->source = read_address(attribute);
          break;
        case RTA_GATEWAY:
          out->gateway = read_address(attribute);
          break;
        case RTA_VIA: {  // an IPv4 route by way of an IPv6 neighbour
          size_t length = mnl_attr_get_payload_len(attribute);
          auto* via = static_cast<const rtvia*>(mnl_attr_get_payload(attribute));
          if (length > sizeof(rtvia)) out->gateway = read_address(via->rtvia_addr, length - sizeof(rtvia));
          break;
        }
        default:
          break;
      }
    });
    return MNL_CB_STOP;
  };
  return exchange(socket_.get(), request, ++sequence_, on_reply, &route);
}

int KernelResolver::ask_neighbour(const IpAddress& next_hop, Neighbour& neighbour) {
  alignas(nlmsghdr) char buffer[256] = {};
  nlmsghdr* request = mnl_nlmsg_put_header(buffer);
  request->nlmsg_type = RTM_GETNEIGH;
  request->nlmsg_flags = NLM_F_REQUEST;
  auto* message = static_cast<ndmsg*>(mnl_nlmsg_put_extra_header(request, sizeof(ndmsg)));
  message->ndm_family = family_of(next_hop);
  message->ndm_ifindex = interface_.index;
  put_address(request, NDA_DST, next_hop);

  auto on_reply = [](const nlmsghdr* reply, void* data) {
    auto* out = static_cast<Neighbour*>(data);
    out->state = static_cast<const ndmsg*>(mnl_nlmsg_get_payload(reply))->ndm_state;
    for_each_attribute(reply, sizeof(ndmsg), [out](const nlattr* attribute) {
      if (mnl_attr_get_type(attribute) != NDA_LLADDR || mnl_attr_get_payload_len(attribute) != 6) return;
      out->mac.emplace();
      std::memcpy(out->mac->bytes.data(), mnl_attr_get_payload(attribute), 6);
    });
    return MNL_CB_STOP;
  };
  int error = exchange(socket_.get(), request, ++sequence_, on_reply, &neighbour);
  return error == ENOENT ? 0 : error;
}

bool KernelResolver::verify_neighbour(const IpAddress& next_hop) {
  alignas(nlmsghdr) char buffer[256] = {};
  nlmsghdr* request = mnl_nlmsg_put_header(buffer);
  request->nlmsg_type = RTM_NEWNEIGH;
  request->nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_REPLACE;
  auto* message = static_cast<ndmsg*>(mnl_nlmsg_put_extra_header(request, sizeof(ndmsg)));
  message->ndm_family = family_of(next_hop);
  message->ndm_ifindex = interface_.index;
  message->ndm_state = NUD_PROBE;
  put_address(request, NDA_DST, next_hop);
  return exchange(socket_.get(), request, ++sequence_, nullptr, nullptr) == 0;
}

void KernelResolver::provoke(const IpAddress& next_hop) {
  constexpr uint16_t kDiscardPort = 9;
  Time now = clock_now();
  auto [last, first_time] = provoked_.try_emplace(next_hop, now);
  if (!first_time && now - last->second < kProvokeInterval) return;
  last->second = now;

  FileDescriptor socket(::socket(family_of(next_hop), SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return;  // asked again soon
  setsockopt(socket.get(), SOL_SOCKET, SO_BINDTODEVICE, device_.c_str(),
             static_cast<socklen_t>(device_.size()));
  const SocketAddress to(next_hop, kDiscardPort, interface_.index);
  if (connect(socket.get(), to.get(), to.length()) == 0) (void)!send(socket.get(), "", 1, MSG_DONTWAIT);
}

std::optional<MacAddress> KernelResolver::next_hop_mac(const IpAddress& next_hop, std::string& error) {
  Neighbour neighbour;
  if (int e = ask_neighbour(next_hop, neighbour)) {
    error = "cannot look up " + next_hop.to_string() + " on " + device_ + ": " + system_text(e);
    return std::nullopt;
  }
  if (neighbour.state & kUsable) {
    // An interface without ARP says so instead of a MAC.
    silent_.erase(next_hop);
    if (neighbour.mac) return neighbour.mac;
    error = device_ + " has no MAC for " + next_hop.to_string() + ": ip neigh add it, or turn ARP on";
    return std::nullopt;
  }
  // The path is asked for once per connection, and a restarted switch may have another MAC: what the kernel
  // has not verified lately is verified first. Only an administrator may ask for that; others take the entry
  // as it is.
  if ((neighbour.state & kUnverified) && neighbour.mac && !verify_neighbour(next_hop)) return neighbour.mac;
  if (!(neighbour.state & (kUnverified | NUD_PROBE))) provoke(next_hop);
  // The kernel goes on asking in turns; what it found out in the last one stays true until there is an
  // answer.
  if (neighbour.state & NUD_FAILED) silent_.insert(next_hop);
  if (silent_.contains(next_hop))
    error =
        std::string(next_hop.is_v4() ? "no answer to ARP for " : "no answer to neighbour discovery for ") +
        next_hop.to_string() + " on " + device_ + ": is the switch up and on this network?";
  return std::nullopt;
}

std::optional<roce::Path> KernelResolver::resolve(const IpAddress& to, std::string& error) {
  try {
    interface_ = query_interface(device_);
  } catch (const Error& e) {
    error = e.what();  // the socket on it will say so too, and ends more than this connect
    return std::nullopt;
  }
  Route route;
  // With an output interface named, IPv4 takes any address for a neighbour; only a match in the table counts.
  int failed = to.is_v4() ? ask_route(to, interface_.index, true, route) : 0;
  if (!failed) failed = ask_route(to, interface_.index, false, route);
  if (failed) {
    error = "no route to " + to.to_string() + " by " + device_ + " (" + system_text(failed) + "): give " +
            device_ + " an address in that network, or name another interface";
    return std::nullopt;
  }
  if (route.type == RTN_LOCAL) {
    error = to.to_string() + " is an address of this host itself: name the switch's";
    return std::nullopt;
  }
  if (route.type != RTN_UNICAST || !route.source || route.source->is_zero() ||
      (is_link_local(*route.source) && !to.is_v4() && !is_link_local(to))) {
    // For a second after an IPv6 address was added it is tentative: the connect goes on asking.
    error = device_ + " has no usable address to reach " + to.to_string() + " from: see `ip addr show " +
            device_ + "`";
    return std::nullopt;
  }
  std::optional<MacAddress> mac = next_hop_mac(route.gateway.value_or(to), error);
  if (!mac) return std::nullopt;
  roce::Path path;
  path.src_mac = interface_.mac;
  path.dst_mac = *mac;
  path.src_ip = *route.source;
  path.dst_ip = to;
  return path;
}

std::string KernelResolver::device_towards(const IpAddress& to) {
  KernelResolver resolver;
  Route route;
  int failed = resolver.ask_route(to, 0, false, route);
  if (failed)
    throw Error(ErrorCode::kUnreachable, "no route to the switch " + to.to_string() + " (" +
                                             system_text(failed) +
                                             "): give an interface an address in that network");
  if (route.type == RTN_LOCAL)
    throw Error(ErrorCode::kUsage, to.to_string() + " is an address of this host itself: name the switch's");
  char device[IF_NAMESIZE];
  if (if_indextoname(static_cast<unsigned>(route.interface_index), device) == nullptr)
    throw Error(ErrorCode::kSystem, "no interface leads to the switch " + to.to_string());
  return device;
}

}  // namespace millrace::host
