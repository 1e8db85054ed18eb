// A model as the reducer sees it: what it is, how its gradients are averaged, what is known of its backwards. Each part
// has a lifetime of its own.
//
// Ownership: the reducer's; the address stays. Thread-safety: the reducer's lock, unless a part says otherwise.
// Failure: throws Error(InvalidUsage) for settings that are not possible, or not now.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/communicator/communicator.h"
#include "reducer/backward/outcome.h"
#include "reducer/backward/record.h"
#include "reducer/backward/route.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/bucket.h"
#include "reducer/buckets/bucket_lane.h"
#include "reducer/buckets/flat_buckets.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/parameters/parameters.h"
#include "reducer/torch/graph_tasks.h"
#include "reducer/torch/hooks.h"
#include "steps/bucket_plan.h"
#include "steps/forwards.h"
#include "steps/lifecycle.h"
#include "steps/statistics.h"
#include "transport/shm/pool.h"

namespace syncengine {

// Memory for a model's large gradients on CPUs, in the communicator's pool as far as that has room. Empty on devices,
// and if the user wants torch's memory. The pool is the communicator's and lives for ever.

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
  // Puts the gradients that the graph task on this thread allocates into the pool. `accumulates`: there are gradients
  // already.
  void use_in_this_task(bool accumulates) {
    if (!pool_ || !habits_ || std::exchange(task_, GraphTasks::current()) == GraphTasks::current()) return;
    const auto grant = std::make_shared<gradient_memory::Grant>(*pool_, habits_, accumulates);
    gradient_memory::use(grant);
    at_task_end(
        [grant] {
          grant->revoke();
          grant->learn();  // a task that has failed shows nothing
        },
        [grant](bool) { grant->revoke(); });
  }
  // Notes that a gradient's memory is about to be reduced. Returns why peers can't do that there, if they can't.
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

class Backward;

struct Model {
  // `tensors` are all the parameters that might ever be synchronized, whether they require a gradient now or not; the
  // same on all ranks. `sparse` says for each whether its gradients are of sparse layout. `lane` is that of their
  // device; null for CPUs.
  Model(std::vector<at::Tensor> tensors, ModelNames names, const std::shared_ptr<Communicator>& communicator,
        const std::vector<bool>& sparse, const ReducerOptions& asked, std::unique_ptr<BucketLane> lane);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ReducerOptions options;

  // Parts that live as long as the model.
  Averaging averaging;
  Parameters parameters;
  Usage usage;
  Record record;
  const std::unique_ptr<FlatBuckets> flat;  // null on CPUs
  PooledGradients pooled;
  // The plan and the route, each until another takes its place.
  CurrentPlan plan;
  std::unique_ptr<Route> route;
  // Parts that last from one step to the next.
  Lifecycle life;
  Outcome outcome;
  // Parts that live as long as a forward, and a backward.
  std::shared_ptr<Forward> forward;    // has begun, and not ended
  std::shared_ptr<Backward> backward;  // the one that comes next, or runs
  // The step that this rank's last micro-batch completes, as long as that runs.
  std::optional<TreeStep> step;
  // The number of backwards that have begun through outputs of this model, averaged or this rank's own.
  uint64_t backwards = 0;

  // The coming forward and backward, made if there is none.
  Forward& coming_forward();
  Backward& coming_backward();

  // Forgets the step if a backward has completed it, and returns whether one has.
  bool end_step();

  // Reserves the model's slots, and returns the first one. Collective, once, before the first plan; without the lock,
  // since nobody reads slots before that. Blocks. `copy_of` is the first slot of the model that this one is a copy of,
  // if any, the same on all ranks. Throws InvalidUsage on all ranks if there are no slots left.
  uint64_t reserve_slots(std::optional<uint64_t> copy_of);
  // Called before a forward, for which parameters have `changed`: see CurrentPlan.
  bool wants_plan(bool changed);
  // Not to be called in the middle of a backward, nor before slots are reserved.
  void install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional);
  void install(std::shared_ptr<const BucketPlan> of_another_forward);
  // Called when a gradient that is to be averaged has come. If all parameters were frozen for the last forward, the
  // gradient is from another graph, and uses the plan from before.
  void thaw() {
    if (plan.before_frozen()) install(plan.before_frozen());
  }
  // At most one of these is called, between backwards. With a hook, all gradients go through the hook. With
  // compression, they travel in a smaller dtype, scaled as torch's compressing hooks do (`divides_first`) or as usual.
  // With the all-reduce hook, they are only scaled as torch's all-reduce hook does.
  void set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_compression(at::ScalarType type, bool divides_first);
  void set_all_reduce_hook();
  // Must be called before the first backward.
  void set_static_graph();

  // Whether ranks can refuse a step. They can't if peers wait for anything but announced buckets, or if all parameters
  // are frozen.
  bool can_refuse() const { return plan && !plan.all_frozen() && route->can_be_refused() && !options.waits_in_between; }
  // Announces that this rank's step ends with these bytes, as announce() does; the caller waits for the work.
  std::shared_ptr<Work> vote(std::shared_ptr<std::vector<uint8_t>> bytes) const;
  // Announces bytes that are no gradients, which become their maximum over all ranks.
  std::shared_ptr<Work> announce(size_t slot, std::shared_ptr<std::vector<uint8_t>> bytes, const char* what) const;
  // Drops what a backward has collected, or was to collect: .grad stays as it is, or becomes None. Called under the
  // GIL.
  void let_go_of_gradients(bool keeps);

  // Called when the graph task on this thread brings gradients.
  void pool_gradients();

 private:
  void check_between_backwards(const char* what) const;
  void check_hookable();
  void keep_gradients();

  bool has_hook_ = false;
};

}  // namespace syncengine
