// One call on tensors, of a Communicator or of torch.distributed: the engine's operations on memory that it consists
// of, and what remains to be done when they have ended.
//
// Ownership: keeps every tensor until the call has ended. Thread-safety: one thread. Aliasing: as torch.distributed has
// it. Failure: InvalidUsage for tensors that are not dense, or not all on one device, the CPU or a CUDA one, and for
// targets whose elements share memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "c10d/in_flight.h"
#include "c10d/torch_dtype.h"
#include "collectives/operation.h"
#include "engine/progress/work.h"
#include "reducer/torch/profile.h"

namespace syncengine {

// Throws InvalidUsage that names the call, and says why.
template <class... Parts>
[[noreturn]] void refuse(const char* call, const Parts&... why) {
  throw Error(ErrorKind::InvalidUsage, c10::str(call, ": ", why...));
}

struct Coalesced;

// The tensors that a kind of call takes, and how its reads and writes are ordered with those of other calls.
struct CallKind {
  bool cuda = true;  // false: on the CPU alone
  // A collective waits for earlier calls on the same memory. A message of the program's own does not, since those calls
  // may be waiting for that message.
  bool follows_order = true;
  bool by_messages = false;  // messages move its elements, in any order
  // Elements of a dense tensor may lie in any order in memory that is the same on all ranks.
  bool any_order = false;
  const char* advice = nullptr;  // for texts: what else to do with tensors of other devices
};

class Call {
 public:
  // `name` is for texts, and outlives the call. The profiler's row lasts until deliver().
  explicit Call(const char* name, CallKind kind = {}, ProfilerRow row = {})
      : name_(name), kind_(kind), row_(std::move(row)) {}

  Call(Call&&) noexcept;
  ~Call();

  const char* name() const { return name_; }
  uint64_t number = 0;         // counts the group's collectives
  bool to_be_counted = false;  // gets its number when it starts
  // This thread's coalesced calls, or null. This call joins them when it starts, and their work stands for it, too.
  std::unique_ptr<Coalesced> coalesced;
  c10::Device device() const { return device_.value_or(c10::Device(c10::kCPU)); }
  // The storages that operations and deliver() use; they stay alive until the call has ended.
  at::ArrayRef<c10::Storage> memory() const { return *memory_; }
  // The addresses of the program's CPU tensors, for which later calls wait; none unless CallKind::follows_order.
  at::ArrayRef<Extent> extents() const { return extents_; }
  std::vector<at::Tensor>& results() { return results_; }

  // How a call uses a tensor. Copies: it copies the tensor at once, even one whose own memory it could read later.
  enum class Use : uint8_t { Reads, Copies, Writes };
  // Throws for a tensor that can't be read or written, and waits for the calls that this one must follow.
  void require_dense(const at::Tensor& tensor, Use use = Use::Reads);
  // Returns the tensor once no earlier call writes to it any more. Code that copies a tensor copies what this returns.
  const at::Tensor& settled(const at::Tensor& tensor) {
    require_dense(tensor, Use::Copies);
    return tensor;
  }
  // Finds targets that share memory with other tensors of either list; called before any tensor is read or written.
  // Such targets go through copies, which deliver() puts into them in the order of the calls of write() and update().
  void compare(at::ArrayRef<at::Tensor> targets, at::ArrayRef<at::Tensor> sources);
  bool is_apart(const at::Tensor& target) const {
    return !apart_.empty() && std::find(apart_.begin(), apart_.end(), target.unsafeGetTensorImpl()) != apart_.end();
  }

  // Append a tensor's elements, row by row unless any_order, to `spans`: its memory, or a copy if they lie otherwise
  // or with gaps. deliver() puts a written copy into the tensor. read() and write() return the tensor or its copy.
  at::Tensor read(const at::Tensor& tensor, SpanList& spans);
  at::Tensor write(const at::Tensor& tensor, SpanList& spans);
  void update(const at::Tensor& tensor, SpanList& spans);
  // Does what update() does, but the operation reads and writes `copy`. deliver() puts the result into `tensor`.
  void update_through(const at::Tensor& tensor, const at::Tensor& copy, SpanList& spans) {
    put(tensor, copy);
    keep(copy, spans);
  }

  // Makes deliver() put `result`, which operations write, into `target`.
  void put(const at::Tensor& target, const at::Tensor& result) {
    keep_target(target);
    deliveries_.push_back({target, result});
  }

