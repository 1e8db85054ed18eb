// A rank as the walks of a model's steps see it: the Lifecycle, the Filling, and what the reducer does with their
// answers, in the reducer's order; autograd's tasks; and an engine of three rules. A slot runs when all ranks have
// announced it, it never does when a rank has refused the step without that, and the end of a refused step runs last.
//
// Each of the tests refusals_within_a_host_leave_nobody_waiting and refusals_between_hosts_leave_nobody_waiting of
// schedule_test.cpp proves all three rules: the first in check_end(), where no rank may wait; the second in drop(),
// where nothing that is refused may be in the log; the third in take(), where nothing may come behind the end. In
// refusal_walk_finds_what_is_missing the flaws ReadsAnnouncedFirst and RefusesFirst break the second, EndNotLast the
// third. Facts that Shell keeps as they are have tables in verdicts_test.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "steps/bucket_plan.h"
#include "steps/lifecycle.h"
#include "test.h"

namespace syncengine::walk {

// A flaw that is planted, to see that a walk finds it.
enum class Flaw : uint8_t {
  None,
  NoStepBegins,       // an error before backward does not begin the step, which has no number then
  BeginsTwice,        // an error in backward begins the step once more
  NoEndAwaited,       // a forward does not wait for the end of a refused step
  NoEndAnnounced,     // a rank that hears of a refusal does not end the step
  VotesAtOnce,        // the last bucket is announced with its last gradient
  NobodyIsTold,       // the peers do not hear of an error
  BehindTwice,        // an error behind averages is told though the step was refused since
  KeepsPhase,         // a step that was lost is not over
  EndForgetsVote,     // averages are put into .grad before the vote has run
  LaterTask,          // a task that is dropped late takes the next step with it
  OuterUnwatched,     // the task around a checkpoint's is not watched
  LossUnheard,        // a task that ends does not say that its step was lost meanwhile
  ClaimForgotten,     // nobody knows from whose output a backward comes
  SpentIsForeign,     // a second backward through one forward is taken for another model's
  Undecided,          // an error in forward decides about .grad before the peers have
  EndUntold,          // an error while a rank waits for averages gives nothing up
  RecomputedForward,  // an error of a checkpoint's forward is told, and again when its backward fails
};
constexpr Flaw kLastFlaw = Flaw::RecomputedForward;

constexpr int kParameters = 3, kSlots = 3, kMostSteps = 6;  // two buckets, of which the second is the vote, and the end
constexpr size_t kVote = 1, kEnd = 2;

inline std::shared_ptr<const BucketPlan> plan_of_three() {
  static const auto plan = [] {
    auto names = std::make_shared<ModelNames>(ModelNames{"Model", {"a", "b", "c"}});
    const std::vector<Fact> facts(kParameters, {.footprint = {4, 6}, .dtype = DType::Float32});
    return std::make_shared<const BucketPlan>(std::vector<std::vector<size_t>>{{0, 1}, {2}}, facts, names, false);
  }();
  return plan;
}

// By rank: the last step in which it has announced each slot, and the steps that it has refused, as bits; and which of
// the program's iterations it means by a step.
struct Engine {
  struct Rank {
    std::array<uint8_t, kSlots> announced{};
    uint16_t refused = 0;
    std::array<uint8_t, kMostSteps> meaning{};
  };
  std::vector<Rank> ranks;
  bool failed = false;

  void mean(size_t rank, uint64_t step, uint8_t iteration) {
    CHECK(step < kMostSteps);
    ranks[rank].meaning[step] = iteration;
    for (const Rank& other : ranks)
      if (other.meaning[step] != 0) CHECK_EQ(int{other.meaning[step]}, int{iteration});
  }
  void announce(size_t rank, size_t slot, uint64_t step) {
    CHECK(slot == kEnd || (ranks[rank].refused >> step & 1) == 0);
    CHECK(ranks[rank].announced[slot] < step);
    // A slot is one word: its number may only grow when nobody waits for the step before any more.
    for (uint64_t before = 1; before < step; ++before)
      CHECK(ranks[rank].announced[kEnd] != before || has_run(kEnd, before));
    ranks[rank].announced[slot] = static_cast<uint8_t>(step);
    for (const Rank& other : ranks) failed |= has_passed_over(ranks[rank], other, step);
  }
  void refuse(size_t rank, uint64_t step) {
    ranks[rank].refused |= static_cast<uint16_t>(1 << step);
    for (const Rank& other : ranks)
      for (uint8_t later : other.announced) failed |= later > step && has_passed_over(other, ranks[rank], later);
  }
  bool has_run(size_t slot, uint64_t step) const {
    for (const Rank& rank : ranks)
      if (rank.announced[slot] < step) return false;
    return true;
  }
  bool is_refused(size_t slot, uint64_t step) const {
    if (has_run(slot, step)) return false;
    for (const Rank& rank : ranks)
      if ((rank.refused >> step & 1) != 0 && rank.announced[slot] < step) return true;
    return false;
  }

