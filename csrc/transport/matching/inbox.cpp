#include "transport/matching/inbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace syncengine::matching {

namespace {

constexpr size_t kMostAsked = 1 << 14;

// A bit for each kChunkUnit that a chunk fills, wholly or in part; one bit for a chunk of no bytes.
static_assert(Interhost::kMaxTransfer / kChunkUnit < 32);
uint32_t units_of(const Frame& chunk) {
  uint32_t count = std::max(1u, (chunk.payload + kChunkUnit - 1) / kChunkUnit);
  return ((1u << count) - 1) << (chunk.offset / kChunkUnit);
}

}  // namespace

void Receive::fail(const Error& error) {
  if (transfer) transfer->fail(error);
  transfer.reset();
}

void Inbox::post(uint64_t tag, std::byte* data, size_t bytes, std::shared_ptr<Interhost::Transfer> transfer) {
  auto size = static_cast<uint32_t>(bytes);
  auto receive = std::make_shared<Receive>(Receive{tag, data, size, std::move(transfer)});
  receive->left = size;
  posted_[tag] = receive;
  if (auto early = unexpected_.find(tag); early != unexpected_.end()) {
    auto unexpected = std::move(early->second);
    unexpected_.erase(early);
    take(receive, unexpected);
  } else if (size > kEagerBytes || asked_.erase(tag) > 0) {
    get_ready(receive);
  }
}

void Inbox::get_ready(const std::shared_ptr<Receive>& receive) {
  receive->handle = ++handles_;
  by_handle_[receive->handle] = receive;
  control_ += encode({.kind = Kind::Ready, .tag = receive->tag, .handle = receive->handle, .size = receive->bytes},
                     shared_.checksum);
}

void Inbox::on_ask(const Frame& frame) {
  if (withdrawals_.is_withdrawn(frame.tag)) return;
  if (auto found = posted_.find(frame.tag); found != posted_.end()) {
    if (found->second->handle == 0) get_ready(found->second);
  } else {
    if (asked_.size() >= kMostAsked) throw garbage(shared_, peer_, "more sends than can be");
    asked_.insert(frame.tag);
  }
}

Arrival Inbox::begin(const Frame& frame) {
  Arrival arrival{.frame = frame};
  if (frame.kind == Kind::Chunk) {
    auto found = by_handle_.find(frame.handle);
    if (found == by_handle_.end()) {
      if (frame.handle > handles_) throw garbage(shared_, peer_, "data that nobody asked for");
      return arrival;  // the receive was withdrawn meanwhile
    }
    Receive& receive = *found->second;
    bool fits = frame.offset <= receive.bytes && frame.payload <= receive.bytes - frame.offset &&
                (frame.payload % kChunkUnit == 0 || frame.payload == receive.bytes - frame.offset) &&
                (frame.payload > 0 || receive.bytes == 0);
    uint32_t units = fits ? units_of(frame) : 0;
    if (!fits || (receive.units & units)) throw garbage(shared_, peer_, "data that does not fit its place");
    receive.units |= units;
    arrival.receive = found->second;
    return arrival;
  }
  if (held_ + window_cost(frame.payload) > kEagerWindow) throw garbage(shared_, peer_, "more than it has credit for");
  held_ += window_cost(frame.payload);
  if (withdrawals_.is_withdrawn(frame.tag)) return arrival;
  auto found = posted_.find(frame.tag);
  if (found == posted_.end()) {
    arrival.unasked = std::make_unique_for_overwrite<std::byte[]>(frame.payload);
    return arrival;
  }
  Receive& receive = *found->second;
  if (receive.bytes != frame.payload)
    throw size_mismatch(shared_.names, peer_, frame.payload, shared_.rank, receive.bytes);
  if (receive.handle != 0 || receive.units) throw garbage(shared_, peer_, "one transfer twice");
  receive.units = 1;
  arrival.receive = found->second;
  return arrival;
}

void Inbox::end(Arrival& arrival) {
  const Frame& frame = arrival.frame;
  const bool withdrawn = withdrawals_.is_withdrawn(frame.tag);  // asked before this Eager lets the range be forgotten
  if (frame.kind == Kind::Eager) withdrawals_.count_eager();
  if (arrival.receive) {
    Receive& receive = *arrival.receive;
    receive.left -= frame.payload;
    if (receive.left == 0 && receive.transfer) finish(receive);
  } else if (arrival.unasked) {
    Unexpected unexpected{std::move(arrival.unasked), frame.payload};
    auto posted = posted_.find(frame.tag);  // the receive may have been posted while the payload came
    if (posted != posted_.end()) return take(posted->second, unexpected);
    if (!withdrawn) {
      if (!unexpected_.emplace(frame.tag, std::move(unexpected)).second)
        throw garbage(shared_, peer_, "one transfer twice");
      return;  // its credit is given back when a receive takes it
    }
  }
  if (frame.kind == Kind::Eager) give_credit(window_cost(frame.payload));
}

void Inbox::take(const std::shared_ptr<Receive>& receive, const Unexpected& unexpected) {
  if (receive->bytes != unexpected.size)
    throw size_mismatch(shared_.names, peer_, unexpected.size, shared_.rank, receive->bytes);
  if (unexpected.size > 0) std::memcpy(receive->data, unexpected.bytes.get(), unexpected.size);
  receive->left = 0;
  finish(*receive);
  give_credit(window_cost(unexpected.size));
}

void Inbox::finish(Receive& receive) {
  receive.transfer->finish();
  receive.transfer.reset();
  shared_.news = true;
  if (receive.handle) by_handle_.erase(receive.handle);
  posted_.erase(receive.tag);  // last, as the map may hold the last reference to `receive`
}

void Inbox::give_credit(uint32_t bytes) {
  owed_ += bytes;
  if (owed_ < kEagerWindow / 2) return;
  control_ += encode({.kind = Kind::Credit, .size = owed_}, shared_.checksum);
  held_ -= owed_;
  owed_ = 0;
}

void Inbox::withdraw(uint64_t first, uint64_t last, const Error& error) {
  withdrawals_.withdraw(first, last);
  auto is_meant = [&](uint64_t tag) { return first <= tag && tag <= last; };
  std::erase_if(posted_, [&](auto& item) {
    if (!is_meant(item.first)) return false;
    if (item.second->handle) by_handle_.erase(item.second->handle);
    item.second->fail(error);
    return true;
  });
  std::erase_if(asked_, is_meant);
  std::erase_if(unexpected_, [&](auto& item) {
    if (!is_meant(item.first)) return false;
    give_credit(window_cost(item.second.size));
    return true;
  });
}

void Inbox::fail(const Error& error) {
  for (auto& [tag, receive] : posted_) receive->fail(error);
  posted_.clear();
  by_handle_.clear();
  unexpected_.clear();
}

}  // namespace syncengine::matching
