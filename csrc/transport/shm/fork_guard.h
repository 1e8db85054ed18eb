// Keeps a forked child (a DataLoader worker) out of the shared memory of its parent and of the parent's peers.
#pragma once

namespace syncengine::shm {

class Arena;
class PeerArena;
class Region;

class ForkGuard {
 public:
  static void add(Arena* arena);
  static void add(PeerArena* arena);
  static void add(Region* region);
  static void remove(Arena* arena);
  static void remove(PeerArena* arena);
  static void remove(Region* region);

 private:
  static void install();
  static void before();
  static void in_parent();
  static void in_child();
};

}  // namespace syncengine::shm
