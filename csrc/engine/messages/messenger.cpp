#include "engine/messages/messenger.h"

#include <algorithm>

#include "base/error.h"
#include "base/trace.h"

namespace syncengine {

namespace {

bool fits(const Message& receive, int source, const MessageHeader& header) {
  return (receive.peer == source || receive.peer == Message::kAnySource) && receive.channel == header.channel &&
         receive.tag == header.tag;
}

constexpr size_t kMostUnmatched = 1 << 14;  // messages of one source

bool is_of_any(const Post& post) { return post.message.peer == Message::kAnySource; }

}  // namespace

Messenger::Messenger(int rank, std::vector<int> global_ranks, std::unique_ptr<MailboxRoute> near,
                     std::unique_ptr<MessageRoute> far, Lane::Trash& trash)
    : rank_(rank),
      global_ranks_(std::move(global_ranks)),
      near_(std::move(near)),
      far_(std::move(far)),
      trash_(trash),
      unmatched_(global_ranks_.size()) {}

void Messenger::post(Post post) {
  ++posted_;
  fresh_.push_back(std::move(post));
}

bool Messenger::advance(size_t budget) {
  if (idle()) return false;
  bool moved = !fresh_.empty(), again = true;
  while (!fresh_.empty()) {
    Post post = std::move(fresh_.front());
    fresh_.pop_front();
    if (post.sends)
      route_to(post.message.peer).send(std::move(post));
    else
      match_new(std::move(post));
  }
  for (moved_bytes_ = 0; again && moved_bytes_ <= budget; moved |= again) {
    again = false;
    for (MessageRoute* route : routes())
      if (route) again |= route->advance(*this);
  }
  return moved;
}

uint64_t Messenger::awaited() const {
  uint64_t members = 0;
  for (const Post& post : receives_) {
    if (!is_of_any(post)) members |= uint64_t{1} << post.message.peer;
  }
  return members;
}

uint64_t Messenger::perhaps_awaited() const {
  return std::any_of(receives_.begin(), receives_.end(), is_of_any) ? ~uint64_t{0} : awaited();
}

const Message* Messenger::waits_in_vain() const {
  if (posted_ != receives_.size()) return nullptr;  // matched messages may still be coming
  auto found = std::find_if(receives_.begin(), receives_.end(), is_of_any);
  return found == receives_.end() ? nullptr : &found->message;
}

void Messenger::arrive(int source, MessageHeader header) {
  header.order = arrivals_++;
  auto receive = std::find_if(receives_.begin(), receives_.end(),
                              [&](const Post& post) { return fits(post.message, source, header); });
  if (receive == receives_.end()) {
    if (unmatched_[source].size() >= kMostUnmatched)
      throw Error(ErrorKind::Mismatch, name(source) + " has sent " + std::to_string(kMostUnmatched) +
                                           " messages that " + name(rank_) +
                                           " receives none of, while it waits for others");
    return unmatched_[source].push_back(std::move(header));
  }
  Post matched = std::move(*receive);
  receives_.erase(receive);
  begin(source, std::move(header), std::move(matched));
}

// Matches a new receive with the first fitting message that has arrived.
void Messenger::match_new(Post receive) {
  int best_source = -1;
  std::deque<MessageHeader>::iterator best;
  for (int source = 0; source < static_cast<int>(unmatched_.size()); ++source) {
    auto& unmatched = unmatched_[source];
    auto first = std::find_if(unmatched.begin(), unmatched.end(),
                              [&](const MessageHeader& header) { return fits(receive.message, source, header); });
    if (first == unmatched.end() || (best_source >= 0 && best->order < first->order)) continue;
    best_source = source;
    best = first;
  }
  if (best_source < 0) return receives_.push_back(std::move(receive));
  MessageHeader header = std::move(*best);
  unmatched_[best_source].erase(best);
  begin(best_source, std::move(header), std::move(receive));
}

void Messenger::begin(int source, MessageHeader header, Post receive) {
  try {
    require_same(source, header, receive);
  } catch (...) {
    receives_.push_back(std::move(receive));  // fails with everything else
    unmatched_[source].push_back(std::move(header));
    throw;
  }
  if (receive.message.source) receive.message.source->store(source, std::memory_order_relaxed);  // before `work` ends
  if (!header.whole) return route_to(source).fetch(source, std::move(header), std::move(receive));
  receive.message.memory.copy_from(header.content.data(), 0, header.bytes);
  finish(receive);
}

void Messenger::require_same(int source, const MessageHeader& header, const Post& receive) const {
  const Message& mine = receive.message;
  if (header.bytes == mine.memory.bytes() && header.fingerprint == mine.fingerprint) return;
  throw Error(
      ErrorKind::Mismatch,
      name(rank_) + " called " + mine.describe() + " for " + std::to_string(mine.memory.bytes()) + " bytes where " +
          name(source) + " sent " + std::to_string(header.bytes) + " bytes" +
          (header.fingerprint != mine.fingerprint ? " in another call of a collective, or of another dtype" : "") +
          ": both sides must mean the same message");
}

const Lane::Item* Messenger::oldest() const {
  const Lane::Item* oldest = nullptr;
  auto consider = [&](const Post& post) {
    if (!oldest || post.item.since < oldest->since) oldest = &post.item;
  };
  if (!receives_.empty()) consider(receives_.front());
  for (MessageRoute* route : routes())
    if (route) route->visit(consider);
  return oldest;
}

void Messenger::finish(Post& post) {
  --posted_;
  ++messages_;
  if (trace::is_on()) {
    const int peer = post.message.peer;
    trace::record({.kind = trace::Kind::Message,
                   .begin = trace::at(post.item.since),
                   .end = trace::now(),
                   .lane = shm::kMessages,
                   .place = peer < 0 ? trace::kNobody : static_cast<uint64_t>(global_ranks_[peer]),
                   .detail = post.message.memory.bytes(),
                   .text = trace::text(post.sends ? "send" : "receive")});
  }
  trash_.push_back(std::move(post.item.operation.keepalive));
  post.item.work->finish();
}

void Messenger::fail_all(const std::exception_ptr& error) {
  auto fail = [&](Post& post) {
    trash_.push_back(std::move(post.item.operation.keepalive));
    post.item.work->fail(error);
  };
  for (MessageRoute* route : routes()) {
    if (!route) continue;
    route->visit(fail);
    route->clear();
  }
  for (auto& unmatched : unmatched_) unmatched.clear();
  for (Post& post : receives_) fail(post);
  for (Post& post : fresh_) fail(post);
  receives_.clear();
  fresh_.clear();
  posted_ = 0;
}

}  // namespace syncengine
