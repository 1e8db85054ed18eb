// The graph tasks of autograd that take part in a model's backward. Reentrant checkpoints nest them, so there may be
// several, and each has a callback of the reducer's that runs at its end, or is destroyed with it. And of those that
// bring gradients without being expected: whether they have to do with the last forward.
//
// Thread-safety: none, but wait_for_all() releases the lock while it waits.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

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

  // A synchronized forward has, which began then, if that is known.
  void forward_ended(const NodeNumber& began) { began_ = began, ended_ = NodeNumber::now(); }
  // Whether the graph of the task on this thread is still to be looked at, as it is once.
  bool is_new() const { return judged_ != current(); }
  // Whether all of it was made after that forward. So is that of a reentrant checkpoint, whatever the graph around it.
  bool runs_later_graph() { return judge().all_later; }
  // The same, and by some node. Of a graph without any but leaves and the one that it starts from, which autograd does
  // not tell, nothing is known.
  bool runs_later_nodes() { return judge().all_later && judged_as_.has_nodes; }
  // Whether some of it was made during that forward, or on another thread.
  bool runs_forwards_nodes() { return judge().some_between; }

 private:
  struct Judgement {
    bool has_nodes = false, all_later = false, some_between = false;
  };

  const Judgement& judge() {
    if (!is_new()) return judged_as_;
    judged_ = current();
    judged_as_ = {};
    const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
    if (nodes == nullptr) return judged_as_;
    judged_as_.all_later = true;
    for (const auto* node : *nodes) {
      if (node->next_edges().empty()) continue;
      const bool is_later = ended_.is_before(*node);
      judged_as_.has_nodes = true;
      judged_as_.all_later &= is_later;
      judged_as_.some_between |= !is_later && !began_.is_after(*node);
    }
    return judged_as_;
  }

  int last_ = -1;       // the last one that is watched
  size_t watched_ = 0;  // that have not ended
  std::condition_variable all_ended_;
  NodeNumber began_, ended_;
  int judged_ = -1;      // the last one that was looked at
  Judgement judged_as_;  // what it was
};

}  // namespace syncengine
