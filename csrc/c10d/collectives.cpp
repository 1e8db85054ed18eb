// TorchBackend's collectives that consist of operations of the engine. Most calls are one operation.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "c10d/backend.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

bool is_in_place(const at::Tensor& output, int64_t elements, const at::Tensor& input) {
  return why_not_dense(output).empty() && output.is_contiguous() && input.is_contiguous() &&
         output.scalar_type() == input.scalar_type() &&
         input.const_data_ptr() ==
             static_cast<const std::byte*>(output.const_data_ptr()) + elements * output.element_size();
}

namespace {

using Tensors = TorchBackend::Tensors;

// Adds a broadcast from `root` into `tensor`. The root sends `value`: `tensor` itself, or another of the same size.
void add_broadcast(Call& call, const at::Tensor& tensor, int root, const at::Tensor& value) {
  Operation operation = call.moving(Collective::Broadcast, tensor.scalar_type());
  operation.root = root;
  if (!value.is_same(tensor)) {
    at::NoGradGuard no_grad;
    const at::Tensor copy = call.settled(value).clone(at::MemoryFormat::Contiguous);
    call.update_through(tensor, copy.view_as(tensor), operation.output);
  } else {
    call.update(tensor, operation.output);
  }
  operation.input = operation.output;
  call.add(std::move(operation));
}

// Adds a reduction by BAND, BOR or BXOR: an all-gather of all ranks' tensors, whose bits each rank then combines in
// `target`. In a reduce-scatter, `target` is another tensor than `tensor`, and gets only this rank's part.
void add_all_reduce_of_bits(Call& call, const TorchBackend& group, const at::Tensor& tensor, const at::Tensor& target,
                            const ::c10d::ReduceOp& op, int root = kNoRoot) {
  auto shape = tensor.sizes().vec();
  shape.insert(shape.begin(), group.getSize());
  at::Tensor parts = at::empty(shape, tensor.options().memory_format(at::MemoryFormat::Contiguous));
  Operation operation = call.moving(Collective::AllGather, tensor.scalar_type());
  // The hash differs from an all_gather's, from another operator's, and between all-reduce and reduce-scatter.
  operation.layout_hash += 1000 * (1 + static_cast<uint64_t>(op.op_)) + (tensor.is_same(target) ? 0 : 500);
  operation.root = root;
  operation.describe = [name = call.name(), root] {
    const std::string whom = root == kNoRoot ? "" : ", to rank " + std::to_string(root) + " of the group";
    return std::string(name) + "(bitwise" + whom + ")";
  };
  call.read(tensor, operation.input);
  call.keep(parts, operation.output);
  call.add(std::move(operation));
  call.afterwards(target, [this_rank = group.getRank(), parts, target, op] {
    at::Tensor result = combined_bits(op, parts);
    assign(target, target.sizes() == result.sizes() ? result : result[this_rank].view(target.sizes()));
  });
}

void add_all_reduce(Call& call, const TorchBackend& group, const Tensors& tensors, const ::c10d::ReduceOp& op,
                    int root = kNoRoot) {
  if (is_bitwise(op, tensors[0].scalar_type(), call.name())) {
    for (const at::Tensor& tensor : tensors) {
      add_all_reduce_of_bits(call, group, tensor, tensor, op, root);
      if (tensors.size() > 1) call.require_sizes(call.operations().back(), tensors);
    }
    return;
  }
  Operation operation =
      call.reducing(Collective::AllReduce, tensors[0].scalar_type(), op, group.getSize(), group.numerics());
  operation.root = root;
  if (tensors.size() > 1) call.require_sizes(operation, tensors);
  for (const at::Tensor& tensor : tensors) {
    if (at::Tensor copy = prepared(call, op, tensor); copy.defined()) {
      call.update_through(tensor, copy, operation.output);
      conclude(call, op, tensor, copy, group.getSize());
    } else {
      call.update(tensor, operation.output);
    }
  }
  operation.input = operation.output;
  call.add(std::move(operation));
}

// Adds an all-gather. Each rank's part of it is that rank's inputs, one after the other.
void add_all_gather(Call& call, at::ArrayRef<at::Tensor> outputs, at::ArrayRef<at::Tensor> inputs) {
  Operation operation = call.moving(Collective::AllGather, inputs[0].scalar_type());
  if (inputs.size() > 1) call.require_sizes(operation, inputs);
  for (const at::Tensor& input : inputs) call.read(input, operation.input);
  for (const at::Tensor& output : outputs) call.write(output, operation.output);
  call.add(std::move(operation));
}

void add_reduce_scatter(Call& call, const TorchBackend& group, const at::Tensor& output,
                        at::ArrayRef<at::Tensor> inputs, const ::c10d::ReduceOp& op) {
  if (is_bitwise(op, output.scalar_type(), call.name())) {
    at::NoGradGuard no_grad;
    Tensors parts;  // of one size, but perhaps of different shapes
    for (const at::Tensor& input : inputs) parts.push_back(call.settled(input).reshape(-1));
    const at::Tensor whole = parts.size() == 1 ? parts[0] : at::cat(parts);
    return add_all_reduce_of_bits(call, group, whole.view({group.getSize(), output.numel()}), output, op);
  }
  Operation operation =
      call.reducing(Collective::ReduceScatter, output.scalar_type(), op, group.getSize(), group.numerics());
  for (const at::Tensor& input : inputs) {
    at::Tensor copy = prepared(call, op, input);
    call.read(copy.defined() ? copy : input, operation.input);
  }
  if (at::Tensor room = room_for(op, output); room.defined()) {
    call.update_through(output, room, operation.output);
    conclude(call, op, output, room, group.getSize());
  } else {
    call.write(output, operation.output);
  }
  call.add(std::move(operation));
}

}  // namespace

