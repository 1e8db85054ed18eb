// ATen's operators for CUDA: the CPU's, as steps of the current stream. The host runs ahead where the results' shapes
// are known without running, as on a device: in place, into given memory (of which most operators make use), and for
// those of kKnownShapes. Others wait for the current stream, as nonzero() does on a device, and are refused while a
// graph is captured.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/sparse_resize_and_clear_native.h>
#include <ATen/ops/sparse_resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zero_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <set>

#include "machine.h"

namespace software_torch {

namespace {

using c10::IValue;
using c10::Stack;

// Shapes of the results depend on those of the arguments alone: found by running on zeros.
const std::set<std::string> kKnownShapes = {
    "aten::native_batch_norm",        "aten::native_batch_norm_backward",
    "aten::native_layer_norm",        "aten::native_layer_norm_backward",
    "aten::_slow_conv2d_forward",     "aten::_slow_conv2d_backward",
    "aten::embedding_dense_backward", "aten::relu",
};

c10::TensorOptions options_of(const at::Tensor& tensor, c10::DeviceType type) {
  c10::TensorOptions options = at::TensorOptions().dtype(tensor.dtype());
  return type == kCuda ? options.device(tensor.device()) : options.device(type);
}

// The CPU's tensor of the same memory. It keeps nothing alive, as a kernel doesn't.
at::Tensor on_host(const at::Tensor& tensor) {
  at::Tensor made = at::for_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes())
                        .strides(tensor.strides())
                        .options(options_of(tensor, c10::kCPU))
                        .target_device(c10::kCPU)
                        .make_tensor();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor sparse_like(const at::Tensor& tensor, at::Tensor indices, at::Tensor values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, tensor.sizes(), tensor.options().device(values.device()),
                                       tensor.is_coalesced());
}

// What an operator of the CPU gets for an argument: memory of the device as it is, that of the host as it is now.
at::Tensor for_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_sparse())
    return tensor.is_cuda() ? sparse_like(tensor, on_host(tensor._indices()), on_host(tensor._values())) : tensor;
  if (tensor.is_cuda()) return on_host(tensor);
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

at::Tensor zeros_for_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), options_of(tensor, c10::kCPU)).zero_();
}

// Memory of its own, which an operator may resize.
at::Tensor copy_for_cpu(const at::Tensor& tensor) {
  const at::Tensor same = for_cpu(tensor);
  if (!same.defined() || !tensor.is_cuda()) return same;
  at::Tensor copy = same.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// `value` with `change` made to all its tensors; devices become the CPU.
template <class Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return c10::Device(c10::kCPU);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

template <class Change>
Stack changed(const Stack& values, const Change& change) {
  Stack all;
  for (const IValue& value : values) all.push_back(changed(value, change));
  return all;
}

template <class Function>
void for_each_tensor(const Stack& values, const Function& function) {
  changed(values, [&](const at::Tensor& tensor) { return function(tensor), tensor; });
}

Stack run_on_cpu(const c10::OperatorHandle& op, Stack arguments) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&arguments);
  return arguments;
}

// A step that must not fail: its arguments were looked at when it was queued.
void run_in_stream(const c10::OperatorHandle& op, const std::function<void()>& step) {
  try {
    step();
  } catch (const std::exception& error) {
    software::undefined(op.schema().name() + ": " + error.what());
  }
}

at::Tensor empty_on_device(const at::Tensor& like, c10::Device device) {
  return at::empty_strided(like.sizes(), like.strides(), options_of(like, c10::kCPU).device(device));
}

at::Tensor to_device(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_sparse())
    return sparse_like(tensor, to_device(tensor._indices(), device), to_device(tensor._values(), device));
  at::Tensor made = empty_on_device(tensor, device);
  const at::Tensor alias = on_host(made);
  enqueue(current_stream(device.index()), [tensor, alias] { alias.copy_(tensor); });
  return made;
}

// What an operator has made of an argument, to where that lies.
void write_back(const IValue& given, const IValue& changed) {
  if (!given.isTensor() || !given.toTensor().defined()) return;
  const at::Tensor &to = given.toTensor(), &from = changed.toTensor();
  if (to.is_sparse()) {
    auto* inside = static_cast<at::SparseTensorImpl*>(to.unsafeGetTensorImpl());
    inside->set_indices_and_values_unsafe(to_device(from._indices(), to.device()),
                                          to_device(from._values(), to.device()));
    inside->set_coalesced(from.is_coalesced());
    return;
  }
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  at::Tensor(to).copy_(from);
}

// The argument that a result is, or is a view of; -1: it is new.
int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* info = schema.arguments()[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

bool returns_arguments_only(const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns())
    if (!is_written(result) || argument_of(schema, result) < 0) return false;
  return true;
}