 private:
  // Whether `rank`, which announces something of `step`, has not ended one that the other has refused.
  static bool has_passed_over(const Rank& rank, const Rank& other, uint64_t step) {
    for (uint64_t before = 1; before < step; ++before)
      if ((other.refused >> before & 1) != 0 && rank.announced[kEnd] < before) return true;
    return false;
  }
};

struct Task {
  bool inner = false, watched = false, tells_outer = false, tells_ours = false, judged = false;
  uint64_t backward = 0, forwards = 0;  // as they were noted with its end
};

// One wrapper of a model on one rank.
struct Model {
  Lifecycle life;
  std::optional<Filling> filling;
  uint64_t backwards = 0;
  uint64_t ends = 0;  // the refused step whose end is awaited
  int watched = 0;
  std::vector<Task> kept = {};  // that have failed, and are dropped later
  uint8_t averaged = 0;         // of the last backward that brought gradients: their bits
  bool keeps = false;           // .grad is what it was before a forward that raised

  std::string key() const {
    std::string key;
    auto add = [&](uint64_t value) { key += static_cast<char>(value); };
    uint64_t ended_well = 0;
    for (uint64_t backward = 1; backward <= backwards; ++backward)
      for (uint64_t forwards = 0; forwards <= life.forwards(); ++forwards)
        if (life.task_failed(backward, forwards).averages) ended_well = backward * 16 + forwards;
    for (uint64_t value :
         {uint64_t(life.phase()), uint64_t(life.claimed()), uint64_t(life.outputs_hooked()),
          uint64_t(life.lost() + 2 * life.hooks_removed()), uint64_t(life.is_ending()), uint64_t(life.is_undecided()),
          life.step(), life.forwards(), ended_well, backwards, uint64_t(watched), uint64_t(averaged), uint64_t(keeps)})
      add(value);
    if (filling)
      for (size_t bucket = 0; bucket < 2; ++bucket)
        add(filling->is_ready(bucket) + 2 * filling->has_gone(bucket) + 4 * filling->all() + 8);
    for (const Task& task : kept) add(task.backward * 16 + task.forwards);
    return key;
  }
};

// The facts that one wrapper sees, and the reducer's work for it.
class Shell {
 public:
  Shell(Model& model, Engine& engine, size_t rank, uint8_t iteration, std::vector<Task>& tasks, Flaw flaw,
        const Model* other = nullptr)
      : model_(model), engine_(engine), rank_(rank), iteration_(iteration), tasks_(tasks), flaw_(flaw), other_(other) {}

  // --- Sees
  bool in_task() const { return !tasks_.empty(); }
  bool in_our_task() const { return model_.watched > 0; }
  bool whole_graph() const { return true; }
  bool accumulates() const { return true; }
  bool is_outermost() const { return tasks_.size() == 1; }
  bool runs_forwards_nodes() const { return !tasks_.back().inner; }
  bool runs_forwards_graph() {
    if (!tasks_.back().judged) tasks_.back().judged = tasks_.back().tells_outer = true;
    return runs_forwards_nodes();
  }
  bool claimed_elsewhere(size_t /*parameter*/) const { return other_ && other_->life.claimed(); }
  bool awaited_elsewhere(size_t /*parameter*/) const { return other_ && other_->life.awaits(); }
  bool collected_all() const { return model_.filling->all(); }
  bool observes() const { return false; }
  bool has_failed() const { return engine_.failed; }
  bool has_plan() const { return true; }
  bool all_frozen() const { return false; }
  bool can_refuse() const { return true; }

  // --- As Reducer does

  using Where = Lifecycle::Where;

  void begin_backward() {
    model_.life.backward_begins();
    model_.filling.emplace(plan_of_three(), /*votes=*/flaw_ != Flaw::VotesAtOnce);
    model_.life.step_begins();
    ++model_.backwards;
    model_.averaged = 0;
    engine_.mean(rank_, model_.life.step(), iteration_);
  }

  void give_up(Where where, bool keeps) {
    auto loss = model_.life.raised(where, *this);
    if (flaw_ == Flaw::NoStepBegins && loss == Lifecycle::Loss::BeginsStep) loss = Lifecycle::Loss::Here;
    if (flaw_ == Flaw::BeginsTwice && loss == Lifecycle::Loss::Here && where == Where::Backward)
      loss = Lifecycle::Loss::BeginsStep;
    if (flaw_ == Flaw::BehindTwice && loss == Lifecycle::Loss::Nothing) loss = Lifecycle::Loss::Here;
    if (loss == Lifecycle::Loss::Aborts) engine_.failed = true;
    if (loss == Lifecycle::Loss::Nothing || loss == Lifecycle::Loss::Aborts) return;
    if (loss == Lifecycle::Loss::BeginsStep) begin_backward();
    switch (flaw_ == Flaw::NobodyIsTold ? Lifecycle::Tell::Nobody : model_.life.tell(*this)) {
      case Lifecycle::Tell::Nobody: break;
      case Lifecycle::Tell::Abort: engine_.failed = true; break;
      case Lifecycle::Tell::Refuse: engine_.refuse(rank_, model_.life.step()); end(where == Where::Forward);
    }
    lose(keeps);
  }
  void end(bool raised_in_forward) {
    if (flaw_ == Flaw::NoEndAnnounced && !raised_in_forward && !engine_.ranks[rank_].refused) return;
    engine_.announce(rank_, kEnd, model_.ends = model_.life.step());
    model_.life.refusal_ends(raised_in_forward && flaw_ != Flaw::Undecided);
  }
  void lose(bool keeps) {
    CHECK(!keeps || model_.averaged == 0 || !model_.filling);  // what a backward has brought can't be kept
    model_.keeps = keeps;
    model_.filling.reset();
    if (flaw_ != Flaw::KeepsPhase) model_.life.step_lost();
  }

