// Gradients of one dtype that are reduced together: on CPUs, where that is possible, in the memory where they lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/progress/work.h"
#include "reducer/gradients/record.h"
#include "reducer/torch/profile.h"
#include "steps/bucket_plan.h"
#include "transport/shm/pool.h"

namespace syncengine {

// Gradients of less than a page share pages with other tensors, which peers must not access: they are copied to a block
// of the pool, one for each bucket, while they are still in the cache, and reduced there.
//
// Ownership: holds the block. Aliasing: the gradients outlive it. Thread-safety: none. Failure: none; where there is no
// room, nothing is copied and they are staged.
class SmallGradients {
 public:
  SmallGradients() = default;
  SmallGradients(shm::Pool& pool, const SmallLayout& layout) {
    void* block = layout.bytes > 0 ? pool.allocate(layout.bytes) : nullptr;
    if (block == nullptr) return;
    block_ = {static_cast<std::byte*>(block), [&pool](std::byte* memory) { pool.release(memory); }};
    pieces_.reserve(layout.offsets.size());
  }

  // Whether the bucket has a block of shared memory for its gradients.
  explicit operator bool() const { return block_ != nullptr; }
  std::byte* at(size_t offset) const { return block_.get() + offset; }

  void copy_in(size_t offset, std::byte* gradient, size_t bytes, Statistics& statistics) {
    pieces_.push_back({offset, gradient, bytes});
    std::copy_n(gradient, bytes, at(offset));
    statistics.count_copy(CopyReason::Small, bytes);
  }
  // Copies the averages from the block to where the gradients came from.
  void copy_out() const {
    for (const Piece& piece : pieces_) std::copy_n(at(piece.offset), piece.bytes, piece.gradient);
  }

 private:
  struct Piece {
    size_t offset;
    std::byte* gradient;
    size_t bytes;
  };
  std::shared_ptr<std::byte> block_;
  std::vector<Piece> pieces_;
};

// Holds the memory that a bucket's operation works on, for longer than the bucket exists if the step was refused.
struct BucketMemory {
  std::vector<at::Tensor> gradients;  // in the layout's order, those in `small` left out
  SmallGradients small;
  std::vector<uint64_t> flags;  // of the operation: all ranks' times, or none
};

// A bucket in one backward. Filling knows how far it is filled.
struct Bucket {
  std::shared_ptr<const BucketLayout> layout;
  int64_t since = 0;  // when the first gradient came; while this rank is traced
  std::shared_ptr<Work> work = {};
  std::shared_ptr<BucketMemory> memory = {};
  ProfilerRow row = {};  // from its announcement until its average is there
};

}  // namespace syncengine
