// What one synchronized forward says about the backward through it.
//
// Ownership: the hooks on its outputs, so it is destroyed with the graph: what a dropped forward has said has no
// effect.
#pragma once

#include <cstddef>
#include <vector>

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
};

}  // namespace syncengine
