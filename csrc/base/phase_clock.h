// What this process spends its time on between two synchronizations of gradients, phase by phase, and how long it has
// waited for other ranks meanwhile: who waits is not late.
//
// Thread-safety: any thread; the phase is the process's, whichever thread enters it. Failure: none.
// Costs: one reading of the clock for each change of phase, and for each gradient of a backward that does not average.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace syncengine {

// How many nanoseconds of this thread have not been its rank's own so far: it has waited for other ranks in the engine,
// or done the engine's work in the middle of backward.
inline int64_t& waited_here() {
  static thread_local int64_t nanoseconds = 0;
  return nanoseconds;
}

class PhaseClock {
 public:
  // What is not in another phase is Input. Forward lasts until backward begins, so the loss is in it. Wait: for
  // averages, at the end of backward.
  enum Phase : uint8_t { Input, Forward, Backward, Optimizer, Wait };
  static constexpr size_t kOwn = 4;       // phases without Wait
  using Own = std::array<int64_t, kOwn>;  // nanoseconds of each, without those that were waited

  static PhaseClock& of_process();

  // Returns the time, in trace::now()'s nanoseconds.
  int64_t enter(Phase phase);
  // A step of an optimizer, which backward may be the place of.
  void begin_optimizer();
  void end_optimizer();
  // One has come in a backward that does not average: it may be its last, whose time ends the phase.
  void local_gradient();
  // All since this was last called. Ranks leave a synchronization now.
  Own take();

 private:
  int64_t change(Phase phase);
  void change(Phase phase, int64_t at, int64_t waited);

  std::mutex mutex_;
  Phase phase_ = Input, around_ = Input;         // `around_` the optimizer's step
  int64_t since_ = 0;                            // 0: before the first phase
  int64_t last_gradient_ = 0, last_waited_ = 0;  // when the last one of a local backward came, and waits by then
  const int64_t* waits_ = nullptr;               // of the thread that has entered the phase
  int64_t waited_ = 0;                           // by then
  uint64_t taken_ = 0;
  Own own_{};
};

}  // namespace syncengine
