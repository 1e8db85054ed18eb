// Errors on their way from autograd's threads to Python.
//
// A foreign C++ exception that crosses autograd becomes a plain RuntimeError; torch's python_error passes unchanged.
// Thread-safety: any thread; the GIL is taken inside, so it must not be waited for by a holder of the caller's locks.
#pragma once

namespace syncengine {

// To be called in a catch block of a hook or callback: rethrows an Error as the class of that name in syncengine.errors,
// anything else as it is.
[[noreturn]] void rethrow_for_autograd();

// Runs Python's pending signal handlers; throws what they raise (KeyboardInterrupt).
void raise_pending_signal();

}  // namespace syncengine
