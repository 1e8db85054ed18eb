// C++ errors as Python's, and Python's signals in C++ waits.
#pragma once

#include <functional>

namespace syncengine {

// For Communicator::wait: runs Python's signal handlers, which may throw (KeyboardInterrupt). Called without the GIL.
std::function<void()> check_signals();

}  // namespace syncengine
