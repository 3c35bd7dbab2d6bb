// The memory that servers lend: the spillway's remote store, one or two lenders of which one may be a fake
// that answers with whatever bytes the input has, a stranger who borrows too and asks for what is not his,
// and a wire that the input delivers from, drops, repeats and mutates. Oracles: the store's books (written =
// read + lost + discarded + held, room as what is held, each packet back once, and as it was written while
// nobody impersonates anybody); a lender answers only from what it lent to whom it answers, keeps to its
// memory and to its number of leases; and nothing is held, lent or connected once everybody is silent.
#include <map>
#include <memory>
#include <set>

#include "buffering/remote_store.h"
#include "tests/fuzz/lease_parts.h"

namespace millrace::fuzz {
namespace {

using namespace lease;
using namespace roce;
using buffering::LeaseReply;
using buffering::LeaseRequest;
using buffering::LenderStatus;
using buffering::RemoteStore;
using buffering::StoreEvent;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

class World {
 public:
  explicit World(Input& input) : in(input) {
    const uint8_t shape = in.byte(), more = in.byte();
    v6 = shape & 1;
    clean = more & 16;
    const size_t lenders_of_it = shape & 2 ? 2 : 1;
    for (size_t i = 0; i < lenders_of_it; i++)
      lenders.push_back(std::make_unique<Lender>(shape & 4 ? 2 : 1, i == 0 && (more & 7) == 7));
    mtu_max = more & 8 ? 4096 : 256;
    if (more & 32) mtu_max = 128;
    genuine = !lenders[0]->fake;
    pool = std::make_unique<HeapFramePool>(640, shape & 8 ? 40 : 512, true);
    buffering::RemoteStoreConfig c;
    c.mac = {{2, 0, 0, 0, 0, 1}};
    c.addresses = {address_of(kStore, false), address_of(kStore, true)};
    for (size_t i = 0; i < lenders.size(); i++) c.lenders.push_back({address_of(1 + i, v6)});
    c.ids = kIds, c.slot_bytes = kSlot, c.mtu = kMtu;
    c.reads_max = shape & 16 ? 1 : 4;
    c.writes_max = shape & 32 ? 2 : 8;
    static constexpr uint64_t kWanted[] = {0, 2 * kSlot, kSlot - 1, uint64_t{1} << 40};
    c.bytes_wanted = kWanted[shape >> 6];
    if (more & 64) c.first_psn = 0xFFFFFE;
    store = std::make_unique<RemoteStore>(c, *pool);
    for (auto& l : lenders) start(*l);
    CmConfig cm;
    cm.ca_guid = 0x77;
    stranger = std::make_unique<CmAgent>(cm, stranger_pool);
  }

  void step() {
    const uint8_t op = in.byte();
    const size_t more = op >> 4;
    switch (op & 15) {
      case 0:
        return write(more);
      case 1:
        return read(more);
      case 2:
        return discard(more);
      case 3:
        if (!wire.empty()) deliver(take(wire, 0));
        return;
      case 4:
        if (!wire.empty()) deliver(take(wire, in.below(wire.size())));
        return;
      case 5:
        if (!wire.empty()) take(wire, in.below(wire.size()));
        return;
      case 6:
        if (!history.empty()) deliver(Flight(history[in.below(history.size())]));
        return;
      case 7:
        return mutated(more & 1 ? history : wire);
      case 8:
        return pass_time(more);
      case 9:
        for (size_t rounds = 0; rounds <= more; rounds++) converse();
        return;
      case 10:
        return borrow(more);
      case 11:
        return ask(more);
      case 12:
        return forge(more);
      case 13:
        return power(more);
      case 14:
        return decode();
      case 15:
        if (more == 15) shut_down();
        return poll();
    }
  }

