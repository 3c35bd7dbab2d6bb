// RDMA READ over the reliable connection: a requester that posts WRITEs, SENDs and READs, a lender that
// serves them, and a wire that the input delivers from, drops, repeats and mutates, on which a stranger
// forges requests and responses. Oracles: what each side sends is what was posted or granted; a READ writes
// only into its own bytes, only what a response brought, and completes once all of it is there; everything
// completes once, in order; and as long as every packet is genuine, nobody fails, what is read is what was
// written, and it all ends.
#include <map>
#include <memory>
#include <optional>

#include "roce/queue_pair.h"
#include "tests/fuzz/wire.h"

namespace millrace::fuzz {
namespace {

using namespace roce;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr uint32_t kMtu = 256, kRkey = 9;
constexpr uint32_t kMemory = 4096, kGuard = 64, kMessageMax = 5 * kMtu;
constexpr size_t kWireMax = 64, kHistoryMax = 16, kStepsMax = 160, kOperationsMax = 48;
constexpr uint8_t kGuardByte = 0xC7;

enum Side : size_t { kRequester = 0, kLender = 1 };
using Kind = WorkRequest::Kind;

Qpn qpn_of(size_t side) { return Qpn{side == kRequester ? 5u : 77u}; }

// What was posted, and what may come of it.
struct Operation {
  Kind kind = Kind::kWrite;
  Psn first;
  uint32_t packets = 1, at = 0, size = 0;
  Bytes data;                                // of a WRITE or a SEND
  Bytes room;                                // of a READ: `into` between two guards
  Bytes value;                               // of a READ: the memory as the operations before it leave it
  std::vector<bool> sure;                    // which bytes of it no later WRITE may have changed
  std::vector<std::vector<Bytes>> answered;  // for each packet, the payloads that came for it
  bool probe = false, sent = false, complete = false;

  std::span<uint8_t> into() { return std::span(room).subspan(kGuard, size); }
  uint32_t length_of(uint32_t index) const { return std::min(kMtu, size - index * kMtu); }
};

// What one packet of a READ's response may be.
struct Grant {
  uint32_t at, length;
  bool last;
};

class World {
 public:
  explicit World(Input& input) : in(input) {
    const uint8_t shape = in.byte();
    v6 = shape & 1;
    reads_max = 1 + (shape >> 1 & 3);
    requests_max = shape & 8 ? 3 : 16;
    base = Psn(shape & 16 ? 0xFFFFFA : 0x7FFFFE);
    for (size_t s = 0; s < 2; s++) {
      pool[s] = std::make_unique<HeapFramePool>(640, shape & (32u << s) ? 2 : 256, true);
      QueuePairConfig c;
      c.local = qpn_of(s);
      c.wire.path.src_ip = address_of(s, v6), c.wire.path.dst_ip = address_of(1 - s, v6);
      c.wire.remote_qpn = qpn_of(1 - s);
      c.expected_psn = c.requester.first_psn = base;
      c.requester.mtu = kMtu;
      c.requester.requests_max = s == kRequester ? requests_max : 1;
      c.requester.packets_max = shape & 128 ? 4 : 64;
      c.requester.reads_max = s == kRequester ? reads_max : 0;
      c.requester.retransmit_timeout = milliseconds(4);
      c.reads_max = s == kLender ? reads_max : 0;
      qp[s] = std::make_unique<QueuePair>(c, now);
    }
    end = base;
    for (uint32_t i = 0; i < kMemory; i++) memory[i] = model[i] = static_cast<uint8_t>(i * 7 + i / 256);
  }

  void step() {
    const uint8_t op = in.byte();
    const uint32_t more = op >> 4;
    switch (op & 15) {
      case 0:
      case 1:
        return post(Kind::kRead, more);
      case 2:
        return post(more & 8 ? Kind::kSend : Kind::kWrite, more);
      case 3:
        return emit(kRequester, 1 + more);
      case 4:
        return emit(kLender, 1 + more);
      case 5:
        if (!wire.empty()) deliver(take(wire, 0));
        return;
      case 6:
        if (!wire.empty()) deliver(take(wire, in.below(wire.size())));
        return;
      case 7:
        if (!wire.empty()) take(wire, in.below(wire.size()));
        return;
      case 8:
        if (!history.empty()) deliver(Flight(history[in.below(history.size())]));
        return;
      case 9:
        return mutated(more & 1 ? history : wire);
      case 10:
        return forge_response(more);
      case 11:
        return forge_request(more);
      case 12:
        return pass_time(more);
      case 13:
        return converse(1 + more);
      case 14:
        busy = static_cast<uint8_t>(more & 3);
        return;
      case 15:
        deaf = more & 1;  // to READs that are asked for again
        return;
    }
  }

