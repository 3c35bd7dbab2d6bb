// The capture file. The input chooses interfaces, bounds and frames of one to three pieces; what the writer
// has made of them is read by a reader of its own, written from draft-ietf-opsawg-pcapng, and must hold
// exactly the frames that the counters claim.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <deque>
#include <optional>

#include "switch/capture.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {
namespace {

using namespace switching;

struct Expected {
  uint16_t interface;
  Direction direction;
  uint64_t time;
  Bytes bytes;  // the whole frame
};

// A file in memory that has a name.
struct MemoryFile {
  MemoryFile() : fd(memfd_create("capture", MFD_CLOEXEC)) {}
  ~MemoryFile() { close(fd); }
  std::string name() const { return "/proc/self/fd/" + std::to_string(fd); }
  Bytes read_all() const {
    Bytes b(static_cast<size_t>(lseek(fd, 0, SEEK_END)));
    FUZZ_CHECK(pread(fd, b.data(), b.size(), 0) == static_cast<ssize_t>(b.size()));
    return b;
  }
  int fd;
};

class Reader {
 public:
  explicit Reader(std::span<const uint8_t> all) : all_(all) {}
  struct Block {
    uint32_t type;
    std::span<const uint8_t> body;
  };
  bool at_end() const { return all_.empty(); }
  Block next() {
    FUZZ_CHECK(all_.size() >= 12);
    const uint32_t total = word(all_, 4);
    FUZZ_CHECK(total % 4 == 0 && total >= 12 && total <= all_.size());
    FUZZ_CHECK(word(all_, total - 4) == total);
    const Block b{word(all_, 0), all_.subspan(8, total - 12)};
    all_ = all_.subspan(total);
    return b;
  }
  static uint32_t word(std::span<const uint8_t> b, size_t at) {
    FUZZ_CHECK(at + 4 <= b.size());
    uint32_t v;
    std::memcpy(&v, b.data() + at, 4);
    return v;
  }
  static uint16_t half(std::span<const uint8_t> b, size_t at) {
    return static_cast<uint16_t>(word(b, at & ~size_t{3}) >> (at % 4 * 8));
  }
  // The option of that code; the list must be well formed to its end.
  static std::span<const uint8_t> option(std::span<const uint8_t> body, size_t at, uint16_t code) {
    std::span<const uint8_t> found;
    for (;;) {
      const uint16_t c = half(body, at), length = half(body, at + 2);
      at += 4;
      if (c == 0) break;
      FUZZ_CHECK(at + (length + 3u) / 4 * 4 <= body.size());
      if (c == code) found = body.subspan(at, length);
      at += (length + 3u) / 4 * 4;
    }
    FUZZ_CHECK(at == body.size());
    return found;
  }

 private:
  std::span<const uint8_t> all_;
};

void check_packet(std::span<const uint8_t> body, const Expected& e, uint32_t snaplen) {
  const uint32_t captured = Reader::word(body, 12), length = Reader::word(body, 16);
  FUZZ_CHECK(Reader::word(body, 0) == e.interface);
  FUZZ_CHECK((static_cast<uint64_t>(Reader::word(body, 4)) << 32 | Reader::word(body, 8)) == e.time);
  FUZZ_CHECK(length == e.bytes.size() && captured == std::min(length, snaplen));
  FUZZ_CHECK(20 + captured <= body.size());
  FUZZ_CHECK(std::equal(e.bytes.begin(), e.bytes.begin() + captured, body.begin() + 20));
  const auto flags = Reader::option(body, 20 + (captured + 3) / 4 * 4, 2);
  FUZZ_CHECK(flags.size() == 4 && Reader::word(flags, 0) == static_cast<uint32_t>(e.direction));
}

struct Capturing {
  explicit Capturing(Input& in) {
    config.file = file.name();
    config.snaplen = 1 + in.u16() % 600;
    config.limit = 256 + 16 * in.byte();
    config.ring = 256 + 16 * in.byte();
    const size_t interfaces = 1 + in.below(3);
    for (size_t i = 0; i < interfaces; i++) names.push_back(text_of(in.take(in.below(20))));
    missed.resize(interfaces), written.resize(interfaces);
    wall_offset = Time(static_cast<int64_t>(in.u64() >> 2));
    capture.emplace(config, names, wall_offset);
  }
  Frame frame(Input& in) {
    Frame f = Frame::allocate(pool);
    const auto own = in.take(in.below(300));
    FrameBuffer* b = f.buffer();
    std::copy(own.begin(), own.end(), b->data());
    b->length = static_cast<uint32_t>(own.size());
    const uint8_t pieces = in.byte();
    if (pieces & 1) {
      b->shared_data = shared.data() + (pieces >> 4);
      b->shared_length = in.byte();
    }
    if (pieces & 2) {
      b->tail_length = static_cast<uint8_t>(in.below(9));
      std::memset(b->tail, 0x5A, 8);
    }
    return f;
  }

