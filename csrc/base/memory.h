// Whole pages, cache lines, blocks.
#pragma once

#include <cstddef>

#include "base/descriptors.h"

namespace syncengine {

inline constexpr size_t kCacheLine = 64;

constexpr size_t round_down(size_t value, size_t multiple) { return value / multiple * multiple; }
constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// A half-open range of offsets.

struct Range {
  size_t begin = 0, end = 0;
  size_t bytes() const { return end - begin; }
};

// A shared memory mapping that unmaps itself.

class Mapping {
 public:
  Mapping() = default;
  // Maps all `bytes` of `fd`, readable and writable, shared, kept out of core dumps. Throws InvalidUsage.
  Mapping(int fd, size_t bytes);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Replaces whole pages by an inaccessible private mapping. False, with errno, if the kernel refuses: then they are what
// they were. Async-signal-safe.
[[nodiscard]] bool make_inaccessible(void* address, size_t bytes);

// madvise() on whole pages, for what may as well be refused: that costs memory or time, never content.
void advise(void* address, size_t bytes, int advice);

// Memory without a name that processes share by passing its descriptor on: of a fixed size, never executable.

// Sealed against growing, shrinking and other seals; close-on-exec; zeros. `name` is what /proc shows. Throws
// InvalidUsage with `hint` behind what failed for want of room.
UniqueFd create_sealed_memfd(const char* name, size_t bytes, const char* hint = "");

// Whether `fd` is such memory: its size will stay what it is.
bool has_fixed_size(int fd);

}  // namespace syncengine
