#include "host/local_hub.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "roce/error.h"

namespace millrace::host {

using Kind = LocalMessage::Kind;

LocalHub::LocalHub(LocalSocket listener, const HubConfig& config, Transport& up, Time now)
    : leader_(config.join.rank),
      listener_(std::move(listener)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      hub_(config, up, now) {
  if (!epoll_)
    throw Error(ErrorCode::kSystem, "cannot make an epoll: " + std::system_category().message(errno));
  watch(listener_->fd(), 0);
}

void LocalHub::watch(int fd, uint64_t key) const {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = key;
  if (fd >= 0) epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event);
}

bool LocalHub::receive(Time now) {
  if (view_) view_.hub().sleeping.publish(0);
  std::array<epoll_event, 64> events;
  const int n = epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  for (int i = 0; i < n; i++) {
    const uint64_t key = events[static_cast<size_t>(i)].data.u64;
    if (key == 0) accept(now);
    if (const auto c = connections_.find(key); c != connections_.end()) drain(key, c->second, now);
  }
  std::erase_if(connections_, [](const auto& c) { return c.second.closed; });
  return n > 0;
}

void LocalHub::accept(Time now) {
  while (listener_) {
    std::optional<LocalSocket> socket = listener_->accept();
    if (!socket) return;
    const uint64_t key = next_key_++;
    watch(socket->fd(), key);
    watch(socket->process_fd(), key);
    connections_[key].socket = std::move(*socket);
    drain(key, connections_[key], now);  // its hello is mostly there
  }
}

void LocalHub::drain(uint64_t key, Connection& c, Time now) {
  while (!c.closed) {
    LocalMessage message;
    FileDescriptor file;
    const LocalSocket::Received r = c.socket.receive(message, file);
    if (r == LocalSocket::Received::kMessage) {
      handle(key, c, message, now);
      continue;
    }
    if (r == LocalSocket::Received::kNothing && !c.socket.process_over()) return;
    c.closed = true;
    if (c.seat) hub_.lose(*c.seat, "died", now);
  }
}

void LocalHub::handle(uint64_t key, Connection& c, const LocalMessage& message, Time now) {
  if (c.seat) hub_.heard(*c.seat, now);
  if (message.kind == Kind::kProbe) {
    LocalMessage alive;
    alive.kind = Kind::kAlive;
    c.socket.send(alive);
  }
  if (message.kind == Kind::kHello && !c.seat) return hello(key, c, message.hello, now);
  if (message.kind == Kind::kGoodbye && c.seat) {
    c.closed = true;
    hub_.depart(*c.seat, now);
  }
}

void LocalHub::hello(uint64_t key, Connection& c, const LocalHello& h, Time now) {
  // Whoever had this rank before may be dead, unseen so far.
  for (auto& [other, connection] : connections_)
    if (other != key && connection.seat && connection.socket.process_over()) drain(other, connection, now);
  if (!hub_.joining()) {  // it shall look for another leader, or become one
    c.closed = true;
    return;
  }
  if (const auto objection = hub_.objection(h)) {
    LocalMessage refusal;
    refusal.kind = Kind::kRefused;
    refusal.text = *objection;
    c.socket.send(refusal);
    c.closed = true;
    return;
  }
  c.seat = hub_.attach(h, c.socket.process());
  connection_of_.push_back(key);
}

void LocalHub::poll(Time now) {
  hub_.poll(now);
  if (const auto layout = hub_.wants_memory()) make_memory(*layout, now);
  tell_ranks();
  // The name is free for the next group of that key.
  if (!hub_.joining()) listener_.reset();
}

void LocalHub::make_memory(const LocalLayout& layout, Time now) {
  try {
    memory_ = SharedMemory::create(layout.bytes());
    view_ = LocalView(layout, memory_->base());
    hub_.give_memory(view_, now);
  } catch (const Error& e) {
    hub_.fail(aggregation::Code::kNoMemory, {}, e.what(), now);
  }
}

void LocalHub::tell_ranks() {
  for (const Hub::Outgoing& o : hub_.take_messages()) {
    const auto c = connections_.find(connection_of_[o.seat]);
    if (c != connections_.end())
      c->second.socket.send(o.message, o.message.kind == Kind::kStart ? memory_->file() : -1);
  }
  if (!hub_.take_published()) return;
  LocalMessage doorbell;
  doorbell.kind = Kind::kDoorbell;
  for (uint32_t seat = 0; seat < connection_of_.size(); seat++) {
    const auto c = connections_.find(connection_of_[seat]);
    if (c != connections_.end() && view_.rank(seat).sleeping.exchange(0) != 0)
      c->second.socket.send(doorbell);
  }
}

bool LocalHub::prepare_to_wait(std::vector<pollfd>& descriptors) {
  if (view_) view_.hub().sleeping.publish(1);
  if (hub_.behind()) return false;
  descriptors.push_back({epoll_.get(), POLLIN, 0});
  return true;
}

}  // namespace millrace::host
