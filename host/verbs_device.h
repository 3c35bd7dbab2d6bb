// Which RDMA device leads to a switch, and that device opened: its context, protection domain and completion
// queue. Any thread may open one; afterwards it belongs to the endpoint's.
#pragma once

#include <infiniband/verbs.h>

#include <memory>
#include <string>
#include <vector>

#include "host/file_descriptor.h"
#include "roce/types.h"

namespace millrace::host {

// Frees what libibverbs and librdmacm hand out. A failure to free is a bug here (something still uses it).
template <auto kDestroy>
struct VerbsDeleter {
  template <typename T>
  void operator()(T* object) const {
    kDestroy(object);
  }
};
template <typename T, auto kDestroy>
using VerbsPtr = std::unique_ptr<T, VerbsDeleter<kDestroy>>;

class VerbsDevice {
 public:
  // The device that `name` (a network interface, an RDMA device, or empty: the interface that routes to the
  // switch) stands for, with a RoCE v2 GID of the switch's family. Throws millrace::Error saying why there is
  // none and what to do.
  static std::unique_ptr<VerbsDevice> open(const std::string& name, const IpAddress& switch_address);
  // Throws millrace::Error where `name` is neither a network interface nor an RDMA device.
  static void check_name(const std::string& name);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* pd() const { return pd_.get(); }
  ibv_cq* cq() const { return cq_.get(); }
  ibv_comp_channel* channel() const { return channel_.get(); }
  const std::string& name() const { return name_; }  // "mlx5_0"
  const std::string& interface() const { return interface_; }
  int interface_index() const { return interface_index_; }
  uint8_t port() const { return port_; }
  uint32_t path_mtu_max() const { return path_mtu_max_; }
  const ibv_device_attr& limits() const { return limits_; }

  // Makes room in the completion queue for this many more entries. Throws millrace::Error.
  void reserve_completions(uint32_t entries);
  void return_completions(uint32_t entries) { reserved_ -= entries; }
  // The interface's address that packets to the switch come from. Throws millrace::Error where that is no
  // RoCE v2 GID of the port.
  IpAddress source_towards(const IpAddress& switch_address) const;
  // Why a GID index that the connection manager has chosen will not do; empty: it will.
  std::string gid_objection(uint8_t gid_index) const;
  // A counter of the port's that the kernel publishes (hw_counters or counters in sysfs); 0 where the driver
  // has none of that name.
  uint64_t counter(const char* name) const;

 private:
  VerbsDevice() = default;
  std::vector<ibv_gid_entry> gids() const;

  VerbsPtr<ibv_context, ibv_close_device> context_;
  VerbsPtr<ibv_pd, ibv_dealloc_pd> pd_;
  VerbsPtr<ibv_comp_channel, ibv_destroy_comp_channel> channel_;
  VerbsPtr<ibv_cq, ibv_destroy_cq> cq_;
  std::string name_, interface_;
  int interface_index_ = 0;
  uint8_t port_ = 1;
  uint32_t path_mtu_max_ = 0;
  uint32_t reserved_ = 0;
  ibv_device_attr limits_{};
};

}  // namespace millrace::host
