#include "host/hub.h"

#include <algorithm>
#include <cassert>
#include <random>
#include <utility>

#include "host/hub_impl.h"
#include "roce/error.h"
#include "roce/headers.h"

namespace millrace::host {

using aggregation::Code;
using Kind = LocalMessage::Kind;

namespace {

// How long a terminal message may take on its way up before the links are closed all the same.
constexpr Time kEndingPatience = std::chrono::seconds(1);
// What a switch's are unless it is told otherwise.
constexpr uint16_t kOwnWindow = 4;
constexpr uint32_t kOwnSegmentBytes = 65472;

}  // namespace

Hub::Impl::Impl(const HubConfig& c, Transport& t, Time) : config(c), up(t) {
  std::mt19937_64 random(c.join.nonce_seed);
  nonce = random();
  stripes.resize(c.join.stripes);
  seat_of.resize(c.join.world, UINT32_MAX);
  for (uint8_t i = 0; i < c.join.stripes; i++) connect(i, c.join.mtu);
}

void Hub::Impl::connect(uint8_t stripe, uint32_t mtu) {
  const CommunicatorConfig& c = config.join;
  ConnectRequest r;
  r.switch_address = c.switch_address;
  r.port = c.port;
  r.join.child = true;
  r.join.key = c.key;
  r.join.stripe = stripe;
  r.join.stripes = c.stripes;
  r.join.world = c.world;
  r.join.tenant = c.tenant;
  r.join.nonce = nonce;
  r.secret = c.secret;
  r.mtu = mtu;
  r.window = kWindowMax;
  r.join.wait = c.wait;
  r.connect_timeout = c.wait ? c.join_timeout : c.connect_timeout;
  stripes[stripe].link = up.connect(r);
}

Hub::Impl::Stripe* Hub::Impl::find(LinkId link) {
  for (Stripe& s : stripes)
    if (s.link == link && !s.closed) return &s;
  return nullptr;
}

std::string Hub::Impl::describe(const Seat& seat) const {
  return "rank " + std::to_string(seat.rank) + " (process " + std::to_string(seat.process) + " on " +
         config.host_name + ")";
}

bool Hub::Impl::present() const {
  return std::any_of(seats.begin(), seats.end(), [](const Seat& s) { return s.present; });
}

void Hub::Impl::tell(uint32_t seat, LocalMessage m) {
  if (seats[seat].present) outgoing.push_back({seat, std::move(m)});
}

void Hub::Impl::tell_all(const LocalMessage& m) {
  for (uint32_t seat = 0; seat < seats.size(); seat++) tell(seat, m);
}

// --- the switch's side ---

void Hub::Impl::handle(const Completion& c, Time now) {
  Stripe* stripe = find(c.link);
  if (stripe == nullptr) return;
  if (root) {
    stripe->closed |= c.kind == Completion::Kind::kClosed || c.kind == Completion::Kind::kError;
    return settle();
  }
  switch (c.kind) {
    case Completion::Kind::kConnected:
      connected(*stripe, c);
      break;
    case Completion::Kind::kMessage:
      message(*stripe, c.message, now);
      break;
    case Completion::Kind::kResult:
      result(*stripe, c.immediate, now);
      break;
    case Completion::Kind::kSent:
      break;  // the result says as much
    case Completion::Kind::kMessageSent:
      if (state == State::kEnding) close();
      break;
    case Completion::Kind::kError:
      link_error(*stripe, c, now);
      break;
    case Completion::Kind::kClosed:
      stripe->closed = true;
      break;
  }
  settle();
}

void Hub::Impl::connected(Stripe& stripe, const Completion& c) {
  stripe.connected = true;
  if (index(stripe) == 0) reply = c.join_reply;
  if (!std::all_of(stripes.begin(), stripes.end(), [](const Stripe& s) { return s.connected; })) return;
  LocalMessage m;
  m.kind = Kind::kConnected;
  m.join_reply = *reply;
  tell_all(m);
}

void Hub::Impl::message(Stripe& stripe, const std::vector<uint8_t>& bytes, Time now) {
  if (state >= State::kEnding) return;
  const aggregation::ControlMessage m = aggregation::decode_control_message(bytes);
  if (m.terminal) {
    LocalMessage terminal;
    terminal.kind = Kind::kTerminal;
    terminal.bytes = bytes;
    tell_all(terminal);
    return close();
  }
  if (!m.start) return fail(Code::kBreach, {}, "the switch sent a message that makes no sense", now);
  start_bytes = bytes;
  take_start(stripe, *m.start, now);
}

void Hub::Impl::take_start(Stripe& stripe, const aggregation::Start& s, Time now) {
  if (state != State::kJoining || stripe.started || s.segment_bytes == 0 || s.window == 0 ||
      s.world != config.join.world || s.weights.size() != stripes.size() ||
      (start && (s.segment_bytes != start->segment_bytes || s.group != start->group)))
    return fail(Code::kBreach, {}, "the switch sent a message that makes no sense", now);
  stripe.started = true;
  start = s;
  start->window = std::min(start->window, kWindowMax);
  if (std::all_of(stripes.begin(), stripes.end(), [](const Stripe& x) { return x.started; }))
    state = State::kStarting;
}

// False: the transport does not take it, which has failed the group.
bool Hub::Impl::register_memory(Time now) {
  const LocalLayout& l = memory.layout();
  uint8_t* const posts = memory.results() + l.results_bytes();
  try {
    results_region = up.register_memory(memory.results(), l.results_bytes(), Access::kResult);
    contributions_region =
        up.register_memory(posts, static_cast<size_t>(memory.base() + l.bytes() - posts), Access::kSend);
    return true;
  } catch (const Error& e) {
    fail(Code::kNoMemory, {}, e.what(), now);
    return false;
  }
}

void Hub::Impl::run(const LocalView& given, Time now) {
  assert(state == State::kStarting);
  memory = given;
  subtrees = ranks.subtrees(config.join.world);
  for (Stripe& s : stripes) s.window.resize(start->window);
  if (!root && !register_memory(now)) return;
  state = State::kRunning;
  for (uint32_t seat = 0; seat < seats.size(); seat++) {
    LocalMessage m;
    m.kind = Kind::kStart;
    m.seat = seat;
    m.layout = memory.layout();
    m.bytes = start_bytes;
    tell(seat, m);
  }
}

void Hub::Impl::link_error(Stripe& stripe, const Completion& c, Time) {
  if (c.error == LinkError::kRefused && c.code == Code::kMtu && c.mtu_wanted >= 1 && c.mtu_wanted <= 5 &&
      128u << c.mtu_wanted <= config.join.mtu && !stripe.mtu_retried && state == State::kJoining) {
    stripe.mtu_retried = true;
    connect(index(stripe), 128u << c.mtu_wanted);
    return;
  }
  stripe.closed = true;
  if (state >= State::kEnding) return;
  LocalMessage m;
  m.kind = Kind::kLinkError;
  m.error = c.error;
  m.code = c.code;
  m.text = c.text;
  if (c.error == LinkError::kRefused && c.code == Code{})
    m.text += " It may be one that is older than the combining of ranks on a host: join without it.";
  if (c.error == LinkError::kRefused && c.code == Code::kMtu)
    m.text += ", this host's interface carries at most " + std::to_string(config.join.mtu) +
              ": raise its MTU, or lower the switch's";
  tell_all(m);
  close();
}

// A group's root is the lowest place where all its ranks are together: here, and the switch is not needed.
void Hub::Impl::become_root() {
  root = true;
  for (Stripe& s : stripes)
    if (!s.closed) up.close(s.link);
  aggregation::Start s;
  s.window = kOwnWindow;
  s.mtu_code = roce::mtu_code(config.join.mtu);
  s.segment_bytes = kOwnSegmentBytes;
  s.world = config.join.world;
  s.weights.assign(stripes.size(), 1);
  start = s;
  start_bytes = encode(s);
  state = State::kStarting;
}

// Tells the switch which ranks have come since it was told last.
void Hub::Impl::announce() {
  if (state == State::kJoining && ranks.size() == config.join.world) return become_root();
  if (state != State::kJoining || !stripes[0].connected || announced.size() == ranks.size()) return;
  aggregation::RankSet more;
  for (const Seat& s : seats)
    if (!announced.contains(s.rank)) more.insert(s.rank);
  aggregation::Members m;
  m.window = static_cast<uint16_t>(std::min<uint32_t>(kWindowMax, reply->window_limit));
  m.group = reply->group;
  m.segment_bytes = reply->segment_limit;
  m.ranks.assign(more.ranges().begin(),
                 more.ranges().begin() +
                     static_cast<ptrdiff_t>(std::min(more.ranges().size(), aggregation::kMembersRangesMax)));
  if (!up.post_message(stripes[0].link, encode(m))) return;
  for (const aggregation::RankRange& r : m.ranks)
    for (uint32_t i = 0; i < r.count; i++) announced.insert(static_cast<uint16_t>(r.first + i));
}

// --- ends ---

void Hub::Impl::fail(Code code, std::vector<uint16_t> failed, const std::string& text, Time now) {
  if (state >= State::kEnding) return;
  aggregation::Terminal t;
  t.code = code;
  t.group = start ? start->group : reply ? reply->group : 0;
  t.operation = operation;
  t.ranks = std::move(failed);
  t.text = text;
  LocalMessage m;
  m.kind = Kind::kTerminal;
  m.bytes = encode(t);
  tell_all(m);
  // Up as well, before the connections go.
  if (!root && stripes[0].connected && !stripes[0].closed && up.post_message(stripes[0].link, m.bytes)) {
    state = State::kEnding;
    close_at = now + kEndingPatience;
  } else {
    close();
  }
}

void Hub::Impl::close() {
  if (state >= State::kClosing) return;
  state = State::kClosing;
  close_at = kNever;
  for (Stripe& s : stripes)
    if (!s.closed && !root) up.close(s.link);
}

// Once all links are closed, the memory is nobody's but ours.
void Hub::Impl::settle() {
  if (state != State::kClosing ||
      !std::all_of(stripes.begin(), stripes.end(), [](const Stripe& s) { return s.closed; }))
    return;
  state = State::kClosed;
  for (MemoryRegion* r : {&results_region, &contributions_region, &wides[0].region, &wides[1].region})
    if (r->id != 0) up.deregister_memory(std::exchange(*r, MemoryRegion{}));
}

// A rank has left or died.
void Hub::Impl::gone(uint32_t seat, const std::string& how, bool goodbye, Time now) {
  Seat& s = seats[seat];
  if (!s.present) return;
  take_all(now);  // what it has posted before
  s.present = false;
  if (departed == UINT32_MAX) departed = seat;
  const bool in_progress = std::any_of(stripes.begin(), stripes.end(), [&](const Stripe& x) {
    if (x.window.empty()) return false;
    const Gather& g = x.window[x.posted % x.window.size()];
    return g.headers != 0 && g.headers != seats.size();
  });
  if (!goodbye)
    fail(Code::kMemberLost, {s.rank}, describe(s) + " " + how, now);
  else if (state == State::kDisagreeing)
    judge(now);
  else if (state < State::kRunning)
    fail(Code::kMemberLost, {s.rank}, describe(s) + " left before all ranks had joined", now);
  else if (in_progress)
    fail(Code::kMemberLost, {s.rank}, describe(s) + " left in the middle of an operation", now);
  if (!present() && state != State::kEnding) close();
  settle();
}

void Hub::Impl::tick(Time now) {
  if (state == State::kDisagreeing && now >= resolve_at) judge(now);
  if (now >= close_at) close();
  if (state == State::kRunning && now >= look_at) look_for_late(now);
  if (state == State::kRunning) probe_silent(now);
  settle();
}

// --- the public face ---

Hub::Hub(const HubConfig& config, Transport& up, Time now) : impl_(std::make_unique<Impl>(config, up, now)) {}
Hub::~Hub() {
  // Unless it is over, the transport is torn down too.
  for (Impl::Stripe& s : impl_->stripes)
    if (!s.closed && !impl_->root && impl_->state < Impl::State::kClosing) impl_->up.close(s.link);
}

std::optional<std::string> Hub::objection(const LocalHello& h) const {
  const CommunicatorConfig& c = impl_->config.join;
  if (h.version != LocalHello::kVersion)
    return "the ranks of this host use different versions of libmillrace: give them one";
  if (impl_->state != Impl::State::kJoining)
    return "the group of this host's other ranks has started, or ended, without this rank";
  if (h.key != c.key || h.tenant != c.tenant) return "another group's rank came to this host's hub";
  if (h.world != c.world || h.stripes != c.stripes)
    return "rank " + std::to_string(h.rank) + " says " + std::to_string(h.world) + " ranks and " +
           std::to_string(h.stripes) + " stripes, the group has " + std::to_string(c.world) + " and " +
           std::to_string(c.stripes);
  if (h.rank >= c.world)
    return "rank " + std::to_string(h.rank) + " of " + std::to_string(c.world) + " makes no sense";
  if (const uint32_t seat = impl_->seat_of[h.rank]; seat != UINT32_MAX)
    return "rank " + std::to_string(h.rank) + " is taken by process " +
           std::to_string(impl_->seats[seat].process) + " on this host";
  return std::nullopt;
}

uint32_t Hub::attach(const LocalHello& h, uint32_t process) {
  assert(!objection(h));
  const auto seat = static_cast<uint32_t>(impl_->seats.size());
  Impl::Seat s;
  s.rank = h.rank;
  s.process = process;
  impl_->seats.push_back(s);
  impl_->seat_of[h.rank] = seat;
  impl_->ranks.insert(h.rank);
  LocalMessage m;
  m.kind = Kind::kAccepted;
  m.rank = impl_->config.join.rank;
  impl_->tell(seat, m);
  if (std::all_of(impl_->stripes.begin(), impl_->stripes.end(), [](auto& x) { return x.connected; })) {
    m.kind = Kind::kConnected;
    m.join_reply = *impl_->reply;
    impl_->tell(seat, m);
  }
  impl_->announce();
  return seat;
}

void Hub::heard(uint32_t seat, Time now) { impl_->seats[seat].heard = now; }
void Hub::depart(uint32_t seat, Time now) { impl_->gone(seat, "", true, now); }
void Hub::lose(uint32_t seat, const std::string& how, Time now) { impl_->gone(seat, how, false, now); }
bool Hub::owns(LinkId link) const { return impl_->find(link) != nullptr; }
void Hub::handle(const Completion& c, Time now) { impl_->handle(c, now); }
void Hub::poll(Time now) { impl_->poll(now); }

Time Hub::next_deadline() const {
  const Impl& m = *impl_;
  return std::min({m.state == Impl::State::kDisagreeing ? m.resolve_at : kNever, m.close_at,
                   m.state == Impl::State::kRunning ? m.look_at : kNever});
}

std::optional<LocalLayout> Hub::wants_memory() const {
  if (impl_->state != Impl::State::kStarting) return std::nullopt;
  return LocalLayout{static_cast<uint32_t>(impl_->seats.size()), static_cast<uint32_t>(impl_->stripes.size()),
                     impl_->start->window, impl_->start->segment_bytes};
}
void Hub::give_memory(const LocalView& memory, Time now) { impl_->run(memory, now); }

void Hub::fail(Code code, std::vector<uint16_t> ranks, const std::string& text, Time now) {
  impl_->fail(code, std::move(ranks), text, now);
  impl_->settle();
}

void Hub::leave(Time) {
  if (std::exchange(impl_->has_left, true)) return;
  LocalMessage m;
  m.kind = Kind::kGoodbye;
  impl_->tell_all(m);
  for (Impl::Seat& s : impl_->seats) s.present = false;
  impl_->close();
  impl_->settle();
}

bool Hub::over() const { return impl_->state == Impl::State::kClosed && !impl_->present(); }
bool Hub::joining() const { return impl_->state == Impl::State::kJoining; }
std::vector<Hub::Outgoing> Hub::take_messages() { return std::exchange(impl_->outgoing, {}); }
bool Hub::take_published() { return std::exchange(impl_->published, false); }
uint32_t Hub::ranks() const { return impl_->ranks.size(); }

bool Hub::behind() const {
  if (!impl_->running()) return false;
  for (uint32_t seat = 0; seat < impl_->seats.size(); seat++)
    for (size_t i = 0; i < impl_->stripes.size(); i++)
      if (impl_->memory.rank(seat).counts[i].read() != impl_->seats[seat].taken[i]) return true;
  return false;
}

LinkStats Hub::stats() const {
  LinkStats total;
  for (const Impl::Stripe& s : impl_->stripes) total += impl_->up.stats(s.link);
  return total;
}

}  // namespace millrace::host
