// The verbs transport: the switch reached by an RDMA NIC's own queue pairs, through librdmacm and libibverbs
// (design, "Join"). It makes its queue pairs itself, since librdmacm's would take the interface's path MTU,
// and gathers each segment straight from the caller's memory. One completion queue for all links, polled
// while there is work and waited on by its event otherwise.
#pragma once

#include <rdma/rdma_cma.h>

#include <map>
#include <memory>
#include <unordered_map>

#include "host/endpoint.h"
#include "host/registration_cache.h"
#include "host/verbs_device.h"

namespace millrace::host {

class VerbsLink;

class VerbsEndpoint final : public Endpoint, private Transport, private Registrar {
 public:
  // Throws millrace::Error.
  explicit VerbsEndpoint(std::unique_ptr<VerbsDevice> device);
  ~VerbsEndpoint() override;

  Transport& transport() override { return *this; }
  const std::string& text() const override { return text_; }
  uint32_t path_mtu_max() const override { return device_->path_mtu_max(); }
  bool receive(Time now) override;
  void send(Time now) override;
  void detach() override;
  bool idle() const override { return links_.empty(); }
  Time next_deadline() const override;
  bool prepare_to_wait(std::vector<pollfd>& descriptors) override;

 private:
  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void* address, size_t bytes, Access access) override;
  void deregister_memory(const MemoryRegion& region) override;
  bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  bool post_message(LinkId link, std::span<const uint8_t> message) override;
  void close(LinkId link) override;
  void poll(std::vector<Completion>& completions) override;
  LinkStats stats(LinkId link) const override;

  MemoryRegion enroll(const void* address, size_t bytes, Access access, void*& handle) override;
  void dismiss(void* handle) override;

  bool poll_completion_queue(Time now);
  void take_cm_events(Time now);
  void take_device_events(Time now);
  VerbsLink* find(LinkId id) const;

  std::unique_ptr<VerbsDevice> device_;
  std::string text_;
  VerbsPtr<rdma_event_channel, rdma_destroy_event_channel> cm_channel_;
  RegistrationCache cache_;
  std::map<LinkId, std::unique_ptr<VerbsLink>> links_;
  std::vector<Completion> completions_;
  LinkId next_link_ = 1;
  Time now_{};
  bool detached_ = false;
};

}  // namespace millrace::host
