#include "engine/messenger.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/sync_point.h"

namespace syncengine {

namespace {

constexpr size_t kPiece = 256 << 10;  // of a direct copy, between two looks at the peers

void copy_out(const SpanList& memory, size_t offset, std::byte* to, size_t bytes) {
  memory.for_each(offset, bytes,
                  [&](std::byte* from, size_t at, size_t length) { std::memcpy(to + at, from, length); });
}

void copy_in(const SpanList& memory, size_t offset, const std::byte* from, size_t bytes) {
  memory.for_each(offset, bytes, [&](std::byte* to, size_t at, size_t length) { std::memcpy(to, from + at, length); });
}

bool fits(const Message& receive, int source, uint64_t channel, uint64_t tag) {
  return (receive.peer == source || receive.peer == Message::kAnySource) && receive.channel == channel &&
         receive.tag == tag;
}

}  // namespace

Messenger::Messenger(const Group& group, std::function<bool()> stop, Lane::Trash& trash)
    : group_(group), stop_(std::move(stop)), trash_(trash), outgoing_(group.size), incoming_(group.size) {}

void Messenger::post(Post post) {
  ++posted_;
  post.item.work->start();
  fresh_.push_back(std::move(post));
}

void Messenger::take(Post post) {
  if (!post.sends) return match_new(std::move(post));
  if (post.message.peer == group_.rank) return send_to_self(std::move(post));
  outgoing_[post.message.peer].waiting.push_back(std::move(post));
}

bool Messenger::advance(size_t budget) {
  if (idle()) return false;
  moved_bytes_ = 0;
  bool moved = !fresh_.empty(), again = true;
  while (!fresh_.empty()) {
    Post post = std::move(fresh_.front());
    fresh_.pop_front();
    take(std::move(post));
  }
  while (again && moved_bytes_ <= budget) {
    again = false;
    for (int peer = 0; peer < group_.size; ++peer) {
      if (peer == group_.rank) continue;
      again |= fetch(peer);
      again |= serve(peer);
      again |= announce(peer);
      if (!receives_.empty()) again |= hear(peer);
    }
    moved |= again;
  }
  return moved;
}

bool Messenger::announce(int destination) {
  Outgoing& to = outgoing_[destination];
  if (to.waiting.empty()) return false;
  shm::Outbox& box = outbox(group_.rank, destination);
  uint64_t number = box.announced.load(std::memory_order_relaxed);  // relaxed: its only writer
  if (!has_room(destination)) return false;
  Post post = std::move(to.waiting.front());
  to.waiting.pop_front();
  const Message& message = post.message;
  shm::Letter& letter = box.letters[number % shm::kLetters];
  letter.channel = message.channel;
  letter.tag = message.tag;
  letter.fingerprint = message.fingerprint;
  letter.bytes = message.memory.bytes();
  letter.offset = -1;
  bool small = letter.bytes <= shm::kLetterBytes;
  if (small)
    copy_out(message.memory, 0, letter.content, letter.bytes);
  else if (message.memory.spans().size() == 1)
    letter.offset = group_.arena->offset_of(message.memory.spans()[0].data, letter.bytes);
  int64_t offset = letter.offset;
  box.announced.store(number + 1, std::memory_order_release);  // release: the letter
  sync_point("announced a message");
  if (small)
    finish(post);
  else
    to.announced.push_back({std::move(post), number, offset});
  return true;
}

// For one more letter.
bool Messenger::has_room(int destination) const {
  uint64_t announced = outbox(group_.rank, destination).announced.load(std::memory_order_relaxed);  // its only writer
  // acquire: the letter that is overwritten has been read
  return announced - inbox(destination, group_.rank).heard.load(std::memory_order_acquire) < shm::kLetters;
}

// What serve() finds something to do by.
bool Messenger::can_serve(int destination) const {
  const Outgoing& to = outgoing_[destination];
  const shm::Inbox& box = inbox(destination, group_.rank);
  if (box.received.load(std::memory_order_acquire) > to.served) return true;  // acquire: it reads the memory no more
  if (box.wanted.load(std::memory_order_acquire) == to.served) return false;  // acquire: the number
  uint64_t number = box.number.load(std::memory_order_relaxed);
  bool direct = std::any_of(to.announced.begin(), to.announced.end(),
                            [&](const Sent& sent) { return sent.number == number && sent.offset >= 0; });
  uint64_t staged = outbox(group_.rank, destination).staged.load(std::memory_order_relaxed);  // its only writer
  return !direct && staged - box.emptied.load(std::memory_order_acquire) < shm::kParcels;     // acquire: as in serve()
}

// Gives the receiver the message that it wants.
bool Messenger::serve(int destination) {
  Outgoing& to = outgoing_[destination];
  if (to.announced.empty()) return false;
  const shm::Inbox& box = inbox(destination, group_.rank);
  if (box.wanted.load(std::memory_order_acquire) == to.served) return false;  // acquire: the number
  uint64_t number = box.number.load(std::memory_order_relaxed);
  auto wanted =
      std::find_if(to.announced.begin(), to.announced.end(), [&](const Sent& sent) { return sent.number == number; });
  if (wanted == to.announced.end())
    throw Error(ErrorKind::Mismatch, group_.name(destination) + " wants a message that was not sent to it");
  size_t bytes = wanted->post.message.memory.bytes();
  bool moved = false;
  if (wanted->offset >= 0) {
    // acquire: it reads the memory no more
    if (box.received.load(std::memory_order_acquire) <= to.served) return false;
    to.done = bytes;
  } else {
    shm::Outbox& own = outbox(group_.rank, destination);
    if (to.parcels == nullptr) {
      size_t offset = group_.arena->allocate_group(kParcelsBytes);
      to.parcels = group_.arena->at(offset);
      own.parcels.store(offset, std::memory_order_relaxed);  // relaxed: before the first `staged`
    }
    uint64_t staged = own.staged.load(std::memory_order_relaxed);  // relaxed: its only writer
    // acquire: the slot has been read
    while (to.done < bytes && staged - box.emptied.load(std::memory_order_acquire) < shm::kParcels) {
      size_t length = std::min(shm::kParcelBytes, bytes - to.done);
      copy_out(wanted->post.message.memory, to.done, to.parcels + staged % shm::kParcels * shm::kParcelBytes, length);
      to.done += length;
      moved_bytes_ += length;
      own.staged.store(++staged, std::memory_order_release);  // release: the bytes
      sync_point("staged a parcel");
      moved = true;
    }
  }
  if (to.done < bytes) return moved;
  to.done = 0;
  ++to.served;
  finish(wanted->post);
  to.announced.erase(wanted);
  return true;
}

bool Messenger::hear(int source) {
  Incoming& from = incoming_[source];
  const shm::Outbox& box = outbox(source, group_.rank);
  if (box.announced.load(std::memory_order_acquire) == from.heard) return false;  // acquire: the letter
  const shm::Letter& letter = box.letters[from.heard % shm::kLetters];
  Arrived arrived{
      letter.channel, letter.tag, letter.fingerprint, letter.bytes, letter.offset, from.heard, arrivals_++, {}, {}};
  if (arrived.bytes <= shm::kLetterBytes) arrived.content.assign(letter.content, letter.content + arrived.bytes);
  inbox(group_.rank, source).heard.store(++from.heard, std::memory_order_release);  // release: our reads
  arrive(source, std::move(arrived));
  return true;
}

void Messenger::send_to_self(Post post) {
  const Message& message = post.message;
  Arrived letter{message.channel, message.tag, message.fingerprint, message.memory.bytes(), -1, 0, arrivals_++, {}, {}};
  letter.own = std::make_shared<Post>(std::move(post));
  arrive(group_.rank, std::move(letter));
}

void Messenger::arrive(int source, Arrived letter) {
  auto receive = std::find_if(receives_.begin(), receives_.end(),
                              [&](const Post& post) { return fits(post.message, source, letter.channel, letter.tag); });
  if (receive == receives_.end()) return incoming_[source].unmatched.push_back(std::move(letter));
  Post matched = std::move(*receive);
  receives_.erase(receive);
  begin(source, std::move(letter), std::move(matched));
}

// Of what has arrived, the first that fits.
void Messenger::match_new(Post receive) {
  int best_source = -1;
  std::deque<Arrived>::iterator best;
  for (int source = 0; source < group_.size; ++source) {
    auto& unmatched = incoming_[source].unmatched;
    auto first = std::find_if(unmatched.begin(), unmatched.end(), [&](const Arrived& letter) {
      return fits(receive.message, source, letter.channel, letter.tag);
    });
    if (first == unmatched.end() || (best_source >= 0 && best->order < first->order)) continue;
    best_source = source;
    best = first;
  }
  if (best_source < 0) return receives_.push_back(std::move(receive));
  Arrived letter = std::move(*best);
  incoming_[best_source].unmatched.erase(best);
  begin(best_source, std::move(letter), std::move(receive));
}

void Messenger::begin(int source, Arrived letter, Post receive) {
  try {
    require_same(source, letter, receive);
  } catch (...) {
    receives_.push_back(std::move(receive));  // to be failed with everything else
    incoming_[source].unmatched.push_back(std::move(letter));
    throw;
  }
  if (receive.message.source) receive.message.source->store(source, std::memory_order_relaxed);  // before `work` ends
  if (letter.own) {
    size_t offset = 0;
    for (const Span& span : letter.own->message.memory.spans()) {
      copy_in(receive.message.memory, offset, span.data, span.bytes);
      offset += span.bytes;
    }
    finish(*letter.own);
    return finish(receive);
  }
  if (letter.bytes > shm::kLetterBytes)
    return incoming_[source].transfers.push_back({std::move(letter), std::move(receive)});
  copy_in(receive.message.memory, 0, letter.content.data(), letter.bytes);
  finish(receive);
}

void Messenger::require_same(int source, const Arrived& letter, const Post& receive) const {
  const Message& mine = receive.message;
  if (letter.bytes == mine.memory.bytes() && letter.fingerprint == mine.fingerprint) return;
  throw Error(ErrorKind::Mismatch, group_.name(group_.rank) + " called " + mine.describe() + " for " +
                                       std::to_string(mine.memory.bytes()) + " bytes where " + group_.name(source) +
                                       " sent " + std::to_string(letter.bytes) + " bytes" +
                                       (letter.fingerprint != mine.fingerprint ? " in another collective" : "") +
                                       ": both sides must mean the same message");
}

// One message of a source at a time, in the order in which they were matched.
bool Messenger::fetch(int source) {
  Incoming& from = incoming_[source];
  if (from.transfers.empty()) return false;
  Transfer& transfer = from.transfers.front();
  shm::Inbox& box = inbox(group_.rank, source);
  bool moved = false;
  if (!transfer.wanted) {
    transfer.wanted = moved = true;
    box.number.store(transfer.letter.number, std::memory_order_relaxed);  // relaxed: before `wanted`
    box.wanted.store(box.wanted.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // release: the number
    sync_point("wanted a message");
  }
  moved |= transfer.letter.offset >= 0 ? fetch_direct(source, transfer) : fetch_staged(source, transfer);
  if (transfer.done < transfer.letter.bytes || stop_()) return moved;
  box.received.store(box.wanted.load(std::memory_order_relaxed), std::memory_order_release);  // release: our reads
  counters_.direct += transfer.letter.offset >= 0;
  Post post = std::move(transfer.post);
  from.transfers.pop_front();
  finish(post);
  return true;
}

bool Messenger::fetch_direct(int source, Transfer& transfer) {
  const Arrived& letter = transfer.letter;
  const std::byte* memory = group_.memory(source, letter.offset, letter.bytes);
  size_t length = std::min(kPiece, letter.bytes - transfer.done);
  copy_in(transfer.post.message.memory, transfer.done, memory + transfer.done, length);
  transfer.done += length;
  moved_bytes_ += length;
  return length > 0;
}

bool Messenger::fetch_staged(int source, Transfer& transfer) {
  const shm::Outbox& box = outbox(source, group_.rank);
  shm::Inbox& own = inbox(group_.rank, source);
  uint64_t emptied = own.emptied.load(std::memory_order_relaxed);  // relaxed: its only writer
  bool moved = false;
  // acquire: the bytes, and where they are
  while (transfer.done < transfer.letter.bytes && emptied < box.staged.load(std::memory_order_acquire)) {
    auto offset = static_cast<int64_t>(box.parcels.load(std::memory_order_relaxed));
    const std::byte* parcels = group_.memory(source, offset, kParcelsBytes);
    size_t length = std::min(shm::kParcelBytes, transfer.letter.bytes - transfer.done);
    copy_in(transfer.post.message.memory, transfer.done, parcels + emptied % shm::kParcels * shm::kParcelBytes, length);
    transfer.done += length;
    moved_bytes_ += length;
    own.emptied.store(++emptied, std::memory_order_release);  // release: our reads
    sync_point("emptied a parcel");
    moved = true;
  }
  return moved;
}

void Messenger::finish(Post& post) {
  --posted_;
  ++counters_.messages;
  trash_.push_back(std::move(post.item.operation.keepalive));
  post.item.work->finish();
}

}  // namespace syncengine
