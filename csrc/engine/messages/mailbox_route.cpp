#include "engine/messages/mailbox_route.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "base/sync_point.h"
#include "engine/messages/messenger.h"

namespace syncengine {

MailboxRoute::MailboxRoute(const Group& group, std::vector<int> ranks)
    : group_(group), ranks_(std::move(ranks)), outgoing_(group.size), incoming_(group.size) {}

int MailboxRoute::member_of(int rank) const {
  auto found = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
  return found != ranks_.end() && *found == rank ? static_cast<int>(found - ranks_.begin()) : -1;
}

void MailboxRoute::fetch(int source, MessageHeader header, Post receive) {
  incoming_[member_of(source)].transfers.push_back({std::move(header), std::move(receive)});
}

bool MailboxRoute::advance(Messenger& messenger) {
  bool moved = false;
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    moved |= fetch_next(peer, messenger);
    moved |= serve(peer, messenger);
    moved |= announce(peer, messenger);
    if (messenger.listens()) moved |= hear(peer, messenger);
  }
  return moved;
}

bool MailboxRoute::announce(int destination, Messenger& messenger) {
  Outgoing& to = outgoing_[destination];
  if (to.waiting.empty() || !has_room(destination)) return false;
  shm::OutboxWords& box = outbox(group_.rank, destination);
  uint64_t number = box.announced.load(std::memory_order_relaxed);  // relaxed: its only writer
  Post post = std::move(to.waiting.front());
  to.waiting.pop_front();
  const Message& message = post.message;
  shm::MailboxHeader& header = box.headers[number % shm::kHeaders];
  header.channel = message.channel;
  header.tag = message.tag;
  header.fingerprint = message.fingerprint;
  const size_t bytes = header.bytes = message.memory.bytes();
  const bool small = bytes <= shm::kInlineBytes;
  if (small) message.memory.copy_to(header.content, 0, bytes);
  box.announced.store(number + 1, std::memory_order_release);  // release: the header
  sync_point("announced a message");
  if (small)
    messenger.finish(post);
  else
    to.announced.push_back({std::move(post), number});
  return true;
}

bool MailboxRoute::has_room(int destination) const {
  uint64_t announced = outbox(group_.rank, destination).announced.load(std::memory_order_relaxed);  // its only writer
  // acquire: the header that is overwritten has been read
  return announced - inbox(destination, group_.rank).heard.load(std::memory_order_acquire) < shm::kHeaders;
}

// Whether serve() would find anything to do: the receiver wants a message, and there is room to stage a piece.
bool MailboxRoute::can_serve(int destination) const {
  const shm::InboxWords& box = inbox(destination, group_.rank);
  if (box.wanted.load(std::memory_order_acquire) == outgoing_[destination].served) return false;  // acquire: the number
  uint64_t staged = outbox(group_.rank, destination).staged.load(std::memory_order_relaxed);      // its only writer
  return staged - box.emptied.load(std::memory_order_acquire) < shm::kFragments;  // acquire: as in serve()
}

// Stages the next pieces of the message that the receiver wants.
bool MailboxRoute::serve(int destination, Messenger& messenger) {
  Outgoing& to = outgoing_[destination];
  if (to.announced.empty()) return false;
  const shm::InboxWords& box = inbox(destination, group_.rank);
  if (box.wanted.load(std::memory_order_acquire) == to.served) return false;  // acquire: the number
  uint64_t number = box.number.load(std::memory_order_relaxed);
  auto wanted = std::find_if(to.announced.begin(), to.announced.end(),
                             [&](const AnnouncedPost& sent) { return sent.number == number; });
  if (wanted == to.announced.end())
    throw Error(ErrorKind::Mismatch, group_.name(destination) + " wants a message that was not sent to it");
  size_t bytes = wanted->post.message.memory.bytes();
  bool moved = false;
  shm::OutboxWords& own = outbox(group_.rank, destination);
  if (to.fragments == 0) {
    to.fragments = group_.arena->allocate_group(kFragmentsBytes);
    own.fragments.store(to.fragments, std::memory_order_relaxed);  // relaxed: before the first `staged`
  }
  std::byte* fragments = group_.arena->at(to.fragments);
  uint64_t staged = own.staged.load(std::memory_order_relaxed);  // relaxed: its only writer
  // acquire: the slot has been read
  while (to.done < bytes && staged - box.emptied.load(std::memory_order_acquire) < shm::kFragments) {
    size_t length = std::min(shm::kFragmentBytes, bytes - to.done);
    wanted->post.message.memory.copy_to(fragments + staged % shm::kFragments * shm::kFragmentBytes, to.done, length);
    to.done += length;
    messenger.count(length);
    own.staged.store(++staged, std::memory_order_release);  // release: the bytes
    sync_point("staged a fragment");
    moved = true;
  }
  if (to.done < bytes) return moved;
  to.done = 0;
  ++to.served;
  messenger.finish(wanted->post);
  to.announced.erase(wanted);
  return true;
}

