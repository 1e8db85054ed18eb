#include "reducer/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <mutex>
#include <vector>

namespace syncengine::gradient_memory {

namespace {

thread_local std::vector<std::shared_ptr<const Grant>> in_use;  // of several models, or of tasks within tasks
c10::Allocator* previous = nullptr;

void release_block(void* block) {
  if (block == nullptr) return;
  if (auto* pool = shm::Pool::find(block)) {
    c10::profiledCPUMemoryReporter().Delete(block);
    pool->release(block);
  } else if (auto* deleter = previous->raw_deleter()) {  // came through raw_allocate
    deleter(block);
  }
}

shm::Pool* pool_for(size_t bytes) {
  std::erase_if(in_use, [](const auto& grant) { return grant->pool() == nullptr; });
  for (const auto& grant : in_use) {
    if (grant->covers(bytes)) return grant->pool();
  }
  return nullptr;
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    shm::Pool* pool = in_use.empty() || bytes < kSmallest ? nullptr : pool_for(bytes);
    void* block = pool ? pool->allocate(bytes) : nullptr;
    if (block == nullptr) return previous->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { previous->copy_data(to, from, bytes); }
};

}  // namespace

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    previous = c10::GetCPUAllocator();
    static PoolAllocator allocator;
    c10::SetCPUAllocator(&allocator, /*priority=*/255);
  });
}

void use(const std::shared_ptr<const Grant>& grant) { in_use.push_back(grant); }

bool is_tensor_memory(const c10::DataPtr& data) {
  auto* deleter = data.get_deleter();
  if (!data.device().is_cpu()) return deleter == c10::GetAllocator(data.device().type())->raw_deleter();
  if (previous == nullptr) return deleter == c10::GetCPUAllocator()->raw_deleter();
  return deleter == &release_block || deleter == previous->raw_deleter();
}

}  // namespace syncengine::gradient_memory
