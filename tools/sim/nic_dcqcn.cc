#include "tools/sim/nic_dcqcn.h"

#include <algorithm>

namespace millrace::sim {

void Dcqcn::on_cnp(Time now) {
  catch_up(now);
  if (p_.clamp_target || risen_) target_ = current_;
  risen_ = false;
  current_ = std::max(p_.least_gbit, current_ * (1 - alpha_ / 2));
  alpha_ = (1 - p_.g) * alpha_ + p_.g;
  limited_ = true;
  bytes_ = 0;
  timer_steps_ = byte_steps_ = 0;
  alpha_at_ = now + p_.alpha_period;
  increase_at_ = now + p_.increase_period;
}

void Dcqcn::sent(uint64_t bytes, Time now) {
  catch_up(now);
  if (!limited_) return;
  for (bytes_ += bytes; bytes_ >= p_.increase_bytes && limited_; bytes_ -= p_.increase_bytes) {
    increase();
    byte_steps_++;
  }
}

void Dcqcn::catch_up(Time now) {
  // α goes on falling at line rate, so that the next CNP finds what is left of it.
  if (alpha_ < 1e-6) alpha_at_ = kNever;
  for (; alpha_at_ <= now && alpha_ >= 1e-6; alpha_at_ += p_.alpha_period) alpha_ *= 1 - p_.g;
  while (limited_ && increase_at_ <= now) {
    increase_at_ += p_.increase_period;
    increase();
    timer_steps_++;
  }
}

// Figure 6 of the paper: F steps back towards the old rate, then beyond it, the faster when both the timer
// and the bytes have gone that far.
void Dcqcn::increase() {
  risen_ = true;
  const uint32_t most = std::max(timer_steps_, byte_steps_), least = std::min(timer_steps_, byte_steps_);
  if (most >= p_.fast_recovery) {
    target_ += least > p_.fast_recovery ? p_.hyper_gbit * (least - p_.fast_recovery) : p_.additive_gbit;
    target_ = std::min(target_, p_.line_gbit);
  }
  current_ = (current_ + target_) / 2;
  if (current_ < p_.line_gbit * 0.999) return;
  current_ = p_.line_gbit;
  limited_ = false;
  increase_at_ = kNever;
}

}  // namespace millrace::sim
