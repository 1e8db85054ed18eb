// Waits for torch's futures in the same way as for everything else: signals are handled, dead and failed peers are
// noticed, and there is a deadline.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

#include "engine/communicator/communicator.h"

namespace syncengine {

using TorchFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// Returns when the future is completed, and rethrows its error; if its value is on a device, current streams wait.
// Called without the GIL. Throws the communicator's error if that comes first, Error(Timeout) naming `what` past the
// communicator's timeout, and whatever a signal handler throws.
void wait_for_future(const TorchFuture& future, Communicator& communicator, const std::function<std::string()>& what);

// Since torch 2.10 a tensor's Python wrapper counts as one of its holders, since 2.13 a node's as well, even when
// Python itself has let go of it.

// Whether `object` has a wrapper that nothing in Python holds.
template <class Object>
bool python_let_go(const Object& object) {
  if constexpr (requires { object.pyobj_slot()->has_unique_reference(); }) {
    return object.pyobj_slot()->has_unique_reference();
  }
  return false;
}

}  // namespace syncengine
