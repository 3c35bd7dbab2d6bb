#include "roce/dcqcn.h"

#include <algorithm>
#include <cmath>

namespace millrace::roce {

namespace {

// What a caller that comes late has missed is made up for, up to this: a thread that sleeps or serves others
// must not lower the rate, nor an idle queue pair save up a burst.
constexpr Time kLateMax = std::chrono::microseconds(20);
// The rate halves its distance to the line and never gets there; from here on it is the line's.
constexpr double kRecovered = 0.999;

}  // namespace

Dcqcn::Dcqcn(const DcqcnConfig& config)
    : config_(config),
      line_(static_cast<double>(config.line_rate)),
      minimum_(std::min(static_cast<double>(config.minimum_rate), line_ / 100)),
      current_(line_),
      target_(line_),
      // F steps of recovery, as many as lead the target from nothing to the line, ten that halve what is left
      // to less than a thousandth, and some.
      steps_max_(config.fast_recovery + config.line_rate / std::max<uint64_t>(config.additive_increase, 1) +
                 16) {}

void Dcqcn::notified(Time now) {
  catch_up(now);
  if (!limited_) {
    next_ = now;
    next_fraction_ = 0;
  }
  limited_ = true;
  target_ = current_;
  current_ = std::max(minimum_, current_ * (1 - alpha_ / 2));
  alpha_ = (1 - config_.g) * alpha_ + config_.g;
  alpha_at_ = now + config_.alpha_timer;
  increase_at_ = now + config_.increase_timer;
  timer_steps_ = byte_steps_ = 0;
  bytes_ = 0;
}

Time Dcqcn::sent(uint32_t bytes, Time now) {
  catch_up(now);
  for (bytes_ += bytes; limited_ && bytes_ >= config_.byte_counter; bytes_ -= config_.byte_counter) {
    byte_steps_++;
    increase();
  }
  if (!limited_) return now;
  next_ = std::max(next_, now - kLateMax);
  next_fraction_ += bytes * 8e9 / current_;
  const double whole = std::floor(next_fraction_);
  next_fraction_ -= whole;
  next_ += Time(static_cast<int64_t>(whole));
  return next_;
}

void Dcqcn::catch_up(Time now) {
  if (now >= alpha_at_) {
    // Also at line rate, so that the next CNP finds what is left of it.
    const auto steps = (now - alpha_at_) / config_.alpha_timer + 1;
    alpha_ *= std::pow(1 - config_.g, static_cast<double>(steps));
    alpha_at_ += steps * config_.alpha_timer;
  }
  if (!limited_ || now < increase_at_) return;
  if (static_cast<uint64_t>((now - increase_at_) / config_.increase_timer) >= steps_max_) return recover();
  while (limited_ && now >= increase_at_) {
    increase_at_ += config_.increase_timer;
    timer_steps_++;
    increase();
  }
}

// Figure 7 of the paper. Hyper increase grows with each step, as QCN's does.
void Dcqcn::increase() {
  const uint32_t f = config_.fast_recovery;
  const uint32_t most = std::max(timer_steps_, byte_steps_), least = std::min(timer_steps_, byte_steps_);
  if (least > f)
    target_ += static_cast<double>(least - f) * static_cast<double>(config_.hyper_increase);
  else if (most > f)
    target_ += static_cast<double>(config_.additive_increase);
  target_ = std::min(target_, line_);
  current_ = (current_ + target_) / 2;
  if (current_ >= kRecovered * line_) recover();
}

void Dcqcn::recover() {
  limited_ = false;
  current_ = target_ = line_;
  increase_at_ = kNever;
}

uint64_t Dcqcn::rate(Time now) const {
  Dcqcn then = *this;
  then.catch_up(now);
  return static_cast<uint64_t>(std::llround(then.current_));
}

uint64_t Dcqcn::target_rate(Time now) const {
  Dcqcn then = *this;
  then.catch_up(now);
  return static_cast<uint64_t>(std::llround(then.target_));
}

double Dcqcn::alpha(Time now) const {
  Dcqcn then = *this;
  then.catch_up(now);
  return then.alpha_;
}

}  // namespace millrace::roce
