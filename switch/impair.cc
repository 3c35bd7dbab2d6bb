#include "switch/impair.h"

#include <algorithm>

#include "switch/copy.h"

namespace millrace::switching {

namespace {
constexpr Time kReorderMin = std::chrono::microseconds(20), kReorderMax = std::chrono::microseconds(500);
}  // namespace

Impairment::Impairment(FramePool& pool, const ImpairConfig& config, size_t queue_max)
    : pool_(pool), queue_max_(queue_max) {
  queue_.reserve(queue_max);
  configure(config);
}

void Impairment::configure(const ImpairConfig& config) {
  config_ = config;
  active_ = config.any();
  random_.seed(config.seed);
}

// The generator's own numbers are compared, since the library's distributions differ between implementations.
// Nothing is drawn for what cannot happen, so that adding one fault leaves the others' dice alone.
bool Impairment::happens(double probability) noexcept {
  if (probability <= 0) return false;
  return static_cast<double>(random_() >> 11) * 0x1p-53 < probability;
}

void Impairment::spoil(Frame frame, Time now, FrameList& out) noexcept {
  if (happens(config_.loss)) {
    counters_.lost++;
    return;
  }
  if (happens(config_.corrupt)) frame = corrupted(std::move(frame));
  if (happens(config_.duplicate)) {
    if (Frame copy = copy_flat(pool_, frame)) {
      counters_.duplicated++;
      hold_or_pass(std::move(copy), now, out);
    } else {
      counters_.pool_empty++;
    }
  }
  hold_or_pass(std::move(frame), now, out);
}

// One random bit of a private copy: a shared payload belongs to the other results too, and a retained frame
// to its slot.
Frame Impairment::corrupted(Frame frame) noexcept {
  Frame copy = copy_flat(pool_, frame);
  if (!copy || copy.bytes().empty()) {
    counters_.pool_empty++;
    return frame;
  }
  const uint64_t bit = random_() % (copy.bytes().size() * 8);
  copy.bytes()[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  counters_.corrupted++;
  return copy;
}

void Impairment::hold_or_pass(Frame frame, Time now, FrameList& out) noexcept {
  Time due = now + config_.delay;
  if (happens(config_.reorder)) {
    const auto span = static_cast<uint64_t>((kReorderMax - kReorderMin).count());
    due += kReorderMin + Time(static_cast<int64_t>(random_() % span));
    counters_.reordered++;
  }
  if (due == now) {
    out.push(std::move(frame));
    return;
  }
  if (queue_.size() >= queue_max_) {
    counters_.queue_full++;
    return;
  }
  counters_.delayed++;
  queue_.push_back({due, order_++, frame.release()});
  std::push_heap(queue_.begin(), queue_.end(), later);
}

void Impairment::poll(Time now, FrameList& out) noexcept {
  while (!queue_.empty() && queue_.front().due <= now) {
    std::pop_heap(queue_.begin(), queue_.end(), later);
    out.push(Frame(queue_.back().frame));
    queue_.pop_back();
  }
}

void Impairment::clear() noexcept {
  for (const Held& held : queue_) unref(held.frame);
  queue_.clear();
}

}  // namespace millrace::switching
