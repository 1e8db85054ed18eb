#include "reducer/buckets/nonfinite.h"

#include <algorithm>
#include <limits>

#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

Nonfinite::Kind kind_of(const at::Tensor& values) {
  const at::Tensor elements = elements_of(values);
  if (elements.isnan().any().item<bool>()) return Nonfinite::NaN;
  if (elements.eq(std::numeric_limits<double>::infinity()).any().item<bool>()) return Nonfinite::Inf;
  return all_finite(values) ? Nonfinite::None : Nonfinite::MinusInf;
}

const char* text_of(Nonfinite::Kind kind) {
  return kind == Nonfinite::NaN ? "NaN" : kind == Nonfinite::Inf ? "Inf" : "-Inf";
}

}  // namespace

NonfiniteWatch::NonfiniteWatch(std::shared_ptr<const BucketPlan> plan, const std::vector<Gradient>& gradients,
                               Nonfinite words, int world, bool seen)
    : plan_(std::move(plan)), gradients_(gradients), world_(world), words_(std::move(words)) {
  words_.anywhere = seen ? std::make_shared<bool>(false) : nullptr;
  std::fill_n(words_.words.get(), world + 1, Nonfinite::kNothing);
}

std::shared_ptr<const Nonfinite> NonfiniteWatch::of(const BucketLayout& layout) const {
  auto nonfinite = std::make_shared<Nonfinite>(words_);
  nonfinite->begin = uint64_t{layout.index} << kPlaceBits;
  return nonfinite;
}

bool NonfiniteWatch::look(size_t parameter, const at::Tensor& values, int rank) const {
  if (all_finite(values)) return true;
  const BucketLayout& layout = *plan_->buckets()[plan_->bucket_of(parameter)];
  uint64_t element = uint64_t{layout.index} << kPlaceBits;
  for (size_t k = 0; k < plan_->position_of(parameter); ++k) element += count_elements(layout, layout.parameters[k]);
  uint64_t& word = words_.words[rank];
  word = std::min(word, Nonfinite::pack(element, kind_of(values)));
  return false;
}

void NonfiniteWatch::look_behind_hook(const BucketLayout& layout, const std::vector<at::Tensor>& results,
                                      const std::vector<at::Tensor>& own, int rank) const {
  for (size_t k = 0; k < results.size(); ++k) {
    const size_t parameter = layout.parameters[k];
    if (!all_finite(results[k]) && look(parameter, own[k], rank)) look(parameter, results[k], world_);
  }
}

std::string NonfiniteWatch::agree(const Averaging& averaging, const ModelNames& names, uint64_t step,
                                  uint64_t backward) const {
  Communicator& communicator = *averaging.communicator;
  const auto told = std::make_shared<std::vector<uint64_t>>(words_.words.get(), words_.words.get() + world_ + 1);
  const auto work =
      averaging.announce(averaging.nonfinite_slot(), step, told, DType::Int64, ReduceOp::Min,
                         [model = names.model] { return "which gradients of " + model + " are not finite"; });
  communicator.wait(work, raise_pending_signal);
  std::string brought;
  for (int member = 0; member < world_; ++member) {
    const uint64_t word = (*told)[member];
    if (word == Nonfinite::kNothing) continue;
    const std::string rank = std::to_string(communicator.global_ranks()[member]);
    brought += (brought.empty() ? "rank " : ", rank ") + rank + " brought " + text_of(Nonfinite::kind_of(word)) +
               " into " + names.parameters[parameter_at(Nonfinite::element_of(word))];
  }
  const uint64_t made = (*told)[world_];
  if (brought.empty() && made == Nonfinite::kNothing) return "";
  const std::string in_step = " in step " + std::to_string(backward) + " of " + names.model;
  if (brought.empty()) {
    return "all ranks brought finite gradients, but their sum is " + std::string(text_of(Nonfinite::kind_of(made))) +
           " in " + names.parameters[parameter_at(Nonfinite::element_of(made))] + in_step +
           ": scale the loss down, or average in a wider dtype. .grad holds that sum on all ranks: drop it "
           "(zero_grad()) to skip this step";
  }
  return brought + in_step +
         ": look at that rank's input and loss. .grad holds the sum of all ranks: drop it (zero_grad()) to skip this "
         "step";
}

size_t NonfiniteWatch::count_elements(const BucketLayout& layout, size_t parameter) const {
  return gradients_[parameter].parameter().nbytes() / element_size(layout.dtype);
}

size_t NonfiniteWatch::parameter_at(uint64_t element) const {
  const BucketLayout& layout = *plan_->buckets()[element >> kPlaceBits];
  size_t place = element & ((uint64_t{1} << kPlaceBits) - 1);
  size_t k = 0;
  for (; place >= count_elements(layout, layout.parameters[k]); ++k)
    place -= count_elements(layout, layout.parameters[k]);
  return layout.parameters[k];
}

}  // namespace syncengine
