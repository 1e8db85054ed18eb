// The steps of one model on one rank: which phase they are in, and what follows when something happens to them.
//
//     phase        what has happened                                     what comes next
//     Local        nothing yet, or the last forward was under no_sync    a synchronized forward: Armed
//     Armed        a synchronized forward has run, perhaps several       the first hook of a backward: Syncing
//     Syncing      their backward has begun                              its end, with all buckets there: Finalizing
//     Finalizing   some thread waits for the averages                    they are in .grad: Consumed
//     Consumed     it is over, well or not; no forward has run since     a forward: Armed, or Local
//
// From Armed to Consumed there is a backward; any error on the way, here or on a rank that refuses the step, gives it
// up, which also leads to Consumed. A rank without a batch goes from Consumed to Finalizing at once.
//
// A method either answers a question, from this state and from facts that it asks for (Sees), or notes what has been
// done. The caller carries the answer out before the next call. If something must be waited for in between, there is
// one call before the wait and one after it, since everything may have changed meanwhile.
//
// Ownership: none; a copy goes on by itself, so that a test can walk everything that may happen. Thread-safety: the
// reducer's lock; phase() and claimed() may be read without it. Failure: none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace syncengine {

enum class Phase : uint8_t { Local, Armed, Syncing, Finalizing, Consumed };

// Facts that autograd, other wrappers and the engine know, as they are when they are asked for. Each is asked for only
// if a decision needs it, since some cost more than the decision.
template <class S>
concept Sees = requires(S& sees, size_t parameter) {
  sees.in_task();                     // a graph task runs on this thread
  sees.in_our_task();                 // a graph task that takes part in the last backward has not ended
  sees.whole_graph();                 // the task on this thread accumulates into every leaf: it has no `inputs`
  sees.accumulates();                 // that task accumulates into some parameter of this model
  sees.is_outermost();                // no task is around it that has to do with the last forward
  sees.runs_forwards_nodes();         // one of the last forwards has made some of the task's graph
  sees.runs_forwards_graph();         // the same; the task around it will be looked at, too, when this one has ended
  sees.claimed_elsewhere(parameter);  // another wrapper that has the parameter says that the backward is its own
  sees.awaited_elsewhere(parameter);  // another wrapper that has the parameter waits for gradients
  sees.collected_all();               // the backward has all gradients
  sees.observes();                    // the backward is the one that shows a static graph: its order says nothing
  sees.has_failed();                  // the communicator has failed
  sees.has_plan();                    // there are buckets, or none since all parameters are frozen
  sees.all_frozen();                  // there are no buckets, since all parameters are frozen
  sees.can_refuse();                  // peers wait for nothing but announced buckets, of which there are some
};

// The part of the reducer's state by which attribute() decides. Autograd does not say from which forward a backward
// comes, so that is decided by the phase that the model is in, and by hooks on outputs, as far as these were found.
struct Standing {
  Phase phase;
  bool claimed = false;         // Armed: the backward that runs comes from an output of this model
  bool given_up = false;        // Consumed: the last backward was given up
  bool outputs_hooked = false;  // Consumed: a backward from an output of the last forward would have been heard of
};

enum class Attribution : uint8_t {
  Local,     // this rank's own, by no_sync
  Foreign,   // of a backward that is none of this model's
  First,     // mine: the first of its backward
  Mine,      // mine, and not the first
  TooLate,   // refused: the parameter's average is on its way, or there
  GivenUp,   // refused: on another thread the backward was given up
  Consumed,  // refused: the forward's backward has been averaged, or lost, before
};

// Decides to which backward a gradient of `parameter` belongs. Asks `sees` nothing in Local, Syncing and Finalizing,
// and otherwise only what still matters: the last question, runs_forwards_graph(), walks the task's nodes.
constexpr Attribution attribute(const Standing& here, size_t parameter, auto&& sees) {
  switch (here.phase) {
    case Phase::Local: return Attribution::Local;
    case Phase::Armed:
      return !here.claimed && sees.claimed_elsewhere(parameter) ? Attribution::Foreign : Attribution::First;
    case Phase::Syncing: return Attribution::Mine;
    case Phase::Finalizing: return Attribution::TooLate;
    case Phase::Consumed: break;
  }
  if (sees.in_our_task()) return here.given_up ? Attribution::GivenUp : Attribution::TooLate;
  if (here.outputs_hooked || sees.awaited_elsewhere(parameter)) return Attribution::Foreign;
  return sees.runs_forwards_graph() ? Attribution::Consumed : Attribution::Foreign;
}

// A value that is written under a lock, and read at any time by any thread.
template <class T>
class Published {
 public:
  Published(T value) : value_(value) {}
  Published(const Published& other) : value_(other.value_.load()) {}
  Published& operator=(const Published& other) { return *this = other.value_.load(); }
  Published& operator=(T value) {
    value_ = value;
    return *this;
  }
  operator T() const { return value_.load(std::memory_order_acquire); }

