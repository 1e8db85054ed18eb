// How the gradients of a bucket become averages, once all of them are there: reduced in place, through flat memory of a
// device, or by a communication hook. All buckets of a model have one route, except that sparse gradients, unless a
// hook takes them, are gathered together at the end of backward (sparse.h).
//
// Ownership: the model's; what a route keeps over backwards (flat memory) is its own. Thread-safety: all calls but
// finish() and proceed() under the reducer's lock; these two without it, by one thread at a time, since they may block
// or run anybody's code. Failure: throws the communicator's error, or the hook's.
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

  // The model has another plan, or this route.
  virtual void install() {}
  // A bucket's first gradient of this backward comes.
  virtual void open(Bucket& /*bucket*/) {}
  // All its gradients are there. Of sparse ones it only learns that their turn has come.
  virtual void ready(Backward& backward, Bucket& bucket) = 0;
  // What can't be done in ready(), under the lock; `mutex` is the reducer's.
  virtual void proceed(Backward& /*backward*/, std::mutex& /*mutex*/) {}
  // Waits until the averages of all its buckets are there.
  virtual void finish(Backward& backward) = 0;
  // Puts them where Gradient::deliver() takes them.
  virtual void deliver(Backward& /*backward*/, Bucket& /*bucket*/) {}

  virtual bool takes_sparse() const { return false; }
  // Whether its buckets are announced, each by itself: then a rank can refuse a step, and the peers go on.
  virtual bool can_be_refused() const { return false; }
  // What has not ended is not used again: the communicator has failed.
  virtual void drop() {}

 protected:
  Model& model_;
};

// On CPUs; on devices; and through a communication hook, on either. They are in routes/.
std::unique_ptr<Route> make_in_place_route(Model& model);
std::unique_ptr<Route> make_flat_route(Model& model);
std::unique_ptr<Route> make_comm_hook_route(Model& model, std::unique_ptr<c10d::CommHookInterface> hook);

}  // namespace syncengine
