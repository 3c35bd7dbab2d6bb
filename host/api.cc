// The C API of millrace.h: checks arguments, keeps the sentence of each thread's last failure, does
// communicators of one rank on the spot, and hands everything else to the context. No exception crosses it.

#include <charconv>
#include <cstring>
#include <new>
#include <set>
#include <string>

#include "host/combining.h"
#include "host/context.h"
#include "host/millrace.h"
#include "roce/error.h"
#include "roce/headers.h"

using millrace::Error;
using millrace::ErrorCode;
using millrace::IpAddress;
using millrace::host::CommunicatorConfig;
using millrace::host::Context;
using millrace::host::LinkStats;
using millrace::host::Membership;
using millrace::host::Registration;
using millrace::host::TransportChoice;
namespace aggregation = millrace::aggregation;
using aggregation::Collective;

struct mr_context {
  mr_context(TransportChoice choice, const std::string& device) : context(choice, device) {}
  Context context;
  std::mutex mutex;             // of the names
  std::set<std::string> names;  // given to callers, who may hold their addresses
  std::atomic<int> communicators{0};
};

struct mr_comm {
  mr_context* context = nullptr;
  Membership* membership = nullptr;  // none: this is the only rank
  int rank = 0, size = 1;
  std::string combining = "off: there is one rank";
  std::atomic<bool> aborted{false};
  std::atomic<uint64_t> operations{0};  // of a communicator of one rank
  // Of the operations issued from now on.
  std::atomic<bool> deterministic{false};
  std::atomic<mr_wire> wire{MR_WIRE_EXACT};
};

struct mr_memory {
  mr_context* context;
  Registration* registration;
};

namespace {

constexpr const char* kAborted = "the communicator was aborted (mr_abort)";

thread_local std::string last_error;

mr_status refuse(mr_status status, std::string sentence) {
  last_error = std::move(sentence);
  return status;
}
mr_status misused(std::string sentence) { return refuse(MR_ERR_USAGE, std::move(sentence)); }

mr_status status_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kUsage:
    case ErrorCode::kConfig:
      return MR_ERR_USAGE;
    case ErrorCode::kUnreachable:
      return MR_ERR_UNREACHABLE;
    case ErrorCode::kRefused:
      return MR_ERR_REFUSED;
    default:
      return MR_ERR_SYSTEM;
  }
}

// Runs the body of an API function; what it throws becomes a status and this thread's last error.
template <typename F>
mr_status guarded(F body) noexcept {
  try {
    try {
      return body();
    } catch (const Error& e) {
      return refuse(status_of(e.code()), e.what());
    } catch (const std::bad_alloc&) {
      return refuse(MR_ERR_SYSTEM, "out of memory");
    } catch (const std::exception& e) {
      return refuse(MR_ERR_SYSTEM, e.what());
    }
  } catch (...) {  // not even memory for the sentence
    return MR_ERR_SYSTEM;
  }
}

TransportChoice parse_transport(const char* name) {
  if (name == nullptr || std::strcmp(name, "auto") == 0) return TransportChoice::kAuto;
  if (std::strcmp(name, "soft") == 0) return TransportChoice::kSoft;
  if (std::strcmp(name, "verbs") == 0) return TransportChoice::kVerbs;
  throw Error(ErrorCode::kUsage, "there is no transport \"" + std::string(name) + "\": auto, verbs or soft");
}

// "10.77.0.100", "fd77::100", "10.77.0.100:18600", "[fd77::100]:18600".
void parse_switch_address(std::string_view text, CommunicatorConfig& config) {
  std::string_view host = text, port;
  bool bracketed = text.starts_with('[');
  size_t colon = text.rfind(':');
  if (bracketed) {
    size_t end = text.find(']');
    host = end == text.npos ? "" : text.substr(1, end - 1);
    if (end != text.npos && end + 1 < text.size()) port = text.substr(end + 1);
  } else if (colon != text.npos && text.find(':') == colon) {  // one colon: no IPv6 address has so few
    host = text.substr(0, colon);
    port = text.substr(colon);
  }
  auto wrong = [&](const char* why) {
    return Error(ErrorCode::kUsage, "switch address \"" + std::string(text) + "\": " + why);
  };
  std::optional<IpAddress> address = IpAddress::parse(host);
  if (!address || (bracketed && address->is_v4()))
    throw wrong("give an IPv4 or IPv6 address, with a port as 10.77.0.100:18600 or [fd77::100]:18600");
  static constexpr uint8_t kV4Broadcast[4] = {255, 255, 255, 255};
  static constexpr uint8_t kV4Any[4] = {};
  if (address->is_multicast() || address->is_zero() || *address == IpAddress::from_v4(kV4Broadcast) ||
      *address == IpAddress::from_v4(kV4Any))
    throw wrong("this is no address of one host");
  config.switch_address = *address;
  if (port.empty()) return;
  auto [end, error] = std::from_chars(port.data() + 1, port.data() + port.size(), config.port);
  if (port[0] != ':' || error != std::errc{} || end != port.data() + port.size() || config.port == 0)
    throw wrong("its port must be a number from 1 to 65535");
}

