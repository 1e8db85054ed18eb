#include "base/error.h"

#include <cstring>

namespace syncengine {

const char* name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::PeerLost: return "PeerLost";
    case ErrorKind::Timeout: return "Timeout";
    case ErrorKind::Mismatch: return "Mismatch";
    case ErrorKind::Aborted: return "Aborted";
    case ErrorKind::InvalidUsage: return "InvalidUsage";
    case ErrorKind::NotFinite: return "NotFinite";
  }
  return "SyncError";
}

void throw_system_error(const std::string& text, int code) {
  throw Error(ErrorKind::InvalidUsage, text + ": " + std::strerror(code));
}

}  // namespace syncengine
