#include "reducer/gradients/gradient_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

#include "reducer/torch/graph_tasks.h"
#include "reducer/torch/hooks.h"
#include "transport/shm/pages.h"

namespace syncengine {

// Grants, and an allocator in the place of torch's, put the gradients of a backward into a pool that peers reach.
//
// The allocator replaces torch's CPU allocator for good, and passes allocations on to it, except those of a gradient's
// exact size by threads with a valid grant: a backward's own threads, until it ends. Known temporaries
// (AllocationHabits) are passed on, too. So the pool has blocks of few sizes, which fit each other's places.

namespace {

constexpr int kWrongGuesses = 3;  // after so many, the graph is taken to change each time

// One backward's permission to allocate gradients from a pool. Thread-safe.
class Grant {
 public:
  // `accumulates`: there were gradients when the backward began.
  Grant(shm::Pool& pool, std::shared_ptr<AllocationHabits> habits, bool accumulates)
      : pool_(pool), habits_(std::move(habits)), accumulates_(accumulates) {}

  bool covers(size_t bytes) const { return habits_->sizes.count(bytes) > 0; }
  // Allocates a size that the grant covers; null if torch's own memory is to be used.
  void* allocate(size_t bytes) {
    if (pool_.forked()) return nullptr;  // before the lock, which another thread may have held at the fork
    std::lock_guard lock(habits_->mutex);
    auto [position, is_first] = courses_.try_emplace(bytes);
    Course& course = position->second;
    if (is_first) {
      const auto& habit = habits_->habits[bytes];
      course.known = habit.temporaries[accumulates_];
      course.learns = !course.known && habit.wrong < kWrongGuesses;
    }
    size_t place = course.next++;
    if (course.known && place < course.known->size() && (*course.known)[place]) return nullptr;
    void* block = pool_.allocate(bytes);
    if (course.learns) {
      course.temporaries.push_back(false);
      if (block) being_learned_[block] = {bytes, place};
    }
    return block;
  }
  // Notes that a block was a temporary, since it goes back to its pool. Ignores blocks that are not this grant's.
  void notice_release(void* block) {
    if (!is_valid()) return;
    std::lock_guard lock(habits_->mutex);
    auto found = being_learned_.find(block);
    if (found == being_learned_.end()) return;
    auto [bytes, place] = found->second;
    courses_[bytes].temporaries[place] = true;
    being_learned_.erase(found);
  }

  bool is_valid() const { return valid_.load(std::memory_order_acquire); }
  void revoke() { valid_.store(false, std::memory_order_release); }  // a late allocation does no harm
  // Remembers for later backwards which blocks were temporaries. Called after revoke(), if this one has ended well.
  void learn() {
    bool any_temporary = false;
    {
      std::lock_guard lock(habits_->mutex);
      for (auto& [bytes, course] : courses_) {
        if (!course.learns) continue;
        for (bool temporary : course.temporaries) any_temporary |= temporary;
        habits_->habits[bytes].temporaries[accumulates_] =
            std::make_shared<const Temporaries>(std::move(course.temporaries));
      }
      courses_.clear();
    }
    if (any_temporary) pool_.trim();  // pages of temporaries will not be needed again
  }

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

// Whether `in_use` may have grants. A bool has no destructor: memory is released even after `in_use` is destroyed.
thread_local bool any_in_use = false;

// A thread's Grants, which let it allocate gradients from pools: of several models, perhaps, or tasks within tasks.
struct GrantsInUse {
  std::vector<std::shared_ptr<Grant>> grants;
  ~GrantsInUse() { any_in_use = false; }
};
thread_local GrantsInUse in_use;
c10::Allocator* previous = nullptr;

void release_block(void* block) {
  if (block == nullptr) return;
  if (auto* pool = shm::Pool::find(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
    if (any_in_use && !pool->forked()) {
      for (const auto& grant : in_use.grants) grant->notice_release(block);
    }
    pool->release(block);
  } else if (auto* deleter = previous->raw_deleter()) {  // the memory came through raw_allocate
    deleter(block);
  }
}

void* allocate_granted(size_t bytes) {
  auto& grants = in_use.grants;
  std::erase_if(grants, [](const auto& grant) { return !grant->is_valid(); });
  any_in_use = !grants.empty();
  for (const auto& grant : grants) {
    if (grant->covers(bytes)) return grant->allocate(bytes);
  }
  return nullptr;
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // A gradient of less than a page would share it with others, and could not be severed from peers.
    void* block = any_in_use && bytes >= shm::kPage ? allocate_granted(bytes) : nullptr;
    if (block == nullptr) return previous->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { previous->copy_data(to, from, bytes); }
};

// Whether `tensor` is held by that many C++ references and by nothing in Python.
bool has_holders(const at::TensorBase& tensor, size_t references) {
  return tensor.use_count() == references ||
         (tensor.use_count() == references + 1 && python_let_go(*tensor.unsafeGetTensorImpl()));
}

// Whether the memory is that of a plain tensor: torch's own, or a pool's.
bool is_tensor_memory(const c10::DataPtr& data) {
  auto* deleter = data.get_deleter();
  if (!data.device().is_cpu()) return deleter == c10::GetAllocator(data.device().type())->raw_deleter();
  if (previous == nullptr) return deleter == c10::GetCPUAllocator()->raw_deleter();
  return deleter == &release_block || deleter == previous->raw_deleter();
}

// Whether nothing but `grad` will ever read the memory that it took over from `incoming`: every holder is known, and
// goes with `incoming`, which autograd is about to drop; and the memory is torch's own (not NumPy's, say).
bool took_over_exclusively(const at::Tensor& grad, const at::Tensor& incoming, size_t references) {
  if (!has_holders(incoming, references)) return false;
  size_t known_holders = 2;
  if (incoming.is_view()) {  // the weight of every nn.Linear: its gradient is the transpose of a product
    const at::TensorBase& base = incoming._base();
    if (has_holders(base, 1) && shares_storage(grad, base)) ++known_holders;
  }
  const auto& storage = grad.storage();
  return storage.use_count() == known_holders && is_tensor_memory(storage.data_ptr());
}

}  // namespace

PooledGradients::PooledGradients(shm::Pool* pool) : pool_(pool) {
  if (!pool_) return;
  static std::once_flag once;
  std::call_once(once, [] {
    previous = c10::GetCPUAllocator();
    auto* allocator = new PoolAllocator;  // never destroyed: memory comes and goes until the process has ended
    c10::SetCPUAllocator(allocator, /*priority=*/255);
  });
  pool_->join();
}

void PooledGradients::use_in_this_task(bool accumulates) {
  if (!pool_ || !habits_ || std::exchange(task_, GraphTasks::current()) == GraphTasks::current()) return;
  const auto grant = std::make_shared<Grant>(*pool_, habits_, accumulates);
  in_use.grants.push_back(grant);
  any_in_use = true;
  at_task_end(
      [grant] {
        grant->revoke();
        grant->learn();  // a task that has failed shows nothing
      },
      [grant](bool) { grant->revoke(); });
}

bool shares_storage(const at::TensorBase& a, const at::TensorBase& b) {
  return a.has_storage() && b.defined() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

bool is_shared(const at::Tensor& grad, const at::Tensor& incoming, size_t references) {
  return shares_storage(grad, incoming) && !took_over_exclusively(grad, incoming, references);
}

bool owns_gradient(const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  const at::Tensor incoming = noted_gradient(parameter);
  if (shares_storage(grad, incoming)) return !is_shared(grad, incoming, /*references=*/2);
  return grad.storage().use_count() == 1;
}

}  // namespace syncengine
