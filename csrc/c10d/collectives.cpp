// TorchBackend's collectives on tensors of one size: each is one operation of the engine.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include "base/error.h"
#include "c10d/backend.h"

namespace syncengine {

namespace {

using ::c10d::OpType;

}  // namespace

TorchBackend::TorchWorkPtr TorchBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  Call call("broadcast");
  const at::Tensor& tensor = require_only(tensors, call.name());
  add_broadcast(call, tensor, require_rank(options.rootRank, call.name()));
  call.results() = tensors;
  return start(std::move(call), {OpType::BROADCAST, options.timeout, options.asyncOp});
}

void TorchBackend::add_broadcast(Call& call, const at::Tensor& tensor, int root) {
  Operation operation = call.moving(Collective::Broadcast, tensor.scalar_type());
  operation.root = root;
  call.update(tensor, operation.output);
  operation.input = operation.output;
  call.add(std::move(operation));
}

TorchBackend::TorchWorkPtr TorchBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  Call call("all_reduce");
  require_only(tensors, call.name());
  add_all_reduce(call, tensors, options.reduceOp);
  call.results() = tensors;
  return start(std::move(call), {OpType::ALLREDUCE, options.timeout, options.asyncOp});
}

// Neighbors of one dtype are one operation.
TorchBackend::TorchWorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors,
                                                             const ::c10d::AllreduceCoalescedOptions& options) {
  Call call("all_reduce_coalesced");
  for (auto begin = tensors.begin(); begin != tensors.end();) {
    auto end = std::find_if(begin, tensors.end(),
                            [&](const at::Tensor& tensor) { return tensor.scalar_type() != begin->scalar_type(); });
    add_all_reduce(call, {begin, end}, options.reduceOp);
    begin = end;
  }
  call.results() = tensors;
  return start(std::move(call), {OpType::ALLREDUCE_COALESCED, options.timeout, options.asyncOp});
}

// An all-reduce that leaves the tensors of all but the root alone.
TorchBackend::TorchWorkPtr TorchBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  Call call("reduce");
  const at::Tensor& tensor = require_only(tensors, call.name());
  int root = require_rank(options.rootRank, call.name());
  call.results() = tensors;
  if (rank_ == root) {
    add_all_reduce(call, tensors, options.reduceOp);
  } else {
    at::NoGradGuard no_grad;
    add_all_reduce(call, {tensor.clone(at::MemoryFormat::Contiguous)}, options.reduceOp);
  }
  return start(std::move(call), {OpType::REDUCE, options.timeout, options.asyncOp});
}

// Every rank gets all ranks' tensors, and combines them.
void TorchBackend::add_all_reduce_of_bits(Call& call, const at::Tensor& tensor, const at::Tensor& target,
                                          const ::c10d::ReduceOp& op) {
  auto shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size_);
  at::Tensor parts = at::empty(shape, tensor.options().memory_format(at::MemoryFormat::Contiguous));
  Operation operation = call.moving(Collective::AllGather, tensor.scalar_type());
  operation.layout_hash += 1000 * (1 + static_cast<uint64_t>(op.op_));  // no other all_gather matches it
  operation.describe = [name = call.name()] { return std::string(name) + "(bitwise)"; };
  call.read(tensor, operation.input);
  call.write_apart(parts, operation.output);
  call.add(std::move(operation));
  call.afterwards(target, [this_rank = rank_, parts, target, op] {
    at::Tensor result = combined_bits(op, parts);
    target.copy_(target.sizes() == result.sizes() ? result : result[this_rank].view(target.sizes()));
  });
}

void TorchBackend::add_all_reduce(Call& call, const Tensors& tensors, const ::c10d::ReduceOp& op) {
  if (is_bitwise(op, tensors[0].scalar_type(), call.name())) {
    for (const at::Tensor& tensor : tensors) add_all_reduce_of_bits(call, tensor, tensor, op);
    return;
  }
  Operation operation = call.reducing(Collective::AllReduce, tensors[0].scalar_type(), op, size_, numerics());
  for (const at::Tensor& tensor : tensors) {
    if (at::Tensor scaled = premultiplied(op, tensor); scaled.defined())
      call.update_through(tensor, scaled, operation.output);
    else
      call.update(tensor, operation.output);
  }
  operation.input = operation.output;
  call.add(std::move(operation));
}

