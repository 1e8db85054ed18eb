// By which route a model's gradients become averages: by the device where they lie, and at most one communication hook.
//
// Ownership: holds the route; the others are the model's. Thread-safety: the reducer's lock. Failure: throws
// Error(InvalidUsage) for a second hook, or one that can't work.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>

#include "reducer/backward/route.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/flat_buckets.h"
#include "reducer/parameters/current_plan.h"
#include "reducer/parameters/parameters.h"
#include "reducer/parameters/pooled_gradients.h"

namespace syncengine {

class Routing {
 public:
  // `flat`: null on CPUs.
  Routing(Averaging& averaging, const Parameters& parameters, const CurrentPlan& plan, PooledGradients& pooled,
          FlatBuckets* flat);

  // All buckets go through a hook; or travel in a smaller dtype; or as without, but scaled as torch's all-reduce hook
  // scales.
  void set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_compression(Compression compression);
  void set_all_reduce_hook();

  Route& route() { return *route_; }

 private:
  void check_no_hook() const;

  Averaging& averaging_;
  const Parameters& parameters_;
  const CurrentPlan& plan_;
  FlatBuckets* const flat_;
  std::unique_ptr<Route> route_;
  bool has_hook_ = false;
};

}  // namespace syncengine
