// Keeps a forked child (a DataLoader worker) out of the shared memory of its parent and of the parent's peers.
#pragma once

namespace syncengine::shm {

class Arena;
class PeerArena;

class ForkGuard {
 public:
  static void add(Arena* arena);
  static void add(PeerArena* arena);
  static void remove(Arena* arena);
  static void remove(PeerArena* arena);

 private:
  static void install();
  static void before();
  static void in_parent();
  static void in_child();
};

}  // namespace syncengine::shm
