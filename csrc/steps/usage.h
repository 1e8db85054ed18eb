// Which parameters have had a gradient since the last synchronization, here and on any rank: for models in which some
// may be unused, in each backward or always. Under no_sync it goes on counting.
//
// Ownership: what is reduced is shared with its operation, which may outlive a backward that was given up.
// Thread-safety: none. Failure: none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>
namespace syncengine {

// A graph that is the same in every iteration: the first synchronized backward shows how often each parameter's hook
// fires (more than once under reentrant checkpoints), and the later ones count down. One in which a rank had no batch
// does not count as the first: the graph is observed on all ranks in the same backward.

class StaticGraph {
 public:
  explicit StaticGraph(size_t parameters) : fires_(parameters), left_(parameters) {}

  bool observed() const { return observed_; }
  void begin_observation() { fires_.assign(fires_.size(), 0); }
  void observe(size_t parameter) { ++fires_[parameter]; }
  void end_of_observation() { observed_ = true; }
  bool is_used(size_t parameter) const { return fires_[parameter] > 0; }

  void begin_backward() { left_ = fires_; }
  enum class Fire : uint8_t { NotYet, Last, Unexpected };
  Fire fire(size_t parameter) {
    if (left_[parameter] == 0) return Fire::Unexpected;
    return --left_[parameter] == 0 ? Fire::Last : Fire::NotYet;
  }

 private:
  bool observed_ = false;
  std::vector<uint32_t> fires_;  // by parameter: in one backward
  std::vector<uint32_t> left_;   // by parameter: in this backward
};

class Usage {
 public:
  Usage(size_t parameters, bool find_unused, bool static_graph)
      : find_unused_(find_unused), here_(parameters), anywhere_(std::make_shared<std::vector<uint8_t>>(parameters)) {
    if (static_graph) set_static_graph();
  }
  void set_static_graph() {
    if (!static_graph_) static_graph_.emplace(here_.size());
  }

  // Whether each forward looks for unused parameters; whether some may be unused; whether the coming backward, or this
  // one, shows which are.
  bool finds_unused() const { return find_unused_ && !static_graph_; }
  bool tracks() const { return find_unused_ || static_graph_; }
  bool observes() const { return static_graph_ && !static_graph_->observed(); }
  // Null if the graph may change.
  StaticGraph* static_graph() { return static_graph_ ? &*static_graph_ : nullptr; }
  bool is_static() const { return static_graph_.has_value(); }

  void note(size_t parameter) { here_[parameter] = true; }
  void clear() { here_.assign(here_.size(), false); }

  bool here(size_t parameter) const { return here_[parameter]; }
  bool anywhere(size_t parameter) const { return (*anywhere_)[parameter] != 0; }
  // To be reduced by its maximum.
  std::shared_ptr<std::vector<uint8_t>> share() {
    anywhere_ = std::make_shared<std::vector<uint8_t>>(here_.begin(), here_.end());
    return anywhere_;
  }

 private:
  const bool find_unused_;
  std::optional<StaticGraph> static_graph_;
  std::vector<bool> here_;
  std::shared_ptr<std::vector<uint8_t>> anywhere_;
};

}  // namespace syncengine
