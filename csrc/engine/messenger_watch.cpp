// What others ask a messenger: whom it waits for, since when, which memory peers may read, and how all of it ends.
#include <algorithm>

#include "engine/messenger.h"

namespace syncengine {

uint64_t Messenger::interest() const {
  if (idle()) return 0;
  uint64_t members = missing();
  for (int peer = 0; peer < group_.size; ++peer) {
    bool transfers = !incoming_[peer].transfers.empty();
    bool awaited = std::any_of(receives_.begin(), receives_.end(), [&](const Post& post) {
      return post.message.peer == peer || post.message.peer == Message::kAnySource;
    });
    if (transfers || awaited) members |= uint64_t{1} << peer;
  }
  return members & ~(uint64_t{1} << group_.rank);
}

uint64_t Messenger::missing() const {
  if (idle()) return 0;
  uint64_t members = 0;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const shm::Outbox& box = outbox(peer, group_.rank);
    const Incoming& from = incoming_[peer];
    bool awaited = std::any_of(receives_.begin(), receives_.end(), [&](const Post& post) {
      return post.message.peer == peer || (post.message.peer == Message::kAnySource && group_.size == 2);
    });
    bool unheard = box.announced.load(std::memory_order_acquire) != from.heard;  // acquire: as in hear()
    bool unread = box.staged.load(std::memory_order_acquire) !=                  // acquire: as in fetch_staged()
                  inbox(group_.rank, peer).emptied.load(std::memory_order_relaxed);
    const Outgoing& to = outgoing_[peer];
    bool needed = (!to.waiting.empty() && !has_room(peer)) || (!to.announced.empty() && !can_serve(peer)) ||
                  (awaited && !unheard) ||
                  (!from.transfers.empty() && from.transfers.front().letter.offset < 0 && !unread);
    if (needed) members |= uint64_t{1} << peer;
  }
  return members;
}

const Lane::Item* Messenger::oldest() const {
  const Lane::Item* oldest = nullptr;
  auto consider = [&](const Post& post) {
    if (!oldest || post.item.since < oldest->since) oldest = &post.item;
  };
  if (!receives_.empty()) consider(receives_.front());
  for (const Outgoing& to : outgoing_) {
    if (!to.announced.empty()) consider(to.announced.front().post);
    if (!to.waiting.empty()) consider(to.waiting.front());
  }
  for (const Incoming& from : incoming_) {
    if (!from.transfers.empty()) consider(from.transfers.front().post);
    for (const Arrived& letter : from.unmatched) {
      if (letter.own) consider(*letter.own);
    }
  }
  return oldest;
}

std::vector<size_t> Messenger::parcels() const {
  std::vector<size_t> offsets;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (outgoing_[peer].parcels != nullptr)
      offsets.push_back(outbox(group_.rank, peer).parcels.load(std::memory_order_relaxed));  // relaxed: its only writer
  }
  return offsets;
}

void Messenger::add_direct_memory(std::vector<ArenaRange>& ranges) const {
  for (const Outgoing& to : outgoing_) {
    for (const Sent& sent : to.announced) {
      if (sent.offset >= 0) ranges.push_back({static_cast<size_t>(sent.offset), sent.post.message.memory.bytes()});
    }
  }
}

void Messenger::fail_all(const std::exception_ptr& error) {
  auto fail = [&](Post& post) {
    trash_.push_back(std::move(post.item.operation.keepalive));
    post.item.work->fail(error);
  };
  for (Outgoing& to : outgoing_) {
    for (Post& post : to.waiting) fail(post);
    for (Sent& sent : to.announced) fail(sent.post);
    to.waiting.clear();
    to.announced.clear();
  }
  for (Incoming& from : incoming_) {
    for (Transfer& transfer : from.transfers) fail(transfer.post);
    for (Arrived& letter : from.unmatched) {
      if (letter.own) fail(*letter.own);
    }
    from = {};
  }
  for (Post& post : receives_) fail(post);
  for (Post& post : fresh_) fail(post);
  receives_.clear();
  fresh_.clear();
  posted_ = 0;
}

}  // namespace syncengine
