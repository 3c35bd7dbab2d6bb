// Faults on purpose, for labs: one Impairment spoils one direction of one port. Pure and seeded: the same
// frames at the same times meet the same fate. Called by the worker; takes its memory at construction, frames
// for duplicates and corrupted copies from the pool.
#pragma once

#include <random>
#include <vector>

#include "roce/frame.h"

namespace millrace::switching {

struct ImpairConfig {
  // Probabilities per frame, 0 … 1.
  double loss = 0, duplicate = 0, reorder = 0, corrupt = 0;
  Time delay{};
  uint64_t seed = 1;
  bool any() const { return loss > 0 || duplicate > 0 || reorder > 0 || corrupt > 0 || delay > Time{}; }
};

#define MILLRACE_IMPAIR_COUNTERS(X)                                                       \
  X(lost)                                                                                 \
  X(duplicated) X(reordered) X(corrupted) X(delayed)                                      \
      X(pool_empty) /* no buffer for a duplicate or a corrupted copy: passed as it was */ \
      X(queue_full) /* dropped: too many frames are being delayed */
struct ImpairCounters {
#define X(n) uint64_t n = 0;
  MILLRACE_IMPAIR_COUNTERS(X)
#undef X
};

class Impairment {
 public:
  // At most `queue_max` frames are held back at a time.
  Impairment(FramePool& pool, const ImpairConfig& config, size_t queue_max = 4096);
  ~Impairment() { clear(); }
  Impairment(const Impairment&) = delete;
  Impairment& operator=(const Impairment&) = delete;

  // Also at run time; frames already held keep their time.
  void configure(const ImpairConfig& config);
  const ImpairConfig& config() const { return config_; }

  // Appends what leaves at once to `out` and keeps the rest for poll(). A reordered frame is held back for 20
  // to 500 µs more than the others, so that those behind it overtake.
  void pass(Frame frame, Time now, FrameList& out) noexcept {
    if (!active_) {
      out.push(std::move(frame));
      return;
    }
    spoil(std::move(frame), now, out);
  }
  void poll(Time now, FrameList& out) noexcept;
  Time next_deadline() const { return queue_.empty() ? kNever : queue_.front().due; }
  size_t held() const { return queue_.size(); }
  void clear() noexcept;  // drops what is held
  const ImpairCounters& counters() const { return counters_; }

 private:
  struct Held {
    Time due;
    uint64_t order;  // of arrival: equal times keep it
    FrameBuffer* frame;
  };
  static bool later(const Held& a, const Held& b) {
    return a.due != b.due ? a.due > b.due : a.order > b.order;
  }
  bool happens(double probability) noexcept;
  void spoil(Frame frame, Time now, FrameList& out) noexcept;
  void hold_or_pass(Frame frame, Time now, FrameList& out) noexcept;
  Frame corrupted(Frame frame) noexcept;

  FramePool& pool_;
  ImpairConfig config_;
  bool active_ = false;
  size_t queue_max_;
  std::vector<Held> queue_;  // a heap, the earliest in front
  uint64_t order_ = 0;
  std::mt19937_64 random_;
  ImpairCounters counters_;
};

}  // namespace millrace::switching
