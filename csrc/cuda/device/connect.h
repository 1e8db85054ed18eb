// What the groups of real devices share: on one host and on several.
//
// Ownership: none. Thread-safety: any thread. Failure: as said.
#pragma once

#include <memory>
#include <string>

#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// Calls step(). What keeps this rank from going on would keep the others waiting: an Error fails the communicator on
// all ranks, and is thrown on.
template <class Step>
void tell_peers_if_it_fails(Communicator& communicator, Step&& step) {
  try {
    step();
  } catch (const Error& error) {
    const int rank = communicator.global_ranks()[communicator.rank()];
    // A mismatch is everybody's, whoever finds it first.
    const ErrorKind kind = error.kind() == ErrorKind::Mismatch ? ErrorKind::Mismatch : ErrorKind::Aborted;
    communicator.abort(kind, "rank " + std::to_string(rank) + ": " + error.what());
    throw;
  }
}

// What a group between hosts allocates: memory that is this rank's alone.
std::shared_ptr<void> take_own_memory(Communicator& communicator, int device, size_t bytes);

// Throws InvalidUsage for an operation that has no meaning on devices.
void require_possible(const Operation& operation);

// For messages; computed anew at each call.
std::string describe(const Operation& operation);

}  // namespace syncengine::cuda
