
#include "reducer/buckets/bucket.h"

#include <algorithm>

#include "reducer/gradients/gradient_memory.h"

namespace syncengine {

void SmallLayout::add(size_t gradient_bytes) {
  bool small = gradient_bytes < gradient_memory::kSmallest;
  offsets.push_back(small ? bytes : kLarge);
  if (!small) return;
  bytes += gradient_bytes;
  ++count;
}

SmallGradients::SmallGradients(shm::Pool& pool, const SmallLayout& layout) {
  void* block = layout.bytes > 0 ? pool.allocate(layout.bytes) : nullptr;
  if (block == nullptr) return;
  block_ = {static_cast<std::byte*>(block), [&pool](std::byte* memory) { pool.release(memory); }};
  pieces_.reserve(layout.count);
}

void SmallGradients::copy_in(size_t offset, std::byte* gradient, size_t bytes, Statistics& statistics) {
  pieces_.push_back({offset, gradient, bytes});
  std::copy_n(gradient, bytes, at(offset));
  statistics.count_copy(CopyReason::Small, bytes);
}

void SmallGradients::copy_out() const {
  for (const Piece& piece : pieces_) std::copy_n(at(piece.offset), piece.bytes, piece.gradient);
}

}  // namespace syncengine
