// A logical run of elements that lies in several pieces of memory: a bucket or a tensor, as collectives see it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

namespace syncengine {

struct Span {
  std::byte* data;
  size_t bytes;
};

// Offsets are in bytes into the concatenation of all spans. Does not own the memory.
class SpanList {
 public:
  SpanList() = default;
  SpanList(void* data, size_t bytes) { add(data, bytes); }

  void add(void* data, size_t bytes) {
    if (bytes == 0) return;
    spans_.push_back({static_cast<std::byte*>(data), bytes});
    starts_.push_back(bytes_);
    bytes_ += bytes;
  }
  size_t bytes() const { return bytes_; }
  const std::vector<Span>& spans() const { return spans_; }
  // Whether any span overlaps a span of `other`. Within each list no two spans overlap.
  bool overlaps(const SpanList& other) const {
    if (spans_.size() * other.spans_.size() <= 64) {  // no allocation
      for (const Span& a : spans_)
        for (const Span& b : other.spans_)
          if (a.data < b.data + b.bytes && b.data < a.data + a.bytes) return true;
      return false;
    }
    const auto mine = sorted(), theirs = other.sorted();
    for (auto a = mine.begin(), b = theirs.begin(); a != mine.end() && b != theirs.end();) {
      if (a->data < b->data + b->bytes && b->data < a->data + a->bytes) return true;
      (a->data < b->data ? a : b)++;
    }
    return false;
  }

  // The byte at `offset`, which is less than bytes().
  std::byte* at(size_t offset) const {
    if (spans_.size() == 1) return spans_[0].data + offset;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
    return spans_[i].data + (offset - starts_[i]);
  }

  // The memory of [offset, offset + bytes) if it lies in one span, else null.
  std::byte* one_piece(size_t offset, size_t bytes) const {
    if (bytes == 0) return nullptr;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
    size_t skip = offset - starts_[i];
    return bytes <= spans_[i].bytes - skip ? spans_[i].data + skip : nullptr;
  }

  // The bytes [offset, offset + bytes) in one piece of memory: where they lie or, if they lie in several spans, copied
  // to room(). Null if there are none.
  template <class Room>
  const std::byte* readable(size_t offset, size_t bytes, const Room& room) const {
    if (bytes == 0) return nullptr;
    if (const std::byte* piece = one_piece(offset, bytes)) return piece;
    std::byte* copy = room();
    copy_to(copy, offset, bytes);
    return copy;
  }

  // Calls visit(std::byte* memory, size_t offset, size_t bytes) for each contiguous piece of [offset, offset + bytes),
  // in order; `offset` in the call is relative to the start of the range.
  template <class Visit>
  void for_each(size_t offset, size_t bytes, Visit&& visit) const {
    if (bytes == 0) return;
    size_t i = std::upper_bound(starts_.begin(), starts_.end(), offset) - starts_.begin() - 1;
    for (size_t done = 0; done < bytes; ++i) {
      size_t skip = offset + done - starts_[i];
      size_t length = std::min(spans_[i].bytes - skip, bytes - done);
      visit(spans_[i].data + skip, done, length);
      done += length;
    }
  }

  void copy_to(std::byte* to, size_t offset, size_t bytes) const {
    for_each(offset, bytes, [&](std::byte* from, size_t at, size_t length) { std::memcpy(to + at, from, length); });
  }
  void copy_from(const std::byte* from, size_t offset, size_t bytes) const {
    for_each(offset, bytes, [&](std::byte* to, size_t at, size_t length) { std::memcpy(to, from + at, length); });
  }

 private:
  std::vector<Span> sorted() const {
    std::vector<Span> spans = spans_;
    std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.data < b.data; });
    return spans;
  }

  std::vector<Span> spans_;
  std::vector<size_t> starts_;
  size_t bytes_ = 0;
};

}  // namespace syncengine
