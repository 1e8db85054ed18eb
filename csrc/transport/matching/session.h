// Everything that each transport keeps for one peer, whatever carries the frames: matching in both directions, how long
// the peer has been silent, and how far the end of its connection has come.
//
// Thread-safety: under the endpoint's progress lock. Failure: on_control() throws what ends the peer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"
#include "transport/matching/heartbeat_monitor.h"
#include "transport/matching/inbox.h"
#include "transport/matching/outbox.h"

namespace syncengine::matching {

// How a connection to a peer ends. Each side says goodbye once, as the last thing that it sends; after both nothing is
// under way.
//
//               Leave      SayGoodbye  HearGoodbye  Break
//   Open        Leaving    -           PeerLeft     Broken    both send
//   PeerLeft    Answering  -           PeerLeft     Broken    it has said its goodbye: this rank is to leave, too
//   Leaving     Leaving    Said        Answering    Broken    what comes counts no more, but for the goodbye
//   Answering   Answering  Parted      Answering    Broken    as Leaving, and as PeerLeft
//   Said        Said       -           Parted       Broken    the peer's is still to come
//   Parted      Parted     -           Parted       Broken
//   Broken      Broken     -           -            Broken    no byte comes through any more
//
// Thread-safety: as the peer's. Failure: `-` is a defect of the caller: throws Aborted, which names state and event.

class ConnectionLifecycle {
 public:
  enum State : uint8_t { Open, PeerLeft, Leaving, Answering, Said, Parted, Broken };
  enum LifeEvent : uint8_t { Leave, SayGoodbye, HearGoodbye, Break };

  static constexpr std::optional<State> next(State state, LifeEvent event) {
    constexpr std::optional<State> kNever;
    constexpr std::optional<State> kTable[][4] = {
        {Leaving, kNever, PeerLeft, Broken}, {Answering, kNever, PeerLeft, Broken},
        {Leaving, Said, Answering, Broken},  {Answering, Parted, Answering, Broken},
        {Said, kNever, Parted, Broken},      {Parted, kNever, Parted, Broken},
        {Broken, kNever, kNever, Broken}};
    return kTable[state][event];
  }

  void on(LifeEvent event) {
    constexpr const char* kStates[] = {"Open", "PeerLeft", "Leaving", "Answering", "Said", "Parted", "Broken"};
    constexpr const char* kEvents[] = {"Leave", "SayGoodbye", "HearGoodbye", "Break"};
    const std::optional<State> then = next(state_, event);
    if (!then)
      throw Error(ErrorKind::Aborted, std::string("a defect of syncengine: the connection to a peer is ") +
                                          kStates[state_] + ", which does not allow " + kEvents[event]);
    state_ = *then;
  }

  State state() const { return state_; }
  bool is_in_use() const { return state_ <= PeerLeft; }  // transfers may begin
  bool may_send() const { return state_ <= Answering; }  // up to the goodbye
  bool owes_goodbye() const { return !is_in_use() && may_send(); }
  bool has_peer_left() const { return state_ == PeerLeft || state_ == Answering || state_ == Parted; }
  bool is_broken() const { return state_ == Broken; }

 private:
  State state_ = Open;
};

struct Session {
  Session(Shared& endpoint, const HeartbeatTiming& timing, int peer)
      : shared(endpoint), rank(peer), withdrawals(endpoint, peer), heartbeat(endpoint, timing, peer) {}

  std::string name() const { return shared.names(rank); }
  void tell(const std::string& message) { add({.kind = Kind::Message}, message); }
  void add_abort(const Error& error);                 // tells the peer why it is given up
  void add(Frame frame, std::string_view text = {});  // a frame for the control connection
  void on_control(const Frame& frame, std::string_view text);
  uint32_t checksum_of(std::string_view text) const;  // 0 without checksums
  void withdraw(uint64_t first, uint64_t last, const Error& error);
  void take_leave(const Error& error);  // what is under way is still sent

  Shared& shared;
  const int rank;
  std::string out;  // frames of control that wait to be sent
  Withdrawals withdrawals;
  Outbox outbox{shared, rank, out, withdrawals};
  Inbox inbox{shared, rank, out, withdrawals};
  HeartbeatMonitor heartbeat;
  ConnectionLifecycle life;
  Interhost::End end = Interhost::End::Unknown;  // as the peer's goodbye says
};

}  // namespace syncengine::matching
