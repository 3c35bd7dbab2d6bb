#include "buffering/pfc.h"

#include "roce/headers.h"

namespace millrace::buffering {

namespace {

struct PfcBody {
  Be16 opcode, enable;
  Be16 quanta[kClasses];
};
constexpr size_t kFrameBytes = 60;  // Ethernet's least, without FCS

}  // namespace

std::optional<Pause> parse_pause(const Frame& frame) noexcept {
  const FrameBuffer* b = frame.buffer();
  if (b->length < sizeof(roce::EthernetHeader) + sizeof(PfcBody)) return std::nullopt;
  const auto& eth = *reinterpret_cast<const roce::EthernetHeader*>(b->data());
  const auto& body = *reinterpret_cast<const PfcBody*>(b->data() + sizeof(eth));
  if (eth.dst != kPauseMac || eth.ether_type.value() != kEtherTypeMacControl ||
      body.opcode.value() != kPfcOpcode)
    return std::nullopt;
  Pause pause;
  for (size_t i = 0; i < kClasses; i++) {
    pause.priorities[i] = body.enable.value() >> i & 1;
    pause.quanta[i] = body.quanta[i].value();
  }
  return pause;
}

Frame build_pause(FramePool& pool, const MacAddress& source, const Pause& pause) noexcept {
  Frame frame = Frame::allocate(pool);
  if (!frame) return frame;
  FrameBuffer* b = frame.buffer();
  std::memset(b->data(), 0, kFrameBytes);
  b->length = kFrameBytes;
  auto& eth = *reinterpret_cast<roce::EthernetHeader*>(b->data());
  auto& body = *reinterpret_cast<PfcBody*>(b->data() + sizeof(eth));
  eth.dst = kPauseMac, eth.src = source, eth.ether_type = kEtherTypeMacControl;
  body.opcode = kPfcOpcode;
  body.enable = static_cast<uint16_t>(pause.priorities.to_ulong());
  for (size_t i = 0; i < kClasses; i++) body.quanta[i] = pause.quanta[i];
  return frame;
}

}  // namespace millrace::buffering
