// One chunk on its way between hosts: its cells, and how far each of them is in its steps.
//
// Ownership: owns the scratch memory that its transfers use; may go only when it is quiet, or its transfers were
// withdrawn. Thread-safety: under the engine's progress lock.
#pragma once

#include <memory>
#include <vector>

#include "collectives/interhost_plan.h"
#include "transport/interhost.h"

namespace syncengine::hosts {

// Memory that is taken piece by piece and given back all at once; pieces don't move.
class Scratch {
 public:
  std::byte* take(size_t bytes);
  void clear();

 private:
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes;
  };
  std::vector<Block> blocks_;
  size_t block_ = 0, used_ = 0;
};

struct InFlightChunk {
  uint64_t operation = 0, chunk = 0, total = 0;  // as in Lane::Cursor
  std::vector<InterhostCell> cells = {};

  using Transfers = std::vector<std::shared_ptr<Interhost::Transfer>>;
  struct Receives {  // of a step
    Transfers transfers = {};
    std::vector<std::byte*> places = {};  // null: in the output
  };
  struct Progress {
    size_t step = 0;
    bool acted = false;                   // the step's act is done, and its sends are posted
    bool arrived = false;                 // the last act is done
    std::vector<Receives> receives = {};  // of the steps whose receives are posted: all of them as soon as possible
    Transfers sends = {};
    std::byte* partial = nullptr;
  };
  std::vector<Progress> progress = {};
  Scratch scratch = {};

  bool arrived() const;  // results are in the local ranks' memory
  bool quiet() const;    // and no byte of it moves any more
};

}  // namespace syncengine::hosts
