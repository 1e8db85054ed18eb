// One synchronized backward of a model: from the first forward that it may come from until its averages are in .grad,
// or until it is given up. None of its state is left for the next one.
//
// The *vote*, the last bucket or an operation of its own, is announced when this rank's whole backward has run, and
// waited for first. A rank that can't go on refuses the step instead (Outcome::refuse), so the vote never runs, and all
// ranks lose the step. If the vote runs, every rank has announced everything.
//
// Ownership: the reducer's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// except for Route::finish(). Failure: throws what the communicator throws; StepRefused if a rank has refused the step.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "reducer/backward/model.h"
#include "reducer/torch/python_error.h"
#include "steps/bucket_plan.h"
#include "steps/forwards.h"

namespace syncengine {

class Backward {
 public:
  // `model` must outlive the backward.
  explicit Backward(Model& model) : model_(model) {}

  // --- Before it runs

  Forwards forwards;                 // that it may come from
  std::vector<TorchFuture> futures;  // that its end waits for

  // --- While it runs

  // Begins with the model's plan and route, and with what the forwards hand on, such as weights. Throws InvalidUsage if
  // two forwards have different weights, or if another backward has completed the step of micro-batches.
  void begin();
  bool has_begun() const { return begun_.has_value(); }

  // Takes a gradient, as a parameter's hook has fired. Returns whether that was the whole gradient: in a static graph
  // only the last firing is. Throws InvalidUsage if the gradient can't be averaged any more.
  bool bring(size_t index, const at::Tensor& incoming);
  // Collects substitutes for the gradients of unused parameters: .grad as it was, or zeros. Throws InvalidUsage if a
  // parameter that is in no bucket has a gradient from an earlier backward that was not synchronized.
  void collect_missing();
  // Collects all gradients, by index, at the end of the backward that observes a static graph. The order is not noted:
  // later backwards collect each gradient as soon as its hook has fired for the last time.
  void collect_observed();
  void collect_absent();  // substitutes for all gradients: this rank has no batch

  bool collected_all() const { return !begun_ || begun_->filling.all(); }
  // Does what the route can't do under the reducer's `mutex`. Called without the lock.
  void proceed(std::mutex& mutex) { model_.route->proceed(*begun_, mutex); }

  // --- Its end

  // Announces the vote, under the reducer's `mutex`, and waits for all buckets. Called without the lock, by one thread.
  // Returns the text about ranks that brought NaN or infinity, if that is asked for; empty if none did.
  std::string finish(std::mutex& mutex);

  // Puts the averages into .grad. If any parameter has user hooks, appends to `written` those whose .grad was written.
  void deliver(std::vector<size_t>& written);

  // Called when this rank has refused a step whose buckets the peers queue. Takes part in these operations.
  void stand_in() {
    if (begun_) model_.route->stand_in(*begun_);
  }
  // Called when the backward is given up, before the memory of its gradients is dropped.
  void drop() {
    if (!begun_) return;
    begun_->is_over = true;
    model_.route->drop(*begun_);
  }

 private:
  bool is_last_fire(size_t index, const at::Tensor& incoming, bool kept);
  void count_collected(size_t index);
  bool skips(const BucketLayout& layout) const;
  void check_skipped() const;
  const BucketPlan& plan() const { return *begun_->plan; }
  Gradient& gradient(size_t index) const { return model_.parameters.gradients()[index]; }
  const ModelNames& names() const { return *model_.parameters.names(); }
  const std::string& name(size_t index) const { return names().parameters[index]; }

  Model& model_;
  Forward told_{};  // told by the forwards that it comes from
  std::optional<BackwardBuckets> begun_;
  std::shared_ptr<Work> usage_work_;
};

}  // namespace syncengine