  void finish() {
    if (clean) end_well();
    silence();
    FrameList left;
    left.splice(out);
    left.clear();
    store.reset();
    FUZZ_CHECK(pool->in_use() == 0, "the store's frames are held by nobody");
    for (auto& l : lenders) {
      l->lender.reset(), l->agent.reset();
      FUZZ_CHECK(l->pool.in_use() == 0, "a lender's frames are held by nobody");
      for (size_t i = 0; i < kGuard; i++)
        FUZZ_CHECK(l->memory[i] == kGuardByte && l->memory[l->memory.size() - 1 - i] == kGuardByte,
                   "what is beside the lender's memory was written to");
    }
    stranger.reset();
    FUZZ_CHECK(stranger_pool.in_use() == 0);
  }

 private:
  // A lender's process begins, or begins anew: with nothing of what it had.
  void start(Lender& l) {
    l.lender.reset(), l.agent.reset();
    const uint64_t seed = 100 + 2 * ++births;
    if (l.fake) {
      CmConfig c;
      c.ca_guid = c.seed = seed;
      l.agent = std::make_unique<CmAgent>(c, l.pool);
      l.agent->listen(tcp_service_id(buffering::kLenderPort));
      return;
    }
    l.table = std::make_unique<host::LeaseTable>(l.lent(), l.parts);
    host::SoftLenderConfig c;
    c.address = address_of(1 + index_of(l), v6);
    c.mtu_max = mtu_max;
    c.ca_guid = c.seed = seed;
    l.lender = std::make_unique<host::SoftLender>(c, *l.table, l.pool);
  }
  size_t index_of(const Lender& l) const {
    return static_cast<size_t>(
        std::find_if(lenders.begin(), lenders.end(), [&](auto& x) { return x.get() == &l; }) -
        lenders.begin());
  }

  // --- the spillway's side ------------------------------------------------------------------------------

  void write(size_t more) {
    const uint32_t id = in.byte() % kIds;
    if (kept.contains(id)) return;
    Frame f = Frame::allocate(*pool);
    if (!f) return;
    const size_t bytes = more == 15 ? kSlot : more == 14 ? kMtu : more == 13 ? kSlot + 1 : 1 + more * 22;
    f.buffer()->length = static_cast<uint32_t>(bytes);
    serial++;
    for (size_t i = 0; i < bytes; i++) f.bytes()[i] = static_cast<uint8_t>(serial * 37 + i);
    Bytes copy(f.bytes().begin(), f.bytes().end());
    const uint64_t before = store->used();
    const bool taken = store->write(id, f, now);
    FUZZ_CHECK(taken == !f, "a frame is whose it should not be");
    const uint64_t more_used = store->used() - before;
    FUZZ_CHECK(more_used == 0 || (taken && more_used == kSlot), "a slot of its own, or another's");
    FUZZ_CHECK(taken ? store->used() > 0 : more_used == 0);
    FUZZ_CHECK(!taken || bytes <= kSlot);
    if (taken) kept[id] = std::move(copy), written++;
    settle();
  }

  std::vector<uint32_t> unasked() const {
    std::vector<uint32_t> ids;
    for (const auto& [id, bytes] : kept)
      if (!asked.contains(id)) ids.push_back(id);
    return ids;
  }
  void read(size_t more) {
    const auto ids = unasked();
    for (size_t n = 0; n < ids.size() && n <= more / 4; n++) {
      const uint32_t id = ids[(more + n) % ids.size()];
      if (asked.insert(id).second) store->read(id, now);
    }
    settle();
  }
  void discard(size_t more) {
    const auto ids = unasked();
    if (ids.empty()) return;
    const uint32_t id = ids[more % ids.size()];
    store->discard(id);
    kept.erase(id);
    discarded++;
    settle();
  }