bool MailboxRoute::hear(int source, Messenger& messenger) {
  Incoming& from = incoming_[source];
  const shm::OutboxWords& box = outbox(source, group_.rank);
  if (box.announced.load(std::memory_order_acquire) == from.heard) return false;  // acquire: the header
  const shm::MailboxHeader& header = box.headers[from.heard % shm::kHeaders];
  MessageHeader arrived{.channel = load_once(header.channel),
                        .tag = load_once(header.tag),
                        .fingerprint = load_once(header.fingerprint),
                        .bytes = load_once(header.bytes),
                        .number = from.heard};
  arrived.whole = arrived.bytes <= shm::kInlineBytes;
  if (arrived.whole) arrived.content.assign(header.content, header.content + arrived.bytes);
  inbox(group_.rank, source).heard.store(++from.heard, std::memory_order_release);  // release: our reads
  messenger.arrive(ranks_[source], std::move(arrived));
  return true;
}

// Asks a source for its next message: one at a time, in the order in which they were matched.
bool MailboxRoute::fetch_next(int source, Messenger& messenger) {
  Incoming& from = incoming_[source];
  if (from.transfers.empty()) return false;
  StagedTransfer& transfer = from.transfers.front();
  shm::InboxWords& box = inbox(group_.rank, source);
  bool moved = false;
  if (!transfer.wanted) {
    transfer.wanted = moved = true;
    box.number.store(transfer.header.number, std::memory_order_relaxed);  // relaxed: before `wanted`
    box.wanted.store(box.wanted.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // release: the number
    sync_point("wanted a message");
  }
  moved |= fetch_staged(source, transfer, messenger);
  if (transfer.done < transfer.header.bytes) return moved;
  if (group_.any_failed([](const shm::EndRecord&) { return true; })) return moved;
  Post post = std::move(transfer.post);
  from.transfers.pop_front();
  messenger.finish(post);
  return true;
}

bool MailboxRoute::fetch_staged(int source, StagedTransfer& transfer, Messenger& messenger) {
  const shm::OutboxWords& box = outbox(source, group_.rank);
  shm::InboxWords& own = inbox(group_.rank, source);
  uint64_t emptied = own.emptied.load(std::memory_order_relaxed);  // relaxed: its only writer
  bool moved = false;
  // acquire: the bytes, and where they are
  while (transfer.done < transfer.header.bytes && emptied < box.staged.load(std::memory_order_acquire)) {
    const uint64_t offset = box.fragments.load(std::memory_order_relaxed);
    const std::byte* fragments = group_.memory(source, offset, kFragmentsBytes, shm::kPage);
    size_t length = std::min(shm::kFragmentBytes, transfer.header.bytes - transfer.done);
    transfer.post.message.memory.copy_from(fragments + emptied % shm::kFragments * shm::kFragmentBytes, transfer.done,
                                           length);
    transfer.done += length;
    messenger.count(length);
    own.emptied.store(++emptied, std::memory_order_release);  // release: our reads
    sync_point("emptied a fragment");
    moved = true;
  }
  return moved;
}

// Converts a mask of ranks of the communicator into a mask of members of the group: its ranks on this host.
uint64_t MailboxRoute::among_members(uint64_t ranks) const {
  uint64_t members = 0;
  for (int member = 0; member < group_.size; ++member) members |= (ranks >> ranks_[member] & 1) << member;
  return members;
}

uint64_t MailboxRoute::interest(const Messenger& messenger) const {
  uint64_t members = missing(messenger) | among_members(messenger.perhaps_awaited());
  for (int peer = 0; peer < group_.size; ++peer)
    if (!incoming_[peer].transfers.empty()) members |= uint64_t{1} << peer;
  return members & ~(uint64_t{1} << group_.rank);
}

uint64_t MailboxRoute::missing(const Messenger& messenger) const {
  uint64_t members = 0, awaited = among_members(messenger.awaited());
  for (int peer = 0; peer < group_.size; ++peer) {
    if (peer == group_.rank) continue;
    const shm::OutboxWords& box = outbox(peer, group_.rank);
    const Incoming& from = incoming_[peer];
    bool unheard = box.announced.load(std::memory_order_acquire) != from.heard;  // acquire: as in hear()
    bool unread = box.staged.load(std::memory_order_acquire) !=                  // acquire: as in fetch_staged()
                  inbox(group_.rank, peer).emptied.load(std::memory_order_relaxed);
    const Outgoing& to = outgoing_[peer];
    bool needed = (!to.waiting.empty() && !has_room(peer)) || (!to.announced.empty() && !can_serve(peer)) ||
                  ((awaited >> peer & 1) && !unheard) || (!from.transfers.empty() && !unread);
    if (needed) members |= uint64_t{1} << peer;
  }
  return members;
}

void MailboxRoute::visit(const std::function<void(Post&)>& each) {
  for (Outgoing& to : outgoing_) {
    for (Post& post : to.waiting) each(post);
    for (AnnouncedPost& sent : to.announced) each(sent.post);
  }
  for (Incoming& from : incoming_)
    for (StagedTransfer& transfer : from.transfers) each(transfer.post);
}

void MailboxRoute::clear() {
  for (Outgoing& to : outgoing_) {
    to.waiting.clear();
    to.announced.clear();
  }
  for (Incoming& from : incoming_) from = {};
}

std::vector<size_t> MailboxRoute::fragments() const {
  std::vector<size_t> offsets;
  for (const Outgoing& to : outgoing_)
    if (to.fragments != 0) offsets.push_back(to.fragments);
  return offsets;
}

}  // namespace syncengine
