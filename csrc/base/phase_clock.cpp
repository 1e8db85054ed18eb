#include "base/phase_clock.h"

#include <utility>

#include "base/trace.h"

namespace syncengine {

PhaseClock& PhaseClock::of_process() {
  static auto& clock = *new PhaseClock;  // never destroyed: threads may outlive the end of main()
  return clock;
}

void PhaseClock::change(Phase phase, int64_t at, int64_t waits) {
  const int64_t waited = waits_ == &waited_here() ? waits - waited_ : 0;
  if (since_ != 0) {
    if (phase_ < kOwn) own_[phase_] += at - since_ - waited;
    if (trace::is_on()) {
      trace::record({.kind = trace::Kind::Phase,
                     .begin = since_,
                     .end = at,
                     .lane = phase_,
                     .place = taken_,
                     .detail = static_cast<uint64_t>(waited)});
    }
  }
  phase_ = phase;
  since_ = at;
  waits_ = &waited_here();
  waited_ = waits;
}

int64_t PhaseClock::change(Phase phase) {
  const int64_t now = trace::now();
  if (const int64_t last = std::exchange(last_gradient_, 0); last != 0 && phase != Wait)
    change(Input, last, last_waited_);
  change(phase, now, waited_here());
  return now;
}

int64_t PhaseClock::enter(Phase phase) {
  std::lock_guard lock(mutex_);
  return change(phase);
}

void PhaseClock::begin_optimizer() {
  std::lock_guard lock(mutex_);
  const bool ends_backward = last_gradient_ != 0;
  if (phase_ != Optimizer) around_ = ends_backward ? Input : phase_;
  change(Optimizer);
}

// Changes nothing if the closure of the optimizer has run a forward and a backward: these have ended its phase.
void PhaseClock::end_optimizer() {
  std::lock_guard lock(mutex_);
  if (phase_ == Optimizer) change(around_);
}

void PhaseClock::local_gradient() {
  std::lock_guard lock(mutex_);
  const int64_t now = trace::now();
  if (phase_ != Backward) change(Backward, now, waited_here());
  last_gradient_ = now;
  last_waited_ = waited_here();
}

PhaseClock::Own PhaseClock::take() {
  std::lock_guard lock(mutex_);
  ++taken_;
  return std::exchange(own_, {});
}

}  // namespace syncengine
