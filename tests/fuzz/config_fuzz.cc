// The configuration: any text is a configuration that the pipeline accepts or a millrace::Error that names
// the file and, where there is one to name, the line.
#include <cctype>

#include "roce/error.h"
#include "switch/config.h"
#include "switch/pipeline.h"
#include "tests/fuzz/target.h"

namespace millrace::fuzz {
namespace {

using namespace switching;

void judge(const std::string& message, const std::string& text) {
  FUZZ_CHECK(message.starts_with("f.yaml:"), message);
  if (message.size() < 8 || !std::isdigit(static_cast<unsigned char>(message[7]))) {
    // Only what has no place in the file goes without a line: a key that an empty file lacks.
    FUZZ_CHECK(message.ends_with(": missing"), message);
    return;
  }
  const auto line = std::stoul(message.substr(7));
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n') +
                                         std::count(text.begin(), text.end(), '\r')) +
                     1;
  FUZZ_CHECK(line >= 1 && line <= lines, message);
}

void accepted(const Config& c) {
  FUZZ_CHECK(!c.ports.empty() && c.ports.size() <= 256 && !c.engine.addresses.empty());
  FUZZ_CHECK(c.engine.addresses.size() == c.routing.interfaces.size());
  FUZZ_CHECK(!c.engine.mac.is_multicast() && c.engine.probe_after < c.engine.peer_dead);
  FUZZ_CHECK(c.frame_room >= FramePool::kHeadroom + 66 + 32 + c.engine.mtu + 8);
  if (c.l2.entries_max > 16384 || c.routing.neighbours.entries_max > 1024 || c.ports.size() > 4) return;
  // What was accepted can be run.
  HeapFramePool pool(c.frame_room, 64);
  Pipeline pipeline({static_cast<uint16_t>(c.ports.size()), c.l2, c.engine, c.routing}, pool);
  FrameList out;
  pipeline.announce(std::chrono::seconds(1), out);
  pipeline.poll(std::chrono::seconds(1), out);
  pipeline.shutdown(std::chrono::seconds(2), out);
}

void run(std::span<const uint8_t> data) {
  const std::string text = text_of(data);
  // It is read whatever it is, and a device or a pipe would never end.
  if (text.size() > 4096 || text.find("/dev") != text.npos || text.find("/proc") != text.npos) return;
  std::string refused;
  try {
    const Config config = parse_config(text, "f.yaml");
    accepted(config);
  } catch (const Error& e) {
    FUZZ_CHECK(e.code() == ErrorCode::kConfig, e.what());
    refused = e.what();
  }
  if (!refused.empty()) judge(refused, text);
}

}  // namespace
MILLRACE_FUZZ_TARGET("config", run)
}  // namespace millrace::fuzz
