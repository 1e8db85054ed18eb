#include <c10/core/StreamGuard.h>

#include <exception>

#include "reducer/backward/route.h"

namespace syncengine {

namespace {

// Copies buckets to flat memory that all peers reach, reduces them there on a separate stream, in one order on all
// ranks, and copies them back at the end of backward.
class FlatRoute final : public Route {
 public:
  using Route::Route;

  void install(const BucketPlan& plan) override {
    model_.flat->lay_out(plan, model_.gradients, model_.averaging.travels_as);
  }

  // Sparse buckets wait for the end of backward.
  void ready(BackwardBuckets& backward, Bucket& /*bucket*/) override {
    while (Bucket* next = backward.next_in_order()) {
      if (backward.filling.is_ready(next->layout->index) && !next->layout->sparse) start(backward, *next);
    }
  }

  void finish(BackwardBuckets& backward) override {
    model_.flat->finish(backward.buckets, backward.filling, model_.gradients);
  }

  // A CUDA graph has no vote. If queueing a bucket has failed, nobody knows what the peers' streams still wait for.
  bool can_be_refused() const override { return !starting_ && !model_.flat->is_captured(); }

  // Queues the missing buckets, as the peers' streams wait for them. They may hold any values: nobody delivers them.
  void stand_in(BackwardBuckets& backward) override {
    for (Bucket& bucket : backward.buckets)
      if (!backward.filling.has_gone(bucket.layout->index) && !bucket.layout->sparse)
        model_.flat->all_reduce(operation_of(backward, bucket));
  }

  void drop(BackwardBuckets& backward) override {
    try {
      model_.flat->drop(backward.buckets, backward.filling, model_.gradients);
    } catch (const std::exception&) {
      // The device has failed, and so will whatever uses it next.
    }
  }

 private:
  Operation operation_of(BackwardBuckets& backward, Bucket& bucket) const {
    const Averaging& averaging = model_.averaging;
    Operation operation = averaging.operation_of(bucket.layout, backward.tree);
    operation.layout_hash =
        operation.layout_hash * 31 + averaging.slots->first();  // of this model: another may look the same
    operation.output = operation.input = model_.flat->span(bucket.layout->index);
    if (backward.watch) operation.nonfinite = backward.watch->of(*bucket.layout);
    if (scales_at_the_end(backward.divisor)) operation.postscale = 1.0 / backward.divisor;
    return operation;
  }

  // Whether the operation scales the sum. Otherwise contributions are scaled in flat memory before peers read them.
  bool scales_at_the_end(double divisor) const {
    return !model_.averaging.scales_first && model_.averaging.scales_all_alike(divisor);
  }

  void start(BackwardBuckets& backward, Bucket& bucket) {
    const Averaging& averaging = model_.averaging;
    FlatBuckets& flat = *model_.flat;
    Record& record = model_.record;
    const size_t index = bucket.layout->index;
    const double divisor = backward.divisor;
    flat.fill(bucket, model_.gradients);
    if (!scales_at_the_end(divisor)) {
      const c10::StreamGuard on(flat.stream());
      averaging.scale_one_by_one(*bucket.layout, model_.gradients, flat.views(index), divisor);
    }
    Operation operation = operation_of(backward, bucket);
    record.statistics.reduced_bytes += operation.output.bytes();
    record.statistics.count_copy(averaging.travels_as ? CopyReason::Compression : CopyReason::Bucket,
                                 operation.output.bytes());
    record.bucket();
    trace_bucket(bucket);
    starting_ = true;
    flat.all_reduce(std::move(operation));
    starting_ = false;
    backward.filling.went(index);
  }

  bool starting_ = false;  // an all-reduce is being queued, or has failed while it was
};

}  // namespace

std::unique_ptr<Route> make_flat_route(const RouteParts& model) { return std::make_unique<FlatRoute>(model); }

}  // namespace syncengine
