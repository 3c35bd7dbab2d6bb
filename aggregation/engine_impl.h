// The engine's insides, shared by engine.cc (packets and timers), engine_segment.cc (the data path),
// engine_join.cc (how groups come to be) and engine_end.cc (how they end). Nobody else includes this.
#pragma once

#include <map>
#include <random>
#include <unordered_map>

#include "aggregation/group.h"

namespace millrace::aggregation {

struct Engine::Impl {
  Impl(const EngineConfig& config, FramePool& pool);

  // engine.cc
  void receive(Frame frame, const roce::Packet& packet, Time now, FrameList& out);
  void poll(Time now, FrameList& out);
  Time next_deadline() const;
  void handle_cm_events(Time now, FrameList& out);
  void tick(Time now, FrameList& out);
  bool tick_link(Link& link, Time now, FrameList& out);
  std::unique_ptr<Link> make_link(const roce::QueuePairConfig& qp, Group& group, Member& member,
                                  uint8_t stripe, roce::CmId cm, Time now);
  Qpn new_qpn();
  Psn new_psn();
  roce::QueuePairConfig qp_config(const roce::Path& path, Qpn local, Psn expected,
                                  const roce::CmQueuePair& remote) const;
  void tick_group(Group& group, Time now, FrameList& out);
  void queue(Link& link);  // has something to send
  static void forget_completions(Link& link);
  static void add_counts(const roce::QueuePair& qp, Counters& counters);
  Counters totals() const;
  std::vector<GroupInfo> groups_info(Time now) const;

  // engine_segment.cc
  void handle_request(Link& link, Frame frame, const roce::Packet& packet, Time now);
  const char* wrong_header(const Link& link, const SegmentHeader& header) const;
  bool may_begin(Link& link, Time now);
  bool begin_segment(Link& link, const roce::Packet& packet, Time now);
  bool open_slot(Group& group, uint8_t stripe, SegmentSlot& slot, const SegmentHeader& header, Time now);
  void contribute(Link& link, Frame frame, std::span<uint8_t> data);
  static void reduce(const Group& group, SlotRing& slots, SegmentSlot& slot, uint32_t chunk,
                     std::span<const uint8_t> data, bool complete);
  void reduce_held(const Group& group, SlotRing& slots, SegmentSlot& slot, uint32_t chunk);
  static void sum_in_place(const SegmentSlot& slot, std::span<Held> ranks);
  void sum_wide(const SegmentSlot& slot, std::span<Held> ranks, size_t level);
  void release_chunk(Group& group, uint8_t stripe, SegmentSlot& slot, uint32_t chunk);
  // `data` is the chunk from `begin` on, in `frame` where that is one.
  void post_chunk(Group& group, uint8_t stripe, SegmentSlot& slot, uint32_t chunk, std::span<uint8_t> data,
                  uint32_t begin, const FrameRef& frame);

  // engine_tree.cc
  void connect_up(Group& group, Time now, FrameList& out);
  void handle_up_event(Group& group, uint8_t stripe, const roce::CmEvent& event, Time now, FrameList& out);
  void report_members(Group& group);
  void forget_parent(Group& group, Time now, FrameList& out);
  void handle_control(Link& link, Time now);
  void handle_members(Link& link, const Members& message, Time now);
  void handle_from_parent(Link& link, Frame frame, const roce::Packet& packet, Time now);
  void handle_result(Link& link, Frame frame, const roce::Packet& packet, Time now);
  void prepare_tree(Group& group, Time now);
  bool reserve_partials(Group& group, PartialStore& store, Time now);
  void contribute_in_tree(Link& link, std::span<const uint8_t> data, bool ends, Time now);
  void add(const SegmentSlot& slot, PartialStore& store, uint32_t partial, uint32_t begin, uint32_t end,
           const uint8_t* data, bool wide_data);
  uint32_t sum_partials(const Group& group, const SegmentSlot& slot, PartialStore& store, RankRange node);
  void complete_in_tree(Group& group, uint8_t stripe, SegmentSlot& slot, Time now);
  void send_up(Group& group, uint8_t stripe, SegmentSlot& slot, Time now);

