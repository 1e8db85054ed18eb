// Gradients of less than a page share pages with other tensors, which peers must not access: they are copied to a block
// of the pool while they are still in the cache, and reduced there. So a bucket of small gradients is one contiguous
// block.
//
// Ownership: holds the block. Aliasing: the gradients outlive it. Thread-safety: none. Failure: none; where there is no
// room, nothing is copied and they are staged.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "reducer/gradients/statistics.h"
#include "transport/shm/pool.h"

namespace syncengine {

// Where in a bucket's block each of its gradients lies.
struct SmallLayout {
  static constexpr size_t kLarge = ~size_t{0};
  std::vector<size_t> offsets;  // in the layout's order; kLarge: it lies elsewhere
  size_t bytes = 0, count = 0;

  void add(size_t gradient_bytes);
};

class SmallGradients {
 public:
  SmallGradients() = default;
  SmallGradients(shm::Pool& pool, const SmallLayout& layout);

  // Whether there is a block at all.
  explicit operator bool() const { return block_ != nullptr; }
  std::byte* at(size_t offset) const { return block_.get() + offset; }

  void copy_in(size_t offset, std::byte* gradient, size_t bytes, Statistics& statistics);
  // The averages are in the block: to where the gradients came from.
  void copy_out() const;

 private:
  struct Piece {
    size_t offset;
    std::byte* gradient;
    size_t bytes;
  };
  std::shared_ptr<std::byte> block_;
  std::vector<Piece> pieces_;
};

}  // namespace syncengine
