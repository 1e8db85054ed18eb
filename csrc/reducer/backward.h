// One synchronized backward of a model: from the first forward that it may come from until its averages are in .grad,
// or until it is abandoned. None of its state is left for the next one.
//
// A backward that fails on this rank is *abandoned*: the buckets that the peers still expect are announced without
// gradients, and a mask that is reduced with every bucket says so. So all ranks stay in step: if all of them abandon
// the same backward no rank waits, and those that did not learn of it while they wait.
//
// Ownership: the reducer's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// but for Route::finish(). Failure: throws what the communicator throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "reducer/averaging.h"
#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/flat_buckets.h"
#include "reducer/forward.h"
#include "reducer/future.h"
#include "reducer/options.h"
#include "reducer/parameters.h"
#include "reducer/route.h"
#include "reducer/usage.h"

namespace syncengine {

// What is left of a backward that was abandoned: operations, and what peers have said in them.
struct Abandoned {
  std::vector<std::shared_ptr<Work>> works;
  std::vector<std::shared_ptr<BucketMemory>> buckets;
  bool told = false;  // some bucket was not in flight yet, so it told the peers

  // As those of Backward, of this rank, too. To be asked when all works have ended.
  uint64_t abandoned_by() const { return mask(0); }
  uint64_t dropped_by() const { return mask(1); }
  uint64_t mask(size_t which) const;
};

class Backward {
 public:
  // What it works with, all of which outlives it.
  struct Model {
    Parameters& parameters;
    Averaging& averaging;
    Usage& usage;
    const ReducerOptions& options;
    FlatBuckets* flat;  // null on CPUs
  };
  explicit Backward(const Model& model) : model_(model) {}

  // --- Before it runs: forwards that it may come from.

  // Keeps `forward` itself if none of its outputs does.
  void expect(const std::shared_ptr<Forward>& forward);
  void wait_at_end_for(std::vector<TorchFuture> futures);

  // --- While it runs

  // Takes what the forwards say that it comes from. `looks_for_unused`: reachable() will be asked for. `asks_usage`:
  // which parameters any rank has used is to be known at its end. Throws InvalidUsage if two forwards say different
  // weights.
  void begin(std::shared_ptr<const BucketPlan> plan, Route& route, bool looks_for_unused, bool asks_usage);
  bool has_begun() const { return plan_ != nullptr; }

  // Gradients, each once.
  void collect(size_t index, const at::Tensor& incoming, bool watched);
  void collect_noted(size_t index);
  void note_ready(size_t index);  // for ready_order: not where collect() notes it
  void collect_unused(size_t index);
  void collect_absent();  // of all: this rank has no batch
  // From the forwards' outputs, or from anything else that this backward started from.
  bool reachable(size_t index) const;

  const BucketPlan& plan() const { return *plan_; }
  bool has_shadows() const { return has_shadows_; }
  bool collected_all() const { return missing_ == 0; }
  // Buckets in their order, the same on all ranks, each as soon as it and all before it are ready or skipped; null: not
  // yet.
  Bucket* next_in_order() {
    const bool ready = next_ < buckets_.size() && buckets_[next_].state >= Bucket::State::Ready;
    return ready ? &buckets_[next_++] : nullptr;
  }

  // --- Its end. These two without the lock, on one thread.

  void proceed(std::mutex& mutex);
  void finish();
  // Members (bit per rank) that have abandoned this one; and that have abandoned the last one, after its averages had
  // been complete. Known after finish().
  uint64_t abandoned_by() const { return abandoned_by_; }
  uint64_t dropped_by() const { return dropped_by_; }

  // Puts the averages into .grad. Returns the parameters whose .grad has been written.
  std::vector<size_t> deliver(bool tracks_usage, bool tells_which);

  // Whether it can be abandoned at all: not where peers wait for what has no such mask.
  bool can_be_abandoned() const;
  // As above. `keeps_gradients`: .grad stays as it is, since backward has not begun; else they become None.
  Abandoned abandon(bool keeps_gradients);
  // The communicator has failed: .grad becomes None.
  void drop(bool keeps_gradients);
  bool is_over() const { return is_over_; }

  // --- For routes

  Averaging& averaging() const { return model_.averaging; }
  const std::vector<Gradient>& gradients() const { return model_.parameters.gradients(); }
  const Parameters& parameters() const { return model_.parameters; }
  std::vector<Bucket>& buckets() { return buckets_; }
  const Weighting& weighting() const { return weighting_; }
  // With the bucket that it is about; all by itself where not every bucket is the engine's to reduce.
  bool usage_travels() const { return asks_usage_ && usage_travels_; }
  const Usage& usage() const { return model_.usage; }
  void take_usage(const BucketLayout& layout, const uint64_t* bits) { model_.usage.take_bits(layout, bits); }
  uint64_t own_bit() const { return uint64_t{1} << model_.averaging.communicator->rank(); }
  bool is_abandoned() const { return is_abandoned_; }
  bool dropped_last() const { return dropped_last_; }
  void note_masks(uint64_t abandoned, uint64_t dropped) {
    abandoned_by_ |= abandoned;
    dropped_by_ |= dropped;
  }
  // This rank's last backward failed when its averages were complete.
  void tell_dropped_last() { dropped_last_ = true; }

  // At the end of a bucket's flags: members that have abandoned this backward; and the last one, see dropped_by().
  static constexpr size_t kMaskWords = 2;

 private:
  void take_forwards(bool looks_for_unused);
  void count_collected(size_t index);
  bool skips(const Bucket& bucket) const;
  void announce_usage();
  void check_skipped() const;
  void average_sparse_gradients();
  const std::string& name(size_t index) const { return model_.parameters.name(index); }

  Model model_;
  std::vector<std::weak_ptr<Forward>> forwards_;
  std::shared_ptr<Forward> kept_;  // the last of them, if its outputs don't keep it
  std::vector<TorchFuture> futures_;

  std::shared_ptr<const BucketPlan> plan_;
  Route* route_ = nullptr;
  Weighting weighting_{};
  bool has_shadows_ = false, asks_usage_ = false, usage_travels_ = false;
  std::vector<bool> reachable_;  // by parameter
  std::vector<Bucket> buckets_;
  size_t missing_ = 0;  // buckets that have not all gradients yet
  size_t next_ = 0;     // bucket that next_in_order() comes to
  std::shared_ptr<Work> usage_work_;
  bool is_over_ = false;  // dropped, while another thread may still be in proceed()
  bool is_abandoned_ = false, dropped_last_ = false;
  uint64_t abandoned_by_ = 0, dropped_by_ = 0;
};

}  // namespace syncengine
