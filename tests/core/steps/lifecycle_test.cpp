// Walks all that can happen to a model's steps, as steps_model.h has them: on one rank with nested tasks, forwards that
// are dropped, and errors at each place; on two ranks, of which both or one raise; and for two wrappers that share a
// parameter. A backward through a synchronized forward averages each gradient once, or raises; all ranks have averages
// of a step or none, unless one raises behind them; nobody waits for ever; and behind any end a forward works.
#include "steps/lifecycle.h"

#include <cstdio>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "steps_model.h"
#include "test.h"

namespace syncengine {

namespace walk {
namespace {

constexpr uint8_t kAll = (1 << kParameters) - 1;

// The place where a rank raises in an iteration, once; InBackward stands for each place there. Removes: a hook of the
// user takes the model's hooks away there, and each later forward raises.
enum class Place : uint8_t { Nowhere, InForward, InBackward, Behind, Removes };
constexpr Place kAnywhere[] = {Place::Nowhere, Place::InForward, Place::InBackward, Place::Behind, Place::Removes};
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
enum Outcome : uint8_t { kNone, kAveraged, kLost, kBehind, kLocal };

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

class Explorer {
 public:
  Explorer(Places places, const Options& options, Flaw flaw)
      : places_(std::move(places)), options_(options), flaw_(flaw) {}

  // The number of different states. Throws at the first bad one.
  size_t explore() {
    World first;
    first.engine.ranks.resize(places_.size());
    first.ranks.resize(places_.size());
    for (Rank& rank : first.ranks) rank.outcome.resize(iterations());
    push(first);
    while (!open_.empty()) {
      const World world = std::move(open_.back());
      open_.pop_back();
      moved_ = false;
      try {
        for (size_t rank = 0; rank < world.ranks.size(); ++rank) act(world, rank);
        if (!moved_) check_end(world);
      } catch (const testing::Failure& failure) {
        throw testing::Failure(failure.what() + describe(world));
      }
    }
    return seen_.size();
  }

 private:
  size_t iterations() const { return places_[0].size(); }
  Place place(const Rank& rank, size_t me) const { return rank.raised ? Place::Nowhere : places_[me][rank.iteration]; }
  Shell shell(World& world, size_t me) const {
    Rank& rank = world.ranks[me];
    return {rank.model, world.engine, me, static_cast<uint8_t>(rank.iteration + 1), rank.tasks, flaw_};
  }

  void push(const World& world) {
    if (seen_.insert(world.key()).second) open_.push_back(world);
    moved_ = true;
  }

  void check_end(const World& world) const {
    if (world.engine.failed) {
      bool behind = false;
      for (const Rank& rank : world.ranks)
        for (uint8_t outcome : rank.outcome) behind |= outcome == kBehind;
      CHECK(behind);
      return;
    }
    for (const Rank& rank : world.ranks) {
      CHECK(rank.pc == Pc::Over);
      for (size_t i = 0; i < iterations(); ++i) {
        auto averaged = [i](const Rank& of) { return of.outcome[i] == kAveraged || of.outcome[i] == kBehind; };
        CHECK_EQ(averaged(rank), averaged(world.ranks[0]));
      }
    }
  }

  // For whoever has to find out how it came to that.
  std::string describe(const World& world) const {
    std::string text = options_.hooked ? "; outputs hooked" : "; outputs not hooked";
    for (size_t me = 0; me < world.ranks.size(); ++me) {
      const Rank& rank = world.ranks[me];
      text += "; rank " + std::to_string(me) + " raises at";
      for (Place place : places_[me]) text += " " + std::to_string(int(place));
      text += ", in iteration " + std::to_string(rank.iteration) + " at " + std::to_string(int(rank.pc)) + ", phase " +
              std::to_string(int(rank.model.life.phase())) + ", step " + std::to_string(rank.model.life.step()) +
              ", outcomes";
      for (uint8_t outcome : rank.outcome) text += " " + std::to_string(outcome);
    }
    return text;
  }

  static void next_iteration(Rank& rank, Outcome outcome) {
    if (!rank.again) rank.outcome[rank.iteration] = outcome;
    ++rank.iteration;
    rank.forwards = rank.arrived = 0;
    rank.started = rank.nested = rank.raised = rank.again = rank.fails = false;
    rank.pc = Pc::Begin;
  }

