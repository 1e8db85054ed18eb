// What the Reducer says when something is wrong.
#include "base/error.h"
#include "reducer/reducer.h"

namespace syncengine {

std::string Reducer::unfinished_text() const {
  if (static_graph_) {
    return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
           "that your training graph has changed in this iteration, e.g., one parameter is used in first iteration, "
           "but "
           "then got unused in the second iteration. this is not compatible with static_graph set to True." +
           missing_text();
  }
  return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
         "that your module has parameters that were not used in producing loss. You can enable unused parameter "
         "detection by passing the keyword argument `find_unused_parameters=True` to `syncengine.Parallel`, and by "
         "making sure all `forward` function outputs participate in calculating loss." +
         missing_text();
}

std::string Reducer::missing_text() const {
  std::string indices, missing;
  size_t next = 0;  // DDP counts only parameters that require a gradient
  for (size_t i = 0; i < parameters_.size(); ++i) {
    size_t index = next;
    if (!is_planned(i) || (++next, parameters_.gradients()[i].collected())) continue;
    indices += " " + std::to_string(index);
    missing += (missing.empty() ? "" : ", ") + parameters_.name(i);
  }
  const Communicator& communicator = *averaging_.communicator;
  const std::string rank = std::to_string(communicator.global_ranks()[communicator.rank()]);
  return "\nParameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + missing;
}

std::string Reducer::removed_text() const {
  return "the hooks of " + parameters_.model() +
         " were removed (_remove_autograd_hooks), so it synchronizes nothing any more: wrap the module again, on all "
         "ranks";
}

std::string Reducer::dropped_text() const {
  return "backward of " + parameters_.model() +
         " raised after its averages were complete, and the error was caught there, while other ranks went on: their "
         "weights may differ. Let the error end the job, or skip that step on all ranks";
}

std::string Reducer::collected_twice_text(size_t index) const {
  return "Expected to mark a variable ready only once. Parameter " + std::to_string(index) + " (" +
         parameters_.name(index) + ") of " + parameters_.model() +
         " got another gradient when its average was already on its way: it is used " +
         "outside of the module's forward, or in several reentrant checkpoints (use_reentrant=False or "
         "static_graph=True helps)";
}

std::string Reducer::graph_changed_text(size_t index) const {
  return "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
         "then "
         "got "
         "used in the second iteration. this is not compatible with static_graph set to True. Parameter " +
         parameters_.name(index) + " of " + parameters_.model() + " got more gradients than in the first iteration";
}

void Reducer::throw_consumed() const {
  throw Error(
      ErrorKind::InvalidUsage,
      "this backward runs through a forward of " + parameters_.model() + " that an earlier backward has already " +
          "synchronized, so its gradients would differ between ranks. Run one backward over the sum of the losses, "
          "or the earlier forwards and backwards under no_sync()");
}

}  // namespace syncengine
