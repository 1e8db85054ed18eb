// Where the threads of an endpoint meet: what callers hand to the thread that moves the bytes, and what it hands back.
//
// Thread-safety: any thread; one lock, held for a few stores. Failure: InvalidUsage for what is too large.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/inbox.h"

namespace syncengine::matching {

class SubmissionQueue : public Interhost {
 public:
  struct Post {
    enum Kind : uint8_t { Send, Receive, Tell } kind;
    int peer;
    uint64_t tag = 0;
    std::byte* data = nullptr;  // const in a Send
    size_t bytes = 0;
    std::shared_ptr<Transfer> transfer = {};
    std::string message = {};
  };

  std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) override;
  std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) override;
  void tell(int peer, const std::string& message) override;
  std::optional<Message> hear() override;
  std::optional<Error> failure(int peer) const override;
  bool has_ended(int peer) const override;

 protected:
  SubmissionQueue(int rank, const RankNames& names, bool checksum) {
    shared_.rank = rank;
    shared_.names = names;
    shared_.checksum = checksum;
  }
  virtual bool is_peer(int rank) const = 0;
  bool has_posts() const;

  // For the thread that runs. What is posted for a peer after note_failure() fails at once.
  std::deque<Post> take();
  void deliver(std::vector<Message>& heard);  // leaves it empty
  // `sent`: what it sent before it left in order and nobody has asked for yet; a receive still gets it.
  // `ended`: as Interhost::has_ended().
  void note_failure(int peer, const Error& error, Inbox::Unexpecteds sent, bool ended);
  void note_end(int peer);         // the same, later
  bool post_too_late(Post& post);  // false: it is not, no failure of the peer was noted

  Shared shared_;  // names and rank: any thread, since they stay as they are

 private:
  std::shared_ptr<Transfer> post(Post post);
  void end_late(Post& post);

  mutable std::mutex mutex_;
  std::deque<Post> posts_;
  std::deque<Message> heard_;
  std::map<int, Error> failures_;
  std::set<int> ended_;  // of them
  std::map<int, Inbox::Unexpecteds> left_behind_;
};

}  // namespace syncengine::matching