  void watch() {
    Task& task = tasks_.back();
    if (task.watched) return;
    task.watched = true;
    ++model_.watched;
    task.backward = model_.backwards + (model_.life.phase() == Phase::Armed);
    task.forwards = model_.life.forwards();
    if (!model_.life.outputs_hooked()) task.tells_ours = true;
  }

  // Returns whether it raises.
  bool output(bool own) {
    const bool claimed = model_.life.claimed();
    switch (model_.life.output(own, *this)) {
      case Lifecycle::Output::Ignore:
      case Lifecycle::Output::Own: return false;
      case Lifecycle::Output::Spent: return flaw_ != Flaw::SpentIsForeign;
      case Lifecycle::Output::Claims: break;
    }
    if (flaw_ == Flaw::ClaimForgotten && !claimed) model_.life.forward_began(true);
    watch();
    return false;
  }

  // Returns whether it raises.
  bool gradient(size_t parameter) {
    auto whose = model_.life.gradient(parameter, *this);
    if (flaw_ == Flaw::SpentIsForeign && whose == Attribution::Consumed) whose = Attribution::Foreign;
    switch (whose) {
      case Attribution::Foreign:
      case Attribution::Local: return false;
      case Attribution::TooLate: engine_.failed = true; return true;
      case Attribution::GivenUp:
      case Attribution::Consumed: return true;
      case Attribution::First:
        watch();
        begin_backward();
        break;
      case Attribution::Mine: watch(); break;
    }
    CHECK((model_.averaged >> parameter & 1) == 0);
    model_.averaged |= static_cast<uint8_t>(1 << parameter);
    const auto [bucket, first, full] = model_.filling->count(parameter);
    if (full && model_.filling->filled(bucket, false)) announce(bucket);
    return false;
  }
  void announce(size_t bucket) {
    engine_.announce(rank_, bucket, model_.life.step());
    model_.filling->went(bucket);
  }

  // The end of the task on this thread.
  Lifecycle::End task_ends() {
    if (!tasks_.back().watched) return Lifecycle::End::Wait;
    --model_.watched;
    tasks_.back().watched = false;
    const auto end = model_.life.task_ended(*this);
    return flaw_ == Flaw::LossUnheard && end == Lifecycle::End::Lost ? Lifecycle::End::Join : end;
  }
  // The task is gone, and its thread is back in the one around it, if there is one. Returns whether that will raise.
  bool task_gone() {
    const Task gone = tasks_.back();
    tasks_.pop_back();
    if (tasks_.empty()) return false;
    bool fails = false;
    for (bool ours : {true, false}) {
      if (!(ours ? gone.tells_ours : gone.tells_outer)) continue;
      switch (model_.life.outer_task(ours, *this)) {
        case Lifecycle::Outer::Leave: break;
        case Lifecycle::Outer::Watch:
          if (flaw_ != Flaw::OuterUnwatched) watch();
          break;
        case Lifecycle::Outer::Fail: fails |= flaw_ != Flaw::SpentIsForeign;
      }
    }
    return fails;
  }
  // A watched task is dropped without its end.
  void task_failed(const Task& task) {
    --model_.watched;
    const uint64_t forwards = flaw_ == Flaw::LaterTask ? model_.life.forwards() : task.forwards;
    const auto [step, averages, keeps] = model_.life.task_failed(task.backward, forwards);
    if (step) give_up(Where::Backward, false);
    if (averages) give_up(Where::BehindAverages, keeps);
  }

  void vote() {
    if (const auto last = model_.filling->vote()) announce(*last);
  }
  // A peer has refused the step.
  void refused() {
    end(false);
    lose(false);
  }
  void deliver() {
    model_.filling.reset();
    model_.life.delivered(model_.backwards);
  }

 private:
  Model& model_;
  Engine& engine_;
  const size_t rank_;
  const uint8_t iteration_;
  std::vector<Task>& tasks_;
  const Flaw flaw_;
  const Model* const other_;
};
static_assert(Sees<Shell>);

}  // namespace syncengine::walk
