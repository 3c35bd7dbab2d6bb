// What a group needs that is part of a tree, beside its slots: partial sums in one piece, to be sent up, and
// results. Used by the engine on the hot path; everything is reserved when the group starts, but what
// deterministic operations need on top.
#pragma once

#include <vector>

#include "aggregation/protocol.h"

namespace millrace::aggregation {

// One stripe's store, by slot of its ring.
class PartialStore {
 public:
  // `up`: the partials that a child sends at most of one segment; 0 at a root.
  PartialStore(uint16_t window, uint32_t segment_bytes, uint32_t up)
      : window_(window), segment_bytes_(segment_bytes), up_(up), headers_(size_t{window} * up) {
    results_.resize(up == 0 ? size_t{window} * segment_bytes : 0);
    hold(1);
  }
  static uint64_t bytes(uint16_t window, uint32_t segment_bytes, uint32_t partials) {
    return uint64_t{window} * ((uint64_t{partials} * kWidest + 1) * segment_bytes);
  }

  // Room for so many partials of each segment: one, unless contributions are kept for the order of ranks.
  // What is there stays where it is: messages in flight are sent from it.
  void hold(uint32_t partials) {
    while (sums_.size() < partials) sums_.emplace_back(size_t{window_} * segment_bytes_);
    filled_.resize(size_t{window_} * partials);
  }
  uint32_t partials() const { return static_cast<uint32_t>(sums_.size()); }

  float* wide(uint64_t segment, uint32_t partial) {
    return sums_[partial].data() + segment % window_ * segment_bytes_;
  }
  uint8_t* sum(uint64_t segment, uint32_t partial) {
    return reinterpret_cast<uint8_t*>(wide(segment, partial));
  }
  // How much of a partial has a value: elements of wide sums, bytes of others. What has none is assigned, not
  // added to.
  uint32_t& filled(uint64_t segment, uint32_t partial) {
    return filled_[size_t{partial} * window_ + segment % window_];
  }
  uint8_t* result(uint64_t segment) { return results_.data() + segment % window_ * segment_bytes_; }
  SegmentHeader& header(uint64_t segment, uint32_t part) { return headers_[segment % window_ * up_ + part]; }
  void clear(uint64_t segment) {
    for (uint32_t i = 0; i < partials(); i++) filled(segment, i) = 0;
  }

 private:
  // f8 in f32; sums are kept as floats, as many as a segment has bytes.
  static constexpr uint32_t kWidest = sizeof(float);
  uint16_t window_;
  uint32_t segment_bytes_, up_;
  std::vector<std::vector<float>> sums_;  // by partial
  std::vector<uint32_t> filled_;
  std::vector<uint8_t> results_;
  std::vector<SegmentHeader> headers_;
};

}  // namespace millrace::aggregation
