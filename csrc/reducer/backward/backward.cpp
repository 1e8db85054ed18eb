#include "reducer/backward/backward.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/trace.h"
#include "reducer/torch/hooks.h"
#include "steps/texts.h"

namespace syncengine {

void Backward::begin() {
  Usage& usage = model_.usage;
  const auto plan = forwards.plan(model_.plan.shared(), model_.parameters);
  // The step is counted before its plan is installed, so that an error there refuses this step, not the one before.
  if (!plan->buckets().empty()) model_.life.step_begins();
  if (plan != model_.plan.shared()) model_.install(plan);
  model_.record.begin_backward(model_.parameters.size(), plan->buckets().size());
  if (usage.observes()) usage.static_graph()->begin_observation();
  if (model_.flat) {
    // Lays out flat memory for the plan now, if that failed when the plan was installed (the device was full, say).
    if (model_.flat->buckets() != plan->buckets().size()) model_.route->install(*plan);
    model_.flat->begin();
  }
  // The host waits for the vote: the last bucket, unless ranks may skip that, a device reduces it, or a hook gets it.
  const bool on_hosts = !model_.flat && model_.route->can_be_refused();
  begun_.emplace(plan, on_hosts && !model_.options.skip_all_reduce_unused_params);
  if (!model_.options.nonfinite.empty()) {
    const Communicator& communicator = *model_.averaging.communicator;
    const int world = communicator.size();
    begun_->watch.emplace(plan, model_.parameters.gradients(),
                          model_.flat ? model_.flat->words_for_nonfinite() : host_words_for_nonfinite(world), world,
                          on_hosts && plan->sparse().empty() && !communicator.spans_hosts());
  }
  if (model_.step && std::exchange(model_.step->begun, true)) {
    throw Error(ErrorKind::InvalidUsage, second_backward_text(names()));
  }
  const auto& tree = begun_->tree = model_.step;
  told_.weighting.divisor = tree ? tree->total : model_.averaging.communicator->size();
  forwards.tell(told_, names(), usage.finds_unused(), model_.parameters);
  if (tree && told_.weighting.given) {
    throw Error(ErrorKind::InvalidUsage, "weight() has no meaning within micro_batches(), which all count the same");
  }
  begun_->divisor = told_.weighting.divisor;
}

bool Backward::bring(size_t index, const at::Tensor& incoming) {
  const Parameters& parameters = model_.parameters;
  const at::Tensor& parameter = parameters.tensor(index);
  const bool watched = parameters.has_node_hooks(index);
  const UserHooks hooks = user_hooks_on(parameter);
  if (hooks == UserHooks::Postponed && parameters.another_has(index, Interest::Averages)) {
    throw Error(ErrorKind::InvalidUsage, averaged_twice_text(names(), index));
  }
  if (hooks == UserHooks::Hasty || (watched && has_hasty_optimizer(parameter))) {
    throw Error(ErrorKind::InvalidUsage, hasty_text(names(), index));
  }
  // .grad must keep this rank's gradient if a user's hook sees it, or if another model with this parameter awaits it.
  const bool kept = watched || parameters.another_has(index, Interest::Awaits);
  const bool is_static = model_.usage.static_graph() != nullptr;
  if (is_static && !is_last_fire(index, incoming, kept)) return false;
  auto fits = [&] {
    const at::Tensor& grad = parameter.grad();
    return plan().fits(index, parameters.footprint(index)) && (!grad.defined() || grad.sizes() == parameter.sizes());
  };
  if (!plan().covers(index) || (parameters.any_retired() && !fits())) {
    throw Error(ErrorKind::InvalidUsage, uncovered_text(names(), index));
  }
  if (gradient(index).collected()) {
    throw Error(ErrorKind::InvalidUsage, collected_twice_text(names(), index));
  }
  if (!is_static) gradient(index).note(incoming, kept);
  gradient(index).collect(name(index), model_.record.statistics);
  model_.record.gradient(index);
  count_collected(index);
  return true;
}

bool Backward::is_last_fire(size_t index, const at::Tensor& incoming, bool kept) {
  const auto fire = model_.usage.static_graph()->fire(index);
  if (fire == StaticGraph::Fire::Unexpected) {
    throw Error(ErrorKind::InvalidUsage, changed_graph_text(names(), index));
  }
  if (model_.usage.observes() && model_.parameters.tensor(index).grad().defined()) model_.usage.note(index);
  gradient(index).note(incoming, kept);
  return fire == StaticGraph::Fire::Last;
}

void Backward::collect_missing() {
  StaticGraph* graph = model_.usage.static_graph();
  const bool observed = graph && graph->observed();
  if (observed) graph->begin_backward();
  if (const auto left = model_.parameters.left_by(plan())) {
    throw Error(ErrorKind::InvalidUsage, left_text(names(), *left));
  }
  if (!observed && !model_.usage.finds_unused()) return;
  for (size_t i : plan().covered()) {
    if (observed ? graph->is_used(i) : told_.reachable[i]) continue;
    gradient(i).collect_unused(model_.record.statistics);
    count_collected(i);
  }
}

void Backward::collect_observed() {
  for (size_t i : plan().covered()) {
    if (!model_.usage.static_graph()->is_used(i)) {
      gradient(i).collect_unused(model_.record.statistics);
    } else {
      gradient(i).collect(name(i), model_.record.statistics);
    }
    count_collected(i);
  }
}

void Backward::collect_absent() {
  for (size_t i : plan().covered()) {
    gradient(i).collect_absent();
    model_.record.ready_order.push_back(i);  // as in DDP: without a question, the order of registration
    count_collected(i);
  }
}

void Backward::count_collected(size_t index) {
  const auto [at, first, full] = begun_->filling.count(index);
  Bucket& bucket = begun_->buckets[at];
  if (first) {
    if (trace::is_on()) bucket.since = trace::now();
    model_.route->open(bucket);
  }
  // The gradient is reduced with the sums of earlier micro-batches, or times this rank's weight.
  if (begun_->tree) {
    gradient(index).complete(*begun_->tree->sums, index);
  } else if (told_.weighting.weight != 1.0) {
    gradient(index).weigh(told_.weighting.weight);
  }
  model_.route->collected(bucket, plan().position_of(index));
  if (!full) return;
  if (begun_->filling.filled(at, skips(*bucket.layout))) model_.route->ready(*begun_, bucket);
  if (!begun_->filling.all() || !(model_.usage.finds_unused() || model_.usage.observes())) return;
  // Parameters count as unused again if zero_grad() has dropped the gradients that they had accumulated under
  // no_sync(). In a step of micro-batches .grad does not show that: earlier gradients are in the tree's sums.
  for (size_t i = 0; !begun_->tree && i < model_.parameters.gradients().size(); ++i)
    if (gradient(i).stands_in() && !model_.parameters.tensor(i).grad().defined()) model_.usage.forget(i);
  usage_work_ = model_.announce(model_.averaging.usage_slot(), model_.usage.share(), "used parameters");
}

bool Backward::skips(const BucketLayout& layout) const {
  if (!model_.options.skip_all_reduce_unused_params || told_.has_shadows) return false;
  const auto& parameters = layout.parameters;
  return std::all_of(parameters.begin(), parameters.end(),
                     [&](size_t i) { return gradient(i).stands_in() && !model_.usage.here(i); });
}

std::string Backward::finish(std::mutex& mutex) {
  Communicator& communicator = *model_.averaging.communicator;
  if (model_.options.skip_all_reduce_unused_params) check_skipped();
  std::shared_ptr<Work> vote;
  // All ranks' times of the last step, if no bucket carries them. None on devices, of which a CPU's clock knows little.
  std::shared_ptr<std::vector<uint64_t>> stamps;
  const bool can_refuse = model_.can_refuse();
  {
    std::lock_guard lock(mutex);
    if (const auto last = begun_->filling.vote()) {
      model_.route->ready(*begun_, begun_->buckets[*last]);
      vote = begun_->buckets[*last].work;
    } else if (!begun_->buckets.empty() && !model_.flat) {
      stamps = std::make_shared<std::vector<uint64_t>>(communicator.size());
      (*stamps)[communicator.rank()] = model_.record.stamp;
      vote = model_.vote(stamps);
    } else if (can_refuse) {
      vote = model_.vote();
    }
  }
  if (can_refuse) communicator.wait(vote, raise_pending_signal);
  model_.route->finish(*begun_);
  if (stamps) {
    communicator.wait(vote, raise_pending_signal);
    model_.record.step_times->compare(std::move(*stamps));
  }
  if (usage_work_) communicator.wait(usage_work_, raise_pending_signal);
  if (!model_.route->takes_sparse() && !plan().sparse().empty()) average_sparse(model_.for_route(), *begun_);
  for (const TorchFuture& future : std::exchange(futures, {})) {
    wait_for_future(future, communicator, [this] { return "a buffer hook's future of " + names().model; });
  }
  const auto& watch = begun_->watch;
  if (!watch || !watch->has_news()) return "";
  if (model_.flat) model_.flat->wait();
  return watch->agree(model_.averaging, names(), model_.life.step(), model_.record.statistics.backwards);
}

// Checks that all ranks skip the same buckets: a rank that skipped what others reduce would be waited for for ever.
void Backward::check_skipped() const {
  Communicator& communicator = *model_.averaging.communicator;
  if (usage_work_) communicator.wait(usage_work_, raise_pending_signal);
  for (const auto& bucket : begun_->buckets) {
    if (!begun_->filling.is_skipped(bucket.layout->index)) continue;
    for (size_t i : bucket.layout->parameters)
      if (model_.usage.anywhere(i)) throw Error(ErrorKind::Mismatch, skipped_text(names(), i));
  }
}

void Backward::deliver(std::vector<size_t>& written) {
  Usage& usage = model_.usage;
  model_.plan.use(/*shows_order=*/!usage.observes() && !plan().buckets().empty());
  if (usage.observes() && !told_.has_shadows) usage.static_graph()->end_of_observation();
  for (Bucket& bucket : begun_->buckets) {
    model_.route->deliver(bucket);
    for (size_t i : bucket.layout->parameters) {
      const bool delivered = gradient(i).deliver(!usage.tracks() || usage.anywhere(i));
      if (delivered && model_.parameters.any_user_hooks()) written.push_back(i);
      if (model_.averaging.scaling == Scaling::DivideViewed) gradient(i).keep();
    }
  }
  usage.clear();
  model_.parameters.end_accumulation();
}

}  // namespace syncengine
