// What moves bytes between hosts, as the engine sees it: a thread of its own, but while a thread of the program waits,
// that thread. It has nothing else to do, and needs no wake-up to go on with what has come.
//
// Ownership: the communicators that reach over hosts. Thread-safety: any thread; poll() and release() by the one that
// claimed. Failure: what fails a peer fails its transfers.
#pragma once

#include "base/deadline.h"

namespace syncengine {

class IoLoop {
 public:
  virtual ~IoLoop() = default;
  // From now on the calling thread moves the bytes, and must do so at least every few milliseconds until it releases.
  // False: it can't, or another one does.
  virtual bool claim() = 0;
  // Moves what can be moved, and sleeps where nothing can, until passes may go on (then it is true), wake() or
  // `at_most`.
  virtual bool poll(Duration at_most) = 0;
  virtual void release() = 0;
  virtual void wake() = 0;    // poll() returns soon
  virtual void notify() = 0;  // there is something to move: wakes the loop's own thread, unless another one is at it
};

}  // namespace syncengine
