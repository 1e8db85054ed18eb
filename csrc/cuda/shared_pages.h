// Memory that all ranks of a host share: the words that streams wait for, and staging where devices can't reach each
// other.
//
// The memory is not in the arena, whose pages a rank replaces by private copies after a failure: a device would go on
// with the old pages, and the CPU could no longer release its streams.
//
// Ownership: the caller's mapping; Linux frees the memory with the last one. Thread-safety: any thread. Failure: as
// bootstrap/fd_exchange.h.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/memory.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// Gathers every rank's `own`, by rank. Collective.
template <class T>
std::vector<T> gather(Communicator& communicator, T own, const char* what, const std::function<void()>& interrupted) {
  std::vector<T> all(communicator.size());
  communicator.run({.collective = Collective::AllGather,
                    .dtype = DType::UInt8,
                    .input = {&own, sizeof(T)},
                    .output = {all.data(), all.size() * sizeof(T)},
                    .layout_hash = 0x63756461,  // "cuda": no other all_gather matches it
                    .describe = [what] { return std::string(what); }},
                   interrupted);
  return all;
}

// `bytes` of zeros, the same memory on all ranks, which share a host. Collective.
Mapping share_pages(Communicator& communicator, size_t bytes, const std::function<void()>& interrupted);

}  // namespace syncengine::cuda
