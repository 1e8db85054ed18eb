// Memory in whole pages: shared mappings, memfds, and what the kernel is advised about them; the size of cache lines.
#pragma once

#include <cstddef>
#include <memory>

#include "base/descriptors.h"

namespace syncengine {

inline constexpr size_t kCacheLine = 64;

constexpr size_t round_down(size_t value, size_t multiple) { return value / multiple * multiple; }
constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A half-open range of byte offsets.

struct Range {
  size_t begin = 0, end = 0;
  size_t bytes() const { return end - begin; }
  bool meets(Range other) const { return begin < other.end && other.begin < end; }
};

// A shared memory mapping that unmaps itself.
class Mapping {
 public:
  // Maps `bytes` of `fd` readable, writable, shared, and out of core dumps if the kernel can. Throws InvalidUsage.
  Mapping(int fd, size_t bytes);

  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return data_.get_deleter().bytes; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Unmap> data_;
};

// Replaces whole pages by an inaccessible private mapping. Returns false, with errno, if the kernel refuses; the pages
// are then unchanged. Async-signal-safe.
[[nodiscard]] bool make_inaccessible(void* address, size_t bytes);

// Calls madvise() on whole pages; returns whether the kernel agreed. Only for advice that it may refuse: a refusal
// costs memory or time, never content.
bool advise(void* address, size_t bytes, int advice);

// Creates memory without a name, of a fixed size and never executable, which processes share by its descriptor.
//
// The memory is zeroed, sealed against growing, shrinking and other seals, and close-on-exec. `name` is what /proc
// shows. Throws InvalidUsage, with `hint` appended if there was no room.
UniqueFd create_sealed_memfd(const char* name, size_t bytes, const char* hint = "");

// Returns the size of the memory `fd`, or 0 if it lacks the seals of create_sealed_memfd(), which fix its size for
// ever. Without them a peer could shrink the memory, and an access here would be a SIGBUS, and no error.
size_t sealed_size(int fd);

}  // namespace syncengine
