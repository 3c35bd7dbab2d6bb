// Several ranks of one host as a single member of their group ("Trees" in aggregation/PROTOCOL.md): it joins
// the switch as a child, tells it which ranks have come, adds their contributions to a segment up into one,
// and passes START, results and terminal messages on. Where all ranks of the group are on this host it is the
// root of the group, and nothing goes to the switch. Pure: it sees messages, completions, counters in the
// memory it is given, and a time; it calls the transport to the switch. LocalHub moves its messages; the
// progress thread of the leader, the process that has it, is its only caller.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/communicator.h"
#include "host/local_memory.h"
#include "host/local_message.h"

namespace millrace::host {

struct HubConfig {
  CommunicatorConfig join;  // of the rank that leads
  std::string host_name;    // for sentences
  // How long the others wait for a rank that lives and does not contribute; the switch's own default.
  Time operation_timeout = std::chrono::seconds(600);
};

class Hub {
 public:
  // Connects at once. `up` outlives the hub.
  Hub(const HubConfig& config, Transport& up, Time now);
  ~Hub();

  // Ranks. A seat is a rank's place at this hub, from 0 in the order of arrival.

  // Why a rank cannot be taken, in a sentence; nothing: attach() takes it.
  std::optional<std::string> objection(const LocalHello& hello) const;
  uint32_t attach(const LocalHello& hello, uint32_t process);
  void heard(uint32_t seat, Time now);                         // it has sent a message
  void depart(uint32_t seat, Time now);                        // it has said goodbye
  void lose(uint32_t seat, const std::string& how, Time now);  // it has died

  // The switch's side.
  bool owns(LinkId link) const;
  void handle(const Completion& completion, Time now);
  // Takes what ranks have posted, hands on what is complete, and timers.
  void poll(Time now);
  Time next_deadline() const;
  LinkStats stats() const;

  // Once the group starts: the memory to make, zeroed, and to give; it outlives the hub.
  std::optional<LocalLayout> wants_memory() const;
  void give_memory(const LocalView& memory, Time now);

  // Ends the group for everybody.
  void fail(aggregation::Code code, std::vector<uint16_t> ranks, const std::string& text, Time now);
  // The leader takes no part any more; ranks that are still there are told so.
  void leave(Time now);
  // Nothing is sent to the switch from the memory nor written to it any more, and no rank is left.
  bool over() const;
  bool joining() const;  // ranks may still come

  struct Outgoing {
    uint32_t seat;
    LocalMessage message;  // kStart: with the memory
  };
  // What ranks are to be told since the last call, in order.
  std::vector<Outgoing> take_messages();
  // Whether results have been published since the last call: whoever sleeps has to be woken.
  bool take_published();
  // Posts have come that poll() has not seen.
  bool behind() const;
  uint32_t ranks() const;  // that have come

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace::host
