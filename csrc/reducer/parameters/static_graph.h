// A graph that is the same in every iteration: the first synchronized backward shows how often each parameter's hook
// fires (more than once under reentrant checkpoints), and the later ones count down. One in which a rank had no batch
// does not count as the first: the graph is observed on all ranks in the same backward.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncengine {

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

}  // namespace syncengine
