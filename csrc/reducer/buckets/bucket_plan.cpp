#include "reducer/buckets/bucket_plan.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

constexpr size_t kNamesShown = 3;

std::shared_ptr<const BucketLayout> make_layout(size_t index, const std::vector<size_t>& parameters,
                                                const std::vector<Gradient>& gradients,
                                                const std::shared_ptr<const ModelNames>& names,
                                                std::vector<bool>& placed) {
  auto fail = [&](const std::string& text) {
    throw Error(ErrorKind::InvalidUsage, "bucket " + std::to_string(index) + " of " + names->model + ": " + text);
  };
  if (parameters.empty()) fail("no parameters");
  uint64_t hash = mix(14695981039346656037u, index);
  std::optional<DType> dtype;
  SmallLayout small;
  for (size_t i : parameters) {
    if (i >= gradients.size() || placed[i])
      fail("parameter index " + std::to_string(i) + " out of range or used twice");
    placed[i] = true;
    const at::Tensor& parameter = gradients[i].parameter();
    auto own = gradient_dtype(parameter.scalar_type());
    if (!own) fail(names->parameters[i] + " has dtype " + c10::toString(parameter.scalar_type()) + ", not supported");
    if (dtype && own != dtype) fail(names->parameters[i] + " differs in dtype from the parameters before it");
    dtype = own;
    if (gradients[i].sparse() && parameters.size() > 1) {
      fail("the sparse gradient of " + names->parameters[i] + " needs a bucket of its own");
    }
    hash = mix(mix(mix(hash, i), parameter.nbytes()), static_cast<uint64_t>(*own));
    hash = gradients[i].order().mix_into(hash);
    if (parameter.nbytes() < gradient_memory::kSmallest) {
      small.offsets.push_back(std::exchange(small.bytes, small.bytes + parameter.nbytes()));
      ++small.count;
    } else {
      small.offsets.push_back(SmallLayout::kLarge);
    }
  }
  auto layout = std::make_shared<BucketLayout>();
  layout->names = names;
  layout->index = index;
  layout->dtype = *dtype;
  layout->parameters = parameters;
  layout->sparse = gradients[parameters[0]].sparse();
  layout->small = std::move(small);
  layout->hash = hash;
  return layout;
}

}  // namespace

std::string BucketLayout::describe() const {
  std::string text = "bucket " + std::to_string(index) + " of " + names->model + " (";
  for (size_t i = 0; i < parameters.size() && i < kNamesShown; ++i) {
    if (i > 0) text += ", ";
    text += names->parameters[parameters[i]];
  }
  return text + (parameters.size() > kNamesShown ? ", ...)" : ")");
}

BucketPlan::BucketPlan(const std::vector<std::vector<size_t>>& indices, const std::vector<Gradient>& gradients,
                       const std::shared_ptr<const ModelNames>& names, bool provisional)
    : provisional_(provisional), places_(gradients.size()) {
  std::vector<bool> placed(gradients.size());
  for (size_t b = 0; b < indices.size(); ++b) {
    const auto layout = make_layout(b, indices[b], gradients, names, placed);
    for (size_t k = 0; k < layout->parameters.size(); ++k) {
      const at::Tensor& parameter = gradients[layout->parameters[k]].parameter();
      const size_t bytes = parameter.nbytes();
      places_[layout->parameters[k]] = {static_cast<uint32_t>(b), static_cast<uint32_t>(k), bytes,
                                        parameter.scalar_type()};
      if (!layout->sparse && bytes >= gradient_memory::kSmallest) pooled_sizes_.insert(bytes);
    }
    if (layout->sparse) sparse_.push_back(layout->parameters[0]);
    parameters_ += layout->parameters.size();
    buckets_.push_back(layout);
  }
  std::sort(sparse_.begin(), sparse_.end());
}

bool BucketPlan::contains(const BucketPlan& other, const std::vector<Gradient>& gradients) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    const at::Tensor& parameter = gradients[i].parameter();
    if (!other.covers(i) || !parameter.requires_grad()) continue;
    if (!covers(i) || !fits(i, parameter)) return false;
  }
  return true;
}

}  // namespace syncengine
