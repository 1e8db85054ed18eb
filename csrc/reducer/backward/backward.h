// One synchronized backward of a model: from the first forward that it may come from until its averages are in .grad,
// or until it is given up. None of its state is left for the next one.
//
// The last bucket is the *vote*: it is announced when this rank's whole backward has run, and waited for first. A rank
// that can't go on refuses the step instead (Outcome::refuse), so the vote never runs, and all ranks lose the step. If
// the vote runs, every rank has announced everything.
//
// Ownership: the reducer's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// except for Route::finish(). Failure: throws what the communicator throws; StepRefused if a rank has refused the step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "reducer/backward/model.h"
#include "reducer/buckets/bucket.h"
#include "reducer/buckets/nonfinite.h"
#include "reducer/torch/python_objects.h"
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

  // Takes what the forwards that it comes from say, and uses the model's plan and route. Throws InvalidUsage if two
  // forwards say different weights, or if another backward has completed the step.
  void begin();
  bool has_begun() const { return filling_.has_value(); }

  // Takes a gradient, as a parameter's hook has fired. Returns whether that was the whole gradient: in a static graph
  // only the last firing is. Throws InvalidUsage if the gradient can't be averaged any more.
  bool bring(size_t index, const at::Tensor& incoming);
  // Collects substitutes for the gradients that are known not to come. Throws InvalidUsage if this rank has accumulated
  // a gradient that is in no bucket.
  void collect_missing();
  // Collects all gradients of a static graph that has been observed. Later backwards will bring them in another order,
  // so the order is not noted.
  void collect_observed();
  void collect_absent();  // substitutes for all gradients: this rank has no batch

  bool collected_all() const { return !filling_ || filling_->all(); }
  // The bucket that Filling::next_in_order() names, or null.
  Bucket* next_in_order() {
    const auto next = filling_->next_in_order();
    return next ? &buckets_[*next] : nullptr;
  }

  // --- Its end

  // Announces the vote, under the reducer's `mutex`, and waits for all buckets. Called without the lock, by one thread.
  void finish(std::mutex& mutex);

  // The text about ranks that brought NaN or infinity, if that is asked for. Known after finish(); empty if none did.
  const std::string& nonfinite() const { return nonfinite_; }

  // Puts the averages into .grad. Adds to `written` the parameters whose .grad was written, if users have hooks on any
  // parameter.
  void deliver(std::vector<size_t>& written);

  // Ends the backward when it is given up.
  void drop();
  bool is_over() const { return is_over_; }

  // --- For routes

  std::vector<Bucket>& buckets() { return buckets_; }
  Filling& filling() { return *filling_; }
  const Weighting& weighting() const { return told_.weighting; }
  uint64_t step() const { return model_.life.step(); }
  // The watch for NaN and infinity; null if nobody asks for it.
  const NonfiniteWatch* watch() const { return watch_ ? &*watch_ : nullptr; }
  // An operation without memory yet, which is added up in the order that this backward's sums have.
  Operation operation_of(const BucketLayout& layout) const;
  // Adds this rank's times of the last step to the vote's flags, which bring back all ranks' times.
  void add_stamp(const Bucket& bucket, std::vector<uint64_t>& flags) const;
  // Traces a bucket that is complete and becomes the operation at this place. Does nothing if this rank is not traced.
  void trace_bucket(const Bucket& bucket, const Work::Place& place) const;

 private:
  bool is_last_fire(size_t index, const at::Tensor& incoming, bool kept);
  void count_collected(size_t index);
  bool skips(const BucketLayout& layout) const;
  void check_skipped() const;
  void average_sparse_gradients();
  Gradient& gradient(size_t index) const { return model_.parameters.gradients()[index]; }
  const ModelNames& names() const { return *model_.parameters.names(); }
  const std::string& name(size_t index) const { return model_.parameters.name(index); }

  Model& model_;
  std::shared_ptr<const BucketPlan> plan_;
  Forward told_{};  // told by the forwards that it comes from
  std::optional<TreeStep> step_;
  bool asks_usage_ = false;
  std::vector<Bucket> buckets_;
  std::optional<Filling> filling_;
  std::shared_ptr<Work> usage_work_;
  std::optional<NonfiniteWatch> watch_;
  std::string nonfinite_;
  bool is_over_ = false;  // dropped, while another thread may still be in proceed()
};

}  // namespace syncengine
