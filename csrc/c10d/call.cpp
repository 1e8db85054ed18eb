#include "c10d/call.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "base/error.h"

namespace syncengine {

namespace {

void require_dense_cpu(const at::Tensor& tensor, const char* call) {
  if (tensor.defined() && tensor.layout() == at::kStrided && tensor.device().is_cpu()) return;
  std::string what = !tensor.defined()                 ? "an undefined tensor"
                     : tensor.layout() != at::kStrided ? "one of layout " + c10::str(tensor.layout())
                                                       : "one on " + tensor.device().str();
  throw Error(ErrorKind::InvalidUsage, std::string(call) + ": syncengine takes dense CPU tensors, not " + what +
                                           "; for other devices give init_process_group a backend for each, as in "
                                           "\"cpu:syncengine,cuda:nccl\"");
}

// Row by row in memory, with no sign or conjugation still to be applied.
bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor plain(const at::Tensor& tensor) {
  at::NoGradGuard no_grad;
  return is_plain(tensor) ? tensor : tensor.resolve_conj().resolve_neg().contiguous();
}

}  // namespace

void Call::keep(const at::Tensor& tensor, SpanList& spans) {
  spans.add(tensor.data_ptr(), tensor.nbytes());
  memory_->push_back(tensor.storage());
}

void Call::read(const at::Tensor& tensor, SpanList& spans) {
  require_dense_cpu(tensor, name_);
  keep(plain(tensor), spans);
}

void Call::write(const at::Tensor& tensor, SpanList& spans) {
  require_dense_cpu(tensor, name_);
  if (is_plain(tensor)) return keep(tensor, spans);
  at::Tensor copy = at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  deliveries_.push_back({tensor, copy});
  keep(copy, spans);
}

void Call::update(const at::Tensor& tensor, SpanList& spans) {
  require_dense_cpu(tensor, name_);
  if (is_plain(tensor)) return keep(tensor, spans);
  update_through(tensor, plain(tensor), spans);
}

void Call::update_through(const at::Tensor& tensor, const at::Tensor& copy, SpanList& spans) {
  deliveries_.push_back({tensor, copy});
  keep(copy, spans);
}

Operation Call::moving(Collective collective, c10::ScalarType type) const {
  Operation operation;
  operation.collective = collective;
  operation.dtype = moved_as(type);
  operation.layout_hash = 1 + static_cast<uint64_t>(type);  // dtypes that are moved alike are still not the same
  return operation;
}

Operation Call::reducing(Collective collective, c10::ScalarType type, const ::c10d::ReduceOp& op, int world,
                         Numerics numerics) const {
  TorchReduction reduction = reduction_of(op, type, world, name_);
  Operation operation = moving(collective, type);
  operation.dtype = reduction.dtype;
  operation.op = reduction.op;
  operation.postscale = reduction.postscale;
  operation.numerics = numerics;
  return operation;
}

void Call::add(Operation operation) {
  operation.keepalive = memory_;
  operations_.push_back(std::move(operation));
}

void Call::add(Mail mail) {
  mail.message.keepalive = memory_;
  if (mail.message.peer == Message::kAnySource) source_ = mail.message.source = std::make_shared<std::atomic<int>>(-1);
  mail_.push_back(std::move(mail));
}

void Call::absorb(Call other) {
  std::move(other.deliveries_.begin(), other.deliveries_.end(), std::back_inserter(deliveries_));
  std::move(other.steps_.begin(), other.steps_.end(), std::back_inserter(steps_));
  std::move(other.results_.begin(), other.results_.end(), std::back_inserter(results_));
}

void Call::deliver() {
  at::NoGradGuard no_grad;
  for (const auto& step : steps_) step();
  steps_.clear();
  for (Delivery& delivery : deliveries_) delivery.target.copy_(delivery.result);
  deliveries_.clear();
}

}  // namespace syncengine
