// The hub's insides, shared by hub.cc (joining, ends, timers) and hub_segment.cc (the data path). Nobody else
// includes this.
#pragma once

#include <array>

#include "aggregation/disagreement.h"
#include "aggregation/reduce.h"
#include "host/hub.h"

namespace millrace::host {

struct Hub::Impl {
  enum class State : uint8_t {
    kJoining,
    kStarting,  // START has come, the memory has not
    kRunning,
    kDisagreeing,  // waits for the other ranks' headers
    kEnding,       // the terminal message is on its way up
    kClosing,      // links to the switch are closing
    kClosed,
  };
  struct Seat {
    uint16_t rank = 0;
    uint32_t process = 0;
    bool present = true;
    Time heard{}, probed = kNever;                           // waited for, and asked whether it is alive
    std::array<uint64_t, aggregation::kStripesMax> taken{};  // segments, by stripe
  };
  // A place in a stripe's window: a segment that ranks contribute to, until it is handed up.
  struct Gather {
    uint32_t headers = 0, contributions = 0;
    aggregation::SegmentHeader reference;
    aggregation::SegmentShape shape;
    aggregation::Reducer reducer;  // none where nothing is reduced
    bool wide = false;             // summed in floats of ours, else where the first contribution lies
    bool hold = false;             // summed in the order of ranks once all are there
    uint8_t* sum = nullptr;        // of what is not wide
    uint32_t messages = 1, posted = 0;
    Time since{};
  };
  struct Stripe {
    LinkId link = 0;
    bool connected = false, started = false, closed = false, mtu_retried = false;
    uint64_t posted = 0;   // segments handed to the switch, wholly
    uint64_t results = 0;  // that have come
    std::vector<Gather> window;
  };
  // Sums in floats: for each place `sums` of a segment.
  struct Wide {
    std::vector<float> floats;
    MemoryRegion region;
  };

  Impl(const HubConfig& c, Transport& t, Time now);

  // hub.cc
  void connect(uint8_t stripe, uint32_t mtu);
  void handle(const Completion& c, Time now);
  void connected(Stripe& stripe, const Completion& c);
  void message(Stripe& stripe, const std::vector<uint8_t>& bytes, Time now);
  void take_start(Stripe& stripe, const aggregation::Start& s, Time now);
  void link_error(Stripe& stripe, const Completion& c, Time now);
  void announce();
  void become_root();
  void run(const LocalView& given, Time now);
  bool register_memory(Time now);
  void tell(uint32_t seat, LocalMessage m);
  void tell_all(const LocalMessage& m);
  void fail(aggregation::Code code, std::vector<uint16_t> ranks, const std::string& text, Time now);
  void close();
  void settle();
  void gone(uint32_t seat, const std::string& how, bool goodbye, Time now);
  void tick(Time now);
  bool present() const;
  std::string describe(const Seat& seat) const;
  bool running() const { return state == State::kRunning || state == State::kDisagreeing; }
  Stripe* find(LinkId link);

  // hub_segment.cc
  void poll(Time now);
  void take_all(Time now);
  void take(uint32_t seat, uint8_t stripe, Time now);
  bool open(Gather& g, const aggregation::SegmentHeader& h, Time now);
  bool make_wide(uint32_t sums, Time now);
  float* wide_sum(const Gather& g, uint8_t stripe, uint64_t segment, uint32_t message);
  void contribute(Gather& g, uint8_t stripe, uint64_t segment, uint8_t* payload);
  void sum_held(const Gather& g, uint8_t stripe, uint64_t segment);
  void sum_in_place(const Gather& g, uint8_t stripe, uint64_t segment, const aggregation::RankRange& range);
  void sum_wide(const Gather& g, uint8_t stripe, uint64_t segment, const aggregation::RankRange& range,
                float* to, size_t level);
  void post(Stripe& stripe, Time now);
  bool post_message(Stripe& stripe, const Gather& g);
  void result(Stripe& stripe, uint32_t immediate, Time now);
  void finish(Stripe& stripe, const Gather& g);
  void publish(Stripe& stripe);
  void judge(Time now);
  void look_for_late(Time now);
  void probe_silent(Time now);
  bool waited_for(const Seat& seat) const;
  uint8_t* payload_of(uint16_t rank, uint8_t stripe, uint64_t segment) const {
    return memory.payload(seat_of[rank], stripe, segment);
  }
  uint8_t index(const Stripe& stripe) const { return static_cast<uint8_t>(&stripe - stripes.data()); }

  HubConfig config;
  Transport& up;
  uint64_t nonce;
  State state = State::kJoining;
  std::vector<Stripe> stripes;
  std::vector<Seat> seats;
  std::vector<uint32_t> seat_of;   // by rank; of those that have come
  aggregation::RankSet ranks;      // that have come
  aggregation::RankSet announced;  // of those, what the switch has been told
  std::optional<aggregation::JoinReply> reply;
  std::optional<aggregation::Start> start;
  std::vector<uint8_t> start_bytes;
  uint32_t departed = UINT32_MAX;  // the first seat that has left
  std::vector<aggregation::RankRange> subtrees;

  LocalView memory;
  MemoryRegion contributions_region, results_region;
  std::array<Wide, 2> wides;                // one sum for each place; one for each subtree
  std::vector<std::vector<float>> scratch;  // by level of the bracketing

  uint64_t operation = 0;  // newest seen
  Time resolve_at = kNever, close_at = kNever, look_at{};
  uint8_t disagree_stripe = 0;
  uint64_t disagree_segment = 0;
  std::vector<Outgoing> outgoing;
  bool published = false;
  bool root = false;  // all ranks of the group are here: nothing goes to the switch
  bool has_left = false;
};

}  // namespace millrace::host
