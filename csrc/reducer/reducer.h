// Averages the gradients of one model while its backward still runs.
//
//   forward    begin_forward -> the model -> prepare_for_backward, or abandon_forward if it raised
//   backward   on_output, on_gradient for each parameter: collect it; announce its bucket with the last one
//   its end    on_backward_end: wait for the buckets, put the averages into .grad
//
//   phase        what has happened                                     what comes next
//   Local        nothing yet, or the last forward was under no_sync    a synchronized forward: Armed
//   Armed        a synchronized forward has run, perhaps several       the first hook of a backward: Syncing
//   Syncing      their backward has begun                              its end, with all buckets there: Finalizing
//   Finalizing   some thread waits for the averages                    they are in .grad: Consumed
//   Consumed     it is over, well or not; no forward has run since     a forward: Armed, or Local
//
// From Armed to Consumed there is a Backward; any error on the way abandons it (Backward::abandon), which also leads to
// Consumed. A rank without a batch goes from Consumed to Finalizing at once (shadow_backward).
//
// Python plans the buckets (install_plan), from the order in which gradients became ready.
//
// Ownership: shared by Python and by the graph tasks it takes part in; holds the parameters and its hooks on them.
// Thread-safety: forward, and backward on any number of threads, one synchronized backward at a time. Blocks in
// on_backward_end, and in begin_forward after a backward that was abandoned. The lock may be held while the GIL is
// taken, so callers must not hold the GIL.
// Failure: throws Error; autograd's hooks turn it into Python's classes. After a failed backward no .grad is half
// averaged: it is either the average or None.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/communicator/communicator.h"
#include "reducer/averaging.h"
#include "reducer/backward.h"
#include "reducer/bucket_lane.h"
#include "reducer/bucket_plan.h"
#include "reducer/comm_hook_route.h"
#include "reducer/compression.h"
#include "reducer/flat_buckets.h"
#include "reducer/forward.h"
#include "reducer/future.h"
#include "reducer/graph_tasks.h"
#include "reducer/options.h"
#include "reducer/parameters.h"
#include "reducer/pooled_gradients.h"
#include "reducer/reasons.h"
#include "reducer/static_graph.h"
#include "reducer/statistics.h"
#include "reducer/step_times.h"
#include "reducer/timeline.h"
#include "reducer/usage.h"

namespace syncengine {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // All the parameters that might ever be synchronized, whether they require a gradient now or not; the same on all
  // ranks. `sparse`, of each: whether its gradients are of sparse layout. `lane`: of the device where they lie; null
  // for CPUs.
  Reducer(std::vector<at::Tensor> parameters, ModelNames names, std::shared_ptr<Communicator> communicator,
          const std::vector<bool>& sparse, const ReducerOptions& options, std::unique_ptr<BucketLane> lane = nullptr);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // A forward with gradients enabled begins; `synchronize`: its backward will average. Returns true if a plan must be
  // installed before such a forward runs: the parameters that require a gradient have changed, or the plan was
  // provisional and the order in which gradients are ready is now known.
  bool begin_forward(bool synchronize);
  // It has ended with these outputs (needed in full only to find unused parameters). Returns the leaves behind them
  // that are no parameters of ours, if a parameter is unused and is looked for: its replacement may be one of them.
  std::vector<at::Tensor> prepare_for_backward(const std::vector<at::Tensor>& outputs);
  // The same for one whose backward will not average: it accumulates where a later one does.
  void prepare_for_local_backward(const std::vector<at::Tensor>& outputs);
  // It raised; its backward would have averaged.
  void abandon_forward(const std::string& text);

