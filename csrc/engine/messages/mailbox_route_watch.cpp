// What others ask a mailbox route: whom it waits for, since when, which memory peers may read, and what it still has.
#include <algorithm>

#include "engine/messages/mailbox_route.h"

namespace syncengine {

// Of ranks of the communicator, those that are members of the group, as such.
uint64_t MailboxRoute::among_members(uint64_t ranks) const {
  uint64_t members = 0;
  for (int member = 0; member < group_.size; ++member) members |= (ranks >> ranks_[member] & 1) << member;
  return members;
}

uint64_t MailboxRoute::interest(const Matcher& matcher) const {
  uint64_t members = missing(matcher) | among_members(matcher.perhaps_awaited());
  for (int peer = 0; peer < group_.size; ++peer)
    if (!incoming_[peer].transfers.empty()) members |= uint64_t{1} << peer;
  return members & ~(uint64_t{1} << group_.rank);
}

uint64_t MailboxRoute::missing(const Matcher& matcher) const {
  uint64_t members = 0, awaited = among_members(matcher.awaited());
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const shm::Outbox& box = outbox(peer, group_.rank);
    const Incoming& from = incoming_[peer];
    bool unheard = box.announced.load(std::memory_order_acquire) != from.heard;  // acquire: as in hear()
    bool unread = box.staged.load(std::memory_order_acquire) !=                  // acquire: as in fetch_staged()
                  inbox(group_.rank, peer).emptied.load(std::memory_order_relaxed);
    const Outgoing& to = outgoing_[peer];
    bool needed = (!to.waiting.empty() && !has_room(peer)) || (!to.announced.empty() && !can_serve(peer)) ||
                  ((awaited >> peer & 1) && !unheard) ||
                  (!from.transfers.empty() && from.transfers.front().header.offset < 0 && !unread);
    if (needed) members |= uint64_t{1} << peer;
  }
  return members;
}

bool MailboxRoute::has_unheard() const {
  for (int peer = 0; peer < group_.size; ++peer) {
    // acquire: as in hear()
    if (peer != group_.rank &&
        outbox(peer, group_.rank).announced.load(std::memory_order_acquire) != incoming_[peer].heard)
      return true;
  }
  return false;
}

const Post* MailboxRoute::oldest() const {
  const Post* oldest = nullptr;
  auto consider = [&](const Post& post) {
    if (!oldest || post.item.since < oldest->item.since) oldest = &post;
  };
  for (const Outgoing& to : outgoing_) {
    if (!to.announced.empty()) consider(to.announced.front().post);
    if (!to.waiting.empty()) consider(to.waiting.front());
  }
  for (const Incoming& from : incoming_)
    if (!from.transfers.empty()) consider(from.transfers.front().post);
  return oldest;
}

std::vector<size_t> MailboxRoute::fragments() const {
  std::vector<size_t> offsets;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (outgoing_[peer].fragments != nullptr)
      offsets.push_back(
          outbox(group_.rank, peer).fragments.load(std::memory_order_relaxed));  // relaxed: its only writer
  }
  return offsets;
}

void MailboxRoute::add_direct_memory(std::vector<ArenaRange>& ranges) const {
  for (const Outgoing& to : outgoing_) {
    for (const Sent& sent : to.announced) {
      if (sent.offset < 0) continue;
      ranges.push_back({static_cast<size_t>(sent.offset), sent.post.message.memory.bytes(), false});
    }
  }
}

std::vector<Post> MailboxRoute::take_all() {
  std::vector<Post> posts;
  for (Outgoing& to : outgoing_) {
    for (Post& post : to.waiting) posts.push_back(std::move(post));
    for (Sent& sent : to.announced) posts.push_back(std::move(sent.post));
    to.waiting.clear();
    to.announced.clear();
  }
  for (Incoming& from : incoming_) {
    for (Transfer& transfer : from.transfers) posts.push_back(std::move(transfer.post));
    from = {};
  }
  return posts;
}

}  // namespace syncengine
