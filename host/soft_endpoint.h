// The soft transport on one Ethernet interface: SoftEngine between the sockets of SoftSocket.
#pragma once

#include "host/endpoint.h"
#include "host/soft_engine.h"
#include "host/soft_socket.h"

namespace millrace::host {

class SoftEndpoint final : public Endpoint {
 public:
  // Throws millrace::Error. `ca_guid` and `seed` at random, else peers take two hosts for one.
  SoftEndpoint(const std::string& device, uint64_t ca_guid, uint64_t seed);

  Transport& transport() override { return engine_; }
  const std::string& text() const override { return text_; }
  uint32_t path_mtu_max() const override { return socket_.path_mtu_max(); }
  bool receive(Time now) override;
  void send(Time now) override;
  void detach() override;
  void release_memory() override { socket_.own_payloads(); }
  bool idle() const override { return engine_.idle() && (detached_ || socket_.backlog() == 0); }
  Time next_deadline() const override;
  bool prepare_to_wait(std::vector<pollfd>& descriptors) override;

 private:
  HeapFramePool pool_;  // outlives all frames
  SoftSocket socket_;
  SoftEngine engine_;
  std::string text_;
  FrameList received_, out_;
  bool detached_ = false;
};

}  // namespace millrace::host
