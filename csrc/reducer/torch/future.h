// Waits for torch's futures as for everything else: signals are handled, dead and failed peers are noticed, and there
// is a deadline.
#pragma once

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>

#include "engine/communicator/communicator.h"

namespace syncengine {

using TorchFuture = c10::intrusive_ptr<c10::ivalue::Future>;

// Returns when it is completed, and rethrows its error; for what is on a device, current streams wait. To be called
// without the GIL. Throws the communicator's error if that comes first, Error(Timeout) naming `what` past the
// communicator's timeout, and what a signal handler throws.
void wait_for_future(const TorchFuture& future, Communicator& communicator, const std::function<std::string()>& what);

}  // namespace syncengine
