// A rank's side of the combining on its host: a Transport whose switch is the hub of another process, or of
// this one. Segments are copied into memory that both see, results out of it. Its links are always as fast as
// memory, lose nothing and need no registration. The progress thread is its only caller.
#pragma once

#include <poll.h>

#include <array>
#include <deque>
#include <optional>

#include "host/local_socket.h"
#include "host/transport.h"

namespace millrace::host {

class LocalTransport final : public Transport {
 public:
  // Of a connection that a hub has accepted; `leader`: the rank whose process has it.
  LocalTransport(LocalSocket socket, uint16_t leader);
  ~LocalTransport() override;

  // Takes the hub's messages; whether there were any.
  bool receive(Time now);
  // Appends what poll(2) should wait on. false: something has arrived meanwhile, do not wait.
  bool prepare_to_wait(std::vector<pollfd>& descriptors);
  Time next_deadline() const;
  uint16_t leader() const { return leader_; }
  uint32_t ranks() const { return memory_ ? view_.layout().ranks : 0; }  // of this host; 0 before START

  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void*, size_t, Access) override { return {}; }
  void deregister_memory(const MemoryRegion&) override {}
  bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  void close(LinkId link) override;
  void poll(std::vector<Completion>& completions) override;
  LinkStats stats(LinkId) const override { return {}; }  // nothing crosses a network here

 private:
  // Where the result of a segment goes.
  struct Target {
    uint8_t* address = nullptr;
    uint32_t begin = 0, bytes = 0;  // of the segment's payload
  };
  struct Link {
    bool open = false;
    uint64_t posted = 0, results = 0;
    std::vector<Target> targets;  // by place in the window
  };
  void handle(LocalMessage message, FileDescriptor file);
  void start(const LocalMessage& message, FileDescriptor file);
  void tell(Completion completion);
  void tell_open(Completion completion);
  void end(const std::string& how);
  void check_hub(Time now);
  void take_results(std::vector<Completion>& completions);
  bool outstanding() const;
  bool results_waiting() const;

  LocalSocket socket_;
  uint16_t leader_;
  uint16_t world_ = 0;
  std::array<Link, aggregation::kStripesMax> links_;  // link id − 1
  std::optional<aggregation::JoinReply> reply_;
  std::optional<SharedMemory> memory_;
  LocalView view_;
  uint32_t seat_ = 0;
  bool hub_left_ = false, ended_ = false, said_goodbye_ = false;
  Time heard_{}, probed_ = kNever;  // a message or result of the hub's; asked whether it is alive
  std::vector<Completion> pending_;
};

}  // namespace millrace::host
