// Whose a gradient is that has come to one of a model's parameters. Autograd does not say from which forward a backward
// comes, so this is decided by the phase that the model is in, and by hooks on outputs, as far as these were found.
//
// Ownership: none. Thread-safety: none. Failure: none.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncengine {

// Of a model, see Lifecycle.
enum class Phase : uint8_t { Local, Armed, Syncing, Finalizing, Consumed };

// The reducer's own part of what decides.
struct Standing {
  Phase phase;
  bool claimed = false;         // Armed: the backward that runs comes from an output of this model
  bool given_up = false;        // Consumed: the last backward was, here
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

// Asks nothing in Local, Syncing and Finalizing, and elsewhere what still matters: the last question is dear, see Sees.
template <class S>
constexpr Attribution attribute(const Standing& here, size_t parameter, S&& sees) {
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

}  // namespace syncengine
