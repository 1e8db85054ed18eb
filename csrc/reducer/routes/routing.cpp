#include "reducer/backward/routing.h"

#include <utility>

#include "base/error.h"
#include "reducer/routes/comm_hook_route.h"
#include "reducer/routes/flat_route.h"
#include "reducer/routes/in_place_route.h"

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

}  // namespace syncengine
