#include "reducer/backward/model.h"

#include <utility>

#include "reducer/backward/backward.h"

namespace syncengine {

Model::Model(std::vector<at::Tensor> tensors, ModelNames names, const std::shared_ptr<Communicator>& communicator,
             const std::vector<bool>& sparse, const ReducerOptions& asked, std::unique_ptr<BucketLane> lane)
    : options(asked),
      averaging{.communicator = communicator,
                .parameters = tensors.size(),
                .scaling = scaling_of(asked, communicator->numerics()),
                .scales_first = communicator->numerics() == Numerics::Ring},
      parameters(std::move(tensors), std::move(names), sparse),
      usage(parameters.size(), options.find_unused_parameters, options.static_graph),
      flat(lane ? std::make_unique<FlatBuckets>(std::move(lane)) : nullptr),
      pooled(flat ? nullptr : communicator->gradient_pool()),
      outcome(averaging, life),
      route(flat ? make_flat_route(for_route()) : make_in_place_route(for_route())) {
  parameters.keep_trained(usage.finds_unused());
  keep_gradients();
}

Forward& Model::coming_forward() {
  if (!forward) {
    forward = std::make_shared<Forward>();
    forward->weighting.divisor = averaging.communicator->size();
  }
  return *forward;
}

Backward& Model::coming_backward() {
  if (!backward) backward = std::make_shared<Backward>(*this);
  return *backward;
}

void Model::let_go_of_gradients(bool keeps) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!plan.covers(i)) continue;
    Gradient& gradient = parameters.gradients()[i];
    keeps ? gradient.forget() : gradient.discard();
  }
  if (!keeps) usage.clear();
}

}  // namespace syncengine