CommunicatorConfig checked(const mr_comm_config& c) {
  auto usage = [](const std::string& sentence) { return Error(ErrorCode::kUsage, sentence); };
  if (c.size < 1 || c.size > UINT16_MAX)
    throw usage("size is " + std::to_string(c.size) + ": a communicator has 1 to 65535 ranks");
  if (c.rank < 0 || c.rank >= c.size)
    throw usage("rank is " + std::to_string(c.rank) + ": ranks go from 0 to size - 1, which is " +
                std::to_string(c.size - 1));
  if (c.stripes < 0 || c.stripes > static_cast<int>(aggregation::kStripesMax))
    throw usage("stripes is " + std::to_string(c.stripes) + ": 1 to 16, or 0 for 1");
  if (c.connect_timeout_ms < 0 || c.join_timeout_ms < 0)
    throw usage("a time-out is negative: milliseconds, or 0 for the default");
  CommunicatorConfig config;
  std::memcpy(config.key.data(), c.key, sizeof c.key);
  config.rank = static_cast<uint16_t>(c.rank);
  config.world = static_cast<uint16_t>(c.size);
  if (c.stripes) config.stripes = static_cast<uint8_t>(c.stripes);
  config.tenant = c.tenant;
  if (c.secret != nullptr) config.secret = c.secret;
  if (c.connect_timeout_ms) config.connect_timeout = std::chrono::milliseconds(c.connect_timeout_ms);
  if (c.join_timeout_ms) config.join_timeout = std::chrono::milliseconds(c.join_timeout_ms);
  config.wait = c.wait != 0;
  if (c.switch_address != nullptr)
    parse_switch_address(c.switch_address, config);
  else if (c.size > 1)
    throw usage("switch_address is NULL: a communicator of more than one rank needs its switch's");
  return config;
}

// The communicator's end, as an error of the call at hand; MR_OK while it can be used.
mr_status ended(const mr_comm& comm) {
  if (comm.membership == nullptr) return comm.aborted ? refuse(MR_ERR_ABORTED, kAborted) : MR_OK;
  mr_status status = comm.membership->status();
  return status == MR_OK ? MR_OK : refuse(status, comm.membership->text());
}

// One rank's own result is its contribution.
void do_locally(mr_comm& comm, mr_request& request) {
  auto& operation = request.operation;
  if (operation.logical)
    millrace::host::as_logical(operation.type, operation.send,
                               operation.bytes / aggregation::element_bytes(operation.type), operation.recv);
  else if (operation.bytes && operation.recv != operation.send)
    std::memcpy(operation.recv, operation.send, operation.bytes);
  operation.sequence = comm.operations++;
  operation.status = MR_OK;
  operation.done = true;
  request.path = "local";
  request.state = MR_OK;
}

mr_status start(mr_comm& comm, std::unique_ptr<mr_request> made, mr_request** request) {
  if (mr_status status = ended(comm); status != MR_OK) return status;
  if (comm.membership == nullptr)
    do_locally(comm, *made);
  else
    comm.context->context.submit(comm.membership, made.get());
  *request = made.release();
  return MR_OK;
}

mr_status wait_for(mr_request* request, std::string& text) {
  int state;
  while ((state = request->state.load(std::memory_order_acquire)) == MR_IN_PROGRESS)
    request->state.wait(MR_IN_PROGRESS, std::memory_order_acquire);
  text = std::move(request->operation.text);
  request->release();
  return static_cast<mr_status>(state);
}

// A C caller's enum holds whatever the caller has put there; as a C++ enum it must not even be looked at.
template <typename E>
int number_of(const E& value) {
  static_assert(sizeof(E) == sizeof(int));
  int number;
  std::memcpy(&number, &value, sizeof number);
  return number;
}

