#include "host/communicator.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <random>

#include "aggregation/bfp.h"
#include "roce/error.h"

namespace millrace::host {

using aggregation::Code;
using aggregation::Collective;
using aggregation::SegmentHeader;

namespace {

mr_status status_of(Code code) {
  switch (code) {
    case Code::kMismatch:
      return MR_ERR_MISMATCH;
    case Code::kMemberLost:
      return MR_ERR_MEMBER_LOST;
    case Code::kLate:
    case Code::kJoinTimeout:
      return MR_ERR_LATE;
    case Code::kAborted:
      return MR_ERR_ABORTED;
    case Code::kShuttingDown:
      return MR_ERR_UNREACHABLE;
    case Code::kBreach:
      return MR_ERR_PROTOCOL;
    default:
      return MR_ERR_REFUSED;
  }
}

mr_status status_of(LinkError error) {
  switch (error) {
    case LinkError::kRefused:
      return MR_ERR_REFUSED;
    case LinkError::kBroken:
      return MR_ERR_PROTOCOL;
    default:
      return MR_ERR_UNREACHABLE;
  }
}

}  // namespace

void as_logical(aggregation::DataType type, const uint8_t* in, size_t count, uint8_t* out) {
  const auto as = [&](auto zero) {
    for (size_t i = 0; i < count; i++) {
      auto value = zero;
      std::memcpy(&value, in + i * sizeof value, sizeof value);
      value = value != zero;
      std::memcpy(out + i * sizeof value, &value, sizeof value);
    }
  };
  switch (aggregation::element_bytes(type)) {
    case 1:
      return as(uint8_t{});
    case 4:
      return as(uint32_t{});
    default:
      return as(uint64_t{});
  }
}

uint64_t Operation::send_bytes(uint16_t rank, uint16_t world) const {
  if (collective == Collective::kBroadcast && rank != root) return 0;
  return collective == Collective::kAllGather ? bytes / world : bytes;
}

uint64_t Operation::recv_bytes(uint16_t rank, uint16_t world) const {
  if (collective == Collective::kReduce && rank != root) return 0;
  return collective == Collective::kReduceScatter ? bytes / world : bytes;
}

struct Communicator::Impl {
  // A segment between its post and the end of both its SEND and its result.
  struct Segment {
    Operation* operation;
    uint8_t* result_at = nullptr;  // where a result goes that is not written there by the switch
    uint32_t result_bytes = 0;
    bool sent = false, result = false;
  };
  struct Stripe {
    LinkId link = 0;
    bool connected = false, started = false, closed = false, mtu_retried = false;
    uint64_t posted = 0;   // segments handed to the transport
    uint64_t results = 0;  // whose result has come, in order
    uint64_t base = 0;     // counter of segments.front()
    std::deque<Segment> segments;
    // For operations whose data takes another form: one segment to send and one result for each place in the
    // window. Made when the first comes.
    std::vector<uint8_t> staging;
    MemoryRegion staging_region;
  };
  // An operation that has left segments to post or to finish.
  struct Running {
    Operation* operation;
    uint64_t posted = 0, finished = 0;
    uint64_t unit = 0, per_unit = 1;  // segments do not straddle units of so many bytes
    MemoryRegion send, recv;
    std::array<MemoryRegion, 2> ours{};  // registered for this call
  };

  Impl(const CommunicatorConfig& c, Transport& t, Time now) : config(c), transport(t), started_at(now) {
    std::mt19937_64 random(c.nonce_seed);
    nonce = random();
    stripes.resize(c.stripes);
    for (uint8_t i = 0; i < c.stripes; i++) connect(i, c.mtu);
  }

  void connect(uint8_t stripe, uint32_t mtu) {
    ConnectRequest r;
    r.switch_address = config.switch_address;
    r.port = config.port;
    r.join.key = config.key;
    r.join.stripe = stripe;
    r.join.stripes = config.stripes;
    r.join.rank = config.rank;
    r.join.world = config.world;
    r.join.tenant = config.tenant;
    r.join.nonce = nonce;
    r.secret = config.secret;
    r.mtu = mtu;
    r.window = kWindowMax;
    r.connect_timeout = config.wait ? config.join_timeout : config.connect_timeout;
    r.join.wait = config.wait;
    stripes[stripe].link = transport.connect(r);
  }

