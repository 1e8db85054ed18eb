#include "transport/matching/desk.h"

#include <iterator>
#include <utility>

namespace syncengine::matching {

std::shared_ptr<Interhost::Transfer> Desk::post(Post post) {
  if (post.bytes > Interhost::kMaxTransfer)
    throw Error(ErrorKind::InvalidUsage, "a transfer has at most 1 MiB, this one " + std::to_string(post.bytes));
  auto transfer = post.transfer;
  bool first;
  {
    std::lock_guard lock(mutex_);
    if (auto failed = failures_.find(post.peer); failed != failures_.end()) {
      if (transfer) transfer->fail(failed->second);
      return transfer;
    }
    first = posts_.empty();
    posts_.push_back(std::move(post));
  }
  if (first) wake_();
  return transfer;
}

std::shared_ptr<Interhost::Transfer> Desk::send(int peer, uint64_t tag, const std::byte* data, size_t bytes) {
  return post({Post::Send, peer, tag, const_cast<std::byte*>(data), bytes, std::make_shared<Transfer>()});
}

std::shared_ptr<Interhost::Transfer> Desk::receive(int peer, uint64_t tag, std::byte* data, size_t bytes) {
  return post({Post::Receive, peer, tag, data, bytes, std::make_shared<Transfer>()});
}

void Desk::tell(int peer, const std::string& message) {
  if (message.size() > Interhost::kMaxMessage)
    throw Error(ErrorKind::InvalidUsage, "a message has at most 64 KiB, this one " + std::to_string(message.size()));
  post({.kind = Post::Tell, .peer = peer, .message = message});
}

std::optional<Interhost::Message> Desk::hear() {
  std::lock_guard lock(mutex_);
  if (heard_.empty()) return {};
  Message message = std::move(heard_.front());
  heard_.pop_front();
  return message;
}

std::optional<Error> Desk::failure(int peer) const {
  std::lock_guard lock(mutex_);
  auto found = failures_.find(peer);
  return found == failures_.end() ? std::nullopt : std::optional(found->second);
}

std::deque<Desk::Post> Desk::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(posts_, {});
}

void Desk::deliver(std::vector<Message>& heard) {
  if (heard.empty()) return;
  std::lock_guard lock(mutex_);
  std::move(heard.begin(), heard.end(), std::back_inserter(heard_));
  heard.clear();
}

void Desk::note_failure(int peer, const Error& error) {
  std::lock_guard lock(mutex_);
  failures_.emplace(peer, error);
}

}  // namespace syncengine::matching
