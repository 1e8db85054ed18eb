// The route on devices: buckets are copied to flat memory that all peers reach, reduced there on a separate stream, in
// one order on all ranks, and copied back at the end of backward.
#pragma once

#include "reducer/backward/route.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/flat_buckets.h"

namespace syncengine {

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

}  // namespace syncengine
