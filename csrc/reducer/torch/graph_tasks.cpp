
#include "reducer/torch/graph_tasks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace syncengine {

using torch::autograd::Node;

std::vector<Node*> mark_used(const std::vector<at::Tensor>& outputs, const AccumulatorIndex& accumulators,
                             std::vector<bool>& used) {
  std::vector<Node*> others;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> pending;  // a stack of our own: graphs are deeper than the thread's
  auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) pending.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!pending.empty()) {
    Node* node = pending.back();
    pending.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
    if (!node->next_edges().empty()) continue;
    if (auto found = accumulators.find(node); found != accumulators.end()) {
      used[found->second] = true;
    } else {
      others.push_back(node);
    }
  }
  return others;
}

std::vector<at::Tensor> leaves_of(const std::vector<Node*>& accumulators) {
  std::vector<at::Tensor> leaves;
  for (Node* node : accumulators) {
    if (auto* accumulator = dynamic_cast<torch::autograd::AccumulateGrad*>(node))
      leaves.push_back(accumulator->variable);
  }
  return leaves;
}

}  // namespace syncengine
