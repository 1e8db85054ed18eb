// One parameter's gradient in one synchronized backward: which memory is reduced, and how the average gets into .grad.
//
// The average may be written while backward still runs only into memory that nobody else can read: with `x @ w +
// pos.view(..)`, pos.grad is the tensor from which w.grad is still to be computed. So the memory of .grad is used if
// autograd alone holds it, and a private tensor otherwise, which becomes .grad's memory at the end, or is copied there.
//
// Ownership: holds the parameter, and the memory between collect() and deliver() or discard(). Thread-safety: none.
// Failure: throws Error(InvalidUsage) naming the parameter for a gradient that can't be reduced.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "reducer/gradients/record.h"
#include "reducer/gradients/tree_sums.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

class Gradient {
 public:
  // `sparse`: gradients are expected to be of sparse layout (nn.Embedding(sparse=True)), and then never of another.
  Gradient(at::Tensor parameter, bool sparse)
      : parameter_(std::move(parameter)), order_(parameter_), device_(parameter_.device()), sparse_(sparse) {}

  const at::Tensor& parameter() const { return parameter_; }
  bool sparse() const { return sparse_; }
  bool collected() const { return source_ != Source::None; }
  std::byte* data() const { return static_cast<std::byte*>(memory_.mutable_data_ptr()); }
  const at::Tensor& memory() const { return memory_; }
  // The order of elements in memory of buckets. A collected gradient has the order that the parameter has now.
  const ElementOrder& order() const { return order_; }

  // Whether the memory is a substitute, made by collect_unused().
  bool stands_in() const { return source_ == Source::Unused; }

  // Notes that autograd has accumulated `incoming` in .grad, which may have taken over its memory. Called once or more
  // in a backward. `kept`: others look at .grad before backward ends, and must see this rank's own gradient.
  void note(const at::Tensor& incoming, bool kept);
  // Takes what autograd has left in .grad, when all of it has come.
  void collect(const std::string& name, Statistics& statistics);
  // Makes a substitute for a gradient that this rank does not have.
  void collect_unused(Statistics& statistics) {
    copy_out(Source::Unused, CopyReason::Unused, parameter_.grad(), statistics);
  }
  // Makes a substitute for the gradient of a rank that has no batch: zeros, without touching .grad.
  void collect_absent();
  // Multiplies the collected gradient by a weight; with weight zero nothing is left of it, not even a NaN.
  void weigh(double weight);
  // Adds this rank's sums of the step's earlier micro-batches.
  void complete(const TreeSums& sums, size_t index) {
    memory_ = sums.complete(index, std::move(memory_));
    version_ = memory_._version();
  }
  // Puts the average, which is in data(), into .grad, and returns true. `used` is false if no rank had a gradient: then
  // .grad stays as it is, as does that of a rank without a batch.
  bool deliver(bool used);
  // Makes .grad None, since the average will never be complete; but not if this rank had no batch.
  void discard() {
    if (source_ != Source::Absent) parameter_.mutable_grad().reset();
    forget();
  }
  // Drops the collected memory, and leaves .grad as it is.
  void forget() {
    shared_ = took_over_ = false;
    source_ = Source::None;
    memory_.reset();
  }
  // Drops the collected memory. Makes .grad None if it still is that memory, in which peers may have begun to reduce.
  void abandon();

  // keep() remembers .grad's memory; is_kept() returns whether .grad still has it, and so would lie in DDP's bucket.
  void keep() {
    const at::Tensor& grad = parameter_.grad();
    if (grad.defined() && grad.has_storage()) kept_ = grad.storage().getWeakStorageImpl();
  }
  bool is_kept() const;

 private:
  enum class Source : uint8_t {
    None,     // not collected
    Own,      // .grad's own memory
    Replace,  // a private tensor whose memory .grad takes over: the old memory stays as autograd left it for others
    Copy,     // a private tensor to be copied into .grad, which keeps its memory and strides
    Unused,   // a private tensor; becomes .grad if another rank had a gradient
    Absent,   // a private tensor that is forgotten
  };

  void copy_out(Source source, CopyReason reason, const at::Tensor& grad, Statistics& statistics);

  at::Tensor parameter_;
  ElementOrder order_;
  c10::Device device_;  // where the gradient has to be
  at::Tensor memory_;
  Source source_ = Source::None;
  bool sparse_;
  c10::weak_intrusive_ptr<c10::StorageImpl> kept_{c10::intrusive_ptr<c10::StorageImpl>()};
  bool shared_ = false;     // noted: something else looks at .grad's memory
  bool took_over_ = false;  // noted: .grad has the memory of the tensor that came
  uint32_t version_ = 0;    // of memory_, after what this object has written there
};

}  // namespace syncengine
