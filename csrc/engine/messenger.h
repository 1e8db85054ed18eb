// Messages between the members of a group: large ones straight out of the sender's arena, or staged piece by piece.
//
// A sender announces; the receiver matches in order, and asks for one message of a sender at a time. Only members that wait
// for messages look for them.
//
// Ownership: owns its posted messages. Thread-safety: all calls under the engine's progress lock. Aliasing: see Message.
// Failure: advance() throws Mismatch where the two sides mean different messages; the caller fails the group.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "collectives/message.h"
#include "engine/lane.h"
#include "transport/shm/mailbox.h"

namespace syncengine {

class Messenger {
 public:
  Messenger(const Group& group, std::function<bool()> stop, Lane::Trash& trash);

  struct Post {
    Message message;
    bool sends;
    Lane::Item item;  // for waits and errors: work, since when, description, keepalive
  };
  void post(Post post);  // never throws

  // Does what can be done without waiting, about `budget` bytes of it. True if anything moved.
  bool advance(size_t budget);
  bool idle() const { return posted_ == 0; }

  uint64_t interest() const;  // members whose next step may help
  // Members that this rank can't go on without, and that have left nothing for it to read.
  uint64_t missing() const;
  const Lane::Item* oldest() const;
  uint64_t culprits() const { return missing(); }
  void add_direct_memory(std::vector<ArenaRange>& ranges) const;
  void fail_all(const std::exception_ptr& error);
  struct Counters {
    uint64_t messages = 0, direct = 0;  // ended well; received straight out of the sender's arena
  };
  const Counters& counters() const { return counters_; }
  // Offsets of own memory of kParcelsBytes each, which must be given back with the group.
  std::vector<size_t> parcels() const;
  static constexpr size_t kParcelsBytes = shm::kParcels * shm::kParcelBytes;

 private:
  struct Sent {
    Post post;
    uint64_t number;
    int64_t offset;
  };
  struct Outgoing {
    std::deque<Post> waiting;      // for room to be announced
    std::list<Sent> announced;     // that the receiver has not got yet
    uint64_t served = 0;           // how many it wanted and got
    size_t done = 0;               // bytes staged of the one that it wants
    std::byte* parcels = nullptr;  // own memory
  };
  struct Arrived {
    uint64_t channel, tag, fingerprint, bytes;
    int64_t offset;
    uint64_t number, order;
    std::vector<std::byte> content;
    std::shared_ptr<Post> own;  // sent by this rank to itself
  };
  struct Transfer {
    Arrived letter;
    Post post;
    bool wanted = false;
    size_t done = 0;
  };
  struct Incoming {
    uint64_t heard = 0;
    std::deque<Arrived> unmatched;
    std::deque<Transfer> transfers;
  };

  shm::Outbox& outbox(int from, int to) const { return group_.block(from).messages.out[to]; }
  shm::Inbox& inbox(int at, int from) const { return group_.block(at).messages.in[from]; }
  bool hear(int source);
  bool announce(int destination);
  bool serve(int destination);
  bool fetch(int source);
  bool fetch_direct(int source, Transfer& transfer);
  bool fetch_staged(int source, Transfer& transfer);
  void take(Post post);
  void send_to_self(Post post);
  void arrive(int source, Arrived letter);
  void match_new(Post receive);
  void begin(int source, Arrived letter, Post receive);
  void require_same(int source, const Arrived& letter, const Post& receive) const;
  bool has_room(int destination) const;
  bool can_serve(int destination) const;
  void finish(Post& post);

  const Group& group_;
  std::function<bool()> stop_;
  Lane::Trash& trash_;
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::deque<Post> fresh_;    // not looked at yet
  std::list<Post> receives_;  // unmatched, in the order of the calls
  uint64_t posted_ = 0;       // that have not ended
  uint64_t arrivals_ = 0;
  Counters counters_;
  size_t moved_bytes_ = 0;
};

}  // namespace syncengine
