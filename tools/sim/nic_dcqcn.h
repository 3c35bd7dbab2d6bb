// DCQCN's reaction point, the rate of one flow (Zhu et al., "Congestion Control for Large-Scale RDMA
// Deployments", SIGCOMM 2015, section 5): the parameters are the paper's. It keeps no timers that anybody has
// to serve: what time would have changed is made up for when the rate is asked for.
#pragma once

#include "roce/types.h"

namespace millrace::sim {

struct DcqcnParameters {
  double line_gbit = 100;
  double g = 1.0 / 256;
  Time alpha_period = std::chrono::microseconds(55);     // K: without a CNP, α falls
  Time increase_period = std::chrono::microseconds(55);  // T
  uint64_t increase_bytes = 10'000'000;                  // B
  uint32_t fast_recovery = 5;                            // F
  double additive_gbit = 0.04, hyper_gbit = 0.2;         // R_AI; R_HAI for each step
  double least_gbit = 0.1;
  // The paper's target follows the rate down with every CNP. Adapters may do so only once the rate has risen
  // in between (mlx5's clamp_tgt_rate: 0), so that a row of CNPs keeps the target of the first.
  bool clamp_target = true;
};

class Dcqcn {
 public:
  explicit Dcqcn(const DcqcnParameters& parameters) : p_(parameters), current_(p_.line_gbit) {}

  void on_cnp(Time now);
  void sent(uint64_t bytes, Time now);
  double gbit(Time now) {
    catch_up(now);
    return current_;
  }
  double alpha() const { return alpha_; }
  double target_gbit() const { return target_; }
  bool limited() const { return limited_; }

 private:
  void catch_up(Time now);
  void increase();

  DcqcnParameters p_;
  bool risen_ = true;     // since the last CNP
  bool limited_ = false;  // at line rate nothing is to be done
  double current_, target_ = 0, alpha_ = 1;
  Time alpha_at_ = kNever, increase_at_ = kNever;
  uint64_t bytes_ = 0;
  uint32_t timer_steps_ = 0, byte_steps_ = 0;
};

}  // namespace millrace::sim
