// The way in which the gradients of a bucket become averages, once all of them are there: reduced in place, through
// flat memory of a device, or by a communication hook. All buckets of a model have one route, except that sparse
// gradients, unless a hook takes them, are gathered together at the end of backward.
//
// Ownership: the model's; memory that a route keeps over backwards is its own. Thread-safety: all calls but finish()
// and proceed() under the reducer's lock; these two without it, since they may block or run anybody's code. Failure:
// throws the communicator's error, or the hook's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/bucket.h"
#include "reducer/buckets/flat_buckets.h"
#include "reducer/buckets/nonfinite.h"
#include "reducer/gradients/gradient.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/gradients/record.h"
#include "reducer/gradients/tree_sums.h"
#include "steps/bucket_plan.h"
#include "steps/lifecycle.h"

namespace syncengine {

struct RouteParts {
  const Averaging& averaging;
  const std::vector<Gradient>& gradients;
  const Lifecycle& life;  // for the step's number
  Record& record;
  PooledGradients& pooled;
  FlatBuckets* flat;  // null on CPUs
};

// The buckets of a backward that has begun, and what else its route has to know of it.
struct BackwardBuckets {
  // With `votes`, one of them is the vote: see Filling.
  BackwardBuckets(std::shared_ptr<const BucketPlan> shared, bool votes)
      : plan(std::move(shared)), filling(plan, votes) {
    buckets.reserve(plan->buckets().size());
    for (const auto& layout : plan->buckets()) buckets.push_back({.layout = layout});
  }

  // Returns the next bucket in the plan's order, once it and all before it are full, and goes on; null before that.
  Bucket* next_in_order() {
    const auto next = filling.next_in_order();
    return next ? &buckets[*next] : nullptr;
  }

  const std::shared_ptr<const BucketPlan> plan;
  Filling filling;
  std::vector<Bucket> buckets = {};
  double divisor = 1.0;                      // of the sums; the same on all ranks
  std::optional<TreeStep> tree = {};         // that the backward completes
  std::optional<NonfiniteWatch> watch = {};  // if anybody asks for it
  bool is_over = false;                      // dropped, while another thread may still be in Route::proceed()
};

class Route {
 public:
  explicit Route(const RouteParts& model) : model_(model) {}
  virtual ~Route() = default;

  // Called when the model has got another plan, or this route.
  virtual void install(const BucketPlan& /*plan*/) {}
  // Called when a bucket's first gradient of this backward comes.
  virtual void open(Bucket& /*bucket*/) {}
  // Called when a gradient, the one at `position` in its bucket, is what this rank contributes. Not virtual, since it
  // is called for each: a small one is copied to the bucket's block, if that has one, while it is still in the cache.
  void collected(Bucket& bucket, size_t position) {
    const BucketLayout& layout = *bucket.layout;
    if (model_.flat) model_.flat->note(layout.index);
    if (!bucket.memory || !bucket.memory->small || layout.small.offsets[position] == SmallLayout::kLarge) return;
    const Gradient& gradient = model_.gradients[layout.parameters[position]];
    bucket.memory->small.copy_in(layout.small.offsets[position], gradient.data(), gradient.memory().nbytes(),
                                 model_.record.statistics);
  }
  // Called when a bucket has all its gradients. A sparse bucket is not started, but those after it may be if full.
  virtual void ready(BackwardBuckets& backward, Bucket& bucket) = 0;
  // Does what ready() can't do under the lock. Called without the lock; `mutex` is the reducer's.
  virtual void proceed(BackwardBuckets& /*backward*/, std::mutex& /*mutex*/) {}
  // Waits until the averages of all the route's buckets are there; for a device's, only the current stream waits.
  virtual void finish(BackwardBuckets& backward) = 0;
  // Puts a bucket's averages where Gradient::deliver() takes them.
  virtual void deliver(Bucket& /*bucket*/) {}

  virtual bool takes_sparse() const { return false; }
  // Whether a rank can refuse a step, and the peers go on.
  virtual bool can_be_refused() const { return false; }
  // Called when this rank has refused a step whose buckets the peers queue. Takes part in these operations.
  virtual void stand_in(BackwardBuckets& /*backward*/) {}
  // Called when a backward is given up, while its gradients exist. Keeps memory that is in use from being reused.
  virtual void drop(BackwardBuckets& /*backward*/) {}

 protected:
  // Traces a bucket that is complete and becomes the operation at `place`; by default a place that no operation has.
  // Does nothing if this rank is not traced.
  void trace_bucket(const Bucket& bucket, const Work::Place& place = {.number = ~uint64_t{0}}) const {
    if (bucket.since == 0 || !trace::is_on()) return;
    const BucketLayout& layout = *bucket.layout;
    size_t bytes = 0;
    std::string text = layout.names->model + "\n" + std::to_string(layout.index);
    for (size_t i : layout.parameters) {
      bytes += model_.gradients[i].parameter().nbytes();
      text += "\n" + layout.names->parameters[i];
    }
    trace::record({.kind = trace::Kind::Bucket,
                   .begin = bucket.since,
                   .end = trace::now(),
                   .group = model_.averaging.communicator->trace_id(),
                   .lane = static_cast<uint16_t>(place.lane),
                   .place = place.number,
                   .epoch = place.epoch,
                   .detail = bytes,
                   .text = trace::text(text)});
  }

  const RouteParts model_;
};

// Routes on CPUs, on devices, and through a communication hook on either. They are in routes/.
std::unique_ptr<Route> make_in_place_route(const RouteParts& model);
std::unique_ptr<Route> make_flat_route(const RouteParts& model);
std::unique_ptr<Route> make_comm_hook_route(const RouteParts& model, std::unique_ptr<c10d::CommHookInterface> hook);

// Averages sparse gradients: every rank's indices and values are gathered, and summed here in the order of ranks, or as
// a tree. A device's gradients are copied to the host and back, for which the host waits, on the current stream. Every
// rank must call it at the same place. Makes two all-gathers for all gradients together: the sizes, then the rest.
void average_sparse(const RouteParts& model, const BackwardBuckets& backward);

}  // namespace syncengine