  void take_events() {
    StoreEvent e;
    while (store->next_event(e)) {
      const auto k = kept.find(e.id);
      FUZZ_CHECK(k != kept.end(), "a packet comes back that is not there");
      if (e.kind == StoreEvent::Kind::kRead) {
        FUZZ_CHECK(asked.contains(e.id), "a packet comes back that nobody asked for");
        FUZZ_CHECK(e.frame && e.frame.bytes().size() == k->second.size());
        if (genuine) FUZZ_CHECK(std::ranges::equal(e.frame.bytes(), k->second), "a packet has changed");
        back++;
      } else {
        FUZZ_CHECK(!e.frame);
        lost++;
      }
      kept.erase(k);
      asked.erase(e.id);
    }
  }

  void check_books() {
    uint64_t in_written = 0, in_read = 0, in_lost = 0, held = 0, in_slots = 0;
    for (size_t i = 0; i < store->lenders(); i++) {
      const LenderStatus s = store->status(i);
      in_written += s.written, in_read += s.read, in_lost += s.lost, held += s.held;
      // Packets share slots; one slot stays open for more, though all that was in it has been given up.
      FUZZ_CHECK(s.used <= s.bytes && s.used % kSlot == 0 && s.used <= (s.held + 1) * kSlot);
      FUZZ_CHECK(s.held == 0 || s.used > 0);
      in_slots += s.used;
    }
    FUZZ_CHECK(in_written == written && in_read == back && in_lost == lost);
    FUZZ_CHECK(held == kept.size());
    FUZZ_CHECK(written == back + lost + discarded + held, "the store's books");
    FUZZ_CHECK(store->used() == in_slots && store->used() <= store->size());
    if (genuine) FUZZ_CHECK(store->size() <= lenders.size() * kPart);
    for (auto& l : lenders) {
      if (!l->lender) continue;
      const auto leases = l->table->leases();
      FUZZ_CHECK(leases.size() <= l->parts);
      for (const auto& lease : leases) FUZZ_CHECK(lease.bytes <= kPart);
    }
  }

  // --- the wire -------------------------------------------------------------------------------------------

  // Everything that somebody has just sent.
  void sent_by(size_t who) {
    FUZZ_CHECK(out.size() <= 400);
    while (Frame f = out.pop()) {
      Bytes b(f.total_length());
      f.copy_to(b.data());
      Packet p;
      FUZZ_CHECK(parse(b, p) == ParseVerdict::kOk && icrc_ok(p) && p.payload.size() <= 2 * kMtu);
      FUZZ_CHECK(p.src_ip == address_of(who, v6));
      if (p.dest_qp() != kGsiQpn && who != kStranger) note_queue_pair(who, p);
      for (size_t to = 0; to <= kStranger; to++)
        if (p.dst_ip == address_of(to, v6) && (to == 0 || to == kStranger || to <= lenders.size()) &&
            wire.size() < kWireMax)
          wire.push_back({to, b});
    }
  }
  // So that a forger knows where to send it.
  void note_queue_pair(size_t from, const Packet& p) {
    const size_t lender = from == kStore ? 0 : from;
    for (size_t to = 0; to <= lenders.size(); to++)
      if (p.dst_ip == address_of(to, v6)) {
        targets[from == kStore ? to : lender][from == kStore] = p.dest_qp();
        psns[from == kStore ? to : lender][from == kStore] = p.psn();
      }
  }

  void settle() {
    take_events();
    check_books();
  }

  void deliver(Flight flight) {
    // Its own allocation, so that the sanitizer sees a step behind its end.
    if (flight.to == kStore || flight.to == kStranger) {
      const auto copy = std::make_unique<uint8_t[]>(flight.bytes.size());
      std::copy(flight.bytes.begin(), flight.bytes.end(), copy.get());
      Packet p;
      if (parse({copy.get(), flight.bytes.size()}, p) == ParseVerdict::kOk && icrc_ok(p))
        flight.to == kStore ? to_store(p) : to_stranger(p);
    } else if (Lender& l = *lenders[flight.to - 1]; l.alive) {
      if (l.fake) {
        to_fake(l, flight.bytes);
      } else if (Frame f = Frame::allocate(l.pool); f && flight.bytes.size() <= 800) {
        f.buffer()->length = static_cast<uint32_t>(flight.bytes.size());
        std::copy(flight.bytes.begin(), flight.bytes.end(), f.buffer()->data());
        l.lender->receive(std::move(f), now, out);
      }
      sent_by(flight.to);
    }
    if (history.size() == kHistoryMax) history.erase(history.begin());
    history.push_back(std::move(flight));
    settle();
  }
  void to_store(const Packet& p) {
    if (p.dst_ip != address_of(kStore, v6)) return;
    store->receive(p, now, out);
    sent_by(kStore);
  }

