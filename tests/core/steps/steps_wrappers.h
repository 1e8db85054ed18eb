// The walk of all that can happen to two wrappers of one rank that share a parameter.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "steps/lifecycle.h"
#include "steps_model.h"
#include "steps_world.h"
#include "test.h"

namespace syncengine::walk {

// Two wrappers on one rank whose parameter 1 is the same tensor: backwards through the outputs of one of them, or of
// both, in any order.
class Wrappers {
 public:
  explicit Wrappers(Flaw flaw) : flaw_(flaw) {}

  size_t explore() {
    State first;
    for (Engine& engine : first.engines) engine.ranks.resize(1);
    push(first);
    while (!open_.empty()) {
      const State state = std::move(open_.back());
      open_.pop_back();
      state.of == 0 ? outside(state) : inside(state);
    }
    return seen_.size();
  }

 private:
  static constexpr uint8_t kOf[] = {0, 0b00111, 0b11010, 0b11111};  // gradients: two of each, the common one between

  struct State {
    std::array<Model, 2> models = {};
    std::array<Engine, 2> engines = {};
    std::array<std::vector<Task>, 2> tasks = {};
    std::array<uint8_t, 2> forwards = {};
    uint8_t of = 0, fired = 0, arrived = 0, armed = 0;  // bits: wrappers; gradients; wrappers as the task began

    std::string key() const {
      std::string key;
      for (int w : {0, 1}) {
        key += models[w].key() + static_cast<char>(forwards[w]);
        for (const Task& task : tasks[w]) key += static_cast<char>(1 + task.watched);
        key += '|';
      }
      return key + static_cast<char>(of) + static_cast<char>(fired) + static_cast<char>(arrived);
    }
  };

  void push(const State& state) {
    if (seen_.insert(state.key()).second) open_.push_back(state);
  }
  Shell shell(State& state, size_t w) const {
    return {state.models[w], state.engines[w], 0, state.forwards[w], state.tasks[w], flaw_, &state.models[1 - w]};
  }
  static bool is_armed(const State& state, size_t w) { return state.models[w].life.phase() == Phase::Armed; }

  void outside(const State& state) {
    for (size_t w : {0, 1}) {
      if (state.forwards[w] == 3) continue;
      State next = state;
      Lifecycle& life = next.models[w].life;
      CHECK(life.begin_forward(true, shell(next, w)) == Lifecycle::Begin::Arm);
      life.forward_began(true);
      life.forward_ended(/*outputs_hooked=*/true);
      ++next.forwards[w];
      push(next);
    }
    for (uint8_t of : {1, 2, 3}) {
      if (((of & 1) && state.forwards[0] == 0) || ((of & 2) && state.forwards[1] == 0)) continue;
      State next = state;
      next.of = of;
      next.armed = static_cast<uint8_t>(is_armed(state, 0) + 2 * is_armed(state, 1));
      for (auto& tasks : next.tasks) tasks = {Task{}};
      push(next);
    }
  }

  void inside(const State& state) {
    for (size_t w : {0, 1}) {
      if (!((state.of & ~state.fired) >> w & 1)) continue;
      State next = state;
      next.fired |= static_cast<uint8_t>(1 << w);
      const bool raises = shell(next, w).output(/*own=*/false);
      CHECK_EQ(raises, (state.armed >> w & 1) == 0);
      raises ? leave(next, /*raised=*/true) : push(next);
    }
    if (state.fired != state.of) return;
    for (size_t gradient = 0; gradient < 5; ++gradient) {
      if (!((kOf[state.of] & ~state.arrived) >> gradient & 1)) continue;
      State next = state;
      next.arrived |= static_cast<uint8_t>(1 << gradient);
      // The hooks of both wrappers fire for the common parameter.
      bool raises = false;
      if (gradient <= 2) raises |= shell(next, 0).gradient(gradient == 1 ? 1 : gradient);
      if (gradient == 1 || gradient > 2) raises |= shell(next, 1).gradient(gradient == 1 ? 1 : gradient == 3 ? 0 : 2);
      CHECK(!raises);
      push(next);
    }
    if (state.arrived != kOf[state.of]) return;
    State next = state;
    for (size_t w : {0, 1}) {
      Shell sees = shell(next, w);
      if (sees.task_ends() == Lifecycle::End::Finalize) {
        sees.vote();
        sees.deliver();
      }
    }
    leave(next, /*raised=*/false);
  }

  void leave(State next, bool raised) {
    for (size_t w : {0, 1}) {
      Model& model = next.models[w];
      if (next.tasks[w].back().watched) shell(next, w).task_failed(next.tasks[w].back());
      next.tasks[w].clear();
      const bool took_part = next.of >> w & 1;
      if (!took_part) {
        CHECK_EQ(is_armed(next, w), (next.armed >> w & 1) != 0);
      } else if (!raised) {
        CHECK_EQ(int{model.averaged}, int{kAll});
        CHECK(model.life.phase() == Phase::Consumed && !model.life.lost());
      }
      if (model.life.is_ending()) model.life.refusal_ended();  // of one rank
    }
    next.of = next.fired = next.arrived = 0;
    push(next);
  }

  const Flaw flaw_;
  std::unordered_set<std::string> seen_;
  std::vector<State> open_;
};

}  // namespace syncengine::walk
