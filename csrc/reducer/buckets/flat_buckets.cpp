#include "reducer/buckets/flat_buckets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "base/memory.h"

namespace syncengine {

namespace {

constexpr size_t kBucketAlignment = 256;  // of each bucket, as cudaMalloc's

std::vector<at::Tensor> memories(const Bucket& bucket, const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> all;
  all.reserve(bucket.layout->parameters.size());
  for (size_t i : bucket.layout->parameters) all.push_back(gradients[i].memory());
  return all;
}

}  // namespace

void FlatBuckets::lay_out(const BucketPlan& plan, const std::vector<Gradient>& gradients,
                          std::optional<at::ScalarType> type) {
  at::NoGradGuard no_grad;
  // The forward that wants buckets may run under torch.func's transforms, which would wrap what is made here.
  const c10::impl::ExcludeDispatchKeyGuard untransformed(c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::FuncTorchDynamicLayerBackMode}));
  // Enough for all gradients in their own dtypes, and so for any other plan of the same parameters.
  size_t needed = 0;
  for (const auto& layout : plan.buckets()) {
    if (layout->sparse) continue;
    for (size_t i : layout->parameters) needed += gradients[i].parameter().nbytes() + kBucketAlignment;
  }
  if (needed > 0 && (!memory_.defined() || memory_.nbytes() < needed)) {
    flats_.clear();
    memory_.reset();
    memory_ = lane_->allocate(needed);
  }
  flats_.assign(plan.buckets().size(), {});
  size_t begin = 0;
  for (const auto& layout : plan.buckets()) {
    if (layout->sparse) continue;
    const auto& parameters = layout->parameters;
    const at::ScalarType own = gradients[parameters[0]].parameter().scalar_type();
    int64_t length = 0;
    for (size_t i : parameters) length += gradients[i].parameter().numel();
    const size_t bytes = length * c10::elementSize(type.value_or(own));
    Flat& flat = flats_[layout->index];
    flat.bytes = memory_.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(bytes));
    const at::Tensor elements = flat.bytes.view(type.value_or(own));
    int64_t offset = 0;
    for (size_t i : parameters) {
      const at::Tensor& parameter = gradients[i].parameter();
      flat.views.push_back(gradients[i].order().view(elements.narrow(0, offset, parameter.numel()), parameter));
      offset += parameter.numel();
    }
    begin += round_up(bytes, kBucketAlignment);
  }
}

void FlatBuckets::note(size_t bucket) {
  auto& streams = flats_[bucket].streams;
  const c10::Stream stream = lane_->current();
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) streams.push_back(stream);
}

void FlatBuckets::fill(const Bucket& bucket, const std::vector<Gradient>& gradients) {
  Flat& flat = flats_[bucket.layout->index];
  for (c10::Stream stream : flat.streams) lane_->order(stream, lane_->own());
  at::NoGradGuard no_grad;
  const c10::StreamGuard on(lane_->own());
  at::_foreach_copy_(flat.views, memories(bucket, gradients));
}

void FlatBuckets::all_reduce(Operation operation) {
  operation.keepalive = std::make_shared<c10::Storage>(memory_.storage());
  lane_->all_reduce(std::move(operation));
}

void FlatBuckets::finish(const std::vector<Bucket>& buckets, const Filling& filling,
                         const std::vector<Gradient>& gradients) {
  lane_->finish();
  // Backward may still read what is overwritten here. The lane waits for the current stream, which follows backward.
  const c10::Stream current = lane_->current();
  lane_->order(current, lane_->own());
  {
    at::NoGradGuard no_grad;
    const c10::StreamGuard on(lane_->own());
    for (const Bucket& bucket : buckets) {
      if (!filling.has_gone(bucket.layout->index)) continue;
      const Flat& flat = flats_[bucket.layout->index];
      const std::vector<at::Tensor> averages = memories(bucket, gradients);
      at::_foreach_copy_(averages, flat.views);
      // Freed memory goes back to the stream that has allocated it, which may not know of the lane's stream.
      if (flat.streams.size() == 1 && flat.streams[0] == current) continue;
      for (const at::Tensor& average : averages) {
        lane_->keep_for(lane_->own(), average);
        lane_->keep_for(current, average);
      }
    }
  }
  lane_->order(lane_->own(), current);
  written_on_ = current;
}

void FlatBuckets::drop(const std::vector<Bucket>& buckets, const Filling& filling,
                       const std::vector<Gradient>& gradients) {
  dropped_ = true;
  for (const Bucket& bucket : buckets) {
    if (!filling.has_gone(bucket.layout->index)) continue;
    for (const at::Tensor& memory : memories(bucket, gradients))
      if (memory.defined()) lane_->keep_for(lane_->own(), memory);
  }
}

void FlatBuckets::take_over(const Bucket& bucket, const std::vector<Gradient>& gradients) {
  const c10::Stream current = lane_->current();
  written_on_ = current;
  auto& streams = flats_[bucket.layout->index].streams;
  if (streams.size() == 1 && streams[0] == current) return;
  for (c10::Stream stream : streams) lane_->order(stream, current);
  for (const at::Tensor& memory : memories(bucket, gradients)) keep(memory);
  note(bucket.layout->index);
}

void FlatBuckets::keep(const at::Tensor& tensor) {
  const c10::Stream current = lane_->current();
  if (!tensor.is_sparse()) return lane_->keep_for(current, tensor);
  lane_->keep_for(current, tensor._indices());
  lane_->keep_for(current, tensor._values());
}

}  // namespace syncengine
