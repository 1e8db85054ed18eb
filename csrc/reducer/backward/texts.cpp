#include "reducer/backward/texts.h"

#include "reducer/backward/model.h"

namespace syncengine {

namespace {

std::string missing_text(const Model& model) {
  const Parameters& parameters = model.parameters;
  std::string indices, missing;
  size_t next = 0;  // DDP counts only parameters that require a gradient
  for (size_t i = 0; i < parameters.size(); ++i) {
    size_t index = next;
    if (!model.plan.covers(i) || (++next, parameters.gradients()[i].collected())) continue;
    indices += " " + std::to_string(index);
    missing += (missing.empty() ? "" : ", ") + parameters.name(i);
  }
  const Communicator& communicator = *model.averaging.communicator;
  const std::string rank = std::to_string(communicator.global_ranks()[communicator.rank()]);
  return "\nParameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + missing;
}

}  // namespace

std::string said_here(const Communicator& communicator, const std::string& text) {
  const std::string rank = "rank " + std::to_string(communicator.global_ranks()[communicator.rank()]);
  return rank + (text.starts_with("raised ") ? " " : ": ") + text;
}

std::string text_for_peers() {
  try {
    throw;
  } catch (const Error& error) {
    return error.what();
  } catch (...) {
    return "backward aborted";
  }
}

void tell_peers(Communicator& communicator, const std::string& text) {
  communicator.abort(ErrorKind::Aborted, said_here(communicator, text));
}

std::string unfinished_text(const Model& model) {
  if (model.usage.is_static()) {
    return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
           "that your training graph has changed in this iteration, e.g., one parameter is used in first iteration, "
           "but "
           "then got unused in the second iteration. this is not compatible with static_graph set to True." +
           missing_text(model);
  }
  return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
         "that your module has parameters that were not used in producing loss. You can enable unused parameter "
         "detection by passing the keyword argument `find_unused_parameters=True` to `syncengine.Parallel`, and by "
         "making sure all `forward` function outputs participate in calculating loss." +
         missing_text(model);
}

std::string removed_text(const Parameters& parameters) {
  return "the hooks of " + parameters.model() +
         " were removed (_remove_autograd_hooks), so it synchronizes nothing any more: wrap the module again, on all "
         "ranks";
}

std::string dropped_text(const Parameters& parameters) {
  return "backward of " + parameters.model() +
         " raised after its averages were complete, and the error was caught there, while other ranks went on: their "
         "weights may differ. Let the error end the job, or skip that step on all ranks";
}

std::string uncovered_text(const Parameters& parameters, size_t index) {
  return "parameter " + parameters.name(index) + " of " + parameters.model() +
         " got a gradient from a graph that is older than a forward for which it was frozen (requires_grad=False), or "
         "of another dtype or size, so it can't be averaged: run that graph's backward before, or freeze only after it";
}

std::string left_text(const Parameters& parameters, size_t index) {
  return "parameter " + parameters.name(index) + " of " + parameters.model() +
         " got a gradient under no_sync(), but is frozen (requires_grad=False) in the forward that synchronizes, so it "
         "is not averaged: freeze it when its gradients have been averaged or dropped (zero_grad()), or, if it was not "
         "frozen when the module was wrapped, pass find_unused_parameters=True";
}

std::string averaged_twice_text(const Parameters& parameters, size_t index) {
  return "parameter " + parameters.name(index) + " of " + parameters.model() +
         " has a hook (register_post_accumulate_grad_hook, or an optimizer in backward) and belongs to two wrappers, "
         "which both average it in this backward: put both parts into one module and wrap that, or run a backward for "
         "each wrapper, or use the gradient after backward";
}

std::string collected_twice_text(const Parameters& parameters, size_t index) {
  return "Expected to mark a variable ready only once. Parameter " + std::to_string(index) + " (" +
         parameters.name(index) + ") of " + parameters.model() +
         " got another gradient when its average was already on its way: it is used " +
         "outside of the module's forward, or in several reentrant checkpoints (use_reentrant=False or "
         "static_graph=True helps)";
}

std::string consumed_text(const Parameters& parameters, const std::string& lost) {
  if (!lost.empty()) {
    return "this backward runs through a forward of " + parameters.model() + " whose step was given up (" + lost +
           "), so its gradients would differ between ranks. Run the forward again";
  }
  return "this backward runs through a forward of " + parameters.model() +
         " that an earlier backward has already synchronized, so its gradients would differ between ranks. Run one "
         "backward over the sum of the losses, or the earlier forwards and backwards under no_sync()";
}

}  // namespace syncengine
