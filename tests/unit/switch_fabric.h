// Several pipelines wired together in virtual time, with plain IP hosts at the edges whose ARP and neighbour
// discovery are written here from the RFCs, not from the switch's code.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <map>
#include <memory>

#include "roce/build.h"
#include "roce/packet.h"
#include "switch/pipeline.h"

namespace millrace::switching::test {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;
using std::chrono::seconds;

inline IpAddress ip(std::string_view text) { return IpAddress::parse(text).value(); }
inline InterfaceAddress on(uint16_t interface, std::string_view text) {
  return {Prefix::parse(text).value(), interface, true};
}
inline StaticRoute route(std::string_view prefix, std::vector<std::string_view> via) {
  StaticRoute r{Prefix::parse(prefix).value(), {}};
  for (const std::string_view v : via) r.via.push_back(ip(v));
  return r;
}

// Big-endian fields of raw bytes.
inline uint16_t be16(const Bytes& b, size_t at) {
  return static_cast<uint16_t>(b.at(at) << 8 | b.at(at + 1));
}
inline void append(Bytes& b, std::span<const uint8_t> more) { b.insert(b.end(), more.begin(), more.end()); }
inline void append16(Bytes& b, unsigned v) {
  b.push_back(static_cast<uint8_t>(v >> 8));
  b.push_back(static_cast<uint8_t>(v));
}

// The Internet checksum as RFC 1071 defines it, in the plainest way.
inline uint16_t ones_complement_sum(std::span<const uint8_t> bytes, uint64_t sum = 0) {
  for (size_t i = 0; i < bytes.size(); i++) sum += i % 2 == 0 ? uint64_t{bytes[i]} << 8 : bytes[i];
  while (sum > 0xFFFF) sum = (sum & 0xFFFF) + (sum >> 16);
  return static_cast<uint16_t>(sum);
}

inline std::span<const uint8_t> raw(const IpAddress& a) {
  return a.is_v4() ? std::span<const uint8_t>(a.v4(), 4) : std::span<const uint8_t>(a.bytes);
}

// An Ethernet frame with an IP packet of any protocol.
inline Bytes ip_frame(const MacAddress& dst, const MacAddress& src, const IpAddress& to,
                      const IpAddress& from, uint8_t protocol, std::span<const uint8_t> payload,
                      uint8_t hops = 64) {
  Bytes b;
  append(b, dst.bytes);
  append(b, src.bytes);
  if (to.is_v4()) {
    append16(b, 0x0800);
    const size_t at = b.size();
    append(b, std::array<uint8_t, 2>{0x45, 0});
    append16(b, static_cast<unsigned>(20 + payload.size()));
    append(b, std::array<uint8_t, 6>{0x12, 0x34, 0x40, 0, hops, protocol});
    append16(b, 0);
    append(b, raw(from));
    append(b, raw(to));
    const auto sum = static_cast<uint16_t>(~ones_complement_sum({b.data() + at, 20}));
    b[at + 10] = static_cast<uint8_t>(sum >> 8), b[at + 11] = static_cast<uint8_t>(sum);
  } else {
    append16(b, 0x86DD);
    append(b, std::array<uint8_t, 4>{0x60, 0, 0, 0});
    append16(b, static_cast<unsigned>(payload.size()));
    append(b, std::array<uint8_t, 2>{protocol, hops});
    append(b, raw(from));
    append(b, raw(to));
  }
  append(b, payload);
  return b;
}

inline Bytes udp(uint16_t from, uint16_t to, size_t bytes = 8) {
  Bytes b;
  append16(b, from);
  append16(b, to);
  append16(b, static_cast<unsigned>(8 + bytes));
  append16(b, 0);
  for (size_t i = 0; i < bytes; i++) b.push_back(static_cast<uint8_t>(i));
  return b;
}

// RFC 4443's checksum, over the pseudo header of RFC 8200, 8.1; 0xFFFF in all when it is right.
inline uint16_t icmp6_sum(const IpAddress& from, const IpAddress& to, std::span<const uint8_t> message) {
  Bytes pseudo;
  append(pseudo, raw(from));
  append(pseudo, raw(to));
  append(pseudo, std::array<uint8_t, 2>{0, 0});
  append16(pseudo, static_cast<unsigned>(message.size()));
  append(pseudo, std::array<uint8_t, 4>{0, 0, 0, 58});
  return ones_complement_sum(message, ones_complement_sum(pseudo));
}

inline Bytes neighbour_message(uint8_t type, uint32_t flags, const IpAddress& target, uint8_t option,
                               const MacAddress& mac, const IpAddress& from, const IpAddress& to) {
  Bytes m = {type, 0, 0, 0, static_cast<uint8_t>(flags >> 24), 0, 0, 0};
  append(m, raw(target));
  m.push_back(option);
  m.push_back(1);
  append(m, mac.bytes);
  const auto sum = static_cast<uint16_t>(~icmp6_sum(from, to, m));
  m[2] = static_cast<uint8_t>(sum >> 8), m[3] = static_cast<uint8_t>(sum);
  return m;
}

inline Bytes arp(uint16_t operation, const MacAddress& sender_mac, const IpAddress& sender,
                 const MacAddress& target_mac, const IpAddress& target, const MacAddress& to) {
  Bytes b;
  append(b, to.bytes);
  append(b, sender_mac.bytes);
  append(b, std::array<uint8_t, 8>{0x08, 0x06, 0, 1, 0x08, 0, 6, 4});
  append16(b, operation);
  append(b, sender_mac.bytes);
  append(b, raw(sender));
  append(b, target_mac.bytes);
  append(b, raw(target));
  return b;
}

inline MacAddress mac_at(const Bytes& b, size_t at) {
  MacAddress m;
  std::copy_n(b.begin() + static_cast<long>(at), 6, m.bytes.begin());
  return m;
}

inline bool is_arp(const Bytes& b) { return b.size() >= 42 && be16(b, 12) == 0x0806; }
inline bool is_nd(const Bytes& b) {
  return b.size() >= 78 && be16(b, 12) == 0x86DD && b[20] == 58 && (b[54] == 135 || b[54] == 136);
}

// A host with one IPv4 and one IPv6 address on one wire.
struct PlainHost {
  MacAddress mac;
  IpAddress ip4, ip6;
  bool answers = true;      // ARP requests and solicitations for its addresses
  std::deque<Bytes> inbox;  // all that came for it or for a group, but questions that it answered

