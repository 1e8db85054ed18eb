// Which parameters a forward has used: those whose AccumulateGrad node can be reached from its outputs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace syncengine {

// The node of a parameter, to the parameter's index.
using AccumulatorIndex = std::unordered_map<const torch::autograd::Node*, size_t>;

// Sets used[i] = true for each parameter i that a backward from `outputs` will reach; leaves the others as they are.
// Returns the accumulators of all other leaves that it will reach, which live as long as the outputs.
std::vector<torch::autograd::Node*> mark_used(const std::vector<at::Tensor>& outputs,
                                              const AccumulatorIndex& accumulators, std::vector<bool>& used);

// The leaves of such accumulators.
std::vector<at::Tensor> leaves_of(const std::vector<torch::autograd::Node*>& accumulators);

}  // namespace syncengine
