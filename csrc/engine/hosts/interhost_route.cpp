#include <algorithm>

#include "base/error.h"
#include "base/sync_point.h"
#include "engine/hosts/interhost_members.h"

namespace syncengine::hosts {

void InterhostSchedule::hear(int member, const Checked<Ready>& ready) {
  if (!links_.leads_all() || links_.leader(links_.placement.host_of[member]) != member)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " announced a bucket to the wrong rank");
  ready_[ready->slot][member] = ready->step;
}

// Hears from rank 0 which slot runs next. Throws PeerLost if more would wait than exist: each gets one turn at a time.
void InterhostSchedule::hear(int member, const Checked<Scheduled>& scheduled) {
  if (!links_.leads_host() || member != 0 || next_.size() >= expected_slots())
    throw Error(ErrorKind::PeerLost, links_.name(member) + " scheduled a bucket out of turn");
  next_.push_back(scheduled->slot);
}

void InterhostSchedule::refuse(const Slots& slots, uint64_t step, const std::string& text) {
  Schedule::refuse(slots, step, text);
  Refused refused{.first_slot = slots.first(), .step = step};
  text.copy(refused.text, sizeof(refused.text));
  std::string announced;
  for (uint64_t slot = slots.first(); slot < slots.end_slot(); ++slot) {
    if (group_.own().announced[slot].load(std::memory_order_relaxed) != step) continue;  // relaxed: its only writer
    const uint64_t bit = slot - slots.first();
    announced.resize(bit / 8 + 1);
    announced.back() = static_cast<char>(announced.back() | 1 << bit % 8);
  }
  for (int member : links_.remotes) links_.tell(member, write(links_.group, refused) + announced);
}

void InterhostSchedule::hear(int member, const Checked<Refused>& refused, const std::string& announced) {
  const uint64_t first = refused->first_slot;
  if (has_ended(first, refused->step)) return;
  int others = 0;  // models of which this member has already refused a step
  for (auto& [slot, members] : refused_) {
    std::erase_if(members, [&, slot = slot](const auto& each) { return has_ended(slot, each.second.step); });
    others += slot != first && members.contains(member);
  }
  if (others >= kMostRefused || announced.size() > (expected_slots() - first) / 8 + 1)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " refused more than it may" + kDamaged);
  refused_[first][member] = {refused->step, checked_text(refused->text), announced};
  ++heard_;
}

std::optional<std::string> InterhostSchedule::reason_to_drop(const AnnouncedOperation& waiting) const {
  if (auto here = Schedule::reason_to_drop(waiting)) return here;
  const Slots& slots = *waiting.item.slots;
  auto found = refused_.find(slots.first());
  if (found == refused_.end()) return {};
  const uint64_t bit = waiting.item.key - slots.first();
  for (const auto& [member, refusal] : found->second) {
    const bool announced = bit / 8 < refusal.announced.size() && refusal.announced[bit / 8] >> bit % 8 & 1;
    if (is_refused(waiting, refusal.step, announced ? refusal.step : 0, [&] { return refusal.text; }))
      return refusal.text;
  }
  return {};
}

std::string InterhostSchedule::remote_refusal_of(int member) const {
  std::string text;
  for (const auto& [first_slot, members] : refused_) {
    auto found = members.find(member);
    if (found != members.end() && !has_ended(first_slot, found->second.step)) text = found->second.text;
  }
  return text;
}

bool InterhostSchedule::append_ready() {
  bool moved = report();
  if (links_.leads_all()) moved |= order();
  shm::ScheduleLog& log = group_.own().schedule;
  for (; !next_.empty() && has_room(); next_.pop_front(), moved = true) {
    uint64_t length = log.length.load(std::memory_order_relaxed);  // relaxed: its only writer
    log.slots[length % shm::kLogEntries] = next_.front();
    log.length.store(length + 1, std::memory_order_release);  // release: the entry
    sync_point("scheduled");
  }
  return moved;
}

bool InterhostSchedule::report() {
  bool moved = false;
  for (const AnnouncedOperation& waiting : waiting_) {
    uint64_t& reported = ready_[waiting.item.key][links_.placement.rank];
    if (reported >= waiting.step || late(waiting.item.key, waiting.step, false)) continue;
    reported = waiting.step;
    moved = true;
    if (!links_.leads_all()) links_.tell(0, Ready{.slot = waiting.item.key, .step = waiting.step});
  }
  return moved;
}

