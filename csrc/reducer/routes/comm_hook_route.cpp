#include <ATen/DeviceGuard.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>

#include "base/error.h"
#include "reducer/backward/route.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

// Turns pybind11's error_already_set into torch's python_error, which crosses autograd unchanged.
auto keeping_python_errors(auto&& call) {
  try {
    return call();
  } catch (pybind11::error_already_set& error) {
    pybind11::gil_scoped_acquire gil;
    error.restore();
    throw_pending_python_error();
  }
}

// A short text about the exception that is being handled: "ValueError: ..."
std::string current_error_text() {
  try {
    throw;
  } catch (const python_error& error) {
    pybind11::gil_scoped_acquire gil;
    return error_text(error.value);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

// A user's communication hook (register_comm_hook), or one of torch's: it gets each bucket as a c10d::GradBucket, in
// flat memory that is kept from step to step, and returns a future of what the gradients become.
//
// On a device all of it, the hook included, runs on the stream that is current where start() and finish() are called,
// as under DDP; the caller has ordered that stream with those that touch the gradients.
//
// Ownership: holds the hook, the flat memory and the futures. The hook may run any code, so it is called without the
// GIL and the reducer's lock. Failure: aborts the communicator, and throws what the hook or its future has raised, as
// Python's own exception.
class CommHookRoute final : public Route {
 public:
  CommHookRoute(const RouteParts& model, std::unique_ptr<c10d::CommHookInterface> hook)
      : Route(model), hook_(std::move(hook)) {}

  // Forgets the memory of the last plan's buckets.
  void install(const BucketPlan& plan) override {
    const size_t buckets = plan.buckets().size();
    pending_ = std::vector<Pending>(buckets);
    if (model_.flat) model_.flat->lay_out_nothing(buckets);
  }

  void ready(BackwardBuckets& /*backward*/, Bucket& /*bucket*/) override {}

  // Calls the hook in the order of buckets, the same on all ranks, since hooks' collectives match by order.
  void proceed(BackwardBuckets& backward, std::mutex& mutex) override {
    const auto& gradients = model_.gradients;
    std::unique_lock lock(mutex);
    if (runs_ && backward.filling.all()) {  // the hook, on another thread; finish() comes next, and takes all futures
      ran_.wait(lock, [this] { return !runs_; });
      model_.averaging.communicator->throw_if_failed();  // it has failed if that hook has raised
    }
    while (Bucket* bucket = runs_ || backward.is_over ? nullptr : backward.next_in_order()) {
      if (backward.filling.is_skipped(bucket->layout->index)) continue;
      backward.filling.went(bucket->layout->index);
      if (model_.flat) model_.flat->take_over(*bucket, gradients);
      auto memory = bucket->memory = std::make_shared<BucketMemory>();
      std::vector<at::Tensor> parameters;
      for (size_t i : bucket->layout->parameters) {
        memory->gradients.push_back(gradients[i].memory());
        parameters.push_back(gradients[i].parameter());
        const at::Tensor& gradient = memory->gradients.back();
        if (!gradient.is_sparse()) model_.record.statistics.count_copy(CopyReason::CommHook, gradient.nbytes());
      }
      model_.record.bucket();
      trace_bucket(*bucket);
      const auto layout = bucket->layout;
      runs_ = true;
      lock.unlock();
      const auto has_run = c10::make_scope_exit([&] {
        lock.lock();
        runs_ = false;
        ran_.notify_all();
      });
      try {
        start(*layout, std::move(parameters), memory->gradients);
      } catch (...) {
        model_.averaging.tell_peers("the communication hook raised " + current_error_text());
        throw;
      }
    }
  }

  void finish(BackwardBuckets& backward) override {
    try {
      for (const auto& bucket : backward.buckets) {
        if (!bucket.memory) continue;
        if (model_.flat) model_.flat->take_over(bucket, model_.gradients);
        const at::Tensor result = wait(*bucket.layout, bucket.memory->gradients, backward.watch);
        if (model_.flat) model_.flat->keep(result);
      }
    } catch (...) {
      model_.averaging.tell_peers("the communication hook's future failed: " + current_error_text());
      throw;
    }
  }

  bool takes_sparse() const override { return true; }

  // Abandons the flat memory, to which a hook's collectives may still write.
  void drop(BackwardBuckets& /*backward*/) override { pending_ = std::vector<Pending>(pending_.size()); }

 private:
  struct Pending {
    at::Tensor flat;
    TorchFuture future;
  };

  void start(const BucketLayout& layout, std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& memory) {
    const c10::OptionalDeviceGuard on_device(at::device_of(memory[0]));  // the hook's, too
    Pending& pending = pending_[layout.index];
    std::vector<size_t> offsets, lengths;
    std::vector<c10::IntArrayRef> sizes;
    if (layout.sparse) {
      pending.flat = memory[0];
    } else {
      at::NoGradGuard no_grad;
      size_t length = 0;
      for (const at::Tensor& tensor : memory) {
        offsets.push_back(length);
        lengths.push_back(tensor.numel());
        length += tensor.numel();
      }
      for (const at::Tensor& parameter : parameters) sizes.push_back(parameter.sizes());
      if (!pending.flat.defined()) pending.flat = at::empty({static_cast<int64_t>(length)}, memory[0].options());
      at::_foreach_copy_(parts_of(pending.flat, layout, memory), memory);
    }
    at::Tensor buffer = pending.flat.is_complex() ? at::view_as_real(pending.flat).view(-1) : pending.flat;  // as DDP
    c10d::GradBucket bucket(layout.index, pending_.size(), std::move(buffer), std::move(offsets), std::move(lengths),
                            std::move(sizes), std::move(parameters), std::nullopt);
    pending.future = keeping_python_errors([&] { return hook_->runHook(bucket); });
  }

  at::Tensor wait(const BucketLayout& layout, const std::vector<at::Tensor>& memory,
                  const std::optional<NonfiniteWatch>& watch) {
    Communicator& communicator = *model_.averaging.communicator;
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
      const auto parts = parts_of(result, layout, memory);
      if (watch && !all_finite(result)) watch->look_behind_hook(layout, parts, memory, communicator.rank());
      at::_foreach_copy_(memory, parts);
      return result;
    });
  }

  // The parts of a flat bucket, each in the order of elements that all ranks have agreed on.
  std::vector<at::Tensor> parts_of(const at::Tensor& flat, const BucketLayout& layout,
                                   const std::vector<at::Tensor>& memory) const {
    std::vector<at::Tensor> parts;
    parts.reserve(memory.size());
    int64_t offset = 0;
    for (size_t k = 0; k < memory.size(); ++k) {
      const at::Tensor part = flat.narrow(0, offset, memory[k].numel());
      parts.push_back(model_.gradients[layout.parameters[k]].order().view(part, memory[k]));
      offset += memory[k].numel();
    }
    return parts;
  }

  const std::unique_ptr<c10d::CommHookInterface> hook_;
  std::vector<Pending> pending_;  // by bucket
  bool runs_ = false;             // the hook, on some thread
  std::condition_variable ran_;   // notified when it no longer does
};

}  // namespace

std::unique_ptr<Route> make_comm_hook_route(const RouteParts& model, std::unique_ptr<c10d::CommHookInterface> hook) {
  return std::make_unique<CommHookRoute>(model, std::move(hook));
}

}  // namespace syncengine