  // Collective, once, and before the first plan; blocks. Returns the first slot. `copy_of`: that of the model that this
  // one is a copy of, if it is; the same on all ranks. Throws InvalidUsage on all ranks if there are no slots left.
  uint64_t reserve_slots(std::optional<uint64_t> copy_of);
  void install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional);
  // Parameters in the order in which the last synchronized backward brought them; those that it did not bring are
  // missing.
  std::vector<size_t> ready_order() const;

  // When things happened in the last timed step; times the first 10 and then one of `rate`.
  Timeline timeline() const;
  void set_sample_rate(uint64_t rate);

  // Of the forward that has begun, before prepare_for_backward, or of the next shadow_backward. Its backward gives the
  // sum of weight * gradient over all ranks, divided by `divisor`: the same on all ranks, and by default their number.
  void average_over(double divisor, double weight);
  // In its backward some rank has no batch. It can't know what others leave out, nor what its own graph is like: no
  // bucket is skipped, and a static graph is observed once more later.
  void expect_shadows();
  // Waited for at its backward's end.
  void install_futures(std::vector<TorchFuture> futures);
  // Takes part in a synchronized backward of the others without a gradient of its own. Blocks.
  void shadow_backward();

  // At most one of these, once: all buckets go through a hook; or travel in a smaller dtype; or as without, but scaled
  // as torch's all-reduce hook scales.
  void set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_compression(Compression compression);
  void set_all_reduce_hook();
  // Before the first backward.
  void set_static_graph();

  // Whether the user's hooks on parameters run now, on averages: else they run on this rank's own gradients.
  bool has_averaged() const;
  void check_finalized() const;
  // Whether each synchronized backward so far has brought the same gradients on this rank.
  bool graph_is_static() const;
  // Why .grad does not hold the averages of the last backward; empty if it does. Whoever asks is to say so before.
  std::string not_averaged() const;
  void watch_local_backwards();
  // Of the last backward, or forward, that was given up; empty if there was none.
  std::string last_error() const;
  // Backwards are this rank's own from then on; another synchronized forward raises.
  void remove_hooks();
  Statistics statistics() const;
  // Of all steps; it may outlive this.
  std::shared_ptr<const StepTimes> step_times() const { return averaging_.step_times; }

  // For hooks only.
  void on_output(Forward& forward);
  void on_local_output();
  // Whether a backward runs that comes from this model's outputs. Without the lock.
  bool has_claimed() const { return claimed_; }
  void on_gradient(size_t index, const at::Tensor& incoming);
  bool postpones(size_t index) const;
  void on_backward_end();
  void on_backward_failed(const std::string& text) noexcept;  // by an error of one of these hooks
  // Its graph task has ended without on_backward_end, by anybody's error.
  void on_backward_abandoned(uint64_t backward) noexcept;

 private:
  enum class Phase : uint8_t { Local, Armed, Syncing, Finalizing, Consumed };

  // Forward
  bool recomputing() const { return phase_ == Phase::Syncing && GraphTasks::inside(); }
  void await_given_up(std::unique_lock<std::mutex>& lock);
  bool plan_is_outdated();
  void follow_stream();
  Forward& coming_forward();
  Backward& coming_backward();
  std::vector<at::Tensor> mark_reachable(const std::vector<at::Tensor>& outputs, Forward& forward);
  void check_parameters_take_part(const std::vector<at::Tensor>& outputs);
  bool finds_unused() const { return options_.find_unused_parameters && !static_graph_; }
  bool tracks_usage() const { return options_.find_unused_parameters || static_graph_; }
  bool observes() const { return static_graph_ && !static_graph_->observed(); }
  bool is_planned(size_t index) const { return plan_ && plan_->covers(index); }
  void use_route(std::unique_ptr<Route> route);
  void check_no_hook() const;

  // Backward
  void watch_this_backward();
  void pool_gradients();
  void begin_backward();
  void collect_missing();
  bool is_last_fire(size_t index, const at::Tensor& incoming, bool watched);
  void collect_observed();

  // Its end
  void finalize();
  void run_hooks_of_users(const std::vector<size_t>& written);
  void check_masks(Backward& backward);
  void note_dropped();
  void fail_finalizing(const std::string& text);
  void give_up(const Reason& reason, bool keeps_gradients = false);
  void end_backward();
  [[noreturn]] void fail(const std::string& text);

  // Texts
  std::string unfinished_text() const;
  std::string missing_text() const;
  std::string removed_text() const;
  std::string dropped_text() const;
  std::string collected_twice_text(size_t index) const;
  std::string graph_changed_text(size_t index) const;
  [[noreturn]] void throw_consumed() const;

  const ReducerOptions options_;

  mutable std::mutex mutex_;
  std::atomic<Phase> phase_{Phase::Local};  // written under mutex_

  // As long as the model lives.
  Averaging averaging_;
  Parameters parameters_;
  Usage usage_;
  std::unique_ptr<FlatBuckets> flat_;  // null on CPUs
  PooledGradients pooled_;
  std::unique_ptr<Route> route_;
  bool has_hook_ = false;                      // of a user
  std::unique_ptr<StaticGraph> static_graph_;  // null if the graph may change
  GraphTasks tasks_;
  std::optional<c10::Stream> hooked_on_;  // the current stream when parameters were hooked; with flat_ only
  std::atomic<bool> delivers_{false};     // runs the user's hooks
  std::optional<std::string> unusable_;   // why nothing can come of this model any more
  bool hooks_removed_ = false;

  // As long as a plan.
  std::shared_ptr<const BucketPlan> plan_;
  bool plan_used_ = false;      // there was a backward since it was installed
  bool wants_plan_ = false;     // begin_forward has asked for one
  bool plan_is_known_ = false;  // whether it covers the parameters, as they are now:
  bool plan_covers_ = false;

  // As long as a forward, and a backward.
  std::shared_ptr<Forward> forward_;    // has begun, and not ended
  std::shared_ptr<Backward> backward_;  // that comes next, or runs
  std::atomic<bool> claimed_{false};    // see has_claimed()
  bool outputs_hooked_ = false;         // on_output will tell of a backward through the last forward

  // From one backward to the next.
  std::string last_error_;
  std::string not_averaged_;
  bool watches_local_backwards_ = false;
  std::optional<uint64_t> last_used_;  // Averaging::used of the last backward
  bool graph_is_static_ = true;
  bool brought_nothing_ = false;  // the last backward through our outputs ended without any gradient
  uint64_t ended_well_ = 0;       // which was the last that did, by statistics().backwards
  // Of a backward that perhaps nobody else has given up: this rank's part of the next exchange, too, so that all announce it
  // equally often.
  std::optional<Reasons> unread_;
  bool dropped_last_ = false;  // which has then failed on this rank, in somebody else's code
  uint64_t everybody() const { return ~uint64_t{0} >> (64 - averaging_.communicator->size()); }

  // Of the last one, if it was given up and the peers may still be in it, and why.
  struct GivenUp {
    Abandoned left;
    Reason reason;
    Reasons reasons;
    bool reused;  // `reasons` was unread_
  };
  std::optional<GivenUp> given_up_;
};

}  // namespace syncengine