  void act(const World& world, size_t me) {
    const Rank& rank = world.ranks[me];
    drop_late(world, me);
    switch (rank.pc) {
      case Pc::Begin: return begin(world, me);
      case Pc::AwaitEnd: return await_end(world, me);
      case Pc::Forward: return forward(world, me);
      case Pc::Between: return between(world, me);
      case Pc::Task: return task(world, me);
      case Pc::AwaitVote: return await_vote(world, me);
      case Pc::AwaitBuckets: return await_buckets(world, me);
      case Pc::Over: return;
    }
  }

  void drop_late(const World& world, size_t me) {
    if (world.ranks[me].model.kept.empty()) return;
    World next = world;
    auto& kept = next.ranks[me].model.kept;
    const Task task = kept.front();
    kept.erase(kept.begin());
    // A task leaves alone what a later forward has made.
    const auto before = next.ranks[me].model.life.step();
    const bool later = task.forwards != next.ranks[me].model.life.forwards();
    shell(next, me).task_failed(task);
    if (later) CHECK_EQ(next.ranks[me].model.life.step(), before);
    push(next);
  }

  void begin(const World& world, size_t me) {
    for (bool synchronize : {true, false}) {
      // Behind a synchronized forward without its backward, one under no_sync is averaged, as under DDP.
      if (!synchronize && (!options_.local || world.ranks[me].model.life.phase() == Phase::Armed)) continue;
      World next = world;
      Rank& rank = next.ranks[me];
      if (rank.iteration == iterations()) {
        rank.pc = Pc::Over;
        return push(next);
      }
      Shell sees = shell(next, me);
      Lifecycle& life = rank.model.life;
      CHECK(!life.is_recomputed(sees));
      rank.synchronize = synchronize;
      switch (life.begin_forward(synchronize, sees)) {
        case Lifecycle::Begin::Unfinished:  // only where nobody has heard of a failed task yet
          CHECK(!rank.model.kept.empty());
          sees.give_up(Lifecycle::Where::Backward, false);
          break;
        case Lifecycle::Begin::Unwatched:
          CHECK(life.hooks_removed());
          next_iteration(rank, kLocal);
          break;
        case Lifecycle::Begin::Local:
          life.forward_began(false);
          rank.pc = Pc::Forward;
          break;
        case Lifecycle::Begin::Arm: rank.pc = Pc::AwaitEnd; break;
      }
      push(next);
    }
  }

  void await_end(const World& world, size_t me) {
    World next = world;
    Rank& rank = next.ranks[me];
    Lifecycle& life = rank.model.life;
    if (world.engine.failed) {
      rank.pc = Pc::Over;
      return push(next);
    }
    if (life.is_ending() && flaw_ != Flaw::NoEndAwaited) {
      if (!world.engine.has_run(kEnd, rank.model.ends)) return;
      life.refusal_ended();
    }
    if (life.hooks_removed()) {
      shell(next, me).give_up(Lifecycle::Where::Forward, true);
      next_iteration(rank, kLost);
      return push(next);
    }
    life.forward_began(true);
    rank.pc = Pc::Forward;
    push(next);
  }

  void forward(const World& world, size_t me) {
    World next = world;
    Rank& rank = next.ranks[me];
    if (rank.synchronize) rank.model.life.forward_ended(options_.hooked);
    ++rank.forwards;
    rank.pc = Pc::Between;
    push(next);
    if (place(world.ranks[me], me) != Place::InForward || !rank.synchronize) return;
    World raises = world;
    Shell sees = shell(raises, me);
    CHECK(raises.ranks[me].model.life.forward_raised(sees) == Lifecycle::ForwardError::GivesUp);
    sees.give_up(Lifecycle::Where::Forward, true);
    const Model& model = raises.ranks[me].model;
    CHECK(world.engine.failed || !model.life.is_ending() || model.life.is_undecided());
    next_iteration(raises.ranks[me], kLost);
    push(raises);
  }

  void between(const World& world, size_t me) {
    World next = world;
    Rank& rank = next.ranks[me];
    rank.tasks = {Task{}};
    rank.pc = Pc::Task;
    push(next);
    if (!options_.drops || rank.forwards == 2) return;
    World dropped = world;
    dropped.ranks[me].pc = Pc::Begin;
    push(dropped);
    if (dropped.ranks[me].model.life.drop_step()) {  // micro-batches, which say so
      dropped.ranks[me].model.life.backward_ended();
      push(dropped);
    }
  }

