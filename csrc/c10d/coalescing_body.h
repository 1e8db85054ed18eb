// The `with` block in which a thread coalesces calls. torch's _coalescing_manager does not tell a backend when its body
// raises, but it is a generator, which has ended then.
//
// Ownership: a weak reference to the generator. Thread-safety: any thread, which must hold no lock that a holder of the
// GIL may wait for. Failure: none.
#pragma once

#include <functional>
#include <memory>

namespace syncengine {

class CoalescingBody {
 public:
  // That of the generator which calls this; null if something else does. `left` is called once the generator is gone,
  // unless this is gone before: without the GIL, on whichever thread lets go of it, and must not throw.
  static std::unique_ptr<CoalescingBody> of_caller(std::function<void()> left);
  ~CoalescingBody();

  bool has_ended() const;

 private:
  explicit CoalescingBody(void* reference) : reference_(reference) {}
  void* reference_;  // Python's
};

// To be called in a catch block: a signal handler's exception is raised later, by the program's main thread.
void postpone_python_error() noexcept;

}  // namespace syncengine
