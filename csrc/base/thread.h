// How the engine's threads begin, and how those who own them end.
//
// Thread-safety: concerns the calling thread alone. Failure: none.
#pragma once

#include <thread>

namespace syncengine {

// Names the calling thread (at most 15 characters), and leaves signals to the program's own threads, but for those of
// its own faults.
void begin_thread(const char* name);

// Deletes `object`, whose destructor waits for `its` thread: elsewhere, if that is the calling one. Which drops what
// operations held, a tensor perhaps: Python may collect garbage there, and the last reference to anything be among it.
template <class Object>
void delete_off(const std::thread& its, Object* object) {
  if (its.get_id() == std::this_thread::get_id())
    std::thread([object] { delete object; }).detach();
  else
    delete object;
}

}  // namespace syncengine
