// What each of the engine's threads does first.
//
// Thread-safety: concerns the calling thread alone. Failure: none.
#pragma once

namespace syncengine {

// Names the calling thread (at most 15 characters), and leaves signals to the program's own threads, but for those of
// its own faults.
void begin_thread(const char* name);

}  // namespace syncengine
