#include "transport/matching/submission_queue.h"

#include <cstring>
#include <iterator>
#include <utility>

#include "transport/matching/shared.h"

namespace syncengine::matching {

std::shared_ptr<Interhost::Transfer> SubmissionQueue::post(QueuedPost post) {
  if (!is_peer(post.peer))
    throw Error(ErrorKind::InvalidUsage, shared_.names(post.peer) + " is no peer on another host");
  if (post.bytes > kMaxTransfer)
    throw Error(ErrorKind::InvalidUsage, "a transfer has at most 1 MiB, this one " + std::to_string(post.bytes));
  auto transfer = post.transfer;
  bool first;
  {
    std::lock_guard lock(mutex_);
    if (failures_.contains(post.peer)) {
      end_late(post);
      return transfer;
    }
    first = posts_.empty();
    posts_.push_back(std::move(post));
  }
  if (first) wake();  // later posts find the thread awake already
  return transfer;
}

std::shared_ptr<Interhost::Transfer> SubmissionQueue::send(int peer, uint64_t tag, const std::byte* data,
                                                           size_t bytes) {
  return post({QueuedPost::Send, peer, tag, const_cast<std::byte*>(data), bytes, std::make_shared<Transfer>()});
}

std::shared_ptr<Interhost::Transfer> SubmissionQueue::receive(int peer, uint64_t tag, std::byte* data, size_t bytes) {
  return post({QueuedPost::Receive, peer, tag, data, bytes, std::make_shared<Transfer>()});
}

void SubmissionQueue::tell(int peer, const std::string& message) {
  if (message.size() > kMaxMessage)
    throw Error(ErrorKind::InvalidUsage, "a message has at most 64 KiB, this one " + std::to_string(message.size()));
  post({.kind = QueuedPost::Tell, .peer = peer, .message = message});
}

std::optional<Interhost::Message> SubmissionQueue::hear() {
  std::lock_guard lock(mutex_);
  if (heard_.empty()) return {};
  Message message = std::move(heard_.front());
  heard_.pop_front();
  return message;
}

std::optional<Error> SubmissionQueue::failure(int peer) const {
  std::lock_guard lock(mutex_);
  auto found = failures_.find(peer);
  return found == failures_.end() ? std::nullopt : std::optional(found->second);
}

Interhost::End SubmissionQueue::end_of(int peer) const {
  std::lock_guard lock(mutex_);
  auto found = ends_.find(peer);
  return found == ends_.end() ? End::Unknown : found->second;
}

bool SubmissionQueue::has_posts() const {
  std::lock_guard lock(mutex_);
  return !posts_.empty();
}

std::deque<SubmissionQueue::QueuedPost> SubmissionQueue::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(posts_, {});
}

void SubmissionQueue::deliver(std::vector<Message>& heard) {
  if (heard.empty()) return;
  std::lock_guard lock(mutex_);
  std::move(heard.begin(), heard.end(), std::back_inserter(heard_));
  heard.clear();
}

void SubmissionQueue::note_failure(int peer, const Error& error, Inbox::Unexpecteds sent, End end) {
  std::lock_guard lock(mutex_);
  ends_.emplace(peer, end);
  failures_.emplace(peer, error);
  left_behind_.emplace(peer, std::move(sent));
}

void SubmissionQueue::note_end(int peer) {
  std::lock_guard lock(mutex_);
  ends_[peer] = End::Ended;
}

bool SubmissionQueue::post_too_late(QueuedPost& post) {
  std::lock_guard lock(mutex_);
  if (!failures_.contains(post.peer)) return false;
  end_late(post);
  return true;
}

// Ends a post for a peer that has failed. Called under the lock.
void SubmissionQueue::end_late(QueuedPost& post) {
  if (!post.transfer) return;
  auto& sent_by_peer = left_behind_.at(post.peer);
  auto found = post.kind == QueuedPost::Receive ? sent_by_peer.extract(post.tag) : Inbox::Unexpecteds::node_type();
  if (!found) return post.transfer->fail(failures_.at(post.peer));
  const auto& sent = found.mapped();
  if (sent.size != post.bytes)
    return post.transfer->fail(size_mismatch(shared_.names, post.peer, sent.size, shared_.rank, post.bytes));
  if (post.bytes > 0) std::memcpy(post.data, sent.bytes.get(), post.bytes);
  post.transfer->finish();
}

}  // namespace syncengine::matching