TorchWorkPtr TorchBackend::broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) {
  Call call = begin("broadcast", tensors);
  const at::Tensor& tensor = require_only(tensors, call.name());
  add_broadcast(call, tensor, require_rank(options.rootRank, call.name()), tensor);
  return start(std::move(call), {OpType::BROADCAST, options.timeout, options.asyncOp, tensors});
}

TorchWorkPtr TorchBackend::allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) {
  Call call = begin("all_reduce", tensors);
  require_only(tensors, call.name());
  add_all_reduce(call, *this, tensors, options.reduceOp);
  return start(std::move(call), {OpType::ALLREDUCE, options.timeout, options.asyncOp, tensors});
}

// Reduces tensors that follow each other in the list and have one dtype in one operation.
TorchWorkPtr TorchBackend::allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) {
  Call call = begin("all_reduce_coalesced", tensors);
  require_some(call.name(), tensors);
  call.compare(tensors, {});
  for (auto begin = tensors.begin(); begin != tensors.end();) {
    auto end = std::find_if(begin, tensors.end(),
                            [&](const at::Tensor& tensor) { return tensor.scalar_type() != begin->scalar_type(); });
    add_all_reduce(call, *this, {begin, end}, options.reduceOp);
    begin = end;
  }
  return start(std::move(call), {OpType::ALLREDUCE_COALESCED, options.timeout, options.asyncOp, tensors});
}

// An all-reduce whose result only the root's tensor gets.
TorchWorkPtr TorchBackend::reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) {
  Call call = begin("reduce", tensors);
  const at::Tensor& tensor = require_only(tensors, call.name());
  int root = require_rank(options.rootRank, call.name());
  if (rank_ == root) {
    add_all_reduce(call, *this, tensors, options.reduceOp, root);
  } else {
    at::NoGradGuard no_grad;
    const at::Tensor copy = call.settled(tensor).clone(at::MemoryFormat::Contiguous);
    add_all_reduce(call, *this, {copy}, options.reduceOp, root);
  }
  return start(std::move(call), {OpType::REDUCE, options.timeout, options.asyncOp, tensors});
}

// Gathers each input into an output, in which the parts of all ranks follow each other.
TorchWorkPtr TorchBackend::gather_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                                       const ::c10d::AllgatherOptions& options) {
  Call call = begin("all_gather", inputs);
  require_lists(call.name(), outputs.size(), static_cast<int>(inputs.size()));
  require_some(call.name(), inputs);
  Tensors elsewhere;
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_parts(call.name(), outputs[i], inputs[i], size_);
    if (!is_in_place(outputs[i], rank_ * inputs[i].numel(), inputs[i])) elsewhere.push_back(inputs[i]);
  }
  call.compare(outputs, elsewhere);
  for (size_t i = 0; i < inputs.size(); ++i) add_all_gather(call, outputs[i], inputs[i]);
  return start(std::move(call), {type, options.timeout, options.asyncOp, outputs});
}

