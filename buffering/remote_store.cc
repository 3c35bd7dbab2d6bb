#include <utility>

#include "buffering/remote_store_impl.h"
#include "roce/error.h"

namespace millrace::buffering {

using namespace lent;

namespace {

roce::CmConfig cm_config(const RemoteStoreConfig& c) {
  roce::CmConfig cm;
  cm.ca_guid = c.ca_guid + 1;  // the engine's agent has the other
  cm.seed = c.seed ^ 0x5350494C;
  cm.retries = 100000;  // connect_timeout ends an attempt
  return cm;
}

}  // namespace

RemoteStore::Impl::Impl(const RemoteStoreConfig& c, FramePool& p)
    : config(c),
      pool(p),
      cm(cm_config(c), p),
      random(c.seed),
      entries(c.ids),
      heads(c.slot_bytes > c.mtu ? c.ids : 0) {
  const auto bad = [](const std::string& what) { throw Error(ErrorCode::kConfig, what); };
  if (c.lenders.empty() || c.lenders.size() > kLendersMax)
    bad("a remote store needs between 1 and " + std::to_string(kLendersMax) + " lenders");
  if (roce::mtu_code(c.mtu) == 0) bad("a lender's path MTU is one of 256, 512, 1024, 2048 and 4096");
  if (c.slot_bytes == 0 || c.slot_bytes > UINT16_MAX || c.writes_max == 0 || c.reads_max == 0 ||
      c.reads_max > UINT8_MAX || c.again_min <= Time{} || c.again_max < c.again_min)
    bad("a remote store needs slots of 1 to 65535 bytes, 1 or more WRITEs, 1 to 255 READs and a time between "
        "attempts");
  for (const LenderConfig& lc : c.lenders) {
    if (std::none_of(c.addresses.begin(), c.addresses.end(),
                     [&](const IpAddress& a) { return a.is_v4() == lc.address.is_v4(); }))
      bad("the switch has no address of the family of the lender " + lc.address.to_string());
    auto l = std::make_unique<Lender>();
    l->config = lc;
    l->backoff = c.again_min;
    lenders.push_back(std::move(l));
  }
  next_qpn = static_cast<uint32_t>(random()) & 0xFFFF;
}

RemoteStore::Impl::~Impl() {
  for (uint32_t id = events.first; id != kNone; id = entries[id].after)
    if (entries[id].frame != nullptr) Frame dropped(entries[id].frame);
  for (const auto& l : lenders)
    for (uint32_t id = l->reading.first; id != kNone; id = entries[id].after)
      if (entries[id].frame != nullptr) Frame dropped(entries[id].frame);
}

// --- what is where ----------------------------------------------------------------------------------

void RemoteStore::Impl::push(List& list, uint32_t id) {
  Entry& e = entries[id];
  e.before = list.last;
  e.after = kNone;
  (list.last == kNone ? list.first : entries[list.last].after) = id;
  list.last = id;
}

void RemoteStore::Impl::unlink(List& list, uint32_t id) {
  const Entry& e = entries[id];
  (e.before == kNone ? list.first : entries[e.before].after) = e.after;
  (e.after == kNone ? list.last : entries[e.after].before) = e.before;
}

List& RemoteStore::Impl::list_of(const Entry& e) {
  Lender& l = *lenders[e.lender];
  switch (e.where) {
    case Where::kHeld:
      return l.held;
    case Where::kAsked:
      return l.asked;
    case Where::kReading:
      return l.reading;
    default:
      return events;
  }
}

void RemoteStore::Impl::move(uint32_t id, Where where) {
  Entry& e = entries[id];
  unlink(list_of(e), id);
  e.where = where;
  push(list_of(e), id);
}

void RemoteStore::Impl::let_go(uint32_t id) {
  Entry& e = entries[id];
  unlink(list_of(e), id);
  e.where = Where::kFree;
  e.frame = nullptr;
}

// Behind the packet `behind` of the slot; kNone: it is the first.
void RemoteStore::Impl::enter_slot(Lender& l, uint32_t id, uint32_t slot, uint32_t behind, uint32_t offset,
                                   uint32_t bytes) {
  Entry& e = entries[id];
  e.slot = slot;
  e.mate = kNone;
  e.frame = nullptr;
  e.length = static_cast<uint16_t>(bytes);
  e.offset = static_cast<uint16_t>(offset);
  e.lender = static_cast<uint8_t>(
      std::find_if(lenders.begin(), lenders.end(), [&](auto& x) { return x.get() == &l; }) - lenders.begin());
  e.where = Where::kHeld;
  push(l.held, id);
  (behind == kNone ? (*l.slots)[slot].first : entries[behind].mate) = id;
  (*l.slots)[slot].packets++;
  l.packets++;
  l.counts.written++;
}

// The slot is free with its last packet, also if a READ or WRITE of it is still under way: what comes after
// it on the connection comes after it in the lender's memory.
void RemoteStore::Impl::leave_slot(Lender& l, uint32_t id) {
  const Entry& e = entries[id];
  Slots::Slot& s = (*l.slots)[e.slot];
  uint32_t before = kNone;
  for (uint32_t n = s.first; n != id; n = entries[n].mate) before = n;
  (before == kNone ? s.first : entries[before].mate) = e.mate;
  if (e.slot == l.open && id == l.open_last) l.open_last = before;
  l.packets--;
  if (--s.packets == 0 && e.slot != l.open) l.slots->give(e.slot);
}

// --- packets ----------------------------------------------------------------------------------------

// The one with the most room, among those whose queue has some: READs, a probe and what is gathered keep
// theirs.
RemoteStore::Impl::Lender* RemoteStore::Impl::choose(uint32_t bytes) {
  Lender* best = nullptr;
  if (bytes == 0 || bytes > config.slot_bytes) return nullptr;
  for (auto& l : lenders) {
    if (l->state != State::kConnected || l->slots_free() == 0) continue;
    if (l->qp->requester().room() <= config.reads_max + 2) continue;
    if (best == nullptr || l->slots_free() > best->slots_free()) best = l.get();
  }
  return best;
}

// One whose open slot has room.
RemoteStore::Impl::Lender* RemoteStore::Impl::choose_open(uint32_t bytes) {
  for (auto& l : lenders) {
    if (l->open == kNone) continue;
    const FrameBuffer* b = l->gathered.buffer();
    if (b->length + bytes <= l->open_room && b->offset + b->length + bytes <= b->room_bytes) return l.get();
  }
  return nullptr;
}

// Small packets are gathered until the end of the worker's turn, as many as one packet to the lender takes.
bool RemoteStore::Impl::write(uint32_t id, Frame& frame) {
  assert(entries[id].where == Where::kFree);
  FrameBuffer* b = frame.buffer();
  own_payload(b);
  assert(b->shared == nullptr);
  const bool small = b->length != 0 && b->length <= shared_bytes() / 2;
  if (Lender* l = small ? choose_open(b->length) : nullptr) {
    FrameBuffer* all = l->gathered.buffer();
    std::memcpy(all->data() + all->length, b->data(), b->length);
    enter_slot(*l, id, l->open, l->open_last, all->length, b->length);
    l->open_last = id;
    all->length += b->length;
    frame = Frame();
    return true;
  }
  Lender* l = choose(b->length);
  if (l == nullptr) return false;
  work = true;
  if (small) close(*l);
  const uint32_t slot = l->slots->take();
  enter_slot(*l, id, slot, kNone, 0, b->length);
  if (small) {
    l->open = slot;
    l->open_last = id;
    l->open_room = shared_bytes() - shared_head_max() + std::min(shared_head_max(), b->length);
    l->gathered = std::move(frame);
    return true;
  }
  const uint32_t head = head_bytes(b->length);
  if (head != 0) std::memcpy(heads[id].data(), b->data(), head);
  post_write(*l, slot, std::move(frame), head);
  return true;
}

void RemoteStore::Impl::post_write(Lender& l, uint32_t slot, Frame frame, uint32_t head) {
  roce::WorkRequest r;
  r.kind = roce::WorkRequest::Kind::kWrite;
  r.id = l.tail;
  r.parts[0] = frame.bytes().subspan(head);
  r.remote_address = address_of(l, slot) + head;
  r.rkey = l.rkey;
  (*l.slots)[slot].head = head;
  const auto bytes = static_cast<uint32_t>(r.bytes());
  const bool posted = l.qp->requester().post(std::move(r));
  assert(posted);
  (void)posted;
  l.at(l.tail++) = {slot, bytes, 0, false, std::move(frame)};
  l.counts.bytes_written += bytes;
  work = true;
}

// What was gathered is written.
void RemoteStore::Impl::close(Lender& l) {
  if (l.open == kNone) return;
  const uint32_t slot = std::exchange(l.open, kNone);
  Frame gathered = std::move(l.gathered);
  const uint32_t first = (*l.slots)[slot].first;
  if (first == kNone) return l.slots->give(slot);  // all given up meanwhile
  const FrameBuffer* b = gathered.buffer();
  const uint32_t head = head_bytes(b->length);
  if (head != 0 && entries[first].offset == 0) std::memcpy(heads[first].data(), b->data(), head);
  post_write(l, slot, std::move(gathered), head);
}

// Begins READs of what was asked for, as far as the lender takes them.
void RemoteStore::Impl::pump(Lender& l) {
  while (l.asked.first != kNone && l.reads < l.depth && l.qp->requester().room() > 2) {
    const uint32_t slot = entries[l.asked.first].slot;
    assert(slot != l.open);  // poll() has closed it
    if (!ask(l, slot)) return;
  }
}

// One READ for all that was asked for of a slot, and what lies between. Each packet gets its frame now, so
// that none is missing when the bytes are there.
bool RemoteStore::Impl::ask(Lender& l, uint32_t slot) {
  Frame frame = Frame::allocate(pool);
  if (!frame) {
    starved = true;
    return false;
  }
  FrameBuffer* b = frame.buffer();
  uint32_t first = kNone, end = 0;
  for (uint32_t id = (*l.slots)[slot].first; id != kNone; id = entries[id].mate) {
    Entry& e = entries[id];
    if (e.where != Where::kAsked) continue;
    if (first == kNone) {
      first = id;
    } else {
      Frame own = Frame::allocate(pool);
      if (!own) break;  // in another READ
      e.frame = own.release();
    }
    e.request = static_cast<uint32_t>(l.tail);
    end = e.offset + uint32_t{e.length};
    move(id, Where::kReading);
  }
  const uint32_t start = entries[first].offset, head = start == 0 ? (*l.slots)[slot].head : 0;
  assert(b->offset + end - start <= b->room_bytes);
  b->length = end - start;
  if (head != 0) std::memcpy(b->data(), heads[first].data(), head);
  roce::WorkRequest r;
  r.kind = roce::WorkRequest::Kind::kRead;
  r.id = l.tail;
  r.into = frame.bytes().subspan(head);
  r.remote_address = address_of(l, slot) + start + head;
  r.rkey = l.rkey;
  const auto bytes = static_cast<uint32_t>(r.bytes());
  const bool posted = l.qp->requester().post(std::move(r));
  assert(posted);
  (void)posted;
  l.at(l.tail++) = {slot, bytes, start, true, std::move(frame)};
  l.reads++;
  work = true;
  return true;
}

void RemoteStore::Impl::complete(Lender& l) {
  for (uint64_t n; l.qp->requester().next_completion(n);) {
    if (n == roce::kProbeId) continue;
    assert(n == l.head);
    Request done = std::move(l.at(l.head++));
    if (!done.read) continue;
    l.reads--;
    l.counts.bytes_read += done.bytes;
    bring(l, static_cast<uint32_t>(n), done);
  }
}

// What a READ has brought, without what was discarded meanwhile.
void RemoteStore::Impl::bring(Lender& l, uint32_t request, Request& done) {
  const uint8_t* bytes = done.frame.buffer()->data();
  uint32_t owner = kNone;
  for (uint32_t id = (*l.slots)[done.slot].first, next; id != kNone; id = next) {
    Entry& e = entries[id];
    next = e.mate;
    if (e.where != Where::kReading || e.request != request) continue;
    if (e.frame == nullptr) {
      owner = id;
    } else {
      e.frame->length = e.length;
      std::memcpy(e.frame->data(), bytes + (e.offset - done.start), e.length);
    }
    l.counts.read++;
    leave_slot(l, id);
    move(id, Where::kEvent);
  }
  if (owner == kNone) return;
  done.frame.buffer()->length = entries[owner].length;
  entries[owner].frame = done.frame.release();
}

// --- the store --------------------------------------------------------------------------------------

RemoteStore::RemoteStore(const RemoteStoreConfig& config, FramePool& pool)
    : impl_(std::make_unique<Impl>(config, pool)) {}
RemoteStore::~RemoteStore() = default;

bool RemoteStore::receive(const roce::Packet& p, Time now, FrameList& out) noexcept {
  Impl& a = *impl_;
  a.now = now;
  if (p.dest_qp() == kGsiQpn) {
    if (!a.cm.owns(p)) return false;
    a.cm.receive(p, now, out);
    a.handle_events(now, out);
    return true;
  }
  if (p.dest_qp().value < kFirstQpn) return false;
  for (auto& l : a.lenders) {
    if (l->state != LenderStatus::State::kConnected || l->qpn != p.dest_qp()) continue;
    a.work = true;
    switch (l->qp->receive(p, now)) {
      case roce::Reception::kResponse:
        if (p.ecn_ce()) l->qp->send_cnp(a.pool, now, out);
        a.complete(*l);
        if (l->qp->requester().failed())
          a.part(*l,
                 l->who() + " refused access to what it lends (syndrome " +
                     std::to_string(l->qp->requester().fail_syndrome()) + ")",
                 now, out);
        break;
      case roce::Reception::kNewRequest:
        a.handle_request(*l, p, now, out);
        break;
      case roce::Reception::kInvalid:
        l->qp->emit(a.pool, a.combine, 0, now, out);
        a.part(*l, l->who() + " broke the transport's rules", now, out);
        break;
      default:
        break;
    }
    break;
  }
  return true;
}

bool RemoteStore::write(uint32_t id, Frame& frame, Time) noexcept { return impl_->write(id, frame); }

void RemoteStore::read(uint32_t id, Time) noexcept {
  const Entry& e = impl_->entries[id];
  if (e.where != Where::kHeld) return;  // lost: its event is waiting
  impl_->move(id, Where::kAsked);
  impl_->work = true;  // poll() begins it, together with what else is asked for until then
}

void RemoteStore::discard(uint32_t id) noexcept {
  Entry& e = impl_->entries[id];
  assert(e.where != Where::kFree);
  if (e.where != Where::kEvent) impl_->leave_slot(*impl_->lenders[e.lender], id);
  if (e.frame != nullptr) Frame dropped(e.frame);
  impl_->let_go(id);
}

bool RemoteStore::next_event(StoreEvent& event) noexcept {
  const uint32_t id = impl_->events.first;
  if (id == kNone) return false;
  Entry& e = impl_->entries[id];
  event.kind = e.frame != nullptr ? StoreEvent::Kind::kRead : StoreEvent::Kind::kLost;
  event.id = id;
  event.frame = Frame(e.frame);
  impl_->let_go(id);
  return true;
}

void RemoteStore::poll(Time now, FrameList& out) noexcept {
  Impl& a = *impl_;
  a.now = now;
  if (now >= a.cm.next_deadline()) a.cm.poll(now, out);
  a.handle_events(now, out);
  a.work = a.starved = false;
  for (auto& each : a.lenders) {
    Impl::Lender& l = *each;
    if (l.state == Impl::State::kWaiting && now >= l.again && !a.closing) a.connect(l, now, out);
    if (l.state == Impl::State::kConnecting && now - l.since >= a.config.connect_timeout)
      a.part(l, l.who() + " did not answer", now, out);
    if (l.state != Impl::State::kConnected) continue;
    if (now >= l.qp->next_deadline()) {
      l.qp->tick(now);
      if (l.qp->dead(now)) {
        a.part(l,
               l.who() + " has not acknowledged anything for " +
                   std::to_string(a.config.peer_dead / std::chrono::milliseconds(1)) + " ms",
               now, out);
        continue;
      }
    }
    a.close(l);
    a.pump(l);
    a.work |= l.qp->emit(a.pool, a.combine, kPacketsPerTurn, now, out);
  }
}

Time RemoteStore::next_deadline() const {
  const Impl& a = *impl_;
  if (a.work) return a.now;
  Time t = std::min(a.cm.next_deadline(), a.starved ? a.now + kStarvedFor : kNever);
  for (const auto& l : a.lenders) {
    if (l->state == Impl::State::kWaiting && !a.closing) t = std::min(t, l->again);
    if (l->state == Impl::State::kConnecting) t = std::min(t, l->since + a.config.connect_timeout);
    if (l->state == Impl::State::kConnected) t = std::min(t, l->qp->next_deadline());
  }
  return t;
}

uint64_t RemoteStore::size() const {
  uint64_t n = 0;
  for (const auto& l : impl_->lenders)
    n += (l->slots ? l->slots->count() : 0) * uint64_t{impl_->config.slot_bytes};
  return n;
}

uint64_t RemoteStore::used() const {
  uint64_t n = 0;
  for (const auto& l : impl_->lenders) n += l->slots_used() * impl_->config.slot_bytes;
  return n;
}

uint32_t RemoteStore::reads_max() const {
  uint32_t n = 0;
  for (const auto& l : impl_->lenders)
    if (l->state == Impl::State::kConnected) {
      const uint64_t slots = std::max<uint64_t>(l->slots_used(), 1);
      n += l->depth *
           static_cast<uint32_t>(std::clamp<uint64_t>((l->packets + slots - 1) / slots, 1, kReadPacketsMax));
    }
  return std::max(n, 1u);
}

void RemoteStore::shutdown(Time now, FrameList& out) noexcept {
  impl_->closing = true;
  for (auto& l : impl_->lenders) impl_->part(*l, "the switch ends", now, out);
}

bool RemoteStore::closing() const { return impl_->closing; }

bool RemoteStore::idle() const { return impl_->closing && impl_->cm.connections() == 0; }

size_t RemoteStore::lenders() const { return impl_->lenders.size(); }

LenderStatus RemoteStore::status(size_t lender) const {
  const Impl::Lender& l = *impl_->lenders[lender];
  LenderStatus s = l.counts;
  s.lender = l.config;
  s.state = l.state;
  s.bytes = (l.slots ? l.slots->count() : 0) * uint64_t{impl_->config.slot_bytes};
  s.used = l.slots_used() * impl_->config.slot_bytes;
  s.held = l.packets;
  if (l.qp) {
    const auto& c = l.qp->requester().counters();
    s.packets_sent += c.packets_sent;
    s.retransmitted += c.retransmitted;
    s.reads_again += c.reads_again;
  }
  return s;
}

const roce::CmCounters& RemoteStore::cm_counters() const { return impl_->cm.counters(); }

}  // namespace millrace::buffering