// out=torch.empty(0) gets the shape of the result.
void resize_outputs(const c10::OperatorHandle& op, const Stack& given) {
  const auto& arguments = op.schema().arguments();
  auto is_unknown = [&](size_t i) {
    return arguments[i].kwarg_only() && is_written(arguments[i]) && given[i].isTensor() &&
           given[i].toTensor().numel() == 0;
  };
  std::vector<size_t> unknown;
  for (size_t i = 0; i < given.size(); ++i)
    if (is_unknown(i)) unknown.push_back(i);
  if (unknown.empty()) return;
  Stack zeros = changed(given, zeros_for_cpu);
  run_on_cpu(op, zeros);
  for (size_t i : unknown) given[i].toTensor().resize_(zeros[i].toTensor().sizes());
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const Stack given(stack->end() - static_cast<ptrdiff_t>(schema.arguments().size()), stack->end());
  stack->erase(stack->end() - static_cast<ptrdiff_t>(given.size()), stack->end());
  std::optional<c10::Device> device;
  bool sparse = false;
  for (const IValue& value : given)
    if (value.isDevice() && value.toDevice().is_cuda()) device = value.toDevice();
  for_each_tensor(given, [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_cuda()) device = tensor.device();
    sparse |= tensor.is_sparse();
  });
  TORCH_CHECK(device, schema.name(), " for CUDA got nothing on CUDA");
  if (!device->has_index()) device = current_stream(-1).device();
  const UseDevice use(device->index());
  const c10::Stream stream = current_stream(device->index());

  if (returns_arguments_only(schema) && !sparse) {
    resize_outputs(op, given);
    enqueue(stream,
            [op, arguments = changed(given, for_cpu)] { run_in_stream(op, [&] { run_on_cpu(op, arguments); }); });
    for (const c10::Argument& result : schema.returns()) stack->push_back(given[argument_of(schema, result)]);
    return;
  }
  if (kKnownShapes.count(schema.name())) {
    std::vector<at::Tensor> aliases;
    for (const IValue& shape : run_on_cpu(op, changed(given, zeros_for_cpu))) {
      const bool defined = shape.toTensor().defined();
      const at::Tensor made = defined ? empty_on_device(shape.toTensor(), *device) : at::Tensor();
      aliases.push_back(defined ? on_host(made) : made);
      stack->push_back(made);
    }
    enqueue(stream, [op, arguments = changed(given, for_cpu), aliases] {
      run_in_stream(op, [&] {
        const Stack results = run_on_cpu(op, arguments);
        for (size_t i = 0; i < aliases.size(); ++i)
          if (aliases[i].defined()) aliases[i].copy_(results[i].toTensor());
      });
    });
    return;
  }
  TORCH_CHECK(!is_capturing(stream), "CUDA error: operation not permitted when stream is capturing: ", schema.name());
  synchronize(stream);
  const Stack arguments = changed(given, copy_for_cpu);
  const Stack results = run_on_cpu(op, arguments);
  for (size_t i = 0; i < given.size(); ++i)
    if (is_written(schema.arguments()[i])) write_back(given[i], arguments[i]);
  for (size_t i = 0; i < results.size(); ++i) {
    const c10::Argument& result = schema.returns()[i];
    const int argument = argument_of(schema, result);
    if (argument < 0) {
      IValue moved = changed(results[i], [&](const at::Tensor& tensor) { return to_device(tensor, *device); });
      stack->push_back(results[i].isDevice() ? results[i] : std::move(moved));
    } else {
      TORCH_CHECK(is_written(result), "the software device has no ", schema.name());
      stack->push_back(given[argument]);
    }
  }
}

// ---- what is made, looked at in another way, or moved ----

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(c10::device_or_default(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type));
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const UseDevice use(storage.device().index());
  c10::DataPtr memory = allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0)
    enqueue(current_stream(-1), [to = memory.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

namespace {

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef symbolic,
                          std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format, "the software device does not resize to a memory format");
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(), self.storage_offset());
  const c10::Storage& storage = self.storage();
  if (bytes > storage.nbytes()) resize_storage(storage, bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from,
                  bool non_blocking /*without effect on copies to memory that is not pinned*/) {
  if (to.is_same(from)) return to;
  const at::Tensor source = from.sizes() == to.sizes() ? from : from.expand(to.sizes());
  if (from.is_cuda() && to.is_cuda()) {
    const c10::Stream stream = current_stream(from.device().index()), other = current_stream(to.device().index());
    TORCH_CHECK(stream == other, "the software device does not copy between devices");
    const at::Tensor alias = on_host(to), other_alias = on_host(source);
    enqueue(stream, [alias, other_alias] { alias.copy_(other_alias); });
  } else if (to.is_cuda()) {
    const at::Tensor alias = on_host(to), now = from.detach().clone();
    const c10::Stream stream = current_stream(to.device().index());
    enqueue(stream, [alias, now] { alias.copy_(now); });
    if (!non_blocking) synchronize(stream);
  } else {
    synchronize(current_stream(from.device().index()));
    at::Tensor(to.detach()).copy_(on_host(source));
  }
  return to;
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, self.storage_offset());
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(),
                                      source.strides());
}

void record(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<run>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("copy_", copy_);
  library.impl("view", view);
  library.impl("as_strided", as_strided);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("record_stream", record);
}

// What a sparse tensor consists of; all else is the CPU's, too.
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) {
  library.impl("_indices", at::native::_indices_sparse);
  library.impl("_values", at::native::_values_sparse);
  library.impl("indices", at::native::indices_sparse);
  library.impl("values", at::native::values_sparse);
  library.impl("_nnz", at::native::_nnz_sparse);
  library.impl("sparse_dim", at::native::sparse_dim_sparse);
  library.impl("dense_dim", at::native::dense_dim_sparse);
  library.impl("is_coalesced", at::native::is_coalesced_sparse);
  library.impl("_coalesced_", at::native::_coalesced_sparse_);
  library.impl("empty.memory_format", at::native::empty_sparse_symint);
  library.impl("copy_", at::native::copy_sparse_wrapper_);
  library.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
  library.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  library.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  library.impl("clone", at::native::clone_sparse);
  library.impl("sparse_resize_", at::native::sparse_resize_);
  library.impl("sparse_resize_and_clear_", at::native::sparse_resize_and_clear_);
  library.impl("zero_", at::native::zero_sparse_);
}

}  // namespace

}  // namespace software_torch
