// The last words of a rank in a communicator, for its peers.
#pragma once

#include <string>

#include "base/error.h"
#include "transport/shm/layout.h"

namespace syncengine {

// Cuts a long text. Once, by the rank that owns `farewell`.
inline void say_farewell(shm::Farewell& farewell, shm::Standing standing, ErrorKind kind, const std::string& text) {
  farewell.kind = static_cast<uint32_t>(kind);
  farewell.text[text.copy(farewell.text, sizeof(farewell.text) - 1)] = '\0';
  farewell.standing.store(static_cast<uint32_t>(standing), std::memory_order_release);  // release: kind and text
}

}  // namespace syncengine
