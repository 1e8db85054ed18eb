// Death notice between processes of one host: robust mutexes, which the kernel marks within milliseconds of a process's
// death, before its memory is torn down (sockets and pidfds speak up only after that: seconds for a large process).
//
// Thread-safety: hold_all/release_all belong to one thread, which must live as long as the rank; found_dead()
// to one thread at a time.
#pragma once

#include "transport/shm/layout.h"

namespace syncengine::shm {

// Initializes `header.alive`; before any peer maps it.
void prepare_liveness(ArenaHeader& header);

// Called by the rank's longest-lived thread: its death is the rank's death.
void hold_all(ArenaHeader& header, int watchers);
void release_all(ArenaHeader& header, int watchers);

// Whether the owner of `header` died without release_all(). It may still be dying: other threads of it may run for a
// moment. `me` is the watcher's local rank. True once, the caller remembers it.
bool found_dead(ArenaHeader& header, int me);

}  // namespace syncengine::shm
