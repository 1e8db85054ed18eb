// A piece of shared memory of every rank, mapped by all of them: the words that streams wait for, and staging where
// devices can't reach each other.
//
// Not in the arena, whose pages a rank replaces by private copies after a failure: a device would go on with the old
// ones, and the CPU could no longer release its streams.
//
// Ownership: unmaps itself; the kernel frees the memory with its last mapping. Thread-safety: constant once made.
// Failure: as bootstrap/fd_exchange.h; Mismatch or InvalidUsage for ranks that can't share memory.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// Every rank's `own`, by rank. Collective.
std::vector<std::string> gather(Communicator& communicator, const std::string& own, const char* what,
                                const std::function<void()>& interrupted);

template <class T>
std::vector<T> gather(Communicator& communicator, const T& own, const char* what,
                      const std::function<void()>& interrupted) {
  std::vector<T> all;
  for (const std::string& text :
       gather(communicator, std::string(reinterpret_cast<const char*>(&own), sizeof(T)), what, interrupted)) {
    all.emplace_back();
    text.copy(reinterpret_cast<char*>(&all.back()), sizeof(T));
  }
  return all;
}

class SharedPages {
 public:
  // Collective. `bytes` of zeros a rank.
  SharedPages(Communicator& communicator, size_t bytes, const std::function<void()>& interrupted);

  std::byte* of(int rank) const { return mappings_[rank].data(); }
  size_t bytes() const { return mappings_[0].bytes(); }

 private:
  std::vector<Mapping> mappings_;
};

}  // namespace syncengine::cuda