bool InterhostSchedule::order() {
  bool moved = false;
  for (const AnnouncedOperation& waiting : waiting_) {
    uint64_t slot = waiting.item.key;
    uint64_t& ordered = ordered_[slot];
    if (ordered >= waiting.step || unready(waiting)) continue;
    auto is_ordered = [this](const AnnouncedOperation& other) { return ordered_[other.item.key] >= other.step; };
    if (waiting.is_end() && has_more(waiting, is_ordered)) continue;
    ordered = waiting.step;
    moved = true;
    next_.push_back(slot);
    for (int host = 1; host < links_.placement.hosts(); ++host)
      links_.tell(links_.leader(host), Scheduled{.slot = slot});
  }
  return moved;
}

uint64_t InterhostSchedule::unready(const AnnouncedOperation& waiting) const {
  uint64_t members = 0;
  auto found = ready_.find(waiting.item.key);
  for (int host = 0; host < links_.placement.hosts(); ++host) {
    int leader = links_.leader(host);
    bool ready = found != ready_.end() && found->second.contains(leader) && found->second.at(leader) >= waiting.step;
    if (!ready) members |= uint64_t{1} << leader;
  }
  return members;
}

uint64_t InterhostSchedule::remote_blocking_ranks() const {
  if (waiting_.empty() || late(waiting_.front().item.key, waiting_.front().step, false)) return 0;
  if (!links_.leads_all()) return links_.leads_host() ? 1 : 0;
  return unready(waiting_.front()) & ~uint64_t{1};
}

InterhostRoute::InterhostRoute(const Links& links) : links_(links) {
  for (int member : links.remotes) peers_[member];
}

void InterhostRoute::hear(int member, const Checked<Announced>& announced, const std::string& content) {
  PeerMail& peer = peers_.at(member);
  const bool whole = announced->bytes <= kShortBytes;
  // A peer must not repeat a message's number: the transfers of two messages with one number would be confused.
  const bool is_next = announced->number == (whole ? 0 : peer.numbered++);
  if (!is_next || content.size() != (whole ? announced->bytes : 0) ||
      peer.heard + peer.headers.size() - peer.told >= kWindow)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent a header of a wrong size, or more than it may");
  auto* bytes = reinterpret_cast<const std::byte*>(content.data());
  peer.headers.push_back({.channel = announced->channel,
                          .tag = announced->tag,
                          .fingerprint = announced->fingerprint,
                          .bytes = announced->bytes,
                          .number = announced->number,
                          .whole = whole,
                          .content = {bytes, bytes + content.size()}});
}

void InterhostRoute::hear(int member, const Checked<Heard>& heard) {
  PeerMail& peer = peers_.at(member);
  if (heard->count > peer.announced || heard->count < peer.taken_in)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " has taken in headers that it was not sent");
  peer.taken_in = heard->count;
}

void InterhostRoute::fetch(int source, MessageHeader header, Post receive) {
  peers_.at(source).receiving.push_back({std::move(receive), header.number});
}

bool InterhostRoute::advance(Messenger& messenger) {
  bool moved = false;
  for (auto& [member, peer] : peers_) {
    moved |= announce(member, peer, messenger);
    moved |= hear_headers(member, peer, messenger);
    moved |= move(member, peer.sending, peer.ended.sent, messenger);
    moved |= move(member, peer.receiving, peer.ended.received, messenger);
  }
  return moved;
}

bool InterhostRoute::announce(int member, PeerMail& peer, Messenger& messenger) {
  bool moved = false;
  for (; !peer.waiting.empty() && peer.has_room(); moved = true) {
    Post post = std::move(peer.waiting.front());
    peer.waiting.pop_front();
    const Message& message = post.message;
    size_t bytes = message.memory.bytes();
    bool whole = bytes <= kShortBytes;
    std::string header = write(links_.group, Announced{.channel = message.channel,
                                                       .tag = message.tag,
                                                       .fingerprint = message.fingerprint,
                                                       .bytes = bytes,
                                                       .number = whole ? 0 : peer.numbers++});
    if (whole) {
      size_t head = header.size();
      header.resize(head + bytes);
      message.memory.copy_to(reinterpret_cast<std::byte*>(header.data()) + head, 0, bytes);
      messenger.count(bytes);
      interhost_bytes_ += bytes;
    }
    links_.tell(member, header);
    ++peer.announced;
    sync_point("announced a message");
    if (whole)
      messenger.finish(post);
    else
      peer.sending.push_back({std::move(post), peer.numbers - 1});
  }
  return moved;
}

