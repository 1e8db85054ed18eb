// Where a model's large gradients lie on CPUs: in the communicator's pool, as far as it has room. Empty on devices, and
// where the user wants torch's memory.
//
// Ownership: the reducer's; the pool is the communicator's and lives for ever. Thread-safety: the reducer's lock.
#pragma once

#include <memory>
#include <optional>

#include "reducer/buckets/bucket.h"
#include "reducer/buckets/bucket_plan.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/gradients/statistics.h"
#include "transport/shm/pool.h"

namespace syncengine {

class PooledGradients {
 public:
  explicit PooledGradients(shm::Pool* pool);
  ~PooledGradients();
  PooledGradients(const PooledGradients&) = delete;
  PooledGradients& operator=(const PooledGradients&) = delete;

  shm::Pool* pool() const { return pool_; }
  void install(const BucketPlan& plan);
  // What the graph task on this thread allocates for gradients lies in the pool. `accumulates`: there are gradients
  // already.
  void use_in_this_task(bool accumulates);
  // A gradient's memory is about to be reduced. Returns why peers can't do it there, if they can't.
  std::optional<StageReason> note(const void* memory, size_t bytes);

 private:
  shm::Pool* const pool_;
  std::shared_ptr<gradient_memory::AllocationHabits> habits_;  // of backward, with blocks of the planned sizes
  int task_ = -1;                                              // the last graph task that uses the pool
};

}  // namespace syncengine
