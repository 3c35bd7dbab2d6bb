// The loop that drives everything: bursts from the ports through capture and impairment into the pipeline and
// back, timers, control's commands between two bursts, and sleep when nothing happens. One thread; the clock
// is read once per turn. The capture point is the wire: before impairment on receive, after it on transmit.
#pragma once

#include <csignal>
#include <memory>

#include "switch/capture.h"
#include "switch/control.h"
#include "switch/port.h"

namespace millrace::switching {

// The captures of a configuration, and the thread that writes them.
class Captures {
 public:
  explicit Captures(const Config& config);
  // Of a port, with the number that the port has in it.
  struct Tap {
    Capture* capture = nullptr;
    uint16_t interface = 0;
  };
  Tap of_port(size_t port) const { return {by_port_[port].get(), 0}; }
  Tap of_all(size_t port) const { return {all_.get(), static_cast<uint16_t>(port)}; }
  std::optional<CaptureCounters> port_counters(size_t port) const;
  std::optional<CaptureCounters> all_counters() const;
  // Writes and closes everything; to be called when nothing is recorded any more.
  void finish() { writer_.reset(); }

 private:
  std::vector<std::unique_ptr<Capture>> by_port_;
  std::unique_ptr<Capture> all_;
  std::unique_ptr<CaptureWriter> writer_;
};

class Worker {
 public:
  // `ring`'s consumer is the thread that calls run().
  Worker(const Config& config, MbufPool& pool, Captures& captures, CommandRing& ring);
  ~Worker();

  // Until *signals > 0 and the pipeline has drained, at most kDrain later, or until *signals > 1.
  void run(const volatile std::sig_atomic_t* signals);
  Snapshot snapshot() const;
  // What was found out about the ports, to be logged once.
  const std::vector<std::string>& notes() const { return notes_; }
  // Drops what is held and stops the ports.
  void stop();

 private:
  static constexpr Time kDrain = std::chrono::seconds(3);
  struct Lane {
    Lane(const PortConfig& config, uint16_t index, MbufPool& pool, const Captures& captures);
    void record(const Frame& frame, Direction direction, Time now) noexcept {
      if (own.capture != nullptr) own.capture->record(frame, own.interface, direction, now);
      if (all.capture != nullptr) all.capture->record(frame, all.interface, direction, now);
    }
    Port port;
    Impairment rx, tx;
    Captures::Tap own, all;
  };

  static std::vector<std::unique_ptr<Lane>> make_lanes(const Config& config, MbufPool& pool,
                                                       const Captures& captures);
  PipelineConfig pipeline_config();
  std::vector<uint64_t> link_speeds() const;
  QosStatus with_pfc(QosStatus status) const;
  bool turn(Time now) noexcept;  // whether there was anything to do
  void watch_links(Time now) noexcept;
  void transmit(Time now) noexcept;
  bool execute_commands(Time now);
  void execute(Command& command, Time now);
  Time next_deadline() const;
  bool drained() const;
  void rest(bool worked, Time now);

  const Config& config_;
  MbufPool& pool_;
  Captures& captures_;
  CommandRing& ring_;
  std::vector<std::string> notes_;
  std::vector<std::unique_ptr<Lane>> lanes_;  // before the pipeline, which is told what they found out
  Pipeline pipeline_;
  FrameList arrived_, received_, out_, leaving_;  // empty between turns
  Time started_;
  Time next_link_check_{};
  Time last_work_{};
  Time sleep_{};  // of the next rest
};

Time clock_now();

}  // namespace millrace::switching