  void poll() {
    store->poll(now, out);
    sent_by(kStore);
    for (size_t i = 0; i < lenders.size(); i++) {
      Lender& l = *lenders[i];
      if (!l.alive) continue;
      if (l.fake) {
        l.agent->poll(now, out);
        for (CmEvent e; l.agent->next_event(e);) continue;
      } else {
        l.lender->poll(now, out);
      }
      sent_by(1 + i);
    }
    stranger->poll(now, out);
    sent_by(kStranger);
    settle();
  }
  void pass_time(size_t more) {
    static constexpr int64_t kSteps[] = {10, 100, 2000, 9000, 60000, 110000, 500000, 2100000};
    now += microseconds(kSteps[more % std::size(kSteps)]);
    poll();
  }
  void converse() {
    now += microseconds(10);
    poll();
    for (size_t n = wire.size(); n > 0 && !wire.empty(); n--) deliver(take(wire, 0));
  }

  // --- the lenders' lives -------------------------------------------------------------------------------

  void power(size_t more) {
    Lender& l = *lenders[more % lenders.size()];
    switch (more / 4) {
      case 0:
        l.alive = false;
        return;
      case 1:
        l.alive = true;
        return;
      case 2:
        l.alive = true;
        return start(l);
      case 3:
        if (!l.alive || l.fake) return;
        l.lender->shutdown(now, out);
        sent_by(1 + index_of(l));
        return settle();
    }
  }
  void shut_down() {
    store->shutdown(now, out);
    sent_by(kStore);
    settle();
  }

  // A fake's answer to who wants to borrow: bytes.
  void to_fake(Lender& l, Bytes& bytes) {
    Packet p;
    if (parse(bytes, p) != ParseVerdict::kOk || !icrc_ok(p) || p.dest_qp() != kGsiQpn) return;
    l.agent->receive(p, now, out);
    for (CmEvent e; l.agent->next_event(e);) {
      if (e.kind != CmEvent::Kind::kRequest) continue;
      const uint8_t what = in.byte();
      CmQueuePair local;
      local.qpn = Qpn{16u + what % 4};
      local.responder_resources = what & 4 ? 4 : what >> 4;
      Bytes data;
      if (what & 8) {
        const auto reply =
            encode(LeaseReply{.rkey = in.u16(), .address = what & 16 ? in.u64() : 0, .bytes = in.u16()});
        data.assign(reply.begin(), reply.end());
        if (what & 32) data[in.below(data.size())] ^= in.byte();
        if (what & 64) data.resize(in.below(data.size() + 1));
      } else if (what & 16) {
        data = encode(buffering::LeaseRefusal{.text = text_of(in.take(in.byte()))});
        if (what & 32) data[in.below(data.size())] ^= in.byte();
      } else {
        const auto raw = in.take(in.below(149));
        data.assign(raw.begin(), raw.end());
      }
      // Half a megabyte at most: more would only be slow.
      if (const auto reply = buffering::decode_lease_reply(data); reply && reply->bytes >= 1u << 19)
        std::fill(data.begin() + 24, data.begin() + 30, uint8_t{0});
      if (what & 128)
        l.agent->reject(e.id, RejectReason::kConsumer,
                        std::span(data).first(std::min<size_t>(148, data.size())), now, out);
      else
        l.agent->accept(e.id, local, data, now, out);
    }
  }

