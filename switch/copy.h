// Flat, private copies of frames: for flooding, for duplicates, and where bits are to be changed.
// Called by the worker; allocates from the pool only.
#pragma once

#include "roce/frame.h"

namespace millrace::switching {

// All pieces of `frame` in one buffer of `pool`, with the same port. Empty when the pool is, or when the
// frame does not fit into one buffer.
inline Frame copy_flat(FramePool& pool, const Frame& frame) noexcept {
  Frame copy = Frame::allocate(pool);
  if (!copy) return copy;
  FrameBuffer* b = copy.buffer();
  const uint32_t bytes = frame.total_length();
  if (b->offset + bytes > b->room_bytes) return {};
  frame.copy_to(b->data());
  b->length = bytes;
  b->port = frame.port();
  return copy;
}

}  // namespace millrace::switching
