// A rank's side of the combining on its host: a Transport whose switch is the hub of another process, or of
// this one. Segments are copied into memory that both see, results out of it. Its links are always as fast as
// memory, lose nothing and need no registration. Pure: who moves its messages and maps the memory
// (LocalTransport, or a simulator) derives from it, and is its only caller.
#pragma once

#include <array>
#include <optional>

#include "host/local_memory.h"
#include "host/local_message.h"
#include "host/transport.h"

namespace millrace::host {

class LocalRank : public Transport {
 public:
  // `leader`: the rank whose process, number `process`, has the hub, which has accepted this one.
  LocalRank(uint16_t leader, uint32_t process) : leader_(leader), process_(process) {}

  // A message of the hub's, but for START.
  void handle(LocalMessage message, Time now);
  // START, with the memory that came along, which outlives this.
  void start(const LocalMessage& message, const LocalView& memory, Time now);
  // START that came to nothing.
  void start_failed(const std::string& why);
  void hub_gone() { end("is gone"); }
  // While results are due: is the hub alive? That its process ends shows at once, that it is stopped does
  // not.
  void check_hub(Time now);
  Time next_deadline() const;
  uint16_t leader() const { return leader_; }
  uint32_t ranks() const { return view_ ? view_.layout().ranks : 0; }  // of this host; 0 before START

  LinkId connect(const ConnectRequest& request) override;
  MemoryRegion register_memory(const void*, size_t, Access) override { return {}; }
  void deregister_memory(const MemoryRegion&) override {}
  bool post_segment(LinkId link, uint64_t segment, const aggregation::SegmentHeader& header,
                    std::span<const uint8_t> payload, const MemoryRegion& source) override;
  void close(LinkId link) override;
  void poll(std::vector<Completion>& completions) override;
  LinkStats stats(LinkId) const override { return {}; }  // nothing crosses a network here

 protected:
  // To the hub. That it is gone shows elsewhere.
  virtual void say(const LocalMessage& message) = 0;
  // Nothing is said any more.
  virtual void hang_up() = 0;

  bool over() const { return ended_ || said_goodbye_; }
  bool has_pending() const { return !pending_.empty(); }
  bool results_waiting() const;
  // Whether the hub need not ring when there are results: this side looks by itself.
  void set_sleeping(bool sleeping) {
    if (view_) view_.rank(seat_).sleeping.publish(sleeping);
  }

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
  void tell(Completion completion);
  void tell_open(Completion completion);
  void end(const std::string& how);
  void take_results(std::vector<Completion>& completions);
  bool outstanding() const;

  uint16_t leader_;
  uint32_t process_;
  uint16_t world_ = 0;
  std::array<Link, aggregation::kStripesMax> links_;  // link id − 1
  std::optional<aggregation::JoinReply> reply_;
  LocalView view_;
  uint32_t seat_ = 0;
  bool hub_left_ = false, ended_ = false, said_goodbye_ = false;
  Time heard_{}, probed_ = kNever;  // a message or result of the hub's; asked whether it is alive
  std::vector<Completion> pending_;
};

}  // namespace millrace::host
