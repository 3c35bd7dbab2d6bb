// DCQCN's reaction point: at what rate one queue pair may send, and when its next packet may go (Zhu et al.,
// "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015, section 5; the counters of its rate
// increase are QCN's, IEEE 802.1Qau). Pure; called by its queue pair only. A queue pair that no CNP holds
// below the line rate pays for one comparison per packet: what timers would have done meanwhile is made up
// for when somebody asks.
#pragma once

#include "roce/types.h"

namespace millrace::roce {

struct DcqcnConfig {
  uint64_t line_rate = 100'000'000'000;  // bit/s; where a queue pair begins, and what it never exceeds
  // The paper has none; this is its authors' simulator's. Never more than a hundredth of the line.
  uint64_t minimum_rate = 100'000'000;
  double g = 1.0 / 256;
  Time alpha_timer = std::chrono::microseconds(55);     // K
  Time increase_timer = std::chrono::microseconds(55);  // T
  uint64_t byte_counter = 10'000'000;                   // B
  uint32_t fast_recovery = 5;                           // F
  uint64_t additive_increase = 40'000'000;              // R_AI, bit/s
  uint64_t hyper_increase = 200'000'000;                // R_HAI, bit/s
};

class Dcqcn {
 public:
  explicit Dcqcn(const DcqcnConfig& config);

  // A CNP arrived.
  void notified(Time now);
  // False: the line's own rate is the limit, and nobody need call sent().
  bool limited() const { return limited_; }
  // A packet of `bytes`, headers included, leaves at `now` while limited(). Returns when the next may: `now`
  // or earlier, if at once.
  Time sent(uint32_t bytes, Time now);

  // As they would be found at `now`; bit/s.
  uint64_t rate(Time now) const;
  uint64_t target_rate(Time now) const;
  double alpha(Time now) const;

 private:
  void catch_up(Time now);
  void increase();
  void recover();

  DcqcnConfig config_;
  double line_, minimum_;
  double current_, target_;  // R_C, R_T, bit/s
  double alpha_ = 1;
  Time alpha_at_ = kNever, increase_at_ = kNever;
  uint64_t bytes_ = 0;
  uint32_t timer_steps_ = 0, byte_steps_ = 0;  // T and BC of the paper's figure 7
  uint64_t steps_max_;                         // of the timer, after which any rate is the line's again
  Time next_{};
  double next_fraction_ = 0;  // ns
  bool limited_ = false;
};

// The pace of all that one queue pair sends, requests and READ responses alike: its peer's CNPs do not say
// which of them met congestion. Until somebody calls release(), what is held stays so.
class Pace {
 public:
  explicit Pace(const DcqcnConfig& config) : dcqcn_(config) {}

  void notified(Time now) { dcqcn_.notified(now); }
  bool limited() const { return dcqcn_.limited(); }
  // Behind a packet of `bytes` that left at `now`; needed while limited() only.
  void sent(uint32_t bytes, Time now) {
    const Time next = dcqcn_.sent(bytes, now);
    held_until_ = next > now ? next : kNever;
  }
  void release(Time now) {
    if (now >= held_until_) held_until_ = kNever;
  }
  bool held() const { return held_until_ != kNever; }
  Time held_until() const { return held_until_; }  // kNever: nothing is held back
  const Dcqcn& dcqcn() const { return dcqcn_; }

 private:
  Dcqcn dcqcn_;
  Time held_until_ = kNever;
};

}  // namespace millrace::roce
