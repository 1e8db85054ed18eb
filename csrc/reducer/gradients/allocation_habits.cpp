#include "reducer/gradients/allocation_habits.h"

#include <utility>

namespace syncengine::gradient_memory {

namespace {

constexpr int kWrongGuesses = 3;  // then it is another graph each time

}  // namespace

std::shared_ptr<const Temporaries> AllocationHabits::known(size_t bytes, bool accumulates) const {
  std::lock_guard lock(mutex_);
  auto habit = habits_.find(bytes);
  return habit == habits_.end() ? nullptr : habit->second.temporaries[accumulates];
}

bool AllocationHabits::wants_to_learn(size_t bytes, bool accumulates) const {
  std::lock_guard lock(mutex_);
  auto habit = habits_.find(bytes);
  return habit == habits_.end() || (!habit->second.temporaries[accumulates] && habit->second.wrong < kWrongGuesses);
}

void AllocationHabits::learn(size_t bytes, bool accumulates, Temporaries temporaries) {
  std::lock_guard lock(mutex_);
  habits_[bytes].temporaries[accumulates] = std::make_shared<const Temporaries>(std::move(temporaries));
}

void AllocationHabits::forget(size_t bytes) {
  std::lock_guard lock(mutex_);
  auto habit = habits_.find(bytes);
  if (habit == habits_.end()) return;
  bool guessed = habit->second.temporaries[0] || habit->second.temporaries[1];
  habit->second.temporaries = {};
  if (guessed) ++habit->second.wrong;
}

}  // namespace syncengine::gradient_memory
