// A shared memory mapping that unmaps itself.
#pragma once

#include <cstddef>

namespace syncengine {

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

// Replaces whole pages by an inaccessible private mapping. Async-signal-safe.
void make_inaccessible(void* address, size_t bytes);

}  // namespace syncengine