  MemoryFile file;
  CaptureConfig config;
  std::vector<std::string> names;
  HeapFramePool pool{1024, UINT32_MAX, true};
  Bytes shared = Bytes(16 + 256, 0xC3);
  Time wall_offset{};
  std::optional<Capture> capture;
  std::deque<Expected> expected;  // in the ring or written, not yet found in the file
  std::vector<uint64_t> missed, written;
};

void check_file(Capturing& c) {
  const Bytes all = c.file.read_all();
  const CaptureCounters counters = c.capture->counters();
  FUZZ_CHECK(counters.file_bytes == all.size() && counters.write_failed == 0);
  Reader reader(all);
  auto block = reader.next();
  FUZZ_CHECK(block.type == 0x0A0D0D0A && Reader::word(block.body, 0) == 0x1A2B3C4D);
  FUZZ_CHECK(Reader::half(block.body, 4) == 1 && Reader::half(block.body, 6) == 0);
  Reader::option(block.body, 16, 4);
  size_t header = 12 + block.body.size();
  for (const std::string& name : c.names) {
    block = reader.next();
    header += 12 + block.body.size();
    FUZZ_CHECK(block.type == 1 && Reader::half(block.body, 0) == 1);
    FUZZ_CHECK(Reader::word(block.body, 4) == c.config.snaplen);
    FUZZ_CHECK(text_of(Reader::option(block.body, 8, 2)) == name);
    const auto resolution = Reader::option(block.body, 8, 9);
    FUZZ_CHECK(resolution.size() == 1 && resolution[0] == 9);
  }
  FUZZ_CHECK(all.size() <= std::max<size_t>(c.config.limit, header + 64 * c.names.size()));

  size_t packets = 0, statistics = 0;
  while (!reader.at_end()) {
    block = reader.next();
    if (block.type == 6) {
      FUZZ_CHECK(statistics == 0);
      packets++;
      // What did not fit below the limit is missing, the others are in order.
      const uint64_t time =
          static_cast<uint64_t>(Reader::word(block.body, 4)) << 32 | Reader::word(block.body, 8);
      while (!c.expected.empty() && c.expected.front().time != time) c.expected.pop_front();
      FUZZ_CHECK(!c.expected.empty());
      check_packet(block.body, c.expected.front(), c.config.snaplen);
      c.written[c.expected.front().interface]++;
      c.expected.pop_front();
      continue;
    }
    FUZZ_CHECK(block.type == 5 && Reader::word(block.body, 0) == statistics);
    const auto received = Reader::option(block.body, 12, 4), dropped = Reader::option(block.body, 12, 5);
    FUZZ_CHECK(received.size() == 8 && dropped.size() == 8);
    FUZZ_CHECK(Reader::word(dropped, 0) == c.missed[statistics]);
    FUZZ_CHECK(Reader::word(received, 0) == c.missed[statistics] + c.written[statistics]);
    statistics++;
  }
  FUZZ_CHECK(statistics == c.names.size());
  FUZZ_CHECK(packets + counters.beyond_limit == counters.captured);
}

void run(std::span<const uint8_t> data) {
  if (data.size() > 4096) return;
  Input in(data);
  Capturing c(in);
  for (uint64_t n = 1; !in.empty(); n++) {
    const uint8_t what = in.byte();
    if (what % 4 == 0) {
      c.capture->write_pending();
      continue;
    }
    const Frame f = c.frame(in);
    Expected e;
    e.interface = static_cast<uint16_t>(what / 8 % c.names.size());
    e.direction = what & 0x80 ? Direction::kOut : Direction::kIn;
    e.bytes.resize(f.total_length() + 1);  // never without storage
    f.copy_to(e.bytes.data());
    e.bytes.pop_back();
    const CaptureCounters before = c.capture->counters();
    // Times are all different, so that the file's packets can be told apart.
    const Time now = std::chrono::microseconds(n);
    c.capture->record(f, e.interface, e.direction, now);
    const CaptureCounters after = c.capture->counters();
    FUZZ_CHECK(after.captured + after.missed == before.captured + before.missed + 1);
    if (after.missed != before.missed) {
      c.missed[e.interface]++;
      continue;
    }
    e.time = static_cast<uint64_t>((now + c.wall_offset).count());
    c.expected.push_back(std::move(e));
  }
  c.capture->finish();
  check_file(c);
}

}  // namespace
MILLRACE_FUZZ_TARGET("pcapng", run)
}  // namespace millrace::fuzz
