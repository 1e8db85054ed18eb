#include "reducer/unused.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace syncengine {

void mark_used(const std::vector<at::Tensor>& outputs, const AccumulatorIndex& accumulators, std::vector<bool>& used) {
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> pending;  // a stack of our own: graphs are deeper than the thread's
  auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) pending.push_back(node);
  };
  for (const auto& output : outputs) {
    if (output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!pending.empty()) {
    const auto* node = pending.back();
    pending.pop_back();
    if (auto found = accumulators.find(node); found != accumulators.end()) used[found->second] = true;
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
}

}  // namespace syncengine
