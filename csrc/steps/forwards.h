// What synchronized forwards say about the backward through them.
//
// Ownership: a Forward is held by the hooks on its outputs, so it is destroyed with the graph, at any time: what a
// dropped one has said has no effect. Thread-safety: the reducer's lock, but for that. Failure: tell() throws
// Error(InvalidUsage).
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "steps/bucket_plan.h"
#include "steps/texts.h"

namespace syncengine {

// Which mean a backward makes: the sum of weight * gradient over all ranks, divided by `divisor`.
struct Weighting {
  double divisor;       // the same on all ranks
  double weight = 1.0;  // of this rank's gradients
  bool given = false;   // by the user, or by who takes part in join()
  bool operator==(const Weighting&) const = default;
};

struct Forward {
  Weighting weighting;
  bool has_shadows = false;                     // some rank has no batch
  std::vector<bool> reachable = {};             // by parameter, from its outputs; empty if nobody asks
  std::vector<const void*> outputs = {};        // the nodes of its outputs: to be compared only
  bool reached = false;                         // by a backward
  std::shared_ptr<const BucketPlan> plan = {};  // that it was made for
  std::string given_up = {};                    // why no backward through it averages any more
};

// Those that a backward may come from.
class Forwards {
 public:
  // Keeps `forward` itself if none of its outputs does.
  void expect(const std::shared_ptr<Forward>& forward) {
    std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
    forwards_.push_back(forward);
    if (forward->outputs.empty()) kept_ = forward;
  }

  // In the backward's first graph task: the plan to go by, the same on all ranks. The `current` one, unless parameters
  // were frozen or changed for a later forward than this backward comes from.
  template <class S>
  std::shared_ptr<const BucketPlan> plan(const std::shared_ptr<const BucketPlan>& current, S&& sees) const {
    auto plan = current;
    for (const auto& forward : alive()) {
      if (!forward->plan || forward->plan == plan) continue;
      if (plan->contains(*forward->plan, sees) || !sees.is_in_this_task(*forward)) continue;
      if (forward->plan->contains(*plan, sees)) plan = forward->plan;
    }
    return plan;
  }

  // No backward comes from them any more.
  void give_up(const std::string& reason) const {
    for (const auto& forward : alive()) forward->given_up = reason;
  }

  // In the backward's first graph task: adds to `all` what each says, and, if it `looks_for_unused`, what else the
  // backward reaches. Throws if two say different weights.
  template <class S>
  void tell(Forward& all, const ModelNames& names, bool looks_for_unused, S&& sees) const {
    auto told = alive();
    auto same = [&](const auto& forward) { return forward->weighting == told[0]->weighting; };
    if (told.size() > 1 && (looks_for_unused || !std::all_of(told.begin(), told.end(), same))) {
      // Forwards that were dropped, though something still holds their graph, are none of this backward's.
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
    if (looks_for_unused) sees.add_reached(all.reachable);  // or from a loss that is no output
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

}  // namespace syncengine
