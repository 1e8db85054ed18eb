// What the Reducer says when something is wrong.
#include "base/error.h"
#include "reducer/reducer.h"

namespace syncengine {

// They wait for gradients that this rank will not bring.
void Reducer::tell_peers(const std::string& text) const {
  auto rank = communicator_->global_ranks()[communicator_->rank()];
  communicator_->abort(ErrorKind::Aborted, "rank " + std::to_string(rank) + ": " + text);
}

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
  for (size_t i = 0; i < gradients_.size(); ++i) {
    size_t index = next;
    if (!planned_[i] || (++next, gradients_[i].collected())) continue;
    indices += " " + std::to_string(index);
    missing += (missing.empty() ? "" : ", ") + name(i);
  }
  auto rank = std::to_string(communicator_->global_ranks()[communicator_->rank()]);
  return "\nParameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + missing;
}

void Reducer::throw_collected_twice(size_t index) const {
  std::string text = "Expected to mark a variable ready only once. Parameter " + std::to_string(index) + " (" +
                     name(index) + ") of " + names_->model +
                     " got another gradient when its average was already on its way: it is used " +
                     "outside of the module's forward, or in several reentrant checkpoints (use_reentrant=False or "
                     "static_graph=True helps)";
  tell_peers(text);
  throw Error(ErrorKind::InvalidUsage, text);
}

void Reducer::throw_graph_changed(size_t index) const {
  std::string text =
      "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
      "got "
      "used in the second iteration. this is not compatible with static_graph set to True. Parameter " +
      name(index) + " of " + names_->model + " got more gradients than in the first iteration";
  tell_peers(text);
  throw Error(ErrorKind::InvalidUsage, text);
}

void Reducer::throw_consumed() const {
  throw Error(
      ErrorKind::InvalidUsage,
      "this backward runs through a forward of " + names_->model + " that an earlier backward has already " +
          "synchronized, so its gradients would differ between ranks. Run one backward over the sum of the losses, "
          "or the earlier forwards and backwards under no_sync()");
}

}  // namespace syncengine
