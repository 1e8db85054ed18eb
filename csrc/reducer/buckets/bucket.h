// Gradients of one dtype that are reduced together, in the memory where they lie: a bucket has no memory of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "engine/progress/work.h"
#include "reducer/torch/profile.h"
#include "steps/statistics.h"
#include "steps/texts.h"
#include "transport/shm/pool.h"

namespace syncengine {

// Gradients of less than a page share pages with other tensors, which peers must not access: they are copied to a block
// of the pool while they are still in the cache, and reduced there. So a bucket of small gradients is one contiguous
// block.
//
// Ownership: holds the block. Aliasing: the gradients outlive it. Thread-safety: none. Failure: none; where there is no
// room, nothing is copied and they are staged.

// Where in a bucket's block each of its gradients lies.
struct SmallLayout {
  static constexpr size_t kLarge = ~size_t{0};
  std::vector<size_t> offsets;  // in the layout's order; kLarge: it lies elsewhere
  size_t bytes = 0, count = 0;
};

class SmallGradients {
 public:
  SmallGradients() = default;
  SmallGradients(shm::Pool& pool, const SmallLayout& layout) {
    void* block = layout.bytes > 0 ? pool.allocate(layout.bytes) : nullptr;
    if (block == nullptr) return;
    block_ = {static_cast<std::byte*>(block), [&pool](std::byte* memory) { pool.release(memory); }};
    pieces_.reserve(layout.count);
  }

  // Whether there is a block at all.
  explicit operator bool() const { return block_ != nullptr; }
  std::byte* at(size_t offset) const { return block_.get() + offset; }

  void copy_in(size_t offset, std::byte* gradient, size_t bytes, Statistics& statistics) {
    pieces_.push_back({offset, gradient, bytes});
    std::copy_n(gradient, bytes, at(offset));
    statistics.count_copy(CopyReason::Small, bytes);
  }
  // The averages are in the block: to where the gradients came from.
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

// What is fixed as long as the plan is. Shared with the operations that describe themselves by it.
struct BucketLayout : std::enable_shared_from_this<BucketLayout> {
  std::shared_ptr<const ModelNames> names;
  size_t index;
  DType dtype;
  std::vector<size_t> parameters;  // in the order in which they lie in the concatenation
  bool sparse;                     // of one gradient of sparse layout
  SmallLayout small;
  uint64_t hash;  // of indices, sizes and dtype: equal on all ranks, or the reduction is a Mismatch

  // "bucket 3 of Parallel(GPT) (layer.weight, layer.bias, ...)"
  std::string describe() const;
};

// What the engine works on; it may hold it longer than the bucket, whose step may have been refused.
struct BucketMemory {
  std::vector<at::Tensor> gradients;  // in the layout's order, those in `small` left out
  SmallGradients small;
  std::vector<uint64_t> flags;  // of the operation: see Backward::add_stamp
};

// A bucket in one backward.
struct Bucket {
  enum class State : uint8_t {
    Filling,   // waits for gradients
    Ready,     // has all of them
    InFlight,  // announced to the peers, or handed to the communication hook
    Skipped,   // nobody has a gradient in it
  };

  std::shared_ptr<const BucketLayout> layout;
  State state = State::Filling;
  size_t missing = 0;  // gradients that this backward has not brought yet
  int64_t since = 0;   // when the first came; while this rank is traced
  std::shared_ptr<Work> work = {};
  std::shared_ptr<BucketMemory> memory = {};
  ProfilerRow row = {};  // from its announcement until its average is there
};

}  // namespace syncengine