  // engine_join.cc
  void join(const roce::CmEvent& request, Time now, FrameList& out);
  void admit(const roce::CmEvent& request, const JoinRequest& join, Time now, FrameList& out);
  Group* form(const GroupKey& key, const JoinRequest& join, Time now, JoinReject& refusal);
  bool authorised(const roce::CmEvent& request, const JoinRequest& join) const;
  void refuse(roce::CmId id, const JoinReject& refusal, Time now, FrameList& out);
  void arrived(Link& link, Time now);
  void start_if_complete(Group& group, Time now, FrameList& out);
  void start(Group& group, Time now);
  Group* admit_child(Group* group, const JoinRequest& join, const IpAddress& from, Time now, FrameList& out);
  void settle_contested(Time now, FrameList& out);
  void settle_waiting(Time now, FrameList& out);
  static uint64_t link_memory(uint32_t requests);
  uint32_t uplink_requests(uint16_t world) const;
  uint64_t memory_needed(uint16_t world, uint8_t stripes) const;
  std::optional<std::string> over_quota(uint32_t tenant, uint64_t more) const;
  bool ever_fits(const JoinRequest& join) const;
  bool reserve_to_hold(Group& group, SlotRing& slots, Time now);
  uint32_t requests_per_link() const;
  uint32_t chunks_per_segment() const { return ChunkMap{config.mtu}.count(config.segment_bytes); }

  // engine_end.cc
  void fail(Group& group, Code code, std::vector<uint16_t> ranks, const std::string& text, Time now);
  void breach(Link& link, const std::string& what, Time now);
  void lost(Link& link, const std::string& how, Time now);
  void leave(Link& link, bool goodbye, Time now, FrameList& out);
  void evict(Member& member, Time now, FrameList& out);
  void detach(Link& link, const JoinReject& why, Time now, FrameList& out);
  void forget_queued(const Group& group, const Member* member);
  void disagree(Link& link, uint64_t segment, Time now);
  void resolve_disagreement(Group& group, Time now);
  bool in_progress(const Group& group) const;
  void bury(Time now, FrameList& out);
  static std::string describe(const Member& member);

  EngineConfig config;
  FramePool& pool;
  roce::CmAgent cm;
  roce::Crc32Combine combine;
  Counters counters;  // without what the queue pairs count themselves
  std::mt19937_64 random;
  uint32_t next_qpn, next_group;
  std::map<uint32_t, std::unique_ptr<Group>> groups;  // by id, in an order that is the same in every run
  std::map<GroupKey, Group*> table;                   // those that can be joined
  std::unordered_map<uint32_t, Link*> by_qpn, by_cm;
  std::unordered_map<uint32_t, std::pair<Group*, uint8_t>> by_attempt;  // connecting to the parent, by CM ID
  uint64_t memory = 0;
  // Joins of a rank that is taken: the old connection is probed meanwhile.
  struct Contested {
    roce::CmEvent request;
    JoinRequest join;
    uint32_t old_qpn;
    Time asked, until;
  };
  std::list<Contested> contested;
  // Joins that wait for memory, in the order in which they came.
  struct Waiting {
    roce::CmEvent request;
    JoinRequest join;
    Time asked;
    std::string why;
  };
  std::list<Waiting> queued_joins;
  std::vector<uint32_t> ended;              // groups to destroy outside packet handling
  std::vector<std::vector<float>> scratch;  // wide sums of subtrees, for operations in the order of ranks
  // Links with something to send, first in first out. A link stands in it at most once; the ring's room is
  // reserved as links are made, so that receive() does not allocate.
  std::vector<Link*> active;
  size_t active_head = 0, active_size = 0;
  Time next_tick = kNever;
  Time next_paced = kNever;  // when the first of the links that their pace holds back may send
  Time polled{};
  bool shutting_down = false;
};

}  // namespace millrace::aggregation
