// Messages to and from the ranks of other hosts. A header goes by Interhost::tell; what is not in it goes by transfers
// straight from the sender's memory into the receiver's, piece by piece, several at a time, any number of messages
// beside each other.
//
// Ownership: as MessageRoute; its transfers must have been withdrawn before take_all(). Thread-safety: under the
// engine's progress lock. Failure: advance() throws what failed a transfer, hear() PeerLost for what no peer should
// send.
#pragma once

#include <deque>
#include <list>
#include <map>

#include "engine/hosts/links.h"
#include "engine/messages/message_route.h"

namespace syncengine::hosts {

class InterhostRoute final : public MessageRoute {
 public:
  explicit InterhostRoute(const Links& links);

  void hear(int member, const Announced& announced, const std::string& content);
  void hear(int member, const Heard& heard);

  void send(Post post) override;
  void fetch(int source, MessageHeader header, Post receive) override;
  bool advance(Matcher& matcher, size_t& moved_bytes) override;
  bool has_unheard() const override;
  const Post* oldest() const override;
  std::vector<Post> take_all() override;
  uint64_t interhost_bytes() const override { return interhost_bytes_; }

  Tally tally(int member) const { return peers_.at(member).ended; }
  // Whether something waits for the member. `theirs`: it has left after these, and what it had sent still comes.
  bool waits_for(const Matcher& matcher, int member, const Tally& theirs = {}) const;
  uint64_t remote_blocking_ranks(const Matcher& matcher) const;  // members whose next step is needed

 private:
  static constexpr uint64_t kWindow = 32;  // headers that a rank keeps for a peer without having asked for them

  struct Piece {
    std::shared_ptr<Interhost::Transfer> transfer;
    size_t offset, bytes;
    std::unique_ptr<std::byte[]> copy;  // where the memory is in several parts
  };
  // A message whose bytes are on their way.
  struct Transit {
    Post post;
    uint64_t number;
    size_t posted = 0;              // bytes
    std::deque<Piece> pieces = {};  // that have not ended
  };
  struct Peer {
    std::deque<Post> waiting;  // for room to be announced
    uint64_t announced = 0;    // headers
    uint64_t taken_in = 0;     // of them, by the peer
    bool has_room() const { return announced - taken_in < kWindow; }
    uint64_t numbers = 0;  // given to messages that come by transfers
    std::list<Transit> sending;

    std::deque<MessageHeader> headers;  // not heard
    uint64_t heard = 0;
    uint64_t told = 0;  // of them the peer knows
    std::list<Transit> receiving;
    Tally ended;
  };

  bool announce(int member, Peer& peer, Matcher& matcher);
  bool move(int member, std::list<Transit>& transits, uint64_t& ended, Matcher& matcher);
  bool hear_headers(int member, Peer& peer, Matcher& matcher);
  bool end_pieces(Transit& transit);
  void post_piece(int member, Transit& transit);

  const Links& links_;
  std::map<int, Peer> peers_;  // members of other hosts
  uint64_t interhost_bytes_ = 0;
  size_t moved_bytes_ = 0;
};

}  // namespace syncengine::hosts