TorchBackend::TorchWorkPtr TorchBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                         const ::c10d::AllgatherOptions& options) {
  Call call("all_gather");
  require_parts(call.name(), output, input, size_);
  add_all_gather(call, {output}, input);
  call.results() = {output};
  return start(std::move(call), {OpType::_ALLGATHER_BASE, options.timeout, options.asyncOp});
}

TorchBackend::TorchWorkPtr TorchBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                         const ::c10d::AllgatherOptions& options) {
  Call call("all_gather");
  require_lists(call.name(), outputs.size(), static_cast<int>(inputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_parts(call.name(), outputs[i], inputs[i], size_);
    add_all_gather(call, {outputs[i]}, inputs[i]);
  }
  call.results() = outputs;
  return start(std::move(call), {OpType::COALESCED, options.timeout, options.asyncOp});
}

TorchBackend::TorchWorkPtr TorchBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                                   const ::c10d::AllgatherOptions& options) {
  Call call("all_gather");
  const at::Tensor& input = require_only(inputs, call.name());
  require_lists(call.name(), outputs.size(), 1);
  require_lists(call.name(), outputs[0].size(), size_);
  const Tensors& parts = outputs[0];
  require_parts(call.name(), parts[rank_], input, 1);
  if (std::all_of(parts.begin(), parts.end(), [&](const at::Tensor& part) { return part.numel() == input.numel(); })) {
    for (const at::Tensor& part : parts) require_parts(call.name(), part, input, 1);
    add_all_gather(call, parts, input);
  } else {  // every rank's part of its own size
    at::NoGradGuard no_grad;
    parts[rank_].copy_(input.view_as(parts[rank_]));
    for (int root = 0; root < size_; ++root) add_broadcast(call, parts[root], root);
  }
  call.results() = outputs[0];
  return start(std::move(call), {OpType::ALLGATHER, options.timeout, options.asyncOp});
}

void TorchBackend::add_all_gather(Call& call, const Tensors& outputs, const at::Tensor& input) {
  Operation operation = call.moving(Collective::AllGather, input.scalar_type());
  call.read(input, operation.input);
  for (const at::Tensor& output : outputs) call.write(output, operation.output);
  call.add(std::move(operation));
}

TorchBackend::TorchWorkPtr TorchBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                              const ::c10d::ReduceScatterOptions& options) {
  Call call("reduce_scatter");
  require_parts(call.name(), input, output, size_);
  add_reduce_scatter(call, output, {input}, options.reduceOp);
  call.results() = {output};
  return start(std::move(call), {OpType::_REDUCE_SCATTER_BASE, options.timeout, options.asyncOp});
}

TorchBackend::TorchWorkPtr TorchBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                         const ::c10d::ReduceScatterOptions& options) {
  Call call("reduce_scatter");
  require_lists(call.name(), inputs.size(), static_cast<int>(outputs.size()));
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_parts(call.name(), inputs[i], outputs[i], size_);
    add_reduce_scatter(call, outputs[i], {inputs[i]}, options.reduceOp);
  }
  call.results() = outputs;
  return start(std::move(call), {OpType::COALESCED, options.timeout, options.asyncOp});
}

TorchBackend::TorchWorkPtr TorchBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                        const ::c10d::ReduceScatterOptions& options) {
  Call call("reduce_scatter");
  const at::Tensor& output = require_only(outputs, call.name());
  require_lists(call.name(), inputs.size(), 1);
  require_lists(call.name(), inputs[0].size(), size_);
  for (const at::Tensor& input : inputs[0]) require_parts(call.name(), input, output, 1);
  add_reduce_scatter(call, output, inputs[0], options.reduceOp);
  call.results() = outputs;
  return start(std::move(call), {OpType::REDUCE_SCATTER, options.timeout, options.asyncOp});
}

void TorchBackend::add_reduce_scatter(Call& call, const at::Tensor& output, const Tensors& inputs,
                                      const ::c10d::ReduceOp& op) {
  if (is_bitwise(op, output.scalar_type(), call.name())) {
    at::NoGradGuard no_grad;
    at::Tensor whole = inputs.size() == 1 ? inputs[0] : at::stack(inputs);
    return add_all_reduce_of_bits(call, whole.reshape({size_, -1}), output, op);
  }
  Operation operation = call.reducing(Collective::ReduceScatter, output.scalar_type(), op, size_, numerics());
  for (const at::Tensor& input : inputs) {
    at::Tensor scaled = premultiplied(op, input);
    call.read(scaled.defined() ? scaled : input, operation.input);
  }
  call.write(output, operation.output);
  call.add(std::move(operation));
}

}  // namespace syncengine