  void task(const World& world, size_t me) {
    const Rank& rank = world.ranks[me];
    if (options_.hooked && !rank.started) {
      World next = world;
      next.ranks[me].started = true;
      if (shell(next, me).output(/*own=*/!rank.synchronize)) {
        fail(next, me, /*by_hook=*/true, /*reached=*/false);
      } else {
        push(next);
      }
      return;
    }
    for (size_t i = 0; i < kParameters; ++i) {
      if (rank.arrived >> i & 1) continue;
      World next = world;
      next.ranks[me].arrived |= static_cast<uint8_t>(1 << i);
      if (!rank.model.life.hooks_removed() && shell(next, me).gradient(i)) {
        fail(next, me, /*by_hook=*/true, /*reached=*/false);
      } else {
        push(next);
      }
      if (options_.ordered) break;
    }
    if (options_.nested && !rank.nested) {
      World next = world;
      next.ranks[me].nested = true;
      next.ranks[me].tasks.push_back({.inner = true});
      push(next);
    }
    if (place(rank, me) == Place::InBackward) {
      for (bool by_hook : {true, false}) {
        World next = world;
        next.ranks[me].raised = true;
        fail(next, me, by_hook, /*reached=*/false);
      }
      recompute(world, me);
    }
    if (place(rank, me) == Place::Removes && rank.model.life.phase() == Phase::Syncing) {
      World next = world;
      shell(next, me).give_up(Lifecycle::Where::Backward, false);
      next.ranks[me].model.life.remove_hooks();
      next.ranks[me].raised = true;
      push(next);
    }
    if (rank.tasks.back().inner || rank.arrived == kAll) end_task(world, me);
  }

  // A checkpoint's forward, which is the model's own, raises.
  void recompute(const World& world, size_t me) {
    World next = world;
    Rank& rank = next.ranks[me];
    Shell sees = shell(next, me);
    if (!rank.model.life.is_recomputed(sees)) return;
    auto error = rank.model.life.forward_raised(sees);
    if (flaw_ == Flaw::RecomputedForward) error = Lifecycle::ForwardError::GivesUp;
    if (error == Lifecycle::ForwardError::GivesUp) sees.give_up(Lifecycle::Where::Forward, true);
    rank.raised = true;
    fail(next, me, /*by_hook=*/false, /*reached=*/false);
  }

  void end_task(const World& world, size_t me) {
    World next = world;
    Shell sees = shell(next, me);
    switch (sees.task_ends()) {
      case Lifecycle::End::Wait:
      case Lifecycle::End::Join: return task_gone(next, me);
      case Lifecycle::End::Lost: return fail(next, me, /*by_hook=*/false, /*reached=*/true);
      case Lifecycle::End::Finalize: break;
    }
    sees.vote();
    next.ranks[me].pc = Pc::AwaitVote;
    push(next);
  }

  void task_gone(World next, size_t me) {
    Rank& rank = next.ranks[me];
    if (rank.tasks.size() == 1 && rank.fails) return fail(next, me, /*by_hook=*/false, /*reached=*/true);
    rank.fails |= shell(next, me).task_gone();
    if (!rank.tasks.empty()) {
      rank.pc = Pc::Task;
      return push(next);
    }
    // The backward has averaged all gradients, or each was this rank's own; else somebody had to raise.
    CHECK(!rank.again);
    if (rank.synchronize) {
      CHECK_EQ(int{rank.model.averaged}, int{kAll});
      CHECK(rank.model.life.phase() == Phase::Consumed && !rank.model.life.lost());
    } else {
      CHECK(rank.model.life.phase() == Phase::Local || rank.model.life.lost());  // by a task that was dropped late
    }
    const Outcome outcome = rank.synchronize ? kAveraged : kLocal;
    if (options_.again && rank.synchronize && rank.model.kept.empty()) {
      World again = next;
      Rank& once_more = again.ranks[me];
      once_more.outcome[rank.iteration] = outcome;
      once_more.again = true;
      once_more.arrived = 0;
      once_more.started = once_more.nested = false;
      once_more.tasks = {Task{}};
      once_more.pc = Pc::Task;
      push(again);
    }
    next_iteration(rank, outcome);
    push(next);
  }

  void await_vote(const World& world, size_t me) {
    World next = world;
    Rank& rank = next.ranks[me];
    const uint64_t step = rank.model.life.step();
    if (world.engine.failed) {
      rank.pc = Pc::Over;
      return push(next);
    }
    if (world.engine.is_refused(kVote, step)) {
      shell(next, me).refused();
      return fail(next, me, /*by_hook=*/false, /*reached=*/true);
    }
    if (!world.engine.has_run(kVote, step) && flaw_ != Flaw::EndForgetsVote) return;
    rank.pc = Pc::AwaitBuckets;
    push(next);
  }