  void finish() {
    busy = 0, deaf = false;
    for (int rounds = 0; genuine && completed < operations.size(); rounds++) {
      FUZZ_CHECK(rounds < 600, "no end in sight: " + std::to_string(completed) + " of " +
                                   std::to_string(operations.size()) + " complete");
      converse(1);
      now += microseconds(10);
      if (completed == operations.size()) break;  // before time makes another probe
      if (qp[0]->wants_to_emit() || qp[1]->wants_to_emit()) continue;
      const Time next = std::min(qp[0]->next_deadline(), qp[1]->next_deadline());
      // One that is in the past says for how long nothing has been acknowledged; other timers go on.
      if (next != kNever) now = std::max(now + (next <= now ? milliseconds(1) : milliseconds(0)), next);
      tick();
    }
    if (genuine) FUZZ_CHECK(memory == model, "the lender's memory is not what was written");
    if (genuine) FUZZ_CHECK(qp[kRequester]->requester().idle());
    for (Operation& o : operations) check_guards(o);
    for (size_t s = 0; s < 2; s++) {
      qp[s].reset();
      FUZZ_CHECK(pool[s]->in_use() == 0, "a frame is held by nobody");
    }
  }

 private:
  // --- posting ------------------------------------------------------------------------------------------

  uint32_t room() const { return requests_max - static_cast<uint32_t>(operations.size() - completed); }

  void post(Kind kind, uint32_t more) {
    if (operations.size() == kOperationsMax) return;
    const uint16_t where = in.u16();
    Operation o;
    o.kind = kind;
    o.size = (more & 7) == 7 ? 0 : where % (1 + (more & 7) * kMtu);
    if ((more & 3) == 2) o.size = (more >> 2 & 1 ? 2 : 1) * kMtu;  // whole packets
    if (kind == Kind::kRead) o.size = std::min(o.size, kMessageMax);
    o.at = where % (kMemory - o.size + 1);
    o.first = end;
    o.packets = std::max(1u, (o.size + kMtu - 1) / kMtu);
    WorkRequest r;
    r.kind = kind;
    r.id = operations.size();
    r.ack_request = !(where & 1);
    r.remote_address = o.at;
    r.rkey = kRkey;
    if (kind == Kind::kRead) {
      o.room.assign(o.size + 2 * kGuard, kGuardByte);
      o.value.assign(model.begin() + o.at, model.begin() + o.at + o.size);
      o.sure.assign(o.size, true);
      o.answered.resize(o.packets);
      r.into = o.into();
    } else {
      for (uint32_t i = 0; i < o.size; i++) o.data.push_back(static_cast<uint8_t>(serial++ * 31 + i));
      r.parts[0] = std::span(o.data).first(o.size / 3);
      r.parts[1] = std::span(o.data).subspan(o.size / 3);
    }
    const bool fits = room() > 0;
    FUZZ_CHECK(qp[kRequester]->requester().post(r) == fits);
    if (!fits) return;
    end = end + o.packets;
    if (kind == Kind::kWrite) note_write(o);
    operations.push_back(std::move(o));
    check_books();
  }

  void note_write(const Operation& o) {
    std::copy(o.data.begin(), o.data.end(), model.begin() + o.at);
    for (Operation& read : operations)
      for (uint32_t i = 0; read.kind == Kind::kRead && !read.complete && i < read.size; i++)
        if (read.at + i >= o.at && read.at + i < o.at + o.size) read.sure[i] = false;
  }

  // A probe takes its place among the requests.
  void tick() {
    for (auto& each : qp) {
      if (now < each->next_deadline()) continue;
      const uint64_t before = each->probes_sent();
      each->tick(now);
      FUZZ_CHECK(each->over() || each->next_deadline() > now || each->wants_to_emit() || each->dead(now),
                 "a timer that does not advance");
      if (each != qp[kRequester] || each->probes_sent() == before) continue;
      Operation o;
      o.probe = true;
      o.first = end;
      end = end + 1;
      operations.push_back(std::move(o));
    }
    check_books();
  }

  // --- what is sent ---------------------------------------------------------------------------------------

