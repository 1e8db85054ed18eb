// Where a model's large gradients lie on CPUs: in the communicator's pool, as far as it has room. Empty on devices, and
// where the user wants torch's memory.
//
// Ownership: the reducer's; the pool is the communicator's and lives for ever. Thread-safety: the reducer's lock.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "reducer/buckets/bucket.h"
#include "reducer/buckets/bucket_plan.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/gradients/statistics.h"
#include "reducer/parameters/hooks.h"
#include "reducer/torch/graph_tasks.h"
#include "transport/shm/pool.h"

namespace syncengine {

class PooledGradients {
 public:
  explicit PooledGradients(shm::Pool* pool) : pool_(pool) {
    if (!pool_) return;
    gradient_memory::install();
    pool_->join();
  }
  ~PooledGradients() {
    if (pool_) pool_->leave();
  }
  PooledGradients(const PooledGradients&) = delete;
  PooledGradients& operator=(const PooledGradients&) = delete;

  shm::Pool* pool() const { return pool_; }
  void install(const BucketPlan& plan) {
    if (!pool_ || (habits_ && habits_->sizes == plan.pooled_sizes())) return;
    habits_ = std::make_shared<gradient_memory::AllocationHabits>(plan.pooled_sizes());
  }
  // What the graph task on this thread allocates for gradients lies in the pool. `accumulates`: there are gradients
  // already.
  void use_in_this_task(bool accumulates) {
    if (!pool_ || !habits_ || std::exchange(task_, GraphTasks::current()) == GraphTasks::current()) return;
    syncengine::use_in_this_task(std::make_shared<gradient_memory::Grant>(*pool_, habits_, accumulates));
  }
  // A gradient's memory is about to be reduced. Returns why peers can't do it there, if they can't.
  std::optional<StageReason> note(const void* memory, size_t bytes) {
    if (!pool_) return StageReason::Setting;
    if (pool_->owns(memory, bytes)) return std::nullopt;
    if (habits_) habits_->forget(bytes);
    return pool_->shortage().empty() ? StageReason::Elsewhere : StageReason::Shortage;
  }

 private:
  shm::Pool* const pool_;
  std::shared_ptr<gradient_memory::AllocationHabits> habits_;  // of backward, with blocks of the planned sizes
  int task_ = -1;                                              // the last graph task that uses the pool
};

}  // namespace syncengine
