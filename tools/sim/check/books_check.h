// Occupancy within limits while the run goes on, and nothing left of it at its end.
#pragma once

#include <cstdint>
#include <string>

#include "tools/sim/check/violations.h"

namespace millrace::sim::check {

class BooksCheck {
 public:
  explicit BooksCheck(Violations& violations) : violations_(violations) {}

  // What a switch holds between two turns, and the most that its groups' windows allow.
  void held(int64_t at_ns, const std::string& who, uint64_t frames, uint64_t frames_max) {
    if (frames > frames_peak_) frames_peak_ = frames;
    if (frames > frames_max && !accused_) {
      accused_ = true;
      violations_.add("books", at_ns,
                      who + " holds " + std::to_string(frames) + " frames, its groups' windows allow " +
                          std::to_string(frames_max));
    }
  }
  void reserved(int64_t at_ns, const std::string& who, uint64_t memory, uint64_t memory_max) {
    if (memory > memory_max)
      violations_.add(
          "books", at_ns,
          who + " has promised " + std::to_string(memory) + " bytes of " + std::to_string(memory_max));
  }
  // At the end of a run each amount must be 0: frames in a pool, queue pairs, bytes reserved, records.
  void left(int64_t at_ns, const std::string& what, uint64_t amount) {
    if (amount != 0)
      violations_.add("books", at_ns, what + ": " + std::to_string(amount) + " left at the end");
  }
  // A spillway's books, in packets or bytes: what was taken in is what has left, lies there, or was lost.
  struct Spilled {
    uint64_t in = 0, drained = 0, rerouted = 0, resident = 0, lost = 0, size = 0;
  };
  void spilled(int64_t at_ns, const std::string& who, const Spilled& s) {
    if (s.in == s.drained + s.rerouted + s.resident + s.lost && s.resident <= s.size) return;
    violations_.add("books", at_ns,
                    who + " has spilled " + std::to_string(s.in) + ", drained " + std::to_string(s.drained) +
                        ", rerouted " + std::to_string(s.rerouted) + ", lost " + std::to_string(s.lost) +
                        " and holds " + std::to_string(s.resident) + " of " + std::to_string(s.size));
  }
  // What a port's queues and spillway gave to the port, before and now, while its link was down.
  void sent_down(int64_t at_ns, const std::string& who, uint64_t before, uint64_t now) {
    if (now != before)
      violations_.add(
          "books", at_ns,
          who + " has drained " + std::to_string(now - before) + " packets to a link that is down");
  }
  // What the spillway still keeps for a port whose link has been down for that long, and may need to give it
  // up.
  void kept_down(int64_t at_ns, const std::string& who, uint64_t packets, int64_t down_ns,
                 int64_t patience_ns) {
    if (packets != 0 && down_ns > patience_ns)
      violations_.add("books", at_ns,
                      who + " keeps " + std::to_string(packets) + " packets for a link that is down");
  }
  uint64_t frames_peak() const { return frames_peak_; }

 private:
  Violations& violations_;
  uint64_t frames_peak_ = 0;
  bool accused_ = false;
};

}  // namespace millrace::sim::check
