// Whose a gradient is that has come to one of a model's parameters: a pure function of what is known there. Autograd
// does not say from which forward a backward comes, so this is decided by the phase that the model is in, and by hooks
// on outputs, as far as these were found.
#pragma once

#include <cstdint>

namespace syncengine {

// Of a model, see Reducer.
enum class Phase : uint8_t { Local, Armed, Syncing, Finalizing, Consumed };

// Each is asked for only in the phases that it names.
struct Circumstances {
  Phase phase;
  bool claimed = false;            // Armed: the backward that runs comes from an output of this model
  bool claimed_elsewhere = false;  // Armed: from an output of another wrapper that has the parameter
  bool in_our_task = false;        // Consumed: a graph task of the last backward has not ended
  bool given_up = false;           // Consumed: that backward was, here
  bool outputs_hooked = false;     // Consumed: a backward from an output of the last forward would have been heard of
  bool awaited_elsewhere = false;  // Consumed: another wrapper that has the parameter waits for gradients
  bool made_by_forward = false;    // Consumed: one of the last forwards has made some of the graph that is run
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

constexpr Attribution attribute(const Circumstances& here) {
  switch (here.phase) {
    case Phase::Local: return Attribution::Local;
    case Phase::Armed: return here.claimed_elsewhere && !here.claimed ? Attribution::Foreign : Attribution::First;
    case Phase::Syncing: return Attribution::Mine;
    case Phase::Finalizing: return Attribution::TooLate;
    case Phase::Consumed: break;
  }
  if (here.in_our_task) return here.given_up ? Attribution::GivenUp : Attribution::TooLate;
  if (here.outputs_hooked || here.awaited_elsewhere || !here.made_by_forward) return Attribution::Foreign;
  return Attribution::Consumed;
}

}  // namespace syncengine
