// The Reducer while backward runs: what a bucket's operation works on, and how it gets to the engine or to the communication
// hook.
#include <c10/core/StreamGuard.h>

#include <utility>

#include "base/error.h"
#include "reducer/python_error.h"
#include "reducer/reducer.h"

namespace syncengine {

std::shared_ptr<BucketMemory> Reducer::make_memory(const BucketLayout& layout) const {
  auto memory = std::make_shared<BucketMemory>();
  bool in_place =
      pool_ && !compression_ && communicator_->numerics() != Numerics::Ring;  // those two scale as they stage
  if (in_place) memory->small = SmallGradients(*pool_, layout.small);
  return memory;
}

void Reducer::copy_if_small(Bucket& bucket, size_t position) {
  size_t offset = bucket.layout->small.offsets[position];
  if (offset == SmallLayout::kLarge || !bucket.memory || !bucket.memory->small) return;
  const Gradient& gradient = gradients_[bucket.layout->parameters[position]];
  bucket.memory->small.copy_in(offset, gradient.data(), gradient.memory().nbytes(), statistics_);
}

bool Reducer::skips(const Bucket& bucket) const {
  if (!options_.skip_all_reduce_unused_params || shadowed_) return false;
  for (size_t i : bucket.layout->parameters) {
    if (!gradients_[i].stands_in()) return false;
  }
  return true;
}

void Reducer::announce(Bucket& bucket) {
  const BucketLayout& layout = *bucket.layout;
  Operation operation = operation_of(bucket);
  double& scale = scales_first() ? operation.prescale : operation.postscale;
  auto memory = bucket.memory;
  auto& gradients = memory->gradients;
  gradients.reserve(layout.parameters.size());
  if (compression_) {
    for (size_t i : layout.parameters) gradients.push_back(compression_->compress(gradients_[i].memory(), statistics_));
    for (const auto& gradient : gradients) operation.output.add(gradient.mutable_data_ptr(), gradient.nbytes());
  } else {
    add_spans(bucket, operation.output);
  }
  if (scaling_ == Scaling::Multiply || is_exact(divisor_)) {
    scale = 1.0 / divisor_;
  } else {
    scale_one_by_one(layout, gradients);
  }
  if (usage_travels()) {
    memory->used = usage_of(layout);
    operation.flags = memory->used.data();
    operation.flag_words = memory->used.size();
  }
  statistics_.reduced_bytes += operation.output.bytes();
  operation.input = operation.output;
  operation.keepalive = memory;
  timeline_.bucket();
  bucket.work = communicator_->announce(first_slot_ + layout.index, std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

Operation Reducer::operation_of(const Bucket& bucket) const {
  Operation operation;
  operation.dtype = compression_ ? compression_->dtype() : bucket.layout->dtype;
  operation.op = ReduceOp::Avg;
  operation.numerics = communicator_->numerics();
  operation.layout_hash = bucket.layout->hash;
  operation.describe = [layout = bucket.layout] { return layout->describe(); };
  return operation;
}

// DDP scales each contribution as it copies it into the bucket; rank_order scales the sum, and so rounds once.
bool Reducer::scales_first() const {
  return communicator_->numerics() == Numerics::Ring ||
         (compression_ && compression_->divides() == Compression::Divides::First);
}

void Reducer::lay_out_flat_buckets() {
  if (comm_hook_) return flat_->lay_out_nothing(buckets_.size());
  flat_->lay_out(buckets_, gradients_, compression_ ? std::optional(compression_->type()) : std::nullopt);
}

// In the order of buckets, which is the same on all ranks. Sparse ones wait for backward's end.
void Reducer::start_flat_buckets() {
  while (next_in_order_ < buckets_.size() && buckets_[next_in_order_].state >= Bucket::State::Ready) {
    Bucket& bucket = buckets_[next_in_order_++];
    if (bucket.state == Bucket::State::Ready && !bucket.layout->sparse) start_flat(bucket);
  }
}

void Reducer::start_flat(Bucket& bucket) {
  const size_t index = bucket.layout->index;
  flat_->fill(bucket, gradients_);
  Operation operation = operation_of(bucket);
  operation.layout_hash = operation.layout_hash * 31 + first_slot_;  // of this model: another may look the same
  operation.output = operation.input = flat_->span(index);
  // As in announce(); but what is scaled beforehand is scaled where it lies, so that the peers may read it there.
  if (!scales_first() && (scaling_ == Scaling::Multiply || is_exact(divisor_))) {
    operation.postscale = 1.0 / divisor_;
  } else {
    const c10::StreamGuard on(flat_->stream());
    scale_one_by_one(*bucket.layout, flat_->views(index));
  }
  statistics_.reduced_bytes += operation.output.bytes();
  statistics_.count_copy(compression_ ? CopyReason::Compression : CopyReason::Bucket, operation.output.bytes());
  timeline_.bucket();
  flat_->all_reduce(std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

// Small gradients that follow one another are one span.
void Reducer::add_spans(Bucket& bucket, SpanList& spans) {
  const BucketLayout& layout = *bucket.layout;
  auto& [gradients, small, used] = *bucket.memory;
  std::byte* begin = nullptr;
  size_t bytes = 0;
  for (size_t k = 0; k < layout.parameters.size(); ++k) {
    const at::Tensor& gradient = gradients_[layout.parameters[k]].memory();
    size_t offset = layout.small.offsets[k];
    if (small && offset != SmallLayout::kLarge) {
      if (bytes == 0) begin = small.at(offset);
      bytes += gradient.nbytes();
      continue;
    }
    spans.add(begin, std::exchange(bytes, 0));
    if (habits_ && !pool_->owns(gradient.data_ptr(), gradient.nbytes())) habits_->forget(gradient.nbytes());
    spans.add(gradient.mutable_data_ptr(), gradient.nbytes());
    gradients.push_back(gradient);
  }
  spans.add(begin, bytes);
}

void Reducer::scale_one_by_one(const BucketLayout& layout, const std::vector<at::Tensor>& contributions) const {
  at::NoGradGuard no_grad;
  for (size_t k = 0; k < contributions.size(); ++k) {
    bool divide = scaling_ == Scaling::Divide || gradients_[layout.parameters[k]].is_kept();
    scale(contributions[k], divide, divisor_);
  }
}

// With the bucket that it is about; all by itself where not every bucket is the engine's to reduce.
bool Reducer::usage_travels() const {
  return asks_usage_ && !comm_hook_ && !flat_ && sparse_.empty() && !options_.skip_all_reduce_unused_params &&
         flags_fit_;
}

std::vector<uint64_t> Reducer::usage_of(const BucketLayout& layout) const {
  std::vector<uint64_t> used((layout.parameters.size() + 63) / 64);
  for (size_t k = 0; k < layout.parameters.size(); ++k) {
    used[k / 64] |= uint64_t{used_here_[layout.parameters[k]]} << k % 64;
  }
  return used;
}

void Reducer::announce_usage() {
  for (size_t i = 0; i < used_here_.size(); ++i) (*used_anywhere_)[i] = used_here_[i];
  Operation operation;
  operation.dtype = DType::UInt8;
  operation.op = ReduceOp::Max;
  operation.numerics = communicator_->numerics();
  operation.output.add(used_anywhere_->data(), used_anywhere_->size());
  operation.input = operation.output;
  operation.describe = [names = names_] { return "used parameters of " + names->model; };
  operation.keepalive = used_anywhere_;
  usage_work_ = communicator_->announce(first_slot_ + gradients_.size(), std::move(operation));
}

// In the order of buckets, which is the same on all ranks, since what hooks send is matched by its order; and without the
// lock, since a hook is anybody's code.
void Reducer::run_comm_hooks() {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::Syncing && phase_ != Phase::Finalizing) return;
  while (!hook_runs_ && next_in_order_ < buckets_.size() && buckets_[next_in_order_].state >= Bucket::State::Ready) {
    Bucket& bucket = buckets_[next_in_order_++];
    if (bucket.state == Bucket::State::Skipped) continue;
    bucket.state = Bucket::State::InFlight;
    if (flat_) flat_->take_over(bucket, gradients_);
    auto memory = bucket.memory = std::make_shared<BucketMemory>();
    std::vector<at::Tensor> parameters;
    for (size_t i : bucket.layout->parameters) {
      memory->gradients.push_back(gradients_[i].memory());
      parameters.push_back(gradients_[i].parameter());
    }
    statistics_.count_copy(CopyReason::CommHook, CommHook::bytes(memory->gradients));
    timeline_.bucket();
    auto layout = bucket.layout;
    hook_runs_ = true;
    lock.unlock();
    try {
      comm_hook_->start(*layout, std::move(parameters), memory->gradients);
    } catch (...) {
      tell_peers("the communication hook raised " + current_error_text());
      lock.lock();
      hook_runs_ = false;
      throw;
    }
    lock.lock();
    hook_runs_ = false;
  }
}

}  // namespace syncengine
