// The agent's core, private to cm.cc and cm_receive.cc: the connections, the tables that find them by what a
// peer names them, and their timers. One thread, as the agent's.
#pragma once

#include <set>

#include "roce/cm.h"
#include "roce/cm_message.h"

namespace millrace::roce {

inline constexpr uint8_t kServiceTypeRc = 0;
inline constexpr size_t kRdmaCmBytes = RdmaCmHeader::kBytes;

// The states of IBA 12.9.5 and 12.9.6, without those that only the caller's delay makes.
enum class CmState : uint8_t {
  kReqSent,      // active; REQ on the timer
  kRepReceived,  // active; the caller's confirm() is awaited
  kReqReceived,  // passive; the caller's accept() or reject() is awaited
  kRepSent,      // passive; REP on the timer
  kEstablished,
  kDreqSent,  // DREQ on the timer
  kResting,   // finished: answers strays until its ID may be used again
};

struct CmAgent::Connection {
  CmId id;
  CmState state = CmState::kReqSent;
  bool active = false;
  // One extension for each transmission, else MRAs without end would hold us for ever.
  bool mra_taken = false;
  uint32_t remote_id = 0;  // 0: not known yet
  uint64_t remote_guid = 0;
  Qpn remote_qpn;
  Psn remote_psn;
  uint64_t service_id = 0;
  uint64_t transaction_id = 0;  // of the REQ, kept by REP, RTU, REJ and MRA
  Path path;
  CmQueuePair local;
  uint32_t repeats_left = 0;
  Time deadline = kNever;
  // What this state sends on its timer and to a repeat of the peer's message: REQ, MRA, REP, RTU, DREQ; a REJ
  // while resting after a refusal.
  std::unique_ptr<Mad> answer;
};

// What a peer calls a connection or a queue pair. The address is part of it: whoever copies another host's
// GUID does not thereby reach that host's connections.
struct CmRemoteKey {
  IpAddress ip;
  uint64_t guid = 0;
  uint32_t number = 0;
  friend bool operator==(const CmRemoteKey&, const CmRemoteKey&) = default;
};
// Salted, since peers choose the keys.
struct CmRemoteKeyHash {
  uint64_t salt = 0;
  size_t operator()(const CmRemoteKey& key) const;
};

struct CmAgent::Impl {
  using RemoteIndex = std::unordered_map<CmRemoteKey, CmId, CmRemoteKeyHash>;

  Impl(const CmConfig& agent_config, FramePool& frames, CmCounters& counts);

  // Tables.
  Connection* find(uint32_t id) const;
  // The live or resting connection of both IDs, if the packet comes from its peer.
  Connection* find(uint32_t id, uint32_t remote_id, const IpAddress& ip) const;
  Connection* find(const RemoteIndex& index, const CmRemoteKey& key) const;
  Connection& create(const Path& path, CmState state);
  static CmRemoteKey id_key(const Connection& c) { return {c.path.dst_ip, c.remote_guid, c.remote_id}; }
  static CmRemoteKey qp_key(const Connection& c) {
    return {c.path.dst_ip, c.remote_guid, c.remote_qpn.value};
  }
  void index_remote(Connection& c);
  bool full() const;
  void set_state(Connection& c, CmState state);
  // Ends the connection; its ID rests. The answer to strays stays only after a refusal.
  void rest(Connection& c, Time now, bool keep_answer = false);
  void forget(CmId id);
  // The connection's peer is gone, a new one has its queue pair number or its communication ID.
  void replace(Connection& c, Time now);
  void event(const Connection& c, CmEvent::Kind kind);

  // Timers.
  void set_timer(Connection& c, Time when);
  void start_repeats(Connection& c, uint32_t repeats, Time now);
  void on_timer(Connection& c, Time now, FrameList& out);
  void take_mra(Connection& c, uint8_t service_timeout, Time now);

  // Sending.
  void send(const Path& path, const Mad& mad, FrameList& out);
  // Keeps the message as the connection's answer and sends it.
  void send_answer(Connection& c, const CmMessage& message, FrameList& out);
  // Sends and keeps a REJ, and ends the connection.
  void refuse(Connection& c, CmAnswered answered, RejectReason reason, std::span<const uint8_t> private_data,
              Time now, FrameList& out);
  void send_rej(const Packet& packet, const MadHeader& header, uint32_t local_id, uint32_t remote_id,
                CmAnswered answered, RejectReason reason, FrameList& out);
  void send_drep(const Packet& packet, const MadHeader& header, const DreqMessage& dreq, FrameList& out);
  uint64_t own_transaction(CmId id) const { return transaction_high | id.value; }

  // Receiving.
  std::optional<CmMessage> admit(const Packet& packet);
  void on_message(const Packet& p, const MadHeader& h, const ReqMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const MraMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const RejMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const RepMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const RtuMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const DreqMessage& m, Time now, FrameList& out);
  void on_message(const Packet& p, const MadHeader& h, const DrepMessage& m, Time now, FrameList& out);
  void on_repeated_req(Connection& c, const Packet& p, const MadHeader& h, FrameList& out);
  void on_first_rep(Connection& c, const RepMessage& m, Time now);
  void on_stray_rep(const Packet& p, const MadHeader& h, const RepMessage& m, RejectReason reason,
                    FrameList& out);
  Connection* find_rejected(const Packet& p, const RejMessage& m) const;
  void establish(Connection& c);

  // Without a service this agent may be one of several processes behind one address, each of which sees the
  // others' messages: what it does not know is then not its to answer.
  bool listening() const { return !services.empty(); }

  CmConfig config;
  FramePool& pool;
  CmCounters& counters;
  std::set<uint64_t> services;
  std::unordered_map<uint32_t, std::unique_ptr<Connection>> connections;
  RemoteIndex by_remote_id, by_remote_qp;
  std::set<std::pair<Time, uint32_t>> timers;
  std::deque<std::pair<Time, CmId>> resting;  // in order of their ends
  std::deque<CmEvent> events;
  size_t half_open = 0;
  std::unordered_map<IpAddress, uint32_t, IpAddressHash> half_open_from;  // by the peer's address; no zeros
  uint64_t transaction_high = 0;
  uint32_t id_mask = 0, next_id = 0;
  Psn psn;
};

}  // namespace millrace::roce