  // --- the stranger ---------------------------------------------------------------------------------------

  void borrow(size_t more) {
    const size_t lender = more % lenders.size();
    Path path;
    path.src_ip = address_of(kStranger, v6), path.dst_ip = address_of(1 + lender, v6);
    CmQueuePair local;
    local.qpn = Qpn{0x500 + static_cast<uint32_t>(++borrowed)};
    local.first_psn = Psn(0x1000);
    // Of two sizes that the pools have frames for, or any where the lender refuses more.
    local.mtu_code = static_cast<uint8_t>(mtu_max > kMtu ? 1 + (more >> 2 & 1) : in.byte() % 7);
    local.initiator_depth = more & 8 ? in.byte() : 4;
    Bytes data;
    if (more & 2) {
      const auto raw = in.take(in.below(57));
      data.assign(raw.begin(), raw.end());
    } else {
      const auto request = encode(LeaseRequest{.instance = in.byte(), .bytes = in.u16() % 5000u});
      data.assign(request.begin(), request.end());
    }
    stranger->connect(path, tcp_service_id(buffering::kLenderPort), local, 40000, data, now, out);
    sent_by(kStranger);
  }

  void to_stranger(const Packet& p) {
    if (p.dest_qp() != kGsiQpn) return check_answer(p);
    stranger->receive(p, now, out);
    for (CmEvent e; stranger->next_event(e);) {
      if (e.kind != CmEvent::Kind::kReply) continue;
      const auto reply = buffering::decode_lease_reply(e.private_data);
      for (size_t i = 0; i < lenders.size(); i++)
        if (reply && !lenders[i]->fake && e.path.dst_ip == address_of(1 + i, v6))
          loot[i] = Borrowed{e.remote.qpn, e.remote.first_psn, *reply, {}};
      stranger->confirm(e.id, now, out);
    }
    sent_by(kStranger);
  }

  // To a READ that goes beyond what is lent there is no answer but a refusal.
  void check_answer(const Packet& p) {
    if (!genuine || !p.op->response || p.opcode() == Opcode::kAcknowledge) return;
    for (size_t i = 0; i < lenders.size(); i++) {
      if (p.src_ip != address_of(1 + i, v6)) continue;
      const LeaseReply& lease = loot[i].lease;
      size_t questions = 0, allowed = 0;
      for (const auto& q : loot[i].asked) {
        const int32_t at = p.psn().distance(q.first);
        if (at < 0 || at >= static_cast<int32_t>(q.packets)) continue;
        questions++;
        allowed += q.bytes == 0 || (q.address >= lease.address && q.address - lease.address <= lease.bytes &&
                                    q.bytes <= lease.bytes - (q.address - lease.address));
      }
      // Without any question it is an answer of a lease before.
      FUZZ_CHECK(questions == 0 || allowed > 0, "a lender shows what it has not lent");
    }
  }

  // What a borrower may send, and what he may not.
  void ask(size_t more) {
    const size_t lender = more % lenders.size();
    Borrowed& b = loot[lender];
    if (b.qpn.value == 0) return;
    send_from(kStranger, 1 + lender, b.qpn, b.next, more >> 1, &b);
  }

