// Autograd's graph tasks that take part in a model's backward. Reentrant checkpoints nest them, so there may be
// several, and each has a callback of the reducer's that runs at its end, or is destroyed with it. If a task brings
// gradients unexpectedly, this class tells whether it has to do with one of the last forwards.
//
// Thread-safety: none, but wait_for_all() releases the lock while it waits.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace syncengine {

// A moment on one thread. Autograd numbers the nodes that a thread makes, so the next number tells whether one of that
// thread's nodes was made before or after.
struct NodeNumber {
  uint64_t next = 0, thread = 0;

  static NodeNumber now() { return {at::sequence_number::peek(), at::RecordFunction::currentThreadId()}; }
  bool is_after(const torch::autograd::Node& node) const {
    return node.thread_id() == thread && node.sequence_nr() < next;
  }
  bool is_before(const torch::autograd::Node& node) const {
    return node.thread_id() == thread && node.sequence_nr() >= next;
  }
};

class GraphTasks {
 public:
  static int current() { return torch::autograd::get_current_graph_task_id(); }
  static bool inside() { return current() != -1; }

  // Begins to watch the task on this thread; returns false if it is watched already.
  bool watch() {
    const int task = current();
    if (std::exchange(last_, task) == task) return false;
    ++watched_;
    return true;
  }
  void ended() {
    --watched_;
    all_ended_.notify_all();
  }
  bool any() const { return watched_ > 0; }
  // Waits for failed tasks, too: a device's thread of autograd may drop one after backward() has raised.
  void wait_for_all(std::unique_lock<std::mutex>& lock) {
    if (watched_ == 0 || inside()) return;
    all_ended_.wait_for(lock, std::chrono::seconds(1), [this] { return watched_ == 0; });
  }

  // Notes that a synchronized forward has ended. `began`: when it began, if that is known.
  void forward_ended(const NodeNumber& began) {
    if (forwards_.size() == kForwards) forwards_.pop_front();
    forwards_.push_back({began, NodeNumber::now()});
  }
  // Whether runs_forwards_nodes() has not judged the task on this thread yet, as it does once for each.
  bool is_new() const { return judged_ != current(); }
  // Whether one of the last forwards made a node of this thread's task, or the node that runs now: a task's first node
  // is known only while it runs. False for a reentrant checkpoint's inner task, whose nodes backward has made.
  bool runs_forwards_nodes() {
    if (!is_new()) return forwards_nodes_;
    judged_ = current();
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    const auto running = torch::autograd::get_current_node();
    forwards_nodes_ = (running && made_it(*running)) ||
                      (nodes && std::any_of(nodes->begin(), nodes->end(), [&](auto* node) { return made_it(*node); }));
    return forwards_nodes_;
  }
  // Whether no task is around the one that ends on this thread, or one that has nothing to do with the last forwards.
  bool is_outermost() const {
    const auto around = torch::autograd::get_current_node();
    return !around || !(forwards_.back().ended.is_before(*around) || made_it(*around));
  }

 private:
  static constexpr size_t kForwards = 64;  // forwards that are remembered
  struct ForwardSpan {
    NodeNumber began, ended;
  };

  // Whether one of the last forwards may have made the node. Leaves do not count: they are older, or may be of any
  // graph. A node of another thread than the forward's counts, unless it is of this thread, which runs the backward.
  bool made_it(const torch::autograd::Node& node) const {
    if (node.next_edges().empty()) return false;
    const uint64_t here = NodeNumber::now().thread;
    return std::any_of(forwards_.begin(), forwards_.end(), [&](const ForwardSpan& forward) {
      if (node.thread_id() != forward.ended.thread) return node.thread_id() != here;
      return !forward.began.is_after(node) && !forward.ended.is_before(node);
    });
  }

  int last_ = -1;       // the last task that is watched
  size_t watched_ = 0;  // watched tasks that have not ended
  std::condition_variable all_ended_;
  std::deque<ForwardSpan> forwards_;
  int judged_ = -1;  // the last task that was judged
  bool forwards_nodes_ = false;
};

// By AccumulateGrad node: the index of its parameter.
using Accumulators = std::unordered_map<const torch::autograd::Node*, size_t>;

// Whether the graph task on this thread runs `node`. May be false for the node from which the task starts.
inline bool is_in_this_task(const void* node) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->count(static_cast<torch::autograd::Node*>(const_cast<void*>(node))) > 0;
}

// Marks, in `reachable`, the parameters in the graph of these outputs. Returns the graph's other leaves.
inline std::vector<at::Tensor> reach(const std::vector<at::Tensor>& outputs, const Accumulators& accumulators,
                                     std::vector<bool>& reachable) {
  using torch::autograd::Node;
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

// Whether the task on this thread accumulates into every leaf: that of backward() without `inputs`, but not those of
// autograd.grad() and backward(inputs=...).
inline bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}
// Whether the task on this thread adds to .grad the gradients that reach any of these AccumulateGrad nodes.
inline bool task_accumulates(const Accumulators& nodes) {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return whole_graph_runs() || std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
           const auto found = chosen->find(const_cast<torch::autograd::Node*>(node.first));
           return found != chosen->end() && found->second.needed_;
         });
}

// Whether the strides of `grad` are those that autograd gives a new gradient of `parameter`.
inline bool has_expected_layout(const at::Tensor& grad, const at::Tensor& parameter) {
  return torch::autograd::utils::obeys_layout_contract(grad, parameter);
}

}  // namespace syncengine
