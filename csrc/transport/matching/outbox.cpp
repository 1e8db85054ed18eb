#include "transport/matching/outbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace syncengine::matching {

void Send::fail(const Error& error) {
  if (transfer) transfer->fail(error);
  transfer.reset();
}

void Send::detach(const Error& error) {
  if (!copy) {
    copy = std::make_unique_for_overwrite<std::byte[]>(bytes);
    std::memcpy(copy.get(), data, bytes);
    data = copy.get();
  }
  fail(error);
}

void Outbox::post(uint64_t tag, const std::byte* data, size_t bytes, std::shared_ptr<Interhost::Transfer> transfer) {
  auto size = static_cast<uint32_t>(bytes);
  auto send = std::make_shared<Send>(Send{tag, data, size, std::move(transfer)});
  send->left = size;
  if (auto ready = ready_.find(tag); ready != ready_.end()) {
    enqueue(send, ready->second);
    ready_.erase(ready);
  } else if (size <= kEagerBytes && credit_ >= window_cost(size)) {
    credit_ -= window_cost(size);
    queue_.push_back(send);
  } else {
    if (size <= kEagerBytes) control_ += encode({.kind = Kind::Ask, .tag = tag}, shared_.checksum);
    unready_[tag] = send;
  }
}

void Outbox::enqueue(const std::shared_ptr<Send>& send, const PeerReady& ready) {
  if (send->bytes != ready.size) {
    Error error = size_mismatch(shared_.names, shared_.rank, send->bytes, peer_, ready.size);
    send->fail(error);
    throw error;
  }
  send->handle = ready.handle;
  queue_.push_back(send);
}

void Outbox::on_ready(const Frame& frame) {
  if (withdrawals_.is_withdrawn(frame.tag)) return;
  constexpr size_t kMostReady = 1 << 14;  // receives that a peer may announce before this rank has a send for them
  PeerReady ready{frame.handle, frame.size};
  if (auto waiting = unready_.find(frame.tag); waiting != unready_.end()) {
    auto send = std::move(waiting->second);
    unready_.erase(waiting);
    enqueue(send, ready);
  } else if (ready_.size() >= kMostReady || !ready_.emplace(frame.tag, ready).second) {
    throw garbage(shared_, peer_, "more receives than can be");
  }
}

void Outbox::on_credit(const Frame& frame) {
  if (frame.size > kEagerWindow - credit_) throw garbage(shared_, peer_, "more credit than it took");
  credit_ += frame.size;
}

OutgoingPiece Outbox::next(uint32_t most) {
  auto send = queue_.front();
  OutgoingPiece piece{.frame = {}, .send = send};
  Frame& frame = piece.frame;
  if (send->handle == 0) {
    frame = {.kind = Kind::Eager, .payload = send->bytes, .tag = send->tag};
    ++eagers_;
  } else {
    frame = {.kind = Kind::Chunk,
             .payload = std::min(most, send->bytes - send->given),
             .handle = send->handle,
             .offset = send->given};
  }
  send->given += frame.payload;
  if (send->given == send->bytes) queue_.pop_front();
  if (shared_.checksum) frame.checksum = crc32c(piece.payload(), frame.payload);
  return piece;
}

void Outbox::written(const OutgoingPiece& piece) {
  Send& send = *piece.send;
  send.left -= piece.frame.payload;
  if (send.left > 0 || !send.transfer) return;
  send.transfer->finish();
  send.transfer.reset();
  shared_.news = true;
}

void Outbox::withdraw(uint64_t first, uint64_t last, const Error& error) {
  auto is_meant = [&](uint64_t tag) { return first <= tag && tag <= last; };
  std::erase_if(unready_, [&](auto& item) {
    if (is_meant(item.first)) item.second->fail(error);
    return is_meant(item.first);
  });
  std::erase_if(ready_, [&](auto& item) { return is_meant(item.first); });
  std::erase_if(queue_, [&](auto& send) {
    if (!is_meant(send->tag)) return false;
    if (send->given > 0) {
      send->detach(error);  // the peer is to get what it has begun to read
      return false;
    }
    if (send->handle == 0) credit_ += window_cost(send->bytes);
    send->fail(error);
    return true;
  });
  control_ += encode({.kind = Kind::Withdrawn, .tag = first, .handle = last, .size = eagers_}, shared_.checksum);
}

void Outbox::fail_unready(const Error& error) {
  for (auto& [tag, send] : unready_) send->fail(error);
  unready_.clear();
}

void Outbox::fail(const Error& error) {
  fail_unready(error);
  for (auto& send : queue_) send->fail(error);
  queue_.clear();
}

}  // namespace syncengine::matching
