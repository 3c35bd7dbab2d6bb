// What a hub and its ranks say to each other over their Unix socket: one message per packet. Both are the
// same library on the same machine, so integers are the machine's. Pure.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "host/local_memory.h"
#include "host/transport.h"

namespace millrace::host {

// What a rank says first.
struct LocalHello {
  uint16_t version = kVersion;
  uint16_t rank = 0, world = 0;
  uint8_t stripes = 1;
  uint32_t tenant = 0;
  std::array<uint8_t, 16> key{};

  static constexpr uint16_t kVersion = 1;
};

// A process that does not answer for so long is as good as dead: stopped, or stuck.
inline constexpr Time kLocalProbeAfter = std::chrono::seconds(1);
inline constexpr Time kLocalPeerDead = std::chrono::seconds(5);

struct LocalMessage {
  enum class Kind : uint8_t {
    kHello = 1,
    kRefused,    // text
    kAccepted,   // rank: the leader's
    kConnected,  // join_reply: all connections to the switch are there
    kStart,      // bytes: the switch's START; layout and seat; the memory's descriptor comes along
    kTerminal,   // bytes: the terminal message
    kLinkError,  // error, code, text: the hub's connection to the switch is gone
    kDoorbell,   // look at the counters
    kProbe,      // is anybody there?
    kAlive,      // the answer
    kGoodbye,    // leaves; of a hub: its process takes no part any more
  };
  Kind kind{};
  LocalHello hello;
  uint16_t rank = 0;
  uint32_t seat = 0;
  LocalLayout layout;
  aggregation::JoinReply join_reply;
  LinkError error{};
  aggregation::Code code{};
  std::string text;
  std::vector<uint8_t> bytes;
};

// A packet is at most this long; longer texts are cut.
inline constexpr size_t kLocalMessageBytesMax = 2048;
std::vector<uint8_t> encode(const LocalMessage&);
std::optional<LocalMessage> decode_local_message(std::span<const uint8_t>);

}  // namespace millrace::host