// A communicator of a context's, unless it comes to nothing.
class Counted {
 public:
  explicit Counted(mr_context& context) : context_(context) { context.communicators++; }
  ~Counted() {
    if (!kept_) context_.communicators--;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  void keep() { kept_ = true; }

 private:
  mr_context& context_;
  bool kept_ = false;
};

bool beyond_memory(const void* buffer, uint64_t bytes) {
  return bytes > UINTPTR_MAX - reinterpret_cast<uintptr_t>(buffer);
}

bool overlap(const uint8_t* send, uint64_t send_bytes, const uint8_t* recv, uint64_t recv_bytes) {
  auto a = reinterpret_cast<uintptr_t>(send), b = reinterpret_cast<uintptr_t>(recv);
  return a < b ? b - a < send_bytes : a - b < recv_bytes;
}

// A collective as it was called. `count` is of each rank's part where the vector falls into shards.
struct Call {
  const char* function;
  Collective collective;
  const void* send;
  void* recv;
  size_t count;
  int type;
  std::optional<int> op;
  int root = 0;
};

struct Operator {
  aggregation::ReduceOp op;
  bool logical;
};

Operator operator_of(int number) {
  if (number == MR_LAND) return {aggregation::ReduceOp::kBand, true};
  if (number == MR_LOR) return {aggregation::ReduceOp::kBor, true};
  return {static_cast<aggregation::ReduceOp>(number), false};
}

// The largest vector, so that an offset in its wire form cannot overflow either.
constexpr uint64_t kBytesMax = uint64_t{1} << 60;

mr_status collective(const Call& call, mr_comm* comm, mr_request** request) {
  auto wrong = [&](const std::string& sentence) { return misused(call.function + (": " + sentence)); };
  if (request == nullptr) return wrong("request is NULL");
  *request = nullptr;
  if (comm == nullptr) return wrong("comm is NULL");
  if (call.type < MR_U8 || call.type > MR_F8E5M2)
    return wrong("type " + std::to_string(call.type) + " is no element type");
  auto made = std::make_unique<mr_request>();
  auto& operation = made->operation;
  operation.collective = call.collective;
  operation.type = static_cast<aggregation::DataType>(call.type);
  const std::string type_name(aggregation::name(operation.type));
  if (call.op) {
    if (*call.op < MR_SUM || *call.op > MR_LOR)
      return wrong("operator " + std::to_string(*call.op) + " is no reduction operator");
    const Operator as = operator_of(*call.op);
    operation.op = as.op;
    operation.logical = as.logical;
    operation.deterministic = comm->deterministic;
    if (!aggregation::supported(operation.type, operation.op))
      return wrong(type_name + " cannot be reduced by " +
                   (as.logical ? "a logical operator" : std::string(aggregation::name(operation.op))));
    if (comm->wire == MR_WIRE_BFP8) {
      operation.bfp = true;
      if (!aggregation::wire_supported(operation.type, operation.op, operation.wire()))
        return wrong(type_name +
                     " does not go in block floating point (mr_comm_set_wire): f16, bf16 and f32 do");
    }
  }
  if (call.root < 0 || call.root >= comm->size)
    return wrong("root is " + std::to_string(call.root) + ": ranks go from 0 to " +
                 std::to_string(comm->size - 1));
  operation.root = static_cast<uint16_t>(call.root);

  const uint64_t parts = aggregation::has_shards(call.collective) ? static_cast<uint64_t>(comm->size) : 1;
  if (call.count > kBytesMax / aggregation::element_bytes(operation.type) / parts)
    return wrong(std::to_string(call.count) + " elements of " + type_name +
                 (parts > 1 ? " for each rank" : "") + " are more bytes than there can be");
  const uint64_t part = call.count * aggregation::element_bytes(operation.type);
  operation.bytes = part * parts;
  const auto rank = static_cast<uint16_t>(comm->rank), size = static_cast<uint16_t>(comm->size);
  const auto* send = static_cast<const uint8_t*>(call.send);
  auto* recv = static_cast<uint8_t*>(call.recv);
  const uint64_t send_bytes = operation.send_bytes(rank, size), recv_bytes = operation.recv_bytes(rank, size);
  if ((send_bytes && send == nullptr) || (recv_bytes && recv == nullptr))
    return wrong("a buffer is NULL, but count is " + std::to_string(call.count));
  if (beyond_memory(send, send_bytes) || beyond_memory(recv, recv_bytes))
    return wrong("a buffer of " + std::to_string(std::max(send_bytes, recv_bytes)) +
                 " bytes goes beyond the end of memory");
  // In place means that a rank's own part is where it is in the whole.
  const bool in_place = send_bytes && recv_bytes &&
                        (call.collective == Collective::kReduceScatter ? recv == send + rank * part
                         : call.collective == Collective::kAllGather   ? send == recv + rank * part
                                                                       : send == recv);
  if (!in_place && send_bytes && recv_bytes && overlap(send, send_bytes, recv, recv_bytes))
    return wrong("send and recv overlap: they must be disjoint or, in place, " +
                 std::string(call.collective == Collective::kReduceScatter
                                 ? "recv == send + rank × recv_count"
                             : call.collective == Collective::kAllGather ? "send == recv + rank × send_count"
                                                                         : "the same"));
  operation.send = send;
  operation.recv = recv;
  return start(*comm, std::move(made), request);
}

// The blocking form of a call that makes a request.
template <typename F>
mr_status blocking(F call) {
  mr_request* request;
  if (mr_status status = call(&request); status != MR_OK) return status;
  return guarded([&] { return wait_for(request, last_error); });
}

}  // namespace

