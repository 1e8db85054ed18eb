// Averages the gradients of one model while its backward still runs.
//
//   forward    begin_forward -> the model -> prepare_for_backward
//   backward   on_output, on_gradient for each parameter: collect it; announce its bucket with the last one
//   its end    on_backward_end: wait for the buckets, put the averages into .grad
//
// The buckets are Python's to plan (install_plan), from the order in which gradients were ready.
//
// Ownership: shared by Python and by the graph tasks it takes part in; holds the parameters and its hooks on them.
// Thread-safety: forward, and backward on any number of threads, one synchronized backward at a time. Blocks only in
// on_backward_end. The lock may be held while the GIL is taken, so callers must not hold the GIL.
// Failure: throws Error; autograd's hooks turn it into Python's classes. After a failed backward no .grad is half averaged:
// it is either the average or None.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "reducer/attributes.h"
#include "reducer/bucket.h"
#include "reducer/bucket_lane.h"
#include "reducer/comm_hook.h"
#include "reducer/compression.h"
#include "reducer/cpu_allocator.h"
#include "reducer/flat_buckets.h"
#include "reducer/future.h"
#include "reducer/gradient.h"
#include "reducer/hooks.h"
#include "reducer/options.h"
#include "reducer/scaling.h"
#include "reducer/static_graph.h"
#include "reducer/statistics.h"
#include "reducer/timeline.h"
#include "reducer/unused.h"

namespace syncengine {

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // All the parameters that might ever be synchronized, whether they require a gradient now or not; the same on all ranks.
  // `sparse`, of each: whether its gradients are of sparse layout. `lane`: of the device where they lie; null for CPUs.
  Reducer(std::vector<at::Tensor> parameters, ModelNames names, std::shared_ptr<Communicator> communicator,
          const std::vector<bool>& sparse, const ReducerOptions& options, std::unique_ptr<BucketLane> lane = nullptr);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // A forward with gradients enabled begins; `synchronize`: its backward will average. Returns true if a plan must be
  // installed before such a forward runs: the parameters that require a gradient have changed, or the plan was provisional
  // and the order in which gradients are ready is now known.
  bool begin_forward(bool synchronize);
  // It has ended with these outputs (needed in full only to find unused parameters). Returns the leaves behind them that are no
  // parameters of ours, if a parameter is unused and is looked for: its replacement may be one of them.
  std::vector<at::Tensor> prepare_for_backward(const std::vector<at::Tensor>& outputs);
  // The same for one whose backward will not average: it accumulates where a later one does.
  void prepare_for_local_backward(const std::vector<at::Tensor>& outputs);

