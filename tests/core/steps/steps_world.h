// Ranks that run a program of forwards and backwards, as the walk of steps_explorer.h keeps them between two moves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "steps_model.h"

namespace syncengine::walk {

inline constexpr uint8_t kAll = (1 << kParameters) - 1;

// The place where a rank raises in an iteration, once; InBackward stands for each place there, AtEnd for each while the
// rank waits for averages. Removes: a hook of the user takes the model's hooks away there, and each later forward
// raises.
enum class Place : uint8_t { Nowhere, InForward, InBackward, AtEnd, Behind, Removes };
inline constexpr Place kAnywhere[] = {Place::Nowhere, Place::InForward, Place::InBackward,
                                      Place::AtEnd,   Place::Behind,    Place::Removes};
using Places = std::vector<std::vector<Place>>;  // by rank and iteration

struct Options {
  bool hooked = true;    // outputs are found
  bool nested = false;   // a task runs another one, as reentrant checkpoints do
  bool local = false;    // forwards may be under no_sync
  bool drops = false;    // a forward may be dropped, whose backward does not come
  bool again = false;    // a second backward runs through the same forward
  bool kept = false;     // a failed task may be dropped late
  bool ordered = false;  // gradients come in one order
};

enum class Pc : uint8_t { Begin, AwaitEnd, Forward, Between, Task, AwaitVote, AwaitBuckets, Over };
// kAtEnd: the rank has raised when it had announced everything, so the others may have averages.
enum Outcome : uint8_t { kNone, kAveraged, kLost, kAtEnd, kBehind, kLocal };

struct Rank {
  Pc pc = Pc::Begin;
  uint8_t iteration = 0, forwards = 0, arrived = 0;
  bool synchronize = true, started = false, nested = false, raised = false, again = false, fails = false;
  Model model = {};
  std::vector<Task> tasks = {};
  std::vector<uint8_t> outcome = {};
};

struct World {
  Engine engine;
  std::vector<Rank> ranks;

  std::string key() const {
    std::string key(1, static_cast<char>(engine.failed));
    auto add = [&](uint64_t value) { key += static_cast<char>(value); };
    for (size_t i = 0; i < ranks.size(); ++i) {
      const Rank& rank = ranks[i];
      for (uint64_t value : {uint64_t(rank.pc), uint64_t(rank.iteration), uint64_t(rank.forwards),
                             uint64_t(rank.arrived), uint64_t(rank.synchronize), uint64_t(rank.started),
                             uint64_t(rank.nested), uint64_t(rank.raised), uint64_t(rank.again), uint64_t(rank.fails)})
        add(value);
      for (const Task& task : rank.tasks)
        for (uint64_t value :
             {uint64_t(task.inner) + 2 * task.watched + 4 * task.tells_outer + 8 * task.tells_ours + 16 * task.judged,
              task.backward, task.forwards})
          add(value);
      for (uint8_t outcome : rank.outcome) add(outcome);
      key += rank.model.key() + '|';
      for (uint8_t step : engine.ranks[i].announced) add(step);
      add(engine.ranks[i].refused);
      for (uint8_t iteration : engine.ranks[i].meaning) add(iteration);
    }
    return key;
  }
};

}  // namespace syncengine::walk
