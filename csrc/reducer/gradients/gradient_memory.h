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

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "reducer/gradients/record.h"
#include "steps/bucket_plan.h"
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
  std::mutex mutex;                        // guards the members below, and the courses of a Grant (.cpp)
  std::unordered_map<size_t, Habit> habits;

  // Forgets a wrong guess: a gradient of that size did not get a block of the pool.
  void forget(size_t bytes) {
    std::lock_guard lock(mutex);
    Habit& habit = habits[bytes];
    if (habit.temporaries[0] || habit.temporaries[1]) ++habit.wrong;
    habit.temporaries = {};
  }
};

// Memory for a model's large gradients on CPUs, in the communicator's pool as far as that has room. Empty on devices,
// and if the user wants torch's memory. The pool is the communicator's and lives for ever.
//
// Thread-safety: the reducer's lock.
class PooledGradients {
 public:
  // Replaces torch's CPU allocator, once in a process, if there is a pool. Any thread may do so while no other thread
  // allocates its first tensor: torch takes no lock.
  explicit PooledGradients(shm::Pool* pool);
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
  void use_in_this_task(bool accumulates);
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
