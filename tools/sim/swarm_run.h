// The inside of a run of the swarm (swarm.h): what its phases, faults and observers share.
#pragma once

#include <map>
#include <set>

#include "tools/sim/swarm.h"

namespace millrace::sim {

class Swarm final : private Observer {
 public:
  Swarm(const Plan& plan, Arena& arena, const Dump& dump)
      : plan_(plan),
        dump_(dump),
        fabric_(plan.fabric),
        wire_(judges_.violations),
        books_(judges_.violations),
        passage_(judges_.violations),
        lent_(judges_.violations, plan.fabric.remote.slot_bytes),
        late_(plan.seed ^ 0x6c617465) {
    Network& n = fabric_.network();
    n.add_observer(*this);
    if (plan_.fabric.tree) wire_.expect_trees();
    for (uint16_t s = 0; s < fabric_.switches(); s++) {
      switches_.insert(fabric_.at(s).id());
      for (const IpAddress& a : fabric_.at(s).config().engine.addresses) {
        own_[fabric_.at(s).id()].insert(a.bytes);
        of_switches_.insert(a.bytes);
      }
      fabric_.at(s).after_turn = [this, s](uint32_t held) { occupancy(s, held); };
    }
    for (uint16_t i = 0; i < fabric_.lenders(); i++) hear_lender(i);
    for (const GroupPlan& g : plan_.groups) {
      groups_.push_back(std::make_unique<GroupRun>());
      groups_.back()->plan = &g;
      groups_.back()->generations_max = g.generations;
      for (uint16_t r = 0; r < g.hosts.size(); r++)
        groups_.back()->members.push_back(
            std::make_unique<Member>(*groups_.back(), r, fabric_, arena, judges_));
    }
    for (const uint16_t h : plan_.eager) {
      fabric_.host(h).set_eager(true);
      // By its window a member says which results it has seen: where one that says so too early has lost one
      // on the wire, nobody sends that again.
      excuse_host(h);
      for (const bool v6 : {false, true}) wire_.tolerate(fabric_.host(h).address(v6).bytes);
    }
    for (uint16_t h = 0; h < fabric_.hosts(); h++)
      fabric_.host(h).set_shared_memory([&arena](size_t bytes) { return arena.take(bytes); },
                                        plan_.fabric.engine.operation_timeout);
    for (uint16_t h = 0; h < fabric_.hosts(); h++)
      fabric_.host(h).after_turn = [this, h](Time now) {
        each([&](GroupRun&, Member& m) {
          if (m.host() == h) m.step(now);
        });
      };
  }

  RunResult run() {
    safety();
    heal();
    liveness();
    final_round();
    epilogue();
    return result();
  }

 private:
  void each(const std::function<void(GroupRun&, Member&)>& what) {
    for (auto& g : groups_)
      for (auto& m : g->members) what(*g, *m);
  }
  bool settled() const {
    return std::all_of(groups_.begin(), groups_.end(), [](auto& g) { return g->settled(); });
  }
  int64_t now_ns() const { return fabric_.now().count(); }

  // The phases.
  void safety();
  void heal();
  void liveness();
  void final_round();
  void epilogue();
  RunResult result();

  void inject(const Fault& fault);
  void crash(uint16_t host, Time until);
  void restart(uint16_t host);
  void excuse_host(uint16_t host);
  void excuse_cut_off(uint16_t host);
  std::vector<uint32_t> together_with(const Fault& f) const;
  void excuse_switch(uint16_t s);
  void excuse_impatient(Time without_answer, std::optional<uint16_t> host = {});
  void excuse_all_through_links();
  void hash_frame(std::span<const uint8_t> frame);
  void copy_later(uint32_t node, std::span<const uint8_t> frame);
  void stand_by();  // lets members come back whose group forms again
  void occupancy(uint16_t s, uint32_t held);
  void pause(uint16_t host, Time duration);
  void check_spillway(uint16_t s);
  void hear_lender(uint16_t i);
  void meet_lenders();
  void send_stream(const StreamPlan& plan, uint32_t number, uint32_t psn);
  void lender_fault(const Fault& f);
  void link_fault(const Fault& f);
  struct Cut {
    uint32_t times = 0;               // that it is down
    bool told = false;                // to the switch
    Time since{};                     // when it was
    std::set<check::Address> to;      // whom the switch then does not reach
    std::optional<uint64_t> drained;  // to the port, when it went down
  };
  void set_link(uint32_t link, const Fault& f, bool up);
  void tell_link(uint16_t s, uint16_t port);
  std::set<check::Address> beyond(uint16_t s, const Fault& f) const;
  void tell_restarted(uint16_t s);
  void end_leases();

  // Observer.
  void sent(Time at, uint32_t node, uint32_t link, std::span<const uint8_t> frame, Fate fate) override;
  void arrived(Time at, uint32_t node, uint32_t link, std::span<const uint8_t> frame) override;
  static std::optional<check::Address> address(std::span<const uint8_t> frame, bool source);

  const Plan& plan_;
  std::map<uint16_t, Time> crashed_at_;  // by host: the last time
  Time switch_back_at_{-1};              // the last time that one was restarted, or went on after long
  const Dump& dump_;
  Judges judges_;
  Fabric fabric_;
  check::WireCheck wire_;
  check::BooksCheck books_;
  check::PassageCheck passage_;
  check::LenderCheck lent_;
  std::vector<std::unique_ptr<GroupRun>> groups_;
  std::set<uint32_t> switches_;
  std::map<uint32_t, std::set<check::Address>> own_;  // addresses of switches, by node
  std::set<check::Address> of_switches_, of_lenders_;
  std::set<uint32_t> lender_nodes_;
  Time begin_{};                                       // of the plan's time
  std::map<std::pair<uint16_t, uint16_t>, Cut> cuts_;  // by switch and port
  std::map<uint16_t, Time> awake_from_;  // by switch: the end of the last time that it stood still
  std::optional<uint32_t> restarting_;   // node
  std::set<uint32_t> down_;              // links by which a switch with queues has to send nothing
  std::array<uint64_t, kFaultKinds> injected_{};
  Random late_;
  unsigned copies_left_ = 40;
  bool healed_ = false;
  Time intact_from_ = kNever;  // whatever was corrupted has arrived by then
};

}  // namespace millrace::sim