  void emit(size_t side, uint32_t budget) {
    FrameList out;
    qp[side]->emit(*pool[side], combine, budget, now, out);
    FUZZ_CHECK(out.size() <= budget + 1);
    std::optional<Psn> last;
    while (Frame f = out.pop()) {
      Bytes b(f.total_length());
      f.copy_to(b.data());
      Packet p;
      FUZZ_CHECK(parse(b, p) == ParseVerdict::kOk && icrc_ok(p) && p.dest_qp() == qpn_of(1 - side));
      FUZZ_CHECK(p.payload.size() <= kMtu);
      if (side == kRequester && p.op->request) check_request(p);
      if (side == kLender && p.op->response && p.opcode() != Opcode::kAcknowledge) {
        check_response(p);
        FUZZ_CHECK(!last || p.psn().distance(*last) > 0, "answers out of order, or one of them twice");
        last = p.psn();
      }
      if (wire.size() < kWireMax) wire.push_back({1 - side, std::move(b)});
    }
  }

  Operation* operation_of(Psn psn) {
    for (Operation& o : operations)
      if (psn.distance(o.first) >= 0 && psn.distance(o.first) < static_cast<int32_t>(o.packets)) return &o;
    return nullptr;
  }

  void check_request(const Packet& p) {
    Operation* o = operation_of(p.psn());
    FUZZ_CHECK(o != nullptr && !o->complete, "a request that nobody posted, or that is complete");
    const auto index = static_cast<uint32_t>(p.psn().distance(o->first));
    o->sent = true;
    if (o->kind == Kind::kRead) {
      FUZZ_CHECK(p.opcode() == Opcode::kReadRequest && p.payload.empty());
      FUZZ_CHECK(p.reth->address.value() == o->at + index * kMtu && p.reth->rkey.value() == kRkey);
      FUZZ_CHECK(p.reth->length.value() == o->size - index * kMtu);
      const auto out = std::count_if(operations.begin(), operations.end(), [](const Operation& x) {
        return x.kind == Kind::kRead && x.sent && !x.complete;
      });
      FUZZ_CHECK(out <= static_cast<ptrdiff_t>(reads_max), "more READs than the peer grants");
      return;
    }
    FUZZ_CHECK(p.op->send == (o->kind == Kind::kSend) && p.op->write == (o->kind == Kind::kWrite));
    FUZZ_CHECK(p.op->starts() == (index == 0) && p.op->ends() == (index + 1 == o->packets));
    FUZZ_CHECK(std::equal(p.payload.begin(), p.payload.end(), o->data.begin() + index * kMtu,
                          o->data.begin() + index * kMtu + o->length_of(index)));
    if (p.reth && !o->probe)
      FUZZ_CHECK(p.reth->address.value() == o->at && p.reth->length.value() == o->size);
  }

  void check_response(const Packet& p) {
    responses++;
    FUZZ_CHECK(responses <= granted, "more answers than questions");
    FUZZ_CHECK(p.psn().distance(qp[kLender]->responder().expected()) < 0, "an answer to what is yet to come");
    const auto found = grants.find(p.psn().value());
    FUZZ_CHECK(found != grants.end(), "an answer to no READ");
    FUZZ_CHECK(std::any_of(found->second.begin(), found->second.end(), [&](const Grant& g) {
      return g.last == p.op->ends() && p.payload.size() == g.length &&
             std::equal(p.payload.begin(), p.payload.end(), memory.begin() + g.at);
    }));
    FUZZ_CHECK((p.aeth != nullptr) == (p.op->starts() || p.op->ends()));
  }

  // --- what arrives ---------------------------------------------------------------------------------------

  void deliver(Flight flight) {
    // Its own allocation, so that the sanitizer sees a step behind its end.
    const auto copy = std::make_unique<uint8_t[]>(flight.bytes.size());
    std::copy(flight.bytes.begin(), flight.bytes.end(), copy.get());
    Packet p;
    if (parse({copy.get(), flight.bytes.size()}, p) == ParseVerdict::kOk && icrc_ok(p)) {
      if (flight.to == kRequester)
        to_requester(p);
      else
        to_lender(p);
      if (genuine) FUZZ_CHECK(!qp[0]->over() && !qp[1]->over(), "failed without any fault of the peer");
    }
    if (history.size() == kHistoryMax) history.erase(history.begin());
    history.push_back(std::move(flight));
  }

