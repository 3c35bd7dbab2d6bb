// Captures what crosses the wire into a pcapng file, bounded in size. The worker copies frames into a ring
// and never waits; a CaptureWriter's thread turns them into blocks and writes them. What does not fit into
// the ring, beyond the limit or onto the disk is counted, never silently missing. The format is
// draft-ietf-opsawg-pcapng: one section, an interface block per port, enhanced packet blocks with direction.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "roce/frame.h"

namespace millrace::switching {

struct CaptureConfig {
  std::string file;
  uint64_t limit = 1ull << 30;  // bytes of the file
  uint32_t snaplen = 65535;
  uint64_t ring = 64ull << 20;  // bytes that may wait for the disk
};

struct CaptureCounters {
  uint64_t captured = 0;      // frames in the ring or in the file
  uint64_t missed = 0;        // the ring was full
  uint64_t beyond_limit = 0;  // the file had reached its limit
  uint64_t write_failed = 0;  // the disk refused
  uint64_t file_bytes = 0;
};

enum class Direction : uint8_t { kIn = 1, kOut = 2 };  // as in epb_flags

// A single-producer single-consumer ring of records of any size. Each record lies in one piece.
class RecordRing {
 public:
  explicit RecordRing(uint64_t bytes);
  // Producer: room for a record of `bytes`, or an empty span; to be published by commit().
  std::span<uint8_t> reserve(uint32_t bytes) noexcept;
  void commit() noexcept { head_.store(head_next_, std::memory_order_release); }
  // Consumer: the oldest record, or an empty span; valid until release().
  std::span<const uint8_t> front() noexcept;
  void release() noexcept { tail_.store(tail_next_, std::memory_order_release); }

 private:
  static constexpr uint32_t kSkip = UINT32_MAX;  // length word: the record is at the start of the ring
  uint64_t size_;
  std::unique_ptr<uint8_t[]> bytes_;
  alignas(64) std::atomic<uint64_t> head_{0};
  uint64_t head_next_ = 0;
  uint64_t tail_seen_ = 0;  // the producer's copy of tail_
  alignas(64) std::atomic<uint64_t> tail_{0};
  uint64_t tail_next_ = 0;
};

class Capture {
 public:
  // Creates the file. `wall_offset` is what to add to a Time for nanoseconds since 1970. Throws
  // millrace::Error.
  Capture(const CaptureConfig& config, const std::vector<std::string>& interfaces, Time wall_offset);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Worker: copies the frame, or counts that it could not.
  void record(const Frame& frame, uint16_t interface, Direction direction, Time now) noexcept;
  // Writer's thread: moves what waits into the file; false when there was nothing.
  bool write_pending();
  // Once, after the last record() and write_pending(): statistics blocks, then closes.
  void finish();

  const std::string& file() const { return config_.file; }
  CaptureCounters counters() const;  // any thread

 private:
  struct Record;
  void append_block(uint32_t type, std::span<const uint8_t> body);
  void append_packet(const Record& record, std::span<const uint8_t> bytes);
  void append_headers(const std::vector<std::string>& interfaces);
  void flush();

  CaptureConfig config_;
  Time wall_offset_;
  size_t interfaces_;
  int fd_ = -1;
  RecordRing ring_;
  std::vector<uint8_t> buffer_;  // blocks not yet written
  // Written by one thread each, read by any.
  std::atomic<uint64_t> captured_{0}, missed_{0}, beyond_limit_{0}, write_failed_{0}, file_bytes_{0};
  std::vector<uint64_t> missed_by_interface_;   // worker; read by finish()
  std::vector<uint64_t> written_by_interface_;  // writer
};

// The thread that writes a set of captures until it is destroyed; then everything is in the files.
class CaptureWriter {
 public:
  explicit CaptureWriter(std::vector<Capture*> captures);
  ~CaptureWriter();

 private:
  std::vector<Capture*> captures_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace millrace::switching