  void install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional);
  // Parameters in the order in which the last synchronized backward brought them; those that it did not bring are missing.
  std::vector<size_t> ready_order() const;

  // When things happened in the last timed step; times the first 10 and then one of `rate`.
  Timeline timeline() const;
  void set_sample_rate(uint64_t rate);

  // The next synchronized backward gives the sum of weight * gradient over all ranks, divided by `divisor`: the same on all
  // ranks, and by default their number. Then everything is as by default again.
  void average_over(double divisor, double weight);
  // In the next synchronized backward some rank has no batch. It can't know what others leave out, nor what its own graph is
  // like: no bucket is skipped, and a static graph is observed once more later.
  void expect_shadows();
  // Takes part in a synchronized backward of the others without a gradient of its own. Blocks.
  void shadow_backward();

  // At most one of these, once: all buckets go through a hook; or travel in a smaller dtype; or as without, but scaled as
  // torch's all-reduce hook scales.
  void set_comm_hook(std::unique_ptr<CommHook> hook);
  void set_compression(Compression compression);
  void set_all_reduce_hook();
  // Before the first backward.
  void set_static_graph();
  // Waited for at the end of the next synchronized backward.
  void install_futures(std::vector<TorchFuture> futures);

  // Whether the last backward has averaged: what post-accumulate hooks of the user see.
  bool has_averaged() const;
  void check_finalized() const;
  void remove_hooks();
  Statistics statistics() const;

  // For hooks only.
  void on_output();
  void on_local_output();
  void on_gradient(size_t index, const at::Tensor& incoming);
  bool postpones(size_t index) const;
  void on_backward_end();
  void on_backward_failed() noexcept;     // by an error of one of these hooks
  void on_backward_abandoned() noexcept;  // its graph task has ended without on_backward_end, by anybody's error

 private:
  enum class Phase : uint8_t {
    Local,       // gradients stay on this rank: nothing has run yet, or the last forward was under no_sync
    Armed,       // a synchronized forward has run, perhaps several
    Syncing,     // their backward has begun
    Finalizing,  // all buckets are announced, and some thread waits for them
    Consumed,    // their backward is over, and no forward has run since
  };

  bool recomputing() const;
  bool plan_is_outdated();
  void check_parameters_take_part(const std::vector<at::Tensor>& outputs);
  std::vector<at::Tensor> strangers_behind(const std::vector<at::Tensor>& outputs);
  bool finds_unused() const { return options_.find_unused_parameters && !static_graph_; }
  bool tracks_usage() const { return options_.find_unused_parameters || static_graph_; }
  bool observes() const { return static_graph_ && !static_graph_->observed(); }
  void begin_backward();
  void collect_missing();
  bool is_last_fire(size_t index, const at::Tensor& incoming);
  void collect_observed();
  void collect_unused(size_t index);
  void collect(size_t index, const at::Tensor& incoming);
  void count_collected(size_t index);
  std::shared_ptr<BucketMemory> make_memory(const BucketLayout& layout) const;
  void copy_if_small(Bucket& bucket, size_t position);
  bool skips(const Bucket& bucket) const;
  void announce(Bucket& bucket);
  void add_spans(Bucket& bucket, SpanList& spans);
  void scale_one_by_one(const BucketLayout& layout, const std::vector<at::Tensor>& contributions) const;
  void lay_out_flat_buckets();
  void start_flat_buckets();
  void start_flat(Bucket& bucket);
  Operation operation_of(const Bucket& bucket) const;
  bool scales_first() const;
  void run_comm_hooks();
  bool usage_travels() const;
  std::vector<uint64_t> usage_of(const BucketLayout& layout) const;
  void announce_usage();
  void watch_this_backward();
  void pool_gradients();
  void weigh(const Bucket& bucket);
  void finalize();
  void wait_for_buckets();
  void wait_for_hooks();
  void check_skipped() const;
  void deliver(Bucket& bucket);
  void fail_backward();
  void settle_after_failure();
  void wait_for_tasks(std::unique_lock<std::mutex>& lock);
  void follow_parameters();
  void follow(size_t index);
  void follow_stream();
  void unhook(size_t index);
  void check_no_hook() const;
  void divide_contributions();
  void tell_peers(const std::string& text) const;
  std::string unfinished_text() const;
  std::string missing_text() const;
  [[noreturn]] void throw_graph_changed(size_t index) const;
  [[noreturn]] void throw_collected_twice(size_t index) const;
  [[noreturn]] void throw_consumed() const;
  const std::string& name(size_t index) const { return names_->parameters[index]; }

  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<const ModelNames> names_;
  const ReducerOptions options_;
  Scaling scaling_;
  shm::Pool* const pool_;      // where large gradients are to lie, or null
  const uint64_t first_slot_;  // one for each bucket there may be, and the last for usage

  mutable std::mutex mutex_;
  std::atomic<Phase> phase_{Phase::Local};            // written under mutex_
  std::vector<Gradient> gradients_;                   // by parameter
  std::vector<std::unique_ptr<GradientHook>> hooks_;  // by parameter; none while it does not require a gradient
  bool provisional_ = false;                          // the plan waits for ready_order_
  bool plan_used_ = false;                            // there was a backward since it was installed
  bool wants_plan_ = false;                           // begin_forward has asked for one
  std::vector<bool> planned_;                         // by parameter: whether it is in a bucket
  std::vector<size_t> bucket_of_, position_of_;       // by parameter: its bucket, and its place there
  std::vector<Attributes> attributes_;                // by parameter
  bool any_user_hooks_ = false;                       // that wait for the averages, or did
  bool hooks_or_plan_changed_ = true;
  bool plan_covers_hooks_ = false;  // each hooked parameter is in a bucket, and no other
  std::vector<Bucket> buckets_;
  size_t buckets_missing_ = 0;  // not announced yet in this backward
  std::vector<size_t> ready_order_;
  int watched_task_ = -1;     // the graph task that holds our last callback
  size_t tasks_watched_ = 0;  // graph tasks that hold one and have not ended
  std::condition_variable task_ended_;
  bool outputs_hooked_ = false;   // on_output will tell of a backward through the last forward
  bool brought_nothing_ = false;  // the last backward through our outputs ended without any gradient
  std::shared_ptr<gradient_memory::AllocationHabits>
      habits_;            // of backward, with blocks of the planned gradients' sizes
  int pooled_task_ = -1;  // the graph task that puts gradients into pool_
  Statistics statistics_;
  Timeline timeline_;
  double divisor_;
  double weight_ = 1.0;               // of this rank's gradients
  bool shadowed_ = false;             // expect_shadows
  std::vector<size_t> sparse_;        // parameters in sparse buckets, in order
  std::vector<TorchFuture> futures_;  // install_futures

  std::unique_ptr<FlatBuckets> flat_;     // null on CPUs
  std::optional<c10::Stream> hooked_on_;  // the current stream when parameters were hooked; with flat_ only

  std::unique_ptr<CommHook> comm_hook_;
  std::optional<Compression> compression_;
  bool all_reduce_hook_ = false;
  size_t next_in_order_ = 0;  // bucket that comes next to comm_hook_ or flat_
  bool hook_runs_ = false;
  bool flags_fit_ = true;                      // a bit for each parameter of each bucket
  std::unique_ptr<StaticGraph> static_graph_;  // null if the graph may change

  // find_unused_parameters and static graphs only
  AccumulatorIndex accumulators_;
  std::vector<bool> reachable_;  // by parameter: from the outputs since the last synchronization
  bool asks_usage_ = false;      // this backward wants to know which parameters the ranks have used
  std::vector<bool> used_here_;  // by parameter: had a gradient since the last synchronization
  std::shared_ptr<std::vector<uint8_t>> used_anywhere_;  // by parameter: reduced over all ranks
  std::shared_ptr<Work> usage_work_;
};

}  // namespace syncengine
