// Measures how long this process spends in each phase between two synchronizations of gradients, and how long it has
// waited for other ranks in each: a rank that waits is not late.
//
// Thread-safety: any thread; the phase is the process's, whichever thread enters it. Failure: none. Costs: one reading
// of the clock for each change of phase, and for each gradient of a backward that does not average.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace syncengine {

// Nanoseconds so far in which this thread did not work for its own rank: it waited for other ranks in the engine, or
// did the engine's work, which serves all ranks, in the middle of backward.
inline int64_t& waited_here() {
  static thread_local int64_t nanoseconds = 0;
  return nanoseconds;
}

class PhaseClock {
 public:
  // The phases of a step. Input is all time that belongs to no other phase. Forward lasts until backward begins, so it
  // includes the loss. Wait is the wait for averages at the end of backward.
  enum Phase : uint8_t { Input, Forward, Backward, Optimizer, Wait };
  static constexpr size_t kOwn = 4;       // phases, without Wait
  using Own = std::array<int64_t, kOwn>;  // nanoseconds of each phase, without waits

  static PhaseClock& of_process();

  // Begins `phase`. Returns the present time, in nanoseconds as trace::now() counts them.
  int64_t enter(Phase phase);
  // Called at the beginning and at the end of an optimizer's step, which may also run within backward.
  void begin_optimizer();
  void end_optimizer();
  // Notes the time of a gradient in a backward that does not average. If no other gradient follows, the phase Backward
  // ends at this time.
  void local_gradient();
  // Returns the time spent in each phase since the last call. Called when all ranks leave a synchronization.
  Own take();

 private:
  int64_t change(Phase phase);
  void change(Phase phase, int64_t at, int64_t waited);

  std::mutex mutex_;
  Phase phase_ = Input, around_ = Input;         // `around_`: the phase to return to after the optimizer's step
  int64_t since_ = 0;                            // 0: before the first phase
  int64_t last_gradient_ = 0, last_waited_ = 0;  // time of a local backward's last gradient, and waits by then
  const int64_t* waits_ = nullptr;               // waited_here() of the thread that has entered the phase
  int64_t waited_ = 0;                           // its value at the beginning of the phase
  uint64_t taken_ = 0;
  Own own_{};
};

}  // namespace syncengine