extern "C" {

const char* mr_version(void) { return MILLRACE_VERSION; }

const char* mr_status_text(mr_status status) {
  switch (number_of(status)) {
    case MR_OK:
      return "ok";
    case MR_IN_PROGRESS:
      return "in progress";
    case MR_ERR_USAGE:
      return "usage";
    case MR_ERR_SYSTEM:
      return "system";
    case MR_ERR_UNREACHABLE:
      return "unreachable";
    case MR_ERR_REFUSED:
      return "refused";
    case MR_ERR_MISMATCH:
      return "mismatch";
    case MR_ERR_MEMBER_LOST:
      return "member lost";
    case MR_ERR_LATE:
      return "late";
    case MR_ERR_ABORTED:
      return "aborted";
    case MR_ERR_PROTOCOL:
      return "protocol";
  }
  return "unknown";
}

const char* mr_last_error(void) { return last_error.c_str(); }

mr_status mr_init(const mr_context_config* config, mr_context** context) {
  return guarded([&] {
    if (context == nullptr) return misused("mr_init: context is NULL");
    *context = nullptr;
    const TransportChoice choice = parse_transport(config ? config->transport : nullptr);
    *context = new mr_context(choice, config && config->device ? config->device : "");
    return MR_OK;
  });
}

mr_status mr_finalize(mr_context* context) {
  return guarded([&] {
    if (context == nullptr) return misused("mr_finalize: context is NULL");
    if (int n = context->communicators)
      return misused("mr_finalize: " + std::to_string(n) +
                     " of the context's communicators must be destroyed first");
    context->context.check_process();
    delete context;
    return MR_OK;
  });
}

const char* mr_transport_name(mr_context* context) {
  if (context == nullptr) return "";
  const char* name = "";
  guarded([&] {
    std::string text = context->context.transport_text();
    std::lock_guard lock(context->mutex);
    name = context->names.insert(std::move(text)).first->c_str();
    return MR_OK;
  });
  return name;
}

mr_status mr_comm_create(mr_context* context, const mr_comm_config* config, mr_comm** comm) {
  return guarded([&] {
    if (comm == nullptr) return misused("mr_comm_create: comm is NULL");
    *comm = nullptr;
    if (context == nullptr || config == nullptr) return misused("mr_comm_create: context or config is NULL");
    CommunicatorConfig checked_config = checked(*config);
    Counted counted(*context);  // while it joins, too
    auto made = std::make_unique<mr_comm>();
    made->context = context;
    made->rank = config->rank;
    made->size = config->size;
    if (config->size > 1) {
      const auto choice = millrace::host::choose_combining(config->combine);
      checked_config.combine = choice.combine;
      made->combining = (choice.combine ? "on: " : "off: ") + choice.why;
      made->membership = context->context.join(checked_config);
      if (mr_status status = made->membership->status(); status != MR_OK) {
        last_error = made->membership->text();
        context->context.leave(made->membership);
        return status;
      }
    }
    counted.keep();
    *comm = made.release();
    return MR_OK;
  });
}

mr_status mr_comm_destroy(mr_comm* comm) {
  return guarded([&] {
    if (comm == nullptr) return misused("mr_comm_destroy: comm is NULL");
    if (comm->membership) comm->context->context.leave(comm->membership);
    comm->context->communicators--;
    delete comm;
    return MR_OK;
  });
}

mr_status mr_abort(mr_comm* comm) {
  return guarded([&] {
    if (comm == nullptr) return misused("mr_abort: comm is NULL");
    comm->aborted = true;
    if (comm->membership) comm->context->context.abort(comm->membership, kAborted);
    return MR_OK;
  });
}

mr_status mr_comm_error(mr_comm* comm, const char** text) {
  if (text) *text = "";
  if (comm == nullptr) return guarded([] { return misused("mr_comm_error: comm is NULL"); });
  if (comm->membership == nullptr) {
    if (comm->aborted && text) *text = kAborted;
    return comm->aborted ? MR_ERR_ABORTED : MR_OK;
  }
  mr_status status = comm->membership->status();
  if (status != MR_OK && text) *text = comm->membership->text().c_str();
  return status;
}

mr_status mr_comm_get_stats(mr_comm* comm, mr_comm_stats* stats) {
  return guarded([&] {
    if (comm == nullptr || stats == nullptr) return misused("mr_comm_get_stats: comm or stats is NULL");
    LinkStats s;
    if (comm->membership) s = comm->context->context.stats(comm->membership);
    *stats = {s.packets_sent,      s.packets_received,    s.retransmitted,   s.timeouts,      s.naks_received,
              s.rnr_naks_received, s.duplicates_received, s.out_of_sequence, s.cnps_received, s.cnps_sent};
    return MR_OK;
  });
}

mr_status mr_comm_get_info(mr_comm* comm, mr_comm_info* info) {
  return guarded([&] {
    if (comm == nullptr || info == nullptr) return misused("mr_comm_get_info: comm or info is NULL");
    *info = {};
    info->combining_rank = -1;
    info->combining = comm->combining.c_str();
    if (!comm->membership) return MR_OK;
    const auto s = comm->context->context.start(comm->membership);
    if (!s) return MR_OK;
    info->group = s->group;
    info->path_mtu = millrace::roce::mtu_bytes(s->mtu_code);
    info->segment_bytes = s->segment_bytes;
    info->window = s->window;
    info->stripes = static_cast<uint32_t>(s->weights.size());
    const auto combining = comm->context->context.combining(comm->membership);
    info->combined_ranks = combining.ranks;
    if (combining.ranks != 0) info->combining_rank = combining.leader;
    return MR_OK;
  });
}

int mr_comm_rank(const mr_comm* comm) { return comm ? comm->rank : -1; }
int mr_comm_size(const mr_comm* comm) { return comm ? comm->size : -1; }

mr_status mr_register(mr_context* context, void* address, size_t bytes, mr_memory** memory) {
  return guarded([&] {
    if (memory == nullptr) return misused("mr_register: memory is NULL");
    *memory = nullptr;
    if (context == nullptr) return misused("mr_register: context is NULL");
    if (address == nullptr || bytes == 0)
      return misused("mr_register: there is no memory at NULL or of 0 bytes");
    if (beyond_memory(address, bytes))
      return misused("mr_register: address + bytes is beyond the end of memory");
    auto made = std::make_unique<mr_memory>(mr_memory{context, nullptr});
    made->registration = context->context.register_memory(address, bytes);
    *memory = made.release();
    return MR_OK;
  });
}

mr_status mr_deregister(mr_memory* memory) {
  return guarded([&] {
    if (memory == nullptr) return misused("mr_deregister: memory is NULL");
    if (!memory->context->context.deregister_memory(memory->registration))
      return misused("mr_deregister: operations are in flight in this memory: wait for them first");
    delete memory;
    return MR_OK;
  });
}

mr_status mr_comm_set_deterministic(mr_comm* comm, int on) {
  return guarded([&] {
    if (comm == nullptr) return misused("mr_comm_set_deterministic: comm is NULL");
    comm->deterministic = on != 0;
    return MR_OK;
  });
}

mr_status mr_comm_set_wire(mr_comm* comm, mr_wire wire) {
  return guarded([&] {
    if (comm == nullptr) return misused("mr_comm_set_wire: comm is NULL");
    const int number = number_of(wire);
    if (number != MR_WIRE_EXACT && number != MR_WIRE_BFP8)
      return misused("mr_comm_set_wire: " + std::to_string(number) + " is no wire form");
    comm->wire = static_cast<mr_wire>(number);
    return MR_OK;
  });
}

mr_status mr_all_reduce(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                        mr_request** request) {
  return guarded([&] {
    return collective(
        {"mr_all_reduce", Collective::kAllReduce, send, recv, count, number_of(type), number_of(op)}, comm,
        request);
  });
}

mr_status mr_reduce(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                    int root, mr_request** request) {
  return guarded([&] {
    return collective(
        {"mr_reduce", Collective::kReduce, send, recv, count, number_of(type), number_of(op), root}, comm,
        request);
  });
}

mr_status mr_broadcast(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, int root,
                       mr_request** request) {
  return guarded([&] {
    return collective({"mr_broadcast", Collective::kBroadcast, send, recv, count, number_of(type), {}, root},
                      comm, request);
  });
}

mr_status mr_reduce_scatter(mr_comm* comm, const void* send, void* recv, size_t recv_count, mr_type type,
                            mr_op op, mr_request** request) {
  return guarded([&] {
    return collective({"mr_reduce_scatter", Collective::kReduceScatter, send, recv, recv_count,
                       number_of(type), number_of(op)},
                      comm, request);
  });
}

mr_status mr_all_gather(mr_comm* comm, const void* send, void* recv, size_t send_count, mr_type type,
                        mr_request** request) {
  return guarded([&] {
    return collective({"mr_all_gather", Collective::kAllGather, send, recv, send_count, number_of(type), {}},
                      comm, request);
  });
}

mr_status mr_barrier(mr_comm* comm, mr_request** request) {
  return guarded([&] {
    return collective({"mr_barrier", Collective::kBarrier, nullptr, nullptr, 0, MR_U8, {}}, comm, request);
  });
}

mr_status mr_test(mr_request* request) {
  if (request == nullptr) return guarded([] { return misused("mr_test: request is NULL"); });
  return static_cast<mr_status>(request->state.load(std::memory_order_acquire));
}

mr_status mr_wait(mr_request* request, const char** text) {
  static thread_local std::string sentence;
  if (text) *text = "";
  return guarded([&] {
    if (request == nullptr) return misused("mr_wait: request is NULL");
    mr_status status = wait_for(request, sentence);
    if (text) *text = sentence.c_str();
    return status;
  });
}

void mr_request_free(mr_request* request) {
  if (request) request->release();
}

mr_status mr_request_get_info(const mr_request* request, mr_request_info* info) {
  return guarded([&] {
    if (request == nullptr || info == nullptr) return misused("mr_request_get_info: request or info is NULL");
    // Both transports send from and write to the caller's own memory, where it has the form of the wire.
    const auto& operation = request->operation;
    const char* memory = operation.bfp       ? "staged: block floating point on the wire"
                         : operation.logical ? "staged: what is sent is 0 or 1"
                                             : "registered";
    *info = {request->path, memory, operation.bytes, 0, 0};
    if (request->state.load(std::memory_order_acquire) == MR_IN_PROGRESS) return MR_OK;
    info->segments = request->operation.segments;
    info->operation = request->operation.sequence;
    return MR_OK;
  });
}

const char* mr_request_error(const mr_request* request) {
  if (request == nullptr || request->state.load(std::memory_order_acquire) == MR_IN_PROGRESS) return "";
  return request->operation.text.c_str();
}

mr_status mr_all_reduce_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type,
                             mr_op op) {
  return blocking([&](mr_request** r) { return mr_all_reduce(comm, send, recv, count, type, op, r); });
}

mr_status mr_reduce_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type, mr_op op,
                         int root) {
  return blocking([&](mr_request** r) { return mr_reduce(comm, send, recv, count, type, op, root, r); });
}

mr_status mr_broadcast_wait(mr_comm* comm, const void* send, void* recv, size_t count, mr_type type,
                            int root) {
  return blocking([&](mr_request** r) { return mr_broadcast(comm, send, recv, count, type, root, r); });
}

mr_status mr_reduce_scatter_wait(mr_comm* comm, const void* send, void* recv, size_t recv_count, mr_type type,
                                 mr_op op) {
  return blocking(
      [&](mr_request** r) { return mr_reduce_scatter(comm, send, recv, recv_count, type, op, r); });
}

mr_status mr_all_gather_wait(mr_comm* comm, const void* send, void* recv, size_t send_count, mr_type type) {
  return blocking([&](mr_request** r) { return mr_all_gather(comm, send, recv, send_count, type, r); });
}

mr_status mr_barrier_wait(mr_comm* comm) {
  return blocking([&](mr_request** r) { return mr_barrier(comm, r); });
}

}  // extern "C"
