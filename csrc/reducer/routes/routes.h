// The route on CPUs: the engine reduces a bucket where autograd has left its gradients, or copies in another dtype.
// Small gradients are reduced as one block.
//
// If it is asked for, each bucket has flags that are reduced with it: a bit for each parameter that any rank has used.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "engine/communicator/communicator.h"
#include "reducer/backward/route.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/bucket.h"
#include "reducer/buckets/flat_buckets.h"
#include "reducer/buckets/nonfinite.h"
#include "reducer/gradients/gradient.h"
#include "reducer/parameters/pooled_gradients.h"
#include "reducer/torch/python_objects.h"

namespace syncengine {

class InPlaceRoute final : public Route {
 public:
  explicit InPlaceRoute(PooledGradients& pooled) : pooled_(pooled) {}

  void open(Backward& backward, Bucket& bucket) override;
  void ready(Backward& backward, Bucket& bucket) override;
  void finish(Backward& backward) override;
  void deliver(Backward& backward, Bucket& bucket) override;
  bool can_be_refused() const override { return true; }

 private:
  void add_spans(const Backward& backward, Bucket& bucket, SpanList& spans);
  static void follow_strides(const Backward& backward, const BucketLayout& layout, Operation& operation);
  void announce(Backward& backward, Bucket& bucket);

  PooledGradients& pooled_;
};

// The route on devices: buckets are copied to flat memory that all peers reach, reduced there on a separate stream, in
// one order on all ranks, and copied back at the end of backward.

class FlatRoute final : public Route {
 public:
  FlatRoute(FlatBuckets& flat, const Averaging& averaging, const std::vector<Gradient>& gradients)
      : flat_(flat), averaging_(averaging), gradients_(gradients) {}

  void install(const BucketPlan& plan) override;
  void ready(Backward& backward, Bucket& bucket) override;
  void finish(Backward& backward) override;

 private:
  void start(Backward& backward, Bucket& bucket);

  FlatBuckets& flat_;
  const Averaging& averaging_;
  const std::vector<Gradient>& gradients_;
};

// A user's communication hook (register_comm_hook), or one of torch's: it gets each bucket as a c10d::GradBucket, in
// flat memory that is kept from step to step, and returns a future of what the gradients become.
//
// On a device all of it, the hook included, runs on the stream that is current where start() and finish() are called,
// as under DDP; the caller has ordered that stream with those that touch the gradients.
//
// Ownership: holds the hook, the flat memory and the futures. The hook is called without the GIL and without the
// reducer's lock, since it may run any code. Failure: what the hook or its future raises, as Python's own exception,
// after the communicator has been aborted.

class CommHookRoute final : public Route {
 public:
  // `flat`: of the device where the gradients are; null on CPUs.
  CommHookRoute(std::unique_ptr<c10d::CommHookInterface> hook, FlatBuckets* flat)
      : hook_(std::move(hook)), flat_(flat) {}

  // Forgets the memory of the buckets before.
  void install(const BucketPlan& plan) override;
  void ready(Backward& /*backward*/, Bucket& /*bucket*/) override {}
  // In the order of buckets, which is the same on all ranks, since what hooks send is matched by its order.
  void proceed(Backward& backward, std::mutex& mutex) override;
  void finish(Backward& backward) override;
  bool takes_sparse() const override { return true; }
  // A hook's collectives may still write to its flat memory.
  void drop() override;

 private:
  struct Pending {
    at::Tensor flat;
    TorchFuture future;
  };

  void start(const BucketLayout& layout, std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& memory,
             const std::vector<Gradient>& gradients);
  at::Tensor wait(const BucketLayout& layout, const std::vector<at::Tensor>& memory,
                  const std::vector<Gradient>& gradients, Communicator& communicator, const NonfiniteWatch* watch);

  std::unique_ptr<c10d::CommHookInterface> hook_;
  FlatBuckets* flat_;
  std::vector<Pending> pending_;  // by bucket
  bool runs_ = false;             // the hook, on some thread
};

// Of the exception that is being handled, in a few words: "ValueError: ..."
std::string current_error_text();

}  // namespace syncengine
