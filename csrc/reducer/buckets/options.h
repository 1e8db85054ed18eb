// What a reducer is asked for, once.
#pragma once

namespace syncengine {

struct ReducerOptions {
  bool find_unused_parameters = false;         // look for them at each forward
  bool static_graph = false;                   // look for them once, and count how often each hook fires
  bool skip_all_reduce_unused_params = false;  // buckets of nothing but unused parameters are not reduced
  bool gradient_as_bucket_view = false;        // these two: only for how DDP rounds, see Scaling
  bool batched_grad_copy = false;
  bool waits_in_between = false;   // ranks wait for each other in forward or backward, too (SyncBatchNorm)
  bool gradients_in_arena = true;  // as far as the communicator has room for them
  bool flat_buckets = false;       // on CPUs, too, as on devices: for tests, in a build with test hooks
};

}  // namespace syncengine
