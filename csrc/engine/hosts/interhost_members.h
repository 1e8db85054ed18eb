// The interhost part of a communicator: its traffic with members on other hosts, their messages, and how they end.
//
// A communicator fails as one: a failure here is told to all members on other hosts at once, and so to their hosts.
//
// Ownership: the communicator's, whose Traffic refers to it and ends first. Thread-safety: under the engine's progress
// lock, unless a comment says otherwise. Failure: throws PeerLost for messages that no peer should send.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/hosts/interhost_exchange.h"
#include "engine/hosts/links.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/message_route.h"
#include "engine/messages/traffic.h"

namespace syncengine::hosts {

// The order of announced operations over hosts. The first rank of each host tells the communicator's first rank when
// all ranks of its host have announced an operation. The communicator's first rank fixes the order and tells the first
// ranks of the hosts, which write it to their hosts' logs.
//
// Ownership, thread-safety: as Schedule. Failure: hear() throws PeerLost for messages that no peer should send.

class InterhostSchedule final : public Schedule {
 public:
  InterhostSchedule(const Links& links, const Group& locals, Lane& lane) : Schedule(locals, lane), links_(links) {}

  void hear(int member, const Checked<Ready>& ready);
  void hear(int member, const Checked<Scheduled>& scheduled);
  void hear(int member, const Checked<Refused>& refused, const std::string& announced);
  void refuse(const Slots& slots, uint64_t step, const std::string& text) override;
  // Returns why `member`, a rank of the communicator on another host, refused a step that has not ended; else empty.
  std::string remote_refusal_of(int member) const;
  // The members of other hosts that hold up the oldest operation, as far as this rank knows; they are leaders.
  uint64_t remote_blocking_ranks() const;

 private:
  uint64_t refusals() const override { return Schedule::refusals() + heard_; }
  std::optional<std::string> reason_to_drop(const AnnouncedOperation& announced) const override;
  bool append_ready() override;  // by the first rank of a host
  bool report();
  bool order();
  // Returns the leaders whose hosts have not reported the operation as ready. Called by the communicator's first rank.
  uint64_t unready(const AnnouncedOperation& waiting) const;

  const Links& links_;
  // By slot and leader of a host: the last step in which all ranks of the host have announced it. Only the
  // communicator's first rank knows this of other hosts.
  std::map<uint64_t, std::map<int, uint64_t>> ready_;
  std::map<uint64_t, uint64_t> ordered_;  // at the first rank, by slot: the last step in which it was scheduled
  std::deque<uint64_t> next_;             // slots in their order, which are not in the log yet

  // The last refusal of a model's step by a member of another host; see Refused.
  struct Refusal {
    uint64_t step;
    std::string text, announced;
  };
  static constexpr int kMostRefused = 64;  // models of which one member may have refused a step that has not ended
  std::map<uint64_t, std::map<int, Refusal>> refused_;  // by the model's first slot
  uint64_t heard_ = 0;                                  // refusals
};

// Messages to and from the ranks of other hosts. Headers, with the content if it is short, go by Interhost::tell.
// Longer content goes by transfers directly from the sender's memory into the receiver's, piece by piece, several
// pieces at a time; any number of messages may be under way.
//
// Ownership: as MessageRoute; its transfers must have been withdrawn before clear(). Thread-safety: under the engine's
// progress lock. Failure: advance() throws the error that failed a transfer, hear() PeerLost for messages that no peer
// should send.

class InterhostRoute final : public MessageRoute {
 public:
  explicit InterhostRoute(const Links& links);

  void hear(int member, const Checked<Announced>& announced, const std::string& content);
  void hear(int member, const Checked<Heard>& heard);

  void send(Post post) override { peers_.at(post.message.peer).waiting.push_back(std::move(post)); }
  void fetch(int source, MessageHeader header, Post receive) override;
  bool advance(Messenger& messenger) override;
  void visit(const std::function<void(Post&)>& each) override;
  void clear() override;
  uint64_t interhost_bytes() const override { return interhost_bytes_; }

  MessageTally tally(int member) const { return peers_.at(member).ended; }
  // Whether a post of this rank can't end without the member. If the member has left, `theirs` counts its messages with
  // this rank that had ended by then: their posts here do not need it, since their bytes still come.
  bool waits_for(const Messenger& messenger, int member, const MessageTally& theirs = {}) const;
  uint64_t remote_blocking_ranks(const Messenger& messenger) const;  // members whose next step is needed

 private:
  static constexpr uint64_t kWindow = 32;  // headers of a peer that a rank holds before any receive wants them
  static constexpr size_t kPieces = 8;     // pieces of one message under way at once

  struct TransitPiece {
    std::shared_ptr<Interhost::Transfer> transfer;
    size_t offset, bytes;
    std::unique_ptr<std::byte[]> copy;  // used if the memory is in several parts
  };
  // A message whose bytes are on their way.
  struct Transit {
    Post post;
    uint64_t number;
    size_t posted = 0;                     // bytes of posted pieces
    std::deque<TransitPiece> pieces = {};  // pieces that have not ended
  };
  struct PeerMail {
    std::deque<Post> waiting;  // until there is room to announce them
    uint64_t announced = 0;    // headers
    uint64_t taken_in = 0;     // of these, the ones that the peer has taken in
    // Whether one more message may be announced. A tag has only kChunkBits for a message's number, and a message that
    // waits for its receive must not meet a later one with the same tag.
    bool has_room() const {
      return announced - taken_in < kWindow && (sending.empty() || numbers - sending.front().number < 1 << kChunkBits);
    }
    uint64_t numbers = 0;   // given to messages that go by transfers
    uint64_t numbered = 0;  // messages that come by transfers
    std::list<Transit> sending;