  // Its answer to a question about it, or nothing.
  std::optional<Bytes> answer(const Bytes& b) const {
    if (!answers) return std::nullopt;
    if (is_arp(b) && be16(b, 20) == 1 && std::equal(b.begin() + 38, b.begin() + 42, ip4.v4()))
      return arp(2, mac, ip4, mac_at(b, 22), IpAddress::from_v4(b.data() + 28), mac_at(b, 22));
    if (is_nd(b) && b[54] == 135 && std::equal(b.begin() + 62, b.begin() + 78, ip6.bytes.begin())) {
      const IpAddress asker = IpAddress::from_v6(b.data() + 22);
      // Solicited, overriding.
      const Bytes m = neighbour_message(136, 0x60000000, ip6, 2, mac, ip6, asker);
      return ip_frame(mac_at(b, 6), mac, asker, ip6, 58, m, 255);
    }
    return std::nullopt;
  }
};

inline Bytes bytes_of(const Frame& frame) {
  Bytes b(frame.total_length());
  frame.copy_to(b.data());
  return b;
}

inline Frame frame_of(FramePool& pool, std::span<const uint8_t> bytes, uint16_t port) {
  Frame f = Frame::allocate(pool);
  std::copy(bytes.begin(), bytes.end(), f.buffer()->data());
  f.buffer()->length = static_cast<uint32_t>(bytes.size());
  f.set_port(port);
  return f;
}

// Switches and hosts, and wires without delay between them.
class Fabric {
 public:
  struct Switch {
    std::string name;
    HeapFramePool pool{4608, UINT32_MAX, true};
    std::unique_ptr<Pipeline> pipeline;
    MacAddress mac;
  };
  struct End {
    int node = -1;  // of a switch, or −1 − a host's number
    uint16_t port = 0;
    friend auto operator<=>(const End&, const End&) = default;
  };
  struct Passed {
    End from, to;
    Bytes bytes;
  };

  ~Fabric() {
    for (auto& s : switches_) {
      s->pipeline.reset();
      EXPECT_EQ(s->pool.in_use(), 0u) << s->name;
    }
  }

