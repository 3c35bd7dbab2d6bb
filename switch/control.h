// The switch's two Unix sockets: one to read, one to change, told apart by file permission. One JSON request
// per line, one JSON reply per line. A thread of its own serves them; what needs the worker goes to it as a
// command through one bounded ring and is carried out there between two bursts. What a request means is apart
// from the sockets, in Requests. Knows no DPDK.
#pragma once

#include <atomic>
#include <boost/lockfree/spsc_queue.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <semaphore>
#include <string>
#include <thread>
#include <vector>

#include "switch/capture.h"
#include "switch/config.h"
#include "switch/pipeline.h"
#include "switch/qos_status.h"

namespace millrace::switching {

// Names of what a port counts; drops among them.
// clang-format off: it finds no rest with comments between the entries
#define MILLRACE_PORT_COUNTERS(X)                                        \
  X(rx_frames) X(rx_bytes) X(tx_frames) X(tx_bytes)                      \
  X(tx_chained)    /* sent as headers and shared payload, not copied */  \
  X(rx_too_long)   /* dropped: more segments than one buffer holds */    \
  X(tx_too_long)   /* dropped: longer than the device can send */        \
  X(tx_queue_full) /* dropped: the driver did not keep up */             \
  X(tx_pool_empty) /* dropped: no buffer to copy or chain it */          \
  X(device_missed) X(device_rx_errors) X(device_tx_errors) X(device_no_buffer)
// clang-format on
struct PortCounters {
#define X(n) uint64_t n = 0;
  MILLRACE_PORT_COUNTERS(X)
#undef X
};

struct PortStatus {
  std::string name, device;
  bool link_up = false;
  uint32_t speed_mbps = 0;
  uint32_t frame_bytes_max = 0;  // the longest that is sent
  bool multi_segments = false;   // payloads shared by several results are not copied
  PortCounters counters;
  ImpairConfig rx_config, tx_config;
  ImpairCounters rx_impair, tx_impair;
  std::optional<CaptureCounters> capture;
};

// What the worker copies out between two bursts.
struct Snapshot {
  Time uptime{};
  std::vector<PortStatus> ports;
  std::optional<CaptureCounters> capture;
  uint32_t frames = 0, frames_available = 0, frames_cached = 0;  // read from the pools themselves
  uint64_t memory_reserved = 0;
  size_t queue_pairs = 0;
  PipelineCounters pipeline;
  RouterCounters router;
  aggregation::Counters aggregation;
  roce::CmCounters cm;
  uint32_t l2_entries = 0;
  std::optional<QosStatus> qos;
};

struct Command {
  enum class Kind { kSnapshot, kGroups, kL2, kRoutes, kNeighbours, kQos, kAbort, kImpair };
  Kind kind = Kind::kSnapshot;
  uint32_t group = 0;  // kAbort
  std::string why;
  uint16_t port = 0;  // kImpair
  std::optional<ImpairConfig> rx, tx;
  // The worker's answer, complete when `done` has been released.
  bool ok = false;
  Snapshot snapshot;
  std::vector<aggregation::GroupInfo> groups;
  std::vector<L2Table::Entry> l2;
  std::vector<Router::RouteInfo> routes;
  std::vector<NeighbourTable::Info> neighbours;
  std::optional<QosStatus> qos;
  std::binary_semaphore done{0};
};

// Control's thread pushes, the worker pops. The ring holds pointers; a command is its pusher's and stays
// until done.
using CommandRing = boost::lockfree::spsc_queue<Command*, boost::lockfree::capacity<64>>;

// All counters by room, as "counters" replies and the summary at the end prints.
nlohmann::json counters_json(const Snapshot& snapshot);

// What request lines mean and what is answered: no socket, no thread.
class Requests {
 public:
  // `run` has a command carried out and returns when it is; it may throw millrace::Error.
  Requests(const Config& config, std::function<void(Command&)> run) : config_(config), run_(std::move(run)) {}
  // One line of JSON, whatever `line` is.
  std::string reply(const std::string& line, bool may_change);

 private:
  nlohmann::json answer(const nlohmann::json& request, bool may_change);
  nlohmann::json status();
  nlohmann::json groups();
  nlohmann::json l2();
  nlohmann::json routes();
  nlohmann::json neighbours();
  nlohmann::json qos(bool spillway);
  std::string interface_name(uint16_t interface) const;
  nlohmann::json abort(const nlohmann::json& request);
  nlohmann::json impair(const nlohmann::json& request);

  const Config& config_;
  std::function<void(Command&)> run_;
};

class Control {
 public:
  // Opens the sockets named in the configuration (replacing those that nobody serves any more) and starts the
  // thread. Throws millrace::Error.
  Control(const Config& config, CommandRing& ring);
  // Stops the thread and removes the socket files. To be called on the worker's thread when the worker has
  // carried out its last command: what is still in the ring is answered as refused.
  ~Control();

 private:
  struct Listener {
    int fd = -1;
    std::string path;
    bool may_change = false;
  };
  struct Client {
    int fd = -1;
    bool may_change = false;
    std::string in, out;
  };
  void open_socket(const std::string& path, bool may_change);
  void close_all();
  void serve();
  void accept_client(const Listener& listener);
  bool read_client(Client& client);
  bool write_client(Client& client);
  void run(Command& command);

  CommandRing& ring_;
  Requests requests_;
  std::vector<Listener> listeners_;
  std::vector<Client> clients_;
  int wake_fd_ = -1;
  std::atomic<bool> stop_{false}, finished_{false};
  std::thread thread_;
};

}  // namespace millrace::switching
