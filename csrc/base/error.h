// The errors users see. Each kind is one Python class of the same name under `syncengine.SyncError`.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace syncengine {

enum class ErrorKind {
  PeerLost,      // another rank died or left while this one still needed it
  Timeout,       // a deadline passed; the text names the ranks that did not arrive
  Mismatch,      // ranks called different collectives, shapes, dtypes or layouts
  Aborted,       // another rank raised, or this one was interrupted; carries the peer's own text
  InvalidUsage,  // a call that can't work on this rank alone
  NotFinite,     // a gradient is NaN or infinite, where the program wants to know
};
inline constexpr ErrorKind kLastErrorKind = ErrorKind::NotFinite;

const char* name(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// A rank's forward or backward has raised, so all ranks lose the step; the communicator goes on. `text` is that rank's.
class StepRefused : public Error {
 public:
  explicit StepRefused(const std::string& text) : Error(ErrorKind::Aborted, text) {}
};

// Throws InvalidUsage with `text`, which says what failed, the system's message for errno `code`, and perhaps a remedy.
// `call`: the name of the system call, as seccomp filters list it; "" if no sandbox refuses that call.
[[noreturn]] void throw_system_error(const std::string& text, int code, const char* call = "");

// Marks an exception that ends a wait from outside, such as Ctrl-C, and holds the text that the peers are told.
//
// Exceptions that a signal handler raises in a wait derive from this class beside std::exception.
class Interruption {
 public:
  // `text` is the Python exception's class and text; empty for Ctrl-C.
  explicit Interruption(std::string text) : text_(std::move(text)) {}
  virtual ~Interruption() = default;
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Returns " failed in PLACE: ERROR", to follow a rank's name. `place` is the call that raised there, such as "init()".
inline std::string failure_text(const std::exception& error, const std::string& place) {
  const std::string failed = " failed in " + place + ": ";
  if (auto* raised = dynamic_cast<const Interruption*>(&error))
    return raised->text().empty() ? " was interrupted (Ctrl-C) in " + place : failed + raised->text();
  return failed + (dynamic_cast<const std::bad_alloc*>(&error) ? "out of memory" : error.what());
}

}  // namespace syncengine
