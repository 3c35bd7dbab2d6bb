// Where spilled packets lie: one interface for memory of the switch and memory that other servers lend. All
// calls come from the worker that owns the spillway; none blocks. Only spilled packets pay for the virtual
// calls.
#pragma once

#include "roce/frame.h"

namespace millrace::buffering {

struct StoreEvent {
  enum class Kind : uint8_t {
    kRead,  // the packet is back: `frame` has its bytes, nothing else of what it was
    kLost,  // whoever held it is gone
  };
  Kind kind = Kind::kRead;
  uint32_t id = 0;
  Frame frame;
};

class Store {
 public:
  virtual ~Store() = default;

  // Takes the frame's bytes under the caller's `id`, which is below the caller's limit and names nothing else
  // meanwhile. False when there is no room: the frame is still the caller's, and nothing has happened.
  virtual bool write(uint32_t id, Frame& frame, Time now) noexcept = 0;
  // Asks for it back, at most once: one kRead or kLost follows, then the room is free. It may be called
  // before the write is complete.
  virtual void read(uint32_t id, Time now) noexcept = 0;
  // Forgets a packet that was not asked for; no event follows.
  virtual void discard(uint32_t id) noexcept = 0;
  // What has come back, in any order over ids. kLost also comes for what was not asked for, once a store has
  // lost it.
  virtual bool next_event(StoreEvent& event) noexcept = 0;

  // Timers, and frames to send for stores that speak to somebody (their port is not set).
  virtual void poll(Time now, FrameList& out) noexcept = 0;
  virtual Time next_deadline() const = 0;

  virtual uint64_t size() const = 0;       // bytes it can hold now
  virtual uint64_t used() const = 0;       // bytes that it holds, in its own measure, never more than size()
  virtual uint32_t reads_max() const = 0;  // reads that are worth having in flight
};

}  // namespace millrace::buffering
