// Messages between the ranks of one host, through mailboxes in their shared memory; large ones are staged in pieces.
//
// A receiver asks each sender for one message at a time. Only members that wait for messages look into their mailboxes.
//
// Ownership, thread-safety, failure: as MessageRoute.
#pragma once

#include <deque>
#include <list>
#include <vector>

#include "engine/messages/message_route.h"
#include "transport/shm/layout.h"

namespace syncengine {

class MailboxRoute final : public MessageRoute {
 public:
  // `ranks` has the rank in the communicator of each member of the group.
  MailboxRoute(const Group& group, std::vector<int> ranks);

  bool reaches(int rank) const { return member_of(rank) >= 0; }

  void send(Post post) override { outgoing_[member_of(post.message.peer)].waiting.push_back(std::move(post)); }
  void fetch(int source, MessageHeader header, Post receive) override;
  bool advance(Messenger& messenger) override;
  void visit(const std::function<void(Post&)>& each) override;
  void clear() override;

  // Return masks of members of the group. interest(): members whose next step may let this rank go on. missing():
  // members without whom it can't go on, and who have left nothing for it to read.
  uint64_t interest(const Messenger& messenger) const;
  uint64_t missing(const Messenger& messenger) const;
  // Offsets in this rank's arena of staging memory: kFragmentsBytes for each receiver, to be given back with the group.
  std::vector<size_t> fragments() const;
  static constexpr size_t kFragmentsBytes = shm::kFragments * shm::kFragmentBytes;

 private:
  struct AnnouncedPost {
    Post post;
    uint64_t number;
  };
  struct Outgoing {
    std::deque<Post> waiting;            // until there is room to announce them
    std::list<AnnouncedPost> announced;  // until the receiver has got them
    uint64_t served = 0;                 // messages that the receiver has wanted and got
    size_t done = 0;                     // bytes staged of the message that it wants now
    size_t fragments = 0;                // their offset in this rank's arena; 0 before the first is staged
  };
  struct StagedTransfer {
    MessageHeader header;
    Post post;
    bool wanted = false;
    size_t done = 0;
  };
  struct Incoming {
    uint64_t heard = 0;
    std::deque<StagedTransfer> transfers;
  };

  shm::OutboxWords& outbox(int from, int to) const { return group_.block(from).messages.out[to]; }
  shm::InboxWords& inbox(int at, int from) const { return group_.block(at).messages.in[from]; }
  int member_of(int rank) const;
  uint64_t among_members(uint64_t ranks) const;
  bool hear(int source, Messenger& messenger);
  bool announce(int destination, Messenger& messenger);
  bool serve(int destination, Messenger& messenger);
  bool fetch_next(int source, Messenger& messenger);
  bool fetch_staged(int source, StagedTransfer& transfer, Messenger& messenger);
  bool has_room(int destination) const;
  bool can_serve(int destination) const;

  const Group& group_;
  std::vector<int> ranks_;
  std::vector<Outgoing> outgoing_;  // by member of the group, like the members below
  std::vector<Incoming> incoming_;
};

}  // namespace syncengine