  void to_requester(const Packet& p) {
    if (p.op->response && p.aeth && p.opcode() == Opcode::kAcknowledge) {
      const bool ack = (p.aeth->syndrome & 0xE0) == 0;
      reached = std::max(reached, p.psn().distance(base) + (ack ? 1 : 0));
    } else if (p.op->response) {
      reached = std::max(reached, p.psn().distance(base) + 1);
      if (Operation* o = operation_of(p.psn()); o && o->kind == Kind::kRead && o->sent && !o->complete)
        o->answered[static_cast<size_t>(p.psn().distance(o->first))].emplace_back(p.payload.begin(),
                                                                                  p.payload.end());
    }
    QueuePair& q = *qp[kRequester];
    if (q.receive(p, now) == Reception::kNewRequest) {
      const bool probe = p.op->write && p.op->only && !p.op->imm && p.payload.empty();
      probe ? q.responder().accept(p) : q.responder().refuse(kNakRemoteAccess);
      if (genuine) FUZZ_CHECK(probe);
    }
    for (uint64_t id; q.requester().next_completion(id);) {
      FUZZ_CHECK(completed < operations.size(), "more completions than requests");
      Operation& o = operations[completed];
      FUZZ_CHECK(id == (o.probe ? kProbeId : completed), "completed out of order");
      complete(o);
      completed++;
    }
    check_books();
  }

  void complete(Operation& o) {
    o.complete = true;
    const Psn last = o.first + (o.packets - 1);
    FUZZ_CHECK(o.sent, "complete before it was sent");
    FUZZ_CHECK(last.distance(base) < reached, "complete, but never acknowledged");
    if (o.kind != Kind::kRead) return;
    for (uint32_t i = 0; i < o.packets; i++) {
      const auto piece = o.into().subspan(i * kMtu, o.length_of(i));
      FUZZ_CHECK(std::any_of(o.answered[i].begin(), o.answered[i].end(),
                             [&](const Bytes& b) { return std::ranges::equal(b, piece); }),
                 "a READ is complete with what no response brought");
    }
    for (uint32_t i = 0; genuine && i < o.size; i++)
      FUZZ_CHECK(!o.sure[i] || o.into()[i] == o.value[i], "what is read is not what was written");
    check_guards(o);
  }

  void to_lender(const Packet& p) {
    QueuePair& q = *qp[kLender];
    const Reception r = q.receive(p, now);
    if (r == Reception::kResponse)
      for (uint64_t id; q.requester().next_completion(id);) FUZZ_CHECK(id == kProbeId);
    if (r == Reception::kReadAgain && !deaf) return grant(p, true);
    if (r != Reception::kNewRequest) return;
    if (busy > 0) {
      busy--;
      return q.responder().not_ready(1);
    }
    if (p.opcode() == Opcode::kReadRequest) return grant(p, false);
    if (p.op->write && !p.payload.empty()) {
      const WritePlace place = q.responder().place(p);
      const bool good =
          place.rkey == kRkey && place.address <= kMemory && p.payload.size() <= kMemory - place.address;
      if (genuine) FUZZ_CHECK(good);
      if (!good) return q.responder().refuse(kNakRemoteAccess);
      std::copy(p.payload.begin(), p.payload.end(), memory.begin() + static_cast<ptrdiff_t>(place.address));
    }
    q.responder().accept(p);
  }

  void grant(const Packet& p, bool again) {
    RcResponder& responder = qp[kLender]->responder();
    const uint64_t at = p.reth->address.value();
    const uint32_t n = p.reth->length.value();
    const bool good = p.reth->rkey.value() == kRkey && at <= kMemory && n <= kMemory - at;
    if (genuine) FUZZ_CHECK(good);
    if (!good) return again ? void() : responder.refuse(kNakRemoteAccess);
    const auto lent = std::span<const uint8_t>(memory).subspan(at, n);
    const uint32_t packets = std::max(1u, (n + kMtu - 1) / kMtu);
    granted += packets;
    for (uint32_t i = 0; i < packets; i++)
      grants[(p.psn() + i).value()].push_back(
          {static_cast<uint32_t>(at) + i * kMtu, std::min(kMtu, n - i * kMtu), i + 1 == packets});
    again ? responder.read_again(p, lent) : responder.accept_read(p, lent);
  }

  // --- the input's mischief -----------------------------------------------------------------------------

  void mutated(std::vector<Flight>& from) {
    if (from.empty()) return;
    Flight f = from[in.below(from.size())];
    mutate(f.bytes, v6, in);
    genuine = false;
    deliver(std::move(f));
  }

  void forge(size_t to, const TransportFields& f, std::span<const uint8_t> payload) {
    HeapFramePool own(1024, 1, true);
    Path path;
    path.src_ip = address_of(1 - to, v6), path.dst_ip = address_of(to, v6);
    const Frame frame = build(own, path, f, payload);
    if (!frame) return;
    genuine = false;
    deliver({to, Bytes(frame.bytes().begin(), frame.bytes().end())});
  }

