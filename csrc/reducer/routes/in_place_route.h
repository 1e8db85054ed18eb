// The route on CPUs: the engine reduces a bucket where autograd has left its gradients, or copies in another dtype.
// Small gradients are reduced as one block.
//
// Each bucket has flags that are reduced with it: a bit for each parameter that any rank has used, if that is asked
// for, and masks of ranks, see Masks.
#pragma once

#include "reducer/backward/route.h"
#include "reducer/parameters/pooled_gradients.h"

namespace syncengine {

class InPlaceRoute final : public Route {
 public:
  explicit InPlaceRoute(PooledGradients& pooled) : pooled_(pooled) {}

  void open(Backward& backward, Bucket& bucket) override;
  void ready(Backward& backward, Bucket& bucket) override;
  void finish(Backward& backward) override;
  void deliver(Backward& backward, Bucket& bucket) override;
  bool outlives_errors() const override { return true; }
  void stand_in(Backward& backward, Bucket& bucket) override;

 private:
  void add_spans(const Backward& backward, Bucket& bucket, SpanList& spans);
  static void follow_strides(const Backward& backward, const BucketLayout& layout, Operation& operation);
  void announce(Backward& backward, Bucket& bucket);

  PooledGradients& pooled_;
};

}  // namespace syncengine
