// One call on tensors, of a Communicator or of torch.distributed, as operations of the engine on memory, and what
// remains to be done when they have ended.
//
// Ownership: keeps every tensor until the call has ended. Thread-safety: one thread. Aliasing: as torch.distributed has
// it. Failure: InvalidUsage for tensors that are not dense, or not all on one device, the CPU or a CUDA one, and for
// targets whose elements share memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "c10d/in_flight.h"
#include "c10d/torch_dtype.h"
#include "collectives/operation.h"
#include "engine/progress/work.h"
#include "reducer/torch/profile.h"

namespace syncengine {

// The `with` block in which a thread coalesces calls. torch's _coalescing_manager does not tell a backend when its body
// raises, but it is a generator, which has ended then.
//
// Ownership: a weak reference to the generator. Thread-safety: any thread, which must hold no lock that a holder of the
// GIL may wait for. Failure: none.

class CoalescingBody {
 public:
  // That of the generator which calls this; null if something else does.
  static std::unique_ptr<CoalescingBody> of_caller();
  ~CoalescingBody();

  bool has_ended() const;

 private:
  explicit CoalescingBody(void* reference) : reference_(reference) {}
  void* reference_;  // Python's
};

struct Coalesced;

// Which tensors a call takes, and how.
struct CallKind {
  bool cuda = true;  // not on the CPU alone
  // A collective waits for those in flight on the same memory; a message of the program's own may be what they wait
  // for.
  bool follows_order = true;
  // Elements in whatever order they lie in memory, if they do so densely: it is the same on all ranks.
  bool any_order = false;
  const char* advice = nullptr;  // what else to do with tensors of other devices; of torch.distributed's calls
};

class Call {
 public:
  // `name` is for messages, and outlives the call. The profiler's row is there until deliver().
  explicit Call(const char* name, CallKind kind = {}, ProfilerRow row = {})
      : name_(name), kind_(kind), row_(std::move(row)) {}

  Call(Call&&) noexcept;
  ~Call();

  const char* name() const { return name_; }
  uint64_t number = 0;         // of the group's collectives
  bool to_be_counted = false;  // gets its number when it starts
  // The block whose work will stand for this call, too, once the call has begun well.
  std::unique_ptr<Coalesced> coalesced;
  c10::Device device() const { return device_.value_or(c10::Device(c10::kCPU)); }
  // What operations and deliveries use.
  at::ArrayRef<c10::Storage> memory() const { return *memory_; }
  // Of the program's tensors, if it follows the order.
  at::ArrayRef<Extent> extents() const { return extents_; }
  std::vector<at::Tensor>& results() { return results_; }

  // Throws for a tensor that can't be read or written. Waits for what the call has to follow.
  void require_dense(const at::Tensor& tensor);
  // Of a call on several tensors, before any of them is read or written: targets that share memory with others of
  // either list go through copies, which are put into them in the order in which they were written.
  void compare(at::ArrayRef<at::Tensor> targets, at::ArrayRef<at::Tensor> sources);
  bool is_apart(const at::Tensor& target) const {
    return !apart_.empty() && std::find(apart_.begin(), apart_.end(), target.unsafeGetTensorImpl()) != apart_.end();
  }

  // A tensor's elements, row by row: its own memory, or that of a copy if they lie in another order or with gaps. What
  // is written to a copy is put into the tensor by deliver(). read() and write() return the tensor or its copy.
  at::Tensor read(const at::Tensor& tensor, SpanList& spans);
  at::Tensor write(const at::Tensor& tensor, SpanList& spans);
  void update(const at::Tensor& tensor, SpanList& spans);
  // The copy instead of the tensor's elements; the result is put into the tensor.
  void update_through(const at::Tensor& tensor, const at::Tensor& copy, SpanList& spans);

  // deliver() puts `result`, which operations write, into the tensor.
  void put(const at::Tensor& tensor, const at::Tensor& result) {
    require_dense(tensor);
    deliver_later(tensor, result);
  }

  // Memory that becomes a tensor's value only by what is done after it was filled.
  void write_apart(const at::Tensor& scratch, SpanList& spans) { keep(scratch, spans); }
  // Run by deliver(), before anything is put into tensors; leads to `target`, which it may assign() to (tensors.h).
  void afterwards(const at::Tensor& target, std::function<void()> step);
  void afterwards(std::function<void()> step) { steps_.push_back(std::move(step)); }
  // What a rank sends itself, in that place: only once the call is known to be right on all ranks. Of what read() and
  // write() have returned; in bytes.
  struct Place {
    at::Tensor tensor;
    size_t offset, bytes;
  };
  struct OwnPart {
    Place from, to;
  };
  void copy_own(const OwnPart& part);

  // Sets what follows from dtype and reduction. The hash has both: what the engine does alike is still not the same.
  Operation moving(Collective collective, c10::ScalarType type) const;
  Operation reducing(Collective collective, c10::ScalarType type, const ::c10d::ReduceOp& op, int world,
                     Numerics numerics) const;
  // Of one that stands for several tensors: only the same call with the same sizes matches it.
  void require_sizes(Operation& operation, const std::vector<at::Tensor>& tensors) const;
  void add(Operation operation);
  using Operations = c10::SmallVector<Operation, 1>;
  Operations& operations() { return operations_; }
  struct Mail {
    Message message;
    bool sends;
  };
  void add(Mail mail);
  std::vector<Mail>& mail() { return mail_; }
  // The sender of the last message to receive; -1 while that is not known.
  int source() const { return source_ ? source_->load(std::memory_order_relaxed) : -1; }

  // Of one that stands for others: throws if another one uses another device.
  void require_device_of(const Call& other) {
    if (other.device_) stay_on(*other.device_);
  }
  // Has the other one's results, too.
  void join(const Call& other);

  bool delivers() const { return !steps_.empty() || !deliveries_.empty(); }
  // Once, after all operations have ended well. On any thread: neither its mode nor the one in which the call was made
  // matters.
  void deliver();

 private:
  struct Delivery {
    at::Tensor target, result;
  };
  // Whether the engine can have the tensor's own memory.
  bool is_plain(const at::Tensor& tensor) const;
  at::Tensor plain(const at::Tensor& tensor) const;
  void require_distinct(const at::Tensor& target);
  void stay_on(c10::Device device);
  void keep(const at::Tensor& tensor, SpanList& spans);
  void deliver_later(const at::Tensor& target, const at::Tensor& result);

  const char* name_;
  CallKind kind_;
  ProfilerRow row_;
  std::optional<c10::Device> device_;
  // What a call on two tensors has costs no allocation besides that of memory_.
  c10::SmallVector<Extent, 2> extents_;
  Operations operations_;
  std::vector<Mail> mail_;
  std::shared_ptr<std::atomic<int>> source_;
  // The engine holds memory, not tensors: any thread may let go of it, and the last reference to a tensor besides
  // Python's would make torch wait for the GIL there.
  using Memory = c10::SmallVector<c10::Storage, 2>;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  std::vector<std::function<void()>> steps_;
  std::vector<Delivery> deliveries_;
  std::vector<at::Tensor> results_;
  std::vector<const c10::TensorImpl*> apart_;  // targets that go through copies
};

// Calls of one thread that are to have one work for all of them. Each of them has begun, and is delivered by itself.
struct Coalesced {
  Call call{"coalesced calls"};  // stands for all
  std::vector<std::shared_ptr<Work>> works;
  std::unique_ptr<CoalescingBody> body;  // where they are made, if that is known
};

}  // namespace syncengine