 private:
  std::atomic<T> value_;
};

class Lifecycle {
 public:
  Phase phase() const { return phase_; }
  bool claimed() const { return claimed_; }
  // awaits(): gradients of a synchronized backward are still to come. is_unfinished(): one has begun, and not ended.
  bool awaits() const { return is(Phase::Armed, Phase::Syncing); }
  bool is_unfinished() const { return is(Phase::Syncing, Phase::Finalizing); }
  // The number of steps so far, which all ranks count alike; and the number of forwards, outside of backwards.
  uint64_t step() const { return step_; }
  uint64_t forwards() const { return forwards_; }
  bool hooks_removed() const { return hooks_removed_; }
  bool outputs_hooked() const { return outputs_hooked_; }
  bool lost() const { return lost_; }                        // the last step was lost
  bool brought_nothing() const { return brought_nothing_; }  // the last backward of our outputs brought no gradient

  // --- A forward

  // Whether this forward is a part of a backward: a checkpoint computes again what it has not kept.
  bool is_recomputed(Sees auto&& sees) const { return phase_ == Phase::Syncing && sees.in_task(); }
  enum class Begin : uint8_t {
    Unfinished,  // an error: a backward still waits for gradients
    Unwatched,   // nothing is to be done: hooks were removed, and its backward is this rank's own
    Local,       // its backward is this rank's own
    Arm,         // its backward averages; the end of a refused step comes before
  };
  // Counts the forward, and returns what follows. The caller has waited for all tasks of earlier forwards: if one
  // fails after this count, a step that waits for gradients is not given up any more, see task_failed().
  Begin begin_forward(bool synchronize, Sees auto&& sees) {
    if (!sees.in_task()) ++forwards_;
    if (phase_ == Phase::Syncing) return Begin::Unfinished;
    if (synchronize) return Begin::Arm;
    return hooks_removed_ ? Begin::Unwatched : Begin::Local;
  }
  void forward_began(bool synchronize) {
    claimed_ = false;
    if (phase_ == Phase::Consumed && !synchronize) phase_ = Phase::Local;
  }
  // Notes that a synchronized forward has ended. `outputs_hooked`: a hook on its outputs will call output().
  void forward_ended(bool outputs_hooked) {
    outputs_hooked_ = outputs_hooked;
    phase_ = Phase::Armed;
  }
  enum class ForwardError : uint8_t {
    Untold,    // its backward, which computes it again, will say so; or there is no plan yet, and nobody waits
    Expected,  // all parameters are frozen: no rank waits for what it would have brought
    GivesUp,   // see raised()
  };
  ForwardError forward_raised(Sees auto&& sees) const {
    if (is_unfinished() || !sees.has_plan()) return ForwardError::Untold;
    return sees.all_frozen() ? ForwardError::Expected : ForwardError::GivesUp;
  }

  // --- A backward

  enum class Output : uint8_t {
    Ignore,
    Own,     // this backward is this rank's own
    Spent,   // an error: the forward's backward has been averaged, or lost, before
    Claims,  // it is the one that is expected
  };
  // Called when a backward reaches an output; `own` if that is an output of a forward under no_sync.
  Output output(bool own, Sees auto&& sees) {
    if (own) return sees.accumulates() ? Output::Own : Output::Ignore;
    if (!sees.whole_graph()) return Output::Ignore;
    if (phase_ == Phase::Consumed) return Output::Spent;
    if (phase_ != Phase::Armed) return Output::Ignore;
    claimed_ = true;
    return Output::Claims;
  }
  Attribution gradient(size_t parameter, Sees auto&& sees) const {
    return attribute({phase_, claimed_, lost_, outputs_hooked_}, parameter, sees);
  }
  void backward_begins() { phase_ = Phase::Syncing; }
  // Counts a step in which all ranks announce or refuse something: it has buckets, or is only a vote.
  void step_begins() { ++step_; }

  enum class End : uint8_t {
    Wait,  // another graph task will bring what is missing
    Join,  // an inner graph task has finalized
    Lost,  // an error: the step was lost meanwhile, by something outside of this task, which so has not heard of it
    Finalize,
  };
  End task_ended(Sees auto&& sees) {
    brought_nothing_ = phase_ == Phase::Armed;
    if (phase_ == Phase::Armed) claimed_ = false;
    if (phase_ == Phase::Consumed) return lost_ ? End::Lost : End::Join;
    if (phase_ != Phase::Syncing) return End::Wait;
    // All hooks have fired only when the outermost task ends. A hook on an output runs there, and makes that task ours.
    const bool observed = sees.observes() && !sees.in_our_task() && (outputs_hooked_ || sees.is_outermost());
    if (!sees.collected_all() && !observed) return End::Wait;
    phase_ = Phase::Finalizing;
    return End::Finalize;
  }
  // Notes that this rank has no batch, and has brought substitutes for all gradients.
  void shadow_waits() { phase_ = Phase::Finalizing; }