  void await_buckets(const World& world, size_t me) {
    const uint64_t step = world.ranks[me].model.life.step();
    for (size_t bucket = 0; bucket < kVote; ++bucket) {
      if (world.engine.failed) break;
      CHECK(!world.engine.is_refused(bucket, step));  // the vote has run, so all have announced all
      if (!world.engine.has_run(bucket, step)) return;
    }
    World next = world;
    shell(next, me).deliver();
    if (place(next.ranks[me], me) == Place::Behind) {
      World raises = next;
      raises.ranks[me].raised = true;
      shell(raises, me).give_up(Lifecycle::Where::BehindAverages, false);
      fail(raises, me, /*by_hook=*/false, /*reached=*/true, kBehind);
    }
    task_gone(std::move(next), me);
  }

  // An error leaves all tasks. `by_hook`: of this model's; `reached`: the innermost has come to its end. A single task
  // may be dropped late.
  void fail(World next, size_t me, bool by_hook, bool reached, Outcome outcome = kLost) {
    Rank& rank = next.ranks[me];
    const bool averaged = rank.model.averaged == kAll && !rank.model.life.lost() && !rank.model.filling &&
                          rank.model.life.phase() == Phase::Consumed && rank.synchronize;
    if (averaged) outcome = kBehind;
    if (options_.kept && !reached && !by_hook && rank.tasks.size() == 1 && rank.tasks[0].watched) {
      World late = next;
      late.ranks[me].model.kept.push_back(late.ranks[me].tasks[0]);
      late.ranks[me].tasks.clear();
      next_iteration(late.ranks[me], outcome);
      push(late);
    }
    if (by_hook && rank.model.life.awaits()) shell(next, me).give_up(Lifecycle::Where::Backward, false);
    while (!rank.tasks.empty()) {
      if (rank.tasks.back().watched) shell(next, me).task_failed(rank.tasks.back());
      shell(next, me).task_gone();
    }
    // Nobody of ours may have seen it: the forward is as one that was dropped, and the program tries again.
    const bool unseen = rank.synchronize && rank.model.life.phase() == Phase::Armed;
    const uint8_t iteration = rank.iteration;
    next_iteration(rank, rank.synchronize ? outcome : kLocal);
    if (unseen) {
      rank.iteration = iteration;
      rank.raised = true;
    }
    push(next);
  }

  const Places places_;
  const Options options_;
  const Flaw flaw_;
  bool moved_ = false;
  std::unordered_set<std::string> seen_;
  std::vector<World> open_;
};

size_t walk_one_rank(Flaw flaw = Flaw::None) {
  size_t states = 0;
  for (bool hooked : {true, false})
    for (Place first : kAnywhere)
      for (Place second : kAnywhere)
        states +=
            Explorer({{first, second, Place::Nowhere}},
                     {.hooked = hooked, .nested = true, .local = true, .drops = true, .again = true, .kept = true},
                     flaw)
                .explore();
  return states;
}

size_t walk_two_ranks(Flaw flaw = Flaw::None) {
  size_t states = 0;
  for (bool hooked : {true, false})
    for (Place a : kAnywhere)
      for (Place b : kAnywhere)
        for (Place then : {Place::Nowhere, Place::InForward, Place::InBackward})
          states += Explorer({{a, then, Place::Nowhere}, {b, Place::Nowhere, Place::Nowhere}},
                             {.hooked = hooked, .ordered = true}, flaw)
                        .explore();
  return states;
}

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

}  // namespace
}  // namespace walk

TEST(steps_of_one_rank_average_or_raise) {
  const size_t states = walk::walk_one_rank();
  std::printf("  one rank: %zu states\n", states);
  CHECK(states > 1000);
}

TEST(steps_of_two_ranks_have_averages_on_both_or_none) {
  const size_t states = walk::walk_two_ranks();
  std::printf("  two ranks: %zu states\n", states);
  CHECK(states > 10000);
}

TEST(two_wrappers_with_one_parameter_average_their_own_backwards) {
  const size_t states = walk::Wrappers(walk::Flaw::None).explore();
  std::printf("  two wrappers: %zu states\n", states);
  CHECK(states > 100);
}

// The walks find what they are there for.
TEST(steps_walks_find_each_flaw) {
  for (int flaw = 1; flaw <= static_cast<int>(walk::kLastFlaw); ++flaw) {
    const auto planted = static_cast<walk::Flaw>(flaw);
    const bool found = testing::fails([&] { walk::Wrappers(planted).explore(); }) ||
                       testing::fails([&] { walk::walk_two_ranks(planted); }) ||
                       testing::fails([&] { walk::walk_one_rank(planted); });
    if (!found) throw testing::Failure("flaw " + std::to_string(flaw) + " was not found");
  }
}

}  // namespace syncengine