  // One that answers what is due, or what is near it.
  void forge_response(uint32_t more) {
    static constexpr Opcode kOpcodes[] = {Opcode::kReadResponseFirst, Opcode::kReadResponseMiddle,
                                          Opcode::kReadResponseLast,  Opcode::kReadResponseOnly,
                                          Opcode::kAcknowledge,       Opcode::kAcknowledge};
    const uint8_t what = in.byte();
    TransportFields f;
    f.opcode = kOpcodes[what % std::size(kOpcodes)];
    f.dest_qp = qpn_of(kRequester);
    const Psn due = completed < operations.size() ? operations[completed].first : end;
    f.psn = due + in.byte() % 8 - (more & 1);
    f.syndrome = f.opcode == Opcode::kAcknowledge ? in.byte() : kAckUnlimited;
    Bytes payload;
    if (f.opcode != Opcode::kAcknowledge)
      payload.assign(what & 0x80 ? kMtu : in.u16() % (kMtu + 8), static_cast<uint8_t>(what));
    forge(kRequester, f, payload);
  }

  void forge_request(uint32_t more) {
    static constexpr Opcode kOpcodes[] = {Opcode::kReadRequest, Opcode::kReadRequest, Opcode::kReadRequest,
                                          Opcode::kWriteOnly,   Opcode::kWriteFirst,  Opcode::kWriteLast,
                                          Opcode::kSendOnly,    Opcode::kSendMiddle};
    const uint8_t what = in.byte();
    TransportFields f;
    f.opcode = kOpcodes[what & 7];
    f.dest_qp = qpn_of(kLender);
    f.psn = qp[kLender]->responder().expected() + in.byte() % 4 - (more & 7);
    f.ack_request = what & 8;
    f.rkey = what & 16 ? 0 : kRkey;
    f.remote_address = what & 32 ? in.u64() : in.u16() % (kMemory + 2);
    f.dma_length = what & 64 ? in.u32() : in.u16() % (2 * kMessageMax);
    Bytes payload;
    if (f.opcode != Opcode::kReadRequest || what & 128) payload.assign(in.u16() % (kMtu + 8), what);
    forge(kLender, f, payload);
  }

  void pass_time(uint32_t more) {
    static constexpr int64_t kSteps[] = {1, 50, 1000, 2000, 4000, 9000, 40000, 1200000};
    now += microseconds(kSteps[more % std::size(kSteps)]);
    tick();
  }

  void converse(uint32_t rounds) {
    for (; rounds > 0; rounds--) {
      for (size_t s = 0; s < 2; s++) emit(s, 8);
      while (!wire.empty()) deliver(take(wire, 0));
    }
  }

  // --- books ----------------------------------------------------------------------------------------------

  void check_books() {
    const RcRequester& r = qp[kRequester]->requester();
    FUZZ_CHECK(r.room() == room());
    FUZZ_CHECK(r.next_psn() == end);
    FUZZ_CHECK(r.idle() == (completed == operations.size()));
  }
  static void check_guards(const Operation& o) {
    if (o.kind != Kind::kRead || o.probe) return;
    for (uint32_t i = 0; i < kGuard; i++)
      FUZZ_CHECK(o.room[i] == kGuardByte && o.room[kGuard + o.size + i] == kGuardByte,
                 "a READ's response went where nobody asked for it");
  }

  Input& in;
  bool v6 = false, deaf = false;
  bool genuine = true;  // every packet so far was sent so by its sender
  uint8_t busy = 0;     // requests that the lender is not ready for
  uint32_t reads_max = 1, requests_max = 1, serial = 0;
  Time now{milliseconds(1)};
  Psn base, end;
  Bytes memory = Bytes(kMemory), model = Bytes(kMemory);
  std::unique_ptr<HeapFramePool> pool[2];
  std::unique_ptr<QueuePair> qp[2];
  Crc32Combine combine;
  std::vector<Flight> wire, history;
  std::vector<Operation> operations;
  size_t completed = 0;
  int32_t reached = 0;                            // what responses have acknowledged at most, from `base`
  std::map<uint32_t, std::vector<Grant>> grants;  // by PSN
  uint64_t granted = 0, responses = 0;
};

void run(std::span<const uint8_t> data) {
  if (data.size() > 1024) return;
  Input in(data);
  World world(in);
  for (size_t steps = 0; steps < kStepsMax && !in.empty(); steps++) world.step();
  world.finish();
}

}  // namespace
MILLRACE_FUZZ_TARGET("read", run)
}  // namespace millrace::fuzz