  void handle(const Completion& c, Time now);
  void message(Stripe& stripe, const std::vector<uint8_t>& bytes, Time now);
  void link_error(Stripe& stripe, const Completion& c, Time now);
  void result(Stripe& stripe, uint32_t immediate, Time now);
  void finish_front(Stripe& stripe);
  void fail(mr_status s, const std::string& why, Time now);
  void register_buffers(Running& r);
  void release_buffers(const Running& r);
  void end_operations();
  void post(Time now);
  void cut(Running& r) const;
  bool post_next(Running& r, Stripe& stripe);
  void make_staging(Stripe& stripe);
  uint32_t segment_elements(const Operation& op) const;
  Stripe* find(LinkId link) {
    for (Stripe& s : stripes)
      if (s.link == link && !s.closed) return &s;
    return nullptr;
  }

  CommunicatorConfig config;
  Transport& transport;
  Time started_at;
  uint64_t nonce;
  State state = State::kJoining;
  bool closing = false;  // failing or leaving: waits for all links to be closed
  mr_status status = MR_IN_PROGRESS;
  std::string text;
  std::vector<Stripe> stripes;
  std::optional<aggregation::Start> start;
  uint64_t next_segment = 0;  // of the group
  uint64_t next_operation = 0;
  std::deque<Running> running;  // in order; those wholly posted come first
  size_t posting = 0;           // index in running of the first with segments left to post
};

void Communicator::Impl::handle(const Completion& c, Time now) {
  Stripe* stripe = find(c.link);
  if (stripe == nullptr) return;
  switch (c.kind) {
    case Completion::Kind::kConnected:
      stripe->connected = true;
      break;
    case Completion::Kind::kMessage:
      message(*stripe, c.message, now);
      break;
    case Completion::Kind::kResult:
      result(*stripe, c.immediate, now);
      break;
    case Completion::Kind::kSent:
      if (closing || c.segment < stripe->base || c.segment - stripe->base >= stripe->segments.size()) break;
      stripe->segments[c.segment - stripe->base].sent = true;
      finish_front(*stripe);
      break;
    case Completion::Kind::kMessageSent:
      break;
    case Completion::Kind::kError:
      link_error(*stripe, c, now);
      break;
    case Completion::Kind::kClosed:
      stripe->closed = true;
      break;
  }
  if (closing && std::all_of(stripes.begin(), stripes.end(), [](const Stripe& s) { return s.closed; })) {
    end_operations();
    state = state == State::kClosed || status == MR_OK ? State::kClosed : State::kFailed;
  }
}

void Communicator::Impl::link_error(Stripe& stripe, const Completion& c, Time now) {
  if (c.error == LinkError::kRefused && c.code == Code::kMtu && c.mtu_wanted >= 1 && c.mtu_wanted <= 5 &&
      !stripe.mtu_retried && !closing) {
    const uint32_t wanted = 128u << c.mtu_wanted;
    if (wanted <= config.mtu) {
      stripe.mtu_retried = true;
      connect(static_cast<uint8_t>(&stripe - stripes.data()), wanted);
      return;
    }
    stripe.closed = true;
    fail(MR_ERR_REFUSED,
         c.text + ", this host's interface carries at most " + std::to_string(config.mtu) +
             ": raise its MTU, or lower the switch's",
         now);
    return;
  }
  stripe.closed = true;
  // A refusal may come of the group's end while it was joined: then its code says why, as a terminal message
  // does.
  const bool code = c.error == LinkError::kRefused && c.code != Code{};
  fail(code ? c.code == Code::kShuttingDown || c.code == Code::kBreach ? MR_ERR_REFUSED : status_of(c.code)
            : status_of(c.error),
       c.text, now);
}

void Communicator::Impl::message(Stripe& stripe, const std::vector<uint8_t>& bytes, Time now) {
  const aggregation::ControlMessage m = aggregation::decode_control_message(bytes);
  if (m.terminal) {
    fail(status_of(m.terminal->code), m.terminal->text, now);
    return;
  }
  if (!m.start || stripe.started || m.start->segment_bytes == 0 || m.start->window == 0 ||
      m.start->world != config.world || m.start->weights.size() != stripes.size() ||
      (start && (m.start->segment_bytes != start->segment_bytes || m.start->group != start->group))) {
    fail(MR_ERR_PROTOCOL, "the switch sent a message that makes no sense", now);
    return;
  }
  stripe.started = true;
  start = m.start;
  start->window = std::min(start->window, kWindowMax);  // what our queues have room for
  if (state == State::kJoining && !closing &&
      std::all_of(stripes.begin(), stripes.end(), [](const Stripe& s) { return s.started; })) {
    state = State::kRunning;
    status = MR_OK;
  }
}

void Communicator::Impl::result(Stripe& stripe, uint32_t immediate, Time now) {
  if (closing) return;
  const uint64_t counter = stripe.results;
  if (counter >= stripe.posted || immediate != aggregation::result_immediate(counter)) {
    fail(MR_ERR_PROTOCOL,
         "a result came out of order (immediate " + std::to_string(immediate) + ", expected " +
             std::to_string(counter & 0xFFFFFF) + ")",
         now);
    return;
  }
  stripe.results++;
  stripe.segments[counter - stripe.base].result = true;
  finish_front(stripe);
}

// Both of a segment's ends have come: it counts for its operation.
void Communicator::Impl::finish_front(Stripe& stripe) {
  while (!stripe.segments.empty() && stripe.segments.front().sent && stripe.segments.front().result) {
    const Segment& done = stripe.segments.front();
    Operation* op = done.operation;
    if (done.result_at != nullptr)
      aggregation::bfp8_decode(
          op->type, stripe.staging.data() + (stripe.base % start->window * 2 + 1) * start->segment_bytes,
          done.result_bytes / aggregation::element_bytes(op->type), done.result_at);
    stripe.segments.pop_front();
    stripe.base++;
    const auto r =
        std::find_if(running.begin(), running.end(), [&](const Running& x) { return x.operation == op; });
    if (++r->finished < op->segments) continue;
    release_buffers(*r);
    op->status = MR_OK;
    op->done = true;
    running.erase(r);
    posting--;
  }
}

// Throws millrace::Error.
void Communicator::Impl::register_buffers(Running& r) {
  const Operation& op = *r.operation;
  // What is staged neither leaves from the caller's memory nor, in another wire form, arrives there.
  const uint64_t send = op.staged() ? 0 : op.send_bytes(config.rank, config.world);
  const uint64_t recv = op.bfp ? 0 : op.recv_bytes(config.rank, config.world);
  auto region = [&](const std::optional<MemoryRegion>& given, const void* at, uint64_t bytes, Access access,
                    MemoryRegion& our) {
    if (bytes == 0) return MemoryRegion{};
    return given ? *given : our = transport.register_memory(at, bytes, access);
  };
  // In place one of the two lies within the other, which is then registered for both.
  const bool within_send = recv != 0 && op.recv >= op.send && op.recv + recv <= op.send + send;
  const bool within_recv = send != 0 && op.send >= op.recv && op.send + send <= op.recv + recv;
  if (within_send) {
    r.send = r.recv = region(op.send_region, op.send, send, Access::kResult, r.ours[0]);
  } else if (within_recv) {
    r.send = r.recv = region(op.recv_region, op.recv, recv, Access::kResult, r.ours[0]);
  } else {
    r.recv = region(op.recv_region, op.recv, recv, Access::kResult, r.ours[0]);
    r.send = region(op.send_region, op.send, send, Access::kSend, r.ours[1]);
  }
}

void Communicator::Impl::release_buffers(const Running& r) {
  for (const MemoryRegion& region : r.ours)
    if (region.id != 0) transport.deregister_memory(region);
}

void Communicator::Impl::end_operations() {
  for (Running& r : running) {
    release_buffers(r);
    r.operation->status = status == MR_OK ? MR_ERR_ABORTED : status;
    r.operation->text =
        status == MR_OK ? "the communicator was destroyed before the operation was over" : text;
    r.operation->done = true;
  }
  running.clear();
  posting = 0;
}

// The queue pairs first: nothing may be written to the callers' memory once they have their error.
void Communicator::Impl::fail(mr_status s, const std::string& why, Time) {
  if (closing) return;
  closing = true;
  status = s;
  text = why;
  for (Stripe& stripe : stripes)
    if (!stripe.closed) transport.close(stripe.link);
}

// Elements of a segment: as many as fit in their wire form.
uint32_t Communicator::Impl::segment_elements(const Operation& op) const {
  const auto element = static_cast<uint32_t>(aggregation::element_bytes(op.type));
  return !op.bfp ? start->segment_bytes / element
                 : static_cast<uint32_t>(start->segment_bytes / aggregation::kBfp8BlockBytes *
                                         aggregation::kBfp8BlockElements);
}

void Communicator::Impl::cut(Running& r) const {
  Operation& op = *r.operation;
  const bool by_shard =
      op.collective == Collective::kAllGather || (op.collective == Collective::kReduceScatter && op.bfp);
  r.unit = by_shard ? op.bytes / config.world : op.bytes;
  const uint64_t segment = uint64_t{segment_elements(op)} * aggregation::element_bytes(op.type);
  r.per_unit = std::max<uint64_t>(1, (r.unit + segment - 1) / segment);
  op.segments = r.per_unit * (by_shard && op.bytes != 0 ? config.world : 1);
}

void Communicator::Impl::make_staging(Stripe& stripe) {
  if (!stripe.staging.empty()) return;
  stripe.staging.resize(size_t{2} * start->window * start->segment_bytes);
  stripe.staging_region =
      transport.register_memory(stripe.staging.data(), stripe.staging.size(), Access::kResult);
}

// Hands an operation's next segment to the transport; false: it takes none now. Throws millrace::Error.
bool Communicator::Impl::post_next(Running& r, Stripe& stripe) {
  Operation& op = *r.operation;
  const uint64_t segment = uint64_t{segment_elements(op)} * aggregation::element_bytes(op.type);
  aggregation::SegmentShape s;
  s.collective = op.collective;
  s.type = op.type, s.wire = op.wire();
  s.world = config.world, s.root = op.root;
  s.total = op.bytes;
  const uint64_t in_unit = r.posted % r.per_unit * segment;
  s.offset = r.posted / r.per_unit * r.unit + in_unit;
  s.length = static_cast<uint32_t>(std::min(segment, r.unit - in_unit));
  s.payload = static_cast<uint32_t>(aggregation::wire_bytes(op.type, op.wire(), s.length));
  const bool contributes = s.contributes(config.rank);
  const auto mine = s.receives(config.rank);
  // Where this segment begins in the caller's memory.
  const uint8_t* from = nullptr;
  if (contributes)
    from =
        op.send + (op.collective == Collective::kAllGather ? s.offset - config.rank * s.shard() : s.offset);
  uint8_t* to = nullptr;
  if (op.collective == Collective::kReduceScatter && mine.bytes() != 0)
    to = op.recv + (s.offset + (!op.bfp ? mine.begin : 0) - config.rank * s.shard());
  else if (mine.bytes() != 0)
    to = op.recv + s.offset;

  Segment record{&op};
  MemoryRegion source = r.send;
  uint64_t address = reinterpret_cast<uintptr_t>(to);
  uint32_t rkey = r.recv.rkey;
  const uint8_t* payload = from;
  if (op.staged()) {
    // A place is free once both ends of the segment that had it have come.
    if (stripe.segments.size() >= start->window) return false;
    make_staging(stripe);
    uint8_t* place = stripe.staging.data() + stripe.posted % start->window * 2 * start->segment_bytes;
    payload = place;
    source = stripe.staging_region;
    const size_t elements = s.length / aggregation::element_bytes(op.type);
    if (op.logical)
      as_logical(op.type, from, elements, place);
    else
      aggregation::bfp8_encode(op.type, from, elements, place);
    if (!op.logical && mine.bytes() != 0) {
      record.result_at = to;
      record.result_bytes = s.length;
      address = reinterpret_cast<uintptr_t>(place + start->segment_bytes);
      rkey = stripe.staging_region.rkey;
    }
  }

  SegmentHeader h;
  h.magic = aggregation::kMagic;
  h.version = aggregation::kProtocolVersion;
  h.collective = static_cast<uint8_t>(op.collective);
  h.op = static_cast<uint8_t>(op.op);
  h.type = static_cast<uint8_t>(op.type);
  h.wire_type = static_cast<uint8_t>(op.wire());
  h.flags = static_cast<uint8_t>((s.offset + s.length == op.bytes ? aggregation::kFlagLast : 0) |
                                 (contributes ? 0 : aggregation::kFlagHeaderOnly) |
                                 (op.deterministic ? aggregation::kFlagDeterministic : 0));
  h.group = start->group;
  h.rank = config.rank;
  h.root = op.root;
  h.operation = op.sequence;
  h.total = op.bytes;
  h.offset = s.offset;
  h.length = s.length;
  h.payload_bytes = contributes ? s.payload : 0;
  h.result_address = mine.bytes() ? address : 0;
  h.result_rkey = mine.bytes() ? rkey : 0;
  if (!transport.post_segment(stripe.link, stripe.posted, h, {payload, h.payload_bytes.value()}, source))
    return false;
  // What nobody sends to its owner: a broadcast's root's and an all-gather's own part.
  if (contributes && !aggregation::reduces(op.collective) && op.recv + s.offset != from)
    std::memcpy(op.recv + s.offset, from, s.length);
  stripe.segments.push_back(record);
  return true;
}

void Communicator::Impl::post(Time now) {
  while (posting < running.size()) {
    Running& r = running[posting];
    Stripe& stripe = stripes[next_segment % stripes.size()];
    if (stripe.posted - stripe.results >= start->window) return;
    try {
      if (!post_next(r, stripe)) return;
    } catch (const Error& e) {
      return fail(MR_ERR_SYSTEM, e.what(), now);
    }
    stripe.posted++;
    next_segment++;
    if (++r.posted == r.operation->segments) posting++;
  }
}

Communicator::Communicator(const CommunicatorConfig& config, Transport& transport, Time now)
    : impl_(std::make_unique<Impl>(config, transport, now)) {}
Communicator::~Communicator() {
  for (const Impl::Stripe& s : impl_->stripes)
    if (s.staging_region.id != 0) impl_->transport.deregister_memory(s.staging_region);
}

Communicator::State Communicator::state() const { return impl_->state; }
mr_status Communicator::status() const {
  return impl_->closing && impl_->state != State::kFailed && impl_->state != State::kClosed ? MR_IN_PROGRESS
                                                                                            : impl_->status;
}
const std::string& Communicator::text() const { return impl_->text; }
bool Communicator::owns(LinkId link) const { return impl_->find(link) != nullptr; }
void Communicator::handle(const Completion& c, Time now) { impl_->handle(c, now); }

void Communicator::submit(Operation* op, Time now) {
  Impl& m = *impl_;
  if (m.closing || m.state == State::kFailed || m.state == State::kClosed) {
    op->status = m.status == MR_OK ? MR_ERR_ABORTED : m.status;
    op->text = m.text;
    op->done = true;
    return;
  }
  op->sequence = m.next_operation++;
  op->segments = 0;  // known once START has told the segment size; see poll()
  m.running.push_back({op});
  try {
    m.register_buffers(m.running.back());
  } catch (const Error& e) {
    // The others wait for this rank's part, which will not come.
    m.fail(MR_ERR_SYSTEM, e.what(), now);
  }
}

void Communicator::poll(Time now) {
  Impl& m = *impl_;
  if (m.state == State::kJoining && !m.closing && now - m.started_at >= m.config.join_timeout)
    m.fail(
        MR_ERR_LATE,
        "the other ranks did not join within " +
            std::to_string(std::chrono::duration_cast<std::chrono::seconds>(m.config.join_timeout).count()) +
            " s",
        now);
  if (m.state != State::kRunning || m.closing) return;
  for (size_t i = m.posting; i < m.running.size(); i++)
    if (m.running[i].operation->segments == 0) m.cut(m.running[i]);
  m.post(now);
}

Time Communicator::next_deadline() const {
  return impl_->state == State::kJoining && !impl_->closing ? impl_->started_at + impl_->config.join_timeout
                                                            : kNever;
}

void Communicator::abort(const std::string& why, Time now) { impl_->fail(MR_ERR_ABORTED, why, now); }

void Communicator::close(Time now) {
  Impl& m = *impl_;
  if (m.closing) return;
  const mr_status before = m.status;
  m.fail(m.status, m.text, now);
  if (before == MR_IN_PROGRESS) m.status = MR_OK;
}

const std::optional<aggregation::Start>& Communicator::start() const { return impl_->start; }

LinkStats Communicator::stats() const {
  LinkStats total;
  for (const Impl::Stripe& s : impl_->stripes) total += impl_->transport.stats(s.link);
  return total;
}

}  // namespace millrace::host
