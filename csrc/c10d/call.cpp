#include "c10d/call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "reducer/torch/tensors.h"

namespace syncengine {

Call::Call(Call&&) noexcept = default;
Call::~Call() = default;

// Whether the tensor's own memory will do: in an order that the call takes, with no negation or conjugation to apply.
bool Call::is_plain(const at::Tensor& tensor) const {
  return (kind_.any_order ? tensor.is_non_overlapping_and_dense() : tensor.is_contiguous()) && !tensor.is_conj() &&
         !tensor.is_neg();
}

at::Tensor Call::plain(const at::Tensor& tensor) const {
  if (is_plain(tensor)) return tensor;
  at::NoGradGuard no_grad;
  const at::Tensor elements = tensor.resolve_conj().resolve_neg();
  return kind_.any_order && tensor.is_non_overlapping_and_dense() ? elements : elements.contiguous();
}

void Call::compare(at::ArrayRef<at::Tensor> targets, at::ArrayRef<at::Tensor> sources) {
  struct TensorPlace {
    Extent extent;
    const at::Tensor* target;  // null for a source
  };
  std::vector<TensorPlace> places;
  places.reserve(targets.size() + sources.size());
  auto add = [&](const at::Tensor& tensor, bool is_target) {
    const Extent extent = extent_of(tensor);
    if (extent.end > 0) places.push_back({extent, is_target ? &tensor : nullptr});
  };
  for (const at::Tensor& target : targets) add(target, true);
  for (const at::Tensor& source : sources) add(source, false);
  std::ranges::sort(places, {}, [](const TensorPlace& place) { return place.extent.begin; });
  for (size_t first = 0; first < places.size();) {  // finds chains of tensors, each of which overlaps the next
    uintptr_t end = places[first].extent.end;
    size_t last = first + 1;
    for (; last < places.size() && places[last].extent.begin < end; ++last)
      end = std::max(end, places[last].extent.end);
    for (size_t i = first; i < last && last - first > 1; ++i)
      if (places[i].target != nullptr) apart_.push_back(places[i].target->unsafeGetTensorImpl());
    first = last;
  }
}

void Call::require_dense(const at::Tensor& tensor, Use use) {
  auto refuse_it = [&](const std::string& what) {
    const char* kinds = kind_.cuda ? "CPU or CUDA" : "CPU";
    if (kind_.advice) refuse(name_, "syncengine takes dense ", kinds, " tensors, not ", what, "; ", kind_.advice);
    refuse(name_, "needs a dense tensor on a ", kinds, " device, not ", what);
  };
  if (const std::string why = why_not_dense(tensor); !why.empty()) refuse_it(why);
  const c10::Device device = tensor.device();
  if (!device.is_cpu() && !(device.is_cuda() && kind_.cuda)) refuse_it("one on " + device.str());
  if (const std::string why = why_without_memory(tensor); !why.empty()) refuse_it(why);
  stay_on(device);
  if (!kind_.follows_order || !device.is_cpu()) return;
  Extent extent = extent_of(tensor);
  extent.written = use == Use::Writes;
  const bool unordered = use == Use::Copies || kind_.by_messages || !is_plain(tensor) || is_apart(tensor);
  InFlight::of_process().await(extent, unordered);
  extents_.push_back(extent);
}

// Keeps the memory of a tensor alive for deliver(), which puts a result into it. Throws if that is impossible.
void Call::keep_target(const at::Tensor& target) {
  require_dense(target, Use::Writes);
  if (at::has_internal_overlap(target) == at::MemOverlap::Yes)
    refuse(name_,
           "several elements of a tensor that is written lie in the same memory, as expand() makes them: give it "
           "memory of its own, as by clone()");
  memory_->push_back(target.storage());
}

void Call::stay_on(c10::Device device) {
  if (device_.value_or(device) != device)
    refuse(name_, "tensors on ", *device_, " and on ", device, " in one call; all must be on the same device");
  device_ = device;
}

at::Tensor Call::read(const at::Tensor& tensor, SpanList& spans) {
  require_dense(tensor);
  at::Tensor elements = plain(tensor);
  keep(elements, spans);
  return elements;
}

at::Tensor Call::write(const at::Tensor& tensor, SpanList& spans) {
  require_dense(tensor, Use::Writes);
  const bool in_place = is_plain(tensor) && !is_apart(tensor);
  at::Tensor elements =
      in_place ? tensor : at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
  if (!in_place) put(tensor, elements);
  keep(elements, spans);
  return elements;
}

void Call::update(const at::Tensor& tensor, SpanList& spans) {
  require_dense(tensor, Use::Writes);
  if (!is_plain(tensor)) return update_through(tensor, plain(tensor), spans);
  if (!is_apart(tensor)) return keep(tensor, spans);
  at::NoGradGuard no_grad;
  update_through(tensor, tensor.clone(), spans);
}

void Call::copy_own(const OwnPart& part) {
  afterwards(part.to.tensor, [part, name = name_] {
    auto bytes_of = [name](const OwnPlace& place) {
      std::string why = why_without_memory(place.tensor);
      if (why.empty() && place.tensor.nbytes() < place.offset + place.bytes) why = "one that became smaller";
      if (!why.empty()) refuse(name, "a tensor was changed before the call had ended, to ", why);
      return static_cast<std::byte*>(place.tensor.data_ptr()) + place.offset;
    };
    if (part.to.bytes > 0) std::memmove(bytes_of(part.to), bytes_of(part.from), part.to.bytes);
  });
}

Operation Call::reducing(Collective collective, c10::ScalarType type, const ::c10d::ReduceOp& op, int world,
                         Numerics numerics) const {
  Operation operation = reduction_of(op, type, world, name_);
  operation.collective = collective;
  operation.layout_hash = moving(collective, type).layout_hash + 1000 * (1 + static_cast<uint64_t>(op.op_));
  operation.numerics = numerics;
  return operation;
}

void Call::require_sizes(Operation& operation, at::ArrayRef<at::Tensor> tensors) const {
  uint64_t& hash = operation.layout_hash;
  for (const char* letter = name_; *letter != 0; ++letter) hash = mix(hash, static_cast<unsigned char>(*letter));
  std::vector<int64_t> sizes;
  for (const at::Tensor& tensor : tensors) hash = mix(hash, sizes.emplace_back(tensor.numel()));
  operation.describe = [name = name_, sizes = std::move(sizes)] {
    std::string text = std::string(name) + "(" + std::to_string(sizes.size()) + " tensors of ";
    for (size_t i = 0; i < std::min<size_t>(sizes.size(), 8); ++i)
      text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
    return text + (sizes.size() > 8 ? ", ..." : "") + " elements)";
  };
}

void Call::add(Mail mail) {
  mail.message.keepalive = memory_;
  if (mail.message.peer == Message::kAnySource) source_ = mail.message.source = std::make_shared<std::atomic<int>>(-1);
  mail_.push_back(std::move(mail));
}

void Call::deliver() {
  // Leaves autograd out, since tensors, and copies too, may be inference tensors, whose versions it does not track.
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  for (const auto& step : steps_) step();
  steps_.clear();
  for (Delivery& delivery : deliveries_) assign(delivery.target, delivery.result);
  deliveries_.clear();
  row_.end();
}

}  // namespace syncengine