// Gathers several tensors in one operation.
TorchWorkPtr TorchBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                               const ::c10d::AllgatherOptions& options) {
  Call call = begin("all_gather_coalesced", inputs);
  require_some(call.name(), inputs);
  require_lists(call.name(), outputs.size(), size_);
  Tensors targets;
  for (const Tensors& list : outputs) {
    require_lists(call.name(), list.size(), static_cast<int>(inputs.size()));
    for (size_t i = 0; i < inputs.size(); ++i) require_parts(call.name(), list[i], inputs[i], 1);
    targets.insert(targets.end(), list.begin(), list.end());
  }
  for (const at::Tensor& input : inputs) require_same_dtype(call.name(), input, inputs[0]);
  call.compare(targets, inputs);
  add_all_gather(call, targets, inputs);
  return start(std::move(call), {OpType::ALLGATHER_COALESCED, options.timeout, options.asyncOp, std::move(targets)});
}

TorchWorkPtr TorchBackend::allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& options) {
  Call call = begin("all_gather", inputs);
  const at::Tensor& input = require_only(inputs, call.name());
  require_lists(call.name(), outputs.size(), 1);
  require_lists(call.name(), outputs[0].size(), size_);
  const Tensors& parts = outputs[0];
  require_parts(call.name(), parts[rank_], input, 1);
  if (std::all_of(parts.begin(), parts.end(), [&](const at::Tensor& part) { return part.numel() == input.numel(); })) {
    for (const at::Tensor& part : parts) require_parts(call.name(), part, input, 1);
    call.compare(parts, is_in_place(parts[rank_], 0, input) ? at::ArrayRef<at::Tensor>() : input);
    add_all_gather(call, parts, input);
  } else {  // the ranks' parts have different sizes
    at::NoGradGuard no_grad;
    call.compare(parts, input);
    for (int root = 0; root < size_; ++root)
      add_broadcast(call, parts[root], root, root == rank_ ? input : parts[root]);
    for (Operation& operation : call.operations()) call.require_sizes(operation, parts);
  }
  return start(std::move(call), {OpType::ALLGATHER, options.timeout, options.asyncOp, outputs[0]});
}

// Reduces and scatters each input into an output, which gets this rank's part of the sum.
TorchWorkPtr TorchBackend::scatter_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                                        const ::c10d::ReduceScatterOptions& options) {
  Call call = begin("reduce_scatter", inputs);
  require_lists(call.name(), inputs.size(), static_cast<int>(outputs.size()));
  require_some(call.name(), outputs);
  call.compare(outputs, inputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    require_parts(call.name(), inputs[i], outputs[i], size_);
    add_reduce_scatter(call, *this, outputs[i], inputs[i], options.reduceOp);
  }
  return start(std::move(call), {type, options.timeout, options.asyncOp, outputs});
}

TorchWorkPtr TorchBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                          const ::c10d::ReduceScatterOptions& options) {
  Call call = begin("reduce_scatter", first_of(inputs));
  const at::Tensor& output = require_only(outputs, call.name());
  require_lists(call.name(), inputs.size(), 1);
  require_lists(call.name(), inputs[0].size(), size_);
  const Tensors& parts = inputs[0];
  require_parts(call.name(), parts[rank_], output, 1);
  for (const at::Tensor& part : parts) require_same_dtype(call.name(), part, output);
  if (std::all_of(parts.begin(), parts.end(), [&](const at::Tensor& part) { return part.numel() == output.numel(); })) {
    call.compare(output, parts);
    add_reduce_scatter(call, *this, output, parts, options.reduceOp);
  } else {  // rare: an all-reduce of copies, of which each rank takes its own part
    at::NoGradGuard no_grad;
    Tensors copies;
    for (const at::Tensor& part : parts) copies.push_back(call.settled(part).clone(at::MemoryFormat::Contiguous));
    add_all_reduce(call, *this, copies, options.reduceOp);
    call.put(output, copies[rank_].view(output.sizes()));
  }
  return start(std::move(call), {OpType::REDUCE_SCATTER, options.timeout, options.asyncOp, outputs});
}

}  // namespace syncengine
