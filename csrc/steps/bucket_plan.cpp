#include "steps/bucket_plan.h"

#include "base/error.h"
#include "collectives/operation.h"
#include "transport/shm/pages.h"

namespace syncengine {

namespace {

constexpr size_t kNamesShown = 3;

std::shared_ptr<const BucketLayout> make_layout(size_t index, const std::vector<size_t>& parameters,
                                                const std::vector<Fact>& facts,
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
    if (i >= facts.size() || placed[i]) fail("parameter index " + std::to_string(i) + " out of range or used twice");
    placed[i] = true;
    const auto& [footprint, own, type_name, order, is_sparse] = facts[i];
    if (!own) fail(names->parameters[i] + " has dtype " + type_name + ", not supported");
    if (dtype && own != dtype) fail(names->parameters[i] + " differs in dtype from the parameters before it");
    dtype = own;
    if (is_sparse && parameters.size() > 1) {
      fail("the sparse gradient of " + names->parameters[i] + " needs a bucket of its own");
    }
    hash = mix(mix(mix(mix(hash, i), footprint.bytes), static_cast<uint64_t>(*own)), order);
    const bool is_small = footprint.bytes < shm::kPage;
    small.offsets.push_back(is_small ? std::exchange(small.bytes, small.bytes + footprint.bytes) : SmallLayout::kLarge);
  }
  return std::make_shared<const BucketLayout>(BucketLayout{.names = names,
                                                           .index = index,
                                                           .dtype = *dtype,
                                                           .parameters = parameters,
                                                           .sparse = facts[parameters[0]].sparse,
                                                           .small = std::move(small),
                                                           .hash = hash});
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

BucketPlan::BucketPlan(const std::vector<std::vector<size_t>>& indices, const std::vector<Fact>& facts,
                       const std::shared_ptr<const ModelNames>& names, bool provisional)
    : provisional_(provisional), places_(facts.size()) {
  std::vector<bool> placed(facts.size());
  for (size_t b = 0; b < indices.size(); ++b) {
    const auto layout = make_layout(b, indices[b], facts, names, placed);
    for (size_t k = 0; k < layout->parameters.size(); ++k) {
      const Footprint& footprint = facts[layout->parameters[k]].footprint;
      places_[layout->parameters[k]] = {static_cast<uint32_t>(b), static_cast<uint32_t>(k), footprint};
      if (!layout->sparse && footprint.bytes >= shm::kPage) pooled_sizes_.insert(footprint.bytes);
    }
    buckets_.push_back(layout);
  }
  for (size_t i = 0; i < places_.size(); ++i) {
    if (covers(i)) covered_.push_back(i);
    if (covers(i) && facts[i].sparse) sparse_.push_back(i);
  }
}

}  // namespace syncengine
