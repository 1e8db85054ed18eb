// The walk of all that can happen to the ranks of steps_world.h, from their first forward until none can go on.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "steps/lifecycle.h"
#include "steps_model.h"
#include "steps_world.h"
#include "test.h"

namespace syncengine::walk {

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

  static bool averaged(const Rank& rank, size_t i) {
    return rank.outcome[i] == kAveraged || rank.outcome[i] == kBehind;
  }
  static bool any_averaged(const World& world, size_t i) {
    return std::any_of(world.ranks.begin(), world.ranks.end(), [i](const Rank& rank) { return averaged(rank, i); });
  }

  void check_end(const World& world) const {
    if (world.engine.failed) {
      bool behind = false;
      for (const Rank& rank : world.ranks)
        for (size_t i = 0; i < iterations(); ++i)
          behind |= rank.outcome[i] == kBehind || (rank.outcome[i] == kAtEnd && any_averaged(world, i));
      CHECK(behind);
      return;
    }
    for (const Rank& rank : world.ranks) {
      CHECK(rank.pc == Pc::Over);
      for (size_t i = 0; i < iterations(); ++i)
        CHECK(rank.outcome[i] == kAtEnd || averaged(rank, i) || !any_averaged(world, i));
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
      case Pc::Begin: return rank.iteration == iterations() ? end(world, me) : begin(world, me);
      case Pc::AwaitEnd: return world.engine.failed ? end(world, me) : await_end(world, me);
      case Pc::Forward: return forward(world, me);
      case Pc::Between: return between(world, me);
      case Pc::Task: return task(world, me);
      case Pc::AwaitVote: return world.engine.failed ? end(world, me) : await_vote(world, me);
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

  void end(const World& world, size_t me) {
    World next = world;
    next.ranks[me].pc = Pc::Over;
    push(next);
  }

  void begin(const World& world, size_t me) {
    for (bool synchronize : {true, false}) {
      // Behind a synchronized forward without its backward, one under no_sync is averaged, as under DDP.
      if (!synchronize && (!options_.local || world.ranks[me].model.life.phase() == Phase::Armed)) continue;
      World next = world;
      Rank& rank = next.ranks[me];
      Shell sees = shell(next, me);
      Lifecycle& life = rank.model.life;
      CHECK(!life.is_recomputed(sees) && life.phase() != Phase::Finalizing);
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
    if (dropped.ranks[me].model.life.phase() == Phase::Armed) {  // micro-batches, which say so
      dropped.ranks[me].model.life.backward_ended();
      push(dropped);
    }
  }

  void task(const World& world, size_t me) {
    const Rank& rank = world.ranks[me];
    if (options_.hooked && !rank.started) {
      World next = world;
      next.ranks[me].started = true;
      const bool raises = shell(next, me).output(/*own=*/!rank.synchronize);
      return raises ? fail(next, me, /*by_hook=*/true, /*reached=*/false) : push(next);
    }
    for (size_t i = 0; i < kParameters; ++i) {
      if (rank.arrived >> i & 1) continue;
      World next = world;
      next.ranks[me].arrived |= static_cast<uint8_t>(1 << i);
      const bool raises = !rank.model.life.hooks_removed() && shell(next, me).gradient(i);
      raises ? fail(next, me, /*by_hook=*/true, /*reached=*/false) : push(next);
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
    raise_at_end(world, me);
    if (world.engine.is_refused(kVote, step)) {
      shell(next, me).refused();
      return fail(next, me, /*by_hook=*/false, /*reached=*/true);
    }
    if (!world.engine.has_run(kVote, step) && flaw_ != Flaw::EndForgetsVote) return;
    rank.pc = Pc::AwaitBuckets;
    push(next);
  }

  // The wait for averages raises.
  void raise_at_end(const World& world, size_t me) {
    if (place(world.ranks[me], me) != Place::AtEnd) return;
    World next = world;
    next.ranks[me].raised = true;
    if (flaw_ != Flaw::EndUntold) shell(next, me).give_up(Lifecycle::Where::Backward, false);
    fail(next, me, /*by_hook=*/false, /*reached=*/true, kAtEnd);
  }

  void await_buckets(const World& world, size_t me) {
    if (!world.engine.failed) raise_at_end(world, me);
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

}  // namespace syncengine::walk
