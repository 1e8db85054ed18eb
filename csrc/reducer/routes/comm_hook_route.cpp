#include "reducer/routes/routes.h"

#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/backward/texts.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

// The parts of a flat bucket, each in the order of elements that all ranks have agreed on.
std::vector<at::Tensor> parts_of(const at::Tensor& flat, const BucketLayout& layout,
                                 const std::vector<Gradient>& gradients, const std::vector<at::Tensor>& memory) {
  std::vector<at::Tensor> parts;
  parts.reserve(memory.size());
  int64_t offset = 0;
  for (size_t k = 0; k < memory.size(); ++k) {
    const at::Tensor part = flat.narrow(0, offset, memory[k].numel());
    parts.push_back(gradients[layout.parameters[k]].order().view(part, memory[k]));
    offset += memory[k].numel();
  }
  return parts;
}

[[noreturn]] void throw_pending_python_error() {
  python_error kept;
  kept.persist();
  throw kept;
}

// pybind11's exceptions as torch's, which cross autograd unchanged.
template <class Call>
auto keeping_python_errors(Call&& call) {
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    pybind11::gil_scoped_acquire gil;
    error.restore();
    throw_pending_python_error();
  } catch (const pybind11::builtin_exception& error) {
    pybind11::gil_scoped_acquire gil;
    error.set_error();
    throw_pending_python_error();
  }
}

size_t dense_bytes(const std::vector<at::Tensor>& memory) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : memory) bytes += tensor.is_sparse() ? 0 : tensor.nbytes();
  return bytes;
}

}  // namespace

void CommHookRoute::install(const BucketPlan& plan) {
  pending_ = std::vector<Pending>(plan.buckets().size());
  if (flat_) flat_->lay_out_nothing(plan.buckets().size());
}

void CommHookRoute::proceed(Backward& backward, std::mutex& mutex) {
  Model& model = backward.model();
  const auto& gradients = model.parameters.gradients();
  std::unique_lock lock(mutex);
  while (Bucket* bucket = runs_ || backward.is_over() ? nullptr : backward.next_in_order()) {
    if (bucket->state == Bucket::State::Skipped) continue;
    bucket->state = Bucket::State::InFlight;
    if (flat_) flat_->take_over(*bucket, gradients);
    auto memory = bucket->memory = std::make_shared<BucketMemory>();
    std::vector<at::Tensor> parameters;
    for (size_t i : bucket->layout->parameters) {
      memory->gradients.push_back(gradients[i].memory());
      parameters.push_back(gradients[i].parameter());
    }
    model.record.statistics.count_copy(CopyReason::CommHook, dense_bytes(memory->gradients));
    model.record.bucket();
    backward.trace_bucket(*bucket, {});
    const auto layout = bucket->layout;
    runs_ = true;
    lock.unlock();
    try {
      start(*layout, std::move(parameters), memory->gradients, gradients);
    } catch (...) {
      tell_peers(*model.averaging.communicator, "the communication hook raised " + current_error_text());
      lock.lock();
      runs_ = false;
      throw;
    }
    lock.lock();
    runs_ = false;
  }
}

void CommHookRoute::finish(Backward& backward) {
  Model& model = backward.model();
  const auto& gradients = model.parameters.gradients();
  Communicator& communicator = *model.averaging.communicator;
  try {
    for (const auto& bucket : backward.buckets()) {
      if (!bucket.memory) continue;
      if (flat_) flat_->take_over(bucket, gradients);
      const at::Tensor result =
          wait(*bucket.layout, bucket.memory->gradients, gradients, communicator, backward.watch());
      if (flat_) flat_->keep(result);
    }
  } catch (...) {
    tell_peers(communicator, "the communication hook's future failed: " + current_error_text());
    throw;
  }
}

void CommHookRoute::drop() { pending_ = std::vector<Pending>(pending_.size()); }

void CommHookRoute::start(const BucketLayout& layout, std::vector<at::Tensor> parameters,
                          const std::vector<at::Tensor>& memory, const std::vector<Gradient>& gradients) {
  const c10::OptionalDeviceGuard on_device(at::device_of(memory[0]));  // the hook's, too
  Pending& pending = pending_[layout.index];
  std::vector<size_t> offsets, lengths;
  std::vector<c10::IntArrayRef> sizes;
  {
    at::NoGradGuard no_grad;
    if (layout.sparse) {
      pending.flat = memory[0];
    } else {
      size_t length = 0;
      for (const at::Tensor& tensor : memory) {
        offsets.push_back(length);
        lengths.push_back(tensor.numel());
        length += tensor.numel();
      }
      for (const at::Tensor& parameter : parameters) sizes.push_back(parameter.sizes());
      if (!pending.flat.defined()) pending.flat = at::empty({static_cast<int64_t>(length)}, memory[0].options());
      at::_foreach_copy_(parts_of(pending.flat, layout, gradients, memory), memory);
    }
  }
  at::Tensor buffer = pending.flat.is_complex() ? at::view_as_real(pending.flat).view(-1) : pending.flat;  // as DDP
  c10d::GradBucket bucket(layout.index, pending_.size(), std::move(buffer), std::move(offsets), std::move(lengths),
                          std::move(sizes), std::move(parameters), std::nullopt);
  pending.future = keeping_python_errors([&] { return hook_->runHook(bucket); });
}

at::Tensor CommHookRoute::wait(const BucketLayout& layout, const std::vector<at::Tensor>& memory,
                               const std::vector<Gradient>& gradients, Communicator& communicator,
                               const NonfiniteWatch* watch) {
  Pending& pending = pending_[layout.index];
  auto what = [&] { return "the communication hook's future of " + layout.describe(); };
  return keeping_python_errors([&] {
    wait_for_future(pending.future, communicator, what);
    at::NoGradGuard no_grad;
    at::Tensor result = hook_->parseHookResult(pending.future->value());
    pending.future.reset();
    if (layout.sparse) {
      if (watch) watch->look_behind_hook(layout, {result}, memory, communicator.rank());
      memory[0].copy_(result);
      return result;
    }
    if (memory[0].is_complex() && !result.is_complex()) result = at::view_as_complex(result.reshape({-1, 2}));
    if (result.numel() != pending.flat.numel()) {
      throw Error(ErrorKind::InvalidUsage, what() + " gave " + std::to_string(result.numel()) +
                                               " elements instead of " + std::to_string(pending.flat.numel()));
    }
    result = result.contiguous().view(-1);
    const auto parts = parts_of(result, layout, gradients, memory);
    if (watch && !all_finite(result)) watch->look_behind_hook(layout, parts, memory, communicator.rank());
    at::_foreach_copy_(memory, parts);
    return result;
  });
}

std::string current_error_text() {
  try {
    throw;
  } catch (const python_error& error) {
    pybind11::gil_scoped_acquire gil;
    auto type = pybind11::reinterpret_borrow<pybind11::object>(error.type);
    auto value = pybind11::reinterpret_borrow<pybind11::object>(error.value);
    return pybind11::str(type.attr("__name__")).cast<std::string>() + ": " + pybind11::str(value).cast<std::string>();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace syncengine
