// Lines that the engine writes to stderr by itself.
//
// Thread-safety: any thread, under any lock. Failure: none; lines at which writing to stderr fails are dropped.
#pragma once

#include <string>

namespace syncengine {

// Hands `lines`, each with its newline, to a thread that writes them: stderr may be a full pipe, which blocks any
// writer, for ever if nobody reads it. At most 64 texts wait there; any more are dropped, and a line at the end says
// how many lines those were. If no thread can be started, the texts wait for a later call.
void say(std::string lines);

// Waits until the lines given to say() are written, at most one second. Called before the process ends.
void await_said();

}  // namespace syncengine
