#include "reducer/parameters/pooled_gradients.h"

#include <utility>

#include "reducer/gradients/gradient_memory.h"
#include "reducer/parameters/hooks.h"
#include "reducer/torch/graph_tasks.h"

namespace syncengine {

PooledGradients::PooledGradients(shm::Pool* pool) : pool_(pool) {
  if (!pool_) return;
  gradient_memory::install();
  pool_->join();
}

PooledGradients::~PooledGradients() {
  if (pool_) pool_->leave();
}

void PooledGradients::install(const BucketPlan& plan) {
  if (!pool_ || (habits_ && habits_->sizes() == plan.pooled_sizes())) return;
  habits_ = std::make_shared<gradient_memory::AllocationHabits>(plan.pooled_sizes());
}

void PooledGradients::use_in_this_task(bool accumulates) {
  if (!pool_ || !habits_ || std::exchange(task_, GraphTasks::current()) == GraphTasks::current()) return;
  syncengine::use_in_this_task(std::make_shared<gradient_memory::Grant>(*pool_, habits_, accumulates));
}

std::optional<StageReason> PooledGradients::note(const void* memory, size_t bytes) {
  if (!pool_) return StageReason::Setting;
  if (pool_->owns(memory, bytes)) return std::nullopt;
  if (habits_) habits_->forget(bytes);
  return pool_->shortage().empty() ? StageReason::Elsewhere : StageReason::Shortage;
}

}  // namespace syncengine
