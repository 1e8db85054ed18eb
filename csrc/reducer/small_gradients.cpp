#include "reducer/small_gradients.h"

#include <cstring>

#include "reducer/cpu_allocator.h"

namespace syncengine {

namespace {

constexpr size_t kWorthIt = 4;  // times as many bytes in place as copied: else staging costs no more

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

SmallGradients SmallGradients::gather(shm::Pool& pool, const std::vector<at::Tensor>& gradients,
                                      Statistics& statistics) {
  size_t small = 0, large = 0;
  for (const auto& gradient : gradients) {
    size_t bytes = gradient.nbytes();
    bool is_small = bytes < gradient_memory::kSmallest;
    (is_small ? small : large) += bytes;
    if (!is_small && !pool.owns(data_of(gradient), bytes)) return {};
  }
  if (small == 0 || large < kWorthIt * small) return {};
  void* block = pool.allocate(small);
  if (block == nullptr) return {};
  SmallGradients result;
  result.memory_ = {block, [&pool](void* memory) { pool.release(memory); }};
  result.places_.reserve(gradients.size());
  auto* next = static_cast<std::byte*>(block);
  for (const auto& gradient : gradients) {
    size_t bytes = gradient.nbytes();
    if (bytes >= gradient_memory::kSmallest) {
      result.places_.push_back(nullptr);
      continue;
    }
    std::memcpy(next, data_of(gradient), bytes);
    result.places_.push_back(next);
    next += bytes;
  }
  statistics.count_copy(CopyReason::Small, small);
  return result;
}

std::byte* SmallGradients::place(const std::vector<at::Tensor>& gradients, size_t i) const {
  return memory_ && places_[i] ? places_[i] : data_of(gradients[i]);
}

void SmallGradients::scatter(const std::vector<at::Tensor>& gradients) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i]) std::memcpy(data_of(gradients[i]), places_[i], gradients[i].nbytes());
  }
}

}  // namespace syncengine
