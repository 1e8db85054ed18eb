// What a rank says to those that wait for it.
#pragma once

#include <string>

#include "engine/communicator/communicator.h"

namespace syncengine {

// "rank 1 raised in forward: ..." or "rank 1: the text".
inline std::string said_here(const Communicator& communicator, const std::string& text) {
  const std::string rank = "rank " + std::to_string(communicator.global_ranks()[communicator.rank()]);
  return rank + (text.starts_with("raised ") ? " " : ": ") + text;
}

// They wait for gradients that this rank will not bring: ends the communicator.
inline void tell_peers(Communicator& communicator, const std::string& text, ErrorKind kind = ErrorKind::Aborted) {
  communicator.abort(kind, said_here(communicator, text));
}

}  // namespace syncengine
