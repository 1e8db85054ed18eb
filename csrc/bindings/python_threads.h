// Which threads could make calls.
#pragma once

namespace syncengine {

// Threads of this process that Python knows, without some that can't: any of them might make a call. kUnknownCallers on
// a thread that Python does not know.
int count_python_threads();

}  // namespace syncengine
