// The graph tasks of autograd that take part in a model's backward. Reentrant checkpoints nest them, so there may be
// several, and each has a callback of the reducer's that runs at its end, or is destroyed with it. And of those that
// bring gradients without being expected: whether they have to do with the last forward.
//
// Thread-safety: none, but wait_for_all() releases the lock while it waits.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>

#include "reducer/node_numbers.h"

namespace syncengine {

class GraphTasks {
 public:
  static int current() { return torch::autograd::get_current_graph_task_id(); }
  static bool inside() { return current() != -1; }

  // Whether the task on this thread is not watched yet; from now on it is.
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
  // A device's thread of autograd may let go of a failed task after backward() has raised.
  void wait_for_all(std::unique_lock<std::mutex>& lock) {
    if (watched_ == 0 || inside()) return;
    all_ended_.wait_for(lock, std::chrono::seconds(1), [this] { return watched_ == 0; });
  }

  // A synchronized forward has.
  void forward_ended() { forward_ended_ = NodeNumber::now(); }
  // Whether runs_later_graph() has to look at the task on this thread, as it does once.
  bool is_new() const { return judged_ != current(); }
  // Whether all of the graph that it runs was made after that forward. So is that of a reentrant checkpoint, whatever
  // the graph around it.
  bool runs_later_graph() {
    if (!is_new()) return is_later_;
    judged_ = current();
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    return is_later_ = nodes != nullptr && std::all_of(nodes->begin(), nodes->end(), [this](const auto* node) {
                         return node->next_edges().empty() || forward_ended_.is_before(*node);
                       });
  }

 private:
  int last_ = -1;       // the last one that is watched
  size_t watched_ = 0;  // that have not ended
  std::condition_variable all_ended_;
  NodeNumber forward_ended_;
  int judged_ = -1;        // the last one that was looked at
  bool is_later_ = false;  // what it was
};

}  // namespace syncengine
