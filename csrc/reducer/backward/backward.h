// One synchronized backward of a model: from the first forward that it may come from until its averages are in .grad,
// or until it is given up. None of its state is left for the next one.
//
// The last bucket is the *vote*: it is announced when this rank's whole backward has run, and waited for first. A rank
// that can't go on refuses the step instead (Outcome::refuse), so the vote never runs, and all ranks lose the step. If
// the vote runs, every rank has announced everything.
//
// Ownership: the reducer's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// but for Route::finish(). Failure: throws what the communicator throws; StepRefused where a rank has refused the step.
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
  // `model` outlives it.
  explicit Backward(Model& model) : model_(model) {}

  // --- Before it runs

  Forwards forwards;                 // that it may come from
  std::vector<TorchFuture> futures;  // that its end waits for

  // --- While it runs

  // Takes what the forwards say that it comes from, and goes by the model's plan and route. Throws InvalidUsage if two
  // forwards say different weights, or another backward has completed the step.
  void begin();
  bool has_begun() const { return filling_.has_value(); }

  // A parameter's hook has fired. Returns whether that was its gradient: of a static graph only the last time is.
  // Throws InvalidUsage where it can't be averaged any more.
  bool bring(size_t index, const at::Tensor& incoming);
  // Those that are known not to come. Throws InvalidUsage where this rank has accumulated a gradient that no bucket
  // has.
  void collect_missing();
  // All of a static graph that has been observed. The order in which they came is not the one in which later backwards
  // will bring them, so it is not noted.
  void collect_observed();
  void collect_absent();  // of all: this rank has no batch

  bool collected_all() const { return !filling_ || filling_->all(); }
  // See Filling.
  Bucket* next_in_order() {
    const auto next = filling_->next_in_order();
    return next ? &buckets_[*next] : nullptr;
  }

  // --- Its end

  // Announces the vote, under the reducer's `mutex`, and waits for all. Without the lock, on one thread.
  void finish(std::mutex& mutex);

  // Who has brought what is not finite, if that is asked for. Known after finish(); empty: nobody.
  const std::string& nonfinite() const { return nonfinite_; }

  // Puts the averages into .grad. Adds the parameters whose .grad has been written to `written`, if users have hooks on
  // any.
  void deliver(std::vector<size_t>& written);

  // It was given up.
  void drop();
  bool is_over() const { return is_over_; }

  // --- For routes

  std::vector<Bucket>& buckets() { return buckets_; }
  Filling& filling() { return *filling_; }
  const Weighting& weighting() const { return told_.weighting; }
  uint64_t step() const { return model_.life.step(); }
  // Null: it is not asked for.
  const NonfiniteWatch* watch() const { return watch_ ? &*watch_ : nullptr; }
  // Without memory; added in the order that this backward's sums have.
  Operation operation_of(const BucketLayout& layout) const;
  // The vote tells all ranks each one's times of the last step: this rank's go into its flags, and all come out.
  void add_stamp(const Bucket& bucket, std::vector<uint64_t>& flags) const;
  // It is complete, and goes its way as the operation at this place. Does nothing if this rank is not traced.
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
  Forward told_{};  // by the forwards that it comes from
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
