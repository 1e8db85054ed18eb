#include <c10/core/StreamGuard.h>

#include <memory>
#include <utility>

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

 private:
  void start(BackwardBuckets& backward, Bucket& bucket) {
    const Averaging& averaging = model_.averaging;
    FlatBuckets& flat = *model_.flat;
    Record& record = model_.record;
    const size_t index = bucket.layout->index;
    const double divisor = backward.divisor;
    flat.fill(bucket, model_.gradients);
    Operation operation = averaging.operation_of(*bucket.layout, backward.tree);
    operation.layout_hash =
        operation.layout_hash * 31 + averaging.slots->first();  // of this model: another may look the same
    operation.output = operation.input = flat.span(index);
    if (backward.watch) operation.nonfinite = backward.watch->of(*bucket.layout);
    // Scaled as in place, except that contributions that are scaled first are scaled in flat memory, where peers read
    // them.
    if (!averaging.scales_first && averaging.scales_all_alike(divisor)) {
      operation.postscale = 1.0 / divisor;
    } else {
      const c10::StreamGuard on(flat.stream());
      averaging.scale_one_by_one(*bucket.layout, model_.gradients, flat.views(index), divisor);
    }
    record.statistics.reduced_bytes += operation.output.bytes();
    record.statistics.count_copy(averaging.travels_as ? CopyReason::Compression : CopyReason::Bucket,
                                 operation.output.bytes());
    record.bucket();
    trace_bucket(bucket, {});
    flat.all_reduce(std::move(operation));
    backward.filling.went(index);
  }
};

}  // namespace

std::unique_ptr<Route> make_flat_route(const RouteParts& model) { return std::make_unique<FlatRoute>(model); }

}  // namespace syncengine
