
#include "reducer/routes/routes.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/backward/routing.h"

namespace syncengine {

Routing::Routing(Averaging& averaging, const Parameters& parameters, const CurrentPlan& plan, PooledGradients& pooled,
                 FlatBuckets* flat)
    : averaging_(averaging), parameters_(parameters), plan_(plan), flat_(flat) {
  if (flat) {
    route_ = std::make_unique<FlatRoute>(*flat, averaging, parameters.gradients());
  } else {
    route_ = std::make_unique<InPlaceRoute>(pooled);
  }
}

void Routing::set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  check_no_hook();
  route_ = std::make_unique<CommHookRoute>(std::move(hook), flat_);
  if (plan_) route_->install(*plan_);
  has_hook_ = true;
}

void Routing::set_compression(Compression compression) {
  check_no_hook();
  for (size_t i = 0; i < parameters_.size(); ++i) compression.check(parameters_.tensor(i), parameters_.name(i));
  averaging_.compression = compression;
  if (plan_) route_->install(*plan_);
  // torch's own hooks divide; see Scaling.
  if (compression.divides() == Compression::Divides::First) averaging_.scale_as({.batched_grad_copy = true});
  has_hook_ = true;
}

void Routing::set_all_reduce_hook() {
  check_no_hook();
  averaging_.scale_as({.batched_grad_copy = true});
  has_hook_ = true;
}

void Routing::check_no_hook() const {
  if (!has_hook_) return;
  throw Error(ErrorKind::InvalidUsage, "register_comm_hook or register_builtin_comm_hook can only be called once.");
}

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
  Operation operation = backward.operation_of(*bucket.layout);
  operation.layout_hash =
      operation.layout_hash * 31 + averaging_.slots->first();  // of this model: another may look the same
  operation.output = operation.input = flat_.span(index);
  if (const auto* watch = backward.watch()) operation.nonfinite = watch->of(*bucket.layout);
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
  record.bucket();
  backward.trace_bucket(bucket, {});
  flat_.all_reduce(std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

void FlatRoute::finish(Backward& backward) { flat_.finish(backward.buckets(), gradients_); }

}  // namespace syncengine
