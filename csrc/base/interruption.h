// What breaks a wait off from outside, and what the peers are told of it.
#pragma once

#include <exception>
#include <new>
#include <string>
#include <utility>

namespace syncengine {

// A base, beside std::exception, of what a signal handler has raised in a wait.
class Interruption {
 public:
  // `text`: the exception's class and text; empty for Ctrl-C.
  explicit Interruption(std::string text) : text_(std::move(text)) {}
  virtual ~Interruption() = default;
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// " failed in init(): ...", to be said of a rank that `error` has reached in `place`.
inline std::string failure_text(const std::exception& error, const std::string& place) {
  const std::string failed = " failed in " + place + ": ";
  if (auto* raised = dynamic_cast<const Interruption*>(&error))
    return raised->text().empty() ? " was interrupted (Ctrl-C) in " + place : failed + raised->text();
  return failed + (dynamic_cast<const std::bad_alloc*>(&error) ? "out of memory" : error.what());
}

}  // namespace syncengine
