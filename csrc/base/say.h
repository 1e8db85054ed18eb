// Lines that the engine writes to stderr by itself.
//
// Thread-safety: any thread, under any lock. Failure: none; lines that stderr does not take are dropped.
#pragma once

#include <string>

namespace syncengine {

// Has `lines`, each with its newline, written by a thread of its own: stderr may be a full pipe, which blocks whoever
// writes to it, for ever where nobody reads it. At most 64 texts wait there; later ones are dropped.
void say(std::string lines);

// Waits until what was said is written, a second at most. Before the process ends.
void await_said();

}  // namespace syncengine
