#include "reducer/plan.h"

#include "base/error.h"
#include "reducer/tensor_dtype.h"

namespace syncengine {

namespace {

constexpr size_t kNamesShown = 3;

// FNV-1a, a word at a time: told apart must be honest mistakes, not attacks.
uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211u; }

BucketLayout make_layout(size_t index, const std::vector<size_t>& parameters, const std::vector<Gradient>& gradients,
                         const std::shared_ptr<const ModelNames>& names, std::vector<bool>& placed) {
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
    small.add(parameter.nbytes());
  }
  return {names, index, *dtype, parameters, gradients[parameters[0]].sparse(), std::move(small), hash};
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

std::vector<Bucket> make_buckets(const std::vector<std::vector<size_t>>& indices,
                                 const std::vector<Gradient>& gradients,
                                 const std::shared_ptr<const ModelNames>& names) {
  std::vector<Bucket> buckets(indices.size());
  std::vector<bool> placed(gradients.size());
  for (size_t b = 0; b < indices.size(); ++b) {
    buckets[b].layout = std::make_shared<const BucketLayout>(make_layout(b, indices[b], gradients, names, placed));
  }
  return buckets;
}

}  // namespace syncengine
