// What synchronized forwards say about the backward through them.
//
// Ownership: the hooks on a forward's outputs, so it is destroyed with the graph: what a dropped one has said has no
// effect. Thread-safety: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "reducer/parameters/parameters.h"
#include "steps/bucket_plan.h"

namespace torch::autograd {
struct Node;
}

namespace syncengine {

// Which mean a backward makes: the sum of weight * gradient over all ranks, divided by `divisor`.
struct Weighting {
  double divisor;       // the same on all ranks
  double weight = 1.0;  // of this rank's gradients
  bool given = false;   // by the user, or by who takes part in join()
  bool operator==(const Weighting&) const = default;
};

struct Forward {
  Weighting weighting;
  bool has_shadows = false;                                // some rank has no batch
  std::vector<bool> reachable = {};                        // by parameter, from its outputs; empty if nobody asks
  std::vector<const torch::autograd::Node*> outputs = {};  // the nodes of its outputs: to be compared only
  bool reached = false;                                    // by a backward
  std::shared_ptr<const BucketPlan> plan = {};             // that it was made for
  std::string given_up = {};                               // why no backward through it averages any more

  // Finds what is reachable from these outputs. Returns all other leaves that are.
  std::vector<at::Tensor> reach(const std::vector<at::Tensor>& of_outputs, const Parameters& parameters);
};

// Those that a backward may come from.
class Forwards {
 public:
  // Keeps `forward` itself if none of its outputs does.
  void expect(const std::shared_ptr<Forward>& forward);

  // In the backward's first graph task: the plan to go by, the same on all ranks. The `current` one, unless parameters
  // were frozen or changed for a later forward than this backward comes from.
  std::shared_ptr<const BucketPlan> plan(const std::shared_ptr<const BucketPlan>& current,
                                         const Parameters& parameters) const;
  // No backward comes from them any more.
  void give_up(const std::string& reason) const;
  // In the backward's first graph task: adds to `all` what each says, and, if it `looks_for_unused`, what else the
  // backward reaches. Throws InvalidUsage if two say different weights.
  void tell(Forward& all, const Parameters& parameters, bool looks_for_unused) const;

 private:
  std::vector<std::weak_ptr<Forward>> forwards_;
  std::shared_ptr<Forward> kept_;  // the last of them, if its outputs don't keep it
};

}  // namespace syncengine
