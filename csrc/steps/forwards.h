// Facts that synchronized forwards hand on to the backward through them: weights, the plan, and the parameters in use.
//
// Ownership: the hooks on a forward's outputs hold its Forward, so that is destroyed with the graph, at any time. A
// later backward does not hear of it any more. Thread-safety: the reducer's lock, but for that destruction. Failure:
// tell() throws Error(InvalidUsage).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "steps/bucket_plan.h"
#include "steps/texts.h"

namespace syncengine {

// The mean that a backward makes: the sum of weight * gradient over all ranks, divided by `divisor`.
struct Weighting {
  double divisor;       // the same on all ranks
  double weight = 1.0;  // of this rank's gradients
  bool given = false;   // by the user, or by who takes part in join()
  bool operator==(const Weighting&) const = default;
};

struct Forward {
  Weighting weighting;
  bool has_shadows = false;                     // some rank has no batch
  std::vector<bool> reachable = {};             // by parameter: from its outputs; empty if not looked for
  std::vector<const void*> outputs = {};        // the nodes of its outputs: to be compared only
  bool reached = false;                         // by a backward
  std::shared_ptr<const BucketPlan> plan = {};  // the model's plan when this forward ended
  std::string given_up = {};                    // why no backward through it averages any more
};

// The forwards that a backward may come from.
class Forwards {
 public:
  // Adds `forward` to those that a backward may come from. Holds it here if no hook on an output does.
  void expect(const std::shared_ptr<Forward>& forward) {
    std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
    forwards_.push_back(forward);
    if (forward->outputs.empty()) kept_ = forward;
  }

  // Returns the plan for a backward, the same on all ranks. Called in the backward's first graph task. The plan is the
  // `current` one, or that of the forward from which the backward comes, if parameters were frozen or changed since.
  std::shared_ptr<const BucketPlan> plan(const std::shared_ptr<const BucketPlan>& current, auto&& sees) const {
    auto plan = current;
    for (const auto& forward : alive()) {
      if (!forward->plan || forward->plan == plan) continue;
      if (plan->contains(*forward->plan, sees) || !sees.is_in_this_task(*forward)) continue;
      if (forward->plan->contains(*plan, sees)) plan = forward->plan;
    }
    return plan;
  }

  // Notes that no backward of these forwards will average any more.
  void give_up(const std::string& reason) const {
    for (const auto& forward : alive()) forward->given_up = reason;
  }

  // Merges what each forward says into `all`. With `looks_for_unused`, also marks parameters that the backward reaches
  // without an output. Called in its first graph task. Throws InvalidUsage if two forwards say different weights.
  void tell(Forward& all, const ModelNames& names, bool looks_for_unused, auto&& sees) const {
    auto told = alive();
    auto same = [&](const auto& forward) { return forward->weighting == told[0]->weighting; };
    if (told.size() > 1 && (looks_for_unused || !std::all_of(told.begin(), told.end(), same))) {
      // Leaves out forwards that are not in this task: they were dropped, though something still holds their graphs.
      const auto last = told.back();
      std::erase_if(told, [&](const auto& forward) { return !sees.is_in_this_task(*forward); });
      if (told.empty()) told.push_back(last);
    }
    if (looks_for_unused) all.reachable.assign(names.parameters.size(), false);
    for (const auto& forward : told) {
      all.has_shadows |= forward->has_shadows;
      if (forward->weighting.given) {
        if (all.weighting.given && all.weighting != forward->weighting)
          throw Error(ErrorKind::InvalidUsage, two_weights_text(names));
        all.weighting = forward->weighting;
      }
      for (size_t i = 0; i < forward->reachable.size() && looks_for_unused; ++i)
        if (forward->reachable[i]) all.reachable[i] = true;
    }
    if (looks_for_unused) sees.add_reached(all.reachable);  // say, from a loss that is no output
  }

 private:
  std::vector<std::shared_ptr<Forward>> alive() const {
    std::vector<std::shared_ptr<Forward>> alive;
    for (const auto& weak : forwards_)
      if (auto forward = weak.lock()) alive.push_back(std::move(forward));
    return alive;
  }

  std::vector<std::weak_ptr<Forward>> forwards_;
  std::shared_ptr<Forward> kept_;  // the last of them, if its outputs don't keep it
};

// A graph that is the same in every iteration. The first synchronized backward counts how often each parameter's hook
// fires (more than once under reentrant checkpoints), so later ones know the last firing. A backward in which a rank
// had no batch does not count as the first, so that the graph is observed on all ranks in the same backward.
//
// Ownership: the Usage's. Thread-safety: the reducer's lock. Failure: none.
class StaticGraph {
 public:
  explicit StaticGraph(size_t parameters) : fires_(parameters), left_(parameters) {}

  bool observed() const { return observed_; }
  void begin_observation() { fires_.assign(fires_.size(), 0); }
  void end_of_observation() { observed_ = true; }
  bool is_used(size_t parameter) const { return fires_[parameter] > 0; }

  void begin_backward() { left_ = fires_; }
  enum class Fire : uint8_t { NotYet, Last, Unexpected };
  // Counts a firing of the parameter's hook. While the graph is observed, none is known to be the last.
  Fire fire(size_t parameter) {
    if (!observed_) {
      ++fires_[parameter];
      return Fire::NotYet;
    }
    if (left_[parameter] == 0) return Fire::Unexpected;
    return --left_[parameter] == 0 ? Fire::Last : Fire::NotYet;
  }

 private:
  bool observed_ = false;
  std::vector<uint32_t> fires_;  // by parameter: in one backward
  std::vector<uint32_t> left_;   // by parameter: in this backward
};

// The parameters that have had a gradient since the last synchronization, here and on any rank: for models in which
// some may be unused, in each backward or always. Backwards under no_sync count, too.
//
// Ownership: the model's; flags that are reduced are shared with their operation, which may outlive a backward that was
// given up. Thread-safety: the reducer's lock. Failure: none.
class Usage {
 public:
  Usage(size_t parameters, bool find_unused, bool static_graph)
      : find_unused_(find_unused), here_(parameters), anywhere_(std::make_shared<std::vector<uint8_t>>(parameters)) {
    if (static_graph) set_static_graph();
  }
  void set_static_graph() {
    if (!static_graph_) static_graph_.emplace(here_.size());
  }

  // finds_unused(): each forward looks for unused parameters. tracks(): some may be unused. observes(): the coming or
  // present backward shows which are.
  bool finds_unused() const { return find_unused_ && !static_graph_; }
  bool tracks() const { return find_unused_ || static_graph_; }
  bool observes() const { return static_graph_ && !static_graph_->observed(); }
  // The static graph of this model; null if its graph may change between iterations.
  StaticGraph* static_graph() { return static_graph_ ? &*static_graph_ : nullptr; }

  void note(size_t parameter) { here_[parameter] = true; }
  void forget(size_t parameter) { here_[parameter] = false; }
  void clear() { here_.assign(here_.size(), false); }

  bool here(size_t parameter) const { return here_[parameter]; }
  bool anywhere(size_t parameter) const { return (*anywhere_)[parameter] != 0; }
  // Returns this rank's flags. The caller reduces them in place, by the maximum over all ranks, for anywhere() to read.
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