  int add_switch(const std::string& name, uint16_t ports, RoutingConfig routing, uint8_t number) {
    auto s = std::make_unique<Switch>();
    s->name = name;
    s->mac = {{0x02, 0x4d, 0x52, 0, 0, number}};
    PipelineConfig config;
    config.ports = ports;
    config.engine.mac = s->mac;
    config.engine.seed = number;
    for (const InterfaceAddress& i : routing.interfaces) config.engine.addresses.push_back(i.prefix.address);
    config.routing = std::move(routing);
    s->pipeline = std::make_unique<Pipeline>(config, s->pool);
    switches_.push_back(std::move(s));
    return static_cast<int>(switches_.size()) - 1;
  }
  int add_host(const std::string& ip4, const std::string& ip6, End at) {
    auto h = std::make_unique<PlainHost>();
    const int number = static_cast<int>(hosts_.size());
    h->mac = {{0x02, 0, 0, 0, 1, static_cast<uint8_t>(number + 1)}};
    h->ip4 = ip(ip4), h->ip6 = ip(ip6);
    hosts_.push_back(std::move(h));
    wire({-1 - number, 0}, at);
    return number;
  }
  void wire(End a, End b) { wires_[a] = b, wires_[b] = a; }
  void cut(End a) { cut_.push_back(a), cut_.push_back(wires_.at(a)); }
  void cut_from(End a) { cut_.push_back(a); }  // what comes from there, not what goes there
  void mend() { cut_.clear(); }

  Switch& sw(int n) { return *switches_[static_cast<size_t>(n)]; }
  PlainHost& host(int n) { return *hosts_[static_cast<size_t>(n)]; }
  Time now() const { return now_; }

  // Puts a frame on a host's wire, and lets everything come to rest.
  void send(int host, const Bytes& bytes) {
    carry({-1 - host, 0}, bytes);
    settle();
  }
  // Lets time pass.
  void run(Time time) {
    for (const Time end = now_ + time; now_ < end;) {
      now_ = std::min(end, now_ + milliseconds(10));
      settle();
    }
  }
  std::vector<Passed> passed;  // everything that was put on a wire, since it was last cleared
  size_t count(const std::function<bool(const Passed&)>& which) const {
    return static_cast<size_t>(std::count_if(passed.begin(), passed.end(), which));
  }

  // What a host's own stack does with a frame for it; by default it goes to the inbox.
  std::function<bool(int host, const Bytes&)> deliver = [](int, const Bytes&) { return false; };
  void carry(End from, Bytes bytes) {
    const auto wire = wires_.find(from);
    if (wire == wires_.end() || std::find(cut_.begin(), cut_.end(), from) != cut_.end()) return;
    passed.push_back({from, wire->second, bytes});
    flying_.push_back({from, wire->second, std::move(bytes)});
  }
  void settle() {
    do {
      while (!flying_.empty()) {
        const Passed p = std::move(flying_.front());
        flying_.pop_front();
        arrive(p);
      }
      for (size_t i = 0; i < switches_.size(); i++) {
        Pipeline& pipeline = *switches_[i]->pipeline;
        // As many turns as it takes: one does a bounded part of what is due.
        for (int turn = 0; turn < 10'000 && now_ >= pipeline.next_deadline(); turn++) {
          FrameList out;
          pipeline.poll(now_, out);
          emit(static_cast<int>(i), out);
        }
      }
    } while (!flying_.empty());
  }

 private:
  void emit(int node, FrameList& out) {
    while (Frame f = out.pop()) carry({node, f.port()}, bytes_of(f));
  }
  void arrive(const Passed& p) {
    if (p.to.node >= 0) {
      Switch& s = sw(p.to.node);
      FrameList in, out;
      in.push(frame_of(s.pool, p.bytes, p.to.port));
      s.pipeline->process(in, now_, out);
      emit(p.to.node, out);
      return;
    }
    const int number = -1 - p.to.node;
    PlainHost& h = host(number);
    if (!(p.bytes[0] & 1) && mac_at(p.bytes, 0) != h.mac) return;
    if (const auto answer = h.answer(p.bytes)) return carry(p.to, *answer);
    if (!deliver(number, p.bytes)) h.inbox.push_back(p.bytes);
  }

  std::vector<std::unique_ptr<Switch>> switches_;
  std::vector<std::unique_ptr<PlainHost>> hosts_;
  std::map<End, End> wires_;
  std::vector<End> cut_;
  std::deque<Passed> flying_;
  Time now_ = seconds(1);
};

// Two leaves with two hosts each, two spines, and a wire from each leaf to each spine: IPv4 /31 and IPv6
// /127. On a leaf the hosts are on ports 0 and 1 and the spines on ports 2 and 3, on a spine the leaves on 0
// and 1.
struct LeafSpine {
  Fabric net;
  int leaf[2], spine[2], host[4];  // hosts 0 and 1 behind the first leaf

