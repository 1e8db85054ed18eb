#include "reducer/routes/flat_route.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "reducer/backward/backward.h"

namespace syncengine {

void FlatRoute::install(const BucketPlan& plan) {
  flat_.lay_out(plan, gradients_,
                averaging_.compression ? std::optional(averaging_.compression->type()) : std::nullopt);
}

// Sparse ones wait for backward's end.
void FlatRoute::ready(Backward& backward, Bucket& /*bucket*/) {
  while (Bucket* next = backward.next_in_order()) {
    if (next->state == Bucket::State::Ready && !next->layout->sparse) start(backward, *next);
  }
}

void FlatRoute::start(Backward& backward, Bucket& bucket) {
  Record& record = backward.model().record;
  const size_t index = bucket.layout->index;
  const double divisor = backward.weighting().divisor;
  flat_.fill(bucket, gradients_);
  Operation operation = averaging_.operation_of(*bucket.layout);
  operation.layout_hash =
      operation.layout_hash * 31 + averaging_.slots->first();  // of this model: another may look the same
  operation.output = operation.input = flat_.span(index);
  // As in place; but what is scaled beforehand is scaled where it lies, so that the peers may read it there.
  if (!averaging_.scales_first() && averaging_.scales_all_alike(divisor)) {
    operation.postscale = 1.0 / divisor;
  } else {
    const c10::StreamGuard on(flat_.stream());
    averaging_.scale_one_by_one(*bucket.layout, gradients_, flat_.views(index), divisor);
  }
  record.statistics.reduced_bytes += operation.output.bytes();
  record.statistics.count_copy(averaging_.compression ? CopyReason::Compression : CopyReason::Bucket,
                               operation.output.bytes());
  record.timeline.bucket();
  flat_.all_reduce(std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

void FlatRoute::finish(Backward& backward) { flat_.finish(backward.buckets(), gradients_); }

}  // namespace syncengine
