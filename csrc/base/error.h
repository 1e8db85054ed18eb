// The errors users see. Each kind is one Python class of the same name under `syncengine.SyncError`.
#pragma once

#include <stdexcept>
#include <string>

namespace syncengine {

enum class ErrorKind {
  PeerLost,      // another rank died or left while this one still needed it
  Timeout,       // a deadline passed; the text names the ranks that did not arrive
  Mismatch,      // ranks called different collectives, shapes, dtypes or layouts
  Aborted,       // another rank raised, or this one was interrupted; carries the peer's own text
  InvalidUsage,  // a call that can't work on this rank alone
};

const char* name(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Throws InvalidUsage with `text` and the system's own words for errno `code`.
[[noreturn]] void throw_system_error(const std::string& text, int code);

}  // namespace syncengine