    std::deque<MessageHeader> headers;  // not heard yet
    uint64_t heard = 0;
    uint64_t told = 0;  // of the headers heard, those that the peer knows of
    std::list<Transit> receiving;
    MessageTally ended;
  };

  bool announce(int member, PeerMail& peer, Messenger& messenger);
  bool move(int member, std::list<Transit>& transits, uint64_t& ended, Messenger& messenger);
  bool hear_headers(int member, PeerMail& peer, Messenger& messenger);
  bool end_pieces(Transit& transit, Messenger& messenger);
  void post_piece(int member, Transit& transit, Messenger& messenger);

  const Links& links_;
  std::map<int, PeerMail> peers_;  // members of other hosts
  uint64_t interhost_bytes_ = 0;
};

class InterhostMembers {
 public:
  // `group` is the communicator's number; `job_ranks` and `global_ranks` are as in Links.
  InterhostMembers(std::shared_ptr<Network> network, uint32_t group, const Placement& placement,
                   std::vector<int> job_ranks, std::vector<int> global_ranks);

  Traffic::Parts make_parts();  // called once

  // Begins to take messages from other hosts. Called when the Traffic exists. `fail` ends the communicator, without
  // first hearing more messages.
  void enroll(std::function<void(const Error&)> fail);
  void hear_all() { links_.network->hear_all(); }
  // Called by the network with a message of `peer`, a rank of the job. Throws if later messages can't be relied on.
  void hear(int peer, const std::string& message);
  void give_up(const Error& error) { fail_(error); }
  // Checks the members on other hosts. Returns the error with which the communicator must fail, or nothing. In the
  // latter case, tells other hosts which members of this host have kept this rank waiting for long.
  std::optional<Error> check(const Traffic& traffic);
  // Tells members on other hosts how this rank ends. Afterwards nothing from another host touches this rank's memory,
  // and until forget() only the messages of shrink() are heard, for look_around().
  void end(shm::Standing standing, const Error& for_peers, const Traffic& traffic);
  void forget() { links_.network->forget(links_.group); }
  // A part of shrink(): tells members on other hosts this host's verdict, if it has changed. Puts into `sees` the
  // verdicts that they have told, and which of them are gone or have ended.
  void look_around(Outlook& sees);
  bool have_all_left() const { return left_.size() == links_.remotes.size(); }
  // Whether the member's process has ended, as far as the transport knows.
  bool has_ended(int member) const { return interhost().end_of(links_.job_ranks[member]) == Interhost::End::Ended; }
  // Members, on any host, that hold up the operation or message that has waited longest.
  uint64_t blocking_ranks(const Traffic& traffic) const;

  // io_loop() and interhost() may be called without any lock.
  IoLoop* io_loop() const { return links_.network.get(); }
  Interhost& interhost() const { return links_.network->interhost(); }

  std::string describe_links() const { return syncengine::describe(links_.choice); }

  // A part of split(): takes a number for a communicator that this rank founds, as its first member. Takes the progress
  // lock, as does expect_group().
  uint64_t take_number();
  // A part of shrink(): the number of the one communicator that may follow this one, the same on all members. Throws
  // InvalidUsage if no number is left, after too many shrinks.
  uint64_t number_of_next() const;
  // Returns an object to keep until the new communicator exists: messages for it from quicker members are stored.
  std::shared_ptr<void> expect_group() const;
  // Makes the interhost part of a new communicator of `members`, who are on several hosts. Called without any lock.
  // Throws InvalidUsage if the founder had no `number` left.
  std::unique_ptr<InterhostMembers> split(uint64_t number, const Placement& placement, const std::vector<int>& members,
                                          std::vector<int> global_ranks) const;

 private:
  void hear_ended(int member, const Checked<Ended>& ended);
  std::optional<Error> check_members(const Traffic& traffic);
  void tell_who_is_late(const Traffic& traffic);
  uint64_t absent_here(const Traffic& traffic, const Lane::Item* item) const;

  Links links_;
  InterhostExchange* exchanges_[shm::kLanes] = {};  // by lane
  InterhostSchedule* schedule_ = nullptr;
  InterhostRoute* route_ = nullptr;
  std::function<void(const Error&)> fail_;

  bool ended_ = false;
  std::map<int, Ended> left_;     // members that left, and the operations that they had completed
  std::map<int, uint64_t> late_;  // by member of another host: the ranks for whom it waits
  uint64_t told_late_ = 0;
  static constexpr auto kLate = std::chrono::milliseconds(100);  // a wait that takes longer is told to the other hosts

  HostVerdict told_;                     // what this rank has told, in shrink()
  std::map<int, HostVerdict> verdicts_;  // what members have told of their hosts
};

}  // namespace syncengine::hosts
