// Which nodes of autograd's graph a backward runs, and which leaves are behind some outputs.
//
// Ownership: none; nodes are compared only. Thread-safety: none. Failure: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace syncengine {

// By AccumulateGrad node: the index of its parameter.
using Accumulators = std::unordered_map<const torch::autograd::Node*, size_t>;

// Whether the graph task on this thread runs `node`; of the one that it starts from, perhaps not.
bool is_in_this_task(const void* node);

// Marks the parameters behind these outputs in `reachable`. Returns all other leaves that are.
std::vector<at::Tensor> reach(const std::vector<at::Tensor>& outputs, const Accumulators& accumulators,
                              std::vector<bool>& reachable);

}  // namespace syncengine
