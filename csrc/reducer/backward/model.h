// A model as the reducer sees it: its settings, and its parts, each of which has a lifetime of its own.
//
// Ownership: the reducer's; the address stays. Thread-safety: the reducer's lock, unless a part says otherwise.
// Failure: throws Error(InvalidUsage) for settings that are not possible, or not now.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/communicator/communicator.h"
#include "reducer/backward/outcome.h"
#include "reducer/backward/route.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/bucket_lane.h"
#include "reducer/buckets/flat_buckets.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/gradients/record.h"
#include "reducer/parameters/parameters.h"
#include "steps/bucket_plan.h"
#include "steps/forwards.h"
#include "steps/lifecycle.h"

namespace syncengine {

class Backward;

struct Model {
  // `tensors` are all the parameters that might ever be synchronized, whether they require a gradient now or not; the
  // same on all ranks. `sparse` says for each whether its gradients are of sparse layout. `lane` is that of their
  // device; null for CPUs.
  Model(std::vector<at::Tensor> tensors, ModelNames names, const std::shared_ptr<Communicator>& communicator,
        const std::vector<bool>& sparse, const ReducerOptions& asked, std::unique_ptr<BucketLane> lane);

  const ReducerOptions options;

  // Parts that live as long as the model.
  Averaging averaging;
  Parameters parameters;
  Usage usage;
  Record record;
  const std::unique_ptr<FlatBuckets> flat;  // null on CPUs
  PooledGradients pooled;
  // The state of the steps, which changes with each.
  Lifecycle life;
  Outcome outcome;
  // The plan and the route, each until another takes its place.
  CurrentPlan plan;
  std::unique_ptr<Route> route;
  // Parts that live as long as a forward, and a backward.
  std::shared_ptr<Forward> forward;    // has begun, and not ended
  std::shared_ptr<Backward> backward;  // the one that comes next, or runs
  // The step of micro-batches while this rank's last one runs: from complete_step() until end_step() or drop_step().
  std::optional<TreeStep> step;
  // The number of backwards that have begun through outputs of this model, averaged or this rank's own.
  uint64_t backwards = 0;

  // The coming forward and backward, made if there is none.
  Forward& coming_forward();
  Backward& coming_backward();

  // Forgets the step of micro-batches, and returns whether a backward has completed it.
  bool end_step() {
    const bool completed = step && step->begun;
    step.reset();
    if (!completed) usage.clear();
    return completed;
  }

  // Whether this forward must install another plan. Also keeps gradients where DDP's forward would. See CurrentPlan.
  bool wants_plan(bool changed) {
    if (plan.notices_order()) keep_gradients();
    return plan.is_outdated(changed, parameters);
  }
  void install(std::shared_ptr<const BucketPlan> another) {
    plan.install(std::move(another));
    pooled.install(*plan);
    route->install(*plan);
  }
  // Whether a rank that raises can refuse the step, so that all ranks lose it and go on. It can't if peers wait for
  // anything but buckets that each rank announces (SyncBatchNorm, a communication hook), or for nothing since all
  // parameters are frozen; on a device also if a rank may not know which buckets the others skip.
  bool can_refuse() const {
    if (options.waits_in_between || (flat && options.skip_all_reduce_unused_params)) return false;
    return plan && !plan.all_frozen() && route->can_be_refused();
  }
  // Announces an all-reduce of words that are no gradients: each byte becomes its maximum over all ranks.
  template <class Word>
  std::shared_ptr<Work> announce(size_t slot, std::shared_ptr<std::vector<Word>> words, const char* what) const {
    return averaging.announce(slot, life.step(), std::move(words), DType::UInt8, ReduceOp::Max,
                              [names = parameters.names(), what] { return what + std::string(" of ") + names->model; });
  }
  // Announces the vote of this step as an operation of its own, with these words. The caller waits for the work.
  template <class Word = uint8_t>
  std::shared_ptr<Work> vote(std::shared_ptr<std::vector<Word>> words = std::make_shared<std::vector<Word>>(1)) const {
    return announce(averaging.vote_slot(), std::move(words), "the last of a step");
  }
  // Drops collected gradients; unless `keeps`, also makes .grad None wherever an average was to come. Needs the GIL.
  void let_go_of_gradients(bool keeps);

  // Lets the graph task on this thread, which brings gradients, allocate them in the pool.
  void pool_gradients() {
    if (!plan || plan.all_frozen()) return;
    pooled.use_in_this_task(parameters.tensor(plan->buckets()[0]->parameters[0]).grad().defined());
  }
  RouteParts for_route() { return {averaging, parameters.gradients(), life, record, pooled, flat.get()}; }

 private:
  // Notes gradients that DDP would have in buckets now. DDP moves them there at wrapping, and again when it makes new
  // buckets: in the first forward behind the backward that has shown the order.
  void keep_gradients() {
    if (averaging.scaling != Scaling::DivideViewed) return;
    for (Gradient& gradient : parameters.gradients()) gradient.keep();
  }
};

}  // namespace syncengine