  void send_from(size_t from, size_t to, Qpn qpn, Psn psn, size_t more, Borrowed* b) {
    static constexpr Opcode kOpcodes[] = {Opcode::kReadRequest,        Opcode::kWriteOnly,
                                          Opcode::kWriteFirst,         Opcode::kWriteLast,
                                          Opcode::kWriteMiddle,        Opcode::kSendOnly,
                                          Opcode::kAcknowledge,        Opcode::kReadResponseOnly,
                                          Opcode::kWriteOnlyImm,       Opcode::kReadRequest,
                                          Opcode::kReadResponseFirst,  Opcode::kReadResponseLast,
                                          Opcode::kReadResponseMiddle, Opcode::kCnp,
                                          Opcode::kWriteOnly,          Opcode::kCompareSwap};
    const uint8_t what = in.byte(), where = in.byte();
    TransportFields f;
    f.opcode = kOpcodes[what & 15];
    f.dest_qp = qpn;
    f.psn = psn + (more & 1 ? in.byte() % 8 : 0) - (more & 2 ? in.byte() % 8 : 0);
    f.ack_request = what & 16;
    f.syndrome = what & 32 ? in.byte() : kAckUnlimited;
    const LeaseReply lease = b ? b->lease : LeaseReply{.rkey = in.u32(), .address = 0, .bytes = kPart};
    f.rkey = where & 1 ? in.u32() : lease.rkey;
    // Near both ends of the lease, or anywhere.
    f.remote_address =
        where & 2 ? in.u64() : lease.address + (where & 4 ? lease.bytes : 0) + in.byte() - 128u;
    Bytes payload;
    if (f.opcode != Opcode::kReadRequest || where & 8)
      payload.assign(where & 16 ? kMtu : in.byte() % 64, static_cast<uint8_t>(where));
    const size_t usual = payload.empty() ? 1 + where : payload.size();
    f.dma_length = where & 32 ? in.u32() : where & 64 ? in.u16() % 600u : static_cast<uint32_t>(usual);
    HeapFramePool own(640, 1, true);
    Path path;
    path.src_ip = address_of(from, v6), path.dst_ip = address_of(to, v6);
    const Frame frame = build(own, path, f, payload);
    if (!frame) return;
    const auto& op = traits(f.opcode);
    if (b && op.request && f.psn == b->next) {
      const uint32_t packets = f.opcode == Opcode::kReadRequest
                                   ? std::max(1u, f.dma_length / kMtu + (f.dma_length % kMtu != 0))
                                   : 1;
      if (f.opcode == Opcode::kReadRequest)
        b->asked.push_back({f.psn, packets, f.remote_address, f.dma_length});
      b->next = b->next + packets;
    } else if (b && f.opcode == Opcode::kReadRequest) {
      b->asked.push_back({f.psn, std::max(1u, f.dma_length / kMtu + (f.dma_length % kMtu != 0)),
                          f.remote_address, f.dma_length});
    }
    deliver({to, Bytes(frame.bytes().begin(), frame.bytes().end())});
  }

  // As if from the other end of a connection between store and lender.
  void forge(size_t more) {
    const size_t lender = 1 + more % lenders.size();
    const bool to_lender = more & 2;
    const Qpn qpn = targets[lender][to_lender];
    if (qpn.value == 0) return;
    genuine = false;
    send_from(to_lender ? kStore : lender, to_lender ? lender : kStore, qpn, psns[lender][to_lender],
              more >> 2, nullptr);
  }

  void mutated(std::vector<Flight>& from) {
    if (from.empty()) return;
    Flight f = from[in.below(from.size())];
    mutate(f.bytes, v6, in);
    genuine = false;
    deliver(std::move(f));
  }

  // Any bytes, through all three decoders; what was understood says the same once more.
  void decode() {
    const auto bytes = in.take(in.below(160));
    const auto copy = std::make_unique<uint8_t[]>(bytes.size());
    std::copy(bytes.begin(), bytes.end(), copy.get());
    const std::span<const uint8_t> raw(copy.get(), bytes.size());
    if (const auto r = buffering::decode_lease_request(raw); r && r->version == buffering::kLeaseVersion)
      FUZZ_CHECK(buffering::decode_lease_request(encode(*r)) == r);
    if (const auto r = buffering::decode_lease_reply(raw); r && r->version == buffering::kLeaseVersion) {
      FUZZ_CHECK(buffering::decode_lease_reply(encode(*r)) == r);
      FUZZ_CHECK(r->address + r->bytes >= r->address, "a lease that wraps");
    }
    if (const auto r = buffering::decode_lease_refusal(raw)) {
      FUZZ_CHECK(r->text.size() <= buffering::LeaseRefusal::kTextBytesMax);
      FUZZ_CHECK(std::ranges::all_of(r->text, [](char c) { return c >= 0x20 && c < 0x7F; }));
      const auto again = buffering::decode_lease_refusal(encode(*r));
      FUZZ_CHECK(again && again->code == r->code && again->text == r->text);
    }
  }

