// The messages between the members of a communicator: matches messages sent to this rank with its receives, by sender,
// channel and tag, in the order of the calls. Routes move the bytes.
//
// Ownership: owns its routes and posted messages. Thread-safety: all calls under the engine's progress lock. Aliasing:
// see Message. Failure: advance() throws Mismatch if the two sides mean different messages; the caller fails the
// communicator.
#pragma once

#include <array>
#include <deque>
#include <list>
#include <memory>
#include <vector>

#include "engine/messages/mailbox_route.h"

namespace syncengine {

class Messenger final {
 public:
  // `global_ranks` of the members are for errors. `near` reaches the members on this host, `far` all others; `far` is
  // null if there are none.
  Messenger(int rank, std::vector<int> global_ranks, std::unique_ptr<MailboxRoute> near,
            std::unique_ptr<MessageRoute> far, Lane::Trash& trash);

  void post(Post post);  // never throws

  // Does what can be done without waiting, for about `budget` bytes. Returns whether anything moved.
  bool advance(size_t budget);
  bool idle() const { return posted_ == 0; }

  // Return masks of members on this host: those whose next step may let this rank go on, and those that hold it up.
  uint64_t interest() const { return idle() ? 0 : near_->interest(*this); }
  uint64_t missing() const { return idle() ? 0 : near_->missing(*this); }
  uint64_t blocking_ranks() const { return missing(); }
  // Returns a receive of any source, or null. Called when all others have left and all their messages are known, so
  // that nothing can end such a receive.
  const Message* waits_in_vain() const;
  const Lane::Item* oldest() const;
  void fail_all(const std::exception_ptr& error);
  uint64_t messages() const { return messages_; }  // messages that have ended well

  uint64_t interhost_bytes() const { return far_ ? far_->interhost_bytes() : 0; }

  const MailboxRoute& near() const { return *near_; }

  // Methods that the routes call.
  bool listens() const { return !receives_.empty(); }  // some receive has no header yet, so new headers are wanted
  uint64_t awaited() const;                            // members whose header such a receive needs
  uint64_t perhaps_awaited() const;                    // and members from whom a receive of any source may come
  void arrive(int source, MessageHeader header);       // may call fetch(); throws Mismatch
  void count(size_t bytes) { moved_bytes_ += bytes; }  // copied in this pass
  void finish(Post& post);

 private:
  std::array<MessageRoute*, 2> routes() const { return {near_.get(), far_.get()}; }  // null where there is no route
  MessageRoute& route_to(int member) const { return near_->reaches(member) ? *routes()[0] : *far_; }
  void match_new(Post receive);
  void begin(int source, MessageHeader header, Post receive);
  void require_same(int source, const MessageHeader& header, const Post& receive) const;
  std::string name(int member) const { return "rank " + std::to_string(global_ranks_[member]); }

  int rank_;
  std::vector<int> global_ranks_;
  std::unique_ptr<MailboxRoute> near_;
  std::unique_ptr<MessageRoute> far_;
  Lane::Trash& trash_;
  std::vector<std::deque<MessageHeader>> unmatched_;  // by source
  std::deque<Post> fresh_;                            // not matched yet
  std::list<Post> receives_;                          // unmatched, in the order of the calls
  uint64_t posted_ = 0;                               // posts that have not ended
  uint64_t arrivals_ = 0;
  uint64_t messages_ = 0;
  size_t moved_bytes_ = 0;
};

}  // namespace syncengine