  // The consequences of a graph task's being dropped before its end. It is known by the number of its backward, and by
  // how many forwards there had been when it began: later forwards and their gradients are left alone.
  struct TaskLoss {
    bool step, averages, keeps;  // raised(Backward) follows; raised(BehindAverages) does; .grad stays
  };
  TaskLoss task_failed(uint64_t backward, uint64_t forwards) const {
    const bool is_later = forwards != forwards_;  // a task may be kept beyond its backward
    const bool ended_well = backward == ended_well_ && forwards == ended_well_behind_;
    return {!is_later && awaits(), ended_well, is_later};
  }
  enum class Outer : uint8_t { Leave, Watch, Fail };
  // Decides, when an inner graph task has ended on this thread, about the task around it. `ours`: the inner one took
  // part in the backward; otherwise its gradients belonged, as far as was known then, to no forward of this model.
  Outer outer_task(bool ours, Sees auto&& sees) const {
    // When averages have been delivered, the task around may just happen to run a backward inside: its nodes tell.
    if (ours) return phase_ == Phase::Syncing || sees.runs_forwards_nodes() ? Outer::Watch : Outer::Leave;
    const bool spent = phase_ == Phase::Consumed && !sees.in_our_task() && sees.runs_forwards_graph();
    return spent ? Outer::Fail : Outer::Leave;
  }

  // --- Its end

  // Notes that the averages of the backward with the number `backward` are in .grad.
  void delivered(uint64_t backward) {
    ended_well_ = backward;
    ended_well_behind_ = forwards_;
    lost_ = false;
    backward_ended();
  }
  void backward_ended() {
    claimed_ = false;
    phase_ = Phase::Consumed;
  }
  void remove_hooks() {
    hooks_removed_ = true;
    if (phase_ == Phase::Armed) phase_ = Phase::Local;
  }

  // --- An error on this rank, which loses the step on all ranks

  enum class Where : uint8_t { Forward, Backward, BehindAverages };
  enum class Loss : uint8_t {
    Nothing,  // behind averages, when a step has been given up since
    Aborts,   // behind averages, when a later backward runs: the communicator fails, and so does that backward
    Here,
    BeginsStep,  // the backward has not begun: the step gets its number first, as on the ranks whose backward has
  };
  Loss raised(Where where, Sees auto&& sees) const {
    if (where == Where::BehindAverages) return lost_ ? Loss::Nothing : is_unfinished() ? Loss::Aborts : Loss::Here;
    return !is_unfinished() && sees.has_plan() && !sees.has_failed() ? Loss::BeginsStep : Loss::Here;
  }
  // The way in which peers learn of the error. Asked for when the step has begun: its plan may be an older forward's.
  enum class Tell : uint8_t {
    Nobody,  // nobody waits: the communicator has failed, or there are no buckets
    Refuse,  // the step is refused, and all go on
    Abort,   // peers wait for more than announced buckets: the communicator fails
  };
  Tell tell(Sees auto&& sees) const {
    if (sees.has_failed()) return Tell::Nobody;
    if (sees.can_refuse()) return Tell::Refuse;
    return sees.all_frozen() ? Tell::Nobody : Tell::Abort;
  }
  // Notes that the step is lost here, whichever rank has refused it.
  void step_lost() {
    lost_ = true;
    backward_ended();
  }

  // Notes that a refused step must end on all ranks before another one begins. `undecided`: the error came in forward,
  // and whether this rank keeps the gradients that it had is decided at that end.
  void refusal_ends(bool undecided) { ending_ = undecided ? Ending::Undecided : Ending::Decided; }
  void refusal_ended() { ending_ = Ending::No; }
  bool is_ending() const { return ending_ != Ending::No; }
  bool is_undecided() const { return ending_ == Ending::Undecided; }

 private:
  bool is(Phase one, Phase other) const {
    const Phase now = phase_;
    return now == one || now == other;
  }

  enum class Ending : uint8_t { No, Decided, Undecided };

  Published<Phase> phase_{Phase::Local};
  Published<bool> claimed_{false};  // a backward runs that comes from this model's outputs
  bool outputs_hooked_ = false, hooks_removed_ = false, lost_ = false, brought_nothing_ = false;
  Ending ending_ = Ending::No;
  uint64_t forwards_ = 0, step_ = 0;
  uint64_t ended_well_ = 0, ended_well_behind_ = 0;  // the last backward that did: its number, and how many forwards
};

}  // namespace syncengine
