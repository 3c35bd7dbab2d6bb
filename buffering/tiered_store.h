// Two stores as one: the first as long as it has room, then the second. Pure; one worker; no allocation after
// construction. Order over ids is not its business, as it is no store's.
#pragma once

#include <algorithm>
#include <memory>

#include "buffering/lazy_array.h"
#include "buffering/store.h"

namespace millrace::buffering {

class TieredStore final : public Store {
 public:
  // Ids are below `ids`, here and in both.
  TieredStore(std::unique_ptr<Store> first, std::unique_ptr<Store> second, uint32_t ids)
      : tiers_{std::move(first), std::move(second)}, second_(ids) {}

  bool write(uint32_t id, Frame& frame, Time now) noexcept override {
    for (uint8_t tier = 0; tier < 2; tier++) {
      if (!tiers_[tier]->write(id, frame, now)) continue;
      second_[id] = tier;
      return true;
    }
    return false;
  }
  void read(uint32_t id, Time now) noexcept override { tiers_[second_[id]]->read(id, now); }
  void discard(uint32_t id) noexcept override { tiers_[second_[id]]->discard(id); }
  bool next_event(StoreEvent& event) noexcept override {
    return tiers_[0]->next_event(event) || tiers_[1]->next_event(event);
  }
  void poll(Time now, FrameList& out) noexcept override {
    for (auto& s : tiers_) s->poll(now, out);
  }
  Time next_deadline() const override {
    return std::min(tiers_[0]->next_deadline(), tiers_[1]->next_deadline());
  }
  uint64_t size() const override { return tiers_[0]->size() + tiers_[1]->size(); }
  uint64_t used() const override { return tiers_[0]->used() + tiers_[1]->used(); }
  // What is asked for may lie in either.
  uint32_t reads_max() const override { return std::max(tiers_[0]->reads_max(), tiers_[1]->reads_max()); }

 private:
  std::unique_ptr<Store> tiers_[2];
  LazyArray<uint8_t> second_;  // by id: 1 where the second has it
};

}  // namespace millrace::buffering
