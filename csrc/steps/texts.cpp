#include "steps/texts.h"

#include "base/error.h"

namespace syncengine {

namespace {

std::string of_model(const ModelNames& names, size_t index) { return names.parameters[index] + " of " + names.model; }

}  // namespace

std::string said_by(int rank, const std::string& text) {
  return "rank " + std::to_string(rank) + (text.starts_with("raised ") ? " " : ": ") + text;
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

std::string unfinished_text(const ModelNames& names, const std::vector<Awaited>& awaited, int rank, bool is_static) {
  // Lists the parameters without a gradient by name and, as DDP does, by index among those that require a gradient.
  std::string indices, missing;
  for (size_t index = 0; index < awaited.size(); ++index) {
    if (awaited[index].came) continue;
    indices += " " + std::to_string(index);
    missing += (missing.empty() ? "" : ", ") + names.parameters[awaited[index].parameter];
  }
  const std::string cause =
      is_static ? "training graph has changed in this iteration, e.g., one parameter is used in first iteration, but "
                  "then got unused in the second iteration. this is not compatible with static_graph set to True."
                : "module has parameters that were not used in producing loss. You can enable unused parameter "
                  "detection by passing the keyword argument `find_unused_parameters=True` to `syncengine.Parallel`, "
                  "and by making sure all `forward` function outputs participate in calculating loss.";
  const std::string of_rank = " which did not receive grad for rank " + std::to_string(rank) + ":";
  return "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates "
         "that your " +
         cause + "\nParameter indices" + of_rank + indices + "\nParameters" + of_rank + " " + missing;
}

std::string removed_text(const ModelNames& names) {
  return "the hooks of " + names.model +
         " were removed (_remove_autograd_hooks), so it synchronizes nothing any more: wrap the module again, on all "
         "ranks";
}

std::string dropped_text(const ModelNames& names) {
  return "backward of " + names.model +
         " raised after its averages were complete, and the error was caught there, while other ranks went on: their "
         "weights may differ. Let the error end the job, or skip that step on all ranks";
}

std::string uncovered_text(const ModelNames& names, size_t index) {
  return "parameter " + of_model(names, index) +
         " got a gradient from a graph that is older than a forward for which it was frozen (requires_grad=False), or "
         "of another dtype or size, so it can't be averaged: run that graph's backward before, or freeze only after it";
}

std::string left_text(const ModelNames& names, size_t index) {
  return "parameter " + of_model(names, index) +
         " got a gradient under no_sync(), but is frozen (requires_grad=False) in the forward that synchronizes, so it "
         "is not averaged: freeze it when its gradients have been averaged or dropped (zero_grad()), or, if it was not "
         "frozen when the module was wrapped, pass find_unused_parameters=True";
}

std::string averaged_twice_text(const ModelNames& names, size_t index) {
  return "parameter " + of_model(names, index) +
         " has a hook (register_post_accumulate_grad_hook, or an optimizer in backward) and belongs to two wrappers, "
         "which both average it in this backward: put both parts into one module and wrap that, or run a backward for "
         "each wrapper, or use the gradient after backward";
}

std::string hasty_text(const ModelNames& names, size_t index) {
  return "a hook was registered on parameter " + of_model(names, index) +
         " (register_post_accumulate_grad_hook, or an optimizer in backward) after the forward, so it has seen this "
         "rank's gradient instead of the average: register it before the forward, and undo what it has done on this "
         "rank";
}

std::string changed_graph_text(const ModelNames& names, size_t index) {
  return "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but "
         "then got used in the second iteration. this is not compatible with static_graph set to True. Parameter " +
         of_model(names, index) + " got more gradients than in the first iteration";
}

std::string skipped_text(const ModelNames& names, size_t index) {
  return "parameter " + names.parameters[index] +
         " is used on some ranks and not on others, which skip_all_reduce_unused_params=True does not allow";
}

std::string second_backward_text(const ModelNames& names) {
  return "a second synchronized backward of " + names.model +
         " in one micro-batch: call backward() once in each, of the sum of losses";
}

std::string two_weights_text(const ModelNames& names) {
  return "this backward comes from several forwards of " + names.model +
         " before which weight() was given different numbers: give it once before the first of them, with the number "
         "for all";
}

std::string collected_twice_text(const ModelNames& names, size_t index) {
  return "Expected to mark a variable ready only once. Parameter " + std::to_string(index) + " (" +
         names.parameters[index] + ") of " + names.model +
         " got another gradient when its average was already on its way: it is used outside of the module's forward, "
         "or in several reentrant checkpoints (use_reentrant=False or static_graph=True helps)";
}

std::string consumed_text(const ModelNames& names, const std::string& lost) {
  if (!lost.empty()) {
    return "this backward runs through a forward of " + names.model + " whose step was given up (" + lost +
           "), so its gradients would differ between ranks. Run the forward again";
  }
  return "this backward runs through a forward of " + names.model +
         " that an earlier backward has already synchronized, so its gradients would differ between ranks. Run one "
         "backward over the sum of the losses, or the earlier forwards and backwards under no_sync()";
}

}  // namespace syncengine
