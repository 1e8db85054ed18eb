// Learns what backward does with blocks of a gradient's size: some are gradients, others are temporaries, which need
// not lie where peers reach them. A convolution makes two temporaries of its weight's size for each gradient, which
// would make the pool twice as large.
//
// One backward is enough to learn: the n-th block of a size is a temporary if it was gone when that backward ended. A
// backward that starts with gradients (it accumulates) has habits of its own. A wrong guess costs a staged gradient,
// never its value; it is forgotten, and after a few nothing is guessed about that size any more.
//
// Thread-safety: any thread. Failure: none.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "reducer/torch/graph_tasks.h"
#include "reducer/torch/hooks.h"
#include "steps/bucket_plan.h"
#include "steps/record.h"
#include "transport/shm/pool.h"

namespace syncengine {

// Whether each of a backward's allocations of one size is a temporary, in the order of the allocations.
using Temporaries = std::vector<bool>;

struct AllocationHabits {
  explicit AllocationHabits(std::unordered_set<size_t> of) : sizes(std::move(of)) {}

  struct Habit {
    std::array<std::shared_ptr<const Temporaries>, 2> temporaries;  // by whether it accumulates; null: not learned yet
    int wrong = 0;                                                  // wrong guesses
  };

  const std::unordered_set<size_t> sizes;  // of gradients that belong into the pool
  std::mutex mutex;                        // guards the members below, and the grants' courses
  std::unordered_map<size_t, Habit> habits;

  // Forgets a wrong guess: a gradient of that size did not get a block of the pool.
  void forget(size_t bytes);
};

// Grants, and an allocator in the place of torch's, put the gradients of a backward into a pool that peers reach.
//
// The allocator replaces torch's CPU allocator for good, and passes allocations on to it, except those of a gradient's
// exact size by threads with a valid grant: a backward's own threads, until it ends. Known temporaries
// (AllocationHabits) are passed on, too. So the pool has blocks of few sizes, which fit each other's places.

// One backward's permission to allocate gradients from a pool. Thread-safe.
class Grant {
 public:
  // `accumulates`: there were gradients when the backward began.
  Grant(shm::Pool& pool, std::shared_ptr<AllocationHabits> habits, bool accumulates)
      : pool_(pool), habits_(std::move(habits)), accumulates_(accumulates) {}

  bool covers(size_t bytes) const { return habits_->sizes.count(bytes) > 0; }
  // Allocates a size that the grant covers; null if torch's own memory is to be used.
  void* allocate(size_t bytes);
  // Notes that a block was a temporary, since it goes back to its pool. Ignores blocks that are not this grant's.
  void notice_release(void* block);

  bool is_valid() const { return valid_.load(std::memory_order_acquire); }
  void revoke() { valid_.store(false, std::memory_order_release); }  // a late allocation does no harm
  // Remembers for later backwards which blocks were temporaries. Called after revoke(), if this one has ended well.
  void learn();

 private:
  // The allocations of one size in this backward.
  struct Course {
    std::shared_ptr<const Temporaries> known;
    bool learns = false;
    size_t next = 0;
    Temporaries temporaries = {};  // if it learns
  };

  shm::Pool& pool_;
  const std::shared_ptr<AllocationHabits> habits_;
  const bool accumulates_;
  std::atomic<bool> valid_{true};
  std::unordered_map<size_t, Course> courses_;                          // by size
  std::unordered_map<void*, std::pair<size_t, size_t>> being_learned_;  // by block: size, and place in the course
};

// Replaces torch's allocator, once, on any thread, while no other allocates its first tensor: torch takes no lock.
void install_pool_allocator();

// Makes the calling thread use the grant, until it is revoked.
void use_grant(const std::shared_ptr<Grant>& grant);

// Memory for a model's large gradients on CPUs, in the communicator's pool as far as that has room. Empty on devices,
// and if the user wants torch's memory. The pool is the communicator's and lives for ever.
//
// Thread-safety: the reducer's lock.
class PooledGradients {
 public:
  explicit PooledGradients(shm::Pool* pool) : pool_(pool) {
    if (!pool_) return;
    install_pool_allocator();
    pool_->join();
  }
  ~PooledGradients() {
    if (pool_) pool_->leave();
  }
  PooledGradients(const PooledGradients&) = delete;
  PooledGradients& operator=(const PooledGradients&) = delete;

  shm::Pool* pool() const { return pool_; }
  void install(const BucketPlan& plan) {
    if (!pool_ || (habits_ && habits_->sizes == plan.pooled_sizes())) return;
    habits_ = std::make_shared<AllocationHabits>(plan.pooled_sizes());
  }
  // Puts the gradients of the graph task on this thread into the pool. `accumulates`: there are gradients already.
  void use_in_this_task(bool accumulates) {
    if (!pool_ || !habits_ || std::exchange(task_, GraphTasks::current()) == GraphTasks::current()) return;
    const auto grant = std::make_shared<Grant>(*pool_, habits_, accumulates);
    use_grant(grant);
    at_task_end(
        [grant] {
          grant->revoke();
          grant->learn();  // a task that has failed shows nothing
        },
        [grant](bool) { grant->revoke(); });
  }
  // Notes that a gradient's memory is about to be reduced. Returns the reason if peers can't access it there.
  std::optional<StageReason> note(const void* memory, size_t bytes) {
    if (!pool_) return StageReason::Setting;
    if (pool_->owns(memory, bytes)) return std::nullopt;
    if (habits_) habits_->forget(bytes);
    return pool_->shortage().empty() ? StageReason::Elsewhere : StageReason::Shortage;
  }

 private:
  shm::Pool* const pool_;
  std::shared_ptr<AllocationHabits> habits_;  // of backward, with blocks of the planned sizes
  int task_ = -1;                             // the last graph task that uses the pool
};

bool shares_storage(const at::TensorBase& a, const at::TensorBase& b);

// Whether anything else may still read the memory that `grad` took over from `incoming`; false if it took over nothing.
// Autograd lets .grad take over a tensor whose memory others may still have to read in the same backward, and two
// parameters may take over the same memory. `references`: how many autograd and the caller have to `incoming`.
bool is_shared(const at::Tensor& grad, const at::Tensor& incoming, size_t references = 1);

// Whether nobody else can access the memory of the parameter's dense .grad. Called in its post-accumulate hook, or
// later. In the hook, memory that .grad took over from a gradient without a note (note_incoming()) counts as shared.
bool owns_gradient(const at::Tensor& parameter);

}  // namespace syncengine