  // Appends a tensor's own memory to `spans`, such as memory from which a step of afterwards() computes a result.
  void keep(const at::Tensor& tensor, SpanList& spans) {
    spans.add(tensor.data_ptr(), tensor.nbytes());
    memory_->push_back(tensor.storage());
  }
  // Adds a step that deliver() runs before anything is put into tensors. The step may assign() to `target` (tensors.h).
  void afterwards(const at::Tensor& target, std::function<void()> step) {
    keep_target(target);
    afterwards(std::move(step));
  }
  void afterwards(std::function<void()> step) { steps_.push_back(std::move(step)); }
  // Makes deliver() copy this rank's own part, which no message carries. It is not copied before, since only then the
  // call is known to be right on all ranks. Places are in tensors that read() and write() have returned, in bytes.
  struct OwnPlace {
    at::Tensor tensor;
    size_t offset, bytes;
  };
  struct OwnPart {
    OwnPlace from, to;
  };
  void copy_own(const OwnPart& part);

  // Make an operation with the fields that follow from dtype and reduction. Its hash has both, as calls of different
  // dtypes must not match even if the engine treats them alike.
  Operation moving(Collective collective, c10::ScalarType type) const {
    return {.collective = collective, .dtype = moved_as(type), .layout_hash = 1 + static_cast<uint64_t>(type)};
  }
  Operation reducing(Collective collective, c10::ScalarType type, const ::c10d::ReduceOp& op, int world,
                     Numerics numerics) const;
  // Makes an operation that stands for several tensors match only the same call with the same sizes.
  void require_sizes(Operation& operation, at::ArrayRef<at::Tensor> tensors) const;
  void add(Operation operation) {
    operation.keepalive = memory_;
    operations_.push_back(std::move(operation));
  }
  using Operations = c10::SmallVector<Operation, 1>;
  Operations& operations() { return operations_; }
  struct Mail {
    Message message;
    bool sends;
  };
  void add(Mail mail);
  std::vector<Mail>& mail() { return mail_; }
  // The sender found by the last receive from any source; -1 if there is no such receive, or while it is not known.
  int source() const { return source_ ? source_->load(std::memory_order_relaxed) : -1; }

  // For the Call that stands for coalesced calls: throws if `other`, one of them, uses another device.
  void require_device_of(const Call& other) {
    if (other.device_) stay_on(*other.device_);
  }
  // Appends the results of `other` to this call's.
  void join(const Call& other) {
    if (other.source_) source_ = other.source_;
    results_.insert(results_.end(), other.results_.begin(), other.results_.end());
  }

  bool delivers() const { return !steps_.empty() || !deliveries_.empty(); }
  // Runs the steps and puts results into tensors. Called once, after all operations have ended well, on any thread,
  // whose grad or inference mode does not matter.
  void deliver();

 private:
  struct Delivery {
    at::Tensor target, result;
  };
  bool is_plain(const at::Tensor& tensor) const;
  at::Tensor plain(const at::Tensor& tensor) const;
  void keep_target(const at::Tensor& target);
  void stay_on(c10::Device device);

  const char* name_;
  CallKind kind_;
  ProfilerRow row_;
  std::optional<c10::Device> device_;
  // Inline space for two tensors, so that most calls allocate only memory_.
  c10::SmallVector<Extent, 2> extents_;
  Operations operations_;
  std::vector<Mail> mail_;
  std::shared_ptr<std::atomic<int>> source_;
  // The engine keeps storages, not tensors. Any thread may drop what the engine keeps, and where the last reference to
  // a tensor besides Python's is dropped, torch waits for the GIL.
  using Memory = c10::SmallVector<c10::Storage, 2>;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  std::vector<std::function<void()>> steps_;
  std::vector<Delivery> deliveries_;
  std::vector<at::Tensor> results_;
  std::vector<const c10::TensorImpl*> apart_;  // targets that go through copies
};

// Coalesced calls of one thread, for which there is one work. Each of them has begun, and delivers its own results.
struct Coalesced {
  Call call{"coalesced calls"};  // stands for all of them
  std::vector<std::shared_ptr<Work>> works;
  // The `with` block in which they are made, if it is known: a weak reference to the generator behind it. Threads that
  // use or drop it hold no lock that a holder of the GIL may wait for.
  std::shared_ptr<void> body;
};

}  // namespace syncengine
