#include "tools/sim/nic_quirks.h"

#include <type_traits>

namespace millrace::sim {

using std::chrono::milliseconds;

NicQuirks draw_quirks(uint64_t seed) {
  Dice dice(seed ^ 0x517CC1B727220A95ull);
  const auto pick = [&](auto... of) {
    const std::common_type_t<decltype(of)...> all[] = {of...};
    return all[dice.below(sizeof...(of))];
  };
  NicQuirks q;
  q.ack_every = pick(0u, 1u, 2u, 4u, 16u, 64u);
  q.ack_delay = Time(pick(1'000, 5'000, 20'000, 100'000));
  q.only_when_asked = dice.one_in(4);
  q.one_ack_per_turn = dice.one_in(2);
  q.lazy_duplicates = dice.one_in(2);
  q.real_credits = dice.one_in(2);
  q.rnr_one_in = pick(0u, 0u, 0u, 50u, 500u);
  q.rnr_timer = static_cast<uint8_t>(pick(1, 5, 12, 12, 14));
  q.ack_request_every = pick(0u, 0u, 1u, 4u, 16u, 64u);
  q.first_timeout = pick(Time(milliseconds(2)), Time(milliseconds(4)), Time(milliseconds(8)),
                         Time(milliseconds(16)), Time(67'108'864));
  q.retry_for_ever = dice.one_in(4);
  q.in_flight_max = pick(16u, 64u, 256u, 1024u, 8192u);
  q.migrated = dice.one_in(2);
  q.solicited = dice.one_in(4);
  q.traffic_class = static_cast<uint8_t>(pick(0x00, 0x02, 0x6A));
  q.pace_ahead = Time(pick(500, 1'000, 4'000));
  q.dcqcn = !dice.one_in(4);
  q.cm_timeout = static_cast<uint8_t>(pick(16, 17, 17, 18, 20));
  q.flow_label = !dice.one_in(3);
  q.establish_delay = Time(pick(0, 0, 30'000, 2'000'000));
  q.drain_delay = Time(pick(0, 2'000, 50'000));
  return q;
}

}  // namespace millrace::sim
