// In what NICs differ within what the specification allows: drawn from a seed, or set by a test.
#pragma once

#include <cstdint>

#include "roce/types.h"

namespace millrace::sim {

// SplitMix64 (Steele, Lea and Flood, 2014): small, and the same everywhere.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}
  uint64_t roll() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((roll() >> 32) * n >> 32); }
  bool one_in(uint32_t n) { return n != 0 && below(n) == 0; }

 private:
  uint64_t state_;
};

struct NicQuirks {
  // Responder.
  uint32_t ack_every = 0;         // request packets that nobody asked to acknowledge, per ACK; 0: the timer
  Time ack_delay{10'000};         // for what is owed without being asked for
  bool only_when_asked = false;   // nothing is: a new packet without AckReq draws no ACK, as with rxe
  bool one_ack_per_turn = false;  // one ACK for all that came between two polls
  bool lazy_duplicates = false;   // an unasked duplicate waits for the timer, too
  bool real_credits = false;      // of posted receives, instead of 0x1F
  uint32_t rnr_one_in = 0;        // messages that find no receive posted; 0: only those that really do not
  uint8_t rnr_timer = 12;

  // Requester.
  uint32_t ack_request_every = 0;  // packets; 0: only each message's last
  Time first_timeout{67'108'864};  // of the transport timer; doubled up to 67 ms
  bool retry_for_ever = false;     // as rxe takes a count of 7
  uint32_t in_flight_max = 1024;   // packets
  bool migrated = true, solicited = false;
  uint8_t traffic_class = 0;  // of data; ECT makes switches mark instead of drop
  Time pace_ahead{500};       // how far before its time a packet may be handed to the wire
  bool dcqcn = true;

  // Connection manager.
  uint8_t cm_timeout = 17;  // 4.096 µs × 2^n
  uint8_t cm_retries = 15;
  bool flow_label = true;    // in the REQ, the flow's UDP port coming of it
  Time establish_delay{0};   // the application's, from the REP to the RTU
  Time drain_delay{0};       // until all flushes have been polled
  uint8_t mra_timeout = 24;  // what a repeated REP is told, as Linux does
};

// What the NIC of this seed is like.
NicQuirks draw_quirks(uint64_t seed);

}  // namespace millrace::sim
