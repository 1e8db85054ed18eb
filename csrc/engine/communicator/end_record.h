// The last words of a rank in a communicator, for its peers.
#pragma once

#include <string>

#include "base/error.h"
#include "transport/shm/layout.h"

namespace syncengine {

// Cuts a long text. Once, by the rank that owns `end_record`, after it has written `ended`.
inline void write_end_record(shm::EndRecord& end_record, shm::Standing standing, ErrorKind kind,
                             const std::string& text) {
  end_record.kind = static_cast<uint32_t>(kind);
  end_record.text[text.copy(end_record.text, sizeof(end_record.text) - 1)] = '\0';
  end_record.standing.store(static_cast<uint32_t>(standing), std::memory_order_release);  // release: all else
}

}  // namespace syncengine
