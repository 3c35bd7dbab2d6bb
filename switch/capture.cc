#include "switch/capture.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "roce/error.h"

namespace millrace::switching {

namespace {

constexpr uint32_t kSectionHeader = 0x0A0D0D0A, kInterfaceDescription = 1, kInterfaceStatistics = 5,
                   kEnhancedPacket = 6;
constexpr uint16_t kLinkEthernet = 1;
constexpr uint16_t kEndOfOptions = 0, kUserApplication = 4, kInterfaceName = 2, kTimeResolution = 9,
                   kPacketFlags = 2, kReceived = 4, kDropped = 5;
constexpr size_t kBuffer = 1 << 20;
// What an interface's statistics, written last, take of the limit: 12 bytes of block, 12 fixed, two options,
// end.
constexpr size_t kStatisticsMax = 12 + 12 + 2 * 12 + 4;
constexpr size_t kPacketOverhead =
    32 + 12;  // of an enhanced packet block: fixed part, flags and end of options

uint64_t align_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// In the machine's byte order, which the section header declares.
template <typename T>
void put(std::vector<uint8_t>& to, T value) {
  const auto* p = reinterpret_cast<const uint8_t*>(&value);
  to.insert(to.end(), p, p + sizeof(T));
}

// The first `bytes` of a frame that may lie in three pieces.
void copy_prefix(const Frame& frame, uint8_t* to, uint32_t bytes) noexcept {
  const FrameBuffer& b = *frame.buffer();
  const std::pair<const uint8_t*, uint32_t> pieces[] = {
      {b.data(), b.length}, {b.shared_data, b.shared_length}, {b.tail, b.tail_length}};
  for (const auto& [from, length] : pieces) {
    const uint32_t n = std::min(length, bytes);
    if (n > 0) std::memcpy(to, from, n);
    to += n;
    bytes -= n;
  }
}

class BlockBody {
 public:
  template <typename T>
  BlockBody& add(T value) {
    put(bytes_, value);
    return *this;
  }
  BlockBody& option(uint16_t code, std::span<const uint8_t> value) {
    add(code).add(static_cast<uint16_t>(value.size()));
    bytes_.insert(bytes_.end(), value.begin(), value.end());
    bytes_.resize(align_up(bytes_.size(), 4));
    return *this;
  }
  BlockBody& option(uint16_t code, const std::string& text) {
    return option(code, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  }
  template <typename T>
  BlockBody& option_value(uint16_t code, T value) {
    return option(code, {reinterpret_cast<const uint8_t*>(&value), sizeof(value)});
  }
  std::span<const uint8_t> finished() {
    add(uint32_t{kEndOfOptions});
    return bytes_;
  }

 private:
  std::vector<uint8_t> bytes_;
};

}  // namespace

RecordRing::RecordRing(uint64_t bytes) : size_(align_up(bytes, 64)), bytes_(new uint8_t[size_]) {}

std::span<uint8_t> RecordRing::reserve(uint32_t bytes) noexcept {
  const uint64_t need = align_up(sizeof(uint64_t) + bytes, 8);
  uint64_t head = head_.load(std::memory_order_relaxed);
  const uint64_t at = head % size_;
  const uint64_t skip = at + need > size_ ? size_ - at : 0;
  if (head + skip + need - tail_seen_ > size_) {
    tail_seen_ = tail_.load(std::memory_order_acquire);
    if (head + skip + need - tail_seen_ > size_) return {};
  }
  if (skip > 0) {
    std::memcpy(&bytes_[at], &kSkip, sizeof(kSkip));
    head += skip;
  }
  uint8_t* record = &bytes_[head % size_];
  std::memcpy(record, &bytes, sizeof(bytes));
  head_next_ = head + need;
  return {record + sizeof(uint64_t), bytes};
}

std::span<const uint8_t> RecordRing::front() noexcept {
  uint64_t tail = tail_.load(std::memory_order_relaxed);
  if (tail == head_.load(std::memory_order_acquire)) return {};
  uint32_t bytes = 0;
  std::memcpy(&bytes, &bytes_[tail % size_], sizeof(bytes));
  if (bytes == kSkip) {
    tail += size_ - tail % size_;
    std::memcpy(&bytes, &bytes_[tail % size_], sizeof(bytes));
  }
  tail_next_ = tail + align_up(sizeof(uint64_t) + bytes, 8);
  return {&bytes_[tail % size_] + sizeof(uint64_t), bytes};
}

// In front of the frame's bytes in the ring.
struct Capture::Record {
  int64_t time_ns;
  uint32_t length;  // on the wire; the ring may hold less
  uint16_t interface;
  Direction direction;
};

Capture::Capture(const CaptureConfig& config, const std::vector<std::string>& interfaces, Time wall_offset)
    : config_(config),
      wall_offset_(wall_offset),
      interfaces_(interfaces.size()),
      ring_(config.ring),
      missed_by_interface_(interfaces.size()),
      written_by_interface_(interfaces.size()) {
  fd_ = open(config.file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd_ < 0)
    throw Error(ErrorCode::kSystem, "capture: cannot create '" + config.file + "': " + std::strerror(errno));
  buffer_.reserve(std::min<uint64_t>(kBuffer, config.limit) + config.snaplen + kPacketOverhead);
  append_headers(interfaces);
  flush();
}

Capture::~Capture() {
  if (fd_ >= 0) close(fd_);
}

void Capture::append_headers(const std::vector<std::string>& interfaces) {
  BlockBody section;
  section.add(uint32_t{0x1A2B3C4D}).add(uint16_t{1}).add(uint16_t{0}).add(int64_t{-1});  // length unknown
  section.option(kUserApplication, "millrace-switch " MILLRACE_VERSION);
  append_block(kSectionHeader, section.finished());
  for (const std::string& name : interfaces) {
    BlockBody interface;
    interface.add(kLinkEthernet).add(uint16_t{0}).add(config_.snaplen);
    interface.option(kInterfaceName, name).option_value(kTimeResolution, uint8_t{9});
    append_block(kInterfaceDescription, interface.finished());
  }
}

void Capture::record(const Frame& frame, uint16_t interface, Direction direction, Time now) noexcept {
  const uint32_t bytes = frame.total_length();
  const uint32_t kept = std::min(bytes, config_.snaplen);
  const std::span<uint8_t> to = ring_.reserve(static_cast<uint32_t>(sizeof(Record)) + kept);
  if (to.empty()) {
    missed_.fetch_add(1, std::memory_order_relaxed);
    missed_by_interface_[interface]++;
    return;
  }
  const Record record{(now + wall_offset_).count(), bytes, interface, direction};
  std::memcpy(to.data(), &record, sizeof(record));
  copy_prefix(frame, to.data() + sizeof(record), kept);
  ring_.commit();
  captured_.fetch_add(1, std::memory_order_relaxed);
}

bool Capture::write_pending() {
  bool any = false;
  // Bounded, so that one busy capture does not keep the writer from the others.
  for (int n = 0; n < 8192; n++) {
    const auto bytes = ring_.front();
    if (bytes.empty()) break;
    Record record;
    std::memcpy(&record, bytes.data(), sizeof(record));
    append_packet(record, bytes.subspan(sizeof(record)));
    ring_.release();
    any = true;
    if (buffer_.size() >= kBuffer) flush();
  }
  flush();
  return any;
}

void Capture::append_packet(const Record& record, std::span<const uint8_t> bytes) {
  const uint64_t padded = align_up(bytes.size(), 4);
  const auto total = static_cast<uint32_t>(kPacketOverhead + padded);
  if (file_bytes_.load(std::memory_order_relaxed) + buffer_.size() + total + kStatisticsMax * interfaces_ >
      config_.limit) {
    beyond_limit_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const auto time = static_cast<uint64_t>(record.time_ns);
  put(buffer_, kEnhancedPacket);
  put(buffer_, total);
  put(buffer_, uint32_t{record.interface});
  put(buffer_, static_cast<uint32_t>(time >> 32));
  put(buffer_, static_cast<uint32_t>(time));
  put(buffer_, static_cast<uint32_t>(bytes.size()));
  put(buffer_, record.length);
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  buffer_.resize(buffer_.size() + padded - bytes.size());
  put(buffer_, kPacketFlags);
  put(buffer_, uint16_t{4});
  put(buffer_, static_cast<uint32_t>(record.direction));
  put(buffer_, uint32_t{kEndOfOptions});
  put(buffer_, total);
  written_by_interface_[record.interface]++;
}

void Capture::append_block(uint32_t type, std::span<const uint8_t> body) {
  const auto total = static_cast<uint32_t>(12 + body.size());
  put(buffer_, type);
  put(buffer_, total);
  buffer_.insert(buffer_.end(), body.begin(), body.end());
  put(buffer_, total);
}

void Capture::flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t n = write(fd_, buffer_.data() + done, buffer_.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      // A torn block would make the rest unreadable: the file ends with what was whole before this buffer.
      write_failed_.fetch_add(1, std::memory_order_relaxed);
      if (ftruncate(fd_, static_cast<off_t>(file_bytes_.load())) == 0)
        lseek(fd_, static_cast<off_t>(file_bytes_.load()), SEEK_SET);
      buffer_.clear();
      return;
    }
    done += static_cast<size_t>(n);
  }
  file_bytes_.fetch_add(buffer_.size(), std::memory_order_relaxed);
  buffer_.clear();
}

void Capture::finish() {
  if (fd_ < 0) return;
  while (write_pending()) {
  }
  for (uint32_t i = 0; i < interfaces_; i++) {
    timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    const uint64_t time =
        static_cast<uint64_t>(wall.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(wall.tv_nsec);
    BlockBody statistics;
    statistics.add(i).add(static_cast<uint32_t>(time >> 32)).add(static_cast<uint32_t>(time));
    statistics.option_value(kReceived, written_by_interface_[i] + missed_by_interface_[i]);
    statistics.option_value(kDropped, missed_by_interface_[i]);
    append_block(kInterfaceStatistics, statistics.finished());
  }
  flush();
  close(fd_);
  fd_ = -1;
}

CaptureCounters Capture::counters() const {
  return {captured_.load(), missed_.load(), beyond_limit_.load(), write_failed_.load(), file_bytes_.load()};
}

CaptureWriter::CaptureWriter(std::vector<Capture*> captures)
    : captures_(std::move(captures)), thread_([this] {
        while (!stop_.load()) {
          bool any = false;
          for (Capture* capture : captures_) any |= capture->write_pending();
          if (!any) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
      }) {}

CaptureWriter::~CaptureWriter() {
  stop_.store(true);
  thread_.join();
  for (Capture* capture : captures_) capture->finish();
}

}  // namespace millrace::switching
