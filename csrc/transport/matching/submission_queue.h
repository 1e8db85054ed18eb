// The queue between callers and the thread that moves the bytes: posts one way, messages and failures the other.
//
// Thread-safety: any thread; one lock, held for a few stores. Failure: InvalidUsage for a post too large or to no peer.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/inbox.h"

namespace syncengine::matching {

class SubmissionQueue : public Interhost {
 public:
  struct QueuedPost {
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
  End end_of(int peer) const override;

 protected:
  SubmissionQueue(int rank, const RankNames& names, bool checksum)
      : shared_{.rank = rank, .names = names, .checksum = checksum} {}
  virtual bool is_peer(int rank) const = 0;
  bool has_posts() const;

  // Called by the thread that moves the bytes. Posts for a peer after note_failure() fail at once.
  std::deque<QueuedPost> take();
  void deliver(std::vector<Message>& heard);  // leaves it empty
  // Notes that `peer` has failed with `error`. `sent`: transfers that came before the peer left in order, for receives
  // that are posted later. `end`: the end that end_of() then returns.
  void note_failure(int peer, const Error& error, Inbox::Unexpecteds sent, End end);
  void note_end(int peer);               // that the process ended, found out after note_failure()
  bool post_too_late(QueuedPost& post);  // ends it if a failure of the peer was noted, else returns false

  Shared shared_;  // any thread may read names and rank, which never change

 private:
  std::shared_ptr<Transfer> post(QueuedPost post);
  void end_late(QueuedPost& post);

  mutable std::mutex mutex_;
  std::deque<QueuedPost> posts_;
  std::deque<Message> heard_;
  std::map<int, Error> failures_;
  std::map<int, End> ends_;  // of failed peers
  std::map<int, Inbox::Unexpecteds> left_behind_;
};

}  // namespace syncengine::matching
