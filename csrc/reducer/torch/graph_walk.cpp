#include "reducer/torch/graph_tasks.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace syncengine {

using torch::autograd::Node;

bool is_in_this_task(const void* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(static_cast<Node*>(const_cast<void*>(node))) > 0;
}

std::vector<at::Tensor> reach(const std::vector<at::Tensor>& outputs, const Accumulators& accumulators,
                              std::vector<bool>& reachable) {
  std::vector<at::Tensor> others;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> pending;  // an explicit stack, since graphs are deeper than the thread's stack
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
      reachable[found->second] = true;
    } else if (auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      others.push_back(leaf->variable);
    }
  }
  return others;
}

bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

bool task_accumulates(const Node* node) {
  if (whole_graph_runs()) return true;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto found = chosen->find(const_cast<Node*>(node));
  return found != chosen->end() && found->second.needed_;
}

bool has_expected_layout(const at::Tensor& grad, const at::Tensor& parameter) {
  return torch::autograd::utils::obeys_layout_contract(grad, parameter);
}

}  // namespace syncengine