  // --- the end --------------------------------------------------------------------------------------------

  // All who are there behave from now on: what was asked for comes back or is lost, and the store's shutdown
  // ends its leases.
  void end_well() {
    for (auto& l : lenders) l->alive = true;
    for (const uint32_t id : unasked()) {
      asked.insert(id);
      store->read(id, now);
    }
    for (int turns = 0; !kept.empty() && turns < 3000; turns++) converse_until_quiet();
    FUZZ_CHECK(kept.empty(), "what was asked for neither comes back nor is lost");
    converse();
    FUZZ_CHECK(store->used() == 0, "a slot is kept for nothing");
    if (!store->closing()) shut_down();
    for (int turns = 0; !store->idle() && turns < 1000; turns++) converse_until_quiet();
    FUZZ_CHECK(!genuine || store->idle(), "the store does not end");
  }
  void converse_until_quiet() {
    converse();
    if (!wire.empty()) return;
    Time next = std::min(store->next_deadline(), stranger->next_deadline());
    for (auto& l : lenders)
      next = std::min(next, l->lender ? l->lender->next_deadline() : l->agent->next_deadline());
    if (next != kNever) now = std::max(now, std::min(next, now + seconds(1)));
  }

  // Nobody hears anybody any more.
  void silence() {
    wire.clear();
    const Time end = now + seconds(60);
    for (int turns = 0; now < end; turns++) {
      FUZZ_CHECK(turns < 4000, "timers without end");
      Time next = store->next_deadline();
      for (auto& l : lenders)
        if (l->lender) next = std::min(next, l->lender->next_deadline());
      if (next == kNever) break;
      now = std::max(now + microseconds(1), next);
      store->poll(now, out);
      for (auto& l : lenders)
        if (l->lender) l->lender->poll(now, out);
      out.clear();
      settle();
    }
    FUZZ_CHECK(kept.empty(), "packets wait for lenders that are dead");
    for (auto& l : lenders)
      FUZZ_CHECK(!l->lender || (l->table->leases().empty() && l->lender->idle()),
                 "memory is lent to somebody who is gone");
  }

  Input& in;
  bool v6 = false, clean = false;
  bool genuine = true;  // nobody has spoken in the name of another
  uint32_t mtu_max = 4096;
  uint64_t births = 0, borrowed = 0, serial = 0;
  uint64_t written = 0, back = 0, lost = 0, discarded = 0;
  Time now{milliseconds(1)};
  FrameList out;
  std::unique_ptr<HeapFramePool> pool;
  HeapFramePool stranger_pool{640, 512, true};
  std::unique_ptr<RemoteStore> store;
  std::vector<std::unique_ptr<Lender>> lenders;
  std::unique_ptr<CmAgent> stranger;
  Borrowed loot[2];
  Qpn targets[3][2];  // of the connection with a lender: the store's end, the lender's
  Psn psns[3][2];
  std::vector<Flight> wire, history;
  std::map<uint32_t, Bytes> kept;
  std::set<uint32_t> asked;
};

void run(std::span<const uint8_t> data) {
  if (data.size() > 1024) return;
  Input in(data);
  World world(in);
  for (size_t steps = 0; steps < kStepsMax && !in.empty(); steps++) world.step();
  world.finish();
}

}  // namespace
MILLRACE_FUZZ_TARGET("lease", run)
}  // namespace millrace::fuzz
