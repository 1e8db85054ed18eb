// The way in which the gradients of a bucket become averages, once all of them are there: reduced in place, through
// flat memory of a device, or by a communication hook. All buckets of a model have one route, except that sparse
// gradients, unless a hook takes them, are gathered together at the end of backward (sparse.h).
//
// Ownership: the model's; memory that a route keeps over backwards is its own. Thread-safety: all calls but finish()
// and proceed() under the reducer's lock; these two without it, by one thread at a time, since they may block or run
// anybody's code. Failure: throws the communicator's error, or the hook's.
#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "reducer/buckets/bucket.h"

namespace syncengine {

class Backward;
struct Model;

class Route {
 public:
  explicit Route(Model& model) : model_(model) {}
  virtual ~Route() = default;

  // Called when the model has got another plan, or this route.
  virtual void install() {}
  // Called when a bucket's first gradient of this backward comes.
  virtual void open(Bucket& /*bucket*/) {}
  // Called when a bucket has all its gradients; for a sparse bucket only to say that its turn has come.
  virtual void ready(Backward& backward, Bucket& bucket) = 0;
  // Does what can't be done in ready(), under the lock; `mutex` is the reducer's.
  virtual void proceed(Backward& /*backward*/, std::mutex& /*mutex*/) {}
  // Waits until the averages of all the route's buckets are there.
  virtual void finish(Backward& backward) = 0;
  // Puts a bucket's averages where Gradient::deliver() takes them.
  virtual void deliver(Backward& /*backward*/, Bucket& /*bucket*/) {}

  virtual bool takes_sparse() const { return false; }
  // Whether buckets are announced, each by itself: then a rank can refuse a step, and the peers go on.
  virtual bool can_be_refused() const { return false; }
  // Called when a backward is given up. Memory in use is abandoned, since the communicator has failed.
  virtual void drop() {}

 protected:
  Model& model_;
};

// Routes on CPUs, on devices, and through a communication hook on either. They are in routes/.
std::unique_ptr<Route> make_in_place_route(Model& model);
std::unique_ptr<Route> make_flat_route(Model& model);
std::unique_ptr<Route> make_comm_hook_route(Model& model, std::unique_ptr<c10d::CommHookInterface> hook);

}  // namespace syncengine