  explicit LeafSpine(uint32_t icmp_errors_pps = 100) {
    for (int l = 0; l < 2; l++) {
      const std::string own = std::to_string(l + 1), other = std::to_string(2 - l);
      RoutingConfig r;
      r.icmp_errors_pps = icmp_errors_pps;
      r.interfaces = {on(kBridge, "10.77." + own + ".1/24"), on(kBridge, "fd77:" + own + "::1/64")};
      r.interfaces.push_back({{ip("192.0.2." + own), 0}, kBridge, false});
      std::vector<std::string> via4, via6;
      for (int s = 0; s < 2; s++) {
        r.interfaces.push_back(on(static_cast<uint16_t>(2 + s), link4(l, s, false) + "/31"));
        r.interfaces.push_back(on(static_cast<uint16_t>(2 + s), link6(l, s, false) + "/127"));
        via4.push_back(link4(l, s, true)), via6.push_back(link6(l, s, true));
      }
      r.routes = {route("10.77." + other + ".0/24", {via4[0], via4[1]}),
                  route("192.0.2." + other + "/32", {via4[0], via4[1]}),
                  route("fd77:" + other + "::/64", {via6[0], via6[1]})};
      leaf[l] = net.add_switch("leaf" + own, 4, r, static_cast<uint8_t>(1 + l));
    }
    for (int s = 0; s < 2; s++) {
      RoutingConfig r;
      r.icmp_errors_pps = icmp_errors_pps;
      for (int l = 0; l < 2; l++) {
        const std::string own = std::to_string(l + 1);
        r.interfaces.push_back(on(static_cast<uint16_t>(l), link4(l, s, true) + "/31"));
        r.interfaces.push_back(on(static_cast<uint16_t>(l), link6(l, s, true) + "/127"));
        r.routes.push_back(route("10.77." + own + ".0/24", {link4(l, s, false)}));
        r.routes.push_back(route("192.0.2." + own + "/32", {link4(l, s, false)}));
        r.routes.push_back(route("fd77:" + own + "::/64", {link6(l, s, false)}));
      }
      spine[s] = net.add_switch("spine" + std::to_string(s + 1), 2, r, static_cast<uint8_t>(11 + s));
      for (int l = 0; l < 2; l++)
        net.wire({leaf[l], static_cast<uint16_t>(2 + s)}, {spine[s], static_cast<uint16_t>(l)});
    }
    for (int h = 0; h < 4; h++) {
      const std::string l = std::to_string(h / 2 + 1), n = std::to_string(h % 2 + 10);
      host[h] = net.add_host("10.77." + l + "." + n, "fd77:" + l + "::" + n,
                             {leaf[h / 2], static_cast<uint16_t>(h % 2)});
    }
    net.settle();  // next hops get to know each other
    net.passed.clear();
  }
  // The address of leaf l's wire to spine s, at the leaf or at the spine.
  static std::string link4(int l, int s, bool at_spine) {
    return "10.255.0." + std::to_string(4 * l + 2 * s + (at_spine ? 1 : 0));
  }
  static std::string link6(int l, int s, bool at_spine) {
    return "fd00:" + std::to_string(l) + std::to_string(s) + "::" + (at_spine ? "1" : "0");
  }
  PlainHost& h(int n) { return net.host(host[n]); }
  IpAddress address(int n, bool v6) { return v6 ? h(n).ip6 : h(n).ip4; }
  // From a host towards any address, by its leaf.
  Bytes packet(int from, const IpAddress& to, uint8_t protocol, std::span<const uint8_t> payload,
               uint8_t hops = 64) {
    return ip_frame(net.sw(leaf[from / 2]).mac, h(from).mac, to, address(from, !to.is_v4()), protocol,
                    payload, hops);
  }
  // A RoCE packet from one host to another, by the first one's leaf.
  Bytes roce_packet(int from, int to, bool v6, uint16_t source_port, size_t bytes = 1000) {
    HeapFramePool pool;
    roce::Path path;
    path.src_mac = h(from).mac;
    path.dst_mac = net.sw(leaf[from / 2]).mac;
    path.src_ip = address(from, v6), path.dst_ip = address(to, v6);
    path.src_port = source_port;
    roce::TransportFields fields;
    fields.dest_qp = Qpn{0x123456};
    fields.psn = Psn(7);
    Bytes payload;
    for (size_t i = 0; i < bytes; i++) payload.push_back(static_cast<uint8_t>(i * 7));
    return bytes_of(roce::build(pool, path, fields, payload));
  }
};

}  // namespace millrace::switching::test
