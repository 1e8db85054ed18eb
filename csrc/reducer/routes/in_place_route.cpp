#include <ATen/core/grad_mode.h>

#include "base/phase_clock.h"
#include "reducer/backward/route.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

// Reduces a bucket where autograd has left its gradients, or copies in another dtype; small gradients as one block.
class InPlaceRoute final : public Route {
 public:
  using Route::Route;

  void open(Bucket& bucket) override {
    const Averaging& averaging = model_.averaging;
    shm::Pool* pool = model_.pooled.pool();
    if (bucket.layout->sparse) return;
    bucket.memory = std::make_shared<BucketMemory>();
    // Copies in another dtype, and contributions that are scaled first, are staged: a block would be of no use.
    const bool is_staged = !pool || averaging.travels_as || averaging.communicator->numerics() == Numerics::Ring;
    if (!is_staged) bucket.memory->small = SmallGradients(*pool, bucket.layout->small);
  }

  void ready(BackwardBuckets& backward, Bucket& bucket) override {
    if (backward.filling.is_ready(bucket.layout->index) && !bucket.layout->sparse) announce(backward, bucket);
  }

  void finish(BackwardBuckets& backward) override {
    for (Bucket& bucket : backward.buckets) {
      if (!bucket.work) continue;
      model_.averaging.communicator->wait(bucket.work, raise_pending_signal);
      bucket.row.end();
    }
  }

  void deliver(Bucket& bucket) override {
    if (!bucket.work) return;
    const BucketLayout& layout = *bucket.layout;
    auto& [gradients, small, flags] = *bucket.memory;
    small.copy_out();
    if (!flags.empty()) model_.record.step_times->compare(std::move(flags));
    if (model_.averaging.travels_as) {
      at::NoGradGuard no_grad;
      for (size_t k = 0; k < layout.parameters.size(); ++k) gradient(layout.parameters[k]).copy_(gradients[k]);
    }
    *bucket.memory = {};  // the engine may hold the operation a little longer
  }

  bool can_be_refused() const override { return true; }

 private:
  const at::Tensor& gradient(size_t index) const { return model_.gradients[index].memory(); }

  void announce(BackwardBuckets& backward, Bucket& bucket) {
    const Averaging& averaging = model_.averaging;
    Statistics& statistics = model_.record.statistics;
    const BucketLayout& layout = *bucket.layout;
    const double divisor = backward.divisor;
    Operation operation = averaging.operation_of(bucket.layout, backward.tree);
    follow_strides(layout, operation);
    const auto memory = bucket.memory;
    if (averaging.travels_as) {
      at::NoGradGuard no_grad;
      for (size_t i : layout.parameters) {
        memory->gradients.push_back(gradient(i).to(*averaging.travels_as, /*non_blocking=*/false, /*copy=*/true));
        operation.output.add(memory->gradients.back().mutable_data_ptr(), memory->gradients.back().nbytes());
      }
      statistics.count_copy(CopyReason::Compression, operation.output.bytes());
      statistics.count_staged(StageReason::Compression, operation.output.bytes());
    } else {
      add_spans(bucket, operation.output);
    }
    if (averaging.scales_all_alike(divisor)) {
      (averaging.scales_first ? operation.prescale : operation.postscale) = 1.0 / divisor;
    } else {
      averaging.scale_one_by_one(layout, model_.gradients, memory->gradients, divisor);
    }
    if (backward.filling.vote() == layout.index) {  // brings back all ranks' times of the last step
      memory->flags.resize(averaging.communicator->size());
      memory->flags[averaging.communicator->rank()] = model_.record.stamp;
    }
    operation.flags = memory->flags.data();
    operation.flag_words = memory->flags.size();
    statistics.reduced_bytes += operation.output.bytes();
    operation.input = operation.output;
    if (backward.watch) operation.nonfinite = backward.watch->of(layout);
    operation.keepalive = memory;
    model_.record.bucket();
    bucket.row = ProfilerRow([&] { return "all_reduce of " + layout.describe(); }, memory->gradients);
    const int64_t since = trace::now();
    bucket.work =
        averaging.communicator->announce(averaging.slots, layout.index, model_.life.step(), std::move(operation));
    waited_here() += trace::now() - since;  // what the engine does here for all ranks is not this one's own time
    backward.filling.went(layout.index);
    trace_bucket(bucket, bucket.work->place);
  }

  // Mixes strides into the layout hash. They may have changed on one rank alone, and ranks must add matching elements.
  void follow_strides(const BucketLayout& layout, Operation& operation) const {
    std::vector<std::pair<size_t, std::vector<int64_t>>> strided;
    for (size_t i : layout.parameters) {
      if (gradient(i).is_contiguous()) continue;
      operation.layout_hash = mix_strides(mix(operation.layout_hash, i), gradient(i));
      strided.emplace_back(i, gradient(i).strides().vec());
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

  // Adds a bucket's memory to `spans`. Small gradients that follow one another in the bucket are one span of its block.
  void add_spans(Bucket& bucket, SpanList& spans) {
    const BucketLayout& layout = *bucket.layout;
    const bool is_ring = model_.averaging.communicator->numerics() == Numerics::Ring;
    auto& [gradients, small, flags] = *bucket.memory;
    gradients.reserve(layout.parameters.size());
    std::byte* begin = nullptr;
    size_t bytes = 0;
    for (size_t k = 0; k < layout.parameters.size(); ++k) {
      const at::Tensor& memory = gradient(layout.parameters[k]);
      size_t offset = layout.small.offsets[k];
      if (small && offset != SmallLayout::kLarge) {
        if (bytes == 0) begin = small.at(offset);
        bytes += memory.nbytes();
        continue;
      }
      spans.add(begin, std::exchange(bytes, 0));
      auto reason = model_.pooled.note(memory.data_ptr(), memory.nbytes());
      if (is_ring) reason = StageReason::Numerics;
      if (reason) model_.record.statistics.count_staged(*reason, memory.nbytes());
      spans.add(memory.mutable_data_ptr(), memory.nbytes());
      gradients.push_back(memory);
    }
    spans.add(begin, bytes);
  }
};

}  // namespace

std::unique_ptr<Route> make_in_place_route(const RouteParts& model) { return std::make_unique<InPlaceRoute>(model); }

}  // namespace syncengine
