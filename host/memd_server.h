// What millrace-memd runs: a lender on one transport, which answers to poll(2). The main thread owns it.
#pragma once

#include <poll.h>

#include <memory>
#include <string>
#include <vector>

#include "host/memd.h"

namespace millrace::host {

struct MemdConfig {
  std::string device;                // a network interface or an RDMA device; empty: the address's
  std::optional<IpAddress> address;  // where it listens
  uint16_t port = buffering::kLenderPort;
  std::string transport = "auto";  // or "verbs" or "soft", which do not fall back
  uint64_t seed = 1;  // of QPNs, rkeys and the like: at random, else two lenders are taken for one
};

struct MemdCounters {
  uint64_t leases = 0, refused = 0, ended = 0, died = 0, replaced = 0;
};

class MemdServer {
 public:
  virtual ~MemdServer() = default;
  // "verbs on rxe0 port 1 (eth0): there is a usable device (asked for auto)".
  virtual std::string text() const = 0;
  // Whether it counts bytes: what a NIC moves nobody here sees.
  virtual bool counts_bytes() const = 0;
  virtual void prepare_to_wait(std::vector<pollfd>& descriptors) = 0;
  virtual Time next_deadline() const = 0;
  // Takes what has come and sends what is due. Throws millrace::Error when the device is gone.
  virtual void serve(Time now) = 0;
  // Tells the borrowers, and takes no more of them; go on with serve() until idle().
  virtual void shutdown(Time now) = 0;
  virtual bool idle() const = 0;
  virtual MemdCounters counters() const = 0;
};

// `table` outlives it. Throws millrace::Error with a sentence that says what to do.
std::unique_ptr<MemdServer> make_memd_server(const MemdConfig& config, LeaseTable& table);
std::unique_ptr<MemdServer> make_soft_memd(const MemdConfig& config, LeaseTable& table);
std::unique_ptr<MemdServer> make_verbs_memd(const MemdConfig& config, LeaseTable& table);

}  // namespace millrace::host
