#include "reducer/routes/routes.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>
#include <vector>

#include "base/phase_clock.h"
#include "base/trace.h"
#include "reducer/backward/backward.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

void InPlaceRoute::open(Backward& backward, Bucket& bucket) {
  const Averaging& averaging = backward.model().averaging;
  if (bucket.layout->sparse) return;
  bucket.memory = std::make_shared<BucketMemory>();
  if (!pooled_.pool() || averaging.compression || averaging.communicator->numerics() == Numerics::Ring) {
    return;  // staged: the last two scale as they do that
  }
  bucket.memory->small = SmallGradients(*pooled_.pool(), bucket.layout->small);
}

void InPlaceRoute::ready(Backward& backward, Bucket& bucket) {
  if (bucket.state == Bucket::State::Ready && !bucket.layout->sparse) announce(backward, bucket);
}

void InPlaceRoute::announce(Backward& backward, Bucket& bucket) {
  Model& model = backward.model();
  const Averaging& averaging = model.averaging;
  const BucketLayout& layout = *bucket.layout;
  const double divisor = backward.weighting().divisor;
  Operation operation = backward.operation_of(layout);
  follow_strides(backward, layout, operation);
  const auto memory = bucket.memory;
  if (averaging.compression) {
    for (size_t i : layout.parameters) {
      memory->gradients.push_back(
          averaging.compression->compress(model.parameters.gradients()[i].memory(), model.record.statistics));
      operation.output.add(memory->gradients.back().mutable_data_ptr(), memory->gradients.back().nbytes());
    }
    model.record.statistics.count_staged(StageReason::Compression, operation.output.bytes());
  } else {
    add_spans(backward, bucket, operation.output);
  }
  if (averaging.scales_all_alike(divisor)) {
    (averaging.scales_first() ? operation.prescale : operation.postscale) = 1.0 / divisor;
  } else {
    averaging.scale_one_by_one(layout, model.parameters.gradients(), memory->gradients, divisor);
  }
  if (backward.usage_travels()) model.usage.add_bits(layout, memory->flags);
  backward.add_stamp(bucket, memory->flags);
  operation.flags = memory->flags.data();
  operation.flag_words = memory->flags.size();
  model.record.statistics.reduced_bytes += operation.output.bytes();
  operation.input = operation.output;
  if (const auto* watch = backward.watch()) operation.nonfinite = watch->of(layout);
  operation.keepalive = memory;
  model.record.bucket();
  bucket.row = ProfilerRow([&] { return "all_reduce of " + layout.describe(); }, memory->gradients);
  const int64_t since = trace::now();
  bucket.work = averaging.communicator->announce(averaging.slots, layout.index, backward.step(), std::move(operation));
  waited_here() += trace::now() - since;  // what the engine does here for all ranks is not this one's own time
  bucket.state = Bucket::State::InFlight;
  backward.trace_bucket(bucket, bucket.work->place);
}

// Parameters may have got other strides, perhaps on one rank alone: bytes must be added to those of the same elements.
void InPlaceRoute::follow_strides(const Backward& backward, const BucketLayout& layout, Operation& operation) {
  std::vector<std::pair<size_t, std::vector<int64_t>>> strided;
  for (size_t i : layout.parameters) {
    const at::Tensor& gradient = backward.model().parameters.gradients()[i].memory();
    if (gradient.is_contiguous()) continue;
    operation.layout_hash = mix_strides(mix(operation.layout_hash, i), gradient);
    strided.emplace_back(i, gradient.strides().vec());
  }
  if (strided.empty()) return;
  operation.describe = [bucket = std::move(operation.describe), names = layout.names, strided = std::move(strided)] {
    std::string text = bucket();
    for (const auto& [i, strides] : strided)
      text += (i == strided[0].first ? ", strides of " : ", of ") + names->parameters[i] + " " +
              c10::str(at::IntArrayRef(strides));
    return text;
  };
}

// Small gradients that follow one another are one span.
void InPlaceRoute::add_spans(const Backward& backward, Bucket& bucket, SpanList& spans) {
  const BucketLayout& layout = *bucket.layout;
  Model& model = backward.model();
  const Averaging& averaging = model.averaging;
  auto& [gradients, small, flags] = *bucket.memory;
  gradients.reserve(layout.parameters.size());
  std::byte* begin = nullptr;
  size_t bytes = 0;
  for (size_t k = 0; k < layout.parameters.size(); ++k) {
    const at::Tensor& gradient = model.parameters.gradients()[layout.parameters[k]].memory();
    size_t offset = layout.small.offsets[k];
    if (small && offset != SmallLayout::kLarge) {
      if (bytes == 0) begin = small.at(offset);
      bytes += gradient.nbytes();
      continue;
    }
    spans.add(begin, std::exchange(bytes, 0));
    auto reason = pooled_.note(gradient.data_ptr(), gradient.nbytes());
    if (averaging.communicator->numerics() == Numerics::Ring) reason = StageReason::Numerics;
    if (reason) model.record.statistics.count_staged(*reason, gradient.nbytes());
    spans.add(gradient.mutable_data_ptr(), gradient.nbytes());
    gradients.push_back(gradient);
  }
  spans.add(begin, bytes);
}

void InPlaceRoute::finish(Backward& backward) {
  for (Bucket& bucket : backward.buckets()) {
    if (!bucket.work) continue;
    backward.model().averaging.communicator->wait(bucket.work, raise_pending_signal);
    bucket.row.end();
  }
}

void InPlaceRoute::deliver(Backward& backward, Bucket& bucket) {
  if (!bucket.work) return;
  Model& model = backward.model();
  const BucketLayout& layout = *bucket.layout;
  auto& [gradients, small, flags] = *bucket.memory;
  small.copy_out();
  if (backward.usage_travels()) model.usage.take_bits(layout, flags.data());
  backward.take_stamps(bucket, flags);
  if (model.averaging.compression) {
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < layout.parameters.size(); ++k) {
      model.parameters.gradients()[layout.parameters[k]].memory().copy_(gradients[k]);
    }
  }
  *bucket.memory = {};  // the engine may hold the operation a little longer
}

}  // namespace syncengine
