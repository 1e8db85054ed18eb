// A bucket whose large gradients lie in the pool is reduced in place. Its small ones share pages with other tensors, which
// peers must not be let into: they travel as copies in the pool.
//
// Ownership: holds the copies; shared with the operation that reduces them. Thread-safety: none. Failure: none; where there
// is no room, the bucket is staged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "reducer/statistics.h"
#include "transport/shm/pool.h"

namespace syncengine {

class SmallGradients {
 public:
  // Copies the small ones of `gradients`, if the others lie in `pool` and are most of the bytes. Otherwise empty.
  static SmallGradients gather(shm::Pool& pool, const std::vector<at::Tensor>& gradients, Statistics& statistics);

  // Where the peers find gradients[i].
  std::byte* place(const std::vector<at::Tensor>& gradients, size_t i) const;
  const std::shared_ptr<void>& memory() const { return memory_; }
  // The averages are in place: copies them back.
  void scatter(const std::vector<at::Tensor>& gradients) const;

 private:
  std::shared_ptr<void> memory_;
  std::vector<std::byte*> places_;  // by gradient; null for large ones
};

}  // namespace syncengine