bool InterhostRoute::hear_headers(int member, PeerMail& peer, Messenger& messenger) {
  bool moved = false;
  for (; !peer.headers.empty() && messenger.listens(); moved = true) {
    MessageHeader header = std::move(peer.headers.front());
    peer.headers.pop_front();
    if (++peer.heard - peer.told >= kWindow / 2) {
      peer.told = peer.heard;
      links_.tell(member, Heard{.count = peer.heard});
    }
    messenger.arrive(member, std::move(header));
  }
  return moved;
}

bool InterhostRoute::move(int member, std::list<Transit>& transits, uint64_t& ended, Messenger& messenger) {
  bool moved = false;
  for (auto next = transits.begin(); next != transits.end();) {
    auto transit = next++;
    moved |= end_pieces(*transit, messenger);
    size_t bytes = transit->post.message.memory.bytes();
    for (; transit->posted < bytes && transit->pieces.size() < kPieces; moved = true)
      post_piece(member, *transit, messenger);
    if (!transit->pieces.empty()) continue;
    ++ended;
    messenger.finish(transit->post);
    transits.erase(transit);
    moved = true;
  }
  return moved;
}

bool InterhostRoute::end_pieces(Transit& transit, Messenger& messenger) {
  bool moved = false;
  for (; !transit.pieces.empty() && transit.pieces.front().transfer->ended(); moved = true) {
    TransitPiece& piece = transit.pieces.front();
    const Message& message = transit.post.message;
    if (piece.transfer->state() == Interhost::Transfer::State::Failed)
      throw Error(piece.transfer->error().kind(), piece.transfer->error().what() + links_.while_in(message.describe()));
    if (piece.copy && !transit.post.sends) {
      message.memory.copy_from(piece.copy.get(), piece.offset, piece.bytes);
      messenger.count(piece.bytes);
    }
    transit.pieces.pop_front();
  }
  return moved;
}

// Posts the next piece. Both sides cut a message alike. If a message has more pieces than a tag can count, numbers
// repeat, long after the first piece of that number has ended.
void InterhostRoute::post_piece(int member, Transit& transit, Messenger& messenger) {
  const SpanList& memory = transit.post.message.memory;
  size_t offset = transit.posted, bytes = std::min(Interhost::kMaxTransfer, memory.bytes() - offset);
  auto number = static_cast<uint32_t>(offset / Interhost::kMaxTransfer % (uint64_t{1} << kEnvelopeBits));
  uint64_t tag = tag_of(links_.group, shm::kMessages, transit.number, number, bytes);
  TransitPiece piece{.offset = offset, .bytes = bytes};
  std::byte* data = memory.one_piece(offset, bytes);
  if (data == nullptr) {
    piece.copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
    data = piece.copy.get();
    if (transit.post.sends) memory.copy_to(data, offset, bytes);
    messenger.count(transit.post.sends ? bytes : 0);
  }
  if (transit.post.sends) interhost_bytes_ += bytes;
  piece.transfer =
      transit.post.sends ? links_.send(member, tag, data, bytes) : links_.receive(member, tag, data, bytes);
  transit.posted += bytes;
  transit.pieces.push_back(std::move(piece));
}

bool InterhostRoute::waits_for(const Messenger& messenger, int member, const MessageTally& theirs) const {
  const PeerMail& peer = peers_.at(member);
  return ((messenger.awaited() >> member & 1) && peer.headers.empty()) || (!peer.waiting.empty() && !peer.has_room()) ||
         (!peer.receiving.empty() && peer.ended.received >= theirs.sent) ||
         (!peer.sending.empty() && peer.ended.sent >= theirs.received);
}

uint64_t InterhostRoute::remote_blocking_ranks(const Messenger& messenger) const {
  uint64_t members = 0;
  for (const auto& [member, peer] : peers_) members |= uint64_t{waits_for(messenger, member)} << member;
  return members;
}

void InterhostRoute::visit(const std::function<void(Post&)>& each) {
  for (auto& [member, peer] : peers_) {
    for (Post& post : peer.waiting) each(post);
    for (auto* transits : {&peer.sending, &peer.receiving})
      for (Transit& transit : *transits) each(transit.post);
  }
}

void InterhostRoute::clear() {
  for (auto& [member, peer] : peers_) {
    peer.waiting.clear();
    peer.sending.clear();
    peer.receiving.clear();
    peer.headers.clear();
  }
}

}  // namespace syncengine::hosts
