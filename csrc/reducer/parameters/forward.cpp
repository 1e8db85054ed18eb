#include "reducer/parameters/forward.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "steps/texts.h"

namespace syncengine {

using torch::autograd::Node;

namespace {

// Of the graph task on this thread: all but perhaps the one that it starts from.
bool is_in_this_task(const Node* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(const_cast<Node*>(node)) > 0;
}

bool is_in_this_task(const Forward& forward) {
  return forward.reached || std::any_of(forward.outputs.begin(), forward.outputs.end(),
                                        [](const Node* node) { return is_in_this_task(node); });
}

}  // namespace

std::vector<at::Tensor> Forward::reach(const std::vector<at::Tensor>& of_outputs, const Parameters& parameters) {
  const auto& accumulators = parameters.accumulators();
  reachable.assign(parameters.size(), false);
  std::vector<at::Tensor> others;
  std::unordered_set<const Node*> seen;
  std::vector<Node*> pending;  // a stack of our own: graphs are deeper than the thread's
  auto visit = [&](Node* node) {
    if (node != nullptr && seen.insert(node).second) pending.push_back(node);
  };
  for (const auto& output : of_outputs) {
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

void Forwards::expect(const std::shared_ptr<Forward>& forward) {
  std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
  forwards_.push_back(forward);
  if (forward->outputs.empty()) kept_ = forward;
}

std::shared_ptr<const BucketPlan> Forwards::plan(const std::shared_ptr<const BucketPlan>& current,
                                                 const Parameters& parameters) const {
  auto plan = current;
  for (const auto& weak : forwards_) {
    const auto forward = weak.lock();
    if (!forward || !forward->plan || forward->plan == plan) continue;
    if (plan->contains(*forward->plan, parameters) || !is_in_this_task(*forward)) continue;
    if (forward->plan->contains(*plan, parameters)) plan = forward->plan;
  }
  return plan;
}

void Forwards::give_up(const std::string& reason) const {
  for (const auto& weak : forwards_) {
    if (const auto forward = weak.lock()) forward->given_up = reason;
  }
}

void Forwards::tell(Forward& all, const Parameters& parameters, bool looks_for_unused) const {
  std::vector<std::shared_ptr<Forward>> alive;
  for (const auto& weak : forwards_) {
    if (auto forward = weak.lock()) alive.push_back(std::move(forward));
  }
  auto same = [&](const auto& forward) { return forward->weighting == alive[0]->weighting; };
  if (alive.size() > 1 && (looks_for_unused || !std::all_of(alive.begin(), alive.end(), same))) {
    // Those that were dropped, though something still holds their graph, are none of this backward's.
    const auto last = alive.back();
    std::erase_if(alive, [](const auto& forward) { return !is_in_this_task(*forward); });
    if (alive.empty()) alive.push_back(last);
  }
  if (looks_for_unused) all.reachable.assign(parameters.size(), false);
  for (const auto& forward : alive) {
    all.has_shadows |= forward->has_shadows;
    if (forward->weighting.given) {
      if (all.weighting.given && all.weighting != forward->weighting) {
        throw Error(ErrorKind::InvalidUsage, two_weights_text(*parameters.names()));
      }
      all.weighting = forward->weighting;
    }
    for (size_t i = 0; i < forward->reachable.size() && looks_for_unused; ++i) {
      if (forward->reachable[i]) all.reachable[i] = true;
    }
  }
  if (!looks_for_unused) return;
  // Or from a loss that is no output.
  for (const auto& [node, index] : parameters.accumulators()) {
    if (!all.reachable[index] && is_in_this_task(node)) all.reachable[index] = true;
  }
}

}  // namespace syncengine
