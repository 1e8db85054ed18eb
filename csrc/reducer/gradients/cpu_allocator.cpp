#include "reducer/gradients/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <vector>

namespace syncengine::gradient_memory {

namespace {

// Of several models, or of tasks within tasks.
struct GrantsInUse {
  std::vector<std::shared_ptr<Grant>> grants;
  ~GrantsInUse();
};

thread_local bool any_in_use = false;  // trivial: memory is released after this thread's other variables are gone, too
thread_local GrantsInUse in_use;
c10::Allocator* previous = nullptr;

GrantsInUse::~GrantsInUse() { any_in_use = false; }

void release_block(void* block) {
  if (block == nullptr) return;
  if (auto* pool = shm::Pool::find(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
    if (any_in_use && !pool->forked()) {
      for (const auto& grant : in_use.grants) grant->notice_release(block);
    }
    pool->release(block);
  } else if (auto* deleter = previous->raw_deleter()) {  // came through raw_allocate
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
    void* block = any_in_use && bytes >= kSmallest ? allocate_granted(bytes) : nullptr;
    if (block == nullptr) return previous->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { previous->copy_data(to, from, bytes); }
};

}  // namespace

void* Grant::allocate(size_t bytes) {
  if (pool_.forked()) return nullptr;  // before the lock, which another thread may have held then
  std::lock_guard lock(mutex_);
  auto [position, is_first] = courses_.try_emplace(bytes);
  Course& course = position->second;
  if (is_first) {
    course.known = habits_->known(bytes, accumulates_);
    course.learns = habits_->wants_to_learn(bytes, accumulates_);
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

void Grant::notice_release(void* block) {
  if (!is_valid()) return;
  std::lock_guard lock(mutex_);
  auto found = being_learned_.find(block);
  if (found == being_learned_.end()) return;
  auto [bytes, place] = found->second;
  courses_[bytes].temporaries[place] = true;
  being_learned_.erase(found);
}

void Grant::learn() {
  bool any_temporary = false;
  {
    std::lock_guard lock(mutex_);
    for (auto& [bytes, course] : courses_) {
      if (!course.learns) continue;
      for (bool temporary : course.temporaries) any_temporary |= temporary;
      habits_->learn(bytes, accumulates_, std::move(course.temporaries));
    }
    courses_.clear();
  }
  if (any_temporary) pool_.trim();  // their pages will not be needed again
}

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    previous = c10::GetCPUAllocator();
    auto* allocator = new PoolAllocator;  // never destroyed: memory comes and goes until the process has ended
    c10::SetCPUAllocator(allocator, /*priority=*/255);
  });
}

void use(const std::shared_ptr<Grant>& grant) {
  in_use.grants.push_back(grant);
  any_in_use = true;
}

bool is_tensor_memory(const c10::DataPtr& data) {
  auto* deleter = data.get_deleter();
  if (!data.device().is_cpu()) return deleter == c10::GetAllocator(data.device().type())->raw_deleter();
  if (previous == nullptr) return deleter == c10::GetCPUAllocator()->raw_deleter();
  return deleter == &release_block || deleter == previous->raw_deleter();
}

}  // namespace syncengine::gradient_memory
